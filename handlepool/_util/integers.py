"""Integers as callers give them: Python's, NumPy's, whatever has ``__index__``. Bools, fractions and texts are mistakes.

And bools, Python's and NumPy's, for which nothing else is taken.
"""

from operator import index
from typing import Any

import numpy as np

from handlepool._util.wording import shown
from handlepool.errors import ArgumentError


def as_integer(value: Any) -> int:
    """The integer that a value is.

    Raises
    ------
    TypeError
        For what is none.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{shown(value)} is no integer")
    return index(value)


def at_least(least: int, what: str, value: Any, unit: str = "") -> int:
    """The integer that an argument is, which must not be below ``least``.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``, and what it may be.
    """
    try:
        number = as_integer(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"{what}={shown(value)}; it must be an integer, {least}{unit} or more")
    return number


def flag(what: str, value: Any) -> bool:
    """The bool that an argument is.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what}={shown(value)}; it must be True or False")
    return bool(value)
