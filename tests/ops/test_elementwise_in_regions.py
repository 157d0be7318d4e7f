"""Elementwise functions in forks, maps and recordings, each with its control; asarray and asnumpy there."""

from functools import partial

import numpy as np
import pytest
from harness.arrays import FULL, Arrays
from harness.scenes import Scene, over_seeds

import handlepool
from handlepool import CaptureError, ContractError, HandlePool, ParallelStates, add, elementwise, multiply
from handlepool import math as over
from handlepool.drivers.host.driver import HostDriver

SEEDS = range(15)
X = np.random.default_rng(1).standard_normal((2, 8, 6, 6)).astype(np.float32)
S = np.random.default_rng(2).standard_normal((2, 8, 1, 1)).astype(np.float32)


@elementwise
def gate(x, s, n=1.0):
    return x * over.hardsigmoid(s) * n


def network(x, s, run=lambda function, *args, **kwargs: function(*args, **kwargs)):
    """Elementwise calls that follow each other by their data, by ``run``; the last but one writes in place."""
    first = run(gate, x, s)
    second = run(over.silu, x)
    third = run(multiply, first, s, 2.0)
    total = run(add, second, third, s)
    run(gate, total, s, 0.5, out=total)
    return run(add, total, first, activation="relu"), total


def expected(x=X, s=S):
    x, s = x.astype(np.float64), s.astype(np.float64)
    open_ = np.clip(s + 3, 0, 6) / 6
    first = x * open_
    total = (x / (1 + np.exp(-x)) + 2 * first * s + s) * open_ / 2
    return np.maximum(total + first, 0), total


def worst(arrays, found, right=None):
    return max(arrays.error(y, each) for y, each in zip(found, right or expected(), strict=True))


def in_a_fork(scene, **options):
    x, s = map(scene.driver.asarray, (X, S))
    with scene.states.fork(**options) as fork:
        found = network(x, s, fork.run)
    return worst(Arrays(scene.pool), found)


def test_g17_elementwise_branches_are_ordered_by_their_data():
    assert max(over_seeds(in_a_fork, seeds=SEEDS)) < 1e-5


def test_g17_control_without_order_elementwise_branches_go_wrong():
    assert not max(over_seeds(partial(in_a_fork, ordered=False), seeds=SEEDS, control=True)) < 1e-2


def in_the_body(scene, **options):
    """A call of the fork's body that reads what a branch writes, and the other way round."""
    x, s = map(scene.driver.asarray, (X, S))
    with scene.states.fork(**options) as fork:
        for _ in range(2):
            first = fork.run(gate, x, s)
            second = gate(first, s, pool=scene.pool)
            found = fork.run(multiply, second, s)
    a, b = X.astype(np.float64), S.astype(np.float64)
    return Arrays(scene.pool).error(found, a * (np.clip(b + 3, 0, 6) / 6) ** 2 * b)


def test_g17_a_call_in_the_body_waits_for_branches_that_write_what_it_reads():
    assert max(over_seeds(in_the_body, seeds=SEEDS)) < 1e-5


def test_g17_control_a_call_in_the_body_that_does_not_wait_goes_wrong():
    assert not max(over_seeds(partial(in_the_body, ordered=False), seeds=SEEDS, control=True)) < 1e-2


def test_g17_calls_over_other_memory_do_not_wait_for_each_other(make_pool):
    pool = make_pool()
    driver = pool.driver
    with driver.create_stream() as stream:
        xs, s = [driver.asarray(X) for _ in range(3)], driver.asarray(S)
        with ParallelStates(3, pool=pool).fork() as fork:
            for x in xs:
                fork.run(gate, x, s)
            assert driver.calls["wait_event"] == 3  # for the caller's stream: all read s, and write memory of their own
        driver.synchronize_stream(stream.ptr)


@pytest.mark.parametrize("out", [False, True])
def test_a_map(each_pool, out):
    arrays = Arrays(each_pool)
    states = ParallelStates(2, pool=each_pool)
    xs, gates = [arrays.random(2, 8, 6, 6) for _ in range(5)], [arrays.random(2, 8, 1, 1) for _ in range(5)]
    wanted = [arrays.take(x) * np.clip(arrays.take(s) + 3, 0, 6) / 6 for x, s in zip(xs, gates, strict=True)]
    for _ in range(2):
        outs = [arrays.poisoned(2, 8, 6, 6) for _ in xs] if out else None
        found = states.map(gate, xs, gates, out=outs)
        assert outs is None or all(y is each for y, each in zip(found, outs, strict=True))
        assert worst(arrays, found, wanted) < FULL


