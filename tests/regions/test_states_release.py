"""Guarantee 8: what a fork kept is let go of by the join of the outermost fork, at once, and not before."""

import gc
import weakref

import pytest
from harness.insides import stream_of
from harness.scenes import BranchError, Scene, over_seeds

from handlepool import ParallelStates


class Held:
    """Something that takes weak references."""


def a_fork(scene, box, gone):
    fork = scene.states.fork()
    with fork:
        fork.run(lambda _: None, box.pop())
        assert gone() is not None
    scene.fork = fork  # holds nothing afterwards


def a_branch_that_fails(scene, box, gone):
    def fails(thing):
        raise BranchError

    with pytest.raises(BranchError), scene.states.fork() as fork:
        fork.run(fails, box.pop())


def a_branch_that_runs_inline(scene, box, gone):
    with ParallelStates(32, pool=scene.pool).fork() as hoard:
        for _ in range(32):
            hoard.run(lambda: None)
        scene.states.map(lambda _: None, [box.pop()])


def a_state(scene, box, gone):
    scene.states.with_state(0, lambda state, _: None, box.pop())


@pytest.mark.parametrize("run", [a_fork, a_branch_that_fails, a_branch_that_runs_inline, a_state])
def test_g8_what_was_kept_is_released_by_the_join_at_once_and_not_before(run):
    gc.disable()
    try:
        with Scene() as scene:
            box = [Held()]
            gone = weakref.ref(box[0])
            run(scene, box, gone)
            assert gone() is None
    finally:
        gc.enable()


def test_g8_what_inner_branches_kept_is_released_by_the_outermost_join():
    with Scene() as scene:
        thing = Held()
        gone = weakref.ref(thing)

        def outer(box):
            scene.states.map(lambda _: None, [box.pop()])
            assert gone() is not None

        box = [thing]
        del thing
        with scene.states.fork() as fork:
            fork.run(outer, box)
            assert gone() is not None
        assert gone() is None


def test_g8_memory_that_nobody_waits_for_after_a_failed_join_is_never_freed(make_driver):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        thing = Held()
        gone = weakref.ref(thing)
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as fork:  # noqa: PT012
            fork.run(lambda _: None, thing)
            scene.driver.fail_at(1, "wait_event")
        del thing, fork
        gc.collect()
        assert gone() is not None


def test_g8_a_callers_stream_that_is_dropped_inside_a_fork_lives_to_the_join():
    def scenario(scene):
        with scene.driver.create_stream():
            fork = scene.states.fork()
            fork.__enter__()
        y = fork.run(scene.array, 1)  # on the stream that nobody else knows any more
        gone = weakref.ref(stream_of(fork))
        fork.__exit__(None, None, None)
        assert gone() is not None
        with stream_of(fork):
            value = scene.read(y)
        del fork
        assert gone() is None
        return value

    assert set(over_seeds(scenario)) == {1}
