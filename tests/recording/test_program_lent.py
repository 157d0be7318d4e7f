"""A program that was used in a branch or a task: its last stream is a side stream, which is lent to others afterwards."""

import gc
import threading
import weakref
from functools import partial

import pytest
from harness.accounts import RESTORES
from harness.graphs import double
from harness.hidden import hidden
from harness.insides import abandoned, streams_of_programs
from harness.scenes import TIMEOUT, Scene, Thread, over_seeds, without_joins, without_waits_of_the_last
from harness.uses import ON_A_SIDE_STREAM, in_a_branch

import handlepool
from handlepool import ParallelStates
from handlepool.pool.deferred import deferred
from handlepool.recording.program import Program

NOTHING = {"handles": 0, "events": 0, "scratch_bytes": 0}


class Recorded:
    """Inside, another thread is in the middle of a recording, for which all side streams that are free are captured."""

    def __init__(self, scene):
        self._inside, self._go = threading.Event(), threading.Event()
        self._thread = Thread(self._record, scene, scene.driver.create_stream())
        assert self._inside.wait(TIMEOUT)

    def _record(self, scene, stream):
        calls = hidden([])
        # The function does not reach this object, whose thread is assigned meanwhile.
        inside, go = self._inside, self._go

        def body(x):
            calls().append(1)
            parts = ParallelStates(16, pool=scene.pool).map(lambda i: scene.plus(x, i), range(16))
            if len(calls()) == 2:
                inside.set()
                go.wait(TIMEOUT)
            return parts

        with stream:
            x = scene.array(1)
            with handlepool.record(body, x, pool=scene.pool) as program:
                program.replay()
                return [scene.read(y) for y in program.outputs]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self._go.set()
        self._thread.join(TIMEOUT)
        if kind is None:
            assert self._thread.finish() == [1 + i for i in range(16)]


@pytest.mark.parametrize("use", ON_A_SIDE_STREAM)
def test_it_can_be_used_and_closed_while_another_thread_records_on_that_stream(make_driver, scheduler, use):
    with Scene(make_driver(scheduler=scheduler)) as scene:
        with handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) as program:
            use(scene, lambda: (program.update(scene.array(2)), program.replay()))
            with Recorded(scene):
                assert scene.read(program.outputs) == 12
                program.update(scene.array(3))
                program.replay()
                assert scene.read(program.outputs) == 13
                program.hand_over()
                use(scene, program.replay)
        assert program.closed


@pytest.mark.parametrize("use", ON_A_SIDE_STREAM)
def test_it_can_be_closed_or_dropped_right_after(make_driver, use):
    for close in (True, False):
        with Scene(make_driver(scheduler="adversarial")) as scene:
            program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
            use(scene, program.replay)
            with Recorded(scene):
                if close:
                    program.close()
                del program
            scene.stream.synchronize()
            deferred.run(1000)
        deferred.run(1000)
        assert {kind: number for kind, number in scene.driver.alive().items() if kind != "streams"} == NOTHING


def readers_in_the_branch(scene):
    """What a reader in a branch saw, whose join another stream waits for that replays, while the side stream is lent on."""
    program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
    with scene.states.fork() as fork:
        early = fork.run(lambda: (program.replay(), scene.plus(program.outputs, 0))[1])
    other = scene.driver.create_stream()
    scene.driver.wait_event(other.ptr, scene.stream.record())
    with Recorded(scene), other:
        program.update(scene.array(2))
        program.replay()
        late = scene.read(program.outputs)
    return scene.read(early), late


def test_what_waits_for_the_join_replays_after_the_readers_in_the_branch():
    assert set(over_seeds(readers_in_the_branch, seeds=range(40))) == {(11, 12)}


@pytest.mark.unmeasured
def test_control_without_the_join_readers_in_the_branch_are_overtaken():
    assert set(over_seeds(readers_in_the_branch, make=without_joins, seeds=range(40))) != {(11, 12)}


