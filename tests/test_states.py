"""Forks and states apart from order and memory: who may use them, what they leave as it was (guarantee 3), captures, ends."""

import os
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from scenes import TIMEOUT, Scene, Thread, over_seeds

import handlepool
from handlepool import (
    ArgumentError,
    CaptureError,
    DeviceMismatchError,
    OwnershipError,
    ParallelStates,
    PoolClosedError,
    StreamError,
)


class BranchError(Exception):
    pass


def leased(scene):
    return scene.pool.stats()["handles_leased"]


def works(scene):
    """Whether pool, states and the caller's stream are usable."""
    x = scene.array(1)
    return [scene.read(y) for y in scene.states.map(scene.plus, [x] * 5, range(5))] == [1, 2, 3, 4, 5] and leased(scene) == 0


# ParallelStates


@pytest.mark.parametrize("count", [0, 33, -1, 1.0, "4", None, True])
def test_a_number_of_states_that_is_none_is_refused(count):
    with Scene() as scene, pytest.raises(ArgumentError, match=rf"ParallelStates\({count!r}\): 1 to 32 states"):
        ParallelStates(count, pool=scene.pool)


@pytest.mark.parametrize("count", [1, 32])
def test_any_number_of_states_from_1_to_32(count):
    with Scene(count=count) as scene:
        assert len(scene.states) == count
        assert len(set(scene.states.map(lambda _: scene.driver.current_stream().ptr, range(64)))) == count
        assert f"{count} of" in repr(scene.states)


def test_making_states_and_forks_makes_nothing_on_the_device():
    with Scene() as scene:
        scene.driver.calls.clear()
        ParallelStates(4, pool=scene.pool).fork()
        assert not scene.driver.calls


def test_states_without_a_pool_are_of_the_default_pool(monkeypatch):
    with Scene() as scene:
        monkeypatch.setattr("handlepool.pool._default", scene.pool)
        assert ParallelStates(2).pool is scene.pool


def test_a_fork_says_in_its_repr_what_it_has():
    with Scene() as scene:
        fork = scene.states.fork()
        assert "not open" in repr(fork)
        with fork:
            fork.run(lambda: None)
            assert "1 of 4 states leased" in repr(fork)
        assert "not open" in repr(fork)


def test_an_empty_fork_leases_nothing_and_orders_nothing():
    with Scene() as scene:
        with scene.states.fork():
            pass
        scene.driver.calls.clear()
        with scene.states.fork():
            pass
        calls = scene.driver.calls
        assert not calls["record_event"] + calls["wait_event"] + calls["create_handle"] + calls["create_stream"]


# Who may use a fork, and when


def test_a_fork_is_the_threads_that_entered_it():
    with Scene() as scene, scene.states.fork() as fork:
        with pytest.raises(OwnershipError, match=r"belongs to the thread.*ParallelStateExecutor"):
            Thread(fork.run, lambda: None).finish()
        with pytest.raises(OwnershipError):
            Thread(fork.__exit__, None, None, None).finish()
        assert fork.run(lambda: "mine") == "mine"


def test_a_fork_that_was_made_in_another_thread_may_be_entered():
    with Scene() as scene, Thread(scene.states.fork).finish() as fork:
        assert fork.run(lambda: 1) == 1


def test_run_after_the_fork_was_left():
    with Scene() as scene:
        with scene.states.fork() as fork:
            fork.run(lambda: None)
        with pytest.raises(PoolClosedError, match="was left"):
            fork.run(lambda: pytest.fail("it ran"))
        assert works(scene)


def test_run_before_the_fork_was_entered():
    with Scene() as scene, pytest.raises(PoolClosedError, match="not entered"):
        scene.states.fork().run(lambda: pytest.fail("it ran"))


@pytest.mark.parametrize("left", [False, True], ids=["inside", "afterwards"])
def test_a_fork_cannot_be_entered_twice(left):
    with Scene() as scene:
        with scene.states.fork() as fork:
            if not left:
                with pytest.raises(OwnershipError, match="entered already"):
                    fork.__enter__()
        with pytest.raises(OwnershipError, match="entered already"):
            fork.__enter__()
        assert works(scene)


def test_a_fork_of_a_pool_that_was_closed():
    with Scene() as scene:
        scene.pool.close()
        for use in (scene.states.fork().__enter__, lambda: scene.states.map(str, [1]), lambda: scene.states.with_state(0, str)):
            with pytest.raises(PoolClosedError):
                use()


