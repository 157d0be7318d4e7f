"""What may happen while a stream is captured: as the pool does it, and as plain calls do. Tests and a benchmark run the matrix of
capture mode, thread and operation.

Each operation is prepared before the capture begins, gives its `act` to be called once under the capture, and may give a `check`
for afterwards.
"""

import gc
import threading
from itertools import count

import cudnn
import cupy
from cupy.cuda import runtime

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates

MODES = {
    "global": runtime.streamCaptureModeGlobal,
    "thread-local": runtime.streamCaptureModeThreadLocal,
    "relaxed": runtime.streamCaptureModeRelaxed,
}
WHO = ("same thread", "another thread")
N = 1 << 12
_sizes = count(9)


class Bench:
    """One capture: a stream of its own, work on it before and after the operation, and eager work elsewhere."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.other = cupy.cuda.Stream(non_blocking=True)
        self.array = kernels.full(N, 0)
        self.x = cupy.ones((1, 16, 8, 8), cupy.float32)
        self.w = cupy.ones((16, 16, 1, 1), cupy.float32)
        self.y = cupy.zeros((1, 16, 8, 8), cupy.float32)
        cupy.add(self.array, 1, out=self.array)  # whatever is launched under the capture has been loaded

    def convolve(self, pool):
        """Eager work on the stream that is not captured; 16 everywhere."""
        with self.other:
            handlepool.conv2d(self.x, self.w, out=self.y, pool=pool)


def create(pool, bench):
    """A miss creates its handle."""
    stream = cupy.cuda.Stream(non_blocking=True)
    return lambda: pool.get_handle(stream)


def create_for_pointers(pool, bench):
    """Misses of a bare pointer and of the default streams create theirs."""
    return lambda: [pool.get_handle(stream) for stream in (bench.other.ptr, 0, 2)]


def take_captured(pool, bench):
    """The captured stream's own handle and scratch, which grows."""

    def act():
        if cupy.cuda.get_current_stream() is bench.stream:
            pool.get_handle()
            pool.get_handle(bench.stream.ptr)
            for size in (N, 4 * N):
                bench.kernels.write(pool.get_workspace(4 * size).view(cupy.float32), 7)

    return act


def grow(pool, bench):
    """A workspace grows, and what it replaced is freed by a later miss."""
    pool.get_workspace(1 << 12, bench.other)
    late = cupy.cuda.Stream(non_blocking=True)

    def act():
        for size in (1 << 16, 1 << 20):
            pool.get_workspace(size, bench.other)
        pool.get_handle(late)

    return act


def build(pool, bench):
    """A plan is built and launched."""
    size = next(_sizes)
    x, y = cupy.ones((1, 16, size, size), cupy.float32), cupy.empty((1, 16, size, size), cupy.float32)

    def act():
        with bench.other:
            handlepool.conv2d(x, bench.w, out=y, pool=pool)

    return act, lambda: (y == 16).all()


def fork(pool, bench):
    """A fork makes and leases side slots, runs branches and is joined."""
    return _fork(pool, bench, bench.other)


def fork_captured(pool, bench):
    """A fork over the captured stream: its branches become branches of the graph, whichever thread runs them."""
    return _fork(pool, bench, bench.stream)


def _fork(pool, bench, stream):
    ys = [cupy.zeros_like(bench.y) for _ in range(4)]

    def act():
        with stream, ParallelStates(4, pool=pool).fork() as fork:
            for y in ys:
                fork.run(handlepool.conv2d, bench.x, bench.w, out=y)

    return act, lambda: all((y == 16).all() for y in ys)


def trim(pool, bench):
    """Idle handles are destroyed, and idle and replaced scratch is freed."""
    in_thread(pool.get_workspace, 1 << 16, bench.other)
    pool.prewarm(states=2, workspace=1 << 16)
    for size in (1 << 12, 1 << 16):
        pool.get_workspace(size, bench.other)
    return pool.trim


def trim_captured(pool, bench):
    """The scratch of captures that are over is freed, and what the one under way was given stays its own."""
    earlier = cupy.cuda.Stream(non_blocking=True)
    earlier.begin_capture()
    pool.get_workspace(1 << 16, earlier)
    earlier.end_capture()
    y = bench.kernels.full(N, 0)

    def act():
        with bench.stream:
            memory = pool.get_workspace(4 * N).view(cupy.float32)
            bench.kernels.write(memory, 7)
            pool.trim(captured=True)
            bench.kernels.copy(memory, y)

    return act, lambda: (y == 7).all() and pool.stats()["scratch_bytes_captured"] == 4 * N


def close(pool, bench):
    """A pool is closed."""
    other = HandlePool(driver="cuda")
    other.prewarm(states=2, workspace=1 << 16)
    other.get_workspace(1 << 16)
    return other.close


def end_thread(pool, bench):
    """A thread ends that had slots, and another takes them over."""
    begun, end = threading.Event(), threading.Event()

    def body():
        pool.get_workspace(1 << 16, bench.other)
        begun.set()
        end.wait(20)

    thread = threading.Thread(target=body)
    thread.start()
    begun.wait(20)
    late = cupy.cuda.Stream(non_blocking=True)

    def act():
        end.set()
        thread.join()
        pool.get_workspace(1 << 16, late)

    return act


def end_stream(pool, bench):
    """A stream is destroyed that had a slot, and the slot goes to another."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    pool.get_workspace(1 << 16, streams[0])

    def act():
        streams.pop(0)
        pool.get_workspace(1 << 16, streams[0])

    return act


def reuse(pool, bench):
    """A slot is reused whose last stream is the one that is captured: its scratch cannot be ordered, so it is freed."""
    in_thread(pool.get_workspace, 1 << 16, bench.stream)

    def act():
        pool.get_workspace(1 << 17, bench.other)

    return act


def repair(pool, bench):
    """A handle that its caller destroyed is replaced."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cudnn.destroy_handle(pool.get_handle(stream))
    return lambda: pool.get_handle(stream)


