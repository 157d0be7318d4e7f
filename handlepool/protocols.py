"""Protocols of other libraries, looked for on users' objects."""

from inspect import getattr_static


def has(value: object, name: str) -> bool:
    """Whether an object has an attribute, its type's or its own; one that is made for any name asked, as by a proxy, is none."""
    return hasattr(type(value), name) or getattr_static(value, name, None) is not None
