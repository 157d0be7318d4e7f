"""Make keys of a call's options.

The values 1, True and 1.0 are equal and have one hash, but may mean different things. So a key contains types.
"""

from typing import Any

_PLAIN_OPTIONS = (int, bool, str, type(None))
"""Types of most options."""


def option_key(options: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that identifies options."""
    # Most options are plain values, whose types are one comparison. Tuples need the types of their entries as well.
    types = tuple(map(type, options.values()))
    return (*options.items(), *types) if tuple not in types else (*options, *typed_key((*options.values(),)))


def of_integers(values: tuple[Any, ...]) -> bool:
    """Return whether a tuple holds only Python integers, also when nested.

    Such a tuple needs no types in a key, because no equal value of another type exists.
    """
    for value in values:
        if type(value) is int:
            continue
        if type(value) is not tuple or not of_integers(value):
            return False
    return True


def typed_key(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key that differs for equal values of different types.

    The key contains the types of the entries of sequences. A list has no hash, so it becomes a tuple.
    """
    types = tuple(map(type, values))
    return types, *[
        typed_key(tuple(value)) if kind not in _PLAIN_OPTIONS and isinstance(value, (list, tuple)) else value
        for kind, value in zip(types, values, strict=True)
    ]


def kind_of_option(value: object) -> Any:
    """Return a key that differs for equal options of other types."""
    kind = type(value)
    return (kind, typed_key(value)) if isinstance(value, tuple) and not of_integers(value) else kind


def identifies(key: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether an option key has a hash, and identifies its options.

    A key does not identify an option of a subclass of tuple, because it does not show the types of the entries.
    """
    try:
        hash(key)
    except TypeError:
        return False
    return not any(isinstance(value, tuple) and type(value) is not tuple for value in options.values())
