"""elementwise, multiply and add over arrays that broadcast, on both drivers, against NumPy in float64; and what they refuse.

``HANDLEPOOL_EXPRESSIONS`` is the number of random functions.
"""

import math
import os
import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
from harness.arrays import FULL, Arrays
from harness.expressions import FLOATING, OTHERS, REFERENCES, Case, around, lying
from harness.kernel_cases import placed
from harness.scenes import Scene

import handlepool
from handlepool import ArgumentError, ArrayTypeError, TraceError, add, elementwise, multiply
from handlepool import math as over
from handlepool.graphs.expression import OTHER_NAMES, TYPES, VOCABULARY
from handlepool.tensors.layout import as_dtype

COUNT = int(os.environ.get("HANDLEPOOL_EXPRESSIONS", "400"))
ROUNDED = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}

OF_NUMPY = {"round": np.rint, "pow": lambda x, y: np.abs(x) ** y, "reciprocal": np.reciprocal, "where": np.where, "clip": np.clip}
WANTED = {name: REFERENCES.get(name) or OF_NUMPY.get(name) or getattr(np, name) for name in VOCABULARY}
"""What each function of the vocabulary computes in float64."""
TAKES = {**dict.fromkeys(VOCABULARY, 1), "where": 3, "clip": 3, "pow": 2}
TAKES |= dict.fromkeys("add subtract multiply divide maximum minimum".split(), 2)  # noqa: SIM905
TAKES |= dict.fromkeys("equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor".split(), 2)  # noqa: SIM905


@pytest.fixture
def scene():
    with Scene(seed=1) as scene:
        yield scene


@pytest.mark.parametrize("name", VOCABULARY)
@hypothesis.given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(FLOATING),
    small=st.booleans(),
)
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
def test_each_function_is_numpys_in_float64(name, shape, seed, dtype, small):
    random = np.random.default_rng(seed)
    with Scene(seed=1) as scene:
        xs = [random.standard_normal(shape if place else [*shape]) * (1 if small else 4) for place in range(TAKES[name])]
        if name == "pow":
            xs[0] = np.abs(xs[0])
        for place, x in enumerate(xs):  # some broadcast
            if place and shape and random.integers(2):
                xs[place] = x[(*(slice(1) for _ in shape),)]
        xs = [np.asarray(x).astype(as_dtype(dtype)) for x in xs]
        with np.errstate(all="ignore"):
            expected = np.asarray(WANTED[name](*(x.astype(np.float64) for x in xs)))
        found = scene.driver.asnumpy(getattr(over, name)(*map(scene.driver.asarray, xs), pool=scene.pool))
    assert found.dtype == (bool if expected.dtype == bool else as_dtype(dtype))
    if expected.dtype == bool:
        assert np.array_equal(found, expected)
        return
    rtol = 3 * ROUNDED[dtype] * (4 if name in ("pow", "exp", "expm1") else 1)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rtol, atol=4e-6 if dtype == "float32" else 1e-4)


def test_every_function_of_the_vocabulary_has_a_name_of_ours_and_is_found_by_numpys():
    assert {*over.__all__} == {*VOCABULARY}
    for name in VOCABULARY:
        assert getattr(over, name).__name__ == name
        assert "partial" not in getattr(over, name).__doc__
        assert pickle.loads(pickle.dumps(getattr(over, name))) is getattr(over, name)
    assert {name for name in VOCABULARY if hasattr(np, name)} >= {"exp", "abs", "where", "clip", "maximum", "isnan", "round"}


