"""The executor on a GPU: tasks start after the submitter's stream, and results are ready on the caller's."""

from concurrent.futures import wait

import pytest

import handlepool
from handlepool import ArgumentError, ParallelStateExecutor

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 16


@pytest.fixture
def executor(pool, latch):
    with ParallelStateExecutor(2, pool=pool) as executor:
        yield executor
        latch.word.value = 1  # whatever a failed test left held back


def test_g6_a_task_starts_after_what_the_submitters_stream_was_given(executor, stream, kernels, latch):
    x, y = kernels.full(N, 0), kernels.full(N, -1)
    latch.hold()
    kernels.write(x, 1)
    future = executor.submit(kernels.copy, x, y)
    assert future.result() is y
    latch.release()
    assert (y.get() == 1).all()


def test_g6_a_result_is_ready_on_the_callers_stream_and_on_the_submitters(executor, stream, kernels, latch):
    y, here, there = (kernels.full(N, 0) for _ in range(3))
    caller = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()

    def late():
        latch.hold()
        kernels.write(y, 1)
        return y

    future = executor.submit(late)
    with caller:
        kernels.copy(future.result(), here)
        after = caller.record()
    kernels.copy(y, there)
    assert not after.done
    latch.release()
    stream.wait_event(after)
    assert (here.get() == 1).all()
    assert (there.get() == 1).all()


def test_g6_synchronize_waits_on_the_host(executor, stream, kernels):
    y = kernels.full(N, 0)

    def late():
        kernels.spin(20)
        kernels.write(y, 1)
        return cupy.cuda.get_current_stream().record()

    assert executor.submit(late).synchronize().done


def test_g6_a_task_that_fails_is_joined_too_and_the_executor_goes_on(executor, stream, kernels, latch):
    y, z = kernels.full(N, 0), kernels.full(N, -1)

    def fail():
        latch.hold()
        kernels.write(y, 1)
        raise KeyError("task")

    with pytest.raises(KeyError, match="task"):
        executor.submit(fail).result()
    kernels.copy(y, z)
    latch.release()
    assert (z.get() == 1).all()
    assert (executor.submit(kernels.copy, y).result().get() == 1).all()


def test_g1_tasks_of_one_worker_use_one_handle_and_workers_differ(executor, pool, stream):
    def handle():
        return pool.get_handle(), pool.internals.slot().pointer, cupy.cuda.get_current_stream().ptr

    futures = [executor.submit(handle) for _ in range(50)]
    wait(futures)
    found = {future.result() for future in futures}
    assert len(found) <= 2
    assert all(pointer == current != stream.ptr for _, pointer, current in found)


def test_convolutions_submitted_from_one_stream_are_right(executor, pool, stream, random_array):
    w = random_array((64, 64, 3, 3))
    images = [random_array((1, 64, 14, 14), seed=seed) for seed in range(20)]
    expected = [handlepool.conv2d(x, w, padding=1, pool=pool) for x in images]
    futures = [executor.submit(handlepool.conv2d, x, w, padding=1) for x in images]
    assert all((future.result() == y).all() for future, y in zip(futures, expected, strict=True))
    mapped = executor.map(lambda x: handlepool.conv2d(x, w, padding=1), images)
    assert all((x == y).all() for x, y in zip(mapped, expected, strict=True))


def test_the_per_thread_default_stream_cannot_be_submitted_from(executor):
    with cupy.cuda.Stream.ptds, pytest.raises(ArgumentError, match="per-thread default stream"):
        executor.submit(int)
    assert executor.submit(int).result() == 0


def test_a_task_that_nobody_asks_for_runs_and_is_let_go(executor, stream, kernels):
    y = kernels.full(N, 0)
    executor.submit(kernels.write, y, 1)
    executor.shutdown()
    cupy.cuda.Device().synchronize()
    assert (y.get() == 1).all()
