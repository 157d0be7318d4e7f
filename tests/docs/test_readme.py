"""The README is true: its Python runs, its commands name what exists, its guarantees have tests."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^(<!-- needs torch and a GPU -->\n)?```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_python_block_was_found():
    assert len(SNIPPETS) == README.count("```python") >= 2


@pytest.mark.parametrize(("marker", "code"), SNIPPETS, ids=[f"snippet{i}" for i in range(len(SNIPPETS))])
def test_every_python_snippet_runs_on_the_host_driver(marker, code, tmp_path):
    driver = "host"
    if marker:
        torch = pytest.importorskip("torch", reason="this snippet passes torch's stream, and torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("this snippet passes torch's stream, and torch sees no GPU")
        driver = "cuda"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "HANDLEPOOL_DRIVER": driver, "PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_both_commands_are_one_line_that_starts_with_an_environment():
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/python -m pip install ")


def test_the_commands_install_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for command in COMMANDS:
        requirement = next(word for word in shlex.split(command) if word.startswith(".["))
        assert set(requirement[2:-1].split(",")) <= set(extras)


def test_the_continuous_integration_finds_the_test_command():
    lines = [line for line in README.splitlines() if re.match(r"python3 -m venv .* -m pytest ", line)]
    assert len(lines) == 1


@pytest.mark.parametrize("number", re.findall(r"`test_g(\d+)_…`", README))
def test_every_guarantee_that_is_claimed_has_a_test(number):
    pattern = re.compile(rf"^\s*(?:async )?def test_g{number}_", re.MULTILINE)
    assert any(pattern.search(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_every_relative_link_leads_somewhere(target):
    assert (ROOT / target).exists()
