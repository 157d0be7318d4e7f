"""Guards of recorded functions: what a function reaches may change between calls, and the next call computes with it."""

import types
from dataclasses import dataclass

import numpy as np
import pytest
from harness.arrays import value_of

import handlepool
from handlepool.drivers.host.driver import HostDriver
from handlepool.recording import guards

pytestmark = pytest.mark.usefixtures("no_warnings")


@dataclass
class Config:
    scale: float = 2.0
    array: object = None


class Inner:
    __slots__ = ("n", "w")


SCALE = 1.0
module = types.ModuleType("a_module")


class Network:
    factor = 1.0

    def __init__(self, array):
        self.w, self.scale, self.flag, self.text = array(1), 1.0, True, "a"
        self.layers = [array(10), array(20)]
        self.table = {"k": array(30), "n": 1}
        self.config = Config(1.0, array(40))
        self.inner = Inner()
        self.inner.n, self.inner.w = 1, array(50)
        self.host = np.ones(3)
        self.unused = 0
        self.pair = (1, 2)

    def step(self, x, more=1):
        y = handlepool.add(x, self.w) * self.scale * self.factor * SCALE * module.n
        y = handlepool.add(y, self.layers[-1]) if self.flag else handlepool.add(y, self.layers[0])
        y = handlepool.add(y, self.table["k"]) * self.table["n"] * len(self.text) * self.pair[0]
        y = handlepool.add(y, self.config.array) * self.config.scale
        y = handlepool.add(y, self.inner.w) * self.inner.n
        return y * float(self.host[0]) * len(self.layers) * more


def change(name):
    return lambda net, array: setattr(net, name, {"scale": 3.0, "flag": False, "text": "abc", "pair": (3, 2)}[name])


CHANGES = {
    "a number": change("scale"),
    "a flag": change("flag"),
    "a text": change("text"),
    "a tuple": change("pair"),
    "an integer that equals the former float": lambda net, array: setattr(net, "scale", 1),
    "a rebound array": lambda net, array: setattr(net, "w", array(7)),
    "an array in a list": lambda net, array: net.layers.__setitem__(-1, array(7)),
    "an array that is appended": lambda net, array: net.layers.append(array(7)),
    "an array in a dictionary": lambda net, array: net.table.__setitem__("k", array(7)),
    "a number in a dictionary": lambda net, array: net.table.__setitem__("n", 3),
    "another object": lambda net, array: setattr(net, "config", Config(3.0, array(7))),
    "an attribute of an object": lambda net, array: setattr(net.config, "scale", 3.0),
    "an array of an object": lambda net, array: setattr(net.config, "array", array(7)),
    "a slot": lambda net, array: setattr(net.inner, "n", 3),
    "an array in a slot": lambda net, array: setattr(net.inner, "w", array(7)),
    "a value of NumPy's": lambda net, array: net.host.__setitem__(0, 3),
    "an attribute of the class": lambda net, array: setattr(Network, "factor", 3.0),
    "a global": lambda net, array: globals().__setitem__("SCALE", 3.0),
    "an attribute of a module": lambda net, array: setattr(module, "n", 3),
    "a default": lambda net, array: setattr(Network.step, "__defaults__", (3,)),
    "an array in place": lambda net, array: net.w.__setitem__(..., 9),
}


@pytest.fixture(autouse=True)
def as_it_was():
    global SCALE
    SCALE, module.n, Network.factor = 1.0, 1, 1.0
    yield
    SCALE, module.n, Network.factor = 1.0, 1, 1.0
    Network.step.__defaults__ = (1,)


@pytest.mark.parametrize("what", CHANGES)
def test_g19_a_change_between_calls_is_seen(array, what):
    net = Network(array)
    network = handlepool.recorded(net.step)
    for _ in range(2):
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    before = value_of(net.step(array(1)))
    CHANGES[what](net, array)
    for _ in range(2):
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    assert (value_of(net.step(array(1))) != before) is ("equals" not in what)
    assert network.stats().eager == 0


