"""Forks and states apart from order and memory: who may use them, and what they leave as it was (guarantee 3)."""

from contextlib import nullcontext

import pytest
from harness.graphs import double
from harness.scenes import BranchError, Scene, Thread, over_seeds, works

import handlepool
from handlepool import ArgumentError, DeviceMismatchError, OwnershipError, ParallelStates, PoolClosedError, StreamError

# ParallelStates


@pytest.mark.parametrize("count", [0, 33, -1, 1.0, "4", None, True])
def test_a_number_of_states_that_is_none_is_refused(count):
    with Scene() as scene, pytest.raises(ArgumentError, match=rf"ParallelStates\({count!r}\): .* 1 to 32"):
        ParallelStates(count, pool=scene.pool)


@pytest.mark.parametrize("count", [1, 32])
def test_any_number_of_states_from_1_to_32(count):
    with Scene(count=count) as scene:
        assert len(scene.states) == count
        assert len(set(scene.states.map(lambda _: scene.driver.current_stream().ptr, range(64)))) == count
        assert f"{count} of" in repr(scene.states)


def test_making_states_and_forks_makes_nothing_on_the_device(make_default):
    with Scene() as scene:
        scene.driver.calls.clear()
        ParallelStates(4, pool=scene.pool).fork()
        assert not scene.driver.calls
        make_default(scene.pool)
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


def test_run_before_the_fork_was_entered_and_after_it_was_left():
    with Scene() as scene:
        with pytest.raises(PoolClosedError, match="not entered"):
            scene.states.fork().run(lambda: pytest.fail("it ran"))
        with scene.states.fork() as fork:
            fork.run(lambda: None)
        with pytest.raises(PoolClosedError, match="was left"):
            fork.run(lambda: pytest.fail("it ran"))
        assert works(scene)


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
        assert handlepool.pool.context.thread.region is None
        assert handlepool.pool.context.thread.pool is None
        assert works(scene)


def test_g3_device_and_stream_are_as_before_inside_the_body_too():
    with Scene() as scene, scene.driver.device(1), scene.driver.create_stream() as stream, scene.states.fork() as fork:
        fork.run(lambda: None)
        assert scene.driver.current_device() == 1
        assert scene.driver.current_stream() is stream


def with_statement_inside(scene, enter):
    """Where a branch is after a ``with`` statement over another stream, when its own was made current by ``enter``."""
    with scene.states.fork() as fork:

        def branch():
            side = scene.driver.current_stream()
            with scene.driver.create_stream():
                pass
            return side, scene.driver.current_stream()

        return fork.run(enter, branch)


def test_g3_a_branch_is_on_its_own_stream_after_a_with_statement_over_another():
    with Scene() as scene:
        side, after = with_statement_inside(scene, lambda branch: branch())
        assert after is side is not scene.stream


def test_g3_control_a_stream_in_use_that_was_not_entered_is_lost_after_a_with_statement():
    with Scene() as scene:
        other = scene.driver.create_stream()

        def use(branch):
            other.use()
            return branch()

        side, after = with_statement_inside(scene, use)
        assert side is other
        assert after is not other


def test_g3_a_branch_runs_on_its_own_device_from_a_body_on_another():
    with Scene() as scene, scene.states.fork() as fork, scene.driver.device(1):
        assert fork.run(scene.driver.current_device) == 0
        assert scene.driver.current_device() == 1


@pytest.mark.parametrize("where", ["device", "stream"])
def test_g3_g6_a_graph_function_in_a_body_on_another_device_or_stream_is_the_forks(where):
    def scenario(scene):
        with scene.states.fork() as fork:
            x = scene.array(4)
            with scene.driver.device(1) if where == "device" else scene.driver.create_stream():
                y = fork.run(double, x)
                assert scene.driver.current_device() == (where == "device")
        return scene.driver.array_device(y), scene.read(y)

    assert set(over_seeds(scenario, seeds=range(50))) == {(0, 8)}
