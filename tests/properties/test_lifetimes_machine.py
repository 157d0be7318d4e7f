"""A state machine over all that may happen to a pool, with the accounts checked after every step. Guarantees 1 to 13, and 17.

Threads start and end, streams of two devices come, go and recycle their pointers, captures of every mode begin, end and are
replayed, handles are taken and destroyed by their callers, workspaces grow, forks run, raise, stay open and are forgotten, memory
runs short, a driver call fails, the pool is trimmed and closed, the process forks. Branches read and overwrite what others made,
and NumPy computes the same. There are 32, 2, 1 or no side slots. The driver checks the order of every access.

``HANDLEPOOL_EXAMPLES`` is the number of examples, and ``HANDLEPOOL_SEED`` decides them.
"""

import contextlib
import os

import pytest
from harness.seeds import SEED
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from lifetime_forks import Value
from lifetimes import Lifetimes

from handlepool import ContractError

EXAMPLES = int(os.environ.get("HANDLEPOOL_EXAMPLES", "800"))
PARTS = 8  # as units of work for test processes


# Branches write what they were given, and in turns return new arrays: a warning says so once for each function.
@pytest.mark.filterwarnings("ignore:.* returned new arrays")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_whatever_happens_the_pool_can_account_for_all_it_has(part):
    print(f"HANDLEPOOL_SEED={SEED}")
    machine = seed(SEED + part)(type("Lifetimes", (Lifetimes,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, EXAMPLES // PARTS),
            stateful_step_count=40,
            deadline=None,
            database=None,  # parts stand for themselves
            derandomize=False,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        ),
    )


def test_the_machine_tells_captures_apart_that_python_keeps_at_one_address():
    for _ in range(20):  # with `id` as their name about every third failed
        machine = Lifetimes()
        machine.begin(schedule=0, idle=32, limit=None)
        for device in (0, 1):
            machine.a_stream_comes(device)
            machine.a_capture_begins(0, device, "relaxed")
            machine.a_handle_is_taken(0, device, "pointer")
            machine.a_capture_ends(0)
            machine.all_is_accounted_for()
        assert machine.most_keys == [1, 1]
        machine.teardown()


def test_the_machine_keeps_what_a_graph_writes_to_while_a_replay_is_pending():
    machine = Lifetimes()
    machine.begin(schedule=0, idle=32, limit=None)
    for _ in range(2):
        machine.a_stream_comes(0)
    machine.a_capture_begins(0, 0, "relaxed")
    machine.a_fork_runs(0, 0, [(0, True, [])])
    machine.a_capture_ends(0)
    machine.a_graph_is_replayed(0, 1, 0)
    machine.all_changes(0, "trim captured")
    machine.a_fork_runs(0, 0, [(0, True, [])])
    machine.all_is_accounted_for()
    machine.teardown()


CHAINS = {
    "a branch after two": [("graph", 7, 0, 0), ("graph", 7, 0, 0), ("two", 0, 2, 0)],
    "in place, after a read": [("graph", 7, 0, 0), ("graph", 0, 0, 0), ("graph", 1, 0, 0), ("operation", 2, 1, 0)],
    "a wait of the body": [("graph", 7, 0, 0), ("wait", 0, 0, 0)],
}


@pytest.mark.parametrize("steps", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("open_", [False, True], ids=["a fork that runs", "a fork that is open"])
@pytest.mark.parametrize("left_out", [False, True], ids=["with all waits", "control, without those by data"])
def test_g17_the_machine_finds_a_wait_that_is_missing(steps, open_, left_out):
    machine = Lifetimes()
    machine.begin(schedule=0, idle=32, limit=None, sides=32)
    machine.states = machine.states[1:] * 4  # of two states and more
    if left_out:
        wait = machine.driver.wait_event

        def only_of_slots(pointer, event):
            slots = machine.pool.internals.device(0).slots
            if any(event in (slot.start_event, slot.end_event) for slot in slots):
                wait(pointer, event)

        machine.driver.wait_event = only_of_slots
    with pytest.raises(ContractError, match="not ordered") if left_out else contextlib.nullcontext():
        if open_:
            machine.a_fork_is_entered(0, 0, 0, True)
            for step in steps:
                machine.a_fork_goes_on(0, [step], [])
            machine.a_fork_is_left(0)
        else:
            machine.a_fork_runs(0, 0, [(0, True, steps)])
    machine.driver.order.found.clear()
    machine.teardown()


def test_control_the_machine_finds_values_that_are_not_numpys(monkeypatch):
    monkeypatch.setattr(Value, "set", lambda value, expected: None)
    machine = Lifetimes()
    machine.begin(schedule=0, idle=32, limit=None, sides=32)
    machine.a_fork_runs(0, 0, [(0, True, [("operation", 0, 0, 0)])])
    with pytest.raises(AssertionError):
        machine.teardown()
    assert machine.wrong
