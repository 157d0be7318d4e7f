"""A state machine over all that may happen to a pool, with the accounts checked after every step. Guarantees 1 to 13.

Threads start and end, streams of two devices come, go and recycle their pointers, captures of every mode begin, end and are
replayed, handles are taken and destroyed by their callers, workspaces grow, forks run, raise, stay open and are forgotten, memory
runs short, a driver call fails, the pool is trimmed and closed, the process forks. The driver checks the order of every access.

``HANDLEPOOL_EXAMPLES`` is the number of examples, ``HANDLEPOOL_SEED`` makes a run repeatable.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from lifetimes import Lifetimes

EXAMPLES = int(os.environ.get("HANDLEPOOL_EXAMPLES", "2000"))
SEED = int(os.environ.get("HANDLEPOOL_SEED") or random.randrange(1 << 32))
PARTS = 8  # as units of work for test processes


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
    machine.a_fork_runs(0, 0, [(0, 0, 0, [])])
    machine.a_capture_ends(0)
    machine.a_graph_is_replayed(0, 1, 0)
    machine.all_changes(0, "trim captured")
    machine.a_fork_runs(0, 0, [(0, 0, 0, [])])
    machine.all_is_accounted_for()
    machine.teardown()
