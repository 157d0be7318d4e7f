"""Torch: tensors as operands, its current stream, and its allocator told where memory crosses streams.

Torch's allocator gives a freed block back to the arena of the stream that was current when the block was allocated, as CuPy's
does; other than CuPy's it can be told of further streams that use a block (``record_stream``), and then waits for them first.
So a tensor that a branch's own code allocates belongs to the side stream's arena, and what the branch returns is recorded for
the caller's stream (guarantee 8). Arguments are kept to the join.

A recording has a memory pool of torch's to itself. Torch is told of no further streams there: it would record an event on each
when a block is freed, maybe long after the recording, when the stream is somebody else's, or gone. What crosses streams is held
instead.

For cuBLAS torch keeps a workspace by stream, which all graphs that were captured on it use at each replay. So no stream that such
a recording was made on is used for anything else as long as the program lives. Nor may a recording meet a workspace that was
allocated elsewhere, or leave one of its own to whoever gets a stream at the same address: torch is told to forget them before
and after.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
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
    """Whether tensors may have derivatives now that are not in their memory: see `derived`."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - as `torch.autograd` asks


def derived(tensor: FrontendTensor) -> str | None:
    """Say which derivative a tensor has that a view of its memory loses; None for those of backward mode."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - it has no public name
        return "is inside a transform of torch.func (grad, jvp, vmap), which hides its memory"
    if torch._C._is_fwd_grad_enabled() and forward_ad.unpack_dual(tensor).tangent is not None:  # noqa: SLF001
        return "has a tangent of torch's forward mode"
    return None


def refuse_derived(name: str, values: Iterable[object]) -> None:
    """Raise where one of a call's values is a tensor with a derivative that no region can order.

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
    """Raise for a tensor whose derivatives a graph function would lose; those of backward mode where gradients are recorded.

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
"""By their bytes, types that CuPy copies as they are."""


def elements(tensor: torch.Tensor) -> View:
    """Return a tensor's elements without their type.

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
    size = tensor.element_size()
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise ArrayTypeError("it has no memory")
    strides = tuple([step * size for step in tensor.stride()])
    return View(pointer, tuple(tensor.shape), strides, np.dtype(_elements[size]), tensor.get_device(), False, tensor)


def empty_like(tensor: torch.Tensor) -> Any:
    """Return a new tensor without gaps, with its axes in the order of another one's."""
    return torch.empty_like(tensor.detach(), memory_format=torch.preserve_format)


def empty_lying_as(tensor: torch.Tensor) -> Any:
    """Return a new tensor with the strides of another one."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], like: torch.Tensor) -> Any:
    """Return a new tensor on another one's device, allocated for torch's current stream; strides in bytes."""
    size = dtype.itemsize
    return torch.empty_strided(shape, [step // size for step in strides], dtype=_types[dtype.name], device=like.device)


def written(tensor: torch.Tensor) -> None:
    """Tell torch that a tensor's memory was written, as its own operations do, so that a backward that needs it says so."""
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
    # The object is no more than the pointer, so an old one is as good as a new one. Given 0, ExternalStream makes a new stream.
    return torch.cuda.ExternalStream(pointer, device) if pointer else torch.cuda.default_stream(device)


