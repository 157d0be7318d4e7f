"""Make keys of a call's options.

The values 1, True and 1.0 are equal and have one hash, but may mean different things. So a key contains the values' types.
"""

from typing import Any

_PLAIN_OPTIONS = (int, bool, str, type(None))
"""Types of values that contain no other values."""


def option_key(options: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that identifies a call's options."""
    # For plain values the key has the type of each value. For tuples the key needs the types of their entries as well.
    types = tuple(map(type, options.values()))
    return (*options.items(), *types) if tuple not in types else (*options, *typed_key((*options.values(),)))


def of_integers(values: tuple[Any, ...]) -> bool:
    """Return whether a tuple holds only Python integers, also when nested.

    Such a tuple needs no types in a key, because an equal tuple of other types, such as (True,), has its types in the key,
    so the two keys differ.
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
    """Return a key of an option's type, and of its entries' types."""
    kind = type(value)
    return (kind, typed_key(value)) if isinstance(value, tuple) and not of_integers(value) else kind


def identifies(key: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether an option key has a hash, and identifies its options.

    A key does not identify an option of a subclass of tuple, because the key does not show the types of the option's entries.
    """
    try:
        hash(key)
    except TypeError:
        return False
    return not any(isinstance(value, tuple) and type(value) is not tuple for value in options.values())
