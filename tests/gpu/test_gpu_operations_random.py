"""Random calls of the ready-made operations on a GPU, as Hypothesis draws them: against float64, and torch where it is there.

About 40 seconds. Afterwards no more calls run, unless fewer than 20 of a kind were right. `test_gpu_operations.py` has shapes as
networks have them.
"""

import time
from importlib.util import find_spec

import hypothesis
import pytest
from harness.arrays import Arrays
from harness.operation_calls import MAKERS, calls

from handlepool import GraphNotSupportedError

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
