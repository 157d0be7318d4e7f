"""Graph functions on the host driver: how arrays are given, settings, plans, and what is refused before anything is launched."""

import functools

import numpy as np
import pytest
from harness.arrays import Arrays

import handlepool
from handlepool import ArgumentError, ArraySpec, ArrayTypeError, DeviceMismatchError, GraphNotSupportedError, HandlePool
from handlepool.graphs.function import GraphFunction
from handlepool.testing.reference import conv2d as reference

UNIT = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
SHAPES = {"x": (2, 4, 8, 8), "w": (6, 4, 3, 3), "b": (1, 6, 1, 1)}


@pytest.fixture
def arrays(pool):
    return Arrays(pool)


@pytest.fixture
def x(arrays):
    return arrays.random(*SHAPES["x"])


@pytest.fixture
def w(arrays):
    return arrays.random(*SHAPES["w"])


def convolve(g, x, w):
    return g.conv_fprop(x, w, name="conv2d", **UNIT)


def twice(g, x):
    return g.add(x, x)


def right(arrays, x, w, **options):
    return reference(arrays.take(x), arrays.take(w), padding=1, **options)


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"io_dtyp": "float16"}, ArgumentError, "no setting is named io_dtyp; the settings are name, io_dtype"),
        ({"io_dtype": "float17"}, ArrayTypeError, "^io_dtype='float17': 'float17' is no data type"),
        ({"io_dtype": 3}, ArrayTypeError, "^io_dtype=3: 3 is no data type"),
        ({"io_dtype": []}, ArrayTypeError, r"^io_dtype=\[\]: cuDNN has no data type 'void'"),
        ({"compute_dtype": "complex64"}, ArrayTypeError, "^compute_dtype='complex64': cuDNN has no data type 'complex64'"),
        ({"intermediate_dtype": [1, 2]}, ArrayTypeError, r"^intermediate_dtype=\[1, 2\]: \[1, 2\] is no data type"),
        ({"intermediate_dtype": {"names": [1], "formats": []}}, ArrayTypeError, "^intermediate_dtype=.* is no data type"),
        ({"workspace_limit": -1}, ArgumentError, "workspace_limit=-1; it must be an integer, 0 bytes or more"),
        ({"workspace_limit": 1.5}, ArgumentError, "workspace_limit=1.5"),
        ({"workspace_limit": True}, ArgumentError, "workspace_limit=True"),
        ({"allow_tf32": 1}, ArgumentError, "allow_tf32=1; it must be True or False"),
        ({"deterministic": "yes"}, ArgumentError, "deterministic='yes'"),
        ({"heuristics": ["A", "C"]}, ArgumentError, "heuristics=.*one or more of A, B, FALLBACK, OPENSOURCE"),
        ({"heuristics": []}, ArgumentError, "heuristics="),
        ({"heuristics": 3}, ArgumentError, "heuristics=3"),
        ({"name": ""}, ArgumentError, "name=''"),
        ({"inputs": []}, ArgumentError, "inputs= is empty"),
        ({"outputs": ()}, ArgumentError, "outputs= is empty"),
        ({"inputs": ["x", "x"]}, ArgumentError, "names a tensor twice"),
    ],
)
def test_settings_are_checked_when_they_are_given(settings, error, match):
    with pytest.raises(error, match=match):
        handlepool.graph(**settings)(twice)
    if settings.keys() <= {"inputs", "outputs"}:
        return
    with pytest.raises(error, match=match):
        handlepool.graph(twice).options(**settings)


@pytest.mark.parametrize("function", [3, None, "f", lambda: None])
def test_what_is_no_function_of_a_graph(function):
    with pytest.raises(ArgumentError, match=r"is no function|takes no graph"):
        GraphFunction(function)


def test_a_method_is_no_graph_function():
    def relu(self, g, x):
        return g.relu(x)

    with pytest.raises(ArgumentError, match=r"takes self, .* takes the graph first, .* under @staticmethod"):
        GraphFunction(relu)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype(np.float16), "bfloat16", "float32", None])
