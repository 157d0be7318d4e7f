"""Guarantees 10 to 13 and 16 on a GPU: threads, streams, memory, a lost context, and what CuPy's branches must not share."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import handlepool
from handlepool import ContractError, HandlePool, OutOfMemoryError, OwnershipError, ParallelStates
from handlepool.ops import conv2d_plan

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)

HERE = Path(__file__).parent
N = 1 << 14


def run(*command, **environment):
    path = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Foreign:
    """Some other library's stream, which keeps nothing alive."""

    def __init__(self, pointer):
        self.pointer = pointer

    def __cuda_stream__(self):
        return 0, self.pointer


# 10, 11. Threads


class ExpectedError(Exception):
    pass


@pytest.mark.parametrize("kind", ["ordinary", "daemon", "pool", "dying"])
def test_g11_threads_of_every_kind_give_their_slots_back(pool, random_array, kind, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    x, w = random_array((1, 64, 14, 14)), random_array((64, 64, 3, 3))
    expected = handlepool.conv2d(x, w, padding=1, pool=pool)
    cupy.cuda.Device().synchronize()
    results = []

    def body():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            results.append(handlepool.conv2d(x, w, padding=1, pool=pool))
            pool.get_workspace(1 << 16)
            stream.synchronize()
        pool.get_handle(cupy.cuda.Stream.null)
        if kind == "dying":
            raise ExpectedError

    for _ in range(25):
        if kind == "pool":
            with ThreadPoolExecutor(4) as executor:
                list(executor.map(lambda _: body(), range(4)))
        else:
            threads = [threading.Thread(target=body, daemon=kind == "daemon") for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
    assert len(results) == 100
    assert all((y == expected).all() for y in results)
    assert pool.stats()["handles_created"] <= 2 + 2 * 4


@pytest.fixture
def quick_switches():
    """Threads hand the interpreter on often: more interleavings, and no thread waits 5 ms behind each of the others."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_switches")
def test_g11_accessors_against_trim(pool, kernels, in_threads):
    accessors, trimmers, rounds = 15, 5, 10
    turns = threading.Semaphore(0)
    (kernels.full(N, 0) != 1).any()  # is compiled here, not in every thread

    def body(i):
        if i >= accessors:
            for _ in range(accessors * rounds // trimmers):
                turns.acquire()
                pool.trim()
            return 0
        wrong = 0
        lasting = cupy.cuda.Stream(non_blocking=True)
        for turn in range(rounds):
            turns.release()
            with lasting if turn % 2 else cupy.cuda.Stream(non_blocking=True) as stream:
                handle = pool.get_handle()
                memory = pool.get_workspace(4 * (N + 1000 * (turn % 7))).view(cupy.float32)
                kernels.write(memory, 100 * i + turn)
                result = kernels.copy(memory)
                assert pool.get_handle() is handle
                wrong += int((result != 100 * i + turn).any())
                stream.synchronize()
        return wrong

    assert sum(in_threads(accessors + trimmers, body)) == 0
    stats = pool.stats()
    assert stats["handles_created"] == sum(
        stats[name] for name in stats if name in ("handles_live", "handles_idle", "handles_leased", "handles_destroyed")
    )


def chain(pool, kernels, in_threads, handle_of, steps=1000, threads=4):
    """Each thread, on its own stream: a convolution with ones, which multiplies by 16, and ``x / 16 + 1``, again and again; the
    largest error of all. Every number is an integer that TF32 holds."""
    w = cupy.ones((16, 16, 1, 1), cupy.float32)
    xs = [cupy.zeros((4, 16, 32, 32), cupy.float32) for _ in range(threads)]
    ys = [cupy.empty_like(x) for x in xs]
    plan = conv2d_plan(xs[0], w, out=ys[0], pool=pool)
    rescale = cupy.ElementwiseKernel("float32 y", "float32 x", "x = y / 16 + 1", "rescale")
    rescale(ys[0], ys[0].copy())
    cupy.cuda.Device().synchronize()

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(threads)]

    def body(i):
        with streams[i] as stream:
            slot = pool.internals.slot()
            kernels.spin(100)  # gathers launches
            for _ in range(steps):
                plan.executable.launch(handle_of(slot), (xs[i], w, ys[i]), slot.reserve(plan.workspace_size))
                rescale(ys[i], xs[i])
            stream.synchronize()

    in_threads(threads, body)
    cupy.cuda.Device().synchronize()
    return max(float(abs(x - steps).max()) for x in xs)


@pytest.mark.usefixtures("quick_switches")
def test_g1_a_chain_of_convolutions_in_several_threads_is_exact(pool, kernels, in_threads):
    assert chain(pool, kernels, in_threads, lambda slot: slot.handle) == 0


@pytest.mark.usefixtures("quick_switches")
def test_g1_control_a_handle_that_is_kept_for_the_device_gives_wrong_sums(pool, kernels, in_threads):
    of_device = {}

    def handle_of(slot):
        return of_device.setdefault(slot.device, slot.handle)  # keeps the stream of whoever came first

    assert chain(pool, kernels, in_threads, handle_of) > 0


# 4, 11. Streams


@pytest.mark.parametrize("form", ["object", "from_external", "pointer", "foreign"])
def test_g4_streams_by_the_thousands_each_have_a_handle_that_is_truly_bound(pool, backend_stream, form):
    met = {}
    for number in range(2000):
        priority = (0, -1, -5)[number % 3]
        owner = cupy.cuda.Stream(non_blocking=True, priority=priority)
        stream = {
            "object": owner,
            "from_external": None,
            "pointer": owner.ptr,
            "foreign": Foreign(owner.ptr),
        }[form] or cupy.cuda.Stream.from_external(Foreign(owner.ptr))
        handle = pool.get_handle(stream)
        assert handle.stream == owner.ptr
        assert backend_stream(handle) == owner.ptr
        assert pool.get_handle(stream) is handle
        met.setdefault(owner.ptr, set()).add(priority)
        del owner, stream
    assert any(len(priorities) > 1 for priorities in met.values()), "no pointer was used again: this test shows nothing"
    assert pool.stats()["handles_created"] <= (2 if form == "object" else 66)


# 4, 11. Ten thousand, one after the other


MANY, EVERY = 10_000, 50
"""Threads, and streams; and of how many one launches."""

HANDLE = 8.8 * 2**20
"""Bytes of device memory that a handle takes, as measured on an H200."""


def used():
    """Bytes of device memory that are in use, by anybody."""
    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


class Sixteenfold:
    """Convolutions with ones, each of an image of its own number, which come out as 16 times that: integers that TF32 holds."""

    def __init__(self, pool):
        count = MANY // EVERY
        self.w = cupy.ones((16, 16, 1, 1), cupy.float32)
        self.xs = cupy.empty((count, 1, 16, 8, 8), cupy.float32)
        self.xs[...] = cupy.arange(1, count + 1, dtype=cupy.float32).reshape(-1, 1, 1, 1, 1)
        self.ys = cupy.zeros_like(self.xs)
        self.plan = conv2d_plan(self.xs[0], self.w, out=self.ys[0], pool=pool)
        cupy.cuda.Device().synchronize()

    def launch(self, slot, i):
        """The i-th, on the stream of a slot."""
        self.plan.executable.launch(slot.handle, (self.xs[i], self.w, self.ys[i]), slot.reserve(self.plan.workspace_size))

    def wrong(self):
        """How many came out wrong."""
        cupy.cuda.Device().synchronize()
        return int((self.ys != 16 * self.xs).any(axis=(1, 2, 3, 4)).sum())


@pytest.mark.alone
def test_g11_ten_thousand_threads_take_the_memory_of_two_handles_at_most(pool, in_thread):
    convolutions = Sixteenfold(pool)
    bound = []

    def body(number):
        with cupy.cuda.Stream(non_blocking=True) as own:
            bound.append(pool.get_handle().stream == own.ptr)
            if number % EVERY == 0:
                convolutions.launch(pool.internals.slot(), number // EVERY)
                own.synchronize()

    in_thread(body, 0)  # what a first launch loads
    before = used()
    for number in range(MANY):
        in_thread(body, number)
    assert used() - before <= 2 * HANDLE
    assert len(bound) == MANY + 1
    assert all(bound)
    assert convolutions.wrong() == 0
    assert pool.stats()["handles_created"] <= 3  # with the one that plans are built with


@pytest.mark.alone
def test_g4_ten_thousand_streams_of_every_kind_some_of_which_go_with_their_work_pending(pool, kernels, backend_stream):
    convolutions, copies = Sixteenfold(pool), cupy.zeros((MANY // EVERY, N), cupy.float32)
    pointers, pending, before, used_so_far, launched = set(), 0, 0, 0, set()
    for number in range(MANY):
        owner = cupy.cuda.Stream(non_blocking=True, priority=(0, -1)[number // 3 % 2])
        pointer = owner.ptr
        if number % 3 == 0:
            stream = owner
        elif number % 3 == 1:
            stream = cupy.cuda.Stream.from_external(Foreign(pointer))
        else:
            stream = pointer
        handle = pool.get_handle(stream)
        assert handle.stream == backend_stream(handle) == pointer
        if number % EVERY == 0:
            i = number // EVERY
            memory = pool.get_workspace(4 * N, stream).view(cupy.float32)
            with owner:
                kernels.write(memory, i + 1)
                kernels.spin(1)  # not over when the stream goes
                slot = pool.internals.slot(stream)
                launched.add(slot.handle.backend_handle)  # some cuDNNs give a handle its memory with its first launch
                convolutions.launch(slot, i)
                kernels.copy(memory, copies[i])
                kernels.write(memory, -1)
                pending += not owner.done
            del memory
        pointers.add(pointer)
        del owner, stream, handle
        if number == MANY // 2:  # by then, most bare pointers have handles that may
            before, used_so_far = used(), pool.stats()["handles_created"] + len(launched)
    created = pool.stats()["handles_created"]
    assert created <= 66
    assert used() - before <= (2 + created + len(launched) - used_so_far) * HANDLE
    assert pending, "no stream was destroyed with work pending: this test shows nothing"
    assert len(pointers) < MANY, "no pointer was used again: this test shows nothing"
    assert convolutions.wrong() == 0
    assert (copies == cupy.arange(1, MANY // EVERY + 1, dtype=cupy.float32).reshape(-1, 1)).all()


# 12. Memory


MANY_HANDLES = 40
"""More than find room in what the context has kept of the handles that were destroyed before."""


class Hog:
    """Fills the device's memory by plain allocations, all but a few bytes."""

    def __enter__(self):
        runtime = cupy.cuda.runtime
        cupy.get_default_memory_pool().free_all_blocks()
        self.blocks = []
        size = 1 << 40
        while size >= 1 << 16:
            try:
                self.blocks.append(runtime.malloc(size))
            except runtime.CUDARuntimeError:
                size //= 2
        return self

    def __exit__(self, *_):
        while self.blocks:
            cupy.cuda.runtime.free(self.blocks.pop())


@pytest.mark.alone
def test_g12_a_create_without_memory_is_an_error_with_numbers_and_works_when_it_is_back(pool, backend_stream):
    pool.get_handle()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(MANY_HANDLES)]
    with Hog(), pytest.raises(OutOfMemoryError, match=r"of \d[\d,]* bytes are free.*live") as info:
        list(map(pool.get_handle, streams))
    assert isinstance(info.value, MemoryError)
    for stream in streams:
        assert backend_stream(pool.get_handle(stream)) == stream.ptr
    assert pool.stats()["handles_live"] == 1 + MANY_HANDLES


@pytest.mark.alone
def test_g12_a_growth_without_memory_is_an_error_with_numbers_and_works_when_it_is_back(pool, stream, kernels):
    pool.get_handle()
    with Hog(), pytest.raises(OutOfMemoryError, match=r"of \d[\d,]* bytes are free"):
        pool.get_workspace(1 << 30)
    memory = pool.get_workspace(4 * N).view(cupy.float32)
    kernels.write(memory, 3)
    assert (kernels.copy(memory) == 3).all()


@pytest.mark.alone
def test_g12_idle_handles_and_scratch_are_given_back_before_an_error(pool, stream, in_thread):
    size = 64 << 20
    pool.get_handle()
    in_thread(pool.get_workspace, size, cupy.cuda.Stream.null)
    assert pool.stats()["scratch_bytes"] == size
    with Hog():
        assert pool.get_workspace(size // 2).nbytes == size // 2
    assert pool.stats()["scratch_bytes"] == size // 2


@pytest.mark.alone
def test_g12_convolutions_without_memory_are_errors_and_right_when_it_is_back(stream, random_array):
    x, w = random_array((4, 256, 14, 14)), random_array((256, 256, 3, 3))
    with HandlePool(driver="cuda") as pool:
        expected = handlepool.conv2d(x, w, padding=1, pool=pool)
        out = cupy.empty_like(expected)
        other = cupy.cuda.Stream(non_blocking=True)
        with Hog(), other, pytest.raises(OutOfMemoryError):
            handlepool.conv2d(x, w, padding=1, out=out, pool=pool)
        with other:
            handlepool.conv2d(x, w, padding=1, out=out, pool=pool)
            assert (out == expected).all()


# A lost context


@pytest.mark.parametrize(
    "first", ["conv2d", "get_handle of a new stream", "get_workspace", "record", "replay", "update", "trim", "submit"]
)
def test_a_lost_context_is_one_clear_error_and_a_clean_exit(first):
    done = run(HERE / "poisoned.py", first)
    said = done.stdout.splitlines()
    assert said, done
    assert said[0].startswith("the user saw cudaErrorIllegalAddress"), done
    if first == "submit":  # no call that it makes is refused
        said = said[1:]
    refused = "refused: CUDARuntimeError 700", "refused: CUDADriverError 700"  # by which of CUDA's two interfaces it was met
    assert all(line.endswith(refused) for line in said[1:]), done.stdout
    assert (done.returncode, done.stderr) == (9, "")


# 10, 13. The process's end


@pytest.mark.parametrize(
    "name", ["daemon_threads", "return_code", "forked", "multiprocessing_spawn", "preloaded", "forkserver_preload"]
)
def test_g10_g13_a_process_ends_with_its_own_return_code_and_nothing_on_standard_error(name):
    done = run(HERE.parent / "harness" / "exits.py", name, HANDLEPOOL_DRIVER="cuda")
    assert (done.returncode, done.stderr) == (7 if name == "return_code" else 0, "")


# 16. What branches must not share, and misuse


def wrong_transforms(pool, kernels, transform, shape, count=80):
    """Fourier transforms in branches on four streams; how many are wrong."""
    values = [cupy.random.default_rng(i).standard_normal(shape).astype(cupy.complex64) for i in range(4)]
    expected = [transform(value) for value in values]
    cupy.cuda.Device().synchronize()
    kernels.spin(20)  # gathers launches, so that the streams run beside each other
    results = ParallelStates(4, pool=pool).map(transform, values * (count // 4))
    return sum(int(abs(y - z).max() > 1) for y, z in zip(results, expected * (count // 4), strict=True))


def test_g16_control_ffts_in_concurrent_branches_of_one_thread_are_wrong(pool, stream, kernels):
    """Plans that need a work area: a long transform, and one of two axes of a prime extent."""
    found = [
        wrong_transforms(pool, kernels, transform, shape)
        for transform, shape in ((cupy.fft.fft, (1 << 20,)), (cupy.fft.fft2, (1009, 1009)), (cupy.fft.fft, (16, 100_003)))
    ]
    assert sum(found) > 0, found


@pytest.mark.parametrize("name", ["fft", "random"])
def test_g16_ffts_and_random_numbers_in_concurrent_branches_are_refused_under_check(stream, name):
    with HandlePool(driver="cuda", check=True) as pool:
        use = {"fft": lambda x: cupy.fft.fft(x), "random": lambda x: cupy.random.rand(10)}[name]
        x = cupy.ones(1000, cupy.complex64)
        use(x)
        with pytest.raises(ContractError, match=rf"cupy\.{name} is used by .* beside a branch"):
            ParallelStates(2, pool=pool).map(use, [x, x.copy()])
        ParallelStates(1, pool=pool).map(use, [x, x])
        use(x)


def test_a_handle_in_another_thread_and_a_workspace_on_another_stream_are_refused_under_check(stream, random_array, in_thread):
    x, w = random_array((1, 64, 14, 14)), random_array((64, 64, 3, 3))
    with HandlePool(driver="cuda", check=True) as pool:
        expected = handlepool.conv2d(x, w, padding=1, pool=pool)
        handle = pool.get_handle()
        with pytest.raises(OwnershipError, match="is used by thread"):
            in_thread(cudnn.set_stream, handle, stream.ptr + 16)
        inside = pool.get_workspace(x.nbytes).view(cupy.float32).reshape(x.shape)
        inside[...] = x
        assert (handlepool.conv2d(inside, w, padding=1, pool=pool) == expected).all()
        with cupy.cuda.Stream(non_blocking=True), pytest.raises(ContractError, match=r"argument 0 \(\w+\) lies in the workspace"):
            handlepool.conv2d(inside, w, padding=1, pool=pool)
        outputs = ParallelStates(4, pool=pool).map(lambda x: handlepool.conv2d(x, w, padding=1, pool=pool), [x] * 8)
        assert all((y == expected).all() for y in outputs)
