"""Recorded programs on a GPU: right results beside everything else, one launch, branches in parallel, and refusals."""

import gc
import sys
import threading

import numpy as np
import pytest
from harness.hidden import hidden
from harness.insides import recording_of, replace_launch, streams_of_programs

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    CaptureError,
    DeviceMismatchError,
    HandlePool,
    OwnershipError,
    ParallelStateExecutor,
    ParallelStates,
    PoolClosedError,
)
from handlepool.pool.deferred import deferred

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 12
ALL = 30  # seconds, of what is expected to happen


def conv(x, w):
    return handlepool.conv2d(x, w, padding=1, deterministic=True, activation="relu")


def tower(x, w):
    """Convolutions and CuPy work with temporaries between them."""
    y = conv(x, w)
    z = conv(y * 0.5 + 1, w)
    return (z - y).sum(axis=1) + cupy.sqrt(abs(y)).max(axis=1)


@pytest.fixture
def images(random_array):
    return [random_array((1, 64, 14, 14), "float16", "nhwc", seed) for seed in range(8)]


@pytest.fixture
def weights(random_array):
    return random_array((64, 64, 3, 3), "float16", "nhwc", 99) / 24


def same(got, expected):
    return all((a == b).all() for a, b in zip(got, expected, strict=True))


def poison(arrays):
    for array in arrays:
        array.fill(cupy.nan)


def test_replays_equal_eager_results_bit_for_bit_also_after_an_update(pool, stream, images, weights):
    states = ParallelStates(4, pool=pool)
    expected = states.map(conv, images, [weights] * 8)
    with handlepool.record(states.map, conv, images, [weights] * 8, pool=pool) as program:
        poison(program.outputs)
        program.replay()
        assert same(program.outputs, expected)
        program.update([image.copy(order="K") for image in reversed(images)], None)
        poison(program.outputs)
        program.replay()
        assert same(program.outputs, expected[::-1])
        pool.trim()
        pool.cache_clear()
        poison(program.outputs)
        program.replay()
        assert same(program.outputs, expected[::-1])


def test_an_update_goes_by_keys_and_reads_every_value_before_it_is_overwritten(pool, stream, kernels):
    a, b, line = kernels.full(N, 1), kernels.full(N, 2), cupy.arange(N, dtype=np.float32)

    def body(given, line):
        return [given["a"] + 0, given["b"] + 0, line + 0]

    with handlepool.record(body, {"a": a, "b": b}, line[4:], pool=pool) as program:
        program.update({"b": kernels.full(N, 20), "a": kernels.full(N, 10)}, None)
        program.replay()
        assert [set(y.get()) for y in program.outputs[:2]] == [{10}, {20}]
        for turn in range(1, 11):
            program.update({"a": b, "b": a}, line[:-4] if turn == 1 else None)
            kernels.full(N, 99)  # where a swapped value was put aside
            program.replay()
            expected = [{20}, {10}] if turn % 2 else [{10}, {20}]
            assert [set(y.get()) for y in program.outputs[:2]] == expected
            assert (program.outputs[2].get() == np.arange(N - 4)).all()
        with pytest.raises(ArgumentError, match="argument 1 overlaps an array that"):  # the values of which turn are meant?
            program.update({"a": b, "b": a}, line[:-4])
        with pytest.raises(ArgumentError, match=r"argument 0 was recorded without the key 'c'"):
            program.update({"a": a, "c": b}, None)
        with pytest.raises(ArgumentError, match=r"argument 0\['b'\] was recorded as an array, and is now a list"):
            program.update({"a": a, "b": [b]}, None)


def test_a_recording_from_the_null_stream_replays_there_and_elsewhere(pool, images, weights):
    with cupy.cuda.Stream.null:
        expected = conv(images[0], weights).get()
        with handlepool.record(conv, images[0], weights, pool=pool) as program:
            program.replay()
            assert (program.outputs.get() == expected).all()
            program.outputs.fill(0)
            with cupy.cuda.Stream(non_blocking=True):
                program.replay()
                assert (program.outputs.get() == expected).all()
        assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null


