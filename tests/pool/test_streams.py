"""Streams as keys: an identity, not an address. Guarantee 4."""

import gc
import threading
from typing import ClassVar

import pytest
from harness.scenes import Thread
from harness.uses import FOREIGN, Foreign

from handlepool import CaptureError, ContractError
from handlepool.drivers.host.array import raw_view
from handlepool.pool.stream import resolve
from handlepool.pool.thread_slots import MOST_FOREIGN_STREAMS

SEEDS = range(60)


KINDS = {"owned": lambda driver, stream: stream, **FOREIGN}


def recycled(driver, use):
    """Use a stream, destroy it, and return a new one at the same pointer."""
    stream = driver.create_stream()
    pointer, identity = stream.ptr, driver.stream_id(stream.ptr)
    use(stream)
    del stream
    new = driver.create_stream()
    assert new.ptr == pointer  # as the CUDA driver does
    assert driver.stream_id(new.ptr) != identity
    return new


def ran(driver, handle, stream):
    """Whether work through the handle runs on the stream; the host driver raises where it would go to a destroyed one."""
    log = []
    latch = driver.latch(stream.ptr)
    driver.use_handle(handle, lambda: log.append(1))
    held = not log
    latch.release()
    stream.synchronize()
    return held and log == [1]


# A recycled pointer


@pytest.mark.parametrize("kind", KINDS)
def test_g4_a_new_stream_at_an_old_address_has_a_slot_of_its_own_that_is_bound_to_it(make_pool, scheduler, kind):
    pool = make_pool(scheduler=scheduler)
    slots = []

    def use(stream):
        slots.append(pool.internals.slot(KINDS[kind](pool.driver, stream)))
        pool.driver.use_handle(slots[0].handle, int)

    new = recycled(pool.driver, use)
    passed = KINDS[kind](pool.driver, new)
    assert pool.internals.slot(passed) is not slots[0]
    assert ran(pool.driver, pool.get_handle(passed), new)
    assert pool.get_handle(passed) is pool.get_handle(passed)


@pytest.mark.parametrize("kind", ["wrapper", "protocol"])
def test_g4_an_object_that_outlives_its_stream_does_not_lead_to_the_old_slot(make_pool, kind):
    pool = make_pool()
    passed = []

    def use(stream):
        passed.append(KINDS[kind](pool.driver, stream))
        pool.driver.use_handle(pool.get_handle(passed[0]), int)

    new = recycled(pool.driver, use)
    assert ran(pool.driver, pool.get_handle(passed[0]), new)


def test_g4_a_current_stream_at_an_old_address_does_not_inherit(make_pool):
    pool = make_pool()

    def use(stream):
        with stream:
            pool.get_handle()

    with recycled(pool.driver, use) as new:
        assert ran(pool.driver, pool.get_handle(), new)


def test_g4_control_a_cache_keyed_by_pointer_is_caught(make_driver):
    driver, cache = make_driver(), {}

    def get_handle(stream):
        if stream.ptr not in cache:
            cache[stream.ptr] = driver.create_handle()
            driver.bind_handle(cache[stream.ptr], stream.ptr)
        return cache[stream.ptr]

    new = recycled(driver, lambda stream: driver.use_handle(get_handle(stream), int))
    with pytest.raises(ContractError, match=r"destroyed>\); bind the handle again"):
        ran(driver, get_handle(new), new)


def scratch_across_recycling(driver, get_workspace, first=lambda use: use()):
    """Two streams, the second at the first one's address, each write and later read their scratch; what they read.

    ``first(use)`` lets the first one be used.
    """
    read = [driver.empty((1,), (1,), "u1") for _ in range(2)]

    def use(stream, i):
        scratch = get_workspace(stream)
        driver.enqueue(stream.ptr, lambda memory: memory.fill(i + 1), writes=[scratch])
        driver.enqueue(stream.ptr, lambda out, memory: out.fill(memory[0]), writes=[read[i]], reads=[scratch])

    new = recycled(driver, lambda stream: first(lambda: use(stream, 0)))
    use(new, 1)
    new.synchronize()
    values = [raw_view(array)[0] for array in read]
    while values[0][0] == 0xFF:  # the destroyed stream's work is still queued
        driver.event_done(driver.create_event())  # polling lets the scheduler run
    return [int(value[0]) for value in values]


