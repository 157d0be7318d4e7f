"""A pool that is closed while other threads are inside calls of it: nothing raises there but `PoolClosedError` in later calls.

`close` destroys the handles that are not in use, leaves those in use to their threads, and waits for none. Guarantee 1.
"""

import contextlib
import functools
import gc
import threading

import numpy as np
import pytest
from harness.graphs import convolution
from harness.lines import at_line, some_lines
from harness.scenes import TIMEOUT, Scene, Thread

import handlepool
from handlepool import ContractError, HandlePool, ParallelStates, PoolClosedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.pool.slot import ClosedHandle


class Closing:
    """A pool, a call of a thread's that is known to be right, and a close of it by another thread."""

    def __init__(self, *, check=False, plan_directory=None):
        self.driver = HostDriver(check_order=True)
        self.pool = HandlePool(driver=self.driver, check=check, plan_directory=plan_directory)
        self.stream = self.driver.create_stream()
        with self.stream:
            x, w = (self.driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3)))
            self.call = functools.partial(handlepool.conv2d, x, w, pool=self.pool)

    def value(self):
        return float(self.call().get().max())

    def handles(self):
        return self.driver.alive()["handles"]

    def close(self):
        Thread(self.pool.close).finish()


def halted(monkeypatch, driver):
    """Let the next launch of a driver's executables stop inside: it begins, and goes on when it is let."""
    from handlepool.drivers.host.executable import HandleUse

    inside, go_on = threading.Event(), threading.Event()
    enter = HandleUse.__enter__

    def entered(use):
        handle = enter(use)
        if use._call == "launch":
            inside.set()
            assert go_on.wait(TIMEOUT)
        return handle

    monkeypatch.setattr(HandleUse, "__enter__", entered)
    return inside, go_on


def launching(world, monkeypatch):
    """A thread inside a launch, and what lets it go on and gives its value and its next call's error."""
    inside, go_on = halted(monkeypatch, world.driver)

    def work():
        with world.stream:
            value = world.value()
            with pytest.raises(PoolClosedError, match="was closed; make a new HandlePool"):
                world.call()
            return value, world.handles()

    thread = Thread(work)
    assert inside.wait(TIMEOUT)

    def end():
        go_on.set()
        return thread.finish()

    return end


@pytest.mark.parametrize("check", [False, True])
def test_g1_a_handle_in_use_is_left_to_its_thread_and_the_others_are_destroyed(monkeypatch, check):
    world = Closing(check=check)
    with world.stream:
        world.value()
    world.pool.prewarm(states=2, workspace=1000)
    assert world.handles() > 3
    end = launching(world, monkeypatch)
    world.pool.close()
    assert world.handles() == 1
    assert world.pool.closed
    with pytest.raises(PoolClosedError):
        world.pool.get_handle()
    assert world.handles() == 1  # it is in use still
    # The thread's next call is refused, and destroys the handle.
    assert end() == (36.0, 0)
    assert world.driver.alive()["scratch_bytes"] == 0


def test_g1_control_a_close_that_does_not_look_whether_a_handle_is_in_use(monkeypatch, without):
    world = Closing()
    without("a look at launches under way")
    end = launching(world, monkeypatch)
    with pytest.raises(ContractError, match="destroy_handle"):
        world.pool.close()
    with contextlib.suppress(ContractError):  # nor is its scratch left to it
        end()


@pytest.mark.parametrize("by", ["a second close", "another pool's miss"])
def test_a_handle_that_was_in_use_is_destroyed_later_by_whoever_comes(monkeypatch, by):
    world = Closing()
    inside, go_on = halted(monkeypatch, world.driver)
    thread = Thread(lambda: (world.stream.__enter__(), world.value())[1])
    assert inside.wait(TIMEOUT)
    world.pool.close()
    go_on.set()
    assert thread.finish() == 36.0
    if by == "a second close":
        world.pool.close()
        assert world.handles() == 0
    else:
        with HandlePool(driver=world.driver) as other:
            other.get_handle()
            assert world.handles() == 1  # the other's
    assert deferred.deferred.run(1000) is None


def a_first_call(world):
    return world.value


def a_planned_call(world):
    world.value()
    return world.value


def a_first_workspace(world):
    return lambda: world.pool.get_workspace(100) is not None and 36.0


def a_growing_workspace(world):
    world.pool.get_workspace(100)
    return lambda: world.pool.get_workspace(100_000) is not None and 36.0


def a_map(world):
    world.value()
    states = ParallelStates(2, pool=world.pool)
    return lambda: float(sum(y.get().max() for y in states.map(lambda _: world.call(), range(2)))) / 2


def a_map_of_launches(world):
    x, w = world.call.args
    states = ParallelStates(2, pool=world.pool)
    states.map(convolution, [x], [w])
    return lambda: float(sum(y.get().max() for y in states.map(convolution, [x, x], [w, w]))) / 2


CALLS = [a_first_call, a_planned_call, a_first_workspace, a_growing_workspace, a_map, a_map_of_launches]


STEPS = {a_first_call: 60, a_map: 60, a_map_of_launches: 20}
"""Of long calls each so manieth line, another one in each run: see `some_lines`."""


