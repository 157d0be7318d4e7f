"""Recordings with lanes on a GPU: random sequential programs give, bit for bit, what one stream gives (guarantee 17)."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from harness.graphs import convolution, double
from harness.process import as_default
from harness.region_gpu import CALLS, SIZES, Arrays
from harness.region_lanes import Flat
from harness.region_maker import make_case
from harness.region_runs import Sequential
from harness.region_worlds import books_of

import handlepool
from handlepool import CaptureError, OutOfMemoryError, operation

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS, PARTS = 3000, 5
LANES = 1, 2, 3, 8
REPLAYS = 1000
WIDE = 8


@pytest.fixture
def lanes(pool, stream):
    """Lanes on the test's pool, the default one, where the CUDA driver is new enough."""
    with as_default(pool), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a branch waits because")
        yield pool


class World:
    """Records cases with lanes, and runs them on one stream."""

    def __init__(self):
        self.arrays = [Arrays(sizes) for sizes in SIZES]

    def wrong(self, case, lanes):
        """What differs after a replay over what the arrays begin with; None where there was nothing to record."""
        place = case.seed % len(SIZES)
        make, sizes = self.arrays[place], SIZES[place]
        with books_of(case):
            flat = Flat(case, make, cupy.copy, sizes)
            try:
                program = handlepool.record(flat.once, lanes=lanes)
            except CaptureError as error:
                if "nothing to replay" in str(error):
                    return None
                raise
            with program:
                for number, array in flat.given.items():
                    array[...] = flat.initial(number)
                program.replay()
                found = {("array", base): array.copy() for base, array in flat.left().items()}
                found |= {("token", number): token.hidden.copy() for number, token in flat.tokens.items()}
        expected = Sequential(make, cupy.copy, numpy=False, sizes=sizes).run(case)
        names = [name for name in expected if name[0] != "look" and expected[name].size]
        flags = [(found[name].view(np.int32) != expected[name].view(np.int32)).any() for name in names]
        return [name for name, flag in zip(names, cupy.stack(flags).get(), strict=True) if flag]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))  # which processes share
def test_g17_random_programs_recorded_with_lanes_give_what_one_stream_gives_bit_for_bit(lanes, eager_work, part):
    world, nothing = World(), 0
    for seed in range(part, PROGRAMS, PARTS):
        case = make_case(seed, CALLS, few=True)
        wrong = world.wrong(case, LANES[seed % len(LANES)])
        nothing += wrong is None
        assert not wrong, f"seed {seed}: {wrong}\n{case}"
    assert nothing < PROGRAMS / PARTS / 20
    assert lanes.stats()["handles_leased"] == 0


def test_g17_control_lanes_without_needs_give_something_else(lanes, without):
    without("the needs of nodes")
    world = World()
    cases = [make_case(seed, CALLS, few=True) for seed in range(60)]
    assert sum(bool(world.wrong(case, 8)) for case in cases) >= 10


# What a lane is for


@operation(mutates=())
def sorted_sums(x):
    ordered = cupy.sort(x.reshape(-1))
    return ((cupy.cumsum(ordered) + ordered.max()) / np.float32(1024)).reshape(x.shape)


@operation(mutates=())
def products(x):
    return x * np.float32(0.5) + 1


def chains(count, depth=3, library=sorted_sums):
    """Graph functions and operations with scratch and reductions of CuPy's, in independent chains."""

    def run(images, filters):
        results = []
        for x, w in zip(images, filters, strict=True):
            for _ in range(depth):
                x = library(convolution(x, w))
            results.append(handlepool.add(x, double(x)))
        return results

    rng = np.random.default_rng(5)
    images = [cupy.asarray(rng.standard_normal((1, 32, 14, 14), np.float32)) for _ in range(count)]
    filters = [cupy.asarray(rng.standard_normal((32, 32, 3, 3), np.float32)) for _ in range(count)]
    return run, images, filters


def different_replays(run, images, filters, replays=REPLAYS):
    """How many of so many replays gave other bits than the function does on one stream."""
    expected = [y.view(np.int32).copy() for y in run(images, filters)]
    wrong = []
    with handlepool.record(run, images, filters, lanes=WIDE) as program:
        for _ in range(replays):
            for y in program.outputs:
                y.fill(np.nan)
            program.replay()
            flags = [(y.view(np.int32) != right).any() for y, right in zip(program.outputs, expected, strict=True)]
            wrong.append(cupy.stack(flags).any())
        assert program.explain().got == WIDE
    return int(cupy.stack(wrong).sum())


def test_parallel_convolutions_sorts_and_scans_are_the_same_at_every_replay(lanes, eager_work):
    assert different_replays(*chains(WIDE)) == 0


