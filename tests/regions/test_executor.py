"""The executor: order of tasks and of results (guarantees 6 and 7), and what it has of concurrent.futures."""

import concurrent.futures
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from harness.scenes import TIMEOUT, Thread, without_joins, without_starts
from harness.submitting import TaskError, over_seeds_with, returned

from handlepool import ArgumentError, ParallelStateExecutor, StreamFuture


@pytest.fixture
def executor(scene):
    with ParallelStateExecutor(4, pool=scene.pool) as executor:
        yield executor


# A task starts after what the submitter's stream had been given at submit


def reads_the_submitter(scene, executor):
    x, y = scene.array(1), scene.array()
    future = executor.submit(scene.put, y, lambda x: x + 1, x)
    returned(future)
    return scene.read(future.result(TIMEOUT))


def test_g6_a_task_waits_for_nothing_that_was_given_after_submit(scene, executor):
    go_on = threading.Event()
    future = executor.submit(lambda: go_on.wait(TIMEOUT) and scene.driver.current_stream())
    latch = scene.driver.latch(scene.stream.ptr)
    go_on.set()
    side = future.result(TIMEOUT)
    side.synchronize()
    assert not latch.passed
    latch.release()


# result() orders, and does not block on the device


def result_orders(scene, executor):
    y = scene.array()
    future = executor.submit(scene.put, y, lambda: 3)
    returned(future)
    return scene.read(future.result(TIMEOUT))


def asked_on_another_stream(scene, executor):
    y = scene.array()
    future = executor.submit(scene.put, y, lambda: 3)
    returned(future)
    here = scene.driver.create_stream()
    with here:
        value = scene.read(future.result(TIMEOUT))
    return value, scene.read(y)


def asked_by_several_threads(scene, executor):
    y = scene.array()
    future = executor.submit(scene.put, y, lambda: 3)

    def ask():
        with scene.driver.create_stream():
            return scene.read(future.result(TIMEOUT)), scene.read(future.result(TIMEOUT))

    values = [Thread(ask).finish() for _ in range(2)]
    return *values, scene.read(future.result(TIMEOUT))


def asked_on_another_device(scene, executor):
    y = scene.array()
    future = executor.submit(scene.put, y, lambda: 3)
    returned(future)
    with scene.driver.device(1), scene.driver.create_stream() as stream:
        future.result(TIMEOUT)
        assert scene.driver.current_device() == 1
        stream.synchronize()
    return float(np.unique(np.array(y))[0])


ORDERED = {
    reads_the_submitter: 2,
    result_orders: 3,
    asked_on_another_stream: (3, 3),
    asked_by_several_threads: ((3, 3), (3, 3), 3),
    asked_on_another_device: 3,
}


@pytest.mark.parametrize(("scenario", "expected"), ORDERED.items())
def test_g6_tasks_and_results_are_ordered(scenario, expected):
    assert set(over_seeds_with(scenario)) == {expected}


@pytest.mark.parametrize(("scenario", "make"), [(reads_the_submitter, without_starts), (result_orders, without_joins)])
def test_g6_control_without_a_wait(scenario, make):
    assert len(set(map(str, over_seeds_with(scenario, make=make)))) > 1


@pytest.mark.parametrize("whose", ["submitter", "caller"])
def test_g6_control_result_that_leaves_one_of_the_two_out(whose):
    def scenario(scene, executor):
        y, sides = scene.array(), []

        def task():
            sides.append(scene.driver.current_stream().ptr)
            scene.put(y, lambda: 3)

        future = executor.submit(task)
        returned(future)
        mine = scene.stream.ptr
        scene.driver.leave_out = lambda pointer: pointer not in sides and (pointer == mine) is (whose == "submitter")
        with scene.driver.create_stream():
            future.result(TIMEOUT)
            value = scene.read(y) if whose == "caller" else 3
        return value, scene.read(y)

    assert len(set(map(str, over_seeds_with(scenario, control=True)))) > 1


