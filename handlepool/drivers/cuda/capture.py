"""What the cuda driver needs to record: graphs, and memory of a recording's own."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import cupy
from cuda.bindings import driver as cu
from cupy.cuda import runtime
from cupy.cuda.memory import BaseMemory, OutOfMemoryError

from handlepool.drivers.cuda.rewiring import Rewiring
from handlepool.drivers.protocol import Edge

_rewiring = Rewiring(cu)
_kernels: dict[int, Any] = {}
"""By device, the kernel of one thread that does nothing. None is ever let go of, as the kernels of our own."""


def _kernel() -> int:
    device = runtime.getDevice()
    if device not in _kernels:
        module = cupy.RawModule(code='extern "C" __global__ void handlepool_gather() {}')
        _kernels[device] = module.get_function("handlepool_gather").kernel
    return int(_kernels[device].ptr)


class CudaGraph:
    """A captured graph and its executable, as raw pointers: no destructor of theirs can call CUDA at a bad moment.

    Attributes
    ----------
    pointer : int
        The ``cudaGraph_t``.
    """

    __slots__ = ("_executable", "launch", "nodes", "pointer")

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self._executable = 0
        self.launch: Callable[[int], None] = _not_ready
        try:
            status, _, self.nodes = cu.cuGraphGetNodes(pointer)
            if status != cu.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"CUDA driver error: {status.name}")
        except BaseException:
            self.destroy()
            raise

    def edges(self) -> list[Edge]:
        return _rewiring.edges(self.pointer)

    def arranged(self, add: Sequence[tuple[int, int]] = (), remove: Sequence[tuple[int, int]] = ()) -> "CudaGraph":
        if not (add or remove or _rewiring.has_many_ends(self.pointer)):
            return self
        copied = CudaGraph(_rewiring.copy(self.pointer))
        try:
            _rewiring.rewire(copied.pointer, add, remove)
            if _rewiring.has_many_ends(copied.pointer):
                _rewiring.gather(copied.pointer, _kernel())
        except BaseException:
            copied.destroy()
            raise
        copied.nodes = self.nodes
        return copied

    def instantiate(self) -> None:
        try:
            self._executable = int(runtime.graphInstantiate(self.pointer))
        except runtime.CUDARuntimeError as error:
            if error.status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(str(error)) from error
            raise
        self.launch = partial(runtime.graphLaunch, self._executable)

    def upload(self, pointer: int) -> None:
        runtime.graphUpload(self._executable, pointer)

    def destroy(self) -> None:
        executable, self._executable = self._executable, 0
        pointer, self.pointer = self.pointer, 0
        try:
            if executable:
                runtime.graphExecDestroy(executable)
        finally:
            if pointer:
                runtime.graphDestroy(pointer)


def _not_ready(pointer: int) -> None:
    raise RuntimeError("the graph was not instantiated")


class CudaRecordingMemory:
    """A pool of CuPy's for one recording.

    It must live as long as any array in it does: a pool of CuPy's that goes frees what is in use.
    """

    def __init__(self, relaxed: Callable[[], AbstractContextManager[Any]]) -> None:
        self._pool = cupy.cuda.MemoryPool()
        self._relaxed = relaxed
        self._tell: Callable[[object], None] | None = None
        self._devices: set[int] = set()
        self._addresses: set[int] = set()  # of what was given: no other pool has them as long as this one has not given them back

    def allocator(self, nbytes: int) -> Any:
        with self._relaxed():
            self._devices.add(runtime.getDevice())
            try:
                memory = self._pool.malloc(nbytes)
            except OutOfMemoryError:
                cupy.get_default_memory_pool().free_all_blocks()
                memory = self._pool.malloc(nbytes)
            self._addresses.add(memory.mem.ptr)
            if self._tell is not None:
                self._tell(memory.mem)
            return memory

    def tell(self, of: Callable[[object], None] | None) -> None:
        self._tell = of

    def recycle(self, may_have: Callable[[int, int], bool] | None) -> bool:
        return False  # CuPy's pool merges what was freed

    @property
    def nbytes(self) -> int:
        return sum(self._on_each(self._pool.total_bytes))

    def holds(self, value: object) -> bool:
        memory = value.data.mem if isinstance(value, cupy.ndarray) else value
        return isinstance(memory, BaseMemory) and memory.ptr in self._addresses

    def begins(self, pointer: int) -> bool:
        return pointer in self._addresses

    def release(self) -> bool:
        self._on_each(self._pool.free_all_blocks)
        return not sum(self._on_each(self._pool.used_bytes))

    def _on_each(self, function: Callable[[], Any]) -> list[Any]:
        values = []
        for device in self._devices:
            with cupy.cuda.Device(device):
                values.append(function())
        return values
