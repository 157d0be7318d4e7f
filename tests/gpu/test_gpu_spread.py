"""`spread` on a GPU, and on two: results bit for bit, in order with the caller's streams, and nothing left behind."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.aliases import ALIASES, base, in_place

import handlepool
from handlepool import DeviceMismatchError, ItemError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

COUNT = 12
W = None


def conv(x, w):
    return handlepool.conv2d(x, w, padding=1, deterministic=True, activation="relu")


def tower(x, w):
    return conv(conv(x, w) * 0.5 + 1, w)


def sequential(x, w):
    """Graph functions alone, which lanes make parallel."""
    y = conv(x, w)
    return handlepool.add(conv(y, w), conv(x, w))


@pytest.fixture
def pool(pool, make_default):
    """The default one during the test."""
    make_default(pool)
    return pool


@pytest.fixture
def images(random_array):
    """NumPy's, of the layout that cuDNN likes."""
    return [on_host(random_array((1, 64, 14, 14), "float16", "nhwc", seed)) for seed in range(COUNT)]


@pytest.fixture
def weights(random_array):
    return random_array((64, 64, 3, 3), "float16", "nhwc", 99) / 24


def on_host(array):
    """A copy on the host, channels-last."""
    values = array if isinstance(array, np.ndarray) else cupy.asnumpy(array)
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)


def expected(pool, function, images, w):
    return [cupy.asnumpy(function(pool.driver.asarray(x), w)) for x in images]


def taken(y):
    if isinstance(y, np.ndarray):
        return y
    with cupy.cuda.Device(y.device.id):
        return cupy.asnumpy(y)


def same(got, right):
    return len(got) == len(right) and all((taken(a) == b).all() for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize("to", [None, "host"])
@pytest.mark.parametrize(("function", "lanes"), [(conv, None), (conv, 8), (tower, None), (tower, 8), (sequential, 8)])
def test_results_equal_eager_ones_bit_for_bit(pool, stream, images, weights, function, lanes, to):
    right = expected(pool, function, images, weights)
    for given in (images, [pool.driver.asarray(x) for x in images]):
        got = [*handlepool.spread(function, given, shared=(weights,), devices=[0], lanes=lanes, to=to)]
        assert all(isinstance(y, np.ndarray if to else cupy.ndarray) for y in got)
        assert same(got, right)


def test_on_the_null_stream(pool, images, weights):
    right = expected(pool, tower, images, weights)
    assert same([*handlepool.spread(tower, images, shared=(weights,), devices=[0])], right)


def test_items_may_be_overwritten_when_the_next_one_is_taken(pool, stream, kernels):
    """Each is written behind a kernel that keeps the caller's stream busy."""
    array, count = cupy.empty(1 << 16, np.float32), 40

    def given():
        for index in range(count):
            kernels.spin(0.2)
            kernels.write(array, index)
            yield array

    for to in (None, "host"):
        got = handlepool.spread(lambda x: x * 2 + 1, given(), devices=[0], to=to)
        assert [np.unique(taken(y)).tolist() for y in got] == [[index * 2 + 1] for index in range(count)]


def test_page_locked_items_may_be_overwritten_when_the_next_one_is_taken(pool, stream):
    """Copies of 64 MiB take longer than the next item takes to come."""
    size, count = 1 << 24, 12
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * size), np.float32, size)

    def given():
        for index in range(count):
            memory.fill(index)
            yield memory

    got = handlepool.spread(lambda x: x * 2 + 1, given(), devices=[0], to="host")
    assert [np.unique(y).tolist() for y in got] == [[index * 2 + 1] for index in range(count)]


def test_memory_of_results_is_used_again_only_after_its_readers(pool, stream, kernels):
    given = [np.full(1 << 16, value, np.float32) for value in range(40)]
    copies = []
    for y in handlepool.spread(lambda x: x * 2 + 1, given, devices=[0]):
        kernels.spin(0.5)
        copies.append(kernels.copy(y))
        del y
    assert [np.unique(taken(y)).tolist() for y in copies] == [[value * 2 + 1] for value in range(40)]


def test_what_cannot_be_recorded_runs_eagerly(pool, stream, images, weights):
    def looks(x, w):
        y = conv(x, w)
        return y * (float(y.max()) > 0)

    with pytest.warns(RuntimeWarning, match="eagerly"):
        got = [*handlepool.spread(looks, images, shared=(weights,), devices=[0], to="host")]
    assert same(got, expected(pool, conv, images, weights))


