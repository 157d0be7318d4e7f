"""Forks that end badly: failures, captures (guarantee 9), threads that ended (guarantees 10 and 11), forked processes (13)."""

import gc
import os
import threading

import numpy as np
import pytest
from harness.graphs import double
from harness.process import leave
from harness.scenes import TIMEOUT, Scene, Thread, leased, over_seeds, works

import handlepool
from handlepool import ArgumentError, CaptureError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.deferred import deferred

# Whatever fails on the way, nothing is lost


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


@pytest.mark.parametrize("capturing", [False, True])
def test_g9_a_graph_functions_bad_arguments_cost_no_side_slot_and_no_capture(capturing):
    with Scene() as scene:
        assert works(scene)
        if capturing:
            scene.stream.begin_capture()
        with scene.states.fork() as fork:
            with pytest.raises(ArgumentError):
                fork.run(double)
            assert leased(scene) == 0
        if capturing:
            scene.stream.end_capture()
        assert works(scene)


# Captures


@pytest.mark.parametrize("begins", ["before the fork", "inside the fork"])
def test_g9_a_fork_under_capture_is_recorded_and_keeps_its_side_slots_until_the_capture_ends(begins):
    with Scene() as scene:
        x, y = scene.array(1), scene.array()
        assert works(scene)
        if begins == "before the fork":
            scene.stream.begin_capture()
        with scene.states.fork() as fork:
            if begins == "inside the fork":
                scene.stream.begin_capture()
            fork.run(scene.put, y, lambda x: x + 1, x)
        assert scene.pool.stats()["handles_captured"] == 1
        graph = scene.stream.end_capture()
        assert works(scene)
        assert scene.pool.stats()["handles_captured"] == 0
        graph.launch(scene.stream)
        assert scene.read(y) == 2


def test_g9_a_branch_from_before_the_capture_cannot_be_joined_and_the_capture_survives():
    with Scene() as scene:
        assert works(scene)
        y = scene.array()
        with pytest.raises(CaptureError, match="began inside a fork"), scene.states.fork() as fork:  # noqa: PT012
            fork.run(scene.array, 1)
            scene.stream.begin_capture()
        scene.put(y, lambda: 3)
        scene.stream.end_capture().launch(scene.stream)
        assert scene.read(y) == 3
        assert works(scene)


def test_g9_an_event_that_a_capture_recorded_and_that_could_not_be_destroyed_goes_with_the_next_trim():
    with Scene() as scene:
        y = scene.array()
        scene.stream.begin_capture()
        with scene.states.fork() as fork:
            fork.run(scene.put, y, lambda: 3)
        scene.stream.end_capture()
        scene.driver.fail_at(1, "destroy_event")
        with pytest.raises(RuntimeError, match="injected"):
            scene.pool.trim()
        scene.pool.trim()
        assert scene.driver.alive()["events"] == 0
        assert works(scene)


@pytest.mark.parametrize("method", ["record_event", "wait_event"])
def test_g9_a_branch_that_did_not_come_to_start_is_not_waited_for_and_the_capture_survives(method):
    with Scene() as scene:
        assert works(scene)
        y = scene.array()
        scene.stream.begin_capture()
        with scene.states.fork() as fork:
            scene.driver.fail_at(1, method)
            with pytest.raises(RuntimeError, match="injected"):
                fork.run(pytest.fail, "it ran")
        scene.put(y, lambda: 3)
        scene.stream.end_capture().launch(scene.stream)
        assert scene.read(y) == 3
        assert works(scene)


@pytest.mark.parametrize("outer", ["on another stream", "captured"])
def test_g9_a_fork_is_not_in_the_books_of_a_fork_outside_its_capture(outer):
    with Scene() as scene:
        driver, other = scene.driver, scene.driver.create_stream()
        y = scene.array()
        if outer == "captured":
            scene.stream.begin_capture("relaxed")
        else:
            assert works(scene)
        with scene.states.fork() as fork:
            fork.run(scene.put, y, lambda: 3)
            with other:
                if outer != "captured":
                    other.begin_capture("relaxed")
                with pytest.raises(CaptureError, match="an open fork of this thread"), scene.states.fork() as second:
                    second.run(pytest.fail, "it ran")
                captured = driver.capture_id(other.ptr)
            fork.run(scene.put, y, lambda: 4)
        # No stream was drawn into the capture of the other fork.
        assert bool(captured) == (outer != "captured")
        (other if captured else scene.stream).end_capture().launch(scene.stream)
        assert scene.read(y) == 4
        assert works(scene)


