"""Graph functions over a plan directory: what was built once is built no more, and what is wrong there is built again."""

import logging

import numpy as np
import pytest
from harness.graphs import both, double, plus
from harness.scenes import Scene

import handlepool
from handlepool import ArgumentError, ContractError, HandlePool
from handlepool.drivers.executable import SavedPlan
from handlepool.drivers.host.executable import HostExecutable
from handlepool.pool.plan_directory import PlanDirectory


@pytest.fixture
def launch_by(monkeypatch):
    """Launches plans of the host driver by another function: ``launch_by(function)``."""
    return lambda function: monkeypatch.setattr(HostExecutable, "launch", function)


@pytest.fixture
def process(make_driver, tmp_path):
    """Calls a graph function with new arrays of these values, as a new process would: the result, and what was counted of files.

    ``process(function, *values, size=8, check=False, before=None)``; ``before(scene)`` comes before the call.
    """

    def call(function, *values, size=8, check=False, before=None, **options):
        with Scene(make_driver(), plan_directory=tmp_path / "plans", check=check, default=True) as scene:
            if before is not None:
                before(scene)
            result = function(*[scene.array(value, size=size) for value in values], **options)
            results = [scene.read(each) for each in (result if isinstance(result, tuple) else [result])]
            counts = scene.pool.stats()
        return results, {
            n.removeprefix("plan_files_"): count for n, count in counts.items() if n.startswith("plan_files_") and count
        }

    return call


BUILT, LOADED = {"missed": 1, "written": 1}, {"loaded": 1}
REBUILT = {"rejected": 1, "written": 1}


@pytest.mark.parametrize("check", [False, True])
def test_a_second_process_builds_nothing(process, check):
    assert process(both, 2, 3, check=check) == ([5, 6], BUILT)
    assert process(both, 2, 3, check=check) == ([5, 6], LOADED)
    assert process(both, 5, 6, check=check) == ([11, 30], LOADED)


@pytest.mark.parametrize(("own", "made"), [(True, 0), (False, 1)])
def test_a_plan_is_read_with_this_threads_own_handle_where_there_is_one(process, own, made):
    def counted(function, values):
        counts = []

        def before(scene):
            if own:
                scene.pool.get_handle()
            function.compile(*[scene.array(value, size=8) for value in values])
            counts.append(scene.pool.stats()["handles_building"])

        return counts, process(function, *values, before=before)[1]

    assert counted(double, [2]) == ([1], BUILT)  # what is built needs a handle that lives as long
    assert counted(double, [2]) == ([made], LOADED)


def test_another_graph_geometry_type_or_setting_is_another_plan(process):
    assert process(double, 2)[1] == BUILT
    assert process(double, 2, size=9)[1] == BUILT
    assert process(plus, 2, 3)[1] == BUILT
    assert process(double.options(compute_dtype="float64"), 2)[1] == BUILT
    assert process(double.options(workspace_limit=0), 2)[1] == BUILT
    assert process(double.options(deterministic=True), 2)[1] == BUILT
    assert process(double.options(name="twice"), 2)[1] == LOADED  # what messages call it is no matter


def test_constants_in_a_graph_are_part_of_the_key(process):
    def scaled(factor):
        @handlepool.graph
        def times(g, x):
            return g.leaky_relu(x, negative_slope=factor)

        return times

    assert process(scaled(0.5), -2) == ([-1], BUILT)
    assert process(scaled(0.25), -2) == ([-0.5], BUILT)


def test_numbers_that_look_alike_and_what_the_function_excludes_are_part_of_the_key(process):
    def times(factor, exclude=lambda g: None):
        @handlepool.graph
        def times(g, x):
            exclude(g)
            return g.leaky_relu(x, negative_slope=factor)

        return times

    half, single = np.float16(0.1), np.float32(0.1)
    assert str(half) == str(single)
    assert process(times(half), -1) == ([-float(half)], BUILT)
    assert process(times(single), -1) == ([-float(single)], BUILT)
    assert process(times(single, lambda g: g.deselect_engines(["eng1"])), -1)[1] == BUILT


def test_a_graph_with_what_text_does_not_tell_from_others_is_planned_each_time(process):
    @handlepool.graph
    def times(g, x):
        return g.leaky_relu(x, negative_slope=np.array(0.5))

    for _ in range(2):
        assert process(times, -2) == ([-1], {})


def test_a_checked_pool_compares_what_a_loaded_plan_computes(process, launch_by):
    def crossed(self, handle, operands, *more):
        *given, first, second = operands
        launch(self, handle, [*given, second, first] if self.untried else operands, *more)

    process(both, 2, 3)
    launch = HostExecutable.launch
    launch_by(crossed)
    assert process(both, 2, 3) == ([6, 5], LOADED)  # the control: nobody looks
    with pytest.raises(ContractError, match="both"):
        process(both, 2, 3, check=True)


def test_versions_and_the_device_are_part_of_the_key(process, monkeypatch):
    assert process(double, 2)[1] == BUILT
    monkeypatch.setattr("handlepool.drivers.host.driver.HostDriver.plan_environment", lambda _: '{"driver":"host","cudnn":92800}')
    assert process(double, 2)[1] == BUILT


