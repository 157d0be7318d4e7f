"""`Program.tune`: other schedules of a recording are measured, and the best is taken; whatever replays change is as it was."""

import io
import re
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from harness.hidden import hidden
from harness.insides import recording_of
from harness.lines import at_line, interrupt
from harness.operations import plus, times
from harness.scenes import TIMEOUT, Scene, Thread, leased, works

import handlepool
from handlepool import (
    ArgumentError,
    CaptureError,
    ParallelStateExecutor,
    PoolClosedError,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.graphs import RecordedGraph
from handlepool.recording import tuning
from handlepool.recording.tuning import LanesRig
from handlepool.tensors.layout import Ranges


@pytest.fixture
def scene(scene):
    yield scene
    assert scene.driver.captures_under_way() == 0


def wide(scene, x):
    return [plus(scene, plus(scene, x, value), 10) for value in range(6)]


def in_place(scene, x):
    times(scene, x, 2)
    return wide(scene, x)


@pytest.fixture
def measured(lane_times):
    """Microseconds on the clock, and on the device, by lanes."""
    return lane_times.clock, lane_times.device


def values(scene, program):
    program.replay()
    return [scene.read(y) for y in program.outputs]


# What is taken


@pytest.mark.parametrize(
    ("clock", "goal", "lanes"),
    [
        ({1: 100, 2: 98, 4: 97.2}, "clock", 1),
        ({1: 100, 2: 96, 4: 95}, "clock", 4),
        ({1: 100, 2: 50, 4: 95}, "clock", 2),
        ({1: 100, 2: 50, 4: 95}, "device", 4),
        ({2: 100, 4: 99}, "clock", 4),
        ({2: 100.9, 3: 100.5, 4: 100}, "clock", 2),
        ({2: 101.1, 3: 100.9, 4: 100}, "clock", 3),
        ({2: 100, 4: 100.5, 6: 99.5}, "clock", 2),
        ({1: 100, 2: 97.8, 3: 97.05, 4: 97}, "clock", 3),
        ({1: 100, 2: 97.5, 4: 97}, "clock", 4),
    ],
)
def test_the_quickest_or_fewer_within_1_percent_is_taken_and_one_lane_stays_unless_another_wins_by_3_percent(
    scene, measured, clock, goal, lanes
):
    measured[0].update(clock)
    measured[1].update({1: 60, 2: 70, 3: 50, 4: 40, 6: 45})
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        found = program.tune(clock, goal=goal)
        assert found.winner.lanes == program.explain().got == lanes
        assert [(trial.lanes, trial.clock) for trial in found.trials] == [*clock.items()]
        assert (found.previous, found.goal, found.rounds) == (6, goal, tuning.MOST_ROUNDS)
        assert values(scene, program) == [11 + value for value in range(6)]


def test_control_the_quickest_alone_has_more_lanes(scene, measured, limits):
    limits(CLOSE=1.0)
    times = {2: 100.9, 3: 100.5, 4: 100}
    measured[0].update(times)
    measured[1].update(times)
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        assert program.tune(times).winner.lanes == program.explain().got == 4


def test_a_program_is_tuned_as_often_as_one_likes_and_to_any_number(scene):
    with handlepool.record(wide, scene, scene.array(1), lanes=2) as program:
        outputs = program.outputs
        for lanes in (1, 3, 6, 2, 6, 5, 1):
            assert program.tune([lanes], seconds=0.01).winner.lanes == program.explain().got == lanes
            assert values(scene, program) == [11 + value for value in range(6)]
            assert program.outputs is outputs
    assert leased(scene) == 0


def test_the_function_is_not_called_again(scene):
    calls = hidden([])

    def function(x):
        calls().append(1)
        return wide(scene, x)

    with handlepool.record(function, scene.array(1), lanes=4) as program:
        program.tune(seconds=0.01)
    assert len(calls()) == 2


def test_what_was_tried_is_a_table(scene, measured):
    measured[0].update({1: 100, 2: 1250.5, 6: 70})
    measured[1].update({1: 60, 2: 70, 6: 40})
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        program.tune([2])
        text = str(program.tune((1, 2, 6, 8, 32)))
    assert re.match(r"wide: lanes by clock, medians of 31 samples in \d\.\d s; microseconds per replay\n", text)
    assert "\nlanes  got   edges       clock      device\n    1    1      11      100.00       60.00\n" in text
    assert "    1,250.50       70.00  before\n" in text
    assert "\n    6    6       6       70.00       40.00  chosen\n" in text
    assert text.endswith(
        "\n    8  the same schedule as on 6 lanes: the data allows only 6 lanes"
        "\n   32  the same schedule as on 6 lanes: the data allows only 6 lanes"
    )


def test_more_lanes_than_the_data_allows_are_told_as_what_it_runs_on(scene):
    with handlepool.record(wide, scene, scene.array(1), lanes=2) as program:
        assert (program.tune([16], seconds=0.01).winner.lanes, program.explain().got) == (16, 6)
        found = program.tune([2, 16])  # in time for both
        assert ([trial.got for trial in found.trials], found.previous) == ([2, 6], 6)
        (line,) = re.findall("\n   16.*", str(found))
        assert re.match(r"\n   16    6 .*before$", line)


def test_time_is_bounded_and_each_has_three_samples_at_least(scene, monkeypatch):
    now = [0.0]

    def monotonic():
        now[0] += 1
        return now[0]

    monkeypatch.setattr(tuning, "monotonic", monotonic)
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        found = program.tune((1, 2, 3), seconds=1.5)
        assert found.rounds == tuning.LEAST_ROUNDS
        assert [bool(trial.skipped) for trial in found.trials] == [False, False, True]
        assert found.trials[2].skipped == "not timed: the time limit, seconds=, had passed"
        assert program.tune((1, 2, 3), seconds=1000).rounds == tuning.MOST_ROUNDS


def test_progress_is_shown_on_a_terminal_alone_and_cleared(scene, monkeypatch, capfd):
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        program.tune((1, 2), seconds=0.01)
        assert capfd.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        program.tune((1, 2), seconds=0.01)
    shown = capfd.readouterr().err
    assert re.search(r"wide: round 3 of 31, \d+\.\d of 0 s", shown)
    assert shown.endswith("\r\x1b[K")


class GoneTerminal(io.StringIO):
    def isatty(self):
        return True

    def write(self, text):
        raise OSError("Input/output error")


@pytest.mark.parametrize("kind", ["none", "closed", "gone"])
def test_progress_that_cannot_be_shown_changes_nothing(scene, monkeypatch, kind):
    stream = None if kind == "none" else GoneTerminal()
    if kind == "closed":
        stream.close()
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=8) as program:
        before = scene.read(x)
        monkeypatch.setattr(sys, "stderr", stream)
        assert program.tune((2,), seconds=0.01).winner.lanes == 2
        assert scene.read(x) == before


