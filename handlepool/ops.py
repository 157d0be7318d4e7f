"""Ready-made graph functions."""

from typing import Any

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs import GraphCall, GraphFunction
from handlepool.inference import axis_order, dense_strides
from handlepool.plans import Plan
from handlepool.pool import HandlePool, current_pool
from handlepool.slots import Slot

ACTIVATIONS = ("relu", "sigmoid", "tanh")
CONVOLUTION_TYPES = ("float16", "bfloat16", "float32")


def _convolution(
    g: Any,
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    dilation: int | tuple[int, int],
    groups: int,
    activation: str | None,
) -> Any:
    # The frontend reads the groups off the channels, which were checked to agree.
    y = g.conv_fprop(
        x,
        w,
        stride=_pair("stride", stride, 1),
        padding=_pair("padding", padding, 0),
        dilation=_pair("dilation", dilation, 1),
    )
    if bias is not None:
        channels = bias.get_dim()[0]
        y = g.bias(y, bias.set_dim([1, channels, 1, 1]).set_stride([channels, 1, channels, channels]))
    return y if activation is None else _activate(g, y, kind=activation)


def _activate(g: Any, x: Any, *, kind: str) -> Any:
    return getattr(g, kind)(x)


class _Sequence:
    """Two calls on one stream, the second over the first one's output, in the form of a `GraphCall`."""

    __slots__ = ("_calls", "operands", "plan", "result")

    def __init__(self, first: GraphCall, second: GraphCall) -> None:
        self._calls = (first, second)
        self.operands = first.operands + second.operands
        self.result = second.result
        self.plan = first.plan

    def launch(self, slot: Slot) -> Any:
        """Enqueue both."""
        for call in self._calls:
            call.launch(slot)
        return self.result


def conv2d(
    x: Any,
    w: Any,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> Any:
    """Convolve images with filters, as neural networks mean it (cross-correlation), on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images; float16, bfloat16 or float32; contiguous, or channels-last in memory (NHWC strides, which tensor cores prefer).
        CuPy arrays on the cuda driver, NumPy arrays on the host driver.
    w : array, shape (K, C / groups, R, S)
        Filters, of the same type.
    stride, padding, dilation : int or (int, int)
        Along height and width, in pixels; zeros are padded on both sides.
    groups : int
        Groups of channels that are convolved apart.
    bias : array, shape (K,), optional
        Added to each channel.
    activation : {"relu", "sigmoid", "tanh"}, optional
        Applied last.
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
        ``out``, or a new array of the type of ``x``.

    Raises
    ------
    ArgumentError
        For shapes, types, strides or options that no plan could take.
    GraphNotSupportedError
        When cuDNN has no plan, as for a workspace limit that none meets.
    """
    chosen = current_pool() if pool is None else pool
    call = _prepare(
        chosen,
        x,
        w,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        activation=activation,
        out=out,
        workspace_limit=workspace_limit,
        allow_tf32=allow_tf32,
        deterministic=deterministic,
    )
    return call.launch(chosen.slot())


def conv2d_plan(x: Any, w: Any, *, pool: HandlePool | None = None, **options: Any) -> Plan:
    """Return the plan that `conv2d` uses for these arguments, built when there is none yet.

    Its ``engine``, ``workspace_size`` and ``candidates`` say what cuDNN chose.
    """
    return _prepare(current_pool() if pool is None else pool, x, w, **options).plan


def _prepare(
    pool: HandlePool,
    x: Any,
    w: Any,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
) -> GraphCall | _Sequence:
    arrays = (x, w) if bias is None else (x, w, bias)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "activation": activation}
    settings = (("workspace_limit", workspace_limit), ("allow_tf32", allow_tf32), ("deterministic", deterministic))
    try:
        return _conv2d.prepare(pool, arrays, out, options, settings)
    except GraphNotSupportedError:
        if activation is None:
            raise
    # cuDNN fuses some activations for channels-last arrays alone: elsewhere the activation is a launch of its own.
    plain = _conv2d.prepare(pool, arrays, out, options | {"activation": None}, settings)
    rest = _activation.prepare(pool, (plain.result,), plain.result, {"kind": activation})
    return _Sequence(plain, rest)


def _prepare_branch(pool: HandlePool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphCall | _Sequence:
    options = dict(kwargs)
    return _prepare(options.pop("pool", None) or pool, *args, **options)


# In a fork the output is allocated before the branch starts, as for any graph function.
conv2d.__handlepool_prepare__ = _prepare_branch  # type: ignore[attr-defined]


def _check(
    arrays: tuple[Any, ...], outs: tuple[Any, ...], *, groups: int, activation: str | None, **pairs: int | tuple[int, int]
) -> None:
    """Raise for what no convolution could be made of; asked once for each geometry, before the plan is built."""
    x, w, *rest = arrays
    for name, array, rank in (
        ("x", x, 4),
        ("w", w, 4),
        *[("bias", bias, 1) for bias in rest],
        *[("out", out, 4) for out in outs],
    ):
        _check_array(name, array, rank, x.dtype)
    for name, value in pairs.items():
        _pair(name, value, 0 if name == "padding" else 1)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"conv2d: groups={groups!r}; it must be an integer, 1 or more")
    if w.shape[1] * groups != x.shape[1]:
        raise ArgumentError(
            f"conv2d: {x.shape[1]} channels in x {x.shape} and {w.shape[1]} x groups={groups} in w {w.shape}; w must be "
            f"(K, C / groups, R, S)"
        )
    for bias in rest:
        if bias.shape != w.shape[:1]:
            raise ArgumentError(f"conv2d: bias of shape {bias.shape} for {w.shape[0]} filters; it must be ({w.shape[0]},)")
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"conv2d: activation={activation!r}; it can be {', '.join(ACTIVATIONS)} or None")


def _pair(name: str, value: int | tuple[int, int], least: int) -> list[int]:
    try:
        pair = [value, value] if isinstance(value, int) else list(value)
        if len(pair) == 2 and all(isinstance(entry, int) and entry >= least for entry in pair):
            return pair
    except TypeError:
        pass
    raise ArgumentError(f"conv2d: {name}={value!r}; it must be an integer, or two, each {least} or more")


def _check_array(name: str, array: Any, rank: int, dtype: Any) -> None:
    if array.ndim != rank:
        raise ArgumentError(f"conv2d: {name} has {array.ndim} axes, shape {array.shape}; it must have {rank}")
    if array.dtype.name not in CONVOLUTION_TYPES:
        raise ArgumentError(f"conv2d: {name} is {array.dtype}; it must be one of {', '.join(CONVOLUTION_TYPES)}")
    if array.dtype != dtype:
        raise ArgumentError(f"conv2d: {name} is {array.dtype} and x is {dtype}; convert one of them")
    itemsize = array.dtype.itemsize
    strides = [stride // itemsize for stride in array.strides]
    order = axis_order(array.shape, strides)
    dense = dense_strides(array.shape, order)
    packed = all(extent == 1 or a == b for extent, a, b in zip(array.shape, strides, dense, strict=True))
    if not packed or order not in ((0, 1, 2, 3), (0, 2, 3, 1), (0,)):
        raise ArgumentError(
            f"conv2d: {name} of shape {array.shape} has strides {array.strides} bytes; cuDNN takes arrays without gaps, "
            f"contiguous or channels-last. Pass a contiguous copy, as from ascontiguousarray({name})"
        )


_conv2d = GraphFunction(_convolution, check=_check, name="conv2d")
_activation = GraphFunction(_activate, elementwise=True, name="activation")
