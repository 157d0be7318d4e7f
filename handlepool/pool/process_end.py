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
"""Seconds for all threads together that are inside a use of a program as the process ends, to come out of it; and for the process
to be gone, before a thread that uses a program after that is told."""


class ProcessEnd:
    """The end of the process: which programs are to be ended, and whether it has begun.

    It has no lock, since a thread that the end meets may hold any lock for ever: each change and each copy is one atomic step.

    Attributes
    ----------
    ending : list of int
        The thread that ends the process, once programs come to an end. From then on nothing of a program is destroyed.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        self._numbers = itertools.count()
        self._ends: dict[int, weakref.WeakMethod[Callable[[float], None]]] = {}

    def add(self, end: Callable[[float], None]) -> None:
        """Have a program's bound method called at exit, with a deadline; does not keep the program alive."""
        number = next(self._numbers)
        self._ends[number] = weakref.WeakMethod(end, lambda _: self._ends.pop(number, None))

    def programs(self) -> list[object]:
        """List the programs whose methods were added, that live and that a user still holds."""
        owners = [getattr(reference(), "__self__", None) for reference in list(self._ends.values())]
        dropped = {id(getattr(step, "__self__", None)) for step in list(deferred)}
        return [owner for owner in owners if owner is not None and id(owner) not in dropped]

    def linger(self) -> None:
        """Have a daemon thread that uses a program too late end with the process: it would print its error.

        But not for ever, since another thread may wait for it.
        """
        if get_ident() not in self.ending:
            sleep(PATIENCE)

    def run(self) -> None:
        """End the programs, and drop every plan: cuDNN's binding complains of plans that outlive it."""
        ends = [reference() for reference in list(self._ends.values())]
        # The collector clears references before it runs destructors.
        ends += [getattr(getattr(entry, "__self__", None), "_end_at_exit", None) for entry in list(deferred)]
        self.ending.append(get_ident())
        deadline = monotonic() + PATIENCE
        do_all([*[partial(end, deadline) for end in ends if end is not None], *[pool.plans.drop for pool in list(live_pools)]])


process_end = ProcessEnd()
atexit.register(process_end.run)
