"""Replace convolutions by kernels, which also compute operations after them."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

import handlepool
from handlepool.integrations.torch.kernel import (
    Kernel,
    Lowering,
    Value,
    arguments,
    aten,
    is_tensor,
    pair,
    sole_user,
    value_of,
)
from handlepool.integrations.torch.modes import deterministic, tf32

NORM = aten._native_batch_norm_legit_no_training.default
ACTIVATIONS = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.silu.default: "swish",
    aten.gelu.default: "gelu",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
}
PLAIN: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swish": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "hardswish": torch.nn.functional.hardswish,
    "hardsigmoid": torch.nn.functional.hardsigmoid,
}
ALONE: dict[str, Callable[..., Any]] = {
    "sigmoid": handlepool.math.sigmoid,
    "tanh": handlepool.math.tanh,
    "swish": handlepool.math.silu,
    "gelu": handlepool.math.gelu,
}
"""Activations that may get a launch of their own, after the convolution.

cuDNN has few plans that fuse a convolution with such an activation.
"""
RANKS = {
    aten.conv1d.default: 3,
    aten.conv1d.padding: 3,
    aten.conv_transpose1d.default: 3,
    aten.conv2d.default: 4,
    aten.conv2d.padding: 4,
    aten.conv_transpose2d.input: 4,
}
"""The number of axes of each convolution's arrays, by torch's operation."""
_OVER_ELEMENTS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
Steps = tuple[Any, ...]
"""Operations that scale and shift channels, in order.

