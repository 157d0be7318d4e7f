"""Calls with empty arrays: an empty result of the right shape, or zeros where a sum is over nothing."""

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import (
    ArgumentError,
    ArraySpec,
    GraphNotSupportedError,
    HandlePool,
    ParallelStates,
    add,
    avg_pool2d,
    concat,
    conv2d,
    conv2d_input_grad,
    conv2d_weight_grad,
    linear,
    matmul,
    max_pool2d,
    mean2d,
    ops,
)
from handlepool.ops import conv2d_plan
from handlepool.testing import reference


def full(*args, **options):
    """A convolution with a bias, a residual and an activation, given by position."""
    x, w, bias, residual = args
    return conv2d(x, w, padding=1, bias=bias, add=residual, activation="relu", **options)


EMPTY = {
    "conv2d": (lambda x, w, **o: conv2d(x, w, padding=1, **o), [(0, 4, 7, 7), (6, 4, 3, 3)], (0, 6, 7, 7)),
    "conv2d and what follows": (full, [(0, 4, 7, 7), (6, 4, 3, 3), (6,), (0, 6, 7, 7)], (0, 6, 7, 7)),
    "conv2d without filters": (lambda x, w, **o: conv2d(x, w, groups=2, **o), [(2, 4, 7, 7), (0, 2, 3, 3)], (2, 0, 5, 5)),
    "depthwise": (lambda x, w, **o: conv2d(x, w, groups=4, **o), [(0, 4, 7, 7), (4, 1, 3, 3)], (0, 4, 5, 5)),
    "uneven padding": (lambda x, w, **o: conv2d(x, w, padding=((0, 1), (2, 1)), **o), [(0, 4, 7, 7), (6, 4, 3, 3)], (0, 6, 6, 8)),
    "input gradient": (
        lambda dy, w, **o: conv2d_input_grad(dy, w, (0, 4, 7, 7), padding=1, **o),
        [(0, 6, 7, 7), (6, 4, 3, 3)],
        (0, 4, 7, 7),
    ),
    "weight gradient without channels": (
        lambda x, dy, **o: conv2d_weight_grad(x, dy, (6, 0, 3, 3), **o),
        [(2, 0, 7, 7), (2, 6, 5, 5)],
        (6, 0, 3, 3),
    ),
    "max_pool2d": (lambda x, **o: max_pool2d(x, 2, **o), [(0, 4, 7, 7)], (0, 4, 3, 3)),
    "avg_pool2d without channels": (lambda x, **o: avg_pool2d(x, 2, **o), [(2, 0, 7, 7)], (2, 0, 3, 3)),
    "mean2d": (mean2d, [(0, 4, 7, 7)], (0, 4)),
    "mean2d of nothing for no channels": (lambda x, **o: mean2d(x, keepdims=True, **o), [(2, 0, 0, 7)], (2, 0, 1, 1)),
    "linear": (lambda x, w, b, **o: linear(x, w, bias=b, activation="relu", **o), [(0, 4), (5, 4), (5,)], (0, 5)),
    "matmul without columns": (lambda a, b, **o: matmul(a, b, activation="tanh", **o), [(3, 4), (4, 0)], (3, 0)),
    "matmul of no batches": (matmul, [(0, 3, 2), (1, 2, 4)], (0, 3, 4)),
    "matmul by no batches": (matmul, [(1, 3, 2), (5, 0, 2, 4)], (5, 0, 3, 4)),
    "add": (lambda x, y, **o: add(x, y, activation="gelu", **o), [(0, 4, 3, 3)] * 2, (0, 4, 3, 3)),
    "concat": (lambda x, y, **o: concat([x, y], 0, **o), [(0, 3), (0, 3)], (0, 3)),
    **{kind: (getattr(ops, kind), [(2, 0, 3)], (2, 0, 3)) for kind in ops.ACTIVATIONS},
}
"""Functions, the shapes of their arrays, and that of the empty result."""


