"""Copies of the cuda driver between devices and to the host, over a runtime that is pretended: what it is asked for."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.cupy

from handlepool.drivers.cuda import driver as cuda  # noqa: E402
from handlepool.tensors.layout import span  # noqa: E402


class RuntimeRefusalError(RuntimeError):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Runtime:
    """Copies at once, and notes what was asked for."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDefault = 1, 2, 4
    CUDARuntimeError = RuntimeRefusalError

    def __init__(self, reaches=1, refusal=None, kind=0):
        self.reaches, self.refusal, self.kind, self.asked = reaches, refusal, kind, []

    def deviceCanAccessPeer(self, here, there):
        return self.reaches

    def deviceEnablePeerAccess(self, there):
        self.asked.append(("reach", there))
        if self.refusal is not None:
            raise RuntimeRefusalError(self.refusal)

    def memcpyPeerAsync(self, target, here, source, there, nbytes, pointer):
        self.asked.append(("copy", here, there, nbytes, pointer))
        ctypes.memmove(target, source, nbytes)

    def memcpyAsync(self, target, source, nbytes, kind, pointer):
        self.asked.append(("copy", nbytes, kind, pointer))
        ctypes.memmove(target, source, nbytes)

    memoryTypeHost = 1

    def pointerGetAttributes(self, pointer):
        self.asked.append(("where", pointer))
        return SimpleNamespace(type=self.kind, device=0)


class DeviceArray:
    """A GPU's array, in truth in the host's memory."""

    def __init__(self, values, device):
        self.values = values
        self.data = SimpleNamespace(ptr=values.__array_interface__["data"][0], device_id=device)
        for name in ("shape", "strides", "dtype", "size", "ndim", "nbytes"):
            setattr(self, name, getattr(values, name))


def pinned(nbytes):
    """As `cupy.cuda.alloc_pinned_memory`."""

    class Memory(ctypes.c_byte * nbytes):
        pass

    memory = Memory()
    memory.ptr = ctypes.addressof(memory)
    return memory


@pytest.fixture
def make(monkeypatch):
    """A driver whose device is 1 and whose stream is 99, and its runtime."""

    def made(**options):
        runtime = Runtime(**options)
        monkeypatch.setattr(cuda, "runtime", runtime)
        monkeypatch.setattr(cuda.cupy.cuda, "alloc_pinned_memory", pinned)
        driver = cuda.CudaDriver()
        driver.current_device = lambda: 1
        driver.current_stream = lambda: SimpleNamespace(ptr=99)
        return driver, runtime

    return made


@pytest.mark.parametrize("refusal", [None, 704])
def test_a_device_is_asked_once_to_reach_another(make, refusal):
    driver, runtime = make(refusal=refusal)
    source = DeviceArray(np.arange(6.0), 0)
    for _ in range(2):
        target = DeviceArray(np.zeros(6), 1)
        driver.copy_from_device(target, source, 99)
        assert (target.values == source.values).all()
    assert runtime.asked == [("reach", 0), *[("copy", 1, 0, 48, 99)] * 2]


def test_devices_that_do_not_reach_each_other_copy_all_the_same(make):
    driver, runtime = make(reaches=0)
    driver.copy_from_device(DeviceArray(np.zeros(6), 1), DeviceArray(np.arange(6.0), 0), 99)
    assert runtime.asked == [("copy", 1, 0, 48, 99)]


def test_another_refusal_is_an_error(make):
    driver, runtime = make(refusal=2)
    with pytest.raises(RuntimeRefusalError):
        driver.copy_from_device(DeviceArray(np.zeros(6), 1), DeviceArray(np.arange(6.0), 0), 99)
    assert runtime.asked == [("reach", 0)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 0, 4, 5)])
def test_a_copy_to_the_host_has_the_layout_of_the_array(make, order, shape):
    driver, runtime = make()
    values = np.random.default_rng(1).standard_normal([shape[axis] for axis in order]).transpose(np.argsort(order))
    host = driver.copy_to_host(DeviceArray(values, 1), 99)
    assert host.shape == values.shape == shape
    assert (host == values).all()
    assert runtime.asked == ([("copy", values.nbytes, 2, 99)] if values.size else [])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_a_copy_from_the_host_has_the_values_of_the_call(make, order):
    driver, runtime = make()
    queued = []
    runtime.memcpyAsync = lambda *copy: queued.append(copy)
    given = np.random.default_rng(2).standard_normal((3, 4, 10, 5))[:, :, ::-2]
    target = DeviceArray(np.zeros([given.shape[axis] for axis in order]).transpose(np.argsort(order)), 1)
    right = given.copy()
    kept = driver.copy_from_host(target, given, 99)
    given[...] = np.nan  # the stream comes to it later
    ((to, source, nbytes, kind, pointer),) = queued
    assert (to, source, nbytes, kind, pointer) == (target.data.ptr, kept.ptr, right.nbytes, 1, 99)
    ctypes.memmove(to, source, nbytes)
    assert (target.values == right).all()