def test_another_geometry_an_error_and_an_early_end_leave_nothing_behind(pool, stream, images, weights):
    small = [on_host(images[0][..., :7, :7])]
    mixed = [*images[:3], *small, *images[3:]]
    assert same([*handlepool.spread(tower, mixed, shared=(weights,), devices=[0])], expected(pool, tower, mixed, weights))
    bad = [*images[:3], np.zeros((1, 3, 14, 14), np.float16), *images]
    results = handlepool.spread(tower, bad, shared=(weights,), devices=[0], to="host")
    got = [next(results) for _ in range(3)]
    with pytest.raises(ItemError, match="item 3 failed on device 0"):
        next(results)
    assert same(got, expected(pool, tower, images[:3], weights))
    with handlepool.spread(tower, images, shared=(weights,), devices=[0]) as results:
        next(results)
    gc.collect()
    assert pool.stats()["scratch_bytes_recorded"] == pool.stats()["handles_leased"] == 0
    dropped = handlepool.spread(tower, images, shared=(weights,), devices=[0])
    next(dropped)
    del dropped
    cupy.cuda.Device().synchronize()
    pool.trim()
    gc.collect()
    assert pool.stats()["scratch_bytes_recorded"] == pool.stats()["handles_leased"] == 0


def test_captures_of_other_threads_survive(pool, stream, images, weights, captured_elsewhere):
    right = expected(pool, conv, images, weights)
    with handlepool.spread(conv, images, shared=(weights,), devices=[0], to="host") as results:
        got = [next(results)]  # the program is recorded: what the function itself allocates is CuPy's to do
        with captured_elsewhere():
            got += results
    assert same(got, right)


# Two devices