def test_every_way_of_naming_a_type(pool, x, dtype):
    fn = handlepool.graph(twice, io_dtype=dtype)
    expected = "float32" if dtype is None else dtype if dtype == "bfloat16" else np.dtype(dtype).name
    assert fn(x).dtype.name == expected


def test_a_heuristics_mode_may_be_one_name_or_the_frontends_own(pool, x):
    import cudnn

    fn = handlepool.graph(twice)
    assert fn.options(heuristics="A") is fn.options(heuristics=["A"]) is fn.options(heuristics=[cudnn.heur_mode.A])


def test_options_gives_the_same_object_for_the_same_settings():
    fn = handlepool.graph(twice, allow_tf32=False)
    assert fn.options() is fn.options(allow_tf32=False) is fn
    limited = fn.options(workspace_limit=1 << 20)
    assert limited is not fn
    assert (
        fn.options(workspace_limit=1 << 20)
        is limited
        is limited.options()
        is fn.options(deterministic=None, workspace_limit=1 << 20)
    )
    assert limited.options(workspace_limit=None) is fn
    assert limited.options(allow_tf32=None) is not limited


def test_a_call_through_options_finds_its_plan_again(pool, x, w):
    fn = handlepool.graph(convolve)
    for _ in range(3):
        fn.options(workspace_limit=1 << 20)(x, w)
    assert pool.stats()["plans_built"] == 1
    fn(x, w)
    assert pool.stats()["plans_built"] == 2


def test_the_variants_that_are_kept_are_bounded(pool):
    fn = handlepool.graph(twice)
    variants = [fn.options(workspace_limit=size) for size in range(1000)]
    assert len(fn.variants) <= 64
    assert variants[-1] is fn.options(workspace_limit=999)


def test_a_function_keeps_its_name_and_documentation():
    def documented(g, x):
        """What it does."""

    fn = handlepool.graph(documented, workspace_limit=5)
    assert (fn.__name__, fn.__doc__, fn.__wrapped__) == ("documented", "What it does.", documented)
    assert repr(fn) == "<GraphFunction documented, workspace_limit=5>"
    assert repr(fn.options(name="other")) == "<GraphFunction other, workspace_limit=5>"


# Arrays in order


def test_tensors_are_named_after_the_parameters(pool, x, w):
    seen = []

    @handlepool.graph
    def named(g, image, weight, *, scale=1):
        seen.append((image.get_name(), image.get_dim(), weight.get_name()))
        return convolve(g, image, weight)

    named(x, w, scale=2)
    assert seen == [("image", [2, 4, 8, 8], "weight")]


def test_a_parameter_with_a_default_may_be_an_array_or_be_left_out(pool, arrays, x, w):
    @handlepool.graph
    def biased(g, x, w, b=None):
        y = convolve(g, x, w)
        return y if b is None else g.bias(y, b)

    b = arrays.random(*SHAPES["b"])
    assert arrays.error(biased(x, w), right(arrays, x, w)) < 1e-5
    assert arrays.error(biased(x, w, b), right(arrays, x, w) + arrays.take(b)) < 1e-5
    assert "b" in biased.run({"x": x, "w": w, "b": b})


def test_any_number_of_arrays(pool, arrays):
    @handlepool.graph
    def total(g, *tensors):
        return functools.reduce(g.add, tensors)

    given = [arrays.random(4, 4) for _ in range(5)]
    assert arrays.error(total(*given), sum(map(arrays.take, given))) < 1e-5
    assert arrays.error(total(*given[:2]), sum(map(arrays.take, given[:2]))) < 1e-5


def test_a_tuple_of_one_tensor_gives_a_tuple_and_a_list_of_outputs_of_one_an_array(pool, x):
    @handlepool.graph
    def alone(g, x):
        return (g.add(x, x),)

    @handlepool.graph(outputs=["y"])
    def named(g, x):
        g.add(x, x).set_name("y")

    assert type(alone(x)) is tuple
    assert isinstance(named(x), pool.driver.array_types)


