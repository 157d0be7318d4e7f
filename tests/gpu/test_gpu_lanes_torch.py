"""Torch's operations recorded with lanes, bit for bit what one stream gives (guarantees 8 and 17). Collected only with torch."""

import gc
import random
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.insides import torch_sleep
from harness.process import as_default

import handlepool
from handlepool import CaptureError, ContractError, OutOfMemoryError, ParallelStates, operation
from handlepool.recording.lane import Lane, LeasedLanes

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = 300
REPLAYS = 1000
WIDE = 8
SIDE = 96


@pytest.fixture
def default(pool, stream, torch, make_default):
    """The test's pool as the default one; one stream for both libraries."""
    make_default(pool)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield pool
        stream.synchronize()
    gc.collect()


@pytest.fixture
def eager_tensors(torch):
    """Another thread allocates tensors, computes and frees meanwhile, and sees that its own values are right."""
    stop, wrong, rounds = threading.Event(), [], []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                flags = []
                for size in (640, 1 << 14, 1 << 16, 1 << 20):
                    x = torch.full((size,), 7.0, device="cuda")
                    for _ in range(4):
                        x = x * 2 - 7
                    flags.append((x != 7).any())
                wrong.append(bool(torch.stack(flags).any()))
                rounds.append(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield rounds
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    assert rounds
    assert not any(wrong)


def operations():
    """What programs are made of: each allocates, and most keep scratch by stream."""
    import torch

    @operation
    def product(x, y):  # a long inner dimension, which is split, and summed in a workspace of the stream's
        long = torch.cat([x] * 96, 1) @ torch.cat([y] * 96, 0)
        return long / long.abs().max().clamp(min=1)

    @operation
    def ordered(x):
        return torch.sort(x.reshape(-1)).values.reshape(x.shape)

    @operation
    def soft(x):
        return torch.softmax(x, -1) * SIDE

    @operation
    def summed(x):
        return torch.cumsum(x, 0) / SIDE

    @operation
    def mixed(x, y):
        return torch.where(x > y, x - y, x + y).clamp(-4, 4)

    @operation
    def halves(x):
        return x[: SIDE // 2].repeat(2, 1), x[SIDE // 2 :].repeat(2, 1)

    @operation(mutates="x")
    def scaled(x, by):
        x.mul_(by)

    @operation(mutates=())
    def gradient(x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)[0]

    return SimpleNamespace(**{name: each for name, each in locals().items() if name != "torch"})


def calm(ops):
    """The same without what takes addresses from its scratch: where that is overwritten, a sort writes anywhere."""
    return SimpleNamespace(**vars(ops) | {"ordered": ops.soft, "summed": ops.soft})


def late(torch, ops):
    """The same as `calm` makes, with readers that are late: others have gone on and allocate as much meanwhile."""

    @operation
    def soft(x):
        torch_sleep(200_000)
        return ops.soft(x)

    @operation
    def mixed(x, y):
        torch_sleep(200_000)
        return ops.mixed(x, y)

    return SimpleNamespace(**vars(calm(ops)) | {"soft": soft, "mixed": mixed})


def random_program(seed, ops):
    """A sequential function of matrices, which frees most of what it makes while others may still read it."""

    def function(*given):
        rng = random.Random(seed)
        arrays = [*given]
        for _ in range(rng.randrange(10, 50)):
            x, y = rng.choice(arrays), rng.choice(arrays)
            kind = rng.choice(["product", "ordered", "soft", "summed", "mixed", "mixed", "halves", "gradient", "scaled", "plain"])
            if kind == "plain":
                arrays.append(x.cos() * 2)
            elif kind == "scaled":
                own = [each for each in arrays if not any(each is one for one in given)]
                if own:
                    ops.scaled(rng.choice(own), rng.choice([0.5, -1.0, 2.0]))
            elif kind == "halves":
                arrays += ops.halves(x)
            else:
                call = getattr(ops, kind)
                arrays.append(call(x, y) if kind in ("product", "mixed") else call(x))
            while len(arrays) > 6:
                del arrays[rng.randrange(len(given), len(arrays))]
        return arrays[len(given) :] or [arrays[0] * 1]

    return function


def given(torch):
    rng = np.random.default_rng(3)
    return [torch.from_numpy(rng.standard_normal((SIDE, SIDE)).astype(np.float32)).cuda() for _ in range(3)]


def different(torch, function, arrays, lanes=WIDE, replays=20):
    """How many of so many replays gave other bits than the function does on one stream."""
    expected = [y.clone() for y in function(*arrays)]
    wrong = []
    with handlepool.record(function, *arrays, lanes=lanes) as program:
        for _ in range(replays):
            for y in program.outputs:
                y.fill_(float("nan"))
            program.replay()
            flags = [
                (y.view(torch.int32) != right.view(torch.int32)).any() for y, right in zip(program.outputs, expected, strict=True)
            ]
            wrong.append(torch.stack(flags).any())
        return int(torch.stack(wrong).sum())


@pytest.mark.timeout(600)
def test_g17_random_programs_of_torch_give_what_one_stream_gives_bit_for_bit(default, torch, eager_tensors):
    ops, arrays = operations(), given(torch)
    for seed in range(PROGRAMS):
        lanes = (1, 2, 3, 8)[seed % 4]
        assert different(torch, random_program(seed, ops), arrays, lanes, replays=5) == 0, f"seed {seed}, {lanes} lanes"
    assert default.stats()["handles_leased"] == 0


def test_g17_control_random_programs_of_torch_without_needs_give_something_else(default, torch, without):
    without("the needs of nodes")
    ops, arrays = calm(operations()), given(torch)
    assert sum(different(torch, random_program(seed, ops), arrays, 8, replays=5) > 0 for seed in range(40)) >= 5


def wrong_with_late_readers(torch, programs=60):
    ops, arrays = late(torch, operations()), given(torch)
    return sum(different(torch, random_program(seed, ops), arrays, 32, replays=3) > 0 for seed in range(programs))


@pytest.mark.alone  # sixty programs on 32 lanes, after each of which torch keeps cuBLAS's scratch for each lane: 40 GiB
def test_g8_random_programs_of_torch_with_late_readers_give_what_one_stream_gives_bit_for_bit(default, torch):
    assert wrong_with_late_readers(torch) == 0


@pytest.mark.alone
def test_g8_control_random_programs_of_torch_without_what_is_held_give_something_else(default, torch, without):
    without("held tensors")
    assert wrong_with_late_readers(torch) >= 1


# What a lane is for


def beside(ops):
    """Independent chains of products, sorts, sums and softmaxes, each of which allocates."""

    def function(*arrays):
        results = []
        for number in range(WIDE):
            x = arrays[number % len(arrays)]
            for _ in range(3):
                x = ops.mixed(ops.soft(ops.product(x, arrays[0])), ops.summed(ops.ordered(x)))
            results.append(x)
        return results

    return function


def test_parallel_products_sorts_and_softmaxes_are_the_same_at_every_replay(default, torch, eager_tensors, eager_work):
    assert different(torch, beside(operations()), given(torch), replays=REPLAYS) == 0


def test_control_all_lanes_on_one_stream_give_something_else(default, torch, monkeypatch):
    original = LeasedLanes._lease

    def lease(leased, ends):
        if not leased.all:
            return original(leased, ends)
        if len(leased.all) >= leased._limit:
            return None
        lane = Lane(leased.all[0].slot, len(leased.all), ends, shown=False)
        leased.all.append(lane)
        leased.of[lane.track] = lane
        leased.wanted = leased.got = len(leased.all)
        return lane

    monkeypatch.setattr(LeasedLanes, "_lease", lease)
    assert different(torch, beside(calm(operations())), given(torch), replays=100) > 0


def crossing(torch):
    """Values that another lane reads late, when their own lane has gone on and allocates as much."""

    @operation(mutates=())
    def late(x):
        torch_sleep(1_000_000)
        return x + 1

    @operation(mutates=())
    def quick(x):
        return x + 1

    def function(x):
        chains, results = [quick(x * number) for number in range(4)], []
        for _ in range(4):
            following = [quick(each) for each in chains]  # on the lane of what it reads
            results += [late(each) for each in chains]  # on another
            chains.clear()
            chains = [quick(quick(each)) for each in following]
        return results + chains

    return function


def test_g8_a_block_that_another_lane_reads_is_given_out_after_that(default, torch):
    x = torch.ones(1 << 16, device="cuda")
    assert different(torch, crossing(torch), [x], 32, replays=50) == 0


def test_g8_control_a_block_that_is_given_out_at_once_is_overwritten(default, torch, without):
    without("held tensors")
    x = torch.ones(1 << 16, device="cuda")
    assert different(torch, crossing(torch), [x], 32, replays=50) > 0


# Programs beside each other


def products(torch, count=6):
    @operation
    def product(x, y):
        return x @ y

    def function(xs, ys):
        return [product(x, y) for x, y in zip(xs, ys, strict=True)]

    generator = torch.Generator("cuda").manual_seed(1)
    xs = [torch.randn(32, 1 << 14, device="cuda", generator=generator) for _ in range(count)]
    ys = [torch.randn(1 << 14, 32, device="cuda", generator=generator) for _ in range(count)]
    return function, xs, ys


def wrong_beside_each_other(torch, rounds=200):
    """How many rounds of two programs, which were recorded one after the other, gave other bits when they ran at once."""
    function, xs, ys = products(torch)
    expected = [y.clone() for y in function(xs, ys)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    programs = [handlepool.record(function, xs, ys, lanes=4) for _ in streams]
    torch.cuda.synchronize()
    wrong = 0
    for _ in range(rounds):
        for program, stream in zip(programs, streams, strict=True):
            program.replay(stream)
        torch.cuda.synchronize()
        wrong += any(not torch.equal(y, right) for each in programs for y, right in zip(each.outputs, expected, strict=True))
    for program in programs:
        program.close()
    return wrong


def test_programs_that_run_at_once_share_no_workspace_of_torchs(default, torch):
    assert wrong_beside_each_other(torch) == 0


def test_control_programs_that_were_recorded_on_the_same_streams_differ(default, torch, monkeypatch, without):
    without("new streams of side slots")
    without("torch's forgotten workspaces")
    assert wrong_beside_each_other(torch) > 0


# Memory


def test_g9_memory_of_a_recording_is_its_own(default, torch):
    """What was freed while recording is given to nobody else, and goes back when the program is closed."""
    ops, (x, *_) = operations(), given(torch)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def function(x):
        y = ops.mixed(ops.summed(ops.soft(x)), x)
        return [ops.mixed(y, ops.ordered(y)), y.cos()]

    program = handlepool.record(function, x, lanes=4)
    assert program.nbytes > 0
    expected = [y.clone() for y in function(x)]
    program.replay()
    others = [torch.full_like(x, float("nan")) for _ in range(200)]
    program.replay()
    assert all(torch.equal(y, right) for y, right in zip(program.outputs, expected, strict=True))
    assert not any(bool((each == each).any()) for each in others)
    kept = program.outputs[0]
    program.close()
    assert torch.equal(kept, expected[0])
    del kept, program, others, expected
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def left_by_programs(torch):
    """Bytes of tensors that a few programs of products leave behind, beside what calling the function does."""
    function, arrays = beside(operations()), given(torch)
    function(*arrays)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with handlepool.record(function, *arrays, lanes=WIDE) as program:
            program.replay()
            torch.cuda.synchronize()
        del program
        gc.collect()
    return torch.cuda.memory_allocated() - before


def test_closed_programs_leave_no_workspace(default, torch):
    assert left_by_programs(torch) <= 0


def test_control_workspaces_that_torch_keeps_are_left(default, torch, without):
    without("torch's forgotten workspaces")
    assert left_by_programs(torch) > 1 << 20


def test_tensors_that_outlive_their_program_and_its_pool_end_quietly(torch, stream):
    """Torch is told of no stream of the pool's, and asks for none when the tensors are freed."""
    with handlepool.HandlePool(driver="cuda") as pool, as_default(pool):
        ops, arrays = operations(), given(torch)
        torch.cuda.synchronize()
        program = handlepool.record(beside(ops), *arrays, lanes=WIDE)
        with ParallelStates(2, pool=pool).fork() as fork:
            branch = fork.run(torch.add, arrays[0], 1)
        program.replay()
        stream.synchronize()
        outputs = program.outputs
        program.close()
    del outputs, program
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.equal(branch, arrays[0] + 1)


def test_memory_with_torchs_operations_is_at_most_five_times_that_of_one_lane(default, torch, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from nets import NETWORKS, Parameters
    from nets.kinds import Torch

    plain = Torch(torch)
    ops = SimpleNamespace(
        **{
            name: operation(getattr(plain, name))
            for name in ("conv2d", "add", "avg_pool2d", "max_pool2d", "mean2d", "concat", "linear")
        }
    )
    for name in ("googlenet", "squeezenet1_1"):
        p = Parameters(lambda values: torch.from_numpy(np.ascontiguousarray(values)).cuda())
        x = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.float16)
        sizes = []
        for lanes in (1, 2, 4, WIDE):
            with torch.no_grad(), handlepool.record(partial(NETWORKS[name], p), x, ops, lanes=lanes) as program:
                sizes.append(program.nbytes)
                assert not program.explain().serial
        assert max(sizes) <= 5 * sizes[0], (name, sizes)


def test_too_little_memory_of_torchs_is_an_error_by_our_name(default, torch):
    @operation
    def large(x):
        return torch.empty(1 << 32, device="cuda", dtype=torch.uint8).fill_(0)[:4]

    x = torch.ones(4, device="cuda")

    def function(x):
        return [large(x)] if torch.cuda.is_current_stream_capturing() else [x * 1]

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    try:
        with pytest.raises(OutOfMemoryError, match="found no memory"):
            handlepool.record(function, x, lanes=4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert default.stats()["handles_leased"] == 0
    assert different(torch, lambda x: [x + 1], [x]) == 0


# What is not seen, and what is refused


def test_tensors_in_globals_and_plain_work_of_torch_are_right(default, torch, monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", torch.arange(1024.0, device="cuda"))
    ops = operations()

    def function():
        doubled = HIDDEN * 2  # noqa: F821 - set above
        first, second = ops.soft(doubled), ops.summed(doubled)
        HIDDEN.add_(0)  # noqa: F821
        return [ops.mixed(first, second), doubled.cos()]

    assert different(torch, function, []) == 0


def test_branches_that_allocate_in_a_recorded_fork(default, torch):
    states = ParallelStates(4)
    ops = operations()

    def function(x):
        made = ops.soft(x)
        for _ in range(3):
            with states.fork() as fork:
                made, other = fork.run(torch.cumsum, made, 0), fork.run(torch.softmax, made, -1)
            made = ops.mixed(made / SIDE, other * SIDE)
        return [made]

    assert different(torch, function, given(torch)[:1]) == 0


def test_a_recording_inside_another_pool_of_torchs_has_its_own_memory_or_is_refused(default, torch):
    """Some versions of torch take the pool that was entered first, others the last one."""
    x = torch.ones(1 << 16, device="cuda")
    theirs, ops = torch.cuda.MemPool(), operations()
    program, refused = None, ""
    with torch.cuda.use_mem_pool(theirs):
        try:
            program = handlepool.record(lambda x: ops.soft(ops.soft(x)), x, lanes=4)
        except CaptureError as error:
            refused = str(error)
        others = [torch.full_like(x, float("nan")) for _ in range(20)]
    assert (program is None) == ("outside of torch" in refused)
    if program is not None:
        with program:
            assert program.nbytes >= 2 * 4 * x.numel()
            program.replay()
            assert torch.equal(program.outputs, ops.soft(ops.soft(x)))
    assert all(bool(each.isnan().all()) for each in others)
    assert different(torch, lambda x: [x * 2], [x]) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_that_is_read_on_the_host_is_refused_with_its_line(default, torch, inside):
    ops = operations()
    check = operation(mutates=())(lambda y: y * 2 if float(y.sum()) > 0 else y) if inside else None

    def function(x):
        y = ops.mixed(x, x)
        if check is not None:
            return check(y)
        return ops.mixed(y, x) if float(y.sum()) > -1e9 else x

    x = torch.ones(8, device="cuda")
    with pytest.raises(CaptureError, match="test_gpu_lanes_torch"):
        handlepool.record(function, x, lanes=4)
    assert default.stats()["handles_leased"] == 0
    assert different(torch, lambda x: [x * 2], [x]) == 0


def test_an_undeclared_write_to_a_tensor_is_an_error_and_leaves_nothing_open(default, torch):
    sly = operation(mutates=())(lambda x: x.add_(1) * 2)
    with pytest.raises(ContractError, match="without declaring it"):
        handlepool.record(lambda x: [sly(x)], torch.ones(8, device="cuda"), lanes=4)
    assert default.stats()["handles_leased"] == 0


def test_work_of_torch_on_a_stream_that_is_not_recorded_is_an_error(default, torch):
    other = torch.cuda.Stream()

    @operation
    def elsewhere(x):
        with torch.cuda.stream(other):
            return x * 2

    def function(x):
        return [elsewhere(x), x * 3]

    with pytest.raises(CaptureError):
        handlepool.record(function, torch.ones(8, device="cuda"), lanes=4)
    assert default.stats()["handles_leased"] == 0
    assert different(torch, lambda x: [x * 2], [torch.ones(8, device="cuda")]) == 0


def test_threads_record_programs_of_torch_at_once(default, torch, in_threads):
    ops = operations()
    torch.cuda.synchronize()

    def body(number):
        with torch.cuda.stream(torch.cuda.Stream()) as _, cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            arrays = given(torch)
            return [different(torch, random_program(seed, ops), arrays, 3, replays=3) for seed in range(number, number + 5)]

    assert not any(map(sum, in_threads(4, body)))
