"""What cuDNN computes wrongly is brought into a form that it computes rightly, or is refused (guarantee 18).

On the host driver these tests show what is declared, copied and refused; what cuDNN computes is measured by
``benchmarks/geometries.py`` and tried at random in ``tests/gpu``.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from harness.arrays import Arrays
from harness.process import as_default

import handlepool
from benchmarks import geometries
from handlepool import ArgumentError, ContractError, GraphNotSupportedError, HandlePool, ops
from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import HandlePoolError
from handlepool.graphs import forms
from handlepool.testing.reference import conv2d as reference

TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "geometries").glob("cudnn-*.json"))


@handlepool.graph
def add(g, x, y):
    return g.add(x, y)


@handlepool.graph
def multiply(g, x, y):
    return g.mul(x, y)


@handlepool.graph
def row_and_sum(g, x, y):
    return g.relu(y), g.add(x, y)


@handlepool.graph
def convolution_relu(g, x, w):
    return g.relu(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))


@handlepool.graph
def relu_convolution(g, x, w):
    return g.conv_fprop(g.relu(x), w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])


@handlepool.graph
def convolution_add(g, x, w, z):
    return g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), z)


@handlepool.graph
def product(g, a, b):
    return g.matmul(a, b)


@handlepool.graph
def product_bias(g, a, b, bias):
    return g.add(g.matmul(a, b), bias)


@pytest.fixture
def arrays(each_pool):
    return Arrays(each_pool, "float16")


def declared(case):
    """How the rule has the operands of a case of the table declared; None for those that it has copied."""
    case["dtype"] = "float32"
    _, tensors, copies = geometries.declare(case, {}, True)
    copied = {copy.operand for copy in copies}
    return [None if place in copied else (list(t.dim), list(t.stride)) for place, t in enumerate(tensors)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_g18_nothing_that_was_measured_wrong_is_handed_on_as_it_was(path):
    table = json.loads(path.read_text())
    assert table["raw bad"], "the table has no wrong cases to hold the rule against"
    for case in table["raw bad"]:
        raw = [tuple(map(list, operand)) for operand in case["in"] + case["out"]]
        try:
            assert declared(case) != raw, f"{case['label']}, seed {case['seed']}: {case['detail']}"
        except HandlePoolError:
            pass


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_g18_under_the_rule_nothing_was_measured_wrong(path):
    table = json.loads(path.read_text())
    assert table["ruled summary"]["right"] > 200
    assert not table["ruled bad"]


def test_the_rule_catches_nothing_where_it_is_not_asked():
    """The control of the test above: declared as they are, the wrong cases are what they were measured as."""
    for case in json.loads(TABLES[0].read_text())["raw bad"][:20]:
        _, tensors, copies = geometries.declare({**case, "dtype": "float32"}, {}, False)
        assert not copies
        assert [(list(t.dim), list(t.stride)) for t in tensors] == [tuple(map(list, each)) for each in case["in"] + case["out"]]


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((2, 16, 8, 8), (2, 16, 8, 8)),
        ((2, 16, 8, 8), (1, 16, 1, 1)),
        ((2, 16, 8, 8), (1, 16, 8, 8)),
        ((2, 16, 8, 8), (2, 16, 1, 1)),
        ((2, 16, 8, 8), (1, 1, 1, 8)),
        ((2, 16, 8, 8), (1, 1, 8, 1)),
        ((2, 8, 16), (1, 1, 16)),
        ((2, 8, 16), (2, 8, 1)),
        ((2, 8, 16), (2, 1, 16)),
        ((5, 7), (5, 1)),
        ((5, 1), (1, 7)),
        ((40,), (1,)),
        ((1,), (1,)),
        ((), ()),
        ((2, 3, 1, 2, 4, 2), (1, 3, 1, 2, 1, 2)),
    ],
)
@pytest.mark.parametrize("function", [add, multiply])
def test_rows_columns_channels_and_batches_broadcast(arrays, function, shape, other):
    x, y = arrays.random(*shape), arrays.random(*other)
    expected = {add: np.add, multiply: np.multiply}[function](arrays.take(x), arrays.take(y))
    assert arrays.error(function(x, y), expected) < 1e-2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., ::2],
        lambda x: x[:, :, 1:],
        lambda x: x[:, ::2],
        lambda x: x[::2],
        lambda x: x.transpose(0, 1, 3, 2),
        lambda x: x.transpose(1, 0, 2, 3),
    ],
)
def test_pointwise_operands_and_outputs_may_be_any_view(arrays, view):
    x, target = view(arrays.random(4, 8, 16, 16)), view(arrays.poisoned(4, 8, 16, 16))
    y = arrays.random(*x.shape, layout="NHWC")
    expected = arrays.take(x) + arrays.take(y)
    assert arrays.error(add(x, y), expected) < 1e-2
    assert add(x, y, out=target) is target
    assert arrays.error(target, expected) < 1e-2


def test_what_lies_between_the_elements_of_an_output_stays(arrays):
    memory = arrays.put(np.full((2, 8, 32), 7.0))
    add(arrays.random(2, 8, 16), arrays.random(2, 8, 16), out=memory[..., ::2])
    assert (arrays.take(memory)[..., 1::2] == 7).all()


@pytest.mark.parametrize("layouts", [("NHWC", "NHWC"), ("NHWC", "NCHW"), ("NCHW", "NHWC"), ("NCHW", "NCHW")])
@pytest.mark.parametrize("out", [None, "NHWC", "NCHW"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_conv2d_with_an_activation_takes_every_mixture_of_layouts(arrays, layouts, out, activation):
    x, w = arrays.random(2, 16, 7, 6, layout=layouts[0]), arrays.random(24, 16, 3, 3, layout=layouts[1])
    target = None if out is None else arrays.poisoned(2, 24, 7, 6, layout=out)
    y = handlepool.conv2d(x, w, padding=1, activation=activation, out=target)
    assert arrays.error(y, reference(arrays.take(x), arrays.take(w), padding=1, activation=activation)) < 1e-2


def test_what_is_copied_is_counted_and_told(arrays, each_pool):
    x, w = arrays.random(2, 16, 7, 6, layout="NHWC"), arrays.random(24, 16, 3, 3)
    before = each_pool.stats()
    convolution_relu(x, w)
    assert each_pool.stats()["operands_copied"] - before["operands_copied"] == 1
    assert each_pool.stats()["bytes_copied"] - before["bytes_copied"] == w.nbytes
    (copy,) = convolution_relu.plan_for(x, w).copies
    assert (copy.operand, copy.nbytes) == (1, w.nbytes)
    convolution_relu(x, arrays.random(24, 16, 3, 3, layout="NHWC"))
    assert each_pool.stats()["operands_copied"] - before["operands_copied"] == 1


def test_a_copy_too_large_for_each_call_is_refused_by_name(arrays, limits):
    limits(MOST_COPIED=1000)
    x, w = arrays.random(2, 16, 7, 6, layout="NHWC"), arrays.random(24, 16, 3, 3)
    with pytest.raises(
        ArgumentError, match=r"argument 1 \(w\), of shape \(24, 16, 3, 3\) with strides .*pass a copy of the array, channels"
    ):
        convolution_relu(x, w)
    with pytest.raises(ArgumentError, match=r"add: out=, of shape .* write to another array and copy that"):
        add(arrays.random(4, 16, 16), arrays.random(4, 16, 16), out=arrays.poisoned(4, 16, 32)[..., ::2])
    large = arrays.random(2, 16, 7, 6)
    assert handlepool.conv2d(large, w, padding=1, activation="relu").shape == (2, 24, 7, 6)  # launched apart


def test_the_scratch_of_copies_counts_against_the_limit(arrays):
    x, w = arrays.random(2, 16, 7, 6, layout="NHWC"), arrays.random(24, 16, 3, 3)
    with pytest.raises(GraphNotSupportedError, match="copies of the operands take 6,912 bytes"):
        convolution_relu.options(workspace_limit=6000)(x, w)


def test_scratch_and_copies_together_keep_the_limit(arrays):
    """On a GPU plans that take less may win; here what each may take is known."""
    x, w = arrays.random(1, 3, 5, 5), arrays.random(3, 3, 3, 3)
    whole = convolution_relu.plan_for(x, w)
    assert whole.copies
    taken = whole.workspace_size
    for limit in range(taken - 3 * 256, taken, 17):
        with suppress(GraphNotSupportedError):
            assert convolution_relu.options(workspace_limit=limit).plan_for(x, w).workspace_size <= limit
    assert convolution_relu.options(workspace_limit=taken).plan_for(x, w).workspace_size <= taken


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_products_take_any_number_of_batch_axes(arrays, rank):
    batch = (2, 3)[: rank - 2]
    a, b = arrays.random(*batch, 8, 16), arrays.random(*batch, 16, 24)
    assert arrays.error(product(a, b), arrays.take(a) @ arrays.take(b)) < 1e-2
    bias = arrays.random(*[1] * (rank - 1), 48)[..., ::2]
    assert arrays.error(product_bias(a, b, bias), arrays.take(a) @ arrays.take(b) + arrays.take(bias)) < 1e-2


@pytest.mark.parametrize("shape", [(2, 24, 7, 6), (1, 24, 7, 6), (2, 1, 7, 6), (2, 24, 1, 6), (1, 24, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_residual_may_repeat_along_any_axis(arrays, shape, layout):
    x, w = arrays.random(2, 16, 7, 6, layout="NHWC"), arrays.random(24, 16, 3, 3, layout="NHWC")
    z = arrays.random(*shape, layout=layout)
    expected = reference(arrays.take(x), arrays.take(w), padding=1) + arrays.take(z)
    assert arrays.error(convolution_add(x, w, z), expected) < 1e-2


def test_graphs_that_cudnn_has_no_form_for_are_refused_on_both_drivers(arrays):
    x, w = arrays.random(2, 16, 7, 6, layout="NHWC"), arrays.random(24, 16, 3, 3, layout="NHWC")
    with pytest.raises(GraphNotSupportedError, match=r"another node comes before node 'conv_fprop\.0'"):
        relu_convolution(x, w)
    with pytest.raises(GraphNotSupportedError, match=r"each output must have that shape\..* two graph functions"):
        row_and_sum(arrays.random(4, 16), arrays.random(1, 16))


def test_copies_are_made_on_the_stream_of_the_launch(make_pool):
    """The adversarial scheduler runs what is not ordered in any order; the copies lie in the slot's own scratch."""
    for seed in range(8):
        pool = make_pool(scheduler="adversarial", seed=seed)
        arrays = Arrays(pool)
        with pool.driver.create_stream():
            views = [arrays.random(2, 4, 6, 6).transpose(0, 1, 3, 2)[..., ::2] for _ in range(4)]
            with handlepool.ParallelStates(2, pool=pool).fork() as fork:
                outs = [fork.run(ops.relu, view, pool=pool) for view in views]
            for view, out in zip(views, outs, strict=True):
                assert np.array_equal(arrays.take(out), np.maximum(arrays.take(view), 0))


