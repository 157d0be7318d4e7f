"""Tuning on a GPU: the winner is among the quickest when timed again, results stay right, and nothing is left behind."""

import numpy as np
import pytest
from harness.process import as_default

import handlepool
from handlepool import ArraySpec, CaptureError, HandlePool, ParallelStates
from handlepool.graphs.tuning import GAIN
from handlepool.testing import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

ALL = 30  # seconds, of what is expected to happen


@handlepool.graph
def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])


@pytest.fixture
def default_pool(pool, make_default):
    make_default(pool)
    return pool


@pytest.fixture
def x(random_array):
    return random_array((1, 64, 14, 14), "float16", "nhwc", 1)


@pytest.fixture
def w(random_array):
    return random_array((64, 64, 3, 3), "float16", "nhwc", 2) / 24


def error(y, x, w):
    """Relative error against float64, of a convolution with padding 1."""
    padded = np.pad(cupy.asnumpy(x).astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    right = np.einsum("nchwrs,kcrs->nkhw", windows, cupy.asnumpy(w).astype(np.float64))
    return np.linalg.norm(cupy.asnumpy(y) - right) / np.linalg.norm(right)


@pytest.mark.parametrize("count", [None, 1, 4, 8])
def test_a_plan_is_chosen_and_is_right(default_pool, stream, x, w, count):
    states = None if count is None else ParallelStates(count, pool=default_pool)
    given = x.copy(), w.copy()
    tuning = conv.tune(x, w, states=states)
    print(tuning)
    timed = [each for each in tuning.candidates if not each.skipped]
    assert len(timed) >= 2
    assert all(0.2 < each.alone < 1e5 for each in timed)
    assert all((each.concurrent is None) == (count is None) for each in timed)
    assert tuning.winner.time < GAIN * min(each.time for each in timed)
    assert tuning.winner is tuning.previous or GAIN * tuning.winner.time <= tuning.previous.time
    assert 0 < tuning.building < tuning.seconds
    assert conv.plan_for(x, w).engine == tuning.winner.engine
    assert (x == given[0]).all()
    assert (w == given[1]).all()
    assert error(conv(x, w), x, w) < 1e-2
    for y in ParallelStates(4, pool=default_pool).map(conv, [x] * 4, [w] * 4):
        assert error(y, x, w) < 1e-2


def test_running_side_by_side_costs_something_and_less_than_one_after_the_other(default_pool, stream, x, w):
    winner = conv.tune(x, w, states=ParallelStates(4, pool=default_pool)).winner
    assert winner.alone * 0.8 < winner.concurrent < winner.alone * 4 * 0.9


def test_out_is_not_written(default_pool, stream, x, w):
    out = cupy.full_like(conv(x, w), cupy.nan)
    conv.tune(x, w, states=ParallelStates(2, pool=default_pool), out=out)
    assert cupy.isnan(out).all()
    assert error(conv(x, w, out=out), x, w) < 1e-2


def test_the_workspace_limit_holds(default_pool, stream, random_array):
    x = random_array((4, 256, 14, 14), "float32", "nchw", 1)
    w = random_array((256, 256, 3, 3), "float32", "nchw", 2)
    limited = conv.options(workspace_limit=1 << 20)
    tuning = limited.tune(x, w, states=ParallelStates(2, pool=default_pool))
    assert all(each.workspace_size <= 1 << 20 for each in tuning.candidates)
    assert any("excluded by a setting" in each.skipped for each in tuning.candidates)
    assert limited.plan_for(x, w).workspace_size <= 1 << 20


def test_the_scratch_limit_holds_and_scratch_goes_back(stream, random_array):
    x = random_array((4, 256, 14, 14), "float32", "nchw", 1)
    w = random_array((256, 256, 3, 3), "float32", "nchw", 2)
    with HandlePool(driver="cuda", scratch_limit=16 << 20) as pool, as_default(pool):
        tuning = conv.tune(x, w, states=ParallelStates(4, pool=pool))
        assert any("no room for" in each.skipped for each in tuning.candidates)
        assert tuning.winner.workspace_size <= 4 << 20
        stats = pool.stats()
        assert (stats["scratch_bytes"], stats["handles_leased"], stats["handles_captured"]) == (0, 0, 0)


@pytest.mark.alone
def test_tuning_twice_takes_no_more_memory(default_pool, stream, x, w):
    states = ParallelStates(4, pool=default_pool)

    def used():
        stream.synchronize()
        default_pool.trim()
        default_pool.driver.release_cached()
        free, total = default_pool.driver.memory_info()
        return total - free

    conv.tune(x, w, states=states)
    before = used()
    for _ in range(3):
        conv.tune(x, w, states=states)
    assert used() <= before + (16 << 20)


def test_every_plan_of_a_function_is_tuned_and_is_right(default_pool, stream, x, w):
    def network(x):
        return conv(handlepool.conv2d(x, w, padding=1), w)

    before = network(x).get().astype(np.float64)
    tunings = handlepool.tune(network, x)
    assert [each.name for each in tunings] == ["conv2d", "conv"]
    for tuning in tunings:
        print(tuning)
        tried = [each for each in tuning.candidates if not each.skipped.startswith("not tried")]
        assert 2 <= len(tried) <= 10
        assert tuning.winner.alone > 0.2
    assert sum(tuning.seconds for tuning in tunings) < 2
    assert handlepool.ops.conv2d_plan(x, w, padding=1).engine == tunings[0].winner.engine
    assert np.linalg.norm(network(x).get() - before) < 2e-2 * np.linalg.norm(before)


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_program_is_recorded_with_the_plans_that_won_and_is_right(default_pool, stream, x, w, lanes):
    def network(x):
        y = handlepool.conv2d(x, w, padding=1)
        return handlepool.add(conv(y, w), conv(conv(x, w), w))

    expected = network(x).get().astype(np.float64)
    plain = handlepool.record(network, x, lanes=lanes)
    with handlepool.record(network, x, lanes=lanes, plans=True) as program:
        for tuning in program.tunings:
            print(tuning)
        assert {each.name for each in program.tunings} == {"conv2d", "conv"}
        assert all(sum(not each.skipped for each in tuning.candidates) >= 2 for tuning in program.tunings)
        assert conv.plan_for(x, w).engine == next(each for each in program.tunings if each.name == "conv").winner.engine
        for each in (plain, program):
            each.replay()
            assert np.linalg.norm(each.outputs.get() - expected) < 2e-2 * np.linalg.norm(expected)
    plain.close()
    stats = default_pool.stats()
    assert (stats["handles_leased"], stats["handles_captured"]) == (0, 0)


@pytest.mark.alone
def test_a_program_with_measured_plans_is_not_slower(default_pool, stream, random_array):
    sizes = [(64, 56), (128, 28), (256, 14), (512, 7)]
    given = [
        (random_array((8, c, n, n), "float16", "nhwc", 1), random_array((c, c, 3, 3), "float16", "nhwc", 2) / 24)
        for c, n in sizes
    ]

    def network(given):
        return [conv(conv(x, w), w) for x, w in given]

    def microseconds(program):
        start, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
        for _ in range(15):
            program.replay()
            start.record()
            for _ in range(10):
                program.replay()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 100)
        return np.median(times)

    with handlepool.record(network, given) as plain, handlepool.record(network, given, plans=True) as chosen:
        for tuning in chosen.tunings:
            print(tuning)
        times = [microseconds(program) for program in (plain, chosen)]
        print(times)
        assert times[1] < 1.03 * times[0]


