"""Arrays with the CUDA array interface or DLPack and no library behind them."""

import weakref

import numpy as np
import pytest

import handlepool
from handlepool import ArgumentError, ArrayTypeError, ParallelStates, conv2d
from handlepool.pool import deferred
from handlepool.testing.reference import conv2d as convolve

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


class Interface:
    """Memory by the CUDA array interface alone."""

    def __init__(self, array, **described):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None} | described


class Producer:
    """Memory by DLPack alone; what it is asked is kept."""

    def __init__(self, array):
        self.array = array
        self.asked = []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream)


@pytest.fixture
def x():
    return cupy.asarray(np.random.default_rng(0).integers(-3, 4, (1, 16, 8, 8)).astype(np.float32))


@pytest.fixture
def w():
    return cupy.asarray(np.random.default_rng(1).integers(-3, 4, (16, 16, 3, 3)).astype(np.float32))


@pytest.mark.parametrize("kind", [Interface, Producer])
def test_values_and_out(pool, stream, kind, x, w):
    stream.synchronize()
    y = conv2d(kind(x), kind(w), pool=pool)
    assert type(y) is cupy.ndarray
    assert np.allclose(y.get(), convolve(x.get(), w.get()), atol=0.25)
    out = cupy.full_like(y, np.nan)
    given = kind(out)
    assert conv2d(x, kind(w), out=given, pool=pool) is given
    assert np.array_equal(out.get(), y.get())


def test_a_producer_orders_the_stream_that_reads(pool, stream, x, w):
    producer = Producer(x)
    conv2d(producer, w, pool=pool)
    assert producer.asked == [stream.ptr]
    with cupy.cuda.Stream.null:
        conv2d(producer, w, pool=pool)
    assert producer.asked == [stream.ptr, 1]


def read_what_another_stream_writes_late(pool, kernels, latch, named):
    x, w = cupy.zeros((1, 16, 8, 8), np.float32), cupy.ones((16, 16, 3, 3), np.float32)
    conv2d(x, w, pool=pool)
    other = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with other:
        latch.hold()
        kernels.write(x.ravel(), 1)
    y = conv2d(Interface(x, stream=other.ptr if named else None), w, pool=pool)
    return y, other


def test_g6_the_stream_that_an_interface_names_is_waited_for_and_waits(pool, stream, kernels, latch):
    y, other = read_what_another_stream_writes_late(pool, kernels, latch, True)
    assert not stream.record().done
    assert not other.record().done
    latch.release()
    assert (y.get() == 16 * 9).all()


def test_g6_control_an_interface_that_names_no_stream_is_read_at_once(pool, stream, kernels, latch, comes_to_pass):
    y, _other = read_what_another_stream_writes_late(pool, kernels, latch, False)
    assert comes_to_pass(stream)
    latch.release()
    assert not y.get().any()


def test_g6_a_fork_waits_for_the_stream_that_an_interface_names(pool, stream, kernels, latch):
    x, w = cupy.zeros((1, 16, 8, 8), np.float32), cupy.ones((16, 16, 3, 3), np.float32)
    conv2d(x, w, pool=pool)
    other = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with other:
        latch.hold()
        kernels.write(x.ravel(), 1)
    with ParallelStates(2, pool=pool).fork() as fork:
        outputs = [fork.run(conv2d, Interface(x, stream=other.ptr), w, pool=pool) for _ in range(3)]
    with other:
        kernels.write(x.ravel(), 5)  # after the readers
    latch.release()
    assert all((y.get() == 16 * 9).all() for y in outputs)


def test_g8_memory_of_a_library_that_cannot_be_told_is_kept_until_the_gpu_has_passed_the_call(pool, stream, latch, x, w):
    conv2d(Producer(x), w, pool=pool)
    stream.synchronize()
    deferred.deferred.run(1000)  # what may wait for the GPU
    latch.hold()
    producer = Producer(x)
    alive = weakref.ref(producer)
    conv2d(producer, w, pool=pool)
    del producer
    deferred.deferred.run()
    assert alive() is not None
    latch.release()
    stream.synchronize()
    deferred.deferred.run(1000)
    assert alive() is None


def test_an_empty_batch_gives_an_empty_result(pool, stream, x, w):
    none = Interface(x, data=(x.data.ptr, False), shape=(0, 16, 8, 8))
    assert conv2d(none, w, pool=pool).shape == conv2d(x[:0], w, pool=pool).shape == (0, *conv2d(x, w, pool=pool).shape[1:])


def test_what_cannot_be_taken(pool, stream, x, w):
    for wrong, expected, text in (
        (Interface(x, typestr="<c8"), ArrayTypeError, "complex64"),
        (Interface(x, strides=(4096, -256, 32, 4)), ArgumentError, "contiguous"),
        (Interface(x, stream=0), ArgumentError, "stream 0"),
        (np.zeros((1, 16, 8, 8), np.float32), ArrayTypeError, "host memory"),
        (Interface(x, data=(np.zeros(4096, np.float32).ctypes.data, False)), ArrayTypeError, "host memory"),
        (object(), ArrayTypeError, "takes cupy.ndarray, torch tensors"),
    ):
        with pytest.raises(expected, match=text):
            conv2d(wrong, w, pool=pool)
    out = cupy.empty((1, 16, 6, 6), np.float32)
    with pytest.raises(ArgumentError, match=r"conv2d: out=, an? .* cannot be written"):
        conv2d(x, w, out=Interface(out, data=(out.data.ptr, True)), pool=pool)


@pytest.mark.two_gpus
def test_g3_memory_of_another_device(pool, x, w):
    with cupy.cuda.Device(1):
        elsewhere = cupy.zeros((1, 16, 8, 8), np.float32)
    for kind in (Interface, Producer):
        with pytest.raises(handlepool.DeviceMismatchError, match="on device 1 and the current device is 0"):
            conv2d(kind(elsewhere), w, pool=pool)
