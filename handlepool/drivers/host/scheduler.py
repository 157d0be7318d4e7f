"""Decide which operation runs next, and on which thread.

`ThreadScheduler` runs operations on worker threads, so that two streams overlap for real. `AdversarialScheduler` has no thread of
its own, and a seed picks the next among the operations that can run. So if the program lacks a wait, the wrong order can show in
every run.

In the main thread, Python may raise an interrupt after any call. The interrupt ends a wait of the program, and loses no
operation. An operation that a thread took and did not begin goes back to the ready list. An operation that has begun counts as
done. All steps under the lock can be repeated: `Scheduler._pending` keeps an operation until its consequences are settled, so the
next thread can go on with them.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from handlepool.drivers.host.race_checker import Access, Clock, Order
from handlepool.errors import ContractError

NO_CLOCK: Clock = {}
PATIENCE_SECONDS = 10.0
"""Seconds that a stuck wait leaves other threads to release a latch."""


class Line(Protocol):
    """A queue whose operations run in order; it remembers the last operation."""

    id: int
    tail: "QueuedOperation"


class QueuedOperation:
    """One entry of a stream.

    An operation without a function is a marker. A marker is done when every operation that it waits for is done.
    """

    __slots__ = (
        "accesses",
        "begun",
        "claimed",
        "clock",
        "dependents",
        "done",
        "function",
        "label",
        "offered",
        "queued",
        "time",
        "waits",
    )

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
        """Clock of the operations that surely run earlier; see `race_checker.Order`."""
        self.claimed = claimed
        """bool: the submitting thread runs the operation, and no worker does."""
        self.waits: set[QueuedOperation] = {self} if held else set()
        """Operations that this operation still waits for.

        If the set contains this operation itself, the operation also waits for the release of its latch.
        """
        self.dependents: list[QueuedOperation] = []
        self.queued = False
        """bool: a scheduler has accepted the operation.

        Until a scheduler has accepted it, the operation has no effect.
        """
        self.offered = False
        """bool: the operation is or was in the scheduler's ready list."""
        self.begun = False
        """bool: a thread has called the function."""
        self.done = False
        self.time = 0.0
        """Time of completion in seconds, by `time.perf_counter`."""


NOTHING = QueuedOperation()
"""A finished operation: the tail of a stream without work."""
NOTHING.done = NOTHING.queued = True


