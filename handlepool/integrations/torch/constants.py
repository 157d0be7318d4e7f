"""Keep tensors that are computed from weights alone.

A program reads the constants at fixed addresses. After a write to a weight, the constants are computed again into the same
memory. So no program has to be recorded again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from handlepool.integrations.torch.refusals import NotTaken

Found = dict[fx.Node, Any]


class Constants:
    """The constant nodes of a graph.

    A node is constant if its value depends on weights alone.

    Attributes
    ----------
    values : dict of Node
        The tensor of each constant node.
    """

    def __init__(self, weights: dict[fx.Node, Tensor]) -> None:
        self.values: Found = {node: tensor.detach() for node, tensor in weights.items()}
        self._weights = weights
        self._made: list[tuple[fx.Node, Callable[..., Any], Any, Any]] = []

    def __contains__(self, node: object) -> bool:
        return node in self.values

    def fold(self, graph: fx.Graph) -> None:
        """Compute each operation whose arguments are all constants."""
        for node in graph.nodes:
            if node.op == "call_function" and all(each in self.values for each in node.all_input_nodes):
                tags = getattr(node.target, "tags", ())
                if torch.Tag.nondeterministic_seeded in tags:
                    raise NotTaken(f"the model draws random numbers, in the operation {node.target}")
                self._add(node, node.target, node.args, node.kwargs)

    def made(self, graph: fx.Graph, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """Return a new constant node, whose value is ``function(*args)``.

        ``args`` are constant nodes and plain values.
        """
        node = graph.create_node("get_attr", f"constant_{len(self._made)}")
        self._add(node, function, args, {})
        node.meta["val"] = self.values[node]
        return node

    def refresh(self, kept: set[fx.Node]) -> None:
        """Compute all constants again from the present weights.

        The new values of the nodes in ``kept`` are written into the memory of the old values.
        """
        found: Found = {node: tensor.detach() for node, tensor in self._weights.items()}
        for node, function, args, kwargs in self._made:
            found[node] = _computed(function, args, kwargs, found)
        for node in kept:
            value, new = self.values[node], found[node]
            if isinstance(value, Tensor) and value.data_ptr() != new.data_ptr():
                value.copy_(new)

    def _add(self, node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.values[node] = _computed(function, args, kwargs, self.values)
        self._made.append((node, function, args, kwargs))


def _computed(function: Callable[..., Any], args: Any, kwargs: Any, values: Found) -> Any:
    args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
    with torch.no_grad():
        return function(*args, **kwargs)
