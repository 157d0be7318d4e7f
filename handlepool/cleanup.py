"""Giving things back when some of the calls for it fail: the rest is given back all the same, and nothing is lost."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def do_all(steps: Iterable[Callable[[], object]]) -> None:
    """Do every step, also after one has failed; raise the first failure then."""
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as trouble:
            failure = failure or trouble
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # or it, its traceback and this frame would keep each other, and all that the callers had


def take_all(things: list[T]) -> list[T]:
    """Empty a list that other threads append to and pop from, too; what it held, the last first."""
    taken: list[T] = []
    try:
        while things:
            taken.append(things.pop())
    except IndexError:  # another thread was faster
        pass
    return taken
