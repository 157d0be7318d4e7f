"""Run kernels of normalisations and copies with NumPy, in float32.

See `handlepool.drivers.kernel`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from handlepool.drivers.host.convolution import Array
from handlepool.drivers.host.pointwise import activated
from handlepool.drivers.kernel import Affine, Excite, Layer, NetworkKernel, Normalise, Pad, Resample, Shuffle, Squeeze

Compute = Callable[[Sequence[Array], Array], None]


def computation(kernel: NetworkKernel) -> Compute:
    """Return the function that computes a kernel's output."""
    if isinstance(kernel, Normalise):
        return _normalise(kernel)
    if isinstance(kernel, Affine):
        return _affine(kernel)
    if isinstance(kernel, Pad):
        return _pad(kernel)
    if isinstance(kernel, Squeeze):
        return _squeeze(kernel)
    if isinstance(kernel, Layer):
        return _layer(kernel)
    if isinstance(kernel, Excite):
        return _excite(kernel)
    return _shuffle(kernel) if isinstance(kernel, Shuffle) else _resample(kernel)


def _normalise(kernel: Normalise) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        x, *parameters = xs
        values = x.astype(np.float32)
        axes = kernel.axes
        if kernel.groups:
            values = values.reshape(x.shape[0], kernel.groups, -1)
            axes = (2,)
        if kernel.kind == "softmax":
            # Subtracting the maximum keeps the exponentials from overflowing.
            result = np.exp(values - values.max(axes, keepdims=True))
            result /= result.sum(axes, keepdims=True)
        else:
            less = values.mean(axes, keepdims=True) if kernel.kind == "mean" else np.float32(0)
            result = values - less
            square = np.mean(result * result, axes, keepdims=True)
            result = result / np.sqrt(square + np.float32(kernel.eps))
        result = result.reshape(x.shape)
        places = (1,) if kernel.groups else kernel.axes
        parameters = [
            each.reshape([x.shape[axis] if axis in places else 1 for axis in range(x.ndim)]).astype(np.float32)
            for each in parameters
        ]
        y[...] = _scaled(result, parameters, kernel.weighted)

    return compute


def _scaled(values: Array, parameters: Sequence[Array], weighted: bool) -> Array:
    """Multiply by the weight, if any, and add the bias, if any."""
    for place, parameter in enumerate(parameters):
        values = values * parameter if weighted and not place else values + parameter
    return values


def _affine(kernel: Affine) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        x, *parameters = xs
        along = (-1, *(1,) * (x.ndim - 2))
        mean, variance, *rest = (each.astype(np.float32).reshape(along) for each in parameters)
        result = (x.astype(np.float32) - mean) / np.sqrt(variance + np.float32(kernel.eps))
        result = _scaled(result, rest, kernel.weighted)
        y[...] = activated(kernel.activation, result)

    return compute


def _pad(kernel: Pad) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        (x,) = xs
        found, outside = x, np.zeros(y.shape, bool)
        for axis, (before, within, extent) in enumerate(zip(kernel.before, x.shape, y.shape, strict=True)):
            places = np.arange(extent) - before
            if kernel.mode == "reflect":
                # Reflection does not repeat the edge element.
                places = np.abs(places)
                places = np.where(places >= within, 2 * within - 2 - places, places)
            # A place outside of the input reads the input's nearest element. In the constant mode, the constant overwrites that
            # place later.
            inside = np.clip(places, 0, within - 1)
            found = np.take(found, inside, axis)
            outside |= (inside != places).reshape([-1 if axis == own else 1 for own in range(y.ndim)])
        y[...] = found
        if kernel.mode == "constant":
            itemsize = y.dtype.itemsize
            y[outside] = np.frombuffer(kernel.bits.to_bytes(8, "little")[:itemsize], y.dtype)[0]

    return compute


def _shuffle(kernel: Shuffle) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        (x,) = xs
        dealt = x.reshape(x.shape[0], kernel.groups, x.shape[1] // kernel.groups, *x.shape[2:])
        y[...] = dealt.swapaxes(1, 2).reshape(y.shape)

    return compute


def _resample(kernel: Resample) -> Compute:
    def places(count: int, extent: int, scale: float) -> tuple[Any, Any]:
        """Return each output pixel's preceding input pixel, and the distance."""
        step, half = np.float32(scale), np.float32(0.5)
        place = np.arange(count, dtype=np.float32)
        found = step * place if kernel.mode == "nearest" or kernel.corners else np.maximum(step * (place + half) - half, 0)
        first = np.minimum(found.astype(np.int64), extent - 1)
        return first, found - first.astype(np.float32)

    def compute(xs: Sequence[Array], y: Array) -> None:
        (x,) = xs
        (rows, v), (columns, h) = (places(*axis) for axis in zip(y.shape[2:], x.shape[2:], kernel.scale, strict=True))
        if kernel.mode == "nearest":
            y[...] = x[:, :, rows[:, None], columns]
            return
        values = x.astype(np.float32)
        below, beside = (np.minimum(first + 1, extent - 1) for first, extent in zip((rows, columns), x.shape[2:], strict=True))
        upper, lower = (
            (1 - h) * values[:, :, row[:, None], columns] + h * values[:, :, row[:, None], beside] for row in (rows, below)
        )
        y[...] = (1 - v[:, None]) * upper + v[:, None] * lower

    return compute


def _squeeze(kernel: Squeeze) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        pixels = xs[0].astype(np.float32).reshape(*xs[0].shape[:2], -1)
        each = -(-pixels.shape[2] // kernel.parts)
        parts = [pixels[:, :, part * each : (part + 1) * each].sum(2) for part in range(kernel.parts)]
        # The output may have an axis of extent 1 behind the channels.
        y[...] = np.stack(parts, 1).reshape(y.shape)

    return compute


def _layer(kernel: Layer) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        sums, w, b = (each.astype(np.float32) for each in xs[1:])
        means = sums.sum(1) / np.float32(xs[0].shape[2] * xs[0].shape[3])
        found = activated(kernel.activation, means @ w.reshape(len(w), -1).T + b)
        # The output may have an axis of extent 1 behind the results.
        y[...] = found.reshape(y.shape)

    return compute


def _excite(kernel: Excite) -> Compute:
    def compute(xs: Sequence[Array], y: Array) -> None:
        x, hidden, *layers, w, b = (each.astype(np.float32) for each in xs)
        if not kernel.layered:
            (w1, b1), means = layers, hidden.sum(1) / np.float32(x.shape[2] * x.shape[3])
            hidden = activated(kernel.activation, means @ w1.reshape(len(w1), -1).T + b1)
        gates = activated(kernel.gate, hidden @ w.reshape(len(w), -1).T + b)
        y[...] = x * gates[:, :, None, None]

    return compute