def test_checked_pools_compare_each_new_plan_with_float64(monkeypatch):
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    with HandlePool(driver=HostDriver(), check=True) as pool:
        assert (ops.relu(x, pool=pool) == np.maximum(x, 0)).all()
        assert (ops.relu(x[:, ::2], pool=pool) == np.maximum(x[:, ::2], 0)).all()
    from handlepool.drivers.host import pointwise

    # The control: a plan that is wrong. The evaluator looks the operation up once for the plan, and once to compare.
    answers = iter([lambda p, x: np.maximum(x, 0.5), lambda p, x: np.maximum(x, 0)])

    class Table(dict):
        def get(self, name):
            return next(answers)

    monkeypatch.setattr(pointwise, "OPERATIONS", Table(pointwise.OPERATIONS))
    monkeypatch.setattr("handlepool.drivers.host.evaluator.OPERATIONS", pointwise.OPERATIONS)
    with HandlePool(driver=HostDriver(), check=True) as pool, pytest.raises(ContractError, match=r"relu: plan .* float64"):
        ops.relu(x, pool=pool)


def test_checked_pools_compare_the_copies_too(monkeypatch):
    """A rule that copies an operand wrongly is found: it is not what was asked for."""
    a, b, z = (
        np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((2, 3, 4, 8), (2, 3, 8, 5), (2, 1, 1, 5))
    )
    with HandlePool(driver=HostDriver(), check=True) as pool, as_default(pool):
        assert np.allclose(product_added(a, b, z), a @ b + z, atol=1e-4)
    copy = forms.OperandForms.copy

    def wrong(self, place, shape, steps, *args, **kwargs):
        copy(self, place, shape, [0 if step == 1 else step for step in steps], *args, **kwargs)

    monkeypatch.setattr(forms.OperandForms, "copy", wrong)
    pool = HandlePool(driver=HostDriver(), check=True)
    with pool, as_default(pool), pytest.raises(ContractError, match="product_added: plan"):
        product_added(a, b, z)


