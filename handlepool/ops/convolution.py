"""Define two-dimensional convolution with bias, residual and activation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

import numpy as np

from handlepool._util.arguments import as_integer, at_least
from handlepool._util.names import kind_of, shown
from handlepool.drivers.kernel import MOST_TAPS, Depthwise
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.arrays import ConvertedArguments
from handlepool.graphs.forms import BEHIND_A_SUM
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.kernels import Described, KernelFunction, dense, lying_as
from handlepool.graphs.launch import (
    GraphCall,
    by_keyword,
    launches,
    misplaced,
    prepared,
    run_known,
)
from handlepool.graphs.operand_forms import stepped_channels_last
from handlepool.graphs.option_keys import of_integers, typed_key
from handlepool.graphs.plan import Plan
from handlepool.graphs.signature import Settings, normalise
from handlepool.ops.activations import ACTIVATIONS, FLOATING_TYPES, activate, check_activation
from handlepool.ops.epilogue import Finisher, Stages, along, parts_of
from handlepool.pool.default import chosen_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.inference import Convolution, axis_order, dense_strides
from handlepool.tensors.layout import Layout

Pair = int | Sequence[int]
Padding = Pair | Sequence[Sequence[int]] | str
Shape = tuple[int, ...]
Sides = tuple[tuple[int, int], ...]
_BYTES = bytes, bytearray, memoryview
"""Types that Python treats as sequences of integers.

A value of these types is refused where two integers are expected.
"""


def pair(function: str, name: str, value: object, least: int = 1) -> tuple[int, int]:
    """Return ``value`` as two integers, for height and width.

    ``name`` is the name of the argument in messages.
    """
    try:
        entries = _two(value)
        if min(entries) >= least:
            return entries
    except TypeError:
        pass
    raise ArgumentError(f"{function}: {name}={shown(value)}; it must be an integer, or two integers, each {least} or more")


def sides(function: str, value: Any) -> Sides:
    """Return the padding as ((above, below), (left, right))."""
    try:
        nested = _is_sequence(value) and all(map(_is_sequence, value))
        found = tuple(map(_two, value)) if nested else tuple((entry, entry) for entry in _two(value))
        if len(found) == 2 and min(map(min, found)) >= 0:
            return found
    except TypeError:
        pass
    raise ArgumentError(
        f"{function}: padding={shown(value)}; it must be 'same' or 'valid', or an integer, two integers, or two pairs of "
        f"integers, each 0 or more"
    )


def named_padding(function: str, name: str, w: DeviceArray, stride: Shape, dilation: Shape) -> Sides:
    """Return the zeros per side for torch's "same" or "valid".

    The zeros are a pair (before, after) for each spatial axis. With "same", the convolution's result has the extents of the
    images. If the number of zeros along an axis is odd, the extra zero comes at the end.
    """
    if name not in PADDINGS:
        raise ArgumentError(f"{function}: padding={name!r}; a named padding must be {' or '.join(map(repr, PADDINGS))}")
    if name == "valid":
        return ((0, 0),) * len(stride)
    if any(step != 1 for step in stride):
        raise ArgumentError(
            f"{function}: padding='same' with stride={stride}; 'same' takes only a stride of 1. Give the padding in numbers"
        )
    # The arrays are checked later, so ``w`` may still be any object.
    taps = tuple(getattr(w, "shape", ()))[2:]
    if len(taps) != len(stride):
        raise ArgumentError(
            f"{function}: padding='same' takes filters w with {len(stride) + 2} axes, and w, a {kind_of(w)}, has the shape "
            f"{getattr(w, 'shape', None)}; give the padding in numbers"
        )
    zeros = [max(tap - 1, 0) * step for tap, step in zip(map(int, taps), dilation, strict=True)]
    return tuple((zero // 2, zero - zero // 2) for zero in zeros)


def _two(value: Any) -> tuple[int, int]:
    if not _is_sequence(value):
        number = as_integer(value)
        return number, number
    one, other = map(as_integer, value) if len(value) == 2 else (None, None)
    if one is None or other is None:
        raise TypeError
    return one, other


def _is_sequence(value: object) -> bool:
    if isinstance(value, _BYTES):
        return False
    # A NumPy array is no `Sequence`. It is accepted, because its integers are in host memory and can be read without a wait.
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def geometry(function: str, pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return stride, padding, dilation and groups for a plan's key.

    The caller may write the same stride, padding or dilation in several ways. All of them give the same key.
    """
    how: dict[str, Any] = {}
    for name, value in pairs.items():
        if name == "groups":
            how[name] = at_least(1, f"{function}: groups", value)
        else:
            how[name] = sides(function, value) if name == "padding" else pair(function, name, value)
    return how


