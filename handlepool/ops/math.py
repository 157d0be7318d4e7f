"""Define mathematical functions, each of them an elementwise function.

A call with arrays is one launch. A call inside another elementwise function becomes a part of that function's kernel.
`handlepool.elementwise` explains the types and layouts.
"""

from handlepool.graphs.expression import VOCABULARY
from handlepool.ops.elementwise import ElementwiseFunction


def _known(name: str) -> ElementwiseFunction:
    return ElementwiseFunction(VOCABULARY[name], name=name, module=__name__)


abs = _known("abs")
add = _known("add")
ceil = _known("ceil")
clip = _known("clip")
cos = _known("cos")
divide = _known("divide")
equal = _known("equal")
erf = _known("erf")
exp = _known("exp")
expm1 = _known("expm1")
floor = _known("floor")
gelu = _known("gelu")
greater = _known("greater")
greater_equal = _known("greater_equal")
hardsigmoid = _known("hardsigmoid")
hardswish = _known("hardswish")
isfinite = _known("isfinite")
isinf = _known("isinf")
isnan = _known("isnan")
less = _known("less")
less_equal = _known("less_equal")
log = _known("log")
log10 = _known("log10")
log1p = _known("log1p")
log2 = _known("log2")
logical_and = _known("logical_and")
logical_not = _known("logical_not")
logical_or = _known("logical_or")
logical_xor = _known("logical_xor")
maximum = _known("maximum")
minimum = _known("minimum")
multiply = _known("multiply")
negative = _known("negative")
not_equal = _known("not_equal")
positive = _known("positive")
pow = _known("pow")
reciprocal = _known("reciprocal")
relu = _known("relu")
round = _known("round")
rsqrt = _known("rsqrt")
sigmoid = _known("sigmoid")
silu = _known("silu")
sin = _known("sin")
sqrt = _known("sqrt")
square = _known("square")
subtract = _known("subtract")
tanh = _known("tanh")
trunc = _known("trunc")
where = _known("where")

__all__ = [*VOCABULARY]
