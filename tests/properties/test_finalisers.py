"""Finalisers that use the pool: the collector runs them wherever it likes, as inside a call of the pool by the same thread.

Here one runs at every line of the package in turn, with the order of accesses checked; at every sixth where there are many,
and another sixth in each run. Guarantees 5, 8, 10 and 15.
"""

import contextlib
import itertools

import numpy as np
import pytest
from harness.accounts import Accounts
from harness.graphs import convolution
from harness.insides import fault_by, loaded_drivers
from harness.lines import at_line, some_lines
from harness.scenes import Scene, Thread
from harness.uses import assert_usable

from handlepool import ContractError, OwnershipError, ParallelStateExecutor, StateBusyError, drivers
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred, status
from handlepool.pool.default import default_pool
from handlepool.pool.slot import Slot
from handlepool.pool.workspace import Workspace
from handlepool.testing import reference


class World(Scene):
    """With two convolutions that need scratch, the second more than the first."""

    def __init__(self, **options):
        super().__init__(HostDriver(scheduler="adversarial", check_order=True), count=2, idle_limit=2, **options)
        with self.stream:
            self.small, self.large = self.images(4), self.images(8)
        self.kept = []
        self.accounted = True

    def images(self, size):
        rng = np.random.default_rng(size)
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, size, size), (1, 1, 3, 3)))
        arrays = self.driver.asarray(x), self.driver.asarray(w)
        return arrays, reference.conv2d(x, w, padding=1)

    def convolve(self, which):
        arrays, right = which
        return convolution.prepare(self.pool.internals, arrays, None, {}).launch(self.pool.internals.slot()), right

    def check(self):
        """Raise where a result is wrong, or where anything was lost or leaks."""
        for y, right in self.kept:
            assert reference.relative_error(self.driver.asnumpy(y), right) < 1e-5
        self.kept.clear()
        if self.accounted:
            Accounts(self.pool).check()
        assert_usable(self.pool)
        self.pool.close()
        deferred.deferred.run(1000)
        assert self.driver.alive() == {"handles": 0, "events": 0, "streams": 1, "scratch_bytes": 0}
        assert not self.driver.order.found


MANY, SOME = 12, 3


def at_every_line(outer, inner, step=1, **options):
    """The number of lines."""
    for k in some_lines(step):
        with World(**options) as world:
            act = outer(world)
            where = at_line(k, act, lambda world=world: inner(world))
            del act
            try:
                world.check()
            except BaseException as error:
                error.add_note(f"at {where}")
                raise
        if where is None:
            return k


# What is interrupted: each makes its world ready, and returns what is then done


def a_first_use(world):
    return lambda: [world.pool.get_handle(), world.pool.get_workspace(300)]


def a_growth(world):
    world.pool.get_workspace(300)
    return lambda: world.pool.get_workspace(3000)


def a_reuse(world):
    Thread(lambda: [world.pool.get_workspace(500, stream) for stream in (world.stream, world.stream.ptr)]).finish()
    return lambda: [world.pool.get_workspace(400, stream) for stream in (world.stream.ptr, world.stream)]


def a_trim(world):
    a_reuse(world)()
    world.pool.prewarm(states=1, workspace=300)
    return world.pool.trim


def a_first_launch(world):
    return lambda: world.kept.append(world.convolve(world.small))


def a_launch(world):
    world.kept.append(world.convolve(world.small))
    convolution.prepare(world.pool.internals, world.large[0], None, {})  # builds it
    return lambda: world.kept.append(world.convolve(world.small))


def a_fork(world):
    convolution.prepare(world.pool.internals, world.large[0], None, {})  # builds it

    def fork():
        with world.states.fork() as fork:
            world.kept += [fork.run(world.convolve, world.small)]
            world.kept += [(fork.run(convolution, *world.small[0]), world.small[1])]

    fork()
    return fork


def a_state(world):
    return lambda: world.states.with_state(0, lambda state: state.workspace(300))


def a_task(world):
    world.accounted = False  # the events are the executor's
    executor = ParallelStateExecutor(1, pool=world.pool)
    executor.submit(int).result()

    def submit():
        executor.submit(int).result()
        executor.shutdown()

    return submit


# What the finaliser does


def trims(world):
    world.pool.trim()


def uses_a_workspace(world):
    world.driver.use_handle(world.pool.get_handle(), int)
    scratch = world.pool.get_workspace(9000)
    world.driver.enqueue(world.driver.current_stream().ptr, lambda memory: memory.fill(1), writes=[scratch])