BYTE = 0xEE


def fill(counts):
    """Overwrite blocks, as any eager work may: so many of each size in bytes."""
    return [cupy.full(size, BYTE, np.uint8) for size, count in counts.items() for _ in range(count)]


def overwritten(blocks):
    """How many blocks no longer hold what `fill` wrote."""
    return sum(int((block != BYTE).any()) for block in blocks)


def churn(images, weights, shift):
    """Eager work that allocates and frees blocks of every size that the recording used, and overwrites them; its results."""
    results = [tower(image + shift, weights) for image in images]
    return results, fill(dict.fromkeys((512, 6272, 12544, 25088, 50176, 100352, 1 << 20), 4))


def different(arrays, truths):
    return sum(int((array.get() != truth).any()) for array, truth in zip(arrays, truths, strict=True))


def test_a_thousand_replays_and_allocation_heavy_eager_work_beside_them_stay_right(pool, stream, images, weights):
    states = ParallelStates(4, pool=pool)
    expected = [array.get() for array in states.map(tower, images, [weights] * 8)]
    of_churn = {shift: [array.get() for array in churn(images, weights, shift)[0]] for shift in (1, 2)}
    truths = [cupy.asarray(truth) for truth in expected]
    program = handlepool.record(states.map, tower, images, [weights] * 8, pool=pool)
    begun, stop, rounds, failures = threading.Event(), threading.Event(), [], []

    def beside():
        try:
            with cupy.cuda.Stream(non_blocking=True):
                while not stop.is_set():
                    results, blocks = churn(images, weights, 1)
                    rounds.append(different(results, of_churn[1]) + overwritten(blocks))
                    begun.set()
        except BaseException as error:
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=beside)
    thread.start()
    wrong, wrong_eager = cupy.zeros((), np.int64), 0
    try:
        assert begun.wait(ALL)
        before = len(rounds)
        for turn in range(1000):
            results, blocks = churn(images, weights, 2) if turn % 10 == 0 else ([], [])
            poison(program.outputs)
            program.replay()
            for array, truth in zip(program.outputs, truths, strict=True):
                wrong += (array != truth).any()
            if results:  # what eager work made before a replay, and has still
                wrong_eager += different(results, of_churn[2]) + overwritten(blocks)
    finally:
        stop.set()
        thread.join(ALL)
    assert not failures
    assert not int(wrong)
    assert not wrong_eager
    assert len(rounds) > before  # it did not wait for the replays
    assert not sum(rounds)
    program.close()


def test_control_a_graph_captured_by_hand_reads_and_writes_what_eager_work_has(pool, stream, images, weights):
    states = ParallelStates(4, pool=pool)
    cupy.get_default_memory_pool().free_all_blocks()
    inputs = [image.copy(order="K") for image in images]
    expected = [array.get() for array in states.map(tower, inputs, [weights] * 8)]  # leaves blocks for the capture
    freed = {array.data.ptr for array in inputs}
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    try:
        outputs = states.map(tower, inputs, [weights] * 8)
    finally:
        graph = stream.end_capture()
    graph.launch(stream)
    assert not different(outputs, expected)  # as long as nobody else has its memory
    del inputs
    blocks = fill({images[0].nbytes: 200})
    assert freed & {block.data.ptr for block in blocks}, "CuPy's pool did not reuse a block, so this test shows nothing"
    graph.launch(stream)
    assert different(outputs, expected)  # read eager work's bytes
    assert overwritten(blocks)  # some of which the graph has its temporaries in


