"""The pytest plugin's fixtures on a machine with a GPU: the GPU pool, and the guard that finds who touches one."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUARDED = """
import cupy

import handlepool


def test_asks_the_pool(handlepool_no_gpu):
    handlepool.HandlePool(driver="cuda").get_handle()


def test_default_pool_is_the_gpus(handlepool_gpu_pool, handlepool_leak_check):
    with cupy.cuda.Stream(non_blocking=True):
        assert handlepool.get_handle() is handlepool_gpu_pool.get_handle()
    assert handlepool.default_pool().driver.name == "cuda"
"""


def outcome(folder, *paths):
    """What pytest says of tests that run with the plugin, and no configuration of ours."""
    path = os.pathsep.join([str(ROOT), *paths, os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_handlepool", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    return done.stdout + done.stderr


def test_the_examples_tests_pass_on_a_gpu_as_well(tmp_path):
    example = ROOT / "docs" / "examples" / "sharpness"
    for test in (example / "tests").glob("test_*.py"):
        (tmp_path / test.name).write_text(test.read_text())
    said = outcome(tmp_path, str(example))
    assert re.search(r"\n\d+ passed in", said), said  # none skipped: the GPU's, too


def test_the_guard_finds_a_use_and_the_gpu_pool_stands_in_for_the_default_one(tmp_path):
    (tmp_path / "test_guarded.py").write_text(GUARDED)
    said = outcome(tmp_path)
    assert re.search(r"1 failed, 1 passed", said), said
    assert "some code asked handlepool for a GPU" in said, said
