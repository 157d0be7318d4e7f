"""Checks of what convolutions are given: raised before a graph is built, in the caller's own words."""

from collections.abc import Mapping
from typing import Any

from handlepool._util.integers import as_integer, at_least
from handlepool._util.wording import shown
from handlepool.errors import ArgumentError
from handlepool.ops.activations import FLOATING_TYPES
from handlepool.tensors.inference import axis_order, dense_strides
from handlepool.tensors.layout import Layout

Pair = int | tuple[int, int]
Shape = tuple[int, ...]


def pair(function: str, name: str, value: Pair) -> list[int]:
    """Stride, padding or dilation along height and width."""
    least = 0 if name == "padding" else 1
    try:
        entries = _two(value)
        if len(entries) == 2 and min(entries) >= least:
            return entries
    except TypeError:
        pass
    raise ArgumentError(f"{function}: {name}={shown(value)}; it must be an integer, or two, each {least} or more")


def _two(value: Any) -> list[int]:
    try:
        return [as_integer(value)] * 2
    except TypeError:
        return [as_integer(entry) for entry in value]


def as_shape(function: str, shape: Any) -> Shape:
    """The shape of what a gradient is taken with respect to."""
    try:
        extents = tuple(map(as_integer, shape))
    except TypeError:
        extents = ()
    if len(extents) != 4 or min(extents) < 1:
        raise ArgumentError(f"{function}: shape={shown(shape)}; it must be four integers, each 1 or more")
    return extents


def check_array(function: str, name: str, layout: Layout, rank: int, like: tuple[str, Any]) -> None:
    """Raise for another rank, a type that is not that of the first array, and for strides that cuDNN does not take."""
    if layout.ndim != rank:
        raise ArgumentError(f"{function}: {name} has {layout.ndim} axes, shape {layout.shape}; it must have {rank}")
    if layout.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"{function}: {name} is {layout.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    if layout.dtype != like[1]:
        raise ArgumentError(f"{function}: {name} is {layout.dtype} and {like[0]} is {like[1]}; convert one of them")
    strides = [stride // layout.dtype.itemsize for stride in layout.strides]
    order = axis_order(layout.shape, strides)
    dense = dense_strides(layout.shape, order)
    packed = all(extent == 1 or a == b for extent, a, b in zip(layout.shape, strides, dense, strict=True))
    if not packed or order not in ((0, 1, 2, 3), (0, 2, 3, 1), (0,)):
        raise ArgumentError(
            f"{function}: {name} of shape {layout.shape} has strides {layout.strides} bytes; cuDNN takes arrays without gaps, "
            f"contiguous or channels-last. Pass a contiguous copy, as from ascontiguousarray({name})"
        )


def check_channels(function: str, image: tuple[str, Shape], weight: tuple[str, Shape], groups: int) -> None:
    """Raise for groups that are none, and for channels of images and filters (K, C / groups, R, S) that do not fit."""
    groups = at_least(1, f"{function}: groups", groups)
    (x, x_shape), (w, w_shape) = image, weight
    if w_shape[1] * groups != x_shape[1]:
        raise ArgumentError(
            f"{function}: {x_shape[1]} channels in {x} {x_shape} and {w_shape[1]} x groups={groups} in {w} {w_shape}; {w} must "
            f"be (K, C / groups, R, S)"
        )
    if w_shape[0] % groups:
        raise ArgumentError(f"{function}: {groups} groups, which do not divide {w_shape[0]} filters in {w} {w_shape}")


def check_result(function: str, x: Shape, w: Shape, dy: Shape, pairs: Mapping[str, Pair]) -> None:
    """Raise where images and filters do not lead to the result whose gradient was given."""
    stride, padding, dilation = (pair(function, name, pairs[name]) for name in ("stride", "padding", "dilation"))
    extents = tuple(
        (x[axis + 2] + 2 * padding[axis] - (w[axis + 2] - 1) * dilation[axis] - 1) // stride[axis] + 1 for axis in (0, 1)
    )
    if dy != (x[0], w[0], *extents):
        raise ArgumentError(
            f"{function}: images {x} and filters {w} lead to {(x[0], w[0], *extents)}, and dy is {dy}; correct the shape, or "
            f"stride, padding and dilation"
        )
