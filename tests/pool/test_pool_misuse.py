"""Misuse of a pool: a typed error that names the value and the remedy, after which everything goes on."""

import functools

import numpy as np
import pytest
from harness.uses import EFFECTS, STREAMS, assert_usable, calls

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
        (
            Speaks((1, 7)),
            r"<a stream of tomorrow> speaks version 1 of the protocol; .* version 0. Pass the stream.s cudaStream_t",
        ),
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


def test_a_handle_that_its_caller_destroyed_is_replaced_for_a_pointer_and_after_a_threads_death_and_counted_once(
    make_pool, in_thread
):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.driver.destroy_handle(pool.get_handle(stream.ptr))
    pool.driver.use_handle(pool.get_handle(stream.ptr), int)
    in_thread(lambda: pool.driver.destroy_handle(pool.get_handle()))
    pool.driver.use_handle(pool.get_handle(), int)
    pool.close()
    stats = pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"] == 4


def test_a_handle_that_its_caller_bound_elsewhere_is_bound_back(make_pool):
    pool = make_pool()
    here, elsewhere = pool.driver.create_stream(), pool.driver.create_stream()
    handle = pool.get_handle(here)
    pool.driver.bind_handle(handle, elsewhere.ptr)
    assert pool.get_handle(here) is handle
    assert handle.stream is here.ptr
    pool.driver.use_handle(handle, int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scratch_limit": -1}, "scratch_limit=-1; it must be an integer, 0 bytes or more"),
        ({"idle_limit": -1}, "idle_limit=-1; it must be an integer, 0 handles or more"),
        *(({"plan_limit": n}, f"plan_limit={n}; it must be an integer, 1 plan or more") for n in (0, -1)),
    ],
)
def test_a_pool_is_not_made_with_limits_that_mean_nothing_nor_with_positional_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        HandlePool(driver="host", **options)
    with pytest.raises(TypeError, match="positional"):
        HandlePool("host")


@pytest.mark.parametrize("options", [{"states": -1}, {"workspace": -1}])
def test_prewarm_refuses_negative_numbers(make_pool, options):
    pool = make_pool()
    with pytest.raises(ArgumentError, match=r"prewarm: .*=-1; it must be an integer, 0"):
        pool.prewarm(**options)
    assert_usable(pool)


def test_the_driver_of_a_pool_that_checks_is_a_driver(make_pool):
    pool = make_pool(check=True)
    with HandlePool(driver=pool.driver) as other:
        assert other.get_handle() is not pool.get_handle()


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
def test_what_is_no_pool_is_refused(make_pool, make_default, function, pool):
    make_default(make_pool())
    with pytest.raises(ArgumentError, match=r"was given pool=.*; pass a HandlePool, or None for the default pool"):
        TAKE_A_POOL[function](pool)
