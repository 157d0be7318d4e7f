"""Replace each tree of elementwise operations by one kernel."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import handlepool
from handlepool import math
from handlepool.integrations.torch.convolutions import NORM, affine
from handlepool.integrations.torch.kernel import FLOATS, Kernel, Lowering, Value, arguments, aten, is_tensor, value_of

MOST_ARRAYS = 32
MOST_OPERATIONS = 64
"""The maximum number of operations in one kernel."""
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.bool: "bool"}


def _add(x: Value, y: Value, alpha: Value = 1) -> Any:
    return x + (y if alpha == 1 else y * alpha)


def _sub(x: Value, y: Value, alpha: Value = 1) -> Any:
    return x - (y if alpha == 1 else y * alpha)


def _clamp(x: Value, low: Value = None, high: Value = None) -> Any:
    x = x if low is None else math.maximum(x, low)
    return x if high is None else math.minimum(x, high)


def _gelu(x: Value, approximate: str = "none") -> Any:
    if approximate == "none":
        return math.gelu(x)
    return 0.5 * x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _leaky(x: Value, slope: Value = 0.01) -> Any:
    return math.where(x > 0, x, x * slope)


def _elu(x: Value, alpha: Value = 1, scale: Value = 1, input_scale: Value = 1) -> Any:
    return math.where(x > 0, x * scale, math.expm1(x * input_scale) * (alpha * scale))


def _mish(x: Value) -> Any:
    return x * math.tanh(math.maximum(x, 0) + math.log1p(math.exp(-math.abs(x))))


def _where(condition: Value, x: Value, y: Value) -> Any:
    return math.where(condition, x, y)


def _filled(x: Value, mask: Value, value: Value) -> Any:
    return math.where(mask, value, x)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: lambda x, y, alpha=1: _sub(y, x, alpha),
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.div.Scalar: operator.truediv,
    aten.neg.default: operator.neg,
    aten.abs.default: math.abs,
    aten.relu.default: math.relu,
    aten.relu6.default: lambda x: _clamp(x, 0, 6),
    aten.sigmoid.default: math.sigmoid,
    aten.tanh.default: math.tanh,
    aten.silu.default: math.silu,
    aten.gelu.default: _gelu,
    aten.hardswish.default: math.hardswish,
    aten.hardsigmoid.default: math.hardsigmoid,
    aten.hardtanh.default: lambda x, low=-1, high=1: _clamp(x, low, high),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, low: _clamp(x, low),
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.leaky_relu.default: _leaky,
    aten.elu.default: _elu,
    aten.mish.default: _mish,
    aten.exp.default: math.exp,
    aten.log.default: math.log,
    aten.sqrt.default: math.sqrt,
    aten.rsqrt.default: math.rsqrt,
    aten.reciprocal.default: math.reciprocal,
    aten.erf.default: math.erf,
    aten.sin.default: math.sin,
    aten.cos.default: math.cos,
    aten.maximum.default: math.maximum,
    aten.minimum.default: math.minimum,
    aten.gt.Scalar: operator.gt,
    aten.gt.Tensor: operator.gt,
    aten.ge.Scalar: operator.ge,
    aten.ge.Tensor: operator.ge,
    aten.lt.Scalar: operator.lt,
    aten.lt.Tensor: operator.lt,
    aten.le.Scalar: operator.le,
    aten.le.Tensor: operator.le,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _filled,
}
"""The function of traced values for each elementwise operation of torch.

`handlepool.elementwise` traces these functions. Each function takes the operation's arguments, with the same defaults."""
_TYPED = (aten.to.dtype, aten._to_copy.default)


class _Tree:
    """A tree of elementwise operations, for one kernel.

    The tree consists of the operation ``root``, and of operations whose values only the tree reads.
    """

    def __init__(self, root: fx.Node, lowering: Lowering) -> None:
        self.root, self._lowering = root, lowering
        self.members: dict[fx.Node, None] = {root: None}
        self._grow()
        inputs = [each for node in self.members for each in node.all_input_nodes if each not in self.members]
        self.inputs = [*dict.fromkeys(inputs)]

    def _grow(self) -> None:
        left = [self.root]
        while left:
            for each in left.pop().all_input_nodes:
                inside = all(user in self.members for user in each.users)
                if each not in self.members and inside and is_pointwise(self._lowering, each):
                    if len(self.members) >= MOST_OPERATIONS:
                        return
                    self.members[each] = None
                    left.append(each)


