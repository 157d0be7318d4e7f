"""Check arguments in the same way for all public functions."""

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
    # If a generator has already started, its caller uses it as a generator on purpose. So such a generator is accepted.
    if type(value) in TO_RUN and not getattr(value, "gi_suspended", False):
        if isinstance(value, (GeneratorType, CoroutineType)):
            # If a coroutine is not closed, Python warns that it was never awaited.
            value.close()
        raise ArgumentError(
            f"{name_of(function)} returned a {kind_of(value)}, and none of its work has run. Pass a function that "
            "does the work and returns arrays"
        )


def as_integer(value: Any, otherwise: int | None = None) -> int:
    """Return a value as an integer.

    If the value is no integer, return ``otherwise``.

    Raises
    ------
    TypeError
        If the value is no integer and ``otherwise`` is None.
    """
    if type(value) is int:
        return value
    try:
        # `operator.index` would take True as 1. A flag in place of a number is a mistake, so flags are refused.
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
        If the value is no such integer. The message has the argument's name ``what``, and its legal values.
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
        If the value is no bool. The message has the argument's name ``what``.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what}={shown(value)}; it must be True or False")
    return bool(value)


MOST_DEEP = 100
"""The maximum nesting depth of containers in an argument.

A recursive function can walk over such containers within Python's recursion limit.
"""


def check_ends(what: str, *values: object) -> None:
    """Refuse lists, tuples and dictionaries with cycles or too much nesting.

    Raises
    ------
    ArgumentError
        The message begins with ``what``, such as "f was given".
    """
    # The loop keeps its own stack. A recursive check of deeply nested containers would exceed Python's recursion limit.
    left: list[tuple[object, Iterator[object]]] = [(values, iter(values))]
    within: set[int] = set()
    while left:
        value = next(left[-1][1], left)
        if value is left:
            within.discard(id(left.pop()[0]))
        elif isinstance(value, (list, tuple, dict)) and value:
            if id(value) in within:
                raise ArgumentError(
                    f"{what} a {kind_of(value)} that contains itself: pass a container that does not contain itself"
                )
            if len(left) > MOST_DEEP:
                raise ArgumentError(
                    f"{what} a {kind_of(value)} nested in more than {MOST_DEEP} containers: pass fewer levels of nesting"
                )
            within.add(id(value))
            # The list is a copy, because another thread may change the container meanwhile.
            left.append((value, iter([*value.values()] if isinstance(value, dict) else [*value])))
