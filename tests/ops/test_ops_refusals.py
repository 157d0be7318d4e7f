"""What conv2d and graph functions refuse: a typed error that names value and remedy, before anything is launched."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from harness.insides import streams_of

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
    ops,
)
from handlepool.ops import convolution
from handlepool.testing import reference

GOOD = {"x": (2, 4, 8, 8), "w": (6, 4, 3, 3), "bias": (6,), "out": (2, 6, 6, 6)}


def numbers(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def given(scene, name, shape=None, dtype=np.float32):
    return scene.driver.asarray(numbers(GOOD[name] if shape is None else shape, dtype))


def queued(scene):
    """The last operation that the caller's stream was given."""
    return streams_of(scene.driver).resolve(scene.stream.ptr).tail


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
    refused(scene, ArrayTypeError, "the host driver takes .*numpy.ndarray", **{name: wrong})


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


def of(name, shape):
    return lambda scene: {name: given(scene, name, shape)}


def square(scene):
    x = given(scene, "x", (1, 4, 8, 8))
    return {"x": x, "w": given(scene, "w", (4, 4, 3, 3)), "padding": 1, "out": x}


PADDINGS = [((1, 1), 1), ((1, 1), (1, 1), (1, 1)), ((1, -1), (0, 0)), [[1], [1]], ((1, 1.5), (0, 0)), ((), ()), {1: 2, 3: 4}]
AXES = [(name, shape) for name in ("x", "w") for shape in ((8, 8), (4, 8, 8), (2, 4, 8, 8, 1), ())]
UNFIT = {
    "none": ("NoneType", lambda scene: {"w": None}),
    **{f"{name} {shape}": (f"{name} has {len(shape)} axes.*must have 4", of(name, shape)) for name, shape in AXES},
    "no rows": ("the result is empty", of("x", (2, 4, 0, 8))),
    "channels": (r"x .* has 4 channels, and w .* with groups=1 takes 3 channels.*C / groups", of("w", (6, 3, 3, 3))),
    "groups": ("2 groups do not divide 5 filters", lambda scene: {"w": given(scene, "w", (5, 2, 3, 3)), "groups": 2}),
    **{
        f"add {shape}": (r"add has shape .* and the result has shape \(2, 6, 6, 6\)", of("add", shape))
        for shape in ((6,), (1, 6, 6, 6), (2, 6, 8, 8))
    },
    "add's type": ("add is float16 and x is float32", lambda scene: {"add": given(scene, "out", dtype="float16")}),
    "a set": ("stride={1, 2}; it must be an integer", {"stride": {1, 2}}),
    **{f"padding {value}": ("padding=.*; it must be .* or two pairs", {"padding": value}) for value in PADDINGS},
    **{f"bias {shape}": ("bias", of("bias", shape)) for shape in ((5,), (1,), (6, 1))},
    "large filters": ("the result is empty.*pad more, or take a smaller filter", of("w", (6, 4, 9, 3))),
    **{
        f"{name} 0": (f"{name}=0; it must be an integer, or two integers, each 1 or more", {name: 0})
        for name in ("stride", "dilation")
    },
    "activation": (
        "activation='selu'; it can be relu, .*, swish, .*, hardswish, or None",
        {"activation": "selu"},
    ),
    "torch's name": ("activation='silu'; it can be .*, or None; torch's silu is swish", {"activation": "silu"}),
    **{f"limit {n!r}": (f"workspace_limit={n!r}", {"workspace_limit": n}) for n in (-1, 1.5, "1")},
    "no workspace": ("workspace", {"workspace_limit": 0}),
    "gaps": (r"strides.*without gaps.*ascontiguousarray\(x\)", lambda scene: {"x": given(scene, "x", (2, 4, 16, 8))[:, :, ::2]}),
    "turned": ("strides", lambda scene: {"x": given(scene, "x")[:, :, ::-1]}),
    "broadcast": ("strides", lambda scene: {"x": np.broadcast_to(given(scene, "x", (1, 4, 8, 8)), (2, 4, 8, 8))}),
    "no layout": ("contiguous or channels-last", lambda scene: {"x": given(scene, "x", (8, 8, 4, 2)).transpose()}),
    "out": (r"out=.*\(2, 6, 8, 8\).*\(2, 6, 6, 6\)", of("out", (2, 6, 8, 8))),
    "out over x": ("shares memory", square),
    "no outs": ("out=.. holds no array", {"out": ()}),
    "two outs": ("out", lambda scene: {"out": (given(scene, "out"), given(scene, "out"))}),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_is_refused(scene, what):
    match, changed = UNFIT[what]
    error = {"none": ArrayTypeError, "no workspace": GraphNotSupportedError}.get(what, ArgumentError)
    refused(scene, error, match, **(changed(scene) if callable(changed) else changed))


@pytest.mark.parametrize("groups", [0, -1, 1.0, "1", None, True, np.True_, (1, True), [2], {}, np.array([2, 2])], ids=repr)
def test_groups_that_are_no_number(scene, groups):
    refused(scene, ArgumentError, "groups=.*; it must be an integer, 1 or more", groups=groups)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize(
    "value", [-1, (1,), (1, 2, 3), 1.5, (1, 0.5), "ab", None, [1, 1, 1], True, np.True_, (1, True), "11", b"11"]
)
def test_a_geometry_that_is_none(scene, name, value):
    refused(scene, ArgumentError, name, **{name: value})


def test_an_option_that_there_is_not(scene):
    with pytest.raises(TypeError):
        conv2d(given(scene, "x"), given(scene, "w"), pool=scene.pool, strides=1)


# Memory


# out


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_an_out_that_overlaps_an_input(scene, name):
    whole = scene.driver.empty((4096,), (4,), np.dtype(np.float32))
    size = int(np.prod(GOOD[name]))
    part = scene.put(whole[:size].reshape(GOOD[name]), lambda: 1)
    out = whole[:432].reshape(GOOD["out"])
    refused(scene, ArgumentError, "out= of conv2d shares memory with argument", **{name: part, "out": out})


def test_an_out_beside_an_input_in_one_block_is_taken(scene):
    whole = scene.driver.empty((1024,), (4,), np.dtype(np.float32))
    x = scene.put(whole[:512].reshape(GOOD["x"]), lambda: numbers(GOOD["x"]))
    out = whole[512:944].reshape(GOOD["out"])
    y = conv2d(x, given(scene, "w"), out=out, pool=scene.pool)
    right = reference.conv2d(numbers(GOOD["x"]), numbers(GOOD["w"]))
    assert reference.relative_error(scene.driver.asnumpy(y), right) < 1e-5


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
        refused(scene, ArgumentError, f"{name}=.*; it can be", **{name: value})


@pytest.mark.parametrize("value", [[], {}, np.ones(2), ["relu"], 1], ids=repr)
@pytest.mark.parametrize("function", [ops.matmul, ops.linear])
def test_an_activation_of_a_product_that_is_none(scene, function, value):
    x = given(scene, "w", (4, 4))
    with pytest.raises(ArgumentError, match=r"activation=.*; it can be .*, or None"):
        function(x, x, activation=value, pool=scene.pool)


@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
@pytest.mark.parametrize("wrong", [lambda pool: (pool, True), lambda pool: (pool, None), lambda pool: ()])
@pytest.mark.parametrize(
    "function", [ops.add, ops.matmul, ops.relu, ops.mean2d, conv2d, conv2d_input_grad], ids=lambda f: f.__name__
)
def test_a_tuple_is_no_pool(scene, function, wrong, known):
    arrays = {ops.relu: ("x",), ops.mean2d: ("x",), conv2d: ("x", "w"), conv2d_input_grad: ("out", "w")}.get(function, ("m", "m"))
    arrays = [given(scene, each, (4, 4) if each == "m" else None) for each in arrays]
    options = {"shape": GOOD["x"]} if function is conv2d_input_grad else {}
    if known:
        function(*arrays, **options, pool=scene.pool)
    with pytest.raises(ArgumentError, match=f"{function.__name__} was given pool=.*; pass a HandlePool"):
        function(*arrays, **options, pool=wrong(scene.pool))


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
    "a misaligned address": (
        beside_a_boundary,
        ArgumentError,
        r"of shape .* begins 4 bytes past a multiple of 16.* Pass a copy; for an output, pass another array, and copy the result",
    ),
    "read-only": (read_only, ArgumentError, "is read-only and cannot be written"),
}
TITLES = {"x": r"argument 0 \(x\)", "w": r"argument 1 \(w\)", "bias": r"argument 2 \(bias\)", "out": "out="}


