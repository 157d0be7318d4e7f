"""Shapes, strides and types of a graph's tensors, by our own rules, and what these refuse."""

import cudnn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.tensors import frontend
from handlepool.tensors.inference import axis_order, dense_strides, infer

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
NCHW, NHWC = (0, 1, 2, 3), (0, 2, 3, 1)
UNIT = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}


@pytest.fixture
def graph():
    return frontend.new_graph(io_dtype=np.float16, intermediate_dtype=np.float32, compute_dtype=np.float32)


def tensor(graph, shape, order=None, name="x"):
    return graph.tensor(dim=list(shape), stride=list(dense_strides(shape, order)), data_type=HALF, name=name)


def layout(y):
    return tuple(y.dim), axis_order(y.dim, y.stride)


# Strides


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_dense_strides_and_axis_order_are_each_others_inverse(shape, data):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    strides = dense_strides(shape, order)
    again = dense_strides(shape, axis_order(shape, strides))
    telling = [axis for axis in range(len(shape)) if shape[axis] > 1]
    assert [again[axis] for axis in telling] == [strides[axis] for axis in telling]
    assert sorted(axis_order(shape, strides)) == list(range(len(shape)))


@pytest.mark.parametrize("order", [NCHW, NHWC, (3, 1, 0, 2)])
def test_strides_are_numpys(order):
    shape = (2, 3, 4, 5)
    array = np.empty([shape[axis] for axis in order], np.uint8).transpose(np.argsort(order))
    assert array.shape == shape
    assert dense_strides(shape, order) == array.strides
    assert axis_order(shape, array.strides) == order


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), NCHW),  # nothing says anything: row-major
        ((2, 1, 4, 5), (20, 20, 5, 1), NCHW),  # both would do: row-major
        ((2, 1, 4, 5), (20, 1, 5, 1), NCHW),
        ((2, 3, 1, 1), (3, 1, 3, 3), NCHW),
        ((1, 3, 4, 5), (7, 1, 15, 3), NHWC),
        ((2, 3, 4, 5), (90, 1, 18, 3), NHWC),  # with gaps
        ((2, 3, 4, 5), (0, 20, 5, 1), NCHW),  # broadcast
    ],
)
def test_axes_that_say_nothing_take_the_usual_order(shape, strides, order):
    assert axis_order(shape, strides) == order


# What comes out


@pytest.mark.parametrize("order", [NCHW, NHWC])
def test_outputs_follow_the_inputs_layout_through_every_node(graph, order):
    x, w = tensor(graph, (2, 4, 9, 8), order), tensor(graph, (6, 2, 3, 3), NHWC)  # two groups
    y = graph.conv_fprop(x, w, pre_padding=[1, 0], post_padding=[2, 1], stride=[2, 1], dilation=[1, 2])
    z = graph.relu(graph.bias(y, tensor(graph, (1, 6, 1, 1))))
    shapes = infer(graph, [z])
    assert layout(z) == ((2, 6, 5, 5), order)
    assert shapes[y.uid] == (2, 6, 5, 5)
    assert z.data_type == HALF
    assert (y.is_virtual, z.is_virtual) == (True, False)


def test_of_pointwise_inputs_the_one_with_the_outputs_shape_decides_the_layout(graph):
    small, full = tensor(graph, (1, 3, 1, 5), NCHW), tensor(graph, (2, 3, 4, 5), NHWC)
    y = graph.add(small, full)
    infer(graph, [y])
    assert layout(y) == ((2, 3, 4, 5), NHWC)


def test_what_was_assigned_stays(graph):
    y = graph.relu(tensor(graph, (2, 3, 4, 5)))
    y.set_stride([120, 1, 30, 6]).set_data_type(FLOAT)
    infer(graph, [y])
    assert (list(y.stride), y.data_type) == ([120, 1, 30, 6], FLOAT)


def test_matrices_come_out_row_major(graph):
    a, b = tensor(graph, (3, 4, 5), (0, 2, 1)), tensor(graph, (1, 5, 6))
    y = graph.matmul(a, b)
    infer(graph, [y])
    assert layout(y) == ((3, 4, 6), (0, 1, 2))


@pytest.mark.parametrize("order", [NCHW, NHWC])
def test_gradients_take_the_shape_that_was_declared_and_their_first_inputs_layout(graph, order):
    loss, w, x = tensor(graph, (2, 6, 4, 4), order), tensor(graph, (6, 4, 3, 3)), tensor(graph, (2, 4, 9, 9), order)
    geometry = UNIT | {"stride": [2, 2]}
    dx = graph.conv_dgrad(loss, w, **geometry)
    dx.set_dim([2, 4, 10, 9])  # of the images that lead to this loss, one
    dw = graph.conv_wgrad(image=x, loss=loss, **geometry)
    dw.set_dim([6, 4, 3, 3])
    infer(graph, [dx, dw])
    assert layout(dx) == ((2, 4, 10, 9), order)
    assert layout(dw) == ((6, 4, 3, 3), order)


def test_a_gradient_with_stride_one_needs_no_declaration(graph):
    dx = graph.conv_dgrad(tensor(graph, (2, 6, 7, 7)), tensor(graph, (6, 4, 3, 3)), **UNIT)
    infer(graph, [dx])
    assert tuple(dx.dim) == (2, 4, 9, 9)


# What is refused


