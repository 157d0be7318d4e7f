"""Streams, events, and the current device and stream of each thread.

The finalizer of a `Stream` destroys the stream. A finalizer may run in any thread at any moment, even while a scheduler's lock is
held. So this finalizer takes no lock (guarantee 10): it marks the stream's queue as dead, and appends the pointer to a deque.
"""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from handlepool.drivers.host.captures import Capture, Captures, HostGraph, Mark, Node
from handlepool.drivers.host.race_checker import Access
from handlepool.drivers.host.scheduler import NOTHING, QueuedOperation, Scheduler
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, ContractError

if TYPE_CHECKING:
    from handlepool.drivers.host.scheduler import Scheduler


class Stream:
    """A stream with the interface of CuPy's streams.

    Streams are equal by pointer, weakly referenceable, and accept free attributes. The last reference destroys the stream.

    Attributes
    ----------
    ptr : int
    device_id : int
        -1 for a default stream and for a pointer that another library owns.
    """

    def __init__(self, table: "StreamTable", queue: "Queue | None", pointer: int, device_id: int, owner: object) -> None:
        self.ptr = pointer
        self.device_id = device_id
        self._table = table
        self._queue = queue
        """The stream's queue if this object owns the stream, else None."""
        self._owner = owner

    # The default argument keeps `sys.is_finalizing`, because the name `sys` may be None when late finalizers run.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        queue = self._queue
        if queue is not None and not is_finalizing():
            self._table.retire(queue)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because the end of a copy would destroy the stream."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled; the end of the copy would destroy the stream. Make another stream"
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __eq__(self, other: object) -> bool:
        return self.ptr == other.ptr if isinstance(other, Stream) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __repr__(self) -> str:
        return f"<host Stream {self.ptr:#x} (device {self.device_id})>"

    def __enter__(self) -> "Stream":
        thread = self._table.thread
        self.use()
        thread.entered[thread.device].append(self)
        thread.entered_on.append(thread.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # As in CuPy, the stream that was last *entered* becomes current again, even if `use` made another stream current since
        # then.
        thread = self._table.thread
        device = thread.entered_on.pop()
        thread.entered[device].pop()
        previous = thread.entered[device][-1]
        thread.current[thread.device if previous.device_id == -1 else previous.device_id] = previous

    def is_owned_by(self, table: "StreamTable") -> bool:
        """Return whether ``table`` made this object for a stream of its own.

        The answer is False for a wrapper around a foreign pointer.
        """
        return self._table is table and (self._queue is not None or self is table.legacy or self is table.per_thread)

    def use(self) -> "Stream":
        """Make this stream current for this thread and the current device."""
        thread = self._table.thread
        if self.device_id not in (-1, thread.device):
            raise ContractError(
                f"{self!r} cannot be used while device {thread.device} is current; make the stream's device current first"
            )
        thread.current[thread.device] = self
        return self

    @property
    def done(self) -> bool:
        """Whether all work of the stream has run."""
        return self._table.is_done(self._table.resolve(self.ptr).tail)

    def synchronize(self) -> None:
        """Wait on the host until all work of the stream has run."""
        self._table.synchronize(self._table.resolve(self.ptr))

    def record(self, event: "Event | None" = None) -> "Event":
        """Record an event, by default a new event."""
        if event is None:
            event = self._table.event()
        self._table.record(event, self._table.resolve(self.ptr))
        return event

    def wait_event(self, event: "Event") -> None:
        """Let later work of this stream wait for the event."""
        self._table.wait(self._table.resolve(self.ptr), event)

    def is_capturing(self) -> bool:
        """Return whether the stream takes part in a capture."""
        return self._table.resolve(self.ptr).capture is not None

    def begin_capture(self, mode: str = "global") -> None:
        """Record later work of this stream instead of running it.

        The mode is ``global``, ``thread_local`` or ``relaxed``.
        """
        self._table.captures.begin(self._table.resolve(self.ptr), mode)

    def end_capture(self) -> HostGraph:
        """End the capture that began here, and return its graph."""
        return HostGraph(self._table, self._table.captures.end(self._table.resolve(self.ptr)))


class ThreadState(threading.local):
    """The state of a thread: current device, streams and allocator.

    Each thread gets its state at its first use.
    """

    def __init__(self, legacy: Stream, devices: int, scheduler: "Scheduler") -> None:
        self.token = object()
        """The thread's identity.

        No other thread ever gets the same identity. `threading.get_ident` reuses the number of a thread that has ended.
        """
        self.device = 0
        self.current = [legacy] * devices
        self.entered = [[legacy] for _ in range(devices)]
        """Streams of the open ``with`` statements of this thread, per device."""
        self.entered_on: list[int] = []
        self.own: list[Queue | None] = [None] * devices
        """Queues of the per-thread default stream, per device."""
        self.relaxed = 0
        self.allocator: Any = None
        self.host_data: Any = None
        """Callbacks ``(bring, read)`` of `Driver.watch_host_data`, or None.

        ``bring`` makes the arrays of `asarray`, and ``read`` receives each read of host memory.
        """
        scheduler.meet()


class Device:
    """Make a device current while entered, and restore the previous device."""

    __slots__ = ("_before", "_table", "id")

    def __init__(self, table: "StreamTable", ordinal: int) -> None:
        self.id = ordinal
        self._table = table
        self._before: list[int] = []

    def __enter__(self) -> "Device":
        before = self._table.thread.device
        self._table.set_device(self.id)
        self._before.append(before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._table.thread.device = self._before.pop()


_drivers = itertools.count(1)


class Queue:
    """The device side of a stream: an identity and its last operation."""

    __slots__ = ("alive", "capture", "default", "device", "frontier", "id", "pointer", "synchronous", "tail")

    def __init__(self, pointer: int, device: int, identity: int) -> None:
        self.pointer = pointer
        self.device = device
        self.id = identity
        self.alive = True
        self.default = pointer in (LEGACY_STREAM, PER_THREAD_STREAM)
        self.synchronous = pointer == LEGACY_STREAM
        """bool: a call on this stream returns after its work has run.

        Only the null stream is synchronous.
        """
        self.tail = NOTHING
        self.capture: Capture | None = None
        self.frontier: tuple[Node, ...] = ()

    def __repr__(self) -> str:
        gone = "" if self.alive else ", destroyed"
        return f"<stream {self.pointer:#x} of device {self.device}, id {self.id}{gone}>"


class Event:
    """A moment of a stream, as returned by `HostDriver.create_event`."""

    __slots__ = ("__weakref__", "destroyed", "device", "moment", "timing")

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.moment: QueuedOperation | Mark | None = None
        """The stream's last operation when the event was recorded, or None.

        A wait for the event keeps this operation, even if the event is recorded again later.
        """
        self.destroyed = False

    def __repr__(self) -> str:
        kinds = {QueuedOperation: "recorded", Mark: "captured"}
        state = "destroyed" if self.destroyed else kinds.get(type(self.moment), "new")
        return f"<event of device {self.device}, {state}>"


class Latch:
    """A block on a stream until any thread releases it."""

    def __init__(self, scheduler: Scheduler, operation: QueuedOperation) -> None:
        self._scheduler = scheduler
        self._operation = operation

    @property
    def passed(self) -> bool:
        """Whether the stream has passed the latch."""
        return self._operation.done

    def release(self) -> None:
        """Let the stream continue; a second release has no effect."""
        self._scheduler.release(self._operation)


class StreamTable:
    """The map from pointers to queues, and the operations on queues."""

    def __init__(self, devices: int, scheduler: Scheduler) -> None:
        self.devices = devices
        self.scheduler = scheduler
        self.legacy = Stream(self, None, LEGACY_STREAM, -1, None)
        self.per_thread = Stream(self, None, PER_THREAD_STREAM, -1, None)
        self.thread = ThreadState(self.legacy, devices, scheduler)
        self.captures = Captures(self.thread)
        self.watchers: list[Callable[[str], None]] = []
        """Listeners for work that is neither a launch nor the driver's own."""
        self._ids = itertools.count(1)
        self._null = [Queue(LEGACY_STREAM, device, next(self._ids)) for device in range(devices)]
        self._queues: dict[int, Queue] = {}
        self._retired: list[deque[int]] = [deque() for _ in range(devices)]
        # The base differs for each driver, so that a driver rejects the pointers of another driver.
        base = next(_drivers) << 40
        self._pointers = [itertools.count(base + (device << 32) + 0x1000, 0x100) for device in range(devices)]

    # Streams

    def create(self) -> Stream:
        """Return a stream of the current device.

        The stream gets the address of the stream that was destroyed last, because a GPU also reuses addresses.
        """
        device = self.thread.device
        try:
            pointer = self._retired[device].pop()
        except IndexError:
            pointer = next(self._pointers[device])
        queue = self._queues[pointer] = Queue(pointer, device, next(self._ids))
        return Stream(self, queue, pointer, device, None)

    def retire(self, queue: Queue) -> None:
        """Note that the last reference to a stream is gone.

        Finalizers call this method, so it takes no lock.
        """
        queue.alive = False
        self._retired[queue.device].append(queue.pointer)

    def alive(self) -> int:
        """Return the number of live streams that are not default streams."""
        return sum(queue.alive for queue in list(self._queues.values()))

    def current_queue(self) -> Queue:
        """Return the queue of this thread's current stream."""
        thread = self.thread
        return self.resolve(thread.current[thread.device].ptr)

    def resolve(self, pointer: int) -> Queue:
        """Return the queue that a pointer names for the calling thread.

        Raises
        ------
        ContractError
            For a pointer that names no live stream. On a GPU such a pointer causes a segmentation fault.
        """
        thread = self.thread
        # The pointer 1 is cudaStreamLegacy, a second name of the legacy default stream.
        if pointer == LEGACY_STREAM or pointer == 1:
            return self._null[thread.device]
        if pointer == PER_THREAD_STREAM:
            own = thread.own[thread.device]
            if own is None:
                own = thread.own[thread.device] = Queue(pointer, thread.device, next(self._ids))
            return own
        queue = self._queues.get(pointer)
        if queue is None or not queue.alive:
            past = f"{queue!r}" if queue is not None else "never created by this driver"
            raise ContractError(
                f"pointer {pointer:#x} names no live stream ({past}), and a GPU's driver would crash with a segmentation fault. "
                "Keep the stream alive as long as its pointer is used"
            )
        return queue

    def set_device(self, ordinal: int) -> None:
        """Make a device current for this thread."""
        if not 0 <= ordinal < self.devices:
            raise ArgumentError(
                f"device {ordinal} does not exist: the number of devices is {self.devices}, and device numbers begin at 0"
            )
        self.thread.device = ordinal

    # Work

    def give(self, queue: Queue, function: Callable[[], object], accesses: Sequence[Access] = (), label: str = "") -> None:
        """Queue an operation, or record it in the stream's capture."""
        if queue.device != self.thread.device:
            raise ContractError(
                f"{label or 'an operation'} was given to {queue!r} while device {self.thread.device} is current; make the "
                "stream's device current first"
            )
        if queue.capture is not None and self.captures.add(queue, function, accesses, label):
            return
        scheduler = self.scheduler
        operation = QueuedOperation(function, label=label, accesses=accesses, claimed=queue.synchronous and scheduler.inline)
        try:
            scheduler.submit(operation, queue)
            self._given(queue, operation)
        except BaseException:
            # After an error this thread does not run the operation that it claimed, so a worker must run it.
            scheduler.disclaim(operation)
            raise

    def _given(self, queue: Queue, operation: QueuedOperation) -> None:
        if queue.synchronous:
            self.scheduler.wait(operation, f"{operation.label or 'an operation'} on {queue!r}")
        else:
            self.scheduler.nudge()

    def latch(self, queue: Queue) -> Latch:
        """Block a queue until the latch is released.

        On the null stream, which is synchronous, the next call waits for that release.
        """
        self.captures.refuse(queue, "a latch")
        operation = QueuedOperation(label=f"latch on {queue!r}", held=True)
        self.scheduler.submit(operation, queue)
        return Latch(self.scheduler, operation)

    def synchronize(self, queue: Queue) -> None:
        """Wait on the host for all work of a queue."""
        self.captures.refuse(queue, "synchronisation with the host")
        self.wait_on_host(queue.tail, repr(queue))

    def wait_on_host(self, operation: QueuedOperation, purpose: str) -> None:
        """Return when an operation is done.

        For the race checker, all work that is queued later then runs after the operation.
        """
        try:
            self.scheduler.wait(operation, purpose)
        finally:
            # Even if the wait raises a failure of queued work, the host has waited for the operation. So the race checker must
            # note this wait.
            if self.scheduler.order is not None and operation.done:
                self.scheduler.order.waited(operation)

    def is_done(self, operation: QueuedOperation) -> bool:
        """Return whether an operation is done.

        If the answer is True, the race checker counts it as a wait for the operation.
        """
        # A caller may poll this method in a loop. So the adversarial scheduler, which has no threads, may run work here.
        self.scheduler.nudge()
        done = operation.done
        if done and self.scheduler.order is not None:
            self.scheduler.order.waited(operation)
        return done

    # Events

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event of the current device."""
        return Event(self.thread.device, timing)

    def record(self, event: Event, queue: Queue) -> None:
        """Let an event represent the work that a queue has so far."""
        self.check_event(event)
        if event.device != queue.device:
            raise ContractError(
                f"{event!r} cannot be recorded on {queue!r}, which is of another device; use a stream of the event's device"
            )
        if queue.capture is not None and (mark := self.captures.mark(queue)) is not None:
            event.moment = mark
        elif event.timing:
            operation = QueuedOperation(label="event")
            self.scheduler.submit(operation, queue)
            event.moment = operation
            if queue.synchronous:
                self.scheduler.wait(operation, f"an event on {queue!r}")
        else:
            event.moment = queue.tail

    def wait(self, queue: Queue, event: Event) -> None:
        """Let later work of a queue wait for an event.

        An event that was never recorded has no effect.
        """
        self.check_event(event)
        moment = event.moment
        if isinstance(moment, Mark):
            self.captures.join(queue, moment)
        elif moment is not None:
            self.captures.refuse(queue, f"a wait for work outside the capture ({event!r})")
            # The race checker's clocks must not depend on whether the event has passed already. So while the checker is on, even
            # a wait for a passed event is queued.
            if not moment.done or self.scheduler.order is not None:
                operation = QueuedOperation(label="wait for an event")
                self.scheduler.submit(operation, queue, (moment,))
                if queue.synchronous:
                    self.scheduler.wait(operation, f"an event that {queue!r} waits for")

    def check_event(self, event: Event) -> None:
        """Raise if an event was destroyed."""
        if event.destroyed:
            raise ContractError(f"{event!r} is used after it was destroyed; create another event")

    def elapsed(self, start: Event, end: Event) -> float:
        """Return the milliseconds between two timing events that have passed."""
        times = []
        for event in (start, end):
            operation = self.operation_of(event, "elapsed")
            # CUDA refuses these events as well, so code that passes this check passes on a GPU.
            if not event.timing or event.moment is None or not operation.done:
                raise ContractError(
                    f"elapsed: {event!r} is no timing event, was not recorded, or has not passed; create it with timing=True, "
                    "record it, and wait for it"
                )
            times.append(operation.time)
        return (times[1] - times[0]) * 1e3

    def operation_of(self, event: Event, call: str) -> QueuedOperation:
        """Return the operation of an event, for a call on the host."""
        self.check_event(event)
        if isinstance(event.moment, Mark):
            event.moment.capture.spoil(f"{call} of an event that was recorded in the capture")
            raise ContractError(
                f"{call} of {event!r}: the event was recorded in a capture, so it marks no work that runs; record the event "
                "outside of the capture"
            )
        return event.moment or NOTHING

    # Graphs

    def launch(self, graph: HostGraph, stream: Stream | None) -> None:
        """Queue a recorded graph on a stream, by default the current stream."""
        stream = stream or self.thread.current[self.thread.device]
        self.launch_on(graph, self.resolve(stream.ptr))

    def launch_on(self, graph: HostGraph, queue: Queue) -> None:
        """Queue a recorded graph as one entry of the queue.

        The edges of the graph alone order its nodes.
        """
        if queue.capture is not None and self.captures.embed(queue, graph.nodes):
            return
        scheduler = self.scheduler
        # A graph never runs beside itself, so a launch depends on the end of the previous launch.
        start = QueuedOperation(label="graph launch")
        scheduler.submit(start, queue, (graph.last,))
        made: dict[Node, QueuedOperation] = {}
        for node in graph.nodes:
            operation = made[node] = QueuedOperation(node.function, label=node.label, accesses=node.accesses)
            lane = 0
            if scheduler.order is not None and (lane := graph.lanes.get(node.lane, 0)) == 0:
                lane = graph.lanes[node.lane] = scheduler.order.component()
            scheduler.submit(operation, None, [made[earlier] for earlier in node.after] or (start,), lane)
        graph.last = QueuedOperation(label="graph end")
        scheduler.submit(graph.last, queue, tuple(made.values()))
        self._given(queue, graph.last)
