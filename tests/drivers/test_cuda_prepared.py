"""The written-out copies of a prepared call, over memory of the host's that stands in for a GPU's."""

import ctypes

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.cupy

from cupy.cuda.memory import MemoryPointer, OutOfMemoryError, UnownedMemory  # noqa: E402

from handlepool.drivers.cuda import prepared as module  # noqa: E402
from handlepool.drivers.prepared import Copies  # noqa: E402

RELAXED, STREAM = 2, 0x77


class World:
    """Arrays of CuPy's over the host's memory, and the calls of the runtime."""

    def __init__(self, monkeypatch):
        self.log, self.held, self.allocated = [], [], []
        self.full = False
        monkeypatch.setattr(module.runtime, "memcpyAsync", self.move)
        monkeypatch.setattr(module, "_move", lambda *args: self.move(*args[:3], module.runtime.memcpyDefault, args[3]))
        monkeypatch.setattr(module.cupy.cuda, "alloc", self.alloc)

    def move(self, target, source, nbytes, kind, pointer):
        assert (kind, pointer) == (module.runtime.memcpyDefault, STREAM)
        self.log.append("move")
        ctypes.memmove(target, source, nbytes)

    def copy(self, target, source):
        self.log.append("copy")
        self.values(target)[...] = self.values(source)

    def alloc(self, nbytes):
        if self.full:
            raise OutOfMemoryError(nbytes, 0, 0)
        self.allocated.append(nbytes)
        self.log.append("alloc")
        memory = (ctypes.c_byte * max(nbytes, 1))()
        self.held.append(memory)
        return MemoryPointer(UnownedMemory(ctypes.addressof(memory), max(nbytes, 1), None, 0), 0)

    def array(self, values):
        """An array that lies as NumPy's does."""
        block = values if values.base is None else values.base
        memory = self.alloc(block.nbytes)
        self.log.clear(), self.allocated.clear()
        made = cupy.ndarray(values.shape, values.dtype, memory, values.strides)
        self.values(made)[...] = values
        return made

    def values(self, array):
        begin = (ctypes.c_byte * (1 << 12)).from_address(array.data.ptr)
        return np.ndarray(array.shape, array.dtype, begin, 0, array.strides)

    def exchange(self, mode):
        self.log.append("exchange")
        return 0

    def run(self, copies, arrays, launch=None, exchange=None):
        def fail(status):
            raise RuntimeError(status)

        call = module.prepared(copies, self.copy, exchange or self.exchange, RELAXED, fail)
        return call(arrays, STREAM, launch or (lambda: self.log.append("launch")))


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def test_arrays_are_copied_in_before_the_launch_and_out_after_it(world):
    x, y = world.array(numbers(2, 3) * 0), world.array(numbers(2, 3) + 50)
    given = world.array(numbers(2, 3))
    (made,) = world.run(Copies([x], [y], [y.strides]), [given])
    assert world.log == ["exchange", "alloc", "exchange", "move", "launch", "move"]
    assert np.array_equal(world.values(x), numbers(2, 3))
    assert np.array_equal(world.values(made), numbers(2, 3) + 50)
    assert made.data.ptr != y.data.ptr


def test_several_results_share_a_block_and_a_written_argument_is_copied_back(world):
    inputs = [world.array(numbers(3) + each) for each in range(2)]
    outputs = [world.array(numbers(4, 2, dtype=dtype)) for dtype in (np.float16, np.float64)]
    given = [world.array(numbers(3)) for _ in range(2)]

    def launch():
        world.values(inputs[1])[...] = 9

    made = world.run(Copies(inputs, outputs, [each.strides for each in outputs], [1]), given, launch)
    assert world.allocated == [1024]
    for one, other in zip(made, outputs, strict=True):
        assert (one.dtype, one.strides) == (other.dtype, other.strides)
        assert np.array_equal(world.values(one), world.values(other))
    assert np.array_equal(world.values(given[0]), numbers(3))
    assert (world.values(given[1]) == 9).all()


def test_arrays_with_gaps_go_through_the_kernel_and_empty_ones_are_left_out(world):
    wide = numbers(2, 8)[:, ::2]
    x, y, empty = world.array(wide), world.array(wide), world.array(numbers(0, 4))
    given = [world.array(wide * 2), world.array(numbers(0, 4))]
    made, nothing = world.run(Copies([x, empty], [y, empty], [(16, 4), (16, 4)]), given)
    assert world.log == ["exchange", "alloc", "exchange", "copy", "launch", "copy"]
    assert np.array_equal(world.values(made), wide)
    assert nothing.shape == (0, 4)


def test_without_inputs_and_outputs_there_is_the_launch_alone(world):
    assert world.run(Copies([], [], []), []) == ()
    assert "launch" in world.log


def test_too_little_memory_is_a_memory_error_before_anything_is_enqueued(world):
    x, y, given = (world.array(numbers(2)) for _ in range(3))
    world.full = True
    with pytest.raises(MemoryError):
        world.run(Copies([x], [y], [y.strides]), [given])
    assert world.log == ["exchange", "exchange"]


def test_a_status_of_the_exchange_is_raised(world):
    x = world.array(numbers(2))
    with pytest.raises(RuntimeError, match="7"):
        world.run(Copies([x], [], []), [x], exchange=lambda _: 7)
