"""The examples pass their tests, and the tests of a library find a planted mistake, each in a run of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = "pytester"

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
WIDE = ("cameras", "tiles", "scene")
"""Programs of several networks, each of at most 80 lines."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not EXAMPLES.exists(), reason="docs/ is not here")]

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


def outcome_of(folder, *options):
    """Runs the tests of an example as its writer does: from its folder, with nothing of ours configured."""
    path = [str(folder), str(DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_handlepool", "-p", "no:cacheprovider", "-W", "error", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "MPLBACKEND": "agg"},
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.fixture
def copied(tmp_path):
    """Copies an example: ``copied(name)``."""

    def copy(name):
        return shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))

    return copy


@pytest.fixture
def run_tests(copied):
    """Runs the tests of a copy of the library, after changes of its source: ``run_tests((right, wrong), ...)``."""

    def run(*changes):
        source = copied("sharpness") / "sharpness.py"
        text = source.read_text()
        for right, wrong in changes:
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        source.write_text(text)
        return outcome_of(source.parent)

    return run


def test_the_example_passes_its_tests(run_tests):
    done = run_tests()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", WIDE)
def test_an_example_of_several_networks_passes_its_tests(name, copied):
    folder = copied(name)
    assert len((folder / f"{name}.py").read_text().splitlines()) <= 80
    done = outcome_of(folder, "--handlepool-seeds=2")
    assert done.returncode == 0, done.stdout


def test_networks_that_wait_for_each_other_are_found(copied):
    folder = copied("scene")
    source = folder / "scene.py"
    text, right = (
        source.read_text(),
        "    return handlepool.recorded(lambda x: [net(x, *filters) for net, filters in weights.items()], lanes=8)\n",
    )
    assert text.count(right) == 1
    source.write_text(
        text.replace(
            right,
            "    def chained(x):\n"
            "        found = [detector(x, *weights[detector]), segmenter(x, *weights[segmenter])]\n"
            "        return [*found, depth(handlepool.add(x, found[1][:, :3]), *weights[depth])]\n\n"
            "    return handlepool.recorded(chained, lanes=8)\n",
        )
    )
    done = outcome_of(folder, "--handlepool-seeds=1", "-k", "no_network_waits")
    assert done.returncode == 1
    assert "FAILED tests/test_scene.py::test_no_network_waits" in done.stdout


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
