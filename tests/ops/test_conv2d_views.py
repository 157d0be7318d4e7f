"""Images and results of conv2d that are views: crops, slices of channels, every second row, column or image."""

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

from handlepool import ArgumentError, GraphNotSupportedError, ParallelStates, conv2d
from handlepool.drivers.host.driver import HostDriver
from handlepool.testing import reference

VIEWS = {
    "crop": lambda of, n, c, h, w: of(n, c, h + 3, w + 2)[:, :, 2:-1, 1:-1],
    "channels": lambda of, n, c, h, w: of(n, c + 16, h, w)[:, 8:-8],
    "rows": lambda of, n, c, h, w: of(n, c, 2 * h, w)[:, :, ::2],
    "columns": lambda of, n, c, h, w: of(n, c, h, 2 * w)[..., ::2],
    "images": lambda of, n, c, h, w: of(2 * n, c, h, w)[::2],
    "rows of an odd height": lambda of, n, c, h, w: of(n, c, 2 * h - 1, w)[:, :, ::2],
    "columns of an odd width": lambda of, n, c, h, w: of(n, c, h, 2 * w - 1)[..., ::2],
    "every second channel": lambda of, n, c, h, w: of(n, 2 * c, h, w)[:, ::2],
    "all": lambda of, n, c, h, w: of(3 * n, c + 8, 2 * h, 2 * w + 2)[::3, 8:, ::2, 2::2],
}
COPIED = {"rows of an odd height", "columns of an odd width", "every second channel"}
"""Views that were not measured enough: copied also where nothing comes behind."""
EPILOGUES = ((), ("bias",), ("bias", "activation"), ("add",), ("bias", "add", "activation"))
SHAPE = (2, 24, 7, 6)


@pytest.fixture
def arrays(each_pool):
    return Arrays(each_pool, layout="NHWC")


def call(arrays, x, parts=(), out=None, **options):
    """Convolve, and compare with the reference."""
    w = arrays.random(24, 16, 3, 3)
    rest = {"bias": arrays.random(48)[::2]} if "bias" in parts else {}
    rest |= {"add": VIEWS["crop"](arrays.random, *SHAPE)} if "add" in parts else {}
    options |= {"padding": 1, "activation": "relu" if "activation" in parts else None}
    try:
        y = conv2d(x, w, out=out, **rest, **options)
    except GraphNotSupportedError as error:  # of a convolution alone; it said what to do
        if (arrays.driver.name, parts) != ("cuda", ()) or "is a view with gaps; " not in str(error):
            raise
        return out
    taken = {name: arrays.take(array) for name, array in rest.items()}
    expected = reference.conv2d(arrays.take(x), arrays.take(w), padding=1, activation=options["activation"], **taken)
    assert arrays.error(y, expected) < TOLERANCE["float32"]
    return y


