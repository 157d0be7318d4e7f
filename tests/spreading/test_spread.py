"""`spread` on simulated devices: results in order and right, whatever runs when; errors; and nothing left behind."""

import contextlib
import gc
import signal
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness.aliases import ALIASES, base, in_place
from harness.hidden import hidden
from harness.insides import device_workers_of
from harness.lines import at_line, interrupt, some_lines
from harness.process import as_default
from harness.scenes import SEEDS

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    CaptureError,
    ContractError,
    DeviceMismatchError,
    HandlePool,
    HandlePoolError,
    ItemError,
    OwnershipError,
    PoisonedContextError,
    PoolClosedError,
)
from handlepool._util.reachable import leaves
from handlepool.drivers.host.array import HostArray
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.recording.sharing import rebuilt
from handlepool.spreading import worker
from handlepool.spreading.worker import InFlight

COUNT = 7
SEEDS = SEEDS[:25]


def images(count=COUNT, size=6):
    random = np.random.default_rng(3)
    return [random.standard_normal((1, 4, size, size)).astype("float32") for _ in range(count)]


WEIGHTS = np.random.default_rng(5).standard_normal((4, 4, 3, 3)).astype("float32")


def conv(x, w):
    return handlepool.conv2d(x, w, padding=1, activation="relu")


def tower(x, w):
    return conv(conv(x, w), w) + conv(x, w)


@contextmanager
def current(driver, **options):
    """A default pool over a driver, with a stream of the caller's own current on each device."""
    streams = []
    with HandlePool(driver=driver, **options) as pool, as_default(pool):
        for device in range(driver.device_count()):
            with driver.device(device):
                streams.append(driver.create_stream().use())
        try:
            yield pool
        finally:
            for device in range(driver.device_count()):
                with driver.device(device):
                    driver.legacy_stream.use()


@pytest.fixture
def pool(make_driver, scheduler):
    """The default pool, of three devices."""
    with current(make_driver(scheduler=scheduler, devices=3)) as pool:
        yield pool


def value_of(pool, array):
    with pool.driver.device(pool.driver.array_device(array)):
        return pool.driver.asnumpy(array)


def expected(pool, function=conv, given=None, w=WEIGHTS):
    put = pool.driver.asarray
    return [pool.driver.asnumpy(function(put(x), put(w))) for x in given or images()]


def same(got, right):
    return len(got) == len(right) and all((a == b).all() for a, b in zip(got, right, strict=True))


def streams(pool):
    """How many streams there are beside the pool's side streams, which it keeps for reuse."""
    return pool.driver.alive()["streams"] - sum(device.sides.made for device in pool.internals.devices.values())


# Results


@pytest.mark.parametrize("function", [conv, tower])
@pytest.mark.parametrize("lanes", [8, None])
def test_results_come_in_order_from_all_devices(pool, function, lanes):
    where = []
    results = handlepool.spread(
        function, images(), shared=(WEIGHTS,), lanes=lanes, on_done=lambda index, device: where.append((index, device))
    )
    got = [*results]
    assert {pool.driver.array_device(y) for y in got} == {0, 1, 2}
    assert where == [(index, pool.driver.array_device(y)) for index, y in enumerate(got)]
    assert same([value_of(pool, y) for y in got], expected(pool, function))


@pytest.mark.parametrize("function", [conv, tower])
def test_host_results_are_numpys(pool, function):
    got = [*handlepool.spread(function, iter(images()), shared=[WEIGHTS], to="host")]
    assert all(type(y) is np.ndarray and y.flags.owndata for y in got)
    assert same(got, expected(pool, function))


def test_results_stay_as_they_are_while_others_are_made(pool):
    results = handlepool.spread(conv, images(12), shared=(WEIGHTS,), devices=[1])
    got = [next(results) for _ in range(5)]
    list(results)
    assert same([value_of(pool, y) for y in got], expected(pool)[:5])


def test_the_function_is_recorded_once_for_each_geometry_and_device(pool):
    log, called = hidden([]), []

    def counted(x, w):
        log().append((x.shape, pool.driver.current_device()))
        return conv(x, w)

    small, large = images(4), images(2, 9)
    given = [*small[:2], *large, *small[2:], *images(6)]
    got = [*handlepool.spread(counted, given, shared=(WEIGHTS,), devices=[0, 2], to="host")]
    assert same(got, expected(pool, given=given))
    called += log()
    assert max(called.count(call) for call in called) == 2  # for real, and captured
    assert {device for _, device in called} == {0, 2}


def test_more_geometries_than_are_kept_come_out_right(pool):
    given = [x for size in range(4, 16) for x in images(2, size)] * 2
    got = [*handlepool.spread(conv, given, shared=(WEIGHTS,), devices=[0], to="host")]
    assert same(got, expected(pool, given=given))


def test_the_program_that_was_used_least_recently_makes_way(pool):
    log = hidden([])

    def counted(x, w):
        log().append(x.shape[-1])
        return conv(x, w)

    sizes = [*range(4, 12), 4, 12, 4, 5]  # eight, the first again, one more that takes the second's place
    given = [x for size in sizes for x in images(1, size)]
    got = [*handlepool.spread(counted, given, shared=(WEIGHTS,), devices=[0], to="host")]
    assert same(got, expected(pool, given=given))
    assert [log().count(size) for size in (4, 5, 6, 12)] == [2, 4, 2, 2]


class Pair(NamedTuple):
    one: Any
    other: Any


def test_a_program_is_for_one_layout_one_type_and_one_kind_of_container(pool):
    """Each of these is another geometry, though the shapes are the same."""

    def of(item):
        return (item[0] - item[1] * 2) if type(item) is Pair else (item[1] - item[0] * 2)

    x, y = (np.arange(first, first + 24, dtype=np.float32).reshape(4, 6) for first in (0, 7))
    given = [
        (x, y),
        Pair(x, y),
        (x, np.asfortranarray(y)),
        (x, y.astype(np.float64)),
        (x, y.astype(np.int32)),
        [x, y],
        (x, y),
        Pair(y, x),
    ]
    for devices in ([0], [0, 1]):
        got = [*handlepool.spread(of, given, devices=devices, to="host")]
        assert same(got, [of(item) for item in given])
        assert [z.dtype for z in got] == [of(item).dtype for item in given]


def test_what_is_done_in_place_is_done_once_to_each_item(pool):
    def in_place(x):
        x += 1
        return x * 2

    given = [x.copy() for x in ARRAYS]
    got = [*handlepool.spread(in_place, given, devices=[0], to="host")]
    assert same(got, [(x + 1) * 2 for x in ARRAYS])
    assert same(given, ARRAYS)


def test_a_row_of_another_device_is_brought(pool):
    """The stride of an axis with one element says nothing."""
    driver = pool.driver
    with driver.device(2):
        rows = [driver.asarray(np.arange(24.0).reshape(4, 6))[index : index + 1, 1:3] for index in range(4)]
    got = [*handlepool.spread(lambda x: x + 1, rows, devices=[0, 1], to="host")]
    assert [y.tolist() for y in got] == [[[6 * index + 2, 6 * index + 3]] for index in range(4)]


def test_a_list_of_what_is_shared_may_change_afterwards(pool):
    shared = [WEIGHTS]
    results = handlepool.spread(conv, images(), shared=shared, to="host")
    shared.clear()
    assert same([*results], expected(pool))


