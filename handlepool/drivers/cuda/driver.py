"""Drive NVIDIA GPUs through CuPy and nvidia-cudnn-frontend.

``cuda.bindings.driver`` serves for calls that CuPy lacks.

Only this module and its neighbours `executable`, `kernel_executable`, `sums`, `fast_launch`, `prepared`, `early`, `capture`,
`shared`, `locked` and `throwaway` import CuPy or launch with cuDNN's binding. The package never uses the runtime half of
cuda-bindings, because that half needs a GPU driver at least as new as cuda-bindings. cuDNN's rule for threads is that a handle is
used by one thread at a time. The pool enforces that rule.
"""

import inspect
import threading
from array import array as buffer
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from ctypes import c_void_p
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import cudnn
import cupy
import numpy as np
from cuda.bindings import driver as cu
from cupy.cuda import runtime
from cupy.cuda.memory import MemoryPointer, OutOfMemoryError, UnownedMemory

from handlepool._util.causes import causes
from handlepool.drivers.cuda import capture as recorded
from handlepool.drivers.cuda import early, failures, planning, shared
from handlepool.drivers.cuda.capture_mode import RELAXED, Relaxed, exchange
from handlepool.drivers.cuda.edges import Dependencies, libcuda, with_edge_data
from handlepool.drivers.cuda.executable import CudaExecutable, new_buffer
from handlepool.drivers.cuda.kernel_executable import KernelExecutable
from handlepool.drivers.cuda.locked import capture_query, locked
from handlepool.drivers.cuda.prepared import prepared
from handlepool.drivers.cuda.status import CudaDriverError, check, check_all
from handlepool.drivers.cuda.sums import CudaSums, prepare
from handlepool.drivers.cuda.throwaway import ThrowawayCapture
from handlepool.drivers.event_pool import Events
from handlepool.drivers.executable import OperandCopy, SavedPlan
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.prepared import Copies, Run
from handlepool.drivers.protocol import BeforeUntracked, Bring, ReadHost
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM, Handle, Stream
from handlepool.errors import ArrayTypeError, CaptureError
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import HOST, UNKNOWN, Layout, Piece, View, one_run, piece, span

