"""What the frontend's nodes compute, in float64, written otherwise than the host driver's evaluator does it.

Each function takes a node's parameters and its inputs in float64, and returns its output. Most go element by element; the
activations are written for complex numbers, so that their slopes come from the forward by a complex step, to the last bits.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import special

_ALL = slice(None)
STEP = 1e-30
"""Of the imaginary part: the slope's error is of the order of its square."""


@dataclass(frozen=True)
class Reference:
    """What a node is compared with."""

    compute: Callable[..., Any]
    """Of the node's parameters as keywords and its inputs."""
    words: str
    """What this is, for the table of the docs."""
    inputs: int = 1
    values: str = "any"
    """From which values inputs are drawn: any, positive, angles, or whole (-1, 0 and 1, so that some are equal)."""
    parameters: Mapping[str, Any] | None = None


# Pointwise operations


def _relu(z: Any, *, negative_slope: float = 0.0, lower_clip: float = 0.0, upper_clip: float = math.inf) -> Any:
    below, above = z.real <= lower_clip, z.real >= upper_clip
    return np.select([below, above], [lower_clip + negative_slope * (z - lower_clip), np.full_like(z, upper_clip)], z)


def _gelu_approx_tanh(z: Any) -> Any:
    return z / (1 + np.exp(-math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)))  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))


ACTIVATIONS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any], str]] = {
    "elu": (lambda z: np.where(z.real > 0, z, np.exp(z) - 1), {}, "exp(x) - 1 below 0"),
    "gelu": (lambda z: z * special.erfc(-z / math.sqrt(2)) / 2, {}, "SciPy's `erfc`"),
    "gelu_approx_tanh": (_gelu_approx_tanh, {}, "x / (1 + exp(-2 u))"),
    "leaky_relu": (
        lambda z, negative_slope: np.where(z.real > 0, z, negative_slope * z),
        {"negative_slope": 0.1},
        "its definition by parts",
    ),
    "relu": (_relu, {"negative_slope": 0.2, "lower_clip": -0.5, "upper_clip": 1.0}, "its definition by parts"),
    "sigmoid": (lambda z: (1 + np.sinh(z / 2) / np.cosh(z / 2)) / 2, {}, "sinh and cosh"),
    "softplus": (lambda z: np.log(1 + np.exp(z)), {}, "log(1 + exp(x))"),
    "swish": (
        lambda z, swish_beta: z * (1 + np.sinh(swish_beta * z / 2) / np.cosh(swish_beta * z / 2)) / 2,
        {"swish_beta": 1.5},
        "sinh and cosh",
    ),
    "tanh": (lambda z: np.sinh(z) / np.cosh(z), {}, "sinh and cosh"),
}


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, **parameters: function(x + 0j, **parameters).real


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda loss, x, **parameters: loss * (function(x + 1j * STEP, **parameters).imag / STEP)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: np.vectorize(lambda *values: float(function(*values)), otypes=[np.float64])(*arrays)


_BY_ELEMENT = "Python's `math`, by element"
_UNARY: Mapping[str, tuple[Callable[[float], Any], str]] = {
    "abs": (math.fabs, "any"),
    "ceil": (math.ceil, "any"),
    "cos": (math.cos, "any"),
    "exp": (math.exp, "any"),
    "floor": (math.floor, "any"),
    "identity": (float, "any"),
    "log": (math.log, "positive"),
    "logical_not": (operator.not_, "whole"),
    "neg": (operator.neg, "any"),
    "reciprocal": (lambda x: 1 / x, "positive"),
    "rsqrt": (lambda x: math.pow(x, -0.5), "positive"),
    "sin": (math.sin, "any"),
    "sqrt": (math.sqrt, "positive"),
    "tan": (math.tan, "angles"),
}
_BINARY: Mapping[str, tuple[Callable[[float, float], Any], str]] = {
    "add": (operator.add, "any"),
    "add_square": (lambda a, b: a + b**2, "any"),
    "bias": (operator.add, "any"),
    "cmp_eq": (operator.eq, "whole"),
    "cmp_ge": (operator.ge, "whole"),
    "cmp_gt": (operator.gt, "whole"),
    "cmp_le": (operator.le, "whole"),
    "cmp_lt": (operator.lt, "whole"),
    "cmp_neq": (operator.ne, "whole"),
    "div": (operator.truediv, "positive"),
    "logical_and": (lambda a, b: bool(a and b), "whole"),
    "logical_or": (lambda a, b: bool(a or b), "whole"),
    "max": (max, "any"),
    "min": (min, "any"),
    "mod": (math.fmod, "positive"),
    "mul": (operator.mul, "any"),
    "pow": (math.pow, "positive"),
    "scale": (operator.mul, "any"),
    "sub": (operator.sub, "any"),
}

