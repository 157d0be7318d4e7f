"""Order callers' streams other than CuPy's current stream.

Such streams are torch's current streams, and the streams that arrays of other libraries name as their own.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from handlepool._util.names import name_of
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import CaptureError
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals


def order(pool: PoolInternals, device: int, first: int, then: int) -> None:
    """Let stream ``then`` wait for the present work of stream ``first``.

    Both streams belong to the current device.

    Raises
    ------
    CaptureError
        When exactly one of the two streams is being captured, because the wait would spoil the capture.
    """
    if first == then:
        return
    # While a blocking stream is being captured, CUDA refuses any question about the legacy stream. So the legacy stream counts
    # as not captured.
    captured = [pointer != LEGACY_STREAM and pool.driver.capture_id(pointer) != 0 for pointer in (first, then)]
    if captured[0] != captured[1]:
        raise CaptureError(
            f"stream {(first, then)[captured[1]]:#x} is being captured, and stream {(first, then)[captured[0]]:#x}, "
            "where arrays are in use, is not, so neither may wait for the other. Make the same stream current for CuPy and for "
            "torch, or pass torch's stream, for example to fork(stream=torch.cuda.current_stream())"
        )
    pool.device(device).edges.order(first, then)


def torch_among(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleType | None:
    """Return `handlepool.foreign.torch` if a call has GPU tensors, or None.

    The tensors are among the call's arguments or in its closure.

    Raises
    ------
    ArgumentError
        For a tensor that `refuse_derived` refuses.
    """
    return torch_of(function, leaves(args, kwargs, function, calls=True)) if "torch" in sys.modules else None


def torch_of(function: Any, reached: Iterable[Any]) -> ModuleType | None:
    """Return `handlepool.foreign.torch` if reached values include GPU tensors, or None.

    Raises
    ------
    ArgumentError
        For a tensor that `refuse_derived` refuses.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    # If torch is not loaded, or another thread is importing torch, no value can be a tensor.
    if tensor is None:
        return None
    values = [*reached]
    refuse_derived(function, values)
    return integration() if any(isinstance(value, tensor) and value.is_cuda for value in values) else None


def refuse_derived(function: Any, reached: Iterable[Any]) -> None:
    """Refuse a call with tensors whose derivatives a region cannot order.

    These are tensors of torch's forward mode or of `torch.func`.

    Raises
    ------
    ArgumentError
        For a tensor of this kind.
    """
    # While torch is being imported, it has no forward mode yet. So no tensor has such derivatives.
    if hasattr(getattr(sys.modules.get("torch"), "autograd", None), "forward_ad") and integration().derives():
        integration().refuse_derived(name_of(function), reached)


def torch_in_use(driver: Driver) -> ModuleType | None:
    """Return `handlepool.foreign.torch` if torch uses the driver's GPUs, or None.

    The result does not depend on tensors: torch uses the GPUs as soon as it has initialised CUDA.
    """
    initialised = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return integration() if driver.name == "cuda" and initialised is not None and initialised() else None


@functools.cache
def integration() -> ModuleType:
    """Return `handlepool.foreign.torch`, and import torch.

    Callers call this function only after other code has imported torch.
    """
    from handlepool.foreign import torch

    return torch


def in_torch(
    torch: ModuleType, pointer: int, caller: int, device: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that runs ``function`` on a torch stream.

    ``pointer`` is that stream. ``caller`` is the stream of the code that uses the result.
    """
    held = () if thread.recording is None else (thread.recording.held,)
    return torch.run_branch, (pointer, caller, device, function, args, kwargs, *held), {}
