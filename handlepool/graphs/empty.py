"""Plan calls with empty arrays.

The pool handles such calls, so that no driver gets an extent of 0. These rules hold for every call:

- A result without elements launches nothing.
- A sum over no elements is 0, as in torch. So a convolution, a gradient or a matrix product over an empty axis writes zeros.
- An empty array contributes nothing to a concatenation.
- Any other call with an empty array is refused if its result has elements.
"""

from collections.abc import Callable, Sequence
from typing import Any

from handlepool.drivers.executable import Executable
from handlepool.drivers.streams import Handle
from handlepool.errors import GraphNotSupportedError
from handlepool.tensors.graph_types import FrontendGraph
from handlepool.tensors.inference import title
from handlepool.tensors.layout import Layout

_SUMS = ("CONV_FPROP", "CONV_DGRAD", "CONV_WGRAD", "MATMUL")
"""Kinds of nodes that give 0 if they sum over no elements."""
_TYPES = ("float16", "bfloat16", "float32")
"""Types that the kernel can fill with zeros, by NumPy's names."""


class WithoutEmpty:
    """An executable for a call with an empty array.

    The launch passes ``inner`` the operands that have elements. Without ``inner``, nothing is launched.

    Parameters
    ----------
    name : str
        Name of the function, for messages.
    titles : sequence of str
        Names of the operands, for messages.
    inner : Executable, optional
        The executable to launch, if any.
    places : sequence of int
        Places of the operands that ``inner`` takes.
    """

    workspace_size = 0
    candidates = 0
    untried = False

    def __init__(self, name: str, titles: Sequence[str], inner: Executable | None = None, places: Sequence[int] = ()) -> None:
        self.name, self.titles = name, titles
        self.engine = "nothing" if inner is None else inner.engine
        self._inner = inner
        self._places = tuple(places)

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Launch the inner executable with the operands that have elements.

        See `handlepool.drivers.executable.Executable.launch`.
        """
        if self._inner is None:
            return

        # ``check`` expects an address for each operand of the plan, so give an empty operand the address 0.
        def check_all(addresses: Sequence[int]) -> None:
            every = [0] * len(operands)
            for place, address in zip(self._places, addresses, strict=False):
                every[place] = address
            assert check is not None
            check(every)

        self._inner.launch(handle, [operands[place] for place in self._places], workspace, None if check is None else check_all)

    def shortcut(self, *_: object) -> None:
        """Return None, because this executable has no shortcut."""

    def save(self) -> None:
        """Return None, because making this executable again needs no planning."""


def without_empty(
    graph: FrontendGraph,
    inputs: int,
    outputs: Sequence[Layout],
    name: str,
    titles: Sequence[str],
    zeros: Callable[[Layout, str], Executable],
) -> WithoutEmpty:
    """Return the executable of a graph with an empty operand.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph, with inferred shapes.
    inputs : int
        Number of inputs.
    outputs : sequence of Layout
    name : str
        Name of the function, for messages.
    titles : sequence of str
        Names of the operands, for messages.
    zeros : callable
        Makes the kernel that fills an array with zeros, from a layout and a title.

    Raises
    ------
    GraphNotSupportedError
        If the result has elements, unless the graph is a single node of `_SUMS` whose result has one of the `_TYPES`.
    """
    if not any(layout.size for layout in outputs):
        return WithoutEmpty(name, titles)
    nodes = graph.nodes
    # A later node may turn the zeros of a sum into other values, so only a single sum is certain to give zeros.
    if len(nodes) > 1 or nodes[0].node_type.name not in _SUMS or outputs[0].dtype.name not in _TYPES:
        raise GraphNotSupportedError(
            f"an array is empty and the result of {title(nodes[-1])} has elements, in shape {outputs[0].shape}: only a single "
            f"convolution or matrix product in {', '.join(_TYPES)} takes such an array. Make the node with the empty array a "
            "graph function of its own"
        )
    return WithoutEmpty(name, titles, zeros(outputs[0], titles[inputs]), (inputs,))
