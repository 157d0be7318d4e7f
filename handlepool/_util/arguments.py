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
    """Refuse what a function returned where its work is still to be done, which nobody would put in order.

    Raises
    ------
    ArgumentError
    """
    if type(value) in TO_RUN and not getattr(value, "gi_suspended", False):  # one that has begun is of a use of its own
        if isinstance(value, (GeneratorType, CoroutineType)):
            value.close()  # or Python warns that nobody awaited it
        raise ArgumentError(
            f"{name_of(function)} returned a {kind_of(value)}, of which nothing has run: pass a function that does the work and "
            f"returns arrays"
        )


def as_integer(value: Any, otherwise: int | None = None) -> int:
    """Return the integer that a value is, or ``otherwise`` for what is none, where that is given.

    Raises
    ------
    TypeError
        For what is none.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{shown(value)} is no integer")
        return index(value)
    except TypeError:
        if otherwise is None:
            raise
        return otherwise


def at_least(least: int, what: str, value: object, unit: str = "") -> int:
    """Return the integer that an argument is, which must not be below ``least``.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``, and what it may be.
    """
    number = as_integer(value, least - 1)
    if number < least:
        raise ArgumentError(f"{what}={shown(value)}; it must be an integer, {least}{unit} or more")
    return number


def flag(what: str, value: object) -> bool:
    """Return the bool that an argument is.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what}={shown(value)}; it must be True or False")
    return bool(value)


MOST_DEEP = 100
"""Containers inside each other, which a recursion over them still takes."""


def check_ends(what: str, *values: object) -> None:
    """Refuse lists, tuples and dictionaries that contain themselves, and those that lie too deep in others.

    Raises
    ------
    ArgumentError
        That begins with ``what``, as "f was given".
    """
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
                    f"{what} a {kind_of(value)} inside more than {MOST_DEEP} others: take it out of some of these"
                )
            within.add(id(value))
            left.append((value, iter([*value.values()] if isinstance(value, dict) else [*value])))
