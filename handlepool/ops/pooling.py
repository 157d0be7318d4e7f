"""Define pooling: maxima and means of windows and of whole images.

The operations use kernels of this package.
"""

from functools import partial
from typing import Any, Literal, Never

from handlepool._util.arguments import flag
from handlepool._util.names import shown
from handlepool.drivers.kernel import Windows
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, dense, lying_as
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import FLOATING_TYPES
from handlepool.ops.convolution import Pair, pair
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout


@launches
@by_keyword
def max_pool2d(
    x: ArrayT,
    window: Pair,
    *extra: Never,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Take each window's largest element, on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32. They may be any view of a contiguous or channels-last array. Channels-last
        images whose channels are a multiple of eight are the quickest.
    window : int or (int, int)
        Height and width, in pixels.
    stride : int or (int, int), optional
        Distance from window to window, in pixels. As in torch, the default is the window's height and width.
    padding : int or (int, int)
        Pixels added on both sides. They are never the largest element of a window. They are at most half of the window, and at
        most the image's pixels along that axis.
    ceil_mode : bool
        Whether P and Q are rounded up. As in torch, the last window may then exceed the padded image. This window is used only
        if it begins in the image or in the padding before the image.
    out : array, shape (N, C, P, Q), optional
        Array for the result, of any layout. It may be a slice of the channels of a larger array. Without ``out`` the result has
        the layout of ``x``, contiguous or channels-last.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, C, P, Q)
        ``out``, or a new array of the kind and type of ``x``. P is (H + 2 padding - window) // stride + 1, and Q likewise. If a
        window contains a NaN, its result is NaN.

    Raises
    ------
    ArgumentError
        For a window that exceeds the padded image, and for unsupported types, strides and numbers.
    """
    if extra:
        raise misplaced(max_pool2d, extra)
    return _max.call((x,), out, pool, (window, stride, padding, ceil_mode))


@launches
@by_keyword
def avg_pool2d(
    x: ArrayT,
    window: Pair,
    *extra: Never,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Take each window's mean, on the current stream.

    The mean is computed in float32.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images, as in `handlepool.max_pool2d`.
    window, stride, ceil_mode, out, pool
        As in `handlepool.max_pool2d`. Pixels beyond the padded image never count.
    padding : int or (int, int)
        Pixels of value 0 added on both sides. They are at most half of the window, and at most the image's pixels along that
        axis.
    count_include_pad : bool
        Whether pixels of the padding count in the divisor of a mean, as in torch by default. Otherwise only pixels inside the
        image count.

    Returns
    -------
    array, shape (N, C, P, Q)
        As in `handlepool.max_pool2d`.

    Raises
    ------
    ArgumentError
        As in `handlepool.max_pool2d`.
    """
    if extra:
        raise misplaced(avg_pool2d, extra)
    return _mean_of_windows.call((x,), out, pool, (window, stride, padding, ceil_mode, count_include_pad))


@launches
@by_keyword
def mean2d(x: ArrayT, *extra: Never, keepdims: bool = False, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Take each channel's mean per image, on the current stream.

    The mean is computed in float32.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images, as in `handlepool.max_pool2d`.
    keepdims : bool
        Whether the result has two axes of extent 1 after the channels.
    out : array, shape (N, C) or (N, C, 1, 1), optional
        Array for the result.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, C) or (N, C, 1, 1)
        ``out``, or a new contiguous array of the kind and type of ``x``.

    Raises
    ------
    ArgumentError
        For unsupported types and strides, and for images without pixels, which have no mean.
    """
    if extra:
        raise misplaced(mean2d, extra)
    return _mean.call((x,), out, pool, (keepdims,))


def _check(name: str, layouts: tuple[Layout, ...]) -> Layout:
    if len(layouts) != 1 or layouts[0].ndim != 4:
        shapes = ", ".join(str(layout.shape) for layout in layouts)
        raise ArgumentError(f"{name} takes one array of images (N, C, H, W), not {shapes}")
    (x,) = layouts
    if x.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"{name}: x is {x.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    check_strides(f"x of {name}", x)
    return x


def _describe(
    name: str,
    kind: Literal["max", "mean"],
    layouts: tuple[Layout, ...],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil_mode: bool,
    count_include_pad: bool = True,
) -> Described:
    x = _check(name, layouts)
    if padding[0] > x.shape[2] or padding[1] > x.shape[3]:
        raise ArgumentError(
            f"{name}: a padding of {padding[0]} and {padding[1]} pixels exceeds the size of the images, "
            f"{x.shape[2]} x {x.shape[3]} pixels; give less padding"
        )
    kernel = Windows(kind, window, stride, padding, count_include_pad, ceil_mode)
    count = kernel.count(*x.shape[2:])
    if min(count) < 1:
        raise ArgumentError(
            f"{name}: a window of {window[0]} x {window[1]} pixels exceeds images of {x.shape[2]} x {x.shape[3]} with a padding "
            f"of {padding[0]} and {padding[1]} on both sides; give a smaller window"
        )
    return kernel, lying_as(x, (*x.shape[:2], *count))


def _describe_max(layouts: tuple[Layout, ...], **how: Any) -> Described:
    return _describe("max_pool2d", "max", layouts, **how)


def _describe_mean(layouts: tuple[Layout, ...], **how: Any) -> Described:
    return _describe("avg_pool2d", "mean", layouts, **how)


def _describe_whole(layouts: tuple[Layout, ...], *, keepdims: bool) -> Described:
    x = _check("mean2d", layouts)
    images, channels, height, width = x.shape
    if images * channels and not height * width:
        raise ArgumentError(
            f"mean2d: images of shape {x.shape} have no pixels, and a mean of no pixels is no number; pass images with pixels"
        )
    shape = (images, channels, 1, 1) if keepdims else (images, channels)
    # The kernel treats the whole image as one window.
    return Windows("mean", (height, width)), dense(shape, x.dtype)


def _options(name: str, window: object, stride: object, padding: object, ceil_mode: object) -> dict[str, Any]:
    rows, columns = size = pair(name, "window", window)
    margins = pair(name, "padding", padding, 0)
    # With more padding, a window could lie outside of the image, and would have no largest pixel.
    if margins[0] * 2 > rows or margins[1] * 2 > columns:
        raise ArgumentError(
            f"{name}: padding={shown(padding)} is more than half of a window of {rows} x {columns} pixels, so some "
            "windows would hold no pixel of the image; give less padding, or pad the image with handlepool.pad"
        )
    steps = size if stride is None else pair(name, "stride", stride)
    return {"window": size, "stride": steps, "padding": margins, "ceil_mode": flag(f"{name}: ceil_mode", ceil_mode)}


def _options_of_mean(*how: object) -> dict[str, Any]:
    *windows, counted = how
    options = _options("avg_pool2d", *windows)
    return {**options, "count_include_pad": flag("avg_pool2d: count_include_pad", counted)}


def _options_of_whole(keepdims: object) -> dict[str, Any]:
    return {"keepdims": flag("mean2d: keepdims", keepdims)}


_max = KernelFunction(_describe_max, "max_pool2d", partial(_options, "max_pool2d"))
_mean_of_windows = KernelFunction(_describe_mean, "avg_pool2d", _options_of_mean)
_mean = KernelFunction(_describe_whole, "mean2d", _options_of_whole)
