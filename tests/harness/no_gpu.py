"""The cuda driver without a GPU: CuPy's arrays over made-up addresses, and a raw entry that reads what it was pointed to."""

import ctypes
import itertools
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
from cupy.cuda.memory import MemoryPointer, UnownedMemory

from handlepool import HandlePool, ParallelStates
from handlepool.drivers.cuda.driver import CudaDriver
from handlepool.drivers.cuda.executable import CudaExecutable
from handlepool.drivers.cuda.kernel_executable import KernelExecutable
from handlepool.drivers.cuda.prepared import prepared
from handlepool.tensors import frontend


class Launch(SimpleNamespace):
    """What an entry was called with: ``addresses``, ``workspace``, ``handle``, ``index`` of the plan, and its ``thread``."""


class Handle:
    def __init__(self, number, stream=0):
        self.backend_handle = number
        self.stream = stream


class Stream:
    def __init__(self, driver, ptr, device):
        self._driver = driver
        self._before = []
        self.ptr = ptr
        self.device_id = device

    def __cuda_stream__(self):
        return 0, self.ptr

    def use(self):
        here = self._driver.here
        here.streams[self.device_id if self.ptr else here.device] = self

    def __enter__(self):
        self._before.append(self._driver.current_stream())
        self.use()
        return self

    def __exit__(self, *_):
        self._before.pop().use()


class Here(threading.local):
    """What is current in a thread."""

    def __init__(self, streams):
        self.device = 0
        self.streams = list(streams)


class Executable(CudaExecutable):
    """A graph that was never built; ``driver.launches`` tells how it was launched."""

    untried = False

    def __init__(self, driver, graph, operands, *, name, titles, plan_index=None, **_):
        driver.compiled += 1
        self.graph = SimpleNamespace(execute=self._execute)
        self._driver, self._device = driver, driver.current_device()
        self.name, self.titles = name, titles
        self.workspace_size, self.engine, self.candidates = driver.workspace_size, "engine", 3
        self._uids = [tensor.uid for tensor in operands]
        self._copies = ()
        self._early = False
        self._index = driver.compiled * 100 + (plan_index or 0)
        self._raw = self._enter if driver.raw else None

    def _enter(self, location, count, workspace, handle, index):
        then, self._driver.entering = self._driver.entering, None
        if then is not None:
            then()
        self._launch(list((ctypes.c_uint64 * count).from_address(location)), workspace, handle, index)

    def _execute(self, pack, workspace, handle):
        self._launch([pack[uid] for uid in sorted(pack)], workspace or 0, handle.backend_handle, self._index)

    def _launch(self, addresses, workspace, handle, index):
        driver = self._driver
        driver.log.append("launch")
        if driver.error is not None:
            raise driver.error
        made = Launch(addresses=addresses, workspace=workspace, handle=handle, index=index, thread=threading.get_ident())
        driver.launches.append(made)


class OwnKernel(KernelExecutable):
    """A kernel of our own that was never compiled; in ``driver.launches`` the stream stands for the handle."""

    def _entry(self, launch):
        driver = self._driver

        def enter(location, count, workspace, stream, index):
            driver.log.append("launch")
            if driver.error is not None:
                raise driver.error
            addresses = list((ctypes.c_uint64 * count).from_address(location))
            made = Launch(addresses=addresses, workspace=workspace, handle=stream, index=launch, thread=threading.get_ident())
            driver.launches.append(made)

        return enter