class Lending(HostDriver):
    """Keeps the memory that copies to the host went into, as CuPy does with page-locked memory."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lent = []

    def copy_to_host(self, array, pointer):
        self.lent.append(super().copy_to_host(array, pointer))
        return self.lent[-1]


def test_host_results_are_in_memory_of_their_own():
    driver = Lending(devices=2)
    with current(driver) as pool:
        got = [*handlepool.spread(conv, images(), shared=(WEIGHTS,), to="host")]
        assert len(driver.lent) == COUNT
        for memory in driver.lent:
            memory[...] = np.nan
        assert same(got, expected(pool))


def test_events_are_used_again(pool):
    def events(count):
        [*handlepool.spread(conv, images(count), shared=(WEIGHTS,), in_flight=1)]
        return pool.driver.alive()["events"]

    assert events(6) == events(30)


def test_items_may_be_on_any_device_and_be_overwritten_when_the_next_one_is_taken(pool):
    driver = pool.driver
    arrays = []
    for device in range(3):
        with driver.device(device):
            arrays.append(driver.asarray(np.zeros_like(images()[0])))

    def given():
        for index, x in enumerate(images()):
            with driver.device(index % 2):
                array = arrays[index % 2]
                array[...] = driver.asarray(x)
            yield array

    got = [*handlepool.spread(conv, given(), shared=(WEIGHTS,), to="host")]
    assert same(got, expected(pool))


class Reading(HostDriver):
    """Reads page-locked arrays when the stream has come so far, as CUDA does: all that are given."""

    locks = True

    def asarray(self, values):
        if not isinstance(values, np.ndarray):
            return super().asarray(values)
        array = self.empty(values.shape, values.strides, values.dtype)
        self.enqueue(self.current_stream().ptr, lambda out: np.copyto(out, values), writes=[array])
        return array

    def copy_from_host(self, target, values, pointer):
        self.enqueue(pointer, lambda out: np.copyto(out, values), writes=[target])

    def page_locked(self, values):
        return self.locks


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_page_locked_items_may_be_overwritten_when_the_next_one_is_taken(devices):
    def refilled():
        memory = np.empty_like(ARRAYS[0])
        for x in ARRAYS:
            memory[...] = x
            yield memory

    def results(locks, seed):
        driver = Reading(scheduler="adversarial", devices=2, seed=seed)
        driver.locks = locks
        with current(driver):
            given = handlepool.spread(add, refilled(), shared=(SHIFT,), devices=devices, to="host", lanes=None)
            return [np.unique(y).tolist() for y in given]

    assert all(is_right(results(True, seed)) for seed in SEEDS)
    assert not all(is_right(results(False, seed)) for seed in SEEDS)  # the control


def test_items_are_containers_and_a_tuple_stays_one_argument(pool):
    def both(item, w, scale):
        x, named = item
        return {"y": conv(x, w) * scale, "z": [named["x"] + 1], "scale": scale}

    given = [(x, {"x": x}) for x in images(4)]
    got = [*handlepool.spread(both, given, shared=(WEIGHTS, 2), to="host")]
    for y, x, right in zip(got, images(4), expected(pool)[:4], strict=True):
        assert (y["y"] == right * 2).all()
        assert (y["z"][0] == x + 1).all()
        assert y["scale"] == 2


def test_channels_last_keeps_its_layout(pool):
    driver = pool.driver
    given = [np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1) for x in images()]
    got = [*handlepool.spread(conv, given, shared=(WEIGHTS,))]
    assert {y.strides for y in got} == {conv(driver.asarray(given[0]), driver.asarray(WEIGHTS)).strides}
    again = [*handlepool.spread(conv, got, shared=(WEIGHTS,), devices=[1], to="host")]
    right = expected(pool, given=expected(pool, given=given))
    assert same(again, right)


def test_what_is_shared_is_copied_to_each_device_once(pool):
    driver = pool.driver
    with driver.device(1):
        w = driver.asarray(WEIGHTS)
    driver.calls.clear()
    got = [*handlepool.spread(conv, images(), shared=(w,), to="host")]
    assert driver.calls["copy_from_device"] == 2
    assert same(got, expected(pool))


def test_with_checks(make_driver):
    with current(make_driver(devices=2), check=True) as pool:
        got = [*handlepool.spread(tower, images(), shared=(WEIGHTS,), to="host")]
        assert same(got, expected(pool, tower))


class Unsized(list):
    """As a progress bar around a generator is."""

    def __len__(self):
        raise TypeError("no length")


def test_items_may_have_a_length_that_they_do_not_know(pool, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for progress in (False, True):
        got = [*handlepool.spread(conv, Unsized(images()), shared=(WEIGHTS,), to="host", progress=progress)]
        assert same(got, expected(pool))
    assert f"{COUNT} of ? items" in capsys.readouterr().err


def test_fewer_items_than_devices_and_none(pool):
    before = streams(pool)
    assert same([*handlepool.spread(conv, images(1), shared=(WEIGHTS,), to="host")], expected(pool)[:1])
    assert [*handlepool.spread(conv, [], shared=(WEIGHTS,))] == []
    assert streams(pool) == before


def test_a_device_that_is_free_gets_the_next_item(pool):
    """While the first device is held back, the other one does all that may wait to be taken."""
    driver, where = pool.driver, []
    [*handlepool.spread(conv, images(), shared=(WEIGHTS,))]
    with driver.device(0):
        latch = driver.latch(driver.current_stream().ptr)  # results of the first device wait for it
    results = handlepool.spread(
        conv, images(9), shared=(WEIGHTS,), devices=[0, 1], on_done=lambda _, device: where.append(device)
    )

    def released():
        for index, x in enumerate(images(9)):
            if index == 7:
                latch.release()
            yield x

    results._items = released()
    assert same([value_of(pool, y) for y in results], expected(pool, given=images(9)))
    assert where[:7].count(0) == 2


def test_items_that_lie_on_a_device_that_is_held_back_are_done_by_the_other_one(pool):
    """They are copied from there meanwhile: their device's own stream does not wait for what it computes."""
    driver, where, held = pool.driver, [], []
    xs = [driver.asarray(np.full(4, float(k))) for k in range(14)]

    def given():
        for index, x in enumerate(xs):
            if index == 4:  # both devices have a program by then
                held.append(driver.latch(device_workers_of(results).of(0)._pointers[1]))
            if index == 11:
                held[0].release()
            yield x

    results = handlepool.spread(
        lambda x: x + 1, given(), devices=[0, 1], on_done=lambda _, device: where.append(device), lanes=None
    )
    assert [value_of(pool, y)[0] for y in results] == [k + 1.0 for k in range(14)]
    assert where[4:11].count(0) <= 2


@pytest.mark.parametrize("in_flight", [2, 4])
def test_a_device_on_which_all_items_fail_gets_its_share_and_no_more(pool, in_flight):
    driver = pool.driver

    def function(x):
        if driver.current_device() == 0:
            raise MemoryError("device 0 is full")
        return x + 1

    def given():
        for x in ARRAYS * 4:
            for each in device_workers_of(results).all:  # whoever brings the items takes as long as they do
                for stream in each._streams:
                    driver.synchronize_stream(stream.ptr)
            yield x

    results = handlepool.spread(function, given(), errors="return", in_flight=in_flight, devices=[0, 1], lanes=None)
    assert sum(isinstance(y, ItemError) for y in results) <= len(ARRAYS * 4) / 2 + 1


def test_an_array_without_elements_of_another_device_has_no_gaps(pool):
    with pool.driver.device(1):
        there = pool.driver.asarray(np.empty((3, 0)))
    (y,) = handlepool.spread(lambda x: x + 1, [there], devices=[0], lanes=None)
    assert y.shape == (3, 0)


def test_no_more_items_than_asked_for_are_in_flight(pool):
    taken = []

    def given():
        for index, x in enumerate(images(40)):
            taken.append(index)
            yield x

    results = handlepool.spread(conv, given(), shared=(WEIGHTS,), devices=[0, 1], in_flight=3)
    for count, _ in enumerate(results):
        assert len(taken) - count <= 2 * 2 * 3
    assert count == 39


# Not recorded


def test_what_cannot_be_recorded_runs_eagerly_which_is_said_once(pool):
    def looks(x, w):
        y = conv(x, w)
        return y * float(y.max())

    results = handlepool.spread(looks, images(), shared=(WEIGHTS,), to="host")
    with pytest.warns(RuntimeWarning, match="looks.*eagerly") as warned:
        got = [*results]
    assert len(warned) == 1
    assert same(got, [y * float(y.max()) for y in expected(pool)])


def test_what_cannot_be_recorded_is_tried_once(pool):
    called = []

    def looks(x):
        called.append(x.shape)
        return x * float(x.max())

    with pytest.warns(RuntimeWarning, match="eagerly"):
        got = [*handlepool.spread(looks, ARRAYS, to="host")]
    assert same(got, [x * x.max() for x in ARRAYS])
    assert len(called) <= len(ARRAYS) + 2  # for real, and captured, where it was tried


def test_an_item_that_holds_a_number_is_not_recorded_with_it(pool):
    given = [(x, float(scale)) for scale, x in enumerate(images())]
    with pytest.warns(RuntimeWarning, match="type float, which is no array") as warned:
        got = [*handlepool.spread(lambda item, w: conv(item[0], w) * item[1], given, shared=(WEIGHTS,), to="host")]
    assert len(warned) == 1
    assert same(got, [y * np.float32(scale) for scale, y in enumerate(expected(pool))])


