"""Hold captured graphs, and the memory of recordings, on the cuda driver."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import c_void_p
from functools import partial
from typing import Any

import cupy
from cuda.bindings import driver as cu
from cupy.cuda import runtime
from cupy.cuda.memory import BaseMemory, MemoryPointer, OutOfMemoryError, UnownedMemory

from handlepool.drivers.captures import Edge
from handlepool.drivers.cuda import early
from handlepool.drivers.cuda.edges import libcuda
from handlepool.drivers.cuda.locked import locked
from handlepool.drivers.cuda.rewiring import Rewiring, are_many, ends
from handlepool.drivers.cuda.status import check_all
from handlepool.drivers.freed_blocks import FreedBlocks

# CuPy's pool rounds the size of a block up to a multiple of this number of bytes.
_ALIGNMENT = 512
_rewiring = Rewiring(cu)


def begins_early(graph: int) -> bool:
    """Return whether a node of ``graph`` begins before its predecessor ends."""
    return _rewiring.begins_early(graph)


_launch = locked(libcuda(), "cuGraphLaunch", (c_void_p, c_void_p), runtime.graphLaunch)


class CudaGraph:
    """Hold a captured graph and its executable as raw pointers.

    Raw pointers have no destructor that could call CUDA at a bad moment.

    Parameters
    ----------
    pointer : int
    captured : bool
        Whether the graph has just been captured. Its programmatic edges then become plain edges.

    Attributes
    ----------
    pointer : int
        The ``cudaGraph_t``.
    """

    __slots__ = ("_edges", "_executable", "launch", "nodes", "pointer")

    def __init__(self, pointer: int, *, captured: bool = False) -> None:
        self.pointer = pointer
        self._edges: list[Edge] | None = None
        self._executable = 0
        self.launch: Callable[[int], None] = _not_ready
        try:
            _, self.nodes = check_all(cu.cuGraphGetNodes(pointer))
            if captured:
                self._edges = _rewiring.make_plain(pointer)
        except BaseException:
            self.destroy()
            raise

    def edges(self) -> list[Edge]:
        # The cache stays valid because a captured graph does not change.
        if self._edges is None:
            self._edges = _rewiring.edges(self.pointer)
        return self._edges

    def allocations(self) -> list[int]:
        return _rewiring.allocations(self.pointer)

    def host_copies(self) -> list[int]:
        return _rewiring.host_copies(self.pointer)

    def arranged(self, add: Sequence[tuple[int, int]] = (), remove: Sequence[tuple[int, int]] = ()) -> "CudaGraph":
        pairs = {*self.edges()}.difference(remove).union(add)
        roots, leaves = ends(_rewiring.nodes(self.pointer), pairs)
        if not (add or remove or are_many(roots, leaves)):
            return self
        # The captured graph stays unchanged, so that a later call can arrange it in another way.
        copied = CudaGraph(_rewiring.copy(self.pointer))
        try:
            _rewiring.rewire(copied.pointer, add, remove)
            if are_many(roots, leaves):
                _rewiring.gather(copied.pointer, roots, leaves, early.kernel())
        except BaseException:
            copied.destroy()
            raise
        # The copy reports the original's number of nodes, which does not count the gathering kernels.
        copied.nodes = self.nodes
        return copied

    def marked(
        self, add: Sequence[tuple[int, int]], remove: Sequence[tuple[int, int]], groups: Sequence[Sequence[int]]
    ) -> "MarkedGraph":
        copied = MarkedGraph(_rewiring.copy(self.pointer))
        try:
            _rewiring.rewire(copied.pointer, add, remove)
            for _ in range(len(groups) + 2):
                copied.events.append(int(runtime.eventCreateWithFlags(0)))
            _rewiring.mark(copied.pointer, groups, copied.events)
        except BaseException:
            copied.destroy()
            raise
        copied.nodes = self.nodes
        return copied

    def instantiate(self) -> None:
        if self._executable:
            return
        try:
            self._executable = int(runtime.graphInstantiate(self.pointer))
        except runtime.CUDARuntimeError as error:
            if error.status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(str(error)) from error
            raise
        self.launch = partial(_launch, self._executable)

    def upload(self, pointer: int) -> None:
        runtime.graphUpload(self._executable, pointer)

    def destroy(self) -> None:
        # The attributes are cleared first, so that a second call destroys nothing twice.
        executable, self._executable = self._executable, 0
        pointer, self.pointer = self.pointer, 0
        try:
            if executable:
                runtime.graphExecDestroy(executable)
        finally:
            if pointer:
                runtime.graphDestroy(pointer)


class MarkedGraph(CudaGraph):
    """Hold a graph with added nodes that record events.

    The first two event nodes run before all other nodes. The time between these two events is the cost of an event.
    """

    __slots__ = ("events",)

    def __init__(self, pointer: int) -> None:
        self.events: list[int] = []
        super().__init__(pointer)

    def times(self) -> list[float]:
        # The time between the first two events is the cost of an event, so the groups' times count from the second event.
        _, first, *others = self.events
        return [1e3 * float(runtime.eventElapsedTime(first, event)) for event in others]

    def cost(self) -> float:
        return 1e3 * float(runtime.eventElapsedTime(*self.events[:2]))

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            while self.events:
                runtime.eventDestroy(self.events.pop())


def _not_ready(pointer: int) -> None:
    raise RuntimeError("the graph cannot be launched before it was instantiated; call `instantiate` first")


class _Owner:
    """Return a block to the freed blocks when its last array ends.

    The arrays over the block keep this object alive. ``memory`` is the pool's block.
    """

    __slots__ = ("_home", "memory")

    def __init__(self, memory: object, home: list[Any]) -> None:
        self.memory = memory
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.memory)


class CudaRecordingMemory:
    """Serve one recording from a CuPy pool of its own.

    The pool must live as long as any array in it, because a CuPy pool that is destroyed frees memory in use. New blocks come from
    the pool's arenas, one arena per stream. While a reuse policy is set, a freed block is kept whole for an allocation that the
    policy allows.
    """

    def __init__(self, relaxed: Callable[[], AbstractContextManager[Any]]) -> None:
        self._pool = cupy.cuda.MemoryPool()
        self._relaxed = relaxed
        self._tell: Callable[[object], None] | None = None
        self._devices: set[int] = set()
        # Addresses of all blocks of this pool. A block whose address is in this set belongs to this pool, because no other
        # pool can have the address before this pool returns the block to the device.
        self._addresses: set[int] = set()
        # The reuse policy. If it is None, every block comes from CuPy's pool.
        self._may_have: Callable[[int, int], bool] | None = None
        self._known: Callable[[object], bool] = bool
        # Each key is a device and a stream's pointer. All streams that the recording knows share their freed blocks, so None
        # takes the place of their pointers.
        self._freed: dict[tuple[int, int | None], FreedBlocks[Any]] = {}

    def allocator(self, nbytes: int) -> Any:
        memory = self._fresh(nbytes) if self._may_have is None or not nbytes else self._recycled(nbytes)
        if self._tell is not None:
            self._tell(memory.mem)
        return memory

    def _fresh(self, nbytes: int) -> Any:
        with self._relaxed():
            self._devices.add(runtime.getDevice())
            try:
                memory = self._pool.malloc(nbytes)
            except OutOfMemoryError:
                # CuPy's default pool may hold freed blocks, which this pool cannot use. The default pool returns them to the
                # device, and then this pool tries again.
                cupy.get_default_memory_pool().free_all_blocks()
                memory = self._pool.malloc(nbytes)
            self._addresses.add(memory.mem.ptr)
            return memory

    def _recycled(self, nbytes: int) -> Any:
        device = runtime.getDevice()
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        stream = cupy.cuda.get_current_stream().ptr
        freed = self._freed.setdefault((device, None if self._known(stream) else stream), FreedBlocks())
        block, home = freed.take(size, self._is_free) or (None, freed.of_size(size))
        if block is None:
            block = self._fresh(size)
        freed.note_given(block, size)
        return MemoryPointer(UnownedMemory(block.ptr, block.mem.size, _Owner(block, home), device), 0)

    def _is_free(self, block: Any) -> bool:
        return self._may_have is not None and self._may_have(block.ptr, block.ptr + block.mem.size)

    def on_allocate(self, of: Callable[[object], None] | None) -> None:
        self._tell = of

    def set_reuse_policy(self, may_have: Callable[[int, int], bool] | None, known: Callable[[object], bool] = bool) -> bool:
        self._may_have, self._known = may_have, known
        return True

    @property
    def nbytes(self) -> int:
        return sum(self._on_each(self._pool.total_bytes))

    @property
    def in_order(self) -> int:
        return sum(freed.in_order() for freed in self._freed.values())

    def holds(self, value: object) -> bool:
        memory = value.data.mem if isinstance(value, cupy.ndarray) else value
        return isinstance(memory, BaseMemory) and memory.ptr in self._addresses

    def begins(self, pointer: int) -> bool:
        return pointer in self._addresses

    def release(self) -> bool:
        for freed in self._freed.values():
            for block in freed.take_all():
                # Dropping the last reference returns the block to the pool.
                del block
        self._on_each(self._pool.free_all_blocks)
        return not sum(self._on_each(self._pool.used_bytes))

    def _on_each(self, function: Callable[[], Any]) -> list[Any]:
        values = []
        for device in self._devices:
            with cupy.cuda.Device(device):
                values.append(function())
        return values
