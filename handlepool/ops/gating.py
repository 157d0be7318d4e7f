"""Scale the channels of images by gates: squeeze-and-excite."""

import math
from collections.abc import Sequence
from typing import Any, cast

from handlepool._util.names import shown
from handlepool.drivers.kernel import MOST_EXCITED, MOST_SQUEEZED, Excite, Layer, Squeeze
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, dense, lying_as
from handlepool.ops.activations import FLOATING_TYPES, check_activation
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout, as_dtype

GATES = ("sigmoid", "hardsigmoid")
PIXELS_EACH, MOST_PARTS = 256, 64
"""The minimum number of pixels per part, and the maximum part count.

Each image is summed in several parts. If it were one part, few blocks of the GPU would have to sum a large image of few
channels.
"""
MOST_ANEW = 1 << 16
"""The maximum number of first-layer weights without a separate launch.

Up to this number of weights, the first layer has no launch of its own: each block of the second launch computes the layer anew.
"""


def squeeze_excite(
    x: ArrayT,
    w1: object,
    b1: object,
    w2: object,
    b2: object,
    *,
    activation: str | None = "relu",
    gate: str = "sigmoid",
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Scale the channels of images by gates, on the current stream.

    The gates of an image are ``gate(w2 @ activation(w1 @ means + b1) + b2)``, where ``means`` are the means of its channels.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32, contiguous or channels-last. They may have gaps, and at most 8192 channels.
    w1, w2 : array, shapes (S, C) and (C, S)
        Weights of both layers, of the same type, without gaps. They may also be 1x1 filters, of shapes (S, C, 1, 1) and (C, S,
        1, 1). S is at most 1024.
    b1, b2 : array, shapes (S,) and (C,)
        Biases of both layers, of the same type.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied after the first layer.
    gate : {"sigmoid", "hardsigmoid"}
        Applied after the second layer.
    out : array, shape (N, C, H, W), optional
        Array for the result. It may be x.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, C, H, W)
        ``out``, or a new array with the kind, type and layout of ``x``. The result is computed in float32, and rounded once.

    Raises
    ------
    ArgumentError
        For unsupported shapes, types, strides or options.

    Notes
    -----
    There are two launches. The first launch sums parts of the images. In the second launch, each block computes the gates that
    it needs, and scales its pixels. If the first layer has more than 65,536 weights, a separate launch between these two
    computes the layer.

    Examples
    --------
    >>> y = handlepool.squeeze_excite(x, w1, b1, w2, b2, activation="swish")                             # doctest: +SKIP
    """
    sums = _squeeze.call((x,), None, pool, ())
    # The arrays are checked later, so ``w1`` may still be any object.
    weights = math.prod(getattr(w1, "shape", ()))
    if weights <= MOST_ANEW:
        return cast("ArrayT", _excite.call((x, sums, w1, b1, w2, b2), out, pool, (gate, activation)))
    hidden = _layer.call((x, sums, w1, b1), None, pool, (activation,))
    return cast("ArrayT", _layered.call((x, hidden, w2, b2), out, pool, (gate,)))


def _describe_squeeze(layouts: tuple[Layout, ...]) -> Described:
    (x,) = layouts
    if x.ndim != 4:
        raise ArgumentError(f"squeeze_excite: x has {x.ndim} axes, shape {x.shape}; it must have 4, (N, C, H, W)")
    if x.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"squeeze_excite: x is {x.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    check_strides("x of squeeze_excite", x)
    pixels = math.prod(x.shape[2:])
    if x.shape[0] * x.shape[1] and not pixels:
        raise ArgumentError(
            f"squeeze_excite: images of shape {x.shape} have no pixels, and a mean of no pixels is no number; pass images "
            f"with pixels"
        )
    parts = min(max(1, pixels // PIXELS_EACH), MOST_PARTS)
    return Squeeze(parts), dense((x.shape[0], parts, x.shape[1]), as_dtype("float32"))


def _describe_layer(layouts: tuple[Layout, ...], *, activation: str | None) -> Described:
    x, _, w1, b1 = layouts
    squeezed = _check_layers(x, [("w1", w1), ("b1", b1)])
    return Layer(activation), dense((x.shape[0], squeezed), as_dtype("float32"))


def _describe_excite(layouts: tuple[Layout, ...], *, gate: Any, activation: str | None = None) -> Described:
    x, given, *layers = layouts
    layered = len(layers) == 2
    squeezed = _check_layers(x, [*zip(("w1", "b1", "w2", "b2")[-len(layers) :], layers, strict=True)])
    if layered and given.shape[1] != squeezed:
        raise ArgumentError(
            f"squeeze_excite: w2 has shape {layers[0].shape} and the first layer has {given.shape[1]} outputs; w2 must have "
            f"the shape (C, {given.shape[1]})"
        )
    return Excite(gate, layered, activation), lying_as(x, x.shape)


def _check_layers(x: Layout, given: Sequence[tuple[str, Layout]]) -> int:
    """Check weights and biases; return S, the number of first-layer outputs."""
    (name, first), channels = given[0], x.shape[1]
    squeezed = (first.shape[0] if name == "w1" else first.shape[1]) if first.ndim > 1 else 0
    if channels > MOST_EXCITED or squeezed > MOST_SQUEEZED:
        raise ArgumentError(
            f"squeeze_excite: x has {channels} channels and the first layer has {squeezed} outputs; at most {MOST_EXCITED} "
            f"channels and {MOST_SQUEEZED} outputs are possible. Use mean2d, linear and multiply instead"
        )
    wanted = {"w1": (squeezed, channels), "b1": (squeezed,), "w2": (channels, squeezed), "b2": (channels,)}
    for name, layout in given:
        shape = wanted[name]
        if layout.shape not in (shape, (*shape, 1, 1)[: 4 if name[0] == "w" else 1]) or not squeezed:
            raise ArgumentError(
                f"squeeze_excite: {name} of shape {layout.shape} for {channels} channels; w1 must be (S, C), b1 (S,), w2 (C, S) "
                f"and b2 (C,)"
            )
        if layout.dtype != x.dtype:
            raise ArgumentError(
                f"squeeze_excite: {name} is {layout.dtype} and x is {x.dtype}; convert one to the type of the other"
            )
        if not layout.lies_as(dense(layout.shape, layout.dtype)):
            raise ArgumentError(
                f"squeeze_excite: {name} of shape {layout.shape} has strides {layout.strides} bytes; {name} must be contiguous "
                f"without gaps. Pass a contiguous copy"
            )
    return squeezed


def _options_of_layer(activation: object) -> dict[str, Any]:
    check_activation("squeeze_excite", activation)
    return {"activation": activation}


def _options(gate: object, *activation: object) -> dict[str, Any]:
    for each in activation:
        check_activation("squeeze_excite", each)
    if not isinstance(gate, str) or gate not in GATES:
        raise ArgumentError(f"squeeze_excite: gate={shown(gate)}; it can be {' or '.join(GATES)}")
    return {"gate": gate} | ({"activation": activation[0]} if activation else {})


_squeeze = KernelFunction(_describe_squeeze, "squeeze_excite")
_layer = KernelFunction(_describe_layer, "squeeze_excite", _options_of_layer)
_excite, _layered = (KernelFunction(_describe_excite, "squeeze_excite", _options) for _ in range(2))
