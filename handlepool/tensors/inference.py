"""Our own rules for the shape of every tensor of a graph, and for the shape, strides and type of every real output.

Both drivers apply them before they compile. Three reasons stand behind rules of our own: the frontend infers on
`validate`, which without a GPU raises and freezes the graph; it lets mismatched channels pass; and it hands the backend
only strides that were *assigned*, so an output without them comes back channels-last whatever the input's layout was.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.tensors.shapes import MERGED, MOST_AXES, MOST_ELEMENTS, RULES, Shape, title


def axis_order(shape: Sequence[int], strides: Sequence[int]) -> Shape:
    """Return the axes from the outermost to the innermost in memory.

    Axes of extent 1 or stride 0 say nothing about the order. An array that they leave open counts as row-major if it
    can be that, and as channels-last (N, spatial axes, C) if it can be that and not row-major.

    Parameters
    ----------
    shape, strides : sequence of int
        Strides in elements, or in any other unit.

    Returns
    -------
    tuple of int
        A permutation of the axes, as `dense_strides` takes it.
    """
    rank = len(shape)
    telling = [axis for axis in range(rank) if shape[axis] > 1 and strides[axis] != 0]
    order = sorted(telling, key=lambda axis: -strides[axis])  # stable: equal strides keep the axes' own order
    for candidate in (tuple(range(rank)), (0, *range(2, rank), 1)):
        if rank > 1 and order == [axis for axis in candidate if axis in telling]:
            return candidate
    for axis in range(rank):
        if axis not in telling:
            order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    return tuple(order)


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> Shape:
    """Return the strides, in elements, of an array without gaps.

    Parameters
    ----------
    shape : sequence of int
    order : sequence of int, optional
        The axes from the outermost to the innermost; row-major by default.
    """
    strides = [1] * len(shape)
    step = 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def infer(graph: Any, outputs: Iterable[Any], *, io_dtype: Any = None) -> dict[int, Shape]:
    """Give every tensor of a graph its shape, and make ``outputs`` real, with shape, strides and type.

    Does not call ``graph.validate()``; needs no GPU and no libcudnn. What the caller assigned (`set_dim`, `set_stride`,
    `set_data_type`) stays, and is checked against what the node computes. Strides that were not assigned are dense, in
    the axis order of the first real tensor that the output is made of (through first inputs); of a pointwise node's
    inputs the first with the output's own shape counts. What `matmul` returns is row-major.

    Parameters
    ----------
    graph : cudnn.pygraph
        Changed in place; must not be frozen.
    outputs : iterable of graph tensor
        The tensors that are to be written to memory.
    io_dtype : cudnn.data_type, optional
        The type of outputs that have none; the graph's own ``io_data_type`` by default.

    Returns
    -------
    dict
        The shape of every tensor of the graph, by ``uid``.

    Raises
    ------
    ArgumentError
        For shapes or parameters that no call could succeed with. The message names the node, the shapes and the remedy.
    GraphNotSupportedError
        For a node of a kind without a rule, whose output has no shape of its own.
    """
    shapes: dict[int, Shape] = {}
    orders: dict[int, Shape] = {}
    made: dict[int, Any] = {}
    for node in graph.nodes:
        for port, tensor in node.inputs.items():
            if tensor.uid not in shapes:
                shapes[tensor.uid] = _input_shape(node, port, tensor)
                orders[tensor.uid] = axis_order(tensor.dim, tensor.stride)
        for port, tensor in node.outputs.items():
            if tensor is not None:
                made[tensor.uid] = tensor
                shapes[tensor.uid] = _output_shape(node, port, tensor, shapes)
                orders[tensor.uid] = _output_order(node, tensor, shapes, orders)
    seen: set[int] = set()
    for tensor in outputs:
        uid = getattr(tensor, "uid", -1)
        if made.get(uid) is not tensor or tensor is None:
            raise ArgumentError(
                f"{getattr(tensor, 'name', tensor)!r} is made by no node of this graph, so it cannot be an output; "
                "return what an operation returned (an input can be passed through g.identity)"
            )
        if uid in seen:
            raise ArgumentError(f"tensor {tensor.name!r} is named twice among the outputs; name it once")
        seen.add(uid)
        _make_real(tensor, shapes[uid], orders[uid], graph.context.io_data_type if io_dtype is None else io_dtype)
    return shapes


def _make_real(tensor: Any, shape: Shape, order: Shape, dtype: Any) -> None:
    tensor.set_output(True)
    if not tensor.dim_assigned:
        tensor.set_dim(list(shape))
    if not tensor.stride_assigned:
        tensor.set_stride(list(dense_strides(shape, order)))
    if tensor.data_type is None:
        if dtype is None:
            raise ArgumentError(
                f"output {tensor.name!r} has no type; call set_data_type on it, or give the graph an io_data_type"
            )
        tensor.set_data_type(dtype)


def _input_shape(node: Any, port: str, tensor: Any) -> Shape:
    shape = tuple(tensor.dim)
    if tensor.is_virtual:
        raise ArgumentError(f"{title(node)}: its {port} {tensor.name!r} is virtual, but no node before it makes it")
    most = MOST_AXES if node.node_type.name not in MERGED else len(shape)
    if not 1 <= len(shape) <= most or min(shape) < 1 or len(tensor.stride) != len(shape):
        raise ArgumentError(
            f"{title(node)}: its {port} {tensor.name!r} has shape {shape} and strides {tuple(tensor.stride)}; "
            f"give 1 to {MOST_AXES} axes, a stride for each, and no empty axis"
        )
    return shape


def _output_shape(node: Any, port: str, tensor: Any, shapes: dict[int, Shape]) -> Shape:
    declared = tuple(tensor.dim)
    rule = RULES.get(node.node_type.name)
    if rule is not None:
        inputs = {name: shapes[source.uid] for name, source in node.inputs.items()}
        shape = rule(node, inputs, declared, tensor.dim_assigned)
    elif declared:
        shape = declared
    else:
        raise GraphNotSupportedError(
            f"{title(node)}: handlepool has no shape rule for this kind of node; call set_dim on its output {port}"
        )
    if tensor.dim_assigned and declared != shape:
        raise ArgumentError(
            f"{title(node)}: its output {port} was declared with shape {declared}, but comes out as {shape}; "
            "drop the set_dim or correct it"
        )
    if tensor.stride_assigned and len(tensor.stride) != len(shape):
        raise ArgumentError(
            f"{title(node)}: its output {port} of shape {shape} was given strides {tuple(tensor.stride)}; one per axis"
        )
    if (elements := math.prod(shape)) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{title(node)}: its output {port} of shape {shape} has {elements:,} elements, and cuDNN's tensors have at most "
            f"{MOST_ELEMENTS:,}; compute it in parts"
        )
    return shape


def _output_order(node: Any, tensor: Any, shapes: dict[int, Shape], orders: dict[int, Shape]) -> Shape:
    shape = shapes[tensor.uid]
    if tensor.stride_assigned:
        return axis_order(shape, tensor.stride)
    sources = [t.uid for t in node.inputs.values() if len(shapes[t.uid]) == len(shape) and not t.is_pass_by_value]
    if not sources or node.node_type.name == "MATMUL":
        return tuple(range(len(shape)))
    if node.node_type.name == "POINTWISE":
        return orders[next((uid for uid in sources if shapes[uid] == shape), sources[0])]
    return orders[sources[0]]
