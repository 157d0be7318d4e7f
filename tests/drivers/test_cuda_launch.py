"""What a launch on the cuda driver hands to cuDNN, with CuPy's arrays over made-up addresses: needs CuPy, and no GPU."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from handlepool import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.drivers.kernel import Add
from handlepool.graphs import launch
from handlepool.graphs.plan import Plan
from handlepool.tensors.layout import Layout

pytestmark = pytest.mark.cupy
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
cuda = pytest.importorskip("handlepool.drivers.cuda.driver", reason="the cuda driver's packages are not installed")
from handlepool.drivers.cuda import fast_launch, kernel_executable, kernels  # noqa: E402


class Handle:
    backend_handle = 1234


class Entry:
    """Stands in for the raw entry beneath ``pygraph.execute``, and reads what it was pointed to."""

    def __init__(self):
        self.calls = []

    def __call__(self, location, count, workspace, handle, index):
        addresses = (ctypes.c_uint64 * count).from_address(location)
        self.calls.append((list(addresses), workspace, handle, index))


def array_at(address, device=0, size=8):
    memory = cupy.cuda.memory.UnownedMemory(address, 4096, None, device)
    return cupy.ndarray((size,), np.float32, cupy.cuda.memory.MemoryPointer(memory, 0))


def executable_of(entry, *, early=False):
    """An executable of an entry, as a plan of cuDNN's has; None for an entry that the frontend does not have."""
    driver = object.__new__(cuda.CudaDriver)
    driver.current_device = lambda: 0
    planned = SimpleNamespace(
        saved=None, save=None, graph=None, copies_at=0, workspace_size=0, engine="engine", candidates=1, uids=[1, 2, 3],
        raw=entry, index=7, early=early,
    )  # fmt: skip
    return cuda.CudaExecutable(driver, planned, name="conv2d", titles=["argument 0 (x)", "argument 1 (w)", "out="])


@pytest.fixture
def entry():
    return Entry()


@pytest.fixture
def executable(entry):
    return executable_of(entry)


ADDRESSES = [0x10000, 0x20000, 0x30010]


def test_addresses_go_in_the_order_of_the_operands(executable, entry):
    executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0x5000)
    executable.launch(Handle(), [array_at(address) for address in reversed(ADDRESSES)], 0)
    assert entry.calls == [(ADDRESSES, 0x5000, 1234, 7), (ADDRESSES[::-1], 0, 1234, 7)]


