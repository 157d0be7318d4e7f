"""End programs and plans as the process ends (guarantee 10)."""

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
"""Seconds to wait for threads that use a program at exit.

All threads inside a use of a program share this time to leave it. A thread that uses a program after that waits as long for the
process to be gone, before it gets an error.
"""


class ProcessEnd:
    """The programs to end at exit, and whether the exit has begun.

    The object has no lock, since a thread that the exit stops may hold any lock for ever. Each change and each copy is one
    atomic step.

    Attributes
    ----------
    ending : list of int
        The number of the thread that ends the process, once programs come to an end. From then on no part of a program is
        destroyed.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        self._numbers = itertools.count()
        self._ends: dict[int, weakref.WeakMethod[Callable[[float], None]]] = {}

    def add(self, end: Callable[[float], None]) -> None:
        """Register a program's bound method for the exit.

        The exit calls the method with a deadline. The registration does not keep the program alive.
        """
        number = next(self._numbers)
        self._ends[number] = weakref.WeakMethod(end, lambda _: self._ends.pop(number, None))

    def programs(self) -> list[object]:
        """List the live programs whose methods were added, except dropped programs."""
        owners = [getattr(reference(), "__self__", None) for reference in list(self._ends.values())]
        # A dropped program waits among the deferred steps for its end, and no user holds it.
        dropped = {id(getattr(step, "__self__", None)) for step in list(deferred)}
        return [owner for owner in owners if owner is not None and id(owner) not in dropped]

    def linger(self) -> None:
        """Delay a daemon thread that uses a program too late.

        The thread then ends with the process, and does not print its error. The delay is bounded, since another thread may wait
        for this thread.
        """
        if get_ident() not in self.ending:
            sleep(PATIENCE)

    def run(self) -> None:
        """End the programs, and drop every plan.

        cuDNN's binding complains of plans that outlive it.
        """
        ends = [reference() for reference in list(self._ends.values())]
        # The collector clears references before it runs destructors, so the programs among the deferred steps are looked up
        # apart.
        ends += [getattr(getattr(entry, "__self__", None), "_end_at_exit", None) for entry in list(deferred)]
        self.ending.append(get_ident())
        deadline = monotonic() + PATIENCE
        do_all([*[partial(end, deadline) for end in ends if end is not None], *[pool.plans.drop for pool in list(live_pools)]])


process_end = ProcessEnd()
atexit.register(process_end.run)
