"""Run every step of a clean-up, also after a step has failed."""

from collections.abc import Callable, Iterable, Iterator
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


def take_each(things: list[T]) -> Iterator[T]:
    """Take what a list holds, the first first; other threads append to it and pop from it, too.

    One at a time, so that an interrupt costs what is in hand at most.
    """
    for _ in range(len(things)):
        try:
            yield things.pop(0)
        except IndexError:  # another thread was faster
            return
