"""conv2d on the host driver against SciPy in float64: layouts, types, epilogues, geometries. Refusals: test_ops_refusals."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness.scenes import Scene, Thread, over_seeds

from handlepool import conv2d
from handlepool.ops import conv2d_plan
from handlepool.tensors.inference import dense_strides
from handlepool.testing import reference

TOLERANCE = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 1e-5}
ORDERS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1)}


@pytest.fixture(scope="module")
def scene():
    with Scene(seed=1) as scene:
        yield scene


@pytest.fixture(params=["float16", "bfloat16", "float32"])
def dtype(request):
    if request.param == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(request.param)


def lay(scene, values, layout="NCHW"):
    """A device array with these values, in a layout."""
    order = ORDERS[layout] if values.ndim == 4 else tuple(range(values.ndim))
    strides = [step * values.dtype.itemsize for step in dense_strides(values.shape, order)]
    array = scene.driver.empty(values.shape, strides, values.dtype)
    return scene.put(array, lambda: values)


def poisoned(scene, shape, dtype, layout):
    return lay(scene, np.full(shape, np.nan, dtype), layout)


def layout_of(array):
    steps = [step // array.dtype.itemsize for step in array.strides]
    return [name for name, order in ORDERS.items() if tuple(steps) == dense_strides(array.shape, order)]


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(scene, *, x=(2, 4, 9, 8), k=6, r=(3, 3), dtype=np.float32, layouts=("NCHW", "NCHW"), out=None, bias=False, **options):
    """Convolve random numbers, and compare with the reference."""
    groups = options.get("groups", 1)
    images = numbers(1, *x).astype(dtype)
    filters = numbers(2, k, x[1] // groups, *r).astype(dtype)
    biases = numbers(3, k).astype(dtype) if bias else None
    expected = reference.conv2d(images, filters, bias=biases, **options)
    given = lay(scene, images, layouts[0]), lay(scene, filters, layouts[1])
    if bias:
        options["bias"] = lay(scene, biases)
    if out is not None:
        out = options["out"] = poisoned(scene, expected.shape, dtype, out)
    y = conv2d(*given, pool=scene.pool, **options)
    assert y.shape == expected.shape
    assert y.dtype == dtype
    error = reference.relative_error(scene.driver.asnumpy(y), expected)
    assert error < TOLERANCE[np.dtype(dtype).name]
    if out is not None:
        assert y is out
    return y


# Layouts and types


@pytest.mark.parametrize("out", [None, "NCHW", "NHWC"])
@pytest.mark.parametrize("w", ["NCHW", "NHWC"])
@pytest.mark.parametrize("x", ["NCHW", "NHWC"])
def test_every_layout_in_and_out_and_the_result_lies_as_x_does(scene, dtype, x, w, out):
    assert layout_of(check(scene, dtype=dtype, layouts=(x, w), out=out)) == [out or x]


# Geometry


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": (1, 3)}, {"padding": 1}, {"padding": (2, 0)}, {"dilation": (2, 3)}]
)
def test_stride_padding_and_dilation(scene, options):
    check(scene, x=(1, 3, 11, 12), **options)


@pytest.mark.parametrize("x", [(1, 1, 1, 1), (1, 1, 5, 5), (3, 1, 4, 4), (1, 3, 1, 9), (2, 3, 9, 1)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_axes_of_extent_one(scene, x, layout):
    check(scene, x=x, k=1, r=(1, 1), layouts=(layout, layout), out="NCHW")


@hypothesis.given(
    n=st.integers(1, 2),
    channels=st.integers(1, 3),
    size=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    filters=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    per_group=st.integers(1, 2),
    groups=st.integers(1, 3),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    layouts=st.tuples(st.sampled_from(["NCHW", "NHWC"]), st.sampled_from(["NCHW", "NHWC"])),
    out=st.sampled_from([None, "NCHW", "NHWC"]),
    bias=st.booleans(),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_geometries(n, channels, size, filters, per_group, groups, stride, padding, layouts, out, bias):
    with Scene(seed=n) as scene:
        check(
            scene,
            x=(n, channels * groups, *size),
            k=per_group * groups,
            r=filters,
            groups=groups,
            stride=stride,
            padding=padding,
            layouts=layouts,
            out=out,
            bias=bias,
        )


def test_a_workspace_limit_is_kept_with_the_same_result(scene):
    x, w = lay(scene, numbers(1, 2, 4, 16, 16)), lay(scene, numbers(2, 6, 4, 3, 3))
    free = conv2d_plan(x, w, pool=scene.pool)
    limited = conv2d_plan(x, w, pool=scene.pool, workspace_limit=free.workspace_size // 4)
    assert 0 < limited.workspace_size <= free.workspace_size // 4
    y = conv2d(x, w, pool=scene.pool, workspace_limit=free.workspace_size // 4)
    expected = reference.conv2d(numbers(1, 2, 4, 16, 16), numbers(2, 6, 4, 3, 3))
    assert reference.relative_error(scene.driver.asnumpy(y), expected) < 1e-5


def test_the_plan_says_what_was_chosen(scene):
    plan = conv2d_plan(lay(scene, numbers(1, 1, 2, 6, 6)), lay(scene, numbers(2, 2, 2, 3, 3)), pool=scene.pool, padding=1)
    assert (plan.name, plan.device, plan.candidates) == ("conv2d", 0, 1)
    assert plan.engine.startswith("host")
    assert plan.outputs[0].shape == (1, 2, 6, 6)


# In parallel regions


def convolve_in_branches(scene):
    images = [numbers(i, 1, 2, 8, 8) for i in range(6)]
    filters = numbers(9, 3, 2, 3, 3)
    w = lay(scene, filters)
    outputs = scene.states.map(conv2d, [lay(scene, image) for image in images], [w] * 6)
    return max(
        reference.relative_error(scene.driver.asnumpy(y), reference.conv2d(image, filters))
        for y, image in zip(outputs, images, strict=True)
    )


def test_g5_concurrent_convolutions_have_workspaces_of_their_own():
    assert max(over_seeds(convolve_in_branches, seeds=range(50))) < 1e-5


def test_g5_control_one_workspace_for_all_states(monkeypatch):
    from handlepool.pool.slot import Slot

    def make(scene):
        monkeypatch.setattr(Slot, "reserve", lambda slot, nbytes: shared)
        shared = scene.driver.allocate(1 << 20)

    assert max(over_seeds(convolve_in_branches, seeds=range(50), make=make)) > 1e-2


def test_conv2d_uses_the_pool_of_the_branch_it_is_called_in():
    with Scene(seed=3) as scene:
        x, w = lay(scene, numbers(1, 1, 2, 6, 6)), lay(scene, numbers(2, 2, 2, 3, 3))

        def library():
            return conv2d(x, w)

        (y,) = scene.states.map(lambda _: library(), [0])
        assert reference.relative_error(scene.driver.asnumpy(y), reference.conv2d(*map(scene.driver.asnumpy, (x, w)))) < 1e-5


def test_conv2d_on_the_second_device():
    with Scene(seed=3) as scene, scene.driver.device(1), scene.driver.create_stream():
        assert scene.driver.array_device(check(scene, bias=True)) == 1


def test_g1_many_threads_convolve_at_a_time(make_driver):
    with Scene(make_driver()) as scene:

        def work():
            with scene.driver.create_stream():
                for _ in range(5):
                    check(scene, bias=True, activation="relu")

        for thread in [Thread(work) for _ in range(8)]:
            thread.finish()
        assert scene.pool.stats()["plans_built"] == 1
