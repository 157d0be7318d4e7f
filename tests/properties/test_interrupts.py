"""An interrupt from the keyboard at any line: no deadlock, no memory reused while it is read, and the pool can be used.

Python raises it between any two steps, so a slot that just changed hands may be lost, which `stats` counts, and what is current
at that moment be left so. Memory that somebody still uses is never among what is lost. Guarantees 8 and 11.
"""

import contextlib
import functools
import gc
import itertools
import os
import signal
from collections import deque

import pytest
from harness.graphs import double
from harness.insides import is_free, replace_launch
from harness.lines import PACKAGE, at_line, interrupt, line_of, some_lines
from harness.process import forget_deferred
from harness.scenes import Scene, Thread
from harness.uses import assert_usable

import handlepool
from handlepool import ContractError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.pool.context import thread
from handlepool.pool.workspace import DeviceScratch
from handlepool.recording.capture import Recording

# What is raised in a destructor is lost, as Python says it is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# Each makes its world ready, and returns what is then done


def a_first_use(scene):
    return lambda: (scene.pool.get_handle(), scene.pool.get_workspace(300))


def full(scene):
    """Idle handles, scratch that was replaced, side slots."""
    pool = scene.pool
    pool.prewarm(states=6, workspace=300)
    with scene.driver.create_stream():
        pool.get_workspace(300)
    pool.get_workspace(300)
    pool.get_workspace(3000)


def a_reuse(scene):
    full(scene)
    stream = scene.driver.create_stream()
    return lambda: scene.pool.get_workspace(400, stream)


def a_trim(scene):
    full(scene)
    return scene.pool.trim


def a_close(scene):
    full(scene)
    return scene.pool.close


def a_reclaim(scene):
    full(scene)
    return scene.pool.internals.device(0).release_idle_scratch


UNSEEN = {}
"""A global: of what a closure leads to, no part is freed before the join."""


def a_fork(scene):
    """Each branch reads an array that only the region keeps; later arrays would be the blocks that it may not have read yet."""

    def fill():
        UNSEEN["inputs"] = [scene.array(1) for _ in range(2)]
        UNSEEN["outputs"] = [scene.array() for _ in range(2)]
        kept.extend(UNSEEN["outputs"])

    def branch():
        z = scene.array()  # or it may have written what it reaches, and would wait for the inner branch
        with scene.states.fork() as inner:
            inner.run(scene.put, UNSEEN["outputs"].pop(), lambda x: x + 1, UNSEEN["inputs"].pop())
        return z

    def fork():
        with scene.states.fork() as fork:
            fork.run(scene.put, UNSEEN["outputs"].pop(), lambda x: x + 1, UNSEEN["inputs"].pop())
            fork.run(branch)

    kept = UNSEEN["kept"] = []
    fill()
    fork()
    scene.driver.synchronize_stream(scene.stream.ptr)
    fill()
    return fork


def a_recording(scene):
    """On lanes, with plain code between its calls."""
    plus = handlepool.operation(scene.plus)
    x = scene.array(1)

    def body(x):
        y = plus(x, 1) + plus(x, 2)
        return plus(y, 1), plus(y, 2)

    def record():
        handlepool.record(body, x, lanes=3, pool=scene.pool).close()

    scene.pool.prewarm(states=4)
    record()
    return record


# Where only a tracer can interrupt: nothing is called before.
SPARED = ("try:", "slots[:0] = held", "self.remove(watcher)", "setattr(thread, name, outer)", "for scratch in self.scratch:")
STEPS = {a_fork: 8, a_recording: 60, a_trim: 3, a_close: 3, a_reuse: 2, a_reclaim: 2}

MAKE_OR_DESTROY = [a_first_use, a_reuse, a_trim, a_close]
"""Here a handle may be lost that no slot has yet, or a slot that has none any more."""


def interrupted_at(k, act):
    """Whether there was such a line."""
    with Scene(HostDriver(scheduler="adversarial", check_order=True), count=2) as scene:
        pool, where = scene.pool, ""
        do = act(scene)
        try:
            where = at_line(k, do, interrupt)  # where a destructor lost it, too
        except KeyboardInterrupt as error:
            if line_of(error) in SPARED:
                thread.recording, thread.rehearsal, thread.launched = None, None, None
                deferred.deferred.run(1000)
                return True
        del do
        assert (thread.recording, thread.rehearsal, thread.launched) == (None, None, None), where
        pool.internals._live._local.__dict__.clear()  # as at the thread's end
        gc.collect()
        thread.region, thread.pool = None, None
        scene.driver.swap_allocator(None)
        scene.stream.use()
        later = [scene.array(100) for _ in range(8)]
        for _ in range(3):
            deferred.deferred.run(1000)
        if act is a_close:
            pool.close()  # raises where something is given back that is gone
        else:
            assert_usable(pool)
            pool.trim()  # likewise
        del later
        gc.collect()
        lost, more = pool.stats()["slots_lost"], act in MAKE_OR_DESTROY
        assert lost <= 2  # a fork's inside a fork
        assert pool.stats()["handles_leased"] <= lost + more
        pool.close()
        deferred.deferred.run(1000)
        assert abs(scene.driver.alive()["handles"] - lost) <= more
        return where is not None


