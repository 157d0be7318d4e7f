"""Infer the shape of every tensor, and the layout of real outputs.

A real tensor lies in memory. A virtual tensor exists only between nodes. The rules give a real output its shape, strides and
type. Both drivers apply the rules before they compile.

The frontend also infers shapes, in `validate`, but this package has its own rules for three reasons. Without a GPU, `validate`
raises and freezes the graph. The frontend accepts mismatched channels. The frontend passes only *assigned* strides to cuDNN, so
an output without assigned strides is always channels-last, whatever the layout of the input.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.tensors.graph_types import FrontendNode, FrontendTensor

Shape = tuple[int, ...]
MOST_AXES = 8
"""The maximum number of axes of a tensor, CUDNN_DIM_MAX in cuDNN."""
MERGED = ("POINTWISE", "MATMUL")
"""Kinds of nodes whose tensors may have any number of axes.

`handlepool.graphs.forms` merges the axes of these tensors before cuDNN gets the graph.
"""
MOST_ELEMENTS = 2**31 - 1
"""The maximum number of elements of a tensor, gaps and padding included.

A signed 32-bit integer counts up to this number. cuDNN's documentation limits a tensor with its gaps to two giga-elements
(cudnnSetTensorNdDescriptor). From cuDNN 9.3 on some engines take more elements, and some of these engines compute wrong results
(PyTorch's issue #152816).
"""


def title(node: FrontendNode) -> str:
    """Return a node's name and kind, for messages."""
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return f"node {node.name!r} ({kind})"


@dataclass(frozen=True, slots=True)
class Convolution:
    """The parameters of a convolution node, for each spatial axis.

    `before` and `after` are the padding at both ends of each axis. With `flipped`, the node computes the mathematical
    convolution. Without `flipped`, it computes the correlation that neural networks call convolution.
    """

    before: Shape
    after: Shape
    stride: Shape
    dilation: Shape
    flipped: bool

    @classmethod
    def of(cls, node: FrontendNode, rank: int) -> "Convolution":
        """Read and check the parameters of a convolution node.

        The node's tensors have ``rank`` axes.

        Raises
        ------
        ArgumentError
            For a parameter that is no list of ``rank - 2`` integers, and for an entry that is out of range.
        """
        params, what = node.params, title(node)
        pre, post = params.get("pre_padding"), params.get("post_padding")
        if (pre is None) != (post is None) or (pre is not None and params.get("padding") is not None):
            raise ArgumentError(f"{what}: give either padding, or pre_padding and post_padding together")

        def entries(name: str, default: int) -> Shape:
            value = params.get(name)
            if value is None:
                return (default,) * (rank - 2)
            try:
                result = tuple(map(as_integer, value))
            except TypeError:
                raise ArgumentError(
                    f"{what}: {name}={shown(value)} is no list of integers; give {rank - 2} integers, one per spatial axis"
                ) from None
            # Each default is also the smallest legal value of its parameter.
            if len(result) != rank - 2 or min(result) < default or max(result) > MOST_ELEMENTS:
                raise ArgumentError(
                    f"{what}: {name}={shown(value)} does not fit tensors of {rank} axes; "
                    f"give {rank - 2} integers, each at least {default} and at most {MOST_ELEMENTS}"
                )
            return result

        padding = entries("padding", 0)
        return cls(
            before=padding if pre is None else entries("pre_padding", 0),
            after=padding if post is None else entries("post_padding", 0),
            stride=entries("stride", 1),
            dilation=entries("dilation", 1),
            flipped=getattr(params.get("convolution_mode"), "name", "") == "CONVOLUTION",
        )

    def extent(self, taps: Sequence[int]) -> Shape:
        """Return the extent of the dilated filter on each spatial axis."""
        return tuple((tap - 1) * dilation + 1 for tap, dilation in zip(taps, self.dilation, strict=True))

    def forward(self, size: Sequence[int], taps: Sequence[int]) -> Shape:
        """Return the output's spatial extents for an image and a filter.

        An extent below 1 means that the output is empty.
        """
        return tuple(
            (size[i] + self.before[i] + self.after[i] - extent) // self.stride[i] + 1
            for i, extent in enumerate(self.extent(taps))
        )

    def smallest(self, size: Sequence[int], taps: Sequence[int]) -> Shape:
        """Return the smallest image's spatial extents for an output of ``size``."""
        return tuple(
            (size[i] - 1) * self.stride[i] + extent - self.before[i] - self.after[i] for i, extent in enumerate(self.extent(taps))
        )

    def transposes(self, size: Sequence[int], taps: Sequence[int], image: Sequence[int]) -> bool:
        """Return whether a transposed convolution can produce an image.

        ``image`` has the image's spatial extents, and ``size`` has the loss's spatial extents. The output padding is the number
        of pixels by which the image exceeds the smallest possible image. As in torch, the output padding must be less than the
        stride or less than the dilation. If the output padding reaches the stride, a convolution of the image gives a result
        that is larger than the loss. The missing elements of the loss then count as 0.
        """
        smallest = self.smallest(size, taps)
        return all(0 <= image[i] - smallest[i] < max(self.stride[i], self.dilation[i]) for i in range(len(smallest)))


def conv_fprop(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the result's shape from image and weight.

    The image is (N, C, …) and the weight (K, C / groups, …).
    """
    return _convolved(node, *_operands(node, inputs, "image", "weight"))


def conv_dgrad(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer an image's shape from loss and filter.

    The loss is (N, K, …) and the filter (K, C / groups, …). If the stride is not 1, images of several shapes are possible.
    """
    loss, weight = _operands(node, inputs, "loss", "filter")
    geometry = Convolution.of(node, len(loss))
    smallest = (loss[0], weight[1], *geometry.smallest(loss[2:], weight[2:]))
    # The frontend's builder declares `smallest` by itself. So a declared shape comes from the caller only if it was assigned or
    # differs from `smallest`.
    shape = declared if assigned or (declared and declared != smallest) else smallest
    if shape is smallest and max(geometry.stride) > 1:
        raise ArgumentError(
            f"{title(node)}: with stride {geometry.stride}, images of several sizes give loss {loss} with filter "
            f"{weight}; call set_dim on the node's output with the shape of your image (of the smallest: {smallest})"
        )
    if not _yields(node, shape, weight, loss, geometry):
        raise ArgumentError(
            f"{title(node)}: a convolution of an image {shape} and filter {weight} cannot give loss {loss}; "
            "call set_dim on the node's output with the shape of the image"
        )
    return shape


def conv_wgrad(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Check and return a filter's declared shape.

    The image is (N, C, …) and the loss (N, K, …). These shapes do not determine the filter's shape, so the caller has to
    declare it.
    """
    image, loss = _operands(node, inputs, "image", "loss")
    if not declared:
        raise ArgumentError(
            f"{title(node)}: image {image} and loss {loss} do not determine the filter's shape; call set_dim on the node's output"
        )
    if not _yields(node, image, declared, loss):
        raise ArgumentError(
            f"{title(node)}: a convolution of image {image} and filter {declared} cannot give loss {loss}; "
            "correct the shape given to set_dim of the node's output, or padding, stride and dilation"
        )
    return declared


def pointwise(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the shape to which a pointwise node's inputs broadcast.

    The inputs must have the same number of axes. On each axis, the extents must be equal or 1. A scalar passed by
    value fits any shape.
    """
    arrays = [shape for port, shape in inputs.items() if not node.inputs[port].is_pass_by_value]
    # If all inputs are scalars passed by value, broadcast the shapes of these scalars.
    arrays = arrays or list(inputs.values())
    listed = ", ".join(map(str, arrays))
    if len({len(shape) for shape in arrays}) > 1:
        raise ArgumentError(
            f"{title(node)}: its inputs {listed} must have the same number of axes; declare a bias of K channels as (1, K, 1, 1)"
        )
    shape = tuple(map(broadcast, zip(*arrays, strict=True)))
    if any(extent not in (1, full) for array in arrays for extent, full in zip(array, shape, strict=True)):
        raise ArgumentError(f"{title(node)}: its inputs {listed} do not broadcast; on each axis extents must be equal or 1")
    return shape


def matmul(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the shape of a matrix product.

    A is (…, M, K) and B (…, K, N). On each batch axis, the extents must be equal or 1.
    """
    a, b = inputs["A"], inputs["B"]
    batches = list(zip(a[:-2], b[:-2], strict=False))
    if len(a) != len(b) or len(a) < 2 or a[-1] != b[-2] or any(x != y and 1 not in (x, y) for x, y in batches):
        raise ArgumentError(
            f"{title(node)}: matrices A {a} and B {b} have no product; give shapes (..., M, K) and (..., K, N) with the "
            "same number of axes and batch axes that are equal or 1"
        )
    return (*map(broadcast, batches), a[-2], b[-1])


def broadcast(extents: Sequence[int]) -> int:
    """Return the extent that the given extents broadcast to.

    All given extents that are not 1 must be equal. They may be 0.
    """
    return 0 if 0 in extents else max(extents)


def reduction(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Check and return a reduction's declared output shape.

    The input may have any shape. The output has extent 1 along each reduced axis.
    """
    source = inputs["input"]
    if getattr(node.params.get("mode"), "name", "NOT_SET") == "NOT_SET":
        raise ArgumentError(f"{title(node)}: the node has no mode; give a mode of cudnn.reduction_mode, such as ADD")
    if len(declared) != len(source) or any(d not in (1, s) for d, s in zip(declared, source, strict=True)):
        raise ArgumentError(
            f"{title(node)}: its input is {source} and its output {declared or 'undeclared'}; "
            "call set_dim on the node's output with the input's shape, but 1 on each axis to reduce"
        )
    return declared


def reshape(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Check and return a reshape's declared output shape.

    The input may have any shape. The output must have as many elements.
    """
    if not declared or math.prod(declared) != math.prod(inputs["input"]):
        raise ArgumentError(
            f"{title(node)}: its input is {inputs['input']} and its output {declared or 'undeclared'}; "
            "call set_dim on the node's output with a shape of as many elements as the input"
        )
    return declared


def permutation(node: Any, rank: int) -> Shape:
    """Return a transpose's input axes in the order of its output.

    The function raises ArgumentError if the node's parameter is no permutation.
    """
    given = node.params.get("permutation")
    try:
        axes = tuple(map(as_integer, given))
    except TypeError:
        axes = ()
    if sorted(axes) != list(range(rank)):
        raise ArgumentError(
            f"{title(node)}: permutation={shown(given)} does not fit an input of {rank} axes; give each of the axes 0 to "
            f"{rank - 1} once"
        )
    return axes


def transpose(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the shape of a transpose, for an input of any shape."""
    source = inputs["input"]
    return tuple(source[axis] for axis in permutation(node, len(source)))


def concatenate(node: FrontendNode, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the shape of inputs that are concatenated along an axis.

    On all other axes, the extents of the inputs must be equal.
    """
    shapes = list(inputs.values())
    axis = concatenation_axis(node, len(shapes[0]) if shapes else 0)
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
        raise ArgumentError(
            f"{title(node)}: its inputs {', '.join(map(str, shapes))} cannot be joined along axis {axis}; give inputs "
            "whose other extents are equal"
        )
    if node.params.get("in_place_index") is not None:
        _index(node, "in_place_index", len(shapes), "inputs")
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def concatenation_axis(node: FrontendNode, rank: int) -> int:
    """Return the axis along which a node concatenates its inputs.

    The inputs have ``rank`` axes. The function raises ArgumentError if the node's parameter is no axis of the inputs.
    """
    return _index(node, "axis", rank, "axes")


def _index(node: FrontendNode, name: str, count: int, of: str) -> int:
    value = node.params.get(name)
    index = as_integer(value, -1)
    if not 0 <= index < count:
        raise ArgumentError(f"{title(node)}: {name}={shown(value)} is none of its {count} {of}; count the {of} from 0")
    return index


def attention(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Infer the attention output (N, H, L, D) from its inputs.

    Queries are (N, H, L, E), keys (N, H, S, E) and values (N, H, S, D).

    Statistics are (N, H, L, 1), as the frontend declares them.
    """
    q, k, v = (inputs.get(name, ()) for name in ("q", "k", "v"))
    if not len(q) == len(k) == len(v) == 4 or k != (*q[:2], k[2], q[3]) or v[:3] != k[:3]:
        raise ArgumentError(
            f"{title(node)}: q {q}, k {k} and v {v} do not fit; give shapes (N, H, L, E), (N, H, S, E) and (N, H, S, D)"
        )
    bias = inputs.get("bias", (1, 1, 1, 1))
    full = (*q[:3], k[2])
    if len(bias) != 4 or any(extent not in (1, whole) for extent, whole in zip(bias, full, strict=True)):
        raise ArgumentError(
            f"{title(node)}: bias {bias} does not broadcast to the scores (N, H, L, S) = {full}; give these extents or 1"
        )
    # The rule is called once for each of the node's two outputs. The declared shape shows which output this is: the statistics
    # have an extent of 1 along the last axis.
    return declared if declared == (*q[:3], 1) else (*q[:3], v[3])


RULES: Mapping[str, Callable[[Any, Mapping[str, Shape], Shape, bool], Shape]] = {
    "CONV_FPROP": conv_fprop,
    "CONV_DGRAD": conv_dgrad,
    "CONV_WGRAD": conv_wgrad,
    "POINTWISE": pointwise,
    "MATMUL": matmul,
    "REDUCTION": reduction,
    "RESHAPE": reshape,
    "TRANSPOSE": transpose,
    "CONCATENATE": concatenate,
    "SDPA": attention,
}
"""The shape rules, by the frontend's name of the node's kind.

A rule takes the node, its input shapes, the declared output shape, and whether that shape was assigned by `set_dim`.
"""


def _operands(node: FrontendNode, inputs: Mapping[str, Shape], first: str, second: str) -> tuple[Shape, Shape]:
    a, b = inputs.get(first), inputs.get(second)
    if a is None or b is None:
        raise ArgumentError(f"{title(node)}: the node needs {first} and {second}, and has {', '.join(inputs) or 'neither'}")
    if len(a) != len(b) or not 3 <= len(a) <= 5:
        raise ArgumentError(
            f"{title(node)}: {first} {a} and {second} {b} must have the same number of axes, 3 to 5: "
            "batch (of a weight: filters), channels, and 1 to 3 spatial axes"
        )
    return a, b


def _convolved(node: FrontendNode, image: Shape, weight: Shape) -> Shape:
    def what() -> str:
        return f"{title(node)}: image {image} and weight {weight}"

    if min(weight[2:]) < 1:
        raise ArgumentError(f"{what()}: a filter without taps computes nothing; give each spatial axis of the weight 1 or more")
    if image[1] % weight[1] if weight[1] else image[1]:
        raise ArgumentError(
            f"{what()}: the image's {image[1]} channels are no multiple of the weight's {weight[1]}; "
            "axis 1 of a weight holds the channels of one group"
        )
    # Without channels, the division would give no number of groups, so assume one group.
    groups = image[1] // weight[1] if image[1] else 1
    if weight[0] % groups:
        raise ArgumentError(
            f"{what()}: {image[1]} channels by {weight[1]} make {groups} groups, which do not divide {weight[0]} "
            f"filters; give a multiple of {groups} filters, or filters of {image[1]} channels"
        )
    geometry = Convolution.of(node, len(image))
    padded = [sum(sides) for sides in zip(image[2:], geometry.before, geometry.after, strict=True)]
    if (elements := math.prod((*image[:2], *padded))) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{what()}: the image has {elements:,} elements with a padding of {geometry.before} before and "
            f"{geometry.after} after, and cuDNN's tensors have at most {MOST_ELEMENTS:,}; pad less, or split the image"
        )
    spatial = geometry.forward(image[2:], weight[2:])
    if min(spatial) < 1:
        raise ArgumentError(
            f"{what()}: the result is empty, because the filter covers {geometry.extent(weight[2:])} of an image "
            f"padded by {geometry.before} and {geometry.after}; pad more, or take a smaller filter or dilation"
        )
    return (image[0], weight[0], *spatial)


def _yields(node: FrontendNode, image: Shape, weight: Shape, loss: Shape, transposed: Convolution | None = None) -> bool:
    """Return whether a convolution of image and weight gives the loss.

    With ``transposed``, return whether a transposed convolution can produce the image.
    """
    # The caller may have declared one of these shapes wrongly. So check the shapes before `_convolved` computes with them.
    if not len(image) == len(weight) == len(loss) or min(*image, *weight) < 0:
        return False
    found = _convolved(node, image, weight)
    if transposed is not None and found[:2] == loss[:2] and min(loss[2:]) > 0:
        return transposed.transposes(loss[2:], weight[2:], image[2:])
    return found == loss


def axis_order(shape: Sequence[int], strides: Sequence[int]) -> Shape:
    """Return the axes from the outermost to the innermost in memory.

    Axes of extent 1 or stride 0 do not determine the order. If several orders are possible, row-major is preferred, then
    channels-last (N, spatial axes, C).

    Parameters
    ----------
    shape, strides : sequence of int
        The strides may be in any unit.

    Returns
    -------
    tuple of int
        A permutation of the axes, in the form that `dense_strides` takes.
    """
    rank = len(shape)
    # An axis of extent 1 or stride 0 fits anywhere. Only all other axes determine the order.
    telling = [axis for axis in range(rank) if shape[axis] > 1 and strides[axis] != 0]
    # The sort is stable, so axes of equal strides keep their own order.
    order = sorted(telling, key=strides.__getitem__, reverse=True)
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
    """Infer every tensor's shape, and make ``outputs`` real.

    Real outputs get shape, strides and type.

    The function does not call ``graph.validate()``, and needs neither a GPU nor libcudnn. Assigned values (`set_dim`,
    `set_stride`, `set_data_type`) stay, and are checked against the shape that the rule gives. Strides that were not assigned
    become dense. An output takes its axis order from its node's first array with as many axes. If that array is virtual, the
    same rule has given its order. For a pointwise node, the first input with the output's shape is preferred. Outputs of
    `matmul` and `reshape` are row-major. A transpose leaves the order in memory unchanged.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph, which is changed in place. It must not be frozen.
    outputs : iterable of graph tensor
        The tensors that are to be written to memory.
    io_dtype : cudnn.data_type, optional
        The type of outputs without an assigned type; by default the graph's ``io_data_type``.

    Returns
    -------
    dict
        The shape of every tensor of the graph, by ``uid``.

    Raises
    ------
    ArgumentError
        For shapes or parameters that no call could succeed with. The message names the node, the shapes and the remedy.
    GraphNotSupportedError
        For a node of a kind without a rule, if its output has no assigned shape.
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
    # A tensor of another graph may have the same uid, so the check compares identity.
    for tensor in outputs:
        uid = getattr(tensor, "uid", -1)
        if made.get(uid) is not tensor or tensor is None:
            raise ArgumentError(
                f"no node of this graph makes {getattr(tensor, 'name', tensor)!r}, so it cannot be an output; return the "
                "result of an operation (g.identity(x) makes an output of an input x)"
            )
        if uid in seen:
            raise ArgumentError(f"tensor {tensor.name!r} is named twice among the outputs; name it once")
        seen.add(uid)
        _make_real(tensor, shapes[uid], orders[uid], graph.context.io_data_type if io_dtype is None else io_dtype)
    return shapes


def _make_real(tensor: FrontendTensor, shape: Shape, order: Shape, dtype: object) -> None:
    # Without this call the tensor would stay virtual, and cuDNN would not write it to memory.
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


def _input_shape(node: FrontendNode, port: str, tensor: FrontendTensor) -> Shape:
    shape = tuple(tensor.dim)
    if tensor.is_virtual:
        raise ArgumentError(
            f"{title(node)}: its {port} {tensor.name!r} is virtual, but no earlier node makes this tensor; add that node first"
        )
    most = MOST_AXES if node.node_type.name not in MERGED else len(shape)
    if not 1 <= len(shape) <= most or min(shape) < 0 or len(tensor.stride) != len(shape):
        raise ArgumentError(
            f"{title(node)}: its {port} {tensor.name!r} has shape {shape} and strides {tuple(tensor.stride)}; "
            f"give 1 to {MOST_AXES} axes, one stride per axis, and no extent below 0"
        )
    return shape


def _output_shape(node: FrontendNode, port: str, tensor: FrontendTensor, shapes: dict[int, Shape]) -> Shape:
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
            f"{title(node)}: its output {port} was declared with shape {declared}, but the node computes shape {shape}; "
            "drop the call of set_dim on this output, or correct the shape"
        )
    if tensor.stride_assigned and len(tensor.stride) != len(shape):
        raise ArgumentError(
            f"{title(node)}: its output {port} of shape {shape} was given strides {tuple(tensor.stride)}; give a stride per axis"
        )
    if (elements := math.prod(shape)) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{title(node)}: its output {port} of shape {shape} has {elements:,} elements, and cuDNN's tensors have at most "
            f"{MOST_ELEMENTS:,}; compute the output in parts"
        )
    return shape


def _output_order(node: FrontendNode, tensor: FrontendTensor, shapes: dict[int, Shape], orders: dict[int, Shape]) -> Shape:
    shape = shapes[tensor.uid]
    if tensor.stride_assigned:
        return axis_order(shape, tensor.stride)
    sources = [t.uid for t in node.inputs.values() if len(shapes[t.uid]) == len(shape) and not t.is_pass_by_value]
    if not sources or node.node_type.name in ("MATMUL", "RESHAPE"):
        return tuple(range(len(shape)))
    if node.node_type.name == "TRANSPOSE":
        axes = permutation(node, len(shape))
        return tuple(axes.index(axis) for axis in orders[sources[0]])
    if node.node_type.name == "POINTWISE":
        return orders[next((uid for uid in sources if shapes[uid] == shape), sources[0])]
    return orders[sources[0]]
