"""Run an image from Zarr to Zarr in overlapping tiles: blurred and run through a small network, by one process and by a cluster.

Each of Dask's workers has one device. With a single device, two workers share it. Both results are compared, bit for bit. The
picture shows the actions of each worker in the cluster's last turn. Needs handlepool[dask] and zarr.
"""

import sys
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, time
from typing import Any

import numpy as np
from common import Ratios, no_collector, pool_on_a_stream, progress, publish, summary
from devices import Cluster
from options import arguments, parse, positive

ALONE, CLUSTER = "one process", "cluster"


def network(x: Any, blur: Any, first: Any, second: Any) -> Any:
    """Three convolutions; the first one a filter of the image."""
    import handlepool

    conv = partial(handlepool.conv2d, deterministic=True)
    y = conv(conv(x, blur, padding=2), first, padding=1, activation="relu")
    return conv(y, second, padding=1)


DEPTH = 4
"""Pixels that the result of one looks at beyond it."""


def weights(channels: int, dtype: str) -> tuple[np.ndarray[Any, Any], ...]:
    """The blur's, of each channel alone, and the network's."""
    line = np.array([1, 4, 6, 4, 1]) / 16
    blur = np.einsum("kc,h,w->kchw", np.eye(channels), line, line)
    rng = np.random.default_rng(1)
    others = [rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels) for _ in range(2)]
    return tuple(np.asarray(each, dtype) for each in (blur, *others))


def stream_of(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the actions with their times in seconds: worker, thread, action, start, end."""
    threads = sorted({(task["worker"], task["thread"]) for task in found})
    steps = [(threads.index((task["worker"], task["thread"])), step) for task in found for step in task["startstops"]]
    begin = min(step["start"] for _, step in steps)
    workers = sorted({worker for worker, _ in threads})
    return [
        [workers.index(threads[row][0]), row, step["action"], round(step["start"] - begin, 5), round(step["stop"] - begin, 5)]
        for row, step in steps
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--side", type=positive, default=4096, help="pixels of the image (default: %(default)s)")
    parser.add_argument("--chunk", type=positive, default=512, help="pixels of a tile (default: %(default)s)")
    parser.add_argument("--channels", type=positive, default=8, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    options = parse(parser, small={"side": 48, "chunk": 16, "channels": 2, "dtype": "float32"})
    try:
        import dask
        import dask.array as da
        import distributed  # noqa: F401
        import zarr  # noqa: F401

        from handlepool.integrations.dask import map_tiles
    except ImportError as error:
        parser.error(f"handlepool[dask] and zarr are needed: {error}")
    warnings.simplefilter("ignore")  # Dask's and Zarr's own
    with pool_on_a_stream(options.driver) as (pool, _), TemporaryDirectory() as folder:
        devices = [*range(pool.driver.device_count())]
        shape = 1, options.channels, options.side, options.side
        chunks = 1, options.channels, options.chunk, options.chunk
        image = da.random.default_rng(1).standard_normal(shape, chunks=chunks, dtype="float32").astype(options.dtype)
        paths = {name: str(Path(folder) / f"{name}.zarr") for name in ("image", ALONE, CLUSTER)}
        with dask.config.set(scheduler="threads"):
            image.to_zarr(paths["image"])
        x = da.from_zarr(paths["image"])
        y = map_tiles(network, x, depth={2: DEPTH, 3: DEPTH}, shared=weights(options.channels, options.dtype), lanes=None)
        samples: dict[str, list[float]] = {ALONE: [], CLUSTER: []}
        with closing(Cluster(pool.driver.name, devices if len(devices) > 1 else devices * 2)) as cluster:
            cluster.client.get_task_stream()  # from now on it is kept
            for repeat in progress(range(options.repeats + 1)):
                for name, scheduler in ((ALONE, "synchronous"), (CLUSTER, "distributed")):
                    begun = time()
                    with no_collector(), dask.config.set(scheduler=scheduler):
                        start = perf_counter()
                        y.to_zarr(paths[name], mode="w")
                        taken = perf_counter() - start
                    if repeat:  # the first round warms up
                        samples[name].append(taken)
            stream = stream_of(cluster.client.get_task_stream(start=begun))
            workers = len(cluster.cluster.workers)
        bits = f"uint{8 * y.dtype.itemsize}"
        both = [da.from_zarr(paths[name]).view(bits) for name in (ALONE, CLUSTER)]
        with dask.config.set(scheduler="threads"):
            if not (both[0] == both[1]).all().compute():
                raise SystemExit("the cluster's result is not that of one process")
        ratios = Ratios()
        ratios.compare(samples, CLUSTER, ALONE, None, f", {workers} workers of {len(devices)} devices")
        times = {
            "an image from Zarr to Zarr, milliseconds, wall": {
                name: summary([1e3 * each for each in values]) for name, values in samples.items()
            }
        }
        more = {"side": options.side, "tiles": int(np.prod(x.numblocks)), "workers": workers, "devices": len(devices)}
        publish(options, "tiles", pool.driver.name, times, ratios, **more, stream=stream)
    return 0


if __name__ == "__main__":
    sys.exit(main())
