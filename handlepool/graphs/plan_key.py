"""Make keys that identify a plan in every process.

A key covers the graph, the settings, and the environment that the plan was made for.
"""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from handlepool.tensors.graph_types import FrontendTensor

_NO_MATTER = ("name", "owner", "uid_assigned")
"""Attributes of a tensor that no plan depends on."""
_MOST_INTEGERS = 64
"""The maximum number of elements of an integer array in a key.

Such an array is a padding, for example. A graph with a larger array gets no key, because such an array counts as data.
"""


def plan_key(graph: Any, operands: Sequence[Any], settings: Mapping[str, Any], plan_environment: str) -> str:
    """Return the key of a graph's plan, as JSON.

    The key is "" for a graph that no text identifies, such as a graph with a callback.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph, not compiled yet, with the geometry of every tensor.
    operands : sequence of graph tensor
        Operands in the order of a launch.
    settings : mapping
        Settings for the driver. The key leaves ``plan_index`` out, because a plan directory keeps one plan for a graph,
        whichever candidate it is.
    plan_environment : str
        The result of `handlepool.drivers.protocol.Driver.plan_environment`.
    """
    places: dict[int, int] = {}
    tensors: list[list[Any]] = []

    def place(tensor: FrontendTensor) -> int:
        if id(tensor) not in places:
            index = places[id(tensor)] = len(tensors)
            tensors.append([])
            # The tensor got its number above, so that its ragged offset, which is a tensor as well, gets the next number.
            behind = tensor.ragged_offset
            told = [value for name, value in vars(tensor).items() if name not in _NO_MATTER and name != "ragged_offset"]
            tensors[index] = [*told, None if behind is None else place(behind)]
        return places[id(tensor)]

    named = {
        "operands": [place(tensor) for tensor in operands],
        "nodes": [
            [
                node.node_type.name,
                node.compute_data_type,
                {name: place(tensor) for name, tensor in node.inputs.items()},
                {name: place(tensor) for name, tensor in node.outputs.items()},
                node.params,
            ]
            for node in graph.nodes
        ],
        "tensors": tensors,
        "types": [*vars(graph.context).values()],
        # The graph function may set these values by methods of the graph. The frontend has them only in private attributes.
        "excluded": [sorted(map(str, graph._barred_names)), graph._workspace_limit, graph._note_filters],  # noqa: SLF001
        "settings": {name: value for name, value in settings.items() if name != "plan_index"},
    }
    try:
        text = _AS_TEXT.encode(named)
    # A value without a JSON form leaves the graph without a key.
    except (TypeError, ValueError):
        return ""
    return f'{text[:-1]},"made for":{plan_environment}}}'


def _exactly(value: object) -> Any:
    """Return a JSON form of a value that JSON does not know.

    Two different values never have the same form.
    """
    if isinstance(value, Enum):
        return str(value)
    # The text of a NumPy number leaves digits out, so encode the Python number.
    if isinstance(value, np.generic) and isinstance(number := value.item(), (int, float)):
        return [type(value).__name__, number]
    if isinstance(value, slice):
        return ["slice", value.start, value.stop, value.step]
    if type(value) is np.ndarray and value.dtype.kind in "iu" and value.size <= _MOST_INTEGERS:
        return ["ndarray", value.dtype.str, value.shape, value.tolist()]
    raise TypeError(value)


_AS_TEXT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_exactly)
