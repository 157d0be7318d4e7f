"""Device memory of the host driver: blocks, scratch and array arenas.

Each device has a budget of bytes. As in CuPy's pool, the *pointer* of the stream that was current at an allocation selects the
arena. When the last array over a block has ended, the next allocation under the same pointer reuses the block at once. The arena
does not check which thread freed the block, and whether queued work still uses the block. `HandlePool` has to prevent this hazard
(guarantee 8).
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from handlepool._util.frames import place_of_call
from handlepool.drivers.host.array import HostArray, Raw, Work
from handlepool.drivers.host.limit import ADVICE
from handlepool.drivers.host.race_checker import Access, Past
from handlepool.drivers.host.scheduler import Scheduler
from handlepool.drivers.host.streams import Event, Queue, Stream, StreamTable
from handlepool.drivers.operands import ASARRAY
from handlepool.drivers.protocol import ReadHost
from handlepool.drivers.streams import PER_THREAD_STREAM
from handlepool.errors import CaptureError, ContractError

ALIGNMENT = 256
POISON = 0xFF
"""Value of each byte that was allocated and not yet written.

A floating-point number of such bytes is NaN, and a signed integer is -1.
"""


class Block:
    """A piece of device memory."""

    __slots__ = ("address", "device", "freed", "generation", "memory", "nbytes", "past")

    def __init__(self, device: int, nbytes: int) -> None:
        # The extra bytes allow the block to begin at an aligned address.
        raw = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        self.memory = raw[offset : offset + nbytes]
        self.address = self.memory.ctypes.data
        self.device = device
        self.nbytes = nbytes
        self.freed = False
        self.generation = 0
        """Number of earlier owners.

        The race checker treats a change of owner as a write.
        """
        self.past: list[Past] = []
        """Accesses to the block, while their order is checked."""

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes at {self.address:#x} of device {self.device}>"

    def check_live(self, label: str) -> None:
        """Raise if the block was freed."""
        if self.freed:
            raise ContractError(
                f"{label or 'an operation'} ran and touches {self!r}, which was freed before; free memory after its last use"
            )


class HostValues:
    """Values in NumPy's own memory that queued work reads.

    The values must stay unchanged until the work has run. The driver makes such an object only while the order of accesses is
    checked.
    """

    def __init__(self, values: Raw) -> None:
        self.address: int = values.ctypes.data
        self.device = -1
        self.generation = 0
        self.past: list[Past] = []
        self._values = values
        # To compare this checksum later is enough to notice a write, and needs no copy of the values.
        self._sum = crc32(values.tobytes())
        self._where = place_of_call()

    def __repr__(self) -> str:
        return f"<a numpy.ndarray of shape {self._values.shape}>"

    def check_live(self, label: str) -> None:
        """Raise if the host has written the values since the submission."""
        if self._sum != crc32(self._values.tobytes()):
            raise ContractError(
                f"not ordered: {label!r}, queued at {self._where}, reads {self!r}, and the host wrote to that "
                f"array before the work ran. Write to it after the stream has run the work, or pass a copy, made by {ASARRAY}"
            )


class Owner:
    """The owner of a block.

    The arrays over the block keep the owner alive. When the owner ends, the block returns to its arena.
    """

    __slots__ = ("__weakref__", "_bin", "block")

    def __init__(self, block: Block, home: list[Block]) -> None:
        self.block = block
        self._bin = home

    def __del__(self) -> None:
        # A finalizer may run inside any lock, so it appends to a list and takes no lock.
        self._bin.append(self.block)


class Lease:
    """The permission to use a block of scratch, kept by arrays.

    Attributes
    ----------
    ended : str
        Reason why the arrays may no longer be used; empty while they may be used.
    """

    __slots__ = ("__weakref__", "_block", "_owner", "ended")

    def __init__(self, block: Block, owner: object) -> None:
        self._block = block
        self._owner = owner
        self.ended = ""

    @property
    def block(self) -> Block:
        """The block. Each use of the arrays reads this property."""
        if self.ended:
            raise ContractError(
                f"a workspace is used after {self.ended}, and since then its memory may belong to another caller. "
                f"For values that must last, make an array, for example with numpy.zeros_like"
            )
        return self._block


def accesses(views: Sequence[tuple[Raw, Block | None]], *, writes: bool) -> list[Access]:
    """Return an access for each of ``views``, which are results of `raw_view`.

    A view without a block gets no access, because this driver did not make its array.
    """
    return [Access(block, view, writes) for view, block in views if block is not None]


def tell_plain(read: ReadHost, arrays: Iterable[Any], label: str, copies: bool = False) -> None:
    """Report the NumPy arrays among ``arrays`` to the listener ``read``.

    NumPy arrays without axes are not reported, because CuPy takes them as numbers.
    """
    for array in arrays:
        if isinstance(array, np.ndarray) and array.ndim:
            read(array, label, copies)


def plain_reads(arrays: Iterable[Any]) -> list[Access]:
    """Return reads of NumPy's own arrays, for the race checker."""
    return [Access(HostValues(array), array, False) for array in arrays if isinstance(array, np.ndarray) and array.size]