@pytest.mark.parametrize(
    "act", [a_first_use, a_reuse, a_trim, a_close, a_reclaim, a_fork, pytest.param(a_recording, marks=pytest.mark.slow)]
)
def test_g8_an_interrupt_at_every_line_gives_nobody_what_is_still_read_and_what_it_costs_is_counted(act):
    for k in some_lines(STEPS.get(act, 1)):
        if not interrupted_at(k, act):
            break
    assert k > 40


@pytest.mark.slow
def test_an_interrupt_at_every_line_of_a_build_keeps_nobody_waiting():
    # Where only a tracer can interrupt: nothing is called before, or a lock is freed.
    spared = ("mine.thread = None", "self.busy = False", "self.busy = former", "with ")
    for k in some_lines(4):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            x, where = scene.array(1), ""

            def call(scene=scene, x=x):
                with scene.stream:
                    return scene.states.map(double, [x])

            try:
                where = at_line(k, call, interrupt)
            except KeyboardInterrupt as error:
                if line_of(error) == "return" or line_of(error).startswith(spared):
                    continue
            Thread(call).finish()  # a build that nobody ends would be waited for
            assert scene.read(call()[0]) == 2
        # Each later scene would look for the slots that this scene lost.
        forget_deferred()
        if where is None:
            break
    assert k > 100


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
@pytest.mark.slow
@pytest.mark.parametrize("use", ["replay", "update"])
def test_interrupts_as_python_delivers_them_leave_a_program_free(use):
    with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
        program = handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), pool=scene.pool)
        replace_launch(program, lambda: None)
        scene.driver.copy = lambda target, source: None
        call = program.replay if use == "replay" else functools.partial(program.update, scene.array(5))

        def repeat():
            while True:
                call()

        before = signal.signal(signal.SIGVTALRM, lambda *_: interrupt())
        try:
            for number in range(500):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4 + number * 1e-7, 0.1)  # again, where a destructor loses it
                    repeat()
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                assert is_free(program)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


TRIED_AGAIN = """
def free(scratch, block):
    if block.nbytes:
        try:
            with scratch.driver.relaxed():
                scratch.driver.free(block.pointer)
        except BaseException:
            scratch.deferred_blocks.append((None, block))
            raise
        scratch._uncount(block.nbytes)
"""


def test_control_where_what_an_interrupt_met_is_freed_again_a_block_is_freed_twice(monkeypatch):
    space = {}
    exec(compile(TRIED_AGAIN, os.path.join(PACKAGE, "tried_again.py"), "exec"), space)  # where lines count
    monkeypatch.setattr(DeviceScratch, "free", space["free"])
    with pytest.raises(ContractError, match="no scratch memory that is still allocated begins there"):
        for _ in itertools.takewhile(lambda k: interrupted_at(k, a_trim), itertools.count(1)):
            pass


@pytest.mark.slow
def test_g8_control_where_an_interrupted_inner_fork_lets_its_region_go_on(without):
    without("the abandoning of regions")
    with pytest.raises(ContractError, match="not ordered"):
        for _ in itertools.takewhile(lambda k: interrupted_at(k, a_fork), some_lines(3)):
            pass


@pytest.mark.slow
def test_g11_control_where_slots_go_uncounted_a_handle_is_missed(monkeypatch):
    monkeypatch.setattr("handlepool.pool.device._NOBODY", 0)
    with pytest.raises(AssertionError):
        for _ in itertools.takewhile(lambda k: interrupted_at(k, a_fork), itertools.count(1)):
            pass


def test_g1_control_where_a_recording_gives_one_slot_back_the_others_are_missed(monkeypatch):
    former = Recording._end_leases

    def one(recording):
        del recording._leased[1:]
        former(recording)

    monkeypatch.setattr(Recording, "_end_leases", one)
    with pytest.raises(AssertionError):
        interrupted_at(10**9, a_recording)


def test_an_interrupt_at_every_line_of_a_reclaim_of_what_was_left_behind_loses_none_of_it():
    class Left:
        settled = False

        def settle(self):
            self.settled = True
            return True

    for k in itertools.count(1):
        things = [Left(), Left()]
        left = deque(things)
        where = None
        with contextlib.suppress(KeyboardInterrupt):
            where = at_line(k, lambda left=left: deferred.run_some(left, Left.settle), interrupt)
            break
        assert all(thing.settled or thing in left for thing in things), (k, where)
    assert k > 10