def test_an_eager_result_shares_no_memory_with_the_item(pool):
    with pytest.warns(RuntimeWarning, match="no array"):
        got = [*handlepool.spread(lambda item: item[0], [(x, 1) for x in images()])]
    assert same([value_of(pool, y) for y in got], images())


# Errors


class BadItemError(Exception):
    pass


def sometimes(x, w):
    if x.shape[-1] == 9:
        raise BadItemError("nine")
    return conv(x, w)


def with_bad_ones():
    given = images(8)
    given[3] = images(1, 9)[0]
    return given


def test_an_error_ends_all_after_the_results_before_it(pool):
    before = streams(pool)
    results = handlepool.spread(sometimes, with_bad_ones(), shared=(WEIGHTS,), to="host")
    got = [next(results) for _ in range(3)]
    with pytest.raises(ItemError) as caught:
        next(results)
    device = caught.value.device
    assert device in (0, 1, 2)  # whichever was free first
    assert f"item 3 failed on device {device}: BadItemError: nine" in str(caught.value)
    assert (caught.value.index, type(caught.value.__cause__)) == (3, BadItemError)
    assert next(results, "ended") == "ended"
    assert same(got, expected(pool)[:3])
    del caught
    gc.collect()
    assert streams(pool) == before
    assert pool.stats()["scratch_bytes_recorded"] == 0


def test_no_item_is_taken_after_one_that_ends_all(pool):
    taken = []

    def given():
        for index, x in enumerate(with_bad_ones()):
            taken.append(index)
            yield x

    with pytest.raises(ItemError, match="item 3 failed"):
        list(handlepool.spread(sometimes, given(), shared=(WEIGHTS,), devices=[0]))
    assert taken == [0, 1, 2, 3]


def test_items_that_fail_after_they_gave_work_to_the_stream_harm_no_later_one(make_driver):
    """That work still writes into the copy of the item."""

    def fails(item):
        if item[1] % 2:
            item[0][...] = np.nan
            raise BadItemError("odd")
        return item[0] * 2

    def values(y):
        return None if isinstance(y, ItemError) else np.unique(y).tolist()

    for seed in SEEDS:
        with current(make_driver(scheduler="adversarial", devices=1, seed=seed)):
            results = handlepool.spread(fails, [(x, index) for index, x in enumerate(ARRAYS)], errors="return", to="host")
            got = []
            with pytest.warns(RuntimeWarning, match="eagerly"):
                got.extend(values(next(results)) for _ in ARRAYS)  # an error goes before the next item is given
        assert got == [None if index % 2 else [(index + 1) * 2] for index in range(len(ARRAYS))]


def test_what_a_failed_item_had_ends_with_its_error(pool):
    """Not with the next run of the collector."""
    there = []

    def fails(x, w):
        there.append(weakref.ref(x))
        raise BadItemError("all of them")

    gc.disable()
    try:
        for error in handlepool.spread(fails, images(), shared=(WEIGHTS,), errors="return"):
            assert isinstance(error.__cause__, BadItemError)
        del error
        assert there
        assert not [x for x in there if x() is not None]
    finally:
        gc.enable()


def test_errors_may_stand_in_the_places_of_results(pool):
    got = [*handlepool.spread(sometimes, with_bad_ones(), shared=(WEIGHTS,), to="host", errors="return")]
    assert [index for index, y in enumerate(got) if isinstance(y, ItemError)] == [3]
    right = expected(pool, given=images(8))
    assert same([*got[:3], *got[4:]], [*right[:3], *right[4:]])


def test_an_item_of_another_geometry_that_no_graph_takes_is_named(pool):
    given = images()
    given[5] = np.zeros((1, 3, 6, 6), np.float32)
    with pytest.raises(ItemError, match=r"item 5 .* device"):
        [*handlepool.spread(conv, given, shared=(WEIGHTS,))]


def test_items_that_raise_do_so_after_the_results_before_them(pool):
    def given():
        yield from images(5)
        raise BadItemError("no more")

    results, got = handlepool.spread(conv, given(), shared=(WEIGHTS,), to="host"), []
    with pytest.raises(BadItemError, match="no more") as caught:
        got.extend(results)
    assert "place of item 5" in caught.value.__notes__[0]
    assert same(got, expected(pool)[:5])


def given(results):
    """Results until the end or an error, and that error."""
    got = []
    try:
        got.extend(results)
    except (HandlePoolError, RuntimeError) as error:
        return got, error
    return got, None


def test_a_device_that_cannot_take_part_ends_all_after_what_was_computed(pool):
    """An array in ``shared`` has gaps, so that no other device can have it."""
    driver, before = pool.driver, streams(pool)
    with driver.device(0):
        gaps = driver.asarray(np.repeat(SHIFT, 2))[::2]
    results = handlepool.spread(add, ARRAYS, shared=(gaps,), devices=[0, 1], to="host")
    got, error = given(results)
    assert isinstance(error, ItemError)
    assert (error.index, error.device, type(error.__cause__)) == (1, 1, ArgumentError)
    assert [np.unique(y).tolist() for y in got] == [[RIGHT[0]]]
    assert next(results, "ended") == "ended"
    del error
    gc.collect()
    assert streams(pool) == before


LEFT = (0, 2_000, 60_000)
"""Bytes free where not even the filters fit, where an item does not, and where scratch does not."""


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("errors", ["raise", "return"])
def test_a_device_with_less_free_memory_is_named_and_the_other_one_goes_on(make_driver, left, errors):
    items = images(12, size=32)
    with current(make_driver(devices=2, memory=1 << 24)) as pool:
        right = expected(pool, given=items)
        driver = pool.driver
        with driver.device(1):
            full = driver.empty((driver.memory_info()[0] - left,), (1,), np.dtype("u1"))
        results = handlepool.spread(conv, items, shared=(WEIGHTS,), to="host", errors=errors)
        got, error = given(results)
        assert full.nbytes > 0
        failed = [y for y in got if isinstance(y, ItemError)]
        if errors == "raise":
            assert (type(error), error.device, len(got)) == (ItemError, 1, 1)
            failed = [error]
        else:
            assert (error, len(got)) == (None, 12)
        assert all(isinstance(each.__cause__, MemoryError) and each.device == 1 for each in failed)
        assert failed
        pairs = [(y, right[index]) for index, y in enumerate(got) if not isinstance(y, ItemError)]
        assert pairs
        assert all((y == z).all() for y, z in pairs)


@pytest.mark.parametrize("to", [None, "host"])
@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_a_device_that_is_taken_away_is_named(make_driver, to, taken):
    """Results that it had already computed may come before; the error of the end is a note."""
    with current(make_driver(devices=2)) as pool:
        results = handlepool.spread(conv, images(40), shared=(WEIGHTS,), to=to)
        for _ in range(taken):
            next(results)
        pool.driver.lose_device(1)
        got, error = given(results)
        pool.driver.fail_at(0)
        assert (type(error), error.device) == (ItemError, 1)
        assert "device 1 was taken away" in str(error)
        assert taken + len(got) == error.index
        assert next(results, "ended") == "ended"


def test_other_devices_go_on_without_one_that_is_taken_away(make_driver):
    with current(make_driver(devices=2)) as pool:
        right = expected(pool, given=images(40))
        results = handlepool.spread(conv, images(40), shared=(WEIGHTS,), to="host", errors="return")
        got = [next(results)]
        pool.driver.lose_device(1)
        more, error = given(results)
        pool.driver.fail_at(0)
        got += more
        assert len(got) == 40
        assert {y.device for y in got if isinstance(y, ItemError)} == {1}
        assert all((y == z).all() for y, z in zip(got, right, strict=True) if not isinstance(y, ItemError))
        assert "spread(conv) raised this error while it released its resources" in error.__notes__


def failing_later(driver):
    """A function of an item and filters, whose work fails for the item of index 2."""

    def fail(out):
        raise BadItemError("late")

    def failing(item, w):
        y = conv(item[0], w)
        if item[1] == 2:
            driver.enqueue(driver.current_stream().ptr, fail, writes=[y])
        return y

    return failing


def test_work_that_fails_later_is_the_items_error(pool):
    given = [(x, index) for index, x in enumerate(images())]
    with pytest.warns(RuntimeWarning, match="eagerly"), pytest.raises(ItemError, match=r"item \d failed.*late"):
        [*handlepool.spread(failing_later(pool.driver), given, shared=(WEIGHTS,))]