def test_g19_control_without_guards_a_change_is_not_seen(array, without):
    without("guards")
    net = Network(array)
    network = handlepool.recorded(net.step)
    network(array(1))
    net.scale = 3.0
    assert value_of(network(array(1))) != value_of(net.step(array(1)))


def test_what_the_function_does_not_name_is_not_guarded(array):
    net = Network(array)
    network = handlepool.recorded(net.step)
    for number in range(5):
        net.unused = number
        network(array(1))
    assert network.stats().recorded == 1


def test_a_value_that_comes_back_finds_its_program(array):
    net = Network(array)
    network = handlepool.recorded(net.step)
    for number in range(8):
        net.scale = 1.0 + number % 2
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    stats = network.stats()
    assert (stats.recorded, stats.eager) == (2, 0)


def test_an_equal_value_of_another_object_is_no_change(array):
    net = Network(array)
    network = handlepool.recorded(net.step)
    for number in range(5):
        net.scale = float(f"1.{number * 0}")
        net.text = "".join(["a"])
        network(array(1))
    assert network.stats().recorded == 1


def test_a_variable_of_a_closure_is_guarded(array):
    scale, weight = 2.0, array(3)

    def function(x):
        return handlepool.add(x, weight) * scale

    network = handlepool.recorded(function)
    assert value_of(network(array(1))) == 8
    scale = 3.0
    assert value_of(network(array(1))) == 12
    weight = array(4)
    assert value_of(network(array(1))) == 15
    assert network.stats().recorded == 3


def test_after_three_rebound_arrays_it_runs_eagerly_with_a_warning(array):
    net = Network(array)
    network = handlepool.recorded(net.step)
    network(array(1))
    for number in range(3):
        net.w = array(number)
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    assert network.stats().recorded == 4
    net.w = array(9)
    with pytest.warns(RuntimeWarning, match=r"self\.w.*in place"):
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    for number in range(3):
        net.w = array(number)
        assert value_of(network(array(1))) == value_of(net.step(array(1)))
    assert network.stats().programs == 0


def test_many_values_that_are_reached_are_warned_of_once(array):
    net = Network(array)
    network = handlepool.recorded(net.step, programs=20)
    for number in range(8):
        net.scale = float(number)
        network(array(1))
    net.scale = 8.0
    with pytest.warns(RuntimeWarning, match=r"self\.scale.*without axes"):
        network(array(1))
    for number in range(9, 12):
        net.scale = float(number)
        assert value_of(network(array(1))) == value_of(net.step(array(1)))


def test_g19_an_array_that_no_guard_watches_is_read_eagerly(array):
    import io

    class Hidden(io.BytesIO):
        pass

    weights = {1: array(5)}
    getter = weights.get

    def function(x):
        return handlepool.add(x, getter(1))

    network = handlepool.recorded(function)
    for number in range(3):
        weights[1] = array(number)
        assert value_of(network(array(1))) == 1 + number
    del Hidden


def test_a_function_that_reaches_much_of_the_hosts_memory_runs_eagerly(driver, array):
    table = np.ones(100_000, np.float32)

    def function(x):
        return handlepool.add(x, x) * float(table[0])

    network = handlepool.recorded(function)
    with pytest.warns(RuntimeWarning, match="table"):
        network(array(1))
    table[0] = 5
    assert value_of(network(array(1))) == 10


def test_of_torchs_modules_parameters_buffers_modules_and_training_are_guarded():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    found = guards.Guards(HostDriver(), model, ())
    assert found.holds()
    assert len(found) < 25
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert found.holds()
    model.train()
    assert {guard.kind for guard in found.changed()} == {guards.VALUE}
    model.eval()
    assert found.holds()
    for change in (
        lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.zeros(8, 8, 3, 3))),
        lambda: setattr(model[1], "running_mean", torch.zeros(8)),
        lambda: model.append(torch.nn.ReLU()),
    ):
        found = guards.Guards(HostDriver(), model, ())
        change()
        assert not found.holds()
        assert {guard.kind for guard in found.changed()} & {guards.ARRAY, guards.OBJECT}
