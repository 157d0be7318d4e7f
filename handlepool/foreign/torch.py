"""Use torch's tensors, current stream and allocator.

Tensors can be operands. The module tells torch's allocator when memory of one stream is used on another stream.

Like CuPy's allocator, torch's allocator has an arena for each stream, and returns a freed block to the arena of the stream that
was current at the allocation. Unlike CuPy's allocator, it can also record further streams that use a block (``record_stream``).
It then waits for the work of these streams before it reuses the block. A tensor that a branch's own code allocates belongs to
the side stream's arena. So this module records the caller's stream for the branch's results (guarantee 8). Arguments are kept
alive until the join.

A recording allocates from a memory pool of its own in torch. For blocks of this pool, this module records no further streams.
If it did, torch would record an event on each such stream when the block is freed. By then the stream may be destroyed or have
another owner. Instead, the recording itself keeps all memory alive that several streams use.

For cuBLAS, torch keeps a workspace for each stream pointer. A graph that was captured on a stream uses the stream's workspace
at each replay. So no other work runs on the stream of a recording as long as the program lives. A recording must neither use a
workspace that torch allocated before, nor leave its own workspace to a later stream with the same pointer. So this module makes
torch drop all workspaces before and after a recording.
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
    """Return a `View` of ``tensor``, with which a launch takes the tensor.

    Raises
    ------
    ArgumentError
        For a tensor whose derivatives would be lost.
    ArrayTypeError
        For a type that cuDNN lacks, and for a tensor without ordinary memory (sparse, fake, or on the meta device).
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
        raise ArrayTypeError(
            f"an operand is a torch tensor without strided memory ({tensor.layout}), so pass a dense tensor: {error}"
        ) from error
    if tensor.is_neg() or (not pointer and tensor.numel()):
        raise ArrayTypeError(
            f"the memory of a torch tensor on {tensor.device} is missing or holds negated values; pass a copy, for example "
            "tensor.resolve_neg()"
        )
    return View(pointer, tuple(tensor.shape), strides, dtype, tensor.get_device(), False, tensor)


def derives() -> bool:
    """Return whether forward mode or a transform of `torch.func` is active.

    If the result is false, no tensor has a derivative of these two kinds, and `derived` need not be called.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - as `torch.autograd` asks


def derived(tensor: FrontendTensor) -> str | None:
    """Describe a derivative of ``tensor`` that a view would lose.

    Return a phrase for messages, or None if ``tensor`` has no such derivative. Derivatives of backward mode do not count here.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - it has no public name
        return "is inside a transform of torch.func (grad, jvp, vmap), which hides its memory"
    if torch._C._is_fwd_grad_enabled() and forward_ad.unpack_dual(tensor).tangent is not None:  # noqa: SLF001
        return "has a tangent of torch's forward mode"
    return None


def refuse_derived(name: str, values: Iterable[object]) -> None:
    """Raise for an argument with a derivative of forward mode or `torch.func`.

    A region cannot order work on such derivatives. ``name`` is the called function, and ``values`` are its arguments.

    Raises
    ------
    ArgumentError
    """
    for value in values:
        if isinstance(value, torch.Tensor) and (found := derived(value)) is not None:
            raise ArgumentError(
                f"{name} was given a tensor that {found}, so a region cannot order the call: call {name} outside of regions and "
                f"programs, or pass plain tensors, such as torch.autograd.forward_ad.unpack_dual(tensor).primal"
            )


def _refuse_derivatives(tensor: torch.Tensor) -> None:
    """Raise for a tensor whose derivatives a graph function would lose.

    Derivatives of backward mode count only while torch records gradients.

    Raises
    ------
    ArgumentError
    """
    if (found := derived(tensor)) is not None:
        raise ArgumentError(
            f"a tensor {found}, and graph functions compute no derivatives: call them in a torch.autograd.Function "
            f"that has a jvp and a vmap, or call handlepool.integrations.torch.conv2d, or pass a plain tensor"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "a tensor requires grad, and graph functions record no gradients: call them under torch.no_grad() or in the forward "
            "of a torch.autograd.Function, or pass tensor.detach()"
        )


def _dtype(kind: object) -> np.dtype[Any]:
    name = str(kind).removeprefix("torch.")
    if name not in NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {name!r}; convert the tensor to one of {', '.join(NAMES)}")
    dtype = _dtypes[kind] = as_dtype(name)
    return dtype


_elements = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""The NumPy type that stands for elements of each size in bytes.

