"""A graph built step by step: tensors declared, an operation added, its output made real; then the plan and its workspace."""

import json

import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import ArgumentError, GraphNotSupportedError
from handlepool.testing.reference import conv2d as reference

X, W, Y = (2, 16, 14, 14), (8, 16, 3, 3), (2, 8, 14, 14)


def last(shape):
    """Strides, in elements, of a channels-last array."""
    _, c, h, w = shape
    return [c * h * w, 1, c * w, c]


@pytest.fixture
def arrays(pool):
    return Arrays(pool, "float16", "NHWC")


@pytest.fixture
def steps():
    """The function, and what it noted at each step."""
    import cudnn

    notes = {}

    @handlepool.graph(name="first_graph", io_dtype="float16", compute_dtype="float32", heuristics=["A"], inputs=["X", "W"])
    def convolution(g):
        half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
        x = g.tensor(name="X", dim=list(X), stride=last(X), data_type=half)
        w = g.tensor(name="W", dim=list(W), stride=last(W))
        y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], compute_data_type=single)
        notes["virtual"] = y.get_is_virtual()
        y.set_output(True)
        notes["real"] = not y.get_is_virtual()
        notes["types"] = (x.get_data_type(), w.get_data_type())
        notes["expected types"] = (half, half)

    return convolution, notes


def test_the_graph_runs(arrays, steps):
    convolution, notes = steps
    x, w, out = arrays.random(*X), arrays.random(*W), arrays.poisoned(*Y)
    expected = reference(*map(arrays.take, (x, w)), padding=1)
    assert convolution(x, w, out=out) is out
    assert arrays.error(out, expected) < TOLERANCE["float16"]
    made = convolution(x, w)
    assert (made.shape, made.strides) == (out.shape, out.strides)
    assert arrays.error(made, expected) < TOLERANCE["float16"]
    assert notes["virtual"]
    assert notes["real"]
    assert notes["types"] == notes["expected types"]  # what was not declared has the type of input and output


def test_the_plan_is_inspected_before_anything_is_launched(pool, arrays, steps):
    convolution, _ = steps
    specs = [handlepool.ArraySpec(shape, "float16", "NHWC") for shape in (X, W)]
    plan = convolution.plan_for(*specs)
    assert plan.name == "first_graph"
    assert plan.engine
    assert plan.candidates >= 1
    assert plan.workspace_size >= 0
    assert [(tuple(out.shape), out.dtype.name) for out in plan.outputs] == [(Y, "float16")]
    text = json.loads(plan.graph)
    (node,) = text["nodes"]
    assert "CONV_FPROP" in json.dumps(node)
    assert pool.stats()["scratch_bytes"] == 0
    x, w = arrays.random(*X), arrays.random(*W)
    assert convolution.plan_for(x, w) is plan
    convolution(x, w)
    assert plan.workspace_size <= pool.stats()["scratch_bytes"] < plan.workspace_size + 512


def test_candidates_are_chosen_by_index_and_give_the_same_result(arrays, steps):
    convolution, _ = steps
    x, w, out = arrays.random(*X), arrays.random(*W), arrays.poisoned(*Y)
    expected = reference(*map(arrays.take, (x, w)), padding=1)
    plan, built = convolution.plan_for(x, w, out=out), 0
    for index in range(min(plan.candidates, 4)):
        try:
            chosen = plan.select(index)
        except GraphNotSupportedError:
            continue
        built += 1
        assert convolution.plan_for(x, w, out=out) is chosen
        out[...] = float("nan")
        convolution(x, w, out=out)
        assert arrays.error(out, expected) < TOLERANCE["float16"]
    assert built
    with pytest.raises(ArgumentError, match="the index must be 0 to"):
        plan.select(plan.candidates)


def test_what_the_document_gets_wrong_is_refused(pool, arrays, steps):
    """An output too small: the frontend writes past it."""
    convolution, _ = steps
    x, w, small = arrays.random(*X), arrays.random(*W), arrays.poisoned(2, 8, 3, 3)
    with pytest.raises(
        ArgumentError, match=r"out= of first_graph .*\(2, 8, 3, 3\); .* must be float16 of shape \(2, 8, 14, 14\)"
    ):
        convolution(x, w, out=small)
