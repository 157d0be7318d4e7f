"""Misuse of a pool: a typed error that names the value and the remedy, after which everything goes on."""

import functools

import numpy as np
import pytest
from harness.uses import EFFECTS, STREAMS, assert_usable, calls, fails_at

import handlepool
from handlepool import ArgumentError, HandlePool, ParallelStateExecutor, ParallelStates, StreamError
from handlepool.drivers.host.driver import HostDriver


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
        (True, "True is no stream: bool has no __cuda_stream__"),
        (False, "False is no stream: bool has no __cuda_stream__"),
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
        ({"scratch_limit": -1}, "scratch_limit=-1; it must be an integer, 0 bytes or more"),
        ({"idle_limit": -1}, "idle_limit=-1; it must be an integer, 0 handles or more"),
        ({"plan_limit": 0}, "plan_limit=0; it must be an integer, 1 plan or more"),
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
    with pytest.raises(ArgumentError, match=r"prewarm: .*=-1; it must be an integer, 0"):
        pool.prewarm(**options)
    assert_usable(pool)


CAN_FAIL = (
    "create_handle",
    "bind_handle",
    "allocate",
    "free",
    "create_event",
    "record_event",
    "event_done",
    "destroy_event",
)


def leave_behind_and_miss(pool, in_thread):
    """Takes in a dead stream's slot and a dead thread's, reuses one with its scratch, makes a new one, grows and collects."""
    driver = pool.driver
    lasting = driver.create_stream()
    with driver.create_stream():
        pool.get_workspace(1000)
    pool.get_workspace(1000)
    in_thread(pool.get_workspace, 1000, lasting)

    def misses():
        for stream in (driver.per_thread_stream, driver.create_stream(), lasting.ptr, lasting):
            pool.get_handle(stream)
            pool.get_workspace(2000, stream)
        pool.get_workspace(3000)
        pool.prewarm(states=1)
        pool.trim()

    return misses


@pytest.mark.parametrize("method", CAN_FAIL)
def test_nothing_is_lost_or_broken_by_any_call_that_fails(make_pool, in_thread, method):
    k, failed = 0, True
    while failed:
        k += 1
        pool = make_pool(idle_limit=1)
        failed = fails_at(k, pool.driver, leave_behind_and_miss(pool, in_thread), method=method)
        assert_usable(pool)
        pool.close()
        stats = pool.stats()
        assert stats["handles_created"] == stats["handles_destroyed"], k
        assert (stats["handles_live"], stats["handles_idle"], stats["scratch_bytes"]) == (0, 0, 0), k
        assert pool.driver.memory_info()[0] == pool.driver.memory_info()[1], k
    assert k > 1


@pytest.mark.parametrize("driver", [HostDriver, object(), 5, b"host", True])
def test_what_is_no_driver_is_refused(driver):
    with pytest.raises(ArgumentError, match=r"HandlePool\(driver=.*\): pass 'cuda', 'host', a driver object, or None"):
        HandlePool(driver=driver)


X, W = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
TAKE_A_POOL = {
    "ParallelStates": lambda pool: ParallelStates(2, pool=pool),
    "ParallelStateExecutor": lambda pool: ParallelStateExecutor(2, pool=pool),
    "record": lambda pool: handlepool.record(int, pool=pool),
    "conv2d": lambda pool: handlepool.conv2d(X, W, pool=pool),
    "relu": lambda pool: handlepool.ops.relu(X, pool=pool),
    "conv2d_input_grad": lambda pool: handlepool.ops.conv2d_input_grad(X, W, X.shape, padding=1, pool=pool),
    "in a branch": lambda pool: ParallelStates(2).map(functools.partial(handlepool.conv2d, pool=pool), [X], [W]),
}


@pytest.mark.parametrize("function", TAKE_A_POOL)
@pytest.mark.parametrize("pool", [5, "host", ParallelStates])
def test_what_is_no_pool_is_refused(make_pool, monkeypatch, function, pool):
    monkeypatch.setattr("handlepool.pool.default._default", make_pool())
    with pytest.raises(ArgumentError, match=r"was given pool=.*; pass a HandlePool, or None for the default pool"):
        TAKE_A_POOL[function](pool)
