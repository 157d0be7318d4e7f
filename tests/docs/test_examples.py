"""The example of a library passes its tests, and these find a mistake that is planted in it, each in a run of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = "pytester"

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "sharpness"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not EXAMPLE.exists(), reason="docs/ is not here")]

MISTAKES = {
    "a missing wait": (
        "        caller.wait_event(self._stream.record())\n",
        "",
        "test_centred",
        "not ordered: 'add' on",
    ),
    "a shared workspace": (
        "    scratch = handlepool.get_workspace(x.nbytes)  # this branch's own\n",
        "    scratch = STATES.scratch\n",
        "test_details",
        "not ordered: 'subtract' on",
    ),
    "an in-place write to an array that a sibling branch reads": (
        "    return x * 4\n",
        "    x *= 4\n    return x\n",
        "test_details",
        "not ordered: 'multiply' on",
    ),
}
SHARED = (
    "    with STATES.fork() as fork:\n",
    "    STATES.scratch = handlepool.get_workspace(x.nbytes)\n    with STATES.fork() as fork:\n",
)

UNORDERED = ("STATES.fork()", "STATES.fork(ordered=False)")  # or data orders the branches
MORE = {"a shared workspace": SHARED, "an in-place write to an array that a sibling branch reads": UNORDERED}


@pytest.fixture
def run_tests(tmp_path):
    """Runs the tests of a copy of the example, after changes of its source: ``run_tests((right, wrong), ...)``."""
    shutil.copytree(EXAMPLE, tmp_path / "sharpness", ignore=shutil.ignore_patterns("__pycache__", ".*"))

    def run(*changes):
        source = tmp_path / "sharpness" / "sharpness.py"
        text = source.read_text()
        for right, wrong in changes:
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        source.write_text(text)
        path = [str(source.parent), str(DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_handlepool", "-p", "no:cacheprovider", "-W", "error"]
        return subprocess.run(
            command,
            cwd=source.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            text=True,
            capture_output=True,
            timeout=120,
        )

    return run


def test_the_example_passes_its_tests(run_tests):
    done = run_tests()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_at_every_seed_and_named(run_tests, mistake):
    right, wrong, test, words = MISTAKES[mistake]
    done = run_tests((right, wrong), *([MORE[mistake]] if mistake in MORE else []))
    assert done.returncode == 1, done.stdout
    assert words in done.stdout
    assert "sharpness.py:" in done.stdout
    # The first call of a process is measured: its branches, which share their arguments, run one after the other.
    for seed in range(int(mistake == "a shared workspace"), 5):
        assert f"FAILED tests/test_sharpness.py::{test}[seed{seed}]" in done.stdout, done.stdout


def test_fifteen_lines_of_the_page_are_a_tested_library(pytester):
    first, second = re.findall(r"```python\n(.*?)```", (DOCS / "testing-your-library.md").read_text(), re.DOTALL)
    assert first.count("\n") <= 15
    pytester.makepyfile(test_sharpen=first)
    pytester.runpytest_subprocess("-p", "pytest_handlepool", "-W", "error").assert_outcomes(passed=5)
    pytester.makepyfile(test_sharpen=first + second)
    done = pytester.runpytest_subprocess("-p", "pytest_handlepool", "-W", "error", "-k", "not gpu")
    done.assert_outcomes(passed=5, deselected=1)