@pytest.mark.parametrize("part", range(4))
def test_random_functions_are_the_plain_function_on_numpy(part, make_driver, monkeypatch):
    tight = total = 0
    with Scene(make_driver()) as scene:
        for seed in range(part, COUNT, 4):
            case = Case(seed)
            function = elementwise(case.traced)
            if seed % 2:
                y = scene.driver.asnumpy(function(*case.args, pool=scene.pool))
            else:  # into an array that lies otherwise
                new = function(*case.args, pool=scene.pool)
                y, memory = placed(lying(case.random, new.shape, new.dtype.name))
                before = around(y, memory)
                assert function(*case.args, out=y, pool=scene.pool) is y
                scene.driver.asnumpy(new)
                assert around(y, memory) == before
            tight += case.check(y, f"seed {seed}")
            total += y.size
    assert tight > 0.9 * total  # most elements are held to what they are, and not to what rounding makes of them


def test_a_result_lies_as_the_first_array_of_its_shape_does(each_pool):
    arrays = Arrays(each_pool, "float16")
    x, gate = arrays.random(2, 8, 5, 7, layout="NHWC"), arrays.random(2, 8, 1, 1)
    assert multiply(x, gate).strides == x.strides
    assert multiply(gate, x).strides == x.strides
    assert multiply(arrays.random(2, 1, 5, 7), arrays.random(8, 1, 1)).strides == (560, 70, 14, 2)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 1, 1, 1), (2, 8, 1, 1), (8, 1, 1), (5, 1), (7,), (), (1, 8, 5, 7), (2, 1, 5, 7)]
)
def test_sums_and_products_by_row_column_channel_and_number(each_pool, shape, layout, dtype):
    arrays = Arrays(each_pool, dtype, layout)
    x, other = arrays.random(2, 8, 5, 7), arrays.random(*shape)
    values, others = arrays.take(x), arrays.take(other)
    for _ in range(2):  # the second one by the shortcut
        assert arrays.error(multiply(x, other), values * others) < ROUNDED[dtype]
        assert arrays.error(multiply(other, x, 2), 2 * values * others) < ROUNDED[dtype]
        assert arrays.error(add(x, other), values + others) < ROUNDED[dtype]
        assert arrays.error(add(other, x, activation="relu"), np.maximum(values + others, 0)) < ROUNDED[dtype]
        swish = 2 * values + others + 1.5
        assert arrays.error(add(x, other, x, 1.5, activation="swish"), swish / (1 + np.exp(-swish))) < 3 * ROUNDED[dtype]


def test_types_are_those_of_the_docstring(scene):
    put, pool = scene.driver.asarray, scene.pool
    array = {name: put(np.ones((2, 3), np.dtype(name) if name in OTHERS else as_dtype(name))) for name in TYPES}

    def type_of(function, *names):
        return elementwise(function)(*(array.get(name, name) for name in names), pool=pool).dtype.name

    for name in FLOATING:
        assert type_of(lambda x, y: x * y, name, name) == name
        assert type_of(lambda x: x * 2.5, name) == name
        assert type_of(lambda x, n: x + n, name, 3) == name
        for other in OTHERS:
            assert type_of(lambda x, y: x * y, other, name) == name
        assert type_of(lambda x: x > 0, name) == "bool"
        assert type_of(lambda x: x.astype("bfloat16"), name) == "bfloat16"
        assert type_of(lambda x: np.where(x > 0, 1.0, 0.0), name) == "float32"
    assert type_of(lambda x, y: x * y, "float16", "bfloat16") == "float32"
    assert type_of(lambda x, y: x * y, "float16", "float32") == "float32"
    for name in OTHERS:
        if name != "bool":
            assert type_of(lambda x, y: (x + y) / 2, name, name) == "float32"
            assert type_of(lambda x: x, name) == "float32"
            assert type_of(lambda x, y: (x / 2) * y, name, "float16") == "float32"
    assert type_of(lambda x: x, "bool") == "bool"
    assert type_of(lambda x, y: x & ~y, "bool", "bool") == "bool"


