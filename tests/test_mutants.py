"""The script that makes mutants of the package."""

import ast

import pytest
from mutants import MODULES, PACKAGE, ROOT, mutants_of

SOURCE = """
def function(a, b=1):
    with lock:
        act(a)
    if a is b and not b:
        return
    return f"{a + 1}"
"""

MADE = [
    "    with __import__('contextlib').nullcontext():",
    "        pass",
    "    if True:",
    "    if False:",
    "    if ((not b)):",
    "    if ((a is b)):",
    "    if ((a) == (b)) and not b:",
    "        pass",
]


def sources_of(source):
    return [source[:start] + text.encode() + source[end:] for _, _, start, end, text in mutants_of(source)]


def test_a_mutant_differs_in_one_line_and_text_has_none():
    before = SOURCE.splitlines()
    found = []
    for source in sources_of(SOURCE.encode()):
        (line,) = (new for old, new in zip(before, source.decode().splitlines(), strict=True) if old != new)
        found.append(line)
    assert sorted(found) == sorted(MADE)


@pytest.mark.parametrize("module", MODULES)
def test_a_mutant_is_another_program(module):
    source = (ROOT / PACKAGE / f"{module}.py").read_bytes()
    program = ast.dump(ast.parse(source))
    mutants = sources_of(source)
    assert len(mutants) > 20
    assert all(ast.dump(ast.parse(mutant)) != program for mutant in mutants[::20])