ARENA_ALIGNMENT = 512


class DeviceMemory:
    """The memory of one device."""

    def __init__(self, ordinal: int, total: int, scheduler: Scheduler) -> None:
        self.total = total
        self.used = 0
        self._ordinal = ordinal
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._scratch: dict[int, Block] = {}
        self._starts: list[int] = []
        self._arenas: dict[tuple[object, int], list[Block]] = {}

    def fresh(self, nbytes: int) -> Block:
        """Return a new block.

        If the device's budget has no room for the block, free the arenas' unused blocks first, as CuPy does.
        """
        if not self._reserve(nbytes):
            self.release_cached()
            if not self._reserve(nbytes):
                raise MemoryError(
                    f"out of memory on host device {self._ordinal}: {nbytes:,} bytes asked for, {self.total - self.used:,} free "
                    f"of {self.total:,}; {ADVICE}"
                )
        return Block(self._ordinal, nbytes)

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            fits = self.used + nbytes <= self.total
            if fits:
                self.used += nbytes
            return fits

    def _quiesce(self, block: Block) -> None:
        """Wait until no queued work uses a block, as ``cudaFree`` does.

        If queued work has failed, the next synchronisation raises the failure, and this method does not.
        """
        for operation in self._scheduler.users(block):
            self._scheduler.reach(operation, f"{operation.label!r}, which uses memory that is being freed")
            if self._scheduler.order is not None:
                self._scheduler.order.waited(operation)

    def _release(self, block: Block) -> None:
        block.freed = True
        # If code uses the block later, the poison gives wrong values, which tests notice.
        block.memory.fill(POISON)
        with self._lock:
            self.used -= block.nbytes

    # Scratch

    def scratch_bytes(self) -> int:
        """Return the allocated bytes of scratch."""
        with self._lock:
            return sum(block.nbytes for block in self._scratch.values())

    def allocate(self, nbytes: int) -> int:
        """Allocate scratch memory and return its address."""
        block = self.fresh(max(ALIGNMENT, _up(nbytes, ALIGNMENT)))
        with self._lock:
            self._scratch[block.address] = block
            self._starts = sorted(self._scratch)
        return block.address

    def free(self, pointer: int) -> None:
        """Free scratch memory."""
        block = self._scratch.get(pointer)
        # `_quiesce` may run queued work in this thread, and that work may need the lock. So this thread waits outside the lock.
        if block is not None:
            self._quiesce(block)
        with self._lock:
            block = self._scratch.pop(pointer, None)
            self._starts = sorted(self._scratch)
        if block is None:
            raise ContractError(
                f"free({pointer:#x}) on device {self._ordinal}: no scratch memory that is still allocated begins there; pass a "
                "pointer that `allocate` returned, once"
            )
        self._release(block)

    def find(self, pointer: int, nbytes: int, purpose: str) -> tuple[Block, int]:
        """Return the scratch block that holds a range, and its offset.

        The range begins at ``pointer`` and has ``nbytes`` bytes.
        """
        with self._lock:
            index = bisect_right(self._starts, pointer) - 1
            block = self._scratch[self._starts[index]] if index >= 0 else None
        if block is None or pointer >= block.address + block.nbytes:
            raise ContractError(
                f"{purpose}: pointer {pointer:#x} is not in scratch memory that is allocated on device {self._ordinal}; pass "
                "memory that `allocate` returned on this device"
            )
        offset = pointer - block.address
        if offset + nbytes > block.nbytes:
            raise ContractError(
                f"{purpose}: {nbytes} bytes are needed, and {block!r} has {block.nbytes - offset} left; pass a larger block"
            )
        return block, offset

    # Arrays

    def take(self, key: object, nbytes: int) -> Owner:
        """Take the block that was freed last from an arena.

        If the arena has no free block of this size, take a new block from the device.
        """
        home, size = self._home(key, nbytes)
        try:
            block = home.pop()
            # The higher generation tells the race checker that the memory has another owner.
            block.generation += 1
        except IndexError:
            block = self.fresh(size)
        return Owner(block, home)

    def has_free(self, key: object, nbytes: int) -> bool:
        """Return whether `take` will find a block in the arena."""
        return bool(self._home(key, nbytes)[0])

    def _home(self, key: object, nbytes: int) -> tuple[list[Block], int]:
        size = self.rounded(nbytes)
        return self._arenas.setdefault((key, size), []), size

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Return the bytes of the block for an array of ``nbytes`` bytes."""
        return max(ARENA_ALIGNMENT, _up(nbytes, ARENA_ALIGNMENT))

    def give_back(self, block: Block) -> None:
        """Return a block to the device.

        The caller ensures that no array uses the block, and that no arena of this driver holds it.
        """
        self._quiesce(block)
        self._release(block)

    def release_cached(self) -> None:
        """Return the free blocks of all arenas to the device."""
        for home in list(self._arenas.values()):
            # Finalizers and other threads change the list during the loop, so the loop runs over a copy.
            for block in home.copy():
                self._quiesce(block)
                try:
                    home.remove(block)
                except ValueError:
                    # Another thread has taken the block from the arena meanwhile.
                    continue
                self._release(block)


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class ArrayMemory(Protocol):
    """The source of arrays while a function is recorded."""

    def take(self, device: DeviceMemory, key: object, nbytes: int) -> Owner:
        """Allocate memory for one array, on the current device."""


class RegionAllocator:
    """An allocator for the branches of a region; see `Driver.region_allocator`."""

    def __init__(
        self, table: StreamTable, stream: Stream, keep: Callable[[object], None], of: Callable[[int], "RegionAllocator | None"]
    ) -> None:
        # If this thread is recording, the arrays of the region come from the recording's memory, too.
        outer = table.thread.allocator
        self.recording: ArrayMemory | None = outer.recording if isinstance(outer, RegionAllocator) else outer
        self.device = table.thread.device
        self.stream = stream
        self._table = table
        self._keep = keep
        self.of = of

    def settle(self, owner: Owner, current: Queue) -> None:
        """Keep an allocated block, and order its use after the region's stream.

        The current stream then writes to the block after all work that the region's stream has so far.
        """
        self._keep(owner)
        home = self._table.resolve(self.stream.ptr)
        if home is not current:
            if (home.capture is None) != (current.capture is None):
                raise CaptureError(
                    f"an allocation on {current!r} belongs to a region of {home!r}, and a capture began on one of the two "
                    "streams since then. Begin the capture before the region or after it"
                )
            # The block comes from the arena of the region's stream, and earlier work of that stream may still use the block. So
            # the current stream waits for that work.
            event = Event(home.device, timing=False)
            self._table.record(event, home)
            self._table.wait(current, event)


class Memory:
    """The memory of all devices, and the arrays in it."""

    work: Work
    """Operations on arrays; the driver sets it."""

    def __init__(self, table: StreamTable, total: int) -> None:
        self._table = table
        self._devices = [DeviceMemory(device, total, table.scheduler) for device in range(table.devices)]

    @property
    def current(self) -> DeviceMemory:
        """The memory of the current device."""
        return self._devices[self._table.thread.device]

    def scratch_bytes(self) -> int:
        """Return the allocated bytes of scratch on all devices."""
        return sum(device.scratch_bytes() for device in self._devices)

    def scratch_array(self, pointer: int, nbytes: int, owner: object) -> HostArray:
        """Return an array over scratch memory."""
        if not nbytes and not pointer:
            # Until a workspace grows for the first time, it has 0 bytes and no pointer.
            return HostArray(np.empty(0, np.uint8), None, self.work)
        block, offset = self.current.find(pointer, nbytes, "scratch_array")
        return HostArray(block.memory[offset : offset + nbytes], Lease(block, owner), self.work)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> HostArray:
        """Return an array from the arena of this thread's allocator."""
        thread = self._table.thread
        stream = thread.current[thread.device]
        allocator: RegionAllocator | ArrayMemory | None = thread.allocator
        region = allocator if isinstance(allocator, RegionAllocator) else None
        recording = allocator.recording if isinstance(allocator, RegionAllocator) else allocator
        if region is not None and region.device != thread.device:
            # The region's stream does not order memory of another device.
            region = None
        if region is not None and stream.ptr != region.stream.ptr:
            # A branch of another region may run on the current stream. Then the allocator of that region decides.
            region = region.of(stream.ptr)
        source = stream if region is None else region.stream
        # As in CuPy, each thread's per-thread default stream has an arena of its own. As in CuPy, the key has the number of
        # `threading.get_ident`, which a later thread may get again. So a missing wait between two such threads shows here as on a
        # GPU.
        key = (source.ptr, threading.get_ident()) if source.ptr == PER_THREAD_STREAM else source.ptr
        # Strides may leave gaps, so the extent can exceed the size of the elements.
        extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
        nbytes = extent if all(shape) else 0
        device = self.current
        if recording is not None:
            owner = recording.take(device, key, nbytes)
        else:
            if not device.has_free(key, nbytes):
                self._table.captures.forbid("an allocation of device memory for an array")
            owner = device.take(key, nbytes)
        queue = self._table.resolve(stream.ptr)
        if region is not None:
            region.settle(owner, queue)
        block = owner.block
        # The old contents of a reused block might happen to be the correct values, and so hide a missing wait. So the block is
        # filled with poison.
        if block.generation and queue.capture is None:
            self._table.give(queue, partial(block.memory.fill, POISON), [Access(block, block.memory, True)], "an allocation")
        return HostArray(np.ndarray(tuple(shape), dtype, owner.block.memory, strides=tuple(strides)), owner, self.work)
