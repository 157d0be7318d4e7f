"""Two threads, at every point where one of them may be interrupted by the other: no sleeps, and nothing left to chance.

At the k-th driver call of one thread another thread does all of its work, for every k; it is waited for until it has ended, or
until it waits for the first at a lock. A replay makes hardly any call, so there it is every line. Then all is accounted for, and
after a close nothing is left. Guarantees 1, 11, 14, 15.
"""

import contextlib
import functools
import itertools
import threading
import time

import numpy as np
import pytest
from accounts import Accounts
from lines import at_line
from scenes import TIMEOUT, Thread
from uses import assert_usable

from handlepool import (
    ContractError,
    HandlePool,
    OwnershipError,
    ParallelStates,
    PoolClosedError,
    Program,
    devices,
    graph,
    record,
    regions,
)
from handlepool.drivers.host import HostDriver


@graph
def double(g, x):
    return g.add(x, x)


class WatchedLock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self, lock, waits):
        self._lock = lock
        self._waits = waits

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._waits.release()
            assert self._lock.acquire(timeout=TIMEOUT), "a deadlock"

    def __exit__(self, *error):
        self._lock.release()


class World:
    def __init__(self, monkeypatch):
        self.driver = HostDriver(scheduler="adversarial", check_order=True)
        self.pool = HandlePool(driver=self.driver, idle_limit=2)
        self.states = ParallelStates(2, pool=self.pool)
        self.streams = [self.driver.create_stream() for _ in range(3)]
        self.shared = self.streams[0]
        self.built = []
        self.came_to_a_stop = threading.Semaphore(0)
        monkeypatch.setattr(devices, "_create_lock", WatchedLock(threading.RLock(), self.came_to_a_stop))
        for device in range(2):
            slots = self.pool.device(device)
            slots.build_lock = WatchedLock(slots.build_lock, self.came_to_a_stop)

    def interrupt(self, k, function):
        """Let a new thread run a function at the k-th driver call of this thread; a list that the thread will be in."""
        here, left, threads = threading.get_ident(), k, []

        def work():
            try:
                function()
            finally:
                self.came_to_a_stop.release()

        def hook(called):
            nonlocal left
            if threading.get_ident() == here:
                left -= 1
                if left == 0:
                    threads.append(Thread(work))
                    assert self.came_to_a_stop.acquire(timeout=TIMEOUT)

        self.driver._log._fault = hook
        return threads

    def scratch(self, stream):
        with stream:
            memory = self.pool.get_workspace(300)
            self.driver.enqueue(stream.ptr, lambda memory: memory.fill(1), writes=[memory], label="scratch")
            self.driver.use_handle(self.pool.get_handle(), int)

    # What two threads do

    def get(self):
        self.scratch(self.shared)

    def get_elsewhere(self):
        self.scratch(self.streams[1])

    def get_a_pointer(self):
        memory = self.pool.get_workspace(300, self.streams[2].ptr)
        self.driver.enqueue(self.streams[2].ptr, lambda memory: memory.fill(1), writes=[memory])

    def fork(self):
        with self.shared:
            self.states.map(lambda _: self.scratch(self.driver.current_stream()), range(3))

    def launch(self):
        with self.shared:
            size = 4 + len(self.built)  # who asks for a plan that another thread builds waits: see the tests of plans
            self.built.append(size)
            self.states.map(double, [self.driver.empty((size, size), (size * 4, 4), np.dtype(np.float32))])

    def trim(self):
        self.pool.trim()

    def close(self):
        self.pool.close()

    def leave_behind(self):
        """A thread that ends, and whose slots nobody has taken in."""
        Thread(lambda: [self.scratch(stream) for stream in self.streams]).finish()


ACTS = ["get", "get_elsewhere", "get_a_pointer", "fork", "launch", "trim", "close", "leave_behind"]


@pytest.mark.parametrize("second", ACTS)
@pytest.mark.parametrize("first", ACTS)
@pytest.mark.parametrize("before", [(), ("get", "leave_behind", "fork")], ids=["first use", "with idle slots"])
def test_g1_one_thread_at_every_call_of_another(monkeypatch, before, first, second):
    for k in itertools.count(1):
        world = World(monkeypatch)
        for act in before:
            Thread(getattr(world, act)).finish()

        def do(act, world=world):
            try:
                getattr(world, act)()
            except (PoolClosedError, ContractError):  # the handle that one thread uses is destroyed by the other's close
                assert world.pool.closed

        threads = world.interrupt(k, lambda do=do: do(second))
        do(first)
        world.driver.fail_at(0)
        for thread in threads:
            thread.finish()
        world.pool.drain()
        regions.settle(most=1000)
        if not world.pool.closed:
            Accounts(world.pool).check()
            assert_usable(world.pool)
        world.pool.close()
        world.pool.close()
        assert world.driver.alive() == {"handles": 0, "events": 0, "streams": 3, "scratch_bytes": 0}, k
        assert not world.driver.order.found
        if not threads:
            break


