"""What a plan is known by beyond its process: its graph, what was asked for, and what it was made for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def plan_key(graph: Any, operands: Sequence[Any], settings: Mapping[str, Any], made_for: Mapping[str, Any]) -> str:
    """Return the key of a graph's plan, as text.

    Parameters
    ----------
    graph : cudnn.pygraph
        With every tensor's geometry, not compiled yet.
    operands : sequence of graph tensor
        In the order in which a launch gets them.
    settings : mapping
        What the driver is asked for. Which of the candidates it is makes no difference: the key is that of the one in use.
    made_for : mapping
        As of `handlepool.drivers.protocol.Driver.made_for`.
    """
    places: dict[int, int] = {}
    tensors: list[list[Any]] = []

    def place(tensor: Any) -> int:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            kind, value = getattr(tensor.data_type, "name", None), getattr(tensor, "pass_by_value", None)
            tensors.append([kind, tensor.dim, tensor.stride, tensor.is_virtual, tensor.uid, value])
        return places[id(tensor)]

    named = {
        "operands": [place(tensor) for tensor in operands],
        "nodes": [
            [
                node.node_type.name,
                getattr(node.compute_data_type, "name", None),
                {name: place(tensor) for name, tensor in node.inputs.items()},
                {name: place(tensor) for name, tensor in node.outputs.items()},
                node.params,
            ]
            for node in graph.nodes
        ],
        "tensors": tensors,
        "types": [getattr(kind, "name", None) for kind in vars(graph.context).values()],
        "settings": {name: value for name, value in settings.items() if name != "plan_index"},
        "made for": made_for,
    }
    return json.dumps(named, sort_keys=True, separators=(",", ":"), default=str)
