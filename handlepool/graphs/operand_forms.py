"""Hold the operands of a graph while `handlepool.graphs.forms` chooses forms.

The module also tells in which form a tensor lies.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from handlepool.drivers.executable import OperandCopy, scratch_of
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import FrontendGraph, FrontendNode, FrontendTensor
from handlepool.tensors.inference import Shape, dense_strides, title

MOST_COPIED = 16 << 20
"""The maximum size in bytes of an operand that each launch copies."""
CONVOLUTIONS = {"CONV_FPROP": ("image", "weight"), "CONV_DGRAD": ("loss", "filter"), "CONV_WGRAD": ("image", "loss")}
"""For each kind of convolution node, the ports of its two factors."""


class OperandForms:
    """Hold a graph's operands, and the copies that are planned for them."""

    def __init__(
        self,
        graph: FrontendGraph,
        operands: Sequence[Any],
        inputs: int,
        shapes: Mapping[int, Shape],
        called: Callable[[int], str],
        copying: bool,
    ) -> None:
        self.copying = copying
        self.graph = graph
        self.operands = operands
        self.inputs = inputs
        self.shapes = dict(shapes)
        self.called = called
        self.copies: list[OperandCopy] = []
        self.given = [(tuple(tensor.dim), tuple(tensor.stride)) for tensor in operands]
        self.places = {tensor.uid: place for place, tensor in enumerate(operands)}
        self.parts: dict[int, tuple[Shape, Shape]] = {}
        """Operands that cuDNN reads or writes in a larger shape.

        The keys are places of operands. The values are the array's own shape, and where the array begins in the larger shape.
        """
        self.completed: set[int] = set()
        """Places of the inputs in ``parts`` whose larger shape needs zeros.

        The zeros fill the rest of the larger shape.
        """

    def virtual(self) -> list[Any]:
        """Return the tensors between nodes, which are no operands."""
        made = [tensor for node in self.graph.nodes for tensor in node.outputs.values() if tensor is not None]
        return [tensor for tensor in made if tensor.uid not in self.places]

    def reshape(self, change: Callable[[Shape], Shape]) -> None:
        """Replace the shape of each tensor by ``change(shape)``."""
        self.shapes = {uid: change(shape) for uid, shape in self.shapes.items()}

    def copy(
        self,
        place: int,
        shape: Sequence[int],
        steps: Sequence[int],
        elements: int | None = None,
        always: bool = False,
        part: tuple[int, Sequence[int]] = (0, ()),
        larger: Shape = (),
        zeros: bool = False,
    ) -> None:
        """Plan a copy of an operand.

        ``steps`` are the steps of the operand's memory along the axes of the copy, in elements. ``elements`` is the number of
        elements of the copy. ``part`` is the operand's offset and its steps in the copy. ``elements`` and ``part`` are needed
        only if the operand does not fill the copy densely. With ``always``, the operand is copied even where copies are not
        allowed. ``larger`` is the shape that the operand is repeated to, for messages. ``zeros`` is as in `OperandCopy`.
        """
        assert all(each.operand != place for each in self.copies), "a copy reads the caller's memory, never another copy"
        tensor = self.operands[place]
        itemsize = itemsize_of(tensor)
        nbytes = (math.prod(shape) if elements is None else elements) * itemsize
        if not (self.copying or always) or nbytes > MOST_COPIED:
            dim, steps = self.given[place]
            what = (
                f"{self.called(place)}, of shape {dim} with strides {steps} elements, lies in no form that cuDNN is known to "
                f"compute rightly here"
            )
            remedy = "write to another array and copy that array" if place >= self.inputs else "pass a copy of the array"
            remedy = f"{remedy}, {self._advice(larger)}"
            if place in self.parts:
                what = (
                    f"{self.called(place)}: a padding that differs from side to side was not measured, so a launch computes a "
                    f"larger output with equal padding, of shape {tuple(tensor.dim)}"
                )
                remedy = "pad the images before the call, as numpy.pad does"
                if zeros:
                    what = (
                        f"{self.called(place)}, of shape {dim}, lacks rows or columns of {tuple(tensor.dim)}, the shape of the "
                        f"result for images of this size"
                    )
                    remedy = "append zeros to the array, as numpy.pad does"
            if not (self.copying or always):
                raise GraphNotSupportedError(what)
            raise ArgumentError(
                f"{what}. Each call would make a copy of {nbytes:,} bytes, more than the limit of {MOST_COPIED:,}: {remedy}"
            )
        strides = tuple(int(step) * itemsize for step in steps)
        first, within = part[0] * itemsize, tuple(int(step) * itemsize for step in part[1])
        # Each copy gets its own place in the scratch, because all copies of a launch exist at once.
        offset = scratch_of(self.copies)
        self.copies.append(OperandCopy(place, place >= self.inputs, tuple(shape), strides, offset, nbytes, first, within, zeros))

    def _advice(self, larger: Shape) -> str:
        kinds = {node.node_type.name for node in self.graph.nodes}
        # Recommend a form that needs no copy in any graph of this kind.
        if kinds & CONVOLUTIONS.keys():
            form = "channels-last without gaps"
        elif "MATMUL" in kinds:
            form = "contiguous"
        else:
            return "without gaps, of the output's shape and layout"
        return f"{form}, repeated to the shape {larger}" if larger else form

    def require(self, place: int, forms: Sequence[str]) -> None:
        """Accept an operand in one of ``forms``, or plan a copy.

        The copy has the last of ``forms``. A vector input is copied even where copies are not allowed.
        """
        tensor = self.operands[place]
        dim, steps = tuple(tensor.dim), tuple(tensor.stride)
        shape, begin = self.parts.get(place, (dim, ()))
        for form in forms if shape == dim else ():
            strides = dense_strides(shape, order_of(form, len(shape)))
            # Axes of extent 1 may have any step.
            if all(extent == 1 or a == b for extent, a, b in zip(shape, steps, strides, strict=True)):
                tensor.set_stride(list(strides))
                return
        order = order_of(forms[-1], len(shape))
        dense = dense_strides(dim, order)
        first = sum(index * step for index, step in zip(begin, dense, strict=False))
        self.copy(
            place,
            [shape[axis] for axis in order],
            [steps[axis] if shape[axis] > 1 else 0 for axis in order],
            math.prod(dim),
            # A vector input may be copied even where copies are not allowed.
            place < self.inputs and sum(extent > 1 for extent in dim) < 2,
            (first, [dense[axis] for axis in order]) if begin else (0, ()),
            zeros=place in self.completed,
        )
        tensor.set_stride(list(dense))

    def expand(self, place: int, shape: Sequence[int], form: str, factor: bool = False) -> None:
        """Plan a copy of an operand, repeated to the larger ``shape``.

        ``shape`` is the shape of the output. With ``factor``, it is the whole shape of a factor of a product.
        """
        tensor = self.operands[place]
        order = order_of(form, len(shape))
        steps = [step if extent > 1 else 0 for extent, step in zip(tensor.dim, tensor.stride, strict=True)]
        # A message names a shape that the caller knows: the output's shape before any change, except for a factor.
        larger = tuple(shape) if factor else self.given[self.inputs][0]
        self.copy(place, [shape[axis] for axis in order], [steps[axis] for axis in order], larger=larger)
        tensor.set_dim(list(shape)).set_stride(list(dense_strides(shape, order)))