def test_g6_a_result_asked_for_long_after_its_events_were_reused(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        first = executor.submit(scene.array, 1)
        first.synchronize(TIMEOUT)
        others = [executor.submit(scene.array, value) for value in range(2, 20)]
        assert [scene.read(future.result(TIMEOUT)) for future in others] == list(range(2, 20))
        latch = scene.driver.latch(scene.stream.ptr)
        executor.submit(scene.array, 100)  # waits for the latch, and may have the first task's events
        with scene.driver.create_stream():
            assert scene.read(first.result(TIMEOUT)) == 1
        latch.release()


def held_back(scene, latches, value):
    latches.append(scene.driver.latch(scene.driver.current_stream().ptr))
    return scene.array(value)


def test_g6_result_returns_while_the_task_is_held_back_on_the_device(scene, executor):
    latches = []
    future = executor.submit(held_back, scene, latches, 1)
    y = future.result(TIMEOUT)
    assert not latches[0].passed
    latches[0].release()
    assert scene.read(y) == 1


def test_g7_a_task_that_is_held_back_on_the_device_does_not_hold_up_a_sibling(scene):
    with ParallelStateExecutor(2, pool=scene.pool) as executor:
        meeting = threading.Barrier(2)
        latches = []

        def held():
            meeting.wait(TIMEOUT)  # two tasks that meet are in two threads
            return held_back(scene, latches, 1)

        def free():
            meeting.wait(TIMEOUT)
            return scene.array(2)

        first, second = executor.submit(held), executor.submit(free)
        returned(first)
        assert float(second.synchronize(TIMEOUT)[0]) == 2
        assert not latches[0].passed
        latches[0].release()
        assert scene.read(first.result(TIMEOUT)) == 1


def test_synchronize_blocks_until_the_device_has_run_the_task(scene, executor):
    latches = []
    future = executor.submit(held_back, scene, latches, 1)
    returned(future)
    done = threading.Event()

    def ask():
        with scene.driver.create_stream():
            value = future.synchronize(TIMEOUT)
            done.set()
            return float(np.unique(np.array(value))[0])  # no wait: the host knows that it has run

    thread = Thread(ask)
    assert not done.is_set()
    latches[0].release()
    assert thread.finish() == 1


def test_g9_synchronize_and_result_harm_no_capture_of_another_thread(scene, executor):
    capturing = scene.driver.create_stream()
    futures = [executor.submit(scene.array, value) for value in range(8)]
    returned(*futures)
    capturing.begin_capture()
    assert [float(future.synchronize(TIMEOUT)[0]) for future in futures] == list(range(8))
    capturing.end_capture()


def test_g3_a_task_runs_on_the_submitters_device(scene, executor):
    with scene.driver.device(1), scene.driver.create_stream():
        future = executor.submit(lambda: (scene.driver.current_device(), scene.array(1)))
        device, y = future.result(TIMEOUT)
        assert (device, scene.driver.array_device(y), scene.read(y)) == (1, 1, 1)
    assert executor.submit(scene.driver.current_device).result(TIMEOUT) == 0


def test_g3_what_a_task_leaves_current_does_not_reach_the_next(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:

        def unruly():
            scene.driver.create_stream().use()
            scene.driver.set_device(1)
            raise TaskError

        before = executor.submit(scene.driver.current_stream).result(TIMEOUT)
        with pytest.raises(TaskError):
            executor.submit(unruly).result(TIMEOUT)
        assert executor.submit(scene.driver.current_stream).result(TIMEOUT) is before
        assert executor.submit(scene.driver.current_device).result(TIMEOUT) == 0


# concurrent.futures


def test_map_gives_results_in_order(scene, executor):
    xs = [scene.array(value) for value in range(6)]
    assert [scene.read(y) for y in executor.map(scene.plus, xs, range(6))] == [0, 2, 4, 6, 8, 10]


def test_as_completed_and_wait_take_its_futures(scene, executor):
    futures = {executor.submit(scene.array, value): value for value in range(6)}
    assert all(isinstance(future, StreamFuture) for future in futures)
    seen = {futures[future]: scene.read(future.result()) for future in concurrent.futures.as_completed(futures, TIMEOUT)}
    assert seen == {value: value for value in range(6)}
    assert concurrent.futures.wait(futures, TIMEOUT).done == set(futures)


def test_done_callbacks_get_the_future_and_may_ask_for_its_result(scene, executor):
    got, called = [], threading.Event()

    def callback(future):
        got.append(future.result(TIMEOUT))
        called.set()

    future = executor.submit(lambda: 5)
    future.add_done_callback(callback)
    assert called.wait(TIMEOUT)
    assert got == [5]


def test_result_times_out_while_the_function_runs(scene, executor):
    go_on = threading.Event()
    future = executor.submit(go_on.wait, TIMEOUT)
    with pytest.raises(TimeoutError):
        future.result(0)
    go_on.set()
    assert future.result(TIMEOUT) is True


def test_a_task_that_waits_may_be_cancelled(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        started, go_on = threading.Event(), threading.Event()
        running = executor.submit(lambda: started.set() or go_on.wait(TIMEOUT))
        assert started.wait(TIMEOUT)
        waiting = executor.submit(pytest.fail, "it ran")
        assert waiting.cancel()
        assert not running.cancel()
        go_on.set()
        assert running.result(TIMEOUT)
        with pytest.raises(CancelledError):
            waiting.result(TIMEOUT)
        assert waiting.cancelled()
        assert not concurrent.futures.wait([waiting], TIMEOUT).not_done


# Making one


@pytest.mark.parametrize("workers", [0, -1, 1.5, "4", None, True])
def test_a_number_of_workers_that_is_none_is_refused(scene, workers):
    with pytest.raises(ArgumentError, match=rf"ParallelStateExecutor\({workers!r}\): .* 1 or more"):
        ParallelStateExecutor(workers, pool=scene.pool)


def test_an_executor_without_a_pool_is_of_the_default_pool(scene, make_default):
    make_default(scene.pool)
    with ParallelStateExecutor(1) as executor:
        assert executor.submit(scene.pool.get_handle).result(TIMEOUT).stream is not None


def test_a_result_whose_join_was_interrupted_may_be_asked_for_again(scene, executor):
    latches = []
    future = executor.submit(held_back, scene, latches, 3)
    returned(future)
    scene.driver.fail_at(1, "wait_event", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        future.result(TIMEOUT)
    y = future.result(TIMEOUT)
    latches[0].release()
    assert scene.read(y) == 3
