"""Guarantee 5 on a GPU: scratch memory is never shared by two streams, and outlives the work that uses it."""

from itertools import chain, pairwise

import pytest

import handlepool
from handlepool import HandlePool, OutOfMemoryError, ParallelStates
from handlepool.ops import conv2d_plan

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

STREAMS, ROUNDS = 8, 10


@pytest.fixture
def convolutions(pool, stream, random_array):
    """A plan that needs scratch, the images of each stream, and what comes out when one runs after the other."""
    w = random_array((256, 256, 3, 3))
    images = [random_array((4, 256, 14, 14), seed=seed) for seed in range(STREAMS)]
    expected = [handlepool.conv2d(x, w, padding=1, pool=pool) for x in images]
    plan = conv2d_plan(images[0], w, padding=1, pool=pool)
    assert plan.workspace_size > 0
    stream.synchronize()
    return plan, w, images, expected


def wrong_results(pool, kernels, convolutions, workspace):
    """Launch on many streams at once, each with the workspace that ``workspace(slot)`` names; count what differs."""
    plan, w, images, expected = convolutions
    outputs = [[cupy.full_like(y, cupy.nan) for y in expected] for _ in range(ROUNDS)]

    @handlepool.operation(mutates="y")
    def launch(x, y):
        slot = pool.internals.slot()
        plan.executable.launch(slot.handle, (x, w, y), workspace(slot))

    with ParallelStates(STREAMS, pool=pool).fork() as fork:
        kernels.spin(50)  # gathers launches, so that the streams run beside each other
        for row in outputs:
            for x, y in zip(images, row, strict=True):
                fork.run(launch, x, y)
    return sum(int((y != z).any()) for row in outputs for y, z in zip(row, expected, strict=True))


def test_g5_concurrent_convolutions_with_scratch_of_their_own_are_right(pool, kernels, convolutions):
    size = convolutions[0].workspace_size
    pool.prewarm(states=STREAMS, workspace=size)
    assert wrong_results(pool, kernels, convolutions, lambda slot: slot.reserve(size)) == 0


@pytest.mark.unmeasured
def test_g5_control_concurrent_convolutions_that_share_one_workspace_are_wrong(pool, kernels, convolutions):
    shared = cupy.empty(convolutions[0].workspace_size, cupy.uint8)
    pool.prewarm(states=STREAMS)
    assert wrong_results(pool, kernels, convolutions, lambda slot: shared.data.ptr) > 0


def test_g5_what_is_handed_out_and_what_is_launched_with_never_overlap(pool, in_threads):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]

    def take(_):
        blocks = []
        for stream in (cupy.cuda.Stream.null, *streams):
            slot = pool.internals.slot(stream)
            blocks += [(pool.get_workspace(1 << 16, stream).data.ptr, 1 << 16), (slot.reserve(1 << 17), 1 << 17)]
        return blocks

    blocks = sorted(chain.from_iterable(in_threads(4, take)))
    assert len(blocks) == 32
    assert all(start % 256 == 0 for start, _ in blocks)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(blocks))


def test_g5_growth_under_queued_work_keeps_the_block_that_the_work_uses(pool, stream, kernels, latch):
    n = 1 << 16
    latch.hold()
    results, pointers = [], []
    for value in range(1, 5):
        memory = pool.get_workspace(4 * n << value).view(cupy.float32)
        pointers.append(memory.data.ptr)
        kernels.write(memory, value)
        results.append(kernels.copy(memory))
    assert len(set(pointers)) == 4
    latch.release()
    assert all((result.get() == value).all() for value, result in enumerate(results, 1))
    before = pool.stats()["scratch_bytes"]
    pool.trim()  # every block but the last has served
    assert pool.stats()["scratch_bytes"] < before


def test_g5_convolutions_whose_scratch_grows_while_others_are_queued_are_right(pool, stream, kernels, random_array):
    w = random_array((256, 256, 3, 3))
    images = [random_array((n, 256, 14, 14), seed=n) for n in (1, 2, 4, 8)]
    expected = [handlepool.conv2d(x, w, padding=1, pool=pool) for x in images]
    fresh = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()
    with fresh:
        kernels.spin(5)
        outputs = [handlepool.conv2d(x, w, padding=1, pool=pool) for x in images]
        assert all((y == z).all() for y, z in zip(outputs, expected, strict=True))


def test_g5_no_bytes_are_a_legal_size(pool, stream):
    assert pool.get_workspace(0).shape == (0,)
    assert pool.stats()["scratch_bytes"] == 0
    assert pool.get_workspace(1).shape == (1,)
    assert pool.stats()["scratch_bytes"] == 256


def test_g5_a_scratch_limit_holds_for_the_device_and_takes_back_idle_scratch_first(stream, in_thread):
    with HandlePool(driver="cuda", scratch_limit=1 << 20) as pool:
        pool.get_handle()
        in_thread(lambda: pool.get_workspace(1 << 19, cupy.cuda.Stream.null).nbytes)
        assert pool.stats()["scratch_bytes"] == 1 << 19
        pool.get_workspace(3 << 18)
        with pytest.raises(OutOfMemoryError, match="1,048,576"):
            pool.get_workspace(1 << 20, cupy.cuda.Stream.null)
        assert pool.get_workspace(1 << 10).shape == (1 << 10,)
        assert pool.stats()["scratch_bytes"] <= 1 << 20


def test_g5_more_than_the_device_has_is_an_error_that_names_the_numbers(pool, stream):
    _, total = cupy.cuda.runtime.memGetInfo()
    with pytest.raises(OutOfMemoryError, match=r"of \d[\d,]* bytes are free"):
        pool.get_workspace(2 * total)
    assert pool.get_workspace(256).shape == (256,)
