"""Prewarm, trim, stats and repr of a pool; closing; the module's functions."""

import contextlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from harness.accounts import RESTORES
from harness.uses import STREAMS, assert_usable, calls

from handlepool import ArgumentError, HandlePool, HandlePoolError, ParallelStates, PoolClosedError, conv2d
from handlepool.pool.deferred import deferred
from handlepool.pool.stats import MEANINGS

# Prewarm, trim, stats, repr


def test_prewarm_makes_what_first_calls_would_make(make_pool):
    pool = make_pool()
    pool.prewarm(states=3, workspace=1000)
    created = pool.stats()
    assert created["handles_created"] == 4
    assert created["scratch_bytes"] == 4 * 1024
    pool.driver.calls.clear()
    ParallelStates(3, pool=pool).map(lambda _: pool.internals.slot().reserve(1000), range(3))
    pool.internals.slot().reserve(1000)
    assert not {"create_handle", "create_stream", "allocate"} & pool.driver.calls.keys()
    assert pool.stats() == created


def test_prewarm_makes_no_more_side_slots_than_there_may_be_and_serves_the_stream_that_is_passed(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.prewarm(states=40, stream=stream)
    assert pool.stats()["handles_created"] == 33
    assert calls(pool.driver, pool.get_handle, stream) == {"current_device": 1}


def test_trim_gives_back_what_is_idle_and_leaves_what_is_owned(make_pool, in_thread):
    pool = make_pool()
    handle, scratch = pool.get_handle(), pool.get_workspace(1000)
    in_thread(pool.get_workspace, 1000)
    pool.prewarm(states=2)
    pool.trim()
    stats = pool.stats()
    assert (stats["handles_live"], stats["handles_idle"], stats["scratch_bytes"]) == (1, 0, 1024)
    assert stats["handles_destroyed"] == 3
    assert pool.get_handle() is handle
    assert pool.driver.array_pointer(pool.get_workspace(1000)) == pool.driver.array_pointer(scratch)
    assert_usable(pool)


def test_the_idle_limit_bounds_the_handles_kept(make_pool):
    pool = make_pool(idle_limit=2)
    streams = [pool.driver.create_stream() for _ in range(6)]
    for stream in streams:
        pool.get_handle(stream)
    del stream
    streams.clear()
    pool.internals.release_left()
    stats = pool.stats()
    assert (stats["handles_live"], stats["handles_idle"], stats["handles_destroyed"]) == (0, 2, 4)


def test_an_idle_limit_of_0_keeps_none(make_pool, in_thread):
    pool = make_pool(idle_limit=0)
    in_thread(pool.get_workspace, 1000)
    pool.internals.release_left()
    assert pool.stats()["handles_idle"] == 0
    assert pool.stats()["scratch_bytes"] == 0
    assert_usable(pool)


def test_stats_have_flat_names_and_integers(make_pool):
    pool = make_pool()
    pool.get_workspace(1)
    stats = pool.stats()
    assert sorted(stats) == list(MEANINGS)
    assert {type(value) for value in stats.values()} == {int}


def test_stats_of_a_device_and_of_all_together(make_pool):
    pool = make_pool()
    for device in (0, 1):
        with pool.driver.device(device):
            pool.get_workspace(300 * (device + 1))
    assert (pool.stats(0)["scratch_bytes"], pool.stats(1)["scratch_bytes"], pool.stats()["scratch_bytes"]) == (512, 768, 1280)
    assert (pool.stats(0)["handles_live"], pool.stats()["handles_live"]) == (1, 2)
    assert not any(pool.stats(7).values())


def test_plans_are_counted_for_the_device_that_they_were_built_for(make_pool):
    with make_pool(plan_limit=1) as pool:
        with pool.driver.device(1):
            for size in (4, 5):
                x = pool.driver.asarray(np.ones((1, 4, size, size), np.float32))
                conv2d(x, pool.driver.asarray(np.ones((4, 4, 3, 3), np.float32)), pool=pool)
        found = [[pool.stats(device)[f"plans_{name}"] for name in ("built", "cached", "evicted")] for device in (0, 1, None)]
        assert found == [[0, 0, 0], [2, 1, 1], [2, 1, 1]]
        assert pool.stats(1)["plan_build_microseconds"] == pool.stats()["plan_build_microseconds"] > 0


@pytest.mark.parametrize("device", [-1, "x", 1.5])
def test_stats_of_what_is_no_device_are_refused(make_pool, device):
    with pytest.raises(ArgumentError, match="stats: device"):
        make_pool().stats(device)


def test_two_snapshots_can_be_subtracted(make_pool):
    pool = make_pool()
    empty = pool.stats()
    pool.get_handle()
    before = pool.stats()
    pool.get_handle(pool.driver.per_thread_stream)
    pool.driver.destroy_handle(pool.get_handle())
    pool.get_handle()
    difference = pool.stats() - before
    assert {name: value for name, value in difference.items() if value and name != "create_microseconds"} == {
        "handles_created": 2,
        "handles_destroyed": 1,
        "handles_live": 1,
        "handles_peak": 1,
        "handles_rebound": 1,
        "handles_repaired": 1,
    }
    assert (before - empty)["handles_created"] == 1


def test_reprs_say_what_is_held(make_pool, in_thread):
    pool = HandlePool(driver="host")
    assert repr(pool) == "<HandlePool driver not loaded>"
    pool.close()
    pool = make_pool()
    with pool.driver.device(1):
        pool.prewarm(states=2)
    pool.get_workspace(1_000_000)
    assert repr(pool) == (
        "<HandlePool host, device 0: 1 live, 0 idle, 0 leased handles, 1,000,192 bytes of scratch; "
        "device 1: 1 live, 2 idle, 0 leased handles, 0 bytes of scratch>"
    )
    assert repr(pool.internals.slot()) == "<Slot device=0 stream=0x0 scratch=1,000,192 bytes>"
    pool.close()
    assert repr(pool) == "<HandlePool host, closed>"


# Closing


def test_close_destroys_the_handles_and_frees_the_scratch_and_is_idempotent(make_pool, in_thread):
    pool = make_pool()
    handles = [pool.get_handle(), pool.get_handle(pool.driver.create_stream())]
    in_thread(pool.get_workspace, 1000)
    pool.get_workspace(1000)
    pool.prewarm(states=2, workspace=1000)
    pool.close()
    assert [handle.backend_handle for handle in handles] == [None, None]
    stats = pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"]
    assert (stats["handles_live"], stats["handles_idle"], stats["scratch_bytes"]) == (0, 0, 0)
    free, total = pool.driver.memory_info()
    assert free == total
    assert not calls(pool.driver, pool.close)
    assert pool.closed


def test_a_close_that_fails_at_any_call_of_the_driver_is_finished_by_the_next(make_driver):
    failed = 0
    for k in itertools.count(1):
        driver = make_driver()
        pool = HandlePool(driver=driver)
        pool.get_workspace(1000)
        pool.prewarm(states=2, workspace=1000)
        first, second = driver.create_stream(), driver.create_stream()
        # This leaves a free event in the pool.
        pool.internals.device(0).edges.order(first.ptr, second.ptr)
        injected = RuntimeError("injected")
        driver.fail_at(k, None, injected, RESTORES)
        with contextlib.suppress(RuntimeError):
            pool.close()
        driver.fail_at(0)
        # A later call of the thread destroys the rest as well.
        with pytest.raises(PoolClosedError):
            pool.get_handle()
        pool.close()
        deferred.run(1000)
        alive = driver.alive()
        assert (alive["handles"], alive["events"], alive["scratch_bytes"]) == (0, 0, 0), f"call {k} failed"
        if injected.__traceback__ is None:
            break
        failed += 1
    assert failed > 5


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        HandlePool.get_handle,
        lambda pool: pool.get_handle(0),
        lambda pool: pool.get_workspace(100),
        HandlePool.prewarm,
        HandlePool.trim,
        lambda pool: ParallelStates(2, pool=pool).map(abs, [1]),
        lambda pool: ParallelStates(2, pool=pool).with_state(0, lambda state: state),
    ],
    ids=["get_handle", "get_handle(0)", "get_workspace", "prewarm", "trim", "map", "with_state"],
)
def test_a_closed_pool_says_so_to_whatever_uses_it(make_driver, make_pool, use, used):
    driver = make_driver()
    pool = make_pool(driver=driver)
    if used:
        use(pool)
    pool.close()
    with pytest.raises(PoolClosedError, match=r"<HandlePool .*closed> was closed; make a new HandlePool"):
        use(pool)
    assert_usable(make_pool(driver=driver))