def test_control_without_needs_replays_differ(lanes, without):
    without("the needs of nodes")
    # Of products: a sort whose scratch somebody else writes to writes anywhere.
    assert different_replays(*chains(WIDE, library=products), replays=50) > 0


def test_work_that_nobody_declared_stands_after_all_before_it_and_before_all_after_it(lanes, kernels):
    x = cupy.zeros((1, 4, 64, 64), np.float32)

    def slow(x):
        kernels.spin(1)
        return x + 1

    slow = operation(mutates=())(slow)

    def run(x):
        x += 1  # the first call
        a, b = slow(x), slow(x)
        x *= 3  # between two
        c, d = double(x), slow(a)
        e = c + d + b  # the last
        return a, b, c, d, e

    with handlepool.record(run, x, lanes=4) as program:
        for _ in range(50):
            x.fill(1)
            program.replay()
            assert [float(y.max()) for y in program.outputs] == [3, 3, 12, 4, 19]
            assert [float(y.min()) for y in program.outputs] == [3, 3, 12, 4, 19]


def test_independent_chains_run_beside_each_other(lanes, kernels):
    @operation(mutates=())
    def slow(x):
        kernels.spin(2)
        return x + 1

    def run(xs):
        return [slow(slow(x)) for x in xs]

    xs = [cupy.zeros((1, 4, 8, 8), np.float32) for _ in range(WIDE)]
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with handlepool.record(run, xs, lanes=WIDE) as program:
        program.replay()
        start.record()
        program.replay()
        end.record()
        end.synchronize()
        assert cupy.cuda.get_elapsed_time(start, end) < 3 * 4  # milliseconds, of 32 one after the other
        assert all(float(y.sum()) == 2 * y.size for y in program.outputs)


def test_an_error_in_the_middle_leaves_no_capture_open(lanes, stream):
    def fails(x):
        y = double(x)
        double(y)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        handlepool.record(fails, cupy.zeros((1, 4, 8, 8), np.float32), lanes=4)
    assert not stream.is_capturing()
    assert lanes.stats()["handles_leased"] == 0
    assert float(double(cupy.ones((1, 4, 8, 8), np.float32)).sum()) == 512


def test_a_synchronising_call_is_refused_by_its_line(lanes):
    def reads(x):
        return double(x) if float(double(x).sum()) > 0 else x

    with pytest.raises(CaptureError, match="test_gpu_lanes"):
        handlepool.record(reads, cupy.ones((1, 4, 8, 8), np.float32), lanes=4)


def test_cupys_matmul_is_refused_by_the_name_of_ours(lanes):
    x = cupy.ones((16, 16), np.float32)
    with pytest.raises(CaptureError, match=r"handlepool\.matmul"):
        handlepool.record(lambda x: double(x @ x), x, lanes=4)


def test_as_many_nodes_as_one_likes_cost_the_same_each(lanes):
    x = cupy.zeros((1, 4, 8, 8), np.float32)

    def run(x):
        for _ in range(2000):
            y = double(x)
        return y

    with handlepool.record(run, x, lanes=8) as program:
        assert len(program.explain().steps) == 2000
        program.replay()


# Memory