def test_outputs_that_were_marked_need_no_return(pool, arrays, x):
    @handlepool.graph
    def both(g, x):
        g.add(x, x).set_output(True)
        g.mul(x, x).set_output(True)

    y, z = both(x)
    assert max(arrays.error(y, 2 * arrays.take(x)), arrays.error(z, arrays.take(x) ** 2)) < 1e-5


def test_an_argument_may_be_given_twice(pool, arrays, x):
    @handlepool.graph
    def product(g, a, b):
        return g.mul(a, b)

    assert arrays.error(product(x, x), arrays.take(x) ** 2) < 1e-5


def test_two_outputs_in_one_array(pool, arrays, x):
    @handlepool.graph
    def both(g, x):
        return g.add(x, x), g.mul(x, x)

    out = arrays.poisoned(*SHAPES["x"])
    with pytest.raises(ArgumentError, match="shares memory with another output"):
        both(x, out=(out, out))


# Bad input: each a typed error, before anything is launched


def unhashable(g, x, *, sizes=()):
    return g.add(x, x)


def nothing(g, x):
    g.add(x, x)


def text(g, x):
    return "y"


def tensor_and_none(g, x):
    return g.add(x, x), None


def raising(g, x):
    raise KeyError("inside")


def passed_through(g, x):
    return x


def unused(g, x, w):
    return g.add(x, x)


def twice_over(g, x):
    y = g.add(x, x)
    return y, y


def unmarked(g, x):
    y = g.add(x, x).set_output(True)
    return g.mul(y, y)


def unknown_kind(g, x):
    return g.reshape(x).set_dim([512])


def strange_mapping(g, x):
    return {"inputs": ["x"], "outputs": [g.add(x, x)], "out": 1}


def host_value(g, x):
    return g.scale(x, g.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True))


def without_inputs(g):
    return g.add(g.tensor(dim=[4], stride=[1]), g.tensor(dim=[4], stride=[1]))


def keyword_needed(g, x, *, times):
    return g.add(x, x)


BAD = {
    "a rank too low": (convolve, ArgumentError, "must have the same number of axes", lambda a: (a["x"][0], a["w"])),
    "channels that do not agree": (convolve, ArgumentError, "are no multiple", lambda a: (a["x"], a["w3"])),
    "groups that divide no filters": (convolve, ArgumentError, "do not divide 5 filters", lambda a: (a["x"], a["w52"])),
    "a type that cuDNN has not": (twice, ArrayTypeError, "complex64", lambda a: (a["complex"],)),
    "an empty array": (convolve, ArgumentError, "are no multiple", lambda a: (a["x"][:0], a["w3"])),
    "an array of another device": (twice, DeviceMismatchError, "device 1", lambda a: (a["far"],)),
    "a list": (twice, ArrayTypeError, "list", lambda a: ([1.0],)),
    "nothing": (twice, ArgumentError, "without arrays", lambda a: ()),
    "an array too few": (
        convolve,
        ArgumentError,
        "takes x, w, and was called with 1 arrays; pass w as well",
        lambda a: (a["x"],),
    ),
    "an array too many": (twice, ArgumentError, "takes x, and was called with 2 arrays", lambda a: (a["x"], a["w"])),
    "an array that no node uses": (unused, ArgumentError, r"argument 1.*'w' is used by no node", lambda a: (a["x"], a["w"])),
    "a function that returns nothing": (nothing, ArgumentError, "returned nothing", lambda a: (a["x"],)),
    "a function that returns no tensor": (text, ArgumentError, "returned 'y'", lambda a: (a["x"],)),
    "a tuple with no tensor in it": (tensor_and_none, ArgumentError, "returned .*None", lambda a: (a["x"],)),
    "a function that raises": (raising, ArgumentError, r"raised KeyError: 'inside'", lambda a: (a["x"],)),
    "an input that is an output": (passed_through, ArgumentError, "cannot be an output", lambda a: (a["x"],)),
    "an output named twice": (twice_over, ArgumentError, "named twice", lambda a: (a["x"],)),
    "a marked tensor that is no output": (unmarked, ArgumentError, "add.0::OUT_0.*set_output", lambda a: (a["x"],)),
    "a kind of node without a rule": (
        unknown_kind,
        GraphNotSupportedError,
        r"unknown_kind: no plan for reshape.0 over x FLOAT \(2, 4, 8, 8\) strides .*reshape",
        lambda a: (a["x"],),
    ),
    "a mapping with more in it": (
        strange_mapping,
        ArgumentError,
        "returned a mapping with 'inputs', 'outputs', 'out'",
        lambda a: (a["x"],),
    ),
    "a value from the host": (host_value, ArgumentError, r"scale.0::IN_1 is passed by value.*tensor_scalar", lambda a: (a["x"],)),
    "an array for a graph without parameters": (without_inputs, ArgumentError, "takes no arrays", lambda a: (a["x"],)),
    "a graph that was forgotten": (
        lambda x: x.shape,
        ArgumentError,
        "raised .* Its one parameter is the graph",
        lambda a: (a["x"],),
    ),
    "an array turned around": (twice, ArgumentError, "negative", lambda a: (a["x"][:, :, ::-1],)),
}


