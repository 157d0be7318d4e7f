"""Choose forms of operands that cuDNN computes rightly (guarantee 18).

Every form is known to be right from measurements. The module also plans the copies that bring other operands into such a form.
cuDNN accepts graphs that it computes wrongly. The kernels of some graphs even end the CUDA context. To find the right forms,
``benchmarks/geometries.py`` compares up to eight plans for each of some thousand graphs with float64. The tables are in
``benchmarks/results/geometries``. They give these rules for each kind of graph:

- cuDNN computes *pointwise nodes alone* rightly over two axes without gaps, declared as (M, N, 1, 1) with N innermost. An operand
  fills both axes, repeats along one axis, or is one element. So the axes are merged to two, in the order of the first output's
  memory.
- *A convolution alone*, or a gradient, takes images and filters without gaps, contiguous or channels-last in any mixture. It
  also takes images that are channels-last with gaps. Followed by a bias alone, it takes operands without gaps. Followed by more
  nodes, it takes channels-last operands without gaps. Addends then fill the output, or have one element for each channel, or
  one element. Followed by a bias and relu, the convolution also takes contiguous operands. Padding is the same on both sides. The
  loss of a gradient has the whole shape of the convolution's result. In a transposed convolution, the last rows or columns of
  the loss may be missing. Then zeros are appended.
- *A matrix product* has three axes. Its factors are contiguous or transposed. If no node follows the product, its output may be
  transposed as well, and gaps are allowed. If nodes follow, the other operands are contiguous. Addends fill the output, repeat
  along the batch, or are a row, a column, or one element.
- *Attention* takes queries, keys, values and outputs (N, H, L, E) whose last axis is innermost. The other axes are in the order
  N, H, L or N, L, H, gaps allowed. cuDNN's documentation names these layouts. A bias is contiguous and has the scores' whole
  shape.
- *Reductions* alone showed no error over operands without gaps, contiguous or channels-last. Reductions among other nodes,
  reshape, transpose and concatenate were not measured. The module refuses graphs with these nodes on both drivers, because a GPU
  may compute them wrongly. Nodes that the host driver cannot compute (`docs/nodes.md`) were not measured either. They are not
  refused, and their operands are brought into the form for reductions.

For an operand in another form, a launch makes a copy on its own stream: an input is copied into scratch before the plan runs,
and an output is copied out of scratch afterwards. An operand of more than `operand_forms.MOST_COPIED` bytes is refused instead.
Both drivers apply these rules at the first call of a geometry.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from handlepool.drivers.executable import OperandCopy
from handlepool.errors import GraphNotSupportedError
from handlepool.graphs.operand_forms import (
    CONVOLUTIONS,
    OperandForms,
    declare,
    has_form,
    is_nested,
    is_per_channel,
    itemsize_of,
    spaced_channels_last,
    used_again,
)
from handlepool.tensors.graph_types import FrontendGraph, FrontendNode
from handlepool.tensors.inference import Convolution, Shape, axis_order, dense_strides, title

_UNMEASURED = ("RESHAPE", "TRANSPOSE", "CONCATENATE")
BEHIND_A_SUM = (None, "relu")
"""Activations measured after a convolution and an addend, in one plan.

The measured addends are as large as the output.
"""
BEHIND_A_PRODUCT = (None, "relu", "sigmoid", "gelu", "swish")
"""Activations measured after a matrix product.

