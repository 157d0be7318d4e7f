"""Give a call's values the aliases that the model's own values have.

A program returns new tensors. A value of the model may instead be an argument, a weight, a view of these, or a view of another
value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from handlepool.integrations.torch.capture import Captured
from handlepool.integrations.torch.cleaning import base_of
from handlepool.integrations.torch.kernel import value_of

View = tuple[Any, Any, Any]
"""A target with its arguments, which name one node."""
OWN, INPUT, TENSOR, PLAIN = "own", "input", "tensor", "plain"


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a value.

    Attributes
    ----------
    kind : str
        `OWN` for a result of the program, `INPUT` for an argument, `TENSOR` for a weight, `PLAIN` for a number.
    at : int or object
        Place among the results or arguments; or the tensor, or the number.
    views : tuple
        Views from there on.
    """

    kind: str
    at: Any
    views: tuple[View, ...] = ()

    def value(self, own: Sequence[Any], given: Sequence[Any]) -> Any:
        """Return the value of one call."""
        found = own[self.at] if self.kind is OWN else given[self.at] if self.kind is INPUT else self.at
        for target, args, kwargs in self.views:
            args, kwargs = fx.node.map_arg((args, kwargs), lambda _, found=found: found)
            found = target(*args, **kwargs)
        return found


class Outputs:
    """The sources of a graph's outputs, and of what it writes.

    Parameters
    ----------
    graph : Captured
        Its output node is changed: it gets the nodes that a program returns.

    Attributes
    ----------
    returned : list of Node
        The nodes whose values a program returns.
    writes : list of (Source, Tensor or int)
        New values of buffers, and of arguments by their places.
    """

    def __init__(self, graph: Captured) -> None:
        self._inputs = {node: place for place, node in enumerate(graph.inputs) if node is not None}
        self._weights = graph.weights
        self.returned: list[fx.Node] = []
        nodes = [each for each in graph.outputs if isinstance(each, fx.Node)] + [node for node, _ in graph.writes]
        self._views = {base: {node for node in nodes if base_of(node) is base} for base in {*map(base_of, nodes)}}
        # The model's value is the tensor that it wrote, and not a copy.
        self._written = dict(graph.writes)
        self.writes = [(self._source(node), target) for node, target in graph.writes]
        self._sources = [self._source(each, written=True) for each in graph.outputs]
        self._structure = graph.structure
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        output.args = (tuple(self.returned),)
        self.build: Callable[[Sequence[Any], Sequence[Any]], Any] = self._build
        if not self.writes and all(each.kind is OWN and not each.views for each in self._sources):
            order = [each.at for each in self._sources]
            if graph.structure.is_leaf() and order == [0]:
                self.build = lambda own, _: own[0]

    def _source(self, value: Any, written: bool = False) -> Source:
        if not isinstance(value, fx.Node):
            return Source(PLAIN, value)
        base = base_of(value)
        target = self._written.get(base) if written else None
        if target is not None:
            return Source(TENSOR if isinstance(target, Tensor) else INPUT, target, _views(base, value))
        if base in self._inputs:
            return Source(INPUT, self._inputs[base], _views(base, value))
        if base in self._weights:
            return Source(TENSOR, self._weights[base], _views(base, value))
        # Values that share memory are views of one result. A value alone is a result of its own, which may be smaller. A program
        # returns tensors without gaps, so a value with gaps is a view.
        if len(self._views[base]) == 1 and is_dense(value_of(value)):
            return Source(OWN, self._place(value))
        return Source(OWN, self._place(base), _views(base, value))

    def _place(self, node: fx.Node) -> int:
        if node not in self.returned:
            self.returned.append(node)
        return self.returned.index(node)

    def _build(self, own: Sequence[Any], given: Sequence[Any]) -> Any:
        """Write what the model writes, and return the model's value."""
        for source, target in self.writes:
            tensor = target if isinstance(target, Tensor) else given[target]
            tensor.copy_(source.value(own, given))
        return self._structure.unflatten([each.value(own, given) for each in self._sources])


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps."""
    span = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() in (0, span)


def _views(base: fx.Node, node: fx.Node) -> tuple[View, ...]:
    """Return the views that lead from a node to another one."""
    found: list[View] = []
    while node is not base:
        found.append((node.target, node.args, node.kwargs))
        node = node.all_input_nodes[0]
    return tuple(reversed(found))
