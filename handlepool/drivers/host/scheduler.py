"""Which operation runs next, and on which thread.

`ThreadScheduler` runs operations on worker threads: two streams overlap for real. `AdversarialScheduler` has no thread and picks
any operation that can run, by a seed: whatever order the program failed to ask for, it will not get, reproducibly.

Python raises an interrupt after any call, in the main thread. The interrupt ends a wait of the program, and loses no operation:
it is put back where it was taken and not begun, and done where it was begun. All steps under the lock can be made again:
`Scheduler._pending` has an operation until all that follows from it is settled, and the next thread goes on with that.
"""

import atexit
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from handlepool.drivers.host.race_checker import Access, Clock, Order
from handlepool.errors import ContractError

PATIENCE_SECONDS = 10.0
"""How long a wait that nothing queued can satisfy is held for another thread that may yet release a latch."""


class Line(Protocol):
    """What keeps operations in order: it remembers the last."""

    id: int
    tail: "QueuedOperation"


NO_CLOCK: Clock = {}


class QueuedOperation:
    """One entry of a stream. Without a function it is a marker, which is done when what it waits for is done."""

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
        """What surely runs before it; see `ordering`."""
        self.claimed = claimed
        """The thread that submitted it will run it, and no worker."""
        self.waits: set[QueuedOperation] = {self} if held else set()
        """The operations that it still waits for; itself stands for the release of a latch."""
        self.dependents: list[QueuedOperation] = []
        self.queued = False
        """A scheduler has it; until then nothing comes of it."""
        self.offered = False
        """Whether the operation is, or was, among those that can run."""
        self.begun = False
        """Its function was called."""
        self.done = False
        self.time = 0.0
        """When it was done, by `time.perf_counter`."""


NOTHING = QueuedOperation()
"""An operation that was done before the first: the tail of a stream that was given nothing."""
NOTHING.done = NOTHING.queued = True


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
        self._ready: deque[QueuedOperation] = deque()  # what can run and nobody runs yet
        self._running: dict[QueuedOperation, None] = {}
        # Operations that may wait for nothing more, or whose dependents may not. To look at one twice does no harm.
        self._pending: deque[QueuedOperation] = deque()
        # Whether threads were told of all that was settled.
        self._told = True
        self._errors: list[BaseException] = []
        self._latches: dict[QueuedOperation, None] = {}
        self._users: dict[QueuedOperation, None] = {}
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

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        """List the operations that a waiting thread must run itself; none when its operation is done. The lock is held."""
        raise NotImplementedError

    # What they share

    def meet(self) -> None:
        """Note that the calling thread uses the driver."""
        self._strangers.discard(threading.current_thread())

    def submit(self, operation: QueuedOperation, line: Line | None, after: Sequence[QueuedOperation] = (), lane: int = 0) -> None:
        """Queue an operation at the end of a line (or on none), to run after some others as well.

        ``lane`` is the clock's component of an operation on no line.
        """
        with self._lock:
            if line is not None:
                after = (line.tail, *after)
            if self.order is not None:
                place = (lane, "a recorded graph") if line is None else (line.id, repr(line))
                self.order.given(operation, *place, after)
            held = operation in operation.waits
            for earlier in after:
                # One that is not queued never is: an interrupt came before.
                if earlier.queued and not earlier.done:
                    operation.waits.add(earlier)
                    earlier.dependents.append(operation)
            self._pending.append(operation)
            # No call from here to the last of these, after which an interrupt could come: all of it is queued, or nothing.
            operation.queued = True
            if line is not None:
                line.tail = operation
            if held:
                self._latches[operation] = None
            if operation.accesses:
                self._users[operation] = None
            self._settle()

    def disclaim(self, operation: QueuedOperation) -> None:
        """Let a worker run an operation that the calling thread was to run, or all that is queued behind it would be stuck."""
        with self._lock:
            self._disclaim(operation)

    def _disclaim(self, operation: QueuedOperation) -> None:
        if operation.claimed:
            operation.claimed = False
            self._pending.append(operation)
            self._settle()

    def release(self, operation: QueuedOperation) -> None:
        """Let a held operation go; harmless when that was done already."""
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
        """Return the queued operations that write what is accessed, or access what is written."""
        with self._lock:
            return [
                operation
                for operation in self._users
                if any(mine.meets(theirs) for theirs in operation.accesses for mine in accesses)
            ]

    def nudge(self) -> None:
        """Mark a moment at which queued work may run, or not."""

    def wait(self, operation: QueuedOperation, purpose: str) -> None:
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

    def reach(self, operation: QueuedOperation, purpose: str) -> None:
        """Return when an operation is done, as `wait` does, and leave what failed to the next `wait`."""
        label = getattr(self._inside, "operation", None)
        if label is not None:
            raise ContractError(f"the queued operation {label!r} waits for {purpose}: queued work must not wait for streams")
        while self._run_one(partial(self._take, operation, purpose)):
            pass

    def _settle(self, spare: int = 0) -> None:
        """Offer what waits for nothing more or, if it has no function (left), go on with what waits for it. The lock is held."""
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
                    # No call in between.
                    operation.offered = True
                    self._ready.append(operation)
            pending.popleft()
        if not self._told:
            self._changed.notify_all()
            self._wake(spare)
            self._told = True

    def _run_one(self, take: Callable[[list[QueuedOperation]], None]) -> bool:
        """Run the operations taken, outside the lock; return whether there were any."""
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
        """Let another thread run what this one took, or, where it has begun, go on with what waits for it."""
        with self._lock:
            if operation.begun:
                self._finish(operation, None)
                return
            self._running.pop(operation, None)
            operation.offered = False
            self._pending.append(operation)
            self._settle()

    def _call(self, operation: QueuedOperation) -> BaseException | None:
        """Call an operation's function, and return what it raised; an interrupt of a thread that waits goes straight on."""
        function: Any = operation.function
        outer = getattr(self._inside, "operation", None)
        self._inside.operation = operation.label
        try:
            for access in operation.accesses:
                access.block.check_live(operation.label)
            # No call in between.
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
                # The references of an operation end here, before this thread takes the lock.
                operation.function = function = None
        return None

    def _finish(self, operation: QueuedOperation, failure: BaseException | None, spare: int = 0) -> None:
        """Go on with what waits for an operation that has run. The lock is held; ``spare`` if the thread will take another."""
        if failure is not None:
            self._errors.append(failure)
        operation.function = None
        operation.accesses = ()
        self._users.pop(operation, None)
        self._running.pop(operation, None)
        self._pending.append(operation)
        self._settle(spare)

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

    wanted = True
    """False where its start was interrupted, and so it was not counted."""


