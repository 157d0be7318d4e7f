"""Pictures of programs, and the times that `Program.explain` tells where they were measured."""

import builtins
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from harness.operations import plus, times
from harness.scenes import works

import handlepool
from handlepool import ArgumentError, CaptureError, PackageMissingError, PoolClosedError
from handlepool.recording import drawing
from handlepool.recording.explain import Explanation, Step

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture
def scene(scene, monkeypatch):
    monkeypatch.delenv(drawing.VARIABLE, raising=False)
    return scene


def wide(scene, x):
    times(scene, x, 2)
    made = [plus(scene, plus(scene, x, value), 10) for value in range(6)]
    return [np.sqrt(made[0]), *made[1:]]


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3]


# Times


def test_measured_times_are_told_with_the_longest_way_and_the_lanes_use(scene):
    x = scene.array(1)
    with handlepool.record(wide, scene, x, lanes=3) as program:
        how = program.explain()
        assert (how.times, how.critical, how.total) == ((), 0.0, 0.0)
        assert "Measured" not in str(how)
        assert re.search(r"Nodes on each lane: \d+, \d+, \d+\n", str(how))
        how = program.explain(measure=True)
        assert len(how.times) == len(how.steps)
        assert 0 < how.critical <= how.planned <= how.total
        assert sum(count for count, _ in how.use) == len(how.nodes)
        assert re.search(r"Measured: [\d.,]+ microseconds one after the other, [\d.,]+ on the longest path by data", str(how))
        known = json.loads(json.dumps(how.to_dict()))
        assert (known["critical"], known["times"], len(known["use"])) == (how.critical, [*how.times], 3)
        assert known["ends"] == [*how.ends]
        assert all(0 <= begin <= end for begin, end in how.ran)
        assert (program.explain().ends, program.explain().ran) == ((), [])
        assert program.explain().times == how.times
        assert scene.read(x) == 2
    assert works(scene)


def test_a_step_ran_from_the_end_of_the_last_one_that_it_waits_for():
    steps = tuple(Step(name, "here", 0, after) for name, after in [("a", ()), ("b", (0,)), ("c", (0, 1))])
    how = Explanation("name", 3, 0, limit=2, got=2, steps=steps, ends=(2.0, 5.0, 9.0))
    assert how.ran == [(0.0, 2.0), (2.0, 5.0), (5.0, 9.0)]


def test_the_longest_way_is_by_times_and_not_by_steps():
    steps = tuple(
        Step(name, "here", lane, after) for name, lane, after in [("a", 0, ()), ("b", 0, (0,)), ("c", 1, (3,)), ("d", 1, ())]
    )
    how = Explanation("name", 4, 0, limit=2, got=2, steps=steps, times=(1.0, 2.0, 10.0, 20.0))
    assert (how.longest, how.critical, how.total, how.use) == (2, 30.0, 33.0, [(2, 3.0), (2, 30.0)])
    by_data = Explanation("name", 4, 0, limit=2, got=2, steps=steps, times=how.times, data=((), (), (), ()))
    assert (by_data.critical, by_data.planned, by_data.longest, by_data.longest_by_data) == (20.0, 30.0, 2, 1)
    assert "2 of 2 lanes; the longest path of waits has 2 of 4 steps, and 1 if only waits by data count" in str(by_data)
    assert "if only waits by data" not in str(how)
    assert how.order().index(3) < how.order().index(2)


# Pictures


@pytest.mark.parametrize("measure", [False, True])
def test_a_picture_is_written_in_a_light_and_a_dark_form(scene, tmp_path, measure):
    x = scene.array(1)
    with handlepool.record(wide, scene, x, lanes=3) as program:
        program.draw(tmp_path / "light.png", measure=measure)
        program.draw(str(tmp_path / "dark.png"), dark=True, measure=measure)
        assert scene.read(x) == 2
    light, dark = pixels(tmp_path / "light.png"), pixels(tmp_path / "dark.png")
    assert light.shape == dark.shape
    assert light[0, 0].mean() > 0.95
    assert dark[0, 0].mean() < 0.15
    for shown in (light, dark):
        assert len(np.unique((shown.reshape(-1, 3) * 255).astype(int), axis=0)) > 20


def test_with_a_replay_there_is_a_second_time_axis(scene, tmp_path):
    with handlepool.record(wide, scene, scene.array(1), lanes=3) as program:
        program.draw(tmp_path / "graph.svg", measure=False)
        program.draw(tmp_path / "both.svg")
    heights = [float(re.search(r'height="([\d.]+)pt"', (tmp_path / f"{name}.svg").read_text())[1]) for name in ("graph", "both")]
    assert heights[1] > 1.4 * heights[0]


def many(count, lanes):
    steps = tuple(
        Step(f"call{number % 12}", "here", number % lanes, (number - lanes,) if number >= lanes else ())
        for number in range(count)
    )
    return Explanation("many", count, 0, limit=lanes, recorded=lanes, got=lanes, steps=steps)


