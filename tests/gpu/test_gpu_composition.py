"""Guarantee 15 on a GPU: regions compose, and nothing deadlocks."""

import threading

import pytest

import handlepool
from handlepool import ParallelStateExecutor, ParallelStates, StateBusyError, StateIndexError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.fixture
def convolution(pool, stream, random_array):
    """``check(run)``: give ``run`` a convolution of one argument and the images, and compare what comes back."""
    w = random_array((32, 32, 3, 3), "float16", "nhwc")
    images = [random_array((1, 32, 14, 14), "float16", "nhwc", seed) for seed in range(8)]
    expected = [handlepool.conv2d(x, w, padding=1, pool=pool).get() for x in images]

    def convolve(x):
        return handlepool.conv2d(x, w, padding=1)

    def check(run):
        with cupy.cuda.Stream(non_blocking=True):
            results = list(run(convolve, images))
            assert all((y.get() == z).all() for y, z in zip(results, expected, strict=True))

    stream.synchronize()
    return check


def test_g15_forks_nest(pool, convolution):
    states = ParallelStates(2, pool=pool)

    def nested(depth, convolve, images):
        if depth == 0:
            return states.map(convolve, images)
        half = len(images) // 2
        with states.fork() as fork:
            parts = [fork.run(nested, depth - 1, convolve, part) for part in (images[:half], images[half:])]
        return parts[0] + parts[1]

    for depth in (1, 2):
        convolution(lambda convolve, images, depth=depth: nested(depth, convolve, images))
    assert pool.stats()["handles_leased"] == 0


def test_g15_a_state_may_be_asked_for_in_a_branch_and_a_fork_inside_a_state(pool, convolution):
    states = ParallelStates(2, pool=pool)
    convolution(lambda f, images: states.map(lambda x: states.with_state(0, lambda state, x: f(x), x), images))
    convolution(lambda f, images: states.with_state(1, lambda state: states.map(f, images)))


def test_g15_a_busy_state_makes_who_holds_one_raise_and_others_wait(pool, in_threads):
    states = ParallelStates(2, pool=pool)
    with pytest.raises(StateBusyError):
        states.with_state(0, lambda state: states.with_state(0, lambda state: None))
    with pytest.raises(StateIndexError):
        states.with_state(2, lambda state: None)
    inside = []

    def alone(state):
        inside.append(1)
        assert len(inside) == 1
        inside.pop()

    in_threads(4, lambda _: [states.with_state(0, alone) for _ in range(50)])


def test_g15_map_works_in_tasks_and_tasks_in_branches(pool, convolution):
    states = ParallelStates(3, pool=pool)
    with ParallelStateExecutor(2, pool=pool) as executor:
        convolution(lambda f, images: executor.submit(states.map, f, images).result())
        convolution(lambda f, images: [executor.submit(f, x).result() for x in images])
        convolution(lambda f, images: states.map(lambda x: executor.submit(f, x).result(), images))


def test_g15_many_threads_share_one_parallel_states(pool, convolution, in_threads):
    states = ParallelStates(4, pool=pool)
    in_threads(12, lambda _: [convolution(states.map) for _ in range(5)])
    now = pool.stats()
    assert now["handles_leased"] == 0
    assert now["handles_created"] <= 12 + 32 + 3  # the threads', the side slots', and those of this test's own streams


def test_g15_a_fork_that_finds_no_side_slot_runs_inline_with_the_same_results(pool, convolution):
    everything = ParallelStates(32, pool=pool)
    few = ParallelStates(4, pool=pool)

    def crowded(convolve, images):
        with everything.fork() as fork:
            outer = [fork.run(convolve, images[i % 8]) for i in range(40)]
            assert pool.stats()["handles_leased"] == 32
            inner = few.map(convolve, images)
            nested = fork.run(few.map, convolve, images)
        assert all((a == b).all() and (a == c).all() for a, b, c in zip(outer, inner, nested, strict=False))
        return inner

    convolution(crowded)
    assert pool.stats()["handles_leased"] == 0


def test_g15_no_lock_is_held_while_a_branch_runs(pool, stream, in_threads):
    both_inside = threading.Barrier(2)
    states = ParallelStates(1, pool=pool)

    def fork(_):
        with cupy.cuda.Stream(non_blocking=True), states.fork() as fork:
            return fork.run(both_inside.wait, 20)

    assert sorted(in_threads(2, fork)) == [0, 1]


def test_g15_an_error_in_a_nested_branch_leaves_everything_usable(pool, convolution):
    states = ParallelStates(2, pool=pool)

    def fail():
        raise KeyError("inner")

    def outer():
        with states.fork() as fork:
            fork.run(fail)

    with pytest.raises(KeyError), states.fork() as fork:
        fork.run(outer)
    assert pool.stats()["handles_leased"] == 0
    convolution(states.map)
