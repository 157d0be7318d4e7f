"""The pool: what a hit costs, devices, misuse, accounts, closing. Guarantees 2 and 3."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from handlepool import (
    ArgumentError,
    DeviceMismatchError,
    HandlePool,
    HandlePoolError,
    ParallelStates,
    PoolClosedError,
    StreamError,
)

ASKING = {"current_device", "current_stream", "owns_stream"}
"""Driver calls that touch neither CUDA nor cuDNN, beside asking CuPy for the current device and stream."""

EFFECTS = {"create_handle", "create_stream", "create_event", "bind_handle", "record_event", "wait_event", "allocate", "launch"}

STREAMS = {
    "null": lambda driver: driver.legacy_stream,
    "per-thread": lambda driver: driver.per_thread_stream,
    "owned": lambda driver: driver.create_stream(),
}


class Foreign:
    """Another library's stream."""

    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, self.stream.ptr


FOREIGN = {
    "pointer": lambda driver, stream: stream.ptr,
    "wrapper": lambda driver, stream: driver.wrap_stream(stream.ptr, stream),
    "protocol": lambda driver, stream: Foreign(stream),
}


def calls(driver, function, *args):
    driver.calls.clear()
    function(*args)
    return Counter({name: count for name, count in driver.calls.items() if count})


def fails_at(k, driver, function, *args):
    """Call with the k-th driver call failing; False when there were fewer calls."""
    error = RuntimeError(f"injected failure of call {k}")
    driver.fail_at(k, error=error)
    try:
        function(*args)
    except (RuntimeError, HandlePoolError):  # itself, or what the pool made of it
        pass
    driver.fail_at(0)
    return error.__traceback__ is not None


def assert_usable(pool):
    """Handle, scratch and a fork work on the caller's stream, which is in order."""
    driver = pool.driver
    ran = []
    driver.use_handle(pool.get_handle(), lambda: ran.append("handle"))
    assert pool.get_workspace(1000).shape == (1000,)
    ParallelStates(2, pool=pool).map(lambda i: driver.use_handle(pool.get_handle(), lambda: ran.append(i)), range(2))
    driver.synchronize_stream(driver.current_stream().ptr)
    assert ran[0] == "handle"
    assert set(ran[1:]) == {0, 1}


# Guarantee 2: bound once


@pytest.mark.parametrize("kind", STREAMS)
def test_g2_a_hit_asks_for_the_device_and_the_current_stream_and_no_more(make_pool, kind):
    pool = make_pool()
    with STREAMS[kind](pool.driver):
        handle = pool.get_handle()
        assert calls(pool.driver, pool.get_handle) == {"current_device": 1, "current_stream": 1}
        assert pool.get_handle() is handle


def test_g2_a_hit_for_a_stream_object_asks_for_the_device_alone(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    handle = pool.get_handle(stream)
    assert calls(pool.driver, pool.get_handle, stream) == {"current_device": 1}
    assert pool.get_handle(stream) is handle


def test_g2_streams_that_take_turns_are_each_bound_once(make_pool):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(3)]
    pool.driver.calls.clear()
    for _ in range(5):
        for stream in streams:
            with stream:
                assert pool.get_handle().stream is stream.ptr
    assert pool.driver.calls["bind_handle"] == 3


@pytest.mark.parametrize("kind", FOREIGN)
def test_g2_a_hit_for_a_foreign_stream_costs_one_capture_query_and_one_id_read(make_pool, kind):
    pool = make_pool()
    stream = pool.driver.create_stream()
    foreign = FOREIGN[kind](pool.driver, stream)
    handle = pool.get_handle(foreign)
    made = calls(pool.driver, pool.get_handle, foreign)
    assert {name: count for name, count in made.items() if name not in ASKING} == {"capture_id": 1, "stream_id": 1}
    assert pool.get_handle(foreign) is handle


@pytest.mark.parametrize("kind", ["owned", "per-thread"])
def test_g2_a_hit_of_get_workspace_adds_a_capture_query(make_pool, kind):
    pool = make_pool()
    with STREAMS[kind](pool.driver):
        pool.get_workspace(1000)
        made = calls(pool.driver, pool.get_workspace, 1000)
    assert made == {"current_device": 1, "current_stream": 1, "capture_id": 1, "scratch_array": 1}


def test_g2_control_a_miss_is_seen_by_the_count(make_pool):
    pool = make_pool()
    assert {"create_handle", "bind_handle"} <= calls(pool.driver, pool.get_handle).keys()


# Guarantee 3: right device


