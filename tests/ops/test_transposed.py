"""Transposed and one-dimensional convolution, named padding and repeated filters on both drivers, and their refusals."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import TOLERANCE, Arrays
from harness.scenes import Scene

from handlepool import ArgumentError, conv1d, conv2d, conv_transpose1d, conv_transpose2d
from handlepool.testing import reference as public

HOWS = [
    {},
    {"stride": 2},
    {"stride": (3, 2), "padding": (1, 0), "output_padding": (2, 1)},
    {"dilation": (1, 2), "output_padding": (0, 1)},
    {"groups": 2, "stride": 2, "padding": 1},
]


def transposed(x, w, stride=1, padding=0, output_padding=0, dilation=1, groups=1, bias=None):
    """The reference, with torch's arguments."""
    pairs = [tuple(int(each) for each in np.broadcast_to(value, 2)) for value in (stride, padding, output_padding, dilation)]
    step, zeros, more, apart = pairs
    sides = tuple((each, each) for each in zeros)
    return reference.conv_transpose2d(
        x, w, stride=step, padding=sides, output_padding=more, dilation=apart, groups=groups, bias=bias
    )


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_transposed_convolution_is_the_reference_and_lies_as_its_input(each_pool, how, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x, w = arrays.random(2, 16, 5, 4), arrays.random(16, 8, 3, 2)
    bias = arrays.random(8 * how.get("groups", 1))
    values = [*map(arrays.take, (x, w))]
    for given, activation in ((None, None), (bias, None), (bias, "relu"), (None, "swish")):
        expected = transposed(*values, **how, bias=None if given is None else arrays.take(given))
        expected = reference.activated(expected, activation) if activation != "relu" else np.maximum(expected, 0)
        for _ in range(2):  # the second one by the shortcut
            y = conv_transpose2d(x, w, **how, bias=given, activation=activation)
            assert y.strides[1 if layout == "NHWC" else 3] == x.dtype.itemsize
            assert arrays.error(y, expected) < TOLERANCE[dtype]


@hypothesis.given(
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    taps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_transposed_convolutions(channels, size, taps, stride, dilation, padding, more, layouts):
    groups, per, made = channels
    more = tuple(min(each, max(s, d) - 1) for each, s, d in zip(more, stride, dilation, strict=True))
    axes = zip(size, taps, stride, dilation, padding, more, strict=True)
    hypothesis.assume(all((n - 1) * s - 2 * p + d * (t - 1) + 1 + m > 0 for n, t, s, d, p, m in axes))
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, "float32", layouts[0])
        x, w, bias = arrays.random(2, groups * per, *size), arrays.random(groups * per, made, *taps), arrays.random(groups * made)
        how = {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups}
        expected = transposed(*map(arrays.take, (x, w)), **how, bias=arrays.take(bias))
        out = None if layouts[1] is None else arrays.poisoned(*expected.shape, layout=layouts[1])
        y = conv_transpose2d(x, w, **how, bias=bias, out=out, pool=scene.pool)
        assert out is None or y is out
        np.testing.assert_allclose(arrays.take(y), expected, atol=1e-4)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_axis_is_two_of_which_one_has_one_row(each_pool, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x, w, bias = arrays.random(2, 16, 11), arrays.random(8, 16, 4), arrays.random(8)
    images, filters = arrays.take(x)[:, :, None], arrays.take(w)[:, :, None]
    for how, sides in (
        ({}, (0, 0)),
        ({"stride": (2,), "padding": [1]}, (1, 1)),
        ({"padding": "same"}, (1, 2)),
        ({"padding": "same", "dilation": 2}, (3, 3)),
        ({"padding": "valid", "dilation": 3}, (0, 0)),
        ({"padding": ((2, 0),)}, (2, 0)),
    ):
        step, apart = (int(np.ravel(how.get(name, 1))[0]) for name in ("stride", "dilation"))
        options = {"stride": (1, step), "dilation": (1, apart), "padding": ((0, 0), sides)}
        for activation in (None, "relu"):
            expected = public.conv2d(images, filters, **options, bias=arrays.take(bias), activation=activation)[:, :, 0]
            for _ in range(2):
                y = conv1d(x, w, **how, bias=bias, activation=activation)
                assert arrays.error(y, expected) < TOLERANCE[dtype]
        assert arrays.error(conv1d(x, w, **how), public.conv2d(images, filters, **options)[:, :, 0]) < TOLERANCE[dtype]
    grouped = arrays.random(16, 4, 3)
    for how in ({}, {"stride": 3, "padding": 1, "output_padding": 2}):
        two = {name: (0 if name != "stride" else 1, value) for name, value in how.items()}
        for groups in (1, 4):
            expected = transposed(images, arrays.take(grouped)[:, :, None], **two, groups=groups)[:, :, 0]
            y = conv_transpose1d(x, grouped, **how, groups=groups, activation="relu")
            assert arrays.error(y, np.maximum(expected, 0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_padding_by_name(each_pool, dtype):
    arrays = Arrays(each_pool, dtype, "NHWC")
    x, w, bias = arrays.random(2, 16, 9, 7), arrays.random(8, 16, 3, 4), arrays.random(8)
    for name, dilation, sides in (
        ("same", 1, ((1, 1), (1, 2))),
        ("same", (2, 3), ((2, 2), (4, 5))),
        ("valid", 1, ((0, 0), (0, 0))),
    ):
        how = {"dilation": tuple(np.broadcast_to(dilation, 2)), "padding": sides}
        expected = public.conv2d(*map(arrays.take, (x, w)), **how, bias=arrays.take(bias))
        for _ in range(2):
            y = conv2d(x, w, padding=name, dilation=dilation, bias=bias)
            assert arrays.error(y, expected) < TOLERANCE[dtype]
        assert name != "same" or y.shape[2:] == x.shape[2:]
    other = arrays.random(8, 16, 5, 5)  # of the same call with other filters
    expected = public.conv2d(*map(arrays.take, (x, other)), padding=((2, 2), (2, 2)))
    assert arrays.error(conv2d(x, other, padding="same"), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_filter_stands_for_all(each_pool, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x, one, row = arrays.random(2, 16, 9, 7), arrays.random(1, 1, 3, 3, layout="NCHW"), arrays.random(1, 16, 3, 3)
    for w, groups in (
        (np.broadcast_to(one, (16, 1, 3, 3)), 16),
        (np.broadcast_to(row, (8, 16, 3, 3)), 1),
        (np.broadcast_to(one, (8, 16, 3, 3)), 1),
    ):
        assert w.strides[0] == 0
        values = np.broadcast_to(arrays.take(w[:1]), w.shape)
        expected = public.conv2d(arrays.take(x), values, padding=1, groups=groups)
        for _ in range(2):
            y = conv2d(x, w, padding=1, groups=groups)
            assert arrays.error(y, expected) < TOLERANCE[dtype]
        assert arrays.error(conv2d(x, w, padding=1, groups=groups, activation="relu"), np.maximum(expected, 0)) < TOLERANCE[dtype]


def test_an_empty_batch_gives_an_empty_result(each_pool):
    arrays = Arrays(each_pool)
    w, b = arrays.random(4, 3, 3, 3), arrays.random(3)
    assert conv_transpose2d(arrays.random(0, 4, 5, 5), w, stride=2, bias=b, activation="relu").shape == (0, 3, 11, 11)
    assert conv_transpose1d(arrays.random(0, 4, 5), arrays.random(4, 3, 3)).shape == (0, 3, 7)
    assert conv1d(arrays.random(0, 3, 5), arrays.random(4, 3, 3), padding="same").shape == (0, 4, 5)


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    x, w, bias = arrays.random(2, 4, 5, 5), arrays.random(4, 3, 3, 3), arrays.random(3)
    row, taps = arrays.random(2, 4, 9), arrays.random(6, 4, 3)
    for match, refused in {
        r"x \(2, 4, 5, 5\) has 4 channels and w .* has 3 filters": lambda: conv_transpose2d(x, w[:3]),
        "3 groups do not divide the 4 channels": lambda: conv_transpose2d(x, w, groups=3),
        r"output_padding=\(2, 2\) with stride=\(2, 2\) .* below 2": lambda: conv_transpose2d(x, w, stride=2, output_padding=2),
        r"lead to spatial extents of \(-1, -1\)": lambda: conv_transpose2d(x, w, padding=4),
        "padding=-1": lambda: conv_transpose2d(x, w, padding=-1),
        "stride=0": lambda: conv_transpose2d(x, w, stride=0),
        r"stride=\(1, 2, 3\)": lambda: conv_transpose2d(x, w, stride=(1, 2, 3)),
        r"bias of shape \(3,\) for 6 channels": lambda: conv_transpose2d(x, w, groups=2, bias=bias),
        "activation='mish'": lambda: conv_transpose2d(x, w, activation="mish"),
        "x has 3 axes": lambda: conv_transpose2d(x[0], w),
        "w is float16 and x is float32": lambda: conv_transpose2d(x, Arrays(each_pool, "float16").random(4, 3, 3, 3)),
        "conv_transpose2d takes x, w by position": lambda: conv_transpose2d(x, w, bias),
        "x has 4 axes": lambda: conv1d(x, taps),
        r"x \(2, 4, 9\) has 4 channels": lambda: conv1d(row, arrays.random(6, 3, 3)),
        "stride=True": lambda: conv1d(row, taps, stride=True),
        r"padding=\(\(1, -1\),\)": lambda: conv1d(row, taps, padding=((1, -1),)),
        r"padding=\(1, 1\)": lambda: conv1d(row, taps, padding=(1, 1)),
        "padding='full'": lambda: conv1d(row, taps, padding="full"),
        r"padding='same' with stride=\(2,\)": lambda: conv1d(row, taps, padding="same", stride=2),
        r"padding='same' with stride=\(2, 1\)": lambda: conv2d(x, x[:, :, :3, :3], padding="same", stride=(2, 1)),
        "padding='SAME'": lambda: conv2d(x, x[:, :, :3, :3], padding="SAME"),
        r"w of shape .* has strides": lambda: conv_transpose1d(row, arrays.random(4, 3, 6)[:, :, ::2]),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            refused()