def test_g9_calls_of_a_captured_branch_on_another_stream_stay_out_of_the_capture():
    with Scene(default=True) as scene:
        other = scene.driver.create_stream()
        y = scene.array()

        def branch(y):
            with other:
                # The second call reads the array of the first, and not an array of the branch.
                found.append(double(double(scene.array(3.0))))
            scene.put(y, lambda: 5)

        found = []
        scene.stream.begin_capture("relaxed")
        with scene.states.fork() as fork:
            fork.run(branch, y)
        assert not other.is_capturing()
        graph = scene.stream.end_capture()
        with other:
            assert scene.read(found[0]) == 12
        graph.launch(scene.stream)
        assert scene.read(y) == 5
        assert works(scene)


@pytest.mark.parametrize("opaque", [False, True])
def test_g9_a_captured_call_in_a_forks_body_waits_for_no_branch_outside_and_its_capture_survives(opaque):
    with Scene(default=True) as scene:
        other = scene.driver.create_stream()
        x, y, z = scene.array(3.0), scene.array(), scene.array(3.0)
        given = Opaque() if opaque else None
        with scene.states.fork() as fork:
            made = fork.run(lambda x, _: scene.plus(x, 1), x, given)
            with other:
                other.begin_capture("relaxed")
                with pytest.raises(CaptureError, match="an open fork of this thread"):
                    double(made)
                if not opaque:
                    double(z, out=y)
                graph = other.end_capture()
        graph.launch(scene.stream)
        assert opaque or scene.read(y) == 6
        assert scene.read(made) == 4
        assert works(scene)


def test_g9_a_branch_may_capture_a_call_over_its_own_arrays():
    with Scene(default=True) as scene:
        other = scene.driver.create_stream()
        x, y = scene.array(3.0), scene.array()

        def branch(x, y):
            made = double(x)
            with other:
                other.begin_capture("relaxed")
                double(made, out=y)
                graph = other.end_capture()
            graph.launch(scene.driver.current_stream())
            return made, graph

        with scene.states.fork() as fork:
            made, _ = fork.run(branch, x, y)
        assert (scene.read(made), scene.read(y)) == (6, 12)
        assert works(scene)


class Opaque:
    """An object that computes its entries, so that a branch may use any array by it."""

    def __getitem__(self, index):
        raise IndexError(index)


@pytest.mark.parametrize("raises", [False, True])
def test_g9_a_branch_that_leaves_a_capture_open_draws_no_other_stream_into_it(raises):
    with Scene(count=2) as scene:
        x, y = scene.array(1), scene.array()
        streams = []

        def branch():
            streams.append(scene.driver.current_stream())
            streams[0].begin_capture("relaxed")
            if raises:
                raise RuntimeError("the branch's own")

        def body():
            with scene.states.fork() as fork:
                fork.run(scene.put, y, lambda x: x + 1, x)
                fork.run(branch)

        with pytest.raises(CaptureError, match=r"a branch began to capture its stream .* and did not end the capture") as raised:
            body()
        assert ("the branch's own" in repr(raised.value.__context__)) == raises
        assert not scene.stream.is_capturing()
        assert scene.read(y) == 2  # the other branch was joined
        stats = scene.pool.stats()
        assert stats["handles_captured"] + stats["handles_idle"] == 2
        streams[0].end_capture()
        assert [scene.read(each) for each in scene.states.map(scene.plus, [x, x], [1, 2])] == [2, 3]
        assert scene.pool.stats()["handles_created"] == 2


# Ends: threads, forgotten forks, forked processes


def test_g11_a_thread_that_ends_inside_a_fork_gives_its_side_slots_back_and_what_it_kept_is_kept_until_then():
    def scenario(scene):
        def work():
            with scene.stream:
                x = scene.array(1)
                fork = scene.states.fork().__enter__()
                fork.run(scene.put, y, lambda x: x + 1, x)

        y = scene.array()
        Thread(work).finish()
        scene.array(100)  # would be the block of x
        assert leased(scene) == 1
        assert works(scene)
        return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


class Holder:
    """An object that a branch's arguments lead to, and that leads to their fork."""

    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_g11_a_fork_that_its_own_branch_led_to_ends_with_its_thread(depth):
    """The walk of arguments meets the fork among attributes. The books of the thread keep the arguments."""
    with Scene() as scene:

        def work():
            holder = Holder(fork=scene.states.fork().__enter__())
            fork, argument = holder.fork, holder
            for _ in range(depth - 1):
                argument = Holder(inner=argument)
            fork.run(lambda value: None, argument)
            del holder.fork

        Thread(work).finish()
        assert works(scene)
        assert leased(scene) == 0


