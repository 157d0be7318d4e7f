"""The gradients of convolution on both drivers, against correlations of their own in float64."""

import numpy as np
import pytest
from harness.arrays import FULL, TOLERANCE, Arrays

from handlepool import ArgumentError, ArrayTypeError, GraphNotSupportedError, ParallelStates
from handlepool.ops import conv2d_input_grad, conv2d_weight_grad

GEOMETRIES = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "uneven": {"padding": (0, 2), "stride": (2, 1)},
    "dilated": {"padding": 2, "dilation": 2},
    "groups": {"padding": 1, "groups": 2},
}
X, FILTERS, TAPS = (2, 16, 9, 10), 8, (3, 3)


def two(value):
    return (value, value) if isinstance(value, int) else value


def shapes(stride=1, padding=0, dilation=1, groups=1):
    """Of x, w and the result."""
    extents = [
        (size + 2 * pad - (tap - 1) * gap - 1) // step + 1
        for size, pad, tap, gap, step in zip(X[2:], two(padding), TAPS, two(dilation), two(stride), strict=True)
    ]
    return X, (FILTERS, X[1] // groups, *TAPS), (X[0], FILTERS, *extents)


def products(x, w, dy, stride=1, padding=0, dilation=1, groups=1):
    """dx and dw, tap by tap: what conv2d adds up, the other way round."""
    (top, left), (down, right), (rows, columns) = two(padding), two(stride), two(dilation)
    padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    dx, dw = np.zeros_like(padded), np.zeros_like(w)
    inputs, outputs = w.shape[1], w.shape[0] // groups
    for group in range(groups):
        i, o = slice(group * inputs, (group + 1) * inputs), slice(group * outputs, (group + 1) * outputs)
        for r, s in np.ndindex(w.shape[2:]):
            h = slice(r * rows, r * rows + (dy.shape[2] - 1) * down + 1, down)
            v = slice(s * columns, s * columns + (dy.shape[3] - 1) * right + 1, right)
            dw[o, :, r, s] = np.einsum("nkpq,ncpq->kc", dy[:, o], padded[:, i, h, v])
            dx[:, i, h, v] += np.einsum("nkpq,kc->ncpq", dy[:, o], w[o, :, r, s])
    return dx[:, :, top : top + x.shape[2], left : left + x.shape[3]], dw


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_gradients_are_the_reference(each_pool, dtype, layout, geometry):
    options = GEOMETRIES[geometry]
    arrays = Arrays(each_pool, dtype, layout)
    x, w, dy = (arrays.random(*shape) for shape in shapes(**options))
    dx, dw = products(*map(arrays.take, (x, w, dy)), **options)
    made = conv2d_input_grad(dy, w, x.shape, **options)
    assert (made.dtype, arrays.error(made, dx) < TOLERANCE[dtype]) == (x.dtype, True)
    made = conv2d_weight_grad(x, dy, w.shape, **options)
    assert (made.dtype, arrays.error(made, dw) < TOLERANCE[dtype]) == (x.dtype, True)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_element_of_out_is_written(each_pool, layout):
    arrays = Arrays(each_pool, "float32", layout)
    x, w, dy = (arrays.random(*shape) for shape in shapes(padding=1, stride=2))
    dx, dw = products(*map(arrays.take, (x, w, dy)), padding=1, stride=2)
    for_x, for_w = arrays.poisoned(*x.shape), arrays.poisoned(*w.shape)
    assert conv2d_input_grad(dy, w, x.shape, padding=1, stride=2, out=for_x, allow_tf32=False) is for_x
    assert conv2d_weight_grad(x, dy, w.shape, padding=1, stride=2, out=for_w, allow_tf32=False) is for_w
    assert max(arrays.error(for_x, dx), arrays.error(for_w, dw)) < FULL


def test_the_smallest_of_several_images(each_pool):
    """Images of two heights lead to one result; the shape says which."""
    arrays = Arrays(each_pool)
    dy, w = arrays.random(2, 8, 4, 4), arrays.random(8, 16, 3, 3)
    for size in (9, 10):
        x = np.zeros((2, 16, size, size))
        dx, _ = products(x, *map(arrays.take, (w, dy)), stride=2)
        assert arrays.error(conv2d_input_grad(dy, w, x.shape, stride=2), dx) < TOLERANCE["float32"]


def test_gradients_in_a_fork(each_pool):
    arrays = Arrays(each_pool)
    x, w, dy = (arrays.random(*shape) for shape in shapes(padding=1))
    dx, dw = products(*map(arrays.take, (x, w, dy)), padding=1)
    with ParallelStates(2, pool=each_pool).fork() as fork:
        first = fork.run(conv2d_input_grad, dy, w, shape=x.shape, padding=1)
        second = fork.run(conv2d_weight_grad, x, dy=dy, shape=w.shape, padding=1)
    assert max(arrays.error(first, dx), arrays.error(second, dw)) < TOLERANCE["float32"]


def test_deterministic_weight_gradients_have_the_same_bits(each_pool):
    arrays = Arrays(each_pool)
    x, w, dy = (arrays.random(*shape) for shape in shapes(padding=1))
    made = [arrays.take(conv2d_weight_grad(x, dy, w.shape, padding=1, deterministic=True)) for _ in range(4)]
    assert all((each == made[0]).all() for each in made)


BAD = {
    "another shape of images": (ArgumentError, "lead to", lambda a: conv2d_input_grad(a["dy"], a["w"], (2, 16, 12, 10))),
    "another shape of filters": (ArgumentError, "lead to", lambda a: conv2d_weight_grad(a["x"], a["dy"], (8, 16, 5, 3))),
    "channels that do not agree": (
        ArgumentError,
        "shape .* has 8 channels",
        lambda a: conv2d_input_grad(a["dy"], a["w"], (2, 8, 9, 10)),
    ),
    "groups that divide nothing": (
        ArgumentError,
        "shape .* takes 48 channels",
        lambda a: conv2d_weight_grad(a["x"], a["dy"], (8, 16, 3, 3), groups=3),
    ),
    "a shape of three": (ArgumentError, "four integers", lambda a: conv2d_input_grad(a["dy"], a["w"], (16, 9, 10))),
    "a shape below zero": (ArgumentError, "four integers", lambda a: conv2d_weight_grad(a["x"], a["dy"], (8, -1, 3, 3))),
    "a shape of no channels": (
        ArgumentError,
        "x .* has 16 channels",
        lambda a: conv2d_weight_grad(a["x"], a["dy"], (8, 0, 3, 3)),
    ),
    "no shape": (ArgumentError, "four integers", lambda a: conv2d_weight_grad(a["x"], a["dy"], 3)),
    "two types": (ArgumentError, "convert one", lambda a: conv2d_input_grad(a["half"], a["w"], X)),
    "three axes": (ArgumentError, "has 3 axes", lambda a: conv2d_input_grad(a["dy"][0], a["w"], X)),
    "a stride of zero": (ArgumentError, "stride=0", lambda a: conv2d_input_grad(a["dy"], a["w"], X, stride=0)),
    "an out of another shape": (ArgumentError, "out=", lambda a: conv2d_input_grad(a["dy"], a["w"], X, out=a["dy"])),
    "a list": (ArrayTypeError, "list", lambda a: conv2d_input_grad([1.0], a["w"], X)),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_typed_error(each_pool, what):
    error, match, call = BAD[what]
    arrays = Arrays(each_pool)
    given = {name: arrays.random(*shape) for name, shape in zip(("x", "w", "dy"), shapes(), strict=True)}
    given["half"] = Arrays(each_pool, "float16").random(*given["dy"].shape)
    with pytest.raises(error, match=match):
        call(given)


def test_a_workspace_limit_is_kept_or_refused(each_pool):
    """The host driver has no plan without scratch; cuDNN has."""
    arrays = Arrays(each_pool)
    x, w, dy = (arrays.random(*shape) for shape in shapes())
    if each_pool.driver.name == "host":
        with pytest.raises(GraphNotSupportedError, match="raise workspace_limit"):
            conv2d_input_grad(dy, w, x.shape, workspace_limit=0)
        return
    dx = conv2d_input_grad(dy, w, x.shape, workspace_limit=0)
    assert each_pool.stats()["scratch_bytes"] == 0
    assert arrays.error(dx, products(*map(arrays.take, (x, w, dy)))[0]) < TOLERANCE["float32"]