READERS = {
    "closure": lambda scene, program, fork: fork.run(lambda: scene.plus(program.outputs, 0)),
    "argument": lambda scene, program, fork: fork.run(lambda given: scene.plus(given.outputs, 0), program),
    "attribute": lambda scene, program, fork: fork.run(partial(reading_attribute, scene, Holding(program))),
    "operation": lambda scene, program, fork: fork.run(handlepool.operation(lambda it: scene.plus(it.outputs, 0)), program),
    "deep": lambda scene, program, fork: fork.run(partial(reading_deeply, scene, Holding(Holding(program)))),
    "wait": lambda scene, program, fork: scene.plus(fork.wait(program).outputs, 0),
}


class Holding:
    def __init__(self, program):
        self.program = program


def reading_attribute(scene, holding):
    return scene.plus(holding.program.outputs, 0)


def reading_deeply(scene, holding):
    return scene.plus(holding.program.program.outputs, 0)


def outputs_of_what_was_given(scene, way):
    """What a branch that was given a program read of its outputs, behind a branch that replays it."""
    with handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) as program:
        with scene.states.fork() as fork:
            fork.run(program.update, scene.array(2))
            fork.run(program.replay)
            read = READERS[way](scene, program, fork)
        return scene.read(read)


@pytest.mark.parametrize("way", READERS)
def test_g17_who_asks_a_program_for_its_outputs_in_a_branch_reads_them(way):
    assert set(over_seeds(lambda scene: outputs_of_what_was_given(scene, way))) == {12}


@pytest.mark.parametrize("way", READERS)
def test_g17_control_where_outputs_are_merely_handed_out(way, monkeypatch):
    monkeypatch.setattr(Program, "outputs", property(lambda program: program._outputs))
    monkeypatch.delattr(Program, "__handlepool_arrays__")
    assert set(over_seeds(lambda scene: outputs_of_what_was_given(scene, way), control=True)) != {12}


def test_g7_branches_do_not_wait_for_other_programs_of_an_object(scene):
    programs = [handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) for _ in range(3)]
    holding = Holding(programs)

    def of_the_object(number):
        holding.program[number].replay()
        return scene.plus(holding.program[number].outputs, 0)

    def alone(program):
        program.replay()
        return scene.plus(program.outputs, 0)

    waits = []
    for function, given in ((of_the_object, range(3)), (alone, programs)) * 2:  # the first time nobody knows what it writes
        scene.driver.calls.clear()
        with scene.states.fork() as fork:
            results = [fork.run(function, each) for each in given]
        waits.append(scene.driver.calls["wait_event"])
        assert [scene.read(y) for y in results] == [11, 11, 11]
    assert waits[2] == waits[3]
    for program in programs:
        program.close()


def replayed_beside_the_last_use(scene):
    """What a replay elsewhere read, of inputs that the branch's replay may still be reading."""
    program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
    with scene.states.fork() as fork:
        fork.run(program.replay)
        other = scene.driver.create_stream()
        scene.driver.wait_event(other.ptr, scene.stream.record())
        with other:
            program.update(scene.array(2))
            program.replay()
            return scene.read(program.outputs)


def test_a_replay_beside_the_branch_starts_after_the_one_there():
    assert set(over_seeds(replayed_beside_the_last_use)) == {12}


def test_control_without_that_wait_the_two_overtake_each_other():
    assert set(over_seeds(replayed_beside_the_last_use, make=without_waits_of_the_last)) != {12}


# What the collector destroys in one go


class Model:
    """In a cycle with all that it has."""

    def __init__(self, **parts):
        self.itself, self.parts = self, parts


def test_a_program_in_a_cycle_with_its_stream_is_given_back(make_driver):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        before = len(abandoned()), set(streams_of_programs())
        stream = scene.driver.create_stream()
        with stream:
            program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
            program.replay()
            stream.synchronize()
        gone = weakref.ref(stream)
        model = Model(stream=stream, program=program)
        del stream, program, model
        gc.collect()
        deferred.run(1000)
        deferred.run(1000)
        gc.collect()
        assert gone() is None
        assert (len(abandoned()), set(streams_of_programs())) == before


