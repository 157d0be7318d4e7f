"""Random calls of the ready-made operations on the host driver, against float64; `gpu/test_gpu_operations_random.py` on a GPU."""

import hypothesis
import pytest
from harness.arrays import Arrays
from harness.operation_calls import MAKERS, calls

from handlepool import HandlePool, ops


@pytest.mark.parametrize("what", MAKERS)
def test_g18_each_operation_is_the_reference(what):
    with HandlePool(driver="host") as pool:

        @hypothesis.given(call=calls(MAKERS[what]))
        @hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
        def is_right(call):
            call.check(Arrays(pool, call.dtype, call.layout), pool)

        is_right()


FAULTS = {
    "convolutions": ("conv2d", {"bias": None, "activation": None}),
    "products": ("matmul", {"activation": None}),
    "kernels": ("avg_pool2d", {"count_include_pad": True}),
}


@pytest.mark.parametrize("what", FAULTS)
def test_g18_control_an_operation_that_leaves_out_an_option_is_found(what, monkeypatch):
    name, without = FAULTS[what]
    right = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args, **options: right(*args, **{**options, **without}))
    with pytest.raises((AssertionError, ExceptionGroup)):
        test_g18_each_operation_is_the_reference(what)