class Watched:
    """A lock that tells, through ``waits.release``, when a thread has to wait for it."""

    waits = None

    def __init__(self, make=threading.RLock):
        self._lock = make()

    def acquire(self, blocking=True, timeout=-1):
        if self._lock.acquire(blocking=False):
            return True
        if blocking and self.waits is not None:
            self.waits.release()
        return blocking and self._lock.acquire(timeout=TIMEOUT if timeout < 0 else timeout)

    def __enter__(self):
        assert self.acquire(), "a deadlock"

    def __exit__(self, *error):
        self._lock.release()

    def __getattr__(self, name):
        return getattr(self._lock, name)


def at_every_line(monkeypatch, make, check=False):
    """Close a pool from another thread at every line of a call; the values, and the errors of calls and closes.

    The close has ended when the call goes on, or waits for a lock that the call has at that line.
    """
    values, errors = [], []
    monkeypatch.setattr(threading, "RLock", Watched)
    for k in some_lines(STEPS.get(make, 1)):
        world = Closing(check=check)
        closers, went = [], threading.Semaphore(0)

        def close(world=world, went=went):
            try:
                world.pool.close()
            except Exception as error:
                return error
            finally:
                went.release()

        def begin(closers=closers, close=close, went=went):
            monkeypatch.setattr(Watched, "waits", went)
            closers.append(Thread(close))
            assert went.acquire(timeout=TIMEOUT)

        with world.stream:
            call = make(world)
            try:
                at_line(k, lambda call=call: values.append(call()), begin)
            except PoolClosedError:
                values.append(None)
            except Exception as error:
                errors.append(error)
        errors += [error for closer in closers if (error := closer.finish()) is not None]
        monkeypatch.setattr(Watched, "waits", None)
        del call
        gc.collect()
        world.pool.close()
        deferred.deferred.run(1000)
        alive = world.driver.alive()
        assert (alive["handles"], alive["scratch_bytes"]) == (0, 0), k
        if not closers:
            return values, errors


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", CALLS)
def test_g1_a_close_at_every_line_of_a_call_lets_it_be_right_or_refuses_it(monkeypatch, make, check):
    values, errors = at_every_line(monkeypatch, make, check)
    assert not errors
    assert {*values} == {36.0, None}


def test_g1_control_a_close_at_every_line_that_does_not_look_whether_a_handle_is_in_use(monkeypatch, without):
    without("a look at launches under way")
    _, errors = at_every_line(monkeypatch, a_planned_call)
    assert any(isinstance(error, ContractError) for error in errors)


def closing(pool, closed):
    pool.close()
    closed.append(pool)


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True])
def test_a_close_in_a_finaliser_at_every_line_of_a_call(check):
    """It runs in the thread of the call: in a launch, it leaves the handle to that."""
    for make in CALLS:
        values = []
        for k in some_lines(STEPS.get(make, 3)):
            world, closed = Closing(check=check), []
            with world.stream:
                call = make(world)
                try:
                    close = functools.partial(closing, world.pool, closed)
                    at_line(k, lambda call=call, values=values: values.append(call()), close)
                except PoolClosedError:
                    values.append(None)
            del call
            gc.collect()
            world.pool.close()
            deferred.deferred.run(1000)
            assert world.handles() == 0, (make, k)
            if not closed:
                break
        assert {*values} == {36.0, None}


def test_a_close_inside_a_branch_and_a_task_leaves_these_to_end_and_refuses_what_follows():
    for submit in (False, True):
        with Scene(HostDriver(check_order=True)) as scene:
            x, w = (scene.driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3)))

            def branch(scene=scene, x=x, w=w):
                y = handlepool.conv2d(x, w, pool=scene.pool)
                scene.pool.close()
                return y

            if submit:
                with handlepool.ParallelStateExecutor(1, pool=scene.pool) as executor:
                    y = executor.submit(branch).result(TIMEOUT)
                    with pytest.raises(PoolClosedError):
                        executor.submit(branch)
            else:
                with scene.states.fork() as fork:
                    y = fork.run(branch)
                    with pytest.raises(PoolClosedError):
                        fork.run(branch)
            assert float(y.get().max()) == 36.0
            del y
        deferred.deferred.run(1000)
        assert scene.driver.alive()["handles"] == 0


def test_a_close_while_a_graph_is_built_waits_for_no_build(monkeypatch):
    world = Closing()
    inside, go_on = threading.Event(), threading.Event()
    compiled = HostDriver.compile

    def compile_(driver, *args, **options):
        inside.set()
        assert go_on.wait(TIMEOUT)
        return compiled(driver, *args, **options)

    monkeypatch.setattr(HostDriver, "compile", compile_)

    def work():
        with world.stream, pytest.raises(PoolClosedError):
            world.value()

    thread = Thread(work)
    assert inside.wait(TIMEOUT)
    world.pool.close()
    assert world.handles() == 1  # the one that graphs are built with
    go_on.set()
    thread.finish()
    deferred.deferred.run(1000)
    assert world.handles() == 0


def test_whatever_is_asked_of_a_handle_that_was_taken_says_that_the_pool_was_closed():
    world = Closing()
    slot = world.pool.internals.slot()
    world.pool.close()
    assert isinstance(slot.handle, ClosedHandle)
    for name in ("backend_handle", "stream"):
        with pytest.raises(PoolClosedError):
            getattr(slot.handle, name)
