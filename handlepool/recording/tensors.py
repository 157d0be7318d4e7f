"""Torch's tensors as inputs and outputs of programs: their elements as arrays of the driver's, copied on the driver's stream."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from handlepool._util.names import kind_of
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.order.stream_order import integration, order
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.graph_types import FrontendTensor
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import HOST


def takes(driver: Driver, value: object, device: int | None = None) -> bool:
    """Whether a value is a tensor that the driver can copy, on a device if one is given."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None or not isinstance(value, tensor):
        return False
    on_gpu = driver.name == "cuda"
    return value.is_cuda is on_gpu and (not on_gpu or device is None or value.get_device() == device)


def modes() -> tuple[bool, bool, bool]:
    """Return whether torch is in a mode that changes its operations: gradients, inference, and autocast."""
    torch: Any = sys.modules["torch"]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()


def elements(driver: Driver, place: str, tensor: FrontendTensor) -> Any:
    """Return an array over a tensor's memory, of as many bytes an element and without its type.

    Raises
    ------
    ArrayTypeError, ArgumentError
        For tensors whose elements are not in memory as they are, and for those with derivatives that a copy loses.
    """
    try:
        return driver.array_over(integration().elements(tensor))
    except (ArrayTypeError, ArgumentError) as error:
        raise type(error)(f"{place}, a {kind_of(tensor)}: {error}") from error


def check_alike(driver: Driver, place: str, recorded: Any, given: Any, device: int, *, strides: bool) -> None:
    """Refuse what cannot be copied into, or from, a tensor that was recorded.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
    """
    if not takes(driver, given):
        raise ArrayTypeError(
            f"{place} was recorded as a {kind_of(recorded)}, and is now a {kind_of(given)}; pass a tensor like it"
        )
    for what, was, now in (
        ("shape", tuple(recorded.shape), tuple(given.shape)),
        ("type", recorded.dtype, given.dtype),
    ):
        if was != now:
            raise ArgumentError(f"{place} was recorded with {what} {was} and now has {what} {now}; record it again for that")
    if strides:
        check_strides(place, tuple(recorded.shape), recorded.stride(), given.stride())
    where = given.get_device()
    if where not in (device, HOST):  # the host driver's devices share the host's memory
        raise DeviceMismatchError(f"{place} is on device {where}, and the program on device {device}; copy it there first")


def check_strides(place: str, shape: Sequence[int], recorded: Sequence[int], given: Sequence[int], itemsize: int = 1) -> None:
    """Refuse what lies otherwise than what was recorded; strides of axes of extent 1 say nothing, nor those of no element.

    ``itemsize`` is how much an element counts in the strides: its bytes in those of an array, 1 in a tensor's.

    Raises
    ------
    ArgumentError
    """
    if _same(shape, recorded, given):
        return
    axes = tuple(range(len(shape)))
    orders = {"contiguous": axes, "channels-last": (*axes[:1], *axes[2:], *axes[1:2])}
    dense = {name: [step * itemsize for step in dense_strides(shape, order)] for name, order in orders.items()}
    known = next((f", {name}" for name, steps in dense.items() if _same(shape, recorded, steps)), "")
    raise ArgumentError(
        f"{place} was recorded with strides {tuple(recorded)} and now has strides {tuple(given)}, in "
        f"{'elements' if itemsize == 1 else 'bytes'}; lay it out as it was recorded{known}, or record it again for that"
    )


def _same(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return 0 in shape or all(a == b for extent, a, b in zip(shape, one, other, strict=True) if extent != 1)


def in_order(pool: PoolInternals, device: int, pointer: int, step: Callable[[], object]) -> None:
    """Do something with tensors on a stream: after torch's current one, which goes on after it.

    So torch may have made the values just now, and may give their memory to others at once.
    """
    if pool.driver.name != "cuda":  # torch's tensors have no stream
        step()
        return
    theirs = integration().current_stream(device)
    order(pool, device, theirs, pointer)
    try:
        step()
    finally:
        order(pool, device, pointer, theirs)
