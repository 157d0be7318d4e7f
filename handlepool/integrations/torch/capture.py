"""Take a model's functional graph for given arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from handlepool.integrations.torch.refusals import NotTaken


@dataclass(eq=False)
class Captured:
    """A functional graph of aten's operations.

    Attributes
    ----------
    graph : Graph
    weights : dict of Node to Tensor
        The placeholders that stand for parameters, buffers and constants.
    inputs : list of Node or None
        The placeholder for each leaf of the arguments; None for a value that is built in.
    outputs : list of Node or plain
        The leaves of the value.
    structure : TreeSpec
        Of the value.
    writes : list of (Node, Tensor or int)
        New values of tensors that the model writes: a buffer, or an argument by its place among the leaves.
    """

    graph: fx.Graph
    weights: dict[fx.Node, Tensor]
    inputs: list[fx.Node | None]
    outputs: list[Any]
    structure: Any
    writes: list[tuple[fx.Node, Any]]


def captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Return the graph of a model.

    It has the shapes of the arguments built in, and the values of numbers and text.

    Raises
    ------
    NotTaken
        If the model cannot be traced, as where its control flow depends on values.
    """
    try:
        # An inference tensor cannot be traced outside of inference mode, and exported programs refuse it inside.
        with torch.inference_mode(False), torch.no_grad():
            program = torch.export.export(model, args, kwargs, strict=False)
            # Without a table, operations stay whole that torch would decompose, as attention and layer_norm.
            program = program.run_decompositions({})
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise NotTaken(f"torch cannot trace it ({type(error).__name__}: {text[:200]})") from error
    return _sorted(program, args, kwargs)


def _sorted(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Sort a program's inputs and outputs by their kinds."""
    graph: fx.Graph = program.graph
    signature = program.graph_signature
    nodes = {node.name: node for node in graph.nodes}
    tensors = {**program.state_dict, **program.constants}
    weights: dict[fx.Node, Tensor] = {}
    inputs: list[fx.Node | None] = []
    for each in signature.input_specs:
        node = nodes.get(getattr(each.arg, "name", ""))
        if each.kind is InputKind.USER_INPUT:
            inputs.append(node if node is not None and isinstance(node.meta.get("val"), Tensor) else None)
        elif each.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and node is not None:
            weights[node] = tensors[each.target]
        else:
            raise NotTaken(f"it has an input of the kind {each.kind.name}")
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs: list[Any] = []
    writes: list[tuple[fx.Node, Any]] = []
    places = {node.name: place for place, node in enumerate(inputs) if node is not None}
    for each, value in zip(signature.output_specs, output.args[0], strict=True):
        if each.kind is OutputKind.USER_OUTPUT:
            outputs.append(value)
        elif each.kind is OutputKind.BUFFER_MUTATION:
            writes.append((value, tensors[each.target]))
        elif each.kind is OutputKind.USER_INPUT_MUTATION:
            writes.append((value, places[each.target]))
        else:
            raise NotTaken(f"it has an output of the kind {each.kind.name}")
    return Captured(graph, weights, inputs, outputs, program.call_spec.out_spec, writes)