Each is ("norm", epsilon), "mul" or "add".
"""


def lower_convolutions(lowering: Lowering) -> None:
    """Replace 1-D and 2-D convolutions that have constant weights."""
    for node in lowering.nodes(*RANKS):
        x, w, bias, *how = arguments(node)
        rank = RANKS[node.target]
        known = all(is_tensor(each, rank) for each in (node, x, w)) and lowering.constant(w, bias)
        if known and not lowering.constant(x):
            if node.target in (aten.conv_transpose1d.default, aten.conv_transpose2d.input):
                _transposed(lowering, node, x, w, bias, how)
            else:
                _convolution(lowering, node, x, w, bias, how)


def _along(rank: int, value: object, other: int) -> tuple[int, int]:
    """Return an option of a convolution as a pair (height, width).

    A row is an image of height 1, whose option for the height is ``other``.
    """
    return pair(value) if rank == 4 else (other, pair(value)[0])


def _convolution(lowering: Lowering, node: fx.Node, x: fx.Node, w: fx.Node, bias: Value, how: list[Any]) -> None:
    stride, padding, dilation, groups = how
    rank = RANKS[node.target]
    options = {
        "stride": _along(rank, stride, 1),
        "padding": padding if isinstance(padding, str) else _along(rank, padding, 0),
        "dilation": _along(rank, dilation, 1),
        "groups": groups,
    }
    out, steps, parts = _scaling(lowering, node)
    filters = lowering.made(_filters, steps, w, parts)
    vector = None if bias is None and not steps else lowering.made(_bias, steps, w, bias, parts)
    out, addend = _addend(lowering, out) if groups == 1 else (out, None)
    out, activation = activation_behind(out)
    inputs = [each for each in (x, filters, vector, addend) if each is not None]
    kernel = _kernel(rank, vector is not None, addend is not None, activation, options)
    lowering.emit(kernel, inputs, out)


def _kernel(rank: int, biased: bool, added: bool, activation: str | None, options: dict[str, Any]) -> Kernel:
    settings: dict[str, Any] = {"allow_tf32": tf32()[1], "deterministic": deterministic()}

    def parts(rest: tuple[Any, ...]) -> dict[str, Any]:
        names = (("bias", biased), ("add", added))
        return dict(zip([name for name, there in names if there], rest, strict=True))

    def fused(x: Value, w: Value, *rest: Value) -> Any:
        return handlepool.conv2d(x, w, activation=activation, **parts(rest), **options, **settings)

    def apart(x: Value, w: Value, *rest: Value) -> Any:
        return ALONE[activation or ""](handlepool.conv2d(x, w, **parts(rest), **options, **settings))

    def plain(x: Value, w: Value, *rest: Value) -> Any:
        given = parts(rest)
        y = torch.conv2d(x, w, given.get("bias"), **options)
        return PLAIN[activation](y + given["add"] if added else y)

    # cuDNN has few plans that fuse a convolution with an activation in `ALONE`, and these plans are slow. So the way with a
    # separate launch comes first.
    ways = {"apart": apart, "fused": fused} if activation in ALONE else {"fused": fused}
    kind = ("conv1d" if rank == 3 else "conv2d") if options["groups"] == 1 else "grouped"
    name = "_".join([kind, *(["add"] if added else []), *([activation] if activation else [])])
    return _of_rank(rank, Kernel(name, ways, plain, (biased, *options.values(), *settings.values())))


def _of_rank(rank: int, kernel: Kernel) -> Kernel:
    """Return ``kernel``, or its version for rows if ``rank`` is 3.

    Rows with channels are images of height 1. Torch has no channels-last rows, so a model cannot ask for the layout in which
    cuDNN is quickest. The kernel takes that layout itself, and the rows stay in it from kernel to kernel.
    """
    if rank == 4:
        return kernel

    def of_rows(function: Callable[..., Any], lay: Callable[[Value], Any]) -> Callable[..., Any]:
        def run(x: Value, w: Value, *rest: Value) -> Any:
            images = [lay(each[:, :, None]) if each.ndim == 3 else each for each in (x, w, *rest)]
            return function(*images)[:, :, 0]

        return run

    ways = {name: of_rows(way, _channels_last) for name, way in kernel.ways.items()}
    return Kernel(kernel.__name__, ways, of_rows(kernel.plain, lambda image: image), kernel.key)


def _channels_last(image: Value) -> Any:
    """Return images of height 1 with the channels innermost."""
    strides = image.stride() if isinstance(image, Tensor) else [step // image.dtype.itemsize for step in image.strides]
    count, channels, _, length = image.shape
    steps = zip((count, channels, length), (strides[0], strides[1], strides[3]), (channels * length, 1, channels), strict=True)
    return image if all(step == right for extent, step, right in steps if extent != 1) else handlepool.to_channels_last(image)


def _transposed(lowering: Lowering, node: fx.Node, x: fx.Node, w: fx.Node, bias: Value, how: list[Any]) -> None:
    stride, padding, beyond, groups, dilation = how
    rank = RANKS[node.target]
    options = {
        "stride": _along(rank, stride, 1),
        "padding": _along(rank, padding, 0),
        "output_padding": _along(rank, beyond, 0),
        "groups": groups,
        "dilation": _along(rank, dilation, 1),
    }
    settings: dict[str, Any] = {"allow_tf32": tf32()[1], "deterministic": deterministic()}
    filters = lowering.made(_lain, w)

    def run(x: Value, w: Value, *bias: Value) -> Any:
        return handlepool.conv_transpose2d(x, w, bias=bias[0] if bias else None, **options, **settings)

    def plain(x: Value, w: Value, *bias: Value) -> Any:
        return torch.conv_transpose2d(x, w, *(bias or (None,)), **options)

    inputs = [x, filters, *([] if bias is None else [bias])]
    lowering.emit(_of_rank(rank, Kernel(f"conv_transpose{rank - 2}d", {"fused": run}, plain)), inputs, node)


def _scaling(lowering: Lowering, node: fx.Node) -> tuple[fx.Node, Steps, list[Any]]:
    """Find the operations after ``node`` that scale or shift channels by constants.

    Return the last of these operations, their kinds, and their constants.
    """
    steps: list[Any] = []
    parts: list[Any] = []
    while (user := sole_user(node)) is not None:
        if user.target is NORM:
            _, weight, bias, mean, variance, _, epsilon = arguments(user)
            first = sole_user(user)
            if first is None or first.target is not operator.getitem or first.args[1] != 0:
                break
            if not lowering.constant(weight, bias, mean, variance):
                break
            steps.append(("norm", epsilon))
            parts += [weight, bias, mean, variance]
            node = first
        elif user.target in (aten.mul.Tensor, aten.add.Tensor) and not user.kwargs and len(user.args) == 2:
            one, other = user.args
            factor = other if one is node else one
            if not isinstance(factor, fx.Node) or not lowering.constant(factor) or not _by_channel(factor, node):
                break
            if value_of(user).dtype != value_of(node).dtype:
                break
            steps.append("mul" if user.target is aten.mul.Tensor else "add")
            parts.append(factor)
            node = user
        else:
            break
    return node, tuple(steps), parts


def _by_channel(factor: fx.Node, node: fx.Node) -> bool:
    extents = (value_of(node).shape[1], *[1] * (value_of(node).dim() - 2))
    return tuple(value_of(factor).shape) in ((1, *extents), extents)


def _addend(lowering: Lowering, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Find a residual that is added after a convolution.

    Return the addition and the residual, or the node itself and None.
    """
    user = sole_user(node)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return node, None
    one, other = user.args
    addend = other if one is node else one
    if addend is node or not is_tensor(addend) or lowering.constant(addend):
        return node, None
    same = value_of(addend).shape == value_of(node).shape and value_of(addend).dtype == value_of(node).dtype
    return (user, addend) if same else (node, None)