def test_where_the_driver_gives_one_lane_that_is_what_the_refusal_says(scene, without):
    without("exact dependencies")
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        for use in (program.tune, partial(program.explain, measure=True)):
            with pytest.raises(ArgumentError, match="a single lane"):
                use()
        assert values(scene, program) == [11 + value for value in range(6)]


def test_schedules_are_made_by_the_times_that_nodes_took(scene, monkeypatch):
    seen = []
    former = tuning.Schedule.on
    monkeypatch.setattr(tuning.Schedule, "on", lambda made, lanes, times: seen.append(times) or former(made, lanes, times))
    with handlepool.record(wide, scene, scene.array(1), lanes=2) as program:
        program.tune((2,), seconds=0.01)
        *_, times = seen
        assert len(times) == 12
        assert all(time >= 0 for time in times)
        assert sum(times) > 0
        assert times == recording_of(program).times


# What is restored


def plain(scene, x):
    x += 5
    return wide(scene, x)


def of_a_view(scene, x):
    times(scene, x[2:4], 2)
    return wide(scene, x)


def nested(scene, x):
    with scene.states.fork() as fork:
        fork.run(times, scene, x, 3)
    return wide(scene, x)


@dataclass
class Holder:
    y: object


@pytest.mark.parametrize("function", [in_place, plain, of_a_view, nested])
def test_what_replays_change_is_as_it_was(scene, function):
    x = scene.array(1)
    with handlepool.record(function, scene, x, lanes=8) as program:
        before = x.get().tolist()
        program.tune((1, 2, 4), seconds=0.01)
        assert x.get().tolist() == before
        program.replay()
        x = scene.driver.asarray(np.array(before))
        expected = [scene.driver.asnumpy(y).tolist() for y in function(scene, x)]
        assert [scene.driver.asnumpy(y).tolist() for y in program.outputs] == expected


