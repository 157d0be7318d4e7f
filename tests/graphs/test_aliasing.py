"""Outputs over inputs: allowed where they share no element, or where there is one output, each element of it from its own place
alone; refused elsewhere.
"""

import numpy as np
import pytest
from harness.arrays import FULL, TOLERANCE, Arrays
from harness.graphs import both

import handlepool
from handlepool import ArgumentError, ParallelStates, add, conv2d, max_pool2d
from handlepool.testing import reference


@handlepool.graph
def read_again(g, x, y):
    total = g.add(x, y)
    return total, g.sub(x, total)


@handlepool.graph
def apart(g, x, y):
    return g.neg(x), g.neg(y)


@handlepool.graph
def chain(g, x, y):
    return g.mul(g.add(x, y), g.sub(x, y))


@handlepool.graph
def negative(g, x):
    return g.neg(x)


def refer(function, x, y, outs):
    keys = function.plan_for(x, y).keys
    return function.run({"x": x, "y": y, **dict(zip(keys, outs, strict=True))})


WAYS = {
    "a call": lambda states, function, x, y, outs: function(x, y, out=outs),
    "a branch": lambda states, function, x, y, outs: states.map(function, [x], [y], out=[outs]),
    "a call in a branch": lambda states, function, x, y, outs: states.map(lambda _: function(x, y, out=outs), [0]),
    "references": lambda states, function, x, y, outs: refer(function, x, y, outs),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
@pytest.mark.parametrize("function", [both, read_again, apart], ids=lambda function: function.__name__)
def test_an_output_of_several_is_not_an_input(pool, function, known, way):
    arrays, states = Arrays(pool), ParallelStates(2, pool=pool)
    x, y, z = (arrays.put(np.full((4, 8), value)) for value in (2, 3, 7))
    if known:
        function(x, y, out=(z, arrays.poisoned(4, 8)))
    for outs in ((x, z), (z, x), (y, z), (z, y)):
        with pytest.raises(ArgumentError, match="shares memory with argument"):
            WAYS[way](states, function, x, y, outs)
    assert [set(arrays.take(array).flat) for array in (x, y)] == [{2}, {3}]


@pytest.mark.parametrize("place", [0, 1])
def test_the_only_output_may_be_an_input_also_of_earlier_nodes(pool, place):
    arrays = Arrays(pool)
    given = arrays.random(4, 8), arrays.random(4, 8)
    x, y = map(arrays.take, given)
    assert arrays.error(chain(*given, out=given[place]), (x + y) * (x - y)) < FULL


@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
def test_an_output_is_not_an_input_transposed(pool, known):
    arrays = Arrays(pool)
    x = arrays.random(8, 8)
    before = arrays.take(x)
    if known:
        negative(x, out=arrays.poisoned(8, 8).T)
    with pytest.raises(ArgumentError, match="out= of negative shares memory with argument 0"):
        negative(x, out=x.T)
    assert (arrays.take(x) == before).all()


# Slices of one block


def dense_block(arrays, block, filters, **branch):
    """Layers that each read all channels so far, and write theirs behind them: no concatenation."""
    channels = block.shape[1] - 16 * len(filters)
    for w in filters:
        layer = branch.get("run", lambda function, *args, **kwargs: function(*args, **kwargs))
        layer(conv2d, block[:, :channels], w, padding=1, out=block[:, channels : channels + 16])
        channels += 16


@pytest.mark.parametrize("way", ["one after the other", "one fork"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_dense_block_writes_behind_what_it_reads(each_pool, dtype, way):
    arrays = Arrays(each_pool, dtype, "NHWC")
    values = np.zeros((2, 64, 9, 8))
    values[:, :32] = np.random.default_rng(1).standard_normal((2, 32, 9, 8))
    filters = [arrays.put(arrays.take(arrays.random(16, channels, 3, 3)) / channels) for channels in (32, 48)]
    block = arrays.put(values)
    values = arrays.take(block)
    for channels, w in zip((32, 48), filters, strict=True):
        values[:, channels : channels + 16] = reference.conv2d(values[:, :channels], arrays.take(w), padding=1)
    for _ in range(2):  # the second time each call is known
        if way == "one fork":
            with ParallelStates(4, pool=each_pool).fork() as fork:
                dense_block(arrays, block, filters, run=fork.run)
        else:
            dense_block(arrays, block, filters)
        assert arrays.error(block, values) < TOLERANCE[dtype]
        block[:, 32:] = 7


def test_kernels_of_our_own_write_beside_what_they_read(each_pool):
    arrays = Arrays(each_pool, "float16", "NHWC")
    block = arrays.random(2, 48, 9, 8)
    values = arrays.take(block)
    max_pool2d(block[:, :16], 3, stride=1, padding=1, out=block[:, 16:32])
    add(block[:, :16], block[:, 16:32], out=block[:, 32:])
    values[:, 16:32] = reference.max_pool2d(values[:, :16], 3, stride=1, padding=1)
    values[:, 32:] = values[:, :16] + values[:, 16:32]
    assert arrays.error(block, values) < TOLERANCE["float16"]


OVERLAPS = {
    "one channel": lambda block: (block[:, :17], block[:, 16:32]),
    "all": lambda block: (block[:, :16], block[:, :16]),
    "columns": lambda block: (block[:, :16, :, :6], block[:, :16, :, 2:]),
    "the last pixel": lambda block: (block[:1, :16], block[:1, :16, 7:, 7:]),
}


@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_slices_that_share_an_element_are_refused(pool, overlap, known):
    arrays = Arrays(pool, "float32", "NHWC")
    block, other = arrays.random(2, 48, 8, 8), arrays.random(2, 48, 8, 8)
    x, out = OVERLAPS[overlap](block)
    w = arrays.random(out.shape[1], x.shape[1], *(1 + a - b for a, b in zip(x.shape[2:], out.shape[2:], strict=True)))
    before = arrays.take(block)
    if known:
        conv2d(x, w, out=OVERLAPS[overlap](other)[1])
    with pytest.raises(ArgumentError, match="out= of conv2d shares memory with argument 0"):
        conv2d(x, w, out=out)
    assert (arrays.take(block) == before).all()


def test_a_residual_beside_the_result_in_one_block_is_taken_and_one_that_shares_an_element_is_not(each_pool):
    arrays = Arrays(each_pool, "float32", "NHWC")
    x, w, block = arrays.random(2, 16, 9, 8), arrays.random(16, 16, 1, 1), arrays.random(2, 32, 9, 8)
    residual = arrays.take(block[:, :16])
    conv2d(x, w, add=block[:, :16], activation="relu", out=block[:, 16:])
    expected = reference.conv2d(arrays.take(x), arrays.take(w)) + residual
    assert arrays.error(block[:, 16:], np.maximum(expected, 0)) < TOLERANCE["float32"]
    with pytest.raises(ArgumentError, match="out= of conv2d shares memory with argument 2"):
        conv2d(x, w, add=block[:, 4:20], activation="relu", out=block[:, 16:])
