"""Use torch's tensors, current stream and allocator.

Tensors serve as operands, and torch's allocator is notified where memory crosses streams.

Torch's allocator returns a freed block to the arena of the stream that was current when the block was allocated, like CuPy's
allocator. Unlike CuPy's, torch's allocator can record further streams that use a block (``record_stream``), and then waits for
them first. So a tensor that a branch's own code allocates belongs to the side stream's arena, and the branch's results are
recorded for the caller's stream (guarantee 8). Arguments are kept to the join.

A recording has its own memory pool of torch's. No further streams are recorded there. Torch would record an event on each such
stream when a block is freed, maybe long after the recording, when the stream has another owner, or is destroyed. Memory that
crosses streams is held instead.

For cuBLAS torch keeps a workspace by stream. All graphs that were captured on the stream use the workspace at each replay. So a
stream on which such a recording was made is used for nothing else as long as the program lives. A recording must not use a
workspace that was allocated elsewhere. It must not leave its own workspace to a later stream at the same address. Torch is
therefore told to forget the workspaces before and after.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from handlepool._util.names import name_of
from handlepool._util.reachable import leaves
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError
from handlepool.tensors.frontend import NAMES
from handlepool.tensors.graph_types import FrontendTensor
from handlepool.tensors.layout import View, as_dtype

T = TypeVar("T")

_dtypes: dict[Any, np.dtype[Any]] = {}
_types = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}


def view(tensor: torch.Tensor) -> View:
    """Return a tensor as an operand.

    Raises
    ------
    ArgumentError
        For a tensor whose derivatives would be lost.
    ArrayTypeError
        For a type that cuDNN has not, and for tensors without plain memory (sparse, fake, on the meta device).
    """
    if (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:  # noqa: SLF001 - it has no public name
        _refuse_derivatives(tensor)
    dtype = _dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _dtype(tensor.dtype)
    size = dtype.itemsize
    try:
        pointer = tensor.data_ptr()
        strides = tuple([step * size for step in tensor.stride()])
    except RuntimeError as error:
        _refuse_derivatives(tensor)
        raise ArrayTypeError(f"a torch tensor without strided memory ({tensor.layout}): {error}") from error
    if tensor.is_neg() or (not pointer and tensor.numel()):
        raise ArrayTypeError(f"a torch tensor on {tensor.device} that is not in memory as it is; pass a copy")
    return View(pointer, tuple(tensor.shape), strides, dtype, tensor.get_device(), False, tensor)


def derives() -> bool:
    """Return whether tensors may now have derivatives outside their memory.

    See `derived`.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - as `torch.autograd` asks


def derived(tensor: FrontendTensor) -> str | None:
    """Say which derivative of a tensor a view of its memory loses.

    Returns None for a tensor with derivatives of backward mode.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - it has no public name
        return "is inside a transform of torch.func (grad, jvp, vmap), which hides its memory"
    if torch._C._is_fwd_grad_enabled() and forward_ad.unpack_dual(tensor).tangent is not None:  # noqa: SLF001
        return "has a tangent of torch's forward mode"
    return None


def refuse_derived(name: str, values: Iterable[object]) -> None:
    """Raise for a tensor with a derivative that no region can order.

    The values are those values that a call was given.

    Raises
    ------
    ArgumentError
    """
    for value in values:
        if isinstance(value, torch.Tensor) and (found := derived(value)) is not None:
            raise ArgumentError(
                f"{name} was given a tensor that {found}, so a region cannot order it: call {name} outside of regions and "
                f"programs, or pass plain tensors, as of torch.autograd.forward_ad.unpack_dual(tensor).primal"
            )


def _refuse_derivatives(tensor: torch.Tensor) -> None:
    """Raise for a tensor whose derivatives a graph function would lose.

    Derivatives of backward mode count where gradients are recorded.

    Raises
    ------
    ArgumentError
    """
    if (found := derived(tensor)) is not None:
        raise ArgumentError(
            f"a tensor {found}, and graph functions derive nothing: call them in a torch.autograd.Function that has a jvp and a "
            f"vmap, or call handlepool.integrations.torch.conv2d, or pass a plain tensor"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "a tensor requires grad, and graph functions record no gradients: call them under torch.no_grad() or in the forward "
            "of a torch.autograd.Function, or pass tensor.detach()"
        )


def _dtype(kind: object) -> np.dtype[Any]:
    name = str(kind).removeprefix("torch.")
    if name not in NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {name!r}; it has {', '.join(NAMES)}")
    dtype = _dtypes[kind] = as_dtype(name)
    return dtype


_elements = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Types by their bytes, which CuPy copies unchanged."""


