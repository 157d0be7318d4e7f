"""Guarantee 17 for sequential code that is recorded with lanes: random programs, each with a control.

More of them by hand: ``PROGRAMS=5000 python -m pytest tests/properties/test_lanes_order.py``.
"""

import os
from collections import Counter

import pytest
from harness.region_lanes import control, run, wanted
from harness.region_maker import make_case
from harness.region_worlds import World

PROGRAMS = int(os.environ.get("PROGRAMS", "96"))
LANES = (1, 2, 3, 8)


@pytest.mark.filterwarnings("ignore:a branch waits since")
@pytest.mark.parametrize("lanes", LANES)
def test_g17_random_programs_give_what_one_stream_gives_and_most_lost_needs_go_wrong(lanes):
    world = World()
    counts = Counter()
    for seed in range(lanes, PROGRAMS, len(LANES)):
        case = make_case(seed)
        expected = wanted(case)
        outcome = run(world, case, lanes)
        if "nothing to replay" in str(outcome.error):
            continue
        assert not (why := outcome.differs(expected)), f"{why}\n{case}"
        assert not world.left_behind()
        counts["programs"] += 1
        counts["lanes"] += outcome.how.got
        if lanes > 1:
            counts["controls"] += control(world, case, lanes, outcome.edges, expected) is not None
            assert not world.left_behind()
    world.close()
    assert counts["lanes"] > counts["programs"] or lanes == 1
    assert counts["controls"] > counts["programs"] / 2 or lanes == 1
