"""Lower squeeze-and-excite blocks, each to one kernel of two launches.

Such a block computes the mean of each channel of an image, two 1x1 convolutions of these means, and a gate between 0 and 1. It
multiplies each channel by its gate.
"""

from typing import Any

import torch
from torch import Tensor, fx

import handlepool
from handlepool.integrations.torch.convolutions import ACTIVATIONS, PLAIN
from handlepool.integrations.torch.kernel import Kernel, Lowering, Value, arguments, aten, is_tensor, pair, sole_user, value_of

GATES = {aten.sigmoid.default: "sigmoid", aten.hardsigmoid.default: "hardsigmoid"}
MOST_CHANNELS, MOST_SQUEEZED = 8192, 1024
"""The maximum channels of a block's image, and between its two convolutions.

Blocks with more channels are not replaced.
"""


def lower_gates(lowering: Lowering) -> None:
    """Replace each squeeze-and-excite block by a kernel."""
    for node in lowering.nodes(aten.mul.Tensor):
        for x, gate in (node.args, node.args[::-1]):
            found = _gate(lowering, x, gate)
            if found is not None:
                _emit(lowering, node, x, *found)
                break


def _gate(lowering: Lowering, x: Any, gate: Any) -> tuple[list[fx.Node], str | None, str] | None:
    """Return a block's weights, inner activation and gate function.

    Return None if ``gate`` is not computed from ``x`` as in a squeeze-and-excite block.
    """
    if not is_tensor(x, 4) or not is_tensor(gate, 4) or gate.target not in GATES or sole_user(gate) is None:
        return None
    second = _layer(lowering, gate.args[0])
    inner = None if second is None else second.args[0]
    kind = None
    if inner is not None and inner.target in ACTIVATIONS and not inner.kwargs and sole_user(inner) is not None:
        kind, inner = ACTIVATIONS[inner.target], inner.args[0]
    first = None if inner is None else _layer(lowering, inner)
    if first is None or second is None or not _is_mean(first.args[0], x):
        return None
    layers = [arguments(each)[1:3] for each in (first, second)]
    (w1, _), (w2, _) = layers
    if any(each is None for layer in layers for each in layer):
        return None
    channels, squeezed = value_of(x).shape[1], value_of(w1).shape[0]
    shapes = tuple(value_of(w1).shape), tuple(value_of(w2).shape)
    if shapes != ((squeezed, channels, 1, 1), (channels, squeezed, 1, 1)):
        return None
    if channels > MOST_CHANNELS or squeezed > MOST_SQUEEZED:
        return None
    return [each for layer in layers for each in layer], kind, GATES[gate.target]


def _layer(lowering: Lowering, node: Any) -> fx.Node | None:
    """Return ``node`` if it is a 1x1 convolution with constant weights.

    For any other node, and if several operations read the node, return None.
    """
    if not isinstance(node, fx.Node) or node.target is not aten.conv2d.default or sole_user(node) is None:
        return None
    _, w, bias, stride, padding, _, groups = arguments(node)
    plain = pair(stride) == (1, 1) and padding in (0, [0, 0], [0]) and groups == 1
    return node if plain and lowering.constant(w, bias) else None


def _is_mean(node: Any, x: fx.Node) -> bool:
    """Return whether a node computes the mean of each channel of ``x``."""
    if not isinstance(node, fx.Node) or sole_user(node) is None or not node.args or node.args[0] is not x:
        return False
    if node.target is aten.adaptive_avg_pool2d.default:
        return pair(node.args[1]) == (1, 1)
    if node.target is not aten.mean.dim:
        return False
    _, axes, keep, dtype = arguments(node)
    return bool(keep) and dtype is None and sorted(axis % 4 for axis in axes or ()) == [2, 3]


def _emit(lowering: Lowering, node: fx.Node, x: fx.Node, weights: list[fx.Node], kind: str | None, gate: str) -> None:
    """Replace the mean, both layers and the product by one kernel."""

    def run(x: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Any:
        return handlepool.squeeze_excite(x, w1, b1, w2, b2, activation=kind, gate=gate)

    def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        inner = PLAIN[kind](torch.conv2d(x.mean((2, 3), keepdim=True), w1, b1))
        return x * PLAIN[gate](torch.conv2d(inner, w2, b2))

    flat = [lowering.made(torch.Tensor.contiguous, each) for each in weights]
    lowering.emit(Kernel("squeeze_excite", {"fused": run}, plain, (kind, gate)), [x, *flat], node)
