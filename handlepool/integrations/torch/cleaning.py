"""Drop operations that a functional graph does not need."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from handlepool.integrations.torch.kernel import aten, value_of

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.alias.default,
        aten.detach.default,
        aten.as_strided.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.movedim.int,
        aten.view_as.default,
        aten.expand_as.default,
    }
)
"""Operations whose value lies in the memory of their first argument."""
_SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value shares the memory of its input."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return node.op == "call_function" and node.target in VIEWS


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` views, or ``node`` itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def clean(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Drop operations that do nothing, and needless copies.

    A copy is needless if it has the layout and the type of its source. A program returns the memory of the nodes in ``kept``,
    so a copy stays if its result is this memory.
    """
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target in _SAME or (node.target in _DROPOUTS and not _active(node)) or _copies_in_vain(node, kept):
            if node in kept:
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _drop_unused(graph)


_FILLED: dict[Any, Callable[[list[Any]], Any]] = {
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.fill.Scalar: lambda args: args[1],
    aten.fill.Tensor: lambda args: args[1],
}
"""Operations whose value has the same number at each element.

For each operation, a function finds this number in the operation's arguments."""


def free_of_values(graph: fx.Graph) -> None:
    """Replace operations such as `zeros_like` by the operation `full`.

    Such an operation reads only the shape and the type of its argument. The new operation does not read the argument at all, so
    it can be computed once.
    """
    for node in [*graph.nodes]:
        number = _FILLED.get(node.target)
        expected = node.meta.get("val")
        if number is None or not isinstance(expected, Tensor) or any(map(_is_symbol, expected.shape)):
            continue
        written = number([*node.args])
        plain = not isinstance(written, fx.Node)
        with graph.inserting_before(node):
            form = {"dtype": expected.dtype, "device": expected.device}
            new = graph.call_function(aten.full.default, ([*expected.shape], written if plain else 0), form)
            new.meta["val"] = expected
            if not plain:
                new = graph.call_function(aten.add.Tensor, (new, written))
                new.meta["val"] = expected
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _is_symbol(extent: object) -> bool:
    return not isinstance(extent, int)


def _active(node: fx.Node) -> bool:
    _, rate, training = node.args
    return bool(training and rate)


def _copies_in_vain(node: fx.Node, kept: set[fx.Node]) -> bool:
    """Return whether a node is a needless copy, as defined in `clean`."""
    source: Any = node.args[0] if node.args else None
    if node.target is aten.clone.default:
        form = node.kwargs.get("memory_format")
        return form in (None, torch.preserve_format) and not any(base_of(each) is node for each in kept)
    if node.target in (aten.pad.default, aten.constant_pad_nd.default):
        return not any(node.args[1]) and not any(base_of(each) is node for each in kept)
    if node.target in (aten.to.dtype, aten._to_copy.default, aten.type_as.default):
        same = isinstance(value_of(node), Tensor) and value_of(node).dtype == value_of(source).dtype
        return same and set(node.kwargs) <= {"dtype"} and not any(base_of(each) is node for each in kept)
    return False


def _drop_unused(graph: fx.Graph) -> None:
    for node in [*reversed(graph.nodes)]:
        if node.op == "call_function" and not node.users and not _effects(node):
            graph.erase_node(node)


def _effects(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