def used_again(forms: OperandForms, node: FrontendNode, full: Shape) -> set[int]:
    """Return the uids of ``node``'s inputs that a later node takes.

    The function raises if such an input has another shape than ``full``, because the later node would repeat its values.
    """
    behind = {tensor.uid for other in forms.graph.nodes if other is not node for tensor in other.inputs.values()}
    again = {tensor.uid for tensor in node.inputs.values()} & behind
    for uid in again:
        if tuple(forms.operands[forms.places[uid]].dim) != full:
            raise GraphNotSupportedError(
                f"{forms.called(forms.places[uid])} is used by {title(node)} and again by a later node, where its values "
                f"would repeat; make {title(node)} a graph function of its own"
            )
    return again


def declare(tensor: FrontendTensor, dim: list[int], stride: list[int]) -> None:
    """Give a tensor another shape and other strides.

    The frontend may have guessed the shape of a tensor between nodes. Such a shape counts as unassigned, and cuDNN does not get
    it. The function leaves it unassigned.
    """
    # The setters mark a property as assigned, and cuDNN gets all assigned properties. So an unassigned property gets no setter.
    if tensor.dim_assigned or not tensor.is_virtual:
        tensor.set_dim(dim)
    else:
        tensor.dim = dim
    if tensor.stride_assigned or not tensor.is_virtual:
        tensor.set_stride(stride)
    else:
        tensor.stride = stride


def order_of(form: str, rank: int) -> Shape:
    """Return the axes of a form, from the outermost to the innermost."""
    return (0, *range(2, rank), 1) if form == "channels-last" and rank > 1 else tuple(range(rank))


def itemsize_of(tensor: FrontendTensor) -> int:
    """Return the bytes of one element of a tensor."""
    return frontend.numpy_dtype(tensor.data_type).itemsize


def has_form(tensor: FrontendTensor, form: str) -> bool:
    """Return whether a tensor lies in a form, without gaps."""
    strides = dense_strides(tensor.dim, order_of(form, len(tensor.dim)))
    # Axes of extent 1 may have any step.
    return all(extent == 1 or a == b for extent, a, b in zip(tensor.dim, tensor.stride, strides, strict=True))


def is_per_channel(tensor: FrontendTensor, full: Sequence[int]) -> bool:
    """Return whether a tensor has one element for each channel."""
    return tuple(tensor.dim) == (1, full[1], *[1] * (len(full) - 2))


def spaced_channels_last(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Return whether an image is channels-last with gaps outside the channels.

    The gaps may lie between pixels, rows or images, but not between channels.
    """
    return shape[1] > 1 and is_nested([(shape[axis], steps[axis]) for axis in (1, *reversed(range(2, len(shape))), 0)])


def stepped_channels_last(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Return whether an image has its axes in the channels-last order.

    The axes run forwards, and no two elements share memory. This condition is weaker than `spaced_channels_last`. Two kinds of
    slices fulfil only this condition. In a slice of every second column of an odd number, a row begins within the step of the
    last column of the row before. In a slice of every second channel, the channels have a step of 2. Neither kind was measured
    enough, so both are copied.
    """
    reach = 1
    for axis in (1, *reversed(range(2, len(shape))), 0):
        if shape[axis] > 1:
            if steps[axis] < reach:
                return False
            reach += steps[axis] * (shape[axis] - 1)
    return True


def is_nested(axes: Iterable[tuple[int, int]]) -> bool:
    """Return whether axes are nested, beginning with a step of 1.

    An axis is (extent, step). The axes run from the innermost to the outermost. In nested axes, each step is at least the extent
    times the step of the axis before.
    """
    reach = 0
    for extent, step in axes:
        if extent > 1:
            if step < reach or (not reach and step != 1):
                return False
            reach = step * extent
    return True
