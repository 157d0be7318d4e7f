"""Represent the parts of a torch graph that this library computes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from handlepool.integrations.torch.constants import Constants

Value = Any
"""A tensor, an array of the driver's, or a traced value."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
aten = torch.ops.aten


class Kernel:
    """The target of a graph node that replaces operations of torch.

    Parameters
    ----------
    name : str
    ways : dict of callable
        Functions of arrays, by name, the preferred function first. All of them compute the same result with this library's
        operations.
    plain : callable
        The same computation by torch, on tensors.
    key : hashable, optional
        The options of the kernel. Kernels of the same name and key take the same time for the same geometry, so the ways of
        only the first such kernel are timed. None for a kernel whose ways are not timed.

    Attributes
    ----------
    __name__ : str
    ways, plain, key
        As given.
    """

    def __init__(self, name: str, ways: dict[str, Callable[..., Any]], plain: Callable[..., Any], key: object = None) -> None:
        self.__name__ = self.__qualname__ = name
        self.ways, self.plain, self.key = ways, plain, key

    def __call__(self, *args: Any) -> Any:
        """Compute the kernel's value by torch."""
        return self.plain(*args)

    def __repr__(self) -> str:
        return f"<Kernel {self.__name__}>"


class Lowering:
    """Hold a graph while functions replace torch's operations by kernels.

    Attributes
    ----------
    graph : Graph
        Changed in place.
    constants : Constants
    kind : str
        Torch's device type.
    """

    def __init__(self, graph: fx.Graph, constants: Constants, kind: str) -> None:
        self.graph, self.constants, self.kind = graph, constants, kind

    def nodes(self, *targets: object) -> list[fx.Node]:
        """Return the nodes whose target is in ``targets``, except constants."""
        return [each for each in self.graph.nodes if each.target in targets and self.varies(each)]

    def varies(self, node: fx.Node) -> bool:
        """Return whether a node is an operation and not a constant."""
        return node.op == "call_function" and node not in self.constants

    def constant(self, *nodes: object) -> bool:
        """Return whether each node is a constant or None."""
        return all(each is None or each in self.constants for each in nodes)

    def emit(self, kernel: Kernel, inputs: Iterable[fx.Node], last: fx.Node) -> fx.Node:
        """Replace the node ``last`` by a kernel.

        Nodes whose values only ``last`` needed are erased.
        """
        with self.graph.inserting_before(last):
            node = self.graph.call_function(kernel, tuple(inputs))
        node.meta["val"] = last.meta["val"]
        last.replace_all_uses_with(node)
        self.remove(last)
        return node

    def remove(self, node: fx.Node) -> None:
        """Erase an unused node, and operations that only this node needed."""
        left = [node]
        while left:
            each = left.pop()
            if each.op == "call_function" and not each.users and each not in self.constants and not each._erased:
                left += each.all_input_nodes
                self.graph.erase_node(each)

    def made(self, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """Return a new constant node, whose value is ``function(*args)``.

        ``args`` are constant nodes and plain values.
        """
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            return self.constants.made(self.graph, function, *args)


def value_of(node: fx.Node) -> Any:
    """Return the tensor without values that stands for a node's value.

    Tracing made this tensor. It has a shape, strides and a type.
    """
    return node.meta["val"]


def is_tensor(node: Any, rank: int | None = None, dtypes: tuple[Any, ...] = FLOATS) -> bool:
    """Return whether a node's value is a tensor of one of ``dtypes``.

    The tensor must have at least one element, and ``rank`` axes if ``rank`` is given.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in dtypes and value.numel() > 0 and (rank is None or value.dim() == rank)


def sole_user(node: fx.Node) -> fx.Node | None:
    """Return the only operation that reads a node, or None."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    return user if user is not None and user.op == "call_function" else None


def arguments(node: fx.Node) -> list[Any]:
    """Return an operation's arguments in the schema's order, with defaults."""
    schema = node.target._schema.arguments
    given = [*node.args]
    return [
        given[place] if place < len(given) else node.kwargs.get(each.name, each.default_value)
        for place, each in enumerate(schema)
    ]


def pair(value: Any) -> tuple[int, int]:
    """Return a number or a sequence as a pair (height, width)."""
    values = [*value] if isinstance(value, (list, tuple)) else [value]
    return values[0], values[-1]
