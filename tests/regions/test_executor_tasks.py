"""Tasks: their errors, streams that cannot submit, captures (guarantee 9), and what a task may do (guarantee 15)."""

import sys
import threading
import types

import pytest
from harness.scenes import TIMEOUT, Scene, Thread, without_joins, without_starts
from harness.submitting import TaskError, over_seeds_with, returned

import handlepool
from handlepool import ArgumentError, CaptureError, HandlePool, ParallelStateExecutor, PoolClosedError


@pytest.fixture
def executor(scene):
    with ParallelStateExecutor(4, pool=scene.pool) as executor:
        yield executor


def held_back(scene, latches, value):
    latches.append(scene.driver.latch(scene.driver.current_stream().ptr))
    return scene.array(value)


# Errors: the join is made first, then the exception goes on


def fails_after_work(scene, executor):
    y = scene.array()

    def task():
        scene.put(y, lambda: 3)
        raise TaskError("from the task")

    future = executor.submit(task)
    returned(future)
    with pytest.raises(TaskError, match="from the task"):
        future.result(TIMEOUT)
    return scene.read(y)


@pytest.mark.parametrize("error", [TaskError, KeyboardInterrupt, SystemExit])
def test_the_very_exception_of_a_task_is_raised_each_time(scene, executor, error):
    instance = error("once")

    def task():
        raise instance

    future = executor.submit(task)
    for _ in range(2):
        with pytest.raises(error) as raised:
            future.result(TIMEOUT)
        assert raised.value is instance
    assert future.exception(TIMEOUT) is instance
    assert executor.submit(lambda: "the worker goes on").result(TIMEOUT)


def test_a_join_that_fails_does_not_hide_the_tasks_error(scene, executor):
    latches = []

    def task():
        held_back(scene, latches, 1)
        raise TaskError

    future = executor.submit(task)
    returned(future)
    scene.stream.begin_capture()
    with pytest.raises(TaskError) as raised:
        future.result(TIMEOUT)
    scene.stream.end_capture()
    latches[0].release()
    assert "is being captured" in raised.value.__notes__[0]


# Streams that cannot be submitted from, and captures


def test_the_per_thread_default_stream_cannot_submit_nor_a_branch_of_a_fork_on_it_and_the_null_stream_may(scene, executor):
    with scene.driver.per_thread_stream:
        with pytest.raises(ArgumentError, match=r"per-thread default stream.*submit inside"):
            executor.submit(pytest.fail, "it ran")
        with pytest.raises(ArgumentError, match="per-thread default stream"), scene.states.fork() as fork:
            fork.run(executor.submit, pytest.fail, "it ran")
    with scene.driver.legacy_stream:
        x = scene.array(1)
        y = executor.submit(scene.plus, x, 1).result(TIMEOUT)
        assert float(y[0]) == 2


def test_g9_submit_under_capture_is_refused_and_the_capture_survives(scene, executor):
    y = scene.array()
    scene.stream.begin_capture()
    with pytest.raises(CaptureError, match=r"being captured.*ParallelStates\.fork"):
        executor.submit(pytest.fail, "it ran")
    scene.put(y, lambda: 3)
    scene.stream.end_capture().launch(scene.stream)
    assert scene.read(y) == 3


@pytest.mark.parametrize("whose", ["submitter", "caller"])
def test_g9_result_under_capture_is_refused_and_the_capture_survives(scene, executor, whose):
    latches, y = [], scene.array()
    future = executor.submit(held_back, scene, latches, 1)
    returned(future)
    other = scene.driver.create_stream()
    captured = scene.stream if whose == "submitter" else other
    captured.begin_capture()
    with other, pytest.raises(CaptureError, match="ask for the result before the capture, or after it"):
        future.result(TIMEOUT)
    with captured:
        scene.put(y, lambda: 3)
    graph = captured.end_capture()
    latches[0].release()
    assert scene.read(future.result(TIMEOUT)) == 1
    graph.launch(scene.stream)
    assert scene.read(y) == 3


def test_g9_a_result_that_was_asked_for_before_the_capture_may_be_asked_for_inside(scene, executor):
    latches = []
    future = executor.submit(held_back, scene, latches, 1)
    y = future.result(TIMEOUT)
    scene.stream.begin_capture()
    assert future.result(TIMEOUT) is y
    scene.stream.end_capture()
    latches[0].release()


# What tasks may do


def test_g15_a_task_has_its_side_slots_own_handle_and_scratch(scene, executor):
    meeting = threading.Barrier(4)

    def task():
        meeting.wait(TIMEOUT)
        handle = scene.pool.get_handle()
        assert handle.stream == scene.driver.current_stream().ptr
        return handle, scene.driver.array_pointer(scene.pool.get_workspace(1000))

    found = [future.result(TIMEOUT) for future in [executor.submit(task) for _ in range(4)]]
    found.append((scene.pool.get_handle(), scene.driver.array_pointer(scene.pool.get_workspace(1000))))
    assert len({id(handle) for handle, _ in found}) == 5
    assert len({scratch for _, scratch in found}) == 5


