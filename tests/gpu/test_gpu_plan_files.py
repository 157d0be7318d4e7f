"""Plans on disk on a GPU: what one pool built another one loads and launches to the same bits, and what was planned elsewhere."""

import numpy as np
import pytest
from harness.process import as_default

import handlepool
from handlepool import ArgumentError, DeviceProperties, HandlePool
from handlepool.drivers.cuda import planning
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.testing import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@handlepool.graph(deterministic=True)
def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])


@handlepool.graph(deterministic=True)
def conv_relu(g, x, w):
    return g.relu(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))


FUNCTIONS = [conv, conv_relu]


@pytest.fixture
def x(random_array):
    return random_array((2, 64, 14, 14), "float16", "nhwc", 1)


@pytest.fixture
def w(random_array):
    return random_array((32, 64, 3, 3), "float16", "nhwc", 2) / 24


@pytest.fixture
def process(tmp_path):
    """Runs something with a new pool over the directory, as a new process would: what it gave, and what was counted of files."""

    def run(function):
        with HandlePool(driver="cuda", plan_directory=tmp_path / "plans") as pool, as_default(pool):
            with pool.driver.create_stream() as stream:
                result = function()
                pool.driver.synchronize_stream(stream.ptr)
            counts = pool.stats()
        return result, {n.removeprefix("plan_files_"): c for n, c in counts.items() if n.startswith("plan_files_") and c}

    return run


def calls(function, x, w):
    """The result of a first call, and of a second one, which a shortcut makes."""
    return [cupy.asnumpy(function(x, w)) for _ in range(2)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_loaded_plan_gives_the_bits_of_the_one_that_was_built(process, function, x, w):
    built, counts = process(lambda: calls(function, x, w))
    assert counts == {"missed": 1, "written": 1}
    loaded, counts = process(lambda: calls(function, x, w))
    assert counts == {"loaded": 1}
    for result in [*built, *loaded]:
        np.testing.assert_array_equal(result, built[0])


def test_a_plan_that_is_read_with_this_threads_handle_leaves_it_on_its_stream(process, x, w):
    def load():
        pool = handlepool.default_pool()
        handle, slot = pool.get_handle(), pool.internals.slot()
        y = conv(x, w)
        assert handle.stream is slot.pointer == cupy.cuda.get_current_stream().ptr
        assert pool.get_handle() is handle
        counts = pool.stats()
        assert (counts["handles_building"], counts["handles_repaired"], counts["handles_created"]) == (0, 0, 1)
        return cupy.asnumpy(y)

    built, _ = process(lambda: cupy.asnumpy(conv(x, w)))
    loaded, counts = process(load)
    assert counts == {"loaded": 1}
    np.testing.assert_array_equal(loaded, built)


def test_a_loaded_plan_in_a_capture_of_the_callers_stream_is_launched_there(process, x, w):
    def captured():
        handlepool.get_handle()
        stream = cupy.cuda.get_current_stream()
        y = cupy.zeros((2, 32, 14, 14), "float16").transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
        stream.synchronize()
        stream.begin_capture()
        conv(x, w, out=y)
        graph = stream.end_capture()
        assert not y.any()
        graph.launch(stream)
        return cupy.asnumpy(y)

    built, _ = process(lambda: cupy.asnumpy(conv(x, w)))
    found, counts = process(captured)
    assert counts == {"loaded": 1}
    np.testing.assert_array_equal(found, built)


def test_a_loaded_plan_is_recorded_forked_and_tuned_as_any_other(process, x, w):
    process(lambda: conv(x, w))

    def use():
        plan = conv.plan_for(x, w)
        states = handlepool.ParallelStates(2)
        forked = states.map(conv, [x] * 4, [w] * 4)
        program = handlepool.record(conv, x, w)
        program.replay()
        right = cupy.asnumpy(conv(x, w))
        results = [cupy.asnumpy(each) for each in [*forked, program.outputs]]
        tuning = conv.tune(x, w)
        return plan.candidates, len(tuning.candidates), [np.array_equal(each, right) for each in results]

    (told, tried, equal), _ = process(use)
    assert told == tried
    assert all(equal)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_g9_a_loaded_plan_may_be_launched_for_the_first_time_under_a_capture(process, function, x, w):
    right, _ = process(lambda: function(x, w))

    def captured():
        out = cupy.full_like(right, np.nan)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            function(x, w, out=out)
            graph = stream.end_capture()
            assert cupy.isnan(out).all()  # the control: nothing has run
            graph.launch(stream)
            stream.synchronize()
        return out

    found, counts = process(captured)
    assert counts == {"loaded": 1}
    np.testing.assert_array_equal(cupy.asnumpy(found), cupy.asnumpy(right))


def test_a_description_of_this_device_is_what_its_plans_are_made_for():
    with HandlePool(driver="cuda") as pool:
        described = DeviceProperties(DeviceProperties.of(pool.driver.current_device()).text)
        assert planning.DescribedDevice(described).plan_environment() == pool.driver.plan_environment()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_plan_for_the_described_device_is_loaded_and_right(process, function, x, w):
    def elsewhere():
        return function.compile(x, w, device=DeviceProperties.of(0)).engine

    engine, counts = process(elsewhere)
    assert counts == {"missed": 1, "written": 1}
    (results, found), counts = process(lambda: (calls(function, x, w), function.plan_for(x, w).engine))
    assert counts == {"loaded": 1}
    assert found == engine
    kind = "relu" if function is conv_relu else None
    right = reference.conv2d(cupy.asnumpy(x), cupy.asnumpy(w), padding=1, activation=kind)
    np.testing.assert_allclose(results[0], right, rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(*results)


def test_damaged_and_swapped_files_are_built_again(process, tmp_path, x, w):
    right, _ = process(lambda: [calls(function, x, w)[0] for function in FUNCTIONS])
    files = PlanDirectory(tmp_path / "plans")
    one, other = list(files.files())
    files.save(one.key, other.plan)
    path = files.path / other.name
    path.write_bytes(path.read_bytes()[:-7])
    again, counts = process(lambda: [calls(function, x, w)[0] for function in FUNCTIONS])
    assert counts["rejected"] >= 1
    for result, expected in zip(again, right, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_without_a_directory_there_is_nowhere_to_plan_for(x, w):
    with pytest.raises(ArgumentError, match="HANDLEPOOL_PLAN_DIRECTORY"):
        conv.compile(x, w, device=DeviceProperties.of(0))


def test_the_lanes_that_a_tuning_found_are_taken_by_the_next_process(process, x, w):
    def network(x, w):
        return [handlepool.concat([conv(x, w), conv_relu(x, w)], axis=1) for _ in range(4)]

    def use():
        expected = [cupy.asnumpy(y) for y in network(x, w)]
        with handlepool.record(network, x, w, lanes=8) as program:
            found = program.tune((1, 2, 4), seconds=2)
            assert program.explain().got == found.winner.got
            for y in program.outputs:
                y.fill(np.nan)
            program.replay()
            for y, right in zip(program.outputs, expected, strict=True):
                np.testing.assert_array_equal(cupy.asnumpy(y), right)
        return found

    first, counts = process(use)
    assert not first.kept
    assert counts["written"] == 3
    second, counts = process(use)
    assert second.kept
    assert counts == {"loaded": 3}
    assert (second.winner, second.trials) == (first.winner, first.trials)