@pytest.mark.parametrize("where", ["a closure", "a list", "a dictionary", "a dataclass"])
def test_arrays_are_found_wherever_a_function_has_them(scene, where):
    y = scene.array(1)
    holder = Holder(y)

    def closing(scene, x):
        times(scene, y, 2)
        return wide(scene, x)

    def held(scene, x, holder):
        times(scene, {"a list": lambda: holder[0], "a dictionary": lambda: holder["a"]}.get(where, lambda: holder.y)(), 2)
        return wide(scene, x)

    given = {"a list": [[y]], "a dictionary": [{"a": y}], "a dataclass": [holder], "a closure": []}[where]
    with handlepool.record(held if given else closing, scene, scene.array(5), *given, lanes=4) as program:
        program.tune((1, 3), seconds=0.01)
        assert scene.read(y) == 2


def test_control_without_restoring_it_is_changed(scene, without):
    without("restoring after a tuning")
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=8) as program:
        program.tune((1, 2), seconds=0.01)
        assert scene.read(x) != 2


def test_what_no_call_writes_is_not_copied(scene):
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        copies = []
        scene.driver.copy = lambda *args: copies.append(args)
        program.tune((1, 2), seconds=0.01)
        assert not copies


GLOBAL = []


def of_a_global(scene, x):
    times(scene, GLOBAL[0], 2)
    return wide(scene, x)


def test_memory_that_the_function_was_not_given_is_refused_with_the_call(scene):
    GLOBAL[:] = [scene.array(1)]
    with handlepool.record(of_a_global, scene, scene.array(1), lanes=8) as program:
        line = of_a_global.__code__.co_firstlineno + 1
        with pytest.raises(ArgumentError, match=rf"times at \S+test_tune.py:{line} writes memory that no argument of the"):
            program.tune(seconds=0.01)
        assert scene.read(GLOBAL[0]) == 2
        assert values(scene, program) == [11 + value for value in range(6)]
    GLOBAL.clear()


def test_memory_between_the_elements_of_what_the_function_was_given_is_refused(scene):
    y = scene.array(1, size=16)
    GLOBAL[:] = [y[:9]]  # inside of where y[::2] begins and ends

    def function(scene, x):
        times(scene, x, 2)
        return of_a_global(scene, plus(scene, x, 0))

    with handlepool.record(function, scene, y[::2], lanes=8) as program:
        before = y.get().tolist()
        with pytest.raises(ArgumentError, match=r"times at \S+ writes memory that no argument of the function covers completely"):
            program.tune(seconds=0.01)
        assert y.get().tolist() == before
    GLOBAL.clear()
    with handlepool.record(in_place, scene, y[::2], lanes=8) as program:  # itself has gaps, too
        before = y.get().tolist()
        program.tune((1, 2), seconds=0.01)
        assert y.get().tolist() == before


@pytest.mark.parametrize("returns", [True, False])
def test_what_a_call_writes_and_does_not_say_is_restored_where_it_is_known_all_the_same(scene, returns):
    """It is what it returned, or what a call inside it says."""

    @handlepool.operation
    def silent(scene, x, deep):
        if returns:
            scene.put(deep.held.y, lambda y: y * 2, deep.held.y)
            return deep.held.y
        times(scene, deep.held.y, 2)
        return scene.plus(x, 0)

    def function(scene, x, y):
        silent(scene, x, SimpleNamespace(held=Held(y)))
        return wide(scene, x)

    y = scene.array(1)
    with handlepool.record(function, scene, scene.array(1), y, lanes=4) as program:
        program.tune((1, 2), seconds=0.01)
        assert scene.read(y) == 2


class Held:
    """An object of which nothing is seen."""

    def __init__(self, y):
        self.box = SimpleNamespace(y=y)

    @property
    def y(self):
        return self.box.y


def test_blocks_within_others_are_parts_of_these():
    ranges = Ranges([(0, 1024), (256, 512), (2048, 4096), (1024, 1100)])
    assert [ranges.have((*piece, None)) for piece in ((600, 1090), (2048, 4096), (1090, 1200), (1200, 1300))] == [
        True,
        True,
        False,
        False,
    ]


def test_a_token_that_is_written_is_refused_with_the_call(scene):
    @handlepool.operation(mutates="plan")
    def counted(plan, x):
        return scene.plus(x, 1)

    with handlepool.record(lambda x: counted(object, plus(scene, x, 1)), scene.array(1), lanes=8) as program:
        with pytest.raises(ArgumentError, match=r"counted at \S+test_tune.py:\d+ changes an object that is no array"):
            program.tune(seconds=0.01)
        program.replay()
        assert scene.read(program.outputs) == 3


class Other:
    """Another library's array."""

    __array_interface__ = np.ones(8).__array_interface__

    def __dlpack__(self):
        raise BufferError

    def __dlpack_device__(self):
        raise BufferError


