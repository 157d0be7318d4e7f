"""Guarantee 17 with bad input and with very many branches: typed errors or right results, and states usable afterwards."""

import gc
import sys
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from harness.graphs import double, plus
from harness.scenes import Scene

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    ContractError,
    DeviceMismatchError,
    HandlePool,
    OwnershipError,
    ParallelStates,
    PoolClosedError,
)
from handlepool.order import books as books_module
from handlepool.order import recent, track, uses
from handlepool.pool.context import active

SHAPE = 1, 4, 2, 4


class World(Scene):
    """With its stream current, and arrays of one shape."""

    def __init__(self, make_driver, **options):
        super().__init__(make_driver(**{"scheduler": "adversarial", **options}))
        self.stream.use()

    def array(self, value=1):
        return self.driver.asarray(np.full(SHAPE, value, np.float32))

    def usable(self):
        """Whether a chain is right, no books are open, and no side slot is leased."""
        with self.states.fork() as fork:
            y = fork.run(plus, fork.run(double, self.array(3)), self.array(1))
        return (y.get() == 7).all() and not active and self.pool.stats()["handles_leased"] == 0


@pytest.fixture
def world(make_driver):
    world = World(make_driver)
    yield world
    if not world.pool.internals.status.closed:
        assert world.usable()
        world.pool.close()


# fork.wait


def test_g17_wait_gives_what_it_was_given(world):
    x = world.array()
    with world.states.fork() as fork:
        y = fork.run(double, x)
        assert fork.wait(y) is y
        assert fork.wait(x, y) == (x, y)
        given = [y, {"x": (x,)}]
        assert fork.wait(given) is given
        assert ((fork.wait(y) + 1).get() == 3).all()


def test_g17_control_the_body_reads_without_a_wait(world):
    with world.states.fork() as fork:
        y = fork.run(double, world.array())
        with pytest.raises(ContractError, match=r"not ordered.*fork\.wait"):
            y + 1


def test_g17_wait_outside_of_the_body_is_refused(world):
    fork = world.states.fork()
    x = world.array()
    with pytest.raises(PoolClosedError, match="not entered"):
        fork.wait(x)
    with fork:
        fork.run(double, x)
    with pytest.raises(PoolClosedError, match="was left"):
        fork.wait(x)


def test_g17_run_inside_a_branch_is_refused_and_a_fork_inside_it_is_not(world):
    def own(x, depth):
        if depth == 0:
            return x + 1
        with world.states.fork() as inner:
            one, other = inner.run(own, x, depth - 1), inner.run(own, x, depth - 1)
            return inner.run(np.add, one, other)

    def same(x):
        for run in (fork.run, lambda function, x: fork.map(function, [x, x])):
            with pytest.raises(OwnershipError, match=r"was called inside a branch, .* the body of the fork.* open another fork"):
                run(lambda x: x * 2, x)
        return x + 1

    with world.states.fork() as fork:
        y, z = fork.run(same, world.array()), fork.run(own, world.array(), 2)
    assert (y.get() == 2).all()
    assert (z.get() == 8).all()


def test_g17_wait_inside_a_branch_is_refused(world):
    x = world.array()

    def branch(x):
        with pytest.raises(OwnershipError, match="inside a branch"):
            fork.wait(x)
        return x + 1

    with world.states.fork() as fork:
        y = fork.run(branch, x)
        assert (fork.wait(y).get() == 2).all()


def test_g17_wait_in_another_thread_is_refused(world, in_thread):
    x = world.array()
    with world.states.fork() as fork:
        y = fork.run(double, x)
        with pytest.raises(OwnershipError, match="thread"):
            in_thread(fork.wait, y)
        assert (fork.wait(y).get() == 2).all()


def test_g17_wait_for_what_no_branch_made_returns_at_once(world):
    x, other = world.array(), world.array()
    with world.states.fork() as fork:
        assert fork.wait(x) is x
        fork.run(double, x)
        world.driver.calls.clear()
        for value in (x, other, [x, (other, None, 3)], np.ones(3), "text", object(), None, x[:, 4:]):
            assert fork.wait(value) is value
        assert fork.wait() == ()
        assert not world.driver.calls["wait_event"] + world.driver.calls["record_event"]


@pytest.mark.unmeasured
def test_g17_wait_waits_for_the_writers_alone(world):
    """A reader, and a branch of other arrays, are not waited for: their streams stay held back."""
    driver = world.driver
    x, z = world.array(), world.array()

    def held(array):
        latches.append(driver.latch(driver.current_stream().ptr))
        return array + 1

    latches = []
    with world.states.fork() as fork:
        y = fork.run(double, x)
        fork.run(held, y)
        fork.run(held, z)
        assert (fork.wait(y).get() == 2).all()  # would never end
        for latch in latches:
            assert not latch.passed
            latch.release()


