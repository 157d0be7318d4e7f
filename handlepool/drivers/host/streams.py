"""Stream objects, and what is current for a thread.

A stream is destroyed by a finaliser, which may run in any thread at any moment, also inside the lock of a scheduler: it marks
the stream's queue and appends to a deque, and takes no lock (G10).
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
    """A stream as CuPy's: equal by pointer, weakly referenceable, with free attributes, destroyed with its last reference.

    Attributes
    ----------
    ptr : int
    device_id : int
        -1 for a default stream and for a pointer that somebody else owns.
    """

    def __init__(self, table: "StreamTable", queue: "Queue | None", pointer: int, device_id: int, owner: object) -> None:
        self.ptr = pointer
        self.device_id = device_id
        self._table = table
        self._queue = queue
        """Set if the stream's life is this object's."""
        self._owner = owner

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` itself is None by then
        queue = self._queue
        if queue is not None and not is_finalizing():
            self._table.retire(queue)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied."""
        raise TypeError(f"{self!r} cannot be copied or pickled; the end of the copy would be its own")

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
        # As CuPy has it: what is current again is what was *entered* before, whatever `use` made current meanwhile.
        thread = self._table.thread
        device = thread.entered_on.pop()
        thread.entered[device].pop()
        previous = thread.entered[device][-1]
        thread.current[thread.device if previous.device_id == -1 else previous.device_id] = previous

    def is_owned_by(self, table: "StreamTable") -> bool:
        """Whether this is the object of one of the table's streams, and not somebody's wrapper around a pointer."""
        return self._table is table and (self._queue is not None or self is table.legacy or self is table.per_thread)

    def use(self) -> "Stream":
        """Make it the current stream of this thread and of the current device."""
        thread = self._table.thread
        if self.device_id not in (-1, thread.device):
            raise ContractError(f"{self!r} cannot be used while device {thread.device} is current")
        thread.current[thread.device] = self
        return self

    @property
    def done(self) -> bool:
        """Whether all that it was given has run."""
        return self._table.is_done(self._table.resolve(self.ptr).tail)

    def synchronize(self) -> None:
        """Wait on the host until all that it was given has run."""
        self._table.synchronize(self._table.resolve(self.ptr))

    def record(self, event: "Event | None" = None) -> "Event":
        """Record an event, or a new one."""
        if event is None:
            event = self._table.event()
        self._table.record(event, self._table.resolve(self.ptr))
        return event

    def wait_event(self, event: "Event") -> None:
        """Run what comes from now on after the event."""
        self._table.wait(self._table.resolve(self.ptr), event)

    def is_capturing(self) -> bool:
        """Whether it takes part in a capture."""
        return self._table.resolve(self.ptr).capture is not None

    def begin_capture(self, mode: str = "global") -> None:
        """Record what it is given from now on instead of running it; mode: global, thread_local or relaxed."""
        self._table.captures.begin(self._table.resolve(self.ptr), mode)

    def end_capture(self) -> HostGraph:
        """End the capture that began here, and return what was recorded."""
        return HostGraph(self._table, self._table.captures.end(self._table.resolve(self.ptr)))


class ThreadState(threading.local):
    """What is current for a thread. Made for each thread at its first use."""

    def __init__(self, legacy: Stream, devices: int, scheduler: "Scheduler") -> None:
        self.token = object()
        """The thread's identity: unlike `threading.get_ident` it is never given to another."""
        self.device = 0
        self.current = [legacy] * devices
        self.entered = [[legacy] for _ in range(devices)]
        """Of each device, the streams of the ``with`` statements that this thread is in."""
        self.entered_on: list[int] = []
        self.own: list[Queue | None] = [None] * devices
        """The queues of the per-thread default stream."""
        self.relaxed = 0
        self.allocator: Any = None
        self.host_data: Any = None
        """Of `Driver.watch_host_data`: the makers of `asarray`'s arrays, and the listener for reads of host memory."""
        scheduler.meet()


