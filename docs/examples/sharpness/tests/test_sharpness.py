"""The tests of a library that uses handlepool. They need no GPU; on a machine that has one, some run there, too."""

import numpy as np
import pytest
import sharpness

pytestmark = pytest.mark.usefixtures("handlepool_leak_check")

IMAGES = np.arange(2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8) % 7
BOX = np.full((3, 3, 3, 3), 1 / 27, np.float32)


def expected():
    """Compute the detail at the scale of a box of 3 by 3 pixels, by NumPy alone."""
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return 2 * (IMAGES - windows.sum(axis=(1, 4, 5), keepdims=True)[..., 0, 0] / 27)


def check_details(pool):
    x, w = pool.driver.asarray(IMAGES), pool.driver.asarray(BOX)
    scales, bright = sharpness.details(x, [w] * 3)
    for scale in scales:
        np.testing.assert_allclose(scale.get(), expected(), atol=1e-2)
    np.testing.assert_array_equal(bright.get(), IMAGES * 4)
    np.testing.assert_array_equal(x.get(), IMAGES)


def test_details(handlepool_host_pool, handlepool_no_gpu):
    check_details(handlepool_host_pool)


def test_details_on_a_gpu(handlepool_gpu_pool):
    check_details(handlepool_gpu_pool)


def test_each_branch_has_a_handle_on_a_stream_of_its_own(handlepool_host_pool):
    assert len(set(sharpness.bound_to())) == 4


def test_centred(handlepool_host_pool):
    x = handlepool_host_pool.driver.asarray(IMAGES)
    centred = sharpness.Centred()
    doubled = centred(x) + centred(x)
    np.testing.assert_allclose(doubled.get(), 2 * (IMAGES - IMAGES.mean()), atol=1e-4)
