"""The CUDA source of an expression over elements, and its launch.

This module needs no CUDA. The source depends on the expression, on the types, on the number of merged axes, and on the axes
along which each operand has a step. A thread computes a pack of neighbouring elements at once. The geometry holds the extents,
the steps and the launch's numbers. So one source serves many shapes and all numbers.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from handlepool.drivers.cuda import kernels
from handlepool.drivers.cuda.kernels import Axes, Launch, merged
from handlepool.drivers.expression import OPERATIONS, Elementwise, Expression
from handlepool.errors import GraphNotSupportedError
from handlepool.tensors.layout import Layout

TYPES: Mapping[str, tuple[str, str, str]] = {
    "float16": ("unsigned short", "half_to_float({})", "float_to_half({})"),
    "bfloat16": ("unsigned short", "bfloat_to_float({})", "float_to_bfloat({})"),
    "float32": ("float", "{}", "{}"),
    "int8": ("signed char", "(float){}", ""),
    "uint8": ("unsigned char", "(float){}", ""),
    "int16": ("short", "(float){}", ""),
    "uint16": ("unsigned short", "(float){}", ""),
    "int32": ("int", "(float){}", ""),
    "bool": ("unsigned char", "({} != 0)", "(unsigned char){}"),
}
"""C++ types of elements, with conversions, by NumPy's name of the type.

The first conversion is from an element to a value, and the second is from a value to an element.
"""

FORMS: Mapping[str, str] = {
    "as_number": "({0} ? 1.0f : 0.0f)",
    "as_float16": "half_to_float(float_to_half({0}))",
    "as_bfloat16": "bfloat_to_float(float_to_bfloat({0}))",
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "pow": "powf({0}, {1})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "negative": "-{0}",
    "abs": "fabsf({0})",
    "floor": "floorf({0})",
    "ceil": "ceilf({0})",
    "trunc": "truncf({0})",
    "round": "rintf({0})",
    "exp": "expf({0})",
    "expm1": "expm1f({0})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "log2": "log2f({0})",
    "log10": "log10f({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "1.0f / sqrtf({0})",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "tanh": "tanhf({0})",
    "erf": "erff({0})",
    "gelu": "{0} * normcdff({0})",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_xor": "{0} != {1}",
    "logical_not": "!{0}",
    "where": "{0} ? {1} : {2}",
}
"""The CUDA C++ code of each operation except ``constant``."""

MOST_PARAMETERS = 4096
"""The maximum number of bytes of a kernel's arguments."""

_PRELUDE = """\
HELPER float larger(float a, float b) { return a > b || a != a ? a : b; }  // a NaN stays one
HELPER float smaller(float a, float b) { return a < b || a != a ? a : b; }

template <class Element, int Count> struct alignas(Count * sizeof(Element)) Pack {
    Element of[Count];
};
"""


@dataclass(frozen=True, slots=True)
class _Operand:
    """Describe how the source reads or writes an operand.

    Attributes
    ----------
    place : int
        Index among the operands.
    type : str
        NumPy's name of the element type.
    along : tuple of int
        The merged axes along which the operand's step is not 0, the innermost first.
    packed : bool
        Whether neighbours along the innermost axis are neighbours in memory. If not, one element serves a whole pack.
    flat : bool
        Whether a pack may cross the ends of the innermost axis, as in an array without gaps.
    """

    place: int
    type: str
    along: tuple[int, ...]
    packed: bool
    flat: bool = False

    def offset(self) -> str:
        """Return the code of the operand's offset, in elements or packs."""
        terms = [f"p{axis} * g.steps[{self.place}][{axis}]" for axis in self.along if axis or not self.packed]
        return " + ".join([*(["p0"] if self.packed else []), *terms]) or "0"

    def address(self, pack: int, const: str = "const ") -> str:
        """Return the code for the operand's element or pack in memory."""
        element = TYPES[self.type][0]
        kind = f"Pack<{element}, {pack}>" if self.packed and pack > 1 else element
        offset = self.offset() if not self.flat else "i" if pack > 1 else "number"
        return f"(({const}{kind}*)operands.at[{self.place}])[{offset}]"

    def element(self, pack: int) -> str:
        """Return the code that converts a loaded element to a value."""
        loaded = f"x{self.place}.of[e]" if self.packed and pack > 1 else f"x{self.place}"
        return TYPES[self.type][1].format(loaded)


