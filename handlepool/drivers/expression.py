"""Describe expressions over elements: straight-line code for each driver to evaluate.

A value is a number, in float32, or a truth value. An expression's values are numbered: first the arrays, then the numbers that a
launch brings, then the steps in their order.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "truth"]

_NUMBER: tuple[tuple[Kind, ...], Kind] = ("number",), "number"
_NUMBERS: tuple[tuple[Kind, ...], Kind] = ("number", "number"), "number"
_COMPARED: tuple[tuple[Kind, ...], Kind] = ("number", "number"), "truth"
_COMBINED: tuple[tuple[Kind, ...], Kind] = ("truth", "truth"), "truth"

OPERATIONS: Mapping[str, tuple[tuple[Kind, ...], Kind]] = {
    "constant": ((), "number"),
    "as_number": (("truth",), "number"),
    "as_float16": _NUMBER,
    "as_bfloat16": _NUMBER,
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "pow", "maximum", "minimum"), _NUMBERS),
    **dict.fromkeys(("negative", "abs", "floor", "ceil", "trunc", "round"), _NUMBER),
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt"), _NUMBER),
    **dict.fromkeys(("sin", "cos", "tanh", "erf", "gelu"), _NUMBER),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"), _COMPARED),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _COMBINED),
    "logical_not": (("truth",), "truth"),
    "where": (("truth", "number", "number"), "number"),
}
"""Kinds of the operands and of the result, by operation.

``maximum`` and ``minimum`` of a NaN are NaN. ``round`` rounds halves to even. ``gelu`` uses the exact error function.
``as_float16`` and ``as_bfloat16`` round to these types.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes
    ----------
    operation : str
        A key of `OPERATIONS`.
    sources : tuple of int
        Numbers of its operands.
    bits : int
        Of a constant: see `bits_of`.
    """

    operation: str
    sources: tuple[int, ...] = ()
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Expression:
    """A function of elements.

    Attributes
    ----------
    inputs, numbers : int
        The count of arrays, and the count of numbers that a launch brings.
    steps : tuple of Step
    result : int
        The number of the written value.
    """

    inputs: int
    numbers: int
    steps: tuple[Step, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Evaluate an expression in float32 over arrays that broadcast to the output.

    Inputs are float16, bfloat16, float32, integers or truth values. The output has a floating type or truth values, and may be an
    input with the same layout.

    Attributes
    ----------
    expression : Expression
    numbers : tuple of int
        The numbers that launches bring: see `bits_of`.
    """

    expression: Expression
    numbers: tuple[int, ...] = ()


def bits_of(value: float) -> int:
    """Return a number's float32 bits as a signed integer.

    Bits tell -0.0 from 0.0, and a NaN equals itself. So an expression can be compared, and be a part of a key.
    """
    try:
        packed = struct.pack("f", value)
    except OverflowError:
        packed = struct.pack("f", float("inf") if value > 0 else float("-inf"))
    bits: int = struct.unpack("i", packed)[0]
    return bits