def test_work_that_fails_later_makes_no_other_item_fail(make_driver):
    """Its memory is used again, and the order checker knows that the host has waited."""
    driver = make_driver(scheduler="adversarial", devices=1)

    with current(driver):
        given = [(x, index) for index, x in enumerate(images(12))]
        results = handlepool.spread(failing_later(driver), given, shared=(WEIGHTS,), errors="return")
        with pytest.warns(RuntimeWarning, match="eagerly"):
            got = [*results]
    assert [index for index, y in enumerate(got) if isinstance(y, ItemError)] == [2]


def test_an_interrupt_leaves_nothing_behind(pool):
    before = streams(pool)

    def interrupted(x, w):
        if x.shape[-1] == 9:
            raise KeyboardInterrupt
        return conv(x, w)

    results = handlepool.spread(interrupted, with_bad_ones(), shared=(WEIGHTS,))
    with pytest.raises(KeyboardInterrupt):
        list(results)
    assert next(results, None) is None
    gc.collect()
    assert streams(pool) == before


# The end


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_an_early_end_leaves_nothing_running(pool, how):
    driver = pool.driver
    before = streams(pool)
    results = handlepool.spread(tower, images(20), shared=(WEIGHTS,), in_flight=3)
    next(results)
    if how == "close":
        results.close()
        results.close()
    elif how == "with":
        with results:
            next(results)
    else:
        given = [(worker.device, [stream.ptr for stream in worker._streams]) for worker in device_workers_of(results).all]
        del results
        gc.collect()
        for device, pointers in given:
            with driver.device(device):
                for pointer in (*pointers, driver.current_stream().ptr):
                    driver.synchronize_stream(pointer)
        for _ in range(1000):
            deferred.deferred.run(100)
            if streams(pool) == before:
                break
    gc.collect()
    assert streams(pool) == before
    assert pool.stats()["handles_leased"] == 0
    assert pool.stats()["scratch_bytes_recorded"] == 0
    if how != "drop":
        assert next(results, "ended") == "ended"


def test_what_was_dropped_is_not_waited_for(make_driver):
    driver = make_driver(scheduler="adversarial", devices=1)
    with current(driver) as pool:
        [*handlepool.spread(conv, images(1), shared=(WEIGHTS,))]
        gc.collect()
        deferred.deferred.run(100)
        before = streams(pool)
        results = handlepool.spread(conv, images(), shared=(WEIGHTS,))
        next(results)
        latch = driver.latch(driver.current_stream().ptr)  # the next results wait for it, for the sake of their memory
        results._advance(device_workers_of(results))
        driver.calls.clear()
        del results
        gc.collect()
        deferred.deferred.run(100)
        assert driver.calls["synchronize_event"] == driver.calls["synchronize_stream"] == 0
        assert streams(pool) > before
        latch.release()
        for _ in range(1000):
            deferred.deferred.run(100)
            if streams(pool) == before:
                break
        assert streams(pool) == before


def test_what_was_dropped_is_abandoned_with_a_lost_context(make_driver):
    driver = make_driver(devices=1)
    with current(driver):
        results = handlepool.spread(conv, images(), shared=(WEIGHTS,))
        next(results)
        driver.lose_context()
        with pytest.raises(PoisonedContextError):
            handlepool.trim()
        deferred.deferred.clear()
        driver.calls.clear()
        del results
        gc.collect()
        assert deferred.deferred
        deferred.deferred.run(100)
        assert not deferred.deferred
        assert not driver.calls["event_done"]
        driver.lost = None
        driver.fail_at(0)


@pytest.mark.parametrize("how", ["close", "error", "all"])
def test_a_generator_of_items_ends_with_the_spread(pool, how):
    ended = []

    def given():
        try:
            yield from with_bad_ones() if how == "error" else images()
        finally:
            ended.append(how)

    with handlepool.spread(sometimes, given(), shared=(WEIGHTS,), in_flight=1, devices=[0]) as results:
        next(results)
        if how == "error":
            with pytest.raises(ItemError):
                list(results)
        elif how == "all":
            list(results)
    assert ended == [how]


def test_one_result_is_taken_at_a_time(pool, in_thread):
    caught = []

    def reenter(index, device):
        with pytest.raises(OwnershipError, match="take one result at a time"):
            next(results)
        with pytest.raises(OwnershipError, match="another thread"):
            in_thread(results.close)
        caught.append(index)

    results = handlepool.spread(conv, images(2), shared=(WEIGHTS,), on_done=reenter, to="host")
    assert same([*results], expected(pool)[:2])
    assert caught == [0, 1]


def test_another_thread_may_go_on(pool, in_thread):
    results = handlepool.spread(conv, images(), shared=(WEIGHTS,), to="host")
    got = [next(results), *in_thread(lambda: [*results])]
    assert same(got, expected(pool))


def test_what_on_done_raises_ends_all(pool):
    def stop(index, device):
        raise BadItemError("enough")

    results = handlepool.spread(conv, images(), shared=(WEIGHTS,), on_done=stop)
    with pytest.raises(BadItemError, match="enough"):
        next(results)
    assert next(results, None) is None


def test_a_closed_pool_is_told(pool):
    results = handlepool.spread(conv, images(), shared=(WEIGHTS,))
    next(results)
    pool.close()
    with pytest.raises(PoolClosedError):
        next(results)
    assert next(results, None) is None


def test_a_lost_context_ends_all_and_nothing_is_destroyed(make_driver):
    driver = make_driver(devices=2)
    with current(driver) as pool:
        results = handlepool.spread(conv, images(), shared=(WEIGHTS,), errors="return")
        next(results)
        before = streams(pool)
        driver.lose_context()
        with pytest.raises(PoisonedContextError):
            list(results)
        assert next(results, "ended") == "ended"
        gc.collect()
        assert streams(pool) == before
        driver.lost = None
        driver.fail_at(0)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "devices is empty"),
        ({"devices": [0, 1, 0]}, "devices holds 0 twice"),
        ({"devices": [0, 3]}, "holds 3; pass ordinals from 0 to 2"),
        ({"devices": [-1]}, "holds -1"),
        ({"devices": 2}, "pass a list of ordinals"),
        ({"devices": "01"}, "pass a list of ordinals"),
        ({"shared": WEIGHTS}, "pass a tuple of arguments"),
        ({"lanes": 0}, "lanes=0"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"to": "cpu"}, "to='cpu'"),
        ({"errors": "ignore"}, "errors='ignore'"),
        ({"on_done": 3}, "on_done=3"),
        ({"progress": 3}, "progress=3"),
    ],
)
def test_options_that_are_none_are_refused(pool, options, message):
    with pytest.raises(ArgumentError, match=message):
        handlepool.spread(conv, images(), **{"shared": (WEIGHTS,), **options})


def test_what_is_no_function_and_what_has_no_items(pool):
    with pytest.raises(ArgumentError, match="pass a function"):
        handlepool.spread(3, images())
    with pytest.raises(ArgumentError, match="items=3"):
        handlepool.spread(conv, 3)


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_a_program_is_told_to_be_given_as_its_function(pool, devices):
    put = pool.driver.asarray
    with (
        handlepool.record(conv, put(images(1)[0]), put(WEIGHTS)) as program,
        pytest.raises(ArgumentError, match=r"spread\(<Program conv of device 0.*Pass the recorded function itself"),
    ):
        handlepool.spread(program, images(), devices=devices)


def test_an_array_in_the_closure_is_named_with_the_remedy(pool):
    driver = pool.driver
    with driver.device(1):
        w = driver.asarray(WEIGHTS)

    def closed_over(x):
        return conv(x, w)

    with pytest.raises(DeviceMismatchError, match=r"closure holds w, .*on device 1.*shared="):
        handlepool.spread(closed_over, images())
    assert same([*handlepool.spread(closed_over, images(), devices=[1], to="host")], expected(pool))


W = None


def reads_a_global(x):
    return conv(x, W)


def reads_one_in_a_comprehension(x):
    return [conv(x, w) for w in W.values()]


def reads_one_in_a_function_that_it_names(x):
    return (lambda y: reads_a_global(y))(x)


class Reads:
    def __call__(self, x):
        return x + conv(x, W)


def reads_a_model(x):
    return conv(x, W.weights)


