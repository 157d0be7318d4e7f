"""What cannot be recorded, replayed or updated: each a typed error, and afterwards all is as it was."""

import contextlib
import copy
import functools
import itertools
import os
import pickle
import sys
import threading

import numpy as np
import pytest
from harness.accounts import RESTORES, Accounts
from harness.graphs import double
from harness.hidden import hidden
from harness.insides import lock_of
from harness.lines import at_line
from harness.process import leave
from harness.scenes import TIMEOUT, Scene, Thread
from harness.uses import Foreign, assert_usable

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    CaptureError,
    DeviceMismatchError,
    HandlePool,
    HandlePoolError,
    OutOfMemoryError,
    OwnershipError,
    ParallelStateExecutor,
    PoolClosedError,
    StateBusyError,
    StreamError,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.context import thread
from handlepool.pool.deferred import deferred

F8 = np.dtype(np.float64)


@pytest.fixture
def scene(make_driver, scheduler):
    """Its pool is the default one during the test; in the end nothing is being captured and the pool is in order."""
    with Scene(make_driver(scheduler=scheduler), default=True) as scene:
        yield scene
        in_order(scene)


def in_order(scene):
    driver = scene.driver
    assert driver.captures_under_way() == 0
    assert driver.current_stream() is scene.stream
    assert driver.current_device() == 0
    assert (thread.recording, thread.region, thread.pool, driver._thread.allocator) == (None, None, None, None)
    assert scene.pool.stats()["handles_captured"] == 0
    deferred.run()
    Accounts(scene.pool).check_owners()
    Accounts(scene.pool).check_bindings()
    Accounts(scene.pool).check_scratch()
    assert_usable(scene.pool)


def work(scene):
    """A function of an array, with branches, temporaries, a handle and scratch."""

    def branch(x):
        scene.pool.get_workspace(1000)
        return scene.plus(scene.plus(x, 10), 100)

    return lambda x: scene.states.map(branch, [x, x, x])


def second(scene, does):
    """A function that works as `work` does, and does something more when it is called the second time."""
    calls = hidden([])

    def function(x):
        outputs = work(scene)(x)
        calls().append(1)
        if len(calls()) == 2:
            does(outputs[0])
        return outputs

    return function


# Recording


@pytest.mark.parametrize(
    "wait",
    [
        lambda scene, y: scene.driver.asnumpy(y),
        lambda scene, y: scene.driver.current_stream().synchronize(),
        lambda scene, y: scene.driver.synchronize_stream(scene.stream.ptr),
        lambda scene, y: scene.driver.allocate(64),
        lambda scene, y: scene.driver.stream_id(scene.driver.current_stream().ptr),
        lambda scene, y: scene.driver.wait_event(scene.driver.current_stream().ptr, scene.stream.record()),
    ],
    ids=["read", "synchronize", "synchronize another", "allocate past us", "ask for the id", "wait for work outside"],
)
def test_what_cannot_be_captured_is_named(scene, wait):
    with pytest.raises(CaptureError, match=r"cannot be recorded: .*must not synchronise"):
        handlepool.record(second(scene, functools.partial(wait, scene)), scene.array(1))


def test_what_cannot_be_captured_is_named_also_where_the_function_swallows_it(scene):
    def swallows(y):
        with pytest.raises(CaptureError):
            scene.driver.asnumpy(y)

    with pytest.raises(CaptureError, match="synchronisation with the host"):
        handlepool.record(second(scene, swallows), scene.array(1))


def test_a_stream_that_nothing_waits_for_is_named(scene):
    other = scene.driver.create_stream()

    def forgets(y):
        with scene.driver.relaxed():
            event = scene.driver.create_event()
        scene.driver.record_event(event, scene.driver.current_stream().ptr)
        scene.driver.wait_event(other.ptr, event)
        with other:
            scene.put(y, lambda: 0)

    with pytest.raises(CaptureError, match="was not waited for"):
        handlepool.record(second(scene, forgets), scene.array(1))


