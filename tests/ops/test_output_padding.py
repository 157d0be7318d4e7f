"""Transposed convolutions, by `conv2d_input_grad`, whose output padding is the stride or more; torch takes less than dilation."""

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays
from harness.transposed_cases import Case, random_case

import handlepool
from handlepool import ArgumentError, ParallelStates, conv2d_input_grad

LAYOUTS = ("NCHW", "NCHW")
DILATED = Case("float32", LAYOUTS, (1, 4, 3, 3), (4, 2, 3, 3), (1, 1), (0, 0), (2, 2), (1, 1), 1)
BEYOND = Case("float32", LAYOUTS, (2, 2, 4, 4), (2, 2, 4, 5), (3, 2), (1, 2), (4, 4), (2, 3), 1)


def check(case, pool, call=conv2d_input_grad):
    arrays = Arrays(pool, case.dtype)
    dy, w = (arrays.random(*shape, layout=layout) for shape, layout in zip((case.dy, case.w), case.layouts, strict=True))
    made = call(dy, w, case.shape, **case.options)
    assert arrays.error(made, case.wanted(arrays.take(dy), arrays.take(w))) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", [DILATED, BEYOND], ids=["dilated", "beyond the stride"])
def test_g18_an_output_padding_of_the_stride_or_more_is_right(each_pool, case):
    check(case, each_pool)
    check(case, each_pool)  # in scratch that is not new


def test_g18_random_transposed_convolutions_are_right():
    """On the host; `gpu/test_gpu_operations_random.py` has those on a GPU."""
    cases = [random_case(seed) for seed in range(60)]
    with handlepool.HandlePool(driver="host") as pool:
        for case in cases:
            check(case, pool, lambda *given, **options: conv2d_input_grad(*given, **options, pool=pool))
    assert sum(any(map(int.__ge__, case.more, case.stride)) for case in cases) > 20


def test_a_checked_pool_computes_them_too():
    with handlepool.HandlePool(driver="host", check=True) as pool:
        check(BEYOND, pool, lambda *given, **options: conv2d_input_grad(*given, **options, pool=pool))


@pytest.mark.parametrize("lanes", [None, 4])
def test_they_are_branches_and_recorded(each_pool, lanes):
    arrays = Arrays(each_pool)
    dy, w = arrays.random(*BEYOND.dy), arrays.random(*BEYOND.w)
    wanted = BEYOND.wanted(arrays.take(dy), arrays.take(w))
    with ParallelStates(2, pool=each_pool).fork() as fork:
        made = fork.run(conv2d_input_grad, dy, w, BEYOND.shape, **BEYOND.options)
    assert arrays.error(made, wanted) < TOLERANCE["float32"]
    with handlepool.record(lambda dy: conv2d_input_grad(dy, w, BEYOND.shape, **BEYOND.options), dy, lanes=lanes) as program:
        for _ in range(2):
            program.replay()
            assert arrays.error(program.outputs, wanted) < TOLERANCE["float32"]


@pytest.mark.parametrize("size", [(6, 8), (9, 8), (8, 9)])
def test_any_other_size_is_refused_with_the_shapes(each_pool, size):
    """From the smallest images, of 7 x 7, to less than the dilation of 2 more."""
    arrays = Arrays(each_pool)
    dy, w = arrays.random(*DILATED.dy), arrays.random(*DILATED.w)
    with pytest.raises(ArgumentError, match=r"images .* lead to .*, and dy has shape \(1, 4, 3, 3\)"):
        conv2d_input_grad(dy, w, (1, 2, *size), dilation=2)


def test_a_graph_of_the_callers_own_takes_them_as_well(each_pool):
    @handlepool.graph
    def transposed(g, dy, w):
        return g.conv_dgrad(dy, w, padding=[1, 2], stride=[3, 2], dilation=[4, 4]).set_dim(list(BEYOND.shape))

    check(BEYOND, each_pool, lambda dy, w, *_, **__: transposed(dy, w))


def test_one_too_large_to_be_completed_is_refused_with_the_remedy(each_pool, limits):
    limits(MOST_COPIED=1 << 8)
    arrays = Arrays(each_pool)
    dy, w = arrays.random(1, 4, 3, 5), arrays.random(4, 2, 3, 3)
    with pytest.raises(
        ArgumentError, match=r"lacks rows or columns of .*\(1, 4, 4, 6\).*append zeros to the array, as numpy.pad"
    ):
        conv2d_input_grad(dy, w, (1, 2, 8, 10), dilation=2)
    completed = arrays.put(np.pad(arrays.take(dy), ((0, 0), (0, 0), (0, 1), (0, 1))))
    assert conv2d_input_grad(completed, w, (1, 2, 8, 10), dilation=2).shape == (1, 2, 8, 10)
