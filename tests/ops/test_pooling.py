"""max_pool2d, avg_pool2d and mean2d on both drivers, against NumPy in float64, and what they refuse."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.arrays import FULL, Arrays
from harness.scenes import Scene

import handlepool
from handlepool import ArgumentError, avg_pool2d, max_pool2d, mean2d
from handlepool.tensors.layout import ArraySpec
from handlepool.testing import reference

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": FULL}
"""Of one rounding."""


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [3, (2, 4), [1, 1]], ids=str)
def test_pooling_is_the_reference_and_lies_as_the_images(each_pool, window, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.random(2, 16, 9, 8)
    values, plain = arrays.take(x), tuple(window) if isinstance(window, list) else window
    for _ in range(2):  # the second one by the shortcut
        largest, mean = max_pool2d(x, window), avg_pool2d(x, window, stride=[2, 1])
        assert np.argsort(largest.strides).tolist() == np.argsort(x.strides).tolist()
        assert arrays.error(largest, reference.max_pool2d(values, plain)) == 0
        assert arrays.error(mean, reference.avg_pool2d(values, plain, stride=(2, 1))) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 40, 7, 7), (1, 3, 1, 9), (3, 8, 30, 31)], ids=str)
def test_mean2d_is_the_mean_of_each_channel(each_pool, shape, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.random(*shape)
    expected = arrays.take(x).mean((2, 3))
    kept, flat = mean2d(x, keepdims=True), mean2d(x)
    assert kept.shape == (*shape[:2], 1, 1)
    assert arrays.error(flat, expected) < TOLERANCE[dtype] * 3  # the sum is near zero
    assert arrays.error(kept.reshape(shape[:2]), expected) < TOLERANCE[dtype] * 3


@hypothesis.given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.none() | st.integers(1, 3) | st.tuples(st.integers(1, 4), st.integers(1, 12)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    counted=st.booleans(),
    ceil_mode=st.booleans(),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
    dtype=st.sampled_from(["float16", "float32"]),
    nan=st.booleans(),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_generated_geometries(shape, window, stride, padding, counted, ceil_mode, layouts, dtype, nan):
    padding = tuple(min(pad, extent // 2) for pad, extent in zip(padding, window, strict=True))
    padding = tuple(map(min, padding, shape[2:]))
    hypothesis.assume(all(e + 2 * p >= w for e, p, w in zip(shape[2:], padding, window, strict=True)))
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype, layouts[0])
        values = np.random.default_rng(3).standard_normal(shape).astype(dtype)
        if nan:
            values[-1, -1, -1, 0] = np.nan
        x, options = arrays.put(values), {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
        for function, more in ((max_pool2d, {}), (avg_pool2d, {"count_include_pad": counted})):
            expected = getattr(reference, function.__name__)(values, window, **options, **more)
            out = None if layouts[1] is None else arrays.poisoned(*expected.shape, layout=layouts[1])
            y = function(x, window, **options, **more, out=out, pool=scene.pool)
            assert out is None or y is out
            np.testing.assert_allclose(arrays.take(y), expected, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-3)


def test_a_nan_is_the_largest_and_what_is_padded_never_is(each_pool):
    arrays = Arrays(each_pool)
    values = np.full((1, 2, 4, 4), -np.inf)
    values[0, 1] = -7
    values[0, 1, 0, 0] = np.nan
    y = arrays.take(max_pool2d(arrays.put(values), 3, stride=2, padding=1))
    assert (y[0, 0] == -np.inf).all()
    assert np.isnan(y[0, 1]).tolist() == [[True, False], [False, False]]
    assert (y[0, 1].ravel()[1:] == -7).all()


def test_a_mean_counts_what_is_padded_or_does_not(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.put(np.full((1, 1, 2, 2), 9.0))
    assert arrays.take(avg_pool2d(x, 3, stride=1, padding=1)).ravel().tolist() == [4, 4, 4, 4]
    assert arrays.take(avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)).ravel().tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_rounded_up_a_last_window_begins_in_the_image_and_counts_what_is_padded_alone(each_pool, layout):
    arrays = Arrays(each_pool, layout=layout)
    x = arrays.put(np.full((1, 8, 6, 5), 9.0))
    for window, stride, padding, counts in [
        (3, 2, 0, (3, 2)),  # of the rows, one window exceeds the image; of the columns, none
        (2, 4, 0, (2, 2)),  # a window that is of the last column alone
        (2, 3, 1, (3, 2)),  # a third one of columns would begin behind the image
        (1, 5, 0, (2, 1)),
    ]:
        options = {"stride": stride, "padding": padding, "ceil_mode": True}
        largest, mean = max_pool2d(x, window, **options), avg_pool2d(x, window, **options)
        assert largest.shape == mean.shape == (1, 8, *counts)
        assert (arrays.take(largest) == 9).all()
        assert arrays.error(mean, reference.avg_pool2d(arrays.take(x), window, **options)) < TOLERANCE["float32"]
        inside = avg_pool2d(x, window, **options, count_include_pad=False)
        assert (arrays.take(inside) == 9).all()
    assert arrays.take(avg_pool2d(x, 3, stride=2, ceil_mode=True))[0, 0, -1, 0] == 9  # of six pixels, not of nine


def test_views_in_and_out(each_pool):
    arrays = Arrays(each_pool, "float16", "NHWC")
    x, y = arrays.random(2, 32, 9, 8), arrays.poisoned(2, 48, 4, 4)
    for images, out in ((x[:, 8:24], y[:, 16:32]), (x[:, ::2], y[:, :16]), (x[:, :16, 1:], y[:, 32:])):
        assert max_pool2d(images, 2, out=out) is out
        assert arrays.error(out, reference.max_pool2d(arrays.take(images), 2)) == 0


@pytest.mark.parametrize("function", [max_pool2d, avg_pool2d], ids=lambda function: function.__name__)
def test_bad_input_is_a_typed_error_with_the_numbers(each_pool, function):
    arrays = Arrays(each_pool)
    x, name = arrays.random(2, 8, 6, 8), function.__name__
    for match, call in {
        "a window of 7 x 3 pixels exceeds images of 6 x 8 with a padding of 0 and 0": lambda: function(x, (7, 3)),
        r"stride=0; it must be an integer, or two integers, each 1 or more": lambda: function(x, 2, stride=0),
        r"stride=\(1, -1\)": lambda: function(x, 2, stride=(1, -1)),
        "padding=-1": lambda: function(x, 2, padding=-1),
        "padding=2 is more than half of a window of 3 x 3": lambda: function(x, 3, padding=2),
        r"padding=\(2, 0\) is more than half of a window of 3 x 4": lambda: function(x, (3, 4), padding=(2, 0)),
        r"padding=\(0, 2\) is more than half of a window of 4 x 3": lambda: function(x, (4, 3), padding=(0, 2)),
        "a padding of 7 and 0 pixels exceeds the size of the images, 6 x 8": lambda: function(x, (14, 1), padding=(7, 0)),
        "a padding of 0 and 9 pixels exceeds the size of the images, 6 x 8": lambda: function(x, (1, 18), padding=(0, 9)),
        "a window of 7 x 1 pixels exceeds images of 6 x 8": lambda: function(x, (7, 1), stride=2, ceil_mode=True),
        "a padding of 1000000 and 1000000 pixels exceeds the size of the images, 6 x 8 pixels": lambda: function(
            x, 2 * 10**6, padding=10**6
        ),
        "a window of 1180591620717411303424 x 1180": lambda: function(x, 2**70),
        "window=0": lambda: function(x, 0),
        r"window=\(1, 2, 3\)": lambda: function(x, (1, 2, 3)),
        "window=True": lambda: function(x, True),
        "window=1.5": lambda: function(x, 1.5),
        "window='3'": lambda: function(x, "3"),
        "window=None": lambda: function(x, None),
        r"window=<.* of shape \(2, 8, 6, 8\), .*>; it must be an integer, or two": lambda: function(x, x),
        r"window=<numpy.ndarray of shape \(2,\), float64>; it must be": lambda: function(x, np.array([2.0, 2.0])),
        r"window=<numpy.ndarray of shape \(5,\), int64>; it must be": lambda: function(x, np.arange(5)),
        r"padding=<numpy.ndarray of shape \(2,\), .*>; it must be .* 0 or more": lambda: function(
            x, 2, padding=np.array([-1, 0])
        ),
        r"window={2: 2}; it must be an integer, or two": lambda: function(x, {2: 2}),
        "window=b'12'; it must be": lambda: function(x, b"12"),
        r"takes one array of images \(N, C, H, W\), not \(8, 6, 8\)": lambda: function(x[0], 2),
        "x is int32; it must be one of": lambda: function(each_pool.driver.asarray(np.ones((1, 1, 4, 4), np.int32)), 2),
        r"out= of \w+ is float32 of shape \(2, 8, 6, 8\); .* must be float32 of shape \(2, 8, 3, 4\)": lambda: function(
            x, 2, out=x
        ),
        "shares memory with argument 0": lambda: function(x, 1, out=x),
        "out= holds 2 arrays": lambda: function(x, 1, out=(x, x)),
        "has the strides .* negative": lambda: function(x[:, :, ::-1], 2),
        f"{name} takes x, window by position": lambda: function(x, 2, 2),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()
    assert function(x, np.int64(2), stride=(np.int8(2), 2)).shape == (2, 8, 3, 4)
    assert function(x, 2, stride=2**70).shape == (2, 8, 1, 1)


def test_bad_flags_are_typed_errors(each_pool):
    x = Arrays(each_pool).random(2, 8, 6, 8)
    with pytest.raises(ArgumentError, match="count_include_pad=0; it must be True or False"):
        avg_pool2d(x, 2, count_include_pad=0)
    with pytest.raises(ArgumentError, match="max_pool2d: ceil_mode=1; it must be True or False"):
        max_pool2d(x, 2, ceil_mode=1)
    with pytest.raises(ArgumentError, match="keepdims=2; it must be True or False"):
        mean2d(x, keepdims=2)


def test_the_types_of_results_are_those_of_images():
    with handlepool.HandlePool(driver="host") as pool:
        spec = ArraySpec((1, 2, 4, 4), "bfloat16", "NHWC")
        x = pool.driver.empty(spec.shape, spec.strides, spec.dtype)
        assert {max_pool2d(x, 2, pool=pool).dtype, mean2d(x, pool=pool).dtype} == {x.dtype}


def test_what_equals_a_known_option_and_is_no_flag_is_refused(each_pool):
    x = Arrays(each_pool).random(2, 8, 6, 8)
    max_pool2d(x, 2, ceil_mode=True)
    with pytest.raises(ArgumentError, match="ceil_mode=1; it must be True or False"):
        max_pool2d(x, 2, ceil_mode=1)
