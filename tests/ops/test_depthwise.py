"""Depthwise convolutions by the kernel of our own; the kernel itself is held by `drivers/test_cuda_kernels.py`."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.arrays import FULL, Arrays
from harness.scenes import Scene

from handlepool import HandlePoolError, ParallelStates, conv2d, record
from handlepool.ops import conv2d_plan, convolution
from handlepool.testing import reference

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": FULL}
"""Of one rounding."""


def is_own(*args, **kwargs):
    return conv2d_plan(*args, **kwargs).engine.endswith("_depthwise")


def given(arrays, channels=24, kernel=3):
    return arrays.random(2, channels, 9, 8), arrays.random(channels, 1, kernel, kernel), arrays.random(channels)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", [3, 5])
def test_it_is_the_reference_in_one_launch(each_pool, kernel, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x, w, b = given(arrays, kernel=kernel)
    values = [*map(arrays.take, (x, w))]
    for options in (
        {"padding": kernel // 2},
        {"padding": 1, "stride": 2, "bias": b, "activation": "relu"},
        {"activation": "swish"},
    ):
        expected = reference.conv2d(*values, groups=24, **{**options, "bias": arrays.take(b) if "bias" in options else None})
        assert is_own(x, w, groups=24, **options)
        for _ in range(2):  # the second time it is known
            y = conv2d(x, w, groups=24, **options)
            assert np.argsort(y.strides).tolist() == np.argsort(x.strides).tolist()
            assert arrays.error(y, expected) < TOLERANCE[dtype]


@hypothesis.given(
    shape=st.tuples(st.integers(1, 2), st.integers(2, 9), st.integers(1, 9), st.integers(1, 9)),
    taps=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.integers(1, 3) | st.tuples(st.integers(1, 4), st.integers(1, 12)),
    padding=st.integers(0, 3) | st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 9))] * 2),
    dilation=st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 4)),
    biased=st.booleans(),
    activation=st.none() | st.sampled_from(["relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"]),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_generated_geometries(shape, taps, stride, padding, dilation, biased, activation, layouts):
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": shape[1], "activation": activation}
    how = convolution.geometry("conv2d", {name: options[name] for name in ("stride", "padding", "dilation")})
    hypothesis.assume(min(convolution.result_shape(shape, (shape[1], 1, *taps), **how)) > 0)
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, "float32", layouts[0])
        x, w, b = arrays.random(*shape), arrays.random(shape[1], 1, *taps), arrays.random(shape[1]) if biased else None
        bias = None if b is None else arrays.take(b)
        expected = reference.conv2d(arrays.take(x), arrays.take(w), **options, bias=bias)
        out = None if layouts[1] is None else arrays.poisoned(*expected.shape, layout=layouts[1])
        assert is_own(x, w, bias=b, out=out, pool=scene.pool, **options)
        y = conv2d(x, w, bias=b, out=out, pool=scene.pool, **options)
        np.testing.assert_allclose(arrays.take(y), expected, rtol=1e-4, atol=1e-4)


def test_views_go_in_and_out_without_copies(each_pool):
    arrays = Arrays(each_pool, "float16", "NHWC")
    x, y, w, b = arrays.random(2, 48, 9, 8), arrays.poisoned(2, 48, 9, 8), arrays.random(24, 1, 3, 3), arrays.random(48)[::2]
    conv2d(x[:, 8:32], w, padding=1, groups=24, bias=b, activation="relu", out=y[:, 24:])
    expected = reference.conv2d(
        arrays.take(x[:, 8:32]), arrays.take(w), padding=1, groups=24, bias=arrays.take(b), activation="relu"
    )
    assert arrays.error(y[:, 24:], expected) < TOLERANCE["float16"]
    assert np.isnan(arrays.take(y[:, :24])).all()
    assert each_pool.stats()["operands_copied"] == 0


def test_what_it_does_not_take_is_cudnns(pool):
    arrays = Arrays(pool, layout="NHWC")
    x, w, _ = given(arrays)
    twice, wide = arrays.random(48, 1, 3, 3), arrays.random(24, 1, 8, 8)
    residual = arrays.random(2, 24, 7, 6)
    for filters, options in (
        (twice, {}),
        (wide, {}),
        (w, {"mode": "convolution"}),
        (w, {"add": residual}),
        (arrays.random(24, 2, 3, 3), {"groups": 12}),
    ):
        options = {"groups": 24, **options}
        assert not is_own(x, filters, **options)
        values = {name: arrays.take(value) if name == "add" else value for name, value in options.items()}
        assert (
            arrays.error(conv2d(x, filters, **options), reference.conv2d(arrays.take(x), arrays.take(filters), **values)) < FULL
        )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"padding": -1}, "padding=-1"),
        ({"stride": 0}, "stride=0"),
        ({"bias": 8}, r"bias of shape \(8,\) for 24 filters"),
        ({"activation": "rely"}, "activation='rely'"),
        ({"workspace_limit": "much"}, "workspace_limit='much'"),
        ({"padding": 10**9}, "1,000,000,000|1000000000"),
        ({"dilation": 9}, "dilation"),
        ({"out": "x"}, "out"),
        ({"groups": 24.0}, r"groups=24\.0"),
    ],
    ids=str,
)
def test_bad_input_is_refused(each_pool, wrong, words):
    arrays = Arrays(each_pool, layout="NHWC")
    x, w, b = given(arrays)
    made = {name: {"bias": b[:8], "out": x}.get(name, value) for name, value in wrong.items()}
    with pytest.raises(HandlePoolError, match=words):
        conv2d(x, w, **{"groups": 24, **made})


def test_in_branches_and_recorded(each_pool):
    arrays = Arrays(each_pool, "float16", "NHWC")
    x, w, _ = given(arrays)

    def twice():
        with ParallelStates(2, pool=each_pool).fork() as fork:
            y = fork.run(conv2d, x, w, padding=1, groups=24)
            return fork.run(conv2d, y, w, padding=1, groups=24, activation="relu")

    values, options = arrays.take(w), {"padding": 1, "groups": 24}
    between = reference.conv2d(arrays.take(x), values, **options).astype(np.float16)
    expected = reference.conv2d(between, values, **options, activation="relu")
    assert arrays.error(twice(), expected) < 2 * TOLERANCE["float16"]
    program = record(twice, pool=each_pool)
    program.replay()
    assert arrays.error(program.outputs, expected) < 2 * TOLERANCE["float16"]