@pytest.mark.parametrize("kind", KINDS)
def test_g4_scratch_is_not_inherited_while_the_destroyed_stream_still_runs(make_pool, kind):
    for seed in SEEDS:
        pool = make_pool(scheduler="adversarial", seed=seed)
        found = scratch_across_recycling(pool.driver, lambda s, pool=pool: pool.get_workspace(64, KINDS[kind](pool.driver, s)))
        assert found == [1, 2], seed


@pytest.mark.parametrize("taken_in", [False, True])
def test_g4_scratch_that_waits_for_its_next_owner_is_not_inherited_from_a_stream_that_goes_meanwhile(
    make_pool, in_thread, taken_in
):
    for seed in SEEDS[:20]:
        pool = make_pool(scheduler="adversarial", seed=seed)

        def in_a_thread_that_ends(use, pool=pool):
            in_thread(use)
            if taken_in:  # while the stream lives, so that the scratch stays with the idle slot
                pool.internals.release_left()
                assert pool.stats()["scratch_bytes"] == 256

        found = scratch_across_recycling(pool.driver, lambda s, pool=pool: pool.get_workspace(64, s), in_a_thread_that_ends)
        assert found == [1, 2], seed


def test_g4_control_scratch_keyed_by_pointer_is_corrupted_at_some_seeds(make_driver):
    def keyed_by_pointer(driver, cache):
        def get_workspace(stream):
            if stream.ptr not in cache:
                cache[stream.ptr] = driver.allocate(64)
            return driver.scratch_array(cache[stream.ptr], 64, None)

        return get_workspace

    def run(seed, check):
        driver = make_driver(scheduler="adversarial", seed=seed, check_order=check)
        return scratch_across_recycling(driver, keyed_by_pointer(driver, {}))

    assert any(run(seed, False) != [1, 2] for seed in SEEDS)
    with pytest.raises(ContractError, match="not ordered"):
        run(0, True)


# Keys


