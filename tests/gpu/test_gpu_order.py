"""Guarantees 6 and 7 on a GPU: a fork orders, and its branches are concurrent."""

import threading
from itertools import count

import pytest

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

N = 1 << 16
SPIN = 20  # milliseconds

_values = count(1001)


class BranchError(Exception):
    pass


@pytest.fixture
def careless_pool(stream):
    """A pool whose driver leaves every wait out."""
    from handlepool.drivers.cuda.driver import CudaDriver

    class Careless(CudaDriver):
        wait_event = staticmethod(lambda pointer, event: None)

    with HandlePool(driver=Careless()) as pool:
        pool.prewarm(states=4)
        yield pool


# 6. A fork orders


def read_what_the_caller_writes_late(pool, kernels, latch):
    """The caller's stream is held back before it writes 1; a branch copies what is there."""
    x, y = kernels.full(N, 0), kernels.full(N, -1)
    cupy.cuda.get_current_stream().synchronize()
    latch.hold()
    kernels.write(x, 1)
    with ParallelStates(1, pool=pool).fork() as fork:
        done = fork.run(lambda: kernels.copy(x, y) is y and cupy.cuda.get_current_stream().record())
    return y, done


def test_g6_a_branch_starts_after_what_the_callers_stream_was_given(pool, stream, kernels, latch):
    y, done = read_what_the_caller_writes_late(pool, kernels, latch)
    assert not done.done
    latch.release()
    assert (y.get() == 1).all()


def test_g6_control_without_the_wait_a_branch_starts_too_early(careless_pool, kernels, latch, comes_to_pass):
    y, done = read_what_the_caller_writes_late(careless_pool, kernels, latch)
    assert comes_to_pass(done)
    latch.release()
    assert (y.get() == 0).all()


@pytest.mark.parametrize("fails", ["nothing", "a branch", "another branch", "the body"])
def test_g6_the_callers_stream_goes_on_after_every_branch_also_on_an_exception(pool, stream, kernels, latch, fails):
    late, z = [kernels.full(N, 0) for _ in range(3)], [kernels.full(N, -1) for _ in range(3)]

    def branch(y, raises=False):
        latch.hold()
        kernels.write(y, 1)
        if raises:
            raise BranchError

    def region():
        with ParallelStates(3, pool=pool).fork() as fork:
            for i, y in enumerate(late):
                fork.run(branch, y, raises=fails == "a branch" and i == 2)
            if fails == "another branch":
                fork.run(branch, late[0], raises=True)
            if fails == "the body":
                raise BranchError

    if fails == "nothing":
        region()
    else:
        with pytest.raises(BranchError):
            region()
    for y, target in zip(late, z, strict=True):
        kernels.copy(y, target)
    after = stream.record()
    assert not after.done
    latch.release()
    assert all((target.get() == 1).all() for target in z)


def test_g6_control_without_the_join_the_callers_stream_goes_on_too_early(careless_pool, stream, kernels, latch, comes_to_pass):
    y, z = kernels.full(N, 0), kernels.full(N, -1)
    stream.synchronize()

    def branch():
        latch.hold()
        kernels.write(y, 1)

    with ParallelStates(1, pool=careless_pool).fork() as fork:
        fork.run(branch)
    kernels.copy(y, z)
    assert comes_to_pass(stream)
    assert (z.get() == 0).all()
    latch.release()


def test_g6_a_fork_over_a_stream_that_is_not_current_orders_that_stream(pool, stream, kernels, latch):
    x, y, z = (kernels.full(N, 0) for _ in range(3))
    stream.synchronize()
    other = cupy.cuda.Stream(non_blocking=True)
    with other:
        latch.hold()
        kernels.write(x, 1)
    with ParallelStates(2, pool=pool).fork(stream=other) as fork:
        fork.run(kernels.copy, x, y)
    with other:
        kernels.copy(y, z)
        after = other.record()
        assert not after.done
        latch.release()
        assert (z.get() == 1).all()


def test_g6_a_fork_over_the_null_stream_orders_it(pool, stream, kernels, latch):
    x, y, z = (kernels.full(N, 0) for _ in range(3))
    stream.synchronize()
    with cupy.cuda.Stream.null:
        latch.hold()
        kernels.write(x, 1)
        with ParallelStates(2, pool=pool).fork() as fork:
            fork.run(kernels.copy, x, y)
        kernels.copy(y, z)
        latch.release()
        assert (z.get() == 1).all()


