"""What conv2d and graph functions refuse: a typed error that names value and remedy, before anything is launched."""

from functools import partial

import numpy as np
import pytest
from harness.scenes import Scene

from handlepool import (
    ArgumentError,
    ArrayTypeError,
    DeviceMismatchError,
    GraphNotSupportedError,
    HandlePoolError,
    conv2d,
    conv2d_input_grad,
    conv2d_weight_grad,
    graph,
)
from handlepool.testing import reference

GOOD = {"x": (2, 4, 8, 8), "w": (6, 4, 3, 3), "bias": (6,), "out": (2, 6, 6, 6)}


@pytest.fixture
def scene():
    with Scene(seed=1) as scene:
        yield scene


def numbers(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def given(scene, name, shape=None, dtype=np.float32):
    return scene.driver.asarray(numbers(GOOD[name] if shape is None else shape, dtype))


def queued(scene):
    """The last operation that the caller's stream was given."""
    return scene.driver._streams.resolve(scene.stream.ptr).tail


def refused(scene, error, match, **changed):
    """Call conv2d with what is changed of good arguments; nothing is launched, and a good call afterwards is right."""
    arguments = {name: given(scene, name) for name in ("x", "w")} | changed
    launched = scene.driver.calls["launch"]
    try:
        with pytest.raises(error, match=match) as raised:
            conv2d(arguments.pop("x"), arguments.pop("w"), pool=scene.pool, **arguments)
        assert isinstance(raised.value, HandlePoolError)
        with pytest.raises(error), scene.states.fork() as fork:
            fork.run(conv2d, changed.get("x", given(scene, "x")), changed.get("w", given(scene, "w")), **arguments)
        assert scene.driver.calls["launch"] == launched
        assert scene.pool.stats()["handles_leased"] == 0
    finally:
        assert scene.driver.current_stream() is scene.stream
    x, w, bias = given(scene, "x"), given(scene, "w"), given(scene, "bias")
    for y in (conv2d(x, w, bias=bias, pool=scene.pool), scene.states.map(lambda x: conv2d(x, w, bias=bias), [x])[0]):
        right = reference.conv2d(*map(numbers, (GOOD["x"], GOOD["w"])), bias=numbers(GOOD["bias"]))
        assert reference.relative_error(scene.driver.asnumpy(y), right) < 1e-5


# Types


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "uint8", "bool", "complex64"])
def test_a_type_that_convolutions_do_not_have(scene, dtype):
    x, w = given(scene, "x", dtype=dtype), given(scene, "w", dtype=dtype)
    refused(scene, ArgumentError, f"x is {dtype}; it must be one of float16, bfloat16, float32", x=x, w=w)


@pytest.mark.parametrize("name", ["w", "bias", "out"])
def test_arrays_of_two_types(scene, name):
    wrong = {name: given(scene, name, dtype="float16")}
    refused(scene, ArgumentError, f"{name} is float16 and x is float32; convert one", **wrong)


@pytest.mark.parametrize("wrong", [[[1.0]], 1.5, "image", b"image", object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["x", "w", "bias", "out"])
def test_what_is_no_array(scene, name, wrong):
    refused(scene, ArrayTypeError, "the host driver takes numpy.ndarray", **{name: wrong})


def test_none_is_no_array(scene):
    refused(scene, ArrayTypeError, "NoneType", w=None)


class Duck:
    """As an array of another library: everything that keys a plan, and no array of the driver's."""

    def __init__(self, array):
        self.shape, self.strides, self.dtype, self.ndim, self.size = (
            array.shape,
            array.strides,
            array.dtype,
            array.ndim,
            array.size,
        )


def test_an_array_of_another_library_whose_geometry_is_known(scene):
    x, w = given(scene, "x"), given(scene, "w")
    conv2d(x, w, pool=scene.pool)
    before = queued(scene)
    with pytest.raises(ArrayTypeError, match="Duck"):
        conv2d(Duck(x), w, pool=scene.pool)
    assert queued(scene) is before


# Shapes


@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (2, 4, 8, 8, 1), ()])
@pytest.mark.parametrize("name", ["x", "w"])
def test_a_rank_that_is_not_four(scene, name, shape):
    refused(scene, ArgumentError, f"{name} has {len(shape)} axes.*must have 4", **{name: given(scene, name, shape)})


