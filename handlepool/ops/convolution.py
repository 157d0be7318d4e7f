"""Two-dimensional convolution with bias and activation, as a graph function."""

from inspect import signature
from typing import Any, Never

from handlepool._util.wording import shown
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import AnyCall, by_keyword, hit, misplaced
from handlepool.graphs.plan import Plan
from handlepool.ops.activations import ACTIVATIONS, activate, activation_call
from handlepool.ops.conv_checks import Pair, check_array, check_channels, pair
from handlepool.pool.context import NOT_CACHED, launchers
from handlepool.pool.default import current_pool
from handlepool.pool.pool import HandlePool
from handlepool.tensors import frontend
from handlepool.tensors.layout import Layout

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
    chosen = current_pool() if pool is None else pool
    marks = (stride, padding, dilation, groups, type(groups), mode, activation, workspace_limit, allow_tf32, deterministic)
    function = _conv2d if activation is None else _fused
    result = hit(function, chosen, None, (x, w) if bias is None else (x, w, bias), out, marks)
    if result is not NOT_CACHED:
        return result
    call = _prepare(
        chosen,
        x,
        w,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        mode=mode,
        bias=bias,
        activation=activation,
        out=out,
        workspace_limit=workspace_limit,
        allow_tf32=allow_tf32,
        deterministic=deterministic,
    )
    return call.launch(chosen.slot(call.stream))


@by_keyword
def conv2d_plan(x: Any, w: Any, *extra: Never, pool: HandlePool | None = None, **options: Any) -> Plan:
    """Return the plan that `conv2d` uses for these arguments, built when there is none yet.

    Its ``engine``, ``workspace_size`` and ``candidates`` say what cuDNN chose. Where an activation is a launch of its own, it is
    the convolution's plan.
    """
    if extra:
        raise misplaced(conv2d, extra)
    return _prepare(current_pool() if pool is None else pool, x, w, **options).plan


def _prepare(
    pool: HandlePool,
    x: Any,
    w: Any,
    *,
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
) -> AnyCall:
    arrays = (x, w) if bias is None else (x, w, bias)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "activation": activation}
    if not isinstance(mode, str) or mode != "cross_correlation":  # a part of the key where it says something
        options["mode"] = mode
    settings = (("workspace_limit", workspace_limit), ("allow_tf32", allow_tf32), ("deterministic", deterministic))
    marks = (stride, padding, dilation, groups, type(groups), mode, activation, workspace_limit, allow_tf32, deterministic)
    if activation is None:
        return _conv2d.prepare(pool, arrays, out, options, settings, marks=marks)
    try:
        return _fused.prepare(pool, arrays, out, options, settings, marks=marks)
    except GraphNotSupportedError:
        pass
    # cuDNN fuses activations for arrays of one layout alone, and some for channels-last arrays: elsewhere the activation is a
    # launch of its own.
    plain = _conv2d.prepare(pool, arrays, out, options | {"activation": None}, settings)
    return plain.then(lambda result: activation_call(pool, activation, result, result))


def _prepare_branch(_: object, pool: HandlePool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnyCall:
    options = dict(kwargs)
    return _prepare(options.pop("pool", None) or pool, *args, **options)


def _hit_branch(_: object, pool: HandlePool, begin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _hit(pool, begin, *args, **kwargs)
    except TypeError:
        if len(args) > 2:
            raise misplaced(conv2d, args[2:]) from None
        signature(conv2d).bind(*args, **kwargs)  # says what is wrong with the arguments, where that was it
        raise


def _hit(
    default: HandlePool,
    begin: Any,
    x: Any,
    w: Any,
    *,
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
) -> Any:
    marks = (stride, padding, dilation, groups, type(groups), mode, activation, workspace_limit, allow_tf32, deterministic)
    function = _conv2d if activation is None else _fused
    return hit(function, default if pool is None else pool, begin, (x, w) if bias is None else (x, w, bias), out, marks)


# In a fork the output is allocated before the branch starts, as for any graph function.
launchers[conv2d] = _hit_branch, _prepare_branch


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
