"""Check arguments that every public function takes alike."""

from collections.abc import Iterator
from operator import index
from types import (
    AsyncGeneratorType,
    CoroutineType,
    GeneratorType,
)
from typing import Any

import numpy as np

from handlepool._util.names import kind_of, name_of, shown
from handlepool.errors import ArgumentError

TO_RUN = frozenset([GeneratorType, CoroutineType, AsyncGeneratorType, map, filter])


def check_ran(function: object, value: object) -> None:
    """Refuse a returned generator or coroutine, whose work has not run yet.

    No part of the library could order such late work.

    Raises
    ------
    ArgumentError
    """
    # A generator that has already started is used on purpose.
    if type(value) in TO_RUN and not getattr(value, "gi_suspended", False):
        if isinstance(value, (GeneratorType, CoroutineType)):
            # Without the close, Python warns that the coroutine was never awaited.
            value.close()
        raise ArgumentError(
            f"{name_of(function)} returned a {kind_of(value)}, and none of its work has run. Pass a function that "
            "does the work and returns arrays"
        )


def as_integer(value: Any, otherwise: int | None = None) -> int:
    """Return a value as an integer, or ``otherwise`` for any other value.

    Without ``otherwise``, a value that is no integer is an error.

    Raises
    ------
    TypeError
        For a value that is no integer.
    """
    if type(value) is int:
        return value
    try:
        # `index` takes True for 1, and a flag in the place of a number is a mistake.
        if isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{shown(value)} is no integer")
        return index(value)
    except TypeError:
        if otherwise is None:
            raise
        return otherwise


def at_least(least: int, what: str, value: object, unit: str = "") -> int:
    """Return an argument as an integer of at least ``least``.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``, and its legal values.
    """
    number = as_integer(value, least - 1)
    if number < least:
        raise ArgumentError(f"{what}={shown(value)}; it must be an integer, {least}{unit} or more")
    return number


def flag(what: str, value: object) -> bool:
    """Return an argument as a bool.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what}={shown(value)}; it must be True or False")
    return bool(value)


MOST_DEEP = 100
"""Nesting depth of containers that a recursion over them still takes."""


def check_ends(what: str, *values: object) -> None:
    """Refuse lists, tuples and dictionaries with cycles or too much nesting.

    Raises
    ------
    ArgumentError
        With a message that begins with ``what``, as "f was given".
    """
    # A recursion would hit Python's limit at the depth that this check has to report.
    left: list[tuple[object, Iterator[object]]] = [(values, iter(values))]
    within: set[int] = set()
    while left:
        value = next(left[-1][1], left)
        if value is left:
            within.discard(id(left.pop()[0]))
        elif isinstance(value, (list, tuple, dict)) and value:
            if id(value) in within:
                raise ArgumentError(f"{what} a {kind_of(value)} that contains itself, which has no end: take it out of itself")
            if len(left) > MOST_DEEP:
                raise ArgumentError(
                    f"{what} a {kind_of(value)} nested in more than {MOST_DEEP} containers: make the nesting flatter"
                )
            within.add(id(value))
            # The list is a copy, because another thread may change the container meanwhile.
            left.append((value, iter([*value.values()] if isinstance(value, dict) else [*value])))
