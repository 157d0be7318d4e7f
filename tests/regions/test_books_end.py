"""What books give back: events of streams that change hands, and streams that nobody has any more."""

import numpy as np
import pytest
from harness.graphs import double

from handlepool import HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import context, deferred
from handlepool.pool.side_streams import MOST_SIDE_SLOTS


@pytest.fixture
def pool():
    with HandlePool(driver=HostDriver(scheduler="adversarial", check_order=True)) as pool:
        yield pool


def filled(driver):
    return driver.asarray(np.ones(16))


def test_g11_trim_destroys_a_side_stream_whose_branch_forked_while_another_fork_is_open(pool):
    driver, states = pool.driver, ParallelStates(2, pool=pool)
    x = filled(driver)

    def nested(y):
        with states.fork() as inner:
            return inner.run(double, y)

    with states.fork() as outer:
        outer.run(double, x)
        with states.fork() as fork:
            fork.run(nested, x)
        pool.trim()
        assert driver.alive()["streams"] == 1  # the state that `outer` has


def test_g11_no_event_is_lost_where_a_state_of_a_fork_without_order_is_leased_next(pool):
    driver, states = pool.driver, ParallelStates(3, pool=pool)
    x = filled(driver)

    def nested():
        y = filled(driver)
        with states.fork() as inner:
            return inner.run(double, inner.run(double, y)), inner.run(double, y)

    with states.fork() as outer:
        y = outer.run(double, x)
        with states.fork(ordered=False) as fork:
            made = fork.run(nested)
        for z in made:
            outer.run(double, z)
            outer.run(double, y)
    sides = pool.internals.device(0).sides
    assert driver.alive()["events"] == 2 * sides.made + len(pool.internals.device(0).edges.free)


class Oops(RuntimeError):
    pass


def test_g8_a_fork_without_a_state_whose_end_fails_closes_its_books_later(pool):
    driver = pool.driver
    sides = pool.internals.device(0).sides
    hoard = [sides.lease() for _ in range(MOST_SIDE_SLOTS)]
    x = filled(driver)
    with pytest.raises(Oops), ParallelStates(2, pool=pool).fork() as fork:  # noqa: PT012
        fork.run(double, x)
        driver.fail_at(1, None, Oops())
    del fork
    deferred.deferred.run(100)
    assert not context.active
    for slot in hoard:
        sides.release(slot, captured=False)


@pytest.mark.parametrize("k", range(1, 6))
def test_a_fork_without_a_state_that_nobody_leaves_closes_its_books_though_a_call_fails_then(pool, k):
    driver = pool.driver
    sides = pool.internals.device(0).sides
    hoard = [sides.lease() for _ in range(MOST_SIDE_SLOTS)]
    fork = ParallelStates(2, pool=pool).fork().__enter__()
    fork.run(double, filled(driver))
    del fork
    driver.fail_at(k)
    for _ in range(2):
        deferred.deferred.run(100)
    driver.fail_at(0)
    assert not context.active
    for slot in hoard:
        sides.release(slot, captured=False)


@pytest.mark.parametrize("free", [MOST_SIDE_SLOTS, 1, 0])
def test_g17_a_fork_over_another_stream_waits_for_branches_of_the_outer_one_wherever_those_ran(pool, free):
    driver, states = pool.driver, ParallelStates(1, pool=pool)
    sides = pool.internals.device(0).sides
    hoard = [sides.lease() for _ in range(MOST_SIDE_SLOTS - free)]
    with driver.create_stream(), states.fork() as outer:
        y = outer.run(double, filled(driver))
        with driver.create_stream(), states.fork() as inner:
            z = inner.run(double, y)
        assert (outer.wait(z).get() == 4).all()
    for slot in hoard:
        sides.release(slot, captured=False)