@pytest.mark.parametrize("kind", ["relu", "swish", "hardswish"])
def test_a_program_whose_plans_are_tuned_inside_is_right_and_not_slower(default_pool, stream, random_array, kind):
    x = random_array((1, 64, 28, 28), "float16", "nhwc", 1)
    filters = [random_array(shape, "float16", "nhwc", 2) / 16 for shape in ((128, 64, 1, 1), (64, 128, 3, 3))]
    biases = [random_array((count,), "float16", seed=count) for count in (128, 64)]

    def network(x):
        for _ in range(3):
            y = handlepool.conv2d(x, filters[0], bias=biases[0], activation=kind)
            x = handlepool.conv2d(y, filters[1], bias=biases[1], padding=1, add=x, activation="relu")
        return x

    program = handlepool.record(network, x, lanes=4)
    program.replay()
    before = cupy.asnumpy(program.outputs).astype(np.float64)
    tuning = program.tune((1, 2), goal="device", seconds=8, plans=True)
    print(tuning)
    assert tuning.plans
    for change in tuning.plans:
        assert not change.kept or change.after < change.before
    program.replay()
    after = cupy.asnumpy(program.outputs).astype(np.float64)
    assert np.linalg.norm(after - before) / np.linalg.norm(before) < 1e-2
    assert np.linalg.norm(cupy.asnumpy(network(x)).astype(np.float64) - before) / np.linalg.norm(before) < 1e-2
    free = default_pool.stats()["handles_leased"]
    assert free == 0
    program.close()


