"""Objects in which a branch is given arrays: keys, iterators, weak references, and objects of any type written in C."""

import asyncio
import collections
import contextvars
import functools
import gc
import itertools
import os
import queue
import random
import re
import threading
import types
import weakref

import numpy as np
import pytest
from harness.scenes import Scene, over_seeds

import handlepool
from handlepool._util import reachable
from handlepool._util.reachable import leaves
from handlepool.order import operation as operation_module

pytestmark = pytest.mark.usefixtures("known")


class Layer:
    def __init__(self, h):
        self.h = h


class Sequence(Layer):
    def __getitem__(self, index):
        return self.h


class Partial(functools.partial):
    pass


class Ref(weakref.ref):
    pass


class KeyedByWeak(weakref.WeakKeyDictionary):
    pass


class Failure(Exception):
    pass


class Objects(np.ndarray):
    pass


def same(h):
    return h


def of_objects(value, kind=np.ndarray):
    array = np.empty(1, object)
    array[0] = value
    return array.view(kind)


def record_of(value):
    array = np.empty(1, [("a", object)])
    array["a"][0] = value
    return array[0]


def queue_of(value):
    made = queue.SimpleQueue()
    made.put(value)
    return made


def context_of(value):
    variable, context = contextvars.ContextVar("variable"), contextvars.Context()
    context.run(variable.set, value)
    return context


FORMS = {
    "keys of a dictionary": (lambda layer: {layer: []}, lambda d: next(iter(d)).h),
    "keys that are tuples": (lambda layer: {(layer, 1): []}, lambda d: next(iter(d))[0].h),
    "keys()": (lambda layer: {layer: []}.keys(), lambda keys: next(iter(keys)).h),
    "an iterator of keys": (lambda layer: iter({layer: []}), lambda keys: next(keys).h),
    "items()": (lambda layer: {layer: []}.items(), lambda items: next(iter(items))[0].h),
    "keys of an OrderedDict": (lambda layer: collections.OrderedDict({layer: []}), lambda d: next(iter(d)).h),
    "keys of a proxy": (lambda layer: types.MappingProxyType({layer: []}), lambda d: next(iter(d)).h),
    "keys of a WeakKeyDictionary": (lambda layer: weakref.WeakKeyDictionary({layer: 1}), lambda d: next(iter(d)).h),
    "a class over WeakKeyDictionary": (lambda layer: KeyedByWeak({layer: 1}), lambda d: next(iter(d)).h),
    "keys() of a WeakKeyDictionary": (lambda layer: weakref.WeakKeyDictionary({layer: 1}).keys(), lambda keys: next(keys).h),
    "iter() of a class": (lambda layer: iter(Sequence(layer.h)), next),
    "reversed(values())": (lambda layer: reversed({1: layer.h}.values()), next),
    "reversed(values()) of an OrderedDict": (lambda layer: reversed(collections.OrderedDict(a=layer.h).values()), next),
    "iter(callable, sentinel)": (lambda layer: iter(lambda: layer, 0), lambda each: next(each).h),
    "a class over partial": (lambda layer: Partial(same, layer.h), lambda call: call()),
    "a class over weakref.ref": (lambda layer: Ref(layer), lambda ref: ref().h),
    "a staticmethod": (lambda layer: staticmethod(lambda: layer.h), lambda call: call()),
    "a classmethod": (lambda layer: classmethod(lambda _: layer.h), lambda call: call.__get__(None, int)()),
    "a property": (lambda layer: property(lambda _: layer.h), lambda each: each.__get__(1)),
    "objects of a subclass": (lambda layer: of_objects(layer, np.matrix), lambda matrix: matrix[0, 0].h),
    "a record of objects": (lambda layer: record_of(layer), lambda record: record["a"].h),
    "an array's flat": (lambda layer: of_objects(layer.h).flat, next),
    "an exception": (lambda layer: ValueError(layer.h), lambda error: error.args[0]),
    "a class over Exception": (lambda layer: Failure("a", [layer]), lambda error: error.args[1][0].h),
    "a cell": (lambda layer: types.CellType(layer), lambda cell: cell.cell_contents.h),
    "a slice": (lambda layer: slice(layer.h), lambda each: each.stop),
    "a queue": (lambda layer: queue_of(layer), lambda each: each.get().h),
    "a context": (lambda layer: context_of(layer), lambda context: next(iter(context.values())).h),
    "a chain of iterators": (lambda layer: itertools.islice(itertools.chain([layer]), 1), lambda each: next(each).h),
}