@pytest.mark.parametrize("shape", [(0, 4, 8, 8), (2, 4, 0, 8)])
def test_an_empty_array(scene, shape):
    refused(scene, ArgumentError, "empty", x=given(scene, "x", shape))


def test_channels_that_do_not_agree(scene):
    refused(scene, ArgumentError, r"4 channels in x.*3 x groups=1 in w.*C / groups", w=given(scene, "w", (6, 3, 3, 3)))


def test_groups_that_do_not_divide_the_filters(scene):
    refused(scene, ArgumentError, "2 groups, which do not divide 5 filters", w=given(scene, "w", (5, 2, 3, 3)), groups=2)


@pytest.mark.parametrize("groups", [0, -1, 1.0, "1", None, True])
def test_groups_that_are_no_number(scene, groups):
    refused(scene, ArgumentError, "groups|channels", groups=groups)


@pytest.mark.parametrize("shape", [(5,), (1,), (6, 1)])
def test_a_bias_of_another_shape(scene, shape):
    refused(scene, ArgumentError, "bias", bias=given(scene, "bias", shape))


def test_filters_larger_than_the_image(scene):
    refused(scene, ArgumentError, "nothing comes out.*pad more, or take a smaller filter", w=given(scene, "w", (6, 4, 9, 3)))


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [-1, (1,), (1, 2, 3), 1.5, (1, 0.5), "ab", None, [1, 1, 1]])
def test_a_geometry_that_is_none(scene, name, value):
    refused(scene, ArgumentError, name, **{name: value})


@pytest.mark.parametrize("name", ["stride", "dilation"])
def test_a_stride_or_dilation_of_zero(scene, name):
    refused(scene, ArgumentError, f"{name}=0; it must be an integer, or two, each 1 or more", **{name: 0})


def test_an_activation_that_is_none(scene):
    refused(scene, ArgumentError, "activation='selu'; it can be relu, sigmoid, tanh, gelu, swish or None", activation="selu")


@pytest.mark.parametrize("limit", [-1, 1.5, "1"])
def test_a_workspace_limit_that_is_none(scene, limit):
    refused(scene, ArgumentError, f"workspace_limit={limit!r}", workspace_limit=limit)


def test_a_workspace_limit_that_no_plan_meets(scene):
    refused(scene, GraphNotSupportedError, "workspace", workspace_limit=0)


def test_an_option_that_there_is_not(scene):
    with pytest.raises(TypeError):
        conv2d(given(scene, "x"), given(scene, "w"), pool=scene.pool, strides=1)


# Memory


def test_an_array_with_gaps(scene):
    refused(scene, ArgumentError, r"strides.*without gaps.*ascontiguousarray\(x\)", x=given(scene, "x", (2, 4, 16, 8))[:, :, ::2])


def test_an_array_with_negative_strides(scene):
    refused(scene, ArgumentError, "strides", x=given(scene, "x")[:, :, ::-1])


def test_an_array_that_is_broadcast(scene):
    refused(scene, ArgumentError, "strides", x=np.broadcast_to(given(scene, "x", (1, 4, 8, 8)), (2, 4, 8, 8)))


def test_a_layout_that_is_neither(scene):
    refused(scene, ArgumentError, "contiguous or channels-last", x=given(scene, "x", (8, 8, 4, 2)).transpose())


