"""Copy arrays of the host driver, in the order of streams."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from handlepool._util.names import shown
from handlepool.drivers.host.array import Array, HostArray, raw_view, work_of
from handlepool.drivers.host.array_work import ArrayWork
from handlepool.drivers.host.memory import accesses
from handlepool.drivers.host.race_checker import Access
from handlepool.drivers.host.streams import Queue, StreamTable
from handlepool.drivers.host.sums import HostSums
from handlepool.errors import ContractError
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import one_run


def enqueue(
    streams: StreamTable,
    queue: Queue,
    function: Callable[..., object],
    writes: Sequence[Array],
    reads: Sequence[Array],
    label: str,
) -> None:
    """Queue a function of the raw arrays of ``writes`` and ``reads``."""
    written = [raw_view(array) for array in writes]
    read = [raw_view(array) for array in reads]
    raw = [view for view, _ in (*written, *read)]
    # The driver frees memory only after its queued accesses have run, and the race checker compares the accesses.
    touched = [*accesses(written, writes=True), *accesses(read, writes=False)]
    # A listener may remove itself during the loop, so the loop runs over a copy.
    for report in streams.watchers[:]:
        report(label or getattr(function, "__name__", "work"))
    streams.give(queue, lambda: function(*raw), touched, label)


class CopyWork:
    """Copy and read arrays on a driver's streams."""

    def __init__(self, streams: StreamTable, work: ArrayWork) -> None:
        self._streams = streams
        self._work = work

    def queue(self, queue: Queue, target: Array, source: Array, label: str) -> None:
        """Queue a copy."""
        enqueue(self._streams, queue, np.copyto, (target,), (source,), label)

    def between(self, target: Array, source: Array) -> None:
        """Copy ``source`` to ``target`` on the current stream.

        Either array may be NumPy's.
        """
        queue = self._streams.current_queue()
        if isinstance(source, np.ndarray) and not isinstance(source, HostArray) and queue.capture is None:
            # The caller may overwrite NumPy's memory as soon as this call returns, so the work reads a copy of its values.
            source = np.array(source, order="K")
        self.queue(queue, target, source, "copy")
        # Code that reads NumPy's memory cannot wait for a stream, so this call returns after the copy.
        if raw_view(target)[1] is None and queue.capture is None:
            self._streams.wait_on_host(queue.tail, "a copy to NumPy's memory")

    def to_device(self, values: Any) -> HostArray:
        """Return a copy on the current device, in the same layout."""
        # The caller may overwrite NumPy's values, so they are copied now. Streams order the accesses to an array of this driver,
        # so that array is read later.
        ours = isinstance(values, HostArray) and work_of(values) is self._work
        source = values if ours else np.array(values, order="K")

        def copy() -> HostArray:
            array = self._work.like(source.shape, source.dtype, raw_view(source)[0])
            self.queue(self._streams.current_queue(), array, source, "copy to the device")
            return array

        watched = self._streams.thread.host_data
        return copy() if ours or watched is None else watched[0](source, copy)

    def from_host(self, target: Array, values: np.ndarray[Any, Any], queue: Queue) -> object:
        """Queue a copy of ``values`` to ``target``.

        Return the NumPy array that the queued work reads.
        """
        # The caller may overwrite ``values`` before the work runs, so the work reads a copy of ``values``.
        read = np.array(values)
        self.queue(queue, target, read, "copy from the host")
        return read

    def onto_host(self, array: Array, queue: Queue) -> np.ndarray[Any, Any]:
        """Queue a copy into a new NumPy array, and return it."""
        # The array is returned before the copy has run. The caller must synchronise before it reads the array.
        host = np.empty_like(raw_view(array)[0])
        self.queue(queue, host, array, "copy to the host")
        return host

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Wait for the current stream of the array's device; return a copy."""
        home: AbstractContextManager[object] = nullcontext()
        if isinstance(array, HostArray):
            self._work.check(array, "asnumpy")
            home = self._work.home(array, "asnumpy")
        with home:
            self._streams.synchronize(self._streams.current_queue())
        raw, block = raw_view(array)
        order = self._streams.scheduler.order
        # An array of NumPy has no block, so the race checker has no earlier accesses to compare with.
        if order is not None and block is not None:
            order.host_reads(block, raw, "copy to the host")
        return np.array(raw, order="K")

    def unordered(self, array: DeviceArray) -> np.ndarray[Any, Any] | None:
        """Return a copy for comparison, or None if the stream is capturing.

        The race checker does not see the read.
        """
        if isinstance(array, HostArray):
            return self._work.read_unordered(array)
        queue = self._streams.current_queue()
        if queue.capture is not None:
            return None
        self._streams.scheduler.reach(queue.tail, f"the work of {queue!r}, to compare an array")
        return np.array(array)

    def checksums(self, queue: Queue, arrays: Sequence[Array]) -> HostSums:
        """Queue the checksums of arrays."""
        views = [raw_view(array) for array in arrays]
        sums = HostSums(partial(self._streams.wait_on_host, purpose="checksums"))
        raw = [view for view, _ in views]
        # Memory is freed only after these reads have run. The race checker does not check their order.
        reads = [Access(block, view, False, checked=False) for view, block in views if block is not None]
        self._streams.give(queue, lambda: sums.compute(*raw), reads, "checksums")
        sums.queued(queue.tail)
        return sums


def check_run(target: Array, source: Array, call: str) -> None:
    """Refuse arrays that `Driver.copy_run` would copy wrongly on a GPU.

    A GPU copies the bytes as one run, and does not look at types and strides.
    """
    one, other = ((array.shape, array.dtype) for array in (target, source))
    if one != other or not one_run(target.shape, target.strides, source.strides, target.dtype.itemsize):
        raise ContractError(
            f"{call} was given {shown(target)} of strides {target.strides} and {shown(source)} of {source.strides}; it needs two "
            "arrays of one shape and type whose elements are a single run of bytes in the same order"
        )
