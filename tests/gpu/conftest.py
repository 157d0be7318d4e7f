"""Fixtures of the tests that need a GPU. Without one each is skipped, saying why.

Tests that need a second GPU, or another array library, are deselected where that is missing, so a skip always means a machine
without a GPU, or one without compute-sanitizer.
"""

import ctypes
import os
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from harness.insides import cudnn_binding

from handlepool import HandlePool, drivers

# Streams that share a hardware queue wait for each other, and 8 queues are the default. Read when the context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

LIMIT = 20
"""Seconds after which what should have happened counts as failed."""

_needs = {
    "test_gpu_torch.py": "torch",
    "test_gpu_program_torch.py": "torch",
    "test_gpu_lanes_torch.py": "torch",
    "test_gpu_recorded_torch.py": "torch",
    "test_gpu_torch_arrays.py": "torch",
    "test_gpu_torch_kernels.py": "torch",
    "test_gpu_torch_models.py": "torch",
    "test_gpu_integrations_torch.py": "torch",
    "test_gpu_integrations_cudnn.py": "torch",
    "test_gpu_jax.py": "jax",
    "test_gpu_dask.py": "distributed",
    "test_gpu_numba.py": "numba_cuda",
}
collect_ignore = [name for name, module in _needs.items() if not find_spec(module)]