@pytest.mark.parametrize("known", [False, True], ids=["new geometry", "known geometry"])
@pytest.mark.parametrize("way", [in_a_call, in_a_branch, in_a_map])
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (wrong, name)
        for wrong in WRONG
        for name in TITLES
        if name == "out" or (wrong != "read-only" and (wrong, name) != ("a misaligned address", "bias"))
    ],
)
def test_an_operand_of_a_known_geometry_is_named_with_its_operation(scene, wrong, name, way, known):
    make, error, match = WRONG[wrong]
    good = {each: given(scene, each) for each in GOOD}
    if known:
        conv2d(**good, pool=scene.pool)
    arguments = good | {name: make(scene, name)}
    title = TITLES[name] if known else TITLES[name].partition(r" \(")[0]  # the plan knows the parameters' names
    before = queued(scene)
    with pytest.raises(error, match=rf"^conv2d: {title},? {match}"):
        way(scene.states, conv2d, arguments.pop("x"), arguments.pop("w"), pool=scene.pool, **arguments)
    assert way is not in_a_call or queued(scene) is before
    conv2d(**good, pool=scene.pool)
    scene.stream.synchronize()


def test_an_operand_by_reference_is_named_by_it(scene, make_default):
    make_default(scene.pool)

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


# Options that equal others


