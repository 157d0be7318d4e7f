"""Arrays of other libraries on the host driver: whatever has ``__dlpack__`` or ``__array_interface__`` in host memory."""

import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from harness.graphs import double
from harness.scenes import over_seeds

import handlepool
from handlepool import ArgumentError, ArrayTypeError, CaptureError, ParallelStateExecutor, ParallelStates, conv2d, ops
from handlepool.drivers.host.array import HostArray
from handlepool.tensors import dlpack
from handlepool.tensors.layout import HOST, View
from handlepool.testing.reference import conv2d as convolve
from handlepool.testing.reference import relative_error as error

CPU, CUDA = 1, 2


class Producer:
    """An array of another library that hands its memory out by DLPack 1."""

    def __init__(self, array, device=(CPU, 0)):
        self.array = array
        self.device = device
        self.asked = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append((stream, max_version))
        return self.array.__dlpack__(max_version=max_version)


class OldProducer(Producer):
    """The same by DLPack before 1."""

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        return self.array.__dlpack__()


class Interface:
    """An array of another library with NumPy's array interface."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class CudaInterface:
    """An array of another library with the CUDA array interface."""

    def __init__(self, **described):
        self.__cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3} | described


class Namespaced(Producer):
    """An array of a library with a namespace that takes DLPack."""

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=Namespaced)


KINDS = [Producer, OldProducer, Interface]


@pytest.fixture
def pool(make_pool, make_default):
    pool = make_pool(scheduler="adversarial")
    make_default(pool)
    return pool


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((2, 4, 6, 6), dtype=np.float32)


@pytest.fixture
def w():
    return np.random.default_rng(2).standard_normal((3, 4, 3, 3), dtype=np.float32)


# Values


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_array_is_read_without_a_copy_of_its_values_and_kinds_may_be_mixed(pool, kind, x, w):
    for given in ((kind(x), kind(w)), (pool.driver.asarray(x), kind(w)), (kind(x), pool.driver.asarray(w))):
        y = conv2d(*given, padding=1)
        assert type(y) is HostArray
        assert error(pool.driver.asnumpy(y), convolve(x, w, padding=1)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_out_may_be_of_any_kind_and_is_what_is_returned(pool, kind, x, w):
    values = np.full((2, 3, 4, 4), np.nan, np.float32)
    out = kind(values)
    assert conv2d(x, w, out=out) is out
    assert error(values, convolve(x, w)) < 1e-5


@pytest.mark.parametrize("lanes", [None, 4])
def test_an_array_whose_kind_the_output_would_have_is_refused_while_recording_on_the_host(pool, x, w, lanes):
    given, weights = Namespaced(x), pool.driver.asarray(w)
    with pytest.raises(CaptureError, match=r"argument 0, a .*Namespaced, cannot be recorded on the host driver, .* on a GPU"):
        handlepool.record(lambda t: conv2d(t, weights), given, lanes=lanes)
    with handlepool.record(conv2d, pool.driver.asarray(x), weights, lanes=lanes) as program:
        program.replay()
        assert error(pool.driver.asnumpy(program.outputs), convolve(x, w)) < 1e-5


def test_outputs_are_of_the_first_arguments_kind_where_its_namespace_takes_dlpack(pool, x, w):
    y = conv2d(Namespaced(x), w)
    assert type(y) is Namespaced
    assert error(y.array, convolve(x, w)) < 1e-5
    assert type(conv2d(x, Namespaced(w))) is HostArray


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_types(pool, dtype, x, w):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    x, w = x.astype(kind), w.astype(kind)
    y = conv2d(Interface(x) if dtype == "float16" else x, w)
    assert error(pool.driver.asnumpy(y).astype(np.float64), convolve(x, w)) < 1e-2


def test_strides_are_the_arrays_own(pool, x, w):
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y = conv2d(Producer(last), w)
    assert y.strides[1] == y.itemsize
    assert error(pool.driver.asnumpy(y), convolve(x, w)) < 1e-5


def test_a_fused_activation_and_a_bias(pool, x, w):
    bias = np.arange(3, dtype=np.float32)
    y = conv2d(Producer(x), Producer(w), bias=Interface(bias), activation="relu")
    assert error(pool.driver.asnumpy(y), np.maximum(convolve(x, w) + bias[:, None, None], 0)) < 1e-5


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["apart", "fused"])
@pytest.mark.parametrize("given", [False, True])
def test_a_residual_and_a_bias_in_one_launch_and_in_two(pool, x, w, layout, given):
    x, w, z = (
        np.ascontiguousarray(a.transpose(layout)).transpose(np.argsort(layout)) for a in (x, w, np.ones((2, 3, 4, 4), np.float32))
    )
    bias, out = np.arange(3, dtype=np.float32), np.zeros_like(z)
    before = pool.driver.calls["launch"]
    y = conv2d(
        Namespaced(x), Producer(w), bias=Interface(bias), add=Producer(z), activation="relu", out=Producer(out) if given else None
    )
    assert pool.driver.calls["launch"] - before == (2 if layout[1] == 1 else 1)
    assert type(y) is (Producer if given else Namespaced)
    assert error(out if given else y.array, convolve(x, w, bias=bias, add=z, activation="relu")) < 1e-5


def test_no_outs_and_two_are_refused(pool, x, w):
    for out, match in (((), "holds no array"), ((x, x), "has 1 outputs")):
        for activation in (None, "relu"):
            with pytest.raises(ArgumentError, match=match):
                conv2d(Producer(x), w, activation=activation, out=out)


def test_an_activation_and_gradients(pool, x, w):
    y = ops.relu(Namespaced(x))
    assert (y.array == np.maximum(x, 0)).all()
    dy = np.ones((2, 3, 4, 4), np.float32)
    dx = handlepool.conv2d_input_grad(Producer(dy), w, x.shape)
    assert error(dx, handlepool.conv2d_input_grad(dy, w, x.shape)) == 0
    dw = handlepool.conv2d_weight_grad(Producer(x), dy, w.shape)
    assert error(dw, handlepool.conv2d_weight_grad(x, dy, w.shape)) == 0


def test_a_graph_function_of_ones_own_and_run_by_reference(pool, x, w):
    @handlepool.graph
    def both(g, x, w):
        y = g.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1], name="conv2d")
        return g.relu(y), y

    relu, y = both(Namespaced(x), w)
    assert type(relu) is type(y) is Namespaced
    assert error(relu.array, np.maximum(convolve(x, w), 0)) < 1e-5
    arrays = both.run({"x": Producer(x), "w": Interface(w)})
    assert error(arrays["conv2d::Y"], convolve(x, w)) < 1e-5
    given = np.empty((2, 3, 4, 4), np.float32)
    arrays = both.run({"x": Namespaced(x), "w": w, "conv2d::Y": Producer(given)})
    assert error(given, convolve(x, w)) < 1e-5
    assert type(arrays["relu.0::OUT_0"]) is Namespaced


def test_one_plan_serves_every_kind(pool, x, w):
    conv2d(x, w)
    before = pool.stats()["plans_built"]
    conv2d(Producer(x), Interface(w))
    assert pool.stats()["plans_built"] == before
    assert handlepool.ops.conv2d_plan(Producer(x), w) is handlepool.ops.conv2d_plan(x, w)


def test_plan_for_takes_foreign_arrays(pool, x, w):
    @handlepool.graph
    def conv(g, x, w):
        return g.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1])

    assert conv.plan_for(Producer(x), Interface(w)) is conv.plan_for(x, w)
    assert conv.plan_for(Producer(x[:0]), w).engine == "nothing"


# In branches and tasks


def test_in_a_map_a_branch_and_a_task(pool, w):
    images = [np.random.default_rng(i).standard_normal((1, 4, 5, 5), dtype=np.float32) for i in range(6)]
    states = ParallelStates(3, pool=pool)
    outputs = states.map(lambda image: conv2d(image, Producer(w)), [Namespaced(image) for image in images])
    outputs += states.map(conv2d, [Namespaced(image) for image in images], [Producer(w)] * 6)
    with ParallelStateExecutor(2, pool=pool) as executor:
        futures = [executor.submit(conv2d, Namespaced(image), w) for image in images]
        outputs += [future.synchronize() for future in futures]
    pool.driver.synchronize_stream(pool.driver.current_stream().ptr)
    for image, y in zip(images * 3, outputs, strict=True):
        assert type(y) is Namespaced
        assert error(y.array, convolve(image, w)) < 1e-5


def test_a_forks_branch_writes_a_foreign_out(pool, x, w):
    values = np.full((2, 3, 4, 4), np.nan, np.float32)
    with ParallelStates(2, pool=pool).fork() as fork:
        assert isinstance(fork.run(conv2d, Producer(x), w, out=Producer(values)), Producer)
    pool.driver.synchronize_stream(0)
    assert error(values, convolve(x, w)) < 1e-5


# The protocols


def test_a_producer_is_asked_for_version_1_and_on_the_host_for_no_stream(pool, x, w):
    new, old = Producer(x), OldProducer(w)
    conv2d(new, old)
    assert new.asked == [(None, (1, 0))]
    assert old.asked == [None]


def test_a_producer_on_a_gpu_is_asked_for_the_stream_that_reads(x):
    for stream, passed in ((0, 1), (2, 2), (0x5000, 0x5000)):
        producer = Producer(x, (CUDA, 3))
        assert dlpack.from_dlpack(producer, stream).device_id == 3
        assert producer.asked == [(passed, (1, 0))]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int8, np.uint8, np.int32, np.int64, np.bool_])
def test_dlpack_describes_shape_strides_and_type(dtype):
    array = np.zeros((3, 4, 5), dtype)[:, ::2, 1:]
    view = dlpack.from_dlpack(array, 0)
    assert (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)
    assert (view.ptr, view.size, view.readonly) == (array.ctypes.data, array.size, False)
    assert np.shares_memory(view.as_numpy(), array)


def test_a_view_keeps_its_memory():
    view = dlpack.from_dlpack(np.arange(1000, dtype=np.float32), 0)
    array = view.as_numpy()
    del view
    assert (array == np.arange(1000)).all()


def test_the_cuda_array_interface_describes_shape_strides_type_and_stream():
    view, stream = dlpack.from_cuda_array(CudaInterface(stream=1))
    assert (view.ptr, view.shape, view.strides, view.dtype, view.readonly) == (4096, (2, 3), (12, 4), np.float32, False)
    assert stream == 0
    view, stream = dlpack.from_cuda_array(CudaInterface(strides=(4, 8), data=(512, True), stream=0x70))
    assert (view.strides, view.readonly, stream) == ((4, 8), True, 0x70)
    assert dlpack.from_cuda_array(CudaInterface())[1] is None


def in_use_elsewhere(scene):
    """A branch over an array that says it is in use on another stream, which fills it before and overwrites it afterwards."""
    other, out = scene.driver.create_stream(), scene.array()
    with other:
        x = scene.array(1)
    foreign = CudaInterface(stream=other.ptr)
    foreign.array = x
    with scene.states.fork() as fork:
        fork.run(double, foreign, out=out)
    with other:
        scene.put(x, lambda: 100)
    return scene.read(out)


@pytest.fixture
def on_the_host(monkeypatch):
    """What has the CUDA array interface is in the host's memory."""

    def view(foreign):
        x = foreign.array
        address, stream = x.data.ptr, foreign.__cuda_array_interface__["stream"]
        return View(address, x.shape, x.strides, x.dtype, HOST, False, x), stream

    monkeypatch.setattr("handlepool.graphs.arrays.from_cuda_array", view)


