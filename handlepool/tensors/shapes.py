"""The shape of what a graph's node computes, and the checks that the frontend leaves out.

One rule a kind of node. A rule gets the node and the shapes of its inputs by port; it raises `ArgumentError` for what
no call could succeed with, naming the node, the shapes and the remedy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool._util.integers import as_integer
from handlepool._util.wording import shown
from handlepool.errors import ArgumentError

Shape = tuple[int, ...]
MOST_AXES = 8
"""Of a tensor: CUDNN_DIM_MAX in cuDNN's documentation."""
MERGED = ("POINTWISE", "MATMUL")
"""Kinds of nodes whose axes are merged before cuDNN sees them, so that there may be any number (`handlepool.forms`)."""
MOST_ELEMENTS = 2**31 - 1
"""Of a tensor, gaps between its elements and padding around it included: what 32 bits count. cuDNN's documentation limits a
tensor with its gaps to two giga-elements (cudnnSetTensorNdDescriptor). From cuDNN 9.3 on some engines take more, and not all of
these are right (PyTorch's issue #152816)."""


def title(node: Any) -> str:
    """Return how messages call a node: its name and its kind."""
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return f"node {node.name!r} ({kind})"


@dataclass(frozen=True, slots=True)
class Convolution:
    """What a convolution node was given besides its tensors; one entry per spatial axis.

    Padding lies `before` and `after` the image; a `flipped` filter is the mathematical convolution, otherwise it is
    the correlation that neural networks mean.
    """

    before: Shape
    after: Shape
    stride: Shape
    dilation: Shape
    flipped: bool

    @classmethod
    def of(cls, node: Any, rank: int) -> "Convolution":
        """Read and check the parameters of a convolution node over tensors of ``rank`` axes.

        Raises
        ------
        ArgumentError
            For a parameter that is no list of ``rank - 2`` integers, or has an entry that is out of range.
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
                    f"{what}: {name}={shown(value)} is no list of integers; give {rank - 2}, one per spatial axis"
                ) from None
            # The defaults are the least legal values, too.
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
        """Return what the dilated filter covers on each spatial axis."""
        return tuple((tap - 1) * dilation + 1 for tap, dilation in zip(taps, self.dilation, strict=True))

    def forward(self, size: Sequence[int], taps: Sequence[int]) -> Shape:
        """Return the spatial extents that come out for those of image and filter; below 1 where nothing does."""
        return tuple(
            (size[i] + self.before[i] + self.after[i] - extent) // self.stride[i] + 1
            for i, extent in enumerate(self.extent(taps))
        )

    def smallest(self, size: Sequence[int], taps: Sequence[int]) -> Shape:
        """Return the spatial extents of the smallest image that yields ``size``."""
        return tuple(
            (size[i] - 1) * self.stride[i] + extent - self.before[i] - self.after[i] for i, extent in enumerate(self.extent(taps))
        )


def conv_fprop(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Image (N, C, …) and weight (K, C / groups, …)."""
    return _convolved(node, *_operands(node, inputs, "image", "weight"))