def network(name, monkeypatch):
    """A network of the benchmarks, its parameters, and images."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from nets import NETWORKS, Parameters

    x = cupy.random.default_rng(3).standard_normal((8, 224, 224, 3), np.float32).astype(np.float16).transpose(0, 3, 1, 2)
    return NETWORKS[name], Parameters(cupy.asarray), x


def sizes_of(*call):
    """Bytes on so many lanes, with scratch and without."""
    *call, numbers = call
    found = []
    for number in numbers:
        with handlepool.record(*call, lanes=number) as program:
            found.append((program.nbytes, program.nbytes - program.explain().scratch))
    return found


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1"])
def test_a_network_takes_at_most_half_as_much_again_as_on_one_lane(lanes, monkeypatch, name):
    one, *others = sizes = sizes_of(*network(name, monkeypatch), (1, 2, 4, WIDE))
    for which in (0, 1):
        assert max(size[which] for size in others) <= 1.5 * one[which], sizes


def test_control_googlenet_with_all_memory_kept_takes_more_than_that(lanes, monkeypatch, without):
    function, p, x = network("googlenet", monkeypatch)
    ((_, one),) = sizes_of(function, p, x, (1,))
    without("the reuse of memory on a GPU")
    ((_, more),) = sizes_of(function, p, x, (WIDE,))
    assert more > 1.5 * one


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1"])
def test_a_network_gives_the_same_bits_at_every_replay(lanes, monkeypatch, eager_work, name):
    function, p, x = network(name, monkeypatch)
    expected = function(p, x).view(np.int16).copy()
    wrong = []
    with handlepool.record(function, p, x, lanes=WIDE) as program:
        for _ in range(200):
            program.outputs.fill(np.nan)
            program.replay()
            wrong.append((program.outputs.view(np.int16) != expected).any())
    assert not cupy.stack(wrong).any()


def test_chains_without_an_order_take_as_many_times_the_memory_as_there_are_lanes(lanes):
    run, images, filters = chains(WIDE)
    (_, one), (_, size) = sizes_of(run, images, filters, (1, WIDE))
    with handlepool.record(run, images, filters, lanes=WIDE) as program:
        assert size <= one * program.explain().recorded * 1.1


def slow_readers(kernels):
    """Values that another lane reads late, when nodes that do not follow it allocate as much."""

    @operation(mutates=())
    def late(x):
        kernels.spin(1)
        return x + 1

    @operation(mutates=())
    def quick(x):
        return x + 1

    def run(x):
        parts, results = [quick(x * number) for number in range(4)], []
        for _ in range(4):
            following = [quick(each) for each in parts]
            results += [late(each) for each in parts]
            parts.clear()
            parts = [quick(quick(each)) for each in following]
        return results + parts

    return run


def wrong_values(run, x, replays=30):
    expected = [y.copy() for y in run(x)]
    wrong = []
    with handlepool.record(run, x, lanes=32) as program:  # as the data allows
        for _ in range(replays):
            program.replay()
            wrong.append(cupy.stack([(y != right).any() for y, right in zip(program.outputs, expected, strict=True)]).any())
    return int(cupy.stack(wrong).sum())


def test_g8_memory_that_was_freed_goes_to_calls_that_come_after_its_readers(lanes, kernels):
    assert wrong_values(slow_readers(kernels), cupy.ones(1 << 16, np.float32)) == 0


def test_g8_control_memory_that_goes_to_whoever_asks_is_overwritten(lanes, kernels, without):
    without("the last users of memory")
    assert wrong_values(slow_readers(kernels), cupy.ones(1 << 16, np.float32)) > 0


@pytest.mark.alone
def test_outputs_outlive_their_program_and_all_memory_goes_back(lanes, kernels):
    x = cupy.ones(1 << 20, np.float32)
    run = slow_readers(kernels)
    program = handlepool.record(run, x, lanes=WIDE)
    free = cupy.cuda.runtime.memGetInfo()[0]
    program.replay()
    kept, size = program.outputs[0], program.nbytes
    program.close()
    others = [cupy.full_like(x, np.nan) for _ in range(32)]
    assert bool((kept == 2).all())
    del kept, program, others
    lanes.trim()
    cupy.get_default_memory_pool().free_all_blocks()
    assert cupy.cuda.runtime.memGetInfo()[0] >= free + size // 2


def test_too_little_memory_is_an_error_that_says_what_lanes_take(lanes):
    large = operation(mutates=())(lambda x: cupy.empty(1 << 50, np.uint8)[:4] if x.size > 8 else x + 1)
    first = []

    def run(x, y):
        calls = [large(x) for _ in range(3)]
        first.append(1)
        return [*calls, large(y if len(first) > 1 else x)]

    with pytest.raises(OutOfMemoryError, match="found no memory"):
        handlepool.record(run, cupy.ones(4, np.float32), cupy.ones(16, np.float32), lanes=4)
    assert lanes.stats()["handles_leased"] == 0


def test_allocations_of_the_graphs_own_are_counted_and_their_callers_named(lanes):
    runtime = cupy.cuda.runtime

    @operation(mutates=())
    def allocates(x):  # CuPy's MemoryAsyncPool asks for its size with each block, which no capture takes
        stream = cupy.cuda.get_current_stream().ptr
        pointer = runtime.mallocAsync(x.nbytes, stream)
        memory = cupy.cuda.UnownedMemory(pointer, x.nbytes, None, device_id=0)
        scratch = cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))
        cupy.add(x, 1, out=scratch)
        y = scratch * 2
        runtime.freeAsync(pointer, stream)
        return y

    def run(x):
        return double(allocates(double(x))), allocates(x)

    x = cupy.ones((1, 4, 8, 8), np.float32)
    for count in (None, 1, 4):
        with handlepool.record(run, x, lanes=count) as program:
            how = program.explain()
            assert len(how.allocations) == 2
            if count is not None:
                assert {how.steps[each].name.rpartition(".")[2] for each in how.allocations} == {"allocates"}
                assert "test_gpu_lanes.py" in str(how)
            for _ in range(5):
                program.replay()
                assert [float(y.min()) for y in program.outputs] == [float(y.max()) for y in program.outputs] == [12, 4]