@pytest.mark.parametrize("error", [KeyError("half way"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_half_way_travels(scene, error):
    def raises(y):
        raise error

    with pytest.raises(type(error)) as caught:
        handlepool.record(second(scene, raises), scene.array(1))
    assert caught.value is error


def test_an_exception_in_a_branch_travels(scene):
    calls = []

    def branch(x):
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("in a branch")
        return scene.plus(x, 1)

    with pytest.raises(KeyError, match="in a branch"):
        handlepool.record(scene.states.map, branch, [scene.array(1)] * 3)


def test_an_exception_while_warming_up_travels(scene):
    with pytest.raises(ZeroDivisionError):
        handlepool.record(lambda: 1 // 0)


def test_a_function_that_leaves_another_stream_or_device_current_is_cleaned_up_after(scene):
    other = scene.driver.create_stream()

    def leaves(x):
        y = scene.plus(x, 1)
        other.use()
        scene.driver.set_device(1)
        return y

    program = handlepool.record(leaves, scene.array(1))
    program.replay()
    assert scene.read(program.outputs) == 2


def test_a_function_that_returns_nothing_is_refused_after_its_warm_up_or_the_second_time(scene):
    ran = []
    with pytest.raises(ArgumentError, match="returned None"):
        handlepool.record(lambda: ran.append(1))
    assert ran == [1]
    results = hidden([scene.array(1), None])
    with pytest.raises(ArgumentError, match="returned None"):
        handlepool.record(lambda: scene.put(scene.array(2), lambda: 3) is not None and results().pop(0))


@handlepool.graph
def unsupported(g, x):
    return g.conv_fprop(x, x, padding=[0], stride=[1], dilation=[1])


def test_what_was_never_warm_is_warmed_by_the_recording_itself(make_driver, scheduler):
    driver = make_driver(scheduler=scheduler)
    with Scene(driver) as scene:
        x = scene.array(1)
        assert not driver.alive()["handles"]  # no slot, no side stream, no plan, no scratch
        with handlepool.record(scene.states.map, double, [x] * 4, pool=scene.pool) as program:
            program.replay()
            assert [scene.read(y) for y in program.outputs] == [2] * 4
        in_order(scene)


def test_what_is_met_under_the_capture_for_the_first_time_is_recorded_and_harms_nothing(scene, monkeypatch):
    # As where plans and slots were dropped between the two calls. That these give the same work is not looked at here.
    monkeypatch.setattr(sys.modules["handlepool.recording.first_call"], "check_same", lambda *_: None)
    monkeypatch.setattr(sys.modules["handlepool.recording.first_call"], "_shapes", lambda *_: [])
    states = handlepool.ParallelStates(3)
    made = hidden([])

    def new_each_time(x):
        made().append(scene.pool.stats())
        size = 8 * len(made())
        own = scene.put(scene.array(size=size), lambda: 5)
        scene.pool.get_workspace(1000 * len(made()))
        return states.map(double, [own] * len(made()) * 2)

    with handlepool.record(new_each_time, scene.array(1)) as program:
        stats = scene.pool.stats()
        assert stats["plans_built"] > made()[1]["plans_built"]
        assert stats["handles_created"] > made()[1]["handles_created"]
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [10] * 4


def test_a_plan_that_is_refused_under_the_capture_is_the_functions_own_error(scene):
    calls = hidden([])

    def body(x):
        calls().append(1)
        return scene.states.map(double if len(calls()) == 1 else unsupported, [x])

    with pytest.raises(HandlePoolError) as error:
        handlepool.record(body, scene.array(1))
    assert not isinstance(error.value, CaptureError)
    assert len(calls()) == 2


def test_arrays_of_objects_and_arrays_with_a_mask_are_refused(scene):
    x = np.ones((1, 4, 6, 6), np.float32)
    masked = np.ma.array(x, mask=x > 0)
    objects = np.empty(1, object)
    objects[0] = x
    with pytest.raises(ArrayTypeError, match=r"was given .*, an array of objects that holds arrays; pass a list"):
        handlepool.record(lambda given: double(given[0]), objects, pool=scene.pool)
    for use in (double, lambda x: handlepool.record(double, x, pool=scene.pool)):
        with pytest.raises(ArrayTypeError, match=r"double: .* is a numpy.ma.*MaskedArray: its mask would be lost; pass x.filled"):
            use(masked)
    with handlepool.record(double, x, pool=scene.pool) as program:
        for use in (program, program.update):
            with pytest.raises(ArrayTypeError, match=r"argument 0 is a numpy.ma.*MaskedArray: its mask would be lost"):
                use(masked)


def test_numpys_memory_may_be_filled_anew_once_a_call_has_returned(scene):
    filled, results = np.zeros(8), []
    with handlepool.record(lambda x: scene.plus(x, 1), scene.array(0), pool=scene.pool) as program:
        for value in range(5):
            filled[...] = value
            results.append(program(filled))
        assert [scene.read(each) for each in results] == [1, 2, 3, 4, 5]


def test_arguments_that_were_given_by_keyword_are_named(scene):
    program = handlepool.record(lambda x: scene.plus(x, 1), x=scene.array(1), pool=scene.pool)
    with program, pytest.raises(ArgumentError, match="0 positional arguments, and was given 1: give x by keyword"):
        program(scene.array(2))


@pytest.mark.parametrize("lanes", [None, 2])
def test_what_returns_a_generator_or_a_coroutine_is_refused_by_its_kind(scene, lanes):
    def generator(x):
        yield scene.plus(x, 1)

    async def coroutine(x):
        return scene.plus(x, 1)

    for function in (generator, coroutine):
        with pytest.raises(ArgumentError, match=f"returned a {function.__name__}, and none of its work has run"):
            handlepool.record(function, scene.array(1), pool=scene.pool, lanes=lanes)


def test_no_function_and_a_function_without_work_are_refused(scene):
    with pytest.raises(CaptureError, match="nothing to replay"):
        handlepool.record(lambda x: x, scene.array(1))
    with pytest.raises(ArgumentError, match="pass a function"):
        handlepool.record(scene.array(1))


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: [each], lambda each: (1, each), lambda each: {"xs": [each]}])
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_an_iterator_in_a_container_is_refused_and_not_used_up(scene, wrap, by):
    xs = map(scene.array, [1, 2])
    args, kwargs = ((wrap(xs),), {}) if by == "position" else ((), {"given": wrap(xs)})
    with pytest.raises(ArgumentError, match=r"iterator <map .* pass a list"):
        handlepool.record(lambda *given, **more: scene.array(1), *args, **kwargs)
    assert len(list(xs)) == 2


IMAGE, FILTER = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)


def in_a_fork_from_outside(do):
    def apart(scene, x, w, stack):
        fork = stack.enter_context(scene.states.fork())
        return lambda: do(scene, fork, x, w)

    return apart


def in_a_fork_of_another_stream(scene, x, w, stack):
    other = scene.driver.create_stream()

    def act():
        with scene.states.fork(stream=other) as fork:
            return fork.run(handlepool.conv2d, x, w)

    return act


def on_another_stream(do):
    def apart(scene, x, w, stack):
        other = scene.driver.create_stream()
        program = stack.enter_context(handlepool.record(scene.states.map, handlepool.conv2d, [x], [w]))
        executor = stack.enter_context(ParallelStateExecutor(1, pool=scene.pool))

        def act():
            with other:
                return do(program, executor, x, w)

        return act

    return apart


def replayed_on_another_stream(scene, x, w, stack):
    other = scene.driver.create_stream()
    program = stack.enter_context(handlepool.record(scene.states.map, handlepool.conv2d, [x], [w]))
    return lambda: program.replay(stream=other)


APART = {
    "branch of a graph function": in_a_fork_from_outside(lambda scene, fork, x, w: fork.run(handlepool.conv2d, x, w)),
    "branch of Python": in_a_fork_from_outside(lambda scene, fork, x, w: fork.run(scene.array, 3)),
    "map": in_a_fork_from_outside(lambda scene, fork, x, w: fork.map(handlepool.conv2d, [x, x], [w, w])),
    "fork": in_a_fork_of_another_stream,
    "launch": on_another_stream(lambda program, executor, x, w: handlepool.conv2d(x, w)),
    "replay of another program": on_another_stream(lambda program, executor, x, w: program.replay()),
    "replay with a stream": replayed_on_another_stream,
    "update of another program": on_another_stream(lambda program, executor, x, w: program.update([None], [w])),
    "task": on_another_stream(lambda program, executor, x, w: executor.submit(handlepool.conv2d, x, w).result()),
}


@pytest.mark.parametrize("apart", APART)
def test_work_on_a_stream_that_is_not_recorded_is_refused_and_not_left_out_of_replays(scene, apart):
    x, w = map(scene.driver.asarray, (IMAGE, FILTER))
    scene.stream.synchronize()
    with contextlib.ExitStack() as stack:
        act = APART[apart](scene, x, w, stack)

        def function(x):
            act()
            return handlepool.conv2d(x, w)

        with pytest.raises(CaptureError, match=r"not part of the recording.*use only the current stream and forks"):
            handlepool.record(function, x)
        act()


def test_another_drivers_work_inside_a_recording_is_its_own(scene):
    with Scene() as other:
        stream = other.driver.create_stream()

        def function(x):
            with stream:
                assert other.states.map(lambda i: i, range(2)) == [0, 1]
            return scene.plus(x, 1)

        with handlepool.record(function, scene.array(1)) as program:
            program.replay()
            assert scene.read(program.outputs) == 2


def test_work_on_a_stream_of_another_threads_recording_is_refused(scene):
    begun, done, captured = threading.Event(), threading.Event(), hidden([])

    def theirs(y):
        captured().append(scene.driver.current_stream())
        begun.set()
        done.wait(TIMEOUT)

    def record():
        with scene.driver.create_stream():
            x = scene.array(1)
            handlepool.record(second(scene, theirs), x, pool=scene.pool).close()

    def ours(y):
        with captured()[0]:
            scene.states.map(scene.array, range(2))

    other = Thread(record)
    assert begun.wait(TIMEOUT)
    try:
        with pytest.raises(CaptureError, match="not part of the recording"):
            handlepool.record(second(scene, ours), scene.array(1))
    finally:
        done.set()
    other.finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_g13_a_child_forked_inside_a_recording_may_use_a_new_pool(scene):
    def in_a_child(y):
        child = os.fork()
        if not child:
            status = 1
            try:
                with Scene(HostDriver()) as own:
                    assert own.states.map(lambda i: i, range(2)) == [0, 1]
                    with handlepool.record(work(own), own.array(1), pool=own.pool) as program:
                        program.replay()
                status = 0
            finally:
                leave(status)
        assert os.waitpid(child, 0)[1] == 0

    handlepool.record(second(scene, in_a_child), scene.array(1)).close()


def test_a_recording_inside_a_capture_is_refused_and_the_capture_lives(scene):
    x = scene.array(1)
    scene.stream.begin_capture()
    scene.put(x, lambda old: old + 1, x)
    with pytest.raises(CaptureError, match="current stream is being captured"):
        handlepool.record(work(scene), x)
    graph = scene.stream.end_capture()
    graph.launch()
    assert scene.read(x) == 2


def test_a_recording_inside_a_recording_is_refused(scene):
    def inside(y):
        with pytest.raises(CaptureError, match="inside another recording"):
            handlepool.record(work(scene), y)

    with handlepool.record(second(scene, inside), scene.array(1)) as program:
        program.replay()
        assert scene.read(program.outputs[0]) == 111


def test_a_recording_inside_a_branch_or_a_task_is_refused(scene):
    def inside():
        with pytest.raises(CaptureError, match="inside a branch or a task"):
            handlepool.record(work(scene), scene.array(1))

    with scene.states.fork() as fork:
        fork.run(inside)
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(inside).result()
    scene.states.with_state(0, lambda state: inside())


def test_a_recording_beside_open_branches_is_possible(scene):
    with scene.states.fork() as fork:
        y = fork.run(scene.plus, scene.array(1), 1)
        with handlepool.record(work(scene), scene.array(1)) as program:
            program.replay()
            assert scene.read(program.outputs[0]) == 111
    assert scene.read(y) == 2


def test_a_task_submitted_while_recording_is_refused(scene):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(int).result()
        with pytest.raises(CaptureError, match=r"cannot be recorded: .*worker thread"):
            handlepool.record(second(scene, lambda y: executor.submit(int)), scene.array(1))


def test_a_recording_that_finds_no_side_stream_is_refused(scene):
    sides = scene.pool.internals.device(0).sides
    leased = [sides.lease() for _ in range(32)]
    with pytest.raises(StateBusyError, match="a recording needs a free side stream"):
        handlepool.record(work(scene), scene.array(1))
    for slot in leased:
        sides.release(slot, captured=False)


def test_a_recording_on_a_closed_pool_is_refused(make_pool):
    pool = make_pool()
    pool.close()
    with pytest.raises(PoolClosedError):
        handlepool.record(int, pool=pool)


def test_memory_of_failed_recordings_goes_back(scene):
    driver = scene.driver
    x = scene.array(1)

    def fails():
        with pytest.raises(CaptureError):
            handlepool.record(second(scene, driver.asnumpy), x)
        deferred.run()
        scene.stream.synchronize()
        scene.pool.trim()
        with driver.relaxed():
            driver.release_cached()

    fails()
    before = driver.memory_info()[0], driver.alive()
    for _ in range(3):
        fails()
    assert (driver.memory_info()[0], driver.alive()) == before


@pytest.mark.parametrize("method", [None, "end_capture", "begin_capture"])
def test_any_call_may_fail_and_no_capture_is_left_open(method):
    k = 0
    failed = True
    while failed:
        k += 1
        with Scene(HostDriver(scheduler="adversarial", seed=k)) as scene:
            x = scene.array(1)
            handlepool.record(work(scene), x, pool=scene.pool).close()
            scene.stream.synchronize()
            error = RuntimeError(f"injected failure of call {k}")
            scene.driver.fail_at(k, method, error, RESTORES)
            try:
                with handlepool.record(work(scene), x, pool=scene.pool) as program:
                    program.replay()
                    program.update(x)
            except (RuntimeError, HandlePoolError):
                pass
            program = None
            scene.driver.fail_at(0)
            failed = error.__traceback__ is not None
            deferred.run()
            scene.pool.trim()
            in_order(scene)
    assert k > 1


def test_no_memory_for_the_graph_is_said_and_with_memory_back_the_same_call_works(scene):
    x = scene.array(1)
    scene.driver.fail_at(1, "end_capture", MemoryError("out of memory"), RESTORES)
    with pytest.raises(OutOfMemoryError, match=r"the graph of .* found no memory on device 0 \(out of memory\): free arrays"):
        handlepool.record(work(scene), x)
    scene.driver.fail_at(0)
    with handlepool.record(work(scene), x) as program:
        program.replay()


# Replays


def test_a_replay_after_the_close_is_refused(scene):
    program = handlepool.record(work(scene), scene.array(1))
    program.close()
    x = scene.array(1)
    for use in (program.replay, lambda: program.replay(scene.stream), lambda: program.update(x), lambda: program.outputs):
        with pytest.raises(PoolClosedError, match=r"the program .* was closed"):
            use()


def test_a_replay_after_the_pools_close_is_refused_and_the_program_can_be_closed(make_driver, scheduler):
    driver = make_driver(scheduler=scheduler)
    with Scene(driver) as scene:
        program = handlepool.record(work(scene), scene.array(1), pool=scene.pool)
        program.replay()
        scene.pool.close()
        for use in (program.replay, lambda: program.update(scene.array(1))):
            with pytest.raises(PoolClosedError):
                use()
        program.close()
    assert driver.alive()["scratch_bytes"] == driver.alive()["events"] == 0


def test_a_replay_on_another_device_is_refused(scene):
    program = handlepool.record(work(scene), scene.array(1))
    with scene.driver.device(1):
        other = scene.driver.create_stream()
        for use in (program.replay, lambda: program.replay(other), lambda: program.replay(scene.stream)):
            with pytest.raises(DeviceMismatchError, match="device 0"):
                use()
    for stream in (other, other.ptr, Foreign(other.ptr)):
        with pytest.raises(DeviceMismatchError, match="device 1"):
            program.replay(stream)
    program.replay()
    assert scene.read(program.outputs[0]) == 111


def test_a_replay_on_no_stream_is_refused(scene):
    program = handlepool.record(work(scene), scene.array(1))
    with pytest.raises(StreamError):
        program.replay("stream")


def test_a_replay_in_a_capture_is_refused_and_the_capture_lives(scene):
    x = scene.array(1)
    program = handlepool.record(work(scene), x)
    other = scene.driver.create_stream()
    for stream in (scene.stream, other):
        stream.begin_capture()
        for use in (functools.partial(program.replay, stream), functools.partial(program.update, x)):
            if stream is scene.stream or use.func == program.replay:
                with pytest.raises(CaptureError, match="is being captured"):
                    use()
        stream.end_capture()
    scene.stream.begin_capture()
    with pytest.raises(CaptureError, match="is being captured"):  # nothing can be ordered after the last use there
        program.replay(other)
    with pytest.raises(CaptureError, match="is being captured"):
        program.close()
    scene.stream.end_capture()
    program.replay(other)
    with other:
        assert scene.read(program.outputs[0]) == 111


def test_a_replay_or_an_update_while_another_thread_updates_is_refused(scene, in_thread, monkeypatch):
    x = scene.array(1)
    program = handlepool.record(work(scene), x)
    copy = scene.driver.copy

    def meanwhile(target, source):
        for use in (program.replay, lambda: program.update(source)):
            with pytest.raises(OwnershipError, match="belongs to thread 'MainThread'"):
                in_thread(use)
        copy(target, source)

    scene.driver.copy = meanwhile
    program.update(scene.array(5))
    program.replay()
    assert scene.read(program.outputs[0]) == 115


USES = {
    "replay": lambda program, scene: program.replay(scene.other),
    "update": lambda program, scene: program.update(scene.array(7)),
    "close": lambda program, scene: program.close(),
}


@pytest.mark.parametrize("inner", USES)
@pytest.mark.parametrize("outer", USES)
@pytest.mark.parametrize("replays", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["first use", "again"])
def test_g10_a_finaliser_at_every_line_of_a_use_neither_waits_for_its_own_thread_nor_harms_it(scene, outer, inner, replays):
    scene.other = scene.driver.create_stream()
    refused = []

    def use(program):
        with contextlib.suppress(*[PoolClosedError] * ("close" in (outer, inner))):
            USES[outer](program, scene)

    def finaliser(program):
        try:
            USES[inner](program, scene)
        except OwnershipError as error:
            refused.append(str(error))
        except PoolClosedError:
            assert outer == "close"

    for k in itertools.count(1):
        program = handlepool.record(work(scene), scene.array(1))
        for _ in range(replays):
            program.replay(scene.other)
        if at_line(k, functools.partial(use, program), functools.partial(finaliser, program)) is None:
            break
        if not program.closed:
            program.update(scene.array(9))
            program.replay()
            assert scene.read(program.outputs[0]) == 119
        program.close()
    assert k > 10
    assert refused
    assert all("by this thread" in message for message in refused)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_g13_a_forked_child_is_told_and_touches_nothing():
    with Scene() as scene:
        program = handlepool.record(work(scene), scene.array(1), pool=scene.pool)
        program.replay()
        lock_of(program).acquire()  # as another thread of the parent may have it
        scene.driver.calls.clear()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                told = 0
                for use in (program.replay, program.update):
                    try:
                        use()
                    except handlepool.ForkedProcessError:
                        told += 1
                program.close()
                del program
                deferred.run()
                touched = scene.driver.calls.keys() - {"current_device", "current_stream"}
                code = 0 if told == 2 and not touched else 2
            finally:
                leave(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lock_of(program).release()
        program.replay()
        assert scene.read(program.outputs[0]) == 111


def test_a_lost_context_is_told(make_driver):
    scene = Scene(HostDriver())
    with scene.stream:
        program = handlepool.record(work(scene), scene.array(1), pool=scene.pool)
        scene.driver.lose_context()
        for _ in range(2):
            with pytest.raises(handlepool.PoisonedContextError):
                program.replay()
        program.close()
        scene.pool.close()


# Updates


@pytest.mark.parametrize(
    ("new", "error", "says"),
    [
        (lambda s: s.driver.empty((9,), (8,), F8), ArgumentError, r"shape \(8,\) and now has shape \(9,\)"),
        (lambda s: s.driver.empty((8, 1), (8, 8), F8), ArgumentError, "shape"),
        (lambda s: s.driver.empty((8,), (4,), np.dtype("f4")), ArgumentError, "type float64 and now has type float32"),
        (
            lambda s: s.driver.empty((16,), (8,), F8)[::2],
            ArgumentError,
            r"strides \(8,\) and now has strides \(16,\), in bytes; lay it out as it was recorded, contiguous, or record",
        ),
        (lambda s: 1.0, ArrayTypeError, "is a float"),
        (lambda s: [s.array(1), s.array(2)], ArgumentError, "recorded as an array, and is now a list"),
    ],
)
def test_an_update_with_another_geometry_or_type_says_what_differs(scene, new, error, says):
    program = handlepool.record(work(scene), scene.array(1))
    with pytest.raises(error, match=says):
        program.update(new(scene))
    program.replay()
    assert scene.read(program.outputs[0]) == 111


def test_an_update_that_lost_the_layout_names_it(scene):
    x = scene.driver.empty((2, 3, 4, 5), (480, 8, 120, 24), F8)
    program = handlepool.record(lambda x: double(x), x)
    says = r"strides \(480, 8, 120, 24\) and now has strides \(480, 160, 40, 8\), in bytes; .* recorded, channels-last, or record"
    with pytest.raises(ArgumentError, match=says):
        program.update(x.copy())
    program.update(x.copy(order="K"))
    with pytest.raises(ArgumentError, match="lay it out as it was recorded, or record"):
        handlepool.record(lambda x: double(x), x[:, :2]).update(x[:, :2].copy())


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (lambda x: {"a": x}, r"argument 0 was recorded with the key 'b'"),
        (lambda x: {"a": x, "b": [x, [x]], "c": x}, r"argument 0 was recorded without the key 'c'; .* 'a', 'b'"),
        (lambda x: {"x": x, "y": [x, [x]]}, r"argument 0 was recorded without the key 'x'; .* 'a', 'b'"),
        (lambda x: [x, [x, [x]]], r"argument 0 was recorded as a dictionary, and is now a list"),
        (lambda x: x, r"argument 0 was recorded as a dictionary, and is now a .*HostArray"),
        (lambda x: {"a": [x], "b": [x, [x]]}, r"argument 0\['a'\] was recorded as an array, and is now a list"),
        (lambda x: {"a": {"a": x}, "b": [x, [x]]}, r"argument 0\['a'\] was recorded as an array, and is now a dict"),
        (lambda x: {"a": x, "b": [[x], x]}, r"argument 0\['b'\]\[0\] was recorded as an array, and is now a list"),
        (
            lambda x: {"a": x, "b": [x, x]},
            r"argument 0\['b'\]\[1\] was recorded as a list or a tuple, and is now a .*HostArray",
        ),
        (
            lambda x: {"a": x, "b": {0: x, 1: [x]}},
            r"argument 0\['b'\] was recorded as a list or a tuple, and is now a dict",
        ),
        (lambda x: {"a": x, "b": [x, [x, x]]}, r"argument 0\['b'\]\[1\] was recorded with 1 entries, and was given 2"),
        (lambda x: {"a": x, "b": [x]}, r"argument 0\['b'\] was recorded with 2 entries, and was given 1"),
        (
            lambda x: {"a": x, "b": [x, [x[:4]]]},
            r"argument 0\['b'\]\[1\]\[0\] was recorded with shape \(8,\) and now has shape \(4,\)",
        ),
    ],
)
def test_an_update_of_another_structure_names_the_place_and_copies_nothing(scene, new, says):
    def body(given):
        return [scene.plus(x, 0) for x in (given["a"], given["b"][0], given["b"][1][0])]

    program = handlepool.record(body, {"a": scene.array(1), "b": [scene.array(2), [scene.array(3)]]})
    with pytest.raises(ArgumentError, match=says):
        program.update(new(scene.array(50)))
    program.replay()
    assert [scene.read(y) for y in program.outputs] == [1, 2, 3]