def conv_dgrad(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Loss (N, K, …) and filter (K, C / groups, …); several images fit when the stride is not 1."""
    loss, weight = _operands(node, inputs, "loss", "filter")
    geometry = Convolution.of(node, len(loss))
    smallest = (loss[0], weight[1], *geometry.smallest(loss[2:], weight[2:]))
    # The frontend's builder fills in `smallest` by itself; what differs from it, or was assigned, is the caller's word.
    shape = declared if assigned or (declared and declared != smallest) else smallest
    if shape is smallest and max(geometry.stride) > 1:
        raise ArgumentError(
            f"{title(node)}: with stride {geometry.stride}, images of several sizes lead to loss {loss} by filter "
            f"{weight}; call set_dim on its output, with {smallest} for the smallest"
        )
    if not _yields(node, shape, weight, loss):
        raise ArgumentError(
            f"{title(node)}: an image of shape {shape} and filter {weight} do not lead to loss {loss}; "
            "call set_dim on its output with the shape of the image"
        )
    return shape


def conv_wgrad(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Image (N, C, …) and loss (N, K, …); the filter's shape has to be declared."""
    image, loss = _operands(node, inputs, "image", "loss")
    if not declared:
        raise ArgumentError(
            f"{title(node)}: image {image} and loss {loss} leave the filter's shape open; call set_dim on its output"
        )
    if not _yields(node, image, declared, loss):
        raise ArgumentError(
            f"{title(node)}: image {image} and a filter of shape {declared} do not lead to loss {loss}; "
            "correct the set_dim of its output, or padding, stride and dilation"
        )
    return declared


def pointwise(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Inputs with the same number of axes, each extent equal or 1; scalars passed by value fit anything."""
    arrays = [shape for port, shape in inputs.items() if not node.inputs[port].is_pass_by_value]
    arrays = arrays or list(inputs.values())
    listed = ", ".join(map(str, arrays))
    if len({len(shape) for shape in arrays}) > 1:
        raise ArgumentError(
            f"{title(node)}: its inputs {listed} must have the same number of axes; a bias of K channels is written (1, K, 1, 1)"
        )
    shape = tuple(max(extents) for extents in zip(*arrays, strict=True))
    if any(extent not in (1, full) for array in arrays for extent, full in zip(array, shape, strict=True)):
        raise ArgumentError(f"{title(node)}: its inputs {listed} do not broadcast; on each axis extents must be equal or 1")
    return shape


def matmul(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """A (…, M, K) and B (…, K, N); batch extents equal or 1."""
    a, b = inputs["A"], inputs["B"]
    batches = list(zip(a[:-2], b[:-2], strict=False))
    if len(a) != len(b) or len(a) < 2 or a[-1] != b[-2] or any(x != y and 1 not in (x, y) for x, y in batches):
        raise ArgumentError(
            f"{title(node)}: A {a} and B {b} do not multiply; give (..., M, K) and (..., K, N) with the same number of "
            "axes and batch axes that are equal or 1"
        )
    return (*(max(pair) for pair in batches), a[-2], b[-1])


def reduction(node: Any, inputs: Mapping[str, Shape], declared: Shape, assigned: bool) -> Shape:
    """Input of any shape; the output's shape has to be declared, with 1 where it is reduced."""
    source = inputs["input"]
    if len(declared) != len(source) or any(d not in (1, s) for d, s in zip(declared, source, strict=True)):
        raise ArgumentError(
            f"{title(node)}: its input is {source} and its output {declared or 'undeclared'}; "
            "call set_dim on its output with the input's shape and a 1 for each axis to reduce"
        )
    return declared


RULES: Mapping[str, Callable[[Any, Mapping[str, Shape], Shape, bool], Shape]] = {
    "CONV_FPROP": conv_fprop,
    "CONV_DGRAD": conv_dgrad,
    "CONV_WGRAD": conv_wgrad,
    "POINTWISE": pointwise,
    "MATMUL": matmul,
    "REDUCTION": reduction,
}
"""By the frontend's name of the node kind: (node, input shapes, what its output declares, whether by `set_dim`)."""


def _operands(node: Any, inputs: Mapping[str, Shape], first: str, second: str) -> tuple[Shape, Shape]:
    a, b = inputs.get(first), inputs.get(second)
    if a is None or b is None:
        raise ArgumentError(f"{title(node)}: needs {first} and {second}, and was given {', '.join(inputs) or 'neither'}")
    if len(a) != len(b) or not 3 <= len(a) <= 5:
        raise ArgumentError(
            f"{title(node)}: {first} {a} and {second} {b} must have the same number of axes, 3 to 5: "
            "batch (of a weight: filters), channels, and 1 to 3 spatial axes"
        )
    return a, b


def _convolved(node: Any, image: Shape, weight: Shape) -> Shape:
    what = f"{title(node)}: image {image} and weight {weight}"
    if image[1] % weight[1]:
        raise ArgumentError(
            f"{what}: the image's {image[1]} channels are no multiple of the weight's {weight[1]}; "
            "axis 1 of a weight holds the channels of one group"
        )
    groups = image[1] // weight[1]
    if weight[0] % groups:
        raise ArgumentError(
            f"{what}: {image[1]} channels by {weight[1]} make {groups} groups, which do not divide {weight[0]} "
            f"filters; give a multiple of {groups} filters, or filters of {image[1]} channels"
        )
    geometry = Convolution.of(node, len(image))
    padded = [sum(sides) for sides in zip(image[2:], geometry.before, geometry.after, strict=True)]
    if (elements := math.prod((*image[:2], *padded))) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{what}: the image has {elements:,} elements with a padding of {geometry.before} before and {geometry.after} after, "
            f"and cuDNN's tensors have at most {MOST_ELEMENTS:,}; pad less, or split the image"
        )
    spatial = geometry.forward(image[2:], weight[2:])
    if min(spatial) < 1:
        raise ArgumentError(
            f"{what}: nothing comes out, because the filter covers {geometry.extent(weight[2:])} of an image padded by "
            f"{geometry.before} and {geometry.after}; pad more, or take a smaller filter or dilation"
        )
    return (image[0], weight[0], *spatial)


def _yields(node: Any, image: Shape, weight: Shape, loss: Shape) -> bool:
    if not len(image) == len(weight) == len(loss) or min(image) < 1 or min(weight) < 1:
        return False
    return _convolved(node, image, weight) == loss
