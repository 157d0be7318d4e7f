"""Run by tests under compute-sanitizer, in a process of its own: ``python sanitized.py NAME``.

CuPy allocates in stream order, as under HANDLEPOOL_TEST_SANITIZER.
"""

import sys

import cupy
from conftest import Kernels
from cupy.cuda import MemoryPointer, UnownedMemory

from handlepool import HandlePool, ParallelStates
from handlepool.drivers.cuda.driver import CudaDriver

N = 1 << 12


class Careless(CudaDriver):
    """Leaves every wait out."""

    wait_event = staticmethod(lambda pointer, event: None)


def read_in_a_branch(kernels, driver):
    """A branch reads what its caller's stream has just allocated and written."""
    with HandlePool(driver=driver) as pool:
        pool.prewarm(states=1)
        x, y = kernels.full(N, 1), kernels.full(N, 0)
        with ParallelStates(1, pool=pool).fork() as fork:
            fork.run(kernels.copy, x, y)
        cupy.cuda.Device().synchronize()


def ordered(kernels):
    """After a wait, as it should be."""
    read_in_a_branch(kernels, CudaDriver())


def without_the_wait(kernels):
    """Before the allocation, for all that the program asked for."""
    read_in_a_branch(kernels, Careless())


def after_the_free(kernels):
    """A write, on one stream, to an array that was freed there before."""
    x = kernels.full(N, 1)
    freed = cupy.ndarray(x.shape, x.dtype, MemoryPointer(UnownedMemory(x.data.ptr, x.nbytes, None, device_id=0), 0))
    del x
    kernels.write(freed, 2)
    cupy.cuda.Device().synchronize()


def main():
    scene = {scene.__name__: scene for scene in (ordered, without_the_wait, after_the_free)}[sys.argv[1]]
    kernels = Kernels()
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    with cupy.cuda.Stream(non_blocking=True):
        scene(kernels)


if __name__ == "__main__":
    main()
