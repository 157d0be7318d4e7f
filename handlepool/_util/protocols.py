"""Protocols of other libraries, looked for on users' objects."""


def has(value: object, name: str) -> bool:
    """Whether an object has an attribute, its type's or its own; one that is made for any name asked, as by a proxy, is none."""
    if hasattr(type(value), name):
        return True
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and name in own
