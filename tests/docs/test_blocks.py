"""Every code block of README and docs runs: the Python blocks of a page, one after the other, in a process of their own.

A block is complete, or continues the blocks above it. A comment above a block marks its needs, as in
``<!-- needs torch and a GPU -->``.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from docs.blocks import PAGES, ROOT, blocks_of

from handlepool import __main__ as command

if not (ROOT / "docs").exists():
    pytest.skip("docs/ is not here", allow_module_level=True)
# Its blocks are cases for cuDNN, of which each is a program. tests/docs/test_wrong_results.py runs them.
CASES = ROOT / "docs" / "history" / "wrong-results.md"
LANGUAGES = ("python", "sh", "text", "diff", "toml", "json")
NEEDS = ("Dask", "Ray", "torch", "CuPy", "a GPU", "Prometheus", "nvtx")
MODULES = {"Dask": "zarr", "Ray": "ray", "torch": "torch", "CuPy": "cupy", "Prometheus": "prometheus_client", "nvtx": "nvtx"}


def missing(need):
    """Say why a need is not met, or None."""
    if need == "a GPU":
        from handlepool import drivers

        return drivers.available("cuda")
    return None if find_spec(MODULES[need]) else f"{need} is not installed"


def python_of(page):
    return [block for block in blocks_of(page) if block.language == "python"]


RUNS = [
    pytest.param(page, needs, id="-".join([str(page.relative_to(ROOT)), *needs]))
    for page in PAGES
    if page != CASES
    for needs in sorted({block.needs for block in python_of(page)})
]


@pytest.mark.parametrize(("page", "needs"), RUNS)
def test_the_blocks_of_a_page_run_one_after_the_other(page, needs, tmp_path):
    if reasons := [why for need in needs if (why := missing(need))]:
        pytest.skip(f"the blocks need {' and '.join(needs)}: {'; '.join(reasons)}")
    code = ""
    for block in python_of(page):
        if set(block.needs) <= set(needs):
            # Errors then name the lines of the page.
            code += "\n" * (block.line - 1 - code.count("\n")) + block.code
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        # Other libraries warn of their own matters.
        [sys.executable, *([] if needs else ["-W", "error"]), str(script)],
        env={
            **os.environ,
            "HANDLEPOOL_DRIVER": "cuda" if "a GPU" in needs else "host",
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_control_a_block_that_continues_nothing_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- needs torch -->\n```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", encoding="utf-8")
    first, second = blocks_of(page)
    assert (first.needs, second.needs) == (("torch",), ())
    assert (first.line, second.line) == (3, 7)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_says_its_language_and_known_needs(page):
    blocks = blocks_of(page)
    text = page.read_text(encoding="utf-8")
    # The site alone has directives, as of the reference. They are no code.
    fences = [fence for fence in re.findall(r"^```(.*)$", text, re.MULTILINE) if not fence.startswith("{")]
    assert len([block for block in blocks if not block.language.startswith("{")]) * 2 <= len(fences)
    for block in blocks:
        if not block.language.startswith("{"):
            assert block.language in LANGUAGES, block.line
            assert set(block.needs) <= set(NEEDS), block.line


SHELL = [
    pytest.param(block.code, id=f"{page.relative_to(ROOT)}-{block.line}")
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "sh"
]


@pytest.mark.parametrize("code", SHELL)
def test_a_shell_block_is_right_and_its_handlepool_commands_exist(code):
    done = subprocess.run(["bash", "-n", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for arguments in re.findall(r"(?:^|&& |/)(?:python -m )?handlepool ([^#|&>\n]*)", code, re.MULTILINE):
        # An argument that does not exist ends the process.
        command.parser().parse_args(arguments.split())
