"""Scenes for tests of order and memory: a driver, a pool, states, a caller's stream, and queued work on float64 arrays."""

import contextlib
import threading

import numpy as np
import pytest
from harness.insides import streams_of
from harness.process import as_default

from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.memory import RegionAllocator
from handlepool.pool import deferred

SEEDS = range(30)
TIMEOUT = 60  # of whatever is expected to happen


class BranchError(Exception):
    """What a branch raises."""


class CarelessDriver(HostDriver):
    """Leaves waits out, so that a control can show what they are for.

    ``leave_out(pointer)`` says for which waiting streams; ``keeps`` and ``edges`` say what a region's allocator still does.
    While it is ``blind``, it says of no event that it has passed: who sees that is ordered after it, and when that is depends on
    the schedule.
    """

    blind = False

    def __init__(self, *, leave_out=lambda pointer: False, keeps=True, edges=True, **options):
        super().__init__(**options)
        self.leave_out = leave_out
        self.keeps = keeps
        self.edges = edges

    def wait_event(self, pointer, event):
        if not self.leave_out(pointer):
            super().wait_event(pointer, event)

    def event_done(self, event):
        return not self.blind and super().event_done(event)

    def region_allocator(self, stream, keep, of):
        return _CarelessAllocator(self, stream, keep, of)


class _CarelessAllocator(RegionAllocator):
    def __init__(self, driver, stream, keep, of):
        super().__init__(streams_of(driver), stream, keep if driver.keeps else lambda _: None, of)
        self._edges = driver.edges

    def settle(self, owner, current):
        if self._edges:
            super().settle(owner, current)
        else:
            self._keep(owner)


class Scene:
    """Enter it to have its stream current, and with ``default`` its pool as the default one. The pool is closed on leaving."""

    def __init__(self, driver=None, *, seed=0, count=4, stream=None, default=False, **options):
        self.driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True) if driver is None else driver
        self.pool = HandlePool(driver=self.driver, **options)
        self.states = ParallelStates(count, pool=self.pool)
        self.stream = self.driver.create_stream() if stream is None else stream
        self._default = as_default(self.pool) if default else contextlib.nullcontext()

    def __enter__(self):
        self._default.__enter__()
        self.stream.__enter__()
        return self

    def __exit__(self, *error):
        self.stream.__exit__(*error)
        self._default.__exit__(*error)
        self.pool.close()

    def array(self, value=None, size=8):
        """An array from the current arena, filled by queued work where a value is given."""
        array = self.driver.empty((size,), (8,), np.dtype(np.float64))
        if value is not None:
            self.put(array, lambda: value)
        return array

    def put(self, out, function, *inputs):
        """Queue ``out[...] = function(*inputs)`` on the current stream."""

        def work(out, *inputs):
            out[...] = function(*inputs)

        self.driver.enqueue(self.driver.current_stream().ptr, work, writes=[out], reads=inputs)
        return out

    def plus(self, array, value):
        """A new array, ``array + value``, by queued work."""
        return self.put(self.array(), lambda x: x + value, array)

    def read(self, array):
        """The array's one value, after the current stream; NaN where it has several."""
        values = np.unique(self.driver.asnumpy(array))
        return float(values[0]) if len(values) == 1 else float("nan")


def leased(scene):
    return scene.pool.stats()["handles_leased"]


def works(scene):
    """Whether pool, states and the caller's stream are usable."""
    x = scene.array(1)
    return [scene.read(y) for y in scene.states.map(scene.plus, [x] * 5, range(5))] == [1, 2, 3, 4, 5] and leased(scene) == 0


def over_seeds(scenario, *, seeds=SEEDS, make=None, control=False, **options):
    """The results of ``scenario(scene)`` over adversarial schedules, with the order of its accesses checked.

    ``make(scene)`` prepares a control; one without it says ``control=True``. The checker must catch a control whatever the
    schedule is, so it does at some seeds here; then the control runs unchecked.
    """

    def run(seed, check):
        driver = CarelessDriver(scheduler="adversarial", seed=seed, check_order=check)
        driver.blind = check and control
        with Scene(driver, **options) as scene:
            if make is not None:
                make(scene)
            try:
                return scenario(scene)
            finally:
                driver.blind = False

    control = control or make is not None
    if control:
        for seed in seeds[:3]:
            with pytest.raises(ContractError, match="not ordered"):
                run(seed, check=True)
        deferred.deferred.run(1000)
    return [run(seed, check=not control) for seed in seeds]


def without_starts(scene):
    """No side stream waits for anything."""
    scene.driver.leave_out = lambda pointer: pointer != scene.stream.ptr


def without_joins(scene):
    """The caller's stream waits for nothing."""
    scene.driver.leave_out = lambda pointer: pointer == scene.stream.ptr


def without_waits_of_the_last(scene):
    """The stream of the scenario's own that was made last waits for nothing."""
    create = scene.driver.create_stream

    def create_stream():
        stream = create()
        scene.driver.leave_out = lambda pointer: pointer == stream.ptr
        return stream

    scene.pool.prewarm(states=4)
    scene.driver.create_stream = create_stream


class Thread(threading.Thread):
    """Runs a function; `finish` gives its value, or raises its error."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self._call = function, args
        self._value = self._error = None
        self.start()

    def run(self):
        function, args = self._call
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error
        finally:
            del self._call

    def finish(self):
        self.join(TIMEOUT)
        assert not self.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._value
