"""Shapes and strides that cuDNN's tensors have not: typed errors on both drivers, before anything is built or launched."""

import cudnn
import numpy as np
import pytest
from harness.arrays import Arrays
from harness.graphs import double
from harness.process import as_default

import handlepool
from handlepool import ArgumentError, ArraySpec, ArrayTypeError, GraphNotSupportedError, HandlePool, ParallelStates, ops
from handlepool.testing import reference


@handlepool.graph
def product(g, a, b):
    return g.matmul(a, b)


@handlepool.graph
def convolve(g, x, w, *, padding=0, stride=1, dilation=1):
    return g.conv_fprop(x, w, padding=[padding] * 2, stride=[stride] * 2, dilation=[dilation] * 2)


@pytest.fixture
def arrays(each_pool):
    return Arrays(each_pool)


@pytest.fixture
def host(make_pool):
    return Arrays(make_pool())


# What a function makes of its tensors


CHANGES = {
    "strides beyond the array": lambda x: x.set_stride([5000, 25, 5, 1]),
    "strides far beyond it": lambda x: x.set_stride([500_000_000, 25, 5, 1]),
    "fewer elements": lambda x: x.set_dim([1, 3, 5, 5]),
    "more elements": lambda x: x.set_dim([4, 3, 5, 5]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_made_one_of_other_elements_is_refused(arrays, change):
    @handlepool.graph
    def changed(g, x):
        return g.relu(CHANGES[change](x))

    with pytest.raises(
        ArgumentError, match=r"changed argument 0 is of shape \(2, 3, 5, 5\), .* which are not the array's elements"
    ):
        changed(arrays.random(2, 3, 5, 5))


def test_a_tensor_that_was_given_another_type_is_refused(arrays):
    @handlepool.graph
    def changed(g, x):
        return g.relu(x.set_data_type(cudnn.data_type.HALF))

    x = arrays.random(2, 3, 5, 5)
    with pytest.raises(ArrayTypeError, match=r"is float32, and the function set its tensor's type to HALF"):
        changed(x)


def test_a_tensor_may_be_given_other_axes_over_the_same_elements(arrays):
    @handlepool.graph
    def turned(g, x):
        return g.relu(x.set_dim([2, 5, 5, 3]).set_stride([75, 5, 1, 25]))

    x = arrays.random(2, 3, 5, 5)
    assert arrays.error(turned(x), np.maximum(arrays.take(x).transpose(0, 2, 3, 1), 0)) < 1e-5


# Axes and extents


@handlepool.graph
def total(g, x):
    return g.reduction(x, mode=cudnn.reduction_mode.ADD).set_dim([1] * len(x.get_dim()))


@pytest.mark.parametrize("rank", [0, 9, 20])
def test_pointwise_graphs_take_any_number_of_axes_and_others_one_to_eight(arrays, rank):
    x = arrays.random(1).reshape((1,) * rank)
    assert arrays.error(double(x), 2 * arrays.take(x)) < 1e-5
    if rank == 9:
        with pytest.raises((ArgumentError, GraphNotSupportedError), match="give 1 to 8 axes"):
            total(x)


@pytest.mark.parametrize("rank", [0, 1, 8, 9, 20])
def test_an_activation_takes_arrays_of_any_number_of_axes(host, rank):
    x = host.random(3 if rank else 1).reshape((3,)[:rank] + (1,) * (rank - 1))
    pool = HandlePool(driver=host.driver)
    assert host.error(ops.sigmoid(x, pool=pool), reference.ACTIVATIONS["sigmoid"](host.take(x))) < 1e-5
    pool.close()


@pytest.mark.parametrize("shape", [(0,), (4, 0), (2, 0, 4, 4)])
def test_an_empty_array_is_taken_wherever_it_is_given_and_checked_as_any(arrays, shape):
    x, empty = arrays.random(4, 4), arrays.put(np.ones(shape))
    assert double(empty).shape == ops.relu(empty).shape == shape
    assert double(empty, out=empty) is empty
    assert [*double.run({"x": empty}).values()][1].shape == shape
    assert double.compile(ArraySpec(shape, "float32")).engine == "nothing"
    with pytest.raises(ArgumentError, match=r"must be float32 of shape \(4, 4\)"):
        double(x, out=empty)
    with pytest.raises(ArgumentError, match="axes"):
        handlepool.conv2d(empty, x)


# Strides and sizes


@pytest.mark.parametrize("strides", [(2**32, 2), (2, 2**31), (2**80, 2)])
def test_strides_that_reach_too_far_are_refused_with_the_numbers(each_pool, strides):
    spec = ArraySpec((2, 4), "float16", strides)
    span = 1 + strides[0] // 2 + 3 * (strides[1] // 2)
    x = ArraySpec((2, 4), "float16")
    for call in (lambda: double.compile(spec), lambda: double.compile(x, out=spec)):
        with pytest.raises(
            ArgumentError, match=rf"shape \(2, 4\).*spans {span:,} elements, gaps included.*at most 2,147,483,647"
        ):
            call()


def test_strides_of_axes_of_one_element_may_be_anything(host):
    with HandlePool(driver=host.driver) as pool:
        for stride in (2**60, -4, -3, 0):
            x = np.lib.stride_tricks.as_strided(host.random(4), (1, 4), (stride, 4))
            y = ParallelStates(1, pool=pool).map(double, [x])[0]
            assert host.error(y, 2 * host.take(x)) < 1e-5
            assert host.error(ops.add(x, x, pool=pool), 2 * host.take(x)) < 1e-5


def test_a_result_of_too_many_elements_is_refused_with_the_numbers(each_pool):
    with pytest.raises(
        ArgumentError, match=r"output C of shape \(65536, 65536\) has 4,294,967,296 elements.*at most 2,147,483,647"
    ):
        product.compile(ArraySpec((1 << 16, 1), "float16"), ArraySpec((1, 1 << 16), "float16"))
    with pytest.raises(ArgumentError, match=r"shape \(1099511627776, 4\).*spans 4,398,046,511,104"):
        double.compile(ArraySpec((1 << 40, 4), "float16"))


# Convolutions


def convolutions(arrays, **options):
    x, w, dy = arrays.random(1, 1, 4, 4), arrays.random(1, 1, 3, 3), arrays.random(1, 1, 3, 3)
    yield lambda: handlepool.conv2d(x, w, **options)
    yield lambda: ParallelStates(2).map(lambda x: handlepool.conv2d(x, w, **options), [x])
    yield lambda: convolve(x, w, **options)
    yield lambda: convolve.compile(x, w, **options)
    if options["stride"] == 10**6:
        yield lambda: handlepool.conv2d_input_grad(dy, w, shape=(1, 1, 4, 4), **options)
        yield lambda: handlepool.conv2d_weight_grad(x, dy, shape=(1, 1, 3, 3), **options)


@pytest.mark.parametrize("stride", [1, 10**6])
def test_a_padding_without_measure_is_refused_with_the_numbers(arrays, stride):
    for call in convolutions(arrays, padding=10**6, stride=stride):
        with pytest.raises(
            ArgumentError, match=r"4,000,016,000,016 elements with a padding of \(1000000, 1000000\).*2,147,483,647"
        ):
            call()


@pytest.mark.parametrize("name", ["padding", "stride", "dilation"])
def test_parameters_of_a_convolution_fit_32_bits(arrays, name):
    for call in convolutions(arrays, **{"stride": 1, name: 1 << 31}):
        with pytest.raises(ArgumentError, match=rf"{name}=\[2147483648, 2147483648\].*at most 2147483647"):
            call()


@pytest.mark.parametrize("grad", ["input", "weight"])
def test_the_gradient_of_what_is_too_large_is_refused_with_the_numbers(arrays, grad):
    x, w, dy = arrays.random(1, 1, 4, 4), arrays.random(1, 1, 3, 3), arrays.random(1, 1, 1, 1)
    huge = (1, 1, 10**6, 10**6)
    call = {
        "input": lambda: handlepool.conv2d_input_grad(dy, w, shape=huge, stride=10**7),
        "weight": lambda: handlepool.conv2d_weight_grad(x, dy, shape=huge, padding=500_000 - 2),
    }[grad]
    with pytest.raises(ArgumentError, match=r"\(1, 1, 1000000, 1000000\).* 1,000,000,000,000 elements.*at most 2,147,483,647"):
        call()


# Outputs


OVERLAPPING = {"no step": (0, 4), "the same step": (4, 4), "rows over rows": (16, 8), "columns over columns": (4, 8)}


@pytest.mark.parametrize("known", [False, True], ids=["at first", "known"])
@pytest.mark.parametrize("strides", OVERLAPPING.values(), ids=OVERLAPPING)
def test_an_output_that_overlaps_itself_is_refused(host, strides, known):
    base, x = host.random(64), host.random(4, 4)
    out = np.lib.stride_tricks.as_strided(base, (4, 4), strides)
    before = host.take(base)
    with HandlePool(driver=host.driver) as pool, as_default(pool):
        if known:
            double(x, out=host.poisoned(4, 4))
        key = double.plan_for(x).keys[0]
        for call in (
            lambda: double(x, out=out),
            lambda: double.run({"x": x, key: out}),
            lambda: ParallelStates(2).map(double, [x, x], out=[out, out]),
            lambda: double.compile(x, out=out),
        ):
            with pytest.raises(ArgumentError, match="its elements overlap"):
                call()
    assert (host.take(base) == before).all()


def test_an_output_whose_strides_are_negative_is_told_so(host):
    x, out = host.random(4, 4), host.random(4, 4)[::-1]
    with HandlePool(driver=host.driver) as pool, pytest.raises(ArgumentError, match="negative"):
        ParallelStates(1, pool=pool).map(double, [x], out=[out])
