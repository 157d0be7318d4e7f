"""Guarantee 8 on a GPU: memory outlives its readers. CuPy reuses a freed block at once, in the order of one stream only."""

import gc
import weakref

import pytest

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 16


@pytest.fixture
def pool_without_edges(stream):
    """A pool whose branches allocate from the caller's arena, without the edge from the caller's stream."""
    from handlepool.drivers.cuda.driver import CudaDriver

    class WithoutEdges(CudaDriver):
        def region_allocator(self, stream, keep, of):
            base = cupy.cuda.get_allocator()

            def allocate(nbytes):
                current = cupy.cuda.get_current_stream()
                stream.use()
                memory = base(nbytes)
                current.use()
                keep(memory.mem)
                return memory

            return allocate

    with HandlePool(driver=WithoutEdges()) as pool:
        pool.prewarm(states=4)
        yield pool


def allocate_what_another_thread_freed(pool, stream, kernels, latch, in_thread):
    """After a branch began, another thread has the caller's stream write 7 late to a block that it frees at once; the branch
    allocates that block and writes 1. Gives the branch's array and an event after its write."""
    cupy.get_default_memory_pool().free_all_blocks()
    blocks = []

    def another_thread():
        with stream:
            latch.hold()
            block = cupy.empty(N, cupy.float32)
            blocks.append(block.data.ptr)
            kernels.write(block, 7)

    def branch():
        in_thread(another_thread)
        block = cupy.empty(N, cupy.float32)
        assert block.data.ptr == blocks[0], "CuPy's pool gave another block, so this test shows nothing"
        kernels.write(block, 1)
        return block, cupy.cuda.get_current_stream().record()

    with ParallelStates(1, pool=pool).fork() as fork:
        return fork.run(branch)


def test_g8_a_block_that_another_thread_freed_is_written_after_its_former_work(pool, stream, kernels, latch, in_thread):
    block, written = allocate_what_another_thread_freed(pool, stream, kernels, latch, in_thread)
    assert not written.done
    latch.release()
    assert (block.get() == 1).all()


def test_g8_control_without_the_edge_the_former_work_strikes(
    pool_without_edges, stream, kernels, latch, in_thread, comes_to_pass
):
    block, written = allocate_what_another_thread_freed(pool_without_edges, stream, kernels, latch, in_thread)
    assert comes_to_pass(written)
    latch.release()
    assert (block.get() == 7).all()


def overwrite_what_is_free(kernels, blocks=8):
    """Take blocks of the current stream's arena and fill them with 9, as any later code may."""
    taken = [cupy.empty(N, cupy.float32) for _ in range(blocks)]
    for block in taken:
        kernels.write(block, 9)
    return taken


def drop_an_argument(pool, fork, kernels, late_copy):
    x = kernels.full(N, 1)
    return fork.run(late_copy, x)


def rebind_a_closure(pool, fork, kernels, late_copy):
    x = kernels.full(N, 1)
    y = fork.run(lambda: late_copy(x))
    x = None
    return y


def rebind_a_method(pool, fork, kernels, late_copy):
    class Holder:
        def __init__(self):
            self.x = kernels.full(N, 1)

        def read(self):
            return late_copy(self.x)

    return fork.run(Holder().read)


def drop_a_temporary(pool, fork, kernels, late_copy):
    return fork.run(lambda: late_copy(kernels.full(N, 1)))


def drop_an_argument_of_a_nested_fork(pool, fork, kernels, late_copy):
    def nested():
        with ParallelStates(2, pool=pool).fork() as inner:
            return inner.run(late_copy, kernels.full(N, 1))

    return fork.run(nested)


