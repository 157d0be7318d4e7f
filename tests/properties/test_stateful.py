"""Random programs that keep state are recorded rightly or refused, and refused ones go on as they were (guarantee 19)."""

import os

import pytest
from harness import stateful

from handlepool.recording import state

FIRST = int(os.environ.get("FIRST", "0"))
COUNT = int(os.environ.get("COUNT", "120"))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_g19_random_stateful_programs_give_the_plain_functions_values_or_are_refused(lanes):
    verdicts = [stateful.check(seed, lanes) for seed in range(FIRST, FIRST + COUNT)]
    assert verdicts.count("accepted") > COUNT // 4
    assert verdicts.count("refused") > COUNT // 4


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 4])
def test_g19_recorded_functions_of_random_stateful_programs_give_the_plain_functions_values(lanes):
    verdicts = [stateful.check_recorded(seed, lanes) for seed in range(FIRST, FIRST + COUNT)]
    assert verdicts.count("accepted") > COUNT // 4
    assert verdicts.count("refused") > COUNT // 4


@pytest.mark.parametrize("statement", [*stateful.PURE, *stateful.IN_PLACE, *stateful.KEPT])
def test_g19_a_recorded_function_with_each_statement_gives_the_plain_functions_values(monkeypatch, statement):
    monkeypatch.setattr(stateful, "Program", _only(statement))
    for lanes in (None, 4):
        stateful.check_recorded(1, lanes)


@pytest.mark.parametrize("statement", stateful.KEPT)
def test_g19_each_kind_of_state_is_refused_or_right(monkeypatch, statement):
    monkeypatch.setattr(stateful, "Program", _only(statement))
    for lanes in (None, 4):
        stateful.check(1, lanes)


@pytest.mark.parametrize("statement", [*stateful.PURE, *stateful.IN_PLACE])
def test_g19_each_kind_without_state_or_with_state_in_one_array_is_accepted(monkeypatch, statement):
    monkeypatch.setattr(stateful, "Program", _only(statement))
    for lanes in (None, 4):
        assert stateful.check(1, lanes) == "accepted"


@pytest.mark.parametrize("step", ["check", "restore"])
def test_g19_control_without_the_comparison_or_putting_back_programs_go_wrong(monkeypatch, step):
    monkeypatch.setattr(state.State, step, lambda *_: None)
    wrong = 0
    for seed in range(60):
        try:
            stateful.check(seed, 4)
        except AssertionError:
            wrong += 1
        if wrong > 5:
            return
    raise AssertionError(f"{wrong} of 60 programs went wrong")


def _only(statement):
    class Program(stateful.Program):
        def __init__(self, seed):
            self.statements = [statement]
            self.kept = statement in stateful.KEPT

    return Program