def tenfold(scene, y):
    scene.put(y, lambda x: 10 * x, y)


def reads(scene, form, way):
    make, get = FORMS[form]
    layer = Layer(scene.array(1))
    given = make(layer)

    def read(given):
        return scene.plus(get(given), 1)

    call = handlepool.operation(read) if way == "operation" else read
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, layer.h)
        z = fork.run(lambda: read(given)) if way == "closure" else fork.run(call, given)
    return scene.read(z)


@pytest.mark.parametrize("way", ["argument", "closure", "operation"])
@pytest.mark.parametrize("form", FORMS)
def test_g17_whatever_a_branch_is_given_an_array_in_it_follows_the_writer_of_that(form, way):
    assert {*over_seeds(lambda scene: reads(scene, form, way), seeds=range(30))} == {11}


@pytest.mark.parametrize("form", FORMS)
def test_g17_control_where_that_is_not_looked_into(form, monkeypatch):
    kind = type(FORMS[form][0](Layer(1)))

    def leaves_of_others(first, *values, **options):
        if type(first) is tuple:
            first = tuple([each for each in first if type(each) is not kind])
        return leaves(first, *values, **options)

    monkeypatch.setattr("handlepool.order.reached.leaves", leaves_of_others)
    assert {*over_seeds(lambda scene: reads(scene, form, "argument"), control=True)} != {11}


def mutates_keys(scene):
    @handlepool.operation(mutates="graph")
    def step(graph):
        for layer in graph["layers"]:
            tenfold(scene, layer.h)

    layer = Layer(scene.array(1))
    with scene.states.fork() as fork:
        fork.run(step, {"layers": {layer: []}})
        # A plain function's first call would wait for readers of its arguments.
        z = fork.run(handlepool.operation(scene.plus, mutates=()), layer.h, 1)
    return scene.read(z)


def test_g17_an_operation_that_mutates_a_dictionary_writes_the_arrays_of_its_keys():
    assert {*over_seeds(mutates_keys)} == {11}


@pytest.mark.unmeasured
def test_g17_control_where_keys_are_left_out(monkeypatch):
    monkeypatch.setattr(operation_module, "leaves", lambda *values, keys=False, **options: leaves(*values, **options))
    assert {*over_seeds(mutates_keys, control=True)} != {11}


# Any structure of these

INNER = {
    "list": (lambda x: [x], lambda g: g[0]),
    "reversed": (lambda x: reversed({1: x}.values()), next),
    "iter": (lambda x: iter(lambda: [x], 0), lambda g: next(g)[0]),
    "partial": (lambda x: Partial(same, x), lambda g: g()),
    "staticmethod": (lambda x: staticmethod(lambda: x), lambda g: g()),
    "classmethod": (lambda x: classmethod(lambda _: x), lambda g: g.__get__(None, int)()),
    "objects": (lambda x: of_objects(x, Objects), lambda g: g[0]),
    "exception": (lambda x: Failure(1, x), lambda g: g.args[1]),
    "proxy": (lambda x: types.MappingProxyType({"a": x}), lambda g: g["a"]),
    "cell": (types.CellType, lambda g: g.cell_contents),
    "generator": (lambda x: (each for each in [x]), next),
}
OF_LAYERS = {
    "itself": (same, lambda g: g.h),
    "key": (lambda layer: {layer: 1}, lambda g: next(iter(g)).h),
    "keys": (lambda layer: {layer: 1}.keys(), lambda g: next(iter(g)).h),
    "weak key": (lambda layer: weakref.WeakKeyDictionary({layer: 1}), lambda g: next(iter(g)).h),
    "ref": (lambda layer: Ref(layer), lambda g: g().h),
    "sequence": (lambda layer: iter(Sequence(layer.h)), next),
}