def test_an_array_of_another_library_that_may_be_written_is_refused_with_its_place(scene):
    def function(x, others):
        x = x + 1  # whose writes nobody sees
        return wide(scene, x)

    with (
        handlepool.record(function, scene.array(1), {"a": [Other()]}, lanes=8) as program,
        pytest.raises(ArgumentError, match=r"argument 1\['a'\]\[0\], a \S*Other, may be written"),
    ):
        program.tune(seconds=0.01)


@pytest.mark.parametrize("call", ["launch_graph", "synchronize_event", "instantiate_graph", "arrange_graph", "elapsed"])
def test_a_failure_in_the_middle_leaves_all_as_it_was(scene, limits, call):
    limits(MOST_ROUNDS=3)
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=3) as program:
        events = scene.driver.alive()["events"]
        for number in (1, 4):
            scene.driver.fail_at(number, call, RuntimeError("a failure"), ())
            with pytest.raises(RuntimeError, match="a failure"):
                program.tune((1, 2, 4, 5))
            scene.driver.fail_at(0)
            assert scene.read(x) == 2
            assert program.explain().got == 3
            assert scene.driver.alive()["events"] == events
        assert values(scene, program) == [4 + 10 + value for value in range(6)]
        program.tune((2,), seconds=0.01)


def measure(program):
    program.explain(measure=True)


def tune(program):
    program.tune((1, 2), seconds=0.01)


def interrupted_at_each_line_of_the_end(monkeypatch, limits, use, again=True):
    """What replays changed and how many events are left, after an interrupt at each line of what restores and gives back."""
    limits(MOST_ROUNDS=1)
    end, ends, interrupted, line = LanesRig._end, [], True, 0

    def ending(rig):
        nonlocal interrupted
        ends.append(rig)
        if len(ends) == 1:
            interrupted = at_line(line, partial(end, rig), interrupt, {"tuning.py", "outside.py"})
        elif again:
            end(rig)

    while interrupted:
        line += 1
        with Scene(HostDriver(scheduler="adversarial", check_order=True), default=True) as scene, monkeypatch.context() as patch:
            x = scene.array(1)
            with handlepool.record(in_place, scene, x, lanes=3) as program:
                before, events = scene.read(x), scene.driver.alive()["events"]
                patch.setattr(LanesRig, "_end", ending)
                ends.clear()
                with suppress(KeyboardInterrupt):
                    use(program)
                patch.undo()
                yield scene.read(x) - before, scene.driver.alive()["events"] - events
                assert values(scene, program) == [scene.read(x) + 10 + value for value in range(6)]


@pytest.mark.parametrize("use", [tune, measure])
def test_an_interrupt_in_the_end_leaves_what_replays_change_as_it_was(monkeypatch, limits, use):
    found = [*interrupted_at_each_line_of_the_end(monkeypatch, limits, use)]
    assert len(found) > 8
    assert not any(changed for changed, _ in found)
    assert all(events <= 1 for _, events in found)  # the one in hand


def test_control_an_end_that_is_not_done_again_leaves_it_changed(monkeypatch, limits):
    assert any(changed for changed, _ in interrupted_at_each_line_of_the_end(monkeypatch, limits, tune, again=False))


def test_graphs_that_are_not_taken_are_destroyed_and_all_with_the_program(scene, monkeypatch):
    made, destroyed = [], []
    arranged, marked, destroy = RecordedGraph.arranged, RecordedGraph.marked, RecordedGraph.destroy
    monkeypatch.setattr(RecordedGraph, "arranged", lambda graph, *edges: made.append(arranged(graph, *edges)) or made[-1])
    monkeypatch.setattr(RecordedGraph, "marked", lambda graph, *edges: made.append(marked(graph, *edges)) or made[-1])
    monkeypatch.setattr(RecordedGraph, "destroy", lambda graph: destroyed.append(graph) or destroy(graph))
    program = handlepool.record(wide, scene, scene.array(1), lanes=2)
    for _ in range(3):
        program.tune((1, 2, 3), seconds=0.01)
    assert len({*made} - {*destroyed}) == 1
    program.close()
    assert not {*made} - {*destroyed}
    assert len(destroyed) == len({*destroyed})


# Whose turn it is


