"""Run by a test in a process of its own: a user's kernel writes to an illegal address; prints what handlepool does then."""

import sys
import threading

import cupy

import handlepool
from handlepool import ParallelStateExecutor, ParallelStates, PoisonedContextError

_kept = []


def main():
    pool = handlepool.HandlePool(driver="cuda")
    late = cupy.cuda.Stream(non_blocking=True)
    side = cupy.cuda.Stream(non_blocking=True)
    _kept.extend([late, side])  # or CuPy would complain of them when they go
    x, w = cupy.ones((1, 16, 8, 8), "float32"), cupy.ones((16, 16, 1, 1), "float32")
    y = handlepool.conv2d(x, w, pool=pool)
    pool.get_workspace(1 << 16, side)
    states = ParallelStates(2, pool=pool)
    states.map(lambda _: pool.get_workspace(100), range(2))
    executor = ParallelStateExecutor(2, pool=pool)
    executor.submit(pool.get_handle).result()
    program, z = handlepool.record(handlepool.conv2d, x, w, pool=pool), cupy.ones((1, 16, 8, 8), "float32")
    program.replay()
    fork = states.fork()
    fork.__enter__()
    fork.run(pool.get_handle)
    thread = threading.Thread(target=pool.get_handle, args=(side,))
    thread.start()
    thread.join()

    nowhere = cupy.ndarray((1000,), "float32", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(256, 4000, None, device_id=0), 0))
    cupy.add(x, 1, out=x)
    nowhere.fill(1)
    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print("the user saw", error)

    uses = {
        "conv2d": lambda: handlepool.conv2d(x, w, out=y, pool=pool),
        "get_handle": pool.get_handle,
        "get_handle of a new stream": lambda: pool.get_handle(late),
        "get_workspace": lambda: pool.get_workspace(1 << 20),
        "map": lambda: states.map(int, [1]),
        "submit": lambda: executor.submit(int),
        "record": lambda: handlepool.record(handlepool.conv2d, x, w, pool=pool),
        "replay": program.replay,
        "update": lambda: program.update(z, None),
        "trim": pool.trim,
        "fork": lambda: fork.__exit__(None, None, None),
    }
    if len(sys.argv) > 1:  # this one is the first to meet it
        uses = {sys.argv[1]: uses[sys.argv[1]]} | uses
    for name, use in uses.items():
        try:
            use()
        except PoisonedContextError as error:
            print(name, "refused:", type(error.__cause__).__name__, getattr(error.__cause__, "status", None))
        else:
            print(name, "went through")
    pool.close()
    return 9


if __name__ == "__main__":
    sys.exit(main())
