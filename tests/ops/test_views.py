"""Outputs of the ready-made operations that are views of more: every second element of an odd number, along any axis."""

import numpy as np
import pytest
from harness.arrays import FULL, TOLERANCE, Arrays

import handlepool
from handlepool import ArgumentError, ops
from handlepool.testing import reference

EXTENTS = (2, 3, 5, 4)
X = (2, 3, 9, 7)
CALLS = {
    "add": (lambda x, out: ops.add(x, x, out=out), lambda x: x + x, EXTENTS),
    "relu": (lambda x, out: ops.relu(x, out=out), lambda x: np.maximum(x, 0), EXTENTS),
    "concat": (lambda x, out: ops.concat([x, x], 3, out=out), lambda x: np.concatenate([x, x], 3), EXTENTS),
    "max_pool2d": (lambda x, out: ops.max_pool2d(x, 2, out=out), lambda x: reference.max_pool2d(x, 2), X),
    "avg_pool2d": (lambda x, out: ops.avg_pool2d(x, 2, out=out), lambda x: reference.avg_pool2d(x, 2), X),
    "mean2d": (lambda x, out: ops.mean2d(x, out=out), lambda x: x.mean((2, 3)), X),
    "matmul": (lambda x, out: ops.matmul(x, x.swapaxes(2, 3), out=out), lambda x: x @ x.swapaxes(2, 3), EXTENTS),
    "linear": (lambda x, out: ops.linear(x, x[0, 0], out=out), lambda x: x @ x[0, 0].T, EXTENTS),
}


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", CALLS)
def test_an_out_that_is_every_second_row_or_column_of_an_odd_number(each_pool, name, layout, step):
    """Each row begins within the step of the last element of the one before it, and no two elements are one."""
    arrays = Arrays(each_pool, layout=layout)
    call, right, shape = CALLS[name]
    x = arrays.random(*shape)
    expected = right(arrays.take(x))
    rank = expected.ndim
    for axes in [(axis,) for axis in range(rank)] + [tuple(range(rank))]:
        steps = tuple(slice(None, None, step if axis in axes else 1) for axis in range(rank))
        extents = [(extent - 1) * each.step + 1 for extent, each in zip(expected.shape, steps, strict=True)]
        whole = arrays.put(np.full(extents, 7.0))
        out = whole[steps]
        assert call(x, out) is out
        assert arrays.error(out, expected) < (TOLERANCE["float32"] if name in ("matmul", "linear") else FULL)
        out[...] = 7
        assert (arrays.take(whole) == 7).all(), axes


def test_a_program_writes_into_every_second_column_of_an_odd_number(each_pool):
    arrays = Arrays(each_pool)
    x, whole = arrays.random(4, 4), arrays.put(np.full((4, 7), 7.0))
    program = handlepool.record(lambda x: ops.add(x, x), x, pool=each_pool)
    program(x, out=whole[:, ::2])
    assert arrays.error(whole[:, ::2], 2 * arrays.take(x)) < FULL
    assert (arrays.take(whole)[:, 1::2] == 7).all()


@pytest.mark.parametrize("strides", [(6, 2), (5, 2), (2, 5), (4, 1), (1, 4), (0, 1)], ids=str)
def test_control_elements_that_are_two_are_refused(pool, strides):
    """(6, 2) over 4 x 4: the fourth element of a row is the first one of the next."""
    arrays = Arrays(pool)
    x, whole = arrays.random(5, 5), arrays.random(64)
    out = np.lib.stride_tricks.as_strided(whole, (5, 5), [4 * step for step in strides])
    with pytest.raises(ArgumentError, match="its elements overlap"):
        ops.add(x, x, out=out)