def test_a_replay_is_one_graph_launch_and_nothing_else(pool, stream, images, weights, monkeypatch):
    states = ParallelStates(4, pool=pool)
    with handlepool.record(states.map, conv, images, [weights] * 8, pool=pool) as program:
        program.replay()
        launches = []
        launch = program._launch
        replace_launch(program, lambda: (launches.append(launch.args[-1]), launch()))
        for name in ("record_event", "wait_event", "create_event", "relaxed"):
            monkeypatch.setattr(pool.driver, name, lambda *_: pytest.fail("an event"), raising=False)
        for _ in range(5):
            program.replay()
        monkeypatch.undo()
        assert launches == [stream.ptr] * 5


@pytest.mark.parametrize("count", [1, 4, 8])
def test_branches_are_parallel_in_the_captured_graph(pool, stream, images, weights, edges, count):
    states = ParallelStates(count, pool=pool)
    with handlepool.record(states.map, conv, images, [weights] * 8, pool=pool) as program:
        nodes, pairs = edges(recording_of(program).captured.pointer)
        assert program.nodes == len(nodes) >= 8
        assert len(set(nodes) - {after for _, after in pairs}) == count  # begin on nothing
        assert len(set(nodes) - {before for before, _ in pairs}) == count  # end in nothing but the graph's end


def test_two_programs_replay_from_different_threads_at_once(pool, stream, images, weights, in_threads):
    states = ParallelStates(4, pool=pool)
    expected = [array.get() for array in states.map(tower, images, [weights] * 8)]
    programs = [handlepool.record(states.map, tower, images, [weights] * 8, pool=pool) for _ in range(2)]

    def body(i):
        wrong = 0
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(100):
                poison(programs[i].outputs)
                programs[i].replay()
                wrong += sum((array.get() != truth).any() for array, truth in zip(programs[i].outputs, expected, strict=True))
        return wrong

    assert in_threads(2, body) == [0, 0]
    for program in programs:
        program.close()


def test_a_replay_on_another_stream_waits_for_the_readers_of_the_last(pool, stream, kernels, latch):
    x = kernels.full(N, 1)

    def body(x):
        return x + 1

    program = handlepool.record(body, x, pool=pool)
    program.replay()
    latch.hold()
    taken = kernels.copy(program.outputs)
    with cupy.cuda.Stream(non_blocking=True) as other:
        program.update(kernels.full(N, 7))
        program.replay()
        later = kernels.copy(program.outputs)
        assert not other.done
    latch.release()
    assert (taken.get() == 2).all()
    other.synchronize()
    assert (later.get() == 8).all()
    program.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda y: float(y[0]),
        lambda y: y.get(),
        lambda y: print(y),
        lambda y: bool((y > 0).all()),
        lambda y: cupy.cuda.get_current_stream().synchronize(),
        lambda y: cupy.cuda.Device().synchronize(),
        lambda y: y.nonzero(),
        lambda y: cupy.cuda.runtime.malloc(1 << 20),
    ],
    ids=["float", "get", "print", "bool", "stream", "device", "nonzero", "malloc"],
)
def test_waiting_on_the_host_inside_is_a_capture_error_that_says_so(pool, stream, images, weights, wait):
    states = ParallelStates(2, pool=pool)

    def body(image):
        states.map(conv, images[:4], [weights] * 4)
        y = conv(image, weights)
        wait(y.reshape(-1))
        return y

    allocator = cupy.cuda.get_allocator()
    with pytest.raises(CaptureError, match=r"cannot be recorded: .*must not synchronise"):
        handlepool.record(body, images[0], pool=pool)
    assert cupy.cuda.get_allocator() == allocator
    assert cupy.cuda.get_current_stream() is stream
    assert not stream.is_capturing()
    assert pool.stats()["handles_captured"] == pool.stats()["scratch_bytes_recorded"] == 0
    expected = conv(images[0], weights)
    with handlepool.record(states.map, conv, images, [weights] * 8, pool=pool) as program:
        program.replay()
        assert (program.outputs[0] == expected).all()