def collect(pool, bench):
    """The collector meets streams, forks and executors in cycles, and a later fork leaves the one that nobody left."""
    stream = cupy.cuda.Stream(non_blocking=True)
    pool.get_workspace(1 << 12, stream)
    fork = ParallelStates(1, pool=pool).fork()
    executor = ParallelStateExecutor(1, pool=pool)
    with bench.other:
        fork.__enter__()
        fork.run(int)
        executor.submit(int).result()
    for thing in (stream, fork, executor):
        cycle = [thing]
        cycle.append(cycle)
    del stream, fork, executor, thing, cycle
    late = cupy.cuda.Stream(non_blocking=True)

    def act():
        gc.collect()
        pool.get_handle(late)
        with bench.other, ParallelStates(1, pool=pool).fork():
            pass

    return act


def forget(pool, bench):
    """Plans go, one of which cuDNN compiled for its graph alone, with the functions that launched them."""
    size = next(_sizes)
    x, w = (cupy.ones(shape, cupy.float16).transpose(0, 3, 1, 2) for shape in ((1, size, size, 16), (16, 1, 1, 16)))
    for _ in range(3):
        bench.convolve(pool)
        with bench.other:
            handlepool.conv2d(x, w, activation="gelu", pool=pool)
    bench.other.synchronize()

    def act():
        pool.cache_clear()
        gc.collect()

    return act


def drop_program(pool, bench):
    """A program that nobody closed goes, and its graph and memory with it."""
    with bench.other:
        program = handlepool.record(lambda: handlepool.conv2d(bench.x, bench.w, pool=pool), pool=pool)
        program.replay()
        bench.other.synchronize()
    programs = [program]
    del program
    late = cupy.cuda.Stream(non_blocking=True)

    def act():
        programs.clear()
        gc.collect()
        pool.get_handle(late)

    return act


def shut_down(pool, bench):
    """An executor is shut down."""
    executor = ParallelStateExecutor(2, pool=pool)
    with bench.other:
        for _ in range(4):
            executor.submit(int)
    return executor.shutdown


OURS = {
    operation.__name__.replace("_", " "): operation
    for operation in (
        create, create_for_pointers, take_captured, grow, build, fork, fork_captured, trim, trim_captured, close, end_thread,
        end_stream, reuse, repair, collect, forget, drop_program, shut_down,
    )
}  # fmt: skip


def plain_create(bench):
    """``cudnnCreate``."""
    return cudnn.create_handle


def plain_destroy(bench):
    """``cudnnDestroy``."""
    handle = cudnn.create_handle()
    return lambda: cudnn.destroy_handle(handle)


def plain_allocate(bench):
    """``cudaMalloc``."""
    return lambda: runtime.malloc(1 << 20)


def plain_free(bench):
    """``cudaFree``."""
    pointer = runtime.malloc(1 << 20)
    return lambda: runtime.free(pointer)


def plain_query(bench):
    """``cudaEventQuery``."""
    event = bench.other.record()
    return lambda: event.done


def plain_identify(bench):
    """``cuStreamGetId`` of the captured stream."""
    from cuda.bindings import driver

    return lambda: driver.cuStreamGetId(bench.stream.ptr)


def plain_record(bench):
    """``cudaEventRecord`` on the legacy default stream."""
    event = cupy.cuda.Event(disable_timing=True)
    return lambda: event.record(cupy.cuda.Stream.null)


def plain_synchronize(bench):
    """``cudaDeviceSynchronize``."""
    return runtime.deviceSynchronize


def plain_array(bench):
    """A CuPy array that CuPy's pool has no block for."""
    cupy.get_default_memory_pool().free_all_blocks()
    return lambda: cupy.empty(1 << 22)


PLAIN = {
    operation.__doc__.replace("`", "").rstrip("."): operation
    for operation in (
        plain_create, plain_destroy, plain_allocate, plain_free, plain_query, plain_identify, plain_record, plain_synchronize,
        plain_array,
    )
}  # fmt: skip


def in_thread(function, *args):
    """Run a function in a new thread to its end, and raise what it raised."""
    errors = []

    def body():
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def survives(kernels, operation, mode, who, pool=None):
    """Whether a capture survives an operation, replays right, and eager work beside it is right; what went wrong, or ''.

    ``pool`` is given to operations of ours.
    """
    bench = Bench(kernels)
    made = operation(bench) if pool is None else operation(pool, bench)
    act, check = made if isinstance(made, tuple) else (made, lambda: True)
    if pool is not None:
        bench.convolve(pool)
        bench.other.synchronize()
        bench.y.fill(0)
    cupy.cuda.Device().synchronize()
    said = ""
    with bench.stream:
        bench.stream.begin_capture(MODES[mode])
        try:
            kernels.write(bench.array, 1)
            act() if who == "same thread" else in_thread(act)
            if pool is not None:
                in_thread(bench.convolve, pool)
            cupy.add(bench.array, 1, out=bench.array)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        try:
            graph = bench.stream.end_capture()
        except Exception as error:
            return said or f"{type(error).__name__}: {error}"
        for _ in range(2):
            bench.array.fill(0)
            graph.launch(bench.stream)
            if not (bench.array == 2).all():
                return said or "the replay is wrong"
    cupy.cuda.Device().synchronize()
    if pool is not None and not (bench.y == 16).all():
        return said or "eager work is wrong"
    return said or ("" if check() else "the operation's own work is wrong")
