"""Runs what streams were given, as far as order allows, and no further than it likes.

Work is a graph of operations. A stream's order, an event's wait and a latch are all the same thing here, an operation that waits
for others; so a stream is no more than the last operation it was given, ten thousand short-lived streams cost nothing, and what
a destroyed stream was given runs all the same.

`ThreadScheduler` runs operations on worker threads: two streams overlap for real. `AdversarialScheduler` has no thread and
picks any runnable operation, by a seed: whatever order the program failed to ask for, it will not get, reproducibly.

No lock is held while an operation's function runs. Nothing here is called by a finaliser, so a collection that starts
while a lock is held cannot deadlock.
"""

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from handlepool.errors import ContractError

MAX_WORKERS = 64
"""More streams than this that can all run take turns, as on a GPU with its 32 queues."""

IDLE_SECONDS = 1.0
"""A worker with nothing to do ends after this."""

PATIENCE_SECONDS = 10.0
"""How long a wait that nothing queued can satisfy is held for another thread that may yet release a latch."""


class Region(Protocol):
    """Memory that an operation touches."""

    def check_live(self, label: str) -> None:
        """Raise `ContractError` if it was given back to the device."""


class Line(Protocol):
    """What keeps operations in order: it remembers the last."""

    tail: "Operation"


class Operation:
    """One entry of a stream. Without a function it is a marker, which is done when what it waits for is done."""

    __slots__ = ("claimed", "dependents", "done", "function", "label", "missing", "regions", "time")

    def __init__(
        self,
        function: Callable[[], object] | None = None,
        *,
        label: str = "",
        regions: Sequence[Region] = (),
        claimed: bool = False,
        held: bool = False,
    ) -> None:
        self.function = function
        self.label = label
        self.regions = regions
        self.claimed = claimed
        """The thread that submitted it will run it, and no worker."""
        self.missing = int(held)
        """How many operations, and a latch's release, it still waits for."""
        self.dependents: list[Operation] = []
        self.done = False
        self.time = 0.0
        """When it was done, by `time.perf_counter`."""


NOTHING = Operation()
"""An operation that was done before the first: the tail of a stream that was given nothing."""
NOTHING.done = True


class Scheduler:
    """What both schedulers share: the graph of operations, who waits for whom, and what failed."""

    inline = False
    """Whether a thread that must wait for its own operation runs it itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running = 0
        self._errors: list[Exception] = []
        self._latches: dict[Operation, None] = {}
        self._users: dict[Operation, None] = {}
        self._inside = threading.local()
        # Threads that were there before and never used this driver (a test runner's own) cannot be the ones to release a latch.
        self._strangers = weakref.WeakSet(threading.enumerate())
        self._strangers.discard(threading.current_thread())

    # What a scheduler decides

    def _offer(self, operation: Operation) -> None:
        """Take an operation that can run. The lock is held."""
        raise NotImplementedError

    def _anything_ready(self) -> bool:
        raise NotImplementedError

    def _wake(self, spare: int) -> None:
        """After operations were offered, of which the calling worker will take ``spare``. The lock is held."""

    def nudge(self) -> None:
        """A moment at which queued work may run, or not."""

    def wait(self, operation: Operation, purpose: str) -> None:
        """Return when an operation is done; raise what failed meanwhile.

        Raises
        ------
        ContractError
            If nothing that is queued can ever complete it.
        """
        raise NotImplementedError

    # What they share

    def meet(self) -> None:
        """This thread uses the driver."""
        self._strangers.discard(threading.current_thread())

    def submit(self, operation: Operation, line: Line | None, after: Sequence[Operation] = ()) -> None:
        """Queue an operation at the end of a line (or on none), to run after some others as well."""
        with self._lock:
            if line is not None:
                after = (line.tail, *after)
                line.tail = operation
            if operation.missing:
                self._latches[operation] = None
            for earlier in after:
                if not earlier.done:
                    earlier.dependents.append(operation)
                    operation.missing += 1
            if operation.regions:
                self._users[operation] = None
            if not operation.missing:
                self._settle(operation)

    def release(self, operation: Operation) -> None:
        """Let a held operation go."""
        with self._lock:
            if operation not in self._latches:
                return
            del self._latches[operation]
            operation.missing -= 1
            if not operation.missing:
                self._settle(operation)

    def users(self, region: Region) -> list[Operation]:
        """The queued operations that touch a region."""
        with self._lock:
            return [operation for operation in self._users if any(item is region for item in operation.regions)]

    def raise_errors(self) -> None:
        """Raise the first error of operations that ran since the last call; like CUDA's, it comes late and to whoever waits."""
        if self._errors:
            errors, self._errors = self._errors, []
            for other in errors[1:]:
                errors[0].add_note(f"{len(errors)} queued operations failed; another: {other!r}")
            raise errors[0]

    def _settle(self, operation: Operation, spare: int = 0) -> None:
        """An operation waits for nothing more: offer it or, if there is nothing (left) to run, go on with what waits for it."""
        ready = deque([operation])
        while ready:
            operation = ready.popleft()
            if operation.function is not None:
                if not operation.claimed:
                    self._offer(operation)
                continue
            operation.done = True
            operation.time = time.perf_counter()
            for dependent in operation.dependents:
                dependent.missing -= 1
                if not dependent.missing:
                    ready.append(dependent)
            operation.dependents.clear()
        self._changed.notify_all()
        self._wake(spare)

    def _execute(self, operation: Operation, spare: int = 0) -> None:
        """Run an operation that was counted as running, outside the lock; ``spare`` if the thread will take another."""
        function = operation.function
        assert function is not None
        self._inside.operation = operation.label
        try:
            for region in operation.regions:
                region.check_live(operation.label)
            function()
        except Exception as error:
            self._errors.append(error)
        finally:
            self._inside.operation = None
            operation.function = None
            del function  # what it holds goes before the lock is taken
            with self._lock:
                operation.regions = ()
                self._users.pop(operation, None)
                self._running -= 1
                self._settle(operation, spare)

    def _refuse_inside(self, purpose: str) -> None:
        label = getattr(self._inside, "operation", None)
        if label is not None:
            raise ContractError(f"the queued operation {label!r} waits for {purpose}: queued work must not wait for streams")

    def _pause(self, purpose: str) -> None:
        """Sleep until something changed. The lock is held, and there is nothing for this thread to run."""
        if self._running or self._anything_ready():
            self._changed.wait()
        elif self._alone() or not self._changed.wait(PATIENCE_SECONDS):
            latches = ", ".join(repr(latch.label) for latch in self._latches) or "none"
            raise ContractError(
                f"waiting for {purpose} would never end: nothing that is queued can run. Unreleased latches: {latches}. "
                "Release them before the wait, or from another thread."
            )

    def _alone(self) -> bool:
        current = threading.current_thread()
        return all(
            thread is current or thread in self._strangers or isinstance(thread, _Worker) for thread in threading.enumerate()
        )