def random_structure(choose):
    """Return a function that makes a structure around an array, of which layers are kept in a list, and one that takes it out."""
    inner = [choose.choice([*INNER.values()]) for _ in range(choose.randrange(3))]
    layer = choose.choice([None, *OF_LAYERS.values()])
    outer = [choose.choice([*INNER.values()]) for _ in range(choose.randrange(3) if inner or layer else 1)]

    def make(h, kept):
        for each, _ in inner:
            h = each(h)
        if layer is not None:
            kept.append(Layer(h))
            h = layer[0](kept[-1])
        for each, _ in outer:
            h = each(h)
        return h

    def take(given):
        for _, get in (*outer[::-1], *([layer] if layer else ()), *inner[::-1]):
            given = get(given)
        return given

    return make, take


def run_structure(number, *, apart):
    """Return a read behind a write, and whether a branch over another array, or over the same one, overlaps the write."""
    make, take = random_structure(random.Random(number))
    kept, streams = [], []
    with Scene(seed=number) as scene:
        x, y = scene.array(1), scene.array(5)
        given, other = make(x, kept), make(y if apart else x, kept)

        def write(y):
            streams.append(scene.driver.current_stream().ptr)
            tenfold(scene, y)

        def read(given):
            streams.append(scene.driver.current_stream().ptr)
            return scene.plus(take(given), 1)

        with scene.states.fork() as fork:
            fork.run(write, x)
            before = scene.driver.calls["wait_event"]
            fork.run(read, other)
            waits = scene.driver.calls["wait_event"] - before
            z = fork.run(read, given)
        # One wait is for the caller's stream.
        return scene.read(z), streams[0] != streams[1] and waits == 1


@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.parametrize("part", range(6))
def test_g17_any_structure_is_ordered_and_one_of_other_arrays_overlaps(part):
    for number in range(part * 50, part * 50 + 50):
        assert run_structure(number, apart=True) == (11, True), number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a branch waits because")
def test_g17_many_structures_are_ordered_and_those_of_other_arrays_overlap():
    """HANDLEPOOL_TEST_COUNT says how many."""
    count = int(os.environ.get("HANDLEPOOL_TEST_COUNT", "2000"))
    found = [run_structure(300 + number, apart=True) for number in range(count)]
    assert {value for value, _ in found} == {11}
    assert sum(apart for _, apart in found) >= 0.95 * count


@pytest.mark.filterwarnings("ignore:a branch waits because")
def test_g7_control_structures_of_one_array_do_not_overlap():
    assert not any(run_structure(number, apart=False)[1] for number in range(50))


# Where nothing is looked into


@pytest.mark.parametrize(
    "value", [re, Layer, threading.Lock(), threading.RLock(), handlepool, same.__code__, 1, "a", None, np.ones(3), np.float32(1)]
)
def test_modules_locks_classes_and_plain_values_hold_nothing(value):
    assert [*leaves(value, calls=True)] == [value]


def test_pools_streams_and_states_hold_nothing(scene):
    for value in (scene.pool, scene.stream, scene.states):
        assert [*leaves(value, calls=True)] == [value]


def test_of_an_exception_no_frames_are_looked_into():
    def fail(array):
        raise ValueError(array)

    unseen, seen = np.ones(3), np.ones(3)
    try:
        fail(seen)
    except ValueError as error:
        found = [*leaves(error, calls=True)]
    assert any(each is seen for each in found)
    assert not any(each is unseen for each in found)


def test_the_names_of_a_module_are_not_looked_into():
    assert len([*leaves(types.CellType(globals()), staticmethod(vars(np)), calls=True)]) < 10


def test_an_event_loop_and_a_future_are_small():
    loop = asyncio.new_event_loop()
    try:
        assert len([*leaves(loop.create_future(), calls=True)]) < 100
    finally:
        loop.close()


def test_a_weak_reference_to_an_object_that_is_gone_is_no_error(scene):
    given = [Ref(Layer(scene.array(1))), weakref.WeakKeyDictionary({Layer(1): 1})]
    gc.collect()
    with scene.states.fork() as fork:
        assert fork.run(lambda refs: refs[0]() is None, given)


def test_a_class_of_a_user_is_not_remembered():
    class Mine(Exception):
        pass

    seen = weakref.ref(Mine)
    assert len([*leaves(Mine(1), {Mine(2): 3}, calls=True)])
    del Mine
    gc.collect()
    assert seen() is None
    assert not any(kind.__module__ == __name__ for kind in reachable._ends)


def test_a_long_dictionary_of_plain_keys_is_not_walked():
    assert len([*leaves(dict.fromkeys(range(10**5), 1), calls=True)]) == 0