@pytest.mark.parametrize("name", ["x", "w", "bias", "out"])
def test_a_misaligned_array(scene, name):
    size = int(np.prod(GOOD[name]))
    wrong = scene.driver.empty((size + 1,), (4,), np.dtype(np.float32))[1:].reshape(GOOD[name])
    arguments = {"x": given(scene, "x"), "w": given(scene, "w"), name: wrong}
    before = queued(scene)
    with pytest.raises(ArgumentError, match=r"4 bytes past a multiple of 16.*copy"):
        conv2d(**arguments, pool=scene.pool)
    assert queued(scene) is before
    with pytest.raises(ArgumentError), scene.states.fork() as fork:
        fork.run(conv2d, **arguments)
    arguments[name] = given(scene, name)
    conv2d(**arguments, pool=scene.pool)
    scene.stream.synchronize()


@pytest.mark.parametrize("name", ["x", "w", "bias", "out"])
@pytest.mark.parametrize("known", [False, True], ids=["new geometry", "known geometry"])
def test_an_array_on_another_device(scene, name, known):
    arguments = {key: given(scene, key) for key in GOOD}
    if known:
        conv2d(**arguments, pool=scene.pool)
    with scene.driver.device(1), scene.driver.create_stream():
        arguments[name] = given(scene, name)
        scene.driver.synchronize_stream(scene.driver.current_stream().ptr)
    before = queued(scene)
    with pytest.raises(DeviceMismatchError, match="is on device 1 and the current device is 0; make device 1 current"):
        conv2d(**arguments, pool=scene.pool)
    assert queued(scene) is before
    arguments[name] = given(scene, name)
    conv2d(**arguments, pool=scene.pool)
    scene.stream.synchronize()


# out


def test_an_out_of_another_shape(scene):
    refused(scene, ArgumentError, r"out=.*\(2, 6, 8, 8\).*\(2, 6, 6, 6\)", out=given(scene, "out", (2, 6, 8, 8)))


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_an_out_that_overlaps_an_input(scene, name):
    whole = scene.driver.empty((4096,), (4,), np.dtype(np.float32))
    size = int(np.prod(GOOD[name]))
    part = scene.put(whole[:size].reshape(GOOD[name]), lambda: 1)
    out = whole[:432].reshape(GOOD["out"])
    refused(scene, ArgumentError, "out= of conv2d shares memory with argument", **{name: part, "out": out})


def test_an_out_that_is_the_input(scene):
    x, w = given(scene, "x", (1, 4, 8, 8)), given(scene, "w", (4, 4, 3, 3))
    refused(scene, ArgumentError, "shares memory", x=x, w=w, padding=1, out=x)


def test_an_out_beside_an_input_in_one_block_is_taken(scene):
    whole = scene.driver.empty((1024,), (4,), np.dtype(np.float32))
    x = scene.put(whole[:512].reshape(GOOD["x"]), lambda: numbers(GOOD["x"]))
    out = whole[512:944].reshape(GOOD["out"])
    y = conv2d(x, given(scene, "w"), out=out, pool=scene.pool)
    right = reference.conv2d(numbers(GOOD["x"]), numbers(GOOD["w"]))
    assert reference.relative_error(scene.driver.asnumpy(y), right) < 1e-5


def test_two_outs_for_one_output(scene):
    refused(scene, ArgumentError, "out", out=(given(scene, "out"), given(scene, "out")))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("out", [(), []])
def test_an_out_that_holds_no_array(make_pool, out, first):
    pool = make_pool()
    x, w = (pool.driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 8, 8), (4, 4, 3, 3)))
    if not first:
        conv2d(x, w, pool=pool)
    with pytest.raises(ArgumentError, match="holds no array"):
        conv2d(x, w, out=out, pool=pool)


# Settings


NO_SETTING = [[], {}, set(), np.ones(2), [[1]], "off", 2.5, object]
OPERATIONS = {
    "conv2d": (conv2d, ("x", "w"), {}),
    "conv2d_input_grad": (conv2d_input_grad, ("out", "w"), {"shape": GOOD["x"]}),
    "conv2d_weight_grad": (conv2d_weight_grad, ("x", "out"), {"shape": GOOD["w"]}),
}