def _descend(frames: int) -> None:
    """Raise RecursionError where so many calls more would, and nothing is lost by it yet."""
    if frames:
        _descend(frames - 1)


HEADROOM = 60
"""Frames that a thread has free before it takes an operation, for its own steps and for those of most operations."""


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
            except BaseException as error:
                # After an interrupt it may have begun, and wait for the lock.
                worker.wanted = False
                self._workers -= 1
                self._idle -= 1
                if isinstance(error, RuntimeError):
                    # The system has no more threads: what waits runs the operation, or a worker that is there.
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
                self._finish(operation, failure, spare=1)
                del operation, failure
        finally:
            self._workers -= 1
            self._changed.notify_all()
            self._lock.release()

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        try:
            while not (awaited.done or taken):
                if awaited.claimed and not awaited.waits:
                    # Another thread may wait for it, too, as `free` does: one of them runs it.
                    awaited.claimed = False
                    self._running[awaited] = None
                    taken.append(awaited)
                elif self._ready and not self._workers:
                    taken.extend(map(deque.popleft, (self._ready,)))
                    self._running[taken[0]] = None
                else:
                    self._pause(purpose)
        except BaseException:
            self._disclaim(awaited)
            raise

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

    def _take(self, awaited: QueuedOperation, purpose: str, taken: list[QueuedOperation]) -> None:
        while not (awaited.done or taken):
            if self._ready:
                self._pick(taken)
            else:
                self._pause(purpose)

    def nudge(self) -> None:
        """As `Scheduler.nudge`."""
        while self._ready and self._run_one(self._stray):
            pass

    def _stray(self, taken: list[QueuedOperation]) -> None:
        """Put an operation to run for no reason into a list, or none. The lock is held."""
        if self._ready and self._random.random() < EAGERNESS:
            self._pick(taken)

    def _pick(self, taken: list[QueuedOperation]) -> None:
        index = self._random.randrange(len(self._ready))
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        # By one call, or an interrupt between two could lose it.
        taken.extend(map(deque.pop, (self._ready,)))
        self._running[taken[0]] = None


def make(name: str, seed: int) -> Scheduler | None:
    """Return a scheduler by its name; None for a name that no scheduler has."""
    makers: dict[str, Callable[[], Scheduler]] = {
        "threads": ThreadScheduler,
        "adversarial": lambda: AdversarialScheduler(seed),
    }
    return makers[name]() if name in makers else None