@pytest.mark.parametrize("new", [3, 2.0, True, "2", [2], np.zeros(8)], ids=repr)
def test_an_update_of_what_is_no_array_is_refused(scene, new):
    program = handlepool.record(lambda x, options: scene.plus(x, options["add"][0]), scene.array(1), {"add": [2, scene.array(0)]})
    with pytest.raises(ArgumentError, match=r"argument 1\['add'\]\[0\] was recorded as 2 and is now "):
        program.update(scene.array(5), {"add": [new, None]})
    program.replay()
    assert scene.read(program.outputs) == 3


def test_an_update_with_two_values_for_one_memory_names_both_places(scene):
    x = scene.array(1)
    given = {"x": x, "part": x[2:], "first": x[:2]}

    def body(x, more):
        return scene.plus(x, 0)

    program = handlepool.record(body, x, more=given)
    new, other = scene.array(5), scene.array(6)
    both = r"body: argument 0 and more\['part'\] were recorded with the same memory, and were now given two different"
    for part in (other[2:], new[:6], x[2:]):
        with pytest.raises(ArgumentError, match=both):
            program.update(new, more={"x": None, "part": part, "first": None})
    program.replay()
    assert scene.read(program.outputs) == 1
    program.update(new, more={"x": new, "part": new[2:], "first": new[:2]})
    program.update(None, more={"x": None, "part": other[2:], "first": other[:2]})
    program.replay()
    assert scene.read(program.outputs) == 6


