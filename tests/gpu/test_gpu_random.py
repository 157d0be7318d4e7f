"""Random calls on a GPU: what is accepted is right. The long run: ``python tests/random_calls.py --cases 10000 --seed 7``."""

import pytest
from random_calls import WORKERS, seeds_of, survey

CASES = 1400
CALLS = 2000


@pytest.mark.alone
def test_g18_random_calls_are_right_or_refused():
    summary = survey(seeds_of(0, CASES), driver="cuda", workers=WORKERS)
    print(summary.counts())
    assert not summary.faults, "\n".join(summary.faults)
    assert summary.calls >= CALLS
    assert summary.right > CASES * 0.6
