"""A lost CUDA context: one clear error from every later call, and a clean end."""

import copy
import copyreg
import subprocess
import sys
import threading

import numpy as np
import pytest
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import HandlePoolError, ParallelStateExecutor, ParallelStates, PoisonedContextError

USES = {
    "get_handle": lambda pool: pool.get_handle(),
    "get_handle of a pointer": lambda pool: pool.get_handle(0),
    "get_workspace": lambda pool: pool.get_workspace(100),
    "slot": lambda pool: pool.internals.slot(),
    "prewarm": lambda pool: pool.prewarm(states=1),
    "trim": lambda pool: pool.trim(),
    "fork": lambda pool: ParallelStates(2, pool=pool).fork().__enter__(),
    "map": lambda pool: ParallelStates(2, pool=pool).map(int, [1]),
    "with_state": lambda pool: ParallelStates(2, pool=pool).with_state(0, lambda state: None),
    "submit": lambda pool: ParallelStateExecutor(1, pool=pool).submit(int),
    "conv2d": lambda pool: convolve(pool),
}


def convolve(pool):
    x, w = np.ones((1, 8, 8, 8), np.float32), np.ones((8, 8, 3, 3), np.float32)
    return handlepool.conv2d(x, w, pool=pool)


def lose(pool):
    """A kernel's error is met by a call."""
    lost = pool.driver.lose_context()
    with pytest.raises(PoisonedContextError):
        pool.trim()
    return lost


@pytest.mark.parametrize("use", USES)
def test_every_call_after_a_lost_context_says_so_and_why(make_pool, use):
    pool = make_pool()
    convolve(pool)
    lost = lose(pool)
    for _ in range(2):
        with pytest.raises(PoisonedContextError, match="restart the process") as info:
            USES[use](pool)
        assert repr(info.value.__cause__) == repr(lost)
        assert isinstance(info.value, RuntimeError)
        assert isinstance(info.value, HandlePoolError)
    pool.close()


def test_the_error_that_is_kept_holds_no_frames_of_the_caller(make_pool):
    pool = make_pool()
    lost = pool.driver.lose_context()
    with pytest.raises(PoisonedContextError):
        pool.get_workspace(100)
    assert lost.__traceback__ is not None
    assert repr(pool.internals.status.poison) == repr(lost)
    assert pool.internals.status.poison.__traceback__ is None


def test_nor_where_errors_are_copied_with_their_frames(make_pool, monkeypatch):
    def whole(kind, args, trace):
        return kind(*args).with_traceback(trace)

    pool = make_pool()
    lost = pool.driver.lose_context()
    monkeypatch.setitem(copyreg.dispatch_table, type(lost), lambda error: (whole, (type(error), error.args, error.__traceback__)))
    with pytest.raises(PoisonedContextError):
        pool.get_workspace(100)
    assert copy.copy(lost).__traceback__ is lost.__traceback__ is not None
    assert pool.internals.status.poison.__traceback__ is None


@pytest.mark.parametrize("use", [use for use in USES if use not in ("get_handle", "slot", "fork")])
def test_a_call_that_is_refused_by_the_lost_context_is_the_first_to_say_so(make_pool, use):
    pool = make_pool()
    lost = pool.driver.lose_context()
    with pytest.raises(PoisonedContextError) as info:
        USES[use](pool)
    assert repr(info.value.__cause__) == repr(lost)


def test_a_launch_on_a_hit_is_refused(make_pool):
    pool = make_pool()
    convolve(pool)
    pool.driver.lose_context()
    with pytest.raises(PoisonedContextError):
        convolve(pool)


def test_other_threads_hits_end(make_pool):
    pool = make_pool()
    ready, lost = threading.Event(), threading.Event()

    def body():
        pool.get_handle()
        ready.set()
        assert lost.wait(TIMEOUT)
        with pytest.raises(PoisonedContextError):
            pool.get_handle()

    thread = Thread(body)
    assert ready.wait(TIMEOUT)
    lose(pool)
    lost.set()
    thread.finish()


def test_a_handle_in_a_branch_is_refused_and_the_fork_ends_without_a_call(make_pool):
    pool = make_pool()
    fork = ParallelStates(2, pool=pool).fork().__enter__()
    fork.run(pool.get_handle)
    lost = lose(pool)
    pool.driver.calls.clear()
    with pytest.raises(PoisonedContextError):
        fork.run(pool.get_handle)
    with pytest.raises(PoisonedContextError) as info:
        fork.__exit__(None, None, None)
    assert repr(info.value.__cause__) == repr(lost)
    assert not pool.driver.calls.keys() - {"current_device"}


def test_an_error_of_a_branchs_own_goes_on_and_later_calls_name_it(make_pool):
    pool = make_pool()

    def branch():
        raise pool.driver.lose_context(MemoryError("an illegal memory access was encountered"))

    with pytest.raises(MemoryError), ParallelStates(1, pool=pool).fork() as fork:
        fork.run(branch)
    with pytest.raises(PoisonedContextError) as info:
        pool.get_handle()
    assert isinstance(info.value.__cause__, MemoryError)


def test_a_mistake_in_a_call_is_no_lost_context(make_pool):
    pool = make_pool()
    pool.get_handle()
    with pytest.raises(handlepool.StreamError):
        pool.get_handle("no stream")
    pool.driver.fail_at(1, "create_stream", RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        pool.prewarm(states=1)
    assert pool.get_handle() is not None


@pytest.mark.parametrize("noticed", [True, False])
def test_close_after_a_lost_context_calls_nothing_and_raises_nothing(make_pool, noticed):
    pool = make_pool()
    pool.prewarm(states=2, workspace=100)
    if noticed:
        lose(pool)
    else:
        pool.driver.lose_context()
    pool.driver.calls.clear()
    pool.close()
    assert not pool.driver.calls
    assert pool.closed
    if noticed:
        with pytest.raises(PoisonedContextError):
            pool.get_handle()


def test_pools_of_one_context_are_told_together_and_others_go_on(make_driver, make_pool):
    driver = make_driver()
    first, second, other = make_pool(driver=driver), make_pool(driver=driver), make_pool()
    handles = [pool.get_handle() for pool in (first, second, other)]
    lose(first)
    with pytest.raises(PoisonedContextError):
        second.get_handle()
    assert other.get_handle() is handles[2]


def test_a_process_with_a_lost_context_ends_as_its_program_says():
    program = """
import sys, threading, handlepool
from handlepool import *
pool = HandlePool(driver="host")
executor = ParallelStateExecutor(2, pool=pool)
executor.submit(pool.get_workspace, 100).result()
fork = ParallelStates(2, pool=pool).fork()
fork.__enter__()
fork.run(pool.get_handle)
threading.Thread(target=pool.get_handle).start()
pool.driver.lose_context()
try:
    pool.get_workspace(1000)
except PoisonedContextError:
    sys.exit(5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (5, "")