def tasks_that_fork(scene, executor):
    def task(x):
        return scene.states.map(scene.plus, [x] * 3, range(3))

    futures = [executor.submit(task, scene.array(value)) for value in (10, 20)]
    returned(*futures)
    return tuple(scene.read(y) for future in futures for y in future.result(TIMEOUT))


def tasks_that_submit(scene, executor):
    def task(x):
        return scene.plus(executor.submit(scene.plus, x, 1).result(TIMEOUT), 10)

    future = executor.submit(task, scene.array(1))
    returned(future)
    return scene.read(future.result(TIMEOUT))


def branches_that_submit(scene, executor):
    def branch(x):
        return scene.plus(executor.submit(scene.plus, x, 1).result(TIMEOUT), 10)

    outputs = scene.states.map(branch, [scene.array(1), scene.array(2)])
    return tuple(scene.read(y) for y in outputs)


def test_g15_a_task_may_take_a_state_by_index(scene, executor):
    handles = [executor.submit(scene.states.with_state, 1, lambda state: state.handle).result(TIMEOUT).stream for _ in range(4)]
    assert scene.stream.ptr not in handles


def outlives_its_branch(scene, executor):
    """A task that found every side slot out and goes on after the fork whose branch submitted it."""
    begun, go_on = threading.Event(), threading.Event()

    def task():
        x = scene.array(5)
        begun.set()
        assert go_on.wait(TIMEOUT)
        return scene.plus(x, 100)

    with handlepool.ParallelStates(32, pool=scene.pool).fork() as fork:
        for _ in range(31):
            fork.run(lambda: None)
        future = fork.run(executor.submit, task)
        assert begun.wait(TIMEOUT)
    go_on.set()
    returned(future)
    return scene.read(scene.array(7)), scene.read(future.result(TIMEOUT))


def test_g8_control_a_task_on_the_side_stream_of_a_branch_that_is_over(monkeypatch):
    def on_the_submitters(driver, stream, device, outer=None):
        region = handlepool.regions.memory.Region(driver, stream, device, outer)
        assert region.prepare() is not None  # made for the outermost stream
        region.stream = driver.current_stream()
        return region

    monkeypatch.setattr("handlepool.regions.future.Region", on_the_submitters)
    assert len(set(over_seeds_with(outlives_its_branch, control=True))) > 1


class Torch:
    """What the executor asks of torch, whose current stream is the driver's in branches and tasks."""

    def __init__(self, driver):
        self.driver = driver

    def current_stream(self, _):
        return self.driver.current_stream().ptr

    def run_branch(self, _pointer, _theirs, _device, function, args, kwargs):
        return function(*args, **kwargs)

    def record(self, *_):
        pass


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("submitter", ["branch", "task"])
def test_g9_a_result_does_not_ask_for_the_side_stream_that_its_submitter_was_lent(scene, submitter, torch, monkeypatch):
    x = scene.array(1)
    executor = ParallelStateExecutor(1, pool=scene.pool)
    if torch:
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        monkeypatch.setattr("handlepool.regions.executor.torch_of", lambda *_: Torch(scene.driver))
    if submitter == "branch":
        future = scene.states.map(executor.submit, [scene.plus], [x], [1])[0]
    else:
        with ParallelStateExecutor(1, pool=scene.pool) as outer:
            future = outer.submit(executor.submit, scene.plus, x, 1).result(TIMEOUT)
    returned(future)
    other = scene.driver.create_stream()
    with other:
        outs = [scene.array() for _ in range(4)]
        other.begin_capture("thread_local")
        scene.states.map(lambda out: scene.put(out, lambda: 3), outs)
    assert scene.read(future.result(TIMEOUT)) == 2
    other.end_capture().launch(other)
    with other:
        assert [scene.read(out) for out in outs] == [3] * 4
    executor.shutdown()


def test_g9_a_result_in_another_thread_leaves_the_side_stream_of_the_branch_that_submitted_to_that(scene, executor):
    """It may go to somebody else meanwhile, who has it captured."""
    x, mine = scene.array(1), []
    wait, done = scene.driver.wait_event, scene.driver.event_done
    scene.driver.event_done = lambda event: False  # or nobody waits for what has passed by chance

    def noting(pointer, event):
        mine.append(pointer)
        wait(pointer, event)

    def in_another_thread(future):
        scene.driver.wait_event = noting
        try:
            return future.result(TIMEOUT)
        finally:
            scene.driver.wait_event = wait

    def branch():
        future = executor.submit(scene.plus, x, 1)
        returned(future)
        value = Thread(in_another_thread, future).finish()
        assert scene.driver.current_stream().ptr not in mine
        return scene.plus(future.result(TIMEOUT), 0), value

    with scene.states.fork() as fork:
        y, value = fork.run(branch)
    scene.driver.event_done = done
    assert [scene.read(y), scene.read(value)] == [2, 2]
    assert scene.stream.ptr in mine