@handlepool.graph
def residual_of_itself(g, x, w):
    return g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), x)


@handlepool.graph
def gradient_relu(g, dy, w):
    return g.relu(g.conv_dgrad(dy, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))


def test_an_operand_that_is_taken_twice_is_right_or_refused(arrays):
    x, w = arrays.random(2, 16, 7, 6), arrays.random(16, 16, 3, 3)
    expected = reference(arrays.take(x), arrays.take(w), padding=1) + arrays.take(x)
    assert arrays.error(residual_of_itself(x, w), expected) < 1e-2
    with pytest.raises(GraphNotSupportedError, match=r"argument 0 \(x\) is used by node 'conv_fprop\.0' .* again"):
        residual_of_itself(arrays.random(2, 1, 7, 6), arrays.random(16, 1, 3, 3))
    with pytest.raises(GraphNotSupportedError, match="a node follows node 'conv_dgrad"):
        gradient_relu(x, w)


@handlepool.graph
def scaled_sum(g, x, y, z):
    return g.relu(g.add(g.mul(x, y), z))


@handlepool.graph
def product_added(g, a, b, z):
    return g.add(g.matmul(a, b), z)


@pytest.mark.parametrize(
    ("first", "second"), [((8, 1), (8, 1)), ((1, 32), (1, 32)), ((8, 1), (1, 32)), ((1, 1), (1, 1)), ((8, 32), (8, 1))]
)
def test_what_is_between_two_nodes_has_the_whole_extent(arrays, first, second):
    """Seen on a GPU: the sum of a product of two columns and a whole array was wrong in every element."""
    x, y, z = arrays.random(*first), arrays.random(*second), arrays.random(8, 32)
    expected = np.maximum(arrays.take(x) * arrays.take(y) + arrays.take(z), 0)
    assert arrays.error(scaled_sum(x, y, z), expected) < 1e-2
    copied = {copy.operand: copy.shape for copy in scaled_sum.plan_for(x, y, z).copies}
    assert copied == ({} if (8, 32) in (first, second) else {0: (8, 32)})