@pytest.mark.parametrize("parts", EPILOGUES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_images_may_be_views(arrays, view, parts):
    y = call(arrays, VIEWS[view](arrays.random, 2, 16, 7, 6), parts)
    assert y is None or y.strides == arrays.random(*SHAPE).strides  # it lies as x does, without gaps


@pytest.mark.parametrize("parts", EPILOGUES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_results_may_be_views_and_nothing_else_is_written(arrays, view, parts):
    whole = []

    def filled(*shape):
        whole.append(arrays.put(np.full(shape, 7.0)))
        return whole[0]

    out = VIEWS[view](filled, *SHAPE)
    assert call(arrays, arrays.random(2, 16, 7, 6), parts, out) is out
    out[...] = 7
    assert (arrays.take(whole[0]) == 7).all()


@pytest.mark.parametrize("view", VIEWS)
def test_g18_a_convolution_alone_copies_no_view_that_was_measured_and_with_more_behind_it_is_one_launch_with_copies(
    make_pool, view
):
    pool = make_pool()
    arrays = Arrays(pool, layout="NHWC")
    x, out = VIEWS[view](arrays.random, 2, 16, 7, 6), VIEWS[view](arrays.random, *SHAPE)
    call(arrays, x, (), out, pool=pool)
    before = pool.stats()["operands_copied"]
    assert before == (2 if view in COPIED else 0)
    launched = pool.driver.calls["launch"]
    for count in (1, 2):  # the second time it is known
        call(arrays, x, ("bias", "activation"), out, pool=pool)
        assert pool.driver.calls["launch"] == launched + count
        assert pool.stats()["operands_copied"] == before + 3 * count  # x, out and the bias


def test_a_bias_of_any_stride_is_copied_and_the_convolution_stays_one_launch(make_pool):
    pool = make_pool()
    arrays = Arrays(pool, layout="NHWC")
    call(arrays, arrays.random(2, 16, 7, 6), ("bias", "activation"), pool=pool)
    assert (pool.driver.calls["launch"], pool.stats()["operands_copied"]) == (1, 1)
    x, w = arrays.random(1, 16, 7, 6), arrays.random(24, 16, 3, 3)
    for bias in (np.broadcast_to(arrays.random(1), (24,)), arrays.random(24)[::1], arrays.random(3 * 24)[::3]):
        expected = reference.conv2d(arrays.take(x), arrays.take(w), bias=arrays.take(bias))
        assert arrays.error(conv2d(x, w, bias=bias, pool=pool), expected) < TOLERANCE["float32"]
    with pytest.raises(ArgumentError, match=r"conv2d argument 2 \(bias\) has the strides \(-4,\) bytes"):
        conv2d(x, w, bias=arrays.random(25)[:0:-1], pool=pool)


def test_large_views_are_taken_as_far_as_no_copy_is_needed(make_pool, limits):
    limits(MOST_COPIED=3000)
    pool = make_pool()
    arrays = Arrays(pool, layout="NHWC")
    x, out = VIEWS["crop"](arrays.random, 2, 16, 7, 6), VIEWS["crop"](arrays.random, *SHAPE)
    call(arrays, x, ("bias", "activation"), pool=pool)  # apart
    assert pool.driver.calls["launch"] == 2
    call(arrays, x, (), out, pool=pool)
    with pytest.raises(ArgumentError, match=r"conv2d: out=, of shape .*8,064 bytes, .* limit of 3,000: write to another array"):
        call(arrays, arrays.random(2, 16, 7, 6), ("bias", "activation"), out, pool=pool)


class NoViews(HostDriver):
    """Has no plans for arrays with gaps."""

    def compile(self, graph, operands, **settings):
        for tensor in operands:
            if tensor.dim[2:] != [1, 1] and tensor.stride[3] > tensor.dim[1] > 1:
                raise GraphNotSupportedError("no plan")
        return super().compile(graph, operands, **settings)


def test_a_view_that_cudnn_has_no_plan_for_is_refused_with_what_to_do(make_pool):
    pool = make_pool(driver=NoViews())
    arrays = Arrays(pool, layout="NHWC")
    x, w, out = arrays.random(2, 16, 7, 6), arrays.random(24, 16, 1, 1), VIEWS["channels"](arrays.poisoned, *SHAPE)
    with pytest.raises(GraphNotSupportedError, match=r"no plan\. x is a view with gaps; pass a contiguous copy"):
        conv2d(VIEWS["channels"](arrays.random, 2, 16, 7, 6), w, pool=pool)
    with pytest.raises(GraphNotSupportedError, match=r"no plan\. out is a view .*; leave out= away, and copy the res"):
        conv2d(x, w, out=out, pool=pool)
    conv2d(x, w, out=out, bias=arrays.random(24), pool=pool)  # copied


def test_a_view_of_a_buffer_that_branches_fill_side_by_side(each_pool):
    """As a concatenation that needs no copy: each branch writes its slice of the channels."""
    arrays = Arrays(each_pool, layout="NHWC")
    x, whole = arrays.random(2, 16, 7, 6), arrays.poisoned(2, 48, 7, 6)
    filters = [arrays.random(16, 16, 3, 3) for _ in range(3)]
    with ParallelStates(3, pool=each_pool).fork() as fork:
        for place, w in enumerate(filters):
            fork.run(conv2d, x, w, padding=1, activation="relu", out=whole[:, 16 * place : 16 * place + 16])
    parts = [reference.conv2d(arrays.take(x), arrays.take(w), padding=1, activation="relu") for w in filters]
    assert arrays.error(whole, np.concatenate(parts, axis=1)) < TOLERANCE["float32"]


NOT_TAKEN = {
    "turned around": lambda of: of(2, 16, 7, 6)[:, :, ::-1],
    "transposed": lambda of: of(2, 16, 6, 7).transpose(0, 1, 3, 2),
}


@pytest.mark.parametrize("view", NOT_TAKEN)
def test_what_is_not_taken_is_refused_with_the_remedy(arrays, view):
    w = arrays.random(16, 16, 1, 1)
    x = NOT_TAKEN[view](arrays.random)
    with pytest.raises(ArgumentError, match=r"x of shape .* also have gaps between channels.*ascontiguousarray\(x\)"):
        conv2d(x, w)
    with pytest.raises(
        ArgumentError, match=r"out of shape .* also have gaps.*Leave out= away, .*out\[\.\.\.\] = conv2d\(\.\.\.\)"
    ):
        conv2d(arrays.random(2, 16, 7, 6), w, out=NOT_TAKEN[view](arrays.random))
    with pytest.raises(ArgumentError, match=r"w of shape .* contiguous or channels-last\. Pass a contiguous copy"):
        conv2d(arrays.random(2, 16, 7, 6), arrays.random(16, 32, 1, 1)[:, ::2])
