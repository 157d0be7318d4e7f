"""The ends of recordings and programs: by an interrupt while they are made, by each other's finalisers, and at exit."""

import gc
import itertools
import threading
import weakref
from functools import partial
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest
from harness.insides import abandoned, at_exit, end_at_exit, plans_of, recording_of, replace_launch
from harness.lines import at_line, interrupt, line_of
from harness.scenes import TIMEOUT, Scene, Thread

import handlepool
from handlepool import PoolClosedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import context, deferred, process_end

MODULES = ("record.py", "capture.py", "owner.py", "program.py", "program_call.py", "update.py", "deferred.py", "context.py")
SPARED = {  # where only a tracer can interrupt: nothing is called before but what returns from Python
    "try:",
    "if watcher in self:",
    "self.remove(watcher)",
    "setattr(thread, name, outer)",
}


def interrupted(k):
    """Record with an interrupt at the k-th line; which that was, and what was left."""
    driver = HostDriver(scheduler="adversarial", check_order=True)
    found = []
    with Scene(driver) as scene:

        def function(x):
            scene.pool.get_workspace(1000)
            return scene.plus(scene.plus(x, 10), 100)

        x, made, line = scene.array(1), [], None
        try:
            line = at_line(k, lambda: made.append(handlepool.record(function, x, pool=scene.pool)), interrupt, MODULES)
        except KeyboardInterrupt as error:
            line = line_of(error)
        gc.collect()
        if driver.captures_under_way():
            found.append("a capture is open")
        now = context.thread
        if context.recordings or any(each is not None for each in (now.recording, now.rehearsal, now.launched)):
            found.append("the thread records")
        now.recording = now.rehearsal = now.launched = now.pool = now.region = None
        context.recordings.clear()
        context.active.clear()
        driver.swap_allocator(None)
        scene.stream.use()
        context.branch_pools.clear()
        for program in made:
            program.close()
        made.clear()
        gc.collect()
        for _ in range(3):
            deferred.deferred.run(1000)
        if abandoned() or scene.pool.stats()["scratch_bytes_recorded"]:
            found.append("what was recorded is kept for good")
        if not found:
            with handlepool.record(function, x, pool=scene.pool) as program:
                program.replay()
                assert scene.read(program.outputs) == 111, line
    return line, found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_every_line_of_a_recording_leaves_no_capture_open_and_uses_nothing_that_was_freed():
    found = {}
    for k in itertools.count(1):
        line, left = interrupted(k)
        abandoned().clear()
        if left:
            found[line] = left
        if line is None:
            break
    assert k > 100
    assert found.keys() == SPARED


# Of each other's


class Model:
    """Has a program of its own method, closed by its destructor."""

    def __init__(self, scene):
        self.scene = scene
        self.before_closing = lambda: None
        self.program = handlepool.record(self.forward, scene.array(1), pool=scene.pool)

    def forward(self, x):
        return self.scene.plus(x, 1)

    def __del__(self):
        self.before_closing()
        self.program.close()


def test_what_a_program_keeps_may_close_it():
    with Scene() as scene:
        program = Model(scene).program
        program.replay()
        program.close()
        gc.collect()
        assert program.closed
        assert not deferred.deferred


def test_whoever_settles_neither_waits_for_a_thread_that_closes_nor_does_its_work():
    with Scene(HostDriver()) as scene:
        program = handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), pool=scene.pool)
        inside, go_on = threading.Event(), threading.Event()
        destroy = scene.driver.destroy_event

        def halted(event):
            inside.set()
            assert go_on.wait(TIMEOUT)
            destroy(event)

        scene.driver.destroy_event = halted
        closer = Thread(program.close)
        assert inside.wait(TIMEOUT)
        settler = Thread(partial(deferred.deferred.run, 1000))
        try:
            settler.join(TIMEOUT / 4)
            waits = settler.is_alive()
            left = list(deferred.deferred)
        finally:
            go_on.set()
        closer.finish()
        settler.finish()
        assert not waits
        assert left == []
        assert not deferred.deferred


