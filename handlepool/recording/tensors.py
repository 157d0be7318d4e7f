"""Take torch's tensors as inputs and outputs of programs.

A program copies a tensor as an array of the driver over the tensor's memory, on the driver's stream.
"""

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
from handlepool.tensors.layout import HOST, Piece, piece


def takes(driver: Driver, value: object, device: int | None = None) -> bool:
    """Return whether a value is a tensor that the driver can copy.

    If ``device`` is given, the tensor must also be on that device.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None or not isinstance(value, tensor):
        return False
    on_gpu = driver.name == "cuda"
    return value.is_cuda is on_gpu and (not on_gpu or device is None or value.get_device() == device)


def modes() -> tuple[bool, bool, bool]:
    """Return whether torch's gradients, inference mode and autocast are on.

    These modes change the work of torch's operations.
    """
    torch: Any = sys.modules["torch"]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()


def elements(driver: Driver, place: str, tensor: FrontendTensor) -> Any:
    """Return an array over a tensor's memory.

    The array's elements have as many bytes as the tensor's elements, but may have another type.

    Raises
    ------
    ArrayTypeError, ArgumentError
        If the tensor's memory does not hold the elements themselves, or if the tensor has derivatives that a copy would lose. The
        message begins with ``place``.
    """
    try:
        return driver.array_over(integration().elements(tensor))
    except (ArrayTypeError, ArgumentError) as error:
        raise type(error)(f"{place}, a {kind_of(tensor)}: {error}") from error


def check(tensor: FrontendTensor) -> None:
    """Refuse a tensor that `elements` refuses, without making an array.

    Raises
    ------
    ArrayTypeError, ArgumentError
        As in `elements`.
    """
    integration().check_elements(tensor)


def piece_of(tensor: Any) -> Piece:
    """Return a tensor's memory."""
    size = tensor.element_size()
    return piece(tensor.data_ptr(), tensor.shape, [step * size for step in tensor.stride()], size)


def check_alike(driver: Driver, place: str, recorded: Any, given: Any, device: int, *, strides: bool) -> None:
    """Refuse a value that is not like a recorded tensor.

    The caller copies the value into the recorded tensor, or copies the recorded tensor into the value.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
    """
    if not takes(driver, given):
        raise ArrayTypeError(
            f"{place} was recorded as a {kind_of(recorded)}, and is now a {kind_of(given)}; pass a tensor of "
            "the recorded shape and type"
        )
    for what, was, now in (
        ("shape", tuple(recorded.shape), tuple(given.shape)),
        ("type", recorded.dtype, given.dtype),
    ):
        if was != now:
            raise ArgumentError(
                f"{place} was recorded with {what} {was} and now has {what} {now}; pass a tensor of the recorded "
                f"{what}, or record the function again"
            )
    if strides:
        check_strides(place, tuple(recorded.shape), recorded.stride(), given.stride())
    where = given.get_device()
    # The host driver's devices share the host's memory.
    if where not in (device, HOST):
        raise DeviceMismatchError(
            f"{place} is on device {where}, and the program on device {device}; copy the tensor to device {device} first"
        )


def check_strides(place: str, shape: Sequence[int], recorded: Sequence[int], given: Sequence[int], itemsize: int = 1) -> None:
    """Refuse strides that differ from the recorded strides.

    Strides of axes of extent 1 may differ, and so may all strides of an empty array.

    ``itemsize`` is the stride between neighbouring elements. For an array, whose strides are in bytes, it is an element's size in
    bytes. For a tensor, whose strides are in elements, it is 1.

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
        f"{'elements' if itemsize == 1 else 'bytes'}; lay it out as it was recorded{known}, or record the function again for "
        "these strides"
    )


def _same(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return 0 in shape or all(a == b for extent, a, b in zip(shape, one, other, strict=True) if extent != 1)


def in_order(pool: PoolInternals, device: int, pointer: int, step: Callable[[], object]) -> None:
    """Run a step on a stream, ordered with torch's current stream.

    The step waits for torch's current stream, so it may read values that torch has just computed. Torch's stream then waits for
    the step, so torch may reuse the memory of these values at once.
    """
    # With the host driver, torch's tensors are in host memory, and torch has no stream to wait for.
    if pool.driver.name != "cuda":
        step()
        return
    theirs = integration().current_stream(device)
    order(pool, device, theirs, pointer)
    try:
        step()
    # Even if the step failed, torch's stream waits for it, because the step may have enqueued work.
    finally:
        order(pool, device, pointer, theirs)
