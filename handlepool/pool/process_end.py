"""End programs and plans when the process exits (guarantee 10)."""

import atexit
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import monotonic, sleep

from handlepool._util.cleanup import do_all
from handlepool.pool.deferred import deferred
from handlepool.pool.status import live_pools

PATIENCE = 1.0
"""Seconds that the exit waits for threads that are using a program.

All these threads share this time. A thread that uses a program later is delayed by the same time, before it gets an error.
"""


class ProcessEnd:
    """The programs to end at exit, and whether the exit has begun.

    The object has no lock, because the exit stops threads, and a thread stopped under a lock would hold the lock for ever. Each
    change and each copy is one atomic step.

    Attributes
    ----------
    ending : list of int
        Empty until the exit begins to end programs. Then it has the number of the thread that ends the process, and no part of
        a program is destroyed any more.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        self._numbers = itertools.count()
        self._ends: dict[int, weakref.WeakMethod[Callable[[float], None]]] = {}

    def add(self, end: Callable[[float], None]) -> None:
        """Register a program's bound method for the exit.

        The exit calls the method with a deadline, a value of `time.monotonic`. The registration does not keep the program
        alive.
        """
        number = next(self._numbers)
        self._ends[number] = weakref.WeakMethod(end, lambda _: self._ends.pop(number, None))

    def programs(self) -> list[object]:
        """List the programs that were added and are still in use."""
        owners = [getattr(reference(), "__self__", None) for reference in list(self._ends.values())]
        # A program that its user has dropped is no longer in use. Its end waits among the deferred steps.
        dropped = {id(getattr(step, "__self__", None)) for step in list(deferred)}
        return [owner for owner in owners if owner is not None and id(owner) not in dropped]

    def linger(self) -> None:
        """Delay a daemon thread that uses a program too late.

        Usually the process has ended before the delay is over, so the thread prints no error. The delay is bounded, because
        another thread may wait for this thread.
        """
        if get_ident() not in self.ending:
            sleep(PATIENCE)

    def run(self) -> None:
        """End the programs, and drop every plan.

        A plan that outlived cuDNN's binding would print errors when it is destroyed.
        """
        ends = [reference() for reference in list(self._ends.values())]
        # The weak references to dropped programs are already cleared. So these programs are found through the deferred steps.
        ends += [getattr(getattr(entry, "__self__", None), "_end_at_exit", None) for entry in list(deferred)]
        self.ending.append(get_ident())
        deadline = monotonic() + PATIENCE
        do_all([*[partial(end, deadline) for end in ends if end is not None], *[pool.plans.drop for pool in list(live_pools)]])


process_end = ProcessEnd()
atexit.register(process_end.run)
