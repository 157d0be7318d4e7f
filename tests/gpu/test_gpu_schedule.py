"""Schedules on a GPU: fewer lanes than were recorded give the same bits, and as many steps run at once as there are lanes."""

import random
import time
import warnings

import numpy as np
import pytest
from harness.insides import recording_of
from harness.process import as_default
from harness.region_gpu import CALLS
from harness.region_lanes import random_times
from harness.region_maker import make_case

import handlepool
from handlepool import operation
from handlepool.recording import timing

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

from test_gpu_lanes import World, chains  # noqa: E402

from handlepool.drivers.cuda.rewiring import MOST_ENDS, Rewiring  # noqa: E402

PROGRAMS = 600
WIDE = 12


@pytest.fixture
def lanes(pool, stream):
    with as_default(pool), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a branch waits because")
        yield pool


@pytest.mark.timeout(600)
def test_g17_random_programs_scheduled_by_random_times_give_what_one_stream_gives(lanes, eager_work):
    world = World()
    for seed in range(PROGRAMS):
        with random_times(random.Random(seed)):
            wrong = world.wrong(make_case(seed, CALLS, few=True), 2 + seed % 3)
        assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_any_number_of_lanes_gives_the_same_bits(lanes, eager_work, count):
    run, images, filters = chains(WIDE)
    expected = [y.copy() for y in run(images, filters)]
    with handlepool.record(run, images, filters, lanes=count) as program:
        assert program.explain().got == min(count, WIDE)
        wrong = []
        for _ in range(200):
            for y in program.outputs:
                y.fill(np.nan)
            program.replay()
            wrong += [(y != right).any() for y, right in zip(program.outputs, expected, strict=True)]
    assert not cupy.stack(wrong).any()


@pytest.fixture
def spins(kernels):
    @operation(mutates=())
    def slow(x):
        kernels.spin(2)
        return x + 1

    def run(xs):
        return [slow(slow(x)) for x in xs]

    return run, [cupy.zeros((1, 4, 8, 8), np.float32) for _ in range(8)]


def milliseconds(program):
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    program.replay()
    start.record()
    program.replay()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)


@pytest.mark.alone
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_as_many_steps_run_at_once_as_there_are_lanes(lanes, spins, count):
    run, xs = spins
    with handlepool.record(run, xs, lanes=count) as program:
        alone = 8 * 2 * 2 / count
        assert alone * 0.95 < milliseconds(program) < alone * 1.3 + 1
        assert all(float(y.sum()) == 2 * y.size for y in program.outputs)


# Tuning


@pytest.mark.alone
@pytest.mark.parametrize("goal", ["clock", "device"])
def test_tuning_finds_the_lanes_that_are_best_and_restores_what_is_written_in_place(lanes, spins, goal):
    run, xs = spins

    @operation(mutates="y")
    def doubled(y):
        y *= 2

    def function(y, xs):
        doubled(y)
        return [y, *run(xs)]

    y = cupy.ones(64, np.float32)
    with handlepool.record(function, y, xs, lanes=2) as program:
        found = program.tune((1, 2, 4, 8, 16), goal=goal, seconds=5)
        print(found)
        one, two, four, *wide = (getattr(trial, goal) for trial in found.trials)
        assert found.winner.lanes >= 8  # there are 8 chains: a lane more, of what stands beside them, gains little or nothing
        assert 8 <= program.explain().got <= 9
        assert getattr(found.winner, goal) <= 1.01 * min(wide) < four < two < one
        assert 3 < one / getattr(found.winner, goal) < 9
        assert all(1500 < time < 3000 for time in sorted(recording_of(program).times)[-16:])
        assert float(y[0]) == 2
        program.replay()
        assert float(y[0]) == 4
        assert all(float(each.sum()) == 2 * each.size for each in program.outputs[1:])


def test_any_schedule_of_a_recording_gives_the_same_bits(lanes, eager_work):
    run, images, filters = chains(WIDE)
    expected = [y.copy() for y in run(images, filters)]
    with handlepool.record(run, images, filters, lanes=8) as program:
        wrong = []
        for count in (1, 2, 3, 5, 8, 16):
            program.tune((count,), seconds=0.5)
            for _ in range(50):
                for y in program.outputs:
                    y.fill(np.nan)
                program.replay()
                wrong += [(y != right).any() for y, right in zip(program.outputs, expected, strict=True)]
    assert not cupy.stack(wrong).any()


