"""Evaluate the frontend's graph nodes with NumPy, as a list of steps.

The steps run on the host's streams. The workspace of a launch holds all tensors that are not operands: intermediate tensors, each
in a region of its own, and the unfolded input of the running convolution. A plan has no memory of its own, so it may run on many
streams at once. Two streams that share a workspace corrupt each other's results, as on a GPU.

The steps compute in float32, or in float64 if an operand has the type float64. A step rounds its result when it writes the
result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from handlepool.drivers.host.convolution import Array, Unfolding, accumulate, filter_matrix, flip, multiply
from handlepool.drivers.host.pointwise import OPERATIONS
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.tensors.graph_types import FrontendGraph, FrontendNode, FrontendTensor
from handlepool.tensors.inference import (
    Convolution,
    Shape,
    axis_order,
    concatenation_axis,
    dense_strides,
    infer,
    permutation,
    title,
)

ALIGNMENT = 256
COLUMN_BYTES = 128 << 20
"""The maximum number of bytes that a convolution unfolds at once.

This maximum also holds if there is no workspace limit.
"""

REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ADD": np.sum,
    "AMAX": lambda x, **over: np.max(np.abs(x), **over),
    "AVG": np.mean,
    "MAX": np.max,
    "MIN": np.min,
    "MUL": np.prod,
    "MUL_NO_ZEROS": lambda x, **over: np.prod(x, where=x != 0, **over),
    "NORM1": lambda x, **over: np.sum(np.abs(x), **over),
    "NORM2": lambda x, **over: np.sqrt(np.sum(x * x, **over)),
}
"""NumPy functions, by the name of the mode in `cudnn.reduction_mode`.

