"""Ordinary code on host arrays: NumPy's values at every seed and no word of the race checker, which catches what has no order."""

from concurrent.futures import wait

import numpy as np
import pytest
from harness.ordinary import IN_ORDER, SHAPES, Place, Plain, flat

import handlepool
from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver

SEEDS = range(20)
EXPECTED = {name: [np.asarray(y) for y in flat(code(Plain()))] for name, code in SHAPES.items()}


def run(name, driver, read=lambda driver, y: y.get()):
    """What a shape gives on a stream of its own."""
    with HandlePool(driver=driver) as pool, driver.create_stream() as stream:
        place = Place(pool, np, driver.asarray)
        results = [read(driver, y) for y in flat(SHAPES[name](place))]
        stream.synchronize()
    return results


def right(name, results):
    return all(np.array_equal(y, z) and y.dtype == z.dtype for y, z in zip(results, EXPECTED[name], strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_ordinary_code_gives_numpys_values_and_is_in_order(name):
    for seed in SEEDS:
        driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True, strict=True)
        assert right(name, run(name, driver)), seed
        assert driver.order.found == []


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.unmeasured
def test_control_ordinary_code_without_its_order_is_caught(name, monkeypatch):
    driver = HostDriver(scheduler="adversarial", seed=0, check_order=True)

    def read_elsewhere(driver, y):
        with driver.create_stream():
            return y.get()

    if name in IN_ORDER:
        with pytest.raises(ContractError, match="not ordered"):
            run(name, driver, read_elsewhere)
    else:
        driver.wait_event = lambda pointer, event: None
        driver.synchronize_event = lambda event: None
        with pytest.raises(ContractError, match="not ordered"):
            run(name, driver)
    assert driver.order.found


def test_there_are_fifty_shapes():
    assert len(SHAPES) >= 50


def a_chain_over_four_states(driver, ordered):
    with HandlePool(driver=driver) as pool, driver.create_stream():
        place = Place(pool, np, driver.asarray)
        with ParallelStates(4, pool=pool).fork(ordered=ordered) as fork:
            y = fork.run(lambda a: a * 2, fork.run(place.conv, place.xs[0]))
        return y.get()


def test_g17_a_chain_over_several_states_is_in_order():
    a_chain_over_four_states(HostDriver(scheduler="adversarial", check_order=True), ordered=True)


def test_g17_control_a_chain_over_several_states_without_order_is_reported():
    with pytest.raises(ContractError, match=r"not ordered: 'multiply' .*test_ordinary_code.py:\d+ reads .*writes"):
        a_chain_over_four_states(HostDriver(scheduler="adversarial", check_order=True), ordered=False)


def test_the_body_of_a_fork_reads_too_early_and_both_places_are_named():
    driver = HostDriver(scheduler="adversarial", check_order=True)
    with HandlePool(driver=driver) as pool, driver.create_stream():
        place = Place(pool, np, driver.asarray)
        with ParallelStates(2, pool=pool).fork() as fork:
            y = fork.run(place.conv, place.xs[0])
            with pytest.raises(
                ContractError, match=r"not ordered: 'get\(\)' .*ordinary_code.py:\d+ reads .*ordinary.py:\d+ writes"
            ):
                y.get()
        assert right("a_recorded_function", [(y * 0).get()]) is False  # the fork is joined, and the states go on


def test_a_task_that_writes_what_its_submitter_reads_is_reported():
    driver = HostDriver(scheduler="adversarial", check_order=True)
    with HandlePool(driver=driver) as pool, driver.create_stream():
        x = driver.asarray(np.ones(8, np.float32))
        with handlepool.ParallelStateExecutor(1, pool=pool) as executor:
            future = executor.submit(lambda: x.__imul__(2))
            wait([future])
            with pytest.raises(ContractError, match=r"not ordered: 'add' .* reads .*'multiply' .* writes"):
                x + 1
            assert (future.result().get() == 2).all()
