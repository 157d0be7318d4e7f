"""Arrays by reference: inputs= and outputs=, tensors that the function declares, and `run`, on the host driver."""

import numpy as np
import pytest
from harness.arrays import Arrays

import handlepool
from handlepool import ArgumentError, ArrayTypeError, DeviceMismatchError, HandlePoolError
from handlepool.testing.reference import conv2d as reference

UNIT = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
X, W, Y = (2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 8, 8)


class Given(Arrays):
    """An image, a filter of other rank order, and what is right for them."""

    def __init__(self, pool):
        super().__init__(pool)
        self.x, self.w = self.random(*X), self.random(*W)
        self.right = reference(self.take(self.x), self.take(self.w), padding=1)

    def is_right(self, y):
        return self.error(y, self.right) < 1e-5


@pytest.fixture
def given(pool):
    return Given(pool)


def convolve(g, x, w):
    return g.conv_fprop(x, w, name="conv2d", **UNIT)


def marked(g, x, w):
    g.conv_fprop(x, w, name="conv2d", **UNIT).set_output(True).set_name("conv_out")


def squares(g, x):
    return g.mul(x, x).set_name("square"), g.add(x, x)


# In the order of inputs=


def test_the_function_runs_once_where_the_guess_is_right_and_twice_where_not(given):
    for inputs, arrays, times in (
        (["conv2d::0", "w"], (given.x, given.w), 1),
        (["w", "x"], (given.w, given.x), 1),
        (["conv2d::1", "conv2d::0"], (given.w, given.x), 2),
        (["conv2d::weight", "x"], (given.w, given.x), 1),
    ):
        runs = []

        @handlepool.graph(inputs=inputs)
        def fn(g, x, w, runs=runs):
            runs.append(1)
            return convolve(g, x, w)

        assert given.is_right(fn(*arrays))
        assert len(runs) == times


def test_a_wrong_number_of_arrays(given):
    fn = handlepool.graph(convolve, inputs=["x", "w"])
    with pytest.raises(ArgumentError, match="takes 2 arrays, for 'x', 'w', and was called with 1"):
        fn(given.x)


def test_inputs_of_any_number_of_parameters_cannot_be_named(pool):
    @handlepool.graph(inputs=["add.0::a", "add.0::b"])
    def total(g, *tensors):
        return g.add(*tensors)

    with pytest.raises(ArgumentError, match=r"takes \*tensors, .* give .* a parameter for each tensor"):
        total.compile(*[handlepool.ArraySpec((4,), "float32")] * 2)


def test_a_function_that_names_its_tensors_otherwise_for_other_shapes(given):
    @handlepool.graph(inputs=["first", "second"])
    def fickle(g, x, w):
        names = ("second", "first") if x.get_dim() == list(X) else ("first", "second")
        x.set_name(names[0])
        w.set_name(names[1])
        return convolve(g, x, w)

    with pytest.raises(ArgumentError, match="gives its tensors other names for other shapes"):
        fickle(given.x, given.w)


def test_outputs_in_an_order_of_their_own(given):
    plain = handlepool.graph(squares)(given.x)
    turned = handlepool.graph(lambda g, x: squares(g, x) and None, outputs=["add.0::OUT_0", "square"])(given.x)
    assert [given.take(y).sum() for y in turned] == [given.take(y).sum() for y in reversed(plain)]


def test_outputs_and_a_returned_tensor_do_not_go_together(given):
    with pytest.raises(ArgumentError, match=r"returned .* and its decorator names outputs="):
        handlepool.graph(convolve, outputs=["conv2d::Y"])(given.x, given.w)


def test_an_intermediate_tensor_may_be_an_output_beside_the_last(given):
    @handlepool.graph(outputs=["conv2d::Y", "relu.0::OUT_0"])
    def both(g, x, w):
        g.relu(convolve(g, x, w))

    y, z = both(given.x, given.w)
    assert given.is_right(y)
    assert given.error(z, np.maximum(given.right, 0)) < 1e-5


# Tensors that the function declares itself


def symbolic(g, *, strides=True, kind=None):
    import cudnn

    dtype = None if kind is None else getattr(cudnn.data_type, kind)
    x = g.tensor(name="X", dim=list(X), stride=[256, 64, 8, 1] if strides else None, data_type=dtype)
    w = g.tensor(name="W", dim=list(W), stride=[36, 9, 3, 1])
    g.conv_fprop(x, w, name="conv2d", **UNIT).set_output(True).set_name("Y")


