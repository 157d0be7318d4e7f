"""Containers among the arguments and results of recorded functions: their attributes, their classes and their identity."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import handlepool
from handlepool import ArgumentError
from handlepool.recording import keys
from handlepool.testing.pools import host_pool


@pytest.fixture
def array():
    """Makes an array on the device, all of one value."""
    with host_pool() as pool:
        yield lambda value: pool.driver.asarray(np.full((1, 4, 3, 4), value, np.float32))


@handlepool.operation
def scaled(x, by):
    return x * by


def value_of(found):
    values = np.unique(found.get())
    assert len(values) == 1
    return float(values[0])


class Items(list):
    pass


class Row(tuple):
    pass


class Table(dict):
    pass


class Scaled(dict):
    def __getitem__(self, key):
        return dict.__getitem__(self, key) * self.by


class Pair(namedtuple("Pair", "x y")):
    pass


@dataclass
class Data:
    x: object


@dataclass(eq=False)
class Options(dict):
    by: float


def with_attributes(value, **attributes):
    for name, each in attributes.items():
        setattr(value, name, each)
    return value


def options(x, by):
    made = Options(by)
    made["x"] = x
    return made


FORMS = {
    "a list": (lambda x, by: with_attributes(Items([x]), by=by), lambda v: scaled(v[0], v.by)),
    "a tuple": (lambda x, by: with_attributes(Row([x]), by=by), lambda v: scaled(v[0], v.by)),
    "a dictionary": (lambda x, by: with_attributes(Table(x=x), by=by), lambda v: scaled(v["x"], v.by)),
    "a dictionary with code": (lambda x, by: with_attributes(Scaled(x=x), by=by), lambda v: scaled(v["x"], 1.0)),
    "a named tuple": (lambda x, by: with_attributes(Pair(x, 0), by=by), lambda v: scaled(v.x, v.by)),
    "a data class": (lambda x, by: with_attributes(Data(x), by=by), lambda v: scaled(v.x, v.by)),
    "a data class over a dictionary": (options, lambda v: scaled(v["x"], v.by)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lanes", [None, 4])
def test_g19_attributes_of_a_container_are_of_the_key(array, form, lanes):
    make, function = FORMS[form]
    network = handlepool.recorded(function, lanes=lanes)
    for _ in range(2):
        for by in (2.0, 3.0):
            assert value_of(network(make(array(1), by))) == by
    assert network.stats().programs == 2
    assert network.stats().eager == 0


def test_g19_control_without_attributes_in_the_key_a_call_is_wrong(array, monkeypatch):
    monkeypatch.setattr(keys, "attributes_of", lambda _: [])
    make, _ = FORMS["a list"]
    network = handlepool.recorded(lambda v: scaled(v[0], getattr(v, "by", 2.0)))
    values = [value_of(network(make(array(1), by))) for by in (2.0, 3.0)]
    assert values != [2.0, 3.0]


def test_g19_an_array_in_an_attribute_is_an_input(array):
    network = handlepool.recorded(lambda v: handlepool.add(v["x"], v.more))
    for number in range(3):
        assert value_of(network(with_attributes(Table(x=array(1)), more=array(number)))) == 1 + number
    assert network.stats().programs == 1
    # An entry that is an attribute as well is one input.
    network = handlepool.recorded(lambda v: scaled(v.x, 2.0) * scaled(v["x"], 1.0))
    for number in range(3):
        x = array(number)
        assert value_of(network(with_attributes(Table(x=x), x=x))) == 2 * number**2
    assert network.stats().eager == 0


@pytest.mark.parametrize(
    "make", [lambda x: [x], lambda x: {"x": x}, Data, lambda x: [1, 2]], ids=["list", "dict", "data", "plain"]
)
def test_g19_one_container_in_two_places_is_another_key_than_two(array, make):
    def function(x, a, b):
        return scaled(x, 2.0) if a is b else scaled(x, 3.0)

    network = handlepool.recorded(function)
    for _ in range(2):
        one = make(array(5))
        assert value_of(network(array(1), one, one)) == 2
        assert value_of(network(array(1), one, make(array(5)))) == 3
    assert network.stats().programs == 2


def test_g19_one_array_in_two_places_is_another_key_than_two(array):
    def function(a, b):
        return scaled(a, 2.0) if a is b else scaled(a, 3.0)

    network = handlepool.recorded(function)
    for _ in range(2):
        x = array(1)
        assert [value_of(network(x, x)), value_of(network(x, x[:])), value_of(network(x, array(1)))] == [2, 3, 3]
    assert network.stats().programs == 3


def test_a_read_only_array_runs_eagerly_and_is_not_written(array):
    network = handlepool.recorded(lambda x: x * 2 + 1)
    x = array(1)
    assert [value_of(network(x)) for _ in range(3)] == [3, 3, 3]
    fixed = np.broadcast_to(x, x.shape)
    with pytest.warns(RuntimeWarning, match="read-only"):
        assert value_of(network(fixed)) == 3
    assert value_of(network(fixed)) == 3
    assert network.stats().eager == 2


# Results


@pytest.mark.parametrize("recorded", [False, True])
def test_a_result_keeps_its_class(array, recorded):
    plain = namedtuple("Plain", "x y")

    def function(x):
        y = handlepool.add(x, x)
        return OrderedDict(y=y, z=plain(y, (1, 2)), shape=Row([1, 2]))

    call = handlepool.recorded(function) if recorded else handlepool.record(function, array(0))
    for number in range(3):
        found = call(array(number))
        assert type(found) is OrderedDict
        assert [*found] == ["y", "z", "shape"]
        assert type(found["z"]) is plain
        assert type(found["shape"]) is Row
        assert value_of(found["y"]) == value_of(found["z"].x) == 2 * number


RESULTS = {
    "a list": lambda y: with_attributes(Items([y]), by=2),
    "a dictionary": lambda y: Table(y=y),
    "a default dictionary": lambda y: defaultdict(list, y=y),
    "a named tuple with attributes": lambda y: with_attributes(Pair(y, 0), by=2),
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_a_result_of_a_class_that_no_call_could_make_runs_eagerly(array, make):
    def function(x):
        return make(handlepool.add(x, x))

    network = handlepool.recorded(function)
    with pytest.warns(RuntimeWarning, match="cannot copy"):
        first = network(array(1))
    for _ in range(2):
        found = network(array(1))
        assert type(found) is type(first)
        assert vars(found) == vars(first) if hasattr(first, "__dict__") else found.keys() == first.keys()
    program = handlepool.record(function, array(1))
    with pytest.raises(ArgumentError, match="overwrite"):
        program(array(2))
    program.close()


def test_one_list_in_two_places_of_a_result_runs_eagerly(array):
    def function(x):
        found = [handlepool.add(x, x)]
        return found, found

    network = handlepool.recorded(function)
    with pytest.warns(RuntimeWarning, match="two places"):
        network(array(1))
    one, other = network(array(1))
    assert one is other