class Device:
    """Makes a device current while entered, and the one before afterwards."""

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
    """What a stream is to the device: an identity, and the last operation that it was given."""

    __slots__ = ("alive", "capture", "default", "device", "frontier", "id", "pointer", "synchronous", "tail")

    def __init__(self, pointer: int, device: int, identity: int) -> None:
        self.pointer = pointer
        self.device = device
        self.id = identity
        self.alive = True
        self.default = pointer in (LEGACY_STREAM, PER_THREAD_STREAM)
        self.synchronous = pointer == LEGACY_STREAM
        """The null stream alone has run what it was given when the call returns."""
        self.tail = NOTHING
        self.capture: Capture | None = None
        self.frontier: tuple[Node, ...] = ()

    def __repr__(self) -> str:
        gone = "" if self.alive else ", destroyed"
        return f"<stream {self.pointer:#x} of device {self.device}, id {self.id}{gone}>"


class Event:
    """A moment of a stream, as `HostDriver.create_event` returns it."""

    __slots__ = ("__weakref__", "destroyed", "device", "moment", "timing")

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.moment: QueuedOperation | Mark | None = None
        """What was last in the stream, or in the capture, when it was recorded; a wait keeps that, whatever is recorded later."""
        self.destroyed = False

    def __repr__(self) -> str:
        kinds = {QueuedOperation: "recorded", Mark: "captured"}
        state = "destroyed" if self.destroyed else kinds.get(type(self.moment), "new")
        return f"<event of device {self.device}, {state}>"


class Latch:
    """Blocks a stream at one place until it is released, by any thread."""

    def __init__(self, scheduler: Scheduler, operation: QueuedOperation) -> None:
        self._scheduler = scheduler
        self._operation = operation

    @property
    def passed(self) -> bool:
        """Whether the stream has come to the latch and passed it."""
        return self._operation.done

    def release(self) -> None:
        """Let the stream go on; harmless when that was done already."""
        self._scheduler.release(self._operation)


