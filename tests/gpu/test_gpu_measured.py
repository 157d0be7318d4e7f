"""Checksums on a GPU, and writes that no function declares (guarantee 17)."""

import numpy as np
import pytest

import handlepool
from handlepool import ContractError, ParallelStates
from handlepool.drivers.checksum import Words, fold
from handlepool.order import measured, plain_calls

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

TYPES = [np.uint8, np.int8, np.float16, np.int16, np.float32, np.int64, np.float64, np.complex64, np.complex128, np.bool_]


@pytest.fixture(autouse=True)
def nothing_known(known):
    """Each test begins without knowledge of functions."""


@pytest.fixture
def states():
    return ParallelStates(4)


@pytest.fixture
def driver(states):
    return states.pool.driver


def sums_of(driver, arrays):
    with driver.relaxed():
        sums = driver.checksums(arrays, driver.current_stream().ptr)
        sums.wait()
    return sums.values()


def reference(array, memory):
    """Compute the checksum of a view of GPU memory from a copy of that memory on the host."""
    words = Words.of(array.data.ptr, array.shape, array.strides, array.itemsize)
    if not words.count:
        return 0
    host = cupy.asnumpy(memory)
    first = words.start - memory.data.ptr
    shape, strides = (tuple(axis[place] for axis in words.axes[::-1]) for place in (0, 1))
    return fold(np.ndarray(shape, f"u{words.size}", host, first, strides))


def random_view(choose):
    """Return a view with gaps of random bytes, and these."""
    dtype = np.dtype(TYPES[choose.integers(len(TYPES))])
    shape = tuple(int(extent) for extent in choose.integers(1, 40, choose.integers(1, 5)))
    count = int(np.prod(shape))
    memory = cupy.asarray(choose.integers(0, 256, dtype.itemsize * count, np.uint8))
    array = memory.view(dtype).reshape(shape).transpose(choose.permutation(len(shape)).tolist())
    return array[tuple(slice(None, None, int(choose.choice([1, 1, 2, 3, -1]))) for _ in array.shape)], memory


def test_checksums_are_those_of_the_reference(driver):
    for seed in range(200):
        choose = np.random.default_rng(seed)
        made = [random_view(choose) for _ in range(choose.integers(1, 30))]
        arrays = [array for array, _ in made]
        assert sums_of(driver, arrays) == [reference(*each) for each in made], seed


def test_one_changed_bit_changes_a_checksum(driver):
    choose = np.random.default_rng(1)
    memory = cupy.asarray(choose.integers(0, 256, 1 << 20, np.uint8))
    seen = set(sums_of(driver, [memory]))
    for place in choose.integers(0, len(memory), 200).tolist():
        memory[place] ^= 1 << int(choose.integers(8))
        seen.update(sums_of(driver, [memory]))
    assert len(seen) == 201


def test_bits_are_compared_and_not_values(driver):
    one, other = (cupy.asarray([value, 3.0]) for value in (0.0, -0.0))
    assert sums_of(driver, [one]) != sums_of(driver, [other])


def test_large_arrays_and_odd_addresses(driver):
    memory = cupy.arange(50_000_001 % (1 << 24), dtype=cupy.uint8)
    for array in (memory, memory[1:], memory[3:-2:5]):
        assert sums_of(driver, [array]) == [reference(array, memory)]


def test_they_stand_in_the_order_of_their_stream(driver):
    x = cupy.zeros(1 << 22, cupy.float32)
    with driver.create_stream() as stream:
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with driver.relaxed():
            before = driver.checksums([x], stream.ptr)
            x += 1
            after = driver.checksums([x], stream.ptr)
            after.wait()
    assert before.ready()
    assert before.values() != after.values()
    assert after.values() == sums_of(driver, [cupy.ones(1 << 22, cupy.float32)])


class Cell:
    def __init__(self):
        self.h = cupy.zeros((1, 8, 64, 64), cupy.float32)

    def step(self, a):
        self.h[...] = self.h + a
        return self.h * 2


def in_place(z):
    z += 1
    return z * 2


@pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote")
def test_g17_writes_that_no_function_declares_are_ordered(states):
    for _ in range(10):
        cell, z, one = Cell(), cupy.zeros(1 << 16, cupy.float32), cupy.ones((1, 8, 64, 64), cupy.float32)
        with states.fork() as fork:
            made = [fork.run(cell.step, one) for _ in range(6)]
            more = [fork.run(in_place, z) for _ in range(6)]
        for found in (made, more):
            assert [float(each.max()) for each in found] == [2, 4, 6, 8, 10, 12]


def test_functions_that_only_read_are_known_after_their_first_call(states, driver):
    x = cupy.ones(1 << 16, cupy.float32)

    def plain(x):
        return x + 1

    with states.fork() as fork:
        fork.run(plain, x)
    measured.wait_for_answers()
    assert not plain_calls.PlainCall(driver, plain, (x,), {}).assumed_writes


@pytest.mark.parametrize("lanes", [None, 8])
def test_g19_record_refuses_an_operation_that_does_not_say_what_it_writes(lanes):
    h, one = cupy.zeros(64, cupy.float32), cupy.ones(64, cupy.float32)

    @handlepool.operation
    def step(h, a):
        h += a
        return h * 2

    with pytest.raises(ContractError, match="wrote argument h without declaring it"):
        handlepool.record(lambda a: [step(h, a) for _ in range(4)], one, lanes=lanes)


@pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote")
def test_g9_a_capture_of_another_stream_survives_a_measurement(states):
    x = cupy.zeros(1 << 10, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with cupy.cuda.Stream(non_blocking=True), states.fork() as fork:
                fork.run(in_place, x)
        finally:
            graph = stream.end_capture()
    assert graph is not None
