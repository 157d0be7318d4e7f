"""Two-dimensional convolution with bias and activation, as a graph function."""

from collections.abc import Mapping
from typing import Any, Never

from handlepool._util import as_integer, at_least, shown
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, by_keyword, hit, hit_branch, launch_new, misplaced, prepare_branch
from handlepool.graphs.plan import Plan
from handlepool.ops.activations import ACTIVATIONS, FLOATING_TYPES, activate, activation_call
from handlepool.pool.context import NOT_CACHED, launchers
from handlepool.pool.default import chosen_pool, current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors import frontend
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
    """Return the shape of what a gradient is taken with respect to."""
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


MODES = ("cross_correlation", "convolution")
SATURATED = 30.0
"""Beyond this, tanh is 1 in float32."""


@by_keyword
def conv2d(
    x: ArrayT,
    w: Any,
    *extra: Never,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Convolve images with filters, add a bias and apply an activation, on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images; float16, bfloat16 or float32; contiguous, or channels-last in memory (NHWC strides, which tensor cores prefer).
        Of CuPy, torch or others (``docs/arrays.md``), or NumPy's on the host driver.
    w : array, shape (K, C / groups, R, S)
        Filters, of the same type.
    stride, padding, dilation : int or (int, int)
        Along height and width, in pixels; zeros are padded on both sides.
    groups : int
        Groups of channels that are convolved apart.
    mode : {"cross_correlation", "convolution"}
        As neural networks mean it, or with the filters turned around, as mathematics does.
    bias : array, shape (K,), optional
        Added to each channel.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish"}, optional
        Applied last, in the same launch where cuDNN can, else in one of its own; "gelu" is the exact one.
    out : array, shape (N, K, P, Q), optional
        Where the result goes. Its strides decide the layout; without it the result lies as ``x`` does.
    workspace_limit : int, optional
        Most bytes of scratch that the plan may need.
    allow_tf32 : bool
        Whether float32 may be rounded to TF32 for tensor cores, as cuDNN does on its own (relative error about 2e-4).
    deterministic : bool
        Whether to take only plans that give the same bits each time.
    pool : HandlePool, optional
        The default pool, or a branch's own, where none is given.

    Returns
    -------
    array, shape (N, K, P, Q)
        ``out``, or a new array of the kind and type of ``x``.

    Raises
    ------
    ArgumentError
        For shapes, types, strides or options that no plan could take.
    GraphNotSupportedError
        When cuDNN has no plan, as for a workspace limit that none meets.
    """
    if extra:
        raise misplaced(conv2d, extra)
    function = _conv2d if activation is None else _fused
    arrays = (x, w) if bias is None else (x, w, bias)
    # What the tuple holds, `_prepare` takes apart. The type of ``groups``, since 1, True and 1.0 are equal.
    key = (stride, padding, dilation, groups, type(groups), mode, activation, workspace_limit, allow_tf32, deterministic)
    begin = None
    if pool is None:
        chosen = current_pool()
    elif type(pool) is tuple:  # type: ignore[comparison-overlap]  # from a fork: see `hit_branch`
        chosen, begin = pool
        if begin is None:
            return _prepare(chosen, arrays, out, key)  # what the fork launches
    else:
        chosen = chosen_pool("conv2d", pool)
    result = hit(function, chosen, begin, arrays, out, key)
    return launch_new(chosen, _prepare(chosen, arrays, out, key)) if result is NOT_CACHED and begin is None else result


@by_keyword
def conv2d_plan(x: Any, w: Any, *extra: Never, pool: HandlePool | None = None, **options: Any) -> Plan:
    """Return the plan that `conv2d` uses for these arguments, built when there is none yet.

    Parameters
    ----------
    x, w : array
        As in `conv2d`.
    pool : HandlePool, optional
        The default pool, or a branch's own, where none is given.
    **options
        Further keywords of `conv2d`.

    Returns
    -------
    Plan
        Its ``engine``, ``workspace_size`` and ``candidates`` say what cuDNN chose. Where an activation is a launch of its own,
        it is the convolution's plan.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `conv2d`.
    """
    return prepare_branch(conv2d, chosen_pool("conv2d_plan", pool), (x, w, *extra), options).plan


def _prepare(pool: PoolInternals, arrays: tuple[Any, ...], out: Any, key: tuple[Any, ...]) -> GraphCall:
    """Return the call for a key of `conv2d`."""
    stride, padding, dilation, groups, _, mode, activation, workspace_limit, allow_tf32, deterministic = key
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "activation": activation}
    if not isinstance(mode, str) or mode != "cross_correlation":  # a part of the plan's key where it says something
        options["mode"] = mode
    settings = (("workspace_limit", workspace_limit), ("allow_tf32", allow_tf32), ("deterministic", deterministic))
    if activation is None:
        return _conv2d.prepare(pool, arrays, out, options, settings, key=key)
    try:
        return _fused.prepare(pool, arrays, out, options, settings, key=key)
    except GraphNotSupportedError:
        pass
    # cuDNN fuses activations for arrays of one layout alone, and some for channels-last arrays: elsewhere the activation is a
    # launch of its own.
    plain = _conv2d.prepare(pool, arrays, out, options | {"activation": None}, settings)
    return plain.then(lambda result: activation_call(pool, activation, result, result))


# In a fork the output is allocated before the branch starts, as for any graph function.
launchers[conv2d] = hit_branch, prepare_branch


def _convolution(
    g: Any,
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    activation: str | None,
    mode: str = "cross_correlation",
) -> Any:
    # The frontend reads the groups off the channels, which were checked to agree.
    y = g.conv_fprop(
        x,
        w,
        stride=pair("conv2d", "stride", stride),
        padding=pair("conv2d", "padding", padding),
        dilation=pair("conv2d", "dilation", dilation),
        convolution_mode=frontend.convolution_mode(mode),
    )
    if bias is not None:
        channels = bias.get_dim()[0]
        y = g.bias(y, bias.set_dim([1, channels, 1, 1]).set_stride([channels, 1, channels, channels]))
    if activation == "tanh":
        # cuDNN's engine for bias and tanh of contiguous arrays takes exp(2 x), and gives NaN from 44.4 on. It does not take this.
        y = g.relu(y, negative_slope=0.0, lower_clip=-SATURATED, upper_clip=SATURATED)
    return y if activation is None else activate(g, y, activation)


def _check(
    layouts: tuple[Layout, ...],
    outs: tuple[Layout, ...],
    *,
    groups: int,
    activation: str | None,
    mode: str = "cross_correlation",
    **pairs: Pair,
) -> None:
    """Raise for what no convolution could be made of; asked once for each geometry, before the plan is built."""
    x, w, *rest = layouts
    named = [("x", x, 4), ("w", w, 4), *(("bias", bias, 1) for bias in rest), *(("out", out, 4) for out in outs)]
    for name, layout, rank in named:
        check_array("conv2d", name, layout, rank, ("x", x.dtype))
    for name, value in pairs.items():
        pair("conv2d", name, value)
    check_channels("conv2d", ("x", x.shape), ("w", w.shape), groups)
    for bias in rest:
        if bias.shape != w.shape[:1]:
            raise ArgumentError(f"conv2d: bias of shape {bias.shape} for {w.shape[0]} filters; it must be ({w.shape[0]},)")
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"conv2d: activation={shown(activation)}; it can be {', '.join(ACTIVATIONS)} or None")
    if mode not in MODES:
        raise ArgumentError(f"conv2d: mode={shown(mode)}; it can be {' or '.join(MODES)}")


_conv2d = GraphFunction(_convolution, check=_check, name="conv2d")
_fused = GraphFunction(_convolution, check=_check, name="conv2d", copies=False)
"""With an activation: where that would take copies of the operands, it is a launch of its own instead."""
