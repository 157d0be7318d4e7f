"""Copies of the cuda driver between devices and to the host, over a runtime that is pretended: what it is asked for."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.cupy

from handlepool.drivers.cuda import driver as cuda  # noqa: E402


class RuntimeRefusalError(RuntimeError):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Runtime:
    """Copies at once, and notes what was asked for."""

    memcpyDeviceToHost = 2
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
        self.asked.append(("to host", nbytes, kind, pointer))
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


@pytest.fixture
def make(monkeypatch):
    """A driver whose device is 1 and whose stream is 99, and its runtime."""

    def made(**options):
        runtime = Runtime(**options)
        monkeypatch.setattr(cuda, "runtime", runtime)
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
        driver.copy_from_device(target, source)
        assert (target.values == source.values).all()
    assert runtime.asked == [("reach", 0), *[("copy", 1, 0, 48, 99)] * 2]


def test_devices_that_do_not_reach_each_other_copy_all_the_same(make):
    driver, runtime = make(reaches=0)
    driver.copy_from_device(DeviceArray(np.zeros(6), 1), DeviceArray(np.arange(6.0), 0))
    assert runtime.asked == [("copy", 1, 0, 48, 99)]


def test_another_refusal_is_an_error(make):
    driver, runtime = make(refusal=2)
    with pytest.raises(RuntimeRefusalError):
        driver.copy_from_device(DeviceArray(np.zeros(6), 1), DeviceArray(np.arange(6.0), 0))
    assert runtime.asked == [("reach", 0)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 0, 4, 5)])
def test_a_copy_to_the_host_has_the_layout_of_the_array(make, monkeypatch, order, shape):
    driver, runtime = make()

    def alloc_pinned_memory(nbytes):
        class Memory(ctypes.c_byte * nbytes):
            pass

        memory = Memory()
        memory.ptr = ctypes.addressof(memory)
        return memory

    monkeypatch.setattr(cuda.cupy.cuda, "alloc_pinned_memory", alloc_pinned_memory)
    values = np.random.default_rng(1).standard_normal([shape[axis] for axis in order]).transpose(np.argsort(order))
    host = driver.copy_to_host(DeviceArray(values, 1))
    assert host.shape == values.shape == shape
    assert (host == values).all()
    assert runtime.asked == ([("to host", values.nbytes, 2, 99)] if values.size else [])


@pytest.mark.parametrize(("kind", "locked"), [(0, False), (1, True), (2, False), (3, False)])
def test_page_locked_memory_is_known(make, kind, locked):
    """0 is memory that CUDA does not know, 1 the host's, 2 a device's, 3 managed."""
    driver, runtime = make(kind=kind)
    values = np.zeros((4, 6))[1:]
    assert driver.page_locked(values) is locked
    assert runtime.asked == [("where", values.ctypes.data)]