@pytest.mark.parametrize(
    ("function", "keep"),
    [
        (reads_a_global, lambda w: w),
        (partial(reads_a_global), lambda w: w),
        (handlepool.operation(reads_a_global), lambda w: w),
        (reads_one_in_a_comprehension, lambda w: {"a": w}),
        (reads_one_in_a_function_that_it_names, lambda w: w),
        (Reads(), lambda w: w),
        (Reads().__call__, lambda w: w),
        (reads_a_model, lambda w: SimpleNamespace(weights=w)),
    ],
)
@pytest.mark.parametrize("lanes", [8, None])
def test_a_global_of_another_device_is_named_with_the_remedy_first(pool, monkeypatch, function, keep, lanes):
    with pool.driver.device(0):
        monkeypatch.setitem(globals(), "W", keep(pool.driver.asarray(WEIGHTS)))
    says = r"item 1 failed on device 1: its global W is on another device; pass it in shared=, and take it as an argument after"
    with pytest.raises(ItemError, match=says) as caught:
        list(handlepool.spread(function, images(), devices=[0, 1], lanes=lanes))
    assert isinstance(caught.value.__cause__, DeviceMismatchError)
    assert str(caught.value).endswith(str(caught.value.__cause__))
    assert len([*handlepool.spread(function, images(), devices=[0], lanes=lanes)]) == COUNT


def test_an_array_of_another_device_that_is_not_found_is_told_with_the_remedy_too(pool):
    holder = {}
    with pool.driver.device(0):
        holder["w"] = pool.driver.asarray(WEIGHTS)

    class Hides:
        def __getattr__(self, name):
            return holder[name]

    hides = Hides()
    says = "device 1: an array that it does not get as an argument is on another device; pass it in shared="
    with pytest.raises(ItemError, match=says):
        list(handlepool.spread(lambda x: conv(x, hides.w), images(), devices=[0, 1]))
    with pytest.raises(ItemError, match="item 0 failed on device 0: ValueError: another"):
        next(handlepool.spread(lambda x: (_ for _ in ()).throw(ValueError("another")), images()))


class Other:
    """Another library's array."""

    shape, dtype = (2,), "float32"

    def __dlpack__(self, **_):
        raise BufferError

    def __dlpack_device__(self):
        return 2, 1


def test_arrays_of_other_libraries_are_refused(pool):
    with pytest.raises(ArrayTypeError, match="shared holds"):
        handlepool.spread(conv, images(), shared=(Other(),))
    with pytest.raises(ItemError, match="item 0 holds"):
        [*handlepool.spread(conv, [Other()], shared=(WEIGHTS,))]
    other = Other()
    with pytest.raises(DeviceMismatchError, match="closure holds other"):
        handlepool.spread(lambda x: (x, other), images())


def test_masks_are_not_lost_but_refused(pool):
    masked = np.ma.masked_greater(images(1)[0], 0)
    with pytest.raises(ArrayTypeError, match=r"shared holds <numpy.ma.MaskedArray.*its data and its mask"):
        handlepool.spread(conv, images(), shared=(WEIGHTS, [masked]))
    with pytest.raises(ItemError, match=r"item 0 holds <numpy.ma.MaskedArray.*whose mask cannot be copied"):
        [*handlepool.spread(conv, [masked], shared=(WEIGHTS,))]


@pytest.mark.filterwarnings("ignore:spread.*run eagerly:RuntimeWarning")
def test_a_container_that_contains_itself_is_refused_in_plain_words(pool):
    def endless():
        item = images(1)
        item.append(item)
        return item

    says = "a list that contains itself"
    with pytest.raises(ArgumentError, match=rf"spread\(conv\): shared holds {says}"):
        handlepool.spread(conv, images(), shared=(endless(),))
    for item in (endless(), [*endless(), 3], pool.driver.asarray(images(1)[0])):
        returns = not isinstance(item, list)
        function = (lambda x: [x + 1, endless()]) if returns else (lambda given: given[0] + 1)
        with pytest.raises(ItemError, match=f"{'returned' if returns else 'item 0 holds'} {says}"):
            next(handlepool.spread(function, [item]))


def test_a_subclass_of_numpys_array_is_not_taken_for_one_but_refused(pool):
    """It may multiply otherwise, as numpy.matrix does."""

    class Matrix(np.ndarray):
        pass

    x = np.ones((2, 2)).view(Matrix)
    with pytest.raises(ItemError, match=r"item 0 holds .*Matrix.*class would be lost"):
        [*handlepool.spread(lambda x: x * x, [x])]
    with pytest.raises(ArrayTypeError, match=r"shared holds .*Matrix"):
        handlepool.spread(conv, images(), shared=(x,))


class Sample:
    def __init__(self, x):
        self.x = x


def test_an_array_inside_an_object_is_not_copied_and_so_refused(pool):
    """Whoever refills it would overwrite it while it is read."""
    x = pool.driver.asarray(images(1)[0])
    for item in (Sample(x), (1, [Sample([x])]), lambda: x):
        with pytest.raises(
            ItemError, match=r"with <.*HostArray.* in it, which cannot be copied to devices: pass arrays only in lists"
        ):
            [*handlepool.spread(lambda item, w: conv(item.x, w), [item], shared=(WEIGHTS,), devices=[0])]


def test_an_object_may_hold_what_the_function_brings_itself(pool):
    def brings(sample, w):
        return conv(pool.driver.asarray(sample.x), w)

    with pytest.warns(RuntimeWarning, match="type .*Sample, which is no array"):
        got = [*handlepool.spread(brings, [Sample(x) for x in images()], shared=(WEIGHTS,), to="host")]
    assert same(got, expected(pool))


def test_not_inside_recordings_and_branches(pool):
    x = pool.driver.asarray(images()[0])
    states = handlepool.ParallelStates(2, pool=pool)
    with pytest.raises(CaptureError, match="call it outside of these"):
        states.map(lambda x: handlepool.spread(conv, [x]), [x])
    results = handlepool.spread(conv, images(), shared=(WEIGHTS,), to="host")
    got = [next(results)]
    with pytest.raises(CaptureError, match="call it outside of these"):
        states.map(lambda x: next(results), [x])
    got += results
    assert same(got, expected(pool))
    with pytest.raises(CaptureError, match="call it outside of these"):
        handlepool.record(lambda x: [*handlepool.spread(conv, [x], shared=(WEIGHTS,))], x)


def test_not_while_the_callers_stream_is_captured(pool):
    driver = pool.driver
    results = handlepool.spread(conv, images(), shared=(WEIGHTS,), devices=[0])
    pointer = driver.current_stream().ptr
    driver.begin_capture(pointer)
    with pytest.raises(CaptureError, match="device 0 is being captured"):
        next(results)
    with driver.relaxed():
        driver.end_capture(pointer).destroy()


