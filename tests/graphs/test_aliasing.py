"""Outputs over inputs: allowed where there is one output, each element of it from its own place alone; refused elsewhere."""

import numpy as np
import pytest
from harness.arrays import FULL, Arrays
from harness.graphs import both

import handlepool
from handlepool import ArgumentError, ParallelStates


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
