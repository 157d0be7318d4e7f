"""Guarantee 17 on a GPU: what one of CuPy's functions and kernels does as a branch says nothing of another one."""

import operator

import pytest
from harness.insides import known_writes

import handlepool
from handlepool import ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 16
RAW = cupy.RawKernel(
    'extern "C" __global__ void tenfold(float* y) { y[blockIdx.x * blockDim.x + threadIdx.x] *= 10; }', "tenfold"
)
ELEMENTWISE = cupy.ElementwiseKernel("T x", "T y", "y = 10 * x", "tenfold")


pytestmark = pytest.mark.usefixtures("known")


def raw(fork, y):
    fork.run(RAW, (N // 256,), (256,), (y,))


def elementwise(fork, y):
    fork.run(ELEMENTWISE, y, y)


def ufunc(fork, y):
    fork.run(cupy.multiply, y, 10, y)


def method(fork, y):
    fork.run(y.fill, 10)


def builtin(fork, y):
    fork.run(operator.imul, y, 10)


def read_late_and_written(pool, kernels, latch, write):
    """A branch reads late what the next one writes; and an event behind what was written."""
    y, z = kernels.full(N, 1), kernels.full(N, -1)
    with ParallelStates(1, pool=pool).fork() as fork:
        for step in (write, lambda fork, y: fork.run(cupy.add, y, 9), lambda fork, y: fork.run(cupy.multiply, y, 9)):
            step(fork, kernels.full(N, 1))  # loads its kernel
    cupy.cuda.Device().synchronize()
    known_writes().clear()

    @handlepool.operation(mutates="z")
    def read_late(y, z):
        latch.hold()
        kernels.copy(y, z)

    @handlepool.operation(mutates=())
    def behind(y):
        return cupy.cuda.get_current_stream().record()

    with ParallelStates(4, pool=pool).fork() as fork:
        for function in (cupy.add, cupy.multiply):
            fork.run(function, y, 9)  # new arrays alone
        fork.run(read_late, y, z)
        write(fork, y)
        return y, z, fork.run(behind, y)


@pytest.mark.parametrize("write", [raw, elementwise, ufunc, method, builtin], ids=lambda write: write.__name__)
def test_g17_what_writes_in_place_waits_for_readers_whatever_others_returned(pool, stream, kernels, latch, write):
    y, z, done = read_late_and_written(pool, kernels, latch, write)
    assert not done.done
    latch.release()
    assert (z.get() == 1).all()
    assert (y.get() == 10).all()


@pytest.mark.unmeasured
def test_g17_control_where_all_are_taken_for_one_it_does_not(pool, stream, kernels, latch, comes_to_pass, without):
    without("the codes of functions")
    written = []

    def scale(y, by):
        y *= by
        written.append(cupy.cuda.get_current_stream().record())  # what follows the call waits for the reader
        return y

    _, z, _ = read_late_and_written(pool, kernels, latch, lambda fork, y: fork.run(scale, y, 10))
    assert comes_to_pass(written[-1])
    latch.release()
    assert (z.get() == 10).all()