def files_of(tmp_path):
    return sorted((tmp_path / "plans").glob("*.plan"))


def test_a_damaged_file_is_built_again_and_written_anew(process, tmp_path):
    process(double, 2)
    (file,) = files_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert process(double, 2) == ([4], REBUILT)
    assert process(double, 2) == ([4], LOADED)


def test_another_plan_behind_a_digest_that_is_right_is_refused_by_the_driver(process, tmp_path):
    process(double, 2)
    files = PlanDirectory(tmp_path / "plans")
    (found,) = files.files()
    files.save(found.key, SavedPlan(found.plan.engine, found.plan.workspace_size, 1, b"another geometry"))
    assert process(double, 2) == ([4], {"loaded": 1, "rejected": 1, "written": 1})
    assert process(double, 2) == ([4], LOADED)


def test_a_plan_that_fails_at_its_first_launch_is_dropped_built_once_and_said(process, launch_by, caplog):
    process(double, 2)
    launch = HostExecutable.launch

    def failing(self, *args):
        if self.untried:
            raise RuntimeError("cuDNN does not like it")
        launch(self, *args)

    launch_by(failing)
    with caplog.at_level(logging.WARNING, "handlepool"):
        assert process(double, 2) == ([4], {"loaded": 1, "rejected": 1, "written": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "double: a plan of the plan directory failed at its first launch, and is built anew: cuDNN does not like it"
    ]
    launch_by(launch)
    assert process(double, 2) == ([4], LOADED)


def test_control_a_plan_that_was_built_here_and_fails_is_not_built_again(process, launch_by):
    def failing(self, *args):
        raise RuntimeError("cuDNN does not like it")

    launch_by(failing)
    with pytest.raises(RuntimeError, match="does not like it"):
        process(double, 2)


def test_a_plan_that_was_launched_once_is_not_built_again_where_it_fails_later(process, launch_by):
    def twice(scene):
        x = scene.array(2)
        double(x)
        launch_by(failing)
        with pytest.raises(RuntimeError, match="does not like it"):
            double(x)
        launch_by(launch)

    def failing(self, *args):
        raise RuntimeError("cuDNN does not like it")

    process(double, 2)
    launch = HostExecutable.launch
    assert process(double, 2, before=twice) == ([4], LOADED)


def test_an_error_of_the_callers_leaves_a_loaded_plan_as_it_is(process):
    def overlap(scene):
        x = scene.array(2, size=8)
        with pytest.raises(ArgumentError):
            both(x, x, out=(x, x))

    process(both, 2, 3)
    assert process(both, 2, 3, before=overlap) == ([5, 6], {"loaded": 2})


def test_a_plan_that_was_selected_is_the_one_that_is_kept(process, tmp_path, monkeypatch):
    def select(scene):
        scene.pool.internals.plan_files.load("nothing")
        double.plan_for(scene.array(2)).select(0)

    saved = []
    save = PlanDirectory.save
    monkeypatch.setattr(PlanDirectory, "save", lambda self, key, plan: (saved.append(key), save(self, key, plan)))
    process(double, 2, before=select)
    assert len(saved) == 2
    assert len(set(saved)) == 1


def test_a_loaded_plan_tells_what_a_built_one_does(process, make_driver, tmp_path):
    def told(scene):
        plan = double.plan_for(scene.array(2))
        return plan.engine, plan.workspace_size, plan.candidates, plan.graph, plan.inputs, plan.outputs, plan.build(0).engine

    found = []
    for _ in range(2):
        process(double, 2, before=lambda scene: found.append(told(scene)))
    assert found[0] == found[1]


def test_a_directory_that_is_read_only_serves_what_it_has(process, monkeypatch):
    process(double, 2)
    monkeypatch.setattr("handlepool.pool.plan_directory._write", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only")))
    assert process(double, 2) == ([4], LOADED)
    assert process(plus, 2, 3) == ([5], {"missed": 1, "unwritten": 1})


def test_the_environment_names_a_directory_where_no_argument_does(monkeypatch, tmp_path, unused):
    monkeypatch.setenv("HANDLEPOOL_PLAN_DIRECTORY", str(tmp_path / "plans"))
    pool = HandlePool(driver="host")
    assert pool.internals.plan_files.path == tmp_path / "plans"
    pool.close()
    monkeypatch.setenv("HANDLEPOOL_PLAN_DIRECTORY", "")
    assert HandlePool(driver="host").internals.plan_files is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HANDLEPOOL_PLAN_DIRECTORY", str(tmp_path / "file"))
    with pytest.raises(
        ArgumentError, match=r"variable HANDLEPOOL_PLAN_DIRECTORY names an unusable path: plan directory .* cannot be used"
    ):
        HandlePool(driver="host")


@pytest.mark.parametrize("device", ["h200.json", 0])
def test_what_is_no_description_of_a_device_is_refused(process, device):
    def compile(scene):
        with pytest.raises(ArgumentError, match="pass DeviceProperties"):
            double.compile(scene.array(2), device=device)

    process(double, 2, before=compile)
