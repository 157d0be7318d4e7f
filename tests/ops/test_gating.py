"""squeeze_excite on both drivers, against a reference in float64, and the arguments that it refuses."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import Scene, over_seeds

import handlepool
from handlepool import ArgumentError, ops, squeeze_excite
from handlepool.ops import gating
from handlepool.ops.activations import OWN_ACTIVATIONS

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 2e-6}
ACTIVATIONS = (None, *ops.ACTIVATIONS, *OWN_ACTIVATIONS)


def given(arrays, shape=(2, 16, 5, 6), squeezed=3, filters=False):
    """Images, and both layers."""
    channels, more = shape[1], (1, 1) if filters else ()
    layers = (squeezed, channels, *more), (squeezed,), (channels, squeezed, *more), (channels,)
    return arrays.random(*shape), *(arrays.random(*each) for each in layers)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", ["sigmoid", "hardsigmoid"])
@pytest.mark.parametrize("most", [0, gating.MOST_ANEW], ids=["a launch for each", "two launches"])
def test_it_is_the_reference_and_lies_as_its_input(each_pool, limits, most, gate, dtype, layout):
    limits(MOST_ANEW=most)
    arrays = Arrays(each_pool, dtype, layout)
    for activation in ACTIVATIONS:
        xs = given(arrays, filters=activation == "relu")
        expected = reference.squeeze_excite(*map(arrays.take, xs), activation, gate)
        for _ in range(2):  # the second time it is known
            y = squeeze_excite(*xs, activation=activation, gate=gate)
            assert y.strides == xs[0].strides
            assert arrays.error(y, expected) < TOLERANCE[dtype]


@hypothesis.given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 30), st.integers(1, 30)),
    squeezed=st.integers(1, 9),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
    dtype=st.sampled_from([*TOLERANCE]),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_geometries(shape, squeezed, layouts, dtype):
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype, layouts[0])
        xs = given(arrays, shape, squeezed)
        expected = reference.squeeze_excite(*map(arrays.take, xs), "swish", "sigmoid")
        out = None if layouts[1] is None else arrays.poisoned(*shape, layout=layouts[1])
        y = squeeze_excite(*xs, activation="swish", out=out, pool=scene.pool)
        assert out is None or y is out
        assert arrays.error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("most", [0, gating.MOST_ANEW], ids=["a launch for each", "two launches"])
def test_the_result_may_be_the_images_and_no_weights(each_pool, limits, most):
    limits(MOST_ANEW=most)
    arrays = Arrays(each_pool)
    x, *layers = given(arrays)
    expected = reference.squeeze_excite(*map(arrays.take, (x, *layers)))
    assert squeeze_excite(x, *layers, out=x) is x
    assert arrays.error(x, expected) < TOLERANCE["float32"]
    x, *layers = given(arrays, (1, 4, 2, 2), 4)
    with pytest.raises(ArgumentError, match="shares memory with argument"):
        squeeze_excite(x, *layers, out=layers[2].reshape(1, 4, 2, 2))


def test_nan_and_infinity_are_those_of_the_definition(each_pool):
    arrays = Arrays(each_pool)
    x, *layers = given(arrays)
    values = arrays.take(x).copy()
    values[0, 0, 0, 0], values[1, 3, 1, 1] = np.nan, np.inf
    found = arrays.take(squeeze_excite(arrays.put(values), *layers))
    with np.errstate(invalid="ignore"):
        expected = reference.squeeze_excite(values, *map(arrays.take, layers))
    assert np.isnan(found[0]).all()
    assert np.array_equal(np.isnan(found), np.isnan(expected))


def test_images_without_a_batch_or_channels_give_an_empty_result(each_pool):
    arrays = Arrays(each_pool)
    _, *layers = given(arrays)
    assert squeeze_excite(arrays.random(0, 16, 4, 4), *layers).shape == (0, 16, 4, 4)


@pytest.mark.parametrize("most", [0, gating.MOST_ANEW], ids=["a launch for each", "two launches"])
def test_bad_input_is_a_typed_error_with_the_numbers(each_pool, limits, most):
    limits(MOST_ANEW=most)
    arrays = Arrays(each_pool)
    x, w1, b1, w2, b2 = given(arrays)
    for match, call in {
        r"x has 3 axes, shape \(16, 5, 6\)": lambda: squeeze_excite(x[0], w1, b1, w2, b2),
        r"shape \(2, 16, 0, 6\) have no pixels": lambda: squeeze_excite(x[:, :, :0], w1, b1, w2, b2),
        r"w1 of shape \(3, 15\) for 16 channels": lambda: squeeze_excite(x, arrays.random(3, 15), b1, w2, b2),
        r"b1 of shape \(4,\)": lambda: squeeze_excite(x, w1, arrays.random(4), w2, b2),
        r"w2 of shape \(3, 16\)": lambda: squeeze_excite(x, w1, b1, w1, b2),
        r"b2 of shape \(3,\)": lambda: squeeze_excite(x, w1, b1, w2, b1),
        "w1 is float16 and x is float32": lambda: squeeze_excite(x, Arrays(each_pool, "float16").random(3, 16), b1, w2, b2),
        r"w1 of shape \(3, 16\) has strides": lambda: squeeze_excite(x, arrays.random(16, 3).T, b1, w2, b2),
        "gate='relu'; it can be sigmoid or hardsigmoid": lambda: squeeze_excite(x, w1, b1, w2, b2, gate="relu"),
        "activation='selu'": lambda: squeeze_excite(x, w1, b1, w2, b2, activation="selu"),
        r"9000 channels and the first layer has 1 outputs; at most 8192": lambda: squeeze_excite(
            *given(arrays, (1, 9000, 1, 1), 1),
        ),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()


def in_a_fork(scene, **options):
    arrays = Arrays(scene.pool)
    x, *layers = given(arrays)
    base = arrays.put(arrays.take(x) * 0)
    with scene.states.fork(**options) as fork:
        first = fork.run(ops.add, x, base)
        y = fork.run(squeeze_excite, first, *layers)
        z = fork.run(ops.add, y, y)
    return arrays.error(z, 2 * reference.squeeze_excite(*map(arrays.take, (x, *layers))))


def test_g17_a_branch_follows_its_data():
    assert max(over_seeds(in_a_fork, seeds=range(10))) < 1e-5


def test_g17_control_without_order_it_goes_wrong():
    assert not max(over_seeds(lambda scene: in_a_fork(scene, ordered=False), seeds=range(30), control=True)) < 1e-2


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize(("most", "nodes"), [(0, 4), (gating.MOST_ANEW, 3)])
def test_g17_a_recording_has_nodes_that_follow_their_data(each_pool, limits, most, nodes, lanes):
    limits(MOST_ANEW=most)
    arrays = Arrays(each_pool)
    xs = given(arrays)
    program = handlepool.record(lambda x, *layers: ops.add(squeeze_excite(x, *layers), x), *xs, lanes=lanes)
    program.replay()
    values = [*map(arrays.take, xs)]
    assert arrays.error(program.outputs, values[0] + reference.squeeze_excite(*values)) < 1e-5
    assert len(program.explain().nodes) == nodes
