"""Two threads, at every point where one of them may be interrupted by the other: no sleeps, and nothing left to chance.

At the k-th driver call of one thread another thread does all of its work, for every k; it is waited for until it has ended, or
until it waits for the first at a lock. A replay makes hardly any call, so there it is every line. Then all is accounted for, and
after a close nothing is left. Guarantees 1, 11, 14, 15.
"""

import contextlib
import functools
import itertools
import threading

import numpy as np
import pytest
from harness.accounts import Accounts
from harness.graphs import double
from harness.insides import fault_by, lock_of, recording_of, replace_launch
from harness.lines import at_line
from harness.scenes import TIMEOUT, Scene, Thread
from harness.uses import assert_usable

from handlepool import ContractError, HandlePool, OwnershipError, PoolClosedError, record
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred, handles
from handlepool.recording.program import Program


class WatchedLock:
    """A lock that tells, through ``waits.release``, when a thread has to wait for it."""

    def __init__(self, lock, waits):
        self._lock = lock
        self._waits = waits

    def acquire(self, blocking=True):
        if self._lock.acquire(blocking=False):
            return True
        if blocking:
            self._waits.release()
            assert self._lock.acquire(timeout=TIMEOUT), "a deadlock"
        return blocking

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


class World(Scene):
    def __init__(self, monkeypatch):
        super().__init__(count=2, idle_limit=2)
        self.streams = [self.stream, self.driver.create_stream(), self.driver.create_stream()]
        self.shared = self.stream
        self.built = []
        self.came_to_a_stop = threading.Semaphore(0)
        monkeypatch.setattr(handles, "_create_lock", WatchedLock(threading.RLock(), self.came_to_a_stop))
        for device in range(2):
            slots = self.pool.internals.device(device)
            slots.handles.build_lock = WatchedLock(slots.handles.build_lock, self.came_to_a_stop)

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

        fault_by(self.driver, hook)
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
            except PoolClosedError:
                assert world.pool.closed
            except ContractError:  # the handle that one thread uses by itself is destroyed by the other's close
                assert world.pool.closed
                assert not {first, second} <= {"launch", "trim", "close"}

        threads = world.interrupt(k, lambda do=do: do(second))
        do(first)
        world.driver.fail_at(0)
        for thread in threads:
            thread.finish()
        world.pool.internals.release_left()
        deferred.deferred.run(1000)
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
            if name == "handlepool" and not met:
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
    del stream.handlepool
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


@pytest.mark.parametrize("before", ["nothing", "an idle slot"])
def test_a_close_while_a_handle_is_bound_refuses_the_call_and_leaves_no_handle(before):
    class Closing(HostDriver):
        armed = False

        def bind_handle(self, handle, pointer):
            super().bind_handle(handle, pointer)
            if self.armed:
                self.armed = False
                Thread(pool.close).finish()

    driver = Closing()
    pool = HandlePool(driver=driver)
    if before == "an idle slot":
        Thread(pool.get_workspace, 300).finish()
    driver.armed = True
    with pytest.raises(PoolClosedError):
        pool.get_handle()
    assert not driver.armed
    assert driver.alive() == {"handles": 0, "events": 0, "streams": 0, "scratch_bytes": 0}