@pytest.mark.parametrize("options", [{}, {"strides": False}, {"kind": "FLOAT"}], ids=str)
def test_symbolic_tensors_take_their_arrays(given, options):
    fn = handlepool.graph(symbolic, inputs=["conv2d::image", "W"])
    assert given.is_right(fn(given.x, given.w, **options))
    assert given.is_right(fn.run({"W": given.w, "X": given.x}, **options)["Y"])


def test_strides_that_were_left_open_are_the_arrays(given):
    fn = handlepool.graph(symbolic, inputs=["X", "W"])
    last = given.put(given.take(given.x), "NHWC")
    assert given.is_right(fn(last, given.w, strides=False))
    with pytest.raises(
        ArgumentError, match=r"has strides \(256, 1, 32, 4\) elements; tensor 'X' was declared with \(256, 64, 8, 1\)"
    ):
        fn(last, given.w)


def test_an_array_of_another_shape_or_type_than_declared(given):
    fn = handlepool.graph(symbolic, inputs=["X", "W"])
    with pytest.raises(
        ArgumentError, match=r"argument 0 is of shape \(1, 4, 8, 8\); tensor 'X' was declared with \(2, 4, 8, 8\)"
    ):
        fn(given.x[:1], given.w)
    with pytest.raises(ArrayTypeError, match="argument 0 is float32; tensor 'X' was declared as HALF"):
        fn(given.x, given.w, kind="HALF")
    with pytest.raises(ArrayTypeError, match="the array for 'W' is float32; tensor 'W' was declared as HALF"):
        fn.options(io_dtype="float16").run({"X": given.put(given.take(given.x)).astype("float16"), "W": given.w})


def mixed(g, x):
    return convolve(g, x, g.tensor(name="W", dim=list(W), stride=[36, 9, 3, 1]))


def test_symbolic_tensors_beside_parameters(given):
    assert given.is_right(handlepool.graph(mixed, inputs=["W", "x"])(given.w, given.x))
    with pytest.raises(ArgumentError, match=r"mixed needs an array for conv2d::weight \(W\)"):
        handlepool.graph(mixed)(given.x)


def test_the_function_itself_may_name_inputs_and_outputs(given):
    @handlepool.graph
    def own(g):
        x, w = g.tensor(name="X", dim=list(X)), g.tensor(name="W", dim=list(W), uid=9)
        return {"inputs": [9, x], "outputs": [convolve(g, x, w)]}

    assert given.is_right(own(given.w, given.x))


def test_inputs_are_named_in_one_place(given):
    own = handlepool.graph(lambda g, x, w: {"inputs": [w, x], "outputs": [convolve(g, x, w)]}, inputs=["x", "w"])
    with pytest.raises(ArgumentError, match="but no key that the decorator sets"):
        own(given.x, given.w)


# run


@pytest.mark.parametrize("image", ["x", "conv2d::image", "conv2d::0", 1])
@pytest.mark.parametrize("weight", ["w", "conv2d::weight", "conv2d::1", 2])
def test_run_returns_its_dictionary_with_the_outputs_added(given, image, weight):
    arrays = {weight: given.w, image: given.x}
    made = handlepool.graph(convolve).run(arrays)
    assert made is arrays
    assert list(made) == [weight, image, "conv2d::Y"]
    assert given.is_right(made["conv2d::Y"])


def test_run_writes_to_the_outputs_that_it_is_given_and_finds_its_plan_again(pool, given):
    fn, built = handlepool.graph(convolve), []
    for layout in ("NCHW", "NHWC", "NHWC"):
        y = given.poisoned(*Y, layout=layout)
        made = fn.run({"conv2d::Y": y, "w": given.w, "x": given.x})
        assert made["conv2d::Y"] is y
        assert len(made) == 3
        assert given.is_right(y)
        built.append(pool.stats()["plans_built"])
    assert built[1] == built[2]


def test_run_names_outputs_as_they_were_named(given):
    both = handlepool.graph(squares).run({"x": given.x})
    assert list(both) == ["x", "square", "add.0::OUT_0"]
    named = handlepool.graph(marked).run({"x": given.x, "w": given.w})
    assert list(named) == ["x", "w", "conv_out"]
    other = handlepool.graph(marked, outputs=["conv2d::Y"]).run({"x": given.x, "w": given.w})
    assert list(other) == ["x", "w", "conv2d::Y"]
    assert given.is_right(named["conv_out"])
    assert given.is_right(other["conv2d::Y"])