def test_nothing_is_rounded_before_the_result(each_pool):
    arrays = Arrays(each_pool, "float16")
    big, small = arrays.put(np.full((4, 8), 2048.0)), arrays.put(np.full((4, 8), 0.75))
    in_one, rounded = elementwise(lambda x, y: x + y + y), elementwise(lambda x, y: (x + y).astype("float16") + y)
    assert arrays.take(in_one(big, small)).ravel().tolist() == [2050.0] * 32
    assert arrays.take(rounded(big, small)).ravel().tolist() == [2048.0] * 32
    assert arrays.take(elementwise(lambda x: x * x / x)(arrays.put([60000.0]))).tolist() == [60000.0]


def test_integers_do_not_wrap_around(scene):
    put, take, pool = scene.driver.asarray, scene.driver.asnumpy, scene.pool
    image = put(np.full((2, 3, 4, 4), 250, np.uint8))
    scaled = elementwise(lambda x, m: ((x + 10) / 255 - m).astype("float16"))
    y = take(scaled(image, put(np.full((3, 1, 1), 0.5, np.float32)), pool=pool))
    assert y.dtype == np.float16
    assert np.allclose(y, 260 / 255 - 0.5, atol=1e-3)
    assert take(elementwise(lambda x: x)(put(np.array([2**24 + 1, -(2**31)], np.int32)), pool=pool)).tolist() == [2**24, -(2**31)]


def test_numbers_are_parameters_and_keywords_are_constants(scene):
    put, take, pool = scene.driver.asarray, scene.driver.asnumpy, scene.pool
    x, traced = put(np.ones((2, 8), np.float32)), []

    @elementwise
    def f(x, n=5.0, *, mode="times", k=1.0):
        traced.append(mode)
        if mode == "times":
            return x * n * k
        return x + n + k

    for _ in range(2):
        for args, options, expected in [
            ((), {}, 5),
            ((2,), {}, 2),
            ((2.5,), {"k": 2}, 5),
            ((np.float32(2),), {"mode": "plus"}, 4),
            ((True,), {"k": 3.0}, 3),
            ((-0.0,), {}, 0),
            ((math.nan,), {}, math.nan),
            ((1e300,), {}, math.inf),
            ((10**400,), {}, math.inf),
        ]:
            found = take(f(x, *args, **options, pool=pool))
            assert np.array_equal(found, np.full((2, 8), expected, np.float32), equal_nan=True)
    assert len(traced) == 8  # each once; the two that are infinite in float32 are one
    for zero, sign in ((0.0, False), (-0.0, True), (0.0, False)):
        assert np.signbit(take(f(x, zero, pool=pool))).all() == sign
        assert np.signbit(take(f(x, 1.0, k=zero, pool=pool))).all() == sign


def test_functions_are_parts_of_each_other(each_pool):
    arrays = Arrays(each_pool)

    @elementwise
    def inner(x, *, slope=0.1):
        return np.where(x > 0, x, x * slope)

    @elementwise
    def outer(x, y):
        space = x.__array_namespace__()
        return add(multiply(inner(x, slope=0.5), over.hardswish(y)), space.exp(x)) - scipy.special.expit(y) + x.clip(0, 1) - +y

    x, y = arrays.random(2, 8, 3, 3), arrays.random(8, 1, 1)
    a, b = arrays.take(x), arrays.take(y)
    expected = np.where(a > 0, a, a * 0.5) * REFERENCES["hardswish"](b) + np.exp(a) - 1 / (1 + np.exp(-b)) + a.clip(0, 1) - b
    assert arrays.error(outer(x, y), expected) < FULL


