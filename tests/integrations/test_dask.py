"""Dask's workers: tiles over a cluster of processes, workers that are killed, and what a worker keeps."""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import harness.tiles
import numpy as np
import pytest
from harness import tiles
from harness.hidden import hidden
from harness.insides import functions_of

import handlepool
from handlepool import ArgumentError, ArrayTypeError, DriverNotAvailableError, HandlePool, PoisonedContextError

dask = pytest.importorskip("dask", reason="Dask is not installed")
da = pytest.importorskip("dask.array", reason="Dask's arrays are not installed")
distributed = pytest.importorskip("distributed", reason="Dask's scheduler is not installed")

from handlepool.integrations import dask as integration  # noqa: E402
from handlepool.integrations.dask import PoolPlugin, map_tiles  # noqa: E402

pytestmark = pytest.mark.slow
WORKERS = 2
IMAGE = np.random.default_rng(1).standard_normal((1, 4, 30, 40)).astype("float32")
WEIGHTS = np.random.default_rng(2).standard_normal((4, 4, 3, 3)).astype("float32")
TILES = {"depth": {2: 1, 3: 1}, "boundary": "reflect", "shared": (WEIGHTS,)}


def image(chunks=(1, 4, 10, 10)):
    return da.from_array(IMAGE, chunks=chunks)


@pytest.fixture
def here(make_pool, make_default):
    """The default pool of this process, for Dask's own schedulers."""
    pool = make_pool(check_order=False)
    make_default(pool)
    yield pool
    functions_of(integration).clear()


def in_one_piece(pool, function=tiles.conv):
    padded = np.pad(IMAGE, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="symmetric")
    put = pool.driver.asarray
    return pool.driver.asnumpy(function(put(padded), put(WEIGHTS)))[:, :, 1:-1, 1:-1]


@pytest.fixture(scope="module")
def client():
    """A cluster of processes on the host driver, which the plugin asks for; registered twice."""
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    # A local cluster looks once, so long after a worker was lost, and gives up one that is starting again just then. And a worker
    # tries for as long as the second one to reach another that is gone.
    timeouts = {"distributed.deploy.lost-worker-timeout": "600s", "distributed.comm.timeouts.connect": "5s"}
    with dask.config.set(timeouts), distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        client.register_plugin(PoolPlugin(driver="host"))
        client.register_plugin(PoolPlugin(driver="host", states=2))
        yield client


# In one process


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_tiles_are_the_image_in_one_piece(here, scheduler):
    got = map_tiles(tiles.conv, image(), **TILES).compute(scheduler=scheduler)
    np.testing.assert_allclose(got, in_one_piece(here), rtol=1e-5, atol=1e-5)


def test_a_network_that_pads_gives_by_default_what_it_gives_of_the_image_in_one_piece(here):
    got = map_tiles(tiles.network, image(), depth={2: 2, 3: 2}, shared=(WEIGHTS,)).compute(scheduler="synchronous")
    right = here.driver.asnumpy(tiles.network(here.driver.asarray(IMAGE), here.driver.asarray(WEIGHTS)))
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    (kept,) = functions_of(integration).values()
    assert kept._recorded.stats().keys == 4  # of the middle, the corners, and the edges above and beside it


def test_an_array_without_axes_keeps_its_shape(here):
    x = da.from_array(np.float32(3))
    assert map_tiles(tiles.twofold, x, depth=0).compute(scheduler="synchronous").shape == x.shape == ()


def test_the_function_is_recorded_once_for_each_geometry(here):
    called = hidden([])

    def counted(x, w):
        called().append(x.shape)
        return tiles.conv(x, w)

    y = map_tiles(counted, image((1, 4, 10, 16)), **TILES)
    y.compute(scheduler="synchronous")
    y.compute(scheduler="synchronous")
    assert sorted(called()) == [(1, 4, 12, 10)] * 2 + [(1, 4, 12, 18)] * 2  # each for real, and captured


