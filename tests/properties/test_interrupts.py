"""An interrupt from the keyboard at any line of a fork inside a fork: what branches still read is given to nobody. Guarantee 8.

Python raises it between any two steps, so a side slot that just changed hands may be lost, and what is current at that moment be
left so. Memory that somebody still uses is never among what is lost.
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
from harness.lines import PACKAGE, at_line, interrupt, line_of
from harness.scenes import Scene, Thread
from harness.uses import assert_usable

import handlepool
from handlepool import ContractError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.pool.context import thread
from handlepool.pool.workspace import DeviceScratch
from handlepool.regions.memory import Region

# What is raised in a destructor is lost, as Python says it is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def forks(scene, box, outs):
    """Each branch reads an array that only the region keeps."""
    take = [box.pop, outs.pop]

    def branch():
        with scene.states.fork() as inner:
            inner.run(scene.put, take[1](), lambda x: x + 1, take[0]())

    def fork():
        with scene.states.fork() as fork:
            fork.run(scene.put, take[1](), lambda x: x + 1, take[0]())
            fork.run(branch)

    return fork


def interrupted_at(k):
    """Whether there was such a line."""
    with Scene(HostDriver(scheduler="adversarial", check_order=True), count=2) as scene:
        forks(scene, [scene.array(1) for _ in range(2)], [scene.array() for _ in range(2)])()
        scene.driver.synchronize_stream(scene.stream.ptr)
        fork = forks(scene, [scene.array(1) for _ in range(2)], outs := [scene.array() for _ in range(2)])
        outs = list(outs)
        where, lost = "", 1
        try:
            where = at_line(k, fork, interrupt)  # where a destructor lost it, too
        except KeyboardInterrupt as error:
            if line_of(error) == "self._sides.free.extend(leased)":  # where only a tracer can interrupt: nothing is called before
                lost = 2
        del fork
        gc.collect()
        thread.region, thread.pool = None, None
        scene.driver.swap_allocator(None)
        scene.stream.use()
        later = [scene.array(100) for _ in range(8)]  # would be the blocks that branches may not have read yet
        for _ in range(3):
            deferred.settle(most=1000)
        assert_usable(scene.pool)
        assert scene.pool.stats()["handles_leased"] <= lost
        del later
        scene.pool.close()
        assert scene.driver.alive()["handles"] <= lost
        return where is not None


def test_g8_an_interrupt_at_every_line_of_a_fork_gives_nobody_what_a_branch_still_reads():
    for k in itertools.count(1):
        if not interrupted_at(k):
            break
    assert k > 400


def test_an_interrupt_at_every_line_of_a_first_use_costs_a_handle_and_a_block_at_most_and_the_pool_goes_on():
    for k in itertools.count(1):
        where = ""
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            with contextlib.suppress(KeyboardInterrupt):  # a destructor does as well
                where = at_line(k, lambda scene=scene: (scene.pool.get_handle(), scene.pool.get_workspace(300)), interrupt)
            assert scene.driver.current_device() == 0
            assert scene.driver.current_stream() is scene.stream
            assert_usable(scene.pool)
            scene.pool.close()
            deferred.settle(most=1000)
            alive = scene.driver.alive()
            assert alive["handles"] <= 1
            assert alive["scratch_bytes"] <= 512
            assert alive["events"] == 0
        if where is None:
            break
    assert k > 100


def things_that_go(scene):
    """Idle handles, scratch that was replaced, side slots, plans."""
    pool = scene.pool
    pool.prewarm(states=1, workspace=300)
    with scene.driver.create_stream():
        pool.get_workspace(300)
    pool.get_workspace(300)
    pool.get_workspace(3000)
    return pool


@pytest.mark.parametrize("end", ["trim", "close"])
def test_an_interrupt_at_every_line_of_an_end_frees_nothing_twice(end):
    for k in itertools.count(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            pool = things_that_go(scene)
            where = ""
            with contextlib.suppress(KeyboardInterrupt):  # a destructor does as well
                where = at_line(k, getattr(pool, end), interrupt)
            for _ in range(2):
                getattr(pool, end)()  # raises where something is given back that is gone
            if end == "trim":
                assert_usable(pool)
                pool.close()
            deferred.settle(most=1000)
            if end == "trim":
                alive = scene.driver.alive()
                assert (alive["handles"], alive["events"]) <= (1, 2)
        if where is None:
            break
    assert k > 200


def test_an_interrupt_at_every_line_of_a_reclaim_costs_one_side_slot_at_most():
    for k in itertools.count(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            scene.pool.prewarm(states=6, workspace=300)
            device, where = scene.pool.internals.device(0), ""
            try:
                where = at_line(k, device.reclaim_scratch, interrupt)
            except KeyboardInterrupt as error:
                if line_of(error).startswith("slots[:0] = held"):  # where only a tracer can interrupt: nothing is called before
                    continue
            assert len(device.sides.free) >= 5
        if where is None:
            break
    assert k > 30


@pytest.mark.slow
def test_an_interrupt_at_every_line_of_a_build_keeps_nobody_waiting():
    spared = ("mine.building = False", "with ")  # where only a tracer can interrupt: nothing is called before, or a lock is freed
    for k in itertools.count(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            x, where = scene.array(1), ""

            def call(scene=scene, x=x):
                with scene.stream:
                    return scene.states.map(double, [x])

            try:
                where = at_line(k, call, interrupt)
            except KeyboardInterrupt as error:
                if line_of(error).startswith(spared):
                    continue
            Thread(call).finish()  # a build that nobody ends would be waited for
            assert scene.read(call()[0]) == 2
        if where is None:
            break
    assert k > 100


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
@pytest.mark.slow
@pytest.mark.parametrize("use", ["replay", "update"])
def test_interrupts_as_python_delivers_them_leave_a_program_free(use):
    with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
        program = handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), pool=scene.pool)
        program._launch = lambda: None
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
                assert not program._lock._is_owned()
                assert program._busy is None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


TWO_STEPS = """
def free(scratch, block):
    if block.nbytes:
        try:
            with scratch.driver.relaxed():
                scratch.driver.free(block.pointer)
                freed = True
        except BaseException:
            scratch.retired.append((None, block))
            raise
        scratch._uncount(block.nbytes)
"""


def test_control_where_freeing_and_noting_it_are_two_steps_a_block_is_freed_twice(monkeypatch):
    space = {}
    exec(compile(TWO_STEPS, os.path.join(PACKAGE, "two_steps.py"), "exec"), space)  # where lines count
    monkeypatch.setattr(DeviceScratch, "free", space["free"])
    with pytest.raises(ContractError, match="no scratch memory that is still allocated begins there"):
        test_an_interrupt_at_every_line_of_an_end_frees_nothing_twice("trim")


def test_g8_control_where_an_interrupted_inner_fork_lets_its_region_go_on(monkeypatch):
    monkeypatch.setattr(Region, "abandon", lambda region: None)
    with pytest.raises(ContractError, match="not ordered"):
        for _ in itertools.takewhile(interrupted_at, itertools.count(1)):
            pass


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
            where = at_line(k, lambda left=left: deferred.settle(left, Left.settle), interrupt)
            break
        assert all(thing.settled or thing in left for thing in things), (k, where)
    assert k > 10