def check_elements(tensor: torch.Tensor) -> int:
    """Check that a tensor's memory holds its elements; return the address.

    Raises
    ------
    ArgumentError
        For a tensor whose forward derivatives would be lost.
    ArrayTypeError
        For tensors whose elements are not in memory as they are.
    """
    if derives() and (found := derived(tensor)) is not None:
        raise ArgumentError(f"it {found}, which a copy loses; pass a plain tensor")
    if tensor.layout is not torch.strided:
        raise ArrayTypeError(f"it is without strided memory ({tensor.layout})")
    if tensor.is_neg() or tensor.is_conj():
        raise ArrayTypeError("its values are not in memory as they are, but negative or conjugate; pass a copy")
    pointer: int = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise ArrayTypeError("it has no memory")
    return pointer


def elements(tensor: torch.Tensor) -> View:
    """Return a tensor's elements without their type.

    Raises
    ------
    ArgumentError, ArrayTypeError
        As `check_elements`.
    """
    pointer = check_elements(tensor)
    size = tensor.element_size()
    strides = tuple([step * size for step in tensor.stride()])
    return View(pointer, tuple(tensor.shape), strides, np.dtype(_elements[size]), tensor.get_device(), False, tensor)


def prepared(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    back: Sequence[int],
    relaxed: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., list[torch.Tensor]]:
    """Return a function that enqueues a program's call over tensors.

    It copies a call's arguments into ``inputs``, launches, and returns new tensors with the values of ``outputs``. Arguments at
    the places ``back`` get the values of their inputs. Torch's current stream is the stream of the launch. ``relaxed`` is the
    driver's, for allocations while other threads capture.
    """

    def run(
        given: Sequence[torch.Tensor], pointer: int, launch: Callable[[], object], begin: object = None
    ) -> list[torch.Tensor]:
        # All results are allocated first, so that a lack of memory leaves the program unchanged.
        with relaxed():
            made = [torch.empty_like(each, memory_format=torch.preserve_format) for each in outputs]
        for target, source in zip(inputs, given, strict=True):
            target.copy_(source)
        launch()
        for new, own in zip(made, outputs, strict=True):
            new.copy_(own)
        for place in back:
            given[place].copy_(inputs[place])
        return made

    return run


def empty_like(tensor: torch.Tensor) -> Any:
    """Return a new tensor without gaps, in another tensor's axis order."""
    return torch.empty_like(tensor.detach(), memory_format=torch.preserve_format)


def empty_lying_as(tensor: torch.Tensor) -> Any:
    """Return a new tensor with the strides of another tensor."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], like: torch.Tensor) -> Any:
    """Return a new tensor on another tensor's device.

    It is allocated for torch's current stream. Strides are in bytes.
    """
    size = dtype.itemsize
    return torch.empty_strided(shape, [step // size for step in strides], dtype=_types[dtype.name], device=like.device)


def written(tensor: torch.Tensor) -> None:
    """Tell torch that a tensor's memory was written.

    Torch's own operations do the same. A backward pass that needs the old values then raises an error.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def current_stream(device: int) -> int:
    """Return the pointer of torch's current stream on a device."""
    try:
        pointer: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - 0.1 µs; the public way takes 3.7
    except AttributeError:
        pointer = torch.cuda.current_stream(device).cuda_stream
    return pointer


@functools.lru_cache(256)
def _stream(pointer: int, device: int) -> Any:
    # The object holds the pointer alone, so an old object is as good as a new one would be. Given 0, ExternalStream makes a new
    # stream.
    return torch.cuda.ExternalStream(pointer, device) if pointer else torch.cuda.default_stream(device)


def record(value: object, pointer: int, device: int) -> None:
    """Record a stream's use of a value's tensors with torch's allocator.

    Tensors in tuples, lists and dictionaries count, too.
    """
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided]
    if tensors:
        stream = _stream(pointer, device)
        for tensor in tensors:
            tensor.record_stream(stream)


