"""What compute-sanitizer says of orders, so that its silence over the tests of order and of memory means something."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def errors():
    """How many errors compute-sanitizer reports of a scene in `sanitized.py`: ``errors(name)``."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")

    def count(name):
        options = "--tool memcheck --track-stream-ordered-races all --show-backtrace no --report-api-errors no"
        done = subprocess.run(
            [sanitizer, *options.split(), sys.executable, str(HERE / "sanitized.py"), name],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
        assert summary, done.stdout
        return int(summary[1])

    return count


def test_g6_no_error_is_reported_of_a_branch_that_waits(errors):
    assert errors("ordered") == 0


@pytest.mark.parametrize("scene", ["without_the_wait", "after_the_free"])
def test_g6_control_what_is_not_ordered_after_its_allocation_or_before_its_free_is_reported(errors, scene):
    assert errors(scene) > 0
