"""Run every step of a clean-up, also after a step has failed."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def do_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step, also after a failure; then raise the first failure."""
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
        # The error refers to its traceback, and the traceback to this frame. If the frame still referred to the error, the three
        # would form a cycle, which would keep all objects of the callers alive.
        del failure


def take_each(things: list[T]) -> Iterator[T]:
    """Pop and yield the items of a list, from the front.

    Other threads may append to the list and pop from it meanwhile. If an interrupt stops the loop, the items that were not yet
    popped stay in the list.
    """
    for _ in range(len(things)):
        try:
            yield things.pop(0)
        # The list is empty, because another thread has popped the last item.
        except IndexError:
            return
