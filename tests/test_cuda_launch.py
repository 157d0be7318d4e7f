"""What a launch on the cuda driver hands to cuDNN, with CuPy's arrays over made-up addresses: needs CuPy, and no GPU."""

import ctypes

import numpy as np
import pytest

from handlepool import ArgumentError, ArrayTypeError, DeviceMismatchError, calls
from handlepool.plans import Plan
from handlepool.slots import Slot

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
cuda = pytest.importorskip("handlepool.drivers.cuda", reason="the cuda driver's packages are not installed")


class Handle:
    backend_handle = 1234


class Entry:
    """Stands in for the raw entry beneath ``pygraph.execute``, and reads what it was pointed to."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.calls = []

    def __call__(self, location, count, workspace, handle, index):
        assert location == self.buffer[1]
        self.calls.append((list(self.buffer[0][:count]), workspace, handle, index))


def array_at(address, device=0, size=8):
    memory = cupy.cuda.memory.UnownedMemory(address, 4096, None, device)
    return cupy.ndarray((size,), np.float32, cupy.cuda.memory.MemoryPointer(memory, 0))


@pytest.fixture
def executable():
    driver = object.__new__(cuda.CudaDriver)
    made = object.__new__(cuda.CudaExecutable)
    made._driver, made._device, made._several_devices = driver, 0, True
    made.engine, made._uids, made._index = "engine", [1, 2, 3], 7
    made.buffer = driver.launch_buffer()
    made._raw = Entry(made.buffer)
    return made


ADDRESSES = [0x10000, 0x20000, 0x30010]


def test_addresses_go_in_the_order_of_the_operands(executable):
    executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0x5000, executable.buffer)
    executable.launch(Handle(), [array_at(address) for address in reversed(ADDRESSES)], 0, executable.buffer)
    assert executable._raw.calls == [(ADDRESSES, 0x5000, 1234, 7), (ADDRESSES[::-1], 0, 1234, 7)]


def test_the_check_is_called_with_the_addresses_before_anything_is_launched(executable):
    seen = []

    def check(addresses):
        seen.extend(addresses[:3])
        raise ArgumentError("they overlap")

    with pytest.raises(ArgumentError, match="they overlap"):
        executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0, executable.buffer, check)
    assert seen == ADDRESSES
    assert executable._raw.calls == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (array_at(0x40004), ArgumentError, "begins 4 bytes past a multiple of 16"),
        (array_at(0x40000, device=1), DeviceMismatchError, "is on device 1"),
        (np.zeros(8, np.float32), ArrayTypeError, r"numpy\.ndarray"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_cannot_be_taken_is_refused_before_anything_is_launched(executable, wrong, error, message, place):
    operands = [array_at(address) for address in ADDRESSES]
    operands[place] = wrong
    with pytest.raises(error, match=message):
        executable.launch(Handle(), operands, 0, executable.buffer)
    assert executable._raw.calls == []


def test_without_the_raw_entry_the_public_one_is_called_by_uid(executable):
    class Graph:
        def execute(self, pack, workspace, handle):
            self.given = (pack, workspace, handle.backend_handle)

    executable.graph, executable._raw = Graph(), None
    executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0, executable.buffer)
    assert executable.graph.given == (dict(zip([1, 2, 3], ADDRESSES, strict=True)), None, 1234)


class Interrupted(tuple):
    """Operands; before the last of them is looked at for the first time, a finaliser runs."""

    finaliser = None

    def __iter__(self):
        for place in range(len(self)):
            if place == len(self) - 1 and self.finaliser is not None:
                finaliser, self.finaliser = self.finaliser, None
                finaliser()
            yield self[place]


class Addresses:
    """Stands in for the raw entry; keeps the addresses that it was pointed to, whatever buffer they are in."""

    def __init__(self):
        self.calls = []

    def __call__(self, location, count, workspace, handle, index):
        self.calls.append(list((ctypes.c_uint64 * count).from_address(location)))


def launch_with_a_finaliser_that_launches(executable, make_pool):
    """On one slot; the addresses of the two launches."""
    executable._raw, executable.workspace_size = Addresses(), 0
    plan = Plan("plan", 0, executable, (), (), True, False)
    slot = make_pool().slot()
    slot._driver, slot.buffer = executable._driver, executable.buffer
    outer, inner = Interrupted(map(array_at, ADDRESSES)), tuple(map(array_at, reversed(ADDRESSES)))
    outer.finaliser = lambda: calls.launch(slot.pool, plan, slot, inner, False)
    calls.launch(slot.pool, plan, slot, outer, False)
    return slot, executable._raw.calls


def test_g10_a_finaliser_that_launches_while_addresses_are_written_changes_none(executable, make_pool):
    slot, launched = launch_with_a_finaliser_that_launches(executable, make_pool)
    assert launched == [ADDRESSES[::-1], ADDRESSES]
    assert slot.buffer is executable.buffer  # for the next launch
    calls.launch(slot.pool, Plan("plan", 0, executable, (), (), True, False), slot, tuple(map(array_at, ADDRESSES)), False)
    assert launched[2:] == [ADDRESSES]


def test_g10_control_with_one_buffer_the_outer_launch_has_the_finalisers_addresses(executable, make_pool, monkeypatch):
    monkeypatch.setattr(Slot, "buffer", property(lambda slot: executable.buffer, lambda slot, value: None))
    _, launched = launch_with_a_finaliser_that_launches(executable, make_pool)
    assert launched == [ADDRESSES[::-1], [*ADDRESSES[:0:-1], ADDRESSES[2]]]


def test_g10_a_launch_that_fails_leaves_the_slot_its_buffer(executable, make_pool):
    executable.workspace_size = 0
    plan = Plan("plan", 0, executable, (), (), True, False)
    slot = make_pool().slot()
    slot.buffer = executable.buffer
    with pytest.raises(ArrayTypeError):
        calls.launch(slot.pool, plan, slot, (np.zeros(8, np.float32),), False)
    assert slot.buffer is executable.buffer
