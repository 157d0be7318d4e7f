"""Recorded functions on a GPU: values under threads and geometries, memory that stays, streams that overlap."""

import threading

import numpy as np
import pytest

import handlepool

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

THREADS, CALLS = 16, 200
ALL = 60  # seconds, of what is expected to happen


@pytest.fixture(autouse=True)
def default(pool, stream, make_default):
    """The test's pool as the default one, with a stream of the test's own current."""
    make_default(pool)
    return pool


@pytest.fixture
def weights(random_array):
    return random_array((16, 16, 3, 3), "float16", "nhwc", 99) / 16


@pytest.fixture
def network(weights):
    def network(x):
        left = handlepool.conv2d(x, weights, padding=1, activation="relu", deterministic=True)
        right = handlepool.add(x, x)
        return handlepool.concat([left, right], 1)

    return network


def image(height, width, value):
    values = np.random.default_rng(value).integers(-2, 3, (1, height, width, 16)).astype(np.float16)
    return cupy.asarray(values).transpose(0, 3, 1, 2)


def in_threads(count, work):
    """Run ``work(number)`` in threads, each with a stream of its own current."""
    errors, gate = [], threading.Barrier(count)

    def run(number):
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                gate.wait(ALL)
                work(number)
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ALL * 4)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_g19_each_call_has_the_plain_functions_value(network, stream):
    recorded = handlepool.recorded(network, strict=True)
    for size in (6, 8, 10, 6, 8, 10, 12):
        for value in range(3):
            x = image(size, size + 1, value)
            assert cupy.array_equal(recorded(x), network(x))
    stats = recorded.stats()
    assert (stats.keys, stats.recorded, stats.eager) == (4, 4, 0)


def test_g19_threads_and_geometries_give_the_plain_functions_values_and_memory_is_bounded(network, stream):
    recorded = handlepool.recorded(network, programs=20, instances=4)
    sizes = [(h, w) for h in (6, 8, 10, 12) for w in (5, 7, 9, 11, 13)]
    inputs = {(size, value): image(*size, value) for size in sizes for value in range(4)}
    right = {key: network(x) for key, x in inputs.items()}
    stream.synchronize()
    for size in sizes:
        recorded(inputs[size, 0])
    one_each = recorded.stats().nbytes

    def work(number):
        rng = np.random.default_rng(number)
        for call in range(CALLS):
            key = sizes[rng.integers(len(sizes))], int(rng.integers(4))
            y = recorded(inputs[key])
            assert cupy.array_equal(y, right[key]), (number, call, key)

    for _ in range(4):
        in_threads(THREADS, work)
        cupy.cuda.Device().synchronize()
        # How many of a key's four instances there are depends on the threads.
        assert one_each <= recorded.stats().nbytes <= 4 * one_each
    stats = recorded.stats()
    assert stats.keys == 20
    assert stats.eager < THREADS * CALLS
    recorded.clear()
    cupy.cuda.Device().synchronize()
    recorded.clear()
    assert recorded.stats().nbytes == 0


def test_calls_on_two_streams_overlap(kernels, stream):
    @handlepool.operation
    def slow(x):
        kernels.spin(20)
        return kernels.copy(x)

    recorded = handlepool.recorded(slow, instances=2)
    x = kernels.full(1 << 10, 1) if hasattr(kernels, "full") else cupy.ones(1 << 10, np.float32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    stream.synchronize()

    def both():
        start, ends = cupy.cuda.Event(), [cupy.cuda.Event() for _ in streams]
        start.record(stream)
        for each, end in zip(streams, ends, strict=True):
            each.wait_event(start)
            with each:
                recorded(x)
            end.record(each)
        for end in ends:
            stream.wait_event(end)
            end.synchronize()
        return max(cupy.cuda.get_elapsed_time(start, end) for end in ends)

    with stream:
        recorded(x)
        recorded(x)
    both()
    assert recorded.stats().programs == 2
    assert both() < 35


def test_written_arguments_are_copied_back(stream):
    increase = cupy.ElementwiseKernel("float32 by", "float32 h", "h += by", "increase")

    @handlepool.operation(mutates="h")
    def add_to(h, by):
        increase(np.float32(by), h)

    def declared(x, h):
        add_to(h, 1)
        return handlepool.add(x, h)

    def plain(x, h):
        h += 1
        return handlepool.add(x, h)

    for function in (declared, plain):
        recorded = handlepool.recorded(function, strict=True)
        h = cupy.zeros((1, 8, 4, 4), np.float32)
        for number in range(1, 6):
            y = recorded(cupy.full((1, 8, 4, 4), 10, np.float32), h)
            assert (y == 10 + number).all()
            assert (h == number).all()


def test_arrays_with_gaps_out_and_reused_outputs(network, stream):
    x = image(8, 18, 1)
    recorded, reused = handlepool.recorded(network, strict=True), handlepool.recorded(network, outputs="reused", strict=True)
    for part in (np.s_[:, :, :, ::2], np.s_[:, :, :, :9], np.s_[:, :, 1:, 3:7]):
        right = network(x[part].copy(order="K"))
        for _ in range(3):
            out = cupy.empty_like(right)
            assert recorded(x[part], out=out) is out
            assert cupy.array_equal(out, right)
            assert cupy.array_equal(recorded(x[part]), right)
    for _ in range(3):
        y = reused(x)
        assert cupy.array_equal(y, network(x))
    assert reused(x) is y


def test_under_a_capture_of_the_callers_it_is_captured(network, stream):
    recorded = handlepool.recorded(network)
    x = image(8, 8, 1)
    recorded(x)
    out = cupy.empty_like(recorded(x))
    stream.synchronize()
    network(x)
    stream.begin_capture()
    recorded(x, out=out)
    graph = stream.end_capture()
    x[...] = image(8, 8, 2)
    graph.launch(stream)
    assert cupy.array_equal(out, network(x))


def test_submitted_calls_are_right_and_in_order(network, stream):
    recorded = handlepool.recorded(network)
    inputs = [image(8, 8, value) for value in range(8)]
    right = [network(x) for x in inputs]
    with handlepool.ParallelStateExecutor(4) as executor:
        for submit in (recorded.submit, lambda x: executor.submit(recorded, x)):
            futures = [submit(x) for x in inputs * 4]
            for future, y in zip(futures, right * 4, strict=True):
                assert cupy.array_equal(future.result(), y)


def test_program_tune_and_explain(network, stream):
    recorded = handlepool.recorded(network)
    x = image(8, 8, 1)
    right = network(x)
    recorded.prewarm(handlepool.ArraySpec((1, 16, 8, 8), "float16", "NHWC"), tune=True)
    assert cupy.array_equal(recorded(x), right)
    assert recorded.stats().recorded == 1
    assert "kernels" in recorded.explain()
    assert recorded.program(x).nodes
