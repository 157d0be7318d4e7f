"""Guarantee 17 for sequential code that is recorded with lanes: random programs, each with a control.

More of them by hand, and others: ``FIRST=600000 PROGRAMS=5000 python -m pytest -n 2 tests/properties/test_lanes_order.py``.
"""

import os
from collections import Counter

import pytest
from harness.region_lanes import Scheduled, control, run, wanted
from harness.region_maker import make_case
from harness.region_worlds import World

from handlepool import ArgumentError

PROGRAMS = int(os.environ.get("PROGRAMS", "80"))
FIRST = int(os.environ.get("FIRST", "0"))
LANES = (1, 2, 3, 8)
PARTS = 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.parametrize("part", range(PARTS))
def test_g17_random_programs_give_what_one_stream_gives_and_most_lost_needs_go_wrong(part):
    world = World()
    counts = Counter()
    for seed in range(FIRST + part, FIRST + PROGRAMS, PARTS):
        case = make_case(seed)
        expected = wanted(case)
        for lanes in LANES:
            outcome = run(world, case, lanes)
            if "nothing to replay" in str(outcome.error):
                break
            assert not (why := outcome.differs(expected)), f"{why}\n{lanes} lanes, {case}"
            assert not world.left_behind()
            counts[lanes] += outcome.how.got
            if lanes > 1 and lanes == LANES[1 + seed // PARTS % 3] and outcome.edges.found:
                counts["tried"] += 1
                counts["caught"] += control(world, case, lanes, outcome.edges, expected) is not None
                assert not world.left_behind()
    world.close()
    print(dict(counts))
    assert counts[8] > counts[2] > counts[1]
    assert counts["caught"] > 0.7 * counts["tried"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.parametrize("part", range(PARTS))
def test_g17_schedules_by_random_times_give_what_one_stream_gives_and_most_lost_edges_go_wrong(part):
    world = World()
    counts = Counter()
    for seed in range(FIRST + part, FIRST + PROGRAMS, PARTS):
        case = make_case(seed)
        expected = wanted(case)
        lanes = 2 + seed // PARTS % 3
        outcome = run(world, case, lanes, kind=Scheduled)
        if "nothing to replay" in str(outcome.error):
            continue
        assert not (why := outcome.differs(expected)), f"{why}\n{lanes} lanes, {case}"
        assert outcome.how.got <= lanes
        if outcome.how.recorded > lanes:
            counts["scheduled"] += 1
            counts["caught"] += control(world, case, lanes, outcome.edges, expected) is not None
        assert not world.left_behind()
    world.close()
    print(dict(counts))
    assert counts["caught"] > 0.9 * counts["scheduled"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.parametrize("restores", [True, False], ids=["", "control"])
def test_programs_that_were_tuned_give_what_one_stream_gives_and_not_all_do_where_nothing_is_restored(restores, without, limits):
    world, counts = World(), Counter()
    limits(MOST_ROUNDS=1)
    if not restores:
        without("restoring after a tuning")

    def tuned(program):
        try:
            program.tune((2, 3), seconds=1)
            counts["tuned"] += 1
        except ArgumentError as error:  # an object is changed
            counts["refused"] += "cannot be replayed for timing" in str(error)

    for seed in range(FIRST, FIRST + PROGRAMS // 2):
        case = make_case(seed)
        outcome = run(world, case, 4, before=tuned)
        if "nothing to replay" in str(outcome.error):
            continue
        why = outcome.differs(wanted(case))
        counts["wrong"] += bool(why)
        assert not (why and restores), f"{why}\n{case}"
        assert not world.left_behind()
    world.close()
    print(dict(counts))
    assert counts["tuned"] > PROGRAMS // 10
    assert bool(counts["wrong"]) is not restores