def test_an_update_of_an_array_of_another_library_says_so_and_what_to_do(scene):
    class Interface:
        def __init__(self, array):
            self.__array_interface__ = array.__array_interface__

    x, foreign = scene.array(1), Interface(np.ones(8))
    program = handlepool.record(lambda x, *more, **named: scene.plus(x, 0), x, [foreign], y={"z": foreign})
    says = r"was recorded as a test_program_misuse.*Interface, which is no array of the host driver.*pool.driver.asarray"
    for args, kwargs, place in (
        ((scene.array(5), [x]), {}, r"argument 1\[0\] "),
        ((scene.array(5), [Interface(np.ones(8))]), {}, r"argument 1\[0\] "),
        ((scene.array(5),), {"y": {"z": x}}, r"y\['z'\] "),
    ):
        with pytest.raises(ArgumentError, match=place + says):
            program.update(*args, **kwargs)
    with pytest.raises(ArrayTypeError, match=r"argument 0 is a .*Interface; the host driver takes .*numpy.ndarray; convert it"):
        program.update(foreign, None)
    program.replay()
    assert scene.read(program.outputs) == 1


def test_an_update_with_an_array_of_another_device_is_refused(scene):
    program = handlepool.record(work(scene), scene.array(1))
    with scene.driver.device(1):
        elsewhere = scene.array()
    with pytest.raises(DeviceMismatchError, match="is on device 1"):
        program.update(elsewhere)


