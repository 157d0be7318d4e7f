"""Programs that end with much of handlepool alive, run in processes of their own: ``python tests/harness/exits.py NAME``.

The driver is the one that HANDLEPOOL_DRIVER names. Each has to end with the return code that it asks for and with nothing on
standard error; `tests/properties/test_process_edges.py` runs them on the host driver, `benchmarks/exits.py` many times on a GPU.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from concurrent.futures import wait
from pathlib import Path

# The benchmark runs this file without pytest, which would put the tests' folder here.
sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.insides import loaded_drivers
from harness.process import leave

import handlepool
from handlepool import ForkedProcessError, OwnershipError, ParallelStateExecutor, ParallelStates, PoolClosedError

ASKING = {"current_device", "current_stream", "owns_stream"}
"""Driver calls that only read what this process knows."""

THREADS = 3
TIMEOUT = 60
_kept = []  # alive at the interpreter's end


def arrays(driver):
    """An image and filters on the device."""
    import numpy as np

    x = driver.asarray(np.ones((1, 8, 10, 10), np.float32))
    return x, driver.asarray(np.ones((8, 8, 3, 3), np.float32))


def convolve(x, w):
    """A convolution with a stream's own handle and scratch."""
    handlepool.get_workspace(1000)
    return handlepool.conv2d(x, w, padding=1)


def use_everything():
    """Handles, scratch, states, an open fork and an executor with results that nobody asked for, in this thread."""
    pool = handlepool.default_pool()
    driver = pool.driver
    x, w = arrays(driver)
    stream = driver.create_stream()
    states = ParallelStates(2)
    with stream:
        handlepool.get_handle()
        states.map(convolve, [x] * 4, [w] * 4)
        handlepool.with_cudnn_state(1, lambda state: state.workspace(100))
        executor = ParallelStateExecutor(2)
        futures = [executor.submit(convolve, x, w) for _ in range(4)]
        wait(futures)  # a fork of the process must find no thread inside cuDNN, nor may one be there when the process ends
        assert futures[0].result().shape == (1, 8, 10, 10)
    fork = states.fork()
    fork.__enter__()
    fork.run(convolve, x, w)
    assert fork.run(handlepool.get_handle) is not None
    return stream, states, executor, futures, fork, x, w


