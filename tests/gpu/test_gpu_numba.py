"""Numba's device arrays. Collected only where Numba's CUDA target is installed."""

import numpy as np
import pytest

from handlepool import conv2d
from handlepool.testing.reference import conv2d as convolve

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_device_array_gives_one(pool, stream):
    from numba import cuda

    x = np.random.default_rng(0).integers(-3, 4, (1, 16, 8, 8)).astype(np.float32)
    w = np.random.default_rng(1).integers(-3, 4, (16, 16, 3, 3)).astype(np.float32)
    y = conv2d(cuda.to_device(x), cuda.to_device(w), pool=pool)
    assert cuda.is_cuda_array(y)
    assert type(y).__module__.startswith("numba")
    stream.synchronize()
    assert np.allclose(y.copy_to_host(), convolve(x, w), atol=0.25)
