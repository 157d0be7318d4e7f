"""Every way of naming a tensor of a graph, and what is refused."""

import re

import pytest

from handlepool import ArgumentError
from handlepool.graphs.tensor_names import KEYWORDS, MOST_LISTED, References, made_by_nodes
from handlepool.tensors import frontend


class Graph:
    """A convolution with a name, a relu without one, a bias, and an addition with a name whose output was given another."""

    def __init__(self):
        g = self.graph = frontend.new_graph(io_dtype="float32", compute_dtype="float32")
        self.x = g.tensor(name="x", dim=[1, 4, 8, 8], stride=[256, 64, 8, 1])
        self.w = g.tensor(name="W", dim=[4, 4, 3, 3], stride=[36, 9, 3, 1], uid=77)
        self.b = g.tensor(name="b", dim=[1, 4, 1, 1], stride=[4, 1, 1, 1])
        self.y = g.conv_fprop(self.x, weight=self.w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv2d")
        self.z = g.relu(input=self.y)
        self.v = g.bias(self.z, bias=self.b)
        self.s = g.add(a=self.z, b=self.v, name="sum").set_name("result")
        self.references = References(g, {"x": self.x})


@pytest.fixture
def graph():
    return Graph()


@pytest.mark.parametrize(
    ("reference", "tensor"),
    [
        ("x", "x"),
        ("W", "w"),
        ("result", "s"),
        (77, "w"),
        ("conv2d::image", "x"),
        ("conv2d::weight", "w"),
        ("conv2d::0", "x"),
        ("conv2d::1", "w"),
        ("conv2d::Y", "y"),
        ("relu.0::input", "y"),
        ("relu.0::IN_0", "y"),
        ("relu.0::0", "y"),
        ("relu.0::OUT_0", "z"),
        ("bias.0::input", "z"),
        ("bias.0::bias", "b"),
        ("bias.0::IN_1", "b"),
        ("bias.0::1", "b"),
        ("sum::a", "z"),
        ("sum::b", "v"),
        ("sum::OUT_0", "s"),
    ],
)
def test_a_reference_means_its_tensor(graph, reference, tensor):
    assert graph.references.resolve(reference) is getattr(graph, tensor)


def test_a_tensor_and_its_uid_mean_itself_and_one_of_another_build_that_of_its_name(graph):
    other = Graph()
    for name in ("x", "w", "b", "y", "z", "v", "s"):
        tensor = getattr(graph, name)
        for reference in (tensor, tensor.uid, getattr(other, name)):
            assert graph.references.resolve(reference) is tensor


def test_a_port_and_a_parameter_still_mean_their_tensors_after_another_name_was_set(graph):
    graph.y.set_name("conv_out")
    graph.x.set_name("image")
    assert graph.references.resolve("conv2d::Y") is graph.references.resolve("conv_out") is graph.y
    assert graph.references.resolve("x") is graph.references.resolve("image") is graph.x


def test_a_node_whose_name_holds_the_separator_and_a_tensor_that_no_node_uses(graph):
    y = graph.graph.tanh(graph.s, name="block::tanh")
    t = graph.graph.tensor(name="lonely", dim=[1], stride=[1])
    assert References(graph.graph, {}).resolve("block::tanh::OUT_0") is y
    assert References(graph.graph, {}).resolve("lonely") is t


@pytest.mark.parametrize(
    "reference",
    ["", "y", "conv2d", "conv2d::", "conv2d::2", "conv2d::-1", "conv2d::X", "conv::Y", "::Y", "relu.1::0", 0, -1, 10**9],
)
def test_a_reference_that_means_nothing_is_told_what_there_is(graph, reference):
    with pytest.raises(ArgumentError, match=f"no tensor of the graph is {re.escape(repr(reference))}") as raised:
        graph.references.resolve(reference)
    for entry in (
        "conv2d::image (x)",
        "conv2d::weight (W)",
        "conv2d::Y",
        "relu.0::input",
        "bias.0::bias (b)",
        "sum::OUT_0 (result)",
    ):
        assert entry in str(raised.value)


@pytest.mark.parametrize("reference", [None, True, 1.5, b"x", ("conv2d", "Y"), ["x"], object], ids=repr)
def test_what_is_no_reference(graph, reference):
    with pytest.raises(ArgumentError, match="is no reference; give a name"):
        graph.references.resolve(reference)


def test_a_name_of_two_tensors_or_of_two_nodes_is_refused(graph):
    graph.b.set_name("W")
    with pytest.raises(ArgumentError, match="'W' means 2 tensors"):
        graph.references.resolve("W")
    assert graph.references.resolve("bias.0::bias") is graph.b
    graph.graph.tanh(graph.s, name="conv2d")
    with pytest.raises(ArgumentError, match="'conv2d::0' means 2 tensors"):
        References(graph.graph, {}).resolve("conv2d::0")
    assert References(graph.graph, {}).resolve("conv2d::image") is graph.x


def test_outputs_are_called_by_the_name_that_was_set_else_by_their_port(graph):
    names = {made: graph.references.name(tensor) for made, tensor in (("y", graph.y), ("z", graph.z), ("s", graph.s))}
    assert names == {"y": "conv2d::Y", "z": "relu.0::OUT_0", "s": "result"}
    assert set(map(id, made_by_nodes(graph.graph).values())) == {id(graph.y), id(graph.z), id(graph.v), id(graph.s)}


def test_a_long_listing_is_cut(graph):
    for _ in range(20):
        graph.graph.tanh(graph.s)
    listing = References(graph.graph, {}).listing()
    assert listing.endswith(f"and {3 + 2 + 3 + 3 + 20 * 2 - MOST_LISTED} more")


@pytest.mark.parametrize(
    "mode",
    [name for name in dir(frontend.new_graph()) if name in KEYWORDS or name.endswith("_backward") or name in ("gelu", "abs")],
)
def test_keywords_are_those_of_the_frontends_methods(mode):
    """Of the methods that make pointwise nodes: each is called by keyword."""
    g = frontend.new_graph(io_dtype="float32", compute_dtype="float32")
    words = KEYWORDS.get(mode, ("loss", "input") if mode.endswith("_backward") else ("input",))
    if not set(words) <= {"a", "b", "input", "input0", "input1", "comparison", "bias", "scale", "mask", "loss"}:
        pytest.fail(f"unknown words {words}")
    tensors = {word: g.tensor(name=word, dim=[1, 4], stride=[4, 1]) for word in words}
    extra = {"negative_slope": 0.1} if mode == "leaky_relu_backward" else {}
    try:
        getattr(g, mode)(**tensors, **extra, name="node")
    except TypeError:
        assert mode not in KEYWORDS  # the gradient of something else than a pointwise operation
        return
    if g.nodes and g.nodes[-1].node_type.name == "POINTWISE":
        for word, tensor in tensors.items():
            assert References(g, {}).resolve(f"node::{word}") is tensor