def is_pointwise(lowering: Lowering, node: fx.Node) -> bool:
    """Return whether ``node`` may be a part of an elementwise kernel."""
    if not lowering.varies(node) or not is_tensor(node, dtypes=(*FLOATS, torch.bool)):
        return False
    if any(not is_tensor(each, dtypes=(*FLOATS, torch.bool)) for each in node.all_input_nodes):
        return False
    if node.target in _TYPED:
        return set(node.kwargs) <= {"dtype"} and len(node.args) <= 2
    if node.target not in FUNCTIONS:
        return False
    # On booleans, `add` and similar operations have another meaning than on numbers.
    if any(value_of(each).dtype is torch.bool for each in node.all_input_nodes):
        return node.target in (aten.where.self, aten.masked_fill.Scalar)
    return all(each is None or isinstance(each, (fx.Node, int, float, str)) for each in (*node.args, *node.kwargs.values()))


def lower_norms(lowering: Lowering) -> None:
    """Replace each batch norm that is not part of a convolution's kernel.

    The new kernel multiplies each channel by a constant, and adds another constant.
    """
    for node in lowering.nodes(NORM):
        x, weight, bias, mean, variance, _, epsilon = arguments(node)
        first = [each for each in node.users if each.target is operator.getitem and each.args[1] == 0]
        if not is_tensor(x) or len(first) != 1 or any(each.users for each in node.users if each not in first):
            continue
        if not lowering.constant(weight, bias, mean, variance):
            continue
        for each in [user for user in node.users if user not in first]:
            lowering.graph.erase_node(each)
        shape = (value_of(x).shape[1], *[1] * (value_of(x).dim() - 2))
        parts = [weight, bias, mean, variance]
        scale = lowering.made(_part, 0, epsilon, parts, shape)
        shift = lowering.made(_part, 1, epsilon, parts, shape)
        kernel = Kernel("affine", {"fused": _affine(value_of(x).dtype)}, _plain_affine)
        lowering.emit(kernel, [x, scale, shift], first[0])


def _part(place: int, epsilon: float, parts: list[Any], shape: tuple[int, ...]) -> Tensor:
    return affine((("norm", epsilon),), parts)[place].float().reshape(shape)


def _affine(dtype: torch.dtype) -> Callable[..., Any]:
    return handlepool.elementwise(_typed(lambda x, scale, shift: x * scale + shift, dtype))


def _plain_affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * scale + shift).to(x.dtype)


def _typed(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def typed(x: Value, scale: Value, shift: Value) -> Any:
        return function(x, scale, shift).astype(NAMES[dtype])

    return typed


def lower_pointwise(lowering: Lowering) -> None:
    """Replace each tree of elementwise operations by one kernel."""
    taken: set[fx.Node] = set()
    for node in [*reversed(lowering.graph.nodes)]:
        if node in taken or not is_pointwise(lowering, node):
            continue
        tree = _Tree(node, lowering)
        if 0 < len(tree.inputs) <= MOST_ARRAYS:
            taken.update(tree.members)
            _emit(lowering, tree)


def _emit(lowering: Lowering, tree: _Tree) -> None:
    """Replace ``tree`` by one kernel."""
    order = [each for each in lowering.graph.nodes if each in tree.members]
    inputs, root = tree.inputs, tree.root
    steps = [(each, _function(each), each.args, {**each.kwargs}) for each in order]

    def function(*values: Value) -> Any:
        found: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node, step, args, kwargs in steps:
            given, named = fx.node.map_arg((args, kwargs), found.__getitem__)
            found[node] = step(*given, **named)
        return found[root].astype(NAMES[value_of(root).dtype])

    targets = [(each, each.target, each.args, each.kwargs) for each in order]

    def plain(*values: Value) -> Any:
        found: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node, target, args, kwargs in targets:
            given, named = fx.node.map_arg((args, kwargs), found.__getitem__)
            found[node] = target(*given, **named)
        return found[root]

    name = "_".join(dict.fromkeys(str(each.target).removeprefix("aten.").partition(".")[0] for each in order))[:60]
    lowering.emit(Kernel(name, {"fused": _traced(function, len(inputs), name)}, plain), inputs, root)


def _traced(function: Callable[..., Any], count: int, name: str) -> Callable[..., Any]:
    kernel = handlepool.elementwise(function)
    kernel.__name__ = name
    return kernel


def _function(node: fx.Node) -> Callable[..., Any]:
    if node.target in _TYPED:
        dtype = value_of(node).dtype
        return lambda x, *_, **__: x.astype(NAMES[dtype])
    return FUNCTIONS[node.target]