def test_progress_is_counted_on_a_terminal(pool, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    [*handlepool.spread(conv, images(3), shared=(WEIGHTS,), progress=True)]
    assert "3 of 3 items" in capsys.readouterr().err


# Order: each wait has a control that leaves it out


def add(x, w):
    return x * 2 + w


ARRAYS = [np.full(8, value, np.float64) for value in range(1, 11)]
SHIFT = np.full(8, 0.5)
RIGHT = [value * 2 + 0.5 for value in range(1, 11)]


def produced(driver):
    """Items that one array on each of two devices stands for in turn, by queued work."""
    arrays = []
    for device in range(2):
        with driver.device(device):
            arrays.append(driver.asarray(ARRAYS[0]))
    for index, x in enumerate(ARRAYS):
        with driver.device(index % 2):
            driver.copy(arrays[index % 2], driver.asarray(x))
        yield arrays[index % 2]


def from_host(driver):
    results = handlepool.spread(add, ARRAYS, shared=(SHIFT,), to="host", lanes=None)
    return [np.unique(y).tolist() for y in results]


def resident(driver):
    """The caller overwrites and frees each result, by queued work of its own streams, and has a use for the memory."""
    got, noise = [], np.full(8, np.nan)
    for y in handlepool.spread(add, produced(driver), shared=(SHIFT,), lanes=None):
        with driver.device(driver.array_device(y)):
            got.append(driver.asarray(y))
            del y
            driver.asarray(noise)
    values = []
    for y in got:
        with driver.device(driver.array_device(y)):
            values.append(np.unique(driver.asnumpy(y)).tolist())
    return values


def closed_over(driver):
    """The closure's array is made by queued work."""
    shift = driver.empty((8,), (8,), np.dtype(np.float64))
    driver.copy(shift, driver.asarray(SHIFT))
    results = handlepool.spread(lambda x: x * 2 + shift, ARRAYS, devices=[0], to="host", lanes=None)
    return [np.unique(y).tolist() for y in results]


class Careless(HostDriver):
    """Leaves waits out, of one kind of stream for another: the caller's, and those that bring, compute and take."""

    kinds = "caller", "brings", "computes", "takes"

    def __init__(self, without, **options):
        super().__init__(scheduler="adversarial", devices=2, memory=1 << 26, **options)
        self.without = without
        self.left_out = 0
        self._made = []
        self._recorded = {}

    def create_stream(self):
        stream = super().create_stream()
        self._made.append(stream.ptr)
        return stream

    def kind(self, pointer):
        place = self._made.index(pointer) if pointer in self._made else -1
        # The callers' come first, one a device; a program may make others, of which none is asked for here.
        return "caller" if place < 2 else self.kinds[1 + (place - 2) % 3]

    def record_event(self, event, pointer):
        self._recorded[id(event)] = self.kind(pointer)
        super().record_event(event, pointer)

    def wait_event(self, pointer, event):
        if (self._recorded.get(id(event)), self.kind(pointer)) == self.without:
            self.left_out += 1
        else:
            super().wait_event(pointer, event)


def run(scenario, seed, check, without=None):
    driver = Careless(without, seed=seed, check_order=check)
    with current(driver):
        values = scenario(driver)
    assert bool(driver.left_out) == (without is not None)
    return values


def is_right(values):
    return values == [[value] for value in RIGHT]


@pytest.mark.parametrize("scenario", [from_host, resident, closed_over])
def test_every_access_is_ordered_at_every_seed(scenario):
    for seed in SEEDS:
        assert is_right(run(scenario, seed, check=True))
        assert is_right(run(scenario, seed, check=False))


@pytest.mark.parametrize(
    ("scenario", "without"),
    [
        pytest.param(from_host, ("brings", "computes"), id="a replay that does not wait for the copy"),
        pytest.param(from_host, ("computes", "takes"), id="a copy to the host that does not wait for the replay"),
        pytest.param(resident, ("caller", "brings"), id="a copy that does not wait for who makes the item"),
        pytest.param(resident, ("brings", "caller"), id="a caller that does not wait for the copy"),
        pytest.param(resident, ("caller", "computes"), id="a result that does not wait for the readers of its memory"),
        pytest.param(closed_over, ("caller", "computes"), id="a replay that does not wait for the closure"),
    ],
)
def test_control_without_a_wait_results_are_wrong_and_the_checker_says_so(scenario, without):
    assert not all(is_right(run(scenario, seed, check=False, without=without)) for seed in SEEDS)
    for seed in SEEDS[:3]:
        with pytest.raises((ContractError, ItemError), match="not ordered"):
            run(scenario, seed, check=True, without=without)


def of_branches(driver):
    """In the body of a fork: each item is made by a branch that nothing else waits for."""

    def made(x):
        driver.enqueue(driver.current_stream().ptr, np.copyto, writes=[x], reads=[ARRAYS[4]])
        return x

    states = handlepool.ParallelStates(2)
    given = [driver.asarray(ARRAYS[0]) for _ in range(4)]
    with states.fork() as fork:
        items = [fork.run(made, x) for x in given]
        results = handlepool.spread(add, items, shared=(SHIFT,), devices=[0], to="host", lanes=None)
        return [np.unique(y).tolist() for y in results]


def test_an_item_may_be_made_by_a_branch_of_an_open_fork():
    for seed in SEEDS:
        for check in (True, False):
            assert run(of_branches, seed, check=check) == [[RIGHT[4]]] * 4


def test_control_without_the_books_of_the_fork_the_branch_may_come_too_late(monkeypatch):
    monkeypatch.setattr(worker, "active", [])
    assert any(run(of_branches, seed, check=False) != [[RIGHT[4]]] * 4 for seed in SEEDS)


class Forgetful(InFlight):
    """Holds nothing."""

    __slots__ = ()

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = None


def test_control_what_an_item_needs_is_held_until_it_is_done(monkeypatch):
    assert all(is_right(run(from_host, seed, check=False)) for seed in SEEDS)
    monkeypatch.setattr(worker, "InFlight", Forgetful)
    assert not all(is_right(run(from_host, seed, check=False)) for seed in SEEDS)


# Faults


@pytest.mark.parametrize("resident", [False, True])
def test_nothing_is_left_running_whichever_call_of_the_driver_fails(make_driver, resident):
    """And what comes out before is right."""
    driver = make_driver(scheduler="adversarial", devices=2)
    with current(driver) as pool:
        list(handlepool.spread(add, ARRAYS, shared=(SHIFT,), to="host"))
        items = [driver.asarray(each) for each in ARRAYS[:5]] if resident else ARRAYS[:5]
        options = {"devices": [0], "to": None} if resident else {"to": "host"}
        before, failed, k = streams(pool), True, 0
        while failed:
            k += 1
            got, error = [], RuntimeError(f"injected failure of call {k}")
            results = handlepool.spread(add, items, shared=(SHIFT,), lanes=None, **options)
            driver.fail_at(k, None, error, spared=("push_stream", "pop_stream", "set_device"))
            try:
                got.extend(results)
            except (RuntimeError, handlepool.HandlePoolError):
                pass
            failed = error.__traceback__ is not None
            driver.fail_at(0)
            assert [np.unique(driver.asnumpy(y)).tolist() for y in got] == [[value] for value in RIGHT[: len(got)]]
            assert next(results, "ended") == "ended"
            del results
            error.__traceback__ = error.__context__ = None  # whose frames hold outputs
            gc.collect()
            deferred.deferred.run(100)
            assert streams(pool) == before, k
        assert k > 100
        assert len(got) == 5


def test_a_function_may_change_the_dictionary_of_its_item(pool):
    def function(item):
        item["x"] = item["x"] + 10
        return item.pop("x") + item["y"]

    items = [{"x": np.full(4, value, np.float32), "y": np.ones(4, np.float32)} for value in range(6)]
    got = [*handlepool.spread(function, items, to="host")]
    assert [np.unique(y).tolist() for y in got] == [[value + 11] for value in range(6)]
    assert all(item.keys() == {"x", "y"} for item in items)


def test_an_item_that_runs_eagerly_and_is_taken_out_of_its_dictionary_is_held(make_driver):
    def function(item):
        x = item.pop("x")
        y = x + 10
        del x
        return y + item["n"]

    for seed in range(5):
        driver = make_driver(scheduler="adversarial", seed=seed)
        with current(driver):
            items = ({"x": np.full(64, value, np.float32), "n": 1} for value in range(8))
            with pytest.warns(RuntimeWarning, match="run eagerly"):
                got = [*handlepool.spread(function, items, to="host", in_flight=4)]
        assert [np.unique(y).tolist() for y in got] == [[value + 11] for value in range(8)]


def test_an_item_may_have_no_elements(pool):
    got = [*handlepool.spread(lambda x: x + 1, [np.zeros((3, 0), np.float32)] * 3, to="host")]
    assert [y.shape for y in got] == [(3, 0)] * 3


def test_what_an_item_was_copied_into_is_free_once_the_callers_stream_is_done_with_it(make_driver):
    """An item that fails while it is given leaves a copy on that stream, and others get the memory when the spread has ended.

    A wait on the host that fails is a lost context, after which nothing runs any more.
    """
    spared = ("push_stream", "pop_stream", "set_device", "synchronize_event", "synchronize_stream")
    failed, k = True, 0
    while failed:
        k += 1
        driver = make_driver(scheduler="adversarial", seed=k)
        with current(driver):
            items = [driver.asarray(np.full(4, value, np.float32)) for value in range(4)]
            error = RuntimeError(f"injected failure of call {k}")
            results = handlepool.spread(lambda x: x + 1, items, lanes=None, devices=[0])
            next(results)
            driver.fail_at(k, None, error, spared=spared)
            with suppress(RuntimeError, handlepool.HandlePoolError):
                list(results)
            driver.fail_at(0)
            failed, error.__traceback__ = error.__traceback__ is not None, None
            del results
            gc.collect()
            deferred.deferred.run(100)
            with driver.create_stream() as other:
                held = [driver.asarray(np.zeros(4, np.float32)) for _ in range(8)]
                driver.synchronize_stream(other.ptr)
                del held
    assert k > 20


def test_an_object_in_the_closure_may_hold_an_array_for_each_device(pool):
    driver = pool.driver
    each = SimpleNamespace(arrays={})
    for device in (0, 1):
        with driver.device(device):
            each.arrays[device] = driver.asarray(np.full(4, device + 1.0, np.float32))
    items = [np.ones(4, np.float32)] * 6
    got = [*handlepool.spread(lambda x: x + each.arrays[driver.current_device()], items, devices=[0, 1], to="host")]
    assert all(np.unique(y).tolist() in ([2], [3]) for y in got)


# Arrays of one item that share memory


def aliased(driver, name, kind, values):
    """An item for each value, of NumPy's arrays or on a device, and what the function gives for it."""
    items, expected = [], []
    for value in values:
        expected.append(in_place(ALIASES[name](base(value))))
        if kind == "numpy":
            items.append(ALIASES[name](base(value)))
        else:
            with driver.device(kind):
                items.append(ALIASES[name](driver.asarray(base(value))))
    return items, expected


GAPS = {"rows between rows", "columns between columns"}  # which are not brought from another device


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in ALIASES for kind in ("numpy", 0, 1) if kind != 1 or name not in GAPS]
)
@pytest.mark.parametrize("lanes", [8, None])
def test_arrays_of_an_item_share_memory_on_the_device_as_they_do(pool, name, kind, lanes):
    items, expected = aliased(pool.driver, name, kind, range(5))
    got = [*handlepool.spread(in_place, items, devices=[0], lanes=lanes, to="host")]
    assert [[y.tolist() for y in ys] for ys in got] == [[y.tolist() for y in ys] for ys in expected]