def activation_behind(node: fx.Node) -> tuple[fx.Node, str | None]:
    """Find an activation after a node.

    Return the activation's node and name, or the node itself and None. An activation other than relu is left out if its value
    goes into an elementwise product or sum. The kernel of this product or sum then computes the activation at no cost, while
    cuDNN has few plans that fuse a convolution with the activation.
    """
    user = sole_user(node)
    if user is None or user.target not in ACTIVATIONS or user.kwargs.get("approximate", "none") != "none":
        return node, None
    after = sole_user(user)
    if user.target is not aten.relu.default and after is not None and after.target in _OVER_ELEMENTS:
        return node, None
    return user, ACTIVATIONS[user.target]


# The functions below compute constants in float64, and round each constant once.


def affine(steps: Steps, parts: list[Any]) -> tuple[Any, Any]:
    """Return the factor and the summand of each channel, in float64.

    One product with the factor and one sum with the summand give the same values as all operations in ``steps``, one after
    another.
    """
    left: Iterator[Any] = iter(parts)
    scale: Value = 1.0
    shift: Value = 0.0
    for step in steps:
        if step == "mul":
            factor = next(left).double().reshape(-1)
            scale, shift = scale * factor, shift * factor
        elif step == "add":
            shift = shift + next(left).double().reshape(-1)
        else:
            weight, bias, mean, variance = (None if each is None else each.double() for each in (next(left) for _ in range(4)))
            factor = torch.rsqrt(variance + step[1])
            factor = factor if weight is None else factor * weight
            scale, shift = scale * factor, (shift - mean) * factor
            shift = shift if bias is None else shift + bias
    return scale, shift


def _filters(steps: Steps, w: Tensor, parts: list[Any]) -> Tensor:
    scale, _ = affine(steps, parts)
    if isinstance(scale, Tensor):
        w = (w.double() * scale.reshape(-1, *[1] * (w.dim() - 1))).to(w.dtype)
    return _lain(w)


def _bias(steps: Steps, w: Tensor, bias: Tensor | None, parts: list[Any]) -> Tensor:
    scale, shift = affine(steps, parts)
    wide = shift if bias is None else bias.double() * scale + shift
    return torch.broadcast_to(torch.as_tensor(wide, dtype=torch.float64, device=w.device), w.shape[:1]).to(w.dtype).contiguous()


def _lain(w: Tensor) -> Tensor:
    """Return filters in channels-last layout; give 1-D filters a height of 1."""
    return (w[:, :, None] if w.dim() == 3 else w).contiguous(memory_format=torch.channels_last)