def plan(kernel: Elementwise, operands: Sequence[Layout]) -> Launch:
    """Return the launch of an expression for these layouts.

    The operands are the inputs, then the output, to which the inputs broadcast.
    """
    y = operands[-1]
    axes = merged(y.shape, *(_steps(operand, y) for operand in operands))
    pack, tail = _pack(axes, operands)
    (extent, inner), *outer = axes
    size = _crossing(axes, operands) if pack == 1 else 0
    if size:
        return _across(kernel, operands, axes, size)
    packed = [step == 1 for step in inner]
    extents = [extent // pack, *(each for each, _ in outer)]
    steps = [
        [each[place] // pack if axis and packed[place] else each[place] for axis, (_, each) in enumerate(axes)]
        for place in range(len(operands))
    ]
    every = [
        _Operand(place, layout.dtype.name, tuple(axis for axis, step in enumerate(steps[place]) if step), packed[place])
        for place, layout in enumerate(operands)
    ]
    loops = [("g.count", _places(len(axes)), pack)]
    # The tail has fewer elements than a pack, so a second loop computes its elements singly.
    if tail:
        loops.append(("g.tail", [f"        const offset_t p0 = g.count * {pack} + i;"], 1))
    bodies = [(count, [*places, *_elements(kernel.expression, every, each)]) for count, places, each in loops]
    code = _source(kernel.expression, every, len(axes), bodies)
    return _launch(kernel, operands, code, math.prod(extents), tail, extents, steps)


def _across(kernel: Elementwise, operands: Sequence[Layout], axes: Axes, pack: int) -> Launch:
    """Return a launch whose packs cross the ends of the innermost axis.

    The kernel reads dense operands in packs, and the elements of any other operand one at a time.
    """
    steps = [[each[place] for _, each in axes] for place in range(len(operands))]
    every = [
        _Operand(place, layout.dtype.name, tuple(axis for axis, step in enumerate(steps[place]) if step), flat, flat)
        for (place, layout), flat in zip(enumerate(operands), _flat(axes, len(operands)), strict=True)
    ]
    extents = [extent for extent, _ in axes]
    count, tail = divmod(operands[-1].size, pack)
    bodies = [("g.count", _crossing_elements(kernel.expression, every, pack, len(axes)))]
    if tail:
        first = f"        const count_t number = (count_t)g.count * {pack} + i;"
        bodies.append(("g.tail", [first, *_places(len(axes), "number"), *_elements(kernel.expression, every, 1)]))
    code = _source(kernel.expression, every, len(axes), bodies)
    return _launch(kernel, operands, code, count, tail, extents, steps)


def _launch(
    kernel: Elementwise,
    operands: Sequence[Layout],
    code: str,
    count: int,
    tail: int,
    extents: Sequence[int],
    steps: Sequence[Sequence[int]],
) -> Launch:
    y = operands[-1]
    geometry = (count, tail, *extents, *(step for each in steps for step in each), *kernel.numbers)
    # If an element lies beyond the range of 32-bit offsets, all offsets have 64 bits.
    wide = any(max(y.size, layout.reach // layout.dtype.itemsize) >= 1 << 31 for layout in operands)
    taken = len(geometry) * (8 if wide else 4) + len(operands) * 8
    if taken > MOST_PARAMETERS:
        raise GraphNotSupportedError(
            f"{len(operands)} operands over {len(extents)} axes that do not merge need {taken:,} bytes of arguments, and CUDA "
            f"takes at most {MOST_PARAMETERS:,}; make the arrays contiguous, or split the function"
        )
    units = max(count, tail)
    blocks = min(max(-(-units // kernels.THREADS), 1), kernels.MOST_BLOCKS)
    macros = (("WIDE", str(int(wide))), ("OPERANDS", str(len(operands))))
    return Launch("elementwise", macros, array("q" if wide else "i", geometry), (blocks, 1), kernels.THREADS, code)


def _steps(operand: Layout, output: Layout) -> list[int]:
    """Return an operand's strides along the output's axes, in elements.

    If one element serves a whole axis, the stride along that axis is 0.
    """
    missing = output.ndim - operand.ndim
    sizes = zip(operand.shape, operand.strides, strict=True)
    return [0] * missing + [stride // operand.dtype.itemsize if extent > 1 else 0 for extent, stride in sizes]


def _pack(axes: Axes, operands: Sequence[Layout]) -> tuple[int, int]:
    """Return the sizes of a pack and of the tail, in elements.

    A thread computes a pack at once. A pack's size is a power of two. The tail has the elements behind the last whole pack.
    """
    (extent, inner), *outer = axes
    if inner[-1] != 1 or any(step not in (0, 1) for step in inner):
        return 1, 0
    together = [place for place, step in enumerate(inner) if step == 1]
    most = kernels.LARGEST_PACK // max(operands[place].dtype.itemsize for place in together)
    pack = math.gcd(most, extent, *(steps[place] for _, steps in outer for place in together)) if outer else most
    # With large packs, a small array would occupy too few threads. So the packs of a small array become smaller.
    size = operands[-1].size
    while pack > 1 and size // pack < kernels.PLENTY:
        pack //= 2
    return pack, extent % pack


def _flat(axes: Axes, operands: int) -> list[bool]:
    """Return for each operand whether it is dense in ``axes``' order."""
    dense = [math.prod(extent for extent, _ in axes[:axis]) for axis in range(len(axes))]
    return [[each[place] for _, each in axes] == dense for place in range(operands)]


def _crossing(axes: Axes, operands: Sequence[Layout]) -> int:
    """Return the size of packs that cross the innermost axis's ends.

    Return 0 if such packs are impossible or gain nothing. The output must have no gaps, and at least one input must have no gaps,
    so that it is read by packs.
    """
    flat = _flat(axes, len(operands))
    if len(axes) == 1 or not flat[-1] or not any(flat[:-1]):
        return 0
    pack = kernels.LARGEST_PACK // max(layout.dtype.itemsize for layout, is_so in zip(operands, flat, strict=True) if is_so)
    pack = kernels.thinned(pack, operands[-1].size)
    return pack if pack > 1 else 0


def _source(expression: Expression, operands: Sequence[_Operand], rank: int, loops: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the source of a kernel with these loops.

    Each loop has a count and a body.
    """
    *inputs, output = operands
    numbers = f", numbers[{expression.numbers}]" if expression.numbers else ""
    body = [
        _PRELUDE,
        _function(expression, inputs, output),
        f"struct Elements {{\n    offset_t count, tail, extents[{rank}], steps[{len(operands)}][{rank}]{numbers};\n}};\n",
        "ENTRY void elementwise(BY_VALUE Pointers operands, BY_VALUE Elements g) {",
        *(f"    const float n{k} = __int_as_float((int)g.numbers[{k}]);" for k in range(expression.numbers)),
    ]
    for count, lines in loops:
        body += [f"    FOR_EACH_INDEX(i, {count}) {{", *lines, "    }"]
    return "\n".join([*body, "}", ""])


def _places(rank: int, number: str = "i") -> list[str]:
    """Return code that turns an element's number into indices along axes."""
    if rank == 1:
        return [f"        const offset_t p0 = {number};"]
    lines = [f"        count_t rest = {number};"]
    for axis in range(rank - 1):
        extent = f"(count_t)g.extents[{axis}]"
        lines += [f"        offset_t p{axis} = rest % {extent};", f"        rest /= {extent};"]
    return [*lines, f"        offset_t p{rank - 1} = rest;"]


def _elements(expression: Expression, operands: Sequence[_Operand], pack: int) -> list[str]:
    """Return the code that loads, computes and stores a pack."""
    *inputs, output = operands
    lines = [f"        const auto x{each.place} = {each.address(pack)};" for each in inputs]
    value = _value(expression, inputs, output, pack)
    if pack == 1:
        return [*lines, f"        {output.address(1, '')} = {value};"]
    return [
        *lines,
        f"        Pack<{TYPES[output.type][0]}, {pack}> y;",
        "#pragma unroll",
        f"        for (int e = 0; e < {pack}; ++e) y.of[e] = {value};",
        f"        {output.address(pack, '')} = y;",
    ]


def _crossing_elements(expression: Expression, operands: Sequence[_Operand], pack: int, rank: int) -> list[str]:
    """Return the code of a pack that crosses the innermost axis's ends.

    The code computes the indices of the pack's first element by divisions. For each further element, the code increments the
    indices, which costs less.
    """
    *inputs, output = operands
    following = f"++p{rank - 1};"
    for axis in reversed(range(rank - 1)):
        following = f"if (++p{axis} == g.extents[{axis}]) {{ p{axis} = 0; {following} }}"
    return [
        *_places(rank, f"(count_t)i * {pack}"),
        *(f"        const auto x{each.place} = {each.address(pack)};" for each in inputs if each.flat),
        f"        Pack<{TYPES[output.type][0]}, {pack}> y;",
        "#pragma unroll",
        f"        for (int e = 0; e < {pack}; ++e) {{",
        *(f"            const auto x{each.place} = {each.address(pack)};" for each in inputs if not each.flat),
        f"            y.of[e] = {_value(expression, inputs, output, pack)};",
        f"            {following}",
        "        }",
        f"        {output.address(pack, '')} = y;",
    ]


def _value(expression: Expression, inputs: Sequence[_Operand], output: _Operand, pack: int) -> str:
    """Return the code that computes one output element in its stored type."""
    arguments = [*(each.element(pack) for each in inputs), *(f"n{k}" for k in range(expression.numbers))]
    return TYPES[output.type][2].format(f"value({', '.join(arguments)})")


def _function(expression: Expression, inputs: Sequence[_Operand], output: _Operand) -> str:
    """Return the expression's code, a function of one element per input."""

    def kind(truth: bool) -> str:
        return "bool" if truth else "float"

    names = [f"a{each.place}" for each in inputs] + [f"n{k}" for k in range(expression.numbers)]
    truths = [each.type == "bool" for each in inputs] + [False] * expression.numbers
    parameters = ", ".join(f"{kind(truth)} {name}" for name, truth in zip(names, truths, strict=True))
    lines = [f"HELPER {kind(output.type == 'bool')} value({parameters}) {{"]
    for number, step in enumerate(expression.steps):
        name, truth = f"v{number}", OPERATIONS[step.operation][1] == "truth"
        if step.operation == "constant":
            form = f"__int_as_float({hex(step.bits & 0xFFFFFFFF)})"
        else:
            form = FORMS[step.operation].format(*(names[source] for source in step.sources))
        lines.append(f"    const {kind(truth)} {name} = {form};")
        names.append(name)
    return "\n".join([*lines, f"    return {names[expression.result]};", "}", ""])
