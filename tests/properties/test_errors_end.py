"""An error that was handled keeps nothing alive: no fork, no array of a caller's, without waiting for the collector.

A frame that names the error which leads to it is a circle, and one that a cache remembers lives as long as the cache.
"""

import gc
import threading
import weakref

import pytest
from harness.graphs import double
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import GraphNotSupportedError, ParallelStateExecutor
from handlepool._util.cleanup import do_all
from handlepool.pool.plan_cache import _Build


class Thing:
    """What a caller has when its call fails."""


@handlepool.graph
def refused(g, x):
    raise GraphNotSupportedError("there is no plan")


@handlepool.graph
def wrong(g, x):
    raise ValueError("wrong by itself")


def a_build(function):
    def fail(scene):
        with scene.states.fork() as fork:
            fork.run(function, scene.array(1))

    return fail


def a_join(method):
    def fail(scene):
        with scene.states.fork() as fork:
            fork.run(lambda: None)
            scene.driver.fail_at(1, method)

    return fail


def a_join_under_a_capture(scene):
    with scene.states.fork() as fork:
        fork.run(lambda: None)
        scene.stream.begin_capture()


def a_start(scene):
    double(scene.array(1))
    scene.driver.fail_at(1, "wait_event")
    scene.states.map(double, [scene.array(1)] * 4)


def a_branch(scene):
    def branch():
        raise ValueError("of a branch")

    with scene.states.fork() as fork:
        fork.run(branch)


def a_task(scene):
    def task():
        raise ValueError("of a task")

    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(task).result()


def a_recording(scene):
    calls = []

    def function():
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("of a recording")

    handlepool.record(function, pool=scene.pool)


def a_recording_that_waits(scene):
    handlepool.record(lambda: scene.driver.synchronize_stream(scene.driver.current_stream().ptr), pool=scene.pool)


def a_trim(scene):
    with scene.driver.create_stream():
        scene.pool.get_workspace(1000)
    scene.driver.fail_at(1, "destroy_handle")
    scene.pool.trim()


def steps(scene):
    do_all([lambda: None, lambda: [].pop()])


FAILURES = {
    "a build": a_build(wrong),
    "a refused build": a_build(refused),
    **{f"a join, {method}": a_join(method) for method in ("record_event", "wait_event", "is_capturing", "current_device")},
    **{function.__name__.replace("_", " "): function for function in (a_join_under_a_capture, a_start, a_branch, a_task)},
    **{function.__name__.replace("_", " "): function for function in (a_recording, a_recording_that_waits, a_trim, steps)},
}


def survives(scene, fail):
    """Whether what a caller has outlives the handled error of a call."""

    def call():
        thing = Thing()
        watches.append(weakref.ref(thing))
        fail(scene)

    watches: list[weakref.ref] = []
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Exception):  # noqa: B017, PT011
            call()
        return watches[0]() is not None
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_caller_has_goes_with_the_handled_error(scene, name):
    for _ in range(2):  # the second time, a refusal is remembered
        assert not survives(scene, FAILURES[name])
        scene.driver.fail_at(0)
        if scene.stream.is_capturing():
            scene.stream.end_capture()


def test_control_a_frame_that_names_its_error_keeps_what_its_callers_have(scene):
    def fail(_):
        error = None
        try:
            raise ValueError("kept")
        except ValueError as trouble:
            error = trouble
        raise error

    assert survives(scene, fail)


def test_what_waited_for_a_build_goes_with_the_error(scene, monkeypatch):
    class Watched:
        """A build's lock, which says that another thread asks for it."""

        def __init__(self, lock):
            self.lock, self.thread = lock, threading.get_ident()

        def __enter__(self):
            if threading.get_ident() != self.thread:
                asked.set()
            return self.lock.__enter__()

        def __exit__(self, *error):
            return self.lock.__exit__(*error)

    def watched(build):
        make(build)
        build.lock = Watched(build.lock)

    @handlepool.graph
    def slow(g, x):
        others.append(Thread(waits))
        waited.append(asked.wait(TIMEOUT))
        raise ValueError("wrong by itself")

    def call(scene):
        scene.states.map(slow, [scene.array(1)])

    def waits():
        with scene.driver.create_stream():
            return survives(scene, call)

    def builds(scene):
        try:
            call(scene)
        finally:
            (other,) = others  # built once; while it waits it has the error that it waits for
            assert not other.finish()

    make, asked, others, waited = _Build.__init__, threading.Event(), [], []
    monkeypatch.setattr(_Build, "__init__", watched)
    assert not survives(scene, builds)
    assert waited == [True]
