"""The executor's ends: shutdown, threads, and handles and events that go back (guarantee 11)."""

import gc
import os
import threading
from concurrent.futures import CancelledError
from concurrent.futures.thread import BrokenThreadPool

import pytest
from harness.insides import workers_of
from harness.process import leave
from harness.scenes import TIMEOUT, over_seeds
from harness.submitting import TaskError, busy, returned

from handlepool import ForkedProcessError, ParallelStateExecutor
from handlepool.pool import deferred

# Shutdown


def test_shutdown_waits_for_tasks_that_wait(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        futures = [executor.submit(scene.array, value) for value in range(5)]
    assert all(future.done() for future in futures)
    assert [scene.read(future.result()) for future in futures] == list(range(5))


def test_shutdown_without_wait_returns_and_the_tasks_run(scene):
    executor = ParallelStateExecutor(1, pool=scene.pool)
    go_on = busy(executor)
    waiting = executor.submit(scene.array, 7)
    executor.shutdown(wait=False)
    assert not waiting.done()
    go_on.set()
    assert scene.read(waiting.result(TIMEOUT)) == 7


def test_shutdown_may_cancel_tasks_that_wait(scene):
    executor = ParallelStateExecutor(1, pool=scene.pool)
    go_on = busy(executor)
    waiting = [executor.submit(pytest.fail, "it ran") for _ in range(3)]
    assert waiting[1].cancel()  # already
    executor.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    returned(*waiting)
    for future in waiting:
        assert future.cancelled()
        with pytest.raises(CancelledError):
            future.result(TIMEOUT)
    executor.shutdown()


def test_submit_after_shutdown_is_refused_and_loses_no_event(scene):
    executor = ParallelStateExecutor(1, pool=scene.pool)
    executor.shutdown()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(pytest.fail, "it ran")
    del executor
    gc.collect()
    deferred.deferred.run()
    assert scene.driver.calls["create_event"] == scene.driver.calls["destroy_event"]


def nobody_asks(scene):
    y = scene.array()
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(scene.put, y, lambda: 3)
    return scene.read(y)


def test_g6_after_the_shutdown_the_submitters_stream_waits_for_tasks_that_nobody_asked():
    assert set(over_seeds(nobody_asks)) == {3}


def test_g6_control_a_shutdown_without_the_join():
    def make(scene):
        scene.driver.leave_out = lambda pointer: pointer == scene.stream.ptr

    assert len(set(map(str, over_seeds(nobody_asks, make=make)))) > 1


@pytest.mark.parametrize("captured", [False, True])
def test_g9_shutdown_does_not_wait_for_the_device_and_leaves_a_capture_of_the_submitters_stream_alone(scene, captured):
    latches = []
    executor = ParallelStateExecutor(1, pool=scene.pool)
    returned(executor.submit(lambda: latches.append(scene.driver.latch(scene.driver.current_stream().ptr))))
    if captured:
        scene.stream.begin_capture()
    executor.shutdown()
    assert not latches[0].passed
    if captured:
        scene.stream.end_capture()
    latches[0].release()


# Threads


def test_threads_are_named_and_initialised(scene):
    seen = []
    with ParallelStateExecutor(
        1, pool=scene.pool, thread_name_prefix="convolver", initializer=seen.append, initargs=("ready",)
    ) as executor:
        name = executor.submit(lambda: threading.current_thread().name).result(TIMEOUT)
    assert name.startswith("convolver")
    assert seen == ["ready"]


def test_an_initializer_that_fails_breaks_the_executor(scene, caplog):
    def initializer():
        assert go_on.wait(TIMEOUT)
        raise TaskError("not today")

    go_on = threading.Event()
    executor = ParallelStateExecutor(1, pool=scene.pool, initializer=initializer)
    waiting = [executor.submit(pytest.fail, "it ran") for _ in range(3)]
    go_on.set()
    for future in waiting:
        with pytest.raises(BrokenThreadPool):
            future.result(TIMEOUT)
    with pytest.raises(BrokenThreadPool):
        executor.submit(pytest.fail, "it ran")
    executor.shutdown()
    assert "not today" in caplog.text
    assert scene.driver.calls["create_event"] == scene.driver.calls["destroy_event"]


# Handles and events go back


def leases(scene):
    return scene.pool.stats()["handles_leased"]


@pytest.mark.parametrize("wait", [True, False])
def test_g11_side_slots_go_back_with_the_workers(scene, wait):
    executor = ParallelStateExecutor(3, pool=scene.pool)
    meeting = threading.Barrier(3)
    returned(*[executor.submit(meeting.wait, TIMEOUT) for _ in range(3)])
    assert leases(scene) == 3
    executor.shutdown(wait=wait)
    executor.shutdown()  # to know that the threads have ended
    assert leases(scene) == 0


def test_g11_an_executor_that_is_dropped_gives_everything_back(scene):
    executor = ParallelStateExecutor(2, pool=scene.pool)
    meeting = threading.Barrier(2)
    returned(*[executor.submit(meeting.wait, TIMEOUT) for _ in range(2)])
    workers = workers_of(executor)
    del executor
    gc.collect()
    for worker in workers:
        worker.join(TIMEOUT)
    assert leases(scene) == 0


def test_g11_executors_one_after_another_make_no_more_handles_than_one(scene):
    for _ in range(20):
        with ParallelStateExecutor(2, pool=scene.pool) as executor:
            meeting = threading.Barrier(2)
            returned(*[executor.submit(meeting.wait, TIMEOUT) for _ in range(2)])
    assert scene.pool.stats()["handles_created"] == 2


def test_events_are_reused(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        for _ in range(200):
            executor.submit(lambda: None).synchronize(TIMEOUT)
        assert scene.driver.calls["create_event"] < 20


def test_every_event_is_destroyed_in_the_end(scene):
    with ParallelStateExecutor(3, pool=scene.pool) as executor:
        futures = [executor.submit(scene.array, value) for value in range(50)]
        assert [scene.read(future.result(TIMEOUT)) for future in futures] == list(range(50))
        executor.submit(scene.array, 1)
        scene.stream.synchronize()
    scene.stream.synchronize()
    for _ in range(10):  # what was deferred is settled a few at a time
        deferred.deferred.run()
    scene.pool.close()
    assert scene.driver.calls["create_event"] == scene.driver.calls["destroy_event"]


def test_no_event_of_a_task_that_was_cancelled_stays(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        go_on = busy(executor)
        futures = [executor.submit(pytest.fail, "it ran") for _ in range(250)]
        assert all(future.cancel() for future in futures)
        go_on.set()
    del executor, futures
    deferred.deferred.run(1000)
    scene.pool.close()
    assert scene.driver.alive()["events"] == 0


def test_g10_dropping_an_executor_makes_no_driver_call(scene):
    executor = ParallelStateExecutor(1, pool=scene.pool)
    latches = []
    returned(executor.submit(lambda: latches.append(scene.driver.latch(scene.driver.current_stream().ptr))))
    workers = workers_of(executor)
    scene.driver.calls.clear()
    del executor
    for worker in workers:
        worker.join(TIMEOUT)
    calls = {name for name, count in scene.driver.calls.items() if count}
    assert calls <= {"relaxed", "event_done"}  # of the worker, at the end of its task
    latches[0].release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_g13_a_forked_child_is_told_when_it_asks_for_a_result(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        latches = []
        future = executor.submit(lambda: latches.append(scene.driver.latch(scene.driver.current_stream().ptr)))
        returned(future)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                future.result(0)
            except ForkedProcessError:
                code = 0
            finally:
                leave(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        latches[0].release()


# A submit that fails


def no_more_threads(monkeypatch, error):
    """Let no thread be started any more, as the system or the stack may have it."""

    def start(self):
        raise error

    monkeypatch.setattr(threading.Thread, "start", start)


NO_THREADS = [RuntimeError("can't start new thread"), RecursionError("maximum recursion depth exceeded"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", NO_THREADS, ids=lambda error: type(error).__name__)
def test_a_submit_that_can_start_no_thread_leaves_nothing_behind(scene, monkeypatch, error):
    ran = []
    with ParallelStateExecutor(2, pool=scene.pool) as executor:
        go_on = busy(executor)
        with monkeypatch.context() as patch:
            no_more_threads(patch, error)
            with pytest.raises(type(error)):
                executor.submit(ran.append, "a call whose submit failed")
        go_on.set()
        (events,) = executor._events.values()
        assert [scene.read(executor.submit(scene.array, value).result(TIMEOUT)) for value in range(4)] == [0, 1, 2, 3]
        assert None not in events.free
    assert not ran
    del executor, events
    gc.collect()
    deferred.deferred.run(100)
    sides = scene.pool.internals.devices[0].sides.made
    assert scene.driver.calls["create_event"] - scene.driver.calls["destroy_event"] == 2 * sides


def test_a_submit_whose_call_an_older_thread_takes_meanwhile_succeeds(scene, monkeypatch):
    """The call is queued before a thread is started for it, so the thread that is there may run it at once."""
    with ParallelStateExecutor(2, pool=scene.pool) as executor:
        go_on = busy(executor)
        begun = threading.Event()

        def start(self):
            go_on.set()
            assert begun.wait(TIMEOUT)
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            future = executor.submit(begun.set)
        assert future.result(TIMEOUT) is None