@pytest.mark.parametrize("kind", STREAMS)
def test_g3_handles_are_made_and_bound_on_their_own_device(make_pool, kind):
    pool = make_pool(devices=3)
    seen = []
    for _ in range(2):
        for device in (2, 0, 1):
            with pool.driver.device(device), STREAMS[kind](pool.driver):
                handle = pool.get_handle()
                pool.driver.use_handle(handle, int)  # the host driver checks device and stream
                seen.append((handle.device, pool.slot().device))
    assert seen == [(2, 2), (0, 0), (1, 1)] * 2


def test_g3_the_null_stream_has_a_handle_on_each_device_and_keeps_it(make_pool):
    pool = make_pool()
    handles = []
    for _ in range(3):
        for device in (0, 1):
            with pool.driver.device(device):
                handles.append(pool.get_handle())
    assert handles == handles[:2] * 3
    assert pool.stats()["handles_created"] == 2


def test_g3_workspaces_are_of_their_own_device(make_pool):
    pool = make_pool()
    for device in (0, 1):
        with pool.driver.device(device):
            assert pool.driver.array_device(pool.get_workspace(100)) == device
    assert pool.stats(0)["scratch_bytes"] == pool.stats(1)["scratch_bytes"] == 256


@pytest.mark.parametrize("ask", [HandlePool.get_handle, lambda pool, stream: pool.get_workspace(100, stream)])
@pytest.mark.parametrize("kind", ["owned", *FOREIGN])
def test_g3_a_stream_of_another_device_is_refused_before_anything_happens(make_pool, kind, ask):
    pool = make_pool()
    with pool.driver.device(1):
        stream = pool.driver.create_stream()
    passed = stream if kind == "owned" else FOREIGN[kind](pool.driver, stream)
    pool.driver.calls.clear()
    with pytest.raises(
        DeviceMismatchError, match=r"belongs to device 1 and the current device is 0; make device 1 current"
    ) as info:
        ask(pool, passed)
    assert repr(passed) in str(info.value)
    assert not EFFECTS & pool.driver.calls.keys()
    assert pool.driver.current_device() == 0
    assert_usable(pool)


def test_g3_a_stream_that_was_hot_on_its_device_is_still_refused_on_another(make_pool):
    pool = make_pool()
    with pool.driver.device(1):
        stream = pool.driver.create_stream()
        handle = pool.get_handle(stream)
    with pytest.raises(DeviceMismatchError):
        pool.get_handle(stream)
    with pytest.raises(DeviceMismatchError):
        pool.get_handle(stream.ptr)
    with pool.driver.device(1):
        assert pool.get_handle(stream) is handle


def leave_behind_on_device_1(pool, in_thread):
    """A dead thread's slot with scratch, a dead stream's slot with scratch, and free side slots, all of device 1."""
    driver = pool.driver

    def use():
        with driver.device(1):
            pool.get_workspace(1000)

    in_thread(use)
    with driver.device(1):
        with driver.create_stream():
            pool.get_workspace(1000)
        pool.prewarm(states=2, workspace=1000)


@pytest.mark.parametrize("call", [HandlePool.trim, HandlePool.close, HandlePool.get_handle, HandlePool.drain])
def test_g3_what_another_device_left_behind_is_taken_back_there_and_the_caller_stays(make_pool, in_thread, call):
    pool = make_pool()
    leave_behind_on_device_1(pool, in_thread)
    with pool.driver.create_stream() as stream:
        call(pool)  # the host driver refuses handles and memory of another device than the current one
        assert pool.driver.current_device() == 0
        assert pool.driver.current_stream() is stream


@pytest.mark.parametrize("call", [HandlePool.trim, HandlePool.close, HandlePool.get_handle])
def test_g3_the_callers_device_and_stream_are_left_as_they_were_whatever_fails(make_pool, in_thread, call):
    k, failed = 0, True
    while failed:
        k += 1
        pool = make_pool()
        leave_behind_on_device_1(pool, in_thread)
        with pool.driver.create_stream() as stream:
            failed = fails_at(k, pool.driver, call, pool)
            assert (pool.driver.current_device(), pool.driver.current_stream()) == (0, stream)
    assert k > 5


# Misuse: a typed error that names the value and the remedy, after which everything goes on


class Speaks:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer

    def __repr__(self):
        return "<a stream of tomorrow>"