SCENARIOS = [drop_an_argument, rebind_a_closure, rebind_a_method, drop_a_temporary, drop_an_argument_of_a_nested_fork]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_g8_what_a_branch_reads_late_is_kept_to_the_join(pool, stream, kernels, latch, scenario):
    y = kernels.full(N, 0)
    cupy.get_default_memory_pool().free_all_blocks()

    def late_copy(x):
        latch.hold()
        return kernels.copy(x, y)

    with ParallelStates(2, pool=pool).fork() as fork:
        result = scenario(pool, fork, kernels, late_copy)
        taken = overwrite_what_is_free(kernels)
    taken += overwrite_what_is_free(kernels)  # ordered after the join, so it may take anything
    latch.release()
    assert result is y
    assert (y.get() == 1).all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_g8_what_a_branch_reads_after_a_kernel_that_spins_is_kept_to_the_join(pool, stream, kernels, scenario):
    """As above, without a latch: compute-sanitizer can wait for it."""
    pool.prewarm(states=4)
    y = kernels.full(N, 0)
    cupy.get_default_memory_pool().free_all_blocks()

    def late_copy(x):
        kernels.spin(20)
        return kernels.copy(x, y)

    with ParallelStates(2, pool=pool).fork() as fork:
        result = scenario(pool, fork, kernels, late_copy)
        taken = overwrite_what_is_free(kernels)
    taken += overwrite_what_is_free(kernels)
    assert result is y
    assert (y.get() == 1).all()


def test_g8_control_without_a_region_a_late_reader_reads_what_came_after(stream, kernels, latch, comes_to_pass):
    side = cupy.cuda.Stream(non_blocking=True)
    y = kernels.full(N, 0)
    x = kernels.full(N, 1)
    side.wait_event(stream.record())
    with side:
        latch.hold()
        kernels.copy(x, y)
    del x
    taken = overwrite_what_is_free(kernels)
    assert comes_to_pass(stream)
    latch.release()
    stream.wait_event(side.record())
    assert (y.get() == 9).all(), taken


def test_g8_after_the_join_a_result_may_be_freed_and_its_block_reused_on_the_callers_stream(pool, stream, kernels, latch):
    cupy.get_default_memory_pool().free_all_blocks()

    def late():
        y = cupy.empty(N, cupy.float32)
        latch.hold()
        kernels.write(y, 1)
        return y

    with ParallelStates(2, pool=pool).fork() as fork:
        y = fork.run(late)
    pointer = y.data.ptr
    del y, fork
    taken = overwrite_what_is_free(kernels)
    assert pointer in [block.data.ptr for block in taken], "CuPy's pool did not reuse the block, so this test shows nothing"
    latch.release()
    assert all((block.get() == 9).all() for block in taken)


def test_g8_nothing_is_kept_after_the_outermost_join(pool, stream, kernels):
    class Argument:
        pass

    def nested(argument):
        ParallelStates(2, pool=pool).map(lambda _: None, [argument])

    argument = Argument()
    watch = weakref.ref(argument)
    with ParallelStates(2, pool=pool).fork() as fork:
        fork.run(nested, argument)
        del argument
        assert watch() is not None
    assert watch() is None, gc.get_referrers(watch())


def test_g8_temporaries_of_many_branches_are_right(pool, stream, kernels, random_array):
    x = random_array((N,))

    def branch(i):
        y = x
        for _ in range(5):
            y = (y + i) * 2 - i  # two temporaries each time
        return y

    def expected(i):
        y = x.get()
        for _ in range(5):
            y = (y + i) * 2 - i
        return y

    states = ParallelStates(8, pool=pool)
    for _ in range(5):
        results = states.map(branch, range(32))
        assert all((result.get() == expected(i)).all() for i, result in enumerate(results))


def test_g8_outputs_of_graph_functions_belong_to_the_callers_arena(pool, stream, random_array):
    x, w = random_array((1, 64, 14, 14), "float16", "nhwc"), random_array((64, 64, 3, 3), "float16", "nhwc")
    cupy.get_default_memory_pool().free_all_blocks()
    with ParallelStates(2, pool=pool).fork() as fork:
        y = fork.run(handlepool.conv2d, x, w, padding=1)
    pointer = y.data.ptr
    del y, fork
    again = handlepool.conv2d(x, w, padding=1, pool=pool)
    assert again.data.ptr == pointer


def test_g8_a_tasks_arguments_and_temporaries_are_kept(pool, stream, kernels, latch):
    y = kernels.full(N, 0)

    def task(x):
        temporary = kernels.copy(x)
        latch.hold()
        return kernels.copy(temporary, y)

    with ParallelStateExecutor(1, pool=pool) as executor:
        try:
            future = executor.submit(task, kernels.full(N, 1))
            future.exception(20)
            taken = overwrite_what_is_free(kernels)
            with cupy.cuda.Stream(non_blocking=True):
                assert future.result() is y
        finally:
            latch.release()
    stream.synchronize()
    assert (y.get() == 1).all(), taken