Each function takes a floating array, ``axis`` and ``keepdims``.
"""

Body = Callable[[Sequence[Array], Array], None]


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """A piece of work that a launch queues as one operation.

    `reads` and `writes` are indices of operands.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    body: Body = field(repr=False)

    def run(self, arrays: Sequence[Array], workspace: Array) -> None:
        """Run the step on the operands' arrays and a workspace.

        The arrays have the operands' shapes, and the workspace is uint8.
        """
        # A GPU does not warn of an overflow or a division by zero, so NumPy's warnings are off.
        with np.errstate(all="ignore"):
            self.body(arrays, workspace)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A planned graph.

    `steps` run in order, and work of other streams may run between two steps.
    """

    engine: str
    workspace_size: int
    steps: tuple[EvaluationStep, ...]

    def run(self, arrays: Sequence[Array], workspace: Array) -> None:
        """Run all steps at once."""
        for step in self.steps:
            step.run(arrays, workspace)


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """The place of a tensor: an operand, the workspace, or a constant."""

    shape: Shape
    dtype: np.dtype[Any]
    """The dtype of a workspace tensor or a constant.

    An operand has the dtype of its array instead.
    """
    operand: int | None = None
    offset: int = 0
    constant: float | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        return () if self.operand is None else (self.operand,)

    def view(self, arrays: Sequence[Array], workspace: Array) -> Array:
        if self.operand is not None:
            return arrays[self.operand]
        if self.constant is not None:
            return np.full(self.shape, self.constant, self.dtype)
        return self.view_as(self.shape, workspace)

    def view_as(self, shape: Shape, workspace: Array) -> Array:
        nbytes = math.prod(shape) * self.dtype.itemsize
        return workspace[self.offset : self.offset + nbytes].view(self.dtype).reshape(shape)


def plan(
    graph: FrontendGraph,
    operands: Sequence[Any],
    *,
    shapes: Mapping[int, Shape] | None = None,
    workspace_limit: int | None = None,
    exact: bool = False,
) -> Evaluation:
    """Plan a graph.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph. `handlepool.tensors.inference.infer` has marked its real outputs.
    operands : sequence of graph tensor
        The graph's real tensors in the order in which the arrays will come: inputs, then outputs.
    shapes : mapping, optional
        The result of `infer`.
    workspace_limit : int, optional
        Bytes. If a convolution does not fit in them, it is cut into parts.
    exact : bool
        Whether to compute in float64 for operands of any type.

    Raises
    ------
    GraphNotSupportedError
        For a node that the host driver cannot evaluate, or if even the smallest parts exceed the limit.
    ArgumentError
        For a real tensor that is not among ``operands``.
    """
    shapes = infer(graph, ()) if shapes is None else shapes
    return _Planner(graph, operands, shapes, workspace_limit, exact).evaluation()


class _Planner:
    def __init__(
        self, graph: FrontendGraph, operands: Sequence[Any], shapes: Mapping[int, Shape], workspace_limit: int | None, exact: bool
    ) -> None:
        self.graph = graph
        self.shapes = shapes
        self.limit = workspace_limit
        self.operands = {tensor.uid: i for i, tensor in enumerate(operands)}
        # One operand of double precision makes the whole graph compute in float64.
        double = exact or any(getattr(tensor.data_type, "name", "") == "DOUBLE" for tensor in operands)
        self.dtype = np.dtype(np.float64 if double else np.float32)
        self.places: dict[int, _TensorPlace] = {}
        # The offset in the workspace at which the next region begins.
        self.end = 0
        # The bytes of the workspace.
        self.size = 0
        self.steps: list[EvaluationStep] = []
        self.engines: set[str] = set()

    def evaluation(self) -> Evaluation:
        rules: Mapping[str, Callable[[Any], None]] = {
            "CONV_FPROP": self.fprop,
            "CONV_DGRAD": self.dgrad,
            "CONV_WGRAD": self.wgrad,
            "POINTWISE": self.pointwise,
            "MATMUL": self.matmul,
            "REDUCTION": self.reduction,
            "RESHAPE": self.reshape,
            "TRANSPOSE": self.transpose,
            "CONCATENATE": self.concatenate,
            "SDPA": self.attention,
        }
        nodes = self.graph.nodes
        totals: dict[int, _TensorPlace] = {}
        for node in nodes:
            if node.node_type.name not in rules:
                raise GraphNotSupportedError(
                    f"{title(node)}: the host driver cannot evaluate this kind of node; it knows convolutions, matmul, "
                    "pointwise operations, reductions, attention, reshape, transpose and concatenate. Run the graph on the cuda "
                    "driver"
                )
            self.place(node)
            # The sums over all tiles of a filter gradient need a region that no other work uses from the first tile to the last.
            if node.node_type.name == "CONV_WGRAD":
                totals[id(node)] = self.region(self.shapes[node.outputs["DW"].uid])
        self.totals = totals
        if self.limit is not None and self.size > self.limit:
            raise GraphNotSupportedError(
                f"the graph's intermediate tensors take {self.size} bytes of workspace, and the limit is {self.limit}; "
                "raise workspace_limit"
            )
        for node in nodes:
            rules[node.node_type.name](node)
        # The first engine in this list that the graph uses names the whole plan.
        engines = ("host_im2col", "host_attention", "host_matmul", "host_reduction", "host_pointwise", "host_copy")
        return Evaluation(next((name for name in engines if name in self.engines), engines[-1]), self.size, tuple(self.steps))

    # Memory

    def place(self, node: FrontendNode) -> None:
        for port, tensor in node.inputs.items():
            if tensor.uid in self.places:
                continue
            if tensor.uid in self.operands:
                self.places[tensor.uid] = _TensorPlace(self.shapes[tensor.uid], self.dtype, self.operands[tensor.uid])
            elif tensor.pass_by_value is not None:
                value = float(tensor.pass_by_value)
                self.places[tensor.uid] = _TensorPlace(self.shapes[tensor.uid], self.dtype, constant=value)
            else:
                raise ArgumentError(
                    f"{title(node)}: its {port} {tensor.name!r} is not among the graph's operands; add the tensor to them"
                )
        for port, tensor in node.outputs.items():
            if tensor.uid in self.operands:
                self.places[tensor.uid] = _TensorPlace(self.shapes[tensor.uid], self.dtype, self.operands[tensor.uid])
            elif tensor.is_virtual:
                self.places[tensor.uid] = self.region(self.shapes[tensor.uid])
            else:
                raise ArgumentError(
                    f"{title(node)}: its output {port} {tensor.name!r} is not among the operands; add this tensor"
                )

    def region(self, shape: Shape) -> _TensorPlace:
        place = _TensorPlace(shape, self.dtype, offset=self.end)
        self.size = self.end + math.prod(shape) * self.dtype.itemsize
        # The next region begins at an aligned offset.
        self.end = -(-self.size // ALIGNMENT) * ALIGNMENT
        return place

    def columns(self, node: FrontendNode, unfolding: Unfolding) -> tuple[_TensorPlace, list[Any]]:
        """Return the region of a convolution's columns, and its tiles.

        All convolutions of the graph share the region. The columns of each tile fit in the region.
        """
        least = unfolding.elements_per_row * self.dtype.itemsize
        # The columns lie behind the regions of all nodes, and may use the rest of the workspace limit.
        room = COLUMN_BYTES if self.limit is None else min(COLUMN_BYTES, self.limit - self.end)
        if self.limit is not None and self.end + least > self.limit:
            raise GraphNotSupportedError(
                f"{title(node)}: the node needs at least {self.end + least} bytes of workspace ({self.end} for intermediate "
                f"tensors, {least} to unfold one row of one image), and the limit is {self.limit}; raise workspace_limit"
            )
        tiles = unfolding.tiles(room // self.dtype.itemsize)
        most = max(math.prod(unfolding.columns(tile)) for tile in tiles)
        self.size = max(self.size, self.end + most * self.dtype.itemsize)
        return _TensorPlace((most,), self.dtype, offset=self.end), tiles

    # Nodes

    def step(self, name: str, reads: Sequence[_TensorPlace], writes: Sequence[_TensorPlace], body: Body) -> None:
        self.steps.append(
            EvaluationStep(
                name,
                tuple(index for place in reads for index in place.operands),
                tuple(index for place in writes for index in place.operands),
                body,
            )
        )

    def ports(self, node: FrontendNode, *names: str) -> list[_TensorPlace]:
        return [self.places[(node.inputs if name in node.inputs else node.outputs)[name].uid] for name in names]

    def fprop(self, node: FrontendNode) -> None:
        image, weight, output = self.ports(node, "image", "weight", "Y")
        self.convolve(node, image, weight, output, weight.shape, transposed=False)

    def dgrad(self, node: FrontendNode) -> None:
        loss, weight, output = self.ports(node, "loss", "filter", "DX")
        self.convolve(node, loss, weight, output, weight.shape, transposed=True)

    def convolve(
        self,
        node: FrontendNode,
        source: _TensorPlace,
        weight: _TensorPlace,
        output: _TensorPlace,
        filters: Shape,
        *,
        transposed: bool,
    ) -> None:
        channels = (output if transposed else source).shape[1]
        unfolding = Unfolding(
            Convolution.of(node, len(filters)),
            channels // filters[1],
            source.shape,
            output.shape[2:],
            filters[2:],
            transposed,
        )

        def finish(tile: Any, columns: Array, arrays: Sequence[Array], workspace: Array) -> None:
            matrix = filter_matrix(weight.view(arrays, workspace), unfolding, self.dtype)
            multiply(matrix, columns, output.view(arrays, workspace), tile)

        self.unfolded(node, unfolding, source, weight, output, finish)

    def wgrad(self, node: FrontendNode) -> None:
        image, loss, output = self.ports(node, "image", "loss", "DW")
        filters = output.shape
        geometry = Convolution.of(node, len(filters))
        groups = image.shape[1] // filters[1]
        unfolding = Unfolding(geometry, groups, image.shape, loss.shape[2:], filters[2:])
        total = self.totals[id(node)]
        grouped = (groups, filters[0] // groups, math.prod(filters[1:]))
        tiles: list[Any] = []

        def finish(tile: Any, columns: Array, arrays: Sequence[Array], workspace: Array) -> None:
            sums = total.view_as(grouped, workspace)
            # The workspace holds old data, so the first tile clears the sums.
            if tile is tiles[0]:
                sums[...] = 0
            accumulate(loss.view(arrays, workspace), columns, sums, tile)
            if tile is tiles[-1]:
                output.view(arrays, workspace)[...] = flip(sums.reshape(filters), geometry)

        tiles += self.unfolded(node, unfolding, image, loss, output, finish)

    def unfolded(
        self,
        node: FrontendNode,
        unfolding: Unfolding,
        source: _TensorPlace,
        factor: _TensorPlace,
        output: _TensorPlace,
        finish: Callable[[Any, Array, Sequence[Array], Array], None],
    ) -> list[Any]:
        """Add two steps per tile: unfold ``source``, then call ``finish``.

        The first step writes the columns, and ``finish`` reads them.
        """
        self.engines.add("host_im2col")
        columns, tiles = self.columns(node, unfolding)
        for number, tile in enumerate(tiles, 1):
            part = f" {number}/{len(tiles)}" if len(tiles) > 1 else ""
            shape = unfolding.columns(tile)

            def unfold(arrays: Sequence[Array], workspace: Array, tile: Any = tile, shape: Shape = shape) -> None:
                unfolding.gather(source.view(arrays, workspace), columns.view_as(shape, workspace), tile)

            def reduce(arrays: Sequence[Array], workspace: Array, tile: object = tile, shape: Shape = shape) -> None:
                finish(tile, columns.view_as(shape, workspace), arrays, workspace)

            self.step(f"{node.name}: unfold{part}", [source], [], unfold)
            self.step(f"{node.name}: multiply{part}", [factor], [output], reduce)
        return tiles

    def pointwise(self, node: FrontendNode) -> None:
        mode = node.params["mode"]
        operation = OPERATIONS.get(mode)
        if operation is None:
            raise GraphNotSupportedError(
                f"{title(node)}: the host driver lacks this pointwise operation; run the graph on the cuda driver"
            )
        self.engines.add("host_pointwise")
        sources = [self.places[tensor.uid] for tensor in node.inputs.values()]
        (output,) = self.ports(node, "OUT_0")
        rank, params = len(output.shape), dict(node.params)

        def compute(arrays: Sequence[Array], workspace: Array) -> None:
            inputs = [np.asarray(source.view(arrays, workspace), self.dtype) for source in sources]
            # A scalar input gets as many axes as the output, so that NumPy broadcasts the scalar along all axes.
            inputs = [x if x.ndim == rank else x.reshape((1,) * rank) for x in inputs]
            output.view(arrays, workspace)[...] = operation(params, *inputs)

        self.step(node.name, sources, [output], compute)

    def matmul(self, node: FrontendNode) -> None:
        self.engines.add("host_matmul")
        a, b, output = self.ports(node, "A", "B", "C")

        def compute(arrays: Sequence[Array], workspace: Array) -> None:
            factors: list[Any] = [np.asarray(place.view(arrays, workspace), self.dtype) for place in (a, b)]
            output.view(arrays, workspace)[...] = np.matmul(*factors)

        self.step(node.name, [a, b], [output], compute)

    def attention(self, node: FrontendNode) -> None:
        known = {"attn_scale", "use_causal_mask", "generate_stats", "is_inference"}
        more = sorted({*node.params} - known | {*node.inputs} - {"q", "k", "v", "bias"})
        more += [name for name, tensor in node.outputs.items() if name != "O" and tensor is not None]
        if more:
            raise GraphNotSupportedError(
                f"{title(node)}: the host driver does not support {', '.join(more)}; run the graph on the cuda driver"
            )
        self.engines.add("host_attention")
        q, k, v, output = self.ports(node, "q", "k", "v", "O")
        biases = self.ports(node, "bias") if "bias" in node.inputs else []
        scale = node.params.get("attn_scale")
        factor = self.dtype.type(1 if scale is None else scale)
        causal = bool(node.params.get("use_causal_mask"))

        def compute(arrays: Sequence[Array], workspace: Array) -> None:
            queries, keys, values = (np.asarray(place.view(arrays, workspace), self.dtype) for place in (q, k, v))
            scores = np.matmul(queries, keys.swapaxes(-1, -2)) * factor
            for bias in biases:
                scores += bias.view(arrays, workspace)
            if causal:
                # A query must not see later keys, and exp(-inf) is 0.
                scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
            # Subtracting the maximum keeps the exponentials from overflowing.
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            output.view(arrays, workspace)[...] = np.matmul(scores, values)

        self.step(node.name, [q, k, v, *biases], [output], compute)

    def reduction(self, node: FrontendNode) -> None:
        reduce = REDUCTIONS.get(node.params["mode"].name)
        if reduce is None or "group_offset" in node.inputs:
            what = f"mode {node.params['mode'].name}" if reduce is None else "group_offset"
            raise GraphNotSupportedError(f"{title(node)}: the host driver has no {what}; run the graph on the cuda driver")
        self.engines.add("host_reduction")
        source, output = self.ports(node, "input", "OUT_0")
        axes = tuple(axis for axis, extent in enumerate(source.shape) if extent != output.shape[axis])

        def compute(arrays: Sequence[Array], workspace: Array) -> None:
            x = np.asarray(source.view(arrays, workspace), self.dtype)
            output.view(arrays, workspace)[...] = reduce(x, axis=axes, keepdims=True)

        self.step(node.name, [source], [output], compute)

    def reshape(self, node: FrontendNode) -> None:
        if getattr(node.params.get("reshape_mode"), "name", "") == "LOGICAL":
            orders = [tuple(range(len(place.shape))) for place in self.ports(node, "input", "OUT_0")]
        else:
            orders = [self.order(node, tensor) for tensor in (node.inputs["input"], node.outputs["OUT_0"])]

        def move(output: Array, source: Array) -> None:
            turned = output.transpose(orders[1])
            turned[...] = source.transpose(orders[0]).reshape(turned.shape)

        self.move(node, move)

    def order(self, node: FrontendNode, tensor: FrontendTensor) -> Shape:
        """Return the order of a tensor's axes in memory.

        A reshape that is a view takes the elements in the order of memory. So the tensor must be dense and its strides known.
        """
        shape, strides = self.shapes[tensor.uid], tuple(tensor.stride)
        if tensor.is_virtual and not tensor.stride_assigned:
            raise GraphNotSupportedError(
                f"{title(node)}: this reshape is a view of memory, and cuDNN chooses the strides of {tensor.name!r}; call "
                "set_stride on that tensor, or pass reshape_mode=cudnn.reshape_mode.LOGICAL"
            )
        order = axis_order(shape, strides)
        dense = dense_strides(shape, order)
        # The stride of an axis of extent 1 is never used, so it may have any value.
        if any(extent > 1 and step != tight for extent, step, tight in zip(shape, strides, dense, strict=True)):
            raise GraphNotSupportedError(
                f"{title(node)}: this reshape is a view of memory, and {tensor.name!r}, of shape {shape} with strides {strides}, "
                f"has gaps; pass reshape_mode=cudnn.reshape_mode.LOGICAL"
            )
        return order

    def transpose(self, node: FrontendNode) -> None:
        axes = permutation(node, len(self.shapes[node.inputs["input"].uid]))

        def move(output: Array, source: Array) -> None:
            output[...] = source.transpose(axes)

        self.move(node, move)

    def concatenate(self, node: FrontendNode) -> None:
        axis = concatenation_axis(node, len(self.shapes[node.outputs["OUT_0"].uid]))

        def move(output: Array, *sources: Array) -> None:
            start = 0
            for source in sources:
                stop = start + source.shape[axis]
                output[(*(slice(None),) * axis, slice(start, stop))] = source
                start = stop

        self.move(node, move)

    def move(self, node: FrontendNode, move: Callable[..., None]) -> None:
        """Add a step that only copies elements.

        The copy may convert the elements to the output's type. It computes nothing else.
        """
        self.engines.add("host_copy")
        sources = [self.places[tensor.uid] for tensor in node.inputs.values()]
        (output,) = self.ports(node, "OUT_0")

        def copy(arrays: Sequence[Array], workspace: Array) -> None:
            move(output.view(arrays, workspace), *(source.view(arrays, workspace) for source in sources))

        self.step(node.name, sources, [output], copy)