def adopt_recorded(array: torch.Tensor) -> Any:
    """Return a tensor over a CuPy array's memory.

    No stream is made to wait.
    """
    return torch.from_dlpack(array.__dlpack__(stream=-1))


def run_branch(
    pointer: int,
    caller: int,
    device: int,
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: list[Any] | None = None,
) -> T:
    """Call a function with a stream current for torch.

    The tensors that it returns are recorded for the caller's stream. With ``held``, they are put into that list instead, and held
    until the recording has ended.
    """
    previous = torch.cuda.current_stream(device)
    torch.cuda.set_stream(_stream(pointer, device))
    try:
        value = function(*args, **kwargs)
    finally:
        torch.cuda.set_stream(previous)
    if derives():
        refuse_derived(name_of(function), leaves(value))
    if pointer != caller:
        if held is None:
            record(value, caller, device)
        else:
            held.append(value)
    return value


class RecordingPool:
    """Hold memory of torch's allocator for one recording.

    The memory serves nothing else. The pool is made and used with its device current.

    It is a pool like that of `torch.cuda.CUDAGraph`, and not a `torch.cuda.MemPool`, whose destructor waits for events. Torch
    aborts the process where such a wait happens while any thread captures.

    Attributes
    ----------
    nbytes : int
        Bytes taken from the device; known once the recording has ended.
    """

    def __init__(self, device: int) -> None:
        # Torch's own graphs call functions without public names.
        if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):  # noqa: SLF001
            raise CaptureError(
                f"torch uses the GPU, and torch {torch.__version__} has no memory pool for one thread, which a recording needs: "
                f"use torch 2.8 or newer, or record in a process where torch does not use the GPU"
            )
        self.nbytes = 0
        self._device = device
        # Whether torch knows the pool.
        self._there = self._kept = (spare := _spare_pool(device)) is not None
        self._pool = spare or (device, torch.cuda.graph_pool_handle())
        self._entered = ExitStack()
        # Start addresses of the pool's segments, in order.
        self._starts: list[int] = []
        # End address of each segment, and the stream that it was taken for.
        self._segments: list[tuple[int, int]] = []
        # Bytes that torch had taken from the device in all at the last look-up of the segments.
        self._looked = -1

    def begin(self) -> None:
        """Start allocating this thread's tensors in this pool."""
        self._forget_workspaces()
        # A backward pass in torch's own threads would allocate elsewhere.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._pool)  # noqa: SLF001
        if self._there:
            # Torch counts the uses of a pool, and the former recording's use was kept.
            torch._C._cuda_releasePool(*self._pool)  # noqa: SLF001
        self._there = True
        self._entered.callback(torch._C._cuda_endAllocateToPool, *self._pool)  # noqa: SLF001
        self._before = self._taken()["allocation"]["all"]["allocated"]

    def end(self) -> None:
        """Stop allocating this thread's tensors in this pool."""
        self._entered.close()
        # The recording's workspaces stay in the pool, which gives them to no other user from now on.
        self._forget_workspaces()
        if self._there:
            self._look()
        self.nbytes = sum(stop - start for start, (stop, _) in zip(self._starts, self._segments, strict=True))

    def check(self) -> None:
        """Raise where the tensors were allocated in another pool.

        That pool gives their memory to other users later. Some versions of torch use the pool that was entered first.
        """
        self._look()
        # The count covers the allocations of all threads.
        own = self._starts and not self._kept
        if own or self._taken()["allocation"]["all"]["allocated"] == self._before:
            return
        # A tensor of a single byte shows which pool this thread's allocations come from.
        if self.stream_of(torch.empty(1, dtype=torch.uint8, device=f"cuda:{self._device}").data_ptr()) is None:
            raise CaptureError(
                "torch allocates tensors in another pool than the recording's, and gives their memory out again later: "
                "record outside of torch.cuda.use_mem_pool"
            )

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a tensor's storage was allocated for.

        Returns None for memory outside of this pool.
        """
        place = bisect_right(self._starts, pointer) - 1
        if place < 0 or self._segments[place][0] <= pointer:
            # A new segment can exist only after torch has taken more memory from the device.
            if self._taken()["reserved_bytes"]["all"]["allocated"] == self._looked:
                return None
            self._look()
            place = bisect_right(self._starts, pointer) - 1
        return self._segments[place][1] if place >= 0 and pointer < self._segments[place][0] else None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Addresses where the pool's segments begin and end.

        They are known once the recording has ended.
        """
        return [(start, stop) for start, (stop, _) in zip(self._starts, self._segments, strict=True)]

    def storages(self, *values: object) -> Iterator[tuple[int, Any]]:
        """Yield the storages of the GPU tensors reached from values.

        Each storage comes with the address where it begins. A tensor without strided memory comes itself, with a number that is
        no address.
        """
        for leaf in leaves(*values, calls=True):
            tensor = leaf.owner if type(leaf) is View else leaf
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
                pointer = 0 if storage is None else storage.data_ptr()
                yield (pointer, storage) if pointer else (-id(tensor), tensor)

    def _taken(self) -> dict[str, Any]:
        counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return counts

    def _look(self) -> None:
        self._looked = self._taken()["reserved_bytes"]["all"]["allocated"]
        # Not of the pool alone: torch 2.11 drops a reference to the numbers that name a pool with each such question, and CPython
        # crashes once these are gone.
        found = sorted(
            (each["address"], each["total_size"], each["stream"])
            for each in torch.cuda.memory_snapshot()
            if each["segment_pool_id"] == self._pool[1]
        )
        self._starts = [start for start, _, _ in found]
        self._segments = [(start + size, stream) for start, size, stream in found]

    @staticmethod
    def _forget_workspaces() -> None:
        # Torch's own recordings call this function. It makes no call of CUDA's. Each workspace returns to the pool that it came
        # from.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001

    def close(self) -> None:
        """Return the memory to torch, or keep it for a later recording.

        Up to `MOST_SPARE` pools of a device are kept. Otherwise the memory returns to the device when torch is short of memory,
        or is told to empty its cache. Memory of a live tensor stays until the tensor is gone. Makes no call of CUDA's.
        """
        if self._there:
            self._there = False
            spare = _spare.setdefault(self._device, [])
            if len(spare) < MOST_SPARE:
                spare.append(self._pool)
            else:
                torch._C._cuda_releasePool(*self._pool)  # noqa: SLF001