def joined_by_a_shutdown(scene, _):
    y, z = scene.array(), scene.array()

    def branch():
        with ParallelStateExecutor(1, pool=scene.pool) as executor:
            executor.submit(scene.put, y, lambda: 3)
        scene.put(z, lambda y: y + 1, y)

    with scene.states.fork() as fork:
        fork.run(branch)
    return scene.read(z)


def where_every_side_slot_is_out(scene, executor):
    """On the submitter's stream."""
    with handlepool.ParallelStates(32, pool=scene.pool).fork() as hoard:
        for _ in range(32):
            hoard.run(lambda: None)
        x = scene.array(1)
        futures = [executor.submit(lambda: (scene.driver.current_stream(), scene.plus(x, 1))) for _ in range(4)]
        results = [future.result(TIMEOUT) for future in futures]
        assert all(stream is scene.stream for stream, _ in results)
        return tuple(scene.read(y) for _, y in results)


ORDERED = {
    fails_after_work: 3,
    tasks_that_fork: (10, 11, 12, 20, 21, 22),
    tasks_that_submit: 12,
    branches_that_submit: (12, 13),
    where_every_side_slot_is_out: (2, 2, 2, 2),
    outlives_its_branch: (7, 105),
    joined_by_a_shutdown: 4,
}


@pytest.mark.parametrize(("scenario", "expected"), ORDERED.items())
def test_g6_g8_g15_what_tasks_do_is_ordered_and_kept(scenario, expected):
    assert set(over_seeds_with(scenario)) == {expected}


@pytest.mark.parametrize(("scenario", "make"), [(fails_after_work, without_joins), (joined_by_a_shutdown, without_starts)])
@pytest.mark.unmeasured
def test_g6_control_without_a_wait(scenario, make):
    assert len(set(map(str, over_seeds_with(scenario, make=make)))) > 1


@pytest.mark.parametrize("begins", ["before the task", "inside the task"])
def test_g9_a_task_on_a_stream_under_capture_says_so_and_the_capture_survives(scene, begins):
    with (
        ParallelStateExecutor(1, pool=scene.pool) as executor,
        handlepool.ParallelStates(32, pool=scene.pool).fork(stream=scene.driver.create_stream()) as hoard,
    ):
        for _ in range(32):
            hoard.run(lambda: None)
        started, captured = threading.Event(), threading.Event()
        if begins == "before the task":
            with scene.driver.create_stream():
                executor.submit(captured.wait, TIMEOUT)
            future, says = executor.submit(pytest.fail, "it ran"), "every side stream is in use"
        else:
            future = executor.submit(lambda: started.set() or captured.wait(TIMEOUT))
            assert started.wait(TIMEOUT)
            says = "a capture began on it"
        scene.stream.begin_capture()
        captured.set()
        with pytest.raises(CaptureError, match=says):
            future.result(TIMEOUT)
        scene.stream.end_capture()


def test_a_pool_that_is_closed_while_tasks_wait_fails_them(make_driver):
    with Scene(make_driver()) as scene, ParallelStateExecutor(1, pool=scene.pool) as executor:
        started, go_on = threading.Event(), threading.Event()
        running = executor.submit(lambda: started.set() or go_on.wait(TIMEOUT))
        assert started.wait(TIMEOUT)
        waiting = executor.submit(pytest.fail, "it ran")
        scene.pool.close()
        go_on.set()
        assert running.result(TIMEOUT) is True
        with pytest.raises(PoolClosedError):
            waiting.result(TIMEOUT)
        with pytest.raises(PoolClosedError):
            executor.submit(pytest.fail, "it ran")


def test_a_pool_that_is_closed_before_its_executor_loses_no_handle(make_driver):
    pool = HandlePool(driver=make_driver())
    with ParallelStateExecutor(3, pool=pool) as executor:
        meeting = threading.Barrier(3)
        for future in [executor.submit(meeting.wait, TIMEOUT) for _ in range(3)]:
            future.result(TIMEOUT)
        pool.close()
    stats = pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"]


def test_g9_a_task_that_allocates_after_the_submitters_stream_began_to_be_captured_is_refused_and_the_capture_survives(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        captured = threading.Event()
        future = executor.submit(lambda: captured.wait(TIMEOUT) and scene.array())
        scene.stream.begin_capture("thread_local")
        captured.set()
        with pytest.raises(CaptureError, match="a capture began on one of"):
            raise future.exception(TIMEOUT)
        scene.stream.end_capture()