class _Worker(threading.Thread):
    """A worker thread of some `ThreadScheduler`."""


class ThreadScheduler(Scheduler):
    """Runs whatever can run on worker threads: one for each operation that can run, up to `MAX_WORKERS`.

    An operation that waits holds no worker, so workers are short of work only, never of each other. The null stream's
    operations are run by the thread that gave them.
    """

    inline = True

    def __init__(self) -> None:
        super().__init__()
        self._work = threading.Condition(self._lock)
        self._ready: deque[Operation] = deque()
        self._idle = 0
        self._workers = 0

    def _offer(self, operation: Operation) -> None:
        self._ready.append(operation)

    def _anything_ready(self) -> bool:
        return bool(self._ready)

    def _wake(self, spare: int) -> None:
        # `_idle` counts a worker until it has taken the lock again, so every operation that is ready has its own.
        wanted = len(self._ready) - spare
        if wanted > 0:
            self._work.notify(min(wanted, self._idle))
        while wanted > self._idle and self._workers < MAX_WORKERS:
            self._workers += 1
            self._idle += 1
            _Worker(target=self._run, name="handlepool-host-worker", daemon=True).start()

    def _run(self) -> None:
        with self._lock:
            self._idle -= 1
        try:
            while True:
                with self._lock:
                    if not self._ready:
                        self._idle += 1
                        self._work.wait(IDLE_SECONDS)
                        self._idle -= 1
                        if not self._ready:
                            return
                    operation = self._ready.popleft()
                    self._running += 1
                self._execute(operation, spare=1)
                del operation
        finally:
            with self._lock:
                self._workers -= 1

    def wait(self, operation: Operation, purpose: str) -> None:
        self._refuse_inside(purpose)
        with self._lock:
            try:
                while not (operation.done or (operation.claimed and not operation.missing)):
                    self._pause(purpose)
            except BaseException:
                # The thread will not run it: a worker must, or all that is queued behind it would be stuck.
                operation.claimed = False
                if not (operation.missing or operation.done):
                    self._settle(operation)
                raise
            mine = not operation.done
            self._running += mine
        if mine:
            self._execute(operation)
        self.raise_errors()


class AdversarialScheduler(Scheduler):
    """Runs any operation that can run, as a seeded generator picks, and mostly only when somebody waits.

    Parameters
    ----------
    seed : int
        The same program and seed give the same order, as long as one thread queues and waits.
    """

    eagerness = 0.25
    """How likely it is that one more operation runs after something was queued."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ready: list[Operation] = []

    def _offer(self, operation: Operation) -> None:
        self._ready.append(operation)

    def _anything_ready(self) -> bool:
        return bool(self._ready)

    def _pick(self) -> Operation:
        index = self._random.randrange(len(self._ready))
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        self._running += 1
        return self._ready.pop()

    def nudge(self) -> None:
        while True:
            with self._lock:
                if not self._ready or self._random.random() >= self.eagerness:
                    return
                operation = self._pick()
            self._execute(operation)

    def wait(self, operation: Operation, purpose: str) -> None:
        self._refuse_inside(purpose)
        while True:
            with self._lock:
                while not operation.done and not self._ready:
                    self._pause(purpose)
                if operation.done:
                    break
                chosen = self._pick()
            self._execute(chosen)
        self.raise_errors()
