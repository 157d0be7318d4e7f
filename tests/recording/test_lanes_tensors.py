"""Torch's operations on lanes: its allocator gives a freed block to whoever allocates next for the same stream (guarantee 8).

A stand-in for torch allocates so from the host driver's arenas, and the race checker watches who uses the blocks.
"""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from harness.hidden import hidden
from harness.scenes import leased

import handlepool
from handlepool import ContractError, OutOfMemoryError
from handlepool._util.reachable import leaves
from handlepool.drivers.host.array import HostArray, owner_of

LANES = (1, 2, 3, 8)


class Tensor:
    """Has a branch run with a stream current for torch."""

    is_cuda = True


class Torch:
    """As `handlepool.foreign.torch`, and its pool of a recording, too."""

    # A recording that changed an attribute of a user's object would be refused; torch's own objects keep such counts.
    __module__ = "torch"

    def __init__(self, driver):
        self.driver = driver
        self.streams = {}
        self.nbytes = 0
        self.calls = []
        self.allocates = False

    def recording_pool(self, device):
        self.streams.clear()
        return self

    def begin(self):
        self.allocates = True
        self.calls.append("begin")

    def check(self):
        self.calls.append("check")

    def end(self):
        self.allocates = False
        self.calls.append("end")
        self.nbytes = 64 * len(self.streams)

    def close(self):
        self.calls.append("close")

    def current_stream(self, device):
        return self.driver.current_stream().ptr

    def storage(self, tensor):
        return id(tensor)

    def version(self, tensor):
        return None

    def run_branch(self, pointer, caller, device, function, args, kwargs, held=None):
        value = function(*args, **kwargs)
        if pointer != caller and held is not None:
            held.append(value)
        return value

    def is_out_of_memory(self, error):
        return "CUDA out of memory" in str(error)

    def empty(self, scene):
        previous = self.driver.swap_allocator(None)
        try:
            with self.driver.relaxed():
                array = scene.array()
        finally:
            self.driver.swap_allocator(previous)
        if self.allocates:
            self.streams[self.driver.array_pointer(array)] = self.driver.current_stream().ptr
        return array

    def stream_of(self, pointer):
        return self.streams.get(pointer)

    def storages(self, *values):
        for leaf in leaves(*values, calls=True):
            if isinstance(leaf, HostArray):
                yield self.driver.array_pointer(leaf), owner_of(leaf)


