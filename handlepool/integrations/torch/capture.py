"""Trace a model for given arguments, as a functional graph."""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from handlepool.integrations.torch.refusals import NotTaken
from handlepool.integrations.torch.weights import Snapshot

pytree = torch.utils._pytree


@dataclass(eq=False)
class Captured:
    """A functional graph: aten operations that write nothing in place.

    Attributes
    ----------
    graph : Graph
    weights : dict of Node to Tensor
        The tensor of each placeholder that stands for a parameter, a buffer or a constant.
    inputs : list of Node or None
        The placeholder for each leaf of the arguments; None for a leaf whose value is built into the graph.
    outputs : list of Node or plain
        The leaves of the model's value.
    structure : TreeSpec
        The nesting of these leaves in the model's value.
    writes : list of (Node, Tensor or int)
        Each tensor that the model writes, with the node of its new value. A written buffer is given as the tensor itself, a
        written argument as its index among the leaves of the arguments.
    """

    graph: fx.Graph
    weights: dict[fx.Node, Tensor]
    inputs: list[fx.Node | None]
    outputs: list[Any]
    structure: Any
    writes: list[tuple[fx.Node, Any]]


def captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Trace a model, and return its functional graph.

    The shapes of the arguments are built into the graph, and so are the values of numbers and texts.

    Raises
    ------
    NotTaken
        If the model cannot be traced, for example because its control flow depends on values.
    """
    # During tracing, torch's export replaces the weights of modules by fake tensors, and other threads may run the model
    # meanwhile. So copies of the modules are traced. The copies share the weights with the model.
    try:
        copied = copy.deepcopy(model, {id(each): each for each in _tensors(model)})
    except Exception as error:
        raise NotTaken(f"the model's modules cannot be copied ({type(error).__name__}: {error})") from error
    before = Snapshot([each.__dict__ for each in copied.modules()])
    args, kwargs = apart((args, kwargs))
    try:
        # With inference mode off, torch cannot trace an inference tensor; with the mode on, the exported program refuses such a
        # tensor. So the mode is off here, and a model with inference tensors is left to torch.
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            # Torch's export warns of code in torch itself, which users cannot change.
            warnings.simplefilter("ignore")
            program = torch.export.export(copied, args, kwargs, strict=False)
            # With an empty table, torch decomposes no operation. So attention, layer_norm and the like stay single operations.
            program = program.run_decompositions({})
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise NotTaken(f"torch cannot trace the model ({type(error).__name__}: {text[:200]})") from error
    if before.restore():
        raise NotTaken("the model changes attributes of its modules, and a recorded program would not repeat these changes")
    return _sorted(program)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of a model's modules.

    Tensors in containers, such as lists, are included.
    """
    yield from (*model.parameters(), *model.buffers())
    for module in model.modules():
        for value in module.__dict__.values():
            yield from (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


def apart(values: Any) -> Any:
    """Return ``values``, with copies in place of tensors that share memory.

    If several tensors share memory, the first tensor stays, and a copy takes the place of each later tensor. Without the
    copies, tracing would treat a tensor that is given twice as one argument, and a recorded function would refuse the call.
    """
    seen: set[int] = set()

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage().data_ptr()
        if storage in seen and storage:
            return value.clone(memory_format=torch.preserve_format)
        seen.add(storage)
        return value

    return pytree.tree_map(one, values)


def _sorted(program: Any) -> Captured:
    """Return the `Captured` of an exported program.

    The function sorts the inputs and outputs by their kinds.
    """
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
            raise NotTaken(f"the model's graph has an input of the kind {each.kind.name}, which handlepool does not know")
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
            raise NotTaken(f"the model's graph has an output of the kind {each.kind.name}, which handlepool does not know")
    return Captured(graph, weights, inputs, outputs, program.call_spec.out_spec, writes)