class HasProperty:
    def __init__(self, pointer):
        self.__cuda_stream__ = (0, pointer)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("stream 1", r"'stream 1' is no stream: str has no __cuda_stream__; pass a stream of CuPy, torch"),
        (True, r"True is no stream; pass a stream object"),
        (False, r"False is no stream; pass a stream object"),
        (-5, r"-5 is no cudaStream_t"),
        (2.0, r"2.0 is no stream: float has no __cuda_stream__"),
        (Speaks((1, 7)), r"<a stream of tomorrow> speaks version 1 of the protocol; .* version 0. Pass the pointer"),
        (Speaks(7), r"<a stream of tomorrow> gave 7, not \(version, pointer\)"),
        (Speaks((0, 1, 2)), r"gave \(0, 1, 2\), not \(version, pointer\)"),
        (Speaks((0, "7")), r"gave the pointer '7', which is no integer"),
        (Speaks((0, True)), r"gave the pointer True, which is no integer"),
        (Speaks((0, -7)), r"-7 is no cudaStream_t"),
    ],
)
@pytest.mark.parametrize("ask", [HandlePool.get_handle, lambda pool, stream: pool.get_workspace(100, stream)])
def test_what_is_no_stream_is_refused(make_pool, value, message, ask):
    pool = make_pool()
    with pytest.raises(StreamError, match=message) as info:
        ask(pool, value)
    assert isinstance(info.value, TypeError)
    assert not EFFECTS & pool.driver.calls.keys()
    assert_usable(pool)


def test_the_protocol_may_be_a_property(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    assert pool.get_handle(HasProperty(stream.ptr)) is pool.get_handle(stream.ptr)


def test_an_error_of_a_streams_own_protocol_is_passed_on(make_pool):
    class Broken:
        def __cuda_stream__(self):
            raise LookupError("this stream was closed")

    pool = make_pool()
    with pytest.raises(LookupError, match="this stream was closed"):
        pool.get_handle(Broken())
    assert_usable(pool)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_handle_that_its_caller_destroyed_is_replaced_and_bound(make_pool, kind):
    pool = make_pool()
    with STREAMS[kind](pool.driver) as stream:
        old = pool.get_handle()
        pool.driver.destroy_handle(old)
        new = pool.get_handle()
        assert new is not old
        assert new.stream is stream.ptr
        assert calls(pool.driver, pool.get_handle) == {"current_device": 1, "current_stream": 1}
        assert_usable(pool)
    assert pool.stats()["handles_repaired"] == 1


def test_a_foreign_streams_handle_that_its_caller_destroyed_is_replaced(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.driver.destroy_handle(pool.get_handle(stream.ptr))
    pool.driver.use_handle(pool.get_handle(stream.ptr), int)


def test_a_handle_that_its_caller_bound_elsewhere_is_bound_back(make_pool):
    pool = make_pool()
    here, elsewhere = pool.driver.create_stream(), pool.driver.create_stream()
    handle = pool.get_handle(here)
    pool.driver.bind_handle(handle, elsewhere.ptr)
    assert pool.get_handle(here) is handle
    assert handle.stream is here.ptr
    pool.driver.use_handle(handle, int)


def test_a_handle_destroyed_by_a_thread_that_then_died_is_not_handed_out_again(make_pool, in_thread):
    pool = make_pool()
    in_thread(lambda: pool.driver.destroy_handle(pool.get_handle()))
    pool.driver.use_handle(pool.get_handle(), int)


def test_a_destroyed_handle_is_counted_once(make_pool):
    pool = make_pool()
    pool.driver.destroy_handle(pool.get_handle())
    pool.get_handle()
    pool.close()
    stats = pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scratch_limit": -1}, "scratch_limit=-1; it must be 0 bytes or more"),
        ({"idle_limit": -1}, "idle_limit=-1; it must be 0 handles or more"),
        ({"plan_limit": 0}, "plan limit of 0; it must be 1 or more"),
    ],
)
def test_a_pool_is_not_made_with_limits_that_mean_nothing(options, message):
    with pytest.raises(ArgumentError, match=message):
        HandlePool(driver="host", **options)


def test_a_pool_takes_keyword_arguments_only():
    with pytest.raises(TypeError, match="positional"):
        HandlePool("host")


@pytest.mark.parametrize("options", [{"states": -1}, {"workspace": -1}])
def test_prewarm_refuses_negative_numbers(make_pool, options):
    pool = make_pool()
    with pytest.raises(ArgumentError, match=r"prewarm\(.*-1.*must be 0 or more"):
        pool.prewarm(**options)
    assert_usable(pool)


def misses(pool):
    pool.get_handle(pool.driver.per_thread_stream)
    pool.get_workspace(2000)


