"""Controls of the host driver that are no part of the protocol.

Tests use these controls: work of their own on the driver's streams, latches, counts of calls, and faults. A GPU has no such
controls, so no part of the package above the drivers may use them.
"""

from collections.abc import Callable, Container, Sequence

from handlepool.drivers.host.array import Array
from handlepool.drivers.host.contract import CallLog, HandleUse, HostHandle
from handlepool.drivers.host.copies import enqueue
from handlepool.drivers.host.memory import Memory
from handlepool.drivers.host.race_checker import Order
from handlepool.drivers.host.streams import Event, Latch, Stream, StreamTable

_ASKS = ("current_device", "current_stream", "owns_stream", "wrap_stream", "set_device", "device_count", "array_device")
"""Calls that need no device, and succeed after a device is lost."""


class Controls:
    """Methods of `HostDriver` with which tests queue work and inject faults.

    The methods are no part of the driver protocol.

    Attributes
    ----------
    calls : collections.Counter
        How often each method of the protocol, and ``launch`` of an executable, was called, by the method's name. A test may clear
        the counter.
    checks : bool
        Whether the use of handles is checked.
    """

    def __init__(self, streams: StreamTable, memory: Memory, checks: bool) -> None:
        self.checks = checks
        self._memory = memory
        self._streams = streams
        self._thread = streams.thread
        self._handles_alive: set[HostHandle] = set()
        self._events_alive: set[Event] = set()
        self._log = CallLog()
        self._note = self._log.note
        self.calls = self._log.calls
        self.lost: Exception | None = None

    def alive(self) -> dict[str, int]:
        """Return how many objects of each kind exist now.

        The kinds are handles, events, streams and bytes of scratch, as made through the protocol and not yet destroyed.
        """
        return {
            "handles": len(self._handles_alive),
            "events": len(self._events_alive),
            "streams": self._streams.alive(),
            "scratch_bytes": self._memory.scratch_bytes(),
        }

    def captures_under_way(self) -> int:
        """Return the number of captures under way."""
        return len(self._streams.captures.active)

    @property
    def order(self) -> Order | None:
        """The race checker, or None while accesses are not checked.

        ``order.found`` lists the conflicts that the checker has found.
        """
        return self._streams.scheduler.order

    @property
    def legacy_stream(self) -> Stream:
        """The object of the legacy default stream."""
        return self._streams.legacy

    @property
    def per_thread_stream(self) -> Stream:
        """The object of the per-thread default stream."""
        return self._streams.per_thread

    def enqueue(
        self,
        pointer: int,
        function: Callable[..., object],
        *,
        writes: Sequence[Array] = (),
        reads: Sequence[Array] = (),
        label: str = "",
    ) -> None:
        """Queue a function on a stream of the current device.

        Parameters
        ----------
        pointer : int
        function : callable
            Called as ``function(*writes, *reads)``, like NumPy's ``copyto``. It gets the raw arrays of ``writes`` and ``reads``.
            Pass all arrays by these two arguments. An array in the function's closure would stay alive until the work has run,
            and on a GPU it would not.
        writes, reads : sequence of array
        label : str
            Name of the work in errors.
        """
        enqueue(self._streams, self._streams.resolve(pointer), function, writes, reads, label)

    def use_handle(self, handle: HostHandle, function: Callable[..., object], *arrays: Array, label: str = "use_handle") -> None:
        """Queue ``function(*arrays)`` on a handle's stream.

        The driver checks the handle as for a launch with it.
        """
        use = HandleUse(self._streams, handle, label, self.checks)
        with use:
            enqueue(self._streams, use.bound_queue(), function, arrays, (), label)

    def latch(self, pointer: int) -> Latch:
        """Block the stream's later work until the latch is released."""
        return self._streams.latch(self._streams.resolve(pointer))

    def fail_at(self, k: int, method: str | None = None, error: BaseException | None = None, spared: Container[str] = ()) -> None:
        """Make the k-th call from now raise, once.

        The call raises before it has any effect.

        Parameters
        ----------
        k : int
            The number of the failing call, counted from 1. 0 cancels the failure.
        method : str, optional
            The name of the method whose calls are counted. By default, every call that `calls` counts is counted.
        error : BaseException, optional
            The error to raise; by default a RuntimeError that names the call.
        spared : container of str
            Names of methods whose calls are not counted.
        """
        self._log.fail_at(k, method, error, spared)

    def lose_context(self, error: Exception | None = None) -> Exception:
        """Make every later call fail, as after an illegal memory access.

        Calls that need no device, such as ``current_device``, still succeed. Return the error that the calls raise.
        """
        # The same error object is raised each time, so that `context_lost` recognises it.
        lost = self.lost = error or RuntimeError("an illegal memory access was encountered")

        def fault(called: str) -> None:
            if called not in _ASKS:
                raise lost

        self._log.fail_by(fault)
        return lost

    def lose_device(self, device: int) -> None:
        """Make later calls fail while a device is current.

        The method simulates the loss of a GPU. Work that was queued on the device earlier still runs, and other devices continue.
        ``fail_at(0)`` restores the device.
        """
        thread = self._thread

        def fault(called: str) -> None:
            if thread.device == device and called not in _ASKS:
                raise RuntimeError(f"device {device} was taken away")

        self._log.fail_by(fault)