def test_an_update_with_another_device_current_is_refused(scene):
    x = scene.array(1)
    program = handlepool.record(work(scene), x)
    with scene.driver.device(1), scene.driver.create_stream():
        with pytest.raises(DeviceMismatchError, match="device 0"):
            program.update(x)
        with pytest.raises(DeviceMismatchError, match="device 0"):
            program.update(scene.driver.asarray(np.ones(8)))
    program.update(scene.array(5))
    program.replay()
    assert scene.read(program.outputs[0]) == 115


def test_an_update_with_another_count_or_name_is_refused(scene):
    program = handlepool.record(lambda x, *, y: scene.put(scene.array(), np.add, x, y), scene.array(1), y=scene.array(2))
    with pytest.raises(ArgumentError, match="1 positional arguments"):
        program.update(scene.array(1), scene.array(2))
    with pytest.raises(ArgumentError, match="1 positional arguments"):
        program.update()
    with pytest.raises(ArgumentError, match="'z': pass only y by keyword"):
        program.update(z=scene.array(1))


def test_programs_of_two_pools_know_their_own(scene):
    with HandlePool(driver=scene.driver) as other:
        program = handlepool.record(lambda x: (other.get_workspace(5000), scene.plus(x, 1))[1], scene.array(1))
        assert other.stats()["scratch_bytes_recorded"] > 0
        program.close()
        assert other.stats()["scratch_bytes_recorded"] == 0