@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
@pytest.mark.parametrize("value", NO_SETTING, ids=repr)
@pytest.mark.parametrize("name", ["workspace_limit", "allow_tf32", "deterministic"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_setting_that_is_none_is_named(scene, operation, name, value, known):
    function, arrays, options = OPERATIONS[operation]
    arrays = [given(scene, each) for each in arrays]
    if known:
        function(*arrays, **options, pool=scene.pool)
    launched = scene.driver.calls["launch"]
    with pytest.raises(ArgumentError, match=f"^{name}=.*; it must be"):
        function(*arrays, **options, **{name: value}, pool=scene.pool)
    with pytest.raises(ArgumentError, match=f"^{name}=.*; it must be"), scene.states.fork() as fork:
        fork.run(function, *arrays, **options, **{name: value}, pool=scene.pool)
    assert scene.driver.calls["launch"] == launched


@pytest.mark.parametrize("value", [[], {}, np.ones(2), "sideways", 1, None], ids=repr)
@pytest.mark.parametrize("name", ["mode", "activation"])
def test_an_option_that_is_none_is_named(scene, name, value):
    if name != "activation" or value is not None:
        refused(scene, ArgumentError, f"{name}=", **{name: value})


# Operands of a known geometry, which are looked at when they are launched


def in_a_call(states, function, *args, **kwargs):
    return function(*args, **kwargs)


def in_a_branch(states, function, *args, **kwargs):
    with states.fork() as fork:
        return fork.run(function, *args, **kwargs)


def in_a_map(states, function, *args, **kwargs):
    return states.map(partial(function, **kwargs), *([arg, arg] for arg in args))


def elsewhere(scene, name):
    with scene.driver.device(1), scene.driver.create_stream():
        return given(scene, name)


def read_only(scene, name):
    array = given(scene, name)
    scene.driver.synchronize_stream(scene.stream.ptr)
    array.flags.writeable = False
    return array


def beside_a_boundary(scene, name):
    flat = scene.driver.empty((np.prod(GOOD[name]) + 1,), (4,), np.dtype(np.float32))
    return flat[1:].reshape(GOOD[name])


WRONG = {
    "another device": (elsewhere, DeviceMismatchError, "is on device 1 and the current device is 0"),
    "a misaligned address": (beside_a_boundary, ArgumentError, r"of shape .* begins 4 bytes past a multiple of 16"),
    "read-only": (read_only, ArgumentError, "is read-only and cannot be written"),
}
TITLES = {"x": r"argument 0 \(x\)", "w": r"argument 1 \(w\)", "bias": r"argument 2 \(bias\)", "out": "out="}


@pytest.mark.parametrize("way", [in_a_call, in_a_branch, in_a_map])
@pytest.mark.parametrize(
    ("wrong", "name"), [(wrong, name) for wrong in WRONG for name in TITLES if wrong != "read-only" or name == "out"]
)
def test_an_operand_of_a_known_geometry_is_named_with_its_operation(scene, wrong, name, way):
    make, error, match = WRONG[wrong]
    arguments = {each: given(scene, each) for each in GOOD}
    conv2d(arguments["x"], arguments["w"], bias=arguments["bias"], out=arguments["out"], pool=scene.pool)
    arguments[name] = make(scene, name)
    with pytest.raises(error, match=rf"^conv2d: {TITLES[name]},? {match}"):
        way(scene.states, conv2d, arguments.pop("x"), arguments.pop("w"), pool=scene.pool, **arguments)


def test_an_operand_by_reference_is_named_by_it(scene, monkeypatch):
    monkeypatch.setattr("handlepool.pool.default._default", scene.pool)

    @graph
    def double(g, x):
        return g.add(x, x)

    x = given(scene, "x")
    key = double.plan_for(x).keys[0]
    double.run({key: given(scene, "x"), "x": x})
    for arrays, named in (
        ({key: given(scene, "x"), "x": elsewhere(scene, "x")}, "'x'"),
        ({key: elsewhere(scene, "x"), "x": x}, f"'{key}'"),
    ):
        with pytest.raises(DeviceMismatchError, match=f"^double: the array for {named} is on device 1"):
            double.run(arrays)