SUMS = {
    "weight gradient": (
        lambda x, dy, **o: conv2d_weight_grad(x, dy, (6, 4, 3, 3), padding=1, **o),
        [(0, 4, 7, 7), (0, 6, 7, 7)],
        lambda *_: np.zeros((6, 4, 3, 3)),
    ),
    "input gradient without filters": (
        lambda dy, w, **o: conv2d_input_grad(dy, w, (2, 4, 7, 7), padding=1, **o),
        [(2, 0, 7, 7), (0, 4, 3, 3)],
        lambda *_: np.zeros((2, 4, 7, 7)),
    ),
    "conv2d without channels": (
        full,
        [(2, 0, 7, 7), (6, 0, 3, 3), (6,), (2, 6, 7, 7)],
        lambda _x, _w, b, z: np.maximum(b[:, None, None] + z, 0),
    ),
    "conv2d of padding alone": (
        lambda x, w, b, **o: conv2d(x, w, padding=2, bias=b, groups=4, **o),
        [(2, 4, 0, 7), (4, 1, 3, 3), (4,)],
        lambda _x, _w, b: np.broadcast_to(b[:, None, None], (2, 4, 2, 9)),
    ),
    "matmul over no columns": (matmul, [(2, 3, 0), (0, 4)], lambda *_: np.zeros((2, 3, 4))),
    "linear of no features": (
        lambda x, w, b, **o: linear(x, w, bias=b, activation="sigmoid", **o),
        [(3, 0), (5, 0), (5,)],
        lambda _x, _w, b: np.broadcast_to(reference.ACTIVATIONS["sigmoid"](b), (3, 5)),
    ),
    "concat of parts": (
        lambda *xs, **o: concat([*xs], 1, **o),
        [(2, 0, 3), (2, 4, 3), (2, 0, 3), (2, 1, 3)],
        lambda *xs: np.concatenate(xs, 1),
    ),
}
"""Functions, the shapes of their arrays, and the result, which has elements."""
WAYS = ["eager", "out", "branch", "map", "recorded", "recorded with lanes"]


