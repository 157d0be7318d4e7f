"""Checksums of arrays' bits: on the host, and the CUDA kernel's own source on the CPU."""

import ctypes
import subprocess

import numpy as np
import pytest
from harness.kernels_on_cpu import COMPILER, SHIM
from numpy.lib.stride_tricks import as_strided

from handlepool import CaptureError, HandlePool
from handlepool.drivers.checksum import Words, fold, of_host
from handlepool.drivers.cuda import checksum
from handlepool.drivers.host.driver import HostDriver

TYPES = [np.uint8, np.int8, np.float16, np.int16, np.float32, np.int64, np.float64, np.complex64, np.complex128, np.bool_]
TYPES += ["V3", "V12", [("a", np.uint8), ("b", np.float64)]]


def random_array(choose):
    """Return an array of any type with gaps, and axes in any order, of any sign, and repeated."""
    dtype = np.dtype(TYPES[choose.integers(len(TYPES))])
    shape = tuple(choose.integers(1, 6, choose.integers(0, 6)))
    memory = choose.integers(0, 256, dtype.itemsize * int(np.prod(shape, dtype=int)) + 8, np.uint8)
    first = choose.integers(0, 8) if dtype.kind == "V" else 0
    array = np.ndarray(shape, dtype, memory, first)
    array = array.transpose(choose.permutation(len(shape)))
    array = array[(*(slice(None, None, int(choose.choice([1, 1, 2, 3, -1, -2]))) for _ in array.shape), ...)]
    if choose.integers(4) == 0:
        array = as_strided(array, (3, *array.shape), (0, *array.strides))
    return array, memory


def bytes_of(array):
    """Return which bytes of memory are an array's, by their addresses."""
    address = array.__array_interface__["data"][0]
    starts = (
        address + sum(np.indices(array.shape).reshape(array.ndim, -1)[axis] * array.strides[axis] for axis in range(array.ndim))
        if array.ndim
        else np.array([address])
    )
    return np.unique((np.asarray(starts).reshape(-1, 1) + np.arange(array.itemsize)).reshape(-1))


def test_words_are_the_bytes_of_an_array_once_each():
    for seed in range(500):
        array, _ = random_array(np.random.default_rng(seed))
        words = Words.of(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
        assert words.start % words.size == 0
        addresses = bytes_of(words.as_numpy())
        assert len(addresses) == words.count * words.size, seed
        assert np.array_equal(addresses, bytes_of(array)), seed


def test_one_changed_bit_changes_a_checksum_and_a_bit_in_a_gap_does_not():
    for seed in range(20):
        choose = np.random.default_rng(seed)
        array, memory = random_array(choose)
        before, own = of_host(array), bytes_of(array) - memory.__array_interface__["data"][0]
        for place in range(len(memory)):
            memory[place] ^= 1 << int(choose.integers(8))
            assert (of_host(array) != before) == (place in own), (seed, place)
            before = of_host(array)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (float("nan"), -float("nan")), (1.0, np.nextafter(1.0, 2))])
def test_bits_are_compared_and_not_values(one, other):
    first, second = np.array([one, 3.0]), np.array([other, 3.0])
    assert of_host(first) != of_host(second)


def test_places_count():
    assert of_host(np.array([1, 2])) != of_host(np.array([2, 1]))


def test_an_array_without_elements_has_a_checksum():
    assert of_host(np.ones((0, 3))) == of_host(np.ones((3, 0), np.int8)) == 0


def test_long_arrays_are_mixed_in_parts():
    words = np.arange(600_000, dtype=np.uint64)
    before = of_host(words)
    assert fold(words) == before
    words[-1] ^= np.uint64(1)
    assert of_host(words) != before


def run_on_cpu(library, arrays):
    """Launch the kernel over NumPy's arrays, as `CudaSums` does."""
    words = [Words.of(each.__array_interface__["data"][0], each.shape, each.strides, each.itemsize) for each in arrays]
    sums = np.full(checksum.MOST_BLOCKS * len(words), 7, np.uint64)
    argument, (across, down) = checksum.arguments(words, sums.__array_interface__["data"][0])
    where, count = argument.buffer_info()
    assert library.run(ctypes.c_void_p(where), ctypes.c_long(8 * count), across, down, checksum.THREADS) == 0
    return [int(part.sum(dtype=np.uint64)) for part in sums[: across * down].reshape(down, across)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel's source, compiled for the CPU."""
    if COMPILER is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("checksum")
    macros = [f"#define {name} {value}" for name, value in (checksum.MACROS | {"THREADS": 32}).items()]
    entry = """
extern "C" long run(void* argument, long bytes, unsigned across, unsigned down, unsigned threads) {
    Checksums given;
    if (bytes != sizeof given) return sizeof given;
    memcpy(&given, argument, sizeof given);
    launch(across, down, THREADS, true, [&] { checksum(given); });
    return 0;
}
"""
    source, made = folder / "checksum.cpp", folder / "checksum.so"
    source.write_text("\n".join([SHIM, *macros, checksum.source(), entry]), encoding="utf-8")
    subprocess.run([COMPILER, "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def test_the_kernel_computes_what_the_host_does(library):
    for seed in range(6):
        choose = np.random.default_rng(seed)
        made = [random_array(choose) for _ in range(choose.integers(1, checksum.MOST_ARRAYS + 1))]
        arrays = [array for array, _ in made]
        assert run_on_cpu(library, arrays) == [of_host(array) for array in arrays], seed


def test_the_kernel_takes_several_blocks(library):
    array = np.arange(3000, dtype=np.uint32).reshape(50, 60).T[::2]
    assert run_on_cpu(library, [array, np.ones(3)]) == [of_host(array), of_host(np.ones(3))]


def test_a_launch_has_room_for_its_argument_on_every_gpu():
    words = [Words.of(0, (2,), (8,), 8)] * checksum.MOST_ARRAYS
    argument, _ = checksum.arguments(words, 0)
    assert 8 * len(argument) <= 4096


def test_more_axes_than_the_kernel_takes_are_refused():
    axes = checksum.MOST_AXES + 1
    words = Words.of(0, (2,) * axes, tuple(3**axis * 8 for axis in range(axes)), 4)
    with pytest.raises(ValueError, match="axes that cannot be merged"):
        checksum.arguments([words], 0)


def test_on_a_host_stream_they_are_as_the_stream_finds_the_arrays():
    driver = HostDriver(scheduler="adversarial")
    with HandlePool(driver=driver), driver.create_stream() as stream:
        x = driver.asarray(np.zeros(8, np.float32))
        with driver.relaxed():
            before = driver.checksums([x, x[::2]], stream.ptr)
            x += 1
            after = driver.checksums([x, x[::2]], stream.ptr)
            after.wait()
        zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
        assert before.ready()
        assert before.values() == [of_host(zeros), of_host(zeros[::2])]
        assert after.values() == [of_host(ones), of_host(ones[::2])]


def test_on_the_host_driver_they_are_asked_for_inside_relaxed_and_not_in_a_capture():
    driver = HostDriver()
    with HandlePool(driver=driver), driver.create_stream() as stream:
        x = driver.asarray(np.zeros(8, np.float32))
        with driver.relaxed():
            driver.begin_capture(stream.ptr)
            with pytest.raises(CaptureError, match="checksums"):
                driver.checksums([x], stream.ptr)
            with pytest.raises(CaptureError):
                driver.end_capture(stream.ptr)
