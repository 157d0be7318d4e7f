"""Values that a recorded function may change without a refusal: a context variable is no state to `record`."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


def hidden(value: T) -> Callable[[], T]:
    """Return a function that gives a value: a log that a recorded function writes to, or an iterator that it takes from."""
    return ContextVar("hidden", default=value).get
