"""Recorded functions under threads: random sequences of calls over many geometries, each value held to the plain function's."""

import os
import threading
import warnings

import numpy as np
import pytest
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import ContractError, HandlePool
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.testing.pools import substitute_default

FIRST = int(os.environ.get("FIRST", "0"))
COUNT = int(os.environ.get("COUNT", "16"))
SHAPES = [(1, 4, h, w) for h in (2, 3, 4, 5) for w in (2, 3, 4)]
THREADS = 8
CALLS = 24


@handlepool.operation(mutates="h")
def add_to(h, x):
    h += x


@handlepool.operation
def scaled(x, k):
    return x * k


def network(x, k, y=None, h=None):
    t = scaled(handlepool.add(x, x), k)
    if h is not None:
        add_to(h, t)
        return handlepool.add(h, x)
    return (t, handlepool.add(t, x)) if y is None else handlepool.add(t, y)


def call(rng, driver, function, shape):
    """Make a random call; return its arrays, and the values that they are to have."""
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for _ in range(2))
    k = float(rng.choice([1, 2]))
    kind = rng.integers(4)
    x = driver.asarray(a)
    if kind == 0:
        return [*function(x, k)], [2 * k * a, 2 * k * a + a]
    if kind == 1:
        return [function(x, k, driver.asarray(b))], [2 * k * a + b]
    if kind == 2:
        h = driver.asarray(b)
        y = function(x, k, h=h)
        return [y, h], [2 * k * a + b + a, 2 * k * a + b]
    return [function(x, k, x)], [2 * k * a + a]


def sequence(seed, *, threads=THREADS, calls=CALLS, shapes=SHAPES, options=None, check=True, warm=False):
    """Run random calls from many threads on a driver of its own; return the wrong values, and what is left on the driver."""
    driver = HostDriver(scheduler="adversarial", seed=seed, check_order=check)
    wrong: list[str] = []
    with HandlePool(driver=driver) as pool, substitute_default(pool), warnings.catch_warnings():
        # Of the values that a few keys differ in.
        warnings.simplefilter("ignore", RuntimeWarning)
        recorded = handlepool.recorded(network, **(options or {"lanes": 3, "instances": 2, "programs": 20}))
        gate = threading.Barrier(threads)

        def work(number):
            rng = np.random.default_rng([seed, number])
            with driver.create_stream() as stream:
                gate.wait(TIMEOUT)
                found = [call(rng, driver, recorded, shapes[rng.integers(len(shapes))]) for _ in range(calls)]
                for at, (arrays, values) in enumerate(found):
                    for array, value in zip(arrays, values, strict=True):
                        if not np.array_equal(array.get(), value):
                            wrong.append(f"seed {seed}, thread {number}, call {at}")
                driver.synchronize_stream(stream.ptr)

        if warm:
            rng = np.random.default_rng(seed)
            with driver.create_stream() as stream:
                for _ in range(60):
                    call(rng, driver, recorded, shapes[rng.integers(len(shapes))])
                driver.synchronize_stream(stream.ptr)
        for thread in [Thread(work, number) for number in range(threads)]:
            thread.finish()
        stats = recorded.stats()
        recorded.clear()
        deferred.deferred.run_all()
    return wrong, stats, driver.alive()


@pytest.mark.slow
def test_g19_random_calls_of_eight_threads_give_the_plain_functions_values():
    used = 0
    for seed in range(FIRST, FIRST + COUNT):
        # Every second one with few keys, which have programs when the threads begin.
        few = seed % 2
        programs = 64 if few else 20
        options = {"lanes": 3, "instances": 2, "programs": programs}
        wrong, stats, alive = sequence(seed, shapes=SHAPES[:3] if few else SHAPES, options=options, warm=few)
        assert not wrong, wrong
        assert (alive["handles"], alive["events"], alive["scratch_bytes"]) == (0, 0, 0)
        used += max(0, THREADS * CALLS - stats.eager)
    assert used > COUNT * THREADS * CALLS // 10


def test_g19_threads_that_share_few_keys_share_their_instances():
    for seed in range(10):
        wrong, stats, _ = sequence(seed, threads=4, shapes=SHAPES[:1], warm=True)
        assert not wrong, wrong
        assert stats.programs > stats.keys


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_g19_control_an_instance_that_two_streams_use_at_once_goes_wrong(without, check):
    without("waits for the last replay")
    caught = wrong = 0
    for seed in range(10):
        try:
            wrong += len(sequence(seed, threads=2, shapes=SHAPES[:1], options={"instances": 1, "lanes": 1}, check=check)[0])
        except ContractError:
            caught += 1
    assert caught if check else wrong


def test_control_an_instance_whose_outputs_two_threads_reuse_goes_wrong(without):

    def reused():
        driver = HostDriver()
        with HandlePool(driver=driver) as pool, substitute_default(pool):
            double = handlepool.recorded(lambda x: handlepool.add(x, x), outputs="reused", instances=2)
            held, go = threading.Barrier(2), threading.Barrier(2)
            ones = np.ones((1, 4, 3, 4), np.float32)

            def work(number):
                with driver.create_stream() as stream:
                    double(driver.asarray(ones))
                    stream.synchronize()
                    held.wait(TIMEOUT)
                    y = double(driver.asarray(ones * number))
                    stream.synchronize()
                    go.wait(TIMEOUT)
                    return float(y.get().max())

            found = [thread.finish() for thread in [Thread(work, number) for number in (3, 5)]]
            double.clear()
        return found

    for _ in range(5):
        assert reused() == [6, 10]
    without("claims of instances")
    assert any(reused() != [6, 10] for _ in range(20))
