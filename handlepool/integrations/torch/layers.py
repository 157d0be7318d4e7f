"""Replace further torch operations, each by one kernel.

These are matrix products, pools, normalisations, softmax, attention, and operations that only move values.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

import handlepool
from handlepool.integrations.torch.convolutions import PLAIN, activation_behind
from handlepool.integrations.torch.kernel import Kernel, Lowering, Value, arguments, aten, is_tensor, pair, sole_user, value_of
from handlepool.integrations.torch.modes import deterministic, tf32

MOST_PARTS = 32
ALIGNED = 16
"""Bytes of alignment that the library's kernels need."""
functional = torch.nn.functional


def lower_layers(lowering: Lowering) -> None:
    """Replace each torch operation by this library's operation, if there is one."""
    for node in [*lowering.graph.nodes]:
        lower = _LOWER.get(node.target)
        if lower is not None and lowering.varies(node) and not node._erased and is_tensor(node):
            lower(lowering, node)


def _emit(lowering: Lowering, name: str, node: fx.Node, inputs: list[Any], run: Callable[..., Any], key: object = None) -> None:
    """Replace the operation ``node`` by a kernel that calls ``run``."""
    target, args, kwargs = node.target, node.args, node.kwargs
    order = [*node.all_input_nodes]

    def plain(*values: Value) -> Any:
        given, named = fx.node.map_arg((args, kwargs), dict(zip(inputs, values, strict=True)).__getitem__)
        return target(*given, **named)

    if [*dict.fromkeys(inputs)] == inputs and set(order) == set(inputs):
        lowering.emit(Kernel(name, {"fused": run}, plain, key), inputs, node)


def _settings() -> dict[str, Any]:
    return {"allow_tf32": tf32()[0], "deterministic": deterministic()}


def _linear(lowering: Lowering, node: fx.Node) -> None:
    x, w, bias = arguments(node)
    if not is_tensor(x) or value_of(x).dim() < 2 or not lowering.constant(w, bias) or lowering.constant(x):
        return
    settings = _settings()
    out, activation = activation_behind(node)

    def run(x: Value, w: Value, *bias: Value) -> Any:
        return handlepool.linear(x, w, bias=bias[0] if bias else None, activation=activation, **settings)

    def pixels(x: Value, w: Value, *bias: Value) -> Any:
        # This way computes the same product as a 1x1 convolution: each row of features becomes a pixel of one image. cuDNN has
        # other plans for a convolution than for a product, and some of these plans are quicker.
        image = x.reshape(-1, x.shape[-1]).T[None, :, :, None]
        more: dict[str, Any] = {"bias": bias[0] if bias else None, "activation": activation}
        return handlepool.conv2d(image, w[:, :, None, None], **more, **settings)[0, :, :, 0].T.reshape(*x.shape[:-1], -1)

    def plain(x: Value, w: Value, *bias: Value) -> Any:
        return PLAIN[activation](functional.linear(x, w, *bias))

    name = "linear" if activation is None else f"linear_{activation}"
    ways: dict[str, Callable[..., Any]] = {"fused": run}
    if value_of(x).dtype is not torch.float32 and value_of(x).is_contiguous():
        ways["pixels"] = pixels
    kernel = Kernel(name, ways, plain, (bias is None, *settings.values()))
    lowering.emit(kernel, [x, w, *([] if bias is None else [bias])], out)


def _matmul(lowering: Lowering, node: fx.Node) -> None:
    a, b = node.args[:2]
    if all(is_tensor(each) and value_of(each).dim() >= 2 for each in (a, b)) and value_of(a).dtype == value_of(b).dtype:
        settings = _settings()
        _emit(lowering, "matmul", node, [a, b], lambda a, b: handlepool.matmul(a, b, **settings), (*settings.values(),))


def _max_pool(lowering: Lowering, node: fx.Node) -> None:
    x, window, stride, padding, dilation, ceil = arguments(node)
    if is_tensor(x, 4) and pair(dilation) == (1, 1):
        window, padding, stride = pair(window), pair(padding), pair(stride or window)
        _emit(
            lowering,
            "max_pool2d",
            node,
            [x],
            lambda x: handlepool.max_pool2d(x, window, stride=stride, padding=padding, ceil_mode=bool(ceil)),
        )


def _avg_pool(lowering: Lowering, node: fx.Node) -> None:
    x, window, stride, padding, ceil, counted, divisor = arguments(node)
    if is_tensor(x, 4) and divisor is None:
        window, padding, stride = pair(window), pair(padding), pair(stride or window)
        more: dict[str, Any] = {"ceil_mode": bool(ceil), "count_include_pad": bool(counted)}
        run = lambda x: handlepool.avg_pool2d(x, window, stride=stride, padding=padding, **more)  # noqa: E731
        _emit(lowering, "avg_pool2d", node, [x], run)