def laid(shape, order, dtype=float):
    values = np.arange(np.prod(shape), dtype=dtype) + 1
    return values.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


NHWC = laid((2, 3, 4, 5), (0, 2, 3, 1))
GAPS = laid((4, 6), (0, 1))[:, ::2]
PAIRS = {
    "row-major": (laid((3, 4), (0, 1)), laid((3, 4), (0, 1)), True),
    "column-major": (laid((3, 4), (1, 0)), laid((3, 4), (1, 0)), True),
    "channels-last": (NHWC, NHWC.copy(order="K"), True),
    "one element": (np.ones(()), np.zeros(()), True),
    "axes of extent 1 that lie anywhere": (laid((4, 6), (0, 1))[1:2], np.zeros((6, 1)).T, True),
    "another order": (NHWC, np.zeros(NHWC.shape), False),
    "a row for all": (np.broadcast_to(np.arange(4.0), (3, 4)), np.zeros((3, 4)), False),
    "a smaller shape of equal strides": (laid((1, 4), (0, 1)), np.zeros((3, 4)), False),
    "a smaller shape of equal strides, axes fewer": (np.arange(4.0), np.zeros((3, 4)), False),
    "gaps in both": (GAPS, np.zeros((4, 6))[:, ::2], False),
    "gaps in the source": (GAPS, np.zeros((4, 3)), False),
    "both backwards": (np.arange(6.0)[::-1], np.zeros(6)[::-1], False),
    "backwards": (np.arange(6.0)[::-1], np.zeros(6), False),
    "another type of as many bytes": (np.arange(6), np.zeros(6), False),
    "a smaller type": (np.arange(6, dtype=np.float32), np.zeros(6), False),
    "nothing": (np.zeros((3, 0)), np.zeros((3, 0)), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_copy_is_right_and_one_of_bytes_where_both_lie_alike(make, monkeypatch, name):
    source, target, as_bytes = PAIRS[name]
    driver, runtime = make()
    monkeypatch.setattr(cuda.cupy, "copyto", lambda target, source: np.copyto(target.values, source.values))
    target[...] = -1
    driver.copy(DeviceArray(target, 1), DeviceArray(source, 1))
    assert (target == source).all()
    assert runtime.asked == ([("copy", target.nbytes, 4, 99)] if as_bytes else [])


@pytest.mark.parametrize("name", [name for name, (*_, as_bytes) in PAIRS.items() if not as_bytes and name != "nothing"])
def test_control_what_lies_otherwise_would_be_copied_wrongly_as_bytes(make, monkeypatch, name):
    """Out of memory that has more on both sides of the source, and into such."""
    source, target, _ = PAIRS[name]
    driver, _ = make()

    def amid(array):
        memory = np.full(4096, 0x55, np.uint8)
        start, stop = span(1024, array.shape, array.strides, array.dtype.itemsize)
        address = array.__array_interface__["data"][0]
        memory[start:stop] = np.frombuffer(ctypes.string_at(address + start - 1024, stop - start), np.uint8)
        return np.ndarray(array.shape, array.dtype, memory, 1024, array.strides), memory

    target[...] = -1
    (source, _), (got, all_of_it), (right, and_right) = amid(source), amid(target), amid(target)
    np.copyto(right, source)
    driver.copy_run(DeviceArray(got, 1), DeviceArray(source, 1), 99)
    assert all_of_it.tobytes() != and_right.tobytes()


@pytest.mark.parametrize(("kind", "locked"), [(0, False), (1, True), (2, False), (3, False)])
def test_page_locked_memory_is_known(make, kind, locked):
    """0 is memory that CUDA does not know, 1 the host's, 2 a device's, 3 managed."""
    driver, runtime = make(kind=kind)
    values = np.zeros((4, 6))[1:]
    assert driver.page_locked(values) is locked
    assert runtime.asked == [("where", values.ctypes.data)]