POINTWISE: Mapping[str, Reference] = {
    **{name: Reference(_each(function), _BY_ELEMENT, 1, values) for name, (function, values) in _UNARY.items()},
    **{name: Reference(_each(function), _BY_ELEMENT, 2, values) for name, (function, values) in _BINARY.items()},
    "binary_select": Reference(_each(lambda a, b, mask: a if mask else b), _BY_ELEMENT, 3, "whole"),
    "erf": Reference(special.erf, "SciPy's `erf`"),
    "gen_index": Reference(lambda x, axis: np.indices(x.shape)[axis], "NumPy's `indices`", parameters={"axis": 1}),
    **{
        name: Reference(_forward(function), f"{words}, in complex numbers", parameters=parameters)
        for name, (function, parameters, words) in ACTIVATIONS.items()
    },
    **{
        f"{name}_backward": Reference(_backward(function), "the complex step of its forward", 2, parameters=parameters)
        for name, (function, parameters, _) in ACTIVATIONS.items()
    },
}
"""By the mode of the node, which is the name of the method that makes it."""


# Reductions and products

_OF_VALUES: Mapping[str, Callable[[list[float]], float]] = {
    "ADD": math.fsum,
    "AMAX": lambda values: max(map(abs, values)),
    "AVG": lambda values: math.fsum(values) / len(values),
    "MAX": max,
    "MIN": min,
    "MUL": math.prod,
    "MUL_NO_ZEROS": lambda values: math.prod(value for value in values if value),
    "NORM1": lambda values: math.fsum(map(abs, values)),
    "NORM2": lambda values: math.hypot(*values),
}


def _reduced(function: Callable[[list[float]], float]) -> Callable[..., Any]:
    def compute(x: Any, shape: Sequence[int]) -> Any:
        result = np.empty(shape)
        for index in np.ndindex(*shape):
            met = tuple(slice(None) if extent == 1 else slice(at, at + 1) for extent, at in zip(shape, index, strict=True))
            result[index] = function(x[met].ravel().tolist())
        return result

    return compute


REDUCTIONS: Mapping[str, Reference] = {
    name: Reference(_reduced(function), "Python's `fsum`, `prod`, `hypot`, by output") for name, function in _OF_VALUES.items()
}
"""By the name of the mode; `compute` takes the shape of the output, too."""

MATMUL = Reference(lambda a, b: np.einsum("...ik,...kj->...ij", a, b), "NumPy's `einsum`")


def attended(q: Any, k: Any, v: Any, scale: float, causal: bool = False, bias: Any = None) -> Any:
    """Each query's mean of the values, weighted by what `math.exp` makes of its scores."""
    result = np.zeros((*q.shape[:3], v.shape[3]))
    for n, h, row in np.ndindex(*q.shape[:3]):
        last = row + 1 if causal else k.shape[2]
        keys = range(min(last, k.shape[2]))
        scores = [math.fsum(q[n, h, row] * k[n, h, key]) * scale for key in keys]
        if bias is not None:
            scores = [
                score + np.broadcast_to(bias, (*q.shape[:3], k.shape[2]))[n, h, row, key] for key, score in enumerate(scores)
            ]
        weights = [math.exp(score - max(scores)) for score in scores]
        for key in keys:
            result[n, h, row] += weights[key] / math.fsum(weights) * v[n, h, key]
    return result


ATTENTION = Reference(attended, "Python's `exp` and `fsum`, by query")


# What only moves


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """Elements in the order of their indices, the last axis quickest."""
    result = np.empty(shape)
    for position, index in enumerate(np.ndindex(*shape)):
        result[index] = x[np.unravel_index(position, x.shape)]
    return result


def viewed(x: Any, strides: Sequence[int], shape: Sequence[int], new_strides: Sequence[int]) -> Any:
    """The same memory under another shape; strides in elements."""
    memory = {sum(map(operator.mul, index, strides)): x[index] for index in np.ndindex(*x.shape)}
    result = np.empty(shape)
    for index in np.ndindex(*shape):
        result[index] = memory[sum(map(operator.mul, index, new_strides))]
    return result


