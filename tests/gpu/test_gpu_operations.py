"""Convolutions with a residual and views, and matrix products, on a GPU: random shapes against float64.

The tests in ``tests/ops`` run on a GPU, too; here are shapes as networks have them, each in all types.
"""

import random

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import GraphNotSupportedError, ParallelStates, ops
from handlepool.testing import reference

CASES = range(40)
KINDS = (None, *ops.ACTIVATIONS)


@pytest.fixture(params=["float16", "bfloat16", "float32"])
def dtype(request):
    return request.param


def view(rng, arrays, *shape):
    """Random values, channels-last, mostly a view of more."""
    n, c, h, w = shape
    what = rng.choice(("all", "channels", "crop", "rows", "images"))
    if what == "channels":
        return arrays.random(n, c + 32, h, w)[:, 16:-16]
    if what == "crop":
        return arrays.random(n, c, h + 3, w + 2)[:, :, 2:-1, 1:-1]
    if what == "rows":
        return arrays.random(n, c, 2 * h, w)[:, :, ::2]
    return arrays.random(2 * n, c, h, w)[::2] if what == "images" else arrays.random(*shape)


@pytest.mark.parametrize("seed", CASES)
def test_g18_convolutions_are_right_or_refused(pool, stream, dtype, seed):
    rng = random.Random(seed)
    arrays = Arrays(pool, dtype, "NHWC")
    groups = rng.choice((1, 1, 2, 8))
    c, k = groups * rng.choice((8, 16, 32)), groups * rng.choice((8, 24, 40))
    n, h, w, taps = rng.choice((1, 2)), rng.choice((7, 14, 28)), rng.choice((7, 14, 13)), rng.choice((1, 3, 5))
    sides = rng.choice((0, 1, 2, (1, 2), ((0, 1), (1, 0)), ((2, 1), (0, 1))))
    options = {"stride": [rng.choice((1, 2))] * 2, "padding": sides, "groups": groups, "activation": rng.choice(KINDS)}
    x, filters = view(rng, arrays, n, c, h, w), arrays.random(k, c // groups, taps, taps)
    expected = reference.conv2d(arrays.take(x), arrays.take(filters), **options | {"activation": None})
    rest = {"bias": arrays.random(2 * k)[::2]} if rng.random() < 0.5 else {}
    if rng.random() < 0.6:
        rest["add"] = view(rng, arrays, *expected.shape)
    out = view(rng, arrays, *expected.shape) if rng.random() < 0.5 else None
    try:
        y = handlepool.conv2d(x, filters, out=out, pool=pool, **options, **rest)
    except GraphNotSupportedError as error:
        if "is a view with gaps; " not in str(error):
            raise
        return
    added = {name: arrays.take(array) for name, array in rest.items()}
    expected = reference.conv2d(arrays.take(x), arrays.take(filters), **options, **added)
    assert arrays.error(y, expected) < 2 * TOLERANCE[dtype]  # what follows in a launch of its own is rounded twice


def matrices(rng, arrays, *shape):
    what = rng.choice(("row", "column", "crop"))
    if what == "column":
        return arrays.random(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    return arrays.random(*shape[:-1], shape[-1] + 8)[..., :-8] if what == "crop" else arrays.random(*shape)


@pytest.mark.parametrize("seed", CASES)
def test_g18_products_are_right(pool, stream, dtype, seed):
    rng = random.Random(seed)
    arrays = Arrays(pool, dtype)
    m, k, n = rng.choice((1, 7, 64, 197)), rng.choice((8, 64, 257, 1024)), rng.choice((1, 10, 64, 1000))
    batch = rng.choice(((), (), (3,), (2, 4), (5, 1)))
    kind = rng.choice(KINDS)
    bias = arrays.random(n) if rng.random() < 0.6 else None
    a = matrices(rng, arrays, *batch, m, k)
    if rng.random() < 0.5:
        w = matrices(rng, arrays, n, k)
        y, b = handlepool.linear(a, w, bias=bias, activation=kind, pool=pool), w.T
    else:
        b = matrices(rng, arrays, *rng.choice(((), batch, (1,) * len(batch))), k, n)
        y = handlepool.matmul(a, b, bias=bias, activation=kind, pool=pool)
    expected = reference.matmul(arrays.take(a), arrays.take(b), bias=None if bias is None else arrays.take(bias), activation=kind)
    assert arrays.error(y, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ops.ACTIVATIONS)
def test_g18_a_product_far_from_zero(pool, stream, dtype, kind):
    arrays = Arrays(pool, dtype)
    x, w, bias = arrays.put(np.linspace(-300, 300, 64 * 64).reshape(64, 64)), arrays.put(np.eye(64)), arrays.random(64)
    y = handlepool.linear(x, w, bias=bias, activation=kind, pool=pool)
    expected = reference.matmul(arrays.take(x), arrays.take(w), bias=arrays.take(bias), activation=kind)
    assert arrays.error(y, expected) < 2 * TOLERANCE[dtype]


def test_a_layer_in_concurrent_branches(pool, stream):
    arrays = Arrays(pool, "float16")
    xs, w, bias = [arrays.random(8, 512) for _ in range(16)], arrays.random(512, 512), arrays.random(512)
    with ParallelStates(4, pool=pool).fork() as fork:
        ys = [fork.run(handlepool.linear, x, w, bias=bias, activation="tanh") for x in xs]
    for x, y in zip(xs, ys, strict=True):
        expected = reference.matmul(arrays.take(x), arrays.take(w).T, bias=arrays.take(bias), activation="tanh")
        assert arrays.error(y, expected) < 2 * TOLERANCE["float16"]
