"""The prose of the package and of the maintainers' pages keeps to the limits of docs/contributing.md."""

import ast
import subprocess
import sys
from pathlib import Path

import prose
import pytest


@pytest.fixture(scope="module")
def found():
    if not all((prose.ROOT / page).exists() for page in prose.PAGES):
        pytest.skip("docs/ is not here")
    return prose.measure(prose.BASE)


@pytest.mark.parametrize("measure", prose.LIMITS)
def test_the_prose_keeps_the_limit(found, measure):
    figures, places = found
    if measure not in figures:
        pytest.skip(f"this clone has no commit {prose.BASE}")
    limit = prose.LIMITS[measure]
    listed = "\n".join(f"{piece.path}:{piece.line}: {piece.text}" for piece in places[measure][:10])
    assert figures[measure] >= limit.bound if limit.least else figures[measure] <= limit.bound, listed


@pytest.mark.parametrize(
    ("pattern", "text", "count"),
    [
        (prose.CLAUSE, "Return what the call reads.", 1),
        (prose.CLAUSE, "Whoever asks gets whatever is there.", 2),
        (prose.CLAUSE, "Return the arrays of the call.", 0),
        (prose.NOBODY, "Nobody waits for somebody.", 2),
        (prose.BARE, "Branches wait for those that write.", 1),
        (prose.BARE, "Those branches wait.", 0),
        (prose.ENDS, "It failed. The value is X. Pass another", 2),
        (prose.ENDS, "f(x.y) of 1.5 failed. Pass another", 1),
    ],
)
def test_a_pattern_counts(pattern, text, count):
    assert len(pattern.findall(text)) == count


@pytest.mark.parametrize(
    ("subject", "right"),
    [
        ("lanes: record the start event at lease time", True),
        ("drivers/host: name the arrays", True),
        ("merge: take the other rooms", True),
        ("Merge branch 'main' into work", False),
        ("Lanes record their start", False),
        ("lanes: record the start event.", False),
    ],
)
def test_a_subject_is_an_area_and_an_imperative(subject, right):
    assert bool(prose.SUBJECT.fullmatch(subject)) is right


def test_messages_are_found_with_their_values_left_out():
    code = 'raise ValueError(f"x={x}; " "pass " + y) from None\nwarn(f"{a} did not wait" if a else "it is late")\nraise error\n'
    found = [piece.text for piece in prose.messages(Path(prose.ROOT / "x.py"), ast.parse(code))]
    assert found == ["x=X; pass", "X did not wait", "it is late"]


def test_a_base_that_the_clone_lacks_is_said():
    assert prose.subjects("0" * 40) is None
    assert "commit subjects" not in prose.measure("0" * 40)[0]


def test_a_broken_limit_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prose.py"])
    figures = {name: limit.bound for name, limit in prose.LIMITS.items()}
    monkeypatch.setattr(prose, "measure", lambda base: (figures, {}))
    assert prose.main() == 0
    monkeypatch.setitem(prose.LIMITS, "nobody", prose.Limit(-1, "per 1,000 words"))
    assert prose.main() == 1
    assert "nobody" in next(line for line in capsys.readouterr().out.splitlines() if "BROKEN" in line)


def test_the_script_runs_by_itself():
    done = subprocess.run([sys.executable, prose.__file__, "--list", "nobody"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
