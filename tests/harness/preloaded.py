"""An application that makes states, pools and an executor at import and uses no device, as a server of workers preloads it."""

import os

import numpy as np

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates

states = ParallelStates(2)
executor = ParallelStateExecutor(2)
pool = handlepool.default_pool()
own = HandlePool(scratch_limit=1 << 20)
own_states = ParallelStates(2, pool=own)
PROCESS = os.getpid()


def serve(preloaded=True):
    """Use all of it in a worker, which the process that imported this module has forked."""
    assert (os.getppid() == PROCESS) is preloaded, "the worker imported the module itself"
    use(handlepool.default_pool(), states)
    use(own, own_states)


def use(pool, states):
    """Use a pool in every way that a worker may."""
    driver = pool.driver

    def convolve(x):
        return handlepool.conv2d(x, w, padding=1, pool=pool)

    with driver.create_stream():
        x, w = (driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 8, 10, 10), (8, 8, 3, 3)))
        assert pool.get_handle() is not None
        assert pool.get_workspace(1000).nbytes >= 1000
        ys = [convolve(x), *states.map(handlepool.conv2d, [x] * 3, [w] * 3, padding=1)]
        with states.fork() as fork:
            ys.append(fork.run(convolve, x))
        ys.append(states.with_state(1, lambda state: convolve(x)))
        with handlepool.record(convolve, x.copy(), pool=pool) as program:
            ys.append(program(x))
        if pool is not own:
            ys.append(executor.submit(convolve, x).result())
            assert handlepool.get_handle() is pool.get_handle()
        assert [driver.asnumpy(y).max() for y in ys] == [72] * len(ys)
