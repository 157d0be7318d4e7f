"""Describe expressions over elements: straight-line code for each driver to evaluate.

A value is a float32 number or a truth value. Each value of an expression has an index. The elements of the arrays have the first
indices, then follow the numbers that each launch passes, then the results of the steps in their order.
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
"""For each operation, the kinds of its operands and of its result.

``maximum`` and ``minimum`` of a NaN are NaN. ``round`` rounds halves to even. ``gelu`` uses the exact error function.
``as_float16`` and ``as_bfloat16`` round to these types.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of an expression.

    Attributes
    ----------
    operation : str
        A key of `OPERATIONS`.
    sources : tuple of int
        The indices of the values that the operation takes.
    bits : int
        The value of a constant, as `bits_of` returns it.
    """

    operation: str
    sources: tuple[int, ...] = ()
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Expression:
    """Compute an output element from one element of each input.

    Attributes
    ----------
    inputs, numbers : int
        The count of arrays, and the count of numbers that each launch passes.
    steps : tuple of Step
    result : int
        The index of the value that is written to the output.
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
        The numbers that each launch passes, as `bits_of` returns them.
    """

    expression: Expression
    numbers: tuple[int, ...] = ()


def bits_of(value: float) -> int:
    """Return a number's float32 bits as a signed integer.

    The bits of -0.0 and 0.0 differ, and the bits of a NaN equal themselves. So expressions can be compared, and can be parts of a
    key.
    """
    try:
        packed = struct.pack("f", value)
    except OverflowError:
        packed = struct.pack("f", float("inf") if value > 0 else float("-inf"))
    bits: int = struct.unpack("i", packed)[0]
    return bits