class Meeting:
    """Two threads that use one program: another one is halted inside of its use while this one goes on.

    It goes on there when this one has ended, or waits for it.
    """

    def __init__(self, monkeypatch):
        self.driver = HostDriver(scheduler="adversarial", check_order=True)
        self.pool = HandlePool(driver=self.driver)
        self.stream = self.driver.create_stream()
        self.go, self.halted = threading.Event(), threading.Semaphore(0)
        self.halts = None  # the thread that halts where it comes inside
        self.other = None  # the other thread
        self.inside, self.met = [], []
        with self.stream:
            self.new = self.driver.asarray(np.full((4, 4), 5, np.float32))
            self.program = record(double, self.driver.asarray(np.ones((4, 4), np.float32)), pool=self.pool)
        program = self.program
        self.use("replay")
        # Calls and closes rest on the lock alone. Who owns the program would keep these uses apart before they come to it.
        monkeypatch.setattr(Program, "_check_owner", lambda self: None)
        self.driver.copy = self.alone(self.driver.copy)
        program._lock = WatchedLock(lock_of(program), self)
        replace_launch(program, self.alone(program._launch))
        monkeypatch.setattr(recording_of(program), "destroy", self.alone(recording_of(program).destroy))

    def release(self):
        """This thread waits: whoever it waits for may go on."""
        if threading.get_ident() == self.halts:
            self.halted.release()
        else:
            self.go.set()

    def alone(self, function):
        """A function that no two threads may be in at once."""

        def call(*args):
            self.met += self.inside
            self.inside.append(function)
            try:
                if threading.get_ident() == self.halts:
                    self.halted.release()
                    assert self.go.wait(TIMEOUT)
                return function(*args)
            finally:
                self.inside.remove(function)

        return call

    def use(self, what):
        with self.stream, contextlib.suppress(PoolClosedError, OwnershipError):  # it was closed, or is being updated
            {"replay": self.program.replay, "update": self.update, "close": self.program.close}[what]()

    def update(self):
        self.program.update(self.new)

    def begin(self, what):
        def job():
            self.halts = threading.get_ident()
            try:
                self.use(what)
            finally:
                self.halts = None
                self.halted.release()

        self.other = Thread(job)
        assert self.halted.acquire(timeout=TIMEOUT)

    def end(self):
        self.go.set()
        if self.other is not None:
            self.other.finish()
        if self.program.closed:
            return
        with self.stream:
            self.program.update(self.new)
            self.program.replay()
            assert (self.driver.asnumpy(self.program.outputs) == 10).all()
        self.program.close()
        self.pool.close()
        assert self.driver.alive() == {"handles": 0, "events": 0, "streams": 1, "scratch_bytes": 0}
        assert not self.driver.order.found


def meet_at_every_line(monkeypatch, this, other):
    """At the k-th line of this thread's use another one begins its own, for every k; who met whom inside, and how many lines."""
    met = []
    for k in itertools.count(1):
        with monkeypatch.context() as patch:
            meeting = Meeting(patch)
            with contextlib.suppress(ContractError):  # for the control: a graph that was destroyed, or an update without order
                at_line(k, functools.partial(meeting.use, this), functools.partial(meeting.begin, other))
            begun = meeting.other is not None
            with contextlib.suppress(ContractError):
                meeting.end()
            met += meeting.met
        if not begun:
            return met, k


USES = ["replay", "update", "close"]


@pytest.mark.parametrize("other", USES)
@pytest.mark.parametrize("this", USES)
def test_one_thread_inside_its_use_of_a_program_at_every_line_of_anothers(monkeypatch, this, other):
    met, lines = meet_at_every_line(monkeypatch, this, other)
    assert not met
    assert lines > 10


@pytest.mark.parametrize("other", ["replay", "update"])  # a close lets go of the last stream before it frees
def test_control_a_lock_of_a_program_that_holds_nobody_up_lets_two_threads_in(monkeypatch, other):
    monkeypatch.setattr(WatchedLock, "acquire", lambda lock: None)
    monkeypatch.setattr(WatchedLock, "release", lambda lock: None)
    assert meet_at_every_line(monkeypatch, "replay", other)[0]


def test_a_thread_whose_wait_for_anothers_use_was_interrupted_waits_again(monkeypatch):
    meeting = Meeting(monkeypatch)
    meeting.begin("replay")
    lock = lock_of(meeting.program)

    def interrupted():
        assert not lock._lock.acquire(blocking=False)
        raise KeyboardInterrupt

    for busy in (meeting.program._busy, None):  # as it is, and as where the other thread had only just begun
        with monkeypatch.context() as patch, meeting.stream:
            patch.setattr(lock, "acquire", interrupted)
            patch.setattr(meeting.program, "_busy", busy)
            with pytest.raises(KeyboardInterrupt):
                meeting.program.replay()
    meeting.use("replay")
    assert not meeting.met
    meeting.end()