@pytest.mark.parametrize("kind", ["numpy", 1])
@pytest.mark.parametrize("name", ["one twice", "windows", "a transpose"])
def test_arrays_of_an_item_that_runs_eagerly_share_memory_as_they_do(pool, name, kind):
    items, expected = aliased(pool.driver, name, kind, range(3))
    with pytest.warns(RuntimeWarning, match="eagerly"):
        got = [*handlepool.spread(in_place, [(*item, 3) for item in items], devices=[0], to="host")]
    assert [[y.tolist() for y in ys] for ys in got] == [[y.tolist() for y in ys] for ys in expected]


@pytest.mark.parametrize("kind", ["numpy", 0, 1])
def test_items_of_one_geometry_that_share_memory_in_other_ways_are_each_right(pool, kind):
    driver = pool.driver

    def pair(number, kind):
        way, value = divmod(number, 4)
        x, y = base(value)[0], base(value)[1]
        if kind != "numpy":
            with driver.device(kind):
                x, y = driver.asarray(x), driver.asarray(y)
        return [(x[:4], y[:4]), (x[:4], x[:4]), (x[:4], x[1:5]), (x[1:5], x[:4]), (x[:4], x[2:6])][way]

    numbers = np.random.default_rng(7).permutation(20).tolist()
    got = [*handlepool.spread(in_place, [pair(number, kind) for number in numbers], devices=[0], to="host")]
    expected = [in_place(pair(number, "numpy")) for number in numbers]
    assert [[y.tolist() for y in ys] for ys in got] == [[y.tolist() for y in ys] for ys in expected]


@pytest.mark.parametrize("kind", ["numpy", 0])
def test_one_list_in_two_places_is_right_among_items_of_its_geometry(pool, kind):
    def make(value):
        lists = [base(value)], [base(value + 1)]
        return lists if value % 3 else (lists[0], lists[0])

    items = [make(value) for value in range(1, 10)]
    if kind == 0:
        items = [
            rebuilt(item, pool.driver.asarray) if item[0] is not item[1] else ([pool.driver.asarray(item[0][0])],) * 2
            for item in items
        ]
    got = [*handlepool.spread(in_place, items, devices=[0], to="host")]
    expected = [in_place(make(value)) for value in range(1, 10)]
    assert [[y.tolist() for y in ys] for ys in got] == [[y.tolist() for y in ys] for ys in expected]


def test_control_copies_of_their_own_lose_what_arrays_share(pool, without):
    without("relations of arrays")
    items, expected = aliased(pool.driver, "one twice", "numpy", range(3))
    got = [*handlepool.spread(in_place, items, devices=[0], to="host")]
    assert [[y.tolist() for y in ys] for ys in got] != [[y.tolist() for y in ys] for ys in expected]


def test_arrays_that_share_memory_lie_as_far_from_a_multiple_of_256_as_they_did(pool):
    x = np.zeros(64, np.float32)
    where = []

    def function(item):
        where.append([pool.driver.array_pointer(each) % 256 for each in item])
        return item[0] + 1

    item = x[3:40], x[5:60]
    list(handlepool.spread(function, [item], devices=[0]))
    assert where == [[each.__array_interface__["data"][0] % 256 for each in item]] * 2


def test_an_item_that_shares_memory_with_what_is_shared_has_a_copy_of_its_own(pool):
    x = pool.driver.asarray(base(0))

    def function(item, reference):
        item -= reference
        return item * 1, reference * 1

    got = [*handlepool.spread(function, [x, x[:]], shared=(x,), devices=[0], to="host")]
    assert [[y.tolist() for y in ys] for ys in got] == [[np.zeros((4, 6)).tolist(), base(0).tolist()]] * 2


# The short way, which items of a known geometry go


def sorts(random, driver):
    """A function that draws items of one of several structures, of arrays that lie in one of several ways."""

    def array(kind, size):
        values = random.integers(0, 100, (2, 3, size)).astype(random.choice(["float32", "float64"]))
        lies = random.integers(0, 6)
        if lies == 0:
            values = np.asfortranarray(values)
        elif lies == 1:
            values = values.transpose(0, 2, 1).copy().transpose(0, 2, 1)
        if kind == "numpy":
            return values[:, ::2] if lies == 2 else values[..., ::-1] if lies == 3 else values
        with driver.device(kind):
            made = driver.asarray(values)
            return made[:1] if lies == 4 else made

    def item():
        kinds = ["numpy", "numpy", 0, 0, 1]
        kind, size = random.choice(np.array(kinds, object)), int(random.integers(2, 4))
        other = random.choice(np.array(kinds, object)) if random.random() < 0.2 else kind
        x = array(kind, size)
        what = random.integers(0, 5)
        if what == 0:
            return [x, {"a": array(other, size)}]
        if what == 1:
            return x, array(other, size)
        if what == 2:
            return [x] * 2
        if what == 3:
            twice = [x]
            return twice, twice
        return x

    return item


def of_any(item):
    """Of what an item holds: new arrays, one of them twice, a view, the item itself, and no arrays."""
    arrays = [*leaves(item)]
    total = sum(x.sum() for x in arrays) + arrays[0] * 3
    if len(arrays) == 1:
        return total
    return {"total": total, "again": (total, [arrays[-1]], "text"), "view": total[:1]}


def on_host(pool, value):
    """The same, of NumPy's arrays."""
    return rebuilt(value, lambda leaf: value_of(pool, leaf) if isinstance(leaf, HostArray) else leaf)


def alike(value):
    """Structure, types and strides, and what lies in several places."""
    found = [*leaves(value)]
    same = [[id(each) for each in found].index(id(leaf)) for leaf in found]
    return repr(rebuilt(value, lambda leaf: leaf if isinstance(leaf, str) else (leaf.dtype, leaf.strides))), same


