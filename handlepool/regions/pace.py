"""Whether launching is what a region takes its time for: then more than one stream is of no use to its launches.

Where the GPU has done each launch before the next one comes, several streams run nothing beside each other, and to order them
costs more than a launch. So branches that launch one known plan share a state then, whose stream orders them. It is asked for
seldom: to ask takes the driver as long as five events.

Nothing here takes a lock: forks of several threads may share a `Pace`, and what one of them counts may be lost. It decides where
branches run, and never what they wait for.
"""

from handlepool.drivers.protocol import Driver
from handlepool.pool.slot import Slot

ENOUGH = 8
"""Looks, one in each fork, that found the GPU without work, before branches share a state."""
EVERY = 4
"""Of so many branches on the shared state, one looks; which one, differs from fork to fork."""
TOO_MANY = 3
"""Looks, one after the other, that found the GPU at work: from then on branches take the states in turn."""
LONGEST_REST = 1024
"""Most forks in which nobody looks, after the GPU was found at work; each time twice as many, from 1."""


class Pace:
    """What the forks of one `ParallelStates` have seen."""

    __slots__ = ("_idle", "_late", "_pause", "_phase", "_rest")

    def __init__(self) -> None:
        self._idle = 0
        self._late = 0
        self._pause = 1
        self._phase = 0
        self._rest = 0

    def begin(self) -> bool:
        """Note a new fork; whether its branches share a state."""
        self._phase += 1
        if self._late:  # the last looks of a fork before
            self._is_behind()
        if self._rest:
            self._rest -= 1
            return False
        return self._idle >= ENOUGH

    def look(self, driver: Driver, slot: Slot) -> None:
        """See whether the GPU has done what a fork has launched so far, on its only state; as the second state is leased."""
        if self._rest:
            return
        if _done(driver, slot):
            self._idle += 1
        else:
            self._is_behind()

    def keeps_up(self, driver: Driver, slot: Slot, number: int) -> bool:
        """Whether the GPU keeps up, and the next branch may share the state, too. The branch's number says whether to look."""
        if not self._late and (number + self._phase) % EVERY:
            return True
        if _done(driver, slot):
            self._late = 0
            return True
        self._late += 1
        if self._late < TOO_MANY:
            return True
        self._is_behind()
        return False

    def _is_behind(self) -> None:
        self._idle = self._late = 0
        self._rest = self._pause
        self._pause = min(2 * self._pause, LONGEST_REST)


def _done(driver: Driver, slot: Slot) -> bool:
    with driver.relaxed():  # to ask would end a capture of another thread
        return driver.stream_done(slot.pointer)