def test_tuning_restores_tensors(lanes):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    @operation(mutates="y")
    def doubled(y):
        y.mul_(2)

    def function(y, x):
        doubled(y)
        return [x + value for value in range(3)]

    y, x = torch.ones(64, device="cuda"), cupy.ones(64, np.float32)
    torch.cuda.synchronize()
    with handlepool.record(function, y, x, lanes=4) as program:
        program.tune((1, 2), seconds=0.5)
        cupy.cuda.get_current_stream().synchronize()
        assert float(y[0]) == 2


@pytest.mark.alone
@pytest.mark.parametrize("count", [1, 4])
def test_nodes_are_measured_and_drawn_as_they_ran(lanes, spins, tmp_path, count):
    run, xs = spins
    with handlepool.record(run, xs, lanes=max(count, 2)) as program:
        program.tune((count,), seconds=0.5)
        how = program.explain(measure=True)
        assert 2 * 2000 < how.critical < 2 * 3000
        assert 16 * 1900 < how.total < 16 * 3000
        ends = timing._measured(program)
        assert 16 / count * 2000 * 0.95 < max(ends) < 16 / count * 3000
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        for dark in (False, True):
            program.draw(tmp_path / f"{dark}.png", dark=dark)
            assert (tmp_path / f"{dark}.png").stat().st_size > 10_000


# Roots and leaves


@pytest.mark.parametrize("count", [2, MOST_ENDS, MOST_ENDS + 1, 16])
def test_a_graph_has_few_roots_and_leaves(lanes, edges, count):
    run, images, filters = chains(16, depth=1)
    with handlepool.record(run, images, filters, lanes=count) as program:
        nodes, pairs = edges(recording_of(program).graph.pointer)
        roots = {*nodes} - {later for _, later in pairs}
        leaves = {*nodes} - {earlier for earlier, _ in pairs}
        assert max(len(roots), len(leaves)) <= MOST_ENDS
        if count > MOST_ENDS:
            assert len(nodes) == program.nodes + 2
        program.replay()


@pytest.mark.alone
def test_a_launch_on_many_lanes_costs_the_host_little_more_than_on_one(lanes):
    def launches(program):
        pointer = cupy.cuda.get_current_stream().ptr
        launch, taken = recording_of(program).graph.launch, []
        for _ in range(300):
            begin = time.perf_counter_ns()
            launch(pointer)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            cupy.cuda.get_current_stream().synchronize()
        return np.median(taken)

    run, images, filters = chains(16, depth=1)
    times = {}
    for count in (1, 16):
        with handlepool.record(run, images, filters, lanes=count) as program:
            times[count] = min(launches(program) for _ in range(5))
    print(times)
    assert times[16] < 1.5 * times[1]


@pytest.mark.alone
def test_the_times_of_nodes_add_up_to_what_a_replay_on_one_lane_takes(lanes):
    run, images, filters = chains(8)
    with handlepool.record(run, images, filters, lanes=8) as program:
        one, _ = program.tune(lanes=(1, 8), goal="device", seconds=2).trials
        how = program.explain()
        print(
            f"{how.total:.1f} microseconds one after the other, {how.critical:.1f} on the longest way; one lane: {one.device:.1f}"
        )
        assert 0.5 * one.device < how.total < 1.5 * one.device
        assert how.critical < 0.5 * how.total


def test_no_edge_is_programmatic(lanes):
    from cuda.bindings import driver

    rewiring = Rewiring(driver)
    run, images, filters = chains(8)
    with handlepool.record(run, images, filters, lanes=3) as program:
        recording = recording_of(program)
        for graph in (recording.captured, recording.graph):
            assert not rewiring.begins_early(graph.pointer)
            assert graph.edges() == rewiring.edges(graph.pointer)


# What cannot be copied


def test_a_graph_that_allocates_memory_runs_as_it_was_recorded(lanes):
    stream_of = cupy.cuda.get_current_stream

    @operation(mutates=())
    def allocating(x):
        pointer = stream_of().ptr
        memory = cupy.cuda.runtime.mallocAsync(1 << 20, pointer)
        y = x + 1
        cupy.cuda.runtime.freeAsync(memory, pointer)
        return y

    xs = [cupy.full(64, value, np.float32) for value in range(6)]
    with handlepool.record(lambda xs: [allocating(x) for x in xs], xs, lanes=2) as program:
        for _ in range(10):
            program.replay()
        assert [float(y[0]) for y in program.outputs] == [value + 1 for value in range(6)]
        assert program.explain().got == 6


@pytest.mark.alone
def test_programs_are_made_and_closed_without_a_leak(lanes):
    run, images, filters = chains(6)
    handlepool.record(run, images, filters, lanes=2).close()
    before = cupy.cuda.Device().mem_info[0]
    for _ in range(50):
        handlepool.record(run, images, filters, lanes=2).close()
    assert before - cupy.cuda.Device().mem_info[0] < 32 << 20
