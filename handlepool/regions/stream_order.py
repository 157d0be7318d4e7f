"""Callers' streams that are not CuPy's current one: torch's, and those that arrays say they are in use on."""

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from handlepool.drivers.protocol import LEGACY_STREAM
from handlepool.errors import CaptureError
from handlepool.pool.internals import PoolInternals
from handlepool.regions.memory import content

_DEEPEST = 4
"""Levels of lists, tuples and dictionaries in which torch's tensors are looked for among a branch's arguments."""


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


def torch_among(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`handlepool.integrations.torch` where there are GPU tensors among a call's arguments or what its closure holds, or None."""
    if "torch" not in sys.modules:
        return None
    tensor = getattr(sys.modules["torch"], "Tensor", None)
    if tensor is None:  # being imported just now
        return None
    if not _has((args, kwargs), tensor, _DEEPEST):
        inner = getattr(function, "__func__", function)
        cells = inner.__closure__ or () if isinstance(inner, FunctionType) else ()
        bound = (getattr(function, "args", ()), getattr(function, "keywords", None), getattr(function, "__self__", None))
        if not _has(bound, tensor, 2) and not any(_has(content(cell), tensor, 2) for cell in cells):
            return None
    return integration()


def _has(value: Any, tensor: type, depth: int) -> bool:
    if isinstance(value, tensor):
        return bool(value.is_cuda)  # type: ignore[attr-defined]
    if not depth:
        return False
    if isinstance(value, (tuple, list)):
        return any(_has(entry, tensor, depth - 1) for entry in value)
    return isinstance(value, dict) and any(_has(entry, tensor, depth - 1) for entry in value.values())


@functools.cache
def integration() -> Any:
    """`handlepool.integrations.torch`, which imports torch: asked for when a tensor was met."""
    from handlepool.foreign import torch

    return torch


def in_torch(
    torch: Any, pointer: int, caller: int, device: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call that makes another one with a stream current for torch, too."""
    return torch.run_branch, (pointer, caller, device, function, args, kwargs), {}
