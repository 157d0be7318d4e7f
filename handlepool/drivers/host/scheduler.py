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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from handlepool.drivers.host.race_checker import Access, Clock, Order
from handlepool.errors import ContractError

PATIENCE_SECONDS = 10.0
"""How long a wait that nothing queued can satisfy is held for another thread that may yet release a latch."""


class Line(Protocol):
    """What keeps operations in order: it remembers the last."""

    id: int
    tail: "Operation"


NO_CLOCK: Clock = {}


class Operation:
    """One entry of a stream. Without a function it is a marker, which is done when what it waits for is done."""

    __slots__ = ("accesses", "claimed", "clock", "dependents", "done", "function", "label", "missing", "time")

    def __init__(
        self,
        function: Callable[[], object] | None = None,
        *,
        label: str = "",
        accesses: Sequence[Access] = (),
        claimed: bool = False,
        held: bool = False,
    ) -> None:
        self.function = function
        self.label = label
        self.accesses = accesses
        self.clock = NO_CLOCK
        """What surely runs before it; see `ordering`."""
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
        self.order: Order | None = None
        """Checks the accesses of what is queued, while that is asked for."""
        self._checker = Order()
        self._watchers = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: deque[Operation] = deque()  # what can run and nobody runs yet
        self._running = 0
        self._errors: list[BaseException] = []
        self._latches: dict[Operation, None] = {}
        self._users: dict[Operation, None] = {}
        self._inside = threading.local()
        # Threads that were there before and never use this driver (a test runner's own) cannot be the ones to release a latch.
        self._strangers = weakref.WeakSet(threading.enumerate())
        self._strangers.discard(threading.current_thread())

    def watch(self) -> None:
        """Check the order of accesses from now on; of what was queued before, nothing is known and nothing is said."""
        with self._lock:
            self._watchers += 1
            if self.order is None:
                self._checker.forgive()
                self.order = self._checker

    def unwatch(self) -> None:
        """End `watch`; the last to do so ends the checks."""
        with self._lock:
            self._watchers -= 1
            if not self._watchers:
                self.order = None

    # What a scheduler decides

    def _wake(self, spare: int) -> None:
        """After operations were offered, of which the calling worker will take ``spare``. The lock is held."""

    def _take(self, awaited: Operation, purpose: str) -> Operation | None:
        """Return what a thread that waits must run itself; None when what it waits for is done. The lock is held."""
        raise NotImplementedError

    def _stray(self) -> Operation | None:
        """Return an operation to run for no reason. The lock is held."""
        return None

    # What they share

    def meet(self) -> None:
        """Note that the calling thread uses the driver."""
        self._strangers.discard(threading.current_thread())

    def submit(self, operation: Operation, line: Line | None, after: Sequence[Operation] = (), lane: int = 0) -> None:
        """Queue an operation at the end of a line (or on none), to run after some others as well.

        ``lane`` is the clock's component of an operation on no line.
        """
        with self._lock:
            if line is not None:
                after = (line.tail, *after)
            if self.order is not None:
                place = (lane, "a recorded graph") if line is None else (line.id, repr(line))
                self.order.given(operation, *place, after)
            if line is not None:
                line.tail = operation
            if operation.missing:
                self._latches[operation] = None
            for earlier in after:
                if not earlier.done:
                    earlier.dependents.append(operation)
                    operation.missing += 1
            if operation.accesses:
                self._users[operation] = None
            if not operation.missing:
                self._settle(operation)

    def release(self, operation: Operation) -> None:
        """Let a held operation go; harmless when that was done already."""
        with self._lock:
            if operation in self._latches:
                del self._latches[operation]
                operation.missing -= 1
                if not operation.missing:
                    self._settle(operation)

    def users(self, block: Any) -> list[Operation]:
        """Return the queued operations that touch a block of memory."""
        with self._lock:
            return [operation for operation in self._users if any(access.block is block for access in operation.accesses)]

    def conflicting(self, accesses: Sequence[Access]) -> list[Operation]:
        """Return the queued operations that write what is accessed, or access what is written."""
        with self._lock:
            return [
                operation
                for operation in self._users
                if any(mine.meets(theirs) for theirs in operation.accesses for mine in accesses)
            ]

    def nudge(self) -> None:
        """Mark a moment at which queued work may run, or not."""
        while True:
            with self._lock:
                operation = self._stray()
            if operation is None:
                return
            self._execute(operation)

    def wait(self, operation: Operation, purpose: str) -> None:
        """Return when an operation is done; raise what failed in queued work since the last wait.

        Several failures are one exception with the others as its notes.

        Raises
        ------
        ContractError
            If nothing that is queued can ever complete it, or if queued work waits.
        """
        self.reach(operation, purpose)
        if self._errors:
            with self._lock:
                errors, self._errors = self._errors, []
            for other in errors[1:]:
                errors[0].add_note(f"{len(errors)} queued operations failed; another: {other!r}")
            for error in errors[:1]:  # another thread may have raised them
                raise error

    def reach(self, operation: Operation, purpose: str) -> None:
        """Return when an operation is done, as `wait` does, and leave what failed to the next `wait`."""
        label = getattr(self._inside, "operation", None)
        if label is not None:
            raise ContractError(f"the queued operation {label!r} waits for {purpose}: queued work must not wait for streams")
        while True:
            with self._lock:
                chosen = self._take(operation, purpose)
            if chosen is None:
                break
            self._execute(chosen)

    def _settle(self, operation: Operation, spare: int = 0) -> None:
        """Offer what waits for nothing more or, if it has no function (left), go on with what waits for it. The lock is held."""
        ready = deque([operation])
        while ready:
            operation = ready.popleft()
            if operation.function is not None:
                if not operation.claimed:
                    self._ready.append(operation)
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

    def _execute(self, operation: Operation) -> None:
        """Run an operation that was counted as running, outside the lock."""
        failure = self._call(operation)
        with self._lock:
            self._finish(operation, failure)

    def _call(self, operation: Operation) -> BaseException | None:
        """Call an operation's function, and return what it raised; an interrupt of a thread that waits goes straight on."""
        function = operation.function
        assert function is not None
        outer = getattr(self._inside, "operation", None)
        self._inside.operation = operation.label
        try:
            for access in operation.accesses:
                access.block.check_live(operation.label)
            function()
        except BaseException as error:
            if isinstance(error, Exception) or isinstance(threading.current_thread(), Worker):
                return error
            with self._lock:
                self._finish(operation, None)
            raise
        finally:
            self._inside.operation = outer
            operation.function = None  # what it holds goes here, before the lock is taken
        return None

    def _finish(self, operation: Operation, failure: BaseException | None, spare: int = 0) -> None:
        """Go on with what waits for an operation that has run. The lock is held; ``spare`` if the thread will take another."""
        if failure is not None:
            self._errors.append(failure)
        operation.function = None
        operation.accesses = ()
        self._users.pop(operation, None)
        self._running -= 1
        self._settle(operation, spare)

    def _pause(self, purpose: str) -> None:
        """Sleep until something changed. The lock is held, and there is nothing for this thread to run."""
        if self._running or self._ready:
            self._changed.wait()
        elif self._alone() or not self._changed.wait(PATIENCE_SECONDS):
            latches = ", ".join(latch.label for latch in self._latches) or "none"
            raise ContractError(
                f"waiting for {purpose} would never end: nothing that is queued can run. Unreleased latches: {latches}. Release "
                "them before the wait, or from another thread."
            )

    def _alone(self) -> bool:
        """Whether no other thread is there that may release a latch."""
        current = threading.current_thread()
        return all(
            thread is current or thread in self._strangers or isinstance(thread, Worker) for thread in threading.enumerate()
        )


class Worker(threading.Thread):
    """A scheduler's own thread, which never releases a latch."""


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
        self._idle = 0
        self._workers = 0
        self._closed = False
        self._work = threading.Condition(self._lock)
        _open.add(self)

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
    """Return a scheduler by its name; None for a name that no scheduler has."""
    makers: dict[str, Callable[[], Scheduler]] = {
        "threads": ThreadScheduler,
        "adversarial": lambda: AdversarialScheduler(seed),
    }
    return makers[name]() if name in makers else None