def test_g6_branches_of_one_state_run_in_order(pool, stream, kernels):
    x = kernels.full(N, 0)

    def add(value):
        kernels.spin(1)
        cupy.add(x, value, out=x)
        cupy.multiply(x, 2, out=x)

    with ParallelStates(1, pool=pool).fork() as fork:
        for value in (1, 2, 3):
            fork.run(add, value)
    assert (x.get() == ((1 * 2 + 2) * 2 + 3) * 2).all()


# The same, held back by a kernel that spins, which compute-sanitizer can wait for. It sees an access that no order puts after the
# allocation, so arrays are used on other streams than their own, and the host waits for nothing in between. What is written is a
# value that no memory holds yet.


def empty():
    return cupy.empty(N, cupy.float32)


def read(kernels, x, y):
    """Copy; gives an event after it."""
    kernels.copy(x, y)
    return cupy.cuda.get_current_stream().record()


def a_branch_reads(pool, kernels, hold, value):
    x, y = empty(), empty()
    hold()
    kernels.write(x, value)
    with ParallelStates(2, pool=pool).fork() as fork:
        done = fork.run(read, kernels, x, y)
    return y, done


def a_branch_in_a_branch_reads(pool, kernels, hold, value):
    x, y = empty(), empty()
    hold()
    kernels.write(x, value)

    def outer():
        with ParallelStates(1, pool=pool).fork() as fork:
            return fork.run(read, kernels, x, y)

    with ParallelStates(1, pool=pool).fork() as fork:
        done = fork.run(outer)
    return y, done


def a_task_reads(pool, kernels, hold, value):
    x, y = empty(), empty()
    hold()
    kernels.write(x, value)
    with ParallelStateExecutor(1, pool=pool) as executor:
        return y, executor.submit(read, kernels, x, y).result()


def a_branch_writes(pool, kernels, hold, value):
    y = empty()

    def branch():
        x = empty()
        hold()
        kernels.write(x, value)
        return x

    with ParallelStates(2, pool=pool).fork() as fork:
        x = fork.run(branch)
    return y, read(kernels, x, y)


def a_branch_that_raises_writes(pool, kernels, hold, value):
    x, y = empty(), empty()

    def branch():
        hold()
        kernels.write(x, value)
        raise BranchError

    with pytest.raises(BranchError), ParallelStates(2, pool=pool).fork() as fork:
        fork.run(branch)
    return y, read(kernels, x, y)


def an_explicit_state_writes(pool, kernels, hold, value):
    x, y = empty(), empty()

    def late(state):
        hold()
        kernels.write(x, value)

    ParallelStates(2, pool=pool).with_state(1, late)
    return y, read(kernels, x, y)


SCENES = [
    a_branch_reads,
    a_branch_in_a_branch_reads,
    a_task_reads,
    a_branch_writes,
    a_branch_that_raises_writes,
    an_explicit_state_writes,
]


@pytest.fixture(params=["a stream", "the null stream"])
def caller(request, stream):
    """The stream that is current, and that the scene's arrays are allocated on."""
    return stream if request.param == "a stream" else cupy.cuda.Stream.null


@pytest.mark.parametrize("scene", SCENES)
def test_g6_what_is_written_late_is_read_after_it(pool, stream, kernels, caller, scene):
    pool.prewarm(states=4)
    value = next(_values)
    with caller:
        y, _ = scene(pool, kernels, lambda: kernels.spin(SPIN), value)
        assert (y.get() == value).all()


@pytest.mark.parametrize("scene", SCENES)
def test_g6_control_without_the_waits_it_is_read_before(careless_pool, kernels, latch, comes_to_pass, caller, scene):
    value = next(_values)
    with caller:
        y, done = scene(careless_pool, kernels, latch.hold, value)
        assert comes_to_pass(done)
        latch.release()
    cupy.cuda.Device().synchronize()
    assert (y.get() != value).all()


# 7. Branches are concurrent