@pytest.fixture
def given(pool, arrays, x, w):
    with pool.driver.device(1), pool.driver.create_stream() as stream:
        far = arrays.random(2, 2)
        pool.driver.synchronize_stream(stream.ptr)
    return {
        "x": x,
        "w": w,
        "w3": arrays.random(6, 3, 3, 3),
        "w52": arrays.random(5, 2, 3, 3),
        "far": far,
        "complex": pool.driver.asarray(np.zeros(4, np.complex64)),
    }


def unlaunched(pool, error, match, call):
    """The call raises a typed error of ours and launches nothing."""
    before = pool.driver.calls["launch"]
    with pytest.raises(error, match=match) as raised:
        call()
    assert isinstance(raised.value, handlepool.HandlePoolError)
    assert pool.driver.calls["launch"] == before
    return raised.value


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_typed_error(pool, given, what):
    function, error, match, call = BAD[what]
    unlaunched(pool, error, match, lambda: handlepool.graph(function)(*call(given)))
    assert pool.stats()["plans_cached"] == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sizes": [1, 2]}, r"sizes=\[1, 2\], which cannot be hashed.*pass a tuple"),
        ({"size": 1}, "has no option size; it has sizes$"),
        ({"pool": None}, "has no option pool; it has sizes. Inside a branch it uses the pool of the branch"),
    ],
)
def test_a_bad_option(pool, x, options, match):
    unlaunched(pool, ArgumentError, match, lambda: handlepool.graph(unhashable)(x, **options))
    unlaunched(pool, ArgumentError, match, lambda: handlepool.graph(unhashable).plan_for(x, **options))


def test_an_option_that_is_missing(pool, x):
    unlaunched(pool, ArgumentError, "needs the option times", lambda: handlepool.graph(keyword_needed)(x))


def test_a_bad_out(pool, arrays, x, w):
    fn = handlepool.graph(convolve)
    rows = arrays.poisoned(6, 8, 8)
    for match, out in {
        r"must be float32 of shape \(2, 6, 8, 8\)": arrays.poisoned(2, 6, 8, 7),
        "out= of convolve is float16": Arrays(pool, "float16").poisoned(2, 6, 8, 8),
        "its elements overlap": np.lib.stride_tricks.as_strided(rows, (2, 6, 8, 8), (0, 256, 32, 4)),
        "has 1 outputs and out= holds 2": (arrays.poisoned(2, 6, 8, 8), arrays.poisoned(2, 6, 8, 8)),
    }.items():
        unlaunched(pool, ArgumentError, match, lambda out=out: fn(x, w, out=out))