def _adaptive(lowering: Lowering, node: fx.Node) -> None:
    x, size = node.args
    if not is_tensor(x, 4):
        return
    extents = value_of(x).shape[2:]
    size = pair(size)
    if size == (1, 1):
        _emit(lowering, "mean2d", node, [x], lambda x: handlepool.mean2d(x, keepdims=True))
    elif all(part and not extent % part for extent, part in zip(extents, size, strict=True)):
        window = extents[0] // size[0], extents[1] // size[1]
        if window != (1, 1):
            _emit(lowering, "avg_pool2d", node, [x], lambda x: handlepool.avg_pool2d(x, window))


def _mean(lowering: Lowering, node: fx.Node) -> None:
    x, axes, keep, dtype = arguments(node)
    if is_tensor(x, 4) and dtype is None and sorted(axis % 4 for axis in axes or ()) == [2, 3]:
        _emit(lowering, "mean2d", node, [x], lambda x: handlepool.mean2d(x, keepdims=bool(keep)))


def _cat(lowering: Lowering, node: fx.Node) -> None:
    parts, axis = arguments(node)
    dtype = value_of(node).dtype
    if not all(is_tensor(each) and value_of(each).dtype == dtype for each in parts) or not 1 < len(parts) <= MOST_PARTS:
        return
    if len({*parts}) == len(parts):
        _emit(lowering, "concat", node, [*parts], lambda *parts: handlepool.concat(parts, axis))


def _layer_norm(lowering: Lowering, node: fx.Node) -> None:
    x, shape, weight, bias, epsilon, *_ = arguments(node)
    if is_tensor(x) and all(each is None or is_tensor(each) for each in (weight, bias)):
        axes = tuple(range(-len(shape), 0))
        _normed(lowering, node, (x, weight, bias), lambda x, **w: handlepool.layer_norm(x, axis=axes, eps=epsilon, **w))


def _rms_norm(lowering: Lowering, node: fx.Node) -> None:
    x, shape, weight, epsilon = arguments(node)
    if is_tensor(x) and (weight is None or is_tensor(weight)):
        axes = tuple(range(-len(shape), 0))
        # If ``epsilon`` is None, torch uses the machine epsilon of the type.
        small = torch.finfo(value_of(x).dtype).eps if epsilon is None else epsilon
        _normed(lowering, node, (x, weight, None), lambda x, **w: handlepool.rms_norm(x, axis=axes, eps=small, **w))


def _group_norm(lowering: Lowering, node: fx.Node) -> None:
    x, groups, weight, bias, epsilon, *_ = arguments(node)
    if is_tensor(x) and all(each is None or is_tensor(each) for each in (weight, bias)):
        _normed(lowering, node, (x, weight, bias), lambda x, **w: handlepool.group_norm(x, groups, eps=epsilon, **w))


def _instance_norm(lowering: Lowering, node: fx.Node) -> None:
    x, weight, bias, mean, variance, of_inputs, _, epsilon, _ = arguments(node)
    if is_tensor(x) and of_inputs and mean is None and variance is None:
        _normed(lowering, node, (x, weight, bias), lambda x, **w: handlepool.instance_norm(x, eps=epsilon, **w))


def _normed(lowering: Lowering, node: fx.Node, given: tuple[Any, Any, Any], run: Callable[..., Any]) -> None:
    names = [name for name, each in zip(("weight", "bias"), given[1:], strict=True) if each is not None]
    inputs = [each for each in given if each is not None]
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    _emit(lowering, name, node, inputs, lambda x, *rest: run(x, **dict(zip(names, rest, strict=True))))


def _softmax(lowering: Lowering, node: fx.Node) -> None:
    x, axis, *rest = arguments(node)
    if is_tensor(x) and value_of(x).dim() and rest[0] in (None, value_of(x).dtype, False):
        _emit(lowering, "softmax", node, [x], lambda x: handlepool.softmax(x, axis=axis))


def _attention(lowering: Lowering, node: fx.Node) -> None:
    q, k, v, mask, dropout, causal, scale, grouped = arguments(node)
    given = [q, k, v, *([] if mask is None else [mask])]
    # Torch computes attention with a boolean mask. Such a mask may hide all keys of a query, and torch then returns NaN or
    # zeros, depending on its version.
    if dropout or grouped or not all(is_tensor(each, dtypes=(torch.float16, torch.bfloat16)) for each in given):
        return
    run = lambda q, k, v, *mask: handlepool.scaled_dot_product_attention(  # noqa: E731
        q, k, v, attn_mask=mask[0] if mask else None, is_causal=bool(causal), scale=scale
    )
    _emit(lowering, "attention", node, given, run, (bool(causal), scale))