MOST_SPARE = 2
"""Most pools of closed recordings that a device keeps for later recordings.

Torch gives a released pool's memory to no other allocation. A process that records and closes without end would take 2 MiB or
more for each recording, until torch is short of memory.
"""
_spare: dict[int, list[tuple[int, Any]]] = {}
"""The kept pools by device.

Appends and pops are atomic. Two threads that close at once may keep one pool more.
"""


def _spare_pool(device: int) -> tuple[int, Any] | None:
    """Return a kept pool without live tensors, or None.

    The work of the pool's recording has passed, since a program is closed only then.
    """
    spare = _spare.get(device)
    if not spare:
        return None
    # A live tensor's memory would be used again once the tensor is gone, while streams may still read it.
    live = {each["segment_pool_id"] for each in torch.cuda.memory_snapshot() if each["active_size"]}
    for _ in range(len(spare)):
        try:
            pool = spare.pop(0)
        except IndexError:
            # Another thread has just taken the last pool.
            return None
        if pool[1] not in live:
            return pool
        spare.append(pool)
    return None


def recording_pool(device: int) -> RecordingPool | None:
    """Return memory for a recording.

    Returns None where torch's allocator is the driver's own allocator, whose allocations are captured.
    """
    return RecordingPool(device) if torch.cuda.get_allocator_backend() == "native" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch found no memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError)


def version(tensor: torch.Tensor) -> int | None:
    """Return torch's count of writes to a tensor's storage.

    Returns None where torch does not count.
    """
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name


def storage(tensor: torch.Tensor) -> int:
    """Return the address that all tensors of a storage share."""
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def read_unordered(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a tensor's elements on the host.

    They are read after torch's current stream. Returns None under a capture, and for a tensor without bytes.
    """
    if tensor.layout is not torch.strided or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return np.array(values.cpu().numpy())
    except RuntimeError:
        return None