class Two(NamedTuple):
    """Equal to a tuple, and to another one of equal entries."""

    one: float
    other: float


def pairs(name, *, zero=False):
    """Ways to say (2, 2), or (0, 0), and what equals it and is none."""
    number = 0 if zero else 2
    good = (number, (number, number), [number, number], np.int64(number), Two(number, number))
    wrong = (float(number), (float(number), number), [float(number), number], np.float32(number), Two(float(number), number))
    return name, good, (*wrong, False, (number, False)) if zero else wrong


IMAGES = GOOD["x"], GOOD["w"]
SETTINGS = [
    ("workspace_limit", (10**9, np.int64(10**9)), (1e9,)),
    ("allow_tf32", (True, np.True_), (1, 1.0)),
    ("deterministic", (False, np.False_), (0, 0.0)),
]
WINDOWS = [pairs("window"), pairs("stride"), pairs("padding", zero=True), ("ceil_mode", (False,), (0, 0.0))]
GEOMETRY = [pairs("stride"), pairs("padding", zero=True), pairs("dilation"), ("groups", (1,), (True, 1.0))]
LIKENESSES = {
    "conv2d": (IMAGES, {}, [*GEOMETRY, *SETTINGS]),
    "conv2d_input_grad": (None, {}, [*GEOMETRY, *SETTINGS]),
    "conv2d_weight_grad": (None, {}, [*GEOMETRY, *SETTINGS]),
    "matmul": (((4, 4), (4, 4)), {}, [SETTINGS[0], SETTINGS[2]]),
    "linear": (((4, 4), (4, 4)), {}, [SETTINGS[0], SETTINGS[2]]),
    "max_pool2d": (IMAGES[:1], {"window": 2}, WINDOWS),
    "avg_pool2d": (IMAGES[:1], {"window": 2}, [*WINDOWS, ("count_include_pad", (True,), (1, 1.0))]),
    "mean2d": (IMAGES[:1], {}, [("keepdims", (True, np.True_), (1, 1.0))]),
    "layer_norm": (IMAGES[:1], {}, [("axis", (1, (1,), [1], np.int64(1)), (True, 1.0, (1.0,))), ("eps", (1, 1.0), (True, "1"))]),
    "softmax": (IMAGES[:1], {}, [("axis", (1, (1,), [1], np.int64(1)), (True, 1.0, (1.0,)))]),
    "interpolate2d": (
        IMAGES[:1],
        {"size": 2, "mode": "bilinear"},
        [pairs("size"), ("align_corners", (True, np.True_), (1, 1.0))],
    ),
    "conv_transpose2d": (((2, 6, 8, 8), IMAGES[1]), {}, [*GEOMETRY, *SETTINGS]),
    "conv_transpose1d": (((2, 6, 8), (6, 4, 3)), {}, SETTINGS),
    "conv1d": (((2, 4, 8), (6, 4, 3)), {}, SETTINGS),
}
OPTIONS = [(operation, *likeness) for operation, (_, _, each) in LIKENESSES.items() for likeness in each]


