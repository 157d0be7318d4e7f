"""matmul and linear against float64: batches, layouts, types, what comes behind them, and what is refused."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    ParallelStateExecutor,
    ParallelStates,
    SignatureError,
    linear,
    matmul,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import GraphNotSupportedError
from handlepool.ops.activations import OWN_ACTIVATIONS
from handlepool.testing import reference


@pytest.fixture
def arrays(each_pool):
    return Arrays(each_pool)


def turned(array):
    """The same matrices, each transposed in memory."""
    return array.swapaxes(-1, -2)


def matrices(arrays, shape, layout):
    if layout == "row":
        return arrays.random(*shape)
    if layout == "column":
        return turned(arrays.random(*shape[:-2], shape[-1], shape[-2]))
    return arrays.random(*shape[:-1], shape[-1] + 8)[..., :-8]


def error_of(arrays, y, a, b, bias=None, activation=None):
    bias = None if bias is None else arrays.take(bias)
    return arrays.error(y, reference.matmul(arrays.take(a), arrays.take(b), bias=bias, activation=activation))


SHAPES = [
    ((3, 8), (8, 5)),
    ((2, 3, 8), (8, 5)),
    ((3, 8), (2, 8, 5)),
    ((2, 3, 8), (2, 8, 5)),
    ((2, 1, 3, 8), (1, 4, 8, 5)),
    ((2, 3, 4, 8), (3, 8, 5)),
    ((4, 1, 8), (8, 5)),
    ((1, 8), (8, 1)),
    ((3, 1), (1, 5)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_batches_broadcast(each_pool, dtype, shapes):
    arrays = Arrays(each_pool, dtype)
    a, b = (arrays.random(*shape) for shape in shapes)
    y = matmul(a, b)
    assert error_of(arrays, y, a, b) < TOLERANCE[dtype]
    assert y.dtype == a.dtype
    assert y.flags.c_contiguous


@pytest.mark.parametrize("kind", [None, *handlepool.ops.ACTIVATIONS, *OWN_ACTIVATIONS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_layer_is_what_torch_calls_linear(arrays, batch, biased, kind):
    x, w = arrays.random(*batch, 4, 16), arrays.random(24, 16)
    bias = arrays.random(24) if biased else None
    y = linear(x, w, bias=bias, activation=kind)
    assert y.shape == (*batch, 4, 24)
    assert error_of(arrays, y, x, turned(w), bias, kind) < TOLERANCE["float32"]


@pytest.mark.parametrize("kind", [*handlepool.ops.ACTIVATIONS, *OWN_ACTIVATIONS])
def test_a_layer_far_from_zero(arrays, kind):
    x, w = arrays.put(np.linspace(-300, 300, 1024).reshape(64, 16)), arrays.put(np.eye(16))
    bias = arrays.random(16)
    assert error_of(arrays, linear(x, w, bias=bias, activation=kind), x, w, bias, kind) < TOLERANCE["float32"]


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    fewer=st.tuples(*[st.integers(0, 3)] * 2),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 8])] * 3),
    layouts=st.tuples(*[st.sampled_from(["row", "column", "crop"])] * 3),
    biased=st.booleans(),
    kind=st.sampled_from([None, "relu", "tanh"]),
    given_out=st.booleans(),
)
def test_any_shapes_layouts_and_epilogues(batch, fewer, sizes, layouts, biased, kind, given_out):
    m, k, n = sizes
    ones = [tuple(1 if (low >> axis) & 1 else extent for axis, extent in enumerate(batch)) for low in fewer]
    with handlepool.HandlePool(driver="host", check=True) as pool:
        arrays = Arrays(pool)
        a = matrices(arrays, (*ones[0], m, k), layouts[0])
        b = matrices(arrays, (*ones[1][fewer[0] % 2 :], k, n), layouts[1])
        bias = arrays.random(3 * n)[::3] if biased else None
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
        out = matrices(arrays, shape, layouts[2]) if given_out else None
        y = matmul(a, b, bias=bias, activation=kind, out=out, pool=pool)
        assert out is None or y is out
        assert error_of(arrays, y, a, b, bias, kind) < TOLERANCE["float32"]


def in_fork(pool, run):
    with ParallelStates(2, pool=pool).fork() as fork:
        return run(fork)


def as_task(pool, function, *args):
    with ParallelStateExecutor(1, pool=pool) as executor:
        return executor.submit(function, *args).result()


def replayed(pool, function, *args):
    program = handlepool.record(function, *args, pool=pool)
    program.replay()
    return program.outputs


WAYS = {
    "call": lambda pool, function, x, w, **more: function(x, w, pool=pool, **more),
    "branch": lambda pool, function, x, w, **more: in_fork(pool, lambda fork: fork.run(function, x, w, **more)),
    "map": lambda pool, function, x, w, **more: in_fork(pool, lambda fork: fork.map(function, [x, x], [w, w])[1]),
    "task": lambda pool, function, x, w, **more: as_task(pool, lambda x, w: function(x, w, **more), x, w),
    "recorded": lambda pool, function, x, w, **more: replayed(pool, lambda x, w: function(x, w, **more), x, w),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [matmul, linear])
def test_a_product_in_every_way_of_calling(each_pool, function, way):
    arrays = Arrays(each_pool)
    x, w = arrays.random(2, 8, 8), arrays.random(8, 8)
    more = {} if way == "map" else {"bias": arrays.random(8), "activation": "relu"}
    for _ in range(2):  # the second time it is known
        y = WAYS[way](each_pool, function, x, w, **more)
        assert error_of(arrays, y, x, turned(w) if function is linear else w, **more) < TOLERANCE["float32"]


FUSED = {  # layouts of x and out, activation: launches, copies
    ("row", None, "relu"): (1, 0),
    ("row", None, "tanh"): (2, 0),
    ("column", None, "gelu"): (1, 0),
    ("crop", None, None): (1, 1),
    ("crop", None, "relu"): (1, 1),
    ("row", "column", "relu"): (2, 0),
    ("row", "crop", "relu"): (1, 1),
}


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_g18_what_is_fused_is_what_was_measured_and_the_rest_is_one_launch_more(make_pool, case):
    layout, out, kind = case
    pool = make_pool()
    arrays = Arrays(pool)
    x, w, bias = matrices(arrays, (32, 16), layout), arrays.random(24, 16), arrays.random(24)
    target = None if out is None else matrices(arrays, (32, 24), out)
    y = linear(x, w, bias=bias, activation=kind, out=target, pool=pool)
    assert error_of(arrays, y, x, turned(w), bias, kind) < TOLERANCE["float32"]
    assert (pool.driver.calls["launch"], pool.stats()["operands_copied"]) == FUSED[case]


def test_rows_of_a_batch_by_one_matrix_are_one_product(make_pool):
    pool = make_pool()
    arrays = Arrays(pool)
    declared = []

    def compile(graph, operands, **settings):
        declared.append([list(tensor.dim) for tensor in operands])
        return HostDriver.compile(pool.driver, graph, operands, **settings)

    pool.driver.compile = compile
    w = arrays.random(5, 8)
    linear(arrays.random(2, 3, 4, 8), w, pool=pool)
    linear(arrays.random(7, 1, 8), w, bias=arrays.random(5), pool=pool)
    linear(arrays.random(2, 4, 16)[..., :8], w, pool=pool)
    linear(arrays.random(4, 8, 8)[:, :4], w, pool=pool)  # no one matrix
    assert [dims[0] for dims in declared] == [[1, 24, 8], [1, 7, 8], [1, 8, 8], [4, 4, 8]]
    assert pool.stats()["operands_copied"] == 0


class Unfused(HostDriver):
    """Has no plan for a graph of several nodes."""

    def compile(self, graph, operands, **settings):
        if len(graph.nodes) > 1:
            raise GraphNotSupportedError("no plan")
        return super().compile(graph, operands, **settings)


def test_what_cudnn_has_no_plan_for_follows_the_product(make_pool):
    pool = make_pool(driver=Unfused())
    arrays = Arrays(pool)
    x, w, bias = arrays.random(4, 16), arrays.random(24, 16), arrays.random(24)
    assert error_of(arrays, linear(x, w, bias=bias, pool=pool), x, turned(w), bias) < TOLERANCE["float32"]
    assert pool.driver.calls["launch"] == 2


REFUSED = {
    "a vector": (lambda r: matmul(r(8), r(8, 5)), r"matmul: a has 1 axes, shape \(8,\); it must have 2 or more"),
    "a vector after": (lambda r: matmul(r(3, 8), r(8)), r"matmul: b has 1 axes, shape \(8,\); it must have 2 or more"),
    "weights in batches": (lambda r: linear(r(3, 8), r(2, 5, 8)), r"linear: w has 3 axes, shape \(2, 5, 8\); it must have 2$"),
    "inner": (
        lambda r: matmul(r(3, 8), r(7, 5)),
        r"matmul: a \(3, 8\) has 8 columns and b \(7, 5\) has 7 rows, which must be equal; b must",
    ),
    "features": (
        lambda r: linear(r(3, 8), r(8, 5)),
        r"linear: x \(3, 8\) has 8 columns and w \(8, 5\) has 5 columns, which must be equal; w must",
    ),
    "batches": (lambda r: matmul(r(2, 3, 8), r(3, 8, 5)), r"batch axes \(2,\) of a and \(3,\) of b do not broadcast"),
    "bias": (
        lambda r: linear(r(3, 8), r(5, 8), bias=r(8)),
        r"linear: bias of shape \(8,\) for 5 columns; its shape must be \(5,\)",
    ),
    "a row": (lambda r: matmul(r(3, 8), r(8, 5), bias=r(1, 5)), r"matmul: bias of shape \(1, 5\) for 5 columns"),
    "empty": (lambda r: matmul(r(0, 3, 7), r(8, 5)), "has 7 columns and b"),
    "activation": (
        lambda r: linear(r(3, 8), r(5, 8), activation="selu"),
        "activation='selu'; it can be relu, .* or None",
    ),
    "out": (lambda r: matmul(r(3, 8), r(8, 5), out=r(5, 3)), r"out=.*\(5, 3\).*\(3, 5\)"),
    "negative": (lambda r: matmul(r(3, 8)[::-1], r(8, 5)), "negative"),
    "limit": (lambda r: matmul(r(3, 8), r(8, 5), workspace_limit=-1), "workspace_limit=-1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_with_the_numbers(arrays, each_pool, what):
    call, match = REFUSED[what]

    def place(*shape):
        return arrays.random(*shape)

    for known in (False, True):
        with pytest.raises(ArgumentError, match=match):
            call(place)
        with pytest.raises(ArgumentError, match=match):
            ParallelStates(2, pool=each_pool).map(lambda _: call(place), [known])
        linear(place(3, 8), place(5, 8))


def test_types_are_of_one_kind(arrays, each_pool):
    x, w = arrays.random(4, 8), arrays.random(8, 8)
    half = Arrays(each_pool, "float16").random(8, 8)
    with pytest.raises(ArgumentError, match="matmul: b is float16 and a is float32; convert one"):
        matmul(x, half)
    with pytest.raises(ArgumentError, match="linear: bias is float16 and x is float32"):
        linear(x, w, bias=half[0])
    with pytest.raises(ArgumentError, match="matmul: a is float64; it must be one of float16, bfloat16, float32"):
        matmul(each_pool.driver.asarray(np.ones((2, 2))), each_pool.driver.asarray(np.ones((2, 2))))
    with pytest.raises(ArrayTypeError, match="matmul: argument 1"):
        matmul(x, [[1.0]])
    with pytest.raises(SignatureError, match=r"linear takes x, w by position.* as in linear\(x, w, bias=\.\.\.\)"):
        linear(x, w, w)


def test_an_out_over_a_factor_or_the_bias_is_refused(make_pool):
    pool = make_pool()
    arrays = Arrays(pool)
    x, w = arrays.random(8, 8), arrays.random(8, 8)
    for kind in ("relu", "tanh"):
        for out, rest in ((x, {}), (arrays.random(8, 8), {"bias": None})):
            more = {"bias": out[0]} if rest else {}
            with pytest.raises(ArgumentError, match=f"out= of linear shares memory with argument {2 if rest else 0}"):
                linear(x, w, activation=kind, out=out, pool=pool, **more)
    assert pool.driver.calls["launch"] == 0


def test_what_is_too_large_is_refused_with_the_numbers(arrays, limits):
    with pytest.raises(ArgumentError, match=r"\(65536, 65536\) has 4,294,967,296 elements.*at most 2,147,483,647"):
        matmul(arrays.random(1 << 16, 1), arrays.random(1, 1 << 16))
    limits(MOST_COPIED=100)
    with pytest.raises(
        ArgumentError, match=r"matmul: argument 0 \(a\), .* 192 bytes, .* limit of 100: pass a copy of the array, con"
    ):
        matmul(arrays.random(2, 1, 2, 4), arrays.random(1, 3, 4, 2))


@pytest.mark.parametrize("function", [matmul, linear])
def test_float32_without_tf32_is_refused(each_pool, function):
    arrays = Arrays(each_pool)
    a, b = arrays.random(8, 8), arrays.random(8, 8)
    with pytest.raises(GraphNotSupportedError, match=f"{function.__name__}.*in TF32.*leave allow_tf32=True"):
        function(a, b, allow_tf32=False)
    half = Arrays(each_pool, "float16")
    function(half.random(8, 8), half.random(8, 8), allow_tf32=False)
