"""Trace Python functions over elements into expressions.

The trace calls a function once with `Traced` values, which note each operation in a `Trace`. A function may use operators, the
functions of `VOCABULARY`, and NumPy's functions of the same names. Any other use of a traced value raises a `TraceError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from handlepool._util.names import kind_of, shown
from handlepool.drivers.expression import OPERATIONS, Expression, Step, bits_of
from handlepool.errors import ArgumentError, ArrayTypeError, HandlePoolError, TraceError
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout, as_dtype

MOST_STEPS = 2000
"""The maximum number of operations in a function.

A compiler takes seconds for more operations.
"""
FLOATING = ("float16", "bfloat16", "float32")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")
TYPES = (*FLOATING, *INTEGERS, "bool")
"""Types of the arrays that an elementwise function takes, by NumPy's names."""
NUMBER = "number"
"""The kind of a traced value that is computed from numbers alone."""


class Traced:
    """Stand for the elements of an array inside an elementwise function.

    Attributes
    ----------
    shape : tuple of int
        Shape of the array that the value stands for.
    dtype : numpy.dtype
        Type of an output with this value.
    """

    __slots__ = ("kind", "number", "shape", "trace")
    # CuPy's arrays leave operators to the class with the higher priority.
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, number: int, shape: tuple[int, ...], kind: str) -> None:
        self.trace = trace
        self.number = number
        self.shape = shape
        self.kind = kind

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an output with this value."""
        return as_dtype(self.kind if self.kind in (*FLOATING, "bool") else "float32")

    def __repr__(self) -> str:
        return f"<a traced value of {self.trace.name}, {self.dtype} of shape {self.shape}>"

    def astype(self, dtype: object) -> Traced:
        """Round to a floating type, or for bool compare with 0."""
        try:
            name = as_dtype(dtype).name
        except ArrayTypeError:
            name = ""
        return self.trace.cast(self, name, dtype)

    def clip(self, min: object = None, max: object = None) -> Traced:
        """Limit this value to the bounds ``min`` and ``max``."""
        return clip(self, min, max)

    # Arithmetic

    def __add__(self, other: object) -> Any:
        return apply("add", self, other)

    def __radd__(self, other: object) -> Any:
        return apply("add", other, self)

    def __sub__(self, other: object) -> Any:
        return apply("subtract", self, other)

    def __rsub__(self, other: object) -> Any:
        return apply("subtract", other, self)

    def __mul__(self, other: object) -> Any:
        return apply("multiply", self, other)

    def __rmul__(self, other: object) -> Any:
        return apply("multiply", other, self)

    def __truediv__(self, other: object) -> Any:
        return apply("divide", self, other)

    def __rtruediv__(self, other: object) -> Any:
        return apply("divide", other, self)

    def __pow__(self, other: object) -> Any:
        return pow(self, other)

    def __rpow__(self, other: Any) -> Any:
        return pow(other, self)

    def __neg__(self) -> Any:
        return apply("negative", self)

    def __pos__(self) -> Any:
        return positive(self)

    def __abs__(self) -> Any:
        return apply("abs", self)

    # Comparisons and truth values

    def __eq__(self, other: object) -> Any:
        return apply("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return apply("not_equal", self, other)

    def __lt__(self, other: object) -> Any:
        return apply("less", self, other)

    def __le__(self, other: object) -> Any:
        return apply("less_equal", self, other)

    def __gt__(self, other: object) -> Any:
        return apply("greater", self, other)

    def __ge__(self, other: object) -> Any:
        return apply("greater_equal", self, other)

    def __and__(self, other: object) -> Any:
        return _combined("logical_and", "&", self, other)

    def __rand__(self, other: object) -> Any:
        return _combined("logical_and", "&", other, self)

    def __or__(self, other: object) -> Any:
        return _combined("logical_or", "|", self, other)

    def __ror__(self, other: object) -> Any:
        return _combined("logical_or", "|", other, self)

    def __xor__(self, other: object) -> Any:
        return _combined("logical_xor", "^", self, other)

    def __rxor__(self, other: object) -> Any:
        return _combined("logical_xor", "^", other, self)

    def __invert__(self) -> Any:
        return _combined("logical_not", "~", self)

    # Other libraries' functions

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Trace a ufunc of NumPy's or SciPy's by its name."""
        if method != "__call__":
            raise TraceError(
                f"{self.trace.name}: numpy.{ufunc.__name__}.{method} combines elements, and a kernel over elements computes each "
                f"element alone; call numpy.{ufunc.__name__}.{method} outside of the function"
            )
        return self._known("numpy", ufunc.__name__, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Trace a call of NumPy's ``function``, by its name."""
        return self._known("numpy", function.__name__, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        """Trace a call of torch's ``function``, by its name."""
        options = options or {}
        traced: Traced = next(value for value in (*args, *options.values()) if isinstance(value, Traced))
        given = {name: value for name, value in options.items() if name != "inplace" or value}
        return traced._known("torch", function.__name__, args, given)

    def _known(self, library: str, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        function = VOCABULARY.get(OTHER_NAMES.get(name, name))
        if function is None:
            raise self._unknown(f"{library}.{name}")
        named = {_OPTION_NAMES.get(option, option): value for option, value in options.items()}
        if named and function is not clip:
            raise TraceError(
                f"{self.trace.name}: {library}.{name} was given {', '.join(options)}=, which no kernel takes; call "
                f"{library}.{name} without this keyword"
            )
        return function(*args, **named)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """Return the vocabulary, under the array API's names."""
        return SimpleNamespace(**VOCABULARY)

    def _unknown(self, what: str) -> TraceError:
        return TraceError(f"{self.trace.name}: {what} is no known function over elements. {_known_functions()}")

    # Refusals

    def __getattr__(self, name: str) -> Any:
        raise self._unknown(f".{name}")

    def __bool__(self) -> bool:
        raise TraceError(
            f"{self.trace.name}: `if`, `and`, `not` or a chain of comparisons asks whether a traced value is true, but the value "
            f"stands for all elements; use where(condition, a, b), &, | and ~"
        )

    def _refuse_number(self, *_: object) -> Any:
        raise TraceError(
            f"{self.trace.name}: float(x), int(x) or a function of Python's math asks for the number of a traced value, but this "
            f"value stands for all elements; use functions over elements, such as numpy.exp(x)"
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _refuse_number

    def _refuse_part(self, *_: object) -> Any:
        raise TraceError(
            f"{self.trace.name}: an index, a loop or len() asks for parts of a traced value, but the value stands for "
            f"one element at a time and has no parts; pass each part of an array as an argument of its own"
        )

    __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = _refuse_part

    def _refuse_operator(self, *_: object) -> Any:
        raise self._unknown("an operator such as //, %, @, << or >>")

    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse_operator
    __matmul__ = __rmatmul__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse_operator


@dataclass
class Trace:
    """Collect the operations of one call of a function.

    An operation that the function repeats on the same values is collected once.

    Attributes
    ----------
    name : str
        The function's name, for messages.
    inputs, numbers : int
        The number of arrays, and the number of positional numbers, that the function takes.
    """

    name: str
    inputs: int
    numbers: int
    _steps: list[Step] = field(default_factory=list)
    _known: dict[Step, int] = field(default_factory=dict)

    def apply(self, operation: str, values: Sequence[Any]) -> Traced:
        """Record an operation on traced values or Python numbers."""
        takes, gives = OPERATIONS[operation]
        if len(values) != len(takes):
            raise TraceError(f"{self.name}: {operation} takes {len(takes)} values and was given {len(values)}")
        operands = [self._operand(operation, value) for value in values]
        if "number" in takes:
            self._refuse_truths(operation, takes, operands)
        kinds = [operand.kind for operand, taken in zip(operands, takes, strict=True) if taken == "number"]
        operands = [
            self._as_truth(operand) if taken == "truth" else self._as_number(operand)
            for operand, taken in zip(operands, takes, strict=True)
        ]
        kind = "bool" if gives == "truth" else promoted(kinds)
        return self._step(Step(operation, tuple(operand.number for operand in operands)), self._shape(operation, operands), kind)

    def cast(self, value: Traced, name: str, asked: object) -> Traced:
        """Record a change of type."""
        if name == "bool":
            return self._as_truth(value)
        if name not in FLOATING:
            raise TraceError(
                f"{self.name}: astype({shown(asked)}) of a traced value is not supported; pass {', '.join(FLOATING)} or bool"
            )
        number = self._as_number(value)
        # Kernels compute in float32, so a change to float32 needs no step.
        if name != "float32":
            number = self._step(Step(f"as_{name}", (number.number,)), number.shape, name)
        return Traced(self, number.number, number.shape, name)

    def expression(self, result: object, titles: Sequence[str]) -> tuple[Expression, Traced]:
        """Return the expression that computes ``result``, and the traced result.

        The expression leaves out steps that ``result`` does not need. ``titles`` are the names of the arguments in messages.
        """
        if not isinstance(result, Traced):
            raise TraceError(
                f"{self.name} returned {shown(result)}; it must return one value that it computes from its arguments, so write a "
                f"function for each result"
            )
        traced = self._own(result)
        first, last = self.inputs + self.numbers, traced.number
        if last >= first and self._steps[last - first].operation == f"as_{traced.dtype.name}":
            # The kernel rounds the output to its type in any case, so the last rounding step is not needed.
            (last,) = self._steps[last - first].sources
        needed = {last}
        # A step comes after its sources, so a single backward pass finds all needed steps.
        for place in reversed(range(len(self._steps))):
            if first + place in needed:
                needed.update(self._steps[place].sources)
        # A launch would wait for an unused array, so refuse such a function.
        unused = [title for place, title in enumerate(titles) if place not in needed]
        if unused:
            raise TraceError(
                f"{self.name}: the result does not depend on {', '.join(unused)}, but each launch would wait for such an array; "
                "remove the unused parameter from the function"
            )
        # Without the unneeded steps, the remaining steps get consecutive numbers.
        kept = [place for place in range(len(self._steps)) if first + place in needed]
        numbers = {**{place: place for place in range(first)}, **{first + old: first + new for new, old in enumerate(kept)}}
        steps = [
            Step(step.operation, tuple(numbers[source] for source in step.sources), step.bits)
            for step in (self._steps[place] for place in kept)
        ]
        return Expression(self.inputs, self.numbers, tuple(steps), numbers[last]), traced

    def _step(self, step: Step, shape: tuple[int, ...], kind: str) -> Traced:
        # Equal steps share a number, so that the kernel computes a repeated subexpression once.
        number = self._known.get(step)
        if number is None:
            if len(self._steps) == MOST_STEPS:
                raise TraceError(f"{self.name} does more than {MOST_STEPS:,} operations; split the function into two")
            self._steps.append(step)
            number = self._known[step] = self.inputs + self.numbers + len(self._steps) - 1
        return Traced(self, number, shape, kind)

    def _own(self, value: Traced) -> Traced:
        # A function can store a traced value outside, for example in a global, and use it in a later call.
        if value.trace is not self:
            raise TraceError(
                f"{self.name} uses a traced value of an earlier call of {value.trace.name}, which stands for no element "
                "any more; pass an array as an argument instead"
            )
        return value

    def _operand(self, operation: str, value: object) -> Traced:
        if isinstance(value, Traced):
            return self._own(value)
        if isinstance(value, (bool, np.bool_)):
            return self._step(Step("not_equal", (self._constant(float(value)).number, self._constant(0.0).number)), (), "bool")
        return self._constant(as_number(f"{self.name}: {operation}", value))

    def _constant(self, value: float) -> Traced:
        return self._step(Step("constant", (), bits_of(value)), (), NUMBER)

    def _as_truth(self, value: Traced) -> Traced:
        if value.kind == "bool":
            return value
        return self._step(Step("not_equal", (value.number, self._constant(0.0).number)), value.shape, "bool")

    def _as_number(self, value: Traced) -> Traced:
        return self._step(Step("as_number", (value.number,)), value.shape, "bool") if value.kind == "bool" else value

    def _refuse_truths(self, operation: str, takes: Sequence[str], operands: Sequence[Traced]) -> None:
        numbers = [operand for operand, taken in zip(operands, takes, strict=True) if taken == "number"]
        compares = OPERATIONS[operation][1] == "truth"
        if not compares and all(operand.kind == "bool" for operand in numbers):
            raise TraceError(
                f"{self.name}: {operation} was given only truth values, for which libraries give different results; combine "
                "truth values by &, | and ^, or convert them by astype('float32')"
            )

    def _shape(self, operation: str, operands: Sequence[Traced]) -> tuple[int, ...]:
        return broadcast(f"{self.name}: {operation}", [operand.shape for operand in operands])


def as_number(what: str, value: object) -> float:
    """Return a Python number, or a NumPy scalar, as a float.

    Raises
    ------
    TraceError
        For any other value.
    """
    if isinstance(value, (int, float, np.floating, np.integer)):
        try:
            return float(value)
        except OverflowError:
            # A Python integer beyond the range of a float counts as infinite.
            return float("inf") if value > 0 else float("-inf")
    if isinstance(value, (complex, np.complexfloating)):
        raise TraceError(
            f"{what} was given {shown(value)}, but takes real numbers only; compute the real and the imaginary part separately"
        )
    raise TraceError(
        f"{what} was given {shown(value)}, a {kind_of(value)}, instead of a traced value or a number; pass each array to the "
        "elementwise function as a positional argument"
    )


def broadcast(what: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape to which all ``shapes`` broadcast.

    Raises
    ------
    ArgumentError
        For shapes that do not broadcast.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ArgumentError(
            f"{what} was given the shapes {' and '.join(map(str, shapes))}, which do not broadcast; counted from the last axis, "
            f"extents must be equal or 1"
        ) from None


def promoted(kinds: Sequence[str]) -> str:
    """Return the kind of a result, from the kinds of its operands.

    If the operands have one floating type, the result has that type. If they have two different floating types, the result is
    float32. If they have no floating type, the result is float32 if an array is among the operands, and `NUMBER` otherwise.
    """
    floating = {kind for kind in kinds if kind in FLOATING}
    if floating:
        return floating.pop() if len(floating) == 1 else "float32"
    return NUMBER if all(kind == NUMBER for kind in kinds) else "float32"


def trace(
    name: str, function: Callable[..., Any], arguments: Sequence[Layout | None], options: Mapping[str, Any]
) -> tuple[Expression, Layout]:
    """Trace a function; return its expression and its result's layout.

    Parameters
    ----------
    name : str
        Name for messages.
    function : callable
    arguments : sequence of Layout or None
        The layout of each positional array. None stands for a number, whose value each launch passes.
    options : dict
        The keyword arguments.

    Returns
    -------
    expression : Expression
    layout : Layout
        The shape and the type of the result, row-major.

    Raises
    ------
    ArgumentError
        For shapes or types that the trace does not take.
    TraceError
        For a function that does more than a kernel over elements can.
    """
    arrays = [layout for layout in arguments if layout is not None]
    made = Trace(name, len(arrays), len(arguments) - len(arrays))
    values, place, number, titles = [], 0, len(arrays), []
    for position, layout in enumerate(arguments):
        if layout is None:
            values.append(Traced(made, number, (), NUMBER))
            number += 1
            continue
        kind = layout.dtype.name
        if kind not in TYPES:
            raise ArgumentError(f"{name}: argument {position} is {layout.dtype}; it must be one of {', '.join(TYPES)}")
        titles.append(f"argument {position}")
        values.append(Traced(made, place, layout.shape, kind))
        place += 1
    try:
        value = function(*values, **options)
    except HandlePoolError:
        raise
    # CuPy's functions, for example, take only arrays and raise a TypeError for a traced value.
    except TypeError as error:
        raise TraceError(f"{name}: {error}. {_known_functions()}") from error
    expression, result = made.expression(value, titles)
    dtype, shape = result.dtype, result.shape
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.itemsize for axis in range(len(shape)))
    return expression, Layout(shape, strides, dtype)


# The vocabulary


def _known_functions() -> str:
    return f"Known are +, -, *, /, **, comparisons, &, |, ^, ~, astype and {', '.join(sorted(VOCABULARY))}"


def apply(operation: str, *values: object) -> Any:
    """Trace an operation on ``values``, which must include a traced value."""
    for value in values:
        if isinstance(value, Traced):
            return value.trace.apply(operation, values)
    raise TraceError(
        f"{operation} was given {', '.join(map(shown, values))}, of which none is a traced value: use Python's own functions "
        "for numbers, such as math.exp(0.5)"
    )


def _combined(operation: str, sign: str, *values: object) -> Any:
    for value in values:
        if not (isinstance(value, (bool, np.bool_)) or (isinstance(value, Traced) and value.kind == "bool")):
            trace = next(each.trace for each in values if isinstance(each, Traced))
            raise TraceError(
                f"{trace.name}: {sign} was given {shown(value)}; pass truth values, such as the result of a comparison"
            )
    return apply(operation, *values)


def pow(x: DeviceArray, y: object) -> Any:
    """Return x to the power of y.

    If y is the number 2, the expression multiplies x by x.
    """
    return apply("multiply", x, x) if isinstance(y, (int, float)) and y == 2 else apply("pow", x, y)


def where(condition: object, x: DeviceArray, y: object) -> Any:
    """Return x where ``condition`` is true or not 0, and y elsewhere."""
    return apply("where", condition, x, y)


def clip(x: DeviceArray, min: object = None, max: object = None) -> Any:
    """Return x limited to the bounds ``min`` and ``max``.

    Where ``min`` is greater than ``max``, the result is ``max``.
    """
    least = x if min is None else apply("maximum", x, min)
    return least if max is None else apply("minimum", least, max)


def positive(x: DeviceArray) -> Any:
    """Return x, as ``+x`` does."""
    return x


def square(x: DeviceArray) -> Any:
    """Return x times x."""
    return apply("multiply", x, x)


def reciprocal(x: DeviceArray) -> Any:
    """Return 1 / x."""
    return apply("divide", 1.0, x)


def isnan(x: DeviceArray) -> Any:
    """Return whether x is NaN, for each element."""
    return apply("not_equal", x, x)


def isinf(x: DeviceArray) -> Any:
    """Return whether x is infinite, for each element."""
    return apply("equal", apply("abs", x), float("inf"))


def isfinite(x: DeviceArray) -> Any:
    """Return whether x is a finite number, for each element."""
    return apply("less", apply("abs", x), float("inf"))


def relu(x: DeviceArray) -> Any:
    """Return max(x, 0)."""
    return apply("maximum", x, 0.0)


def sigmoid(x: DeviceArray) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return apply("divide", 1.0, apply("add", 1.0, apply("exp", apply("negative", x))))


def silu(x: DeviceArray) -> Any:
    """Return x / (1 + exp(-x))."""
    return apply("divide", x, apply("add", 1.0, apply("exp", apply("negative", x))))


def hardsigmoid(x: DeviceArray) -> Any:
    """Return x / 6 + 1 / 2, limited to the range 0 to 1."""
    return apply("multiply", clip(apply("add", x, 3.0), 0.0, 6.0), 1 / 6)


def hardswish(x: DeviceArray) -> Any:
    """Return x times hardsigmoid(x)."""
    return apply("multiply", x, hardsigmoid(x))


_SAME = [name for name in OPERATIONS if name not in ("constant", "as_number", "as_float16", "as_bfloat16", "pow", "where")]
VOCABULARY: Mapping[str, Callable[..., Any]] = {
    **{name: partial(apply, name) for name in _SAME},
    "pow": pow,
    "where": where,
    "clip": clip,
    "positive": positive,
    "square": square,
    "reciprocal": reciprocal,
    "isnan": isnan,
    "isinf": isinf,
    "isfinite": isfinite,
    "relu": relu,
    "sigmoid": sigmoid,
    "silu": silu,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
}
"""Functions over elements, by name."""
OTHER_NAMES = {"absolute": "abs", "fabs": "abs", "true_divide": "divide", "power": "pow", "rint": "round", "expit": "sigmoid"}
OTHER_NAMES |= {
    "clamp": "clip",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
"""Names in `VOCABULARY`, by the other names of NumPy, SciPy and torch."""
_OPTION_NAMES = {"a_min": "min", "a_max": "max"}