def values(value):
    return [leaf if isinstance(leaf, str) else leaf.tolist() for leaf in leaves(value)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("to", [None, "host"])
def test_the_short_way_gives_what_the_general_one_does_at_random(without, general_items, seed, to):
    found = []
    for short in (True, False):
        random = np.random.default_rng(seed)
        driver = HostDriver(devices=2, scheduler="adversarial", seed=seed, check_order=True)
        with current(driver) as pool:
            if not short:
                without("known items of spreads")
            item = sorts(random, driver)
            few = [item() for _ in range(6)]
            given = [few[place] for place in random.integers(0, 6, 40)]
            driver.calls.clear()
            general_items.clear()
            got = [*handlepool.spread(of_any, given, to=to, in_flight=int(random.integers(1, 4)), lanes=None)]
            assert (len(general_items) < len(given)) == short
            assert [values(on_host(pool, each)) for each in got] == [values(of_any(on_host(pool, each))) for each in given]
            found.append([alike(each) for each in got])
    assert found[0] == found[1]


@pytest.fixture
def general(general_items):
    """How many items of a spread over one device go the general way: ``general(function, given, **options)``."""

    def count(function, given, **options):
        general_items.clear()
        assert len([*handlepool.spread(function, given, devices=[0], lanes=None, **options)]) == len(given)
        return len(general_items)

    return count


def test_items_of_a_known_geometry_go_the_short_way(pool, general):
    driver, options = pool.driver, {"shared": (SHIFT,)}
    resident = [driver.asarray(x) for x in ARRAYS]
    with driver.device(1):
        elsewhere = [driver.asarray(x) for x in ARRAYS]
    assert general(add, ARRAYS, **options) == 1
    assert general(add, ARRAYS, to="host", **options) == 1
    assert general(add, resident, **options) == 1
    assert general(add, elsewhere, **options) == 1
    assert general(add, [*ARRAYS, *resident, *elsewhere], **options) == 2
    assert general(lambda item: {"y": item["x"] + 1}, [{"x": x} for x in resident]) == 1


def test_what_is_no_run_of_bytes_or_on_two_devices_goes_the_general_way(pool, general):
    driver = pool.driver
    gaps = [driver.asarray(np.repeat(x, 2))[::2] for x in ARRAYS]
    here = driver.asarray(ARRAYS[0])
    with driver.device(1):
        there = driver.asarray(ARRAYS[0])
    assert general(lambda x: x + 1, gaps) == len(gaps)
    assert general(lambda x: (x + 1)[::2], ARRAYS) == len(ARRAYS)
    assert general(lambda item: item[0] + item[1], [(here, there)] * 3) == 3
    assert general(lambda item: item[0] + item[1], [(here, ARRAYS[1])] * 3) == 3


def test_a_page_locked_item_goes_the_general_way(pool, general):
    pool.driver.page_locked = lambda values: values is ARRAYS[5]
    assert general(add, ARRAYS, shared=(SHIFT,)) == 2


def test_copies_of_items_are_made_for_as_many_as_are_in_flight(pool):
    with handlepool.spread(add, ARRAYS * 4, shared=(SHIFT,), devices=[0], lanes=None, in_flight=3, to="host") as results:
        for _ in results:
            made = [way.spare for way in device_workers_of(results).all[0]._copy_plans.values()]
    assert len(made) == 1
    assert 1 <= len(made[0]) <= 3


class Reused(worker.CopyPlan):
    """Lends the same copy to all items in flight."""

    __slots__ = ("_one",)

    @property
    def spare(self):
        return self._one

    @spare.setter
    def spare(self, value):
        self._one = Lent(value)


class Lent(list):
    def pop(self):
        return self[-1]


def crowded(driver):
    results = handlepool.spread(add, ARRAYS, shared=(SHIFT,), devices=[0], in_flight=4, to="host", lanes=None)
    return [np.unique(y).tolist() for y in results]


def test_control_a_copy_that_another_item_in_flight_has_gives_wrong_results(monkeypatch):
    assert all(is_right(run(crowded, seed, check=False)) for seed in SEEDS)
    monkeypatch.setattr(worker, "CopyPlan", Reused)
    assert not all(is_right(run(crowded, seed, check=False)) for seed in SEEDS)


def test_what_was_given_by_the_short_way_fails_late_and_ends_with_its_error(pool):
    """And the copies that it had are used again by later items."""
    driver = pool.driver
    results = handlepool.spread(add, ARRAYS, shared=(SHIFT,), devices=[0], errors="return", to="host", in_flight=1, lanes=None)
    got = [next(results) for _ in range(3)]
    driver.fail_at(1, "copy_run", RuntimeError("injected"))
    got += results
    driver.fail_at(0)
    failed = [index for index, y in enumerate(got) if isinstance(y, ItemError)]
    assert len(failed) == 1
    assert "injected" in str(got[failed[0]])
    assert [np.unique(y).tolist() for y in got if not isinstance(y, ItemError)] == [
        [value] for index, value in enumerate(RIGHT) if index not in failed
    ]


def test_what_an_item_that_fails_on_the_short_way_gave_to_streams_is_waited_for(pool):
    """Or its memory would be used again meanwhile."""
    driver = pool.driver
    with handlepool.spread(add, ARRAYS, shared=(SHIFT,), devices=[0], errors="return", in_flight=1, lanes=None) as results:
        for _ in range(3):
            next(results)
        driver.calls.clear()
        driver.fail_at(2, "copy_run")  # the result's; that of the item is enqueued
        got = [next(results) for _ in range(3)]
        assert [type(y) is ItemError for y in got].count(True) == 1
        assert driver.calls["synchronize_stream"] == 3


def test_once_something_is_not_recorded_known_geometries_run_eagerly_too(pool):
    called = []

    def looks(x):
        called.append(x.shape)
        return x * (float(x.max()) if len(x) == 9 else 2)

    given = [*ARRAYS[:3], np.ones(9), *ARRAYS[3:]]
    with pytest.warns(RuntimeWarning, match="eagerly"):
        got = [*handlepool.spread(looks, given, devices=[0], to="host", lanes=None)]
    assert same(got, [x * (1 if len(x) == 9 else 2) for x in given])
    assert called.count((8,)) == 2 + len(ARRAYS[3:])


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, "host"])
def test_an_interrupt_at_any_line_leaves_nothing_behind(to):
    driver = HostDriver(scheduler="adversarial", devices=2, memory=1 << 26)
    with current(driver) as pool:
        [*handlepool.spread(add, ARRAYS, shared=(SHIFT,), lanes=None)]
        gc.collect()
        deferred.deferred.run(100)
        before = streams(pool)
        for k in some_lines(23):
            results = handlepool.spread(add, ARRAYS[:6], shared=(SHIFT,), lanes=None, to=to)
            got, where = [], None
            try:
                where = at_line(k, partial(got.extend, results), interrupt, {"worker.py"})
                if where is None:
                    break
            except KeyboardInterrupt as error:
                where = error.__notes__
            values = [np.unique(y if to else value_of(pool, y)).tolist() for y in got]
            assert values == [[value] for value in RIGHT[: len(got)]], where
            results.close()
            del results
            gc.collect()
            deferred.deferred.run(100)
            assert streams(pool) == before, where
        assert k > 100


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
@pytest.mark.slow
def test_interrupts_as_python_delivers_them_leave_the_turn_free(pool):
    def refused(*_):
        raise KeyboardInterrupt

    results = handlepool.spread(conv, images(), shared=(WEIGHTS,))
    results._next = lambda: None
    before = signal.signal(signal.SIGVTALRM, refused)
    try:
        for number in range(200):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4 + number * 1e-7, 0.1)
                while True:
                    next(results)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            assert not results._turn._is_owned()
            assert not results._taking
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    results.close()


class Freeing(HostDriver):
    """Tells of the host's memory that copies to the host go to, whether it is let go of before a stream was waited for."""

    def __init__(self, **options):
        super().__init__(**options)
        self.going, self.early = [], 0

    def copy_to_host(self, array, pointer):
        if len(self.going) == 2 * len(ARRAYS) - 1:
            raise MemoryError("no page-locked memory")
        host = super().copy_to_host(array, pointer)
        self.going.append(weakref.ref(host))
        return host

    def synchronize_stream(self, pointer):
        self.early += self.going[-1]() is None
        super().synchronize_stream(pointer)


@pytest.mark.parametrize("short", [True, False])
def test_memory_of_the_host_is_kept_to_the_end_of_its_copy_also_where_the_next_one_fails(without, short):
    def two(x):
        return x + 1, x * 2

    if not short:
        without("known items of spreads")
    driver = Freeing(devices=1)
    with current(driver):
        results = handlepool.spread(two, ARRAYS, to="host", in_flight=1, lanes=None)
        with pytest.raises(ItemError, match="no page-locked memory"):
            list(results)
    assert len(driver.going) == 2 * len(ARRAYS) - 1
    assert not driver.early


@pytest.mark.parametrize("fails", [None, "copy_run", "copy_from_device", "wait_event"])
def test_g3_device_and_stream_of_the_caller_stay_current(pool, fails):
    driver = pool.driver
    here = driver.current_device(), driver.current_stream()
    given = [x if index % 2 else driver.asarray(x) for index, x in enumerate(ARRAYS * 2)]
    with handlepool.spread(add, given, shared=(SHIFT,), devices=[2, 1], lanes=None, errors="return", in_flight=1) as results:
        got = []
        for index in range(len(given)):
            if index == 8 and fails:
                driver.fail_at(1, fails)
            got.append(next(results))
            assert (driver.current_device(), driver.current_stream()) == here
        driver.fail_at(0)
    assert [isinstance(y, ItemError) for y in got].count(True) == bool(fails)
