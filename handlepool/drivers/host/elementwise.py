"""Evaluate expressions over elements with NumPy, in float32."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from handlepool.drivers.expression import Elementwise, Step
from handlepool.drivers.host.pointwise import Array
from handlepool.tensors.layout import as_dtype


def _rounded(name: str) -> Callable[[Array], Array]:
    return lambda x: x.astype(as_dtype(name)).astype(np.float32)


def _by_element(function: Callable[[float], float]) -> Callable[[Any], Array]:
    """Return a function of arrays that calls ``function`` for each element."""

    # NumPy has no error function, and the package does not depend on SciPy. So the functions of `math` serve.
    def computed(x: Any) -> Array:
        values = np.asarray(x)
        return np.fromiter(map(function, values.ravel().tolist()), np.float32, values.size).reshape(values.shape)

    return computed


def _gelu(x: float) -> float:
    # `erfc` keeps its precision for large negative inputs, where 1 + erf(x) would cancel.
    return x * (math.erfc(-x * math.sqrt(0.5)) / 2)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "as_number": lambda x: np.asarray(x, np.float32),
    "as_float16": _rounded("float16"),
    "as_bfloat16": _rounded("bfloat16"),
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negative": np.negative,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _by_element(math.erf),
    "gelu": _by_element(_gelu),
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
    "where": np.where,
}
"""The NumPy function of each operation except ``constant``."""


def computation(kernel: Elementwise) -> Callable[[Sequence[Array], Array], None]:
    """Return a function that evaluates an expression into an array.

    The output array may be one of the inputs.
    """
    expression = kernel.expression
    numbers = [_number(bits) for bits in kernel.numbers]

    def compute(xs: Sequence[Array], y: Array) -> None:
        values: list[Any] = [x if x.dtype == bool else x.astype(np.float32) for x in xs]
        values += numbers
        for step in expression.steps:
            values.append(_value(step, [values[source] for source in step.sources]))
        y[...] = values[expression.result]

    return compute


def _value(step: Step, values: Sequence[Any]) -> Any:
    return _number(step.bits) if step.operation == "constant" else FUNCTIONS[step.operation](*values)


def _number(bits: int) -> np.float32:
    return np.float32(struct.unpack("f", struct.pack("i", bits))[0])