_streams = []  # kept to the end, under the sanitizer
_here = Path(__file__).parent
_kernels = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
extern "C" __global__ void write(float* to, float value, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = value;
}
extern "C" __global__ void copy(const float* from, float* to, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mine = [item for item in items if _here in item.path.parents]
    if not mine:
        return
    problem = drivers.available("cuda")
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if problem:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {problem}"))
    # XLA has threads that ask its streams from time to time whether they have passed, which ends any global capture.
    items.sort(key=lambda item: item.path.name == "test_gpu_jax.py")  # to the end
    surplus = []
    if not problem and os.environ.get("HANDLEPOOL_TEST_SANITIZER"):
        # With CuPy's pool in between, compute-sanitizer sees no access to an array that was freed. With the driver's
        # stream-ordered allocations it sees those that are not ordered, too. It waits for each kernel, so that a stream which
        # the host holds back would hold the host; one that a kernel keeps busy does not.
        import cupy

        from handlepool.drivers.cuda.driver import CudaDriver

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        # It tells streams apart by their addresses, so that a new one at an old address would stand for both.
        create = CudaDriver.create_stream
        CudaDriver.create_stream = lambda driver: _streams.append(create(driver)) or _streams[-1]
        surplus = [item for item in mine if "latch" in item.fixturenames]
    if not problem and drivers.load("cuda").device_count() < 2:
        surplus += [item for item in mine if item.get_closest_marker("two_gpus")]
    if surplus:
        config.hook.pytest_deselected(items=surplus)
        items[:] = [item for item in items if item not in surplus]


@pytest.fixture
def pool():
    """A pool of the test's own on the cuda driver, closed after it."""
    with HandlePool(driver="cuda") as pool:
        yield pool


@pytest.fixture
def stream():
    """A stream of the test's own, current during the test."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        if os.environ.get("HANDLEPOOL_TEST_SANITIZER"):
            _streams.append(stream)
        yield stream
        stream.synchronize()


@pytest.fixture
def torch():
    import torch

    torch.cuda.init()
    return torch


class Kernels:
    """Hand-written kernels on the current stream, launched once each before any test: the first launch of a kernel loads it,
    for which it may wait for the device."""

    def __init__(self):
        import cupy

        self._cupy = cupy
        module = cupy.RawModule(code=_kernels)
        self._spin, self._write, self._copy = (module.get_function(name) for name in ("spin", "write", "copy"))
        array = cupy.zeros(8, np.float32)
        self.spin(0)
        self.write(array, 0)
        self.copy(array, cupy.empty_like(array))
        cupy.cuda.Device().synchronize()

    def spin(self, milliseconds):
        """Keep the stream busy."""
        self._spin((1,), (1,), (np.int64(milliseconds * 1e6),))

    def write(self, array, value):
        """Fill a float32 array."""
        self._write((32,), (256,), (array, np.float32(value), np.int32(array.size)))

    def copy(self, source, target=None):
        """Copy a float32 array, into a new one where no target is given."""
        if target is None:
            target = self._cupy.empty_like(source)
        self._copy((32,), (256,), (source, target, np.int32(source.size)))
        return target

    def full(self, n, value):
        """A new float32 array of one value."""
        array = self._cupy.empty(n, np.float32)
        self.write(array, value)
        return array


@pytest.fixture(scope="session")
def kernels():
    """`Kernels`: spin, write, copy, full."""
    return Kernels()


class Latch:
    """Holds streams back until it is released: they wait for a word of host memory.

    It releases itself after a while, so that whatever blocks the host while it holds fails the test and does not hang it.
    """

    words = None
    next = 0

    def __init__(self):
        import cupy
        from cuda.bindings import driver

        if Latch.words is None:
            Latch.words = cupy.cuda.alloc_pinned_memory(1 << 16)
        self._driver = driver
        self._current_stream = cupy.cuda.get_current_stream
        self._address = Latch.words.ptr + 4 * Latch.next  # no word is used twice
        Latch.next += 1
        self.word = ctypes.c_uint32.from_address(self._address)
        self.word.value = 0
        self.timer = threading.Timer(LIMIT, self._expire)
        self.timer.daemon = True
        self.expired = False

    def hold(self):
        """Hold back what the current stream is given from now on."""
        if not self.timer.is_alive():
            self.timer.start()
        (status,) = self._driver.cuStreamWaitValue32(self._current_stream().ptr, self._address, 1, 0)
        assert status == self._driver.CUresult.CUDA_SUCCESS, status

    def release(self):
        """Let go of every stream."""
        self.word.value = 1
        self.timer.cancel()
        assert not self.expired, "the host was blocked until the latch released itself"

    def _expire(self):
        self.expired = True
        self.word.value = 1


@pytest.fixture
def latch(pool, stream, kernels):
    """A `Latch`, released before the pool and the stream are torn down. The pool has what the test will need: whatever is made
    or loaded while a stream is held back may wait for it."""
    pool.prewarm(states=4, workspace=1 << 20)
    latch = Latch()
    yield latch
    latch.timer.cancel()
    latch.word.value = 1


@pytest.fixture
def comes_to_pass():
    """Wait, for a limited time, for an event, or for what a stream has been given; says whether it came to pass."""

    def wait(awaited):
        event = awaited if hasattr(awaited, "done") else awaited.record()
        deadline = time.monotonic() + LIMIT / 2
        while not event.done:
            if time.monotonic() > deadline:
                return False
        return True

    return wait


@pytest.fixture
def in_threads():
    """Run ``function(i)`` in ``count`` threads, and give the values in order: ``in_threads(count, function)``.

    They start together, and none ends, which would give its slots to another, before each has run its function.
    """

    def run(count, function):
        begin, end = threading.Barrier(count), threading.Barrier(count)
        outcomes = [None] * count

        def body(i):
            try:
                begin.wait(LIMIT)
                outcomes[i] = function(i), None
            except BaseException as error:
                outcomes[i] = None, error
            end.wait(2 * LIMIT)

        threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * LIMIT)
            assert not thread.is_alive(), "a thread hangs"
        for _, error in outcomes:
            if error is not None:
                raise error
        return [value for value, _ in outcomes]

    return run


@pytest.fixture
def captured_elsewhere(stream, kernels):
    """``with captured_elsewhere():`` another thread captures, in the strictest mode; the graph is right in the end."""
    import cupy

    @contextmanager
    def capturing():
        array = kernels.full(1 << 12, 0)
        begun, done = threading.Event(), threading.Event()
        graphs = []

        def other():
            with cupy.cuda.Stream(non_blocking=True) as own:
                own.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
                try:
                    kernels.write(array, 3)
                    begun.set()
                    done.wait(6 * LIMIT)
                finally:
                    graphs.append(own.end_capture())

        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(LIMIT)
        try:
            yield
        finally:
            done.set()
            thread.join(LIMIT)
        graphs[0].launch(stream)
        assert (array.get() == 3).all()

    return capturing


@pytest.fixture(scope="session")
def edges():
    """Nodes of a captured graph, and pairs of nodes of which the second runs after the first: ``edges(pointer)``."""

    def of(graph):
        from cuda.bindings import driver

        from handlepool.drivers.cuda.edges import with_edge_data

        status, _, count = driver.cuGraphGetNodes(graph)
        assert status == 0
        status, nodes, _ = driver.cuGraphGetNodes(graph, count)
        assert status == 0
        get_edges = with_edge_data(driver, "cuGraphGetEdges")
        status, *_, count = get_edges(graph)
        assert status == 0
        if not count:
            return [int(node) for node in nodes], []
        status, begins, ends, *_ = get_edges(graph, count)
        assert status == 0
        return [int(node) for node in nodes], [(int(a), int(b)) for a, b in zip(begins, ends, strict=True)]

    return of


@pytest.fixture(scope="session")
def random_array():
    """Random normal values on the GPU: ``random_array(shape, dtype, layout, seed)``."""
    import cupy

    def make(shape, dtype="float32", layout="nchw", seed=0):
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        values = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
        if layout == "nhwc" and len(shape) == 4:
            return cupy.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
        return cupy.asarray(values)

    return make


@pytest.fixture
def backend_stream():
    """The stream that cuDNN itself says a handle is bound to."""

    return lambda handle: cudnn_binding().get_stream(handle.backend_handle)


@pytest.fixture
def eager_work():
    """Another thread allocates, computes and frees meanwhile, and sees that its own values are right."""
    import cupy

    stop, wrong, rounds = threading.Event(), [], []

    def work():
        with cupy.cuda.Stream(non_blocking=True) as own:
            while not stop.is_set():
                flags = []
                for size in (640, 1 << 12, 1 << 14, 1 << 16):
                    x = cupy.full(size, 7, np.float32)
                    for _ in range(4):
                        x = x * 2 - 7
                    flags.append((x != 7).any())
                wrong.append(bool(cupy.stack(flags).any()))
                rounds.append(own.done)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield rounds
    stop.set()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert rounds
    assert not any(wrong)