def test_recordings_of_two_threads_know_their_own(scene):
    def body(value):
        with scene.driver.create_stream():
            program = handlepool.record(work(scene), scene.array(value))
            program.replay()
            return scene.read(program.outputs[0])

    threads = [Thread(body, value) for value in range(4)]
    assert [thread.finish() for thread in threads] == [110, 111, 112, 113]


@pytest.mark.parametrize("make", [np.broadcast_to, lambda values, shape: np.frombuffer(values.tobytes()), None])
def test_an_update_of_an_array_that_cannot_be_written_is_refused(make_driver, make):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        array = np.arange(8.0)
        if make is None:
            array.flags.writeable = False
        else:
            array = make(array, (8,))
        y = scene.array(1)
        with handlepool.record(lambda x, y: scene.put(scene.array(), np.add, x, y), array, y, pool=scene.pool) as program:
            with pytest.raises(ArgumentError, match="argument 0 was recorded as a read-only array"):
                program.update(np.zeros(8), scene.array(5))
            program.update(None, scene.array(2))
            program.replay()
            assert (scene.driver.asnumpy(program.outputs) == np.arange(8) + 2).all()


def test_an_update_by_a_keyword_that_was_positional_says_so(scene):
    program = handlepool.record(work(scene), scene.array(1))
    with program, pytest.raises(ArgumentError, match="keyword 'x': pass all arguments by position"):
        program.update(x=scene.array(2))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_program_cannot_be_copied(scene, duplicate):
    with handlepool.record(work(scene), scene.array(1)) as program:
        with pytest.raises(TypeError, match="owns a graph and memory and cannot be copied or pickled"):
            duplicate(program)
        program.replay()