def test_nothing_is_lost_or_broken_by_a_failure_at_any_call_of_a_miss(make_pool, in_thread):
    """Each driver call of a miss that grows scratch and takes in what a thread left fails once; the accounts stay right."""
    k, failed = 0, True
    while failed:
        k += 1
        pool = make_pool()
        stream = pool.driver.create_stream()
        in_thread(pool.get_workspace, 1000, stream)
        pool.get_workspace(1000)
        failed = fails_at(k, pool.driver, misses, pool)
        assert_usable(pool)
        pool.close()
        stats = pool.stats()
        assert stats["handles_created"] == stats["handles_destroyed"], k
        assert stats["scratch_bytes"] == 0, k
        assert pool.driver.memory_info()[0] == pool.driver.memory_info()[1], k
    assert k > 15


# Prewarm, trim, stats, repr


def test_prewarm_makes_what_first_calls_would_make(make_pool):
    pool = make_pool()
    pool.prewarm(states=3, workspace=1000)
    created = pool.stats()
    assert created["handles_created"] == 4
    assert created["scratch_bytes"] == 4 * 1024
    pool.driver.calls.clear()
    ParallelStates(3, pool=pool).map(lambda _: pool.slot().reserve(1000), range(3))
    pool.slot().reserve(1000)
    assert not {"create_handle", "create_stream", "allocate"} & pool.driver.calls.keys()
    assert pool.stats() == created


def test_prewarm_makes_no_more_side_slots_than_there_may_be(make_pool):
    pool = make_pool()
    pool.prewarm(states=40)
    assert pool.stats()["handles_created"] == 33


def test_prewarm_serves_the_stream_that_is_passed(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.prewarm(stream=stream)
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
    pool.drain()
    stats = pool.stats()
    assert (stats["handles_live"], stats["handles_idle"], stats["handles_destroyed"]) == (0, 2, 4)


def test_an_idle_limit_of_0_keeps_none(make_pool, in_thread):
    pool = make_pool(idle_limit=0)
    in_thread(pool.get_workspace, 1000)
    pool.drain()
    assert pool.stats()["handles_idle"] == 0
    assert pool.stats()["scratch_bytes"] == 0
    assert_usable(pool)


def test_stats_have_flat_names_and_integers(make_pool):
    pool = make_pool()
    pool.get_workspace(1)
    stats = pool.stats()
    assert set(stats) == {
        "create_microseconds",
        "handles_building",
        "handles_captured",
        "handles_created",
        "handles_destroyed",
        "handles_idle",
        "handles_leased",
        "handles_live",
        "handles_repaired",
        "handles_reused",
        "plans_built",
        "plans_cached",
        "scratch_bytes",
        "scratch_bytes_peak",
    }
    assert {type(value) for value in stats.values()} == {int}


def test_stats_of_a_device_and_of_all_together(make_pool):
    pool = make_pool()
    for device in (0, 1):
        with pool.driver.device(device):
            pool.get_workspace(300 * (device + 1))
    assert (pool.stats(0)["scratch_bytes"], pool.stats(1)["scratch_bytes"], pool.stats()["scratch_bytes"]) == (512, 768, 1280)
    assert (pool.stats(0)["handles_live"], pool.stats()["handles_live"]) == (1, 2)
    assert pool.stats(7).get("handles_live", 0) == 0


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
    assert repr(pool.slot()) == "<Slot device=0 stream=0x0 scratch=1,000,192 bytes>"
    pool.close()
    assert repr(pool) == "<HandlePool host, closed>"


# Closing


def test_close_destroys_the_handles_and_frees_the_scratch(make_pool, in_thread):
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


def test_close_is_idempotent(make_pool):
    pool = make_pool()
    pool.get_handle()
    pool.close()
    assert not calls(pool.driver, pool.close)
    assert pool.closed


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
names = ("close", "get_handle", "get_workspace", "prewarm", "stats", "trim")
pools = []
threads = [threading.Thread(target=lambda: pools.append(handlepool.get_handle.__self__)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
pool = handlepool.default_pool()
assert len(pools) == 8 and {id(p) for p in pools} == {id(pool)}, pools
for name in names:
    assert getattr(handlepool, name) == getattr(pool, name), name
assert handlepool.get_handle() is pool.get_handle()
assert handlepool.get_workspace(100).nbytes == 100
handlepool.prewarm(states=2)
assert handlepool.stats()["handles_created"] == 3
handlepool.trim()
handlepool.close()
try:
    handlepool.get_handle()
except handlepool.PoolClosedError:
    print("closed", pool)
"""
    environment = os.environ | {"HANDLEPOOL_DRIVER": "host"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "closed <HandlePool host, closed>\n", done.stderr