Tanh is missing. An engine for convolutions computes tanh far from zero wrongly, and no measurement of products covers such
values.
"""


def conform(
    graph: FrontendGraph,
    operands: Sequence[Any],
    inputs: int,
    shapes: Mapping[int, Shape],
    called: Callable[[int], str],
    copying: bool = True,
    misaligned: Iterable[int] = (),
) -> tuple[OperandCopy, ...]:
    """Declare operands in forms that cuDNN computes rightly; return the copies.

    Parameters
    ----------
    graph : cudnn.pygraph
        The graph, changed in place. Every tensor has its shape, and every real tensor has strides and a type.
    operands : sequence of graph tensor
        Inputs, then outputs.
    inputs : int
        Number of inputs.
    shapes : mapping
        The shapes that `infer` returned.
    called : callable
        Returns the name of an operand for messages, by its place.
    copying : bool
        Whether operands may be copied.
    misaligned : iterable of int
        Places of the vectors that do not begin at a multiple of 16 bytes. cuDNN takes no such vector, so each of them is copied,
        even with ``copying=False``.

    Returns
    -------
    tuple of OperandCopy

    Raises
    ------
    ArgumentError
        For an operand that needs a copy, and is too large for a copy.
    GraphNotSupportedError
        For a graph without a form known to be right. With ``copying=False``, also for a graph whose only such form needs copies.
    """
    for node in graph.nodes:
        if node.node_type.name in _UNMEASURED:
            raise GraphNotSupportedError(
                f"{title(node)}: cuDNN's result of such a node was not measured, so the result may be wrong; compute this step "
                "with the array library, before the call or after it"
            )
        if node.node_type.name == "REDUCTION" and len(graph.nodes) > 1:
            raise GraphNotSupportedError(
                f"{title(node)}: cuDNN's result of a reduction among other nodes was not measured, so it may be wrong; "
                "make the reduction a graph function of its own"
            )
    forms = OperandForms(graph, operands, inputs, shapes, called, copying)
    nodes = [node for node in graph.nodes if node.node_type.name != "POINTWISE"]
    kind = nodes[0].node_type.name if len(nodes) == 1 else ""
    if not nodes and all(node.params.get("mode") != "gen_index" for node in graph.nodes):
        _pointwise(forms)
    elif kind in CONVOLUTIONS or kind == "MATMUL":
        if any(tensor.is_virtual for tensor in nodes[0].inputs.values()):
            raise GraphNotSupportedError(
                f"another node comes before {title(nodes[0])}, and cuDNN has plans for few such graphs; make {title(nodes[0])} a "
                f"graph function of its own"
            )
        (_matmul if kind == "MATMUL" else _convolution)(forms, nodes[0])
    elif kind == "SDPA" and {*nodes[0].inputs} <= {"q", "k", "v", "bias"} and len(graph.nodes) == 1:
        _attention(forms, nodes[0])
    else:
        for place in range(len(operands)):
            forms.require(place, ("contiguous", "channels-last"))
    # A vector that needs no copy for its form has no gaps, so one axis describes the copy.
    for place in set(misaligned) - {copy.operand for copy in forms.copies}:
        forms.copy(place, (math.prod(forms.given[place][0]),), (1,), always=True)
    return tuple(forms.copies)


# Pointwise nodes alone


def _pointwise(forms: OperandForms) -> None:
    shapes = [forms.shapes[tensor.uid] for tensor in forms.operands]
    full = tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]
    for place in range(forms.inputs, len(shapes)):
        if shapes[place] != full:
            raise GraphNotSupportedError(
                f"{forms.called(place)} has shape {shapes[place]}, but all arrays of the graph broadcast to shape {full}, and "
                "in a graph of pointwise operations each output must have that shape. Split the graph into two graph functions"
            )
    order = axis_order(full, forms.operands[forms.inputs].stride)
    axes = [axis for axis in order if full[axis] > 1]
    extents = [full[axis] for axis in axes]
    steps = [
        [tensor.stride[axis] if shape[axis] > 1 else 0 for axis in axes]
        for tensor, shape in zip(forms.operands, shapes, strict=True)
    ]
    sizes = [itemsize_of(tensor) for tensor in forms.operands]
    whole = _operands_to_expand(forms, steps)

    def parts(place: int, split: int) -> tuple[list[int], list[int], bool]:
        return (extents, steps[place], False) if place in whole else _dense_axes(steps[place], extents, split)

    def cost(split: int) -> int:
        chosen = [parts(place, split) for place in range(len(steps))]
        return sum(math.prod(shape) * size for (shape, _, fits), size in zip(chosen, sizes, strict=True) if not fits)

    # The axes are split into rows and columns. Choose the split at which the copies take the fewest bytes.
    split = min(range(len(axes) + 1), key=cost)
    fills = []
    for place, each in enumerate(steps):
        shape, along, fits = parts(place, split)
        if not fits:
            forms.copy(place, shape, along)
        fills.append((split > 0, split < len(axes)) if place in whole else (any(each[:split]), any(each[split:])))
    size, columns = math.prod(extents), math.prod(extents[split:])
    # cuDNN has no plan for one element, so compute eight equal elements.
    if size == 1:
        size = columns = 8
        fills = [(False, True)] * len(fills)
        # The copies planned above do not have eight elements, so plan them again.
        forms.copies.clear()
        for place in range(len(fills)):
            forms.copy(place, (1,) if place >= forms.inputs else (8,), (0,), elements=8)
    elif all(rows == its for rows, its in fills) or columns in (1, size):
        # No operand repeats along just one of the two axes, so any row length is possible. The largest power of two up to 256
        # suits vector loads and the kernels' tiles.
        fills = [(rows or its,) * 2 for rows, its in fills]
        columns = math.gcd(size, 256)
        if columns < 8:
            columns = extents[-1]
    _declare_rows(forms, fills, size // columns, columns)


def _operands_to_expand(forms: OperandForms, steps: Sequence[Sequence[int]]) -> set[int]:
    """Return the operands to copy, repeated to the output's whole shape.

    With these copies, each node has an input of the whole shape. If all inputs of a node repeated along some axis, cuDNN would
    have no plan, or would compute a later node wrongly. ``steps`` has the steps of each operand's memory along the axes.
    """
    whole: set[int] = set()
    for node in forms.graph.nodes:
        places = [forms.places.get(tensor.uid) for tensor in node.inputs.values() if not tensor.is_pass_by_value]
        given = [place for place in places if place is not None]
        if len(given) == len(places) and not any(place in whole or all(steps[place]) for place in given):
            # One input of the whole extent is enough for cuDNN. So note the first input, which the caller copies.
            whole.update(given[:1])
    return whole


def _dense_axes(steps: Sequence[int], extents: Sequence[int], split: int) -> tuple[list[int], list[int], bool]:
    """Return an operand's extents and steps, without repeated sides.

    The first ``split`` axes form one side, and the remaining axes form the other side. A side counts as repeated if the operand
    repeats along all its axes. The last result says whether the axes of the remaining sides lie in memory without gaps.
    """
    shape: list[int] = []
    along: list[int] = []
    for part in (slice(None, split), slice(split, None)):
        if any(steps[part]):
            shape += extents[part]
            along += steps[part]
    return shape, along, tuple(along) == dense_strides(shape)


def _declare_rows(forms: OperandForms, fills: Sequence[tuple[bool, bool]], rows: int, columns: int) -> None:
    """Declare every tensor as (rows, columns, 1, 1).

    ``fills`` says for each operand whether it fills the rows, and whether it fills the columns. Where a tensor does not fill an
    axis, it repeats, and its extent is 1.
    """
    by_uid: dict[int, tuple[bool, bool]] = {}
    for tensor, fill in zip(forms.operands, fills, strict=True):
        by_uid[tensor.uid] = fill
    for node in forms.graph.nodes:
        filled = [by_uid.get(tensor.uid, (False, False)) for tensor in node.inputs.values()]
        for tensor in node.outputs.values():
            if tensor is not None:
                by_uid.setdefault(tensor.uid, (any(a for a, _ in filled), any(b for _, b in filled)))
    for tensor in (*forms.operands, *forms.virtual()):
        down, along = by_uid[tensor.uid]
        dim = [rows if down else 1, columns if along else 1, 1, 1]
        if tensor.dim:
            declare(tensor, dim, [dim[1], 1, dim[1], dim[1]])


# Convolutions


def _convolution(forms: OperandForms, node: FrontendNode) -> None:
    if len(forms.shapes[next(iter(node.inputs.values())).uid]) == 3:
        _add_spatial_axis(forms, node)
    _symmetrise_padding(forms, node)
    _complete_loss(forms, node)
    first, second = (node.inputs[port] for port in CONVOLUTIONS[node.node_type.name])
    (made,) = [tensor for tensor in node.outputs.values() if tensor is not None]
    core = {tensor.uid for tensor in (first, second, made)}
    behind = [other for other in forms.graph.nodes if other is not node]
    either = ("contiguous", "channels-last")
    extras = [place for place, tensor in enumerate(forms.operands) if tensor.uid not in core]
    if not behind:
        filters = {"CONV_FPROP": second, "CONV_DGRAD": second, "CONV_WGRAD": made}[node.node_type.name]
        for place, tensor in enumerate(forms.operands):
            if tensor is filters or place in forms.parts or not spaced_channels_last(tensor.dim, tensor.stride):
                forms.require(place, either)
        return
    if node.node_type.name != "CONV_FPROP":
        raise GraphNotSupportedError(
            f"a node follows {title(node)}, and cuDNN is not known to compute both nodes rightly; make {title(node)} a "
            "graph function of its own"
        )
    result = forms.operands[forms.inputs :]
    full = tuple(result[0].dim)
    used_again(forms, node, full)
    # For an output of one pixel, contiguous and channels-last are the same, so the rules for contiguous operands do not apply.
    single = len(result) == 1 and max(full[2:]) > 1
    modes = [other.params.get("mode") for other in behind]
    added = [place for place in extras if place < forms.inputs]
    biased = single and modes[0] in ("bias", "add") and len(added) == 1 and is_per_channel(forms.operands[added[0]], full)
    whole = [place for place in range(len(forms.operands)) if place not in added and place not in forms.parts]
    contiguous = all(has_form(forms.operands[place], "contiguous") for place in whole)
    if biased and len(modes) == 1:
        wanted: tuple[str, ...] = either
    elif biased and modes[1:] == ["relu"] and contiguous:
        wanted = ("contiguous",)
    else:
        wanted = ("channels-last",)
    for place, tensor in enumerate(forms.operands):
        if place not in added:
            forms.require(place, wanted)
        elif tuple(tensor.dim) in (full, (1,) * len(full)) or is_per_channel(tensor, full):
            forms.require(place, ("channels-last",))
        else:
            forms.expand(place, full, "channels-last")


def _add_spatial_axis(forms: OperandForms, node: FrontendNode) -> None:
    """Turn one spatial axis into two.

    cuDNN has no plans for one spatial axis with an activation.
    """
    for name, fill in (("padding", 0), ("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
        value = node.params.get(name)
        if value is not None:
            node.params[name] = [fill, *value]
    forms.reshape(lambda shape: (*shape[:2], 1, *shape[2:]))
    for tensor in (*forms.operands, *forms.virtual()):
        if tensor.dim:
            n, c, w = tensor.dim
            outer, channel, step = tensor.stride or dense_strides(tensor.dim)
            declare(tensor, [n, c, 1, w], [outer, channel, max(w * step, 1), step])


def _symmetrise_padding(forms: OperandForms, node: FrontendNode) -> None:
    """Pad equally on both sides, and extend the output accordingly.

    Unequal padding was not measured. So both sides get the padding before the image, increased by whole strides until it covers
    the padding after the image. The wanted output is then a part of the computed output.
    """
    # If `pre_padding` is None, `post_padding` is None as well, because `infer` has checked that they come together.
    if node.params.get("pre_padding") is None:
        return
    first, second = (forms.shapes[tensor.uid] for tensor in list(node.inputs.values())[:2])
    how = Convolution.of(node, len(first))
    if how.before == how.after:
        return
    full = forms.shapes[next(iter(node.outputs.values())).uid]
    core = {tensor.uid for tensor in node.inputs.values()}
    added = [t for place, t in enumerate(forms.operands[: forms.inputs]) if t.uid not in core]
    fits = all(tuple(t.dim) in (full, (1,) * len(full)) or is_per_channel(t, full) for t in added)
    if node.node_type.name != "CONV_FPROP" or not fits or used_again(forms, node, full):
        remedy = "pad the images before the call, as numpy.pad does, and give the same padding on both sides"
        if node.node_type.name == "CONV_DGRAD":
            remedy = "compute the gradient of the padded images with padding=0, and cut the padding off"
        raise GraphNotSupportedError(
            f"{title(node)}: a padding of {how.before} before and {how.after} after was not measured for such a graph, so the "
            f"result may be wrong; {remedy}"
        )
    steps = list(zip(how.before, how.after, how.stride, strict=True))
    more = [max(0, -((low - high) // step)) for low, high, step in steps]
    margins = tuple(low + count * step for (low, _, step), count in zip(steps, more, strict=True))
    larger = [*full[:2], *replace(how, before=margins, after=margins).forward(first[2:], second[2:])]
    del node.params["pre_padding"], node.params["post_padding"]
    node.params["padding"] = list(margins)
    for tensor in (*forms.operands, *forms.virtual()):
        if tensor.uid not in core and tuple(tensor.dim) == full:
            place = forms.places.get(tensor.uid)
            if place is not None:
                forms.parts[place] = (full, (0, 0, *more))
            declare(tensor, larger, list(dense_strides(larger) if place is None else tensor.stride))


def _complete_loss(forms: OperandForms, node: FrontendNode) -> None:
    """Append zeros to a loss that lacks rows or columns.

    A convolution of the image gives a result with these rows or columns; see `Convolution.transposes`. cuDNN was measured only
    with losses of that whole shape.
    """
    if node.node_type.name != "CONV_DGRAD":
        return
    loss, weight = node.inputs["loss"], node.inputs["filter"]
    (image,) = [forms.shapes[tensor.uid] for tensor in node.outputs.values() if tensor is not None]
    shape, taps = forms.shapes[loss.uid], forms.shapes[weight.uid][2:]
    whole = (*shape[:2], *Convolution.of(node, len(shape)).forward(image[2:], taps))
    if whole != shape:
        place = forms.places[loss.uid]
        forms.parts[place] = (shape, (0,) * len(shape))
        forms.completed.add(place)
        declare(loss, list(whole), list(loss.stride))


# Matrix products


def _matmul(forms: OperandForms, node: FrontendNode) -> None:
    _one_matrix(forms, node)
    _three_axes(forms, node)
    full = tuple(forms.operands[forms.inputs].dim)
    alone = len(forms.graph.nodes) == 1
    again = used_again(forms, node, full)
    # If each product of two matrices is a single element, cuDNN computes the nodes after the product wrongly.
    if not alone and full[1:] == (1, 1):
        raise GraphNotSupportedError(
            f"{title(node)} makes a single element of each pair of matrices, and cuDNN computes any following node wrongly; make "
            f"{title(node)} a graph function of its own"
        )
    # A factor that a later node takes as well must also have the form that the later node needs.
    factors = {node.inputs["A"].uid, node.inputs["B"].uid} - again
    addends = (full, (1, *full[1:]), (1, 1, full[2]), (1, full[1], 1), (1, 1, 1))
    for place, tensor in enumerate(forms.operands):
        (batch, rows, columns), (step, down, along) = tensor.dim, tensor.stride
        if tensor.uid in factors or (alone and place >= forms.inputs):
            turned = rows > 1 and (down, along) == (1, rows) and (batch == 1 or step == rows * columns)
            orders = (((columns, along), (rows, down), (batch, step)), ((rows, down), (columns, along), (batch, step)))
            if not turned and not (alone and any(map(is_nested, orders))):
                forms.require(place, ("contiguous",))
        elif place < forms.inputs and (batch, rows, columns) not in addends:
            forms.expand(place, full, "contiguous")
        else:
            forms.require(place, ("contiguous",))


def _one_matrix(forms: OperandForms, node: FrontendNode) -> None:
    """Merge the rows of all batches into one matrix product.

    All batches must share the second factor, and there must be no gaps between the batches. Otherwise the tensors stay as they
    are.
    """
    full = tuple(forms.operands[forms.inputs].dim)
    rows = []
    for tensor in forms.operands:
        dim = tuple(tensor.dim)
        if tensor.uid != node.inputs["B"].uid and dim[:-1] == full[:-1]:
            axes = [(extent, step) for extent, step in zip(dim, tensor.stride[:-1], strict=False) if extent > 1]
            # With gaps between the batches, their rows do not lie at one step, so they are not rows of a single matrix.
            if any(step != extent * inner for (_, step), (extent, inner) in pairwise(axes)):
                return
            rows.append((tensor, axes[-1][1] if axes else dim[-1]))
        elif math.prod(dim[:-2]) > 1 or (tensor.uid != node.inputs["B"].uid and dim[-2] > 1):
            return
    every = (*[1] * (len(full) - 2), math.prod(full[:-1]))
    for tensor, step in rows:
        outer = [every[-1] * step] * (len(full) - 2)
        tensor.set_dim([*every, tensor.dim[-1]]).set_stride([*outer, step, tensor.stride[-1]])
    forms.reshape(lambda shape: (*every, shape[-1]) if shape[:-1] == full[:-1] else shape)


def _three_axes(forms: OperandForms, node: FrontendNode) -> None:
    """Declare every tensor with exactly one batch axis.

    cuDNN has no plans for tensors with no batch axis or with two batch axes. A factor that repeats along some batch axes but not
    all is copied to the whole batch. An addend that repeats in this way is copied to the output's whole shape, because cuDNN was
    measured only with such a copy.
    """
    batches = [tuple(tensor.dim)[:-2] for tensor in forms.operands]
    batch, matrix = tuple(map(max, *batches)), tuple(forms.operands[forms.inputs].dim)[-2:]
    factors = {node.inputs["A"].uid, node.inputs["B"].uid}
    for place, tensor in enumerate(forms.operands):
        dim, steps = tuple(tensor.dim), tuple(tensor.stride)
        its = dim[:-2]
        size = math.prod(its)
        inner = [steps[axis] for axis in range(len(its)) if its[axis] > 1]
        extents = [extent for extent in its if extent > 1]
        merged = all(a == b * extent for a, b, extent in zip(inner, inner[1:], extents[1:], strict=False))
        if size > 1 and (its != batch or not merged or not all(inner)):
            factor = place >= forms.inputs or tensor.uid in factors
            forms.expand(place, (*batch, *(dim[-2:] if factor else matrix)), "contiguous", factor)
            dim, steps = tuple(tensor.dim), tuple(tensor.stride)
            size, inner = math.prod(batch), [dim[-2] * dim[-1]]
        # A tensor with a single matrix has no batch step, so choose a step beyond the matrix.
        reach = max(dim[-2] * steps[-2], dim[-1] * steps[-1], 1)
        tensor.set_dim([size, *dim[-2:]]).set_stride([inner[-1] if inner else reach, *steps[-2:]])
    forms.reshape(lambda shape: (math.prod(shape[:-2]), *shape[-2:]))
    for tensor in forms.virtual():
        if tensor.dim:
            three = list(forms.shapes[tensor.uid])
            declare(tensor, three, list(dense_strides(three)))


# Attention


def _attention(forms: OperandForms, node: Any) -> None:
    bias = node.inputs.get("bias")
    scores = (*forms.shapes[node.inputs["q"].uid][:3], forms.shapes[node.inputs["k"].uid][2])
    for place, tensor in enumerate(forms.operands):
        if tensor is not bias:
            orders = (3, 2, 1, 0), (3, 1, 2, 0)
            axes = [[(tensor.dim[axis], tensor.stride[axis]) for axis in order] for order in orders]
            # cuDNN's kernels load 16 bytes at a time, so each row must begin at a multiple of 16 bytes.
            aligned = all(step % 8 == 0 for extent, step in axes[0][1:] if extent > 1)
            if not aligned or not any(map(is_nested, axes)):
                forms.require(place, ("contiguous",))
        elif tuple(tensor.dim) == scores:
            forms.require(place, ("contiguous",))
        else:
            forms.expand(place, scores, "contiguous", factor=True)