def test_two_programs_that_keep_what_closes_the_other_are_closed_by_two_threads():
    with Scene(HostDriver()) as scene:
        models = [Model(scene), Model(scene)]
        programs = [model.program for model in models]
        both = threading.Barrier(2)
        for model, other in zip(models, reversed(programs), strict=True):
            model.before_closing, model.program = lambda: both.wait(TIMEOUT), other
        del models, model
        threads = [Thread(program.close) for program in programs]
        for thread in threads:
            thread.finish()
        assert all(program.closed for program in programs)


# At exit


class Left:
    """Is told that the interpreter ends."""

    def __init__(self, happens=lambda: None):
        self.happens, self.told = happens, []

    def _end_at_exit(self, deadline):
        self.told.append(deadline)
        self.happens()


def references(programs):
    return {number: partial(programs.__getitem__, number) for number in range(len(programs))}


def test_an_interrupt_of_one_end_at_exit_spares_none_of_the_others(monkeypatch):
    dropped = []
    pool = SimpleNamespace(plans=SimpleNamespace(drop=lambda: dropped.append(True)))
    programs = [Left(), Left(interrupt), Left()]
    monkeypatch.setattr(process_end.process_end, "_ends", references([left._end_at_exit for left in programs]))
    monkeypatch.setattr(process_end, "live_pools", [pool])
    with pytest.raises(KeyboardInterrupt):
        at_exit()
    assert process_end.process_end.ending
    assert dropped
    assert [len(left.told) for left in programs] == [1, 1, 1]


def recorded(scene):
    return handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), pool=scene.pool)


@pytest.mark.parametrize("lanes", [None, 4])
def test_after_the_end_nothing_holds_a_plan(scene, lanes):
    """Or cuDNN's binding would print what is left, once the interpreter ends."""
    x = scene.driver.asarray(np.ones((2, 8), np.float32))
    program = handlepool.record(lambda x: handlepool.add(handlepool.add(x, x), x), x, pool=scene.pool, lanes=lanes)
    plans = [weakref.ref(plan) for plan in plans_of(program)]
    assert plans
    scene.pool.internals.plans.drop()
    end_at_exit(program, monotonic() + TIMEOUT)
    gc.collect()
    assert [plan() for plan in plans] == [None] * len(plans)


def test_after_the_end_other_threads_are_told_late_and_the_one_that_ends_at_once(monkeypatch):
    pauses = []
    monkeypatch.setattr(process_end, "sleep", pauses.append)
    monkeypatch.setattr(process_end, "live_pools", [])
    with Scene() as scene:
        program = recorded(scene)
        monkeypatch.setattr(process_end.process_end, "_ends", references([program._end_at_exit]))
        at_exit()
        with pytest.raises(PoolClosedError, match="interpreter"):
            program.replay()
        assert pauses == []
        with pytest.raises(PoolClosedError, match="interpreter"):
            Thread(program.replay).finish()
        assert len(pauses) == 1
        assert pauses[0] >= 1


def test_an_end_leaves_a_launch_of_another_thread_alone_and_comes_after_it():
    with Scene(HostDriver()) as scene:
        program = recorded(scene)
        plans, launch = recording_of(program)._plans, program._launch
        plans[0] = None
        inside, go_on = threading.Event(), threading.Event()

        def halted():
            inside.set()
            assert go_on.wait(TIMEOUT)
            launch()

        replace_launch(program, halted)
        other = Thread(program.replay, scene.stream)
        assert inside.wait(TIMEOUT)
        try:
            end_at_exit(program, 0.0)
            assert plans
            assert not program.closed
        finally:
            go_on.set()
        end_at_exit(program, monotonic() + TIMEOUT)
        other.finish()
        assert not plans
        assert program.closed