@pytest.mark.parametrize(
    ("out", "error", "match"),
    [
        (lambda a: [1.0], ArrayTypeError, "convolve: out= is a float"),
        (lambda a: 1.0, ArrayTypeError, "convolve: out= is a float"),
        (lambda a: a["far"], DeviceMismatchError, "convolve: out= is on device 1"),
        (lambda a: a["x"][:0], ArgumentError, r"out= of convolve is float32 of shape \(0, "),
        (lambda a: (a["far"], a["x"]), DeviceMismatchError, r"convolve: out\[0\] is on device 1"),
    ],
)
def test_an_out_that_no_graph_takes_is_called_so(pool, given, out, error, match):
    fn = handlepool.graph(convolve)
    unlaunched(pool, error, match, lambda: fn(given["x"], given["w"], out=out(given)))


def test_plan_for_says_which_argument_cannot_be_taken(pool, given):
    fn, x, w = handlepool.graph(convolve), given["x"], given["w"]
    unlaunched(pool, DeviceMismatchError, "convolve: argument 1 is on device 1", lambda: fn.plan_for(x, given["far"]))
    unlaunched(pool, ArrayTypeError, "convolve: argument 1 is a float", lambda: fn.plan_for(x, 1.0))
    unlaunched(pool, ArgumentError, "out= of convolve is float32", lambda: fn.plan_for(x, w, out=x[:0]))


def test_a_limit_that_no_plan_meets(pool, x, w):
    error = unlaunched(
        pool,
        GraphNotSupportedError,
        r"convolve: no plan for conv2d \(conv_fprop\) over",
        lambda: handlepool.graph(convolve, workspace_limit=0)(x, w),
    )
    assert "workspace" in str(error)
    assert "x FLOAT (2, 4, 8, 8) strides (256, 64, 8, 1)" in str(error)


def test_a_refusal_is_remembered_and_another_error_is_not(pool, x, w):
    runs = []

    @handlepool.graph(workspace_limit=0)
    def refused(g, x, w):
        runs.append(1)
        return convolve(g, x, w)

    @handlepool.graph
    def failing(g, x):
        runs.append(1)
        raise ValueError("once")

    for _ in range(3):
        with pytest.raises(GraphNotSupportedError):
            refused(x, w)
    assert len(runs) == 1
    for _ in range(3):
        with pytest.raises(ArgumentError):
            failing(x)
    assert len(runs) == 4


# Building ahead, inspection, choice


def test_a_plan_says_what_it_is(pool, x, w):
    plan = handlepool.graph(convolve).plan_for(x, w)
    assert (plan.name, plan.device, plan.candidates, plan.engine) == ("convolve", 0, 1, "host_im2col")
    assert plan.workspace_size > 0
    assert '"conv2d"' in plan.graph
    assert "CONV_FPROP" in plan.graph
    assert pool.driver.calls["launch"] == 0


def test_a_plan_is_chosen_by_index(pool, x, w):
    fn = handlepool.graph(convolve)
    plan = fn.plan_for(x, w)
    chosen = plan.select(np.int64(0))
    assert chosen is not plan
    assert fn.plan_for(x, w) is chosen
    assert fn.options().plan_for(x, w) is chosen
    for index in (1, -1, True, "0", 0.0):
        unlaunched(pool, ArgumentError, "there is no plan .*; the index must be 0 to 0", lambda index=index: plan.select(index))
    assert fn.plan_for(x, w) is chosen


def test_a_plan_that_cannot_be_built_leaves_the_one_that_is_there(pool, x, w, monkeypatch):
    fn = handlepool.graph(convolve)
    plan = fn.plan_for(x, w)

    def refuse(*_, **settings):
        assert settings["plan_index"] == 0
        raise GraphNotSupportedError("not this one")

    pool.driver.compile = refuse
    unlaunched(pool, GraphNotSupportedError, "not this one", lambda: plan.select(0))
    assert fn.plan_for(x, w) is plan


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_building_ahead_needs_no_arrays(pool, layout):
    fn = handlepool.graph(convolve)
    specs = [ArraySpec(SHAPES["x"], "float32", layout), ArraySpec(SHAPES["w"], np.float32, layout)]
    before = pool.driver.memory_info()
    plan = fn.compile(*specs)
    assert pool.driver.memory_info() == before
    arrays = Arrays(pool, "float32", layout)
    x, w = arrays.random(*SHAPES["x"]), arrays.random(*SHAPES["w"])
    assert fn.plan_for(x, w) is plan is fn.compile(*specs)
    assert arrays.error(fn(x, w), right(arrays, x, w)) < 1e-5
    assert pool.stats()["plans_built"] == 1


