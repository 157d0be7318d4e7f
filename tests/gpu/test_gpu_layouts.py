"""What the pages say of channels-last arrays and of CuPy code as an operation holds of CuPy's arrays."""

import numpy as np
import pytest
from harness.arrays import Arrays
from harness.process import as_default

import handlepool
from handlepool import ArgumentError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


def channels_last(x):
    return x.strides[1] == x.itemsize and x.transpose(0, 2, 3, 1).flags.c_contiguous


def test_what_makes_an_array_channels_last_and_what_keeps_that(pool, stream):
    plain = Arrays(pool).random(2, 16, 6, 5)
    x = plain.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    assert not channels_last(plain)
    assert not channels_last(x.copy())
    for lost in (cupy.ascontiguousarray(x), x + 1, cupy.maximum(x, 0)):
        assert not channels_last(lost)
    for kept in (x, x.copy(order="K"), cupy.empty_like(x), x.astype("float16"), cupy.multiply(x, 2, out=cupy.empty_like(x))):
        assert channels_last(kept)
    assert (x == plain).all()
    w = Arrays(pool, layout="NHWC").random(16, 16, 3, 3)
    with as_default(pool), handlepool.record(lambda x: handlepool.conv2d(x, w), x.copy(order="K"), lanes=2) as program:
        assert channels_last(program(x))
        with pytest.raises(ArgumentError, match="in bytes; lay it out as it was recorded, channels-last"):
            program(plain)


def test_repeat_tile_and_reshape_are_recorded_and_views_give_a_graph_nothing(pool, stream):
    x = Arrays(pool).random(4, 6)
    works = {"repeat": lambda x: x.repeat(2, 1), "tile": lambda x: cupy.tile(x, (2, 2)), "reshape": lambda x: x.T.reshape(8, 3)}
    with as_default(pool):
        for work in works.values():
            with handlepool.record(work, x) as program:
                assert np.array_equal(program(x).get(), work(x).get())
        with handlepool.record(lambda x: cupy.broadcast_to(x.T.reshape(8, 3) + 1, (5, 8, 3)).T, x) as program:
            assert program.nodes == 2  # the copy of the reshape, and the sum
