"""Define the resizing of images, by a kernel of this package."""

import math
from collections.abc import Sequence
from typing import Any, Never

import numpy as np

from handlepool._util.arguments import flag
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.kernel import Resample
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, lying_as
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import FLOATING_TYPES
from handlepool.ops.convolution import Pair, pair
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout

MODES = ("nearest", "bilinear")
MOST_SIDE = 1 << 24
"""The maximum number of pixels along an axis.

Torch computes the places of pixels in float32, which represents every integer up to this bound.
"""


@launches
@by_keyword
def interpolate2d(
    x: ArrayT,
    *extra: Never,
    size: Pair | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Resize images, on the current stream.

    The result equals that of torch's ``interpolate``.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32. They may be any view without negative strides. Channels-last images are the
        quickest.
    size : int or (int, int), optional
        Height and width of the result. Give either ``size`` or ``scale_factor``.
    scale_factor : number or (number, number), optional
        Factors for height and width. The resulting extents are rounded down.
    mode : {"nearest", "bilinear"}
        As in torch, "nearest" rounds a place down to a pixel, instead of taking the nearest pixel.
    align_corners : bool
        In mode "bilinear", whether the centres of the corner pixels of both images coincide.
    out : array, shape (N, C, P, Q), optional
        Array for the result, with any strides. Without ``out`` the result has the layout of x, without gaps.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, C, P, Q)
        ``out``, or a new array of the kind and type of x. The result is computed in float32.

    Raises
    ------
    ArgumentError
        For unsupported sizes, types, strides and options.

    Examples
    --------
    >>> y = handlepool.interpolate2d(x, scale_factor=2, mode="bilinear")                 # doctest: +SKIP
    """
    if extra:
        raise misplaced(interpolate2d, extra)
    return _interpolate.call((x,), out, pool, (size, scale_factor, mode, align_corners))


def _options(size: object, scale_factor: object, mode: object, align_corners: object) -> dict[str, Any]:
    name = "interpolate2d"
    if (size is None) == (scale_factor is None):
        raise ArgumentError(f"{name}: size={shown(size)} and scale_factor={shown(scale_factor)}; give exactly one of these")
    if not isinstance(mode, str) or mode not in MODES:
        raise ArgumentError(f"{name}: mode={shown(mode)}; it can be {' or '.join(MODES)}")
    corners = flag(f"{name}: align_corners", align_corners)
    if corners and mode == "nearest":
        raise ArgumentError(f"{name}: align_corners=True with mode='nearest', which has no corners; leave align_corners= out")
    found = None if size is None else pair(name, "size", size)
    return {"size": found, "factors": _factors(scale_factor), "mode": mode, "align_corners": corners}


def _factors(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    both = value if isinstance(value, (list, tuple)) else (value, value)
    try:
        if len(both) != 2 or any(isinstance(each, (bool, str, bytes)) or holds_values(each) for each in both):
            raise TypeError
        one, other = map(float, both)
        if min(one, other) > 0 and max(one, other) < math.inf:
            return one, other
    except (TypeError, ValueError, OverflowError):
        pass
    raise ArgumentError(f"interpolate2d: scale_factor={shown(value)}; it must be a number, or two numbers, each above 0")


def _describe(
    layouts: tuple[Layout, ...],
    *,
    size: tuple[int, int] | None,
    factors: tuple[float, float] | None,
    mode: Any,
    align_corners: bool,
) -> Described:
    (x,) = layouts
    if x.ndim != 4:
        raise ArgumentError(f"interpolate2d: x has {x.ndim} axes, shape {x.shape}; it must have 4, (N, C, H, W)")
    if x.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"interpolate2d: x is {x.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    check_strides("x of interpolate2d", x)
    extents = x.shape[2:]
    counts = size or tuple(math.floor(extent * factor) for extent, factor in zip(extents, factors or (), strict=True))
    if min(extents) < 1 or min(counts) < 1 or max(*extents, *counts) > MOST_SIDE:
        raise ArgumentError(
            f"interpolate2d: images of {extents[0]} x {extents[1]} pixels cannot become {counts[0]} x {counts[1]} pixels; both "
            f"sizes must be 1 to {MOST_SIDE:,} pixels along each axis"
        )
    scales = [_scale(*axis, align_corners) for axis in zip(extents, counts, factors or (None, None), strict=True)]
    return Resample(mode, (scales[0], scales[1]), align_corners), lying_as(x, (*x.shape[:2], *counts))


def _scale(extent: int, count: int, factor: float | None, corners: bool) -> float:
    """Return the input pixels per output pixel, rounded as in torch."""
    if corners:
        return float(np.float32(extent - 1) / np.float32(count - 1)) if count > 1 else 0.0
    return float(np.float32(extent) / np.float32(count)) if factor is None else float(np.float32(1 / factor))


_interpolate = KernelFunction(_describe, "interpolate2d", _options)