def test_rows_of_several_matrices_are_one_matrix_alone_where_every_operand_has_them(arrays):
    a, b, z = arrays.random(4, 8, 32), arrays.random(1, 32, 16), arrays.random(1, 8, 16)
    for addend, batch in ((z, 4), (arrays.random(4, 8, 16), 1), (arrays.random(1, 1, 16), 1)):
        expected = arrays.take(a) @ arrays.take(b) + arrays.take(addend)
        assert arrays.error(product_added(a, b, addend), expected) < 1e-2
        tensors = json.loads(product_added.plan_for(a, b, addend).graph)["tensors"]  # the drivers' texts differ
        taken = tensors["a"] if isinstance(tensors, dict) else next(each for each in tensors if each["name"] == "a")
        assert taken["dim"][0] == batch


@handlepool.graph
def product_scaled(g, a, b, z):
    return g.mul(g.matmul(a, b), z)


MASKS = [(*batch, rows, columns) for batch in ((2, 3), (2, 1), (1, 3), (1, 1)) for rows in (4, 1) for columns in (5, 1)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("function", [product_added, product_scaled])
def test_an_addend_of_a_product_repeats_along_any_axes(arrays, function, mask):
    """Seen with the mask of an attention, (batch, 1, 1, keys): the second copy of one operand read what was no memory of it."""
    a, b, z = arrays.random(2, 3, 4, 8), arrays.random(2, 3, 8, 5), arrays.random(*mask)
    product, addend = arrays.take(a) @ arrays.take(b), arrays.take(z)
    expected = product + addend if function is product_added else product * addend
    assert arrays.error(function(a, b, z), expected) < 1e-2
    assert len(function.plan_for(a, b, z).copies) <= 1


def test_what_is_too_large_for_a_copy_is_taken_as_the_advice_says(limits):
    """The shape is told as it was given, and the remedy works."""
    limits(MOST_COPIED=1000)
    q, k = np.ones((2, 4, 8, 16), np.float32), np.ones((2, 4, 16, 8), np.float32)
    x, w = np.ones((4, 8, 6, 6), np.float32), np.ones((8, 8, 3, 3), np.float32)
    one, whole = np.ones((1, 8, 6, 6), np.float32), np.ones((4, 8, 6, 6), np.float32)
    with HandlePool(driver=HostDriver()) as pool, as_default(pool):
        for mask in ((2, 1, 1, 8), (2, 4, 1, 8), (2, 1, 8, 8)):
            with pytest.raises(ArgumentError) as refused:
                product_added(q, k, np.ones(mask, np.float32))
            assert f"of shape {mask} with strides" in str(refused.value)
            assert str(refused.value).endswith("pass a copy of the array, contiguous, repeated to the shape (2, 4, 8, 8)")
        product_added(q, k, np.ones((2, 4, 8, 8), np.float32))
        with pytest.raises(ArgumentError, match=r"channels-last without gaps, repeated to the shape \(4, 8, 6, 6\)$"):
            convolved_plus(channels_last(x), channels_last(w), one)
        convolved_plus(channels_last(x), channels_last(w), channels_last(whole))


def channels_last(array):
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@handlepool.graph
def convolved_plus(g, x, w, z):
    return g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), z)