def test_g1_two_threads_that_meet_at_the_first_place_on_one_stream_object(make_pool):
    """The place for slots is made by both; one of the two places is lost, and with it nothing but a hit."""
    pool = make_pool()
    stream = pool.driver.create_stream()
    met, handles = [], []

    class Meeting(type(stream)):
        def __setattr__(self, name, value):
            if name == pool.attribute and not met:
                met.append(name)
                Thread(lambda: handles.append((pool.get_handle(stream), pool.get_handle(stream)))).finish()
            super().__setattr__(name, value)

    stream.__class__ = Meeting
    mine = pool.get_handle(stream)
    assert pool.get_handle(stream) is mine
    ((theirs, again),) = handles
    assert theirs is again is not mine
    assert pool.stats()["handles_created"] == 2


def test_g1_a_thread_whose_place_was_lost_keeps_its_handle(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    handle = pool.get_handle(stream)
    delattr(stream, pool.attribute)
    assert pool.get_handle(stream) is handle
    assert pool.get_handle(stream) is handle
    assert pool.stats()["handles_created"] == 1


def test_g5_a_close_that_takes_the_block_which_a_growth_would_retire_frees_it_once(make_driver):
    class Closing(HostDriver):
        armed = False

        def create_event(self, **options):
            if self.armed:
                self.armed = False
                closer = threading.Thread(target=pool.close)
                closer.start()
                closer.join(60)
            return super().create_event(**options)

    driver = Closing()
    pool = HandlePool(driver=driver)
    pool.get_workspace(256)
    driver.armed = True
    with contextlib.suppress(PoolClosedError):
        pool.get_workspace(100_000)
    pool.close()
    assert driver.alive()["scratch_bytes"] == 0


class Meeting:
    """A thread that replays a program without its lock, and another that uses it meanwhile."""

    def __init__(self, monkeypatch):
        self.driver = HostDriver(scheduler="adversarial", check_order=True)
        self.pool = HandlePool(driver=self.driver)
        self.streams = [self.driver.create_stream() for _ in range(2)]
        self.came_to_a_stop = threading.Semaphore(0)
        self.inside, self.met = [], []
        with self.streams[0]:
            self.x = self.driver.asarray(np.ones((4, 4), np.float32))
            self.program = record(double, self.x, pool=self.pool)
            self.program.replay()
        monkeypatch.setattr("handlepool.program.sleep", self.wait)
        monkeypatch.setattr(self.driver, "copy", self.alone(self.driver.copy))
        monkeypatch.setattr(self.program, "_lock", WatchedLock(self.program._lock, self.came_to_a_stop))
        monkeypatch.setattr(self.program, "_launch", self.alone(self.program._launch))
        monkeypatch.setattr(self.program._recording, "release", self.alone(self.program._recording.release))
        self.threads = []
        self.second = None  # what another thread does inside of a launch

    def wait(self, seconds):
        self.came_to_a_stop.release()
        time.sleep(seconds)

    def alone(self, function):
        def call(*args):
            self.met += self.inside
            self.inside.append(function.__name__)
            try:
                if self.second is not None:
                    second, self.second = self.second, None
                    self.interrupt(second)
                return function(*args)
            finally:
                self.inside.pop()

        return call

    def interrupt(self, second):
        def work():
            try:
                with self.streams[1]:
                    getattr(self, second)()
            finally:
                self.came_to_a_stop.release()

        self.threads.append(Thread(work))
        assert self.came_to_a_stop.acquire(timeout=TIMEOUT)

    def replay(self):
        with contextlib.suppress(PoolClosedError, OwnershipError):  # closed, or being updated
            self.program.replay()

    def update(self):
        self.program.update(self.driver.asarray(np.full((4, 4), 5, np.float32)))

    def close(self):
        self.program.close()

    def end(self):
        for thread in self.threads:
            thread.finish()
        if not self.program.closed:
            with self.streams[0]:
                self.update()
                self.replay()
                assert (self.driver.asnumpy(self.program.outputs) == 10).all()
        self.program.close()
        self.pool.close()
        assert self.driver.alive() == {"handles": 0, "events": 0, "streams": 2, "scratch_bytes": 0}
        assert not self.driver.order.found


@pytest.mark.parametrize("second", ["replay", "update", "close"])
def test_one_thread_at_every_line_of_a_replay_that_takes_no_lock(monkeypatch, second):
    for k in itertools.count(1):
        meeting = Meeting(monkeypatch)
        with meeting.streams[0]:
            where = at_line(k, meeting.replay, functools.partial(meeting.interrupt, second))
        assert not meeting.met, where
        meeting.end()
        if where is None:
            break
    assert k > 10


@pytest.mark.parametrize("second", ["replay", "update", "close"])
def test_one_thread_in_a_launch_that_takes_no_lock_is_waited_for(monkeypatch, second):
    meeting = Meeting(monkeypatch)
    meeting.second = second
    with meeting.streams[0]:
        meeting.program.replay()
        assert meeting.threads
    assert not meeting.met
    meeting.end()


@pytest.mark.parametrize("second", ["replay", "update", "close"])
def test_control_a_launch_that_is_not_announced_is_not_waited_for(monkeypatch, second):
    class Silent(Program):
        _launching = property(lambda self: 0, lambda self, thread: None)

    meeting = Meeting(monkeypatch)
    meeting.program.__class__ = Silent
    meeting.second = second
    with meeting.streams[0], contextlib.suppress(ContractError):  # a graph that was destroyed, or an update without order
        meeting.program.replay()
    for thread in meeting.threads:
        thread.finish()
    assert meeting.met == ["launch"]