@pytest.mark.slow
def test_a_thousand_nodes_are_told_apart(tmp_path):
    ran = replace(many(1000, 8), ends=tuple(float(number // 8 + 1) for number in range(1000)))
    drawing.draw(ran, tmp_path / "many.png", dark=False)
    shown = pixels(tmp_path / "many.png")
    ink = (np.abs(shown - 1) > 0.02).any(axis=2)
    boxes = max(np.count_nonzero(np.diff(row.sum(axis=1))) for row in shown[ink.mean(axis=1) > 0.5])
    assert boxes >= 120


def test_names_are_taken_literally(tmp_path):
    how = many(4, 2)
    steps = tuple(step._replace(name="f<$\\frac{$>.λ") for step in how.steps)
    drawing.draw(Explanation("$x_", 4, 0, limit=2, got=2, recorded=2, steps=steps), tmp_path / "x.png", dark=False)


def test_other_work_is_a_band_over_all_lanes(tmp_path):
    steps = (Step("a", "here", 0, ()), Step("other work", "there", None, (0,), "plain"), Step("b", "here", 0, (1,)))
    how = Explanation("name", 3, 0, limit=2, got=1, recorded=1, steps=steps)
    assert "1 steps that run alone" in drawing._subtitle(how)
    drawing.draw(how, tmp_path / "x.png", dark=True)


# Bad input


@pytest.mark.parametrize("place", ["nowhere/x.png", "x.unknown", "", "folder", "x\0.png", 5])
def test_a_file_that_cannot_be_written_is_refused(scene, tmp_path, monkeypatch, place):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / place if place == "x.unknown" else place
    with handlepool.record(wide, scene, scene.array(1), lanes=3) as program:
        with pytest.raises(
            ArgumentError, match=r"folder .* does not exist|cannot write|the name of a file|the file name.s ending selects"
        ):
            program.draw(file, measure=False)
        assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
        program.replay()


def test_without_matplotlib_the_error_says_what_to_install(scene, tmp_path, monkeypatch):
    original = builtins.__import__

    def importing(name, *args):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *args)

    with handlepool.record(wide, scene, scene.array(1), lanes=3) as program:
        monkeypatch.setattr(builtins, "__import__", importing)
        with pytest.raises(PackageMissingError, match=r"pip install handlepool\[demo\]"):
            program.draw(tmp_path / "x.png")
        program.replay()


@pytest.mark.parametrize("options", [{"dark": 1}, {"measure": "yes"}])
def test_other_options_are_refused(scene, tmp_path, options):
    with handlepool.record(wide, scene, scene.array(1), lanes=3) as program, pytest.raises(ArgumentError, match="True or False"):
        program.draw(tmp_path / "x.png", **options)


def test_what_cannot_be_drawn_or_measured_says_so(scene, tmp_path):
    with handlepool.record(wide, scene, scene.array(1)) as program:
        for measure in (False, True):
            with pytest.raises(ArgumentError, match="lanes=8"):
                program.draw(tmp_path / "x.png", measure=measure)
        with pytest.raises(ArgumentError, match="lanes=8"):
            program.explain(measure=True)
    with pytest.raises(PoolClosedError):
        program.draw(tmp_path / "x.png")
    with handlepool.record(wide, scene, scene.array(1), lanes=2) as program:
        with pytest.raises(CaptureError, match="cannot be measured or tuned inside a branch"), scene.states.fork() as fork:
            fork.run(program.explain, measure=True)
        for call, message in (
            (partial(program.explain, measure=1), "explain: measure=1; it must be True or False"),
            (partial(program.draw, tmp_path / "x.png", measure=None), "draw: measure=None; it must be True or False"),
            (partial(program.draw, tmp_path / "x.png", dark="yes"), "draw: dark='yes'; it must be True or False"),
        ):
            with pytest.raises(ArgumentError, match=f"^wide: {message}$"):
                call()
        program.replay()


# By the environment


def test_the_environment_has_every_recording_with_lanes_drawn(scene, tmp_path, monkeypatch):
    monkeypatch.setenv(drawing.VARIABLE, str(tmp_path))
    for lanes in (1, 3, None):
        handlepool.record(lambda x: wide(scene, x), scene.array(1), lanes=lanes).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(re.fullmatch(r"test_the_environment\S+lambda-\d+\.png", name) for name in names)


def test_the_environment_does_not_stop_a_recording_of_which_nothing_can_be_drawn(scene, tmp_path, monkeypatch, without):
    without("exact dependencies")
    monkeypatch.setenv(drawing.VARIABLE, str(tmp_path))
    with handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), lanes=4) as program:
        program.replay()
        assert scene.read(program.outputs) == 2
        with pytest.raises(ArgumentError, match="calls no graph function"):
            program.draw(tmp_path / "x.png", measure=False)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(scene, tmp_path, monkeypatch):
    monkeypatch.setenv(drawing.VARIABLE, str(tmp_path / "nowhere"))
    calls = []
    with pytest.raises(ArgumentError, match=r"\(drawn because HANDLEPOOL_DRAW is set\): draw\(.* folder .* does not exist"):
        handlepool.record(lambda: calls.append(1), lanes=3)
    assert not calls


def test_a_picture_that_fails_leaves_nothing_open(scene, tmp_path, monkeypatch):
    monkeypatch.setenv(drawing.VARIABLE, str(tmp_path))
    monkeypatch.setattr(drawing, "draw", lambda *_, **__: SimpleNamespace().nothing)
    with pytest.raises(AttributeError):
        handlepool.record(wide, scene, scene.array(1), lanes=3)
    assert works(scene)
    assert scene.pool.stats()["scratch_bytes_recorded"] == 0