def launches(world):
    """With more scratch, where that is not refused, and lets go of what was replaced."""
    with contextlib.suppress(OwnershipError):  # this thread makes a launch on the same slot, or starts a branch
        world.kept.append(world.convolve(world.large))
    world.pool.trim()


def forks(world):
    with contextlib.suppress(OwnershipError):  # this thread starts a branch, or ends one
        world.kept += world.states.map(world.convolve, [world.large])


def asks_for_a_state(world):
    try:
        world.states.with_state(0, lambda state: state.workspace(5000))
    except StateBusyError:  # this thread has it
        pass


@pytest.mark.parametrize("inner", [trims, uses_a_workspace, launches, forks])
@pytest.mark.parametrize("outer", [a_first_use, a_growth, a_reuse, a_trim, a_state, a_task])
def test_g10_a_finaliser_at_every_line(outer, inner):
    assert at_every_line(outer, inner, MANY if outer is a_state else SOME) > 20


@pytest.mark.parametrize("inner", [trims, uses_a_workspace, launches, forks])
@pytest.mark.parametrize("outer", [a_launch, *(pytest.param(act, marks=pytest.mark.slow) for act in (a_first_launch, a_fork))])
def test_g10_a_finaliser_at_every_line_of_a_launch(outer, inner):
    assert at_every_line(outer, inner, SOME if outer is a_launch else MANY) > 20


def test_g15_a_finaliser_that_asks_for_a_state_at_every_line_of_one_does_not_wait_for_its_own_thread():
    assert at_every_line(a_state, asks_for_a_state, MANY) > 20


def test_g10_a_finaliser_may_ask_for_the_default_pool_at_every_line_of_its_making(make_default):
    before = len(status.live_pools)
    for k in itertools.count(1):
        make_default(None)
        got = []
        where = at_line(k, lambda got=got: got.append(default_pool()), lambda got=got: got.append(default_pool()))
        assert len(set(map(id, got))) == 1
        assert len(status.live_pools) == before + 1
        got[0].internals.is_shared = False
        got[0].close()
        if where is None:
            break
    assert k > 20


def test_g10_a_finaliser_may_ask_for_the_driver_while_it_is_loaded(monkeypatch):
    load, inside = drivers.import_module, []

    def import_module(name):
        if not inside:
            inside.append(None)
            inside[0] = drivers.load("host")
        return load(name)

    monkeypatch.setattr(loaded_drivers(), "by_name", {})
    monkeypatch.setattr(drivers, "import_module", import_module)
    assert drivers.load("host") is inside[0] is drivers.load("host")


def grow_without_a_look(workspace, scratch, nbytes, stream, capture):
    old = workspace.block
    new = scratch.allocate(nbytes)
    if old.nbytes:
        workspace._replace(scratch, new, stream)
    else:
        workspace.block = new
    return new


def test_g10_control_a_growth_that_does_not_look_again_loses_what_a_finaliser_grew(monkeypatch):
    monkeypatch.setattr(Workspace, "grow", grow_without_a_look)
    with pytest.raises(AssertionError, match="lost or unknown scratch"):
        at_every_line(a_first_use, uses_a_workspace)


def test_g5_control_a_launch_that_shares_its_slots_scratch_with_a_finalisers_launch_uses_it_after_it_was_freed(monkeypatch):
    monkeypatch.setattr(Slot, "busy", property(lambda slot: False, lambda slot, value: None))
    with pytest.raises(ContractError, match="is not in scratch memory that is allocated"):
        at_every_line(a_launch, launches)


@pytest.mark.parametrize("capture", [False, True])
def test_g5_a_finalisers_launch_inside_a_launch_of_its_slot_is_refused_and_harms_it_not(capture):
    with World() as world:
        y, right = world.convolve(world.small)
        large = convolution.prepare(world.pool.internals, world.large[0], None, {})
        slot, tried = world.pool.internals.slot(), []
        before = slot.reserve(1)

        def launch(called):
            if called == "launch" and not tried:
                # A launch that is not refused comes here again.
                tried.append(True)
                with pytest.raises(OwnershipError, match="by a finalizer that Python ran during another launch"):
                    large.launch(slot)

        call = convolution.prepare(world.pool.internals, world.small[0], y, {})
        if capture:
            world.stream.begin_capture("relaxed")
        fault_by(world.driver, launch)
        call.launch(slot)
        fault_by(world.driver, None)
        if capture:
            world.stream.end_capture().launch(world.stream)
        assert tried
        assert slot.reserve(1) == before
        world.kept += [(y, right), (large.launch(slot), world.large[1])]
        world.accounted = not capture
        if capture:
            world.pool.trim(captured=True)
        world.check()
