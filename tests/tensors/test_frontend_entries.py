"""What we use of nvidia-cudnn-frontend beside its documented face is there, in the version that is installed.

Continuous integration runs this with the oldest version that is supported and with the newest, pre-releases too. What takes a
built graph is in `tests/planning`.
"""

import inspect

import cudnn
import numpy as np
import pytest
from cudnn import wrapper

from handlepool.integrations import cudnn as integration
from handlepool.tensors import frontend


@pytest.fixture
def graph():
    graph = frontend.new_graph(io_dtype=np.float16, intermediate_dtype=np.float32, compute_dtype=np.float32)
    x, w = (
        graph.tensor(dim=dim, stride=[144, 1, 48, 16], data_type=cudnn.data_type.HALF) for dim in ([1, 16, 3, 3], [8, 16, 3, 3])
    )
    y = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv2d")
    graph.relu(y, negative_slope=0.0, lower_clip=-30.0, upper_clip=30.0)
    return graph


def test_a_node_says_what_it_is_and_what_it_takes(graph):
    convolution, relu = graph.nodes
    assert (convolution.name, convolution.node_type.name, relu.node_type.name) == ("conv2d", "CONV_FPROP", "POINTWISE")
    assert list(convolution.inputs) == ["image", "weight"]
    assert list(convolution.outputs) == ["Y"]
    assert convolution.params["padding"] == [1, 1]
    assert relu.params["mode"] == "relu"


def test_a_tensor_says_what_is_known_of_it(graph):
    x, y = graph.nodes[0].inputs["image"], graph.nodes[0].outputs["Y"]
    assert (x.is_virtual, y.is_virtual) == (False, True)
    assert (list(x.dim), list(x.stride), x.data_type) == ([1, 16, 3, 3], [144, 1, 48, 16], cudnn.data_type.HALF)
    assert (x.dim_assigned, x.stride_assigned, y.stride_assigned) == (True, True, False)
    assert (x.pass_by_value, x.is_pass_by_value, x.ragged_offset) == (None, False, None)
    assert x.uid != y.uid


def test_what_a_graph_says_of_types_can_be_set_later(graph):
    assert graph.context.io_data_type == cudnn.data_type.HALF
    graph.context.io_data_type = cudnn.data_type.FLOAT
    assert graph.context.io_data_type == cudnn.data_type.FLOAT


def test_an_operation_infers_nothing_before_it_is_asked_for():
    graph = frontend.new_graph(io_dtype=np.float16)
    a, b = (graph.tensor(dim=[1, 4, 4], stride=[16, 4, 1], data_type=cudnn.data_type.HALF) for _ in range(2))
    assert list(graph.matmul(a, b).dim or []) == []


@pytest.mark.parametrize("name", ["cross_correlation", "convolution"])
def test_both_modes_of_convolution_have_names(name):
    mode = frontend.convolution_mode(name)
    assert mode is None if name == "cross_correlation" else mode is not None


@pytest.mark.parametrize("name", ["TENSOR_CORE", "NONDETERMINISTIC"])
def test_numeric_notes_have_names(name):
    assert hasattr(cudnn.numerical_note, name)


@pytest.mark.parametrize("name", ["A", "B", "FALLBACK"])
def test_heuristics_have_names(name):
    assert hasattr(cudnn.heur_mode, name)


def test_a_handle_says_its_address_and_its_stream_and_can_be_made_to_forget_that():
    """`set_stream` leaves out the pointer that it remembers, which is wrong where that was recycled."""
    handle = cudnn.Handle(1234, 0, 77)
    assert (handle.backend_handle, handle.stream) == (1234, 77)
    handle.stream = None
    assert handle.stream is None


def test_what_an_integration_replaces_is_there_and_takes_what_it_is_given():
    functions, methods = integration._places()
    for owner, name, _ in functions + methods:
        assert callable(getattr(owner, name)), name
    takes = [list(inspect.signature(inspect.unwrap(getattr(cudnn.pygraph, name))).parameters) for _, name, _ in methods[:3]]
    lowering, execute, execute_at = takes
    assert len(lowering) == 2
    assert execute[:4] == ["self", "tensor_dict", "workspace", "handle"]
    assert execute_at[:5] == ["self", "tensor_dict", "workspace", "index", "handle"]
    assert (wrapper.Graph._Graph__workspace, wrapper.Graph._Graph__handle) == (None, None)
    assert cudnn.pygraph(handle=None)._handle is None