class StreamTable:
    """Pointers to queues, and all that is done with queues."""

    def __init__(self, devices: int, scheduler: Scheduler) -> None:
        self.devices = devices
        self.scheduler = scheduler
        self.legacy = Stream(self, None, LEGACY_STREAM, -1, None)
        self.per_thread = Stream(self, None, PER_THREAD_STREAM, -1, None)
        self.thread = ThreadState(self.legacy, devices, scheduler)
        self.captures = Captures(self.thread)
        self.watchers: list[Callable[[str], None]] = []
        """Told of work that is no launch and none of the driver's own."""
        self._ids = itertools.count(1)
        self._null = [Queue(LEGACY_STREAM, device, next(self._ids)) for device in range(devices)]
        self._queues: dict[int, Queue] = {}
        self._retired: list[deque[int]] = [deque() for _ in range(devices)]
        base = next(_drivers) << 40  # another driver's pointers are unknown to this one
        self._pointers = [itertools.count(base + (device << 32) + 0x1000, 0x100) for device in range(devices)]

    # Streams

    def create(self) -> Stream:
        """Return a stream of the current device, at the address of the one that was destroyed last."""
        device = self.thread.device
        try:
            pointer = self._retired[device].pop()
        except IndexError:
            pointer = next(self._pointers[device])
        queue = self._queues[pointer] = Queue(pointer, device, next(self._ids))
        return Stream(self, queue, pointer, device, None)

    def retire(self, queue: Queue) -> None:
        """Note that a stream's last reference has gone. Runs in finalisers: no lock."""
        queue.alive = False
        self._retired[queue.device].append(queue.pointer)

    def alive(self) -> int:
        """How many streams there are beside the default streams."""
        return sum(queue.alive for queue in list(self._queues.values()))

    def resolve(self, pointer: int) -> Queue:
        """Return the queue that a pointer names now, for the calling thread.

        Raises
        ------
        ContractError
            For a pointer that names no live stream. On a GPU that is a segmentation fault.
        """
        thread = self.thread
        if pointer == LEGACY_STREAM or pointer == 1:  # 1 is cudaStreamLegacy
            return self._null[thread.device]
        if pointer == PER_THREAD_STREAM:
            own = thread.own[thread.device]
            if own is None:
                own = thread.own[thread.device] = Queue(pointer, thread.device, next(self._ids))
            return own
        queue = self._queues.get(pointer)
        if queue is None or not queue.alive:
            past = f"{queue!r}" if queue is not None else "never created by this driver"
            raise ContractError(f"pointer {pointer:#x} names no live stream ({past}): on a GPU, a segmentation fault")
        return queue

    def set_device(self, ordinal: int) -> None:
        """Make a device current."""
        if not 0 <= ordinal < self.devices:
            raise ArgumentError(f"device {ordinal} does not exist: this driver has {self.devices}")
        self.thread.device = ordinal

    # Work

    def give(self, queue: Queue, function: Callable[[], object], accesses: Sequence[Access] = (), label: str = "") -> None:
        """Queue an operation: on a capture if the stream is in one."""
        if queue.device != self.thread.device:
            raise ContractError(f"{label or 'an operation'} was given to {queue!r} while device {self.thread.device} is current")
        if queue.capture is not None and self.captures.add(queue, function, accesses, label):
            return
        scheduler = self.scheduler
        operation = QueuedOperation(function, label=label, accesses=accesses, claimed=queue.synchronous and scheduler.inline)
        try:
            scheduler.submit(operation, queue)
            self._given(queue, operation)
        except BaseException:
            scheduler.disclaim(operation)
            raise

    def _given(self, queue: Queue, operation: QueuedOperation) -> None:
        if queue.synchronous:
            self.scheduler.wait(operation, f"{operation.label or 'an operation'} on {queue!r}")
        else:
            self.scheduler.nudge()

    def latch(self, queue: Queue) -> Latch:
        """Block a queue; the null stream, too, and there the next call waits."""
        self.captures.refuse(queue, "a latch")
        operation = QueuedOperation(label=f"latch on {queue!r}", held=True)
        self.scheduler.submit(operation, queue)
        return Latch(self.scheduler, operation)

    def synchronize(self, queue: Queue) -> None:
        """Wait on the host for all that a queue was given."""
        self.captures.refuse(queue, "synchronisation with the host")
        self.wait_on_host(queue.tail, repr(queue))

    def wait_on_host(self, operation: QueuedOperation, purpose: str) -> None:
        """Return when an operation is done; whatever is queued from now on runs after it."""
        try:
            self.scheduler.wait(operation, purpose)
        finally:  # also where it raises what failed in queued work: the host has waited all the same
            if self.scheduler.order is not None and operation.done:
                self.scheduler.order.waited(operation)

    def is_done(self, operation: QueuedOperation) -> bool:
        """Whether an operation is done; who sees that it is has waited for it."""
        self.scheduler.nudge()  # who polls must see progress
        done = operation.done
        if done and self.scheduler.order is not None:
            self.scheduler.order.waited(operation)
        return done

    # Events

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event of the current device."""
        return Event(self.thread.device, timing)

    def record(self, event: Event, queue: Queue) -> None:
        """Let an event stand for what a queue was given so far."""
        self.check_event(event)
        if event.device != queue.device:
            raise ContractError(f"{event!r} was recorded on {queue!r}: an event is recorded on its own device")
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
        """Let what a queue is given from now on run after an event; nothing, for one that was never recorded."""
        self.check_event(event)
        moment = event.moment
        if isinstance(moment, Mark):
            self.captures.join(queue, moment)
        elif moment is not None:
            self.captures.refuse(queue, f"a wait for work outside the capture ({event!r})")
            if not moment.done or self.scheduler.order is not None:  # the checker's clocks depend on no schedule
                operation = QueuedOperation(label="wait for an event")
                self.scheduler.submit(operation, queue, (moment,))
                if queue.synchronous:
                    self.scheduler.wait(operation, f"an event that {queue!r} waits for")

    def check_event(self, event: Event) -> None:
        """Raise for an event that was destroyed."""
        if event.destroyed:
            raise ContractError(f"{event!r} is used after it was destroyed")

    def operation_of(self, event: Event, call: str) -> QueuedOperation:
        """Return what an event stands for, for a call that asks on the host."""
        self.check_event(event)
        if isinstance(event.moment, Mark):
            event.moment.capture.spoil(f"{call} of an event that was recorded in it")
            raise ContractError(f"{call} of {event!r}: it was recorded in a capture and stands for no work that runs")
        return event.moment or NOTHING

    # Graphs

    def launch(self, graph: HostGraph, stream: Stream | None) -> None:
        """Queue a recorded graph on a stream, the current one by default."""
        stream = stream or self.thread.current[self.thread.device]
        self.launch_on(graph, self.resolve(stream.ptr))

    def launch_on(self, graph: HostGraph, queue: Queue) -> None:
        """Queue a recorded graph: its nodes in the order of their own edges only, as one entry of the queue."""
        if queue.capture is not None and self.captures.embed(queue, graph.nodes):
            return
        scheduler = self.scheduler
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
