"""Dask's workers on a GPU, and on two: tiles bit for bit, and a worker whose context is lost."""

import os

import numpy as np
import pytest
from harness import tiles

dask = pytest.importorskip("dask", reason="Dask is not installed")
da = pytest.importorskip("dask.array", reason="Dask's arrays are not installed")
distributed = pytest.importorskip("distributed", reason="Dask's scheduler is not installed")

from handlepool.integrations.dask import KeptFunctions, PoolPlugin, map_tiles  # noqa: E402

IMAGE = np.random.default_rng(1).standard_normal((1, 16, 300, 400)).astype("float16")
WEIGHTS = (np.random.default_rng(2).standard_normal((16, 16, 3, 3)) / 12).astype("float16")
TILES = {"depth": {2: 1, 3: 1}, "shared": (WEIGHTS,)}


def image():
    return da.from_array(IMAGE, chunks=(1, 16, 100, 128))


@pytest.fixture
def expected(pool, monkeypatch, make_default):
    """What this process alone makes of the image."""
    make_default(pool)
    monkeypatch.setattr("handlepool.integrations.dask._functions", KeptFunctions())  # what is there is of another pool
    return map_tiles(tiles.conv, image(), **TILES).compute(scheduler="synchronous")


def cluster_of(devices):
    """A worker of two threads for each device, of those that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [given.split(",")[device] if given else str(device) for device in devices]
    workers = {
        index: {"cls": distributed.Nanny, "options": {"nthreads": 2, "env": {"CUDA_VISIBLE_DEVICES": device}}}
        for index, device in enumerate(visible)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": ":0"}}
    return distributed.SpecCluster(scheduler=scheduler, workers=workers, silence_logs=50)


@pytest.mark.parametrize("to_lose", [False, True], ids=["as it is", "a lost context"])
def test_workers_of_one_gpu_give_what_one_process_gives(expected, tmp_path, to_lose):
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "600s"})
    with patient, cluster_of([0, 0]) as cluster, distributed.Client(cluster) as client:
        client.register_plugin(PoolPlugin(states=2, workspace=1 << 20))
        if to_lose:
            before = {pid for pid, _, _ in client.run(tiles.state).values()}
            y = map_tiles(tiles.crashes, image(), **{**TILES, "shared": (WEIGHTS, str(tmp_path / "lost"))})
            assert y.compute().tobytes() == expected.tobytes()
            client.wait_for_workers(2, timeout=120)
            assert {pid for pid, _, _ in client.run(tiles.state).values()} - before
        assert map_tiles(tiles.conv, image(), **TILES).compute().tobytes() == expected.tobytes()
        assert all(name == "cuda" and peak >= 4 for _, name, peak in client.run(tiles.state).values())


@pytest.mark.two_gpus
def test_two_gpus_give_what_one_process_gives(expected):
    with cluster_of([0, 1]) as cluster, distributed.Client(cluster) as client:
        client.register_plugin(PoolPlugin())
        assert len({*client.run(tiles.device).values()}) == 2
        assert map_tiles(tiles.conv, image(), **TILES).compute().tobytes() == expected.tobytes()
