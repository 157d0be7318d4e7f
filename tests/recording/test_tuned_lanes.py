"""What `Program.tune` found is kept in the plan directory, and taken from there by whoever records the same (guarantee 19)."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from harness.operations import plus
from harness.scenes import Scene

import handlepool
from handlepool import ArgumentError
from handlepool.__main__ import main
from handlepool.drivers.executable import SavedPlan
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.recording import tuned_lanes
from handlepool.recording.tuning import LanesRig

COUNTS = (1, 2, 4)


def wide(scene, x, parts=6):
    return [plus(scene, plus(scene, x, value), 10) for value in range(parts)]


def ones(scene, size):
    return scene.driver.asarray(np.ones((1, 8, size), "float32"))


@pytest.fixture
def process(tmp_path):
    """``with process() as scene``: a pool of another process, as far as files can tell, with the same plan directory."""

    @contextmanager
    def start(path=tmp_path / "plans"):
        driver = HostDriver(scheduler="adversarial", check_order=True)
        with Scene(driver, plan_directory=path, default=True) as scene:
            yield scene
            assert not scene.driver.order.found

    return start


@pytest.fixture
def rounds(lane_times):
    """The lanes that were timed, once for each time."""
    lane_times.clock |= {1: 100.0, 2: 50.0, 4: 90.0}
    lane_times.device |= {1: 0.0, 2: 50.0, 4: 10.0}
    return lane_times.timed


def tuned(process, rounds, function=wide, lanes=8, counts=COUNTS, **options):
    """What a process finds, and whether it measured anything; its program is right."""
    rounds.clear()
    with process() as scene, handlepool.record(function, scene, scene.array(1), lanes=lanes) as program:
        found = program.tune(counts, **options)
        assert program.explain().got == found.winner.got
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [11 + value for value in range(len(program.outputs))]
        return found, bool(rounds)


def test_the_next_process_takes_what_was_found_and_measures_nothing(process, rounds, monkeypatch):
    first, measured = tuned(process, rounds)
    assert measured
    assert not first.kept
    assert first.winner.lanes == 2
    with monkeypatch.context() as patch:
        patch.setattr(LanesRig, "times", None)  # nor does it time the steps
        second, measured = tuned(process, rounds)
    assert not measured
    assert second.kept
    assert (second.winner, second.trials, second.rounds, second.seconds) == (
        first.winner,
        first.trials,
        first.rounds,
        first.seconds,
    )
    assert "s, from the plan directory; microseconds per replay\n" in str(second)
    assert str(second).splitlines()[1:] == str(first).splitlines()[1:]


def test_a_program_of_the_same_process_takes_it_too_and_has_the_times_of_its_nodes(process, rounds):
    with process() as scene:
        found, times = [], []
        for _ in range(2):
            with handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
                found.append(program.tune(COUNTS))
                times.append(program.explain().to_dict()["nodes"])
        assert [each.kept for each in found] == [False, True]
        assert times[0] == times[1]


def other(scene, x):
    return wide(scene, x, 5)


@pytest.mark.parametrize(
    "changed",
    [{"goal": "device"}, {"counts": (1, 2)}, {"counts": (4, 2, 1)}, {"anew": True}, {"function": other}],
    ids=["goal", "counts", "their order", "anew", "calls"],
)
def test_what_differs_is_measured(process, rounds, changed):
    tuned(process, rounds)
    found, measured = tuned(process, rounds, **changed)
    assert measured
    assert not found.kept


def test_other_sizes_are_measured(process, rounds):
    def sums(x):
        return [handlepool.add(handlepool.add(x, x), x) for _ in range(6)]

    found = []
    for size in (8, 8, 800, 800):
        with process() as scene, handlepool.record(sums, ones(scene, size), lanes=8) as program:
            found.append(program.tune(COUNTS).kept)
    assert found == [False, True, False, True]


def test_other_plans_are_measured(process, rounds, monkeypatch):
    tuned(process, rounds)
    monkeypatch.setattr("handlepool.recording.capture.Recording.engines", lambda recording: ["another"])
    assert tuned(process, rounds)[1]
    assert not tuned(process, rounds)[1]


def test_lanes_that_were_asked_for_in_record_make_no_difference(process, rounds):
    tuned(process, rounds, lanes=8)
    found, measured = tuned(process, rounds, lanes=2)
    assert not measured
    assert (found.previous, found.winner.lanes) == (2, 2)


def kept_by(path):
    """The key of the tuning that is in a plan directory, and what it has."""
    (file,) = [file for file in PlanDirectory(path).files() if file.plan.engine == tuned_lanes.ENGINE]
    return file.key, json.loads(file.plan.data)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"winner": 0}',
        {"winner": 3},
        {"winner": -1},
        {"winner": 1.0},
        {"winner": True},
        {"trials": []},
        {"trials": [[1, 1, 0, 1.0, 1.0, ""]] * 3},
        {"trials": [[count, 1, 0, float("nan"), 1.0, ""] for count in COUNTS]},
        {"trials": [[count, 1, 0, None, None, ""] for count in COUNTS]},
        {"trials": [[count, 1, 0, None, None, "no time"] for count in COUNTS]},
        {"trials": [[count, "1", 0, 1.0, 1.0, ""] for count in COUNTS]},
        {"trials": [[count, 1, 0, 1.0] for count in COUNTS]},
        {"trials": 3},
        {"times": []},
        {"times": [-1.0] * 12},
        {"times": ["1"] * 12},
        {"rounds": None},
        {"seconds": "1"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_that_is_not_ours_is_passed_over_counted_and_written_anew(process, rounds, tmp_path, wrong):
    tuned(process, rounds)
    key, found = kept_by(tmp_path / "plans")
    data = wrong if isinstance(wrong, bytes) else json.dumps(found | wrong).encode()
    PlanDirectory(tmp_path / "plans").save(key, SavedPlan(tuned_lanes.ENGINE, 0, 0, data))
    with process() as scene, handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        assert not program.tune(COUNTS).kept
        stats = scene.pool.stats()
        assert (stats["plan_files_rejected"], stats["plan_files_written"]) == (1, 1)
    assert tuned(process, rounds)[0].kept


def test_a_plan_under_its_key_is_not_taken_for_it(process, rounds, tmp_path):
    tuned(process, rounds)
    key, found = kept_by(tmp_path / "plans")
    PlanDirectory(tmp_path / "plans").save(key, SavedPlan("eng0", 0, 0, json.dumps(found).encode()))
    assert not tuned(process, rounds)[0].kept


def test_without_a_plan_directory_it_is_measured_each_time(process, rounds):
    for _ in range(2):
        rounds.clear()
        with process(None) as scene, handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
            assert not program.tune(COUNTS).kept
            assert rounds


@pytest.mark.parametrize("call", ["arrange_graph", "instantiate_graph"])
def test_a_failure_leaves_the_program_as_it_was(process, rounds, call):
    tuned(process, rounds)
    with process() as scene, handlepool.record(wide, scene, scene.array(1), lanes=8) as program:
        scene.driver.fail_at(1, call, RuntimeError("a failure"), ())
        with pytest.raises(RuntimeError, match="a failure"):
            program.tune(COUNTS)
        scene.driver.fail_at(0)
        assert program.explain().got == 6
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [11 + value for value in range(6)]
        assert program.tune(COUNTS).kept


def test_nothing_is_replayed_so_nothing_that_is_written_has_to_be_restored(process, rounds):
    @handlepool.operation(mutates="y")
    def doubled(scene, y):
        scene.put(y, lambda x: x * 2, y)

    def in_place(scene, x, y):
        doubled(scene, y)
        return wide(scene, x)

    for kept in (False, True):
        with process() as scene:
            x, y = scene.array(1), scene.array(3)
            with handlepool.record(in_place, scene, x, y, lanes=8) as program:
                before = scene.read(y)
                assert program.tune(COUNTS).kept == kept
                assert scene.read(y) == before
                program.replay()
                assert scene.read(y) == 2 * before


def test_it_is_listed_among_the_plans(process, rounds, tmp_path, capsys):
    tuned(process, rounds)
    assert main(["plans", "list", "--directory", str(tmp_path / "plans")]) == 0
    line, total = capsys.readouterr().out.splitlines()
    assert line.endswith("host: lanes of wide by clock")
    assert total.startswith("1 plans, ")
    assert main(["plans", "verify", "--directory", str(tmp_path / "plans")]) == 0


def test_anew_is_a_truth_value(process, rounds):
    with (
        process() as scene,
        handlepool.record(wide, scene, scene.array(1), lanes=8) as program,
        pytest.raises(ArgumentError, match="anew"),
    ):
        program.tune(anew="yes")