class Scheduler:
    """The shared part of both schedulers: operations, their dependencies, and failures."""

    inline = False
    """bool: a thread that waits for its own operation runs it itself."""

    def __init__(self) -> None:
        self.order: Order | None = None
        """The checker of queued accesses, or None while no check is on."""
        self._checker = Order()
        self._watchers = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Operations that can run and that no thread has taken yet.
        self._ready: deque[QueuedOperation] = deque()
        self._running: dict[QueuedOperation, None] = {}
        # Operations for `_settle` to look at: such an operation may have become able to run, or may be done. A second look at an
        # operation does no harm.
        self._pending: deque[QueuedOperation] = deque()
        # Whether waiting threads and workers were notified since the last change by `_settle`.
        self._told = True
        self._errors: list[BaseException] = []
        self._latches: dict[QueuedOperation, None] = {}
        self._users: dict[QueuedOperation, None] = {}
        self._inside = threading.local()
        # Threads that are older than this driver, such as a test runner's own threads. As long as such a thread does not use the
        # driver, it cannot release a latch.
        self._strangers = weakref.WeakSet(threading.enumerate())
        self._strangers.discard(threading.current_thread())

    def watch(self) -> None:
        """Check the order of accesses from now on.

        The checker knows nothing about work that was queued earlier, and reports nothing about it.
        """
        with self._lock:
            self._watchers += 1
            if self.order is None:
                self._checker.forgive()
                self.order = self._checker

    def unwatch(self) -> None:
        """End one `watch`; the checks end with the last `watch`."""
        with self._lock:
            self._watchers -= 1
            if not self._watchers:
                self.order = None

    # Decisions of a scheduler

    def _wake(self, spare: int) -> None:
        """Wake or start workers for the ready operations. The lock is held.

        ``spare`` is the number of ready operations that the calling worker will take itself.
        """

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        """Append to ``taken`` an operation that the waiting thread must run.

        If ``awaited`` is done, ``taken`` stays empty. The lock is held.
        """
        raise NotImplementedError

    # Shared steps

    def meet(self) -> None:
        """Note that the calling thread uses the driver."""
        self._strangers.discard(threading.current_thread())

    def submit(self, operation: QueuedOperation, line: Line | None, after: Sequence[QueuedOperation] = (), lane: int = 0) -> None:
        """Queue an operation at the end of a line, and after ``after``.

        Without a line, the operation depends on ``after`` alone, and ``lane`` is its component of the race checker's clocks.
        """
        with self._lock:
            if line is not None:
                after = (line.tail, *after)
            if self.order is not None:
                place = (lane, "a recorded graph") if line is None else (line.id, repr(line))
                self.order.given(operation, *place, after)
            held = operation in operation.waits
            for earlier in after:
                # If an interrupt kept an earlier operation from being queued, that operation will never run. So no operation may
                # wait for it.
                if earlier.queued and not earlier.done:
                    operation.waits.add(earlier)
                    earlier.dependents.append(operation)
            self._pending.append(operation)
            # An interrupt can come only after a call, and the next assignments contain no call. So an interrupt finds the
            # operation either queued in full or not queued.
            operation.queued = True
            if line is not None:
                line.tail = operation
            if held:
                self._latches[operation] = None
            if operation.accesses:
                self._users[operation] = None
            self._settle()

    def disclaim(self, operation: QueuedOperation) -> None:
        """Let a worker run an operation that the calling thread has claimed.

        If the operation never ran, all operations that depend on it would be stuck.
        """
        with self._lock:
            self._disclaim(operation)

    def _disclaim(self, operation: QueuedOperation) -> None:
        if operation.claimed:
            operation.claimed = False
            self._pending.append(operation)
            self._settle()

    def release(self, operation: QueuedOperation) -> None:
        """Let a held operation run; a second release has no effect."""
        with self._lock:
            if operation in self._latches:
                operation.waits.discard(operation)
                self._pending.append(operation)
                del self._latches[operation]
                self._settle()

    def users(self, block: object) -> list[QueuedOperation]:
        """Return the queued operations that touch a block of memory."""
        with self._lock:
            return [operation for operation in self._users if any(access.block is block for access in operation.accesses)]

    def conflicting(self, accesses: Sequence[Access]) -> list[QueuedOperation]:
        """Return the queued operations that conflict with accesses.

        An operation conflicts if it writes memory that the accesses use, or uses memory that they write.
        """
        with self._lock:
            return [
                operation
                for operation in self._users
                if any(mine.meets(theirs) for theirs in operation.accesses for mine in accesses)
            ]

    def nudge(self) -> None:
        """Let a scheduler without threads run some queued work now."""

    def wait(self, operation: QueuedOperation, purpose: str) -> None:
        """Return when an operation is done; raise failures of queued work.

        The call raises the failures since the last wait. If there are several, it raises the first, with a note for each of the
        rest.

        Raises
        ------
        ContractError
            If no queued work can ever complete the operation, or if the caller is queued work itself.
        """
        self.reach(operation, purpose)
        if self._errors:
            with self._lock:
                errors, self._errors = self._errors, []
            for other in errors[1:]:
                errors[0].add_note(f"{len(errors)} queued operations failed; another: {other!r}")
            # If another thread has raised the failures meanwhile, the list is empty here.
            for error in errors[:1]:
                raise error

    def reach(self, operation: QueuedOperation, purpose: str) -> None:
        """Return when an operation is done, and leave failures to `wait`.

        In all other respects the call is like `wait`.
        """
        label = getattr(self._inside, "operation", None)
        if label is not None:
            raise ContractError(
                f"the queued operation {label!r} waits for {purpose}: queued work must not wait for streams, so wait "
                "before the operation is queued"
            )
        while self._run_one(partial(self._take, operation, purpose)):
            pass

    def _settle(self, spare: int = 0) -> None:
        """Offer operations that wait for nothing more. The lock is held.

        An operation becomes done here if it has no function or its function has run. Its dependents then stop waiting for it.
        """
        pending = self._pending
        while pending:
            operation = pending[0]
            self._told = False
            if operation.queued and not operation.waits:
                if operation.function is None:
                    if not operation.done:
                        operation.time = time.perf_counter()
                        operation.done = True
                    for dependent in operation.dependents:
                        dependent.waits.discard(operation)
                        pending.append(dependent)
                    operation.dependents.clear()
                elif not (operation.claimed or operation.offered):
                    # An interrupt can come only after a call. No call separates these two steps, so an offered operation is
                    # always in the ready list.
                    operation.offered = True
                    self._ready.append(operation)
            pending.popleft()
        if not self._told:
            self._changed.notify_all()
            self._wake(spare)
            self._told = True

    def _run_one(self, take: Callable[[list[QueuedOperation]], None]) -> bool:
        """Run the operation that ``take`` takes, outside the lock.

        Return whether ``take`` took an operation.
        """
        _descend(HEADROOM)
        taken: list[QueuedOperation] = []
        try:
            with self._lock:
                self._settle()
                take(taken)
            if not taken:
                return False
            failure = self._call(taken[0])
            with self._lock:
                self._finish(taken[0], failure)
            return True
        except BaseException:
            if taken:
                self._put_back(taken[0])
            raise

    def _put_back(self, operation: QueuedOperation) -> None:
        """Let another thread run an operation that this thread took.

        If the operation has begun, settle its dependents instead.
        """
        with self._lock:
            if operation.begun:
                self._finish(operation, None)
                return
            self._running.pop(operation, None)
            operation.offered = False
            self._pending.append(operation)
            self._settle()

    def _call(self, operation: QueuedOperation) -> BaseException | None:
        """Call an operation's function, and return the exception that it raised.

        If an interrupt stops a waiting thread, the method raises the interrupt at once.
        """
        function: Any = operation.function
        outer = getattr(self._inside, "operation", None)
        self._inside.operation = operation.label
        try:
            for access in operation.accesses:
                access.block.check_live(operation.label)
            # An interrupt can come only after a call. So no interrupt comes between this mark and the call of the function.
            operation.begun = True
            function()
        except BaseException as error:
            if isinstance(error, Exception) or isinstance(threading.current_thread(), Worker):
                operation.begun = True
                return error
            raise
        finally:
            self._inside.operation = outer
            if operation.begun:
                # The operation's references to arrays end here, before this thread takes the lock, because their finalizers may
                # run any code.
                operation.function = function = None
        return None

    def _finish(self, operation: QueuedOperation, failure: BaseException | None, spare: int = 0) -> None:
        """Settle the dependents of an operation that has run.

        The lock is held. ``spare`` is 1 if the calling thread will take another operation.
        """
        if failure is not None:
            self._errors.append(failure)
        operation.function = None
        operation.accesses = ()
        self._users.pop(operation, None)
        self._running.pop(operation, None)
        self._pending.append(operation)
        self._settle(spare)

    def _pause(self, purpose: str) -> None:
        """Sleep until something changes.

        The lock is held, and this thread has nothing to run.
        """
        if self._running or self._ready:
            self._changed.wait()
        elif self._alone() or not self._changed.wait(PATIENCE_SECONDS):
            latches = ", ".join(latch.label for latch in self._latches) or "none"
            raise ContractError(
                f"waiting for {purpose} would never end, because no queued work can run. Release the latches ({latches}) before "
                "the wait, or from another thread"
            )

    def _alone(self) -> bool:
        """Return whether no thread but this one could release a latch."""
        current = threading.current_thread()
        return all(
            thread is current or thread in self._strangers or isinstance(thread, Worker) for thread in threading.enumerate()
        )


