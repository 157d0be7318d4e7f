"""Guarantee 8 for tasks: what one was given and made is kept to a join, or until its end has passed. Controls must go wrong."""

import gc
import weakref

import pytest
from harness.insides import pending_of, workers_of
from harness.scenes import TIMEOUT, Scene, over_seeds
from harness.submitting import TaskError, busy, returned

from handlepool import ContractError, ParallelStateExecutor
from handlepool.regions import memory


class Held:
    """Something that takes weak references."""


@pytest.fixture
def unchecked(make_driver):
    """A scene for a control that shows what goes wrong; the checker would stop it."""
    with Scene(make_driver(check_order=False)) as scene:
        yield scene


# Memory is kept to a join, or until the task's end has passed


def held_back(scene, latches, y, x):
    latches.append(scene.driver.latch(scene.driver.current_stream().ptr))
    return scene.put(y, lambda x: x + 1, x)


def an_argument_is_dropped(scene, latch=True):
    y, x = scene.array(), scene.array(1)
    scene.stream.synchronize()
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        latches = []
        future = executor.submit(held_back, scene, latches, y, x)
        returned(future)
        del x
        scene.put(scene.array(), lambda: 100)  # takes its block, if that was freed
        scene.stream.synchronize()
        latches[0].release()
        future.result(TIMEOUT)
        return scene.read(y)


def test_g8_a_tasks_arguments_are_kept(scene):
    assert an_argument_is_dropped(scene) == 2


def keeps_nothing(region, *given, make=memory.Region.__init__, **options):
    make(region, *given, **options)
    region.keep = lambda _: None


def test_g8_control_a_tasks_arguments_that_are_not_kept(unchecked, monkeypatch):
    monkeypatch.setattr(memory.Region, "__init__", keeps_nothing)
    assert an_argument_is_dropped(unchecked) == 101
    with Scene() as scene, pytest.raises(ContractError, match="not ordered"):
        an_argument_is_dropped(scene)


def a_dropped_executor(scene, *, parks):
    """Nobody asks, and the executor is dropped, while the device still reads the task's argument."""
    y, x = scene.array(), scene.array(1)
    scene.stream.synchronize()
    executor = ParallelStateExecutor(1, pool=scene.pool)
    latches = []
    returned(executor.submit(held_back, scene, latches, y, x))
    workers = workers_of(executor)
    if not parks:
        pending_of(executor).clear()
    del x, executor
    gc.collect()
    for worker in workers:
        worker.join(TIMEOUT)
    scene.put(scene.array(), lambda: 100)
    scene.stream.synchronize()
    latches[0].release()
    scene.pool.internals.device(0).sides.free[0].side_stream.synchronize()
    return scene.read(y)


def test_g8_what_a_task_reads_outlives_a_dropped_executor(scene):
    assert a_dropped_executor(scene, parks=True) == 2


def test_g8_control_a_dropped_executor_that_parks_nothing(unchecked):
    assert a_dropped_executor(unchecked, parks=False) == 101
    with Scene() as scene, pytest.raises(ContractError, match="not ordered"):
        a_dropped_executor(scene, parks=False)


def dies(scene, use):
    """Whether something that a task was given is gone after ``use(scene, executor, future, latch)``, and was not before."""
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        thing, latches = Held(), []
        gone = weakref.ref(thing)

        def task(thing):
            latches.append(scene.driver.latch(scene.driver.current_stream().ptr))

        future = executor.submit(task, thing)
        del thing
        returned(future)
        gc.collect()
        assert gone() is not None
        use(scene, executor, future, latches[0])
        latches[0].release()
        return gone() is None


def past_its_end(scene, executor, future, latch):
    latch.release()
    scene.driver.synchronize_event(future._task._end)
    executor.submit(lambda: None)


RELEASES = {
    "nothing": (lambda scene, executor, future, latch: None, False),
    "result": (lambda scene, executor, future, latch: future.result(TIMEOUT), True),
    "the next task": (lambda scene, executor, future, latch: executor.submit(lambda: None), False),
    "the next task past its end": (past_its_end, True),
    "shutdown": (lambda scene, executor, future, latch: executor.shutdown(), True),
}


@pytest.mark.parametrize("use", RELEASES)
def test_g8_what_a_task_kept_is_released_by_a_join_or_after_its_end(scene, use):
    act, released = RELEASES[use]
    assert dies(scene, act) is released


def test_g8_an_error_that_was_raised_keeps_no_argument_alive(scene):
    def task(thing):
        raise TaskError

    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        thing = Held()
        gone = weakref.ref(thing)
        future = executor.submit(task, thing)
        del thing
        gc.disable()
        try:
            with pytest.raises(TaskError):
                future.result(TIMEOUT)
            assert executor.submit(lambda: "the worker is past it").result(TIMEOUT)
            future.exception().__traceback__ = None
            assert gone() is None
        finally:
            gc.enable()


def test_g8_a_future_and_its_error_are_no_reference_cycle(scene):
    def task():
        raise TaskError

    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        future = executor.submit(task)
        gone = weakref.ref(future)
        gc.disable()
        try:
            with pytest.raises(TaskError):
                future.result(TIMEOUT)
            assert executor.submit(lambda: "the worker is past it").result(TIMEOUT)
            executor.submit(lambda: None).synchronize(TIMEOUT)
            del future
            assert gone() is None
        finally:
            gc.enable()


def test_g8_a_cancelled_task_releases_what_it_was_given(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        go_on = busy(executor)
        thing = Held()
        gone = weakref.ref(thing)
        future = executor.submit(pytest.fail, thing)
        del thing
        assert future.cancel()
        del future
        go_on.set()
        executor.submit(lambda: None).synchronize(TIMEOUT)
        assert gone() is None


def test_g8_the_submitters_stream_may_be_dropped_while_a_task_waits():
    def scenario(scene):
        with ParallelStateExecutor(1, pool=scene.pool) as executor:
            go_on = busy(executor)
            stream = scene.driver.create_stream()
            with stream:
                x = scene.array(1)
                future = executor.submit(scene.plus, x, 1)
            gone = weakref.ref(stream)
            del stream
            assert gone() is not None
            go_on.set()
            return scene.read(future.result(TIMEOUT))

    assert set(over_seeds(scenario)) == {2}


def outputs_of_a_subtask(scene):
    """A branch reads, by queued work, what a task made that it submitted, and drops it; the next branch allocates."""
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        outputs = [scene.array() for _ in range(3)]

        def branch(y, value):
            made = executor.submit(scene.array, value).result(TIMEOUT)
            scene.put(y, lambda x: x + 1, made)

        scene.states.map(branch, outputs, range(3))
        return tuple(scene.read(y) for y in outputs)


def test_g8_what_a_task_made_for_a_branch_is_kept_to_the_branches_join():
    assert set(over_seeds(outputs_of_a_subtask)) == {(1, 2, 3)}


def test_g8_control_a_task_whose_memory_goes_back_when_the_branch_asked_for_its_result(monkeypatch):
    monkeypatch.setattr(memory.Region, "release", lambda region: (region.kept.clear(), region.allocated.clear()))
    assert len(set(map(str, over_seeds(outputs_of_a_subtask, control=True)))) > 1