def test_a_with_statement_closes_also_after_an_exception(make_driver):
    with pytest.raises(HandlePoolError), HandlePool(driver=make_driver()) as pool:
        pool.get_workspace(-1)
    assert pool.closed


def test_a_pool_may_be_closed_by_another_thread_than_its_users(make_pool, in_thread):
    pool = make_pool()
    handle = pool.get_handle()
    in_thread(pool.close)
    assert handle.backend_handle is None
    with pytest.raises(PoolClosedError):
        pool.get_handle()


def test_threads_and_streams_that_end_after_the_close_do_no_harm(make_pool, in_thread):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.get_workspace(100, stream)

    def use_close_and_die():
        pool.get_workspace(100)
        pool.close()

    in_thread(use_close_and_die)
    del stream
    assert pool.stats()["handles_created"] == pool.stats()["handles_destroyed"]


@pytest.mark.parametrize("kind", STREAMS)
def test_two_pools_on_one_stream_keep_apart(make_pool, kind):
    first = make_pool()
    second = make_pool(driver=first.driver)
    with STREAMS[kind](first.driver):
        one, other = first.get_handle(), second.get_handle()
        assert one is not other
        for _ in range(2):
            assert (first.get_handle(), second.get_handle()) == (one, other)
        first.close()
        assert second.get_handle() is other
        assert_usable(second)


# The module's functions


def test_the_modules_functions_are_those_of_one_default_pool():
    program = """
import threading, handlepool
pools = []
threads = [threading.Thread(target=lambda: pools.append(handlepool.default_pool())) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
pool = handlepool.default_pool()
assert len(pools) == 8 and {id(p) for p in pools} == {id(pool)}, pools
assert handlepool.get_handle() is pool.get_handle()
assert handlepool.get_handle.__code__ is pool.get_handle.__code__
assert handlepool.get_workspace(100).nbytes == 100
handlepool.prewarm(states=2)
assert handlepool.stats()["handles_created"] == 3
handlepool.trim()
print(pool)
"""
    environment = os.environ | {"HANDLEPOOL_DRIVER": "host"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "<HandlePool host, device 0: 1 live, 0 idle, 0 leased handles, 256 bytes of scratch>\n", done.stderr


def test_a_closed_pool_leaves_nothing_on_streams_that_live_on(make_pool):
    pool = make_pool()
    streams = [pool.driver.current_stream(), pool.driver.create_stream()]
    before = [set(vars(stream)) for stream in streams]
    for stream in streams:
        pool.get_handle(stream)
    assert [set(vars(stream)) for stream in streams] != before
    pool.close()
    assert [set(vars(stream)) for stream in streams] == before
