"""What comes behind a convolution: bias, residual and activation, in one plan or in launches behind it, against float64."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays
from harness.scenes import Scene

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    DeviceMismatchError,
    GraphNotSupportedError,
    ParallelStateExecutor,
    ParallelStates,
    conv2d,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.graphs.launch import GraphCall
from handlepool.pool.plan_cache import PlanCache
from handlepool.testing import reference


class Few(HostDriver):
    """Has plans for graphs of a few nodes alone."""

    most = 1

    def compile(self, graph, operands, **settings):
        if any(node.node_type.name == "CONV_FPROP" for node in graph.nodes) and len(graph.nodes) > self.most:
            raise GraphNotSupportedError("no plan")
        return super().compile(graph, operands, **settings)


@pytest.fixture
def arrays(each_pool):
    return Arrays(each_pool, layout="NHWC")


def launches(pool, function):
    """How many launches a call is."""
    before = pool.driver.calls["launch"]
    function()
    return pool.driver.calls["launch"] - before


def given(arrays, bias, add, layout=None):
    """Images, filters, and what is to come behind the convolution."""
    x, w = arrays.random(2, 16, 7, 6, layout=layout), arrays.random(24, 16, 3, 3, layout=layout)
    rest = {"bias": arrays.random(24)} if bias else {}
    return x, w, rest | ({"add": arrays.random(2, 24, 7, 6, layout=layout)} if add else {})


def expected(arrays, x, w, rest, **options):
    return reference.conv2d(arrays.take(x), arrays.take(w), **{k: arrays.take(v) for k, v in rest.items()}, **options)


@pytest.mark.parametrize("kind", [None, "relu", "gelu", "hardswish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_residual_is_the_reference(each_pool, dtype, layout, bias, kind):
    arrays = Arrays(each_pool, dtype, layout)
    x, w, rest = given(arrays, bias, True)
    y = conv2d(x, w, padding=1, activation=kind, **rest)
    assert y.strides[1] == (x.itemsize if layout == "NHWC" else 42 * x.itemsize)
    assert arrays.error(y, expected(arrays, x, w, rest, padding=1, activation=kind)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", [None, "relu", "swish", "tanh", "hardswish"])
@pytest.mark.parametrize(("bias", "add"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_g18_each_form_is_the_reference(each_pool, layout, bias, add, kind):
    arrays = Arrays(each_pool, "float16", layout)
    x, w, rest = given(arrays, bias, add)
    wanted = expected(arrays, x, w, rest, padding=1, activation=kind)
    sites = each_pool.internals.plans.sites
    conv2d(x, w, padding=1, activation=kind, **rest)
    (site,), right = sites.values(), []
    for form in site.forms():
        try:
            site.prepare(form, (x, w, *rest.values()), None)
        except GraphNotSupportedError:
            continue
        site.choose(form)
        right.append(form)
        for _ in range(3):
            y = conv2d(x, w, padding=1, activation=kind, **rest)
            assert arrays.error(y, wanted) < TOLERANCE["float16"], form
    assert () in right
    assert (("add", "bias") in right) is (bias and add and layout == "NHWC")


FUSED = {
    ("NHWC", True, True, "relu"): 1,
    ("NHWC", False, True, None): 1,
    ("NHWC", True, True, "tanh"): 2,  # not measured behind a residual
    ("NHWC", True, False, "tanh"): 1,
    ("NCHW", True, True, "relu"): 2,
    ("NCHW", True, False, "relu"): 1,
    ("NCHW", False, True, None): 2,
    ("NCHW", False, False, "gelu"): 2,
    ("NHWC", True, False, "hardswish"): 2,  # cuDNN has no node for it
    ("NHWC", True, True, "hardsigmoid"): 2,
}


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_g18_what_is_fused_is_what_was_measured_and_the_rest_is_one_launch_more(make_pool, case):
    layout, bias, add, kind = case
    pool = make_pool()
    arrays = Arrays(pool)
    x, w, rest = given(arrays, bias, add, layout)
    assert launches(pool, lambda: conv2d(x, w, padding=1, activation=kind, pool=pool, **rest)) == FUSED[case]
    assert pool.stats()["operands_copied"] == 0


def test_what_is_launched_apart_with_some_options_is_not_with_others(make_pool):
    pool = make_pool()
    x, w, rest = given(Arrays(pool), True, True, "NHWC")
    for kind in ("tanh", "relu", "tanh", "relu"):
        count = launches(pool, lambda kind=kind: conv2d(x, w, padding=1, activation=kind, pool=pool, **rest))
        assert count == FUSED["NHWC", True, True, kind]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("kind", [None, "relu"])
def test_what_cudnn_has_no_plan_for_follows_in_one_launch(make_pool, most, kind):
    driver = Few(scheduler="adversarial", check_order=True)
    driver.most = most
    pool = make_pool(driver=driver)
    arrays = Arrays(pool, layout="NHWC")
    with driver.create_stream():
        x, w, rest = given(arrays, True, True)
        out = arrays.poisoned(2, 24, 7, 6)
        count = launches(pool, lambda: conv2d(x, w, padding=1, activation=kind, out=out, pool=pool, **rest))
        assert count == 1 + (most < 3 + (kind is not None))
        assert arrays.error(out, expected(arrays, x, w, rest, padding=1, activation=kind)) < TOLERANCE["float32"]


def test_what_was_refused_once_is_not_asked_for_at_each_call(make_pool, monkeypatch):
    driver = Few()
    driver.most = 1
    pool = make_pool(driver=driver)
    arrays = Arrays(pool, layout="NHWC")
    x, w, rest = given(arrays, True, True)
    asked = []
    build = PlanCache.get_or_build

    def counted(cache, *args):
        asked.append(args)
        return build(cache, *args)

    monkeypatch.setattr(PlanCache, "get_or_build", counted)

    def call(**options):
        before = len(asked)
        behind = {name: array for name, array in (rest | options).items() if array is not None}
        y = conv2d(x, w, padding=1, activation="relu", pool=pool, **behind)
        right = expected(arrays, x, w, behind, padding=1, activation="relu")
        assert arrays.error(y, right) < TOLERANCE["float32"]
        return len(asked) - before

    assert call() > 2
    assert call() == 0
    assert call(bias=None) > 0  # other parts are asked for on their own
    assert call(add=arrays.random(*rest["add"].shape, layout="NCHW")) > 0
    assert call() == 0
    pool.cache_clear()
    driver.most = 9  # as if another cuDNN was there
    assert launches(pool, call) == 1


def test_splits_are_forgotten_where_there_are_too_many(limits):
    limits(MOST_RECOLLECTED=3)
    splits = PlanCache().fused_parts
    for number in range(4):
        splits[number] = number
    assert dict(splits) == {3: 3}


WAYS = {
    "call": lambda pool, function, *args: function(*args),
    "branch": lambda pool, function, *args: in_fork(pool, lambda fork: fork.run(function, *args)),
    "map": lambda pool, function, *args: ParallelStates(2, pool=pool).map(function, *([each] * 2 for each in args))[1],
    "task": lambda pool, function, *args: as_task(pool, function, *args),
    "recorded": lambda pool, function, *args: replayed(pool, function, *args),
}


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_an_epilogue_in_every_way_of_calling(each_pool, layout, way):
    arrays = Arrays(each_pool, layout=layout)
    x, w, rest = given(arrays, True, True)
    y = WAYS[way](each_pool, lambda x, w: conv2d(x, w, padding=[1, 1], activation="relu", **rest), x, w)
    assert arrays.error(y, expected(arrays, x, w, rest, padding=1, activation="relu")) < TOLERANCE["float32"]


# Order and memory


def residual_of_a_sibling(scene):
    """A convolution whose residual another branch makes, added in a launch behind it."""
    arrays = Arrays(scene.pool)
    x, w, rest = given(arrays, False, True)
    image = arrays.random(2, 16, 7, 6)
    with scene.states.fork() as fork:
        add = fork.run(conv2d, image, w, padding=1, pool=scene.pool)
        y = fork.run(conv2d, x, w, padding=1, add=add, pool=scene.pool)
    return arrays.error(y, expected(arrays, x, w, rest | {"add": add}, padding=1))


@pytest.mark.parametrize("seed", range(6))
def test_g17_a_residual_that_is_added_behind_waits_for_its_branch(seed):
    with Scene(seed=seed) as scene:
        assert residual_of_a_sibling(scene) < TOLERANCE["float32"]


def test_g17_control_without_the_accesses_of_what_is_launched_behind(monkeypatch):
    pieces = GraphCall.pieces

    def of_the_first(call):
        call._more, more = (), call._more
        try:
            return pieces(call)
        finally:
            call._more = more

    monkeypatch.setattr(GraphCall, "pieces", of_the_first)
    wrong = 0
    for seed in range(6):
        try:
            with Scene(seed=seed) as scene:
                wrong += residual_of_a_sibling(scene) > TOLERANCE["float32"]
        except handlepool.ContractError:
            wrong += 1
    assert wrong


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", ["add", "bias"])
def test_an_out_over_what_is_added_is_refused_in_one_plan_and_in_two(make_pool, layout, name):
    pool = make_pool(driver=HostDriver() if name == "add" else Few())
    arrays = Arrays(pool)
    x, w, rest = given(arrays, True, True, layout)
    out = rest["add"]
    if name == "bias":
        out = arrays.poisoned(2, 24, 7, 6, layout=layout)
        rest["bias"] = out[0].transpose(1, 2, 0).reshape(-1)[:24] if layout == "NHWC" else out.reshape(-1)[:24]
    place = 2 + (name == "add")

    def call():
        with pytest.raises(ArgumentError, match=f"out= of conv2d shares memory with argument {place}"):
            conv2d(x, w, padding=1, out=out, pool=pool, **rest)

    assert launches(pool, call) == 0


WRONG = {
    "elsewhere": (DeviceMismatchError, "on device 1"),
    "misaligned": (ArgumentError, "begins 4 bytes past"),
    "a list": (ArrayTypeError, "is a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_wrong_residual_is_refused_before_anything_is_launched(make_pool, layout, wrong):
    pool = make_pool()
    arrays = Arrays(pool)
    x, w, rest = given(arrays, True, True, layout)
    conv2d(x, w, padding=1, pool=pool, **rest)
    if wrong == "elsewhere":
        with pool.driver.device(1):
            rest["add"] = given(arrays, True, True, layout)[2]["add"]
    elif wrong == "misaligned":
        memory = arrays.random(2 * 24 * 42 + 1)[1:]
        rest["add"] = (memory.reshape(2, 24, 7, 6)) if layout == "NCHW" else memory.reshape(2, 7, 6, 24).transpose(0, 3, 1, 2)
    else:
        rest["add"] = [1.0]
    error, match = WRONG[wrong]

    def call():
        with pytest.raises(error, match=rf"^conv2d: argument 3.*{match}"):
            conv2d(x, w, padding=1, pool=pool, **rest)

    assert launches(pool, call) == 0


# Geometry


@pytest.mark.parametrize(
    ("name", "plain", "ways"),
    [
        ("stride", (2, 1), ([2, 1], np.array([2, 1]), [np.int32(2), np.int64(1)])),
        ("dilation", (1, 2), ([1, 2], np.array([1, 2], np.uint8))),
        ("padding", (1, 2), ([1, 2], np.array([1, 2]), ((1, 1), (2, 2)), [[1, 1], [2, 2]], np.array([[1, 1], [2, 2]]))),
    ],
)
def test_a_sequence_of_integers_is_what_a_tuple_is_and_shares_its_plan(make_pool, name, plain, ways):
    pool = make_pool()
    arrays = Arrays(pool)
    x, w, _ = given(arrays, False, False)
    right = arrays.take(conv2d(x, w, pool=pool, **{name: plain}))
    for way in ways:
        assert np.array_equal(arrays.take(conv2d(x, w, pool=pool, **{name: way})), right)
        with ParallelStates(2, pool=pool).fork() as fork:
            y = fork.run(conv2d, x, w, pool=pool, **{name: way})
        assert np.array_equal(arrays.take(y), right)
    assert pool.stats()["plans_built"] == 1


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    size=st.tuples(st.integers(5, 7), st.integers(5, 7)),
    layouts=st.tuples(*[st.sampled_from(["NCHW", "NHWC"])] * 3),
    bias=st.booleans(),
    add=st.booleans(),
    kind=st.sampled_from((None, "relu", "swish")),
    given_out=st.booleans(),
)
def test_padding_that_differs_from_side_to_side(padding, stride, dilation, size, layouts, bias, add, kind, given_out):
    with handlepool.HandlePool(driver="host", check=True) as pool:
        arrays = Arrays(pool)
        x, w = arrays.random(2, 3, *size, layout=layouts[0]), arrays.random(4, 3, 3, 2, layout=layouts[1])
        geometry = {"padding": padding, "stride": stride, "dilation": dilation}
        shape = expected(arrays, x, w, {}, **geometry).shape
        rest = {"bias": arrays.random(4)} if bias else {}
        rest |= {"add": arrays.random(*shape, layout=layouts[2])} if add else {}
        out = arrays.poisoned(*shape, layout=layouts[2]) if given_out else None
        y = conv2d(x, w, **geometry, activation=kind, out=out, pool=pool, **rest)
        assert arrays.error(y, expected(arrays, x, w, rest, **geometry, activation=kind)) < TOLERANCE["float32"]


def test_g18_cudnn_is_given_the_same_padding_on_both_sides(make_pool):
    """What differs from side to side was not measured."""
    pool = make_pool()
    arrays = Arrays(pool, layout="NHWC")
    x, w, _ = given(arrays, False, False)
    plan = handlepool.ops.conv2d_plan(x, w, padding=((0, 1), (2, 1)), stride=2, pool=pool)
    assert "pre_padding" not in plan.graph
    assert [(copy.operand, copy.output) for copy in plan.copies] == [(2, True)]
    assert plan.outputs[0].shape == (2, 24, 3, 4)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_padding_that_differs_is_one_launch_with_a_copy_of_the_result(make_pool, layout):
    pool = make_pool()
    arrays = Arrays(pool, layout=layout)
    x, w, rest = given(arrays, True, False)
    for count in (1, 2):
        y = conv2d(x, w, padding=((1, 0), (2, 0)), activation="relu", pool=pool, **rest)
        assert (pool.driver.calls["launch"], pool.stats()["operands_copied"]) == (count, count)
    assert arrays.error(y, expected(arrays, x, w, rest, padding=((1, 0), (2, 0)), activation="relu")) < TOLERANCE["float32"]


def test_padding_that_differs_writes_no_more_than_a_view(arrays):
    whole = arrays.put(np.full((4, 48, 20, 20), 7.0))
    out = whole[::2, :24, 4:11:1, 4:9]
    x, w, _ = given(arrays, False, False)
    right = expected(arrays, x, w, {}, padding=((2, 0), (0, 1)))
    assert conv2d(x, w, padding=((2, 0), (0, 1)), out=out) is out
    assert arrays.error(out, right) < TOLERANCE["float32"]
    out[...] = 7
    assert (arrays.take(whole) == 7).all()


def test_a_residual_is_no_bias_once_its_geometry_is_known(arrays):
    for layout in ("NHWC", "NCHW"):
        x, w, rest = given(arrays, False, True, layout)
        conv2d(x, w, padding=1, **rest)
        with pytest.raises(ArgumentError, match=r"bias of shape \(2, 24, 7, 6\) for 24 filters"):
            conv2d(x, w, padding=1, bias=rest["add"])


def test_padding_that_differs_is_refused_where_it_would_take_too_large_a_copy_and_for_gradients(arrays, limits):
    x, w, _ = given(arrays, False, False)
    for call in (
        lambda: handlepool.conv2d_input_grad(arrays.random(2, 24, 6, 4), w, x.shape, padding=((1, 0), (0, 0))),
        lambda: handlepool.conv2d_weight_grad(x, arrays.random(2, 24, 6, 4), w.shape, padding=((1, 0), (0, 0))),
    ):
        with pytest.raises(GraphNotSupportedError, match=r"padding of \(1, 0\) before and \(0, 0\) after was not measured"):
            call()
    limits(MOST_COPIED=1000)
    with pytest.raises(ArgumentError, match=r"of shape \(2, 24, 7, 4\)\. Each call .* 5,376 bytes.*pad the images before"):
        conv2d(x, w, padding=((1, 0), (0, 0)), bias=arrays.random(24), activation="relu")
