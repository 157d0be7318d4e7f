"""Controls that the host driver offers beside the protocol.

They are custom work on its streams, latches, counts and faults. Tests depend on them. No GPU has them, so no part of the
package above the drivers may use them.
"""

from collections.abc import Callable, Container, Sequence

from handlepool.drivers.host.array import Array
from handlepool.drivers.host.contract import CallLog, HandleUse, HostHandle
from handlepool.drivers.host.copies import enqueue
from handlepool.drivers.host.memory import Memory
from handlepool.drivers.host.race_checker import Order
from handlepool.drivers.host.streams import Event, Latch, Stream, StreamTable

_ASKS = ("current_device", "current_stream", "owns_stream", "wrap_stream", "set_device", "device_count", "array_device")
"""Calls that ask the host alone, and succeed without a device."""


class Controls:
    """The part of `HostDriver` beside the protocol.

    Attributes
    ----------
    calls : collections.Counter
        How often each method of the protocol was called, by its name, and ``launch`` of an executable; clear it at will.
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
        """Return the counts of objects that are made and not destroyed.

        The objects are handles, events, streams and bytes of scratch, made through the protocol.
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
        """The checker of the order of accesses, or None while off.

        ``order.found`` lists its findings.
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
            Called as ``function(*writes, *reads)``, as NumPy's ``copyto``, with arrays over the raw memory of the given arrays.
            Pass all arrays as arguments: an array in the function's closure would stay alive until the work has run, unlike on a
            GPU.
        writes, reads : sequence of array
        label : str
            Name of the work in errors.
        """
        enqueue(self._streams, self._streams.resolve(pointer), function, writes, reads, label)

    def use_handle(self, handle: HostHandle, function: Callable[..., object], *arrays: Array, label: str = "use_handle") -> None:
        """Queue ``function(*arrays)`` on a handle's stream.

        The call makes the checks of a cuDNN call with the handle.
        """
        use = HandleUse(self._streams, handle, label, self.checks)
        with use:
            enqueue(self._streams, use.bound_queue(), function, arrays, (), label)

    def latch(self, pointer: int) -> Latch:
        """Block a stream at this place until the latch is released."""
        return self._streams.latch(self._streams.resolve(pointer))

    def fail_at(self, k: int, method: str | None = None, error: BaseException | None = None, spared: Container[str] = ()) -> None:
        """Make the k-th call from now raise, once.

        The call raises before it has any effect.

        Parameters
        ----------
        k : int
            From 1; 0 cancels the failure.
        method : str, optional
            Count calls of this method only. By default every call that `calls` counts.
        error : BaseException, optional
            The error to raise; by default a RuntimeError that says so.
        spared : container of str
            Methods that are not counted.
        """
        self._log.fail_at(k, method, error, spared)

    def lose_context(self, error: Exception | None = None) -> Exception:
        """Make every later call fail, as after an illegal address.

        Calls that ask for the current device and stream still succeed.
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

        This simulates the loss of a GPU. Work that the device has already still runs, and other devices continue.
        ``fail_at(0)`` restores the device.
        """
        thread = self._thread

        def fault(called: str) -> None:
            if thread.device == device and called not in _ASKS:
                raise RuntimeError(f"device {device} was taken away")

        self._log.fail_by(fault)
