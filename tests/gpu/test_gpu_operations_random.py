"""Random calls of the ready-made operations on a GPU, as Hypothesis draws them: against float64, and torch where it is there.

About 40 seconds. Afterwards no more calls run, unless fewer than 20 of a kind were right. `test_gpu_operations.py` has shapes as
networks have them.
"""

import time
from importlib.util import find_spec

import hypothesis
import numpy as np
import pytest
from harness.arrays import Arrays
from harness.operation_calls import MAKERS, TOLERANCE, calls
from harness.transposed_cases import random_case

from handlepool import GraphNotSupportedError, conv2d_input_grad

SECONDS = 13
"""For each kind of operation. Most of it builds plans and compiles kernels."""
LEAST = 20
"""Calls that are to be right, however long they take."""


@pytest.mark.parametrize("what", MAKERS)
def test_g18_each_operation_is_the_reference_and_what_torch_gives(pool, stream, what):
    torch = __import__("torch") if find_spec("torch") else None
    until, failed, right, refused = time.monotonic() + SECONDS, [], 0, 0

    @hypothesis.given(call=calls(MAKERS[what]))
    @hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
    def is_right(call):
        nonlocal right, refused
        if right >= LEAST and time.monotonic() > until and not failed:  # a failure is made smaller in any case
            return
        try:
            call.check(Arrays(pool, call.dtype, call.layout), pool, torch)
            right += 1
        except GraphNotSupportedError as error:  # of a convolution alone; it said what to do
            if "is a view with gaps; " not in str(error):
                failed.append(call)
                raise
            refused += 1
        except BaseException:
            failed.append(call)
            raise

    is_right()
    print(f"{right} right, {refused} refused")
    assert right >= LEAST
    assert refused <= right // 2


def test_g18_transposed_convolutions_of_any_output_padding_are_the_reference(pool, stream):
    """Also of the stride or more, which dilation allows: cuDNN gets a loss that zeros were appended to."""
    until, right, beyond, refused = time.monotonic() + 2 * SECONDS, 0, 0, 0
    for seed in range(400):
        if right >= LEAST and time.monotonic() > until:
            break
        case = random_case(seed)
        arrays = Arrays(pool, case.dtype)
        dy, w = (arrays.random(*shape, layout=layout) for shape, layout in zip((case.dy, case.w), case.layouts, strict=True))
        values = arrays.take(dy), arrays.take(w)
        expected, bound = case.wanted(*values), case.wanted(*map(np.abs, values)).max()
        for _ in range(2):
            try:
                made = arrays.take(conv2d_input_grad(dy, w, case.shape, **case.options, pool=pool))
            except GraphNotSupportedError:  # cuDNN has no plan
                refused += 1
                break
            assert np.abs(made - expected).max() <= TOLERANCE[case.dtype] * max(1.0, bound), f"seed {seed}: {case}"
        else:
            right += 1
            beyond += any(map(int.__ge__, case.more, case.stride))
    print(f"{right} right, {beyond} of them with an output padding of the stride or more, {refused} refused")
    assert beyond >= LEAST // 4
    assert refused <= right // 4
