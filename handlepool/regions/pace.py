"""Whether launching is what regions take their time for: then side streams are of no use to their launches.

Where the GPU has done each launch before the next one comes, nothing runs beside anything, and to lead a branch to a side stream
and back takes the host more than half as long as a launch. So branches that launch one known plan stay on the caller's stream
then, which orders them. The GPU is seldom asked, which takes as long as five events.

Nothing here takes a lock: forks of several threads may share a `Pace`, and what one of them counts may be lost. It decides where
branches run, and never what they wait for.
"""

from collections.abc import Sequence

from handlepool.drivers.protocol import LEGACY_STREAM, Driver

ENOUGH = 8
"""Forks, one after the other, in which the GPU had soon done what was launched: from then on launches stay."""
BETWEEN = 24, 39
"""Launches that stay from one look to the next: one more each time, and from the least again, so that forks which all launch the
same are not always looked at in the same place."""
TOO_MANY = 6
"""Looks, from one branch to the next, that found the GPU at work each time: it does not keep up. It may be behind for fewer, as
after a large launch among small ones."""
ASKS = 4
"""How often a look asks, at most. The last launch may be under way, and these take about as long as a launch takes the host."""
LONGEST_REST = 1024
"""Most forks in which nobody looks, after the GPU was found at work; each time twice as many, from 1."""


class Pace:
    """What the forks of one `ParallelStates` have seen.

    Attributes
    ----------
    left : int
        Launches that stay to the next look.
    """

    __slots__ = ("_between", "_idle", "_late", "_pause", "_rest", "left")

    def __init__(self) -> None:
        self._idle = 0
        self._late = 0
        self._pause = 1
        self._rest = 0
        self._between = self.left = BETWEEN[0]

    def begin(self) -> tuple[bool, bool]:
        """Note a new fork; whether its launches stay on the caller's stream, and else whether it is to look if they could."""
        if self._late:  # the last looks of a fork before
            self._is_behind()
        if self._rest:
            self._rest -= 1
            return False, False
        stays = self._idle >= ENOUGH
        return stays, not stays

    def look(self, driver: Driver, pointers: Sequence[int]) -> bool:
        """See, from the second branch on, whether the GPU has done those before it; whether to look again at the next one."""
        if _done(driver, pointers):
            self._late = 0
            self._idle += 1
            return False
        return self._may_be_late()

    def keeps_up(self, driver: Driver, pointer: int) -> bool:
        """Whether the GPU keeps up with what is launched on the caller's stream, so that the next launch stays there, too."""
        if _done(driver, (pointer,)):
            self._late = 0
            least, most = BETWEEN
            self._between = self._between + 1 if self._between < most else least
            self.left = self._between
            return True
        self.left = 1  # the next one looks again
        return self._may_be_late()

    def _may_be_late(self) -> bool:
        """Count a look that found the GPU at work; False where that were too many."""
        self._late += 1
        if self._late < TOO_MANY:
            return True
        self._is_behind()
        return False

    def _is_behind(self) -> None:
        self._idle = self._late = 0
        self._rest = self._pause
        self._pause = min(2 * self._pause, LONGEST_REST)


def _done(driver: Driver, pointers: Sequence[int]) -> bool:
    for pointer in pointers:
        if pointer != LEGACY_STREAM and driver.is_capturing(pointer):
            return False  # since the fork was entered; to ask would end that
    with driver.relaxed():  # or it would end captures of other threads
        for _ in range(ASKS):
            if all(map(driver.stream_done, pointers)):
                return True
    return False
