"""Every node that the host driver evaluates, compiled and launched on one of its streams, against a reference in float64.

Below the rule of guarantee 18, which takes fewer graphs through `handlepool.graph`: the table is docs/nodes.md.
"""

import cudnn
import numpy as np
import pytest
from harness.insides import cudnn_binding
from harness.node_graphs import compiled_and_run, graph_of, placed
from harness.node_references import (
    ACTIVATIONS,
    ATTENTION,
    CONVOLUTIONS,
    MATMUL,
    POINTWISE,
    REDUCTIONS,
    Windows,
    concatenated,
    reshaped,
    transposed,
    viewed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from node_table import SAMPLES, makers

import handlepool
from handlepool.drivers.host import evaluator
from handlepool.drivers.host.pointwise import OPERATIONS
from handlepool.errors import ArgumentError, GraphNotSupportedError, HandlePoolError

ROUNDING = {"float16": 2**-10, "float32": 2**-19, "float64": 2**-46}
"""Of a result, or of the sums that it was made of: a few roundings of float32 or float64, and that to float16."""
DTYPES = st.sampled_from([np.dtype(name) for name in ROUNDING])


def layouts(rank):
    """How an array lies: the order of its axes in memory, and whether with gaps."""
    return st.tuples(st.permutations(range(rank)), st.booleans())


def draw_array(data, shape, dtype, values="any"):
    """An array of a drawn layout, and the same in float64."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    made = {
        "any": lambda: rng.standard_normal(shape) * 2,
        "positive": lambda: rng.uniform(0.2, 4, shape),
        "angles": lambda: rng.uniform(-1.4, 1.4, shape),
        "factors": lambda: rng.choice([-1, 0, 1], shape, p=[0.45, 0.1, 0.45]) * np.exp(rng.uniform(-0.01, 0.01, shape)),
        "whole": lambda: rng.integers(-1, 2, shape).astype(np.float64),
    }[values]()
    order, gap = data.draw(layouts(len(shape)))
    array = placed(made, dtype, order, gap)
    return array, array.astype(np.float64)


def shapes(least=1, most=4):
    return st.lists(st.integers(1, 4), min_size=least, max_size=most).map(tuple)


def assert_close(actual, expected, dtype, magnitude=None):
    """Each element within the rounding of its own size, or of a given one."""
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    limit = ROUNDING[dtype.name] * np.maximum(np.abs(expected), 1 if magnitude is None else np.maximum(magnitude, 1))
    assert (np.abs(actual - expected) <= limit).all(), np.abs(actual - expected).max()


# Pointwise operations


@pytest.mark.parametrize("name", sorted(POINTWISE))
@settings(max_examples=15, deadline=None)
@given(shape=shapes(), dtype=DTYPES, data=st.data())
def test_a_pointwise_operation_is_its_reference_in_any_shape_type_and_layout(name, shape, dtype, data):
    reference = POINTWISE[name]
    parameters = dict(reference.parameters or {})
    if name == "gen_index":
        parameters["axis"] = data.draw(st.integers(0, len(shape) - 1))
    whole = data.draw(st.integers(0, reference.inputs - 1))  # the others may repeat along some axes
    arrays = []
    for place in range(reference.inputs):
        its = [data.draw(st.sampled_from([1, extent])) if place != whole else extent for extent in shape]
        arrays.append(draw_array(data, its, dtype, reference.values))
    result = compiled_and_run(lambda g, *x: getattr(g, name)(*x, **parameters), *(array for array, _ in arrays))
    # A gradient's terms are as large as what it is made of, and may cancel each other.
    largest = np.max([np.broadcast_to(np.abs(x), shape) for _, x in arrays], axis=0) if name.endswith("_backward") else None
    expected = np.broadcast_to(reference.compute(*(x for _, x in arrays), **parameters), shape)
    assert_close(result, expected, dtype, largest)


def test_every_pointwise_operation_of_the_frontend_has_a_reference_and_is_evaluated():
    pointwise = {name for name, made in makers().items() if made.node.node_type.name == "POINTWISE"}
    assert pointwise == set(POINTWISE) == set(OPERATIONS)
    assert len(pointwise) > 50


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_without_parameters_has_the_usual_ones(name):
    defaults = {"leaky_relu": {"negative_slope": 0.3}, "swish": {"swish_beta": 1.0}}.get(name, {})
    x, loss = (placed(np.random.default_rng(seed).standard_normal((3, 5)), np.float64) for seed in (0, 1))
    given_ = defaults if name == "leaky_relu" else {}
    for suffix, inputs in (("", [x]), ("_backward", [loss, x])):
        result = compiled_and_run(lambda g, *x, suffix=suffix: getattr(g, name + suffix)(*x, **given_), *inputs)
        assert_close(result, POINTWISE[name + suffix].compute(*inputs, **defaults), x.dtype)


# Reductions and products


@settings(max_examples=40, deadline=None)
@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dtype=DTYPES,
    kind=st.sampled_from(["plain", "causal", "bias"]),
    data=st.data(),
)
def test_attention_is_its_reference_in_any_layout(heads, rows, sizes, dtype, kind, data):
    (queries, keys), (size, values) = rows, sizes
    shapes = [(*heads, queries, size), (*heads, keys, size), (*heads, keys, values)]
    shapes += [tuple(data.draw(st.sampled_from([1, extent])) for extent in (*heads, queries, keys))] if kind == "bias" else []
    arrays = [draw_array(data, shape, dtype) for shape in shapes]

    def build(g, q, k, v, *bias):
        more = {"bias": bias[0]} if bias else {}
        return g.sdpa(q, k, v, attn_scale=0.4, use_causal_mask=kind == "causal", generate_stats=False, **more)[0]

    result = compiled_and_run(build, *(array for array, _ in arrays))
    q, k, v, *bias = (x for _, x in arrays)
    expected = ATTENTION.compute(q, k, v, 0.4, kind == "causal", *bias)
    assert_close(result, expected, dtype, np.full(expected.shape, 30 * np.abs(v).max()))


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@settings(max_examples=25, deadline=None)
@given(shape=shapes(most=5), dtype=DTYPES, data=st.data())
def test_a_reduction_is_its_reference_over_any_axes(name, shape, dtype, data):
    array, x = draw_array(data, shape, dtype, "factors" if "MUL" in name else data.draw(st.sampled_from(["any", "whole"])))
    kept = [data.draw(st.sampled_from([1, extent])) for extent in shape]
    mode = getattr(cudnn.reduction_mode, name)
    result = compiled_and_run(lambda g, x: g.reduction(x, mode=mode).set_dim(kept), array)
    expected = REDUCTIONS[name].compute(x, kept)
    assert_close(result, expected, dtype, REDUCTIONS["NORM1"].compute(x, kept) + 8 * np.abs(expected))


def test_every_mode_of_the_frontends_reductions_is_evaluated():
    modes = {name for name in cudnn.reduction_mode.__members__ if name != "NOT_SET"}
    assert modes == set(REDUCTIONS) == set(evaluator.REDUCTIONS)


@settings(max_examples=80, deadline=None)
@given(batch=shapes(0, 2), inner=st.tuples(*[st.integers(1, 7)] * 3), dtype=DTYPES, data=st.data())
def test_a_product_is_its_reference_in_batches_that_may_repeat(batch, inner, dtype, data):
    rows, terms, columns = inner
    batches = [[data.draw(st.sampled_from([1, extent])) for extent in batch] for _ in range(2)]
    (a, wide_a), (b, wide_b) = (
        draw_array(data, (*its, *matrix), dtype) for its, matrix in zip(batches, ((rows, terms), (terms, columns)), strict=True)
    )
    result = compiled_and_run(lambda g, a, b: g.matmul(a, b), a, b)
    assert_close(result, MATMUL.compute(wide_a, wide_b), dtype, MATMUL.compute(np.abs(wide_a), np.abs(wide_b)) * terms)


# What only moves

EXACT = st.sampled_from([np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int32", "int64")])


def factors(count, data):
    """A shape of as many elements."""
    shape = []
    while count > 1 and len(shape) < 4:
        part = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        shape.append(part)
        count //= part
    return (*shape, count)


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), dtype=EXACT, data=st.data())
def test_a_logical_reshape_keeps_the_order_of_indices(shape, dtype, data):
    array, x = draw_array(data, shape, dtype)
    new, mode = factors(x.size, data), cudnn_binding().reshape_mode.LOGICAL  # public nowhere
    result = compiled_and_run(lambda g, x: g.reshape(x, reshape_mode=mode).set_dim(list(new)), array)
    assert (result == reshaped(x, new)).all()


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), dtype=EXACT, data=st.data())
def test_any_other_reshape_is_a_view_of_the_same_memory(shape, dtype, data):
    order = data.draw(st.permutations(range(len(shape))))
    array = placed(np.random.default_rng(0).integers(-9, 9, shape), dtype, order)
    new = factors(array.size, data)
    turned = data.draw(st.permutations(range(len(new))))
    strides = [step // array.itemsize for step in placed(np.zeros(new), dtype, turned).strides]
    result = compiled_and_run(lambda g, x: g.reshape(x).set_dim(list(new)).set_stride(strides), array)
    assert (result == viewed(array.astype(float), [step // array.itemsize for step in array.strides], new, strides)).all()


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), dtype=EXACT, data=st.data())
def test_a_transpose_turns_the_axes_and_leaves_the_order_in_memory(shape, dtype, data):
    order, permutation = (data.draw(st.permutations(range(len(shape)))) for _ in range(2))
    array = placed(np.random.default_rng(0).integers(-9, 9, shape), dtype, order)
    _, _, y = graph_of(lambda g, x: g.transpose(x, permutation=permutation), [array])
    assert [step for step, extent in zip(y.stride, y.dim, strict=True) if extent > 1] == [
        array.strides[axis] // array.itemsize for axis in permutation if shape[axis] > 1
    ]
    result = compiled_and_run(lambda g, x: g.transpose(x, permutation=permutation), array)
    assert (result == transposed(array.astype(float), permutation)).all()


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), count=st.integers(1, 4), dtype=EXACT, data=st.data())
def test_a_concatenation_puts_arrays_behind_each_other(shape, count, dtype, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    its = [(*shape[:axis], data.draw(st.integers(1, 3)), *shape[axis + 1 :]) for _ in range(count)]
    arrays = [draw_array(data, each, dtype) for each in its]
    place = data.draw(st.sampled_from([None, *range(count)]))
    result = compiled_and_run(
        lambda g, *x: g.concatenate(inputs=list(x), axis=axis, in_place_index=place), *(array for array, _ in arrays)
    )
    assert (result == concatenated(*(x for _, x in arrays), axis=axis)).all()


# Convolutions


@st.composite
def convolutions(draw):
    """Shapes of image and filters in one to three dimensions, and the windows."""
    rank = draw(st.integers(1, 3))
    most = {1: 6, 2: 3, 3: 2}[rank]

    def entries(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * rank))

    taps, dilation = entries(1, min(3, most)), entries(1, 2)
    windows = Windows(entries(0, 2), entries(0, 2), entries(1, 3), dilation, draw(st.booleans()))
    size = [
        max(1, (tap - 1) * gap + 1 + extra - low - high)
        for tap, gap, extra, low, high in zip(taps, dilation, entries(0, most), windows.before, windows.after, strict=True)
    ]
    groups, width, each = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return (draw(st.integers(1, 2)), groups * width, *size), (groups * each, width, *taps), windows


def options(windows):
    modes = cudnn_binding().convolution_mode  # public nowhere
    return {
        "pre_padding": list(windows.before),
        "post_padding": list(windows.after),
        "stride": list(windows.stride),
        "dilation": list(windows.dilation),
        "convolution_mode": modes.CONVOLUTION if windows.flipped else modes.CROSS_CORRELATION,
    }


@pytest.mark.parametrize("kind", sorted(CONVOLUTIONS))
@settings(max_examples=60, deadline=None)
@given(geometry=convolutions(), dtype=DTYPES, data=st.data())
def test_a_convolution_in_one_two_and_three_dimensions_is_its_reference(kind, geometry, dtype, data):
    image, filters, windows = geometry
    result = (image[0], filters[0], *windows.extents(image[2:], filters[2:]))
    given_, shape = {
        "conv_fprop": ((image, filters), None),
        "conv_dgrad": ((result, filters), image),
        "conv_wgrad": ((image, result), filters),
    }[kind]
    (a, wide_a), (b, wide_b) = (draw_array(data, each, dtype) for each in given_)

    def build(g, a, b):
        y = getattr(g, kind)(a, b, **options(windows))
        return y if shape is None else y.set_dim(list(shape))

    declared = () if shape is None else (shape,)
    expected, magnitude = (
        CONVOLUTIONS[kind].compute(windows, *each, *declared) for each in ((wide_a, wide_b), (np.abs(wide_a), np.abs(wide_b)))
    )
    assert_close(compiled_and_run(build, a, b), expected, dtype, 8 * magnitude)


# Chains, and what is refused


def test_nodes_follow_each_other_through_tensors_that_no_array_holds():
    x, b = (
        placed(np.random.default_rng(seed).standard_normal(shape), np.float32) for seed, shape in ((0, (2, 3, 4)), (1, (2, 4, 3)))
    )
    logical = cudnn_binding().reshape_mode.LOGICAL

    def softmax(g, x, b):
        largest = g.reduction(x, mode=cudnn.reduction_mode.MAX).set_dim([2, 3, 1])
        powers = g.exp(g.sub(x, largest))
        shares = g.div(powers, g.reduction(powers, mode=cudnn.reduction_mode.ADD).set_dim([2, 3, 1]))
        both = g.concatenate(inputs=[g.matmul(shares, b), g.transpose(g.matmul(shares, b), permutation=[0, 2, 1])], axis=0)
        return g.reshape(both, reshape_mode=logical).set_dim([6, 6])

    wide, other = x.astype(np.float64), b.astype(np.float64)
    shares = np.exp(wide) / np.exp(wide).sum(axis=2, keepdims=True)
    product = np.einsum("bij,bjk->bik", shares, other)
    expected = np.concatenate([product, product.swapaxes(1, 2)]).reshape(6, 6)
    for seed in range(10):
        assert_close(compiled_and_run(softmax, x, b, seed=seed), expected, x.dtype, 8)


UNKNOWN = sorted(set(makers()) - set(SAMPLES))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_node_that_the_host_does_not_know_is_a_typed_error_with_its_name(kind):
    made = makers()[kind]
    graph, operands, _ = made.operands()
    with pytest.raises(GraphNotSupportedError, match=rf"'it' \({made.node.node_type.name.lower()}\): the host driver cannot"):
        evaluator.plan(graph, operands)


X = placed(np.ones((2, 3, 4)), np.float32)
VIEWED = "is a view of memory"
REFUSED = {
    "a reduction without a mode": (lambda g, x: g.reduction(x, name="it").set_dim([1, 1, 1]), ArgumentError, "has no mode"),
    "a reduction of no mode": (
        lambda g, x: g.reduction(x, mode=cudnn.reduction_mode.NOT_SET, name="it").set_dim([1, 1, 1]),
        ArgumentError,
        "has no mode",
    ),
    "a reduction by groups": (
        lambda g, x: g.reduction(x, g.relu(x), mode=cudnn.reduction_mode.ADD, name="it").set_dim([1, 1, 1]),
        GraphNotSupportedError,
        "has no group_offset",
    ),
    "a reshape to more": (lambda g, x: g.reshape(x, name="it").set_dim([5, 5]), ArgumentError, "as many elements"),
    "a reshape to nothing": (lambda g, x: g.reshape(x, name="it"), ArgumentError, "output undeclared"),
    "a view of what cuDNN lays out": (
        lambda g, x: g.reshape(g.relu(x), name="it").set_dim([24]),
        GraphNotSupportedError,
        VIEWED,
    ),
    "a view with gaps": (
        lambda g, x: g.reshape(x, name="it").set_dim([24]).set_stride([2]),
        GraphNotSupportedError,
        VIEWED,
    ),
    "an axis twice": (
        lambda g, x: g.transpose(x, permutation=[0, 1, 1], name="it"),
        ArgumentError,
        r"each of the axes 0 to 2 once",
    ),
    "an axis that is none": (
        lambda g, x: g.transpose(x, permutation=[0, 1, 0.5], name="it"),
        ArgumentError,
        "each of the axes 0",
    ),
    "no permutation": (lambda g, x: g.transpose(x, name="it"), ArgumentError, "permutation=None does not fit"),
    "a concatenation of unlike arrays": (
        lambda g, x: g.concatenate(inputs=[x, g.transpose(x, permutation=[0, 2, 1])], axis=0, name="it"),
        ArgumentError,
        r"\(2, 3, 4\), \(2, 4, 3\) cannot be joined along axis 0",
    ),
    "a concatenation of nothing": (lambda g, x: g.concatenate(axis=0, name="it"), ArgumentError, "axis=0 is none of its 0 axes"),
    "a concatenation along no axis": (
        lambda g, x: g.concatenate(inputs=[x, x], axis=-1, name="it"),
        ArgumentError,
        "axis=-1 is none of its 3 axes",
    ),
    "a concatenation in place of nothing": (
        lambda g, x: g.concatenate(inputs=[x, x], axis=0, in_place_index=2, name="it"),
        ArgumentError,
        "in_place_index=2 is none of its 2 inputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_result_is_a_typed_error_with_the_nodes_name(case):
    build, kind, problem = REFUSED[case]
    with pytest.raises(kind, match=problem) as refusal:
        compiled_and_run(build, X)
    assert "node 'it' (" in str(refusal.value)


def among_others(g, x):
    return g.relu(g.reduction(x, mode=cudnn.reduction_mode.ADD, name="it").set_dim([1, 1, 1]))


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.reshape(x, name="it").set_dim([24]),
        lambda g, x: g.transpose(x, permutation=[0, 2, 1], name="it"),
        lambda g, x: g.concatenate(inputs=[x, x], axis=0, name="it"),
        among_others,
    ],
)
def test_g18_what_was_not_measured_on_a_gpu_is_refused_without_one_though_the_host_evaluates_it(build, pool):
    assert compiled_and_run(build, X).size
    with pytest.raises(GraphNotSupportedError, match=r"node 'it' .*was not measured"):
        handlepool.graph(build)(pool.driver.asarray(X))


def test_a_reduction_alone_goes_through_a_graph_function(pool):
    norm = handlepool.graph(lambda g, x: g.reduction(x, mode=cudnn.reduction_mode.NORM2).set_dim([2, 1, 4]))
    y = norm(pool.driver.asarray(X))
    assert_close(pool.driver.asnumpy(y).astype(np.float64), np.full((2, 1, 4), 3**0.5), X.dtype)


def test_every_refusal_is_of_the_houses_types():
    assert all(issubclass(kind, HandlePoolError) for _, kind, _ in REFUSED.values())
