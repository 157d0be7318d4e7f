"""The default pool is everybody's: one library cannot switch off another, and an application may choose it before it is used."""

import threading

import numpy as np
import pytest
from harness.arrays import Arrays
from harness.insides import made_default
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import ArgumentError, HandlePool, OwnershipError, ParallelStateExecutor, ParallelStates, PoolClosedError
from handlepool.drivers.host.driver import HostDriver


@pytest.mark.parametrize("close", [handlepool.close, lambda: handlepool.default_pool().close()])
def test_a_close_leaves_the_default_pool_to_the_others(unused, close):
    pool = handlepool.default_pool()
    arrays = Arrays(pool)
    get_handle, states, executor = pool.get_handle, ParallelStates(2), ParallelStateExecutor(2)
    x, w = arrays.random(2, 4, 6, 6), arrays.random(8, 4, 3, 3)
    with pool.driver.create_stream():
        program = handlepool.record(handlepool.conv2d, x, w)
        expected = arrays.take(handlepool.conv2d(x, w))
        handle = get_handle()
        states.map(handlepool.conv2d, [x, x], [w, w])
        assert pool.stats()["handles_idle"] == 2
        close()
        assert (pool.stats()["handles_idle"], pool.closed) == (0, False)
        assert handlepool.default_pool() is pool
        assert get_handle() is handle
        results = [
            *states.map(handlepool.conv2d, [x, x], [w, w]),
            executor.submit(handlepool.conv2d, x, w).result(),
            program.outputs,
        ]
        program.replay()
        assert all(np.array_equal(arrays.take(result), expected) for result in results)
        program.close()
        executor.shutdown()


def test_a_close_does_no_harm_to_threads_that_work(unused):
    pool, stop = handlepool.default_pool(), threading.Event()
    barrier = threading.Barrier(4)

    def work():
        arrays = Arrays(pool)
        with pool.driver.create_stream():
            x, w = arrays.random(1, 4, 6, 6), arrays.random(4, 4, 3, 3)
            expected = arrays.take(handlepool.conv2d(x, w))
            barrier.wait(TIMEOUT)
            while not stop.is_set():
                assert np.array_equal(arrays.take(handlepool.conv2d(x, w)), expected)

    threads = [Thread(work) for _ in range(3)]
    barrier.wait(TIMEOUT)
    for _ in range(50):
        handlepool.close()
    stop.set()
    for thread in threads:
        thread.finish()


def test_a_close_before_the_first_use_makes_nothing(unused):
    handlepool.close()
    assert made_default() is None


def test_a_pool_that_somebody_made_is_closed_for_good(unused):
    mine = HandlePool(driver=HostDriver())
    handlepool.set_default_pool(mine)
    handlepool.close()
    assert mine.get_handle() is handlepool.default_pool().get_handle()
    mine.close()
    with pytest.raises(PoolClosedError):
        handlepool.default_pool().get_handle()


def test_the_default_pool_is_chosen_before_its_first_use(unused):
    mine = HandlePool(driver=HostDriver())
    handlepool.set_default_pool(mine)
    handlepool.set_default_pool(mine)
    assert handlepool.default_pool() is mine
    with (
        HandlePool(driver=HostDriver()) as other,
        pytest.raises(OwnershipError, match=r"came too late: <HandlePool .* at the start"),
    ):
        handlepool.set_default_pool(other)
    mine.close()


def test_a_choice_after_the_first_use_is_too_late(unused):
    used = ParallelStates(2)
    with HandlePool(driver=HostDriver()) as mine, pytest.raises(OwnershipError, match="came too late"):
        handlepool.set_default_pool(mine)
    assert used.map(int, [1]) == [1]


@pytest.mark.parametrize("value", [None, "cuda", HostDriver(), HandlePool])
def test_what_is_no_pool_or_a_closed_one_is_refused(unused, value):
    with pytest.raises(ArgumentError, match="set_default_pool was given"):
        handlepool.set_default_pool(value)
    closed = HandlePool(driver=HostDriver())
    closed.close()
    with pytest.raises(PoolClosedError):
        handlepool.set_default_pool(closed)
    assert made_default() is None


def test_of_two_threads_that_choose_at_once_one_is_told(unused):
    pools = [HandlePool(driver=HostDriver()) for _ in range(8)]
    barrier, told = threading.Barrier(8), []

    def choose(pool):
        barrier.wait(TIMEOUT)
        try:
            handlepool.set_default_pool(pool)
        except OwnershipError:
            told.append(pool)

    for thread in [Thread(choose, pool) for pool in pools]:
        thread.finish()
    assert len(told) == 7
    assert handlepool.default_pool() not in told
    for pool in pools:
        pool.close()
