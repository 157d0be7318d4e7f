"""Torch: tensors as operands, its current stream, and its allocator told where memory crosses streams.

Torch's allocator gives a freed block back to the arena of the stream that was current when the block was allocated, as CuPy's
does; other than CuPy's it can be told of further streams that use a block (``record_stream``), and then waits for them first.
So a tensor that a branch's own code allocates belongs to the side stream's arena, and what the branch returns is recorded for
the caller's stream (guarantee 8). Arguments are kept to the join.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from handlepool._util import leaves
from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors.frontend import NAMES
from handlepool.tensors.layout import View, as_dtype

T = TypeVar("T")

_dtypes: dict[Any, np.dtype[Any]] = {}
_types = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}


def view(tensor: Any) -> View:
    """Return a tensor as an operand.

    Raises
    ------
    ArgumentError
        For a tensor that requires grad where gradients are recorded: none would be.
    ArrayTypeError
        For a type that cuDNN has not, and for tensors without plain memory (sparse, fake, on the meta device).
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "a tensor requires grad, and graph functions record no gradients: call them under torch.no_grad() or in the forward "
            "of a torch.autograd.Function, or pass tensor.detach()"
        )
    dtype = _dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _dtype(tensor.dtype)
    size = dtype.itemsize
    try:
        pointer = tensor.data_ptr()
        strides = tuple([step * size for step in tensor.stride()])
    except RuntimeError as error:
        raise ArrayTypeError(f"a torch tensor without strided memory ({tensor.layout}): {error}") from error
    if tensor.is_neg() or (not pointer and tensor.numel()):
        raise ArrayTypeError(f"a torch tensor on {tensor.device} that is not in memory as it is; pass a copy")
    return View(pointer, tuple(tensor.shape), strides, dtype, tensor.get_device(), False, tensor)


def _dtype(kind: Any) -> np.dtype[Any]:
    name = str(kind).removeprefix("torch.")
    if name not in NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {name!r}; it has {', '.join(NAMES)}")
    dtype = _dtypes[kind] = as_dtype(name)
    return dtype


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    """Return a new tensor on another one's device, allocated for torch's current stream; strides in bytes."""
    size = dtype.itemsize
    return torch.empty_strided(shape, [step // size for step in strides], dtype=_types[dtype.name], device=like.device)


def written(tensor: Any) -> None:
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


def record(value: Any, pointer: int, device: int) -> None:
    """Tell torch's allocator that the tensors in a value, also in tuples, lists and dictionaries, are used on a stream."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided]
    if tensors:
        stream = _stream(pointer, device)
        for tensor in tensors:
            tensor.record_stream(stream)


def adopt_recorded(array: Any) -> Any:
    """Return a tensor over a CuPy array's memory, for which no stream is made to wait."""
    return torch.from_dlpack(array.__dlpack__(stream=-1))


def run_branch(
    pointer: int, caller: int, device: int, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """Call a function with a stream current for torch, and record the tensors that it returns for the caller's stream."""
    previous = torch.cuda.current_stream(device)
    torch.cuda.set_stream(_stream(pointer, device))
    try:
        value = function(*args, **kwargs)
    finally:
        torch.cuda.set_stream(previous)
    if pointer != caller:
        record(value, caller, device)
    return value


def version(tensor: Any) -> int | None:
    """Return what torch counts on with each write to a tensor's storage; None where it does not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name


def storage(tensor: Any) -> int:
    """Return what the tensors of one storage have in common."""
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def peek(tensor: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a tensor's elements, after torch's current stream; None under a capture, and where it has no bytes."""
    if tensor.layout is not torch.strided or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return np.array(values.cpu().numpy())
    except RuntimeError:
        return None