# CuPy's public `using_allocator` wraps these two functions in a generator, which costs each branch 1.5 µs more.
_get_allocator: Callable[[], Any] = cupy.cuda.memory._get_thread_local_allocator  # noqa: SLF001
_set_allocator: Callable[[Any], None] = cupy.cuda.memory._set_thread_local_allocator  # noqa: SLF001
_capture_info = with_edge_data(cu, "cuStreamGetCaptureInfo")
_dependencies = Dependencies(libcuda(), lambda status: str(cu.CUresult(status).name))
# cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2
# cudaErrorNotReady: the work has not run.
_NOT_READY = 600
# cudaErrorPeerAccessAlreadyEnabled: other code, such as CuPy, has enabled the access before.
_REACHED_BEFORE = 704
_STAND_IN_BYTES = 1 << 20
"""Size in bytes of the memory for a launch that never runs.

`CudaDriver._begins_early` captures such a launch. The memory takes the place of the launch's operands and scratch.
"""
_STICKY = frozenset((214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""Numbers of the CUDA errors after which a context is lost.

An error has the same number in CUDA's runtime and in CUDA's driver. These errors are uncorrectable memory errors, illegal
instructions, addresses that are illegal, misaligned or in a wrong space, and failed assertions and launches.
"""


def unavailable() -> str | None:
    """Say why the cuda driver cannot run: no GPU, driver or libcudnn.

    If all three are present, return None.
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"CUDA found no usable NVIDIA GPU ({error})"
    if count == 0:
        return "no NVIDIA GPU is visible"
    try:
        cudnn.backend_version()
    except Exception as error:
        return f"libcudnn was not found ({error}); install handlepool[cu12] or handlepool[cu13]"
    return None


# `array_pointers` maps this function over many arrays. An attrgetter is the quickest function for that.
_POINTER = attrgetter("data.ptr")


class _ForeignStream:
    """Carry a stream's pointer and owner as the argument of ``Stream.from_external``."""

    def __init__(self, pointer: int, owner: object) -> None:
        self.pointer = pointer
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


class CudaDriver:
    """Drive NVIDIA GPUs through CuPy and cudnn-frontend.

    See `handlepool.drivers.protocol.Driver` for every method's contract.
    """

    name = "cuda"
    memory_advice = ""
    array_types: tuple[type, ...] = (cupy.ndarray,)
    block_type: type = cupy.cuda.memory.PooledMemory
    current_device: Callable[[], int] = staticmethod(runtime.getDevice)
    current_stream: Callable[..., Stream] = staticmethod(cupy.cuda.get_current_stream)
    record_event: Callable[[Any, int], None] = staticmethod(runtime.eventRecord)
    record_event_next: Callable[[Any, int], None] = staticmethod(
        locked(libcuda(), "cuEventRecord", (c_void_p, c_void_p), runtime.eventRecord)
    )
    wait_event: Callable[[int, Any], None] = staticmethod(runtime.streamWaitEvent)
    set_device: Callable[[int], None] = staticmethod(runtime.setDevice)
    is_capturing: Callable[[int], bool] = staticmethod(capture_query(libcuda()))
    free: Callable[[int], None] = staticmethod(runtime.free)
    destroy_event: Callable[[Any], None] = staticmethod(runtime.eventDestroy)
    device = staticmethod(cupy.cuda.Device)
    array_pointer: Callable[[Any], int] = staticmethod(_POINTER)

    def __init__(self) -> None:
        # Pools of events by device. `region_allocator` and `checksums` take events from these pools.
        self._edges: dict[int, Events] = {}
        self._plan_environment: dict[int, str] = {}
        # If `watch_host_data` was called in a thread, the attribute `bring` is the function that makes the arrays of `asarray` in
        # that thread.
        self._host_data = threading.local()
        # Pairs of devices. `copy_from_device` has enabled the first to reach the memory of the second, if the hardware can.
        self._reached: set[tuple[int, int]] = set()
        # Python finds an attribute of the object sooner than an attribute of its class, so the hottest functions are stored in
        # the object.
        for name in ("current_stream", "record_event", "wait_event", "is_capturing"):
            setattr(self, name, getattr(self, name))

    def device_count(self) -> int:
        return int(runtime.getDeviceCount())

    # Streams

    def create_stream(self) -> Stream:
        stream: Stream = cupy.cuda.Stream(non_blocking=True)
        return stream

    def wrap_stream(self, pointer: int, owner: object) -> Stream:
        stream: Stream
        if pointer == 0:
            stream = cupy.cuda.Stream.null
        elif pointer == PER_THREAD_STREAM:
            stream = cupy.cuda.Stream.ptds
        else:
            stream = cupy.cuda.Stream.from_external(_ForeignStream(pointer, owner))
        return stream

    def push_stream(self, stream: cupy.cuda.Stream) -> None:
        # `stream.use()` would not suffice, because the end of an inner `with` statement restores the stream that was last
        # *entered*, and not the stream that was last used.
        stream.__enter__()

    def pop_stream(self, stream: cupy.cuda.Stream, previous: cupy.cuda.Stream) -> None:
        stream.__exit__(None, None, None)
        # CuPy restores the stream that was last entered. The caller may have made `previous` current by `use`, so `previous` is
        # made current again here.
        previous.use()

    def owns_stream(self, stream: object) -> bool:
        # `Stream.from_external` also makes a Stream object, but the end of that object does not destroy the CUDA stream.
        return type(stream) is cupy.cuda.Stream and getattr(stream, "_foreign_stream_ref", None) is None

    def stream_id(self, pointer: int) -> int:
        return int(check(cu.cuStreamGetId(pointer)))

    def capture_id(self, pointer: int) -> int:
        # `streamIsCapturing` takes 0.1 µs, and the query of the id below takes ten times as long. So the id is only asked for a
        # capturing stream.
        if not runtime.streamIsCapturing(pointer):
            return 0
        _status, identity, *_ = check_all(_capture_info(pointer))
        return int(identity)

    def stream_device(self, pointer: int) -> int:
        context = check(cu.cuStreamGetCtx(pointer))
        check(cu.cuCtxPushCurrent(context))
        try:
            return int(check(cu.cuCtxGetDevice()))
        finally:
            check(cu.cuCtxPopCurrent())

    def synchronize_stream(self, pointer: int) -> None:
        runtime.streamSynchronize(pointer)

    # Events are raw pointers, because the destructor of an event object could call CUDA at a bad moment (guarantee 10).

    def create_event(self, *, timing: bool = False) -> int:
        return int(runtime.eventCreateWithFlags(0 if timing else runtime.eventDisableTiming))

    def event_done(self, event: int, failures: bool = False) -> bool:
        status = runtime.eventQuery(event)
        if failures and status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def synchronize_event(self, event: int) -> None:
        runtime.eventSynchronize(event)

    def elapsed(self, start: int, end: int) -> float:
        return float(runtime.eventElapsedTime(start, end))

    # Handles

    def create_handle(self) -> Handle:
        # `unwrap` finds the frontend's own function, even if `handlepool.integrations.cudnn` has replaced `cudnn.create_handle`.
        handle: Handle = inspect.unwrap(cudnn.create_handle)()
        return handle

    def bind_handle(self, handle: Handle, pointer: int) -> None:
        # `set_stream` does nothing if the handle remembers the same pointer. A new stream may have the pointer of a destroyed
        # stream, so the handle must forget the old pointer first.
        handle.stream = None
        cudnn.set_stream(handle, pointer)

    def destroy_handle(self, handle: Handle) -> None:
        cudnn.destroy_handle(handle)

    # Memory

    def allocate(self, nbytes: int) -> int:
        try:
            return int(runtime.malloc(nbytes))
        except runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(str(error)) from error
            raise

    def memory_info(self) -> tuple[int, int]:
        free, total = runtime.memGetInfo()
        return int(free), int(total)

    def release_cached(self) -> None:
        cupy.get_default_memory_pool().free_all_blocks()

    def scratch_array(self, pointer: int, nbytes: int, owner: object) -> Any:
        memory = UnownedMemory(pointer, nbytes, owner, self.current_device())
        return cupy.ndarray((nbytes,), np.uint8, MemoryPointer(memory, 0))

    def end_scratch(self, array: DeviceArray, why: str) -> None:
        # CuPy does not report the uses of its arrays, so the cuda driver can refuse none.
        pass

    def region_allocator(self, stream: cupy.cuda.Stream, keep: Callable[[object], None], of: Callable[[int], Any]) -> Any:
        base = cupy.cuda.get_allocator()
        device = self.current_device()
        origin = stream.ptr
        edges = self._edges.get(device) or self._edges.setdefault(device, Events(self))

        def allocate(nbytes: int) -> Any:
            current = cupy.cuda.get_current_stream()
            pointer = current.ptr
            if pointer == origin or runtime.getDevice() != device or (its := of(pointer)) is None:
                memory = base(nbytes)
            elif its is not allocate:
                return its(nbytes)
            else:
                if origin != LEGACY_STREAM and runtime.streamIsCapturing(origin) != runtime.streamIsCapturing(current.ptr):
                    raise CaptureError(
                        f"an allocation on stream {current.ptr:#x} belongs to a region of stream {origin:#x}, and only one "
                        "of the two streams is being captured. Begin the capture before the region, or after its join"
                    )
                # CuPy takes a block from the arena of the current stream. The block must come from the arena of the origin
                # stream, so that a reuse of the block after the join follows the order of the origin stream.
                stream.use()
                try:
                    memory = base(nbytes)
                finally:
                    current.use()
                edges.order(origin, current.ptr)
            keep(memory.mem)
            return memory

        return allocate

    def block_range(self, block: Any) -> tuple[int, int]:
        return block.ptr, block.ptr + block.size

    def swap_allocator(self, allocator: object) -> Any:
        previous = _get_allocator()
        _set_allocator(allocator)
        return previous

    # Captures

    def relaxed(self) -> AbstractContextManager[Any]:
        return Relaxed()

    def begin_capture(self, pointer: int) -> None:
        runtime.streamBeginCapture(pointer, runtime.streamCaptureModeThreadLocal)
        early.recording(True)

    def end_capture(self, pointer: int) -> recorded.CudaGraph:
        early.recording(False)
        return recorded.CudaGraph(int(runtime.streamEndCapture(pointer)), captured=True)

    def dependencies(self, pointer: int) -> tuple[int, ...] | None:
        return _dependencies.read(pointer)

    def set_dependencies(self, pointer: int, nodes: Sequence[int]) -> None:
        _dependencies.put(pointer, nodes)

    def capture_failure(self, error: BaseException) -> str | None:
        return failures.failure(error)

    def recording_memory(self) -> recorded.CudaRecordingMemory:
        return recorded.CudaRecordingMemory(Relaxed)

    # When something is wrong

    def context_lost(self, error: BaseException | None, ask: bool = True) -> BaseException | None:
        for cause in causes(error):
            if getattr(cause, "status", 0) in _STICKY:
                return cause
        # cuDNN's errors carry no status of CUDA. So after a RuntimeError or a MemoryError the driver makes a call of CUDA that
        # would fail in a lost context.
        if ask and (error is None or isinstance(error, (RuntimeError, MemoryError))):
            try:
                with Relaxed():
                    runtime.memGetInfo()
            except (runtime.CUDARuntimeError, CudaDriverError) as refusal:
                return refusal if refusal.status in _STICKY else None
        return None

    def watch_host_data(self, bring: Bring, read: ReadHost) -> Callable[[], None]:
        own = self._host_data
        before, own.bring = getattr(own, "bring", None), bring
        return partial(setattr, own, "bring", before)

    def watch_untracked_work(self, report: Callable[[str], None]) -> Callable[[], None]:
        # CuPy does not report the work that it queues, so there is nothing to watch.
        return _nothing

    def before_untracked_access(self, before: BeforeUntracked) -> None:
        pass

    def watch_shared_state(self, report: Callable[[str], None], *, check: bool = True) -> Callable[[], None]:
        return shared.watch(report)

    # Arrays and graphs

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        # Callers of a driver expect MemoryError, and not CuPy's own error.
        try:
            return cupy.ndarray(shape, dtype, None, strides)
        except OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def prepared(self, copies: Copies) -> Run:
        return prepared(copies, self.copy, exchange, RELAXED, lambda status: check((cu.CUresult(status),)))

    def asarray(self, values: object) -> Any:
        # CuPy copies `values` asynchronously if they are in pinned memory. If they are in pageable memory, CuPy has read them
        # when it returns. Either copy is ordered on the current stream. CuPy keeps only row-major and column-major layouts. So
        # the axes are sorted by stride for the copy, and put back into their order afterwards.
        values = np.asarray(values)
        order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))

        def copy() -> Any:
            return cupy.asarray(values.transpose(order), order="C").transpose(np.argsort(order).tolist())

        bring = getattr(self._host_data, "bring", None)
        return copy() if bring is None else bring(values, copy)

    def asnumpy(self, array: DeviceArray) -> np.ndarray[Any, Any]:
        # CuPy enters the array's device to make a view contiguous. CuPy 14.2 then forgets a stream that `Stream.use` had made
        # current, so that stream is made current again.
        current: Any = self.current_stream()
        try:
            return np.asarray(cupy.asnumpy(array, order="A"))
        finally:
            if self.current_stream().ptr != current.ptr:
                current.use()

    def read_unordered(self, array: DeviceArray) -> np.ndarray[Any, Any] | None:
        pointer = self.current_stream().ptr
        if pointer != LEGACY_STREAM and self.is_capturing(pointer):
            return None
        return np.array(self.asnumpy(array), order="C")

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        # CuPy copies only row-major arrays as one run of bytes. CuPy copies channels-last arrays by a kernel, and a kernel's
        # launch costs more host time than `copy_run`.
        shape, dtype = target.shape, target.dtype
        if shape == source.shape and dtype == source.dtype and one_run(shape, target.strides, source.strides, dtype.itemsize):
            self.copy_run(target, source, self.current_stream().ptr)
        else:
            cupy.copyto(target, source)

    def copy_run(self, target: cupy.ndarray, source: cupy.ndarray, pointer: int) -> None:
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, runtime.memcpyDefault, pointer)

    def copy_from_device(self, target: cupy.ndarray, source: cupy.ndarray, pointer: int) -> None:
        here, there = self.current_device(), int(source.data.device_id)
        if (here, there) not in self._reached:
            # Without peer access each copy goes through the host's memory.
            if runtime.deviceCanAccessPeer(here, there):
                try:
                    runtime.deviceEnablePeerAccess(there)
                except runtime.CUDARuntimeError as error:
                    if error.status != _REACHED_BEFORE:
                        raise
            self._reached.add((here, there))
        runtime.memcpyPeerAsync(target.data.ptr, here, source.data.ptr, there, target.nbytes, pointer)

    def copy_from_host(self, target: cupy.ndarray, values: np.ndarray[Any, Any], pointer: int) -> object:
        memory, host = _page_locked_like(target)
        np.copyto(host, values)
        runtime.memcpyAsync(target.data.ptr, memory.ptr, target.nbytes, runtime.memcpyHostToDevice, pointer)
        return memory

    def copy_to_host(self, array: cupy.ndarray, pointer: int) -> np.ndarray[Any, Any]:
        if not array.size:
            return np.empty(array.shape, array.dtype)
        memory, host = _page_locked_like(array)
        runtime.memcpyAsync(memory.ptr, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, pointer)
        return host

    def page_locked(self, values: np.ndarray[Any, Any]) -> bool:
        found = runtime.pointerGetAttributes(values.__array_interface__["data"][0])
        return bool(found.type == runtime.memoryTypeHost)

    def prepare_checksums(self) -> None:
        prepare()

    def checksums(self, arrays: Sequence[cupy.ndarray], pointer: int) -> CudaSums:
        device = self.current_device()
        return CudaSums(arrays, pointer, self._edges.get(device) or self._edges.setdefault(device, Events(self)))

    def array_device(self, array: cupy.ndarray) -> int:
        return int(array.data.device_id)

    def memory_of(self, array: cupy.ndarray) -> Piece:
        return piece(array.data.ptr, array.shape, array.strides, array.itemsize)

    def part(self, array: cupy.ndarray, address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        return cupy.ndarray(shape, dtype, array.data + (address - array.data.ptr), strides)

    def array_block(self, array: cupy.ndarray) -> object:
        return array.data.mem

    def array_pointers(self, arrays: Iterable[Any]) -> list[int]:
        return list(map(_POINTER, arrays))

    def adopt(self, view: View) -> Any:
        if view.device_id == UNKNOWN:
            # Memory of type 0 is unknown to CUDA, and memory of type 1 is host memory that CUDA knows. Memory of any other type
            # has a device.
            found = runtime.pointerGetAttributes(view.ptr)
            view.device_id = self.current_device() if not view.size else int(found.device) if found.type > 1 else HOST
        if view.device_id == HOST:
            raise ArrayTypeError(
                "the array is in host memory, and the cuda driver takes arrays in a GPU's memory; copy the array to the GPU first"
            )
        return view

    def array_over(self, view: View) -> Any:
        if not view.size:
            return cupy.ndarray(view.shape, view.dtype)
        start, stop = span(view.ptr, view.shape, view.strides, view.dtype.itemsize)
        memory = UnownedMemory(start, stop - start, view.owner, view.device_id)
        return cupy.ndarray(view.shape, view.dtype, MemoryPointer(memory, view.ptr - start), view.strides)

    def launch_buffer(self) -> Any:
        pointers = new_buffer()
        return pointers, pointers.buffer_info()[0]

    def new_graph(self, **settings: Any) -> Any:
        return frontend.new_graph(**settings)

    def plan_environment(self) -> str:
        device = self.current_device()
        if device not in self._plan_environment:
            self._plan_environment[device] = planning.plan_environment(_kind(device))
        return self._plan_environment[device]

    def compile(
        self,
        graph: Any,
        operands: Sequence[Any],
        *,
        handle: Handle,
        copies: Sequence[OperandCopy] = (),
        saved: SavedPlan | None = None,
        **settings: Any,
    ) -> CudaExecutable:
        name, titles = settings.pop("name"), settings.pop("titles")
        if saved is None:
            # The graph was made before it was known whether a saved plan exists, so its constructor got no handle.
            graph._handle = handle  # noqa: SLF001
            planned = planning.plan(graph, operands, copies, **settings)
        else:
            with ThrowawayCapture(self.bind_handle, handle):
                planned = planning.loaded(operands, copies, saved, handle=handle.backend_handle)
        if planned.early is None:
            planned = replace(planned, early=self._begins_early(handle, planned))
        if planned.early is not False:
            # Launches of this plan need the kernel of `early.barrier`. The kernel is loaded here, because the first launch may be
            # inside a capture.
            early.kernel()
        return CudaExecutable(self, planned, copies, name=name, titles=titles)

    def _begins_early(self, handle: Handle, planned: planning.Planned) -> bool | None:
        """Return whether a plan's launches begin before earlier work has ended.

        To find out, this method captures a kernel of this package, followed by a launch of the plan. The captured work never
        runs, so the memory that stands in for the operands is neither read nor written. Return None if the capture fails, for
        example because the plan fills more bytes of an operand than that memory has.
        """
        raw = planned.raw
        if raw is None:
            return None
        try:
            memory = cupy.get_default_memory_pool().malloc(_STAND_IN_BYTES)
            addresses = buffer("Q", [memory.ptr] * len(planned.uids))
            location, count = addresses.buffer_info()
            with ThrowawayCapture(self.bind_handle, handle, ask=True) as captured:
                early.launch(captured.stream)
                raw(location, count, memory.ptr if planned.size else 0, handle.backend_handle, planned.index)
        except Exception:
            # cuDNN or CUDA refused the launch, so the answer stays unknown.
            return None
        return captured.early

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> KernelExecutable:
        return KernelExecutable(self, kernel, operands, name, titles)


def _kind(ordinal: int) -> dict[str, Any]:
    """Return a device's `DeviceProperties.kind` without asking cuDNN.

    See `handlepool.tensors.device_properties.DeviceProperties.kind`.
    """
    attributes = cu.CUdevice_attribute
    (device,) = check_all(cu.cuDeviceGet(ordinal))

    def asked(attribute: object) -> int:
        return int(check_all(cu.cuDeviceGetAttribute(attribute, device))[0])

    major = asked(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = asked(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    (name,) = check_all(cu.cuDeviceGetName(256, device))
    return {
        "deviceName": bytes(name).partition(b"\0")[0].decode(),
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": int(check_all(cu.cuDriverGetVersion())[0]),
        "l2CacheSize": asked(attributes.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        "maxSharedMemoryPerBlockOptin": asked(attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        "multiProcessorCount": asked(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        "totalGlobalMem": int(check_all(cu.cuDeviceTotalMem(device))[0]),
    }


def _page_locked_like(array: DeviceArray) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return page-locked memory, and a host array in it.

    The host array keeps the memory alive, and has the strides of ``array``. ``array`` must have no gaps.
    """
    memory = cupy.cuda.alloc_pinned_memory(array.nbytes)
    return memory, np.ndarray(array.shape, array.dtype, memory, 0, array.strides)


def _nothing() -> None:
    pass