CuPy copies elements of these types without a change of their bits.
"""


def check_elements(tensor: torch.Tensor) -> int:
    """Check that a tensor's memory holds its values; return the address.

    Raises
    ------
    ArgumentError
        For a tensor whose forward derivatives would be lost.
    ArrayTypeError
        For a tensor without strided memory, and for a tensor whose memory holds its values negated or conjugated.
    """
    if derives() and (found := derived(tensor)) is not None:
        raise ArgumentError(f"the tensor {found}, which a copy would lose; pass a plain tensor")
    if tensor.layout is not torch.strided:
        raise ArrayTypeError(f"the tensor has no strided memory ({tensor.layout}); pass a dense tensor")
    if tensor.is_neg() or tensor.is_conj():
        raise ArrayTypeError(
            "the tensor's memory holds negated or conjugated values; pass a copy, such as tensor.resolve_conj().resolve_neg()"
        )
    pointer: int = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise ArrayTypeError("the tensor has no memory; pass a tensor with values")
    return pointer


def elements(tensor: torch.Tensor) -> View:
    """Return a view of a tensor's elements as plain bits.

    The view has a NumPy type of the same element size. A copy in this type keeps all bits.

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

    The function copies a call's arguments into ``inputs``, launches, and returns new tensors with the values of ``outputs``. For
    each index in ``back``, it copies the input back into the argument. Torch's current stream must be the stream of the launch.
    ``relaxed`` is `Driver.relaxed`, which permits allocations while other threads capture.
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
    """Return a new tensor like ``tensor``, without gaps between elements.

    The axes lie in memory in the same order as in ``tensor``.
    """
    return torch.empty_like(tensor.detach(), memory_format=torch.preserve_format)


def empty_lying_as(tensor: torch.Tensor) -> Any:
    """Return a new tensor with the strides of ``tensor``."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], like: torch.Tensor) -> Any:
    """Return a new tensor on the device of ``like``.

    Torch allocates the tensor for its current stream. Strides are in bytes.
    """
    size = dtype.itemsize
    return torch.empty_strided(shape, [step // size for step in strides], dtype=_types[dtype.name], device=like.device)


def written(tensor: torch.Tensor) -> None:
    """Tell torch that the memory of ``tensor`` was written.

    Torch's own operations also tell torch of their writes. A backward pass that needs the old values then raises, instead of
    computing with the new values.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def current_stream(device: int) -> int:
    """Return the pointer of torch's current stream on a device."""
    try:
        pointer: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - takes 0.1 µs; the public function 3.7
    except AttributeError:
        pointer = torch.cuda.current_stream(device).cuda_stream
    return pointer


@functools.lru_cache(256)
def _stream(pointer: int, device: int) -> Any:
    # The object holds only the pointer, so a cached object stays valid if the driver reuses the pointer. The pointer 0 is the
    # default stream; for 0, `ExternalStream` would make a new stream.
    return torch.cuda.ExternalStream(pointer, device) if pointer else torch.cuda.default_stream(device)


def record(value: object, pointer: int, device: int) -> None:
    """Tell torch's allocator that a stream uses the tensors in ``value``.

    Tensors in tuples, lists and dictionaries are included.
    """
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided]
    if tensors:
        stream = _stream(pointer, device)
        for tensor in tensors:
            tensor.record_stream(stream)


