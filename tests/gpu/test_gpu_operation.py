"""Guarantee 17 on a GPU: operations of hand-written kernels are ordered by what they declare."""

import pytest

import handlepool
from handlepool import ContractError, HandlePool, ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 16


def writing(kernels, latch, mutates):
    """An operation that is held back, and then writes 1."""

    @handlepool.operation(mutates=mutates)
    def write_late(y):
        latch.hold()
        kernels.write(y, 1)

    return write_late


def written_late_and_read(pool, kernels, latch, mutates):
    """A branch writes late, and the next one copies what is there."""
    y, z = kernels.full(N, 0), kernels.full(N, -1)
    cupy.cuda.get_current_stream().synchronize()

    @handlepool.operation(mutates="z")
    def copy_now(y, z):
        kernels.copy(y, z)
        return cupy.cuda.get_current_stream().record()

    with ParallelStates(2, pool=pool).fork() as fork:
        fork.run(writing(kernels, latch, mutates), y)
        done = fork.run(copy_now, y, z)
    return z, done


def test_g17_a_branch_waits_for_the_operation_that_mutates_what_it_reads(pool, stream, kernels, latch):
    z, done = written_late_and_read(pool, kernels, latch, "y")
    assert not done.done
    latch.release()
    assert (z.get() == 1).all()


@pytest.mark.unmeasured
def test_g17_control_it_does_not_wait_for_what_was_not_declared(pool, stream, kernels, latch, comes_to_pass):
    z, done = written_late_and_read(pool, kernels, latch, ())
    assert comes_to_pass(done)
    latch.release()
    assert (z.get() == 0).all()


def test_g17_in_the_body_an_operation_waits_for_a_branch_and_plain_code_does_not(pool, stream, kernels, latch, comes_to_pass):
    y, z, early = kernels.full(N, 0), kernels.full(N, -1), kernels.full(N, -1)
    stream.synchronize()
    copied = handlepool.operation(kernels.copy, mutates="target")
    with ParallelStates(2, pool=pool).fork() as fork:
        fork.run(writing(kernels, latch, "y"), y)
        kernels.copy(y, early)
        assert comes_to_pass(stream)
        copied(y, z)
        done = stream.record()
        assert not done.done
        latch.release()
    assert (z.get() == 1).all()
    assert (early.get() == 0).all()


def test_g17_a_raw_kernel_is_an_operation_whose_entry_is_a_function(pool, stream):
    kernel = cupy.RawKernel('extern "C" __global__ void grow(float* y) { y[threadIdx.x] = y[threadIdx.x] * 2 + 1; }', "grow")
    grow = handlepool.operation(kernel, mutates=lambda grid, block, args: args)
    y = cupy.zeros(64, "float32")
    with ParallelStates(4, pool=pool).fork() as fork:
        for _ in range(6):
            fork.run(grow, (1,), (64,), (y,))
        total = fork.run(handlepool.operation(cupy.sum), y)
    assert float(total) == 64 * 63


def test_with_checks_arguments_are_compared_after_the_stream_has_run(stream, kernels):
    with HandlePool(driver="cuda", check=True) as pool:
        y = kernels.full(N, 0)

        def spin_and_write(y):
            kernels.spin(20)
            kernels.write(y, 1)

        with ParallelStates(2, pool=pool).fork() as fork:
            with pytest.raises(ContractError, match="spin_and_write wrote argument y without declaring it"):
                fork.run(handlepool.operation(spin_and_write, mutates=()), y)
            fork.run(handlepool.operation(spin_and_write, mutates="y"), y)
        write = handlepool.operation(spin_and_write, mutates="y")
        program = handlepool.record(lambda y: (write(y), y)[1], y, pool=pool)  # nothing waits there
        program.replay()
        stream.synchronize()
        program.close()
