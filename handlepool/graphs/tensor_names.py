"""Find the tensor of a graph that a reference names.

A reference is a tensor object, its uid, a name or ``node::port``. A name is the tensor's own name, or the parameter that
declared the tensor. A port is the frontend's name for it, the keyword of the method that made the node, or a position among the
node's inputs. A name that fits two tensors raises an error.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool.errors import ArgumentError
from handlepool.tensors.graph_types import FrontendGraph, FrontendNode, FrontendTensor

MOST_LISTED = 24
"""The maximum number of tensors that a message lists."""

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "add_square", "div", "logical_and", "logical_or", "mul", "sub"), ("a", "b")),
    **dict.fromkeys(("max", "min", "mod", "pow"), ("input0", "input1")),
    **dict.fromkeys(("cmp_eq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt", "cmp_neq"), ("input", "comparison")),
    "bias": ("input", "bias"),
    "scale": ("input", "scale"),
    "binary_select": ("input0", "input1", "mask"),
}
"""Keywords of the tensor arguments of the frontend's pointwise methods.

The keys are the modes of the nodes. Any other mode has ("input",), and the mode of a gradient has ("loss", "input"). In a node,
the ports of these tensors are IN_0, IN_1 and IN_2.
"""


def is_tensor(value: object) -> bool:
    """Return whether a value is a graph tensor."""
    return hasattr(type(value), "get_uid")


def made_by_nodes(graph: FrontendGraph) -> dict[int, Any]:
    """Return the tensors that nodes make, by ``id``."""
    return {id(tensor): tensor for node in graph.nodes for tensor in node.outputs.values() if tensor is not None}


class References:
    """Find the tensors of one graph by references.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph with all its nodes.
    parameters : mapping of str to graph tensor
        Tensors by the parameter that declared them. If the function gives such a tensor another name, the parameter's name
        stays a reference to the tensor.
    """

    def __init__(self, graph: Any, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._nodes = graph.nodes
        tensors = [*parameters.values(), *(tensor for _, _, tensor in self._ports()), *graph.tensors.values()]
        self._tensors = {id(tensor): tensor for tensor in tensors}

    def resolve(self, reference: Any) -> Any:
        """Return the tensor that a reference names.

        Raises
        ------
        ArgumentError
            If the reference fits no tensor, or several. The message lists the tensors.
        """
        if is_tensor(reference):
            if id(reference) in self._tensors:
                return reference
            # The tensor belongs to the graph of an earlier call of the same function, so look for its name in this graph.
            found = self._named(reference.name)
        elif isinstance(reference, str):
            found = self._named(reference)
        else:
            try:
                uid = as_integer(reference)
            except TypeError:
                raise ArgumentError(
                    f"{shown(reference)} is no reference; give a name, 'node::port', 'node::0', a uid or a graph tensor. "
                    f"{self.listing()}"
                ) from None
            found = [tensor for tensor in self._tensors.values() if tensor.uid == uid]
        if len(found) == 1:
            return found[0]
        called = shown(reference.name if is_tensor(reference) else reference)
        if not found:
            raise ArgumentError(f"no tensor of the graph is {called}. {self.listing()}")
        raise ArgumentError(
            f"{called} means {len(found)} tensors of the graph; refer to one tensor by its uid or object. {self.listing()}"
        )

    def name(self, tensor: FrontendTensor) -> str:
        """Return the tensor's own name, or ``node::port`` for an unnamed output."""
        for node, port, made in self._ports(inputs=False):
            # A name that begins with the node's name comes from the frontend, and not from the function. It may differ from
            # ``node::port`` in the port.
            if made is tensor and (not tensor.name or tensor.name.startswith(f"{node.name}::")):
                return f"{node.name}::{port}"
        return str(tensor.name)

    def label(self, tensor: FrontendTensor) -> str:
        """Return a tensor's first port and name, for messages."""
        for node, port, other in self._ports():
            if other is tensor:
                return self._entry(node, port, tensor)
        return str(tensor.name)

    def listing(self) -> str:
        """Return a list of the graph's tensors, for messages."""
        entries = [self._entry(node, port, tensor) for node, port, tensor in self._ports()]
        more = len(entries) - MOST_LISTED
        return f"The graph has {', '.join(entries[:MOST_LISTED]) or 'no tensors'}" + (f" and {more} more" if more > 0 else "")

    def _named(self, name: str) -> list[Any]:
        # A text can name the same tensor in several ways, so collect tensors by identity.
        found = {id(tensor): tensor for tensor in self._tensors.values() if tensor.name == name}
        if name in self._parameters:
            found[id(self._parameters[name])] = self._parameters[name]
        head, separator, tail = name.rpartition("::")
        if separator:
            for node, port, tensor in self._ports():
                if node.name == head and tail in (port, _keyword(node, port), _position(node, port)):
                    found[id(tensor)] = tensor
        return list(found.values())

    @staticmethod
    def _entry(node: FrontendNode, port: str, tensor: FrontendTensor) -> str:
        title = f"{node.name}::{_keyword(node, port)}"
        return title if tensor.name in (title, f"{node.name}::{port}") else f"{title} ({tensor.name})"

    def _ports(self, *, inputs: bool = True) -> Iterator[tuple[Any, str, Any]]:
        for node in self._nodes:
            ports = [*node.inputs.items(), *node.outputs.items()] if inputs else node.outputs.items()
            yield from ((node, port, tensor) for port, tensor in ports if tensor is not None)


def _position(node: FrontendNode, port: str) -> str | None:
    return str(list(node.inputs).index(port)) if port in node.inputs else None


def _keyword(node: FrontendNode, port: str) -> str:
    """Return a port's keyword in the method that made the node."""
    if node.node_type.name != "POINTWISE" or port not in node.inputs:
        return port
    mode = node.params["mode"]
    words = KEYWORDS.get(mode) or (("loss", "input") if mode.endswith("_backward") else ("input",))
    position = list(node.inputs).index(port)
    return words[position] if position < len(words) else port