def test_a_pool_that_is_closed_inside_a_fork_refuses_branches_and_loses_no_handle():
    with Scene() as scene:
        with scene.states.fork() as fork:
            fork.run(lambda: None)
            scene.pool.close()
            with pytest.raises(PoolClosedError):
                fork.run(lambda: pytest.fail("it ran"))
        stats = scene.pool.stats()
        assert stats["handles_created"] == stats["handles_destroyed"] == 1


# The stream that is given


def test_a_stream_of_another_device_is_refused_before_anything_is_made():
    with Scene() as scene:
        with scene.driver.device(1):
            foreign = scene.driver.create_stream()
        scene.driver.calls.clear()
        with pytest.raises(DeviceMismatchError, match=r"device 1.*current device is 0"):
            scene.states.fork(stream=foreign).__enter__()
        with pytest.raises(DeviceMismatchError):
            scene.states.fork(stream=foreign.ptr).__enter__()
        calls = scene.driver.calls
        assert not calls["create_handle"] + calls["create_stream"] + calls["record_event"] + calls["wait_event"]
        assert works(scene)


@pytest.mark.parametrize("stream", ["stream", 1.5, True, object()])
def test_what_is_no_stream_is_refused(stream):
    with Scene() as scene:
        with pytest.raises(StreamError):
            scene.states.fork(stream=stream).__enter__()
        assert works(scene)


@pytest.mark.parametrize("form", ["object", "pointer", "protocol"])
def test_g6_a_stream_may_be_given_in_any_form(form):
    class Foreign:
        def __init__(self, stream):
            self.stream = stream

        def __cuda_stream__(self):
            return 0, self.stream.ptr

    def scenario(scene):
        other = scene.driver.create_stream()
        stream = {"object": other, "pointer": other.ptr, "protocol": Foreign(other)}[form]
        with other:
            x, y = scene.array(1), scene.array()
        with scene.states.fork(stream=stream) as fork:
            fork.run(scene.put, y, lambda x: x + 1, x)
        with other:
            return scene.read(y)

    assert set(over_seeds(scenario, seeds=range(50))) == {2}


# Device and stream are left as they were (guarantee 3)


def changes_everything(scene):
    scene.driver.create_stream().use()
    scene.driver.set_device(1)
    scene.driver.create_stream().use()


@pytest.mark.parametrize("error", [None, BranchError, KeyboardInterrupt])
@pytest.mark.parametrize("region", ["run", "map", "with_state", "inline"])
def test_g3_device_and_stream_and_allocator_are_as_before_whatever_a_branch_does(region, error):
    def branch(*_):
        changes_everything(scene)
        scene.driver.swap_allocator(None)
        if error is not None:
            raise error

    with Scene() as scene:
        allocator = scene.driver.swap_allocator(None)
        hoard = ParallelStates(32, pool=scene.pool).fork()
        hoard.__enter__()
        if region == "inline":
            for _ in range(32):
                hoard.run(lambda: None)
        with nullcontext() if error is None else pytest.raises(error):
            if region == "map":
                scene.states.map(branch, [1])
            elif region == "with_state":
                scene.states.with_state(0, branch)
            else:
                with scene.states.fork() as fork:
                    fork.run(branch)
        assert scene.driver.current_device() == 0
        assert scene.driver.current_stream() is scene.stream
        assert scene.driver.swap_allocator(None) is allocator
        hoard.__exit__(None, None, None)
        assert handlepool.regions.thread.region is None
        assert handlepool.regions.thread.pool is None
        assert works(scene)


def test_g3_device_and_stream_are_as_before_inside_the_body_too():
    with Scene() as scene, scene.driver.device(1), scene.driver.create_stream() as stream, scene.states.fork() as fork:
        fork.run(lambda: None)
        assert scene.driver.current_device() == 1
        assert scene.driver.current_stream() is stream


def test_g3_a_branch_runs_on_its_own_device_from_a_body_on_another():
    with Scene() as scene, scene.states.fork() as fork, scene.driver.device(1):
        assert fork.run(scene.driver.current_device) == 0
        assert scene.driver.current_device() == 1


@handlepool.graph
def double(g, x):
    return g.add(x, x)


