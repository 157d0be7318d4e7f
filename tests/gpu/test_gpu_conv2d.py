"""Convolutions on a GPU, compared with a reference in float64."""

import re

import numpy as np
import pytest

import handlepool
from handlepool import ArgumentError, ArrayTypeError, ParallelStates
from handlepool.ops import conv2d_plan

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytest.importorskip("scipy", reason="SciPy is not installed")

LAYOUTS = ("nchw", "nhwc")
PRECISIONS = {
    "float16": ("float16", {}, 1e-2),
    "bfloat16": ("bfloat16", {}, 1e-2),
    "float32": ("float32", {}, 2e-3),  # TF32
    "float32 without TF32": ("float32", {"allow_tf32": False}, 1e-5),
}
GEOMETRIES = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "uneven": {"padding": (0, 2), "stride": (2, 1)},
    "dilated": {"padding": 2, "dilation": 2},
    "groups": {"padding": 1, "groups": 2},
}


def reference(x, w, **options):
    from handlepool.testing.reference import conv2d

    bias = options.pop("bias", None)
    return conv2d(wide(x), wide(w), bias=None if bias is None else wide(bias), **options)


def wide(array):
    return array.get().astype(np.float64)


def relative_error(y, expected):
    assert y.shape == expected.shape
    return np.linalg.norm(wide(y) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_convolution_is_the_reference(pool, stream, random_array, precision, layout, geometry):
    dtype, options, tolerance = PRECISIONS[precision]
    geometry = GEOMETRIES[geometry]
    x = random_array((2, 16, 14, 13), dtype, layout)
    w = random_array((8, 16 // geometry.get("groups", 1), 3, 3), dtype, layout)
    y = handlepool.conv2d(x, w, pool=pool, **geometry, **options)
    assert y.dtype == x.dtype
    assert np.argsort(y.strides)[0] == np.argsort(x.strides)[0]  # the result lies as x does
    assert relative_error(y, reference(x, w, **geometry)) < tolerance


def test_a_deterministic_convolution_gives_the_same_bits(pool, stream, random_array):
    x, w = random_array((8, 256, 14, 14)), random_array((256, 256, 3, 3))
    first = handlepool.conv2d(x, w, padding=1, deterministic=True, pool=pool)
    others = ParallelStates(4, pool=pool).map(lambda _: handlepool.conv2d(x, w, padding=1, deterministic=True), range(8))
    assert all((y.view(cupy.uint32) == first.view(cupy.uint32)).all() for y in others)


def test_eight_threads_that_ask_for_one_plan_build_it_once(pool, random_array, in_threads):
    x, w = random_array((2, 16, 14, 14)), random_array((8, 16, 3, 3))
    cupy.cuda.Device().synchronize()

    def convolve(_):
        with cupy.cuda.Stream(non_blocking=True):
            return handlepool.conv2d(x, w, padding=1, pool=pool).get()

    results = in_threads(8, convolve)
    assert pool.stats()["plans_built"] == 1
    assert all((y == results[0]).all() for y in results)


def test_the_launch_path_uses_the_frontends_raw_entry(pool, stream, random_array):
    x, w = random_array((2, 16, 14, 14)), random_array((8, 16, 3, 3))
    executable = conv2d_plan(x, w, padding=1, pool=pool).executable
    # (address of the pointers, their number, workspace, raw handle, plan index)
    signature = executable._raw.__doc__.splitlines()[0]
    assert re.fullmatch(r"_execute_with_raw_ptrs\(self, (\w+: int, ){4}\w+: int( = -1)?\) -> None", signature), signature


def test_the_public_entry_gives_the_same_result_where_the_raw_one_is_missing(pool, stream, random_array, monkeypatch):
    x, w = random_array((2, 256, 14, 14)), random_array((256, 256, 3, 3))
    plan = conv2d_plan(x, w, padding=1, pool=pool)
    expected = handlepool.conv2d(x, w, padding=1, pool=pool)
    monkeypatch.setattr(plan.executable, "_raw", None)
    mapped = ParallelStates(4, pool=pool).map(lambda x: handlepool.conv2d(x, w, padding=1), [x] * 8)
    assert all((y == expected).all() for y in mapped)


BAD = {
    "a NumPy array": (ArrayTypeError, lambda x, w: {"x": x.get()}),
    "a list": (ArrayTypeError, lambda x, w: {"w": [1.0]}),
    "float64": (ArgumentError, lambda x, w: {"x": x.astype("float64"), "w": w.astype("float64")}),
    "two types": (ArgumentError, lambda x, w: {"w": w.astype("float16")}),
    "three axes": (ArgumentError, lambda x, w: {"x": x[0]}),
    "gaps": (ArgumentError, lambda x, w: {"x": x[:, :, ::2]}),
    "turned around": (ArgumentError, lambda x, w: {"x": x[:, :, ::-1]}),
    "other channels": (ArgumentError, lambda x, w: {"w": w[:, :8].copy()}),
    "too small": (ArgumentError, lambda x, w: {"dilation": 20}),
    "no stride": (ArgumentError, lambda x, w: {"stride": 0}),
    "negative padding": (ArgumentError, lambda x, w: {"padding": -1}),
    "three strides": (ArgumentError, lambda x, w: {"stride": (1, 1, 1)}),
    "an unknown activation": (ArgumentError, lambda x, w: {"activation": "bump"}),
    "a bias of another length": (ArgumentError, lambda x, w: {"bias": x[0, 0, 0]}),
    "a negative limit": (ArgumentError, lambda x, w: {"workspace_limit": -1}),
    "out of another shape": (ArgumentError, lambda x, w: {"out": cupy.empty((2, 8, 14, 14), "float32")}),
    "out of another type": (ArgumentError, lambda x, w: {"out": cupy.empty((2, 8, 12, 12), "float16")}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_typed_error_and_the_pool_goes_on(pool, stream, random_array, what):
    x, w = random_array((2, 16, 14, 14)), random_array((8, 16, 3, 3))
    error, change = BAD[what]
    with pytest.raises(error):
        handlepool.conv2d(**{"x": x, "w": w, "pool": pool} | change(x, w))
    with pytest.raises(error), ParallelStates(2, pool=pool).fork() as fork:
        fork.run(handlepool.conv2d, **{"x": x, "w": w} | change(x, w))
    assert relative_error(handlepool.conv2d(x, w, pool=pool), reference(x, w)) < 2e-3


def test_a_graph_of_a_users_own(pool, stream, random_array):
    @handlepool.graph
    def convolution_bias_relu(g, x, w, b, *, padding):
        y = g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1])
        return g.relu(g.bias(y, b))

    x, w = random_array((2, 16, 14, 14), "float16", "nhwc"), random_array((8, 16, 3, 3), "float16", "nhwc")
    b = random_array((1, 8, 1, 1), "float16")
    expected = reference(x, w, padding=1, bias=b.reshape(8), activation="relu")
    with ParallelStates(2, pool=pool).fork() as fork:
        results = [fork.run(convolution_bias_relu, x, w, b, padding=1) for _ in range(4)]
        results += [fork.run(lambda: convolution_bias_relu(x, w, b, padding=1)) for _ in range(4)]
    assert all(relative_error(y, expected) < 1e-2 for y in results)
    assert pool.stats()["plans_built"] == 1