def test_uses_by_other_threads_wait(scene, monkeypatch):
    started, values = threading.Event(), []
    former = LanesRig.tune

    def tune(rig, *args):
        thread = Thread(other)
        started.wait(TIMEOUT)
        made = former(rig, *args)
        values.append("tuned")
        threads.append(thread)
        return made

    def other():
        with scene.driver.create_stream():
            started.set()
            y = program(x)
            values.append([scene.read(each) for each in y])

    threads = []
    monkeypatch.setattr(LanesRig, "tune", tune)
    x = scene.array(1)
    scene.read(x)
    with handlepool.record(wide, scene, x, lanes=8) as program:
        program.tune((1, 2), seconds=0.01)
        threads[0].finish()
        assert values == ["tuned", [11 + value for value in range(6)]]


def test_a_program_that_was_used_on_another_stream_is_tuned_after_that(scene):
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=8) as program:
        stream = scene.driver.create_stream()
        scene.read(x)
        program.replay(stream)
        program.tune((1, 2), seconds=0.01)
        assert scene.read(x) == 4


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": ()}, r"tune\(lanes=\(\)\)"),
        ({"lanes": 4}, r"tune\(lanes=4\); pass several"),
        ({"lanes": "48"}, r"tune\(lanes='48'\)"),
        ({"lanes": (1, 33)}, r"tune\(lanes=\(1, 33\)\); pass one or more integers from 1 to 32"),
        ({"lanes": (1, 2.5)}, "integers from 1 to 32"),
        ({"lanes": (True, 2)}, "integers from 1 to 32"),
        ({"goal": "host"}, r"tune\(goal='host'\); goal must be 'clock' or 'device'"),
        ({"seconds": 0}, r"tune\(seconds=0\)"),
        ({"seconds": "1"}, r"tune\(seconds='1'\)"),
        ({"seconds": float("nan")}, r"tune\(seconds=nan\)"),
    ],
    ids=str,
)
def test_other_arguments_are_refused(scene, options, message):
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program, pytest.raises(ArgumentError, match=message):
        program.tune(**options)


@pytest.mark.parametrize("lanes", [None, 1])
def test_a_program_without_several_lanes_is_refused_with_advice(scene, lanes):
    with handlepool.record(wide, scene, scene.array(1), lanes=lanes) as program:
        with pytest.raises(
            ArgumentError, match=r"recorded (without lanes|with lanes=1), so .* record\(function, \.\.\., lanes=8\)"
        ):
            program.tune()
        assert values(scene, program) == [11 + value for value in range(6)]


def test_tuning_in_a_capture_a_recording_a_branch_or_a_task_is_refused(scene):
    with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        inside = partial(program.tune, (1, 2), seconds=0.01)
        with pytest.raises(CaptureError, match="inside a branch or a task"), scene.states.fork() as fork:
            fork.run(inside)
        with ParallelStateExecutor(2, pool=scene.pool) as executor:
            task = executor.submit(inside)
            assert "inside a branch or a task" in str(task.exception())

        def function(x):
            if scene.driver.is_capturing(scene.driver.current_stream().ptr):
                with pytest.raises(CaptureError, match="inside a recording"):
                    inside()
            return wide(scene, x)

        handlepool.record(function, scene.array(1), lanes=2).close()
        scene.stream.begin_capture("thread_local")
        with pytest.raises(CaptureError, match="is being captured"):
            inside()
        scene.stream.end_capture()
        assert values(scene, program) == [11 + value for value in range(6)]
        assert works(scene)
        inside()


def test_a_closed_program_and_a_closed_pool_say_so(scene):
    program = handlepool.record(wide, scene, scene.array(1), lanes=2)
    program.close()
    with pytest.raises(PoolClosedError, match="was closed"):
        program.tune()
    program = handlepool.record(wide, scene, scene.array(1), lanes=2)
    scene.pool.close()
    with pytest.raises(PoolClosedError):
        program.tune()
    program.close()


def test_a_graph_that_cannot_be_copied_is_refused(scene, monkeypatch):
    def refused(graph, *args):
        raise CaptureError("it allocates memory")

    monkeypatch.setattr(RecordedGraph, "arranged", refused)
    monkeypatch.setattr(RecordedGraph, "marked", refused)
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=2) as program:
        with pytest.raises(CaptureError, match="it allocates memory"):
            program.tune((1, 2), seconds=0.01)
        assert scene.read(x) == 2
        assert values(scene, program) == [4 + 10 + value for value in range(6)]


def test_no_memory_for_what_is_saved_says_so_and_nothing_is_changed(scene, monkeypatch):
    x = scene.array(1)
    with handlepool.record(in_place, scene, x, lanes=2) as program:

        def empty(*_):
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(scene.driver, "empty", empty)
            with pytest.raises(MemoryError):
                program.tune((1, 2), seconds=0.01)
        assert scene.read(x) == 2
        program.tune((1, 2), seconds=0.01)