@pytest.mark.parametrize(
    ("x", "w", "parameters", "problem"),
    [
        ((2, 5, 9, 9), (6, 2, 3, 3), {}, "5 channels are no multiple of the weight's 2"),
        ((2, 6, 9, 9), (4, 2, 3, 3), {}, "make 3 groups, which do not divide 4"),
        ((2, 4, 9), (6, 4, 3, 3), {}, "must have the same number of axes"),
        ((2, 4), (6, 4), {}, "must have the same number of axes, 3 to 5"),
        ((2, 4, 2, 9), (6, 4, 3, 3), {}, "the result is empty"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"dilation": [5, 1]}, "the result is empty"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"stride": [0, 1]}, r"stride=\[0, 1\] does not fit"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"padding": [-1, 0]}, r"padding=\[-1, 0\] does not fit"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"dilation": [1]}, r"dilation=\[1\] does not fit"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"stride": [1.5, 1]}, "no list of integers"),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"pre_padding": [1, 1]}, "padding, or pre_padding and post_padding together"),
    ],
)
def test_a_convolution_that_cannot_be_names_node_and_shapes(graph, x, w, parameters, problem):
    y = graph.conv_fprop(tensor(graph, x), tensor(graph, w), name="odd", **(UNIT | parameters))
    with pytest.raises(ArgumentError, match=problem) as refusal:
        infer(graph, [y])
    assert "node 'odd' (conv_fprop)" in str(refusal.value)


def of(kind, *shapes, dim=None, strides=None, **parameters):
    """A graph of one node over inputs of these shapes; what its output was declared with."""

    def build(graph):
        y = getattr(graph, kind)(*(tensor(graph, shape) for shape in shapes), **parameters)
        if dim is not None:
            y.set_dim(dim)
        if strides is not None:
            y.set_stride(strides)
        return y

    return build


def of_input(**given):
    return lambda graph: graph.relu(graph.tensor(data_type=HALF, **given))


def weight_gradient(graph):
    dw = graph.conv_wgrad(image=tensor(graph, (2, 4, 9, 9)), loss=tensor(graph, (2, 6, 4, 4)), **UNIT)
    return dw.set_dim([6, 4, 3, 3])


LOSS, FILTERS = (2, 6, 4, 4), (6, 4, 3, 3)
UNFIT = [
    (of("add", (2, 3, 4, 5), (2, 3, 4, 6)), "do not broadcast"),
    (of("add", (2, 3, 4, 5), (3,)), r"the same number of axes; declare a bias of K channels as \(1, K, 1, 1\)"),
    *(
        (of("matmul", *shapes), "have no product")
        for shapes in [((2, 3, 4), (2, 5, 6)), ((2, 3, 4), (3, 4, 6)), ((2, 3, 4), (4, 6))]
    ),
    (
        of("conv_dgrad", LOSS, FILTERS, **(UNIT | {"stride": [2, 2]})),
        r"call set_dim on the node\'s output .* \(of the smallest: \(2, 4, 9, 9\)\)",
    ),
    (
        of("conv_dgrad", LOSS, FILTERS, dim=[2, 4, 9, 9], **UNIT),
        r"\(2, 4, 9, 9\) and filter \(6, 4, 3, 3\) cannot give loss \(2, 6, 4, 4\)",
    ),
    (weight_gradient, "cannot give loss"),
    (
        of("relu", (2, 3, 4, 5), dim=[2, 3, 4, 6]),
        r"declared with shape \(2, 3, 4, 6\), but the node computes shape \(2, 3, 4, 5\)",
    ),
    (of("relu", (2, 3, 4, 5), strides=[1, 1]), "give a stride per axis"),
    (of_input(dim=[2, -1, 4, 5], stride=[1, 1, 1, 1], name="hole"), "'hole' has shape"),
    (
        of_input(dim=[2, 3], stride=[3, 1], is_virtual=True, name="ghost"),
        "'ghost' is virtual, but no earlier node makes this tensor",
    ),
]


@pytest.mark.parametrize(("build", "problem"), UNFIT)
def test_what_does_not_fit_is_refused(graph, build, problem):
    y = build(graph)
    with pytest.raises(ArgumentError, match=problem):
        infer(graph, [y])


def test_outputs_are_made_by_the_graph_and_named_once(graph):
    x = tensor(graph, (2, 3))
    y = graph.relu(x)
    for outputs, problem in (
        ([x], "no node of this graph makes"),
        ([y, y], "named twice"),
        ([None], "no node of this graph makes"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            infer(graph, outputs)


def test_an_output_without_a_type_is_refused():
    graph = frontend.new_graph()
    y = graph.relu(tensor(graph, (2, 3)))
    with pytest.raises(ArgumentError, match="has no type"):
        infer(graph, [y])
    infer(graph, [y], io_dtype=FLOAT)
    assert y.data_type == FLOAT


def test_a_node_without_a_rule_needs_its_shape_and_is_named(graph):
    x = tensor(graph, (2, 3, 4, 5))
    y = graph.slice(x, name="flat")
    with pytest.raises(GraphNotSupportedError, match=r"'flat' \(slice\): handlepool has no shape rule"):
        infer(graph, [y])
    y.set_dim([2, 60])
    infer(graph, [y])
    assert (list(y.dim), list(y.stride)) == ([2, 60], [60, 1])