def test_a_fork_in_a_cycle_with_its_stream_gives_its_states_back(make_driver):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        stream = scene.driver.create_stream()
        with stream:
            fork = scene.states.fork()
            fork.__enter__()
            fork.run(scene.array, 1)
        model = Model(stream=stream, fork=fork)
        del stream, fork, model
        gc.collect()
        deferred.run(1000)
        assert scene.pool.stats()["handles_leased"] == 0
        assert scene.states.map(lambda value: scene.read(scene.array(value)), range(4)) == [0, 1, 2, 3]


def test_g11_threads_that_end_in_forks_which_the_collector_takes_with_their_streams_give_their_states_back(make_driver):
    """Branches that launch one known plan lend no stream to Python, so that nothing but the fork has the caller's stream."""
    with Scene(make_driver(scheduler="adversarial")) as scene:
        x = scene.array(1)
        scene.states.map(double, [x, x])
        scene.stream.synchronize()

        def work():
            stream = scene.driver.create_stream()
            with stream:
                fork = scene.states.fork()
                fork.__enter__()
                fork.run(double, x)
            Model(stream=stream, fork=fork)

        gc.disable()  # or some of them might go before all have ended
        try:
            for _ in range(3):
                Thread(work).finish()
            assert scene.pool.stats()["handles_leased"] == 3
        finally:
            gc.enable()
        gc.collect()
        deferred.run(1000)
        assert scene.pool.stats()["handles_leased"] == 0
        assert scene.states.map(lambda value: scene.read(scene.array(value)), range(4)) == [0, 1, 2, 3]


def test_a_dropped_program_goes_once_its_replay_has_passed_however_busy_its_stream_is(make_driver):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        for use in (lambda program: program.replay(), lambda program: in_a_branch(scene, program.replay)):
            program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
            use(program)
            del program
            deferred.run(1000)  # sees when that is
            passed, hold = scene.stream.record(), threading.Event()
            scene.driver.enqueue(scene.stream.ptr, partial(hold.wait, TIMEOUT))
            try:
                scene.driver.synchronize_event(passed)
                deferred.run(1000)
                assert not [step for step in deferred if isinstance(step.__self__, Program)]
            finally:
                hold.set()


def after_a_close_that_failed(scene):
    """What a reader saw after a close that queued work made fail, and what a replay on another stream gives then."""
    program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)
    program.replay()
    scene.driver.enqueue(scene.stream.ptr, fails)
    with pytest.raises(ValueError, match="queued"):
        program.close()
    early = scene.plus(program.outputs, 0)
    with scene.driver.create_stream():
        program.update(scene.array(2))
        program.replay()
        late = scene.read(program.outputs)
    return scene.read(early), late


def fails():
    raise ValueError("queued")


def test_a_close_that_failed_leaves_the_order_as_it_was():
    assert set(over_seeds(after_a_close_that_failed, seeds=range(40))) == {(11, 12)}


def interrupted_at_its_end(scene):
    """What a replay beside a branch gives whose own was interrupted when it had been launched."""
    program = handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool)

    def branch():
        scene.driver.fail_at(2, "record_event", KeyboardInterrupt(), RESTORES)  # the first is on the former stream
        with pytest.raises(KeyboardInterrupt):
            program.replay()
        scene.driver.fail_at(0)

    with scene.states.fork() as fork:
        fork.run(branch)
        other = scene.driver.create_stream()
        with other:
            program.update(scene.array(2))
            program.replay()
            return scene.read(program.outputs)


def test_a_replay_that_was_interrupted_at_its_end_is_waited_for():
    assert set(over_seeds(interrupted_at_its_end, seeds=range(40))) == {12}
