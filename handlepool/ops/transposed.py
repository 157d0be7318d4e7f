"""Define transposed convolutions, with a bias and an activation."""

from functools import partial
from typing import Any, Never

from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import activate
from handlepool.ops.convolution import Pair, check_array, check_vector, parameters
from handlepool.ops.epilogue import along
from handlepool.ops.filtering import Filtering, Shape, steps, windows
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout


@launches
@by_keyword
def conv_transpose2d(
    x: ArrayT,
    w: DeviceArray,
    *extra: Never,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    bias: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Compute a transposed convolution of images, on the current stream.

    A transposed convolution is the gradient of `handlepool.conv2d` for its images. The arguments are those of torch. If a bias
    is given, it is added. If an activation is given, it is applied last.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32, contiguous or channels-last in memory.
    w : array, shape (C, K / groups, R, S)
        Filters, of the same type, without gaps.
    stride, dilation : int or sequence of two
        Along height and width, in pixels.
    padding : int or sequence of two
        Number of pixels that are cut off on each side of the result.
    output_padding : int or sequence of two
        Additional pixels below and on the right. Along each axis, it must be less than the stride or less than the dilation.
    groups : int
        Number of groups of channels that are convolved separately.
    bias : array, shape (K,), optional
        Added to each channel.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last. "gelu" uses the exact formula.
    out : array, shape (N, K, P, Q), optional
        Array for the result. Without ``out`` the result has the layout of x.
    workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv2d`.

    Returns
    -------
    array, shape (N, K, P, Q)
        ``out``, or a new array of the kind and type of x. P is (H - 1) stride - 2 padding + dilation (R - 1) + output_padding
        + 1, and Q likewise.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`.

    Notes
    -----
    Bias and activation together cost one more launch. If ``output_padding`` reaches the stride, x is copied, up to 16 MiB.

    Examples
    --------
    >>> y = handlepool.conv_transpose2d(x, w, stride=2, bias=b)                          # doctest: +SKIP
    """
    if extra:
        raise misplaced(conv_transpose2d, extra)
    values, limits = (stride, padding, output_padding, dilation, groups), (workspace_limit, allow_tf32, deterministic)
    return _two_axes.call((x, w, bias), activation, out, values, limits, pool)


@launches
@by_keyword
def conv_transpose1d(
    x: ArrayT,
    w: DeviceArray,
    *extra: Never,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    bias: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Compute a transposed convolution of rows, on the current stream.

    If a bias is given, it is added. If an activation is given, it is applied last.

    Parameters
    ----------
    x : array, shape (N, C, L)
        Rows with channels, of float16, bfloat16 or float32. They are contiguous or channels-last in memory.
    w : array, shape (C, K / groups, R)
        Filters, of the same type, without gaps.
    stride, padding, output_padding, dilation : int or sequence of one
        As in `handlepool.conv_transpose2d`, along the one spatial axis.
    groups, bias, activation, out, workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv_transpose2d`.

    Returns
    -------
    array, shape (N, K, P)
        As in `handlepool.conv_transpose2d`.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`.

    Examples
    --------
    >>> y = handlepool.conv_transpose1d(x, w, stride=2)                                  # doctest: +SKIP
    """
    if extra:
        raise misplaced(conv_transpose1d, extra)
    values, limits = (stride, padding, output_padding, dilation, groups), (workspace_limit, allow_tf32, deterministic)
    return _one_axis.call((x, w, bias), activation, out, values, limits, pool)


def _options(name: str, axes: int, _: tuple[Any, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    stride, padding, output_padding, dilation, groups = values
    given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return {**windows(name, given, axes), "output_padding": steps(name, "output_padding", output_padding, axes, 0)}


def _spatial(size: Shape, taps: Shape, how: dict[str, Any], more: Shape) -> Shape:
    """Return the spatial extents of a transposed convolution's result."""
    axes = zip(size, taps, how["stride"], how["padding"], how["dilation"], more, strict=True)
    return tuple((extent - 1) * s - sum(p) + d * (tap - 1) + 1 + extra for extent, tap, s, p, d, extra in axes)


def _build(
    g: Any,
    /,
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    groups: int,
    activation: str | None,
    output_padding: Shape,
    **how: Any,
) -> Any:
    (n, _, *size), (_, per_group, *taps) = x.get_dim(), w.get_dim()
    # If the stride is not 1, several shapes of the result are possible. Without a declared shape, the frontend would use the
    # smallest shape.
    shape = [n, per_group * groups, *_spatial(tuple(size), tuple(taps), how, output_padding)]
    y = g.conv_dgrad(x, w, **parameters(**how)).set_dim(shape)
    if bias is not None:
        y = g.bias(y, along(bias, len(shape), 1))
    return y if activation is None else activate(g, y, activation)


def _check(
    name: str,
    axes: int,
    layouts: tuple[Layout, ...],
    outs: tuple[Layout, ...],
    *,
    groups: int,
    activation: str | None,
    output_padding: Shape,
    **how: Any,
) -> None:
    """Raise for arrays that no transposed convolution accepts."""
    x, w, *rest = layouts
    like = ("x", x.dtype)
    for title, layout in [("x", x), ("w", w), *(("out", out) for out in outs)]:
        check_array(name, title, layout, axes + 2, like)
    if min(w.shape[2:]) < 1:
        raise ArgumentError(f"{name}: w {w.shape} has filters without taps; give each spatial axis of w 1 or more")
    if w.shape[0] != x.shape[1]:
        raise ArgumentError(
            f"{name}: x {x.shape} has {x.shape[1]} channels and w {w.shape} has {w.shape[0]} filters, which must be equal; w "
            f"must have the shape (C, K / groups, ...)"
        )
    if w.shape[0] % groups:
        raise ArgumentError(
            f"{name}: {groups} groups do not divide the {w.shape[0]} channels of x {x.shape}; the channels must be a "
            "multiple of the groups"
        )
    for axis, (more, stride, dilation) in enumerate(zip(output_padding, how["stride"], how["dilation"], strict=True)):
        # Torch has the same bound. Below this bound, a convolution exists that turns the result's shape into the shape of x.
        # The transposed convolution is the gradient of that convolution.
        if more >= max(stride, dilation):
            raise ArgumentError(
                f"{name}: output_padding={output_padding} with stride={how['stride']} and dilation={how['dilation']}; along "
                f"spatial axis {axis}, output_padding must be below {max(stride, dilation)}"
            )
    spatial = _spatial(x.shape[2:], w.shape[2:], how, output_padding)
    if min(spatial) < 1:
        raise ArgumentError(
            f"{name}: x {x.shape} and w {w.shape} lead to spatial extents of {spatial}, which must be 1 or more; give less "
            f"padding"
        )
    for bias in rest:
        check_vector(name, bias, w.shape[1] * groups, "channels", like)


_two_axes, _one_axis = (
    Filtering.of(name, partial(_options, name, axes), _build, partial(_check, name, axes))
    for name, axes in (("conv_transpose2d", 2), ("conv_transpose1d", 1))
)
