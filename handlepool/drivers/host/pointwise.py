"""The frontend's pointwise operations in NumPy, in one table.

The keys are names of methods of `cudnn.pygraph`. Every function gets the node's parameters, then the node's inputs in order. All
inputs have the same floating type. The caller broadcasts and rounds the result. The inputs of a backward operation are the
gradient and the forward operation's input.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Parameters = Mapping[str, Any]


def _erf(x: Array) -> Array:
    # NumPy has no error function, and the package does not depend on SciPy.
    flat = np.asarray(x, np.float64).ravel()
    return np.fromiter(map(math.erf, flat.tolist()), np.float64, flat.size).reshape(x.shape).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _relu(p: Parameters, x: Array) -> Array:
    lower, slope = p.get("lower_clip", 0.0), p.get("negative_slope", 0.0)
    # If the slope is 0, nothing is multiplied by it, because 0 times -inf would be NaN.
    below = slope * (x - lower) if slope else np.where(np.isnan(x), x, 0)
    return np.where(x > lower, np.minimum(x, p.get("upper_clip", math.inf)), lower + below)


def _relu_backward(p: Parameters, loss: Array, x: Array) -> Array:
    inside = (x > p.get("lower_clip", 0.0)) & (x < p.get("upper_clip", math.inf))
    below = x <= p.get("lower_clip", 0.0)
    return loss * np.where(inside, 1.0, np.where(below, p.get("negative_slope", 0.0), 0.0)).astype(x.dtype)


def _swish(p: Parameters, x: Array) -> Array:
    return x * _sigmoid(p.get("swish_beta", 1.0) * x)


def _swish_backward(p: Parameters, loss: Array, x: Array) -> Array:
    beta = p.get("swish_beta", 1.0)
    gate = _sigmoid(beta * x)
    return loss * (gate + beta * x * gate * (1 - gate))


def _gelu(p: Parameters, x: Array) -> Array:
    return x * (0.5 * (1 + _erf(x * math.sqrt(0.5))))


def _gelu_backward(p: Parameters, loss: Array, x: Array) -> Array:
    density = np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return loss * (0.5 * (1 + _erf(x * math.sqrt(0.5))) + x * density)


_GELU_SLOPE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


def _gelu_tanh(p: Parameters, x: Array) -> Array:
    return x * (0.5 * (1 + np.tanh(_GELU_SLOPE * (x + _GELU_CUBIC * x * x * x))))


def _gelu_tanh_backward(p: Parameters, loss: Array, x: Array) -> Array:
    t = np.tanh(_GELU_SLOPE * (x + _GELU_CUBIC * x * x * x))
    inner = _GELU_SLOPE * (1 + 3 * _GELU_CUBIC * x * x)
    return loss * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


def _index(p: Parameters, x: Array) -> Array:
    axis = int(p["axis"])
    shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
    return np.broadcast_to(np.arange(x.shape[axis]).reshape(shape), x.shape)


def _hardsigmoid(x: Array) -> Array:
    return np.asarray(np.clip(x + 3, 0, 6) / 6)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "abs": lambda p, x: np.abs(x),
    "ceil": lambda p, x: np.ceil(x),
    "cos": lambda p, x: np.cos(x),
    "elu": lambda p, x: np.where(x > 0, x, np.expm1(x)),
    "erf": lambda p, x: _erf(x),
    "exp": lambda p, x: np.exp(x),
    "floor": lambda p, x: np.floor(x),
    "gelu": _gelu,
    "gelu_approx_tanh": _gelu_tanh,
    "gen_index": _index,
    "identity": lambda p, x: x,
    "leaky_relu": lambda p, x: np.where(x > 0, x, p.get("negative_slope", 0.0) * x),
    "log": lambda p, x: np.log(x),
    "logical_not": lambda p, x: x == 0,
    "neg": lambda p, x: -x,
    "reciprocal": lambda p, x: 1 / x,
    "relu": _relu,
    "rsqrt": lambda p, x: 1 / np.sqrt(x),
    "sigmoid": lambda p, x: _sigmoid(x),
    "sin": lambda p, x: np.sin(x),
    # `logaddexp` does not overflow for large inputs, as log(1 + exp(x)) would.
    "softplus": lambda p, x: np.logaddexp(x, np.zeros((), x.dtype)),
    "sqrt": lambda p, x: np.sqrt(x),
    "swish": _swish,
    "tan": lambda p, x: np.tan(x),
    "tanh": lambda p, x: np.tanh(x),
    "add": lambda p, a, b: a + b,
    "add_square": lambda p, a, b: a + b * b,
    "bias": lambda p, a, b: a + b,
    "cmp_eq": lambda p, a, b: a == b,
    "cmp_ge": lambda p, a, b: a >= b,
    "cmp_gt": lambda p, a, b: a > b,
    "cmp_le": lambda p, a, b: a <= b,
    "cmp_lt": lambda p, a, b: a < b,
    "cmp_neq": lambda p, a, b: a != b,
    "div": lambda p, a, b: a / b,
    "logical_and": lambda p, a, b: (a != 0) & (b != 0),
    "logical_or": lambda p, a, b: (a != 0) | (b != 0),
    "max": lambda p, a, b: np.maximum(a, b),
    "min": lambda p, a, b: np.minimum(a, b),
    # `fmod` keeps the sign of the dividend, as C does.
    "mod": lambda p, a, b: np.fmod(a, b),
    "mul": lambda p, a, b: a * b,
    "pow": lambda p, a, b: np.power(a, b),
    "scale": lambda p, a, b: a * b,
    "sub": lambda p, a, b: a - b,
    "binary_select": lambda p, a, b, mask: np.where(mask != 0, a, b),
    "elu_backward": lambda p, loss, x: loss * np.where(x > 0, np.ones((), x.dtype), np.exp(x)),
    "gelu_approx_tanh_backward": _gelu_tanh_backward,
    "gelu_backward": _gelu_backward,
    "leaky_relu_backward": lambda p, loss, x: np.where(x > 0, loss, p.get("negative_slope", 0.0) * loss),
    "relu_backward": _relu_backward,
    "sigmoid_backward": lambda p, loss, x: loss * _sigmoid(x) * (1 - _sigmoid(x)),
    "softplus_backward": lambda p, loss, x: loss * _sigmoid(x),
    "swish_backward": _swish_backward,
    "tanh_backward": lambda p, loss, x: loss * (1 - np.tanh(x) ** 2),
}


def activated(kind: str | None, x: Array) -> Array:
    """Apply an activation of this package's kernels.

    If ``kind`` is None, return the values unchanged.
    """
    if kind is None:
        return x
    if kind == "hardsigmoid":
        return _hardsigmoid(x)
    return x * _hardsigmoid(x) if kind == "hardswish" else np.asarray(OPERATIONS[kind]({}, x))
