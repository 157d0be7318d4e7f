"""Padding, dealt-out channels and copies to other layouts on both drivers, and the arguments that they refuse."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import Scene

from handlepool import ArgumentError, channel_shuffle, pad, to_channels_last, to_contiguous

TYPES = ("float16", "bfloat16", "float32", "int8", "int64")
MODES = ("constant", "reflect", "replicate")
X = (2, 8, 5, 6)


def exact(arrays, y, expected):
    assert tuple(y.shape) == expected.shape
    return np.array_equal(arrays.take(y), expected)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", MODES)
def test_pad_is_the_reference_and_lies_as_its_input(each_pool, mode, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.put(np.random.default_rng(0).integers(-9, 9, X))
    for widths in ((1, 2), (3, 0, 1, 4), (0, 0, 0, 0, 2, 1), (-1, 2, 1, -2), (0, 0)):
        for _ in range(2):
            y = pad(x, widths, mode=mode)
            assert np.argsort(y.strides).tolist() == np.argsort(x.strides).tolist()
            assert exact(arrays, y, reference.pad(arrays.take(x), widths, mode))


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", -2.5), ("float32", np.inf), ("bfloat16", 3), ("int8", -128), ("int64", 2**40)]
)
def test_pad_with_a_constant(each_pool, dtype, value):
    arrays = Arrays(each_pool, dtype)
    x = arrays.put(np.random.default_rng(0).integers(-9, 9, X))
    assert exact(arrays, pad(x, (1, 1), value=value), reference.pad(arrays.take(x), (1, 1), value=value))


def test_pad_with_nan_finds_its_plan_again(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.random(2, 3)
    for _ in range(2):
        assert np.isnan(arrays.take(pad(x, (0, 1), value=np.nan))[:, 3]).all()
    assert (arrays.take(pad(x, (0, 1)))[:, 3] == 0).all()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TYPES)
def test_channels_are_dealt_out(each_pool, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.put(np.random.default_rng(0).integers(-9, 9, X))
    for groups in (1, 2, 4, 8):
        assert exact(arrays, channel_shuffle(x, groups), reference.channel_shuffle(arrays.take(x), groups))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TYPES)
def test_copies_to_other_layouts(each_pool, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.put(np.random.default_rng(0).integers(-9, 9, X))
    for view in (x, x[:, :6], x[:, :, ::2, :5]):
        last, contiguous = to_channels_last(view), to_contiguous(view)
        assert exact(arrays, last, arrays.take(view))
        assert exact(arrays, contiguous, arrays.take(view))
        size, (c, h, w) = x.dtype.itemsize, view.shape[1:]
        assert last.strides == (h * w * c * size, size, w * c * size, c * size)
        assert contiguous.strides == (h * w * c * size, h * w * size, w * size, size)


@hypothesis.given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_generated_geometries(shape, mode, layouts, dtype, seed):
    random = np.random.default_rng(seed)
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype, layouts[0])
        x = arrays.put(random.integers(-9, 9, shape))
        widths = []
        for extent in shape[::-1][: random.integers(1, len(shape) + 1)]:
            most = extent - 1 if mode == "reflect" else 4
            one, other = (int(random.integers(-(extent // 2), most + 1)) for _ in range(2))
            widths += [one, other] if extent + one + other > 0 and extent + min(one, other) > 0 else [0, 0]
        expected = reference.pad(arrays.take(x), widths, mode)
        out = None if layouts[1] is None else arrays.put(np.ones(expected.shape), layouts[1])
        y = pad(x, widths, mode=mode, out=out, pool=scene.pool)
        assert out is None or y is out
        assert exact(arrays, y, expected)
        if len(shape) > 1:
            groups = int(random.choice([each for each in range(1, shape[1] + 1) if shape[1] % each == 0]))
            assert exact(arrays, channel_shuffle(x, groups, pool=scene.pool), reference.channel_shuffle(arrays.take(x), groups))


def test_empty_arrays(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.random(0, 4, 3, 3)
    assert pad(x, (1, 1), mode="reflect").shape == (0, 4, 3, 5)
    assert channel_shuffle(x, 2).shape == to_channels_last(x).shape == to_contiguous(x).shape == x.shape
    assert pad(arrays.random(2, 3), (-1, -2)).shape == (2, 0)
    for mode in MODES:
        with pytest.raises(ArgumentError):
            pad(arrays.random(2, 0), (1, 1), mode=mode)


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    x, many = arrays.random(2, 8, 4), Arrays(each_pool, "int8").put(np.ones((2, 3)))
    for match, refused in {
        "widths of 4 and 0 for 4 elements of axis 2": lambda: pad(x, (4, 0), mode="reflect"),
        "leave -1 of the 4 elements of axis 2": lambda: pad(x, (-3, -2)),
        r"8 widths for x of shape \(2, 8, 4\); pass at most 6 widths": lambda: pad(x, (1,) * 8),
        r"widths=\(1,\)": lambda: pad(x, (1,)),
        "widths=3": lambda: pad(x, 3),
        r"widths=\(1.5, 1\)": lambda: pad(x, (1.5, 1)),
        "mode='circular'": lambda: pad(x, (1, 1), mode="circular"),
        "value='0'": lambda: pad(x, (1, 1), value="0"),
        "value=1 with mode='reflect'": lambda: pad(x, (1, 1), mode="reflect", value=1),
        "value=200 for x of int8; it must be an integer from -128 to 127": lambda: pad(many, (1, 1), value=200),
        "value=0.5 for x of int8": lambda: pad(many, (1, 1), value=0.5),
        "value=nan for x of int8": lambda: pad(many, (1, 1), value=np.nan),
        "3 groups do not divide the 8 channels": lambda: channel_shuffle(x, 3),
        "groups=0": lambda: channel_shuffle(x, 0),
        "x has 1 axes": lambda: channel_shuffle(x[0, 0], 1),
        "x has 2 axes": lambda: to_channels_last(x[0]),
        "x has 0 axes": lambda: to_contiguous(x[0, 0, 0]),
        "negative": lambda: to_contiguous(x[::-1]),
        "shares memory with argument 0": lambda: pad(x[:, :4], (0, 0, 0, 1), out=x[:, 3:8]),
        "pad takes x, widths by position": lambda: pad(x, (1, 1), "reflect"),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            refused()