def test_axes_of_two_elements_count_for_the_form_of_an_image():
    assert forms.spaced_channels_last((2, 8, 2, 2), (32, 1, 16, 8))
    assert forms.spaced_channels_last((2, 8, 2, 2), (99, 1, 40, 9))
    for steps in ((32, 1, 16, 4), (32, 1, 8, 8), (16, 1, 16, 8)):
        assert not forms.spaced_channels_last((2, 8, 2, 2), steps)
    assert not forms.spaced_channels_last((1, 2, 3, 3), (18, 9, 3, 1))


def test_products_of_one_row_and_one_column_have_nothing_behind(arrays):
    """Seen on a GPU: two of three sums of such a product and an addend were wrong."""
    a, b, z = arrays.random(3, 1, 32), arrays.random(3, 32, 1), arrays.random(3, 1, 1)
    assert arrays.error(product(a, b), arrays.take(a) @ arrays.take(b)) < 1e-2
    with pytest.raises(GraphNotSupportedError, match="makes a single element of each pair"):
        product_added(a, b, z)


@handlepool.graph
def uneven(g, x, w, *rest, before, after, activation):
    spatial = len(before)
    y = g.conv_fprop(x, w, pre_padding=list(before), post_padding=list(after), stride=[2] * spatial, dilation=[1] * spatial)
    for tensor in rest:
        y = g.add(y, tensor)
    return g.relu(y) if activation else y


