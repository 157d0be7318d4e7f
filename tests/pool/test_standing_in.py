"""A pool may stand in for the default one while a test runs; what others keep meanwhile is left on the default pool."""

import threading

import numpy as np
import pytest
from harness.arrays import Arrays
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates, PoolClosedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import context
from handlepool.pool.default import substitute_default


@pytest.fixture
def other():
    """A pool to stand in, closed afterwards."""
    with HandlePool(driver=HostDriver()) as pool:
        yield pool


def test_what_is_asked_of_the_default_pool_is_asked_of_the_one_that_stands_in_and_afterwards_not(unused, other):
    default = handlepool.default_pool()
    mine = handlepool.get_handle()
    kept = default.get_handle
    with substitute_default(other):
        theirs = handlepool.get_handle()
        assert theirs is other.get_handle() is kept() is default.get_handle() is handlepool.get_handle()
        assert theirs is not mine
        assert handlepool.get_workspace(256).size == 256
        assert handlepool.stats() == other.stats()
        assert handlepool.default_pool() is default
    assert handlepool.get_handle() is kept() is mine
    assert other.get_handle() is theirs


def test_what_a_library_keeps_meanwhile_is_not_left_on_a_closed_pool(unused):
    with HandlePool(driver=HostDriver()) as other, substitute_default(other):
        states, executor, pool = ParallelStates(2), ParallelStateExecutor(2), handlepool.default_pool()
        get_handle = pool.get_handle
        with other.driver.create_stream():
            assert states.map(lambda _: handlepool.get_handle(), [0])[0] is not get_handle()
            assert executor.submit(int, 3).result() == 3
            assert handlepool.with_cudnn_state(0, lambda state: state.device) == 0
        assert other.stats()["handles_leased"] >= 1
        assert other.stats()["handles_created"] >= 3
    with pytest.raises(PoolClosedError):
        other.get_handle()
    with pool.driver.create_stream():
        assert states.map(int, [1, 2]) == [1, 2]
        assert executor.submit(int, 4).result() == 4
        assert handlepool.with_cudnn_state(0, lambda state: state.device) == 0
        assert pool.get_handle() is get_handle() is handlepool.get_handle()
    executor.shutdown()
    assert other.stats()["handles_leased"] == 0


def test_what_was_kept_before_uses_the_pool_that_stands_in(unused, other):
    states, executor = ParallelStates(2), ParallelStateExecutor(1)
    with handlepool.default_pool().driver.create_stream():
        executor.submit(int).result()
    with substitute_default(other), other.driver.create_stream():
        arrays = Arrays(other)
        x, w = arrays.random(1, 4, 6, 6), arrays.random(4, 4, 3, 3)
        outputs = [*states.map(handlepool.conv2d, [x, x], [w, w]), executor.submit(handlepool.conv2d, x, w).result()]
        assert all(np.array_equal(arrays.take(y), arrays.take(outputs[0])) for y in outputs)
        assert other.stats()["plans_built"] == 1
    assert handlepool.stats()["plans_built"] == 0
    executor.shutdown()


def test_a_branch_that_is_under_way_goes_on_with_its_own_pool(unused, other):
    default, begun, go_on = handlepool.default_pool(), threading.Event(), threading.Event()

    def branch():
        handlepool.get_handle()
        begun.set()
        assert go_on.wait(TIMEOUT)
        return context.thread.pool

    def work():
        with default.driver.create_stream():
            return ParallelStates(1).map(lambda _: branch(), [0])[0]

    internals = default.internals
    thread = Thread(work)
    assert begun.wait(TIMEOUT)
    with substitute_default(other):
        go_on.set()
        assert thread.finish() is internals
    assert default.internals is internals
    assert not context.branch_pools


def test_a_library_that_closes_the_default_pool_ends_nobodys(unused, other):
    with substitute_default(other):
        handle = handlepool.get_handle()
        handlepool.close()
        handlepool.default_pool().close()
        assert handlepool.get_handle() is handle
    other.close()
    with pytest.raises(PoolClosedError):
        other.get_handle()


def test_of_several_the_last_one_counts_in_whatever_order_they_end(unused, make_pool):
    first, second = make_pool(), make_pool()
    default = handlepool.default_pool().internals
    one, two = substitute_default(first), substitute_default(second)
    one.__enter__()
    two.__enter__()
    assert handlepool.get_handle() is second.get_handle()
    one.__exit__(None, None, None)
    assert handlepool.get_handle() is second.get_handle()
    two.__exit__(None, None, None)
    assert handlepool.default_pool().internals is default
    assert not context.branch_pools


def test_a_pool_that_was_set_is_stood_in_for_as_well(unused, other):
    with HandlePool(driver=HostDriver()) as mine:
        handlepool.set_default_pool(mine)
        handle = mine.get_handle()
        with substitute_default(other):
            assert mine.get_handle() is handlepool.get_handle() is other.get_handle() is not handle
        assert mine.get_handle() is handlepool.get_handle() is handle


def test_the_default_pool_is_restored_when_the_test_fails_and_a_closed_pool_is_refused(unused, other):
    default = handlepool.default_pool().internals
    with pytest.raises(ZeroDivisionError), substitute_default(other):
        raise ZeroDivisionError
    assert handlepool.default_pool().internals is default
    other.close()
    with pytest.raises(PoolClosedError), substitute_default(other):
        raise AssertionError
    assert handlepool.default_pool().internals is default


def test_threads_that_ask_all_the_while_get_handles_of_pools_that_are_open(unused):
    stop, begun = threading.Event(), threading.Barrier(3)

    def ask():
        begun.wait(TIMEOUT)
        while not stop.is_set():
            assert handlepool.get_handle().stream is not None
            try:
                handlepool.get_workspace(16)
            except PoolClosedError:  # the pool that it was asked of was closed meanwhile, by its test
                pass

    threads = [Thread(ask) for _ in range(2)]
    begun.wait(TIMEOUT)
    default = handlepool.default_pool()
    for _ in range(50):
        with HandlePool(driver=HostDriver()) as other:
            with substitute_default(other):
                assert handlepool.get_handle() is other.get_handle()
            assert handlepool.get_handle() is not other.get_handle()
    stop.set()
    for thread in threads:
        thread.finish()
    assert handlepool.get_handle() is default.internals.get_handle()