def in_threads(daemon):
    """Use everything in threads that wait until the process ends, or for `daemon` ones, for ever."""
    ready = threading.Barrier(THREADS + 1)
    end = threading.Event()

    def body():
        own = use_everything()
        ready.wait(TIMEOUT)
        end.wait(TIMEOUT if daemon else 0)
        del own

    threads = [threading.Thread(target=body, daemon=daemon) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    ready.wait(TIMEOUT)
    return threads


def main_thread():
    """All of it alive in the main thread."""
    _kept.append(use_everything())
    return 0


def threads_that_ended():
    """All of it left behind by threads, and nothing taken in since."""
    for thread in in_threads(daemon=False):
        thread.join(TIMEOUT)
    return 0


def daemon_threads():
    """All of it alive in daemon threads and in the main thread."""
    in_threads(daemon=True)
    _kept.append(use_everything())
    return 0


def busy_daemon_threads():
    """Daemon threads that ask for handles and scratch and fork while the interpreter ends."""
    ready = threading.Barrier(THREADS + 1)

    def body():
        states, asked = ParallelStates(2), False
        while True:
            handlepool.get_workspace(1000)
            states.map(lambda _: handlepool.get_handle(), range(2))
            if not asked:
                asked = bool(ready.wait(TIMEOUT) + 1)

    for _ in range(THREADS):
        threading.Thread(target=body, daemon=True).start()
    ready.wait(TIMEOUT)
    return 0


def return_code():
    """The program's own return code is the process's."""
    _kept.append(use_everything())
    return 7


def closed_late():
    """The pool is closed by a function that runs at exit, when other threads have ended."""
    import atexit

    atexit.register(handlepool.close)
    in_threads(daemon=False)
    handlepool.get_handle()
    return 0


class Closing:
    """Closes what it has in its destructor."""

    def __init__(self, closed):
        self.closed = closed

    def __del__(self):
        self.closed.close()


def close_late(program):
    """Let a program be closed as the interpreter ends."""
    module = sys.modules["closing"] = types.ModuleType("closing")  # this one's own is kept alive by daemon threads
    module.closing = Closing(program)


def programs_of_daemon_threads():
    """Recorded programs that daemon threads use while the interpreter ends, one of them in all, and closed by a destructor."""
    ready = threading.Barrier(THREADS + 1)
    operands = arrays(handlepool.default_pool().driver)
    common = handlepool.record(convolve, *operands)

    def body():
        own, asked = handlepool.record(convolve, *operands), False
        while True:
            own.replay()
            common(*[None] * len(operands))
            if not asked:
                asked = bool(ready.wait(TIMEOUT) + 1)

    for _ in range(THREADS):
        threading.Thread(target=body, daemon=True).start()
    ready.wait(TIMEOUT)
    close_late(common)
    return 0


def joined_late():
    """A daemon thread that replays a program, and that a function which runs last at exit waits for."""
    import atexit

    from handlepool.pool import process_end

    stop, begun = threading.Event(), threading.Event()
    program = handlepool.record(convolve, *arrays(handlepool.default_pool().driver))

    def body():
        try:
            while not stop.is_set():
                program.replay()
                begun.set()
        except PoolClosedError:
            pass

    thread = threading.Thread(target=body, daemon=True)

    def stop_and_join():
        stop.set()
        thread.join(TIMEOUT)
        if thread.is_alive():
            print("the thread waits for ever", file=sys.stderr)

    atexit.unregister(process_end.process_end.run)
    atexit.register(stop_and_join)
    atexit.register(process_end.process_end.run)  # the last is the first to run
    thread.start()
    begun.wait(TIMEOUT)
    return 0


def inside_a_launch():
    """A program closed by a destructor, with a daemon thread that never came back from its launch."""
    inside, never = threading.Event(), threading.Event()
    program = handlepool.record(convolve, *arrays(handlepool.default_pool().driver))

    def launch():
        inside.set()
        never.wait()

    def body():
        program.replay()
        program._launch = launch
        program.replay()

    threading.Thread(target=body, daemon=True).start()
    inside.wait(TIMEOUT)
    close_late(program)
    return 0


def records_of_daemon_threads():
    """Daemon threads that record, replay and drop programs while the interpreter ends."""
    ready = threading.Barrier(THREADS + 1)
    operands = arrays(handlepool.default_pool().driver)
    sys.setswitchinterval(1e-5)

    def body():
        kept = [handlepool.record(convolve, *operands) for _ in range(50)]
        ready.wait(TIMEOUT)
        while True:
            kept[-1].replay()
            kept.append(handlepool.record(convolve, *operands))

    for _ in range(THREADS):
        threading.Thread(target=body, daemon=True).start()
    ready.wait(TIMEOUT)
    return 0


def cycles():
    """Streams, forks and executors in reference cycles, for the collector."""
    for _ in range(3):
        own = list(use_everything())
        own.append(own)
    del own
    gc.collect()
    handlepool.get_handle()
    own = list(use_everything())
    own.append(own)
    return 0


def _refused():
    """In a forked child: every use says so, and names the remedy."""
    pool = handlepool.default_pool()
    uses = [
        handlepool.get_handle,
        lambda: handlepool.get_workspace(10),
        handlepool.trim,
        lambda: handlepool.prewarm(states=1),
        lambda: ParallelStates(2).map(int, [1]),
        lambda: handlepool.with_cudnn_state(0, lambda state: None),
        lambda: ParallelStateExecutor(1).submit(int),
        lambda: pool.internals.slot(),
    ]
    for use in uses:
        said = ""
        try:
            use()
        except ForkedProcessError as error:
            said = str(error)
        assert "spawn" in said
    gc.collect()
    handlepool.stats()
    handlepool.close()


def _new_pool():
    """In a forked child: a new pool works where CUDA is not needed, and is refused where the parent had used it."""
    pool, said = handlepool.HandlePool(), ""
    try:
        driver = pool.driver
    except ForkedProcessError as error:
        said = str(error)
    if os.environ.get("HANDLEPOOL_DRIVER") != "host":
        assert "spawn" in said
        return
    with pool, driver.create_stream():
        pool.get_workspace(1000)
        (y,) = ParallelStates(2, pool=pool).map(handlepool.conv2d, *[[array] for array in arrays(driver)])
        assert driver.asnumpy(y).max() == 72


def forked():
    """A child made by os.fork while threads and executors live: it is told, ends as usual, and the parent goes on."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork in a process with threads
    in_threads(daemon=True)
    own = use_everything()
    stream, _, executor, futures, fork, x, w = own
    before = handlepool.stats()
    child = os.fork()
    if child == 0:
        driver = handlepool.default_pool().driver
        calls = getattr(driver, "calls", {})  # counted by the host driver
        calls.clear()
        _refused()
        fork.__exit__(None, None, None)
        executor.shutdown()
        assert not calls.keys() - ASKING, calls
        _new_pool()
        _kept.append(own)
        return 0
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
    assert not any((handlepool.stats() - before).values())
    with stream:
        assert convolve(x, w).shape == futures[1].result().shape
        assert executor.submit(convolve, x, w).result().shape == (1, 8, 10, 10)
    assert fork.run(convolve, x, w).shape == (1, 8, 10, 10)
    fork.__exit__(None, None, None)
    executor.shutdown()
    return 0


def forked_among_locks():
    """A child made by os.fork while other threads load a driver, create a handle and begin to check."""
    from handlepool import drivers
    from handlepool.drivers.cuda import shared
    from handlepool.pool import handles

    warnings.simplefilter("ignore", DeprecationWarning)
    held, forking, end = threading.Barrier(3), threading.Event(), threading.Event()
    load = drivers.import_module

    def loading(name):
        held.wait(TIMEOUT)
        forking.wait(TIMEOUT)
        return load(name)

    def hold():
        with handles._create_lock, shared._watchers.lock:
            held.wait(TIMEOUT)
            end.wait(TIMEOUT)

    drivers.import_module = loading
    threads = [threading.Thread(target=hold), threading.Thread(target=drivers.load)]
    for thread in threads:
        thread.start()
    held.wait(TIMEOUT)
    os.register_at_fork(before=forking.set)  # the last one that was registered is the first that is called
    child = os.fork()
    drivers.import_module = load
    if child == 0:
        assert loaded_drivers().inherited, "the fork did not wait for the driver"
        _new_pool()
        with handlepool.HandlePool(check=True) as pool:
            pool.get_handle()
        return 0
    end.set()
    for thread in threads:
        thread.join(TIMEOUT)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
    handlepool.get_handle()
    return 0


def multiprocessing_fork():
    """A child of multiprocessing's fork is told; the parent goes on."""
    warnings.simplefilter("ignore", DeprecationWarning)
    _kept.append(use_everything())
    process = multiprocessing.get_context("fork").Process(target=_refused)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0, process.exitcode
    handlepool.get_handle()
    return 0


def _spawned():
    use_everything()


def multiprocessing_spawn():
    """A child of multiprocessing's spawn has a pool of its own."""
    _kept.append(use_everything())
    process = multiprocessing.get_context("spawn").Process(target=_spawned)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0, process.exitcode
    handlepool.get_handle()
    return 0


def _child(function, *args):
    """Call a function in a child made by os.fork, and end there; a child that hangs is ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(TIMEOUT)
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            leave(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status


def preloaded():
    """Workers forked after the import of an application that has used no device: all that it made works, in each and here."""
    warnings.simplefilter("ignore", DeprecationWarning)
    import preloaded as application

    def worker():
        application.serve()
        # The streams that this used are the worker's to destroy, and not its child's.
        gc.collect()
        _child(_refused)  # the worker has used a device: its own children are told

    for _ in range(2):
        _child(worker)
    application.serve(preloaded=False)
    application.executor.shutdown()
    return 0


def forkserver_preload():
    """The same under the forkserver of multiprocessing, which imports the application before it forks."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    import preloaded as application

    for _ in range(2):
        process = context.Process(target=application.serve)
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == 0, process.exitcode
    return 0


def default_pool_replaced():
    """What the error in a forked child advises works there: another default pool, also for what was made on the former one."""
    warnings.simplefilter("ignore", DeprecationWarning)
    states, idle = ParallelStates(2), ParallelStateExecutor(1)
    own = use_everything()
    executor = own[2]
    driver = handlepool.default_pool().driver
    inside = threading.Event(), threading.Event()

    def hold(state):
        inside[0].set()
        inside[1].wait(TIMEOUT)

    holder = threading.Thread(target=states.with_state, args=(0, hold))
    holder.start()
    inside[0].wait(TIMEOUT)

    def child():
        _refused()
        calls = driver.calls
        calls.clear()
        pool = handlepool.HandlePool()
        handlepool.set_default_pool(pool)
        assert handlepool.default_pool() is pool
        x, w = arrays(pool.driver)
        assert pool.driver is not driver
        for many in (states, ParallelStates(2)):
            assert [y.shape for y in many.map(convolve, [x] * 3, [w] * 3)] == [(1, 8, 10, 10)] * 3
            assert many.with_state(0, lambda state: state.workspace(10)) is not None
        assert idle.submit(convolve, x, w).result().shape == (1, 8, 10, 10)
        assert handlepool.get_handle() is pool.get_handle()
        refusals = (
            (lambda: executor.submit(convolve, x, w), ForkedProcessError, "make a ParallelStateExecutor in the child"),
            (lambda: handlepool.set_default_pool(handlepool.HandlePool()), OwnershipError, "too late"),
        )
        for use, kind, says in refusals:
            said = ""
            try:
                use()
            except kind as error:
                said = str(error)
            assert says in said, said
        executor.shutdown()
        ParallelStateExecutor.__del__(executor)
        handlepool.trim()
        assert not calls.keys() - ASKING, calls  # nothing of the parent's was destroyed

    _child(child)
    inside[1].set()
    holder.join(TIMEOUT)
    _kept.append(own)
    assert states.map(convolve, *[[each] for each in arrays(driver)])[0].shape == (1, 8, 10, 10)
    return 0


def forked_while_a_pool_loads():
    """A child made by os.fork while another thread is between the question for a pool's driver and its answer."""
    from handlepool import drivers

    warnings.simplefilter("ignore", DeprecationWarning)
    held, end, load = threading.Event(), threading.Event(), drivers.load

    def loading(*args, **kwargs):
        held.set()
        end.wait(TIMEOUT)
        return load(*args, **kwargs)

    drivers.load = loading
    thread = threading.Thread(target=handlepool.get_handle)
    thread.start()
    held.wait(TIMEOUT)
    drivers.load = load

    def child():
        _new_pool()
        handlepool.get_handle()  # the very pool that was being loaded

    _child(child)
    end.set()
    thread.join(TIMEOUT)
    handlepool.get_handle()
    return 0


PROGRAMS = {
    program.__name__: (program, code)
    for program, code in (
        (main_thread, 0),
        (threads_that_ended, 0),
        (daemon_threads, 0),
        (busy_daemon_threads, 0),
        (return_code, 7),
        (closed_late, 0),
        (programs_of_daemon_threads, 0),
        (joined_late, 0),
        (cycles, 0),
        (forked, 0),
        (multiprocessing_fork, 0),
        (multiprocessing_spawn, 0),
        (preloaded, 0),
        (forkserver_preload, 0),
    )
}
"""Each with the return code that it asks for."""

ON_THE_HOST = {
    program.__name__: (program, 0)
    for program in (
        inside_a_launch,
        records_of_daemon_threads,
        forked_among_locks,
        default_pool_replaced,
        forked_while_a_pool_loads,
    )
}
"""On a GPU the first two end all the same, but cuDNN's binding prints what a thread keeps alive that does not come back. The
others have a driver in a child, which CUDA has not."""

if __name__ == "__main__":
    faulthandler.enable()
    sys.exit((PROGRAMS | ON_THE_HOST)[sys.argv[1]][0]())