def test_a_join_that_was_forgotten_is_named(pool, stream, kernels):
    other = cupy.cuda.Stream(non_blocking=True)
    x = kernels.full(N, 1)

    def body(x):
        event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
        other.wait_event(event)
        with other:
            kernels.write(x, 2)
        return x

    body(x)
    with pytest.raises(CaptureError, match="does not wait for that work"):
        handlepool.record(body, x, pool=pool)


def test_an_exception_half_way_travels_and_leaves_all_usable(pool, stream, images, weights):
    states = ParallelStates(2, pool=pool)
    calls = []

    def body():
        states.map(conv, images, [weights] * 8)
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("half way")
        return images[0]

    with pytest.raises(KeyError, match="half way"):
        handlepool.record(body, pool=pool)
    with handlepool.record(states.map, conv, images, [weights] * 8, pool=pool) as program:
        program.replay()
        assert (program.outputs[3] == conv(images[3], weights)).all()


def test_refusals(pool, stream, images, weights):
    states = ParallelStates(2, pool=pool)
    with pytest.raises(ArgumentError, match="returned None"):
        handlepool.record(lambda: None, pool=pool)
    with pytest.raises(CaptureError, match="nothing to replay"):
        handlepool.record(lambda x: x, images[0], pool=pool)
    with pytest.raises(CaptureError, match="inside a branch"):
        states.map(lambda image: handlepool.record(conv, image, weights), images)
    stream.begin_capture()
    try:
        with pytest.raises(CaptureError, match="is being captured"):
            handlepool.record(conv, images[0], weights, pool=pool)
    finally:
        stream.end_capture()
    program = handlepool.record(conv, images[0], weights, pool=pool)
    with pytest.raises(ArgumentError, match="shape"):
        program.update(images[0][:, :32], None)
    with pytest.raises(ArgumentError, match="type"):
        program.update(images[0].astype("float32"), None)
    with pytest.raises(ArgumentError, match="strides"):
        program.update(cupy.ascontiguousarray(images[0]), None)
    with pytest.raises(ArrayTypeError, match="numpy"):
        program.update(images[0].get(), None)
    stream.begin_capture()
    try:
        with pytest.raises(CaptureError, match="is being captured"):
            program.replay()
    finally:
        stream.end_capture()
    program.replay()
    program.close()
    with pytest.raises(PoolClosedError, match="was closed"):
        program.replay()


def test_what_is_met_under_the_capture_for_the_first_time_is_recorded_or_refused_and_harms_nothing(
    pool, stream, random_array, monkeypatch
):
    """A plan is built there, a handle made, and kernels are loaded: whether CUDA loads them in a capture is for it to say.

    As where plans and slots were dropped between the two calls. That these give the same work is not looked at here.
    """
    monkeypatch.setattr(sys.modules["handlepool.recording.first_call"], "check_same", lambda *_: None)
    monkeypatch.setattr(sys.modules["handlepool.recording.first_call"], "_shapes", lambda *_: "")
    states = ParallelStates(3, pool=pool)
    given = [[random_array(shape, "float32") for shape in ((1, 24, side, side), (40, 24, 3, 3))] for side in (15, 17)]
    calls = hidden(iter(given))

    def body():
        image, weight = next(calls())
        return states.map(conv, [image] * 3, [weight] * 3)

    try:
        program = handlepool.record(body, pool=pool)
    except CaptureError as error:
        print(f"refused: {error}")
    else:
        program.replay()
        expected = conv(*given[1])
        assert all((y == expected).all() for y in program.outputs)
        program.close()
    assert not stream.is_capturing()
    assert pool.stats()["handles_captured"] == pool.stats()["scratch_bytes_recorded"] == 0
    with handlepool.record(conv, *given[0], pool=pool) as program:
        program.replay()
        assert (program.outputs == conv(*given[0])).all()