# Arrays that are not to be used here


def test_g17_an_array_of_another_device_is_refused(world):
    with world.driver.device(1), world.driver.create_stream():
        there = world.array()
    here = world.array()
    with world.states.fork() as fork:
        y = fork.run(double, here)
        with pytest.raises(DeviceMismatchError):
            fork.run(plus, y, there)
        with pytest.raises(DeviceMismatchError):
            fork.run(lambda a, b: a + b, y, there)
        with pytest.raises(DeviceMismatchError):
            fork.map(plus, [y, y], [here, there])
        assert fork.wait(there) is there
        z = fork.run(plus, y, here)
    assert (z.get() == 3).all()


def test_g17_an_array_of_another_driver_is_refused(world, make_driver):
    there = World(make_driver)
    x = there.array()
    with world.states.fork() as fork:
        y = fork.run(double, world.array())
        with pytest.raises(ArrayTypeError):
            fork.run(plus, y, x)
        with pytest.raises(ArrayTypeError):
            fork.run(lambda a, b: a + b, y, x)
        z = fork.run(double, y)
    assert (z.get() == 4).all()
    there.pool.close()


def test_g17_arrays_outlive_the_pool_that_made_them(world):
    with HandlePool(driver=world.driver) as other, ParallelStates(2, pool=other).fork() as fork:
        y = fork.run(double, world.array())
    with world.states.fork() as fork:
        z = fork.run(plus, y, fork.run(double, y))
    assert (z.get() == 6).all()


@pytest.mark.parametrize("after", ["run", "map", "wait"])
def test_g17_a_pool_that_is_closed_inside_a_region_refuses(make_driver, after):
    world = World(make_driver)
    x = world.array()
    fork = world.states.fork()
    with pytest.raises(PoolClosedError), fork:  # noqa: PT012
        y = fork.run(double, x)
        world.pool.close()
        if after == "run":
            fork.run(plus, y, x)
        elif after == "map":
            fork.map(plus, [y], [x])
        else:
            fork.wait(y)
    assert not active


def test_g17_arguments_that_are_refused_are_in_no_books(world):
    """A call that never came to be orders nobody."""
    x, y = world.array(), world.array()
    with world.states.fork() as fork:
        fork.run(double, x)
        with pytest.raises(ArgumentError):
            fork.run(plus, x, y, out=world.array()[:, :2])
        world.driver.calls.clear()
        fork.run(double, y)
        assert world.driver.calls["wait_event"] == 1  # the start


# Very many branches


class Steps:
    """Counts what Python executes of the package above the drivers."""

    def __init__(self):
        self.count = 0

    @contextmanager
    def counting(self):
        def local(frame, event, _):
            self.count += event == "opcode"
            return local

        def trace(frame, event, _):
            name = frame.f_globals.get("__name__", "")
            if name.startswith("handlepool.") and not name.startswith("handlepool.drivers."):
                frame.f_trace_opcodes = True
                frame.f_trace_lines = False
                return local
            return None

        former = sys.gettrace()
        gc.disable()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(former)
            gc.enable()


def into(y, x):
    y[...] = x


def scaled(x):
    return x * 2


@handlepool.operation(mutates="y")
def added(x, y):
    y += x


BRANCHES = {
    "new outputs": lambda fork, xs, k: fork.run(double, xs[k % 4]),
    "new outputs of plain functions": lambda fork, xs, k: fork.run(scaled, xs[k % 4]),
    "outputs that are there": lambda fork, xs, k: fork.run(plus, xs[k % 4], xs[4], out=xs[k % 3 + 5]),
    "a chain": lambda fork, xs, k: xs.append(fork.run(plus, xs.pop(), xs[k % 4])),
    "writes in place": lambda fork, xs, k: fork.run(into, xs[k % 3 + 5], xs[k % 4]),
    "operations": lambda fork, xs, k: fork.run(added, xs[k % 4], xs[k % 3 + 5]),
    "views": lambda fork, xs, k: fork.run(into, xs[k % 3 + 5][:, k % 4 : k % 4 + 1], xs[k % 4][:, 1:2]),
    "calls in the body": lambda fork, xs, k: plus(fork.run(double, xs[k % 4]), xs[4]),
}
COUNT, FEW, SAMPLE = 10_000, 100, 30


BOOKS = {module.__name__ for module in (books_module, uses, track, recent)}


