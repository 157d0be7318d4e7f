"""Forks inside forks whose join fails: nobody waits for their branches, so what those read is never given to anybody else.

Guarantees 1, 6 and 8.
"""

import contextlib
import gc
import weakref

import pytest
from harness.accounts import Accounts
from harness.scenes import Scene, over_seeds
from harness.uses import assert_usable

from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred

FAILING = ["record_event", "wait_event", "current_device"]  # of the join; after the last, nothing of it was done


@contextlib.contextmanager
def failing(driver, method):
    """Fail each call of a method: a join that fails is tried again, branch by branch."""

    def fail(*_):
        raise RuntimeError("injected")

    if method == "current_device":  # asked for once, by a name that the pool has
        driver.fail_at(1, method)
        yield
        return
    setattr(driver, method, fail)
    try:
        yield
    finally:
        delattr(driver, method)


def an_inner_join_that_fails(method):
    def scenario(scene):
        y, box, sides = scene.array(), [scene.array(1)], []

        def read(x):
            sides.append(scene.driver.current_stream().ptr)
            scene.put(y, lambda x: x + 1, x)

        def branch():
            z = scene.array()  # or it may have written y, and would wait for the inner branch
            inner = scene.states.fork().__enter__()
            inner.run(read, box.pop())  # from here on nobody but the region has it
            with failing(scene.driver, method), pytest.raises(RuntimeError, match="injected"):
                inner.__exit__(None, None, None)
            return z

        with scene.states.fork() as fork:
            new = fork.run(branch)
        scene.array(100)  # would be the block that the inner branch may not have read yet
        for pointer in sides:
            scene.driver.synchronize_stream(pointer)
        del new
        return scene.read(y)

    return scenario


@pytest.mark.parametrize("method", FAILING)
def test_g8_what_a_branch_reads_that_could_not_be_joined_is_not_reused_after_the_outer_join(method):
    assert set(over_seeds(an_inner_join_that_fails(method))) == {2}


@pytest.mark.parametrize("method", FAILING)
@pytest.mark.unmeasured
def test_g8_control_where_an_inner_fork_lets_its_region_go_on_the_block_is_reused(without, method):
    without("the abandoning of regions")
    assert 101 in over_seeds(an_inner_join_that_fails(method), control=True)


@pytest.mark.parametrize("method", FAILING)
def test_g6_the_outer_fork_is_left_as_ever_and_what_its_own_branches_had_is_let_go_of(make_driver, method):
    class Thing:
        pass

    with Scene(make_driver(scheduler="adversarial")) as scene:
        early, late = Thing(), Thing()
        watches = [weakref.ref(early), weakref.ref(late)]

        def branch(_):
            with contextlib.suppress(RuntimeError), scene.states.fork() as inner:
                inner.run(scene.array, 1)
                scene.driver.fail_at(1, method)

        with scene.states.fork() as fork:
            fork.run(branch, early)
            y = fork.run(lambda _: scene.array(5), late)
            del early, late
        gc.collect()
        assert [watch() is not None for watch in watches] == [True, False]
        assert scene.read(y) == 5
        deferred.deferred.run(1000)
        Accounts(scene.pool).check()
        assert scene.pool.stats()["handles_leased"] == 0
        assert_usable(scene.pool)
        scene.pool.close()
        assert scene.driver.alive() == {"handles": 0, "events": 0, "streams": 1, "scratch_bytes": 0}


def branches_on_side_slots_that_were_not_joined(scene):
    """They use the slots' scratch again: in order, since that is their streams' own."""
    sums = [scene.array() for _ in range(12)]

    def add(out, value):
        scratch = scene.pool.get_workspace(64)
        pointer = scene.driver.current_stream().ptr
        scene.driver.enqueue(pointer, lambda memory: memory.fill(value), writes=[scratch], label="into scratch")
        scene.driver.enqueue(pointer, lambda out, scratch: out.fill(scratch[0]), writes=[out], reads=[scratch], label="out of it")

    def branch():
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as inner:  # noqa: PT012
            for value in range(4):
                inner.run(add, sums[value], value)
            scene.driver.fail_at(1, "wait_event")

    with scene.states.fork() as fork:
        fork.run(branch)
    with scene.states.fork() as fork:
        for value in range(4, 12):
            fork.run(add, sums[value], value)
    return tuple(scene.read(out) for out in sums[4:])


def test_g6_side_slots_that_were_not_joined_serve_later_forks_in_order():
    results = over_seeds(branches_on_side_slots_that_were_not_joined, seeds=range(30), count=4)
    assert set(results) == {tuple(range(4, 12))}


def test_g6_control_without_the_join_of_the_later_fork(monkeypatch):
    def scenario(scene):
        scene.driver.leave_out = lambda pointer: pointer == scene.stream.ptr
        return branches_on_side_slots_that_were_not_joined(scene)

    assert set(over_seeds(scenario, seeds=range(30), count=4, control=True)) != {tuple(range(4, 12))}


def test_g1_side_slots_of_a_fork_that_did_not_come_to_its_join_stay_out_until_it_was_joined():
    with Scene(HostDriver(scheduler="adversarial", check_order=True), count=2) as scene:
        scene.pool.prewarm(states=8)  # a lease that finds one free looks no further
        mine = []
        with scene.states.fork() as fork:

            def branch():
                inner = scene.states.fork().__enter__()
                mine.extend(inner.run(scene.driver.current_stream).ptr for _ in range(2))
                scene.driver.fail_at(1, "current_device")
                with pytest.raises(RuntimeError, match="injected"):
                    inner.__exit__(None, None, None)

            fork.run(branch)
        assert len(set(mine)) == 2
        assert scene.pool.stats()["handles_leased"] == 2
        sides = scene.pool.internals.device(0).sides
        leased = [sides.lease() for _ in range(4)]
        assert not {slot.pointer for slot in leased} & set(mine)
        for slot in leased:
            sides.release(slot, captured=False)
        deferred.deferred.run(1000)
        assert scene.pool.stats()["handles_leased"] == 0
        assert {slot.pointer for slot in sides.free} >= set(mine)
