"""Guarantee 17: what a region's branches and its body read and write decides their order. Random programs, each with its control.

More of them by hand: ``python tests/properties/random_regions.py --programs 5000 --seed 7``.
"""

import os
from collections import Counter

import numpy as np
import pytest
from harness.graphs import double
from harness.region_cases import MOST_DEPTH, MOST_WIDTH
from harness.region_functions import FUNCTIONS, RECORDED, shifted
from harness.region_maker import make_case
from harness.region_worlds import World, expected_of
from random_regions import seeds_of, survey

from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver

PROGRAMS = 40
"""Of one part: about three seconds' worth."""
COUNT = int(os.environ.get("PARTS", "6"))
PARTS = [range(10), *(pytest.param(seeds_of(part, PROGRAMS), marks=pytest.mark.slow) for part in range(1, COUNT + 1))]


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{len(seeds)} programs from {seeds[0]}")
def test_g17_random_programs_give_what_one_stream_gives_and_each_control_goes_wrong(seeds):
    summary = survey(seeds)
    assert not summary.faults, "\n\n".join(summary.faults)
    assert summary.programs == len(seeds)
    assert summary.controls["by data"] > summary.programs / 2
    assert summary.controls["none is needed"] < summary.programs / 10 + 2


def test_g17_the_programs_have_all_that_a_region_may_meet():
    cases = [make_case(seed) for seed in range(400)]
    seen = sum((case.features for case in cases), Counter())
    assert not {*FUNCTIONS, *RECORDED} - set(seen)
    kinds = {function.kind for function in FUNCTIONS.values()}
    ways = {f"{kind}, {way}" for kind in kinds for way in ("run", "body", "map", "state", "submit")} | {"plain, wait"}
    views = {"whole", "slice", "odd strides", "negative strides", "zero strides", "one element", "no element"}
    nested = {"fork", "fork in a fork", "fork in a branch", "branch, run", "branch, state", "silent branch", "another stream"}
    programs = {f"{use}, {way}" for use in ("replay", "update") for way in ("run", "body", "submit")}
    ends = {"drop", "look", "raises", "a branch that raises", "a body that raises", "made by the body", "a first call"}
    rest = {"map with out", "map alone", "by an outer fork", "the legacy default stream", "small books"}
    assert not (ways | views | nested | programs | ends | rest) - set(seen)
    assert max(case.depth for case in cases) >= MOST_DEPTH
    assert max(case.width for case in cases) >= MOST_WIDTH


# The controls can be trusted


def needed_somewhere(seeds):
    """Cases with their waits of which one is needed for the order of the data, on a world."""
    world = World()
    for seed in seeds:
        case = make_case(seed)
        world.run(case)  # makes its functions known, whose first calls wait for more
        outcome = world.run(case)
        waits = [wait for wait in outcome.trace.needed(case) if wait.by_data]
        if waits:
            yield world, case, waits
    world.close()


@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote")
@pytest.mark.unmeasured
def test_g17_every_wait_that_is_needed_is_one_whose_loss_is_found():
    found = 0
    for world, case, waits in needed_somewhere(range(8)):
        for wait in waits:
            outcome = world.run(case, wait)
            assert outcome.trace.has_left_out
            assert isinstance(outcome.error, ContractError)
            found += 1
    assert found > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote")
def test_g17_control_the_values_alone_tell_too():
    """Without the checker a wait that is missing gives wrong values under some schedule, mostly."""
    unchecked = World(check_order=False)
    wrong = tried = 0
    for _, case, waits in needed_somewhere(range(30)):
        expected = expected_of(case)
        tried += 1
        wrong += any(unchecked.run(case, waits[0], schedule=schedule).differs(expected) for schedule in range(4))
    unchecked.close()
    assert wrong > tried / 3, f"{wrong} of {tried}"


@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote")
def test_g17_control_forks_that_do_not_order_by_data_go_wrong():
    world = World()
    for seed in range(20):
        case = make_case(seed)
        outcome = world.run(case)
        if any(wait.by_data for wait in outcome.trace.needed(case)):
            assert world.run(case, ordered=False).error is not None, f"seed {seed}"
    world.close()


def test_g17_what_comes_of_a_missing_wait_is_in_the_trace_as_well():
    """The trace knows by itself what is not ordered: it asks the case, and not the checker."""
    for world, case, waits in needed_somewhere(range(4)):
        outcome = world.run(case)
        assert outcome.trace.unordered(case) == []
        assert outcome.trace.unordered(case, waits[0]) != []


# The most natural thing to write


def make(x):
    return shifted(x * 2, x)


def chain(driver, **options):
    """What anybody writes first."""
    with HandlePool(driver=driver) as pool, driver.create_stream():
        x = driver.asarray(np.arange(32, dtype=np.float32).reshape(1, 4, 2, 4))
        with ParallelStates(4, pool=pool).fork(**options) as fork:
            b = fork.run(double, fork.run(make, x))
        return driver.asnumpy(b)


EXPECTED = 2 * make(np.arange(32, dtype=np.float32).reshape(1, 4, 2, 4))


@pytest.mark.parametrize("check_order", [True, False])
def test_g17_a_branch_may_be_given_what_another_makes(check_order):
    for seed in range(50):
        found = chain(HostDriver(scheduler="adversarial", seed=seed, check_order=check_order))
        assert np.array_equal(found, EXPECTED), seed


def test_g17_control_a_fork_that_does_not_order_by_data_starts_it_too_early():
    found = [chain(HostDriver(scheduler="adversarial", seed=seed), ordered=False) for seed in range(20)]
    assert sum(np.array_equal(values, EXPECTED) for values in found) < 10
    with pytest.raises(ContractError, match="not ordered"):
        chain(HostDriver(scheduler="adversarial", check_order=True), ordered=False)