def test_more_geometries_and_functions_than_are_kept(here, limits):
    limits(MOST_PROGRAMS=1, MOST_FUNCTIONS=1)
    first = map_tiles(tiles.conv, image((1, 4, 10, 16)), **TILES)
    second = map_tiles(tiles.wide, first.rechunk((1, 4, 10, 12)), extents={1: 8}, **TILES)
    got = second.compute(scheduler="threads")
    assert got.shape == (1, 8, 30, 40)
    assert [function._recorded.stats().keys for function in functions_of(integration).values()] == [1]
    np.testing.assert_allclose(got[:, 4:], in_one_piece(here), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_recorded_runs_eagerly_which_is_said_once(here):
    with pytest.warns(RuntimeWarning, match="runs eagerly") as warned:
        got = map_tiles(tiles.looks, image(), **TILES).compute(scheduler="synchronous")
    assert len(warned) == 1
    np.testing.assert_allclose(got, in_one_piece(here), rtol=1e-5, atol=1e-5)


def test_what_is_shared_is_part_of_what_a_worker_keeps(here):
    for w in (WEIGHTS, WEIGHTS * 2, WEIGHTS):
        got = map_tiles(tiles.conv, image(), depth={2: 1, 3: 1}, boundary="reflect", shared=(w,)).compute(scheduler="synchronous")
        np.testing.assert_allclose(got, in_one_piece(here) * (w is not WEIGHTS) + in_one_piece(here), rtol=1e-5, atol=1e-5)


def test_a_function_is_what_it_is_when_a_tile_is_computed(here, monkeypatch):
    def got(function):
        return map_tiles(function, image(), depth=0).compute(scheduler="synchronous").ravel()[0] / IMAGE.ravel()[0]

    functions = [tiles.scaled, tiles.scaled_inside, lambda x: tiles.scaled(x) + x * tiles.SCALE - x * tiles.SCALE]
    functions += [tiles.scaled_by_operation, lambda x: tiles.scaled_by_operation(x), lambda x: x * harness.tiles.SCALE]
    assert [got(function) for function in functions] == [2] * 6
    monkeypatch.setattr(tiles, "SCALE", 5)
    assert [got(function) for function in functions] == [5] * 6
    factor = 3

    def by_factor(x):
        return x * factor

    late = map_tiles(by_factor, image(), depth=0)
    factor = 4
    assert late.compute(scheduler="synchronous").ravel()[0] / IMAGE.ravel()[0] == 4
    factor = 3
    assert got(by_factor) == 3


class Attributes(dict):
    """As configurations have it."""

    __getattr__ = dict.__getitem__


def test_a_function_that_runs_eagerly_and_counts_its_calls_is_kept_once(here):
    calls = 0

    def function(x):
        nonlocal calls
        calls += 1
        return here.driver.asarray(here.driver.asnumpy(x) * 2)

    with pytest.warns(RuntimeWarning, match="runs eagerly") as warned:
        got = map_tiles(function, image((1, 2, 8, 8)), depth=0).compute(scheduler="threads", num_workers=4)
    assert (got == IMAGE * 2).all()
    assert len(functions_of(integration)) == 1
    assert len(warned) <= 4  # threads, each of which may have begun before the first was done


def test_a_function_that_counts_its_calls_or_names_odd_objects_is_recorded_once(here):
    calls, odd, nan = hidden([]), Attributes(a=2), float("nan")

    def function(x):
        calls().append(1)
        return x * odd["a"] if nan != nan else x

    got = map_tiles(function, image(), depth=0).compute(scheduler="synchronous")
    assert (got == IMAGE * 2).all()
    assert len(calls()) == 2


def test_what_is_done_in_place_is_done_once_to_each_tile(here):
    x = image().persist(scheduler="synchronous")
    got = map_tiles(tiles.in_place, x, depth=0).compute(scheduler="synchronous")
    assert (got == (IMAGE + 1) * 2).all()
    assert (x.compute(scheduler="synchronous") == IMAGE).all()


@pytest.mark.parametrize("depth", [0, {2: 0}, {2: (0, 0), 3: (0, 0)}, {2: 1}], ids=str)
def test_without_margins_a_tile_is_one_task(depth):
    x = image().persist(scheduler="synchronous")
    y = map_tiles(tiles.in_place, x, depth=depth, boundary="none")
    (known,) = dask.optimize(y)
    tasks = len(known.__dask_graph__()) - x.npartitions - 1  # and what is shared
    assert (tasks == x.npartitions) is (depth != {2: 1})


@pytest.mark.parametrize("depth", [0, {2: 1}], ids=str)
def test_tiles_reach_the_function_alike_however_the_array_lies(here, depth):
    seen = hidden([])

    def looking(x):
        seen().append(x.strides)
        return x * 2

    lies_otherwise = da.from_array(np.ascontiguousarray(IMAGE.transpose(0, 2, 3, 1)), chunks=(1, 10, 16, 4)).transpose(0, 3, 1, 2)
    got = map_tiles(looking, lies_otherwise[:, :, ::-1], depth=depth, boundary="none").compute(scheduler="synchronous")
    assert (got == IMAGE[:, :, ::-1] * 2).all()
    assert all(strides == tuple(sorted(strides, reverse=True)) for strides in seen()), seen()


def test_results_that_differ_have_names_that_differ():
    options = [{}, {"dtype": "float64"}, {"extents": {1: 8}}, {"lanes": 2}, {"depth": 0}, {"shared": (WEIGHTS, 1)}]
    assert len({map_tiles(tiles.conv, image(), **{**TILES, **option}).name for option in options}) == len(options)


def test_zarr_to_zarr(here, tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    image().to_zarr(str(tmp_path / "in.zarr"))
    x = da.from_zarr(str(tmp_path / "in.zarr"))
    with dask.config.set(scheduler="synchronous"):
        map_tiles(tiles.conv, x, **TILES).to_zarr(str(tmp_path / "out.zarr"))
    np.testing.assert_allclose(zarr.open(str(tmp_path / "out.zarr"))[:], in_one_piece(here), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "x", "options", "message"),
    [
        (3, image(), {}, "pass a function that takes a tile"),
        (tiles.conv, IMAGE, {}, "is of type ndarray; pass a dask.array.Array"),
        (tiles.conv, image(), {"extents": {2: 8}}, "axis 2"),
        (tiles.conv, image(), {"extents": {4: 8}}, "axis 4"),
        (tiles.conv, image(), {"shared": WEIGHTS}, r"shared is of type ndarray; pass a tuple"),
        (tiles.conv, image(), {"shared": "abc"}, r"shared is of type str; pass a tuple"),
        # Dask would leave these out, and the margins would not be there.
        (tiles.conv, image(), {"depth": {-1: 1, -2: 1}}, "depth has axis -1; x has the axes 0 to 3"),
        (tiles.conv, image(), {"depth": {2: 1, 4: 1}}, "depth has axis 4"),
        (tiles.conv, image(), {"depth": (1, 1)}, "depth has 2 entries and x has 4 axes"),
        (tiles.conv, image(), {"boundary": {-1: "none"}}, "boundary has axis -1"),
        (tiles.conv, image(), {"boundary": ("none",)}, "boundary has 1 entries"),
        (tiles.conv, image(), {"depth": -1}, "depth has -1; each depth must be an integer of 0 or more"),
        (tiles.conv, image(), {"depth": "1"}, "depth has '1'; each depth must"),
        (tiles.conv, image(), {"depth": {2: (1, -1)}}, r"depth has \(1, -1\)"),
        (
            tiles.conv,
            image(),
            {"boundary": "mirror"},
            "boundary has 'mirror'; each boundary must be a number or one of reflect, periodic, nearest, none",
        ),
        (tiles.conv, image(), {"boundary": {2: "mirror"}}, "boundary has 'mirror'"),
        (tiles.conv, image(), {"lanes": 0}, "lanes=0.: lanes must be an integer from 1 to 32, or None"),
        (tiles.conv, image(), {"lanes": "8"}, "lanes='8'"),
        (tiles.conv, image(), {"extents": {"a": 3}}, "extents has axis 'a'; name only axes of x"),
        (tiles.conv, image(), {"extents": {1: -3}}, "extents has -3 for axis 1"),
        (tiles.conv, image(), {"extents": 3}, "extents is of type int"),
        (tiles.conv, image(), {"depth": {2: (1, 2)}}, r"\(1, 2\) for axis 2; Dask takes two depths .* boundary 'none'"),
    ],
)
def test_what_cannot_be_mapped_is_refused(function, x, options, message):
    with pytest.raises(ArgumentError, match=message):
        map_tiles(function, x, **{**TILES, **options})


@pytest.mark.parametrize(("value", "kind"), [([WEIGHTS], "list"), (np.ma.masked_greater(WEIGHTS, 0), "MaskedArray")])
def test_what_is_shared_goes_to_workers_as_it_is(value, kind):
    with pytest.raises(ArrayTypeError, match=f"shared holds .* of type {kind}"):
        map_tiles(tiles.conv, image(), depth=0, shared=(value,))


def test_what_is_shared_is_as_it_was_when_it_was_given(here):
    """What a worker keeps is found by what was in it then: another call with the same weights finds it, too."""
    w = WEIGHTS.copy()
    first = map_tiles(tiles.conv, image(), depth={2: 1, 3: 1}, boundary="reflect", shared=(w,))
    w *= 2
    right = in_one_piece(here)
    for y in (first, map_tiles(tiles.conv, image(), **TILES)):
        np.testing.assert_allclose(y.compute(scheduler="synchronous"), right, rtol=1e-5, atol=1e-5)


def test_what_is_shared_keeps_its_layout_on_the_way_to_a_worker(client):
    w = np.ones((2, 4, 3, 5), np.float32)
    channels_last = w.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    for given, digits in ((w, 123), (channels_last, 231), (w.T.copy().T, 3210), (w[:, ::2], 123)):
        y = map_tiles(tiles.order_of_axes, image(), depth=0, shared=(given,))
        assert np.unique(y.compute()).tolist() == [digits]


@pytest.mark.parametrize("boundary", ["none", ["none"] * 4, {2: "none", 3: "none"}])
@pytest.mark.parametrize("depth", [[0, 0, 1, 1], {2: (1, 2), 3: 1}, {2: 12, 3: 12}])
def test_margins_are_those_of_map_overlap(here, depth, boundary):
    """Also where chunks are smaller than the margin."""

    def sums(x):
        y = x * 1
        y[:, :, 1:-1, 1:-1] = x[:, :, :-2, 1:-1] + x[:, :, 2:, 1:-1] + x[:, :, 1:-1, :-2]
        return y

    got = map_tiles(sums, image(), depth=depth, boundary=boundary).compute(scheduler="synchronous")
    depth = dict(enumerate(depth)) if isinstance(depth, list) else depth
    right = da.map_overlap(sums, image(), depth=depth, boundary="none", dtype="float32").compute(scheduler="synchronous")
    assert (got == right).all()


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (tiles.wide, TILES, r"of shape \(1, 8, 12, 12\) and type float32 for a tile of shape \(1, 4, 12, 12\)"),
        (tiles.conv, {**TILES, "dtype": "float64"}, "and type float64"),
        (tiles.nothing, {"depth": 0}, "NoneType"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no work to the current stream:RuntimeWarning")
def test_a_result_that_is_none_is_named_with_its_tile(here, function, options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        map_tiles(function, image(), **options).compute(scheduler="synchronous")
    assert "at the tile (0, 0, " in caught.value.__notes__[-1]


def test_tiles_with_a_mask_are_refused(here):
    masked = da.ma.masked_greater(image(), 0)
    with pytest.raises(ArrayTypeError, match="of type MaskedArray"):
        map_tiles(tiles.conv, masked, depth=0, shared=(WEIGHTS,)).compute(scheduler="synchronous")


@pytest.fixture
def losing(monkeypatch):
    """Lets the integration find the context lost, or not, and lists the workers that leave: ``losing(lost)``."""

    def lose(lost):
        left = []
        monkeypatch.setattr(integration, "_is_lost", lambda: lost)
        monkeypatch.setattr(integration, "_leave", lambda worker: left.append(worker) or Future())
        return left

    return lose


def test_a_worker_that_does_not_close_in_time_lets_the_task_report_its_own_error(here, losing, monkeypatch):
    def lost(x):
        raise PoisonedContextError("lost")

    left = losing(True)
    monkeypatch.setattr(integration, "get_worker", lambda: "the worker")
    monkeypatch.setattr(integration, "wait", lambda futures, seconds: left.append(seconds))
    with pytest.raises(PoisonedContextError, match="lost"):
        map_tiles(lost, image((1, 4, 30, 40)), depth=0).compute(scheduler="synchronous")
    assert left == ["the worker", integration._CLOSING]


@pytest.mark.parametrize("lost", [True, False])
def test_a_task_of_the_users_own_that_finds_the_context_lost_closes_its_worker(unused, losing, lost):
    left = losing(lost)
    plugin, here = PoolPlugin(driver="host"), worker()
    plugin.setup(here)
    plugin.transition("key", "executing", "memory")
    assert not left
    plugin.transition("key", "executing", "error")
    assert left == [here] * lost


# The plugin


def worker(threads=2):
    return SimpleNamespace(name="w", state=SimpleNamespace(nthreads=threads, tasks={}))


def test_a_workers_threads_find_their_handles_made(unused, in_thread):
    plugin = PoolPlugin(driver="host", states=3, workspace=1 << 10)
    plugin.setup(worker(4))
    made = handlepool.stats()["handles_created"]
    assert made >= 7
    in_thread(handlepool.get_handle)
    assert handlepool.stats()["handles_created"] == made
    plugin.setup(worker(4))
    functions_of(integration)["of a function"] = None
    plugin.teardown(worker(4))
    assert not functions_of(integration)
    assert handlepool.stats()["handles_idle"] == 0
    in_thread(handlepool.get_handle)  # the pool stays usable


def test_the_default_pool_of_another_driver_is_not_taken(unused, make_driver, monkeypatch):
    handlepool.set_default_pool(HandlePool(driver=make_driver()))
    monkeypatch.setattr(type(handlepool.default_pool().driver), "name", "other")
    with pytest.raises(ArgumentError, match="has the other driver"):
        PoolPlugin(driver="host").setup(worker())


def test_a_failure_of_one_thread_is_the_setups(unused, make_driver):
    driver = make_driver()
    handlepool.set_default_pool(HandlePool(driver=driver))
    driver.fail_at(1, "bind_handle", RuntimeError("no more"))
    with pytest.raises(RuntimeError, match="no more"):
        PoolPlugin(driver="host").setup(worker(3))


@pytest.mark.parametrize("starts", [0, 1, 3])
def test_a_thread_that_cannot_be_started_is_the_setups_failure(unused, monkeypatch, starts):
    """Those that were started do not wait for it."""
    start, started = threading.Thread.start, []

    def limited(thread):
        if not thread.name.startswith("ThreadPoolExecutor"):
            return start(thread)
        if len(started) == starts:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        return start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        PoolPlugin(driver="host").setup(worker(4))
    assert len(started) == starts
    assert not any(thread.is_alive() for thread in started)


# A cluster of processes


def test_a_worker_without_a_gpu_is_told(client):
    if handlepool.drivers.available("cuda") is None:
        pytest.skip("there is a GPU")
    with pytest.raises((DriverNotAvailableError, ArgumentError)):
        client.register_plugin(PoolPlugin(driver="cuda"), name="other")
    client.unregister_worker_plugin("other")


def test_the_cluster_gives_what_one_process_gives_whichever_worker_is_killed(client, here, tmp_path):
    """Byte for byte, five times, with a worker killed in the middle; and the worker that follows has a pool of its own."""
    right = map_tiles(tiles.conv, image(), **TILES).compute(scheduler="synchronous")
    before = {pid for pid, _, _ in client.run(tiles.state).values()}
    for place in [(0, 0, 0, 0), (0, 0, 1, 2), (0, 0, 2, 3), (0, 0, 1, 0), (0, 0, 0, 3)]:
        flag = str(tmp_path / "-".join(map(str, place)))
        x = image().map_blocks(tiles.dies, flag=flag, place=place, dtype="float32", meta=np.empty((0,) * 4, "float32"))
        got = map_tiles(tiles.conv, x, **TILES).compute()
        assert os.path.exists(flag)
        assert got.tobytes() == right.tobytes()
    client.wait_for_workers(WORKERS, timeout=60)
    after = client.run(tiles.state)
    assert {pid for pid, _, _ in after.values()} - before
    assert all(driver == "host" and peak >= 3 for _, driver, peak in after.values())  # a thread's, and two states


def test_a_lost_context_takes_its_worker_down_and_others_go_on(client, here, tmp_path):
    right = map_tiles(tiles.conv, image(), **TILES).compute(scheduler="synchronous")
    y = map_tiles(tiles.loses, image(), **{**TILES, "shared": (WEIGHTS, str(tmp_path / "lost"))})
    assert y.compute().tobytes() == right.tobytes()
    with pytest.raises(PoisonedContextError):
        client.submit(tiles.finds_it_lost, pure=False).result()
    assert map_tiles(tiles.conv, image(), **TILES).compute().tobytes() == right.tobytes()


def test_a_task_that_fails_says_where(client):
    with pytest.raises(ArgumentError, match="returned") as caught:
        map_tiles(tiles.wide, image(), **TILES).compute()
    assert "at the tile (0, 0, " in caught.value.__notes__[-1]


def test_a_scheduler_that_goes_away_is_an_error_and_its_workers_end(tmp_path):
    told, *pipes = tmp_path / "scheduler.json", tmp_path / "begun", tmp_path / "released"
    for pipe in pipes:
        os.mkfifo(pipe)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
    command = [sys.executable, "-m", "distributed.cli.dask_{}", "--no-dashboard", "--scheduler-file", str(told)]
    started = []

    def start(what, *options):
        words = [word.format(what) for word in command]
        started.append(subprocess.Popen([*words, *options], env=environment, stderr=subprocess.DEVNULL))
        return started[-1]

    try:
        scheduler = start("scheduler", "--port", "0")
        worker = start("worker", "--nthreads", "1")
        with (
            dask.config.set({"distributed.comm.timeouts.connect": "2s"}),
            distributed.Client(scheduler_file=str(told), timeout=60) as client,
        ):
            client.wait_for_workers(1, timeout=60)
            client.register_plugin(PoolPlugin(driver="host"))
            ((pid, driver, _),) = client.run(tiles.state).values()
            assert driver == "host"
            shared = (WEIGHTS, *map(str, pipes))
            future = client.compute(map_tiles(tiles.waits, image((1, 4, 30, 40)), **{**TILES, "shared": shared}))
            with open(pipes[0]):  # the tile is under way
                scheduler.kill()
            with open(pipes[1], "w"), pytest.raises((distributed.client.FutureCancelledError, OSError)):
                future.result(timeout=60)
        assert worker.wait(timeout=60) is not None
        assert not Path(f"/proc/{pid}").exists()
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_the_benchmark_runs_and_has_a_picture(tmp_path):
    pytest.importorskip("zarr", reason="zarr is not installed")
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, and it is not installed")
    folder = Path(__file__).parents[2] / "benchmarks"
    if not folder.exists():
        pytest.skip("benchmarks/ is not here")
    written = str(tmp_path / "tiles.json")
    for command in (["tiles.py", "--quick", "--driver", "host", "--json", written], ["draw.py", str(tmp_path)]):
        arguments = [sys.executable, "-W", "error", str(folder / command[0]), *command[1:]]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.glob("*.png")} == {"tiles-light.png", "tiles-dark.png"}
    assert {worker for worker, *_ in json.loads(Path(written).read_text())["stream"]} == {0, 1}


def test_the_example_of_the_page_runs(client, here, tmp_path):
    pytest.importorskip("zarr", reason="zarr is not installed")
    page = Path(__file__).parents[2] / "docs" / "dask.md"
    if not page.exists():
        pytest.skip("docs/ is not here")
    _, block = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    image().to_zarr(str(tmp_path / "image.zarr"))  # whole, or each worker would write where it was started
    names = {"__name__": "__main__", "client": client, "weights": WEIGHTS}
    exec(
        block.replace("PoolPlugin()", "PoolPlugin(driver='host')")
        .replace('"image.zarr"', repr(str(tmp_path / "image.zarr")))
        .replace('"result.zarr"', repr(str(tmp_path / "result.zarr"))),
        names,
    )
    got = da.from_zarr(str(tmp_path / "result.zarr")).compute()
    assert got.tobytes() == names["result"].compute(scheduler="synchronous").tobytes()