def test_run_with_one_of_two_outputs_given(given):
    out = given.poisoned(*X)
    made = handlepool.graph(squares).run({"x": given.x, "add.0::OUT_0": out})
    assert list(made) == ["x", "add.0::OUT_0", "square"]
    assert given.error(out, 2 * given.take(given.x)) < 1e-5
    assert given.error(made["square"], given.take(given.x) ** 2) < 1e-5


def test_run_with_tensor_objects_of_an_earlier_build(given):
    kept = []

    @handlepool.graph
    def keeping(g, x, w):
        kept[:] = x, w, convolve(g, x, w)
        return kept[2]

    keeping.compile(given.x, given.w)
    x, w, y = kept
    out = given.poisoned(*Y)
    made = keeping.run({w: given.w, x: given.x, y: out})
    assert made[y] is out
    assert given.is_right(out)


BAD = {
    "an input that is missing": (
        ArgumentError,
        r"needs an array for conv2d::weight \(w\).*The graph has conv2d::image \(x\)",
        lambda a: {"x": a.x},
    ),
    "all inputs missing but an output": (
        ArgumentError,
        "needs an array for conv2d::image",
        lambda a: {"conv2d::Y": a.poisoned(*Y)},
    ),
    "an unknown name": (ArgumentError, "no tensor of the graph is 'weight'", lambda a: {"x": a.x, "weight": a.w}),
    "an unknown port": (ArgumentError, "is 'conv2d::3'", lambda a: {"x": a.x, "w": a.w, "conv2d::3": a.w}),
    "two arrays for one tensor": (
        ArgumentError,
        "two arrays for one tensor: 'conv2d::0'",
        lambda a: {"x": a.x, "conv2d::0": a.x, "w": a.w},
    ),
    "two arrays for one output": (
        ArgumentError,
        "two arrays for one tensor",
        lambda a: {"x": a.x, "w": a.w, "conv2d::Y": a.poisoned(*Y), 3: a.poisoned(*Y)},
    ),
    "an out of another shape": (ArgumentError, "out= of convolve", lambda a: {"x": a.x, "w": a.w, "conv2d::Y": a.x}),
    "an out over an input": (ArgumentError, "shares memory", lambda a: {"x": a.x, "w": a.w[:4], "conv2d::Y": a.x[:, :4]}),
    "a list for an array": (ArrayTypeError, "list", lambda a: {"x": [1.0], "w": a.w}),
    "None for an array": (ArrayTypeError, "NoneType", lambda a: {"x": a.x, "w": a.w, "conv2d::Y": None}),
    "an empty array": (ArgumentError, "out= of convolve", lambda a: {"x": a.x[:0], "w": a.w, "conv2d::Y": a.poisoned(*Y)}),
    "an array of another device": (DeviceMismatchError, "device 1", lambda a: {"x": a.far, "w": a.w}),
    "no arrays": (ArgumentError, "without arrays", lambda a: {}),
    "no dictionary": (ArgumentError, "takes a dictionary with an array for each reference", lambda a: [a.x, a.w]),
    "no reference": (ArgumentError, "is no reference", lambda a: {"x": a.x, None: a.w}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_of_run_is_a_typed_error(pool, given, what):
    with pool.driver.device(1), pool.driver.create_stream() as stream:
        given.far = given.random(*X)
        pool.driver.synchronize_stream(stream.ptr)
    error, match, make = BAD[what]
    arrays = make(given)
    names = list(arrays)
    with pytest.raises(error, match=match) as raised:
        handlepool.graph(convolve).run(arrays)
    assert isinstance(raised.value, HandlePoolError)
    assert pool.driver.calls["launch"] == 0
    assert len(arrays) == len(names)


def test_an_array_for_an_intermediate_tensor_and_an_output_among_the_arrays_of_a_call(given):
    fused = handlepool.graph(lambda g, x, w: g.relu(convolve(g, x, w)))
    with pytest.raises(ArgumentError, match="'conv2d::Y' is made by the graph and is no output"):
        fused.run({"x": given.x, "w": given.w, "conv2d::Y": given.poisoned(*Y)})
    with pytest.raises(ArgumentError, match="argument 2: tensor 'conv2d::Y' is an output; pass its array as out="):
        handlepool.graph(convolve, inputs=["x", "w", "conv2d::Y"])(given.x, given.w, given.poisoned(*Y))