class NoGpuDriver(CudaDriver):
    """Counts what it compiles and lists what is launched, in ``log`` with allocations, events and waits.

    ``raw`` says whether executables have the raw entry, ``workspace_size`` what they need, ``error`` what a launch raises.
    ``reserving`` is called once, where a slot reserves its workspace, and ``entering`` once, before the raw entry reads.
    """

    def __init__(self, devices=1):
        super().__init__()
        self.devices = devices
        self.null = Stream(self, 0, 0)  # one object for all devices, as CuPy's
        self.here = Here([self.null] * devices)
        self.raw, self.workspace_size, self.error = True, 0, None
        self.reserving = self.entering = None
        self.compiled = 0
        self.launches, self.log = [], []
        self._numbers = itertools.count(1)
        self._addresses = itertools.count(1 << 30, 1 << 20)

    def device_count(self):
        return self.devices

    def current_device(self):
        return self.here.device

    def set_device(self, ordinal):
        self.here.device = ordinal

    @contextmanager
    def device(self, ordinal):
        before, self.here.device = self.here.device, ordinal
        try:
            yield
        finally:
            self.here.device = before

    def current_stream(self, device=-1):
        here = self.here
        return here.streams[here.device if device == -1 else device]

    def create_stream(self):
        return Stream(self, 0x1000 + next(self._numbers), self.here.device)

    def wrap_stream(self, pointer, owner):
        assert pointer == 0
        return self.null

    def owns_stream(self, stream):
        return isinstance(stream, Stream)

    def stream_id(self, pointer):
        return pointer

    def capture_id(self, pointer):
        then, self.reserving = self.reserving, None
        if then is not None:
            then()
        return 0

    def is_capturing(self, pointer):
        return False

    def create_event(self, *, timing=False):
        return next(self._numbers)

    def destroy_event(self, event):
        pass

    def record_event(self, event, pointer):
        self.log.append(("record", pointer))

    record_event_next = record_event

    def wait_event(self, pointer, event):
        self.log.append(("wait", pointer))

    def event_done(self, event, failures=False):
        return True

    def synchronize_event(self, event):
        pass

    def synchronize_stream(self, pointer):
        pass

    def copy_run(self, target, source, pointer):
        self.log.append(("copy", pointer))

    def prepared(self, copies):
        return prepared(copies, self.copy, lambda _: 0, 2, None)

    def create_handle(self):
        return Handle(next(self._numbers))

    def bind_handle(self, handle, pointer):
        handle.stream = pointer

    def destroy_handle(self, handle):
        handle.backend_handle = handle.stream = None

    def relaxed(self):
        return nullcontext()

    def memory_info(self):
        return 1 << 40, 1 << 40

    def context_lost(self, error, ask=True):
        return None

    def allocate(self, nbytes):
        return next(self._addresses)

    def free(self, pointer):
        pass

    def alloc(self, nbytes, address=None, device=None):
        """As `cupy.cuda.alloc`."""
        self.log.append("allocate")
        memory = UnownedMemory(address or next(self._addresses), nbytes, None, self.here.device if device is None else device)
        return MemoryPointer(memory, 0)

    def empty(self, shape, strides, dtype):
        return cupy.ndarray(shape, dtype, self.alloc(1 << 20), strides)

    def swap_allocator(self, allocator):
        return None

    def region_allocator(self, stream, keep, of):
        return None

    def new_graph(self, **settings):
        return frontend.new_graph(**settings)

    def compile(self, graph, operands, **settings):
        return Executable(self, graph, operands, **settings)

    def kernel(self, kernel, operands, *, name, titles):
        return OwnKernel(self, kernel, operands, name, titles)


class World:
    """A pool over the driver, states, and a stream of its own that is current; closed on leaving.

    CuPy allocates from the driver meanwhile.
    """

    def __init__(self, *, devices=1, driver=None, **options):
        self.driver = driver or NoGpuDriver(devices)
        self.pool = HandlePool(driver=self.driver, **options)
        self.states = ParallelStates(4, pool=self.pool)
        self.stream = self.driver.create_stream()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self):
        self.stream.__enter__()
        self._patch.setattr(cupy.cuda, "alloc", self.driver.alloc)
        return self

    def __exit__(self, *_):
        self._patch.undo()
        self.stream.__exit__()
        self.pool.close()

    def array(self, *shape, dtype="float32", strides=None, address=None, device=None):
        """An array somewhere, or where it is told."""
        memory = self.driver.alloc(1 << 20, address, device)
        return cupy.ndarray(shape or (2, 4), np.dtype(dtype), memory, strides)

    def launched(self, function, *args, **kwargs):
        """The one launch that a call makes."""
        before = len(self.driver.launches)
        function(*args, **kwargs)
        (launch,) = self.driver.launches[before:]
        return launch


def addresses(*arrays):
    return [array.data.ptr for array in arrays]
