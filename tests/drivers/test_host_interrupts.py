"""An interrupt anywhere in the host driver's scheduler ends the caller's wait, and no operation is lost by it.

CPython delivers it after a call, where a function begins, and where a loop goes back: at each of these, in turn.
"""

import dis
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.lines import some_lines
from harness.scenes import Thread

from handlepool import ContractError
from handlepool.drivers.host import scheduler as schedulers
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.scheduler import Scheduler

# What is raised in a destructor is lost, as Python says it is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FOLDER = Path(schedulers.__file__).parent
FILES = {str(FOLDER / "scheduler.py"), str(FOLDER / "streams.py")}
CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME"}


@functools.cache
def places(code):
    """Where CPython looks for an interrupt in a function, as offsets of the instructions that come next."""
    found, previous = set(), None
    for instruction in dis.get_instructions(code):
        if previous in CALLS:
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        if instruction.opname != "CACHE":
            previous = instruction.opname
    return frozenset(found)


def interrupted(k, function):
    """Call a function, and interrupt it at the k-th place in the scheduler; whether there were so many."""
    left = k

    def trace(frame, event, _):
        nonlocal left
        if event == "call":
            if frame.f_code.co_filename not in FILES:
                return None
            frame.f_trace_opcodes = True
        elif event == "opcode" and frame.f_lasti in places(frame.f_code):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


class World:
    """Two streams and the null stream, each with an array that queued work counts up."""

    def __init__(self, scheduler):
        self.driver = HostDriver(scheduler=scheduler, seed=3)
        self.streams = [self.driver.create_stream(), self.driver.create_stream()]
        self.arrays = [self.driver.asarray(np.zeros(4, np.float32)) for _ in range(3)]
        self.given = [0, 0, 0]  # of each stream, how much was queued for sure
        self.ran = [0, 0, 0]

    def count(self, number):
        """Queue one more on a stream; 2 stands for the null stream."""
        pointer = self.streams[number].ptr if number < 2 else 0

        def work(array):
            array += 1
            self.ran[number] += 1

        self.driver.enqueue(pointer, work, writes=[self.arrays[number]])
        self.given[number] += 1

    def act(self):
        for number in (0, 1, 0, 2):
            self.count(number)
        event = self.driver.create_event()
        self.driver.record_event(event, self.streams[0].ptr)
        self.driver.wait_event(self.streams[1].ptr, event)
        self.count(1)
        self.driver.event_done(event)
        self.driver.synchronize_stream(self.streams[1].ptr)
        self.driver.synchronize_stream(self.streams[0].ptr)

    def check(self):
        """What was queued has run, once each, and each stream goes on: in another thread, which waits for what this one left."""
        for number in range(3):
            self.count(number)
            self.driver.synchronize_stream(self.streams[number].ptr if number < 2 else 0)
        for array, given, ran in zip(self.arrays, self.given, self.ran, strict=True):
            (value,) = {*self.driver.asnumpy(array).tolist()}
            assert value == ran
            # One whose submission was interrupted may have been queued, and is not counted.
            assert given <= ran <= given + 1
        return True


def every_place(scheduler):
    for k in some_lines(3):
        world = World(scheduler)
        there = interrupted(k, world.act)
        assert Thread(world.check).finish(), k
        if not there:
            return k


def test_no_operation_is_lost_by_an_interrupt(scheduler):
    assert every_place(scheduler) > 100


def test_control_an_operation_that_is_not_put_back_is_waited_for_in_vain(scheduler, monkeypatch, limits):
    monkeypatch.setattr(Scheduler, "_put_back", lambda self, operation: self._running.pop(operation, None))
    limits(PATIENCE_SECONDS=0.01)
    with pytest.raises((AssertionError, ContractError)):
        every_place(scheduler)


def test_no_operation_is_lost_where_the_stack_ends(scheduler):
    """A wait at each depth, up to the one at which nothing can be called any more."""
    world = World(scheduler)
    world.driver.synchronize_stream(0)
    refused = []

    def at_depth(left):
        if left:
            return at_depth(left - 1)
        world.count(0)
        world.driver.synchronize_stream(world.streams[0].ptr)
        return None

    limit, depth = sys.getrecursionlimit(), len(_stack())
    for left in range(limit - depth - 150, limit - depth):
        try:
            at_depth(left)
        except RecursionError:
            refused.append(left)
        world.given[0] = world.ran[0]
        assert Thread(world.driver.synchronize_stream, world.streams[0].ptr).finish() is None
    assert refused
    world.given[0] = world.ran[0]
    assert Thread(world.check).finish()


def _stack():
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