@pytest.mark.two_gpus
def test_a_program_is_replayed_on_its_own_device(pool, stream, images, weights):
    with handlepool.record(conv, images[0], weights, pool=pool) as program:
        with cupy.cuda.Device(1), pytest.raises(DeviceMismatchError, match="device 0"):
            program.replay()
        with cupy.cuda.Device(1):
            other = cupy.cuda.Stream(non_blocking=True)
        with pytest.raises(DeviceMismatchError, match="device 1"):
            program.replay(other)


def test_captures_of_other_threads_survive_records_updates_replays_and_closes(pool, stream, images, weights, captured_elsewhere):
    out, calls = conv(images[0], weights), hidden([])

    def recorded(x, w):
        # Eager work allocates nothing, since CuPy on its own does not take care of captures; what is recorded does.
        calls().append(1)
        temporary = cupy.empty(1 << 22, np.uint8) if len(calls()) % 2 == 0 else out
        handlepool.conv2d(x, w, padding=1, out=out)
        calls()[-1] = temporary
        return out

    def body():
        program = handlepool.record(recorded, images[0], weights, pool=pool)
        program.replay()
        program.update(images[1], None)
        with cupy.cuda.Stream.ptds:
            program.replay()
        program.replay()
        program.close()

    body()
    with captured_elsewhere():
        body()


@pytest.mark.alone
def test_a_program_gives_its_memory_back_after_its_outputs(pool, stream):
    def body(x):
        return (x + 1) * 2

    x = cupy.zeros(1 << 26, np.uint8)
    program = handlepool.record(body, x, pool=pool)
    program.replay()
    held = program.outputs
    assert program.nbytes >= 2 << 26
    stream.synchronize()
    before = cupy.cuda.runtime.memGetInfo()[0]
    program.close()
    assert cupy.cuda.runtime.memGetInfo()[0] - before >= 1 << 26
    assert (held.get() == 2).all()
    before = cupy.cuda.runtime.memGetInfo()[0]
    del held
    with ParallelStates(1, pool=pool).fork():
        pass
    assert cupy.cuda.runtime.memGetInfo()[0] - before >= 1 << 26


def test_a_program_that_nobody_closed_is_given_back_at_a_later_fork(pool, stream, images, weights):
    program = handlepool.record(conv, images[0], weights, pool=pool)
    program.replay()
    stream.synchronize()
    del program
    with ParallelStates(1, pool=pool).fork():
        pass
    assert pool.stats()["scratch_bytes_recorded"] == 0


def test_a_replay_while_another_thread_updates_is_an_error(pool, stream, images, weights, in_thread, monkeypatch):
    with handlepool.record(conv, images[0], weights, pool=pool) as program:
        copy = pool.driver.copy

        def replays_meanwhile(target, source):
            with pytest.raises(OwnershipError, match="belongs to thread"):
                in_thread(program.replay)
            copy(target, source)

        monkeypatch.setattr(pool.driver, "copy", replays_meanwhile)
        program.update(images[1], None)
        monkeypatch.undo()
        program.replay()
        assert (program.outputs == conv(images[1], weights)).all()


def test_programs_of_a_closed_pool_are_refused_and_can_be_closed(stream, images, weights):
    with HandlePool(driver="cuda") as pool:
        program = handlepool.record(conv, images[0], weights, pool=pool)
        program.replay()
    with pytest.raises(PoolClosedError):
        program.replay()
    program.close()


# Side streams that are lent to others, and streams that are no part of a recording


