"""interpolate2d on both drivers, against a reference in float64 with torch's places, and the arguments that it refuses."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import Scene

from handlepool import ArgumentError, interpolate2d

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 2e-6}
KINDS = [("nearest", False), ("bilinear", False), ("bilinear", True)]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("mode", "corners"), KINDS)
def test_it_is_the_reference_and_lies_as_its_input(each_pool, mode, corners, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x = arrays.random(2, 16, 5, 6)
    for how in ({"size": (10, 12)}, {"size": 3}, {"size": (1, 9)}, {"scale_factor": 2}, {"scale_factor": (1.7, 0.4)}):
        expected = reference.interpolate2d(arrays.take(x), **how, mode=mode, align_corners=corners)
        for _ in range(2):
            y = interpolate2d(x, **how, mode=mode, align_corners=corners)
            assert y.strides[1 if layout == "NHWC" else 3] == x.dtype.itemsize
            assert arrays.error(y, expected) <= (0 if mode == "nearest" else TOLERANCE[dtype])


@hypothesis.given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    how=st.one_of(
        st.tuples(st.integers(1, 20), st.integers(1, 20)).map(lambda size: {"size": size}),
        st.floats(1, 4).map(lambda factor: {"scale_factor": factor}),
    ),
    kind=st.sampled_from(KINDS),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
    dtype=st.sampled_from([*TOLERANCE]),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_geometries(shape, how, kind, layouts, dtype):
    mode, corners = kind
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype, layouts[0])
        x = arrays.random(*shape)
        expected = reference.interpolate2d(arrays.take(x), **how, mode=mode, align_corners=corners)
        out = None if layouts[1] is None else arrays.poisoned(*expected.shape, layout=layouts[1])
        y = interpolate2d(x, **how, mode=mode, align_corners=corners, out=out, pool=scene.pool)
        assert out is None or y is out
        bound = 0 if mode == "nearest" else 5 * TOLERANCE[dtype]
        np.testing.assert_allclose(arrays.take(y), expected, atol=bound, rtol=bound)


def test_an_empty_batch_gives_an_empty_result(each_pool):
    assert interpolate2d(Arrays(each_pool).random(0, 3, 4, 4), size=2).shape == (0, 3, 2, 2)


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.random(2, 4, 4, 4)
    for match, refused in {
        "size=None and scale_factor=None; give exactly one": lambda: interpolate2d(x),
        "size=3 and scale_factor=2; give exactly one": lambda: interpolate2d(x, size=3, scale_factor=2),
        "size=0": lambda: interpolate2d(x, size=0),
        r"size=\(1, 2, 3\)": lambda: interpolate2d(x, size=(1, 2, 3)),
        "scale_factor=-1": lambda: interpolate2d(x, scale_factor=-1),
        "scale_factor=True": lambda: interpolate2d(x, scale_factor=True),
        "images of 4 x 4 pixels cannot become 0 x 0 pixels": lambda: interpolate2d(x, scale_factor=0.1),
        "mode='cubic'": lambda: interpolate2d(x, size=2, mode="cubic"),
        "align_corners=1": lambda: interpolate2d(x, size=2, align_corners=1),
        "align_corners=True with mode='nearest'": lambda: interpolate2d(x, size=2, align_corners=True),
        "x has 3 axes": lambda: interpolate2d(x[0], size=2),
        r"16,777,216 pixels": lambda: interpolate2d(x, size=(2**24 + 1, 1)),
        "x is int32": lambda: interpolate2d(each_pool.driver.asarray(np.ones((1, 1, 4, 4), np.int32)), size=2),
        "shares memory with argument 0": lambda: interpolate2d(x, size=4, out=x),
        "interpolate2d takes x by position": lambda: interpolate2d(x, (2, 2)),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            refused()
