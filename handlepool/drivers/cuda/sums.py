"""Launch the checksum kernel, and read its sums."""

import os
from array import array as buffer
from collections import deque
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from handlepool.drivers.checksum import Words
from handlepool.drivers.cuda.checksum import MACROS, MOST_ARRAYS, MOST_BLOCKS, THREADS, arguments, source
from handlepool.drivers.cuda.early import immortal
from handlepool.drivers.event_pool import Events

_ARRAYS = 8
"""The number of arrays whose sums fit into the smallest page-locked block.

For more arrays, the block is several times as large.
"""
_BLOCK = 8 * MOST_BLOCKS * _ARRAYS
_BLOCKS = 16
"""The number of page-locked blocks that `prepare` allocates."""
_functions: dict[int, int] = {}
"""The kernel of each device, as a pointer.

Kernels live as long as the process, because a destructor would call CUDA (guarantee 10).
"""
_under_way: deque["CudaSums"] = deque()
"""Sums that streams may still write.

The queue keeps the sums alive, because the caller may drop its `CudaSums` before the stream has written them. Appends and pops
are atomic.
"""


class CudaSums:
    """Compute checksums; see `handlepool.drivers.checksum.Sums`.

    The kernel writes to page-locked memory, so no copy to the host is needed.

    Parameters
    ----------
    arrays : sequence of cupy.ndarray
        Arrays on the current device.
    pointer : int
        The stream, which is not being captured.
    events : Events
        Events of the current device.
    """

    def __init__(self, arrays: Sequence[Any], pointer: int, events: Events) -> None:
        words = [Words.of(array.data.ptr, array.shape, array.strides, array.itemsize) for array in arrays]
        function = _function()
        # The allocation of a new page-locked block may wait for the device. So blocks have few sizes, and CuPy's pool usually has
        # a free block.
        self._memory: Any = cupy.cuda.alloc_pinned_memory(-(-len(words) // _ARRAYS) * _BLOCK)
        self._events = events
        self._parts: list[tuple[int, int]] = []
        launches, first = [], 0
        for place in range(0, len(words), MOST_ARRAYS):
            argument, grid = arguments(words[place : place + MOST_ARRAYS], self._memory.ptr + 8 * first)
            launches.append((argument, grid))
            across, down = grid
            self._parts += [(first + across * each, across) for each in range(down)]
            first += across * down
        _forget_written()
        # When the event has passed, the host may read the sums, and the page-locked memory may be reused.
        self._event: Any = events.acquire()
        _under_way.append(self)
        for argument, (across, down) in launches:
            places = buffer("Q", (argument.buffer_info()[0],))
            cupy.cuda.driver.launchKernel(function, across, down, 1, THREADS, 1, 1, 0, pointer, places.buffer_info()[0], 0)
        runtime.eventRecord(self._event, pointer)

    def ready(self) -> bool:
        """See `handlepool.drivers.checksum.Sums.ready`."""
        if self._event is not None and runtime.eventQuery(self._event) == 0:
            self._passed()
        return self._event is None

    def wait(self) -> None:
        """See `handlepool.drivers.checksum.Sums.wait`."""
        if self._event is not None:
            runtime.eventSynchronize(self._event)
            self._passed()

    def _passed(self) -> None:
        # The swap gives the event to one thread only, which releases it.
        event, self._event = self._event, None
        # If another thread was quicker, it has taken the event, and None is left.
        if event is not None:
            self._events.release(event)

    def values(self) -> list[int]:
        """See `handlepool.drivers.checksum.Sums.values`."""
        sums = np.frombuffer(self._memory, np.uint64, sum(count for _, count in self._parts))
        return [int(sums[first : first + count].sum(dtype=np.uint64)) for first, count in self._parts]


def prepare() -> None:
    """Load the current device's kernel, and allocate page-locked memory.

    Either step may wait for all work of the device.
    """
    _function()


def _forget_written() -> None:
    """Drop written sums, up to the first sums that are not written."""
    while _under_way:
        try:
            sums = _under_way.popleft()
        except IndexError:
            # Another thread has just taken the last element.
            return
        if not sums.ready():
            _under_way.append(sums)
            return


def _after_fork() -> None:
    """Keep a forked child from ending its parent's objects (guarantee 13)."""
    _inherited.append([*_under_way])
    _under_way.clear()


_inherited: list[object] = []
os.register_at_fork(after_in_child=_after_fork)


def _function() -> int:
    """Return the current device's kernel; compile and load it if needed."""
    device = runtime.getDevice()
    pointer = _functions.get(device)
    if pointer is None:
        options = ("--std=c++17", *(f"-D{name}={value}" for name, value in MACROS.items()))
        # Two threads may compile the kernel at once. Either result serves, because both stay loaded.
        module = cupy.RawModule(code=source(), options=options)
        pointer = int(immortal(module.get_function("checksum").kernel).ptr)
        # CuPy's pool keeps these blocks for later sums.
        _ = [cupy.cuda.alloc_pinned_memory(_BLOCK) for _ in range(_BLOCKS)]
        _functions[device] = pointer
    return pointer