def test_g3_a_graph_function_in_a_body_on_another_device_runs_on_the_forks():
    def scenario(scene):
        x = scene.array(4)
        with scene.states.fork() as fork, scene.driver.device(1):
            y = fork.run(double, x)
            assert scene.driver.current_device() == 1
        return scene.driver.array_device(y), scene.read(y)

    assert set(over_seeds(scenario, seeds=range(30))) == {(0, 8)}


def test_g6_a_graph_function_in_a_body_on_another_stream_orders_with_the_forks():
    def scenario(scene):
        with scene.states.fork() as fork:
            x = scene.array(4)
            with scene.driver.create_stream():
                y = fork.run(double, x)
        return scene.read(y)

    assert set(over_seeds(scenario, seeds=range(50))) == {8}


# Whatever fails on the way, nothing is lost


FALLIBLE = (
    *("create_handle", "create_stream", "create_event", "bind_handle", "launch_buffer", "capture_id"),
    *("record_event", "wait_event", "region_allocator", "allocate", "scratch_array"),
)


@pytest.mark.parametrize("method", FALLIBLE)
def test_nothing_is_lost_by_a_failure_of_any_driver_call_in_a_fork(method):
    with Scene(count=2) as scene:
        calls, k = scene.driver.calls, 0
        calls[method] = k
        while calls[method] >= k:
            k += 1
            scene.pool.trim()  # so that the side slots are made anew
            calls.clear()
            scene.driver.fail_at(k, method)
            try:
                scene.states.map(scene.pool.get_workspace, [256, 512, 1024])
            except Exception:
                assert calls[method] >= k
            scene.driver.fail_at(0)
            reached = calls[method]
            assert scene.driver.current_device() == 0
            assert scene.driver.current_stream() is scene.stream
            assert handlepool.regions.thread.region is None
            assert works(scene), f"after a failure of call {k}"
            calls[method] = reached
        assert k > 1, "nothing failed"


def test_a_side_slot_whose_handle_cannot_be_repaired_is_not_lost():
    with Scene(count=1) as scene:

        def branch():
            handle = scene.pool.get_handle()
            scene.driver.destroy_handle(handle)

        scene.states.map(lambda _: branch(), [0])
        for call in (1, 2):  # the second after memory was given back
            scene.driver.fail_at(call, "bind_handle")
            with pytest.raises(RuntimeError, match="injected"):
                scene.states.map(lambda _: branch(), range(3))
            scene.driver.fail_at(0)
        assert works(scene)


def test_a_graph_functions_bad_arguments_cost_no_side_slot():
    with Scene() as scene, scene.states.fork() as fork:
        with pytest.raises(ArgumentError):
            fork.run(double)
        assert leased(scene) == 0


# Captures


def test_g9_a_fork_under_capture_is_recorded_and_keeps_its_side_slots_until_the_capture_ends():
    with Scene() as scene:
        x, y = scene.array(1), scene.array()
        assert works(scene)
        scene.stream.begin_capture()
        with scene.states.fork() as fork:
            fork.run(scene.put, y, lambda x: x + 1, x)
        assert scene.pool.stats()["handles_captured"] == 1
        graph = scene.stream.end_capture()
        assert works(scene)
        assert scene.pool.stats()["handles_captured"] == 0
        graph.launch(scene.stream)
        assert scene.read(y) == 2


def test_g9_a_capture_that_begins_inside_a_fork_keeps_the_side_slots_as_well():
    with Scene() as scene:
        assert works(scene)
        y = scene.array()
        with scene.states.fork() as fork:
            scene.stream.begin_capture()
            fork.run(scene.put, y, lambda: 3)
        assert scene.pool.stats()["handles_captured"] == 1
        scene.stream.end_capture().launch(scene.stream)
        assert scene.read(y) == 3


def test_g9_a_branch_from_before_the_capture_cannot_be_joined_and_the_capture_survives():
    with Scene() as scene:
        assert works(scene)
        y = scene.array()
        with pytest.raises(CaptureError, match="began to be captured inside a fork"), scene.states.fork() as fork:  # noqa: PT012
            fork.run(scene.array, 1)
            scene.stream.begin_capture()
        scene.put(y, lambda: 3)
        scene.stream.end_capture().launch(scene.stream)
        assert scene.read(y) == 3
        assert works(scene)


