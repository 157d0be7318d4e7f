"""Make a scheduler by its name, and define the adversarial scheduler."""

import random
from collections import deque
from collections.abc import Callable

from handlepool.drivers.host.scheduler import QueuedOperation, Scheduler, ThreadScheduler

EAGERNESS = 0.25
"""Probability that the adversarial scheduler runs one more operation after a submission."""


class AdversarialScheduler(Scheduler):
    """Run operations in a seeded random order, mostly when a thread waits.

    Parameters
    ----------
    seed : int
        The same program and seed give the same order, as long as one thread queues and waits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        while not (awaited.done or taken):
            if self._ready:
                self._pick(taken)
            else:
                self._pause(purpose)

    def nudge(self) -> None:
        """Run a few random operations; see `Scheduler.nudge`."""
        while self._ready and self._run_one(self._stray):
            pass

    def _stray(self, taken: list[QueuedOperation]) -> None:
        """Take a random operation, with probability `EAGERNESS`. The lock is held."""
        if self._ready and self._random.random() < EAGERNESS:
            self._pick(taken)

    def _pick(self, taken: list[QueuedOperation]) -> None:
        index = self._random.randrange(len(self._ready))
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        # One call moves the operation between the lists. With two calls an interrupt between them could lose it.
        taken.extend(map(deque.pop, (self._ready,)))
        self._running[taken[0]] = None


def make(name: str, seed: int) -> Scheduler | None:
    """Return a scheduler by its name, or None for an unknown name."""
    makers: dict[str, Callable[[], Scheduler]] = {
        "threads": ThreadScheduler,
        "adversarial": lambda: AdversarialScheduler(seed),
    }
    return makers[name]() if name in makers else None
