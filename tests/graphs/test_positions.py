"""Arrays are positional, all else is by keyword: what a call that mixes them up is told."""

import inspect

import pytest
from harness.arrays import Arrays, Tensor

import handlepool
from handlepool import ArgumentError, ArraySpec, ParallelStateExecutor, ParallelStates, SignatureError, ops

GRADIENTS = (handlepool.conv2d_input_grad, handlepool.conv2d_weight_grad)
ACTIVATIONS = tuple(getattr(ops, kind) for kind in ops.ACTIVATIONS)


@handlepool.graph
def conv(g, x, w, b, z=None, *, padding=1):
    y = g.bias(g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1]), b)
    return y if z is None else g.add(y, z)


@handlepool.graph(inputs=["conv::weight", "x"])
def reordered(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv")


@handlepool.graph
def total(g, *tensors, **options):
    return g.add(*tensors)


class Given:
    def __init__(self, pool):
        arrays = Arrays(pool)
        self.pool, self.states = pool, ParallelStates(2, pool=pool)
        self.x, self.w, self.b = arrays.random(1, 4, 6, 6), arrays.random(4, 4, 3, 3), arrays.random(1, 4, 1, 1)
        self.bias = arrays.random(4)

    def ways(self):
        """Of calling a function."""

        def in_fork(function, *args, **kwargs):
            with self.states.fork() as fork:
                return fork.run(function, *args, **kwargs)

        def as_task(function, *args, **kwargs):
            with ParallelStateExecutor(1, pool=self.pool) as executor:
                return executor.submit(function, *args, **kwargs).result()

        return {"call": lambda f, *args, **kwargs: f(*args, **kwargs), "fork": in_fork, "task": as_task}


@pytest.fixture
def given(each_pool):
    return Given(each_pool)


@pytest.mark.parametrize("way", ["call", "fork", "task"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("z", "conv was given z= by keyword, but arrays are positional; pass z as parameter 4 of x, w, b, z"),
        ("b", "conv was given b= by keyword, but arrays are positional; pass b as parameter 3 of x, w, b, z"),
        ("bias", "conv was given bias= by keyword, but arrays are positional; pass the arrays x, w, b, z"),
        ("padding", r"conv was given padding=<.*rray of shape \(1, 4, 6, 6\), float32>: an option is a part of the plan's key"),
    ],
)
def test_an_array_that_is_passed_by_keyword_is_told_its_place(given, way, names, message):
    arrays = (given.x, given.w) if names == "b" else (given.x, given.w, given.b)
    with pytest.raises(ArgumentError, match=message):
        given.ways()[way](conv, *arrays, **{names: given.x})
    assert given.pool.stats()["plans_built"] == 0


def test_the_place_is_told_where_inputs_are_named_where_there_are_any_number_and_beside_a_dictionary(given):
    for function, args, options, message in (
        (reordered, [given.w], {"x": given.x}, "pass x as parameter 2 of conv::weight, x"),
        (reordered, [given.x], {"w": given.w}, "arrays are positional; pass the arrays conv::weight, x"),
        (
            total,
            [given.x],
            {"x": given.x},
            r"total was given x= by keyword, but arrays are positional; pass the arrays \*tensors",
        ),
        (
            conv.run,
            [{"x": given.x}],
            {"b": given.b},
            "conv.run was given b= by keyword; put the array into the dictionary",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            function(*args, **options)


@pytest.mark.parametrize("array", [Tensor(), ArraySpec((1, 4, 1, 1), "float32")])
def test_what_can_be_hashed_is_told_so_too(given, array):
    """As torch's tensors, each of which would be a key of its own."""
    for call in (conv, conv.plan_for, conv.compile):
        with pytest.raises(ArgumentError, match="arrays are positional; pass b as parameter 3 of x, w, b, z"):
            call(given.x, given.w, b=array)
    assert given.pool.stats()["plans_cached"] == 0


def test_what_only_has_a_shape_and_a_type_may_be_an_option(given):
    class Geometry:
        shape, dtype = (1, 2), "float32"

    @handlepool.graph
    def scaled(g, x, *, geometry):
        return g.add(x, x)

    assert scaled(given.x, geometry=Geometry()).shape == given.x.shape


def positional(function, given):
    """What a function takes by position."""
    if function in GRADIENTS:
        return (given.x, given.w, given.x.shape) if function is GRADIENTS[0] else (given.x, given.x, given.w.shape)
    return (given.x,) if function in ACTIVATIONS else (given.x, given.w)


@pytest.mark.parametrize("way", ["call", "fork", "task"])
@pytest.mark.parametrize("function", [handlepool.conv2d, *GRADIENTS, *ACTIVATIONS])
def test_what_comes_after_the_positional_arguments_is_told_that_it_is_a_keyword(given, function, way):
    args, name = positional(function, given), function.__name__
    by_keyword = "bias" if function is handlepool.conv2d else "out"
    first = "out" if function in ACTIVATIONS else "stride"
    for extra, meant in ((given.bias, by_keyword), (1, first), (None, first)):
        with pytest.raises(SignatureError) as caught:
            given.ways()[way](function, *args, extra)
        assert isinstance(caught.value, TypeError)
        assert f": {meant} is a keyword, as in {name}(" in str(caught.value)
        assert f", {meant}=...)" in str(caught.value)


def test_conv2d_says_that_bias_is_a_keyword(given):
    message = (
        r"conv2d takes x, w by position, and was given <.*rray of shape \(4,\), float32> as a further argument: bias is a "
        r"keyword, as in conv2d\(x, w, bias=\.\.\.\)\. The keywords are stride, padding, .* pool$"
    )
    for function in (handlepool.conv2d, ops.conv2d_plan):
        with pytest.raises(TypeError, match=message):
            function(given.x, given.w, given.bias)


@pytest.mark.parametrize("function", [handlepool.conv2d, ops.conv2d_plan, *GRADIENTS, *ACTIVATIONS])
def test_the_signature_says_what_is_by_keyword(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()} - {inspect.Parameter.VAR_KEYWORD}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