def test_g9_arguments_that_are_refused_leave_a_capture_alone():
    with Scene() as scene:
        assert works(scene)
        scene.stream.begin_capture()
        with pytest.raises(ArgumentError), scene.states.fork() as fork:
            fork.run(double)
        scene.stream.end_capture()
        assert works(scene)


# Ends: threads, forgotten forks, forked processes


def test_g11_a_thread_that_ends_inside_a_fork_gives_its_side_slots_back():
    def scenario(scene):
        x, y = scene.array(1), scene.array()

        def work():
            with scene.stream:
                fork = scene.states.fork()
                fork.__enter__()
                fork.run(scene.put, y, lambda x: x + 1, x)

        Thread(work).finish()
        assert leased(scene) == 1
        assert works(scene)
        return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g11_what_a_forgotten_fork_kept_is_kept_until_it_is_joined():
    def scenario(scene):
        def work():
            with scene.stream:
                x = scene.array(1)
                fork = scene.states.fork()
                fork.__enter__()
                fork.run(scene.put, y, lambda x: x + 1, x)

        y = scene.array()
        Thread(work).finish()
        scene.array(100)  # would be the block of x
        assert works(scene)
        return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g10_dropping_an_open_fork_makes_no_driver_call():
    with Scene() as scene:
        fork = scene.states.fork()
        fork.__enter__()
        fork.run(lambda: None)
        scene.driver.calls.clear()
        del fork
        assert not scene.driver.calls
        assert works(scene)


def test_g9_a_forgotten_fork_under_capture_waits_for_the_captures_end():
    with Scene() as scene:
        fork = scene.states.fork()
        fork.__enter__()
        fork.run(lambda: None)
        other = scene.driver.create_stream()
        scene.stream.begin_capture()
        del fork
        with other:
            assert scene.states.map(str, [1]) == ["1"]
        assert leased(scene) == 1
        scene.stream.end_capture()
        assert works(scene)


def test_a_forgotten_fork_on_the_per_thread_default_stream_gives_its_side_slots_back():
    with Scene() as scene:

        def work():
            with scene.driver.per_thread_stream:
                fork = scene.states.fork()
                fork.__enter__()
                fork.run(lambda: None)

        Thread(work).finish()
        assert works(scene)


def test_a_generator_that_is_never_finished_gives_its_side_slots_back():
    with Scene() as scene:

        def outputs():
            with scene.states.fork() as fork:
                for value in range(4):
                    yield fork.run(scene.array, value)

        generator = outputs()
        next(generator)
        del generator
        assert works(scene)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_g13_a_child_that_is_forked_inside_a_fork_leaves_it_without_a_driver_call():
    with Scene() as scene, scene.states.fork() as fork:
        fork.run(lambda: None)
        scene.driver.calls.clear()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    fork.run(lambda: None)
                except handlepool.ForkedProcessError:
                    fork.__exit__(None, None, None)
                    touched = scene.driver.calls["record_event"] + scene.driver.calls["wait_event"]
                    code = 0 if not touched else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert fork.run(lambda: "the parent is unaffected")


# Threads that come and go


def test_g11_threads_that_fork_one_after_another_make_no_more_handles():
    with Scene() as scene:

        def work():
            with scene.driver.create_stream():
                assert works(scene)

        for _ in range(5):
            Thread(work).finish()
        created = scene.pool.stats()["handles_created"]
        for _ in range(100):
            Thread(work).finish()
        assert scene.pool.stats()["handles_created"] == created


def test_forty_threads_that_fork_at_a_time_share_32_side_slots(make_driver):
    with Scene(make_driver()) as scene:
        meeting = threading.Barrier(40)

        def work(number):
            with scene.driver.create_stream() as stream:
                x = scene.array(number)
                with scene.states.fork() as fork:
                    y = fork.run(scene.plus, x, 1)
                    meeting.wait(TIMEOUT)
                    z = fork.run(scene.plus, x, 2)
                stream.synchronize()
                return scene.read(y), scene.read(z)

        threads = [Thread(work, number) for number in range(40)]
        assert [thread.finish() for thread in threads] == [(n + 1, n + 2) for n in range(40)]
        assert scene.pool.stats()["handles_leased"] == 0
        with scene.driver.create_stream():
            assert np.isfinite(scene.read(scene.array(1)))
