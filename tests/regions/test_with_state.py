"""`with_state`, the one place with a lock (guarantee 15), and `with_cudnn_state`."""

import copy
import pickle
import threading
from contextlib import ExitStack

import pytest
from harness.scenes import TIMEOUT, BranchError, Scene, Thread

import handlepool
from handlepool import ArgumentError, OwnershipError, ParallelStates, StateBusyError, StateIndexError
from handlepool.pool import context

# The state


USES = {
    "handle": lambda state: state.handle,
    "stream": lambda state: state.stream,
    "pointer": lambda state: state.pointer,
    "device": lambda state: state.device,
    "workspace": lambda state: state.workspace(100),
    "workspace of nothing": lambda state: state.workspace(0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("taken", [0, 32], ids=["on a side stream", "inline"])
def test_g5_a_state_that_was_kept_hands_out_nothing_of_another_branch(use, taken):
    with Scene() as scene, ExitStack() as stack:
        for _ in range(taken):
            stack.enter_context(fork := scene.states.fork())
            fork.run(lambda: None)
        kept = []
        assert scene.states.with_state(1, lambda state: kept.append(state) or use(state)) is not None
        with pytest.raises(BranchError):
            scene.states.with_state(1, fail_with, kept)
        with pytest.raises(ArgumentError, match="<lambda> returned a generator, and none of its work has run"):
            scene.states.with_state(1, lambda state: (use(state) for _ in range(1)))
        later = scene.states.with_state(1, lambda state: lambda: use(state))
        for late in (lambda: use(kept[0]), lambda: use(kept[1]), later):
            with pytest.raises(OwnershipError, match="the call of this state has ended"):
                late()
        with scene.states.fork() as fork:
            for late in (use, use):
                with pytest.raises(OwnershipError):
                    fork.run(late, kept[0])
        assert "has ended" in repr(kept[0])


def fail_with(state, kept):
    kept.append(state)
    raise BranchError


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_g5_a_state_is_not_copied(way):
    with Scene() as scene, pytest.raises(TypeError, match="cannot be copied or pickled"):
        scene.states.with_state(0, way)


# with_state: one lock for each index


@pytest.mark.parametrize("index", [-1, 4, 33, "1", 1.0, None, True])
def test_an_index_out_of_range_is_refused_before_anything_happens(index):
    with Scene() as scene:
        scene.driver.calls.clear()
        with pytest.raises(StateIndexError, match=f"state {index!r} does not exist.*0 to 3"):
            scene.states.with_state(index, lambda state: pytest.fail("it ran"))
        assert not scene.driver.calls["create_handle"] + scene.driver.calls["record_event"]
        assert scene.states.with_state(1, lambda state: 20) == 20


def occupy(scene, index):
    """A thread that holds a state until it is told to leave; told by the event."""
    inside, leave = threading.Event(), threading.Event()

    def hold(state):
        inside.set()
        assert leave.wait(TIMEOUT)

    def work():
        with scene.driver.create_stream():
            scene.states.with_state(index, hold)

    thread = Thread(work)
    assert inside.wait(TIMEOUT)
    return thread, leave


def test_g15_one_index_excludes_between_threads(make_driver):
    with Scene(make_driver()) as scene:
        inside, worst, guard = [], [], threading.Lock()

        def enter(state):
            with guard:
                inside.append(state)
                worst.append(len(inside))
            scene.driver.use_handle(state.handle, lambda: None)
            with guard:
                inside.remove(state)

        def work():
            with scene.driver.create_stream():
                for _ in range(30):
                    scene.states.with_state(1, enter)

        for thread in [Thread(work) for _ in range(4)]:
            thread.finish()
        assert max(worst) == 1
        assert len(worst) == 120


def test_g15_two_indices_do_not_exclude_each_other(make_driver):
    with Scene(make_driver()) as scene:
        meeting = threading.Barrier(4)

        def work(index):
            with scene.driver.create_stream():
                return scene.states.with_state(index, lambda state: meeting.wait(TIMEOUT))

        assert sorted(thread.finish() for thread in [Thread(work, index) for index in range(4)]) == [0, 1, 2, 3]


def test_g15_one_index_of_two_devices_is_two_states(make_driver):
    with Scene(make_driver()) as scene:
        thread, leave = occupy(scene, 0)
        with scene.driver.device(1):
            assert scene.states.with_state(0, lambda state: state.device) == 1
        leave.set()
        thread.finish()


def test_g15_a_busy_index_is_waited_for(make_driver):
    with Scene(make_driver()) as scene:
        thread, leave = occupy(scene, 2)
        entered = threading.Event()

        def work():
            with scene.driver.create_stream():
                return scene.states.with_state(2, lambda state: entered.set() or leave.is_set())

        waiter = Thread(work)
        assert not entered.is_set()
        leave.set()
        assert waiter.finish() is True
        thread.finish()


def test_g15_a_busy_index_is_an_error_for_a_thread_that_holds_a_state(make_driver):
    with Scene(make_driver()) as scene:
        thread, leave = occupy(scene, 2)

        def work():
            with scene.driver.create_stream():
                scene.states.with_state(1, lambda state: scene.states.with_state(2, lambda state: None))

        with pytest.raises(StateBusyError, match=r"state 2 is busy.*deadlock.*fork\(\)"):
            Thread(work).finish()
        leave.set()
        thread.finish()


def test_g15_a_thread_that_asks_for_its_own_index_again_is_told():
    with Scene() as scene, pytest.raises(StateBusyError, match="state 1 is busy"):
        scene.states.with_state(1, lambda state: scene.states.with_state(1, lambda state: None))


def test_g15_a_state_held_in_one_parallel_states_counts_in_another(make_driver):
    with Scene(make_driver()) as scene:
        thread, leave = occupy(scene, 2)
        others = ParallelStates(2, pool=scene.pool)
        with pytest.raises(StateBusyError):
            others.with_state(0, lambda state: scene.states.with_state(2, lambda state: None))
        leave.set()
        thread.finish()


def test_g15_two_threads_that_hold_a_state_each_and_ask_for_the_others_do_not_deadlock(make_driver):
    with Scene(make_driver()) as scene:
        meeting = threading.Barrier(2)

        def work(mine, other):
            def ask(state):
                meeting.wait(TIMEOUT)
                try:
                    return scene.states.with_state(other, lambda state: "entered")
                except StateBusyError:
                    return "busy"
                finally:
                    meeting.wait(TIMEOUT)

            with scene.driver.create_stream():
                return scene.states.with_state(mine, ask)

        threads = [Thread(work, 0, 1), Thread(work, 1, 0)]
        assert [thread.finish() for thread in threads] == ["busy", "busy"]


def test_g15_a_state_is_free_again_after_its_function_raised():
    def fails(state):
        raise BranchError

    with Scene() as scene:
        for _ in range(2):
            with pytest.raises(BranchError):
                scene.states.with_state(1, fails)
        assert Thread(scene.states.with_state, 1, lambda state: "free").finish() == "free"
        assert context.thread.states_held == 0


# What the function of with_state gets


def test_with_state_gives_the_state_first_and_then_the_arguments():
    with Scene() as scene:

        def function(state, a, b, *, c):
            assert state.handle.stream == state.stream.ptr == scene.driver.current_stream().ptr
            assert state.device == 0
            assert len(state.workspace(100)) == 100
            return a, b, c

        assert scene.states.with_state(1, function, 1, 2, c=3) == (1, 2, 3)


def test_with_cudnn_state_takes_one_of_four_states_of_the_process():
    with Scene(default=True) as scene:
        x, y = scene.array(1), scene.array()
        handlepool.with_cudnn_state(3, lambda state, value: scene.put(y, lambda x: x + value, x), value=1)
        assert scene.read(y) == 2
        with pytest.raises(StateIndexError, match="state 4 does not exist"):
            handlepool.with_cudnn_state(4, lambda state: None)


def test_g15_with_cudnn_state_excludes_from_its_first_use_on(monkeypatch):
    with Scene(default=True) as scene:
        made, meeting = [], threading.Barrier(4)

        class Slow(ParallelStates):
            def __init__(self, *args, **options):
                meeting.wait(TIMEOUT)  # every thread has found that there are none
                super().__init__(*args, **options)

            def with_state(self, *args):
                made.append(self)

        monkeypatch.setattr(handlepool, "ParallelStates", Slow)
        for thread in [Thread(handlepool.with_cudnn_state, 0, None) for _ in range(4)]:
            thread.finish()
        handlepool._states.pop(scene.pool)
        assert len(made) == 4
        assert len(set(map(id, made))) == 1