def transposed(x: Any, permutation: Sequence[int]) -> Any:
    """Element by element."""
    result = np.empty([x.shape[axis] for axis in permutation])
    for index in np.ndindex(*x.shape):
        result[tuple(index[axis] for axis in permutation)] = x[index]
    return result


def concatenated(*parts: Any, axis: int) -> Any:
    """Element by element."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    result, before = np.empty(shape), 0
    for part in parts:
        for index in np.ndindex(*part.shape):
            result[(*index[:axis], index[axis] + before, *index[axis + 1 :])] = part[index]
        before += part.shape[axis]
    return result


MOVES: Mapping[str, Reference] = {
    "reshape": Reference(reshaped, "each element by its index, or by its address"),
    "transpose": Reference(transposed, "each element by its index"),
    "concatenate": Reference(concatenated, "each element by its index"),
}


# Convolutions


@dataclass(frozen=True)
class Windows:
    """How a convolution in any number of dimensions was called; one entry an axis."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    flipped: bool = False

    def extents(self, image: Sequence[int], taps: Sequence[int]) -> tuple[int, ...]:
        """The spatial extents of what comes out."""
        padded = map(sum, zip(image, self.before, self.after, strict=True))
        covered = ((tap - 1) * gap + 1 for tap, gap in zip(taps, self.dilation, strict=True))
        return tuple((size - cover) // step + 1 for size, cover, step in zip(padded, covered, self.stride, strict=True))

    def meetings(self, image: Sequence[int], taps: Sequence[int]) -> Any:
        """Which element of the image each position meets under each tap: (position, tap of the filter, element)."""
        places = zip(self.stride, self.dilation, self.before, strict=True)
        rules = list(places)
        for position in product(*map(range, self.extents(image, taps))):
            for tap in product(*map(range, taps)):
                element = tuple(p * s + t * d - b for p, t, (s, d, b) in zip(position, tap, rules, strict=True))
                if all(0 <= at < size for at, size in zip(element, image, strict=True)):
                    yield position, tuple(n - 1 - t for n, t in zip(taps, tap, strict=True)) if self.flipped else tap, element


def fprop(windows: Windows, x: Any, w: Any) -> Any:
    """The convolution of images (N, C, …) by filters (K, C / groups, …)."""
    groups = x.shape[1] // w.shape[1]
    y = np.zeros((x.shape[0], w.shape[0], *windows.extents(x.shape[2:], w.shape[2:])))
    for position, tap, element in windows.meetings(x.shape[2:], w.shape[2:]):
        for filters, channels in _groups(groups, w.shape):
            y[(_ALL, filters, *position)] += x[(_ALL, channels, *element)] @ w[(filters, _ALL, *tap)].T
    return y


def dgrad(windows: Windows, loss: Any, w: Any, shape: Sequence[int]) -> Any:
    """The gradient of images of a shape."""
    groups, dx = shape[1] // w.shape[1], np.zeros(shape)
    for position, tap, element in windows.meetings(shape[2:], w.shape[2:]):
        for filters, channels in _groups(groups, w.shape):
            dx[(_ALL, channels, *element)] += loss[(_ALL, filters, *position)] @ w[(filters, _ALL, *tap)]
    return dx


def wgrad(windows: Windows, x: Any, loss: Any, shape: Sequence[int]) -> Any:
    """The gradient of filters of a shape."""
    groups, dw = x.shape[1] // shape[1], np.zeros(shape)
    for position, tap, element in windows.meetings(x.shape[2:], shape[2:]):
        for filters, channels in _groups(groups, shape):
            dw[(filters, _ALL, *tap)] += loss[(_ALL, filters, *position)].T @ x[(_ALL, channels, *element)]
    return dw


def _groups(groups: int, filters: Sequence[int]) -> Any:
    """By group: the slice of filters, and so of what comes out, and that of the image's channels."""
    each, width = filters[0] // groups, filters[1]
    for group in range(groups):
        yield slice(group * each, (group + 1) * each), slice(group * width, (group + 1) * width)


CONVOLUTIONS: Mapping[str, Reference] = {
    f"conv_{name}": Reference(function, "its sum, by position and tap")
    for name, function in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad))
}
