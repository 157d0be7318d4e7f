"""NVTX ranges: opened when asked for, closed in order, and not in the way otherwise."""

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest

import handlepool
from handlepool import Fork, PackageMissingError, Program, RecordedFunction


@pytest.fixture
def events():
    """What was pushed and popped."""
    return []


@pytest.fixture
def ranges(events, monkeypatch):
    """The module, over a stand-in for the package."""
    fake = ModuleType("nvtx")
    fake.push_range = lambda message, *, domain: events.append(("push", message, domain))
    fake.pop_range = lambda *, domain: events.append(("pop", domain))
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.delitem(sys.modules, "handlepool.integrations.nvtx", raising=False)
    module = importlib.import_module("handlepool.integrations.nvtx")
    yield module
    module.uninstall()
    del sys.modules["handlepool.integrations.nvtx"]


def double(x):
    return handlepool.add(x, x)


def titles(events):
    """The titles of balanced ranges, in the order of their beginnings."""
    depth = 0
    for event in events:
        depth += 1 if event[0] == "push" else -1
        assert depth >= 0
        assert event[-1] == "handlepool"
    assert depth == 0
    return [event[1] for event in events if event[0] == "push"]


def test_branches_joins_and_programs_have_ranges(ranges, events, pool):
    x = handlepool.asarray(np.ones((1, 4, 4, 4), np.float32))
    with ranges.ranges():
        with handlepool.ParallelStates(2, pool=pool).fork() as fork:
            fork.run(double, x)
        fast = handlepool.recorded(double, strict=True)
        fast(x)
        fast(x)
        with handlepool.record(double, x) as program:
            program.replay()
            program(x.copy())
    found = titles(events)
    assert found[:2] == ["branch double", "join"]
    assert found.count("recorded double") == 2
    assert "replay double" in found
    assert "call double" in found
    assert not ranges.is_installed()


def test_a_range_ends_with_an_error(ranges, events, pool):
    def failing():
        raise ValueError("on purpose")

    with ranges.ranges(), pytest.raises(ValueError, match="on purpose"), handlepool.ParallelStates(2, pool=pool).fork() as fork:
        fork.run(failing)
    assert titles(events)[:1] == ["branch failing"]


def test_without_ranges_the_methods_are_the_classes_own(ranges, events):
    before = Fork.run, Fork.__exit__, Program.replay, Program.__call__, RecordedFunction.__call__
    ranges.install()
    ranges.install()
    assert ranges.is_installed()
    assert Fork.run is not before[0]
    assert Fork.run.__doc__ == before[0].__doc__
    ranges.uninstall()
    assert (Fork.run, Fork.__exit__, Program.replay, Program.__call__, RecordedFunction.__call__) == before
    assert events == []


def test_importing_handlepool_does_not_import_it():
    assert "handlepool.integrations.nvtx" not in sys.modules


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "handlepool.integrations.nvtx", raising=False)
    with pytest.raises(PackageMissingError, match=r"handlepool\[nvtx\]"):
        importlib.import_module("handlepool.integrations.nvtx")
