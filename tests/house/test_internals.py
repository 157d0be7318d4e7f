"""The tests hold little to internals of the package."""

import ast
from pathlib import Path

import pytest
from harness.controls import CONTROLS

from house.internals import TESTS, by_file, patches, private_names

MOST_PRIVATE_NAMES = 240
MOST_PATCHES = 180


@pytest.mark.parametrize(("count", "most"), [(private_names, MOST_PRIVATE_NAMES), (patches, MOST_PATCHES)])
def test_the_tests_hold_little_to_internals(count, most):
    found = {file: len(places) for file, places in by_file(count).items()}
    assert sum(found.values()) <= most, f"run python tests/house/internals.py; most are in {[*found.items()][:5]}"


@pytest.mark.parametrize(
    ("code", "private", "patched"),
    [
        ("self._x; cls._x; a.x; a.__x__; a._replace()", 0, 0),
        ("a._x; a.b._x.c; f()._x = 1", 3, 0),
        ("from handlepool.pool import slot as s\npatch.setattr(s.Slot, 'busy', 1); patch.setattr(other, 'busy', 1)", 0, 1),
        (
            "patch.setattr('handlepool.pool.slot.Slot.busy', 1); patch.setattr('numpy.add', 1); patch.delattr(f'handlepool.{x}')",
            0,
            2,
        ),
        ("import handlepool\npatch.setattr(handlepool, 'conv2d', 1); setattr(handlepool, 'conv2d', 1)", 0, 1),
    ],
)
def test_accesses_and_patches_are_told_apart(code, private, patched):
    tree = ast.parse(code)
    assert (len(private_names(tree)), len(patches(tree))) == (private, patched)


def test_each_control_is_made_by_a_test():
    texts = [path.read_text(encoding="utf-8") for path in Path(TESTS).rglob("test_*.py")]
    unused = [name for name in CONTROLS if not any(f'without("{name}")' in text for text in texts)]
    assert unused == []