def test_the_check_is_called_with_the_addresses_before_anything_is_launched(executable, entry):
    seen = []

    def check(addresses):
        seen.extend(addresses[:3])
        raise ArgumentError("they overlap")

    with pytest.raises(ArgumentError, match="they overlap"):
        executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0, check)
    assert seen == ADDRESSES
    assert entry.calls == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (array_at(0x40004), ArgumentError, "begins 4 bytes past a multiple of 16"),
        (array_at(0x40000, device=1), DeviceMismatchError, "is on device 1"),
        (np.zeros(8, np.float32), ArrayTypeError, r"numpy\.ndarray"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_cannot_be_taken_is_refused_before_anything_is_launched(executable, entry, wrong, error, message, place):
    operands = [array_at(address) for address in ADDRESSES]
    operands[place] = wrong
    with pytest.raises(error, match=message) as raised:
        executable.launch(Handle(), operands, 0)
    assert f"conv2d: {executable.titles[place]}" in str(raised.value)
    assert entry.calls == []


def test_without_the_raw_entry_the_public_one_is_called_by_uid():
    class Graph:
        def execute(self, pack, workspace, handle):
            self.given = (pack, workspace, handle.backend_handle)

    executable = executable_of(None)
    executable.graph = Graph()
    executable.launch(Handle(), [array_at(address) for address in ADDRESSES], 0)
    assert executable.graph.given == (dict(zip([1, 2, 3], ADDRESSES, strict=True)), None, 1234)


@pytest.fixture
def launched(monkeypatch):
    """What `launchKernel` was called with: function, grid and block, stream, and what its arguments point to."""
    found = []

    def launch_kernel(function, *rest):
        *grid, shared, stream, arguments, extra = rest
        assert (shared, extra) == (0, 0)
        addresses, geometry = (ctypes.c_uint64 * 2).from_address(arguments)
        found.append((function, grid, stream, list((ctypes.c_uint64 * 3).from_address(addresses)), geometry))

    monkeypatch.setattr(kernel_executable, "_function", lambda device, launch: SimpleNamespace(ptr=77))
    monkeypatch.setattr(cupy.cuda, "driver", SimpleNamespace(launchKernel=launch_kernel))
    return found


def test_a_kernel_is_launched_on_the_handles_stream_with_the_addresses_in_order_and_its_geometry(launched):
    layout = Layout((8,), (4,), np.dtype(np.float32))
    driver = CountingEvents()
    made = kernel_executable.KernelExecutable(driver, Add(), [layout] * 3, "add", ["argument 0", "argument 1", "out="])
    handle = SimpleNamespace(backend_handle=1234, stream=0x77)
    made.launch(handle, [array_at(address) for address in ADDRESSES], 0)
    plan = kernels.plan(Add(), [layout] * 3)
    ((function, grid, stream, addresses, geometry),) = launched
    assert (function, stream, addresses) == (77, 0x77, ADDRESSES)
    assert grid == [*plan.grid, 1, plan.threads, 1, 1]
    assert ctypes.string_at(geometry, len(plan.geometry) * 4) == plan.geometry.tobytes()
    seen = []
    with pytest.raises(ArgumentError, match="argument 1, of shape"):
        made.launch(handle, [array_at(0x10000), array_at(0x20004), array_at(0x30000)], 0, seen.append)
    assert (len(launched), seen) == (1, [])


def test_a_shortcut_to_a_kernel_launches_on_the_stream():
    from harness.no_gpu import World

    from handlepool import add

    with World() as world:
        x, z, out = (world.array(1, 4, 6, 6) for _ in range(3))
        for given in (out, out, None, None):
            y = add(x, z, out=given, pool=world.pool)
            launch = world.driver.launches[-1]
            assert launch.addresses == [x.data.ptr, z.data.ptr, y.data.ptr]
            assert launch.handle == world.stream.ptr
        (attempts,) = [made for (function, *_), made in world.pool.internals.plans.shortcuts.items()]
        assert len(attempts) == 2


def test_g10_a_launch_that_fails_leaves_the_slot_free(executable, make_pool):
    executable.workspace_size = 0
    plan = Plan("plan", 0, executable, (), (), True, False)
    pool = make_pool().internals
    slot = pool.slot()
    with pytest.raises(ArrayTypeError):
        launch.launch(pool, plan, slot, (np.zeros(8, np.float32),), False)
    assert not slot.busy


class CountingEvents(cuda.CudaDriver):
    """Makes numbers for events, and orders nothing."""

    def __init__(self):
        super().__init__()
        self.made = 0

    relaxed = staticmethod(contextlib.nullcontext)
    current_device = staticmethod(int)
    record_event = wait_event = staticmethod(lambda *_: None)

    def create_event(self, *, timing=False):
        self.made += 1
        return self.made


class Placed(SimpleNamespace):
    """A stream at an address, to be made current."""

    def use(self):
        CURRENT[:] = [self]


CURRENT = []


def test_g11_threads_that_allocate_in_branches_leave_no_event_each(monkeypatch, in_thread):
    driver, caller, side, other = CountingEvents(), Placed(ptr=0), Placed(ptr=0x20), Placed(ptr=0x30)
    monkeypatch.setattr(cuda.cupy.cuda, "get_current_stream", lambda: CURRENT[-1])
    monkeypatch.setattr(cuda.cupy.cuda, "get_allocator", lambda: lambda nbytes: SimpleNamespace(mem=nbytes))
    monkeypatch.setattr(cuda, "runtime", SimpleNamespace(getDevice=int))
    kept = []

    def branch():
        allocate = driver.region_allocator(caller, kept.append, lambda pointer: allocate if pointer == side.ptr else None)
        side.use()
        allocate(100)
        other.use()
        allocate(200)  # no join waits for this one: its own arena, and no edge

    for _ in range(20):
        in_thread(branch)
    assert kept == [100, 200] * 20
    assert driver.made == 1


def test_what_begins_early_is_launched_behind_a_barrier(monkeypatch):
    order = []
    monkeypatch.setattr("handlepool.drivers.cuda.executable.barrier", lambda pointer: order.append(("barrier", pointer)))
    handle, operands = Handle(), [array_at(address) for address in ADDRESSES]
    handle.stream = 0x77
    executable_of(lambda *_: order.append("launch")).launch(handle, operands, 0)
    assert order == ["launch"]
    executable_of(lambda *_: order.append("launch"), early=True).launch(handle, operands, 0)
    assert order == ["launch", ("barrier", 0x77), "launch"]


@pytest.mark.parametrize("early", [True, False])
def test_a_shortcut_knows_of_the_barrier(early, monkeypatch):

    texts = []
    monkeypatch.setattr(fast_launch, "compile", lambda text, *args: texts.append(text) or compile(text, *args), raising=False)
    layout = Layout.of(array_at(0x10000))
    names = dict.fromkeys(("raw", "index"), None)
    fast_launch.shortcut([layout], [layout], None, True, 0, None, names, early=early)
    assert ("barrier(slot.pointer); raw(" in texts[0]) is early
    assert "raw(location" in texts[0]
