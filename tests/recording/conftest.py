"""Fixtures that the tests of recordings share."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from handlepool.recording.recorded import RecordedFunction
from handlepool.recording.tuning import LanesRig
from handlepool.testing.pools import host_pool


@pytest.fixture
def driver():
    """The driver of a default pool for the test."""
    with host_pool() as pool:
        yield pool.driver


@pytest.fixture
def array(driver):
    """Makes an array on the device, all of one value: ``array(value, *shape)``."""
    return lambda value, *shape: driver.asarray(np.full(shape or (1, 4, 3, 4), value, np.float32))


@pytest.fixture
def no_warnings():
    """A function that runs eagerly without need fails its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def long_way(monkeypatch):
    """The calls of recorded functions that take the long way, in a list that grows."""
    taken, call = [], RecordedFunction._call
    monkeypatch.setattr(RecordedFunction, "_call", lambda self, *args: taken.append(args) or call(self, *args))
    return taken


@pytest.fixture
def lane_times(monkeypatch):
    """Microseconds on the clock and on the device, by lanes, and the lanes that were timed by the clock."""
    times = SimpleNamespace(clock={}, device={}, timed=[])

    def clock(rig, each, replays):
        times.timed.append(each.asked)
        return times.clock[each.asked]

    monkeypatch.setattr(LanesRig, "_clock", clock)
    monkeypatch.setattr(LanesRig, "_device", lambda rig, each, replays: times.device[each.asked])
    return times
