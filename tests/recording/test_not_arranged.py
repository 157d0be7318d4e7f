"""Recordings on a driver that does not arrange them, as the cuda driver: they are right, and what is missing is refused."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from harness.region_lanes import control, run, wanted
from harness.region_maker import make_case
from harness.region_worlds import World
from harness.scenes import Scene, leased

import handlepool
from handlepool import ArgumentError, CaptureError, OutOfMemoryError
from handlepool.drivers.host.driver import HostDriver
from handlepool.recording import drawing
from handlepool.recording.unwritten import Unwritten

PROGRAMS = 12


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.setattr(HostDriver, "arranges", False)
    monkeypatch.delenv(drawing.VARIABLE, raising=False)


@pytest.fixture
def scene(monkeypatch):
    with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
        monkeypatch.setattr("handlepool.pool.default._default", scene.pool)
        yield scene
        assert not scene.driver.order.found
        assert leased(scene) == 0


@handlepool.operation
def plus(scene, x, value):
    return scene.plus(x, value)


@handlepool.operation(mutates="y")
def times(scene, y, value):
    scene.put(y, lambda x: x * value, y)


def wide(scene, x):
    return [plus(scene, plus(scene, x, value), 10) for value in range(6)]


def chain(scene, x):
    for value in range(40):
        x = plus(scene, x, value)
    return x


def values(scene, program):
    program.replay()
    return [scene.read(y) for y in program.outputs]


@pytest.mark.filterwarnings("ignore:a branch waits since")
def test_g17_random_programs_give_what_one_stream_gives_and_most_lost_needs_go_wrong():
    world = World()
    counts = Counter()
    for seed in range(PROGRAMS):
        case = make_case(seed)
        expected = wanted(case)
        for lanes in (1, 2, 8):
            outcome = run(world, case, lanes)
            if "nothing to replay" in str(outcome.error):
                break
            assert not (why := outcome.differs(expected)), f"{why}\n{lanes} lanes, {case}"
            assert outcome.how.recorded == outcome.how.got <= lanes
            assert not world.left_behind()
            if lanes == 8 and outcome.edges.found:
                counts["tried"] += 1
                counts["caught"] += control(world, case, lanes, outcome.edges, expected) is not None
                assert not world.left_behind()
    world.close()
    assert counts["caught"] > 0.7 * counts["tried"] > 0


@pytest.mark.parametrize(("lanes", "got"), [(1, 1), (2, 2), (8, 6)])
def test_calls_are_recorded_on_as_many_lanes_as_were_asked_for(scene, lanes, got):
    with handlepool.record(wide, scene, scene.array(1), lanes=lanes) as program:
        how = program.explain()
        assert (how.wanted > lanes or how.wanted == got, how.recorded, how.got) == (True, got, got)
        assert "brought onto" not in str(how)
        assert values(scene, program) == [11 + value for value in range(6)]


def test_memory_is_kept_on_several_lanes_and_used_again_on_one(scene):
    sizes = []
    for lanes in (1, 2):
        with handlepool.record(chain, scene, scene.array(1), lanes=lanes) as program:
            program.replay()
            assert scene.read(program.outputs) == 1 + sum(range(40))
            sizes.append(program.nbytes)
    assert sizes[0] < 512 * 5
    assert sizes[1] >= 512 * 40


@pytest.mark.parametrize(
    ("before", "given"),
    [([(0, 512), (512, 1024)], (0, 1024)), ([(0, 1024)], (512, 1024)), ([(0, 1024)], (0, 1024))],
    ids=["several in one", "a part", "the same"],
)
def test_memory_that_is_given_out_again_in_other_blocks_is_known_by_its_last_block(before, given):
    books = Unwritten()
    for start, stop in before:
        books.add(start, stop, "before")
    books.add(*given, "now")
    for place in (0, 0, 512, 512):
        books.add(place, place, "nothing")
    inside = (max(given[0], 512), 600, None)
    with pytest.raises(CaptureError, match="allocated at now"):
        books.check("call", "here", [inside], [], ())
    books.wrote([(*given, None)])
    books.check("call", "here", [inside], [], ())


def test_too_little_memory_promises_no_number_for_one_lane_and_one_lane_is_enough(monkeypatch):
    with Scene(HostDriver(memory=512 * 20, check_order=True)) as scene:
        monkeypatch.setattr("handlepool.pool.default._default", scene.pool)
        x = scene.array(1)

        def beside(x):
            return [plus(scene, x, 1), chain(scene, x), chain(scene, x)]

        with pytest.raises(OutOfMemoryError, match=r"finds no memory.*record it with lanes=1; or free arrays") as caught:
            handlepool.record(beside, x, lanes=8)
        assert "1 lane takes" not in str(caught.value)
        assert leased(scene) == 0
        with handlepool.record(beside, x, lanes=1) as program:
            assert values(scene, program) == [2, 781, 781]


def test_what_measures_is_refused_with_what_works_and_the_program_goes_on(scene, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with handlepool.record(wide, scene, scene.array(1), lanes=4) as program:
        for use in (program.tune, lambda: program.explain(measure=True), lambda: program.draw(tmp_path / "measured.png")):
            with pytest.raises(ArgumentError, match=r"does not arrange recordings yet.*draw\(\.\.\., measure=False\)"):
                use()
        program.draw(tmp_path / "x.png", measure=False)
        assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
        assert program.explain().got == 4
        assert values(scene, program) == [11 + value for value in range(6)]


def test_the_environment_has_recordings_drawn(scene, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setenv(drawing.VARIABLE, str(tmp_path))
    for lanes in (1, 3, None):
        with handlepool.record(wide, scene, scene.array(1), lanes=lanes) as program:
            assert values(scene, program) == [11 + value for value in range(6)]
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_a_graph_is_made_ready_once_and_never_copied(scene, lanes):
    before = Counter(scene.driver.calls)
    with handlepool.record(wide, scene, scene.array(1), lanes=lanes):
        made = Counter(scene.driver.calls) - before
        assert (made["instantiate_graph"], made["arrange_graph"], made["mark_graph"]) == (1, 0, 0)


class Tensor:
    """A tensor on a GPU, over an array of the host driver's."""

    is_cuda = True

    def __init__(self, array):
        self.array = array


@handlepool.operation(mutates=lambda scene, tensor: tensor.array)
def doubled(scene, tensor):
    return scene.put(tensor.array, lambda x: x * 2, tensor.array)


def test_operations_on_tensors_are_other_work_and_right(scene, monkeypatch):
    theirs = SimpleNamespace(
        current_stream=lambda device: scene.driver.current_stream().ptr,
        storage=id,
        version=lambda tensor: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    for place in ("stream_order", "undeclared"):
        monkeypatch.setattr(f"handlepool.regions.{place}.integration", lambda: theirs)

    def function(x, y):
        first = plus(scene, y, 1)
        doubled(scene, Tensor(y))
        return first, plus(scene, y, 1), plus(scene, x, 1)

    y = scene.array(1)
    with handlepool.record(function, scene.array(1), y, lanes=4) as program:
        how = program.explain()
        serial = [step for step in how.steps if step.lane is None]
        assert serial[0].name.endswith("doubled")
        assert "torch's own streams" in serial[0].why
        assert (serial[0].after, [step.lane is None for step in how.steps[-2:]]) == ((0,), [False, False])
        assert {step.after for step in how.steps[-2:]} == {(len(how.steps) - 3,)}
        assert values(scene, program) == [3, 5, 2]  # the first call doubled it once
