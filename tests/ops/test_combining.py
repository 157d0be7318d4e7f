"""add and concat on both drivers, against NumPy in float64, and what they refuse."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.arrays import FULL, Arrays
from harness.scenes import Scene

from handlepool import ArgumentError, ArrayTypeError, add, concat
from handlepool.ops import ACTIVATIONS
from handlepool.testing import reference

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": FULL}
"""Of one rounding."""


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sum_is_the_reference_and_lies_as_the_first_array(each_pool, dtype, layout, activation):
    arrays = Arrays(each_pool, dtype, layout)
    xs = [arrays.random(2, 16, 5, 7) for _ in range(3)]
    total = sum(map(arrays.take, xs))
    expected = total if activation is None else reference.ACTIVATIONS[activation](total)
    for _ in range(2):  # the second one by the shortcut
        y = add(*xs, activation=activation)
        assert y.strides == xs[0].strides
        assert arrays.error(y, expected) < TOLERANCE[dtype]


@hypothesis.given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=5),
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float16", "float32"]),
    given=st.booleans(),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_sums_and_concatenations_of_any_shape_and_order_of_axes(shape, count, seed, dtype, given):
    random = np.random.default_rng(seed)

    def values(*extents):
        """In memory in any order of the axes."""
        order = random.permutation(len(extents))
        made = random.standard_normal([extents[axis] for axis in order]).astype(dtype)
        return made.transpose(np.argsort(order))

    with Scene(seed=1) as scene:
        put, take, pool = scene.driver.asarray, scene.driver.asnumpy, scene.pool
        xs = [values(*shape) for _ in range(count)]
        out = put(np.full_like(values(*shape), np.nan)) if given else None
        y = add(*map(put, xs), out=out, pool=pool)
        expected = np.sum([x.astype(np.float64) for x in xs], 0)
        np.testing.assert_allclose(take(y).astype(np.float64), expected, rtol=1e-3, atol=4e-3 if dtype == "float16" else 1e-5)
        if shape:
            axis = int(random.integers(-len(shape), len(shape)))
            shapes = [[*shape] for _ in range(count)]
            for each in shapes:
                each[axis] = int(random.integers(1, 5))
            xs = [values(*each) for each in shapes]
            assert np.array_equal(take(concat([*map(put, xs)], axis, pool=pool)), np.concatenate(xs, axis))


def test_a_sum_is_made_in_float32_and_rounded_once(each_pool):
    arrays = Arrays(each_pool, "float16")
    big, small = (arrays.put(np.full((8, 33), value)) for value in (2048.0, 0.75))
    assert arrays.take(add(big, small, small)).ravel().tolist() == [2050.0] * 264  # 2048 + 0.75 is 2048 in float16


def test_a_sum_may_be_written_over_one_of_its_arrays(each_pool):
    arrays = Arrays(each_pool)
    x, y = arrays.random(2, 8, 6, 6), arrays.random(2, 8, 6, 6)
    expected = np.maximum(arrays.take(x) + 2 * arrays.take(y), 0)
    assert add(x, y, y, activation="relu", out=y) is y
    assert arrays.error(y, expected) < FULL
    with pytest.raises(ArgumentError, match="shares memory with argument 0"):
        add(x[:1], out=x.reshape(-1)[64 : 64 + 288].reshape(1, 8, 6, 6))


def test_a_nan_stays_one_through_relu(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.put([np.nan, -np.inf, 0.0, np.inf])
    assert np.array_equal(arrays.take(add(x, activation="relu")), [np.nan, 0, 0, np.inf], equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_concatenation_has_every_array_in_its_place(each_pool, axis, layout, dtype):
    arrays = Arrays(each_pool, dtype, layout)
    shapes = [[2, 8, 3, 4] for _ in range(3)]
    for each, extent in zip(shapes, (16, 8, 3), strict=True):
        each[axis] = extent
    xs = [arrays.put(np.random.default_rng(n).integers(-99, 99, each)) for n, each in enumerate(shapes)]
    expected = np.concatenate([arrays.take(x) for x in xs], axis)
    y = concat(xs, axis)
    assert np.argsort(y.strides).tolist() == np.argsort(xs[0].strides).tolist()
    assert np.array_equal(arrays.take(y), expected)
    out = arrays.put(np.zeros(expected.shape), "NHWC" if layout == "NCHW" else "NCHW")
    assert concat(tuple(xs), axis, out=out) is out
    assert np.array_equal(arrays.take(out), expected)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_lies_in_its_place_stays_there_and_the_rest_is_copied(each_pool, layout):
    arrays = Arrays(each_pool, "float16", layout)
    a, y = arrays.random(2, 8, 3, 4), arrays.poisoned(2, 32, 3, 4)
    for _ in range(2):  # the second time it is known
        y[...] = 0
        b, d = (add(arrays.random(2, 8, 3, 4), out=y[:, first : first + 8]) for first in (8, 24))
        parts = [arrays.take(each) for each in (a, b, a, d)]
        assert concat([a, b, a, d], 1, out=y) is y
        assert np.array_equal(arrays.take(y), np.concatenate(parts, 1))
    concat([y[:, :8], y[:, 8:]], 1, out=y)  # nothing is left to be done
    assert np.array_equal(arrays.take(y), np.concatenate(parts, 1))
    for wrong in ([d, a, a, a], [a, y[:, 16:24], a, a], [a, a, y[:, 8:24:2], a]):
        with pytest.raises(ArgumentError, match="out= of concat shares memory with argument"):
            concat(wrong, 1, out=y)


def test_sixty_three_arrays_are_the_most(each_pool):
    arrays = Arrays(each_pool)
    xs = [arrays.random(1, 4, 2, 2) for _ in range(64)]
    expected = [*map(arrays.take, xs[:63])]
    assert np.array_equal(arrays.take(concat(xs[:63], 1)), np.concatenate(expected, 1))
    assert arrays.error(add(*xs[:63]), np.sum(expected, 0)) < FULL
    for call, name in ((lambda: concat(xs, 1), "concat"), (lambda: add(*xs), "add")):
        with pytest.raises(ArgumentError, match=rf"{name}: 64 arrays; .*at most 63"):
            call()
    assert np.array_equal(arrays.take(concat([concat(xs[:63], 1), *xs[63:]], 1)), np.concatenate([*map(arrays.take, xs)], 1))


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    asarray = each_pool.driver.asarray
    x, y = arrays.random(2, 8, 6, 8), arrays.random(2, 8, 6, 4)
    half = asarray(np.ones((2, 8, 6, 8), np.float16))
    for match, call in {
        r"add: argument 1 is of shape \(2, 8, 6, 4\) and argument 0 of \(2, 8, 6, 8\)": lambda: add(x, y),
        "add: argument 1 is float16 and argument 0 is float32": lambda: add(x, half),
        "add: argument 0 is int32; it must be one of": lambda: add(asarray(np.ones(8, np.int32))),
        "add: activation='rely'; it can be relu": lambda: add(x, activation="rely"),
        "add: activation=3": lambda: add(x, activation=3),
        r"add: activation=\['relu'\]; it can be .*, or None": lambda: add(x, activation=["relu"]),
        r"add: activation=<numpy.ndarray .*>; it can be .*, or None": lambda: add(x, activation=np.ones(2)),
        r"add: argument 1 is of shape \(0, 8, 6, 8\)": lambda: add(x, x[:0]),
        "concat was called without arrays": lambda: concat([], 1),
        r"concat: argument 1 has shape \(2, 8, 6, 4\) .* only along axis 1": lambda: concat([x, y], 1),
        r"concat: argument 1 has shape \(8, 6, 8\)": lambda: concat([x, x[0]], 0),
        "concat: axis=4; it must be an integer from -4 to 3 for 4 axes": lambda: concat([x, x], 4),
        "concat: axis=-5": lambda: concat([x, x], -5),
        "concat: axis=True": lambda: concat([x, x], True),
        "concat: argument 0 has no axes, so it has no axis=0": lambda: concat([asarray(np.float32(1))], 0),
        "concat: axis=None": lambda: concat([x, x], None),
        r"concat: axis=\[1\]; it must be an integer": lambda: concat([x, x], [1]),
        r"concat: axis=<numpy.ndarray .*>; it must be an integer": lambda: concat([x, x], np.array([1, 0])),
        "concat: argument 1 is float16 and argument 0 is float32": lambda: concat([x, half], 1),
        "concat takes a list or a tuple of arrays, not <": lambda: concat(x, 1),
        "concat takes arrays, axis by position": lambda: concat([x, x], 1, x),
        r"must be float32 of shape \(2, 16, 6, 8\)": lambda: concat([x, x], 1, out=x),
        "shares memory with argument 0": lambda: concat([x[1:], x[:1]], 0, out=x),
        "has the strides .* negative": lambda: add(x[:, :, ::-1]),
        "its elements overlap": lambda: (
            add(x, out=np.lib.stride_tricks.as_strided(arrays.take(x).astype("f4"), x.shape, (0,) * 4))
            if each_pool.driver.name == "host"
            else concat([x, x], 1, out=x[:0])
        ),
    }.items():
        with pytest.raises(ArgumentError, match=match if "overlap" not in match else "overlap|the output is"):
            call()
    with pytest.raises(ArrayTypeError, match="add: argument 1 is a list"):
        add(x, [x])
    for incomplete in (add, lambda: concat([x, x])):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            incomplete()


def test_what_begins_in_its_place_and_lies_otherwise_is_refused(each_pool):
    arrays = Arrays(each_pool)
    y, x = arrays.random(8, 4), arrays.random(4, 4)
    with pytest.raises(ArgumentError, match="out= of concat shares memory with argument 0"):
        concat([y[:4].T, x], 0, out=y)
