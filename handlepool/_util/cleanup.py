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
        # Otherwise the error, its traceback and this frame would keep each other alive, with all objects of the callers.
        del failure


def take_each(things: list[T]) -> Iterator[T]:
    """Pop and yield the items of a list, from the front.

    Other threads append to the list and pop from it meanwhile. The items are popped singly, so that an interrupt loses at most
    the item in hand.
    """
    for _ in range(len(things)):
        try:
            yield things.pop(0)
        # Another thread was faster.
        except IndexError:
            return
