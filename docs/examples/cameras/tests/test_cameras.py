"""Each camera has the scores of its own network, and the frames come one after the other. No GPU is needed."""

import cameras
import numpy as np
import pytest

import handlepool

pytestmark = pytest.mark.usefixtures("handlepool_leak_check")


def windows(x, w, stride):
    """Convolve by NumPy alone, with a margin of zeros that keeps the size."""
    margin = w.shape[2] // 2
    padded = np.pad(x, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    found = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwrs,kcrs->nkhw", found, w)


def expected(x, weights):
    stages, (head, _) = weights
    for (w, _), (v, _) in stages:
        x = np.maximum(windows(x, handlepool.asnumpy(w).astype(np.float64), 2), 0)
        x = np.maximum(windows(x, handlepool.asnumpy(v).astype(np.float64), 1) + x, 0)
    return windows(x.mean((2, 3), keepdims=True), handlepool.asnumpy(head).astype(np.float64), 1)


def views(rng, side=8):
    return [rng.standard_normal((1, 3, side, side), dtype=np.float32) for _ in range(cameras.CAMERAS)]


def test_each_camera_has_the_scores_of_its_own_network(handlepool_host_pool, handlepool_no_gpu):
    rng = np.random.default_rng(0)
    networks = [cameras.network(rng, ((3, 4), (4, 8))) for _ in range(cameras.CAMERAS)]
    frame = cameras.recognizer(networks)
    for _ in range(3):
        images = views(rng)
        found = frame.submit(*images).result()
        for got, image, weights in zip(found, images, networks, strict=True):
            np.testing.assert_allclose(got, expected(image, weights), rtol=1e-4, atol=1e-4)
    assert frame.stats().keys == 1


def test_the_networks_run_side_by_side(handlepool_host_pool):
    rng = np.random.default_rng(0)
    frame = cameras.recognizer([cameras.network(rng, ((3, 4),)) for _ in range(cameras.CAMERAS)])
    images = [handlepool.asarray(each) for each in views(rng)]
    explained = frame.program(*images).explain()
    assert explained.longest_by_data == len(explained.steps) // cameras.CAMERAS


def test_the_latencies_are_drawn(handlepool_host_pool, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, and it is not installed")
    rng = np.random.default_rng(0)
    frame, images = cameras.recognizer([cameras.network(rng, ((3, 4),)) for _ in range(cameras.CAMERAS)]), views(rng)
    found = cameras.latencies(frame, images, 4, 0.0)
    assert len(found) == 4
    assert min(found) > 0
    cameras.draw(found, tmp_path / "cameras.png", 1 / 30, "host driver")
    assert (tmp_path / "cameras.png").stat().st_size > 1000
