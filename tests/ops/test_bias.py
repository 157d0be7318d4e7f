"""A bias that begins anywhere and has any stride: copied where no launch takes it as it lies."""

from contextlib import nullcontext

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import ArgumentError, ParallelStates, ops
from handlepool.testing import reference

PLACES = {
    "aligned": lambda b: b[:8],
    "every second from the second on": lambda b: b[1:17:2],
    "from the second on": lambda b: b[1:9],
    "every third from the third on": lambda b: b[2:26:3],
    "one element of all": lambda b: np.broadcast_to(b[1:2], (8,)) if isinstance(b, np.ndarray) else b[1:9],
}


def convolution(layout, groups=1, **options):
    def case(arrays):
        x, w = arrays.random(2, 8, 9, 9, layout=layout), arrays.random(8, 8 // groups, 3, 3, layout=layout)
        rest = {"add": arrays.random(2, 8, 7, 7, layout=layout)} if "add" in options else {}
        own = {name: value for name, value in options.items() if name != "add"} | {"groups": groups}
        taken = {name: arrays.take(value) for name, value in rest.items()}
        return (ops.conv2d, (x, w), rest | own), lambda b: reference.conv2d(
            arrays.take(x), arrays.take(w), bias=arrays.take(b), **own, **taken
        )

    return case


def product(name, kind):
    def case(arrays):
        a, b = arrays.random(5, 8), arrays.random(8, 8)
        return (getattr(ops, name), (a, b), {"activation": kind}), lambda bias: reference.matmul(
            arrays.take(a), arrays.take(b).T if name == "linear" else arrays.take(b), bias=arrays.take(bias), activation=kind
        )

    return case


CASES = {
    "conv2d": convolution("NHWC"),
    "conv2d, contiguous, relu": convolution("NCHW", activation="relu"),
    "conv2d, contiguous, tanh": convolution("NCHW", activation="tanh"),  # in a launch of its own
    "conv2d, a residual, relu": convolution("NHWC", add=True, activation="relu"),
    "conv2d, a contiguous residual": convolution("NCHW", add=True),
    "depthwise": convolution("NHWC", 8, activation="relu"),
    "matmul": product("matmul", None),
    "linear, relu": product("linear", "relu"),
    "linear, tanh": product("linear", "tanh"),
    "linear, hardsigmoid": product("linear", "hardsigmoid"),
    "conv2d, contiguous, a residual, hardswish": convolution("NCHW", add=True, activation="hardswish"),
}


@pytest.mark.parametrize("first", ["aligned", "from the second on"])
@pytest.mark.parametrize("name", CASES)
def test_a_bias_may_begin_anywhere(each_pool, name, first):
    arrays = Arrays(each_pool)
    (function, given, options), right = CASES[name](arrays)
    whole = arrays.random(40)
    for place in [first, *PLACES, *reversed(PLACES)]:  # what was called before makes no difference
        bias = PLACES[place](whole)
        with ParallelStates(2, pool=each_pool).fork() as fork:
            branch = fork.run(function, *given, bias=bias, **options)
        for y in (function(*given, bias=bias, **options), branch):
            assert arrays.error(y, right(bias)) < TOLERANCE["float32"], place


def test_with_a_padding_that_differs_from_side_to_side(each_pool):
    arrays = Arrays(each_pool)
    x, w, whole = arrays.random(2, 8, 9, 9, layout="NHWC"), arrays.random(8, 8, 3, 3, layout="NHWC"), arrays.random(40)
    for place in PLACES.values():
        y = ops.conv2d(x, w, bias=place(whole), padding=((1, 0), (2, 0)))
        expected = reference.conv2d(*map(arrays.take, (x, w)), bias=arrays.take(place(whole)), padding=((1, 0), (2, 0)))
        assert arrays.error(y, expected) < TOLERANCE["float32"]


def test_it_is_a_copy_in_the_plan_and_a_plan_of_its_own(pool):
    arrays = Arrays(pool, layout="NHWC")
    x, w, whole = arrays.random(2, 8, 9, 9), arrays.random(8, 8, 3, 3), arrays.random(40)
    for place, copies in (("aligned", 0), ("from the second on", 1), ("aligned", 0), ("every second from the second on", 1)):
        launched, copied = pool.driver.calls["launch"], pool.stats()["operands_copied"]
        ops.conv2d(x, w, bias=PLACES[place](whole), activation="relu")
        assert pool.driver.calls["launch"] == launched + 1
        assert pool.stats()["operands_copied"] == copied + copies


def test_recorded_and_replayed(each_pool):
    arrays = Arrays(each_pool)
    (function, given, options), right = CASES["conv2d, a residual, relu"](arrays)
    bias = PLACES["from the second on"](arrays.random(40))
    program = handlepool.record(lambda b: function(*given, bias=b, **options), bias, pool=each_pool, lanes=2)
    assert arrays.error(program(bias), right(bias)) < TOLERANCE["float32"]


def test_what_begins_between_elements_is_refused(pool):
    arrays = Arrays(pool)
    (function, given, _), _ = CASES["conv2d"](arrays)
    memory = np.zeros(64, np.uint8)
    bias = memory[2:34].view(np.float32)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"argument 2.* begins \d+ bytes past a multiple of 4"):
            function(*given, bias=bias)


@pytest.mark.parametrize("wrong", ["x", "w", "add", "out"])
def test_control_nothing_else_may_begin_anywhere(each_pool, wrong):
    arrays = Arrays(each_pool)
    shapes = {"x": (2, 8, 9, 9), "w": (8, 8, 3, 3), "add": (2, 8, 7, 7), "out": (2, 8, 7, 7)}
    given = {
        name: arrays.random(int(np.prod(shape)) + 1)[name == wrong :][: int(np.prod(shape))] for name, shape in shapes.items()
    }
    given = {name: array.reshape(shapes[name]) for name, array in given.items()}
    with pytest.raises(ArgumentError, match="begins 4 bytes past a multiple of 16"):
        ops.conv2d(given.pop("x"), given.pop("w"), **given)


def test_a_vector_of_a_graph_function_may_begin_anywhere(each_pool):
    arrays = Arrays(each_pool)
    whole = arrays.random(40)
    for begin in (0, 1, 4, 3, 1):
        x, y = whole[begin : begin + 9], whole[20 - begin : 29 - begin]
        assert arrays.error(ops.relu(x), np.maximum(arrays.take(x), 0)) < 1e-6
        with pytest.raises(ArgumentError, match="past a multiple of 16") if begin % 4 else nullcontext():
            ops.add(x, y)