def doubled(scene, given):
    """Give back what it was given otherwise, and the sum of that."""
    given["x"] = scene.plus(given["x"], 10)
    return scene.plus(given["x"], 1)


def turned(scene, given):
    """Turn a list around."""
    given.reverse()
    return scene.plus(given[0], 1)


def taken(scene, given):
    """Take something out of a dictionary."""
    return scene.plus(given.pop("x"), 1)


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (doubled, r"argument 1\['x'\] is another object now"),
        (turned, r"argument 1\[0\] is another object now"),
        (taken, r"argument 1\['x'\] is gone"),
    ],
)
def test_a_function_that_changes_a_list_or_dictionary_that_it_is_given_is_refused(scene, function, what, lanes):
    x, y = scene.array(1), scene.array(2)
    given = [x, y] if function is turned else {"x": x, "y": y}
    with pytest.raises(
        CaptureError, match=f"{function.__name__} changed a list or dictionary .*: {what}. In the function, change a copy"
    ):
        handlepool.record(function, scene, given, lanes=lanes)
    given = [x, y] if function is turned else {"x": x, "y": y}
    with handlepool.record(lambda given: function(scene, given.copy()), given, lanes=lanes) as program:
        program.replay()
        assert scene.read(program.outputs) == {doubled: 12, turned: 3}.get(function, 2)


