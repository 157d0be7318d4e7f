"""Callers' streams that are not CuPy's current one: torch's, and those that arrays say they are in use on."""

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
    """Let a stream wait for what another one of the current device was given by now.

    Raises
    ------
    CaptureError
        When one of the two is being captured and the other is not: the attempt would spoil the capture.
    """
    if first == then:
        return
    captured = [pointer != LEGACY_STREAM and pool.driver.capture_id(pointer) != 0 for pointer in (first, then)]
    if captured[0] != captured[1]:
        raise CaptureError(
            f"stream {(first, then)[captured[1]]:#x} is being captured and stream {(first, then)[captured[0]]:#x}, which arrays "
            f"are in use on, is not: make one stream current for CuPy and for torch, or fork(stream=torch.cuda.current_stream())"
        )
    pool.device(device).edges.order(first, then)


def torch_among(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleType | None:
    """`handlepool.foreign.torch` where there are GPU tensors among a call's arguments or what its closure holds, or None.

    Raises
    ------
    ArgumentError
        As `refuse_derived`.
    """
    return torch_of(function, leaves(args, kwargs, function, calls=True)) if "torch" in sys.modules else None


def torch_of(function: Any, reached: Iterable[Any]) -> ModuleType | None:
    """`handlepool.foreign.torch` where there are GPU tensors among the values that a call reaches, or None.

    Raises
    ------
    ArgumentError
        As `refuse_derived`.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:  # not loaded, or being imported just now
        return None
    values = [*reached]
    refuse_derived(function, values)
    return integration() if any(isinstance(value, tensor) and value.is_cuda for value in values) else None


def refuse_derived(function: Any, reached: Iterable[Any]) -> None:
    """Refuse a call with tensors of torch's forward mode or of `torch.func`, whose derivatives no region sees.

    Raises
    ------
    ArgumentError
    """
    # A torch that is being imported just now has no forward mode yet.
    if hasattr(getattr(sys.modules.get("torch"), "autograd", None), "forward_ad") and integration().derives():
        integration().refuse_derived(name_of(function), reached)


def torch_in_use(driver: Driver) -> ModuleType | None:
    """`handlepool.foreign.torch` where torch is loaded and uses the driver's GPUs, for whatever tensors there are; or None."""
    initialised = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return integration() if driver.name == "cuda" and initialised is not None and initialised() else None


@functools.cache
def integration() -> ModuleType:
    """`handlepool.foreign.torch`, which imports torch: asked for when a tensor was met."""
    from handlepool.foreign import torch

    return torch


def in_torch(
    torch: ModuleType, pointer: int, caller: int, device: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that makes another one with a stream current for torch, too."""
    held = () if thread.recording is None else (thread.recording.held,)
    return torch.run_branch, (pointer, caller, device, function, args, kwargs, *held), {}
