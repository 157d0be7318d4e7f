"""Stand for a piece of a graph that the library computes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from handlepool.integrations.torch.constants import Constants

Value = Any
"""A tensor, an array of the driver's in its place, or a traced value of an elementwise function."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
aten = torch.ops.aten


class Kernel:
    """The target of a node that stands for operations of torch.

    Parameters
    ----------
    name : str
    ways : dict of callable
        Functions of arrays by name, the preferred function first. Each computes the same with the library's operations.
    plain : callable
        The same function of tensors, by torch.
    key : hashable, optional
        Its options. Kernels of one name and key take one time for one geometry. None for a kernel that is not timed.

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
        """Compute by torch."""
        return self.plain(*args)

    def __repr__(self) -> str:
        return f"<Kernel {self.__name__}>"


class Lowering:
    """A graph whose operations become kernels.

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
        """Return the operations of some kinds that are no constants, in order."""
        return [each for each in self.graph.nodes if each.target in targets and self.varies(each)]

    def varies(self, node: fx.Node) -> bool:
        """Return whether a node is an operation whose value is no constant."""
        return node.op == "call_function" and node not in self.constants

    def constant(self, *nodes: object) -> bool:
        """Return whether all are constants, or None."""
        return all(each is None or each in self.constants for each in nodes)

    def emit(self, kernel: Kernel, inputs: Iterable[fx.Node], last: fx.Node) -> fx.Node:
        """Put a kernel in the place of a node, and of the nodes that only led to it."""
        with self.graph.inserting_before(last):
            node = self.graph.call_function(kernel, tuple(inputs))
        node.meta["val"] = last.meta["val"]
        last.replace_all_uses_with(node)
        self.remove(last)
        return node

    def remove(self, node: fx.Node) -> None:
        """Erase a node, and the operations before it that have no further use."""
        left = [node]
        while left:
            each = left.pop()
            if each.op == "call_function" and not each.users and each not in self.constants and not each._erased:
                left += each.all_input_nodes
                self.graph.erase_node(each)

    def made(self, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """Return a new constant: a function of constants and plain values."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            return self.constants.made(self.graph, function, *args)


def value_of(node: fx.Node) -> Any:
    """Return the tensor without values that tracing gave a node."""
    return node.meta["val"]


def is_tensor(node: Any, rank: int | None = None, dtypes: tuple[Any, ...] = FLOATS) -> bool:
    """Return whether a node's value is a tensor of such types with elements."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in dtypes and value.numel() > 0 and (rank is None or value.dim() == rank)


def sole_user(node: fx.Node) -> fx.Node | None:
    """Return the only operation that reads a node, None if there are more."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    return user if user is not None and user.op == "call_function" else None


def arguments(node: fx.Node) -> list[Any]:
    """Return an operation's arguments by position, with its defaults."""
    schema = node.target._schema.arguments
    given = [*node.args]
    return [
        given[place] if place < len(given) else node.kwargs.get(each.name, each.default_value)
        for place, each in enumerate(schema)
    ]


def pair(value: Any) -> tuple[int, int]:
    """Return a value for both axes of an image."""
    values = [*value] if isinstance(value, (list, tuple)) else [value]
    return values[0], values[-1]
