"""Recorded functions under load: four models, 20 geometries, 16 threads, every result compared on the GPU, memory flat.

``CALLS`` in the environment says how many calls a thread makes; the long form has 20,000.
"""

import os
import threading

import numpy as np
import pytest

import handlepool

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.alone

THREADS, TURNS = 16, 4
CALLS = int(os.environ.get("CALLS", "200"))
ALL = 60 + CALLS // 20  # seconds
SIZES = [(h, w) for h in (6, 8, 10, 12) for w in (5, 7, 9, 11, 13)]


@pytest.fixture(autouse=True)
def default(pool, stream, make_default):
    """The test's pool as the default one, with a stream of the test's own current."""
    make_default(pool)
    return pool


def models(filters):
    def one(x):
        return handlepool.conv2d(x, filters, padding=1, activation="relu", deterministic=True)

    def two(x):
        left = handlepool.conv2d(x, filters, padding=1, deterministic=True)
        return handlepool.concat([left, handlepool.add(x, x)], 1)

    def three(x):
        return handlepool.max_pool2d(handlepool.add(x, x), 3, stride=1, padding=1)

    def four(x):
        return handlepool.mean2d(handlepool.conv2d(handlepool.add(x, x), filters, padding=1, deterministic=True))

    return [one, two, three, four]


def image(height, width, value):
    values = np.random.default_rng(value).integers(-2, 3, (1, height, width, 16)).astype(np.float16)
    return cupy.asarray(values).transpose(0, 3, 1, 2)


def test_g19_every_result_of_a_long_run_is_the_plain_functions_and_memory_is_flat(stream, random_array):
    filters = random_array((16, 16, 3, 3), "float16", "nhwc", 99) / 16
    compare = cupy.ElementwiseKernel("T y, T right, raw int32 wrong", "", "if (!(y == right)) atomicAdd(&wrong[0], 1)", "compare")
    plain = models(filters)
    networks = [handlepool.recorded(each, programs=20, instances=4, strict=True) for each in plain]
    inputs = [[image(*size, value) for value in range(3)] for size in SIZES]
    right = [[[each(x) for x in xs] for xs in inputs] for each in plain]
    wrong = cupy.zeros(THREADS, np.int32)
    for network in networks:
        for xs in inputs:
            network(xs[0])
    stream.synchronize()
    one_each = [network.stats().nbytes for network in networks]
    errors, free = [], []

    def work(number, gate):
        rng = np.random.default_rng([number, len(free)])
        mine = wrong[number : number + 1]
        try:
            with cupy.cuda.Stream(non_blocking=True) as own:
                gate.wait(ALL)
                for call in range(CALLS // TURNS):
                    model, size, value = (int(rng.integers(count)) for count in (4, len(SIZES), 3))
                    y = networks[model](inputs[size][value])
                    compare(y, right[model][size][value], mine)
                    if call % 64 == 0:
                        own.synchronize()
                own.synchronize()
        except BaseException as error:
            errors.append(error)

    for _ in range(TURNS):
        gate = threading.Barrier(THREADS)
        threads = [threading.Thread(target=work, args=(number, gate)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ALL)
            assert not thread.is_alive()
        assert not errors, errors[0]
        cupy.cuda.Device().synchronize()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
        assert not wrong.get().any()
        for network, nbytes in zip(networks, one_each, strict=True):
            assert network.stats().nbytes <= 4 * nbytes
            assert (network.stats().keys, network.stats().closed) == (20, 0)
    print(f"{THREADS * CALLS:,} calls, free MiB after each turn: {[each >> 20 for each in free]}")
    assert free[1] - free[-1] < 32 << 20
    for network in networks:
        network.clear()
    cupy.cuda.Device().synchronize()
    for network in networks:
        network.clear()
        assert network.stats().nbytes == 0


def test_g6_requests_of_many_clients_have_their_values(stream, random_array):
    filters = random_array((16, 16, 3, 3), "float16", "nhwc", 99) / 16
    plain = models(filters)[1]
    network = handlepool.recorded(plain, instances=4)
    values = [np.asarray(image(8, 9, value).get()) for value in range(4)]
    right = [plain(cupy.asarray(value)).get() for value in values]
    errors = []

    def work(number):
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for call in range(max(20, CALLS // 20)):
                    at = (number + call) % 4
                    found = network.submit(values[at]).result()
                    assert np.array_equal(found, right[at]), (number, call)
                    given = cupy.asarray(values[at])
                    future = network.submit(given)
                    assert np.array_equal(future.result().get(), right[at]), (number, call)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ALL)
        assert not thread.is_alive()
    assert not errors, errors[0]
