"""The page's example with Ray: actors on GPUs that Ray was told of, on the host driver; where Ray is installed."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import handlepool

ray = pytest.importorskip("ray", reason="Ray is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "processes.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")]


def network(x, w):
    return handlepool.conv2d(x, w, padding=1, activation="relu", deterministic=True)


@pytest.mark.filterwarnings("ignore")
def test_the_example_gives_what_one_process_gives(make_pool, monkeypatch, make_default):
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
    random = np.random.default_rng(1)
    images = [random.standard_normal((1, 4, 9, 9 + index % 2)).astype("float32") for index in range(9)]
    weights = random.standard_normal((4, 4, 3, 3)).astype("float32")
    _, block = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": "__main__", "images": images, "weights": weights, "network": network}
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's processes have no such module
    ray.init(num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(block, names)
    finally:
        ray.shutdown()
    pool = make_pool()
    make_default(pool)
    put, take = pool.driver.asarray, pool.driver.asnumpy
    for y, x in zip(names["results"], images, strict=True):
        assert y.tobytes() == take(network(put(x), put(weights))).tobytes()