def test_building_ahead_for_an_out_and_from_strides(pool, arrays, x, w):
    fn = handlepool.graph(convolve)
    out = arrays.poisoned(2, 6, 8, 8, layout="NHWC")
    fn.compile(*[ArraySpec(a.shape, a.dtype, a.strides) for a in (x, w)], out=ArraySpec(out.shape, "float32", "NHWC"))
    assert arrays.error(fn(x, w, out=out), right(arrays, x, w)) < 1e-5
    assert pool.stats()["plans_built"] == 1


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ArraySpec((2, -1), "float32"), ArgumentError, "give integers of 0 or more"),
        (lambda: ArraySpec((2, 2.0), "float32"), ArgumentError, "give integers of 0 or more"),
        (lambda: ArraySpec((2, 2), "float33"), ArrayTypeError, "float33"),
        (lambda: ArraySpec((2, 2), None), ArrayTypeError, "None"),
        (lambda: ArraySpec((2, 2), "float32", "CHWN"), ArgumentError, "layout='CHWN'"),
        (lambda: ArraySpec((2, 2), "float32", (4,)), ArgumentError, "1 strides for the 2 axes"),
        (lambda: handlepool.graph(twice).compile((2, 2)), ArrayTypeError, "argument 0 is a tuple"),
        (lambda: handlepool.graph(twice).compile(), ArgumentError, "without arrays"),
    ],
)
def test_a_bad_spec(pool, make, error, match):
    unlaunched(pool, error, match, make)


# The cache


def test_clearing_forgets_a_functions_own_plans_alone(pool, x, w):
    fn, other = handlepool.graph(convolve), handlepool.graph(twice)
    fn(x, w)
    fn.options(allow_tf32=False)(x, w)
    other(x)
    assert pool.stats()["plans_cached"] == 3
    fn.options(allow_tf32=False).cache_clear()
    assert pool.stats()["plans_cached"] == 1
    fn(x, w)
    other(x)
    assert pool.stats()["plans_built"] == 4
    pool.cache_clear()
    assert pool.stats()["plans_cached"] == 0


def test_clearing_forgets_what_was_refused(pool, x, w):
    function = handlepool.graph(convolve, workspace_limit=0)
    with pytest.raises(GraphNotSupportedError):
        function(x, w)
    runs = pool.driver.calls["compile"]
    for again in (0, 1):
        if again:
            function.cache_clear()
        with pytest.raises(GraphNotSupportedError):
            function(x, w)
        assert pool.driver.calls["compile"] == runs + again


def test_plans_are_counted(make_driver, arrays, x, w):
    with HandlePool(driver=make_driver(), plan_limit=2) as pool, pool.driver.create_stream():
        fn = handlepool.graph(twice)
        own = Arrays(pool)
        for size in (1, 2, 3, 3, 4):
            fn.prepare(pool.internals, (own.random(size),), None, {}).launch(pool.internals.slot())
        stats = pool.stats()
    assert (stats["plans_built"], stats["plans_cached"], stats["plans_evicted"]) == (4, 2, 2)
    assert stats["plan_build_microseconds"] > 0


def test_a_plan_keeps_no_array(pool, arrays):
    import weakref

    x = arrays.random(4)
    handlepool.graph(twice)(x)
    reference = weakref.ref(x)
    pool.driver.synchronize_stream(pool.driver.current_stream().ptr)
    del x
    assert reference() is None