@pytest.mark.parametrize("how", ["branch", "task"])
def test_a_program_that_was_used_in_a_branch_or_a_task_is_usable_while_another_thread_records(pool, stream, kernels, how):
    x = kernels.full(N, 1)
    program = handlepool.record(lambda x: x * 2, x, pool=pool)
    if how == "branch":
        with ParallelStates(1, pool=pool).fork() as fork:
            fork.run(program.replay)
    else:
        with ParallelStateExecutor(1, pool=pool) as executor:
            executor.submit(program.replay).result()
    inside, go = threading.Event(), threading.Event()
    programs = []

    def record():
        calls = hidden([])

        def body(x):
            parts = ParallelStates(8, pool=pool).map(lambda i: x + i, range(8))
            calls().append(1)
            if len(calls()) == 2:
                inside.set()
                go.wait(ALL)
            return parts

        with cupy.cuda.Stream(non_blocking=True) as own:
            programs.append(handlepool.record(body, kernels.full(N, 3), pool=pool))
            programs[0].replay()
            own.synchronize()

    thread = threading.Thread(target=record)
    thread.start()
    try:
        assert inside.wait(ALL)
        program.update(kernels.full(N, 5))
        program.replay()
        assert (program.outputs == 10).all()
        program.close()
    finally:
        go.set()
        thread.join(ALL)
    assert [int(part[0]) for part in programs[0].outputs] == list(range(3, 11))
    programs[0].close()


def test_what_replays_would_leave_out_is_refused(pool, stream, images, weights):
    other = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()
    states = ParallelStates(2, pool=pool)

    def elsewhere(x):
        with other:
            conv(x, weights)
        return x * 2

    def over_another(x):
        with states.fork(stream=other) as fork:
            fork.run(conv, x, weights)
        return x * 2

    with states.fork() as outside, handlepool.record(conv, images[1], weights, pool=pool) as program:
        for function in (
            elsewhere,
            over_another,
            lambda x: outside.run(conv, x, weights),
            lambda x: outside.run(lambda: x * 3),
            lambda x: (program.replay(stream=other), x * 2)[1],
        ):
            with pytest.raises(CaptureError, match="not part of the recording"):
                handlepool.record(function, images[0], pool=pool)
        other.synchronize()
    with handlepool.record(conv, images[0], weights, pool=pool) as again:
        again.replay()
        assert same([again.outputs], [conv(images[0], weights)])


def test_a_program_and_an_open_fork_in_a_cycle_with_their_streams_are_given_back(pool, images, weights):
    class Model:
        def __init__(self):
            self.itself, self.stream = self, cupy.cuda.Stream(non_blocking=True)
            with self.stream:
                self.program = handlepool.record(conv, images[0], weights, pool=pool)
                self.program.replay()
                self.fork = ParallelStates(2, pool=pool).fork()
                self.fork.__enter__()
                self.fork.run(conv, images[1], weights)
                self.stream.synchronize()

    before = set(streams_of_programs())
    model = Model()
    del model
    gc.collect()
    deferred.run(1000)
    cupy.cuda.Device().synchronize()
    deferred.run(1000)
    assert set(streams_of_programs()) == before
    stats = pool.stats()
    assert (stats["handles_leased"], stats["scratch_bytes_recorded"]) == (0, 0)


UNSEEN = {}
"""A global, or the order by data would let the fork's stream wait for what the other stream still has to do."""


@pytest.mark.parametrize("way", ["fork over it", "fork inside it", "itself"])
def test_g8_work_of_a_branch_on_another_stream_has_memory_of_that_stream(pool, stream, kernels, latch, way):
    other, states = cupy.cuda.Stream(non_blocking=True), ParallelStates(2, pool=pool)
    y = UNSEEN["y"] = kernels.full(N, 0)

    def work():
        temporary = kernels.full(N, 7)
        kernels.copy(temporary, UNSEEN["y"])

    def branch():
        if way == "fork over it":
            with states.fork(stream=other) as fork:
                fork.run(work)
        else:
            with other:
                states.map(lambda _: work(), range(1)) if way == "fork inside it" else work()

    for held in (False, True):  # at first CuPy's pool gets the blocks that are taken later
        stream.synchronize()
        other.synchronize()
        with other:
            if held:
                latch.hold()
        with states.fork() as fork:
            fork.run(branch)
        later = [kernels.full(N, 9) for _ in range(8)]
        stream.synchronize()
        if held:
            latch.release()
        other.synchronize()
        assert (y == 7).all()
        assert all((array == 9).all() for array in later)
        del later
