"""JAX's arrays. Collected only where JAX is installed."""

import os

import numpy as np
import pytest

from handlepool import ArgumentError, ParallelStates, conv2d
from handlepool.testing.reference import conv2d as convolve

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or it takes three quarters of the device from the other tests
pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.fixture
def jax():
    import jax

    return jax


def integers(jax, *shape, seed=0, dtype="float32"):
    return jax.numpy.asarray(np.random.default_rng(seed).integers(-3, 4, shape), getattr(jax.numpy, dtype))


def exact(y, x, w):
    """Whether a convolution of integers is right, but for what its type rounds."""
    expected = convolve(np.asarray(x, np.float32), np.asarray(w, np.float32))
    return np.allclose(np.asarray(y, np.float32), expected, rtol=1e-2, atol=0.25)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_array_of_jax_gives_one(pool, stream, jax, dtype):
    x, w = integers(jax, 1, 16, 8, 8, dtype=dtype), integers(jax, 16, 16, 3, 3, seed=1, dtype=dtype)
    y = conv2d(x, w, pool=pool)
    assert isinstance(y, jax.Array)
    assert y.dtype == x.dtype
    assert exact(y, x, w)


def test_g6_a_call_starts_after_what_jax_still_computes_and_jax_goes_on_after_it(pool, stream, jax):
    @jax.jit
    def slow(a, x):
        for _ in range(20):
            a = a @ a / 4096
        return x + 0 * a[0, 0], a

    a, x, w = jax.numpy.ones((4096, 4096)), integers(jax, 1, 16, 8, 8), integers(jax, 16, 16, 3, 3, seed=1)
    conv2d(slow(a, x)[0], w, pool=pool).block_until_ready()
    for _ in range(5):
        y = conv2d(slow(a, x)[0], w, pool=pool)
        assert exact(y + 0, x, w)


def test_a_map_over_arrays_of_jax(pool, stream, jax):
    images, w = [integers(jax, 1, 16, 8, 8, seed=i) for i in range(8)], integers(jax, 16, 16, 3, 3, seed=99)
    states = ParallelStates(4, pool=pool)
    for function in (conv2d, lambda image, w: conv2d(image, w)):
        outputs = states.map(function, images, [w] * 8)
        assert all(isinstance(y, jax.Array) and exact(y, image, w) for y, image in zip(outputs, images, strict=True))


def test_an_immutable_array_is_no_out(pool, jax):
    x, w = integers(jax, 1, 16, 8, 8), integers(jax, 16, 16, 3, 3)
    with pytest.raises(ArgumentError, match=r"conv2d: out=, an? .* cannot be written"):
        conv2d(x, w, out=jax.numpy.zeros((1, 16, 6, 6)), pool=pool)
