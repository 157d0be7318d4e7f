"""Which operation runs next, and on which thread.

`ThreadScheduler` runs operations on worker threads: two streams overlap for real. `AdversarialScheduler` has no thread and picks
any operation that can run, by a seed: whatever order the program failed to ask for, it will not get, reproducibly.
"""

import atexit
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from handlepool.drivers.host.operations import Operation, Scheduler, Worker

MAX_WORKERS = 64
"""More streams than this that can all run take turns, as on a GPU with its 32 queues."""

IDLE_SECONDS = 1.0
"""A worker with nothing to do ends after this."""

EXIT_SECONDS = 1.0
"""How long the interpreter's exit waits for what is running just then; what is queued behind is dropped, as on a GPU."""

EAGERNESS = 0.25
"""How likely it is that the adversarial scheduler runs one more operation after something was queued."""


class ThreadScheduler(Scheduler):
    """Runs whatever can run on worker threads: one for each operation that can run, up to `MAX_WORKERS`.

    An operation that waits holds no worker, so workers wait for work only, never for each other. The null stream's operations are
    run by the thread that gave them.
    """

    inline = True

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[Operation] = deque()
        self._idle = 0
        self._workers = 0
        self._closed = False
        self._work = threading.Condition(self._lock)
        _open.add(self)

    def _offer(self, operation: Operation) -> None:
        self._ready.append(operation)

    def _anything_ready(self) -> bool:
        return bool(self._ready)

    def _wake(self, spare: int) -> None:
        # `_idle` counts a worker until it has taken the lock again, so every operation that is ready has its own.
        wanted = len(self._ready) - spare
        if wanted > 0:
            self._work.notify(min(wanted, self._idle))
        while wanted > self._idle and self._workers < MAX_WORKERS and not self._closed:
            worker = Worker(target=self._run, name="handlepool-host-worker", daemon=True)
            self._workers += 1
            self._idle += 1
            try:
                worker.start()
            except RuntimeError:  # the system has no more threads: what waits runs it, or a worker that is there
                self._workers -= 1
                self._idle -= 1
                return

    def _run(self) -> None:
        self._lock.acquire()
        self._idle -= 1
        try:
            while True:
                called = True
                while called and not self._ready and not self._closed:
                    self._idle += 1
                    called = self._work.wait(IDLE_SECONDS)
                    self._idle -= 1
                if not self._ready or self._closed:
                    return
                operation = self._ready.popleft()
                self._running += 1
                self._lock.release()
                try:
                    failure = self._call(operation)
                finally:
                    self._lock.acquire()
                self._finish(operation, failure, spare=1)
                del operation, failure
        finally:
            self._workers -= 1
            self._changed.notify_all()
            self._lock.release()

    def _take(self, awaited: Operation, purpose: str) -> Operation | None:
        try:
            while not awaited.done:
                if awaited.claimed and not awaited.missing:
                    awaited.claimed = False  # another thread may wait for it too, as `free` does: one of them runs it
                    self._running += 1
                    return awaited
                if self._ready and not self._workers:
                    self._running += 1
                    return self._ready.popleft()
                self._pause(purpose)
        except BaseException:
            # This thread will not run it: a worker must, or all that is queued behind it would be stuck.
            if awaited.claimed:
                awaited.claimed = False
                if not (awaited.missing or awaited.done):
                    self._settle(awaited)
            raise
        return None

    def close(self) -> None:
        """Let the workers end after what they are running: no thread of ours runs while the interpreter is taken down."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            deadline = time.monotonic() + EXIT_SECONDS
            while self._workers and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)


_open: weakref.WeakSet[ThreadScheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for scheduler in list(_open):
        scheduler.close()


# A forked child has none of the workers, and a lock that one of them held stays locked: its exit waits for nothing.
os.register_at_fork(after_in_child=_open.clear)


class AdversarialScheduler(Scheduler):
    """Runs any operation that can run, as a seeded generator picks, and mostly only when somebody waits.

    Parameters
    ----------
    seed : int
        The same program and seed give the same order, as long as one thread queues and waits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ready: list[Operation] = []

    def _offer(self, operation: Operation) -> None:
        self._ready.append(operation)

    def _anything_ready(self) -> bool:
        return bool(self._ready)

    def _take(self, awaited: Operation, purpose: str) -> Operation | None:
        while not awaited.done:
            if self._ready:
                return self._pick()
            self._pause(purpose)
        return None

    def _stray(self) -> Operation | None:
        return self._pick() if self._ready and self._random.random() < EAGERNESS else None

    def _pick(self) -> Operation:
        index = self._random.randrange(len(self._ready))
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        self._running += 1
        return self._ready.pop()


def make(name: str, seed: int) -> Scheduler | None:
    """A scheduler by its name; None for a name that no scheduler has."""
    makers: dict[str, Callable[[], Scheduler]] = {
        "threads": ThreadScheduler,
        "adversarial": lambda: AdversarialScheduler(seed),
    }
    return makers[name]() if name in makers else None
