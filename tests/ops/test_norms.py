"""Normalisations and softmax on both drivers, against NumPy in float64, and the arguments that they refuse."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import Scene

import handlepool
from handlepool import ArgumentError, batch_norm, group_norm, instance_norm, layer_norm, rms_norm, softmax

TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}
X = (2, 16, 5, 6)
CALLS = {
    "layer_norm": (layer_norm, {}, ((6,), (6,))),
    "layer_norm of channels": (layer_norm, {"axis": 1}, ((16,), (16,))),
    "layer_norm of two axes": (layer_norm, {"axis": (-2, -1), "eps": 1e-3}, ((5, 6), (5, 6))),
    "rms_norm": (rms_norm, {}, ((6,),)),
    "rms_norm of an image": (rms_norm, {"axis": (1, 2, 3)}, ((16, 5, 6),)),
    "group_norm": (group_norm, {"groups": 4}, ((16,), (16,))),
    "group_norm of one group": (group_norm, {"groups": 1}, ((16,), (16,))),
    "instance_norm": (instance_norm, {}, ((16,), (16,))),
    "softmax": (softmax, {}, ()),
    "softmax of channels": (softmax, {"axis": 1}, ()),
    "softmax of all": (softmax, {"axis": [0, 1, 2, 3]}, ()),
}


def keywords(names, values):
    return dict(zip(names, values, strict=False))


def call(function, x, options, **more):
    """The call with its options, of which groups stand by position."""
    options = dict(options)
    positional = [options.pop("groups")] if "groups" in options else []
    return function(x, *positional, **options, **more)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CALLS)
def test_each_is_the_reference_and_lies_as_its_input(each_pool, name, dtype, layout):
    function, options, shapes = CALLS[name]
    arrays = Arrays(each_pool, dtype, layout)
    x, parameters = arrays.random(*X), [arrays.random(*shape, layout="NCHW") for shape in shapes]
    for count in range(len(parameters) + 1):
        given = keywords(("weight", "bias"), parameters[:count])
        expected = getattr(reference, function.__name__)(
            arrays.take(x), **options, **{key: arrays.take(value) for key, value in given.items()}
        )
        for _ in range(2):  # the second one by the shortcut
            y = call(function, x, options, **given)
            assert y.strides == x.strides
            assert arrays.error(y, expected) < TOLERANCE[dtype]
    if len(shapes) > 1:
        bias = parameters[1]
        expected = getattr(reference, function.__name__)(arrays.take(x), **options, bias=arrays.take(bias))
        assert arrays.error(call(function, x, options, bias=bias), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [None, "relu", "swish"])
def test_batch_norm_is_the_reference(each_pool, activation, dtype, layout):
    arrays = Arrays(each_pool, dtype, layout)
    x, mean, weight, bias = arrays.random(*X), *(arrays.random(16) for _ in range(3))
    variance = arrays.put(np.random.default_rng(0).random(16) + 0.1)
    for more in ({}, {"weight": weight}, {"bias": bias}, {"weight": weight, "bias": bias, "eps": 1e-2}):
        how = {key: value if isinstance(value, float) else arrays.take(value) for key, value in more.items()}
        expected = reference.batch_norm(*map(arrays.take, (x, mean, variance)), **how, activation=activation)
        for _ in range(2):
            y = batch_norm(x, mean, variance, **more, activation=activation)
            assert arrays.error(y, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_may_be_float32(each_pool, dtype):
    arrays, single = Arrays(each_pool, dtype, "NHWC"), Arrays(each_pool)
    x, w, b = arrays.random(*X), single.random(16), single.random(16)
    values = [arrays.take(x), single.take(w), single.take(b)]
    found = {
        "layer_norm": (layer_norm(x, axis=1, weight=w, bias=b), reference.layer_norm(values[0], 1, *values[1:])),
        "group_norm": (group_norm(x, 2, weight=w, bias=b), reference.group_norm(values[0], 2, *values[1:])),
        "batch_norm": (
            batch_norm(x, b, w * w, bias=b),
            reference.batch_norm(values[0], values[2], values[1] ** 2, None, values[2]),
        ),
    }
    for name, (y, expected) in found.items():
        assert str(y.dtype) == dtype
        assert arrays.error(y, expected) < 2 * TOLERANCE[dtype], name


@hypothesis.given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    axes=st.sets(st.integers(0, 4), min_size=1),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from([None, "NCHW", "NHWC"])),
    dtype=st.sampled_from([*TOLERANCE]),
    given=st.tuples(st.booleans(), st.booleans()),
    step=st.sampled_from([1, 1, 2]),
    scale=st.sampled_from([1.0, 1e-3, 100.0]),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_generated_geometries(shape, axes, layouts, dtype, given, step, scale, seed):
    random = np.random.default_rng(seed)
    axes = tuple(sorted({axis % len(shape) for axis in axes}))
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype, layouts[0])
        x = arrays.put(
            random.standard_normal([extent * (step if axis == 0 else 1) for axis, extent in enumerate(shape)]) * scale
        )[::step]
        extents = [shape[axis] for axis in axes]
        rows = keywords(("weight", "bias"), [arrays.put(random.standard_normal(extents), "NCHW") for _ in range(2)])
        channels = keywords(("weight", "bias"), [arrays.put(random.standard_normal(shape[1])) for _ in range(2)])
        chosen = [name for name, there in zip(("weight", "bias"), given, strict=True) if there]
        groups = int(random.choice([each for each in range(1, shape[1] + 1) if shape[1] % each == 0]))
        mean, variance = arrays.put(random.standard_normal(shape[1])), arrays.put(random.random(shape[1]) + 0.5)
        cases = [
            (layer_norm, (), {"axis": axes}, {name: rows[name] for name in chosen}),
            (rms_norm, (), {"axis": axes}, {name: rows[name] for name in chosen if name == "weight"}),
            (softmax, (), {"axis": axes}, {}),
            (group_norm, (groups,), {}, {name: channels[name] for name in chosen}),
            (instance_norm, (), {}, {name: channels[name] for name in chosen}),
            (batch_norm, (mean, variance), {}, {name: channels[name] for name in chosen}),
        ]
        for function, more, options, parameters in cases:
            numbers = [value if isinstance(value, int) else arrays.take(value) for value in more]
            taken = {name: arrays.take(value) for name, value in parameters.items()}
            expected = getattr(reference, function.__name__)(arrays.take(x), *numbers, **options, **taken)
            out = None if layouts[1] is None else arrays.poisoned(*shape, layout=layouts[1])
            y = function(x, *more, **options, **parameters, out=out, pool=scene.pool)
            assert out is None or y is out
            bound = 3 * TOLERANCE[dtype] * max(1, np.abs(expected).max())
            np.testing.assert_allclose(arrays.take(y), expected, atol=bound, rtol=0, err_msg=function.__name__)


def test_an_input_may_be_the_output(each_pool):
    arrays = Arrays(each_pool, "float16", "NHWC")
    for function, more in ((layer_norm, {"axis": 1}), (softmax, {"axis": (1, 2)}), (instance_norm, {})):
        x = arrays.random(*X)
        expected = getattr(reference, function.__name__)(arrays.take(x), **more)
        assert function(x, **more, out=x) is x
        assert arrays.error(x, expected) < TOLERANCE["float16"]


def test_nan_and_infinity_spread_over_their_row_alone(each_pool):
    arrays = Arrays(each_pool)
    values = np.random.default_rng(0).standard_normal((4, 8))
    values[1, 3], values[2, 0], values[3] = np.nan, np.inf, -np.inf
    x = arrays.put(values)
    for function in (layer_norm, rms_norm, softmax):
        y = arrays.take(function(x))
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()
        assert np.isnan(y[3]).all()
    assert np.isnan(arrays.take(softmax(x))[2]).all()
    assert arrays.take(softmax(arrays.put([[-np.inf, 0.0, 1e30]]))).ravel().tolist() == [0, 0, 1]


def test_rows_far_from_zero_keep_their_variance(each_pool):
    arrays = Arrays(each_pool)
    values = np.random.default_rng(0).standard_normal((3, 1000)) + 1000
    x = arrays.put(values)
    assert arrays.error(layer_norm(x), reference.layer_norm(arrays.take(x))) < 1e-3


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty_arrays_give_empty_results(each_pool, shape):
    arrays = Arrays(each_pool)
    x, w = arrays.random(*shape), arrays.random(shape[1])
    for y in (
        layer_norm(x),
        softmax(x, axis=1),
        rms_norm(x, axis=(0, 1)),
        group_norm(x, 1, weight=w),
        batch_norm(x, w, w),
        instance_norm(x),
    ):
        assert y.shape == shape


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays = Arrays(each_pool)
    x, w, half = arrays.random(2, 8, 4), arrays.random(8), Arrays(each_pool, "float16")
    for match, refused in {
        r"axis=\(3,\) for x of shape \(2, 8, 4\); .* from -3 to 2": lambda: layer_norm(x, axis=3),
        "names an axis of x": lambda: softmax(x, axis=(-1, 2)),
        r"axis=\(\)": lambda: softmax(x, axis=()),
        "axis='channels'": lambda: layer_norm(x, axis="channels"),
        "axis=1.5": lambda: rms_norm(x, axis=1.5),
        "axis=True": lambda: rms_norm(x, axis=True),
        r"weight of shape \(8,\) for x of shape \(2, 8, 4\) and axis=\(-1,\); its shape must be \(4,\)": lambda: layer_norm(
            x, weight=w
        ),
        "eps=-1": lambda: layer_norm(x, eps=-1),
        "eps=nan": lambda: layer_norm(x, eps=float("nan")),
        "eps='1'": lambda: group_norm(x, 2, eps="1"),
        "3 groups do not divide the 8 channels": lambda: group_norm(x, 3),
        "groups=0": lambda: group_norm(x, 0),
        r"bias of shape \(8,\) for 4 channels": lambda: instance_norm(x[0], bias=w),
        "x has 1 axes": lambda: instance_norm(w),
        r"variance of shape \(4,\) for 8 channels": lambda: batch_norm(x, w, w[:4]),
        "mean is float16 and x is float32": lambda: batch_norm(x, half.random(8), w),
        "bias is float32 and weight is float16": lambda: layer_norm(half.random(2, 8), weight=half.random(8), bias=w),
        "activation='mish'": lambda: batch_norm(x, w, w, activation="mish"),
        "x is int32": lambda: softmax(each_pool.driver.asarray(np.ones((2, 3), np.int32))),
        "negative": lambda: softmax(x[:, ::-1]),
        "shares memory with argument 0": lambda: layer_norm(x[:, :4], axis=1, out=x[:, 1:5]),
        "shares memory with argument 1": lambda: layer_norm(w.reshape(1, 8), weight=w, out=w.reshape(1, 8)),
        r"out= of layer_norm is float32 of shape \(8,\)": lambda: layer_norm(x, out=w),
        "layer_norm takes x by position": lambda: layer_norm(x, 1),
        "group_norm takes x, groups by position": lambda: group_norm(x, 2, w),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            refused()


def test_equal_options_of_other_types_are_refused_after_right_ones(each_pool):
    x = Arrays(each_pool).random(2, 8, 4)
    group_norm(x, 1)
    layer_norm(x, axis=1, eps=1)
    with pytest.raises(ArgumentError, match="groups=True"):
        group_norm(x, True)
    with pytest.raises(ArgumentError, match="axis=True"):
        layer_norm(x, axis=True, eps=1)
    with pytest.raises(ArgumentError, match="eps=True"):
        layer_norm(x, axis=1, eps=True)


def test_the_functions_are_in_the_public_names():
    assert {name.partition(" ")[0] for name in CALLS} | {"batch_norm"} <= {*handlepool.__all__} & {*handlepool.ops.__all__}