def adopt_recorded(array: torch.Tensor) -> Any:
    """Return a tensor over the memory of the CuPy array ``array``.

    The stream -1 asks DLPack for no wait. An ordinary exchange would make torch's current stream wait for CuPy's stream.
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
    """Call a function while torch's current stream is ``pointer``.

    Torch's allocator notes that the caller's stream uses the tensors that the function returns. If the list ``held`` is given,
    the tensors are added to the list instead, and so stay alive until the recording has ended.
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
    """A memory pool of torch's allocator, for one recording alone.

    The pool's device must be the current device when the pool is made and used.

    `torch.cuda.CUDAGraph` uses the same kind of pool. A `torch.cuda.MemPool` would not do, because its destructor waits for
    events. If any thread captures during such a wait, torch aborts the process.

    Attributes
    ----------
    nbytes : int
        Bytes that the pool has taken from the device. The number is set when the recording ends.
    """

    def __init__(self, device: int) -> None:
        # These functions have no public names. Torch's own graphs call them.
        if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):  # noqa: SLF001
            raise CaptureError(
                f"a recording needs a memory pool of torch for one thread, which torch {torch.__version__} lacks: "
                f"use torch 2.8 or newer, or record in a process where torch does not use the GPU"
            )
        self.nbytes = 0
        self._device = device
        # `_there` tells whether torch knows the pool, and `_kept` whether an earlier recording used it.
        self._there = self._kept = (spare := _spare_pool(device)) is not None
        self._pool = spare or (device, torch.cuda.graph_pool_handle())
        self._entered = ExitStack()
        # Start addresses of the pool's segments, in order.
        self._starts: list[int] = []
        # The end address of each segment, and the stream for which torch took the segment.
        self._segments: list[tuple[int, int]] = []
        # The bytes that torch had taken from the device when `_look` last read the segments.
        self._looked = -1

    def begin(self) -> None:
        """Start allocating this thread's tensors in this pool."""
        self._forget_workspaces()
        # A backward pass in threads of torch would allocate outside of the pool.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._pool)  # noqa: SLF001
        if self._there:
            # Torch counts the uses of a pool, and drops a pool without uses. So the former recording's use is released only here,
            # after this recording's use was added.
            torch._C._cuda_releasePool(*self._pool)  # noqa: SLF001
        self._there = True
        self._entered.callback(torch._C._cuda_endAllocateToPool, *self._pool)  # noqa: SLF001
        self._before = self._taken()["allocation"]["all"]["allocated"]

    def end(self) -> None:
        """Stop allocating this thread's tensors in this pool."""
        self._entered.close()
        # The memory of the recording's workspaces stays in the pool, which allocates nothing more from now on.
        self._forget_workspaces()
        if self._there:
            self._look()
        self.nbytes = sum(stop - start for start, (stop, _) in zip(self._starts, self._segments, strict=True))

    def check(self) -> None:
        """Raise if the recording's tensors were allocated in another pool.

        The other pool would later give their memory to other users. If a thread has entered two pools, some versions of torch
        use the pool that was entered first.
        """
        self._look()
        # In two cases, no tensor can be in another pool. Either this pool is new and has memory, which means that the tensors
        # are in this pool. Or torch has allocated no tensor in any thread since `begin`.
        own = self._starts and not self._kept
        if own or self._taken()["allocation"]["all"]["allocated"] == self._before:
            return
        # A tensor of one byte shows whether this thread's allocations come from this pool.
        if self.stream_of(torch.empty(1, dtype=torch.uint8, device=f"cuda:{self._device}").data_ptr()) is None:
            raise CaptureError(
                "torch allocated a recording's tensors in another pool than the recording's own, and that pool would reuse the "
                "memory of these tensors: record outside of torch.cuda.use_mem_pool"
            )

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream for which a tensor's storage was allocated.

        Return None for memory outside of this pool.
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

        The list is complete once the recording has ended.
        """
        return [(start, stop) for start, (stop, _) in zip(self._starts, self._segments, strict=True)]

    def storages(self, *values: object) -> Iterator[tuple[int, Any]]:
        """Yield the storages of all GPU tensors in ``values``.

        Each storage is paired with its start address. For a tensor without strided memory, the pair is a negative number and
        the tensor itself.
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
        # This call asks for the segments of all pools. If it asked for a single pool, torch 2.11 would drop a reference to the
        # integers that name the pool. After a few such calls CPython crashes.
        found = sorted(
            (each["address"], each["total_size"], each["stream"])
            for each in torch.cuda.memory_snapshot()
            if each["segment_pool_id"] == self._pool[1]
        )
        self._starts = [start for start, _, _ in found]
        self._segments = [(start + size, stream) for start, size, stream in found]

    @staticmethod
    def _forget_workspaces() -> None:
        # Torch's own recordings also call this function, which does not call CUDA. The memory of each workspace returns to the
        # pool that the workspace was allocated from.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001

    def close(self) -> None:
        """Return the memory to torch, or keep it for a later recording.

        Up to `MOST_SPARE` pools of a device are kept. The memory of further pools returns to the device when torch is short of
        memory, or is told to empty its cache. Memory of a live tensor stays until the tensor is gone. The method does not call
        CUDA.
        """
        if self._there:
            self._there = False
            spare = _spare.setdefault(self._device, [])
            if len(spare) < MOST_SPARE:
                spare.append(self._pool)
            else:
                torch._C._cuda_releasePool(*self._pool)  # noqa: SLF001


MOST_SPARE = 2
"""The maximum number of pools of a device kept for later recordings.

A kept pool belonged to a recording that was closed. Torch does not use the memory of a released pool for other allocations. So
without kept pools, each recording would take 2 MiB or more from the device, until torch is short of memory.
"""
_spare: dict[int, list[tuple[int, Any]]] = {}
"""The kept pools by device.

Appends and pops are atomic. Two threads that close at once may keep one pool more than `MOST_SPARE`.
"""


def _spare_pool(device: int) -> tuple[int, Any] | None:
    """Take a pool without live tensors from `_spare`, or return None.

    No work uses the pool's memory any more, because a program is closed only after its last replay has ended.
    """
    spare = _spare.get(device)
    if not spare:
        return None
    # A pool with a live tensor is not reused. Once the tensor is gone, the new recording would use its memory again, while
    # streams may still read it.
    live = {each["segment_pool_id"] for each in torch.cuda.memory_snapshot() if each["active_size"]}
    for _ in range(len(spare)):
        try:
            pool = spare.pop(0)
        except IndexError:
            # Another thread has taken the last pool meanwhile.
            return None
        if pool[1] not in live:
            return pool
        spare.append(pool)
    return None


def recording_pool(device: int) -> RecordingPool | None:
    """Return a memory pool for a recording, or None.

    A recording needs no pool if torch allocates by ``cudaMallocAsync``, because a capture contains such allocations as nodes.
    """
    return RecordingPool(device) if torch.cuda.get_allocator_backend() == "native" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch's error for a lack of memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError)


def version(tensor: torch.Tensor) -> int | None:
    """Return torch's count of writes to a tensor's storage.

    Return None for an inference tensor, whose writes torch does not count.
    """
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name


def storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def read_unordered(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a tensor's elements, as a NumPy array.

    The bytes are read after the present work of torch's current stream. The result is None if this stream is capturing, or if
    the bytes cannot be read.
    """
    if tensor.layout is not torch.strided or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return np.array(values.cpu().numpy())
    except RuntimeError:
        return None