@pytest.mark.parametrize("lanes", [None, 1, 3])
def test_a_recording_is_replayed_with_new_inputs(each_pool, lanes):
    arrays = Arrays(each_pool)
    x, s = arrays.put(X), arrays.put(S)
    program = handlepool.record(network, x, s, lanes=lanes)
    program.replay()
    assert worst(arrays, program.outputs) < FULL
    x2, s2 = (np.random.default_rng(seed).standard_normal(each.shape).astype(np.float32) for seed, each in ((3, X), (4, S)))
    assert worst(arrays, program(arrays.put(x2), arrays.put(s2)), expected(x2, s2)) < FULL


def test_each_call_is_a_node_with_the_reads_and_writes_of_its_arrays(each_pool):
    arrays = Arrays(each_pool)
    program = handlepool.record(network, arrays.put(X), arrays.put(S), lanes=4)
    explained = program.explain()
    assert [node.name for node in explained.nodes] == ["gate", "silu", "multiply", "add", "gate", "add"]
    assert explained.serial == []
    assert [node.after for node in explained.nodes] == [(), (), (0,), (1, 2), (3,), (4,)]


class LessOrdered(HostDriver):
    """Puts a node behind all its producers but one."""

    def set_dependencies(self, pointer, nodes):
        super().set_dependencies(pointer, tuple(nodes)[1:])


def recorded(scene):
    x, s = map(scene.driver.asarray, (X, S))
    program = handlepool.record(network, x, s, lanes=4, pool=scene.pool)
    for _ in range(2):
        program.replay()
    return worst(Arrays(scene.pool), program.outputs)


def test_g17_lanes_are_ordered_by_data():
    for seed in SEEDS:
        with Scene(HostDriver(scheduler="adversarial", seed=seed, check_order=True)) as scene:
            assert recorded(scene) < 1e-5


def test_g17_control_lanes_that_lack_a_producer_are_caught():
    with Scene(LessOrdered(scheduler="adversarial", seed=1, check_order=True)) as scene:
        with pytest.raises((ContractError, CaptureError), match=r"not ordered|not waited for"):
            recorded(scene)
        scene.driver.order.found.clear()


def test_g19_a_number_that_differs_between_the_two_calls_is_refused(each_pool):
    arrays, calls = Arrays(each_pool), iter(range(9))
    x, s = arrays.put(X), arrays.put(S)
    with pytest.raises(CaptureError):
        handlepool.record(lambda x: gate(x, s, float(next(calls))), x, lanes=2)


def test_a_pool_with_checks(make_driver):
    with HandlePool(driver=make_driver(), check=True) as pool, pool.driver.create_stream():
        x, s = handlepool.asarray(X, pool=pool), handlepool.asarray(S, pool=pool)
        states = ParallelStates(3, pool=pool)
        with states.fork() as fork:
            found = network(x, s, fork.run)
        assert worst(Arrays(pool), found) < FULL


def test_asarray_and_asnumpy_are_of_the_current_pool(each_pool):
    for values in (X, X.transpose(0, 2, 3, 1), np.float32(3), [[1, 2], [3, 4]], np.arange(5, dtype=np.uint16)):
        x = handlepool.asarray(values)
        assert isinstance(x, each_pool.driver.array_types[0])
        assert handlepool.asarray(x) is x
        back = handlepool.asnumpy(x)
        assert type(back) is np.ndarray
        assert np.array_equal(back, values)
        assert back.dtype == np.asarray(values).dtype
    y = handlepool.asarray(X.transpose(0, 2, 3, 1))
    assert y.strides == X.transpose(0, 2, 3, 1).strides


def test_asnumpy_keeps_the_current_stream(each_pool):
    driver = each_pool.driver
    before = driver.current_stream().ptr
    view = handlepool.asarray(X)[:, ::2]
    assert np.array_equal(handlepool.asnumpy(view), X[:, ::2])
    assert driver.current_stream().ptr == before


def test_asnumpy_of_what_is_no_array_of_the_drivers_is_refused(each_pool):
    for wrong in (3, [1.0], object()):
        with pytest.raises(handlepool.ArrayTypeError, match="asnumpy"):
            handlepool.asnumpy(wrong)
    with pytest.raises(handlepool.ArgumentError, match="pool"):
        handlepool.asarray(X, pool=object())


def test_g19_equal_values_in_both_calls_of_a_recorded_function_are_a_constant_and_others_are_refused(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.put(X)
    program = handlepool.record(lambda x: multiply(x, handlepool.asarray(S)), x, lanes=2)
    for _ in range(2):
        program.replay()
        assert arrays.error(program.outputs, X.astype(np.float64) * S) < FULL
    random = np.random.default_rng(5)
    with pytest.raises(CaptureError):
        handlepool.record(lambda x: multiply(x, handlepool.asarray(random.standard_normal(S.shape).astype("f4"))), x, lanes=2)
