"""The journeys of calls through the package are as short as they were made: counted by `benchmarks/journeys.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "journeys.py"
BOUNDS = {
    "get_handle, hit": {"modules": 1, "calls": 1},
    "program.replay()": {"modules": 1, "calls": 1},
    "record of five calls, lanes=8": {"modules": 28, "calls": 510},
    "fork, run(conv2d), join": {"modules": 11, "calls": 50, "module switches": 20},
    "fork, run(a function), join": {"modules": 12, "calls": 80, "module switches": 30},
}
"""The most that a journey may take."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """The counts of all journeys, in a process of their own: no other test has left anything to settle there."""
    path = tmp_path_factory.mktemp("journeys") / "journeys.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(path)],
        env={**os.environ, "HANDLEPOOL_DRIVER": "host"},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_journey_stays_within_its_bounds(name, counts):
    over = {what: counts[name][what] for what, most in BOUNDS[name].items() if counts[name][what] > most}
    assert not over, f"{name}: {over}, and the bounds are {BOUNDS[name]}; see {SCRIPT.name} --modules"


def test_a_journey_counts_each_call(counts):
    assert counts["get_handle, miss"]["calls"] > counts["get_handle, hit"]["calls"]
    assert counts["record of five calls, lanes=8"]["calls"] > counts["record of one call, lanes=8"]["calls"]