@pytest.fixture
def scene(scene, torch_door, monkeypatch):
    scene.torch = Torch(scene.driver)
    loaded = SimpleNamespace(Tensor=Tensor, cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", loaded)
    torch_door(lambda: scene.torch, "order.stream_order", "order.undeclared", "recording.tensors")
    scene.driver.name = "cuda"
    return scene


@handlepool.operation
def plus(scene, x, value):
    return scene.put(scene.torch.empty(scene), lambda x: x + value, x)


@handlepool.operation
def adding(scene, x, y):
    return scene.put(scene.torch.empty(scene), lambda x, y: x + y, plus(scene, x, 0), y)


def crossing(scene, x):
    """Chains whose values the next chain reads, too, and which nobody holds any more by then."""
    chains = [plus(scene, x, value) for value in range(4)]
    for _ in range(5):
        chains = [adding(scene, one, other) for one, other in pairwise([*chains, chains[0]])]
    return chains


@pytest.mark.parametrize("lanes", LANES)
def test_g8_a_block_that_another_lane_reads_is_given_out_after_that(scene, lanes):
    x = scene.array(1)
    expected = [scene.read(y) for y in crossing(scene, x)]
    with handlepool.record(crossing, scene, x, lanes=lanes) as program:
        assert not program.explain().serial
        for _ in range(3):
            program.replay()
            assert [scene.read(y) for y in program.outputs] == expected
    assert scene.torch.calls == ["begin", "check", "end", "close"]
    assert leased(scene) == 0


def test_g8_control_a_block_that_is_given_out_at_once_is_caught(scene, without):
    without("held tensors")
    program = handlepool.record(crossing, scene, scene.array(1), lanes=8)
    with pytest.raises(ContractError, match="not ordered"):
        program.replay()
    scene.driver.order.found.clear()


def blocks(scene, lanes):
    """How many blocks torch gave a recording."""
    with handlepool.record(crossing, scene, scene.array(1), lanes=lanes) as program:
        assert program.nbytes == 64 * len(scene.torch.streams)
        return len(scene.torch.streams)


def test_a_block_is_given_out_again_where_its_lane_comes_after_its_readers(scene, without):
    one, several = blocks(scene, 1), blocks(scene, 3)
    assert several <= 3 * one
    without("followed readers")
    assert blocks(scene, 3) > several  # control: all is held to the end


def test_blocks_are_let_go_of_at_work_that_is_no_node_and_at_the_end(scene):
    seen = hidden([])

    def function(x):
        y = adding(scene, plus(scene, x, 1), plus(scene, x, 2))
        x += 1
        z = plus(scene, y, 1)
        held = handlepool.pool.context.thread.recording
        if held is not None:
            seen().append(dict(held.lanes._held._by_stream))
        return z

    handlepool.record(function, scene.array(1), lanes=4).close()
    assert [*map(bool, seen())] == [True]  # what was read behind the plain code alone
    assert all(len(each) == 1 for each in seen()[0].values())


def test_what_a_branch_returns_is_held_until_the_recording_has_ended(scene):
    seen = hidden([])

    def function(x):
        with scene.states.fork() as fork:
            y = fork.run(lambda x, tensor: scene.plus(x, 1), x, Tensor())
        recording = handlepool.pool.context.thread.recording
        if recording is not None:
            seen().append(recording.held)
            assert [*recording.held] == [y]
        return y

    handlepool.record(function, scene.array(1), lanes=4).close()
    assert seen() == [[]]


def test_g9_a_programs_streams_are_its_own_as_long_as_it_lives(scene):
    """Torch keeps a workspace by stream, which the graphs use that were captured there."""
    seen = hidden(set())

    @handlepool.operation
    def both(x, y):
        if scene.torch.allocates:  # in a recording
            seen().add(scene.driver.current_stream().ptr)
        return scene.put(scene.torch.empty(scene), lambda x, y: x + y, x, y)

    def function(x):
        left, right = both(x, x), both(x, x)
        with scene.states.fork() as fork:
            other = fork.run(both, left, right)
        return both(other, left)

    used, programs = [], []
    for _ in range(3):
        programs.append(handlepool.record(function, scene.array(1), lanes=4))
        used.append({*seen()})
        seen().clear()
    sides = scene.pool.internals.device(0).sides
    for each, others in ((used[0], used[1]), (used[1], used[2]), (used[2], {slot.pointer for slot in sides.free})):
        assert len(each) == 3  # two lanes and the branch
        assert not each & others
    assert not sides.capturing
    for program in programs:
        program.replay()
        assert scene.read(program.outputs) == 6
        program.close()
    assert leased(scene) == 0


def test_control_without_tensors_streams_are_used_again(scene):
    scene.driver.name = "host"
    seen = hidden([])

    @handlepool.operation
    def both(x, y):
        seen().append(scene.driver.current_stream().ptr)
        return scene.put(scene.array(), lambda x, y: x + y, x, y)

    for _ in range(2):
        handlepool.record(lambda x: [both(x, x), both(x, x)], scene.array(1), lanes=4)
    assert {*seen()[2:4]} & {*seen()[6:8]}


def test_torchs_error_for_want_of_memory_is_ours(scene):
    def function(x):
        if scene.torch.allocates:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return plus(scene, x, 1)

    with pytest.raises(OutOfMemoryError, match="found no memory on device 0"):
        handlepool.record(function, scene.array(1), lanes=4)
    assert scene.torch.calls == ["begin", "end", "close"]