@pytest.mark.parametrize("lanes", [None, 4])
def test_entries_of_keys_that_look_alike_are_told_apart(scene, lanes):
    one, other = (0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 2)

    def moved(given):
        given[one] = given.pop(one)
        return scene.plus(given[one], 1)

    def changed(given):
        given[one] = scene.plus(given[one], 1)
        return given[one]

    given = {one: scene.array(1), other: scene.array(2)}
    with handlepool.record(moved, given, lanes=lanes) as program:
        program.replay()
        assert scene.read(program.outputs) == 2
    with pytest.raises(CaptureError, match=r"argument 0\[\(0, 0, .* is another object now"):
        handlepool.record(changed, given, lanes=lanes)


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_container_that_two_ways_lead_to_is_looked_at_as_it_is(scene, lanes):
    def aliased(given, context):
        context["all"], given["last"] = given, given["both"]
        return scene.plus(given["both"][0], 1)

    def changed(given, context):
        given["both"] = [scene.plus(given["both"][0], 1)]
        return given["both"][0]

    def none(given, context):
        context["made"] = scene.plus(given["x"], 1)
        return context["made"]

    both = [scene.array(2)]
    given = {"both": both, "again": both, "x": scene.array(1)}
    with handlepool.record(aliased, given, {}, lanes=lanes) as program:
        program.replay()
        assert scene.read(program.outputs) == 3
    for function, context, what in ((changed, {}, r"0\['both'\]"), (none, {"made": None}, r"1\['made'\]")):
        with pytest.raises(CaptureError, match=rf"argument {what} is another object now"):
            handlepool.record(function, given, context, lanes=lanes)


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_dictionary_may_be_given_new_entries(scene, lanes):
    def function(scene, given):
        given["again"], given["itself"] = given["x"], given
        given["y"] = scene.plus(given["again"], 10)
        given["z"] = scene.plus(given["y"], 100)
        return given["z"]

    x = scene.array(1)
    with handlepool.record(function, scene, {"x": x}, lanes=lanes) as program:
        assert scene.read(program({"x": scene.array(2)})) == 112


# Containers without an end


def endless(kind, x):
    """A container that contains itself, or lies deeper in others than a recursion goes."""
    inner = [x]
    if kind == "deep":
        for _ in range(3000):
            inner = [inner]
        return inner
    if kind == "dict":
        outer = {"x": x}
        outer["more"] = outer
        return outer
    outer = (x, inner) if kind == "tuple" else inner
    inner.append(outer)
    return outer


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "deep"])
@pytest.mark.parametrize("lanes", [None, 2])
def test_a_container_without_an_end_is_refused_in_plain_words(scene, kind, lanes):
    x, says = scene.array(1), "nested in more than 100 containers" if kind == "deep" else f"a {kind} that contains itself"
    with pytest.raises(ArgumentError, match=says):
        handlepool.record(lambda given: scene.plus(x, 1), endless(kind, x), lanes=lanes)
    with pytest.raises(ArgumentError, match=says):
        handlepool.record(lambda given: scene.plus(x, 1), given={"a": [endless(kind, x)]}, lanes=lanes)
    with handlepool.record(lambda x: [scene.plus(x, 1), endless(kind, scene.plus(x, 2))], x, lanes=lanes) as program:
        with pytest.raises(ArgumentError, match=f"<lambda> returned a .*{says[2:]}"):
            program(scene.array(5))
        program.replay()
        assert scene.read(program.outputs[0]) == 2


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "deep"])
def test_an_update_with_a_container_without_an_end_names_the_place(scene, kind):
    with handlepool.record(lambda given: scene.plus(given[0], 1), [scene.array(1), [2]]) as program:
        for given in (endless(kind, scene.array(2)), [scene.array(2), endless(kind, scene.array(2))]):
            with pytest.raises(ArgumentError, match="argument 0"):
                program(given)
        assert scene.read(program(None)) == 2


def test_one_list_in_two_places_has_an_end(scene):
    pair = [scene.array(1), scene.array(2)]

    def function(given):
        return scene.put(scene.array(), np.add, given[0][0], given[1]["a"][1])

    with handlepool.record(function, [pair, {"a": pair}]) as program:
        assert scene.read(program(None)) == 3


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "deep"])
def test_branches_take_containers_without_an_end(scene, kind):
    x = scene.array(1)
    with scene.states.fork() as fork:
        y = fork.run(lambda given: scene.plus(x, 1), endless(kind, x))
    ys = scene.states.map(lambda given: endless(kind, scene.plus(x, 2)), [endless(kind, x)] * 2)
    assert scene.read(y) == 2
    assert len(ys) == 2