def settings_of(workspace_limit: object, allow_tf32: object, deterministic: object) -> Settings:
    """Return the settings of an operation for a plan's key.

    Settings that compare equal but differ in type have different keys.
    """
    return normalise({"workspace_limit": workspace_limit, "allow_tf32": allow_tf32, "deterministic": deterministic})


def parameters(*, stride: tuple[int, int], padding: Sides, dilation: tuple[int, int]) -> dict[str, list[int]]:
    """Return a convolution node's parameters, from the result of `geometry`."""
    before, after = (list(side) for side in zip(*padding, strict=True))
    how = {"padding": before} if before == after else {"pre_padding": before, "post_padding": after}
    return {"stride": list(stride), "dilation": list(dilation), **how}


def as_shape(function: str, shape: Any) -> Shape:
    """Check the ``shape`` of a gradient, and return it as integers."""
    try:
        extents = () if isinstance(shape, _BYTES) else tuple(map(as_integer, shape))
    except TypeError:
        extents = ()
    if len(extents) != 4 or min(extents) < 0:
        raise ArgumentError(f"{function}: shape={shown(shape)}; it must be four integers, each 0 or more")
    return extents


def check_array(function: str, name: str, layout: Layout, rank: int, like: tuple[str, Any], views: bool = False) -> None:
    """Raise for a wrong rank, a wrong type or unsupported strides.

    ``like`` has the name and the type of the first array. ``layout`` must have that type. With ``views``, a channels-last image
    may have gaps.
    """
    if layout.ndim != rank:
        raise ArgumentError(f"{function}: {name} has {layout.ndim} axes, shape {layout.shape}; it must have {rank}")
    check_type(function, name, layout, like)
    # The strides of an empty array address no element, so any strides will do.
    if not layout.size:
        return
    strides = [stride // layout.dtype.itemsize for stride in layout.strides]
    # One filter may be expanded to all filters or channels, with a stride of 0.
    repeats = [name == "w" and axis < 2 and not stride for axis, stride in enumerate(strides)]
    shape = [1 if repeated else extent for extent, repeated in zip(layout.shape, repeats, strict=True)]
    order = axis_order(shape, strides)
    dense = dense_strides(shape, order)
    packed = all(extent == 1 or a == b for extent, a, b in zip(shape, strides, dense, strict=True))
    last = (0, *range(2, rank), 1)
    if packed and order in (tuple(range(rank)), last):
        return
    if not views or any(stride % layout.dtype.itemsize for stride in layout.strides):
        taken = ""
    elif stepped_channels_last(layout.shape, strides):
        return
    else:
        taken = "; a channels-last array may also have gaps between channels, pixels, rows or images"
    remedy = f"Pass a contiguous copy, for example ascontiguousarray({name})"
    # A contiguous copy of a channels-last view would lose the layout, so advise another copy.
    if order == last:
        remedy = f"Pass a copy without gaps, for example {name}.copy(order='K')"
    if name == "out":
        remedy = f"Leave out= away, and copy the result: out[...] = {function}(...)"
    raise ArgumentError(
        f"{function}: {name} of shape {layout.shape} has strides {layout.strides} bytes; cuDNN takes arrays without gaps, "
        f"contiguous or channels-last{taken}. {remedy}"
    )


def check_type(function: str, name: str, layout: Layout, like: tuple[str, Any]) -> None:
    """Raise for an unsupported type, or another type than the first array's."""
    if layout.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"{function}: {name} is {layout.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    if layout.dtype != like[1]:
        raise ArgumentError(
            f"{function}: {name} is {layout.dtype} and {like[0]} is {like[1]}; convert one to the type of the other"
        )


def check_vector(function: str, bias: Layout, extent: int, of: str, like: tuple[str, Any]) -> None:
    """Raise for a bias that is no vector of ``extent`` elements."""
    if bias.shape != (extent,):
        raise ArgumentError(f"{function}: bias of shape {bias.shape} for {extent} {of}; its shape must be ({extent},)")
    check_type(function, "bias", bias, like)


def check_channels(function: str, image: tuple[str, Shape], weight: tuple[str, Shape], groups: int) -> None:
    """Raise unless the channels of images and filters fit.

    Filters have the shape (K, C / groups, R, S).
    """
    (x, x_shape), (w, w_shape) = image, weight
    if min(w_shape[2:]) < 1:
        raise ArgumentError(f"{function}: {w} {w_shape} has filters without taps; give R and S of 1 or more")
    if w_shape[1] * groups != x_shape[1]:
        raise ArgumentError(
            f"{function}: {x} {x_shape} has {x_shape[1]} channels, and {w} {w_shape} with groups={groups} takes "
            f"{w_shape[1] * groups} channels; {w} must be (K, C / groups, R, S)"
        )
    if w_shape[0] % groups:
        raise ArgumentError(
            f"{function}: {groups} groups do not divide {w_shape[0]} filters in {w} {w_shape}; the number of filters "
            "must be a multiple of the groups"
        )


def result_shape(
    x: Shape, w: Shape, *, stride: tuple[int, int], padding: Sides, dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the shape of the convolution of images with filters.

    An extent below 1 means that the result has no pixels.
    """
    height, width = (
        (x[axis + 2] + sum(padding[axis]) - (w[axis + 2] - 1) * dilation[axis] - 1) // stride[axis] + 1 for axis in (0, 1)
    )
    return x[0], w[0], height, width


def check_result(function: str, x: Shape, w: Shape, dy: Shape, how: Mapping[str, Any], transposed: bool = False) -> None:
    """Raise unless images and filters lead to a result of shape ``dy``.

    With ``transposed``, raise only if a transposed convolution of ``dy`` cannot give the images: see `Convolution.transposes`.
    """
    shape = result_shape(x, w, **how)
    if dy == shape:
        return
    before, after = zip(*how["padding"], strict=True)
    node = Convolution(before, after, how["stride"], how["dilation"], False)
    if not transposed or dy[:2] != shape[:2] or min(dy[2:]) < 1 or not node.transposes(dy[2:], w[2:], x[2:]):
        raise ArgumentError(
            f"{function}: images {x} and filters {w} lead to a result of shape {shape}, and dy has shape {dy}; correct dy, "
            f"shape, stride, padding or dilation"
        )


MODES = ("cross_correlation", "convolution")
PADDINGS = ("same", "valid")
SATURATED = 30.0
"""The bound to which the argument of tanh is clipped.

Beyond this bound, tanh is 1 or -1 in float32.
"""


@launches
@by_keyword
def conv2d(
    x: ArrayT,
    w: DeviceArray,
    *extra: Never,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    bias: object = None,
    add: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Convolve images with filters, then apply bias, residual and activation.

    The work runs on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32. They are contiguous or channels-last in memory (NHWC strides, which tensor cores
        prefer). A channels-last array may be a view with gaps: a crop, a slice of channels, or every second row, column,
        channel or image. The array comes from CuPy, torch or another library (``docs/arrays.md``). With the host driver, it may
        come from NumPy.
    w : array, shape (K, C / groups, R, S)
        Filters, of the same type, without gaps. A single filter may be expanded to all filters, with a stride of 0.
    stride, dilation : int or sequence of two
        Along height and width, in pixels.
    padding : int, or sequence of two, or of two pairs, or {"same", "valid"}
        Number of zeros around an image. An integer holds for all sides. Two integers hold for height (above and below) and
        width (left and right). Two pairs are ((above, below), (left, right)). "valid" adds no zeros. "same" requires a stride
        of 1, and gives a result of the images' size. If "same" needs an odd number of zeros, the extra zero comes below or on
        the right, as in torch.
    groups : int
        Number of groups of channels that are convolved separately.
    mode : {"cross_correlation", "convolution"}
        "cross_correlation" is the convention of neural networks. "convolution" is the mathematical convention, which flips the
        filters.
    bias : array, shape (K,), optional
        Added to each channel. It may be a view with any stride that is not negative, and need not be aligned.
    add : array, shape (N, K, P, Q), optional
        A residual, added before the activation. It must share no element with ``out``.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last. "gelu" uses the exact formula.
    out : array, shape (N, K, P, Q), optional
        Array for the result. It may have any layout that ``x`` may have, also with gaps. Without ``out`` the result has the
        layout of ``x``, without gaps.
    workspace_limit : int, optional
        The maximum number of bytes of scratch that the plan may need.
    allow_tf32 : bool
        Whether cuDNN may round float32 to TF32 for tensor cores, with a relative error of about 2e-4. The default is True.
    deterministic : bool
        Whether to use only plans that give the same bits in each run.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, K, P, Q)
        ``out``, or a new array of the kind and type of ``x``. For a batch without images the result is empty.

    Raises
    ------
    ArgumentError
        For unsupported shapes, types, strides or options.
    GraphNotSupportedError
        When cuDNN has no plan. An example is a workspace limit that every plan exceeds.

    Notes
    -----
    Bias, residual and activation are fused into cuDNN's plan if such a plan is known to be right. A bias can be fused for any
    layouts. Residual and activation are fused only if all arrays are channels-last without gaps. The parts that are not fused
    cost one more launch, and the result is rounded to its type before that launch.

    Some views are copied, up to 16 MiB: each view with a bias, a residual or an activation, a view of every second channel, and
    a view of every second row or column of an odd number. Padding that differs between two opposite sides also needs a copy.
    ``docs/graphs.md`` gives the costs.
    """
    if extra:
        raise misplaced(conv2d, extra)
    arrays = (x, w) if bias is None else (x, w, bias)
    function, copying = _plain
    # Look for a depthwise plan only if there may be one. The depthwise kernel adds no residual, and needs several groups.
    deep = (type(groups) is not int or groups != 1) and add is None
    # A shortcut tells arrays apart only by position. So calls with a residual use other graph functions. Otherwise the residual
    # of a call without a bias could be taken for a bias.
    if add is not None:
        arrays, (function, copying) = (*arrays, add), _summed
    key = values = (stride, padding, dilation, groups, mode, activation, workspace_limit, allow_tf32, deterministic)
    # Most calls have only values of the types below. Then the values themselves are the key, without the slower `typed_key`. A
    # call with a value of another type gets a key of another structure, which never equals such a key.
    if not (
        (
            type(stride) is type(padding) is type(dilation) is int
            or (list not in (type(stride), type(padding), type(dilation)) and of_integers((stride, padding, dilation)))
        )
        and type(groups) is int
        and workspace_limit is None
        and type(allow_tf32) is type(deterministic) is bool
    ):
        key = typed_key(values)

    def prepare(chosen: PoolInternals) -> GraphCall:
        return _prepare(chosen, arrays, parts_of(bias, add, activation), out, values, key)

    functions = (_depthwise, function, copying) if deep else (function, copying)
    return run_known("conv2d", pool, functions, arrays, out, key, prepare)


@by_keyword
def conv2d_plan(x: DeviceArray, w: DeviceArray, *extra: Never, pool: HandlePool | None = None, **options: object) -> Plan:
    """Return `conv2d`'s plan for these arguments; build it if necessary.

    Parameters
    ----------
    x, w : array
        As in `conv2d`.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.
    **options
        Further keywords of `conv2d`.

    Returns
    -------
    Plan
        The plan of the first launch, which contains the convolution. The plan's ``engine``, ``workspace_size`` and
        ``candidates`` describe cuDNN's choice.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `conv2d`.
    """
    return prepared(conv2d, chosen_pool("conv2d_plan", pool), (x, w, *extra), options).plan


def _prepare(
    pool: PoolInternals,
    arrays: tuple[Any, ...],
    parts: tuple[str, ...],
    out: object,
    values: tuple[Any, ...],
    key: tuple[Any, ...],
) -> GraphCall:
    """Return the call of `conv2d` with the options ``values``.

    ``parts`` names the parts of the epilogue that are among ``arrays`` and ``values``. ``key`` identifies ``values``.
    """
    stride, padding, dilation, groups, mode, activation, *limits = values
    if isinstance(padding, str):
        steps = (pair("conv2d", name, value) for name, value in (("stride", stride), ("dilation", dilation)))
        # Replace the name by numbers, so that "same" and the equal padding in numbers share a plan.
        padding = named_padding("conv2d", padding, arrays[1], *steps)
    options = geometry("conv2d", {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})
    check_activation("conv2d", activation)
    if not isinstance(mode, str) or mode not in MODES:
        raise ArgumentError(f"conv2d: mode={shown(mode)}; it can be {' or '.join(MODES)}")
    # Calls with the default mode have a key without a mode.
    if mode != "cross_correlation":
        options["mode"] = mode
    settings = settings_of(*limits)

    def fused(
        some: tuple[str, ...], copies: bool, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
    ) -> GraphCall:
        function = (_summed if "add" in some else _plain)[copies]
        applied = activation if "activation" in some else None
        if "add" in some and applied in ACTIVATIONS and applied not in BEHIND_A_SUM:
            raise GraphNotSupportedError(f"conv2d: {applied} after a residual was not measured in one plan")
        # The arrays are passed by position. If there is a residual but no bias, the keyword ``bias=None`` keeps the residual
        # from being taken for the bias.
        own = options | {"activation": applied} | ({} if "bias" in some or "add" not in some else {"bias": None})
        if some[:2] == ("add", "bias"):
            own["last"] = "bias"
        # The key stands for a call with its whole epilogue. So a plan with only some parts gets no shortcut by this key.
        known = key if set(some) == set(parts) else None
        return function.prepare(pool, arrays, out, own, settings, converted, known)

    if options["groups"] != 1 and "add" not in parts:
        try:
            return _depthwise.prepare(pool, arrays, out, options | {"activation": activation}, settings, None, key)
        # The depthwise kernel does not take this convolution, so go on with a plan of cuDNN.
        except GraphNotSupportedError:
            pass
    # cuDNN is not known to be right if the padding of two opposite sides differs. A plan with copies pads both sides equally,
    # and copies the wanted part of the larger result.
    uneven = any(one != other for one, other in options["padding"])
    return Stages("conv2d", pool, parts, activation, fused, _finish, key, uneven, reorders=True).call(arrays, out)


def _convolution(
    g: Any,
    /,
    x: Any,
    w: Any,
    bias: Any = None,
    add: Any = None,
    *,
    groups: int,
    activation: str | None,
    mode: str = "cross_correlation",
    last: str = "add",
    **how: Any,
) -> Any:
    # The frontend derives the groups from the channels. `_check` has ensured that ``groups`` agrees with the channels.
    y = g.conv_fprop(x, w, **parameters(**how), convolution_mode=frontend.convolution_mode(mode))
    if bias is not None and last == "add":
        y = g.bias(y, along(bias, 4, 1))
    if add is not None:
        y = g.add(y, add)
    if bias is not None and last == "bias":
        y = g.bias(y, along(bias, 4, 1))
    if activation == "tanh":
        # For contiguous arrays, cuDNN has an engine for bias and tanh that computes exp(2 x), and gives NaN for x above 44.4.
        # That engine does not accept a graph with this clipping node, so cuDNN uses another engine.
        y = g.relu(y, negative_slope=0.0, lower_clip=-SATURATED, upper_clip=SATURATED)
    return y if activation is None else activate(g, y, activation)


def _check(
    layouts: tuple[Layout, ...],
    outs: tuple[Layout, ...],
    *,
    groups: int,
    activation: str | None,
    bias: Any = True,
    mode: str = "cross_correlation",
    last: str = "add",
    **how: Any,
) -> None:
    """Raise for arguments that no convolution accepts.

    The check runs once for each geometry, before the plan is built.
    """
    x, w, *rest = layouts
    like = ("x", x.dtype)
    for name, layout in [("x", x), ("w", w), *(("out", out) for out in outs)]:
        check_array("conv2d", name, layout, 4, like, name != "w")
    check_channels("conv2d", ("x", x.shape), ("w", w.shape), groups)
    if rest and bias is not None:
        check_vector("conv2d", rest.pop(0), w.shape[0], "filters", like)
    for add in rest:
        shape = result_shape(x.shape, w.shape, **how)
        # If the result has no pixels, the shapes are wrong, and a later check raises a clearer error.
        if add.shape != shape and min(shape[2:]) > 0:
            raise ArgumentError(
                f"conv2d: add has shape {add.shape} and the result has shape {shape}; pass an array of the result's shape"
            )
        check_type("conv2d", "add", add, like)


def _describe_depthwise(
    layouts: tuple[Layout, ...], *, groups: int, activation: str | None, mode: str = "cross_correlation", **how: Any
) -> Described:
    _check(layouts, (), groups=groups, activation=activation, mode=mode, **how)
    x, w = layouts[:2]
    shape = result_shape(x.shape, w.shape, **how)
    before, after = zip(*how["padding"], strict=True)
    padded = math.prod(extent + one + other for extent, one, other in zip(x.shape[2:], before, after, strict=True))
    filters = dense(w.shape, w.dtype)
    # Filters with a stride of 0 over the first axis are one filter for all channels. The kernel can read such a view.
    one_for_all = w.lies_as(Layout(w.shape, (0, *filters.strides[1:]), w.dtype))
    apart = groups == x.shape[1] == w.shape[0] and (one_for_all or w.lies_as(filters))
    small = math.prod(w.shape[2:]) <= MOST_TAPS and padded * x.shape[0] * x.shape[1] < 1 << 31
    if not apart or not small or mode != "cross_correlation" or min(shape) < 1:
        raise GraphNotSupportedError("conv2d: the depthwise kernel does not take these arguments")
    return Depthwise(how["stride"], before, how["dilation"], activation), lying_as(x, shape)


_depthwise = KernelFunction(_describe_depthwise, "conv2d")
"""Run depthwise convolutions without a residual, by a kernel.

The kernel is this package's own. It takes 0.15 to 0.42 of the time of cuDNN's plans (``benchmarks/operations.py``).
"""
_plain, _summed = (
    tuple(GraphFunction(_convolution, check=_check, name="conv2d", copies=copies) for copies in (False, True)) for _ in range(2)
)
"""The graph functions for calls without a residual, and with a residual.

Each pair has a graph function that copies no operands, and a graph function that may copy operands.
"""
_finish = Finisher.of("conv2d", axis=1)