class Worker(threading.Thread):
    """A scheduler's own thread, which never releases a latch."""

    wanted = True
    """False if the worker's start was interrupted; it then ends at once."""


def _descend(frames: int) -> None:
    """Raise RecursionError unless ``frames`` more calls fit on the stack.

    The caller has taken no operation yet, so the error loses no operation.
    """
    if frames:
        _descend(frames - 1)


HEADROOM = 60
"""Frames that a thread must have free before it takes an operation.

So many frames are enough for the scheduler's own steps, and for the steps of most operations.
"""


MAX_WORKERS = 64
"""Upper limit of worker threads per scheduler.

If more than `MAX_WORKERS` streams have work to run, they take turns, as streams do on the 32 queues of a GPU.
"""

IDLE_SECONDS = 1.0
"""Seconds after which an idle worker ends."""

EXIT_SECONDS = 1.0
"""Seconds that the interpreter's exit waits for running operations.

The exit drops queued operations that have not begun, as on a GPU.
"""


class ThreadScheduler(Scheduler):
    """Run every operation that can run, on worker threads.

    There is one worker for each operation that can run, up to `MAX_WORKERS`. An operation that still waits for another occupies
    no worker, so workers never wait for each other. The submitting thread runs the null stream's operations.
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
        # `_idle` counts a worker until the worker has taken the lock again, so every ready operation has a worker of its own.
        wanted = len(self._ready) - spare
        if wanted > 0:
            self._work.notify(min(wanted, self._idle))
        while wanted > self._idle and self._workers < MAX_WORKERS and not self._closed:
            worker = Worker(target=self._run, name="handlepool-host-worker", daemon=True)
            self._workers += 1
            self._idle += 1
            try:
                worker.start()
            except BaseException as error:
                # If an interrupt came, the worker may have begun and may wait for the lock. This mark makes it end at once.
                worker.wanted = False
                self._workers -= 1
                self._idle -= 1
                if isinstance(error, RuntimeError):
                    # The system has no more threads. A waiting thread or an existing worker runs the operation.
                    return
                raise

    def _run(self) -> None:
        self._lock.acquire()
        if not getattr(threading.current_thread(), "wanted", True):
            self._lock.release()
            return
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
                self._running[operation] = None
                self._lock.release()
                try:
                    failure = self._call(operation)
                finally:
                    self._lock.acquire()
                # This worker takes the next ready operation itself, so `_wake` need not start another worker for it.
                self._finish(operation, failure, spare=1)
                # An idle worker must not keep the arrays of its last operation alive.
                del operation, failure
        finally:
            self._workers -= 1
            self._changed.notify_all()
            self._lock.release()

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        try:
            while not (awaited.done or taken):
                if awaited.claimed and not awaited.waits:
                    # Another thread may wait for the same operation, as `free` does. The cleared claim keeps that thread from
                    # running the operation, too.
                    awaited.claimed = False
                    self._running[awaited] = None
                    taken.append(awaited)
                elif self._ready and not self._workers:
                    # One call moves the operation between the lists, so that an interrupt cannot lose it.
                    taken.extend(map(deque.popleft, (self._ready,)))
                    self._running[taken[0]] = None
                else:
                    self._pause(purpose)
        except BaseException:
            self._disclaim(awaited)
            raise

    def close(self) -> None:
        """Let the workers end after their current operations.

        The interpreter's exit calls this method, because no worker may run while the interpreter is taken down.
        """
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


# A forked child has no workers, and a lock that a worker held at the fork stays locked. So the child forgets the parent's
# schedulers, and its exit waits for none of them.
os.register_at_fork(after_in_child=_open.clear)
