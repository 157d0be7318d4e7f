"""What the frontend's graph wrapper offers, without torch: every way of naming inputs and outputs, and the cached factory."""

import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool.testing.reference import conv2d as reference

X, W, Y = (2, 16, 14, 14), (8, 16, 3, 3), (2, 8, 14, 14)
UNIT = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
SETTINGS = {"io_dtype": "float16", "compute_dtype": "float32"}


def last(shape):
    """Strides, in elements, of a channels-last array."""
    _, c, h, w = shape
    return [c * h * w, 1, c * w, c]


class Given(Arrays):
    """Channels-last arrays in half precision, and what is right for them."""

    def __init__(self, pool):
        super().__init__(pool, "float16", "NHWC")
        self.x, self.w = self.random(*X), self.random(*W)

    def is_right(self, y, x=None, w=None):
        expected = reference(*(self.take(a) for a in (self.x if x is None else x, self.w if w is None else w)), padding=1)
        return self.error(y, expected) < TOLERANCE["float16"]


@pytest.fixture
def given(pool):
    return Given(pool)


# Graph functions, each with a name for its node, or without, and its output marked, named or returned


def named(g, x, w):
    g.conv_fprop(image=x, weight=w, **UNIT, name="conv2d").set_output(True).set_name("conv_out")


def unnamed(g, x, w):
    g.conv_fprop(x, weight=w, **UNIT).set_output(True)


def with_uids(g, x, w):
    x.set_uid(30)
    w.set_uid(20)
    g.conv_fprop(x, w, **UNIT, name="conv2d").set_output(True).set_uid(10)


def symbolic(g):
    import cudnn

    x = g.tensor(name="X", dim=list(X), stride=last(X), data_type=cudnn.data_type.HALF)
    w = g.tensor(name="W", dim=list(W), stride=last(W))
    g.conv_fprop(image=x, weight=w, **UNIT, name="conv2d").set_output(True).set_name("conv_out")


def typed(g, x, w):
    import cudnn

    y = g.conv_fprop(image=x, weight=w, **UNIT, compute_data_type=cudnn.data_type.FLOAT, name="conv2d")
    y.set_data_type(cudnn.data_type.HALF).set_output(True).set_name("conv_out")


WAYS = {
    "node::port, and a name that was set": (named, ["conv2d::image", "conv2d::weight"], ["conv_out"]),
    "node::port of an output that has a name": (named, ["conv2d::image", "conv2d::weight"], ["conv2d::Y"]),
    "the position of an input": (named, ["conv2d::0", "conv2d::weight"], ["conv_out"]),
    "both by position": (named, ["conv2d::0", "conv2d::1"], ["conv2d::Y"]),
    "the parameters": (named, ["x", "w"], ["conv_out"]),
    "a node without a name": (unnamed, ["conv_fprop.0::0", "conv_fprop.0::weight"], ["conv_fprop.0::Y"]),
    "uids": (with_uids, [30, 20], [10]),
    "a uid and a port": (with_uids, [30, "conv2d::weight"], ["conv2d::Y"]),
    "tensors without arrays": (symbolic, ["conv2d::image", "conv2d::weight"], ["conv_out"]),
    "names of tensors without arrays": (symbolic, ["X", "W"], ["conv2d::Y"]),
    "types at nodes and tensors": (typed, ["conv2d::image", "conv2d::weight"], ["conv_out"]),
}


@pytest.mark.parametrize("settings", [SETTINGS, {}], ids=["typed", "untyped"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_naming(given, way, settings):
    function, inputs, outputs = WAYS[way]
    fn = handlepool.graph(inputs=inputs, outputs=outputs, **settings)(function)
    y = given.poisoned(*Y)
    assert fn(given.x, given.w, out=y) is y
    assert given.is_right(y)
    assert given.is_right(fn(given.x, given.w))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_naming_in_another_order(given, way):
    function, inputs, outputs = WAYS[way]
    fn = handlepool.graph(inputs=inputs[::-1], outputs=outputs, **SETTINGS)(function)
    assert given.is_right(fn(given.w, given.x))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_naming_in_a_dictionary(given, way):
    function, inputs, outputs = WAYS[way]
    fn = handlepool.graph(function, **SETTINGS)
    y = given.poisoned(*Y)
    arrays = {outputs[0]: y, inputs[1]: given.w, inputs[0]: given.x}
    assert fn.run(arrays) is arrays
    assert arrays[outputs[0]] is y
    assert given.is_right(y)


def test_tensor_objects_in_any_order(given):
    @handlepool.graph(**SETTINGS)
    def convolution(g, x, w):
        return {"inputs": [w, x], "outputs": [g.conv_fprop(x, weight=w, **UNIT)]}

    assert given.is_right(convolution(given.w, given.x))


def test_the_cached_factory_called_with_three_shapes_builds_two_graphs(pool, given):
    @handlepool.graph(**SETTINGS)
    def convolution(g, x, w):
        g.conv_fprop(image=x, weight=w, **UNIT, name="conv").set_output(True)

    for images, filters, built in ((X, W, 1), (X, W, 1), ((2, 20, 15, 15), (30, 20, 3, 3), 2)):
        x, w = given.random(*images), given.random(*filters)
        assert given.is_right(convolution(x, w), x, w)
        assert pool.stats()["plans_built"] == built


def test_one_graph_serves_many_inputs_streams_and_forks(pool, given):
    fn = handlepool.graph(inputs=["conv2d::image", "conv2d::weight"], outputs=["conv_out"], **SETTINGS)(named)
    images = [given.random(*X) for _ in range(8)]
    outputs = handlepool.ParallelStates(4, pool=pool).map(fn, images, [given.w] * 8)
    assert all(given.is_right(y, x) for x, y in zip(images, outputs, strict=True))
    assert pool.stats()["plans_built"] == 1