def test_contexts_lost_on_every_device_end_a_spread_and_the_process():
    """Nobody waits for an event that no device will pass."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(folder / "poisoned_spread.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HANDLEPOOL_DRIVER": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [f"refused: {error} True True" for error in ("ItemError", "PoisonedContextError")]  # by who met it first
    assert done.stdout.splitlines() in ([said[0]], [said[1]]), done
    assert (done.returncode, done.stderr) == (9, "")


@pytest.mark.two_gpus
@pytest.mark.parametrize("to", [None, "host"])
@pytest.mark.parametrize("function", [conv, tower, sequential])
def test_results_of_two_devices_come_in_order(pool, stream, images, weights, function, to):
    right = expected(pool, function, images, weights)
    where = []
    results = handlepool.spread(
        function, images, shared=(weights,), devices=[0, 1], to=to, on_done=lambda _, device: where.append(device)
    )
    assert same([*results], right)
    assert {*where} == {0, 1}


@pytest.mark.two_gpus
def test_items_and_weights_of_either_device_are_brought_to_both(pool, stream, images, weights):
    right = expected(pool, tower, images, pool.driver.asarray(on_host(weights)))  # of that layout
    for home in (0, 1):
        with cupy.cuda.Device(home):
            given, w = [pool.driver.asarray(x) for x in images], pool.driver.asarray(on_host(weights))
        got = [*handlepool.spread(tower, given, shared=(w,), devices=[0, 1])]
        assert {y.device.id for y in got} == {0, 1}
        assert same(got, right)


@pytest.mark.two_gpus
def test_items_of_another_device_may_be_overwritten(pool, stream, kernels):
    array, count = cupy.empty(1 << 20, np.float32), 30

    def given():
        for index in range(count):
            array.fill(index)
            yield array

    got = handlepool.spread(lambda x: x * 2 + 1, given(), devices=[1], to="host")
    assert [np.unique(y).tolist() for y in got] == [[index * 2 + 1] for index in range(count)]


@pytest.mark.two_gpus
def test_an_array_in_the_closure_is_named(pool, stream, images, weights):
    with pytest.raises(DeviceMismatchError, match="closure holds weights"):
        handlepool.spread(lambda x: conv(x, weights), images)


@pytest.mark.two_gpus
def test_a_gap_is_refused_in_plain_words(pool, stream):
    x = cupy.zeros((8, 8), np.float32)[:, ::2]
    with pytest.raises(ItemError, match="gaps between its elements"):
        [*handlepool.spread(lambda x: x + 1, [x], devices=[1])]


# Copies of the driver's


def laid_out(dtype):
    """Pairs of a target and a source of one shape, and whether they lie in one run of bytes alike."""
    x = cupy.arange(1, 121, dtype=dtype)
    image, last = x.reshape(2, 3, 4, 5), x.reshape(2, 4, 5, 3).transpose(0, 3, 1, 2)
    row = cupy.broadcast_to(x[:5], (4, 5))
    return {
        "row-major": (cupy.zeros_like(image), image, True),
        "channels-last": (cupy.zeros_like(last), last, True),
        "one row": (cupy.zeros((7, 5), dtype)[3:4], image[1, 2, :1], True),
        "another order": (cupy.zeros_like(image), last, False),
        "a row for all": (cupy.zeros((4, 5), dtype), row, False),
        "gaps in both": (cupy.zeros((8, 5), dtype)[::2], image[0, 0].repeat(2, axis=0)[::2], False),
        "both backwards": (cupy.zeros(120, dtype)[::-1], x[::-1], False),
        "another type": (cupy.zeros(120, "float64"), x, dtype == "float64"),
        "one element": (cupy.zeros((), dtype), x[5], True),
        "nothing": (cupy.zeros((0, 4), dtype), image[0, 0][:0, :4], False),
    }


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_copy_is_cupys_bit_for_bit_and_one_of_bytes_where_both_lie_alike(pool, stream, monkeypatch, dtype):
    driver, of_bytes = pool.driver, []
    copy_run = driver.copy_run
    monkeypatch.setattr(driver, "copy_run", lambda *given: of_bytes.append(given) or copy_run(*given))
    for name, (target, source, alike) in laid_out(dtype).items():
        of_bytes.clear()
        driver.copy(target, source)
        assert (cupy.asnumpy(target) == cupy.asnumpy(source)).all(), name
        assert bool(of_bytes) == alike, name


def test_copies_are_ordered_on_the_stream_that_is_told(pool, kernels):
    driver, one, other = pool.driver, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(1 << 16, np.float32), cupy.zeros(1 << 16, np.float32)
    values = np.full(1 << 16, 3, np.float32)
    cupy.cuda.Device().synchronize()
    with one:
        kernels.spin(5)
        kernels.write(x, 2)
    with other, driver.relaxed():  # whatever is current
        driver.copy_run(y, x, one.ptr)
        host = driver.copy_to_host(y, one.ptr)
        kept = driver.copy_from_host(x, values, one.ptr)
    values[...] = 9
    one.synchronize()
    del kept
    assert [np.unique(each).tolist() for each in (host, cupy.asnumpy(y), cupy.asnumpy(x))] == [[2], [2], [3]]


def test_further_items_go_the_short_way_and_give_the_same(pool, stream, images, weights, general_items):
    """From the host and resident, with several results."""

    def both(item, w):
        return {"y": tower(item["x"], w), "z": [conv(item["x"], w)]}

    first, second = (expected(pool, function, images, weights) for function in (tower, conv))
    for items in (images, [pool.driver.asarray(x) for x in images]):
        for to in (None, "host"):
            general_items.clear()
            got = [*handlepool.spread(both, [{"x": x} for x in items], shared=(weights,), devices=[0], to=to)]
            assert len(general_items) == 1
            assert same([y["y"] for y in got], first)
            assert same([y["z"][0] for y in got], second)


@pytest.mark.parametrize("kind", ["numpy", 0, pytest.param(1, marks=pytest.mark.two_gpus)])
@pytest.mark.parametrize("name", ALIASES)
def test_arrays_of_an_item_share_memory_on_the_device_as_they_do(pool, name, kind):
    if kind == 1 and "between" in name:
        pytest.skip("arrays with gaps are not brought from another device")
    items = [ALIASES[name](base(value)) for value in range(4)]
    expected = [[y.tolist() for y in in_place(item)] for item in items]
    items = [ALIASES[name](base(value)) for value in range(4)]
    if kind != "numpy":
        with cupy.cuda.Device(kind):
            items = [ALIASES[name](cupy.asarray(base(value))) for value in range(4)]
    got = [*handlepool.spread(in_place, items, devices=[0], to="host")]
    assert [[y.tolist() for y in ys] for ys in got] == expected


@pytest.mark.two_gpus
def test_a_global_of_another_device_is_named_with_the_remedy_first(pool, images, weights, monkeypatch):
    monkeypatch.setitem(globals(), "W", weights)
    with pytest.raises(ItemError, match="item 1 failed on device 1: its global W is on another device; pass it in shared="):
        list(handlepool.spread(lambda x: conv(x, W), images, devices=[0, 1]))
