"""Torch's tensors as inputs and outputs of programs: `update` and a call copy into them. A stand-in has NumPy's memory."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import handlepool
from handlepool import ArgumentError, ArrayTypeError
from handlepool.tensors.layout import HOST, View


class Tensor:
    is_cuda = False
    written = 0

    def __init__(self, values, conjugate=False):
        self.values = values
        self.conjugate = conjugate
        self.dtype = f"torch.{values.dtype}"
        self.__array_interface__ = values.__array_interface__

    @property
    def shape(self):
        return self.values.shape

    def stride(self):
        return tuple(step // self.values.itemsize for step in self.values.strides)

    def get_device(self):
        return HOST

    def element_size(self):
        return self.values.itemsize

    def data_ptr(self):
        return self.values.ctypes.data


class Torch:
    def elements(self, tensor):
        if tensor.conjugate:
            raise ArrayTypeError("its values are not in memory as they are")
        values = tensor.values
        return View(tensor.data_ptr(), values.shape, values.strides, np.dtype(f"u{values.itemsize}"), HOST, False, tensor)

    def empty_like(self, tensor):
        return Tensor(np.empty_like(tensor.values))

    def written(self, tensor):
        tensor.written += 1


@pytest.fixture
def scene(scene, torch_door, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    torch_door(Torch, "recording.tensors", "recording.update", "recording.outputs", "order.undeclared")
    return scene


def tensor(value, shape=(2, 4)):
    return Tensor(np.full(shape, value, np.float32))


def read(scene, tensor):
    scene.stream.synchronize()
    return tensor.values.max() if tensor.values.min() == tensor.values.max() else np.nan


@pytest.fixture
def program(scene):
    def function(x, named, result):
        def work(result, x, y):
            result.values[...] = x.values + y["y"].values

        scene.driver.enqueue(scene.driver.current_stream().ptr, lambda: work(result, x, named), writes=[], reads=[])
        return {"sum": [result], "name": "sum"}

    given = tensor(1), {"y": tensor(2)}, tensor(0)
    with handlepool.record(function, *given) as program:
        program.given = given
        yield program


def test_an_update_writes_into_tensors(scene, program):
    x, named, _ = program.given
    program.update(x, None, None)  # itself
    program.update(tensor(10), {"y": tensor(20)}, None)
    program.replay()
    assert read(scene, program.outputs["sum"][0]) == 30
    assert read(scene, x) == 10
    assert (x.written, named["y"].written) == (1, 1)
    with pytest.raises(ArgumentError, match=r"argument 0 is the array that .* was recorded with, and .* overwritten"):
        program.update(x, None, None)
    program.update(named["y"], {"y": x}, None)  # swapped
    assert (read(scene, x), read(scene, named["y"])) == (20, 10)


def test_a_call_returns_tensors_of_the_callers_own(scene, program):
    first, second = (program(tensor(value), None, None) for value in (5, 6))
    assert [read(scene, each["sum"][0]) for each in (first, second)] == [7, 8]
    assert first["name"] == "sum"
    assert type(first["sum"][0]) is Tensor
    assert read(scene, program.outputs["sum"][0]) == 8


def test_a_call_copies_into_tensors_that_are_given(scene, program):
    out = {"sum": [tensor(0)], "name": None}
    assert program(tensor(5), {"y": tensor(1)}, None, out=out)["sum"][0] is out["sum"][0]
    assert read(scene, out["sum"][0]) == 6
    strided = Tensor(np.zeros((2, 8), np.float32)[:, ::2])
    program(tensor(7), None, None, out={"sum": [strided], "name": None})
    assert read(scene, strided) == 8


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda scene: tensor(1, (4, 2)), ArgumentError, r"argument 0 was recorded with shape \(2, 4\) and now has"),
        (lambda scene: Tensor(np.zeros((2, 4))), ArgumentError, r"with type torch.float32 and now has type torch.float64"),
        (
            lambda scene: Tensor(np.zeros((4, 2), np.float32).T),
            ArgumentError,
            r"with strides \(4, 1\) and now has strides \(1, 2\), in elements; lay it out as it was recorded, contiguous, or",
        ),
        (lambda scene: np.zeros((2, 4), np.float32), ArrayTypeError, "pass a tensor of the recorded shape and type"),
        (lambda scene: scene.array(1), ArrayTypeError, "pass a tensor of the recorded shape and type"),
        (lambda scene: Tensor(np.zeros((2, 4), np.float32), True), ArrayTypeError, "argument 0, a .*Tensor: its values are not"),
    ],
)
def test_what_is_not_like_the_recorded_tensor_is_refused_and_nothing_is_copied(scene, program, given, error, message):
    for use in (program.update, program):
        with pytest.raises(error, match=message):
            use(given(scene), {"y": tensor(9)}, None)
    program.replay()
    assert read(scene, program.outputs["sum"][0]) == 3


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda scene: tensor(1, (4, 2)), ArgumentError, r"out\['sum'\]\[0\] was recorded with shape"),
        (lambda scene: scene.array(1), ArrayTypeError, r"out\['sum'\]\[0\] was recorded as a .*Tensor"),
        (
            lambda scene: Tensor(np.broadcast_to(np.zeros(4, np.float32), (2, 4))),
            ArgumentError,
            r"out\['sum'\]\[0\] has elements that overlap",
        ),
    ],
)
def test_an_out_that_no_tensor_can_be_copied_into_is_refused(scene, program, out, error, message):
    with pytest.raises(error, match=message):
        program(None, None, None, out={"sum": [out(scene)], "name": None})


def test_two_values_for_one_tensor_are_refused(scene):
    x = tensor(1)
    result = tensor(0)

    def function(x, y, result):
        scene.driver.enqueue(scene.driver.current_stream().ptr, lambda: None, writes=[], reads=[])
        return result

    with handlepool.record(function, x, x, result) as program, pytest.raises(ArgumentError, match="given two different"):
        program.update(tensor(2), tensor(3), None)