def test_g1_a_fork_whose_exit_failed_is_deferred_once():
    with Scene() as scene:
        fork = scene.states.fork()
        fork.__enter__()
        fork.run(lambda: None)
        scene.driver.fail_at(1, "current_device", RuntimeError("failed"))
        with pytest.raises(RuntimeError, match="failed"):
            fork.__exit__(None, None, None)
        scene.driver.fail_at(0)
        del fork
        gc.collect()
        assert len(deferred) == 1
        assert works(scene)
        assert leased(scene) == 0


def test_g1_a_join_that_was_deferred_twice_releases_its_slots_once(monkeypatch):
    """As after an interrupt behind the exit's last statement. The second step is done in the middle of the first."""
    with Scene() as scene:
        fork = scene.states.fork()
        fork.__enter__()
        fork.run(lambda: None)
        scene.driver.fail_at(1, "current_device", RuntimeError("failed"))
        with pytest.raises(RuntimeError, match="failed"):
            fork.__exit__(None, None, None)
        scene.driver.fail_at(0)
        first = deferred.pop()
        others, record, recorded = [first], scene.driver.record_event, []

        def record_event(*args):
            while others:
                assert others.pop()()
            recorded.append(args)
            record(*args)

        monkeypatch.setattr(scene.driver, "record_event", record_event)
        assert first()
        monkeypatch.undo()
        assert not others
        assert len(recorded) == 1
        sides = scene.pool.internals.device(0).sides
        assert len(sides.free) == len({id(slot) for slot in sides.free}) == sides.made
        assert works(scene)


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
        # A branch of this fork could wait for captured branches.
        with other, pytest.raises(CaptureError, match="an open fork of this thread"):
            scene.states.map(str, [1])
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
@pytest.mark.parametrize("child", ["leaves it", "drops it"])
def test_g13_a_child_that_is_forked_inside_a_fork_ends_it_without_a_driver_call(child):
    with Scene() as scene:
        fork = scene.states.fork().__enter__()
        fork.run(lambda: None)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                scene.driver.calls.clear()
                if child == "leaves it":
                    with pytest.raises(handlepool.ForkedProcessError):
                        fork.run(lambda: None)
                    fork.__exit__(None, None, None)
                del fork
                handlepool.pool.deferred.deferred.run(1000)
                code = 2 if scene.driver.calls.keys() - {"current_device", "current_stream"} else 0
            finally:
                leave(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert fork.run(lambda: "the parent is unaffected")
        fork.__exit__(None, None, None)


# Pools that are closed inside


def closed_under_a_capture(scene):
    scene.stream.begin_capture()
    with scene.states.fork() as fork:
        fork.map(double, scene.xs, out=scene.outs)
        scene.pool.close()
    scene.stream.end_capture()


def closed_before_a_join_that_fails(method):
    def act(scene):
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as fork:  # noqa: PT012
            fork.map(double, scene.xs, out=scene.outs)
            scene.pool.close()
            scene.driver.fail_at(1, method)

    return act


CLOSES = {
    "under a capture": closed_under_a_capture,
    **{f"{method} fails": closed_before_a_join_that_fails(method) for method in ("record_event", "wait_event", "is_capturing")},
}


@pytest.mark.parametrize("close", CLOSES)
def test_g11_states_that_come_back_after_a_close_and_may_not_go_yet_go_later(close):
    with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
        scene.xs, scene.outs = ([scene.array(0) for _ in range(6)] for _ in range(2))
        for _ in range(2):
            scene.states.map(double, scene.xs, out=scene.outs)
        CLOSES[close](scene)
        handlepool.pool.deferred.deferred.run(1000)
        assert scene.driver.alive() == {"handles": 0, "events": 0, "streams": 1, "scratch_bytes": 0}


@pytest.mark.parametrize("check", [False, True])
def test_g11_a_pool_is_forgotten_by_a_later_close_where_all_that_the_first_left_has_gone(check):
    with Scene(HostDriver(scheduler="adversarial", check_order=True), check=check) as scene:
        scene.pool.get_handle()
        scene.driver.fail_at(1, "destroy_handle")
        with pytest.raises(RuntimeError, match="injected"):
            scene.pool.close()
        handlepool.pool.deferred.deferred.run(1000)
        assert scene.driver.alive()["handles"] == 0
        assert scene.pool.internals in handlepool.pool.status.live_pools
        scene.pool.close()
        assert scene.pool.internals not in handlepool.pool.status.live_pools


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
