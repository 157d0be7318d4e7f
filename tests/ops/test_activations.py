"""Activations on both drivers, alone and after a convolution, against SciPy in float64."""

import numpy as np
import pytest
from harness.arrays import FULL, TOLERANCE, Arrays

import handlepool
from handlepool import ArgumentError, GraphNotSupportedError, ParallelStates, ops
from handlepool.drivers.host.driver import HostDriver
from handlepool.testing import reference

KINDS = ops.ACTIVATIONS


@pytest.mark.parametrize("shape", [(2, 8, 6, 6), (3, 5, 7), (1000,), (2, 3, 4, 5, 6), (7, 11)], ids=str)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_is_the_reference_in_any_shape_and_layout(each_pool, kind, layout, shape):
    arrays = Arrays(each_pool, "float32", layout)
    x = arrays.random(*shape)
    y = getattr(ops, kind)(x)
    assert y.strides == x.strides
    assert arrays.error(y, reference.ACTIVATIONS[kind](arrays.take(x))) < FULL


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_of_half_precision(each_pool, kind, dtype):
    arrays = Arrays(each_pool, dtype, "NHWC")
    x = arrays.random(2, 8, 6, 6)
    assert arrays.error(getattr(ops, kind)(x), reference.ACTIVATIONS[kind](arrays.take(x))) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_in_place_and_into_an_out(each_pool, kind):
    arrays = Arrays(each_pool)
    x, out = arrays.random(2, 8, 6, 6), arrays.poisoned(2, 8, 6, 6)
    expected = reference.ACTIVATIONS[kind](arrays.take(x))
    assert getattr(ops, kind)(x, out=out) is out
    assert getattr(ops, kind)(x, out=x, pool=each_pool) is x
    assert max(arrays.error(out, expected), arrays.error(x, expected)) < FULL


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_convolution_with_bias_and_activation(each_pool, dtype, layout, kind):
    arrays = Arrays(each_pool, dtype, layout)
    x, w, bias = arrays.random(2, 16, 8, 8), arrays.random(8, 16, 3, 3), arrays.random(8)
    out = arrays.poisoned(2, 8, 8, 8)
    assert handlepool.conv2d(x, w, padding=1, bias=bias, activation=kind, out=out) is out
    expected = reference.conv2d(*map(arrays.take, (x, w)), padding=1, bias=arrays.take(bias), activation=kind)
    assert arrays.error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_convolution_with_an_activation_far_from_zero(each_pool, dtype, layout, kind):
    arrays = Arrays(each_pool, dtype, layout)
    x, w, bias = arrays.put(np.linspace(-300, 300, 2048).reshape(2, 16, 8, 8)), np.zeros((16, 16, 1, 1)), arrays.random(16)
    w[range(16), range(16)] = 1
    out = arrays.poisoned(2, 16, 8, 8)
    handlepool.conv2d(x, arrays.put(w), bias=bias, activation=kind, out=out)
    expected = reference.ACTIVATIONS[kind](arrays.take(x) + arrays.take(bias).reshape(-1, 1, 1))
    assert arrays.error(out, expected) < TOLERANCE[dtype]


class Unfused(HostDriver):
    """Has no plan for a graph of several nodes."""

    def compile(self, graph, operands, **settings):
        if len(graph.nodes) > 1:
            raise GraphNotSupportedError("no plan")
        return super().compile(graph, operands, **settings)


@pytest.mark.parametrize("region", ["a call", "a fork"])
def test_an_activation_without_a_plan_for_both_is_a_launch_of_its_own(make_pool, region):
    pool = make_pool(driver=Unfused(scheduler="adversarial", check_order=True))
    arrays = Arrays(pool)
    with pool.driver.create_stream():
        x, w = arrays.random(2, 16, 8, 8), arrays.random(8, 16, 3, 3)
        if region == "a call":
            ys = [handlepool.conv2d(x, w, activation="relu", pool=pool)]
        else:
            with ParallelStates(2, pool=pool).fork() as fork:
                ys = [fork.run(handlepool.conv2d, x, w, activation="relu", pool=pool) for _ in range(3)]
        expected = reference.conv2d(*map(arrays.take, (x, w)), activation="relu")
        assert all(arrays.error(y, expected) < TOLERANCE["float32"] for y in ys)
    assert pool.driver.calls["launch"] == 2 * len(ys)


def test_activations_in_a_fork(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.random(4, 32)
    with ParallelStates(2, pool=each_pool).fork() as fork:
        made = {kind: fork.run(getattr(ops, kind), x) for kind in KINDS}
    assert all(arrays.error(y, reference.ACTIVATIONS[kind](arrays.take(x))) < FULL for kind, y in made.items())


def test_bad_input_is_a_typed_error(each_pool):
    arrays = Arrays(each_pool)
    x = arrays.random(2, 8, 6, 8)  # also the last row begins at a multiple of 16 bytes
    flat = arrays.random(128)
    for match, call in {
        "it must be one of": lambda: ops.relu(each_pool.driver.asarray(arrays.take(x))),
        "negative": lambda: ops.tanh(x[:, :, ::-1]),
        "must be float32 of shape": lambda: ops.gelu(x, out=arrays.random(2, 8, 6, 4)),
        r"must be float32 of shape \(0, ": lambda: ops.swish(x[:0], out=x),
        "shares memory": lambda: ops.relu(flat[:64], out=flat[16:80]),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()