def test_g4_streams_that_are_equal_by_pointer_are_told_apart(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    wrapper = pool.driver.wrap_stream(stream.ptr, stream)
    assert stream == wrapper
    assert hash(stream) == hash(wrapper)
    assert pool.internals.slot(stream) is not pool.internals.slot(wrapper)
    assert pool.internals.slot(stream) is pool.internals.slot(stream)


def test_g4_all_foreign_forms_of_a_live_stream_share_a_slot(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    assert len({pool.internals.slot(KINDS[kind](pool.driver, stream)) for kind in FOREIGN}) == 1


def test_g4_the_slot_of_an_owned_stream_ends_with_the_stream(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.get_workspace(1000, stream)
    assert pool.stats()["handles_live"] == 1
    del stream
    pool.internals.release_left()
    stats = pool.stats()
    assert (stats["handles_live"], stats["handles_idle"], stats["scratch_bytes"]) == (0, 1, 0)


def test_g4_the_pool_keeps_no_stream_alive(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pointer = stream.ptr
    with stream:
        pool.get_workspace(1000)
    del stream
    with pytest.raises(ContractError, match="names no live stream"):
        pool.driver.stream_id(pointer)


@pytest.mark.parametrize("kind", FOREIGN)
def test_g4_keys_of_bare_pointers_are_bounded_least_recently_used_out_first(make_pool, kind):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(MOST_FOREIGN_STREAMS + 1)]
    passed = [KINDS[kind](pool.driver, stream) for stream in streams]
    slots = [pool.internals.slot(stream) for stream in passed[:-1]]
    assert pool.internals.slot(passed[0]) is slots[0]  # used again: the second is the oldest now
    pool.internals.slot(passed[-1])
    assert pool.internals.slot(passed[0]) is slots[0]
    assert pool.internals.slot(passed[2]) is slots[2]
    assert pool.stats()["handles_live"] <= MOST_FOREIGN_STREAMS + 1
    assert pool.internals.slot(passed[1]) is not slots[1]
    pool.internals.release_left()
    assert pool.stats()["handles_live"] == MOST_FOREIGN_STREAMS


def test_g4_owned_streams_are_not_bounded(make_pool):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(2 * MOST_FOREIGN_STREAMS)]
    slots = [pool.internals.slot(stream) for stream in streams]
    assert [pool.internals.slot(stream) for stream in streams] == slots


# Default streams


@pytest.mark.parametrize(("pointers", "name"), [((0, 1), "legacy_stream"), ((2,), "per_thread_stream")])
def test_g4_every_form_of_a_default_stream_is_one_key(make_pool, pointers, name):
    pool = make_pool()
    stream = getattr(pool.driver, name)
    handle = pool.get_handle(stream)
    for pointer in pointers:
        assert pool.get_handle(pointer) is handle
        assert pool.get_handle(Foreign(pointer)) is handle
        assert pool.get_handle(pool.driver.wrap_stream(pointer, None)) is handle
    with stream:
        assert pool.get_handle() is handle
    assert len({pool.get_handle(pointer) for pointer in (0, 1, 2)}) == 2


@pytest.mark.parametrize("pointer", [0, 1, 2])
def test_g4_a_default_stream_asked_for_by_its_pointer_first_is_kept(make_pool, in_thread, pointer):
    pool = make_pool()
    handle = pool.get_handle(pointer)
    assert in_thread(pool.get_handle, pointer) is not handle
    assert pool.get_handle(pointer) is handle


@pytest.mark.parametrize("form", [lambda driver: 2, lambda driver: driver.per_thread_stream, lambda driver: Foreign(2)])
def test_g4_the_per_thread_default_stream_is_another_in_each_thread(make_pool, in_thread, form):
    pool = make_pool()
    passed = form(pool.driver)
    latch = pool.driver.latch(2)
    handle, log = pool.get_handle(passed), []
    pool.driver.use_handle(handle, lambda: log.append("here"))

    def elsewhere():
        other = pool.get_handle(passed)
        pool.driver.use_handle(other, lambda: log.append("there"))
        pool.driver.synchronize_stream(2)
        return other

    assert in_thread(elsewhere) is not handle
    assert log == ["there"]
    latch.release()
    pool.driver.synchronize_stream(2)
    assert log == ["there", "here"]


def test_g4_scratch_of_a_dead_threads_per_thread_stream_is_not_passed_on(make_pool, in_thread):
    """The pointer is the same in each thread and the stream is not, so the dead thread's may still be running."""
    pool = make_pool()
    release = threading.Event()

    def use_and_die():
        scratch = pool.get_workspace(1000, 2)
        pool.driver.enqueue(2, lambda memory: (release.wait(60), memory.fill(7)), writes=[scratch])

    in_thread(use_and_die)
    before = pool.driver.calls["free"]
    releaser = Thread(release.set)
    pool.get_handle(2)  # takes the handle over, and waits for the scratch to be free
    releaser.finish()
    assert pool.driver.calls["free"] == before + 1
    assert pool.stats()["handles_reused"] == 1
    assert pool.stats()["scratch_bytes"] == 0


# Captures


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_g4_the_id_of_a_capturing_stream_is_never_read(make_pool, kind, mode):
    pool = make_pool()
    stream = pool.driver.create_stream()
    passed = KINDS[kind](pool.driver, stream)
    eager = pool.internals.slot(passed)
    stream.begin_capture(mode)
    pool.driver.calls.clear()
    captured = pool.internals.slot(passed)  # a miss
    assert pool.internals.slot(passed) is captured  # a hit
    assert "stream_id" not in pool.driver.calls
    assert captured is not eager
    stream.end_capture()  # raises if anything spoiled it
    assert pool.internals.slot(passed) is eager


def test_g4_control_the_host_driver_spoils_a_capture_whose_streams_id_is_read(make_driver):
    driver = make_driver()
    stream = driver.create_stream()
    stream.begin_capture("relaxed")
    with pytest.raises(CaptureError):
        driver.stream_id(stream.ptr)
    with pytest.raises(CaptureError):
        stream.end_capture()


def test_g4_two_captures_of_one_foreign_stream_do_not_share_a_slot(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    slots = []
    for _ in range(2):
        stream.begin_capture()
        slots.append(pool.internals.slot(stream.ptr))
        stream.end_capture()
    assert slots[0] is not slots[1]


def test_g4_an_owned_stream_keeps_its_slot_through_a_capture(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    slot = pool.internals.slot(stream)
    stream.begin_capture()
    pool.driver.calls.clear()
    assert pool.internals.slot(stream) is slot
    assert not pool.driver.calls.keys() - {"current_device"}
    stream.end_capture()


# References


def test_a_reference_says_device_pointer_and_owner(make_driver):
    driver = make_driver()
    with driver.device(1):
        stream = driver.create_stream()
        foreign = Foreign(stream.ptr)
        mine, theirs = resolve(driver, stream), resolve(driver, foreign)
    assert (mine.device, mine.pointer, mine.stream, mine.owner) == (1, stream.ptr, stream, stream)
    assert (theirs.device, theirs.pointer, theirs.stream, theirs.owner) == (1, stream.ptr, None, foreign)
    assert mine.key != theirs.key


def test_the_current_stream_is_resolved_where_none_is_given(make_driver):
    driver = make_driver()
    assert resolve(driver).stream is driver.legacy_stream
    with driver.create_stream() as stream:
        assert resolve(driver).stream is stream


def test_g11_captures_and_streams_that_are_over_at_a_pointer_keep_no_handle(make_pool):
    """Torch's streams are known by their pointers, and each capture is a key of its own."""
    pool = make_pool()
    stream = pool.driver.create_stream()
    for _ in range(20):
        stream.begin_capture()
        captured = pool.get_handle(stream.ptr)
        assert pool.get_handle(stream.ptr) is captured
        stream.end_capture()
        eager = pool.get_handle(stream.ptr)
        assert eager.stream == stream.ptr
    assert pool.stats()["handles_live"] <= 3
    for _ in range(20):
        other = pool.driver.create_stream()
        pool.get_handle(other.ptr)
        del other  # its pointer is the next one's
    assert pool.stats()["handles_live"] <= 5
    assert pool.get_handle(stream.ptr) is eager


class Resurrected:
    """An object in a cycle that keeps its stream at its end, as a program that is closed later does."""

    kept: ClassVar[list[object]] = []

    def __init__(self, stream):
        self.stream, self.itself = stream, self

    def __del__(self):
        self.kept.append(self.stream)


def test_g4_a_stream_that_the_collector_destroyed_serves_no_later_program(pool):
    """The collector ends all objects of a cycle, those too that another one of them keeps."""
    Resurrected.kept.clear()
    Resurrected(pool.driver.create_stream())
    gc.collect()
    alive = pool.driver.create_stream()
    (destroyed,) = Resurrected.kept
    sides = pool.internals.device(0).sides
    for stream in (destroyed, alive):
        sides.reuse(stream)
    slot = sides.lease()
    sides.replace_stream(slot)
    assert slot.side_stream is alive
    sides.replace_stream(slot)
    assert slot.side_stream is not destroyed
    sides.release(slot, captured=False)