def test_g6_a_branch_is_ordered_with_the_stream_that_an_array_is_in_use_on(on_the_host):
    assert set(over_seeds(in_use_elsewhere)) == {2}


# Errors


@pytest.mark.parametrize(
    ("described", "expected", "text"),
    [
        ({"stream": 0}, ArgumentError, "stream 0"),
        ({"mask": object()}, ArrayTypeError, "mask"),
        ({"typestr": ">f4"}, ArrayTypeError, "order"),
        ({"typestr": "<c8"}, ArrayTypeError, "complex64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_cuda_array_interface_may_not_say(described, expected, text):
    with pytest.raises(expected, match=text):
        dlpack.from_cuda_array(CudaInterface(**described))


@pytest.mark.parametrize(("name", "operand"), [("x", "argument 0"), ("w", "argument 1"), ("out", "out=")])
def test_memory_of_a_gpu(pool, x, w, name, operand):
    arrays = {"x": x, "w": w, "out": np.empty((2, 3, 4, 4), np.float32)}
    arrays[name] = Producer(arrays[name], (CUDA, 0))
    with pytest.raises(ArrayTypeError, match=f"conv2d: {operand}, a test_arrays.Producer: the array is in a GPU's memory"):
        conv2d(arrays.pop("x"), arrays.pop("w"), **arrays)
    with pytest.raises(ArrayTypeError, match="in a GPU's memory"):
        conv2d(CudaInterface(), w)


class Refusing(Producer):
    def __dlpack__(self, **_):
        raise BufferError("not today")


@pytest.mark.parametrize(
    ("array", "expected", "text"),
    [
        (Producer(np.zeros((2, 4, 6, 6), np.complex64)), ArrayTypeError, "type code 5"),
        (Producer(np.zeros((2, 4, 6, 6), np.uint16)), ArrayTypeError, "no data type 'uint16'"),
        (Producer(np.zeros((2, 4, 8, 8), np.float32)[:, :, ::-1]), ArgumentError, "contiguous copy"),
        (Producer(np.zeros((4, 6, 6), np.float32)), ArgumentError, "3 axes"),
        (Producer(np.zeros((2, 4, 6, 6), np.float32), (8, 0)), ArrayTypeError, "DLPack's type 8"),
        (Refusing(np.zeros((2, 4, 6, 6), np.float32)), ArrayTypeError, "does not export its memory by DLPack, .*: not today"),
    ],
    ids=["complex", "unsigned", "negative strides", "rank", "device", "refusing"],
)
def test_what_no_call_could_take(pool, array, expected, text, w):
    with pytest.raises(expected, match=text):
        conv2d(array, w)


@pytest.mark.parametrize("kind", [Producer, Interface, np.asarray])
def test_an_empty_batch_of_any_kind_gives_an_empty_result(pool, kind, w):
    none = kind(np.zeros((0, 4, 6, 6), np.float32))
    out = np.zeros((0, 3, 4, 4), np.float32)
    assert tuple(conv2d(none, w).shape) == conv2d(none, w, out=out).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("kind", [Producer, Interface, np.asarray])
def test_an_output_that_cannot_be_written(pool, kind, x, w):
    values = np.zeros((2, 3, 4, 4), np.float32)
    values.flags.writeable = False
    with pytest.raises(ArgumentError, match="cannot be written"):
        conv2d(x, w, out=kind(values))
    pool.driver.synchronize_stream(0)
    assert not values.any()


def test_an_output_that_lies_over_an_input(pool, x):
    w = np.ones((4, 4, 1, 1), np.float32)
    with pytest.raises(ArgumentError, match="shares memory"):
        conv2d(Producer(x), w, out=Interface(x))


def test_nothing_is_imported_for_it():
    program = """
import sys
import numpy as np
import handlepool
class Foreign:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
x = np.ones((1, 1, 4, 4), np.float32)
with handlepool.HandlePool(driver="host") as pool:
    handlepool.conv2d(Foreign(x), x, pool=pool)
    handlepool.ParallelStates(2, pool=pool).map(lambda x: handlepool.conv2d(x, x), [Foreign(x)])
print(sorted({"torch", "jax", "cupy", "handlepool.integrations"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
