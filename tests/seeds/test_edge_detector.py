"""An edge detector: three channels to three, by both kinds of convolution, within a workspace limit; then a sigmoid pass."""

import numpy as np
import pytest
from harness.arrays import FULL, TOLERANCE, Arrays

import handlepool
from handlepool import GraphNotSupportedError, ops
from handlepool.ops.convolution import conv2d_plan
from handlepool.testing.reference import ACTIVATIONS
from handlepool.testing.reference import conv2d as reference

HEIGHT, WIDTH = 128, 96
EDGES = np.array([[1, 1, 1], [1, -8, 1], [1, 1, 1]], float)
SLOPE = np.array([[0, 1, 2], [-1, 0, 1], [-2, -1, 0]], float)  # unlike itself turned around
MODES = ("cross_correlation", "convolution")
LIMIT = 1 << 20


@pytest.fixture(params=["NCHW", "NHWC"])
def arrays(request, pool):
    return Arrays(pool, "float32", request.param)


@pytest.fixture
def image(arrays):
    """Values of 0 to 1, with a frame and a disc drawn into them."""
    values = np.abs(arrays.take(arrays.random(1, 3, HEIGHT, WIDTH)))
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    values[..., 20:100, 10:12] += 2
    values[..., (rows - 64) ** 2 + (columns - 48) ** 2 < 400] += 1
    return arrays.put(values / values.max())


def filters(arrays, kernel):
    """The kernel for every pair of an output and an input channel."""
    return arrays.put(np.broadcast_to(kernel, (3, 3, 3, 3)))


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("kernel", ["edges", "slope"])
@pytest.mark.parametrize("mode", MODES)
def test_both_kinds_of_convolution(arrays, image, mode, kernel, tf32):
    w = filters(arrays, {"edges": EDGES, "slope": SLOPE}[kernel])
    out = arrays.poisoned(1, 3, HEIGHT, WIDTH)
    handlepool.conv2d(image, w, padding=1, mode=mode, out=out, allow_tf32=tf32)
    expected = reference(arrays.take(image), arrays.take(w), padding=1, mode=mode)
    assert arrays.error(out, expected) < (TOLERANCE["float32"] if tf32 else FULL)


def test_the_kinds_differ_where_the_kernel_is_unlike_itself_turned_around(arrays, image):
    for kernel, alike in ((EDGES, True), (SLOPE, False)):
        w = filters(arrays, kernel)
        made = [arrays.take(handlepool.conv2d(image, w, padding=1, mode=mode, allow_tf32=False)) for mode in MODES]
        assert np.allclose(*made, atol=1e-4) == alike


@pytest.mark.parametrize("mode", MODES)
def test_the_workspace_stays_within_its_limit(pool, arrays, image, mode):
    w = filters(arrays, EDGES)
    options = {"padding": 1, "mode": mode, "workspace_limit": LIMIT}
    plan = conv2d_plan(image, w, **options)
    assert plan.workspace_size <= LIMIT
    y = handlepool.conv2d(image, w, **options)
    assert pool.stats()["scratch_bytes"] <= LIMIT
    assert arrays.error(y, reference(arrays.take(image), arrays.take(w), padding=1, mode=mode)) < TOLERANCE["float32"]


def test_no_workspace_at_all(pool, arrays, image):
    """cuDNN has plans without; where there is none, as on the host driver, it is said, and nothing is launched."""
    w = filters(arrays, EDGES)
    if pool.driver.name == "host":
        with pytest.raises(GraphNotSupportedError, match=r"conv2d: no plan for conv_fprop.0.*raise workspace_limit"):
            handlepool.conv2d(image, w, padding=1, workspace_limit=0)
        assert pool.stats()["plans_cached"] == 0
        return
    y = handlepool.conv2d(image, w, padding=1, workspace_limit=0)
    assert pool.stats()["scratch_bytes"] == 0
    assert arrays.error(y, reference(arrays.take(image), arrays.take(w), padding=1)) < TOLERANCE["float32"]


def test_the_sigmoid_pass_in_place_and_in_one(arrays, image):
    w = filters(arrays, EDGES)
    expected = ACTIVATIONS["sigmoid"](reference(arrays.take(image), arrays.take(w), padding=1))
    y = handlepool.conv2d(image, w, padding=1, allow_tf32=False)
    assert ops.sigmoid(y, out=y) is y
    fused = handlepool.conv2d(image, w, padding=1, activation="sigmoid")
    assert arrays.error(y, expected) < FULL
    assert arrays.error(fused, expected) < TOLERANCE["float32"]
    assert 0 <= arrays.take(y).min() <= arrays.take(y).max() <= 1
