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
"""Forks in which one state was enough, one after the other, before launches share a state from the start."""
BETWEEN = 24, 39
"""Launches on the shared state from one look to the next: one more each time, and from the least again, so that forks which all
launch the same are not always looked at in the same place."""
TOO_MANY = 3
"""Looks, one after the other, that found the GPU at work: from then on branches take the states in turn."""
LONGEST_REST = 1024
"""Most forks in which nobody looks, after the GPU was found at work; each time twice as many, from 1."""


class Pace:
    """What the forks of one `ParallelStates` have seen.

    Attributes
    ----------
    left : int
        Launches to the next look, on the shared state.
    """

    __slots__ = ("_between", "_enough", "_late", "_pause", "_rest", "left")

    def __init__(self) -> None:
        self._enough = 0
        self._late = 0
        self._pause = 1
        self._rest = 0
        self._between = self.left = BETWEEN[0]

    def begin(self) -> bool:
        """Note a new fork; whether its branches share a state."""
        if self._late:  # the last looks of a fork before
            self._is_behind()
        if self._rest:
            self._rest -= 1
            return False
        return self._enough >= ENOUGH

    def look(self, driver: Driver, slot: Slot) -> None:
        """As a fork leases its second state, see whether the GPU has done already what was launched on the first."""
        if self._rest:
            return
        if _done(driver, slot):
            self._enough += 1
        else:
            self._is_behind()

    def one_was_enough(self) -> None:
        """Note a fork that leased one state, since each branch followed the last one, or they shared it."""
        if not self._rest:
            self._enough += 1

    def keeps_up(self, driver: Driver, slot: Slot) -> bool:
        """Whether the GPU keeps up with what is launched on the shared state, so that the next one may share it, too."""
        if _done(driver, slot):
            self._late = 0
            least, most = BETWEEN
            self._between = self._between + 1 if self._between < most else least
            self.left = self._between
            return True
        self._late += 1
        self.left = 1  # the next one looks again
        if self._late < TOO_MANY:
            return True
        self._is_behind()
        return False

    def _is_behind(self) -> None:
        self._enough = self._late = 0
        self._rest = self._pause
        self._pause = min(2 * self._pause, LONGEST_REST)


def _done(driver: Driver, slot: Slot) -> bool:
    with driver.relaxed():  # to ask would end a capture of another thread
        return driver.stream_done(slot.pointer)