def call(way, pool, function, given, out):
    """Call a function with arrays, and return the result."""
    if way == "branch":
        with ParallelStates(2, pool=pool).fork() as fork:
            made = [fork.run(function, *given) for _ in range(2)]
        return made[1]
    if way == "map":
        return ParallelStates(2, pool=pool).map(function, *([array] * 3 for array in given))[2]
    if way.startswith("recorded"):
        with handlepool.record(function, *given, lanes=4 if "lanes" in way else None) as program:
            program.replay()
            assert program.explain()
            return program(*(array.copy(order="K") for array in given))
    if way == "out":
        made = function(*given, out=out)
        assert made is out
        return made
    return function(*given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("what", EMPTY)
def test_an_empty_result_has_its_shape_and_launches_nothing(each_pool, what, layout, way):
    function, shapes, shape = EMPTY[what]
    arrays = Arrays(each_pool, "float16", layout)
    given = [arrays.random(*each) for each in shapes]
    made = call(way, each_pool, function, given, arrays.random(*shape))
    assert (made.shape, made.dtype, type(made)) == (shape, arrays.dtype, type(given[0]))
    if each_pool.driver.name == "host":
        assert each_pool.driver.calls["launch"] == 0
        assert each_pool.driver.calls["compile"] == each_pool.driver.calls["kernel"] == 0
    else:
        assert arrays.take(made).shape == shape


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("what", SUMS)
def test_a_sum_of_nothing_is_zero_and_empty_parts_add_nothing(each_pool, what, dtype, way):
    function, shapes, wanted = SUMS[what]
    arrays = Arrays(each_pool, dtype)
    given = [arrays.random(*each) for each in shapes]
    expected = wanted(*map(arrays.take, given))
    made = call(way, each_pool, function, given, arrays.poisoned(*expected.shape))
    assert made.shape == expected.shape
    assert np.abs(arrays.take(made) - expected).max() <= TOLERANCE[dtype] * max(1, np.abs(expected).max())


@pytest.mark.parametrize("what", EMPTY | SUMS)
def test_no_driver_gets_an_extent_of_zero(each_pool, monkeypatch, what):
    """Neither cuDNN, whose graphs both drivers compile, nor a kernel."""
    shapes, driver = [], each_pool.driver
    compiled, kernel = driver.compile, driver.kernel

    def compiling(graph, operands, **options):
        shapes.extend(tuple(tensor.dim) for tensor in operands)
        return compiled(graph, operands, **options)

    def making(kind, operands, **options):
        shapes.extend(layout.shape for layout in operands)
        return kernel(kind, operands, **options)

    driver.compile = compiling
    driver.kernel = making
    function, given, _ = (EMPTY | SUMS)[what]
    arrays = Arrays(each_pool)
    function(*(arrays.random(*shape) for shape in given))
    assert not any(0 in shape for shape in shapes)
    assert bool(shapes) == (what not in EMPTY)


def test_an_empty_result_is_channels_last_where_the_images_are(each_pool):
    arrays = Arrays(each_pool, layout="NHWC")
    y = conv2d(arrays.random(1, 8, 7, 7)[:0], arrays.random(16, 8, 3, 3))
    assert y.strides[1:] == (4, 5 * 16 * 4, 16 * 4)


def test_zeros_go_into_a_view_and_nowhere_else(each_pool):
    arrays = Arrays(each_pool)
    whole = arrays.put(np.full((3, 8), 7.0))
    matmul(arrays.random(3, 0), arrays.random(0, 4), out=whole[:, :4])
    assert np.array_equal(arrays.take(whole), [[0] * 4 + [7] * 4] * 3)


def test_an_empty_slice_of_out_is_a_part_of_a_concatenation(each_pool):
    arrays = Arrays(each_pool)
    out, x = arrays.poisoned(2, 4), arrays.random(2, 4)
    for parts in ([out[:, :0], x], [x, out[:, 2:2]]):
        assert concat(parts, 1, out=out) is out
        assert arrays.error(out, arrays.take(x)) == 0


def test_empty_calls_stand_among_others_in_a_recording(each_pool):
    arrays = Arrays(each_pool)
    w, none, some = arrays.random(6, 4, 3, 3), arrays.random(0, 4, 7, 7), arrays.random(2, 4, 7, 7)

    def network(none, some):
        first, second = (conv2d(each, w, padding=1) for each in (none, some))
        return concat([first, second, first], 0), mean2d(first)

    expected = reference.conv2d(arrays.take(some), arrays.take(w), padding=1)
    for lanes in (None, 1, 4):
        with handlepool.record(network, none, some, lanes=lanes) as program:
            program.replay()
            assert arrays.error(program.outputs[0], expected) < TOLERANCE["float32"]
            assert program.outputs[1].shape == (0, 6)


def test_a_batch_that_is_empty_now_and_then_is_found_each_time(each_pool):
    arrays = Arrays(each_pool)
    w = arrays.random(6, 4, 3, 3)
    for count in (2, 0, 2, 0, 1):
        x = arrays.random(count, 4, 7, 7)
        y = conv2d(x, w)
        assert y.shape == (count, 6, 5, 5)
        if count:
            assert arrays.error(y, reference.conv2d(arrays.take(x), arrays.take(w))) < TOLERANCE["float32"]


UNFIT = {
    r"x .* has 5 channels": lambda a: conv2d(a(0, 5, 7, 7), a(6, 4, 3, 3)),
    "has filters without taps": lambda a: conv2d(a(0, 4, 7, 7), a(6, 4, 0, 3)),
    r"add has shape \(1, 6, 5, 5\) and the result has shape \(0, 6, 5, 5\)": lambda a: conv2d(
        a(0, 4, 7, 7), a(6, 4, 3, 3), add=a(1, 6, 5, 5)
    ),
    "bias of shape": lambda a: conv2d(a(0, 4, 7, 7), a(6, 4, 3, 3), bias=a(0)),
    "the result is empty": lambda a: conv2d(a(2, 4, 0, 8), a(6, 4, 3, 3)),
    r"must be float32 of shape \(0, 6, 5, 5\)": lambda a: conv2d(a(0, 4, 7, 7), a(6, 4, 3, 3), out=a(1, 6, 5, 5)),
    "lead to": lambda a: conv2d_input_grad(a(0, 6, 5, 5), a(6, 4, 3, 3), (1, 4, 7, 7)),
    "conv2d_weight_grad: .* lead to": lambda a: conv2d_weight_grad(a(0, 4, 7, 7), a(0, 6, 5, 5), (6, 4, 5, 3)),
    "each 0 or more": lambda a: conv2d_input_grad(a(0, 6, 5, 5), a(6, 4, 3, 3), (-1, 4, 7, 7)),
    "no pixels": lambda a: mean2d(a(2, 4, 0, 7)),
    "exceeds images of 0 x 7": lambda a: max_pool2d(a(2, 4, 0, 7), 2),
    r"a \(0, 3\) has 3 columns": lambda a: matmul(a(0, 3), a(4, 5)),
    "do not broadcast": lambda a: matmul(a(0, 3, 3), a(2, 3, 3)),
    "must broadcast to one shape": lambda a: add(a(0, 3), a(2, 3)),
    "differ only along axis 0": lambda a: concat([a(0, 3), a(2, 4)], 0),
    "has 3 axes": lambda a: conv2d(a(0, 7, 7), a(6, 4, 3, 3)),
}


@pytest.mark.parametrize("match", UNFIT)
def test_shapes_that_do_not_fit_are_refused_all_the_same(each_pool, match):
    with pytest.raises(ArgumentError, match=match):
        UNFIT[match](Arrays(each_pool).random)


# Plans


def test_a_plan_for_an_empty_array_says_that_there_is_none_to_choose(each_pool):
    arrays = Arrays(each_pool)
    x, w = arrays.random(0, 4, 7, 7), arrays.random(6, 4, 3, 3)
    plan = conv2d_plan(x, w)
    assert (plan.engine, plan.candidates, plan.workspace_size) == ("nothing", 0, 0)
    for choose in (plan.select, plan.build):
        with pytest.raises(ArgumentError, match="conv2d: there is no plan 0, because an array is empty"):
            choose(0)
    if each_pool.driver.name == "cuda":
        assert handlepool.tune(conv2d, x, w) == ()


@handlepool.graph
def scaled(g, x, y):
    return g.relu(g.mul(x, y))


@handlepool.graph
def product(g, a, b):
    return g.relu(g.matmul(a, b))


def test_a_graph_function_of_the_callers_own_gives_an_empty_result(each_pool):
    arrays = Arrays(each_pool)
    x, row, out = arrays.random(0, 4), arrays.random(1, 4), arrays.random(0, 4)
    assert scaled(x, row).shape == (0, 4)
    assert scaled(x, row, out=out) is out
    *_, made = scaled.run({"x": x, "y": row}).values()
    assert made.shape == (0, 4)
    assert scaled.plan_for(ArraySpec((0, 4), "float32"), row).engine == "nothing"
    assert product(arrays.random(2, 0, 3), arrays.random(2, 3, 4)).shape == (2, 0, 4)


def test_a_result_with_elements_behind_a_sum_of_nothing_is_refused_with_the_remedy(each_pool):
    arrays = Arrays(each_pool)
    with pytest.raises(GraphNotSupportedError, match=r"an array is empty and the result of node .*graph function of its own"):
        product(arrays.random(2, 3, 0), arrays.random(2, 0, 4))
    with pytest.raises(ArgumentError, match="do not broadcast"):
        scaled(arrays.random(0, 4), arrays.random(2, 4))


def test_a_checked_pool_takes_empty_arrays():
    with HandlePool(driver="host", check=True) as pool:
        arrays = Arrays(pool)
        x, w, dy = (arrays.random(*shape) for shape in ((0, 4, 7, 7), (6, 4, 3, 3), (0, 6, 5, 5)))
        assert conv2d(x, w, bias=arrays.random(6), activation="relu", pool=pool).shape == dy.shape
        assert not arrays.take(conv2d_weight_grad(x, dy, w.shape, pool=pool)).any()
