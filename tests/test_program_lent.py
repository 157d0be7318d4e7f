"""A program that was used in a branch or a task: its last stream is a side stream, which is lent to others afterwards."""

import threading

import pytest
from scenes import TIMEOUT, Scene, Thread, over_seeds

import handlepool
from handlepool import ParallelStateExecutor, ParallelStates
from handlepool.program import Program
from handlepool.regions import settle


def in_a_branch(scene, act):
    with scene.states.fork() as fork:
        fork.run(act)


def in_a_task(scene, act):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(act).result()


def in_a_state(scene, act):
    scene.states.with_state(0, lambda _: act())


NOTHING = {"handles": 0, "events": 0, "scratch_bytes": 0}


class Recorded:
    """Another thread is in the middle of a recording, for which all side streams that are free are captured."""

    def __init__(self, scene):
        self._inside, self._go = threading.Event(), threading.Event()
        self._thread = Thread(self._record, scene, scene.driver.create_stream())
        assert self._inside.wait(TIMEOUT)

    def _record(self, scene, stream):
        calls = []

        def body(x):
            calls.append(1)
            parts = ParallelStates(16, pool=scene.pool).map(lambda i: scene.plus(x, i), range(16))
            if len(calls) == 2:
                self._inside.set()
                self._go.wait(TIMEOUT)
            return parts

        with stream:
            x = scene.array(1)
            with handlepool.record(body, x, pool=scene.pool) as program:
                program.replay()
                return [scene.read(y) for y in program.outputs]

    def finish(self):
        self._go.set()
        assert self._thread.finish() == [1 + i for i in range(16)]


@pytest.mark.parametrize("use", [in_a_branch, in_a_task, in_a_state])
def test_it_can_be_used_and_closed_while_another_thread_records_on_that_stream(make_driver, scheduler, use):
    with Scene(make_driver(scheduler=scheduler)) as scene:
        with handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) as program:
            use(scene, lambda: (program.update(scene.array(2)), program.replay()))
            recorded = Recorded(scene)
            try:
                assert scene.read(program.outputs) == 12
                program.update(scene.array(3))
                program.replay()
                assert scene.read(program.outputs) == 13
                use(scene, program.replay)
            finally:
                recorded.finish()
        assert program.closed


@pytest.mark.parametrize("use", [in_a_branch, in_a_task, in_a_state])
def test_it_can_be_closed_or_dropped_right_after(make_driver, use):
    for close in (True, False):
        with Scene(make_driver(scheduler="adversarial")) as scene:
            program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
            use(scene, program.replay)
            recorded = Recorded(scene)
            if close:
                program.close()
            del program
            recorded.finish()
            scene.stream.synchronize()
            settle(most=1000)
        settle(most=1000)
        assert {kind: number for kind, number in scene.driver.alive().items() if kind != "streams"} == NOTHING


def readers_in_the_branch(scene):
    """What a reader in the branch saw, after whose replay the caller replays before the join, and what the caller saw."""
    program = scene.program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
    with scene.states.fork() as fork:
        early = fork.run(lambda: (program.replay(), scene.plus(program.outputs, 0))[1])
        program.update(scene.array(2))
        program.replay()
        late = scene.plus(program.outputs, 0)
    return scene.read(early), scene.read(late)


def test_a_replay_beside_the_branch_starts_after_the_readers_there():
    assert set(over_seeds(readers_in_the_branch)) == {(11, 12)}


def test_control_without_recording_on_the_lent_stream_again_readers_are_overtaken(monkeypatch):
    monkeypatch.setattr(Program, "_record_lent", lambda program: None)
    assert set(over_seeds(readers_in_the_branch, control=True)) != {(11, 12)}
