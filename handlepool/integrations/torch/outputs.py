"""Make a call's results share memory as the model's own results do.

A program returns new tensors. A result of the model itself may instead be an argument, a weight, a view of an argument or a
weight, or a view of another result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from handlepool.integrations.torch.capture import Captured
from handlepool.integrations.torch.cleaning import base_of
from handlepool.integrations.torch.kernel import value_of

View = tuple[Any, Any, Any]
"""A view: its operation, positional arguments and keyword arguments.

One of the arguments is the node that is viewed.
"""
OWN, INPUT, TENSOR, PLAIN = "own", "input", "tensor", "plain"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of one result of the model.

    Attributes
    ----------
    kind : str
        `OWN` for a result of the program, `INPUT` for an argument, `TENSOR` for a weight, `PLAIN` for a number.
    at : int or object
        For `OWN` the index among the program's results, for `INPUT` the index among the arguments, else the tensor or the
        number.
    views : tuple
        The view operations that lead from this origin to the result, in order.
    """

    kind: str
    at: Any
    views: tuple[View, ...] = ()

    def value(self, own: Sequence[Any], given: Sequence[Any]) -> Any:
        """Return this result of the model for one call.

        ``own`` are the results of the program in this call, and ``given`` are the arguments.
        """
        found = own[self.at] if self.kind is OWN else given[self.at] if self.kind is INPUT else self.at
        for target, args, kwargs in self.views:
            args, kwargs = fx.node.map_arg((args, kwargs), lambda _, found=found: found)
            found = target(*args, **kwargs)
        return found


class Outputs:
    """The origin of each output and each written value of a graph.

    Parameters
    ----------
    graph : Captured
        The constructor changes the graph's output node, which then lists `returned`.

    Attributes
    ----------
    returned : list of Node
        The nodes whose values a program returns.
    writes : list of (Source, Tensor or int)
        Each new value with its target: a buffer, or the index of an argument.
    """

    def __init__(self, graph: Captured) -> None:
        self._inputs = {node: place for place, node in enumerate(graph.inputs) if node is not None}
        self._weights = graph.weights
        self.returned: list[fx.Node] = []
        nodes = [each for each in graph.outputs if isinstance(each, fx.Node)] + [node for node, _ in graph.writes]
        self._views = {base: {node for node in nodes if base_of(node) is base} for base in {*map(base_of, nodes)}}
        # If the model returns a tensor that it wrote, the result is that tensor, not a copy.
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
        # If an output shares memory with no other output and has no gaps, the program returns the output itself, which may be
        # smaller than ``base``. For any other output, the program returns ``base``, and the output becomes a view of it:
        # outputs that share memory have to be views of one result, and a program returns no tensors with gaps.
        if len(self._views[base]) == 1 and is_dense(value_of(value)):
            return Source(OWN, self._place(value))
        return Source(OWN, self._place(base), _views(base, value))

    def _place(self, node: fx.Node) -> int:
        if node not in self.returned:
            self.returned.append(node)
        return self.returned.index(node)

    def _build(self, own: Sequence[Any], given: Sequence[Any]) -> Any:
        """Write the tensors that the model writes; return the model's value."""
        for source, target in self.writes:
            tensor = target if isinstance(target, Tensor) else given[target]
            tensor.copy_(source.value(own, given))
        return self._structure.unflatten([each.value(own, given) for each in self._sources])


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps."""
    span = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() in (0, span)


def _views(base: fx.Node, node: fx.Node) -> tuple[View, ...]:
    """Return the views that lead from ``base`` to ``node``, in order."""
    found: list[View] = []
    while node is not base:
        found.append((node.target, node.args, node.kwargs))
        node = node.all_input_nodes[0]
    return tuple(reversed(found))
