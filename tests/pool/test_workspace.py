"""Scratch memory: never shared by two streams, grow-only, limited. Guarantee 5."""

import numpy as np
import pytest
from harness.graphs import convolution

from handlepool import ArgumentError, ContractError
from handlepool.testing import reference

SEEDS = range(30)
RNG = np.random.default_rng(5)
IMAGES = RNG.standard_normal((2, 1, 3, 6, 6)).astype(np.float32)
FILTERS = RNG.standard_normal((2, 4, 3, 3, 3)).astype(np.float32)
EXPECTED = [reference.conv2d(x, w, padding=1) for x, w in zip(IMAGES, FILTERS, strict=True)]


def compiled(pool, x, w):
    return convolution.prepare(pool.internals, (x, w), None, {}).plan.executable


def address(pool, array):
    return pool.driver.array_pointer(array)


def span(pool, array):
    return range(address(pool, array), address(pool, array) + array.nbytes)


def overlap(first, second):
    return max(first.start, second.start) < min(first.stop, second.stop)


def write(pool, stream, scratch, value):
    pool.driver.enqueue(stream.ptr, lambda memory: memory.fill(value), writes=[scratch])


# Two streams


def test_g5_no_two_streams_or_threads_share_scratch(make_pool, in_thread):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(4)]
    spans = []

    def ask():
        for stream in streams:
            spans.append(span(pool, pool.get_workspace(1000, stream)))
            spans.append(span(pool, pool.get_workspace(1000, stream.ptr)))
            start = pool.internals.slot(stream).reserve(1000)
            spans.append(range(start, start + 1000))
        return pool.driver.per_thread_stream  # alive until here

    ask()
    spans_of_this_thread = len(spans)
    barrier_keeps = []

    def elsewhere():
        ask()
        barrier_keeps.append(len(spans))

    in_thread(elsewhere)
    assert len(spans) == 2 * spans_of_this_thread
    distinct = spans[:spans_of_this_thread]
    assert not any(overlap(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    # The dead thread had its own beside this one's, which still holds all of its.
    assert not any(overlap(a, b) for a in distinct for b in spans[spans_of_this_thread:])


def convolve_on_two_streams(driver, launch):
    """Three rounds of two convolutions on two streams, no order between them; whether all results are right.

    Parameters
    ----------
    launch : callable
        ``launch(number, x, w, y)`` is called with the number's stream current.
    """
    streams = [driver.create_stream() for _ in range(2)]
    operands = []
    for number, stream in enumerate(streams):
        with stream:
            x, w = driver.asarray(IMAGES[number]), driver.asarray(FILTERS[number])
            operands.append((x, w, [driver.empty(EXPECTED[0].shape, (576, 144, 24, 4), np.float32) for _ in range(3)]))
    for turn in range(3):
        for number, stream in enumerate(streams):
            x, w, outputs = operands[number]
            with stream:
                launch(number, x, w, outputs[turn])
    for stream in streams:
        stream.synchronize()
    return all(np.allclose(y, EXPECTED[number], rtol=1e-4, atol=1e-4) for number in range(2) for y in operands[number][2])


@pytest.fixture
def on_seeds(make_pool, make_driver):
    """Runs a two-stream program with each seed's order of events: ``on_seeds(program)``, a list of its values.

    A control must be caught by the checker of orders, whatever the order of events; then it runs unchecked.
    """

    def run(program, *, control=False):
        found = []
        for seed in SEEDS:
            pool = make_pool(driver=make_driver(scheduler="adversarial", seed=seed, check_order=not control))
            found.append(program(pool))
            pool.driver.checks = False  # what a broken program left queued may touch anything
        if control:
            pool = make_pool(driver=make_driver(scheduler="adversarial"))
            with pytest.raises(ContractError, match="not ordered"):
                program(pool)
            pool.driver.checks = False
        return found

    return run


def test_g5_two_streams_with_their_own_scratch_are_right_whatever_the_order(on_seeds):
    def program(pool):
        def launch(number, x, w, y):
            convolution.prepare(pool.internals, (x, w), y, {}).launch(pool.internals.slot())

        return convolve_on_two_streams(pool.driver, launch)

    assert all(on_seeds(program))


def test_g5_two_streams_with_get_workspace_are_right_whatever_the_order(on_seeds):
    def program(pool):
        def launch(number, x, w, y):
            executable = compiled(pool, x, w)
            scratch = pool.get_workspace(executable.workspace_size)
            executable.launch(pool.get_handle(), (x, w, y), address(pool, scratch))

        return convolve_on_two_streams(pool.driver, launch)

    assert all(on_seeds(program))


def test_g5_control_two_streams_with_one_workspace_are_wrong_at_some_seeds(on_seeds):
    def program(pool):
        def launch(number, x, w, y):
            executable = compiled(pool, x, w)
            shared = pool.internals.slot(pool.driver.legacy_stream).reserve(executable.workspace_size)
            executable.launch(pool.get_handle(), (x, w, y), shared)

        return convolve_on_two_streams(pool.driver, launch)

    assert not all(on_seeds(program, control=True))


def test_g5_control_a_cache_keyed_by_device_alone_is_wrong_at_some_seeds(on_seeds):
    """One handle and one workspace for all streams of a device, even where cudnnSetStream is not forgotten."""

    def program(pool):
        driver = pool.driver
        handle = driver.create_handle()
        scratch = []

        def launch(number, x, w, y):
            executable = compiled(pool, x, w)
            if not scratch:
                scratch.append(driver.allocate(executable.workspace_size))
            driver.bind_handle(handle, driver.current_stream().ptr)
            executable.launch(handle, (x, w, y), scratch[0])

        return convolve_on_two_streams(driver, launch)

    assert not all(on_seeds(program, control=True))


def test_g5_control_a_handle_that_is_not_bound_to_the_stream_is_wrong_at_some_seeds(on_seeds):
    def program(pool):
        first = []

        def launch(number, x, w, y):
            first.append(pool.internals.slot())  # keyed by device alone: whatever stream came first
            call = convolution.prepare(pool.internals, (x, w), y, {})
            call.launch(first[0])

        return convolve_on_two_streams(pool.driver, launch)

    assert not all(on_seeds(program, control=True))


# Two blocks a slot


def caller_scratch_survives(pool, launch):
    driver = pool.driver
    with driver.create_stream() as stream:
        x, w = driver.asarray(IMAGES[0]), driver.asarray(FILTERS[0])
        executable = compiled(pool, x, w)
        scratch = pool.get_workspace(executable.workspace_size)
        write(pool, stream, scratch, 7)
        launch(executable, scratch, x, w)
        seen = []
        driver.enqueue(stream.ptr, lambda memory: seen.append((memory == 7).all()), reads=[scratch])
        stream.synchronize()
    return seen == [True]


def test_g5_what_get_workspace_gave_is_not_touched_by_our_own_launches(make_pool, scheduler):
    pool = make_pool(scheduler=scheduler)
    inside = pool.internals
    assert caller_scratch_survives(pool, lambda _, __, x, w: convolution.prepare(inside, (x, w), None, {}).launch(inside.slot()))


def test_g5_control_a_launch_in_the_callers_workspace_is_seen(make_pool, scheduler):
    pool = make_pool(scheduler=scheduler)

    def launch(executable, scratch, x, w):
        y = pool.driver.empty(EXPECTED[0].shape, (576, 144, 24, 4), np.float32)
        executable.launch(pool.get_handle(), (x, w, y), address(pool, scratch))

    assert not caller_scratch_survives(pool, launch)


def test_g5_get_workspace_never_overlaps_reserved_scratch_however_either_grows(make_pool):
    pool = make_pool()
    slot = pool.internals.slot()
    for nbytes in (100, 5000, 300, 20000, 20000):
        start = slot.reserve(nbytes)
        mine = pool.get_workspace(nbytes + 1)
        assert not overlap(span(pool, mine), range(start, start + nbytes))
        assert slot.reserve(nbytes) == start


# Growth


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 100_000])
def test_g5_a_workspace_has_the_size_asked_for_and_is_aligned(make_pool, nbytes):
    pool = make_pool()
    scratch = pool.get_workspace(nbytes)
    assert (scratch.shape, scratch.dtype) == ((nbytes,), np.uint8)
    assert nbytes == 0 or address(pool, scratch) % 256 == 0
    assert pool.stats()["scratch_bytes"] == -(-nbytes // 256) * 256


def test_g5_0_bytes_are_legal_at_any_time(make_pool):
    pool = make_pool()
    with pool.driver.create_stream():
        for nbytes in (0, 1000, 0):
            assert pool.get_workspace(nbytes).shape == (nbytes,)
    assert pool.internals.slot().reserve(0) == 0


@pytest.mark.parametrize("nbytes", [-1, -(1 << 40), 1.5, 256.0, "256", None])
def test_g5_a_size_that_is_none_is_refused(make_pool, nbytes):
    pool = make_pool()
    kept = pool.get_workspace(np.int64(100))
    with pytest.raises(ArgumentError, match=f"workspace nbytes={nbytes!r}; it must be an integer, 0 bytes or more"):
        pool.get_workspace(nbytes)
    assert address(pool, pool.get_workspace(100)) == address(pool, kept)
    assert pool.stats()["scratch_bytes"] == 256


def test_g5_scratch_only_grows_and_is_the_drivers_own_allocation(make_pool):
    pool = make_pool()
    large = pool.get_workspace(5000)
    assert (pool.driver.calls["allocate"], pool.driver.calls["empty"]) == (1, 0)
    small = pool.get_workspace(10)
    assert address(pool, small) == address(pool, large)
    assert pool.stats()["scratch_bytes"] == 5120
    pool.get_workspace(5121)
    pool.trim()
    assert pool.stats()["scratch_bytes"] == 5376


def test_g5_scratch_of_exactly_the_size_is_used_again(make_pool):
    pool = make_pool()
    size = 1024  # which no rounding makes larger
    slot = pool.internals.slot()
    for take in (pool.get_workspace, slot.reserve):
        take(size)
        allocated = pool.driver.calls["allocate"]
        for _ in range(3):
            take(size)
        assert pool.driver.calls["allocate"] == allocated


def test_g5_a_workspace_is_the_callers_whatever_other_keys_do(make_pool, in_thread):
    pool = make_pool()
    mine = pool.get_workspace(1000)
    write(pool, pool.driver.legacy_stream, mine, 7)
    with pool.driver.create_stream():
        pool.get_workspace(100_000)
    pool.get_workspace(100_000, 2)
    in_thread(pool.get_workspace, 100_000)
    with pool.driver.device(1):
        pool.get_workspace(100_000)
    pool.get_handle()
    pool.trim()
    assert (mine == 7).all()


def test_g5_growth_copies_nothing(make_pool):
    pool = make_pool()
    write(pool, pool.driver.legacy_stream, pool.get_workspace(100), 7)
    assert (pool.get_workspace(1000) == 0xFF).all()  # the host driver's mark of fresh memory


def test_g5_growth_leaves_the_old_block_to_its_stream_and_does_not_wait(make_pool, scheduler):
    pool = make_pool(scheduler=scheduler)
    driver = pool.driver
    stream = driver.create_stream()
    old = pool.get_workspace(1000, stream)
    latch = driver.latch(stream.ptr)
    write(pool, stream, old, 7)
    new = pool.get_workspace(5000, stream)  # would never return if it waited
    pool.internals.release_left()
    assert driver.calls["free"] == 0
    assert pool.stats()["scratch_bytes"] == 1024 + 5120
    assert not overlap(span(pool, old), span(pool, new))
    latch.release()
    stream.synchronize()  # raises if the old block was gone when it was written
    assert (old == 7).all()
    pool.internals.release_left()
    assert driver.calls["free"] == 1
    assert pool.stats()["scratch_bytes"] == 5120


def test_g5_control_freeing_the_old_block_at_once_waits_for_its_stream(make_driver, scheduler):
    driver = make_driver(scheduler=scheduler)
    stream, pointer = driver.create_stream(), driver.allocate(1000)
    latch = driver.latch(stream.ptr)
    driver.enqueue(stream.ptr, lambda memory: memory.fill(7), writes=[driver.scratch_array(pointer, 1000, None)])
    with pytest.raises(ContractError, match="would never end"):
        driver.free(pointer)
    latch.release()


def test_g5_a_workspace_lives_on_while_only_another_stream_has_passed(make_pool):
    pool = make_pool()
    driver = pool.driver
    stream, other = driver.create_stream(), driver.create_stream()
    old = pool.get_workspace(1000, stream)
    latch = driver.latch(stream.ptr)
    write(pool, stream, old, 7)
    pool.get_workspace(5000, stream)
    pool.get_workspace(1000, other)
    other.synchronize()
    pool.internals.release_left()
    assert driver.calls["free"] == 0
    latch.release()
    stream.synchronize()


def test_g5_the_scratch_of_a_destroyed_stream_is_freed_only_when_its_work_has_run(make_pool):
    for seed in range(30):
        pool = make_pool(scheduler="adversarial", seed=seed)
        stream = pool.driver.create_stream()
        scratch = pool.get_workspace(1000, stream)
        for value in range(5):
            write(pool, stream, scratch, value)
        seen = []
        pool.driver.enqueue(stream.ptr, lambda memory, seen=seen: seen.append(memory.copy()), reads=[scratch])
        del stream
        pool.internals.release_left()  # the host driver raises where queued work touches freed memory
        assert (seen[0] == 4).all()
        assert pool.stats()["scratch_bytes"] == 0


def test_g5_a_failure_while_growing_leaves_the_old_block_and_loses_nothing(make_pool):
    for method in ("allocate", "create_event", "record_event"):
        pool = make_pool()
        stream = pool.driver.create_stream()
        old = pool.get_workspace(1000, stream)
        pool.driver.fail_at(1, method)
        with pytest.raises(RuntimeError, match="injected"):
            pool.get_workspace(5000, stream)
        assert pool.stats()["scratch_bytes"] == 1024, method
        assert address(pool, pool.get_workspace(1000, stream)) == address(pool, old)
        pool.get_workspace(5000, stream)
        pool.close()
        assert pool.driver.memory_info()[0] == pool.driver.memory_info()[1], method


def test_g5_two_threads_that_collect_at_a_time_free_each_block_once(make_pool, in_thread):
    """One has asked for the first block when the other takes the second."""
    pool = make_pool()
    driver = pool.driver
    with driver.create_stream() as stream:
        for size in (1000, 2000, 3000):
            pool.get_workspace(size)
        stream.synchronize()
        done = driver.event_done

        def meanwhile(event):
            driver.event_done = done
            in_thread(pool.internals.release_left)
            return done(event)

        driver.event_done = meanwhile
        pool.internals.release_left()
    assert driver.calls["free"] == 2
    assert pool.stats()["scratch_bytes"] == 3072