def along_each_axis(x, w, before, after):
    """A convolution of one image with filters for one channel, each with stride 2."""
    x = np.pad(x, [(0, 0), (0, 0), *zip(before, after, strict=True)])
    size = [(extent - taps) // 2 + 1 for extent, taps in zip(x.shape[2:], w.shape[2:], strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *size))
    for tap in np.ndindex(*w.shape[2:]):
        seen = x[(slice(None), 0, *[slice(t, t + 2 * (n - 1) + 1, 2) for t, n in zip(tap, size, strict=True)])]
        y += np.einsum("n...,k->nk...", seen, w[(slice(None), 0, *tap)])
    return y


@pytest.mark.parametrize("sides", [((0, 1, 2), (1, 1, 0)), ((2, 0, 1), (0, 3, 1)), ((0, 0, 0), (1, 2, 1))], ids=str)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_g18_padding_that_differs_from_side_to_side_becomes_the_same(arrays, spatial, layout, sides):
    before, after = (side[:spatial] for side in sides)
    x = arrays.random(2, 1, *[6, 5, 4][:spatial], layout=layout)
    w = arrays.random(8, 1, *[3] * spatial, layout=layout)
    expected = along_each_axis(arrays.take(x), arrays.take(w), before, after)
    z, row = arrays.random(*expected.shape, layout=layout), arrays.random(1, 8, *[1] * spatial)
    options = {"before": before, "after": after, "activation": True}
    assert arrays.error(uneven(x, w, **options | {"activation": False}), expected) < 1e-2
    y = uneven(x, w, row, z, **options)
    assert arrays.error(y, np.maximum(expected + arrays.take(row) + arrays.take(z), 0)) < 1e-2
    told = uneven.plan_for(x, w, row, z, **options).graph
    before, after = (re.findall(rf'"{side}_padding": *(\[[^]]*])', told) for side in ("pre", "post"))
    assert before == after


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, 1, 2, 1)])
def test_g18_uneven_padding_with_an_addend_that_repeats_is_refused(arrays, shape):
    x, w = arrays.random(2, 1, 5, 5), arrays.random(1, 1, 3, 3)
    with pytest.raises(GraphNotSupportedError, match=r"padding of \(1, 0\) before and \(0, 0\) after was not measured"):
        uneven(x, w, arrays.random(*shape), before=(1, 0), after=(0, 0), activation=False)


def test_an_uneven_gradient_of_images_says_what_to_do_and_that_is_right(arrays):
    dy, w = arrays.random(2, 8, 5, 7), arrays.random(8, 4, 3, 3)
    with pytest.raises(
        GraphNotSupportedError, match=r"the gradient of the padded images with padding=0, and cut the padding off"
    ):
        ops.conv2d_input_grad(dy, w, (2, 4, 6, 8), padding=((1, 0), (1, 0)))
    padded = arrays.take(ops.conv2d_input_grad(dy, w, (2, 4, 7, 9), padding=0))
    evenly = arrays.take(ops.conv2d_input_grad(dy, w, (2, 4, 5, 7), padding=1))
    assert np.allclose(padded[:, :, 1:-1, 1:-1], evenly, atol=1e-2)


def test_an_image_that_is_added_again_is_not_padded_unevenly(arrays):
    @handlepool.graph
    def added(g, x, w):
        how = {"pre_padding": [2, 2], "post_padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
        return g.add(g.conv_fprop(x, w, **how), x)

    with pytest.raises(GraphNotSupportedError, match=r"a padding of \(2, 2\) before and \(0, 0\) after was not measured"):
        added(arrays.random(2, 8, 6, 6, layout="NHWC"), arrays.random(8, 8, 3, 3, layout="NHWC"))