GEOMETRIES = [((1, 64, 14, 14), (96, 64, 3, 3), 1), ((2, 96, 28, 28), (24, 96, 1, 1), 0), ((1, 24, 56, 56), (72, 24, 1, 1), 0)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_g18_each_form_and_each_of_its_plans_is_right(default_pool, stream, random_array, geometry, dtype):
    (shape, filters, padding), tolerance = geometry, {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-3}[dtype]
    x, w = random_array(shape, dtype, "nhwc", 1), random_array(filters, dtype, "nhwc", 2)
    b, add = random_array(filters[:1], dtype, seed=3), random_array((shape[0], filters[0], *shape[2:]), dtype, "nhwc", 4)
    wide = [each.get().astype(np.float64) for each in (x, w, b, add)]
    values = reference.conv2d(*wide[:2], padding=padding, bias=wide[2], add=wide[3])
    sites, tried = default_pool.internals.plans.sites, 0
    for kind, right in ((None, values), ("relu", np.maximum(values, 0)), ("swish", values / (1 + np.exp(-values)))):
        sites.clear()
        handlepool.conv2d(x, w, bias=b, add=add, padding=padding, activation=kind)
        (site,) = sites.values()
        for form in site.forms():
            try:
                plan = site.prepare(form, (x, w, b, add), None).plan
            except handlepool.GraphNotSupportedError:
                continue
            site.choose(form)
            for index in range(min(plan.candidates, 8)):
                try:
                    plan.select(index)
                except handlepool.GraphNotSupportedError:
                    continue
                y = handlepool.conv2d(x, w, bias=b, add=add, padding=padding, activation=kind).get().astype(np.float64)
                assert np.linalg.norm(y - right) / np.linalg.norm(right) < tolerance, (kind, form, index)
                tried += 1
    assert tried > 12


def test_from_the_null_stream(default_pool, x, w):
    assert conv.tune(x, w, states=ParallelStates(2, pool=default_pool)).winner.concurrent > 0
    assert error(conv(x, w), x, w) < 1e-2


def test_in_a_capture_it_is_refused_and_the_capture_lives(default_pool, stream, kernels, x, w):
    array = kernels.full(1 << 12, 0)
    stream.begin_capture()
    kernels.write(array, 3)
    specs = ArraySpec(x.shape, x.dtype, "NHWC"), ArraySpec(w.shape, w.dtype, "NHWC")
    with pytest.raises(CaptureError, match="is being captured"):
        conv.tune(*specs, states=ParallelStates(2, pool=default_pool))
    graph = stream.end_capture()
    graph.launch(stream)
    assert (array.get() == 3).all()


def test_captures_of_other_threads_survive(default_pool, captured_elsewhere, x, w):
    with captured_elsewhere():
        conv.tune(x, w, states=ParallelStates(4, pool=default_pool))
    assert error(conv(x, w), x, w) < 1e-2
