"""Random calls on the host driver, and that the harness reports what is wrong."""

import os
from itertools import count

import pytest
from harness.process import as_default
from harness.random_cases import FUNCTIONS, WAYS, make_case
from random_calls import Caller, judge, seeds_of, survey

from handlepool import ArgumentError, HandlePool, ops

CALLS = 150
OK = ("right", "refused")


@pytest.fixture
def caller(make_driver, scheduler):
    """On a pool that is the default one."""
    with HandlePool(driver=make_driver(scheduler=scheduler)) as pool, as_default(pool):
        caller = Caller(pool)
        yield caller
        caller.close()


def test_g18_random_calls_are_right_or_refused(caller):
    verdicts = {seed: judge(caller, seed) for seed in seeds_of(0, CALLS)}
    faults = [f"{verdict}: {make_case(seed)}\n  {why}" for seed, (verdict, why) in verdicts.items() if verdict not in OK]
    assert not faults, "\n".join(faults)
    assert sum(verdict == "right" for verdict, _ in verdicts.values()) > CALLS * 0.6


def test_cases_cover_what_can_be_called():
    cases = [make_case(seed) for seed in seeds_of(1, 2000)]
    seen = {(case.operation.function, case.way) for case in cases}
    assert seen == {(function, way) for function in FUNCTIONS for way in WAYS}
    assert {len(case.operation.inputs[0]) for case in cases} == {1, 2, 3, 4, 5, 6}
    places = [place for case in cases for place in case.rounds[-1].inputs]
    assert any(0 in place.strides for place in places)
    assert any(min(place.strides) < 0 for place in places)
    over = [
        (place, out)
        for case in cases
        for out in case.rounds[-1].outs
        for place in case.rounds[-1].inputs
        if out.buffer == place.buffer
    ]
    assert any(out == place for place, out in over)
    assert any(out.shape == place.shape and sorted(out.strides) == sorted(place.strides) != out.strides for place, out in over)
    assert any(out.first != place.first for place, out in over)
    assert sum(case.plain for case in cases) > len(cases) / 4


# That it can fail


def wrong_values(x, **options):
    return ops.tanh(x, **options)


def overwrites_its_input(x, **options):
    return ops.relu(x, out=x)


def refuses_when_it_has_written(x, **options):
    ops.relu(x, out=x)
    raise ArgumentError("too late")


def another_shape(x, **options):
    return ops.relu(x)[:1]


def an_untyped_error(x, **options):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("plant", "verdict", "why"),
    [
        (ops.relu, "right", ""),
        (wrong_values, "wrong", "is off by"),
        (overwrites_its_input, "wrong", "was changed outside of the outputs"),
        (refuses_when_it_has_written, "wrong", "too late"),
        (another_shape, "wrong", "of shape"),
        (an_untyped_error, "untyped", "KeyError"),
    ],
)
def test_a_planted_fault_is_reported(caller, monkeypatch, plant, verdict, why):
    monkeypatch.setitem(FUNCTIONS, "relu", plant)
    seed = find(lambda case: case.operation.function == "relu" and case.plain and case.way == "call")
    found, words = judge(caller, seed)
    assert found == verdict
    assert why in words


def find(wanted):
    """The first seed whose case is wanted."""
    return next(seed for seed in count() if wanted(make_case(seed)))


def ends_at_three(caller, seed):
    if seed == 3:
        os._exit(1)
    if seed == 5:
        return "dies", "it said so"
    return judge(caller, seed)


@pytest.mark.slow
def test_a_process_that_ends_is_one_death_and_the_rest_goes_on():
    summary = survey(range(8), driver="host", workers=1, judge=ends_at_three)
    assert summary.cases == 8
    assert ["seed 3" in death or "seed 5" in death for death in summary.dies] == [True, True]
    assert summary.faults[-2:] == [f"dies: {death}" for death in summary.dies]
