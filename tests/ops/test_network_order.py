"""Normalisations, copies, attention and transposed convolutions in forks, maps and recordings, each with its control."""

from functools import partial

import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import over_seeds

import handlepool
from handlepool import ParallelStates, ops
from handlepool.testing import reference as public

SEEDS = range(10)
RANDOM = np.random.default_rng(0)


def values(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def half(*shape):
    return RANDOM.standard_normal(shape).astype(np.float16)


def transposed(x, w, bias):
    return reference.conv_transpose2d(x, w, stride=(2, 2), bias=bias)


def convolved(x, w):
    return public.conv2d(x[:, :, None], w[:, :, None], padding=((0, 0), (1, 1)))[:, :, 0]


X = values(2, 4, 5, 6)
CALLS = {
    "layer_norm": (partial(ops.layer_norm, axis=1), [X], partial(reference.layer_norm, axis=1)),
    "rms_norm": (ops.rms_norm, [X], reference.rms_norm),
    "group_norm": (lambda x, **more: ops.group_norm(x, 2, **more), [X], lambda x: reference.group_norm(x, 2)),
    "instance_norm": (ops.instance_norm, [X], reference.instance_norm),
    "batch_norm": (ops.batch_norm, [X, values(4), values(4) ** 2 + 1], reference.batch_norm),
    "softmax": (ops.softmax, [X], reference.softmax),
    "pad": (lambda x, **more: ops.pad(x, (1, 2), mode="reflect", **more), [X], lambda x: reference.pad(x, (1, 2), "reflect")),
    "channel_shuffle": (lambda x, **more: ops.channel_shuffle(x, 2, **more), [X], lambda x: reference.channel_shuffle(x, 2)),
    "to_channels_last": (ops.to_channels_last, [X], lambda x: x),
    "to_contiguous": (ops.to_contiguous, [X], lambda x: x),
    "interpolate2d": (
        partial(ops.interpolate2d, size=(7, 3), mode="bilinear"),
        [X],
        partial(reference.interpolate2d, size=(7, 3), mode="bilinear"),
    ),
    "conv_transpose2d": (
        lambda x, w, b, **more: ops.conv_transpose2d(x, w, bias=b, stride=2, **more),
        [X, values(4, 3, 2, 2), values(3)],
        transposed,
    ),
    "conv_transpose1d": (
        ops.conv_transpose1d,
        [X[:, :, 0], values(4, 3, 2)],
        lambda x, w: reference.conv_transpose2d(x[:, :, None], w[:, :, None])[:, :, 0],
    ),
    "conv1d": (partial(ops.conv1d, padding="same"), [X[:, :, 0], values(3, 4, 3)], convolved),
    "attention": (ops.scaled_dot_product_attention, [half(1, 2, 5, 8) for _ in range(3)], reference.attention),
}
"""By name: a call, its arrays, and its reference."""
DIRECT = {
    "layer_norm": (ops.layer_norm, (), {"axis": 1}),
    "group_norm": (ops.group_norm, (2,), {}),
    "pad": (ops.pad, ((1, 2),), {"mode": "reflect"}),
    "channel_shuffle": (ops.channel_shuffle, (2,), {}),
    "interpolate2d": (ops.interpolate2d, (), {"size": (7, 3), "mode": "bilinear"}),
    "conv1d": (ops.conv1d, (), {"padding": "same"}),
}
"""The functions themselves, with the rest of their arguments, where a call is something around one."""


def given(name):
    """The function, its further arguments by position and by keyword, its arrays and its reference."""
    call, arrays, expected = CALLS[name]
    if name == "conv_transpose2d":
        return ops.conv_transpose2d, (), {"stride": 2}, arrays[:2], lambda x, w: reference.conv_transpose2d(x, w, stride=(2, 2))
    function, rest, more = DIRECT.get(name, (call, (), {}))
    return function, rest, more, arrays, expected


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_out_and_without_gives_the_same(each_pool, name):
    function, rest, more, inputs, expected = given(name)
    arrays = Arrays(each_pool, inputs[0].dtype)
    xs, wanted = [each_pool.driver.asarray(x) for x in inputs], expected(*inputs)
    y = function(*xs, *rest, **more)
    out = arrays.poisoned(*wanted.shape)
    assert function(*xs, *rest, **more, out=out) is out
    assert np.array_equal(arrays.take(out), arrays.take(y))
    assert arrays.error(y, wanted) < 2e-3


def in_a_fork(scene, name, **options):
    """A writer of the input, the operation, and a reader of its result, as branches."""
    function, rest, more, inputs, expected = given(name)
    arrays = Arrays(scene.pool, inputs[0].dtype)
    x, *others = map(scene.driver.asarray, inputs)
    base = scene.driver.asarray(inputs[0] * 0)
    with scene.states.fork(**options) as fork:
        first = fork.run(ops.add, x, base)
        y = fork.run(function, first, *others, *rest, **more)
        z = fork.run(ops.add, y, y)
    return arrays.error(z, 2 * expected(*inputs))


@pytest.mark.parametrize("name", CALLS)
def test_g17_a_branch_follows_its_data(name):
    assert max(over_seeds(partial(in_a_fork, name=name), seeds=SEEDS)) < 2e-3


@pytest.mark.parametrize("name", CALLS)
def test_g17_control_without_order_it_goes_wrong(name):
    assert not max(over_seeds(partial(in_a_fork, name=name, ordered=False), seeds=range(30), control=True)) < 1e-2


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", CALLS)
def test_g17_a_recording_has_a_node_that_follows_its_data(each_pool, name, lanes):
    call, inputs, expected = CALLS[name]
    arrays = Arrays(each_pool, inputs[0].dtype)
    xs = [each_pool.driver.asarray(x) for x in inputs]

    def network(x, *rest):
        first = ops.add(x, x)
        y = call(first, *rest)
        return ops.add(y, y), ops.add(x, x, x)

    wanted = [2 * expected(2 * inputs[0], *inputs[1:]), 3 * inputs[0].astype(np.float64)]
    program = handlepool.record(network, *xs, lanes=lanes)
    for _ in range(2):
        program.replay()
        for y, each in zip(program.outputs, wanted, strict=True):
            assert arrays.error(y, each) < 4e-3
    if lanes > 1:
        assert len(program.explain().nodes) == 4


@pytest.mark.parametrize("name", CALLS)
def test_a_map_of_each(each_pool, name):
    function, rest, more, inputs, expected = given(name)
    arrays = Arrays(each_pool, inputs[0].dtype)
    scales = (1, 2, 3)
    firsts = [each_pool.driver.asarray(inputs[0] * scale) for scale in scales]
    others = [[each_pool.driver.asarray(x)] * len(scales) for x in inputs[1:]]
    fixed = [[value] * len(scales) for value in rest]
    found = ParallelStates(2, pool=each_pool).map(partial(function, **more), firsts, *others, *fixed)
    for y, scale in zip(found, scales, strict=True):
        assert arrays.error(y, expected(inputs[0] * scale, *inputs[1:])) < 4e-3