def test_operators_from_both_sides(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.put([0.5, -1.5, 2.0])
    a = arrays.take(x)
    half = np.float64(0.5)
    for function in (
        lambda x: (1 + x - 2) * (3 - x) / 4 + 1 / x + 2**x - -x,
        lambda x: abs(x) ** 0.5 + x**2 + x**3 + half * x + half / x + np.float32(2) - x,
        lambda x: np.where((1 < x) | (x <= -1) ^ (x == 2) & ~(x != 0.5), 1.5, -1.5),  # noqa: SIM300
        lambda x: np.where(True & (x > 0), half, np.where(x, 1, 2)),
    ):
        assert arrays.error(elementwise(function)(x), function(a)) < FULL


def test_nan_and_infinities_are_as_torchs(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.put([np.nan, -np.inf, -1.0, -0.0, 0.0, 1.0, np.inf])
    wanted = {
        over.relu: [np.nan, 0, 0, 0, 0, 1, np.inf],
        over.sigmoid: [np.nan, 0, 1 / (1 + math.e), 0.5, 0.5, 1 / (1 + 1 / math.e), 1],
        over.silu: [np.nan, np.nan, -1 / (1 + math.e), 0, 0, 1 / (1 + 1 / math.e), np.inf],
        over.hardsigmoid: [np.nan, 0, 1 / 3, 0.5, 0.5, 2 / 3, 1],
        over.hardswish: [np.nan, np.nan, -1 / 3, 0, 0, 2 / 3, np.inf],
        over.reciprocal: [np.nan, 0, -1, -np.inf, np.inf, 1, 0],
        over.log: [np.nan, np.nan, np.nan, -np.inf, -np.inf, 0, np.inf],
        elementwise(lambda x: np.maximum(x, 0.5)): [np.nan, 0.5, 0.5, 0.5, 0.5, 1, np.inf],
        elementwise(lambda x: np.minimum(0.5, x)): [np.nan, -np.inf, -1, 0, 0, 0.5, 0.5],
        elementwise(lambda x: np.clip(x, -0.5, 0.5)): [np.nan, -0.5, -0.5, 0, 0, 0.5, 0.5],
        elementwise(lambda x: np.clip(x, 1.0, -1.0)): [np.nan, -1, -1, -1, -1, -1, -1],
        elementwise(lambda x: x / 0): [np.nan, -np.inf, -np.inf, np.nan, np.nan, np.inf, np.inf],
    }
    for function, expected in wanted.items():
        np.testing.assert_allclose(arrays.take(function(x)), expected, rtol=1e-6)
    assert arrays.take(over.isnan(x)).tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert arrays.take(over.isinf(x)).tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert arrays.take(over.isfinite(x)).tolist() == [0, 0, 1, 1, 1, 1, 0]


def test_empty_arrays_give_empty_results(each_pool):
    arrays = Arrays(each_pool, "float16")
    for shape, other, result in [((0, 8, 3, 3), (8, 1, 1), (0, 8, 3, 3)), ((2, 1, 3), (0, 1), (2, 0, 3)), ((0,), (), (0,))]:
        x, s = arrays.random(*shape), arrays.random(*other)
        for y in (multiply(x, s), add(x, s), over.exp(multiply(x, s))):
            assert (y.shape, y.dtype) == (result, arrays.dtype)
        out = arrays.random(*result)
        assert multiply(x, s, out=out) is out


def test_a_result_may_be_written_over_an_array_that_lies_as_it_does(each_pool):
    arrays = Arrays(each_pool)
    x, s = arrays.random(2, 8, 6, 6), arrays.random(2, 8, 1, 1)
    expected = arrays.take(x) * arrays.take(s) + arrays.take(x)
    f = elementwise(lambda x, s: x * s + x)
    for _ in range(2):
        y = x.copy()
        assert f(y, s, out=y) is y
        assert arrays.error(y, expected) < FULL
    gated = arrays.random(2, 8, 6, 6, layout="NHWC")
    values = arrays.take(gated)
    assert arrays.error(multiply(gated, s, out=gated), values * arrays.take(s)) < FULL


def test_an_out_that_overlaps_an_input_otherwise_is_refused(each_pool):
    arrays = Arrays(each_pool)
    memory = arrays.random(4 * 64)
    x, later = memory[:128].reshape(2, 8, 8), memory[64:192].reshape(2, 8, 8)
    row = memory[:8].reshape(1, 1, 8)
    for call in (
        lambda: multiply(x, 2.0, out=later),
        lambda: multiply(x, later, out=later.reshape(2, 8, 8).transpose(0, 2, 1)),
        lambda: multiply(later, row, out=x),
        lambda: add(x, row, out=x),
    ):
        with pytest.raises(ArgumentError, match="shares memory with argument"):
            call()


def traced_errors():
    """What no kernel over elements does, with what the message has of it."""
    kept = []

    def keep(x):
        kept.append(x)
        return x * kept[0]

    yield lambda x: 1 if x > 0 else 2, ("where(condition, a, b)",)
    yield lambda x: (x > 0) and x, ("where",)
    yield lambda x: -1 < x < 1, ("where", "&")
    yield lambda x: x.sum(), (".sum", "hardswish", "exp")
    yield lambda x: np.cumsum(x), ("numpy.cumsum", "hardswish")
    yield lambda x: np.arctan2(x, x), ("numpy.arctan2", "exp")
    yield lambda x: np.add.reduce(x), ("numpy.add.reduce",)
    yield lambda x: np.add(x, x, dtype=np.float16), ("dtype=",)
    yield lambda x: np.exp(x, where=x > 0), ("where=",)
    yield lambda x: x @ x, ("@",)
    yield lambda x: x // 2, ("//",)
    yield lambda x: x % 2, ("%",)
    yield lambda x: x & 1, ("&", "truth")
    yield lambda x: ~x, ("~",)
    yield lambda x: (x > 0) + (x < 0), ("add", "truth values")
    yield lambda x: x * 1j, ("1j", "real")
    yield lambda x: x + None, ("None",)
    yield lambda x: x * [1, 2], ("list",)
    yield lambda x: x * np.ones(3), ("positional argument",)
    yield lambda x: math.exp(x), ("numpy.exp",)
    yield lambda x: float(x), ("float(x)",)
    yield lambda x: x[0], ("index",)
    yield lambda x: sum(x), ("loop",)
    yield lambda x: len(x) * x, ("len()",)
    yield lambda x: x.astype("int32"), ("int32", "float16")
    yield lambda x: (x, x), ("function for each result",)
    yield lambda x: None, ("None",)
    yield lambda x: 3.0, ("3.0",)
    yield lambda x: handlepool.mean2d(x), ("Traced",)
    yield lambda x: over.exp(x, out=x), ("out=",)
    yield lambda x: over.exp(x, x), ("exp", "1", "2")
    yield lambda x: math.gcd(x, 2), ("numpy.exp",)
    yield lambda x: format(x, "d"), ("format", "hardswish")
    yield keep, ()


@pytest.mark.parametrize("place", range(len([*traced_errors()]) - 1))
def test_what_no_kernel_can_do_is_a_trace_error_with_its_name(pool, place):
    function, parts = [*traced_errors()][place]
    x = pool.driver.asarray(np.ones((2, 3), np.float32))
    with pytest.raises((TraceError, ArrayTypeError)) as caught:
        elementwise(function)(x)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_value_that_was_kept_of_another_call_is_refused(scene):
    keep = elementwise([*traced_errors()][-1][0])
    x = scene.driver.asarray(np.ones((2, 3), np.float32))
    keep(x, pool=scene.pool)
    with pytest.raises(TraceError, match="earlier call"):
        keep(x[:1], pool=scene.pool)


def test_errors_are_what_a_person_would_catch(scene):
    x = scene.driver.asarray(np.ones((2, 3), np.float32))
    for kind in (TypeError, AttributeError, ValueError, handlepool.HandlePoolError):
        with pytest.raises(kind):
            elementwise(lambda x: x.mean())(x, pool=scene.pool)


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    asarray = each_pool.driver.asarray
    x, y = arrays.random(2, 8, 6, 8), arrays.random(2, 8, 6, 4)
    mul = elementwise(lambda x, y, **options: x * y)
    named = elementwise(lambda x, *, k: x * k)
    for parts, call in [
        (("(2, 8, 6, 8)", "(2, 8, 6, 4)", "broadcast"), lambda: mul(x, y)),
        (("(2, 8, 6, 8)", "(2, 8, 6, 4)"), lambda: multiply(x, y)),
        (("argument 1", "(2, 8, 6, 4)", "(2, 8, 6, 8)"), lambda: add(x, y)),
        (("argument 0", "complex64", "float16"), lambda: mul(asarray(np.ones(3, np.complex64)), 1)),
        (("argument 1", "float64"), lambda: mul(x, asarray(np.ones(8)))),
        (("argument 1", "1j"), lambda: mul(x, 1j)),
        (("(2, 8, 6, 4)", "(2, 8, 6, 8)"), lambda: mul(x, x, out=y)),
        (("float16", "float32"), lambda: mul(x, x, out=asarray(np.ones(x.shape, np.float16)))),
        (("negative",), lambda: mul(x[:, :, ::-1], x)),
        (("k=", "by position"), lambda: named(x, k=x)),
        (("k=[1]", "tuple"), lambda: named(x, k=[1])),
        (("63",), lambda: multiply(*[x] * 64)),
        (("without arrays",), lambda: mul(1.0, 2.0)),
        (("argument 1", "does not depend"), lambda: elementwise(lambda x, y: x)(x, y)),
        (("pool",), lambda: mul(x, x, pool=3)),
    ]:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert all(part in str(caught.value) for part in parts), str(caught.value)
    for call in (lambda: mul(x, [1, 2]), lambda: mul(x, None), lambda: mul(x, "1")):
        with pytest.raises(ArrayTypeError, match="argument 1"):
            call()
    with pytest.raises(TypeError):
        mul(x)
    for function, part in ((3, "3"), (lambda x, out: x, "out"), (lambda x, *, pool: x, "pool")):
        with pytest.raises(ArgumentError, match=part):
            elementwise(function)


def test_a_function_of_too_many_operations_is_refused(scene):
    def long(x):
        for step in range(3000):
            x = x * 1.5 + step
        return x

    with pytest.raises(TraceError, match="2,000"):
        elementwise(long)(scene.driver.asarray(np.ones(3, np.float32)), pool=scene.pool)


def test_a_function_of_a_module_is_pickled_by_its_name_and_a_local_one_refused():
    with pytest.raises(ArgumentError, match="module"):
        pickle.dumps(elementwise(lambda x: x * 2))
    assert repr(over.exp) == "<ElementwiseFunction exp>"
    assert OTHER_NAMES["absolute"] == "abs"


def squeeze_and_excite(x, w1, b1, w2, b2):
    """A gate for each channel of images, in four launches."""
    means = handlepool.mean2d(x, keepdims=True)
    inner = handlepool.conv2d(means, w1, bias=b1, activation="relu")
    return gated(x, handlepool.conv2d(inner, w2, bias=b2))


@elementwise
def gated(x, s):
    return x * over.hardsigmoid(s)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_squeeze_and_excite_is_four_launches(each_pool, layout):
    arrays = Arrays(each_pool, "float32", layout)
    x, w1, w2 = arrays.random(2, 16, 7, 5), arrays.random(4, 16, 1, 1), arrays.random(16, 4, 1, 1)
    b1, b2 = arrays.random(4), arrays.random(16)
    a, f1, f2, c1, c2 = map(arrays.take, (x, w1, w2, b1, b2))
    inner = np.maximum(a.mean((2, 3)) @ f1[:, :, 0, 0].T + c1, 0)
    s = REFERENCES["hardsigmoid"](inner @ f2[:, :, 0, 0].T + c2)[:, :, None, None]
    tolerance = FULL if each_pool.driver.name == "host" else 2e-3
    assert arrays.error(squeeze_and_excite(x, w1, b1, w2, b2), a * s) < tolerance
    program = handlepool.record(squeeze_and_excite, x, w1, b1, w2, b2, lanes=2)
    assert len(program.explain().nodes) == 4
    assert arrays.error(program(x.copy(order="K"), w1, b1, w2, b2), a * s) < tolerance
