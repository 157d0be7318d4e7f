"""Stream objects, and what is current for a thread.

A stream is destroyed by a finaliser, which may run in any thread at any moment, also inside the lock of a scheduler: it marks
the stream's queue and appends to a deque, and takes no lock (G10).
"""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from handlepool.drivers.host.captures import HostGraph
from handlepool.errors import ContractError

if TYPE_CHECKING:
    from handlepool.drivers.host.operations import Scheduler
    from handlepool.drivers.host.queues import Event, Queue, StreamTable


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
        return self._table.resolve(self.ptr).tail.done

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