def _pad(lowering: Lowering, node: fx.Node) -> None:
    x, widths, *rest = arguments(node)
    mode, value = (rest[0], rest[1]) if node.target is aten.pad.default else ("constant", rest[0])
    if is_tensor(x) and mode in ("constant", "reflect", "replicate"):
        number = 0.0 if value is None else value
        _emit(lowering, "pad", node, [x], lambda x: handlepool.pad(x, tuple(widths), mode=mode, value=number))


def _upsample(lowering: Lowering, node: fx.Node) -> None:
    x, size, *rest = arguments(node)
    bilinear = node.target is aten.upsample_bilinear2d.vec
    factors = rest[-1]
    corners = bool(bilinear and rest[0])
    if is_tensor(x, 4):
        places: dict[str, Any] = {"size": pair(size)} if factors is None else {"scale_factor": pair(factors)}
        mode = "bilinear" if bilinear else "nearest"
        more: dict[str, Any] = {"align_corners": True} if corners else {}
        _emit(lowering, f"{mode}2d", node, [x], lambda x: handlepool.interpolate2d(x, mode=mode, **places, **more))


def _shuffle(lowering: Lowering, node: fx.Node) -> None:
    """Replace the three views of a channel shuffle by one kernel.

    The first view splits the channels into two axes, the second swaps these axes, and the third joins them again.
    """
    x, shape = node.args
    if not is_tensor(x, 4) or len(shape) != 5 or value_of(node).shape[2] * value_of(node).shape[1] != value_of(x).shape[1]:
        return
    if tuple(value_of(node).shape[3:]) != tuple(value_of(x).shape[2:]) or value_of(node).shape[0] != value_of(x).shape[0]:
        return
    swap = sole_user(node)
    if swap is None or swap.target is not aten.transpose.int or sorted(axis % 5 for axis in swap.args[1:]) != [1, 2]:
        return
    last = sole_user(swap)
    if last is not None and last.target is aten.clone.default:
        last = sole_user(last)
    if last is None or last.target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return
    if value_of(last).shape != value_of(x).shape:
        return
    groups = value_of(node).shape[1]
    plain = lambda x: torch.channel_shuffle(x, groups)  # noqa: E731
    kernel = Kernel("channel_shuffle", {"fused": lambda x: handlepool.channel_shuffle(x, groups)}, plain)
    lowering.emit(kernel, [x], last)


def lower_slices(lowering: Lowering) -> None:
    """Copy each slice of channels whose first element is misaligned.

    The copy is aligned to `ALIGNED` bytes, as the kernels need it.
    """
    for node in [*lowering.graph.nodes]:
        part = _slice(node) if lowering.varies(node) and is_tensor(node, 4) else None
        if part is None or not any(isinstance(user.target, Kernel) for user in node.users):
            continue
        source, start, stop = part
        value = value_of(source)
        if start * value.element_size() % ALIGNED:
            widths = (0, 0, 0, 0, -start, stop - value.shape[1])
            run = partial(_cut, widths)
            kernel = Kernel("slice", {"fused": run}, partial(_narrow, start, stop))
            lowering.emit(kernel, [source], node)


def _slice(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return the source, begin and end of a slice of channels.

    Return None for any other node.
    """
    if node.target is aten.slice.Tensor:
        source, axis, start, _, step = arguments(node)
        if axis == 1 and step == 1 and is_tensor(source, 4):
            start = start or 0
            return (source, start, start + value_of(node).shape[1]) if start >= 0 else None
    if node.target is operator.getitem and node.args[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        source, _, axis = arguments(node.args[0])
        if axis == 1 and is_tensor(source, 4):
            extents = [each.shape[1] for each in value_of(node.args[0])]
            start = sum(extents[: node.args[1]])
            return source, start, start + extents[node.args[1]]
    return None


def _cut(widths: tuple[int, ...], x: Value) -> Any:
    return handlepool.pad(x, widths)


def _narrow(start: int, stop: int, x: Value) -> Any:
    return x[:, start:stop].clone(memory_format=torch.preserve_format)


_LOWER: dict[Any, Callable[[Lowering, fx.Node], None]] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mm.default: _matmul,
    aten.max_pool2d.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _mean,
    aten.cat.default: _cat,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.scaled_dot_product_attention.default: _attention,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.upsample_nearest2d.vec: _upsample,
    aten.upsample_bilinear2d.vec: _upsample,
    aten.view.default: _shuffle,
}
