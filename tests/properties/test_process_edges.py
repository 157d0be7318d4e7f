"""Guarantees 10 and 13 at the edges of a process: exits with everything alive, os.fork, multiprocessing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.exits import ON_THE_HOST, PROGRAMS

SCRIPT = Path(__file__).parents[1] / "harness" / "exits.py"


def run(name):
    environment = os.environ | {"HANDLEPOOL_DRIVER": "host"}
    return subprocess.run(
        [sys.executable, SCRIPT, name], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", PROGRAMS | ON_THE_HOST)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_g10_g13_a_process_ends_with_its_own_return_code_and_nothing_on_standard_error(name):
    done = run(name)
    assert (done.returncode, done.stderr) == ((PROGRAMS | ON_THE_HOST)[name][1], "")