@pytest.mark.parametrize(("operation", "name", "good", "wrong"), OPTIONS, ids=lambda value: value if type(value) is str else "")
def test_what_equals_a_known_option_and_is_of_another_type_is_refused(scene, operation, name, good, wrong):
    """Whether a call is taken does not depend on the calls before it: each good one is right after each wrong one, and back."""
    function, (shapes, options, _) = getattr(ops, operation), LIKENESSES[operation]
    if shapes is None:  # a gradient: of the result that the option leads to
        how = {"stride": 1, "padding": 0, "dilation": 1} | ({name: good[0]} if name in ("stride", "padding", "dilation") else {})
        result = convolution.result_shape(*IMAGES, **convolution.geometry(operation, how))
        weight = operation == "conv2d_weight_grad"
        shapes, options = (IMAGES[0], result) if weight else (result, IMAGES[1]), {"shape": IMAGES[weight]}
    arrays = [scene.driver.asarray(numbers(shape)) for shape in shapes]

    def call(value):
        arguments = {**options, name: value}
        positional = [arguments.pop("window")] if "window" in arguments else []
        return function(*arrays, *positional, **arguments, pool=scene.pool)

    def refuse():
        for value in wrong:
            for way in (call, in_a_fork):
                with pytest.raises(ArgumentError, match=name):
                    way(value)

    def in_a_fork(value):
        with scene.states.fork() as fork:
            fork.run(call, value)
        with scene.states.fork() as fork:
            positional = [value if name == "window" else options["window"]] if "window" in options else []
            arguments = {each: given for each, given in {**options, name: value}.items() if each != "window"}
            fork.run(function, *arrays, *positional, **arguments)

    refuse()
    right = scene.driver.asnumpy(call(good[0]))
    for value in good:
        for _ in range(2):  # the second time it is known
            assert np.array_equal(scene.driver.asnumpy(call(value)), right)
            refuse()


def test_options_of_graph_functions_that_are_equal_and_of_other_types_have_plans_of_their_own(scene, make_default):
    make_default(scene.pool)
    seen = []

    @graph
    def double(g, x, *, how):
        seen.append(how)
        return g.add(x, x)

    x = given(scene, "x")
    ways = [1, 1.0, True, (1, 2), (1.0, 2), (True, 2), ((1,), 2), ((1.0,), 2), Two(1, 2), Two(1.0, 2)]
    for _ in range(3):
        for way in ways:
            double(x, how=way)
    assert [*map(repr, seen)] == [*map(repr, ways)]


@pytest.mark.parametrize("way", [[2, 2], range(2, 4), np.array([2, 3]), np.array([2, 2], np.uint8)], ids=repr)
@pytest.mark.parametrize("function", [ops.max_pool2d, ops.avg_pool2d])
def test_pooling_takes_the_sequences_that_convolutions_take(scene, function, way):
    x = given(scene, "x")
    one, other = map(int, way)
    right = scene.driver.asnumpy(function(x, (one, other), stride=(other, one), padding=1, pool=scene.pool))
    for _ in range(2):
        y = function(x, way, stride=way[::-1], padding=[1, 1], pool=scene.pool)
        assert np.array_equal(scene.driver.asnumpy(y), right)
    assert conv2d(x, given(scene, "w"), stride=way, pool=scene.pool).ndim == 4
    assert function(x, np.array(2), pool=scene.pool).shape == function(x, 2, pool=scene.pool).shape