# A first call is ordered as a writer of `x`, too, which its sibling reads.
@pytest.mark.unmeasured
def test_g7_a_branch_finishes_while_its_sibling_is_held_back_and_the_join_waits_for_both(
    pool, stream, kernels, latch, comes_to_pass
):
    x, held, free = kernels.full(N, 1), kernels.full(N, 0), kernels.full(N, 0)
    reader = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()

    @handlepool.operation(mutates="target")
    def branch(target, wait):
        if wait:
            latch.hold()
        kernels.copy(x, target)
        return cupy.cuda.get_current_stream().record()

    with ParallelStates(2, pool=pool).fork() as fork:
        first = fork.run(branch, held, True)
        second = fork.run(branch, free, False)
        assert comes_to_pass(second)
        assert not first.done
        with reader:
            assert (free.get() == 1).all()
            assert (held.get() == 0).all()
    after = stream.record()
    assert not first.done
    assert not after.done
    latch.release()
    assert comes_to_pass(after)
    assert first.done
    assert (held.get() == 1).all()


def test_g7_a_convolution_finishes_while_its_sibling_is_held_back(pool, stream, latch, random_array, comes_to_pass):
    x, w = random_array((1, 64, 14, 14), "float16", "nhwc"), random_array((64, 64, 3, 3), "float16", "nhwc")
    y = handlepool.conv2d(x, w, padding=1, pool=pool)
    expected, held, free = y.get(), cupy.zeros_like(y), cupy.zeros_like(y)
    states = ParallelStates(2, pool=pool)
    reader = cupy.cuda.Stream(non_blocking=True)  # to make one may wait, too

    def branches(fork, hold):
        fork.run(hold)
        fork.run(handlepool.conv2d, x, w, padding=1, out=free)
        fork.run(handlepool.conv2d, x, w, padding=1, out=held)  # on the state that is held back
        return fork.run(lambda: cupy.cuda.get_current_stream().record())

    with states.fork() as fork:  # for once without holding: what a first use loads may wait for a stream that is held back
        branches(fork, lambda: None)
    held.fill(0)
    free.fill(0)
    stream.synchronize()
    with states.fork() as fork:
        finished = branches(fork, latch.hold)
        assert comes_to_pass(finished)
        assert not latch.expired
        with reader:
            assert (free.get() == expected).all()
            assert (held.get() == 0).all()
    after = stream.record()
    assert not after.done
    latch.release()
    assert (held.get() == expected).all()


def test_g7_a_task_has_its_result_while_a_branch_and_another_task_are_held_back(pool, stream, kernels, latch, comes_to_pass):
    x = kernels.full(N, 1)
    stream.synchronize()
    begun = threading.Event()  # or the same worker could run both tasks, on one stream

    def held():
        latch.hold()
        y = kernels.copy(x)
        assert begun.wait(10)  # seconds, of what is expected to happen
        return y

    def free():
        begun.set()
        return kernels.copy(x)

    with ParallelStateExecutor(2, pool=pool) as executor:
        try:
            submitters = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            with submitters[0]:
                waiting = executor.submit(held)
            with submitters[1]:
                result = executor.submit(free).result()
                assert comes_to_pass(submitters[1])
                assert (result.get() == 1).all()
            with submitters[0]:
                late = waiting.result()  # the function has returned; the GPU has not run it
                after = submitters[0].record()
                assert not after.done
            with ParallelStates(2, pool=pool).fork() as fork:
                finished = fork.run(lambda: kernels.copy(x) is not None and cupy.cuda.get_current_stream().record())
            assert comes_to_pass(finished)
        finally:
            latch.release()
        assert comes_to_pass(after)
        with submitters[0]:
            assert (late.get() == 1).all()


def test_g6_an_explicit_state_is_joined_at_once(pool, stream, kernels, latch):
    x, z = kernels.full(N, 0), kernels.full(N, -1)
    stream.synchronize()

    def late(state):
        assert state.stream is cupy.cuda.get_current_stream() is not stream
        assert state.handle is pool.get_handle()
        latch.hold()
        kernels.write(x, 1)

    ParallelStates(2, pool=pool).with_state(1, late)
    kernels.copy(x, z)
    after = stream.record()
    assert not after.done
    latch.release()
    assert (z.get() == 1).all()