def books():
    """How many objects of the order by data there are, by their types."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each).__module__ in BOOKS)


def costs(world, branch, count):
    """Of the first and the last of many branches of one fork: Python's steps of one, on average, and the driver's calls."""

    def of_some(fork, xs, first):
        steps = Steps()
        world.driver.calls.clear()
        with steps.counting():
            for k in range(first, first + SAMPLE):
                branch(fork, xs, k)
        return steps.count / SAMPLE, world.driver.calls.total() / SAMPLE

    for pending in (0, 1):  # the first time functions become known
        xs = [world.array(k) for k in range(9)]
        with world.states.fork() as fork:
            for k in range(FEW - SAMPLE):
                branch(fork, xs, k)
            early = of_some(fork, xs, FEW - SAMPLE)
            if pending:
                for k in range(FEW, count - SAMPLE):
                    branch(fork, xs, k)
                late = of_some(fork, xs, count - SAMPLE)
    return early, late


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.parametrize("name", BRANCHES)
def test_g17_each_of_ten_thousand_branches_costs_what_each_of_a_hundred_does(make_driver, make_default, name):
    world = World(make_driver, check_order=False, scheduler="threads")
    make_default(world.pool)
    world.array()
    before = books()
    events = world.driver.alive()["events"]
    early, late = costs(world, BRANCHES[name], COUNT)
    assert late[0] < early[0] * 1.05 + 10
    assert late[1] < early[1] * 1.05 + 1
    assert not active
    assert books() == before
    assert world.driver.alive()["events"] - events < 400  # 64 for each stream, at most, kept for the next
    assert world.usable()
    world.pool.close()


def test_g17_control_a_step_for_each_branch_so_far_is_seen(make_driver, monkeypatch, make_default):
    next_call = track.Track.next_call

    def slow(branchs):
        for _ in range(branchs.count):
            track.last(branchs, 0)
        return next_call(branchs)

    monkeypatch.setattr(track.Track, "next_call", slow)
    world = World(make_driver, check_order=False, scheduler="threads")
    make_default(world.pool)
    early, late = costs(world, BRANCHES["operations"], 10 * FEW)
    assert late[0] > early[0] * 1.05 + 10
    world.pool.close()


def test_g17_the_books_grow_with_arrays_and_not_with_branches(make_driver):
    world = World(make_driver, check_order=False, scheduler="threads")
    xs = [world.array(k) for k in range(8)]
    with world.states.fork() as fork:
        counts = []
        for k in range(400):
            fork.run(plus, xs[k % 4], xs[k % 3 + 4], out=xs[k % 5 + 3] if k % 4 != k % 5 + 3 else xs[7])
            if k in (99, 399):
                counts.append(books()["Use"])
        assert counts == [8, 8]
    assert not books()["Use"]
    assert world.usable()
    world.pool.close()


# A finaliser finds its thread in the middle of the books


@pytest.mark.parametrize("use", ["a call", "a branch", "a map", "an operation", "a replay", "a wait"])
def test_g17_a_finaliser_that_finds_its_thread_in_the_middle_of_the_books_is_refused(world, monkeypatch, make_default, use):
    make_default(world.pool)
    x, y = world.array(1), world.array(2)
    program = handlepool.record(double, y, pool=world.pool) if use == "a replay" else None
    refused = []

    def finaliser(fork):
        uses = {
            "a call": lambda: plus(x, y),
            "a branch": lambda: fork.run(double, y),
            "a map": lambda: world.states.map(double, [x, y]),
            "an operation": lambda: added(x, y),
            "a replay": lambda: program.replay(),
            "a wait": lambda: fork.wait(y),
        }
        with pytest.raises(OwnershipError, match="outside of finalizers"):
            uses[use]()
        refused.append(use)

    meet = books_module.DataOrder.look_up

    with world.states.fork() as fork:
        fork.run(lambda a: a * 2, x)

        def interrupted(order, memory):
            monkeypatch.setattr(books_module.DataOrder, "look_up", meet)
            finaliser(fork)
            return meet(order, memory)

        monkeypatch.setattr(books_module.DataOrder, "look_up", interrupted)
        z = fork.run(lambda a: a + 1, x)
        w = fork.run(double, z)
    assert refused == [use]
    assert (w.get() == 4).all()


# What cannot be seen


def test_g17_an_array_that_does_not_say_where_it_lies_is_an_error_and_not_left_out(world):
    with world.states.fork() as fork:
        y = fork.run(double, world.array(2))
        world.driver.fail_at(1, "memory_of", RuntimeError("no address"))
        with pytest.raises(RuntimeError, match="no address"):
            fork.run(lambda y: y + 1, y)
        z = fork.run(lambda y: y + 1, y)
    assert (z.get() == 5).all()