def record(value: object, pointer: int, device: int) -> None:
    """Tell torch's allocator that the tensors in a value, also in tuples, lists and dictionaries, are used on a stream."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided]
    if tensors:
        stream = _stream(pointer, device)
        for tensor in tensors:
            tensor.record_stream(stream)


def adopt_recorded(array: torch.Tensor) -> Any:
    """Return a tensor over a CuPy array's memory, for which no stream is made to wait."""
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
    """Call a function with a stream current for torch, and record the tensors that it returns for the caller's stream.

    Or put what it returns into a list, to be held until the recording has ended.
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
    """Memory of torch's allocator for one recording, and for nothing else. Made and used with its device current.

    It is a pool as `torch.cuda.CUDAGraph` has one, and not a `torch.cuda.MemPool`, whose destructor waits for events. Torch
    aborts the process where it comes to that while a capture is under way in any thread.

    Attributes
    ----------
    nbytes : int
        Bytes taken from the device; known once the recording has ended.
    """

    def __init__(self, device: int) -> None:
        # What torch's own graphs call has no public names.
        if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):  # noqa: SLF001
            raise CaptureError(
                f"torch uses the GPU, and torch {torch.__version__} has no memory pool for one thread, which a recording needs: "
                f"use torch 2.8 or newer, or record in a process where torch does not use the GPU"
            )
        self.nbytes = 0
        self._device = device
        self._pool = device, torch.cuda.graph_pool_handle()
        self._there = False  # whether torch knows the pool
        self._entered = ExitStack()
        self._starts: list[int] = []  # of its segments, in order
        self._segments: list[tuple[int, int]] = []  # the end of each, and the stream that it was taken for
        self._looked = -1  # how many bytes torch had taken from the device in all when they were looked up

    def begin(self) -> None:
        """Have this thread's tensors allocated here."""
        self._forget_workspaces()
        # A backward pass in torch's own threads would allocate elsewhere.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._pool)  # noqa: SLF001
        self._there = True
        self._entered.callback(torch._C._cuda_endAllocateToPool, *self._pool)  # noqa: SLF001
        self._before = self._taken()["allocation"]["all"]["allocated"]

    def end(self) -> None:
        """Have them allocated as before."""
        self._entered.close()
        self._forget_workspaces()  # those of the recording stay in the pool, which gives them to nobody from now on
        if self._there:
            self._look()
        self.nbytes = sum(stop - start for start, (stop, _) in zip(self._starts, self._segments, strict=True))

    def check(self) -> None:
        """Raise where the tensors were allocated in another pool, from which others are given their memory later.

        Of pools in use some versions of torch take the one that was entered first.
        """
        self._look()
        if self._starts or self._taken()["allocation"]["all"]["allocated"] == self._before:  # of all threads
            return
        if self.stream_of(torch.empty(1, dtype=torch.uint8, device=f"cuda:{self._device}").data_ptr()) is None:
            raise CaptureError(
                "torch's tensors are allocated in another pool than the recording's, whose memory others are given later: record "
                "outside of torch.cuda.use_mem_pool"
            )

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a tensor's storage was allocated for; None for memory that is not from here."""
        place = bisect_right(self._starts, pointer) - 1
        if place < 0 or self._segments[place][0] <= pointer:
            if self._taken()["reserved_bytes"]["all"]["allocated"] == self._looked:
                return None
            self._look()
            place = bisect_right(self._starts, pointer) - 1
        return self._segments[place][1] if place >= 0 and pointer < self._segments[place][0] else None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where its segments begin and end; known once the recording has ended."""
        return [(start, stop) for start, (stop, _) in zip(self._starts, self._segments, strict=True)]

    def storages(self, *values: object) -> Iterator[tuple[int, Any]]:
        """Yield the storages of the GPU tensors that are reached from values, each with the address that it begins at.

        Of tensors without strided memory the tensors themselves, with numbers that are no addresses.
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
        # What torch's own recordings call, which makes no call of CUDA's: each goes back to the pool that it came from.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001

    def close(self) -> None:
        """Let torch have it back: it goes to the device when torch is short of memory, or is told to empty its cache.

        What a tensor uses stays until that is gone. Makes no call of CUDA's.
        """
        if self._there:
            self._there = False
            torch._C._cuda_releasePool(*self._pool)  # noqa: SLF001


def recording_pool(device: int) -> RecordingPool | None:
    """Return memory for a recording; None where torch's allocator is the driver's own, whose allocations are captured."""
    return RecordingPool(device) if torch.cuda.get_allocator_backend() == "native" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError)


def version(tensor: torch.Tensor) -> int | None:
    """Return what torch counts on with each write to a tensor's storage; None where it does not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name


def storage(tensor: torch.Tensor) -> int:
    """Return what the tensors of one storage have in common."""
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def read_unordered(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a tensor's elements, after torch's current stream; None under a capture, and where it has no bytes."""
    if tensor.layout is not torch.strided or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return np.array(values.cpu().numpy())
    except RuntimeError:
        return None
