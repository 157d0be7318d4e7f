"""Branches of plain functions: what is not known of them is guessed, and that is said (guarantee 17)."""

import functools
import gc
import itertools
import operator
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest
from harness import measuring
from harness.insides import known_writes, leases_of
from harness.scenes import BranchError, Scene, over_seeds

import handlepool
from handlepool import ArgumentError, HandlePool, ParallelStateExecutor, ParallelStates
from handlepool._util import reachable
from handlepool._util.reachable import _has_attributes, leaves
from handlepool.order import plain_calls
from handlepool.order.books import DataOrder
from handlepool.order.plain_calls import PlainCall

pytestmark = pytest.mark.usefixtures("known")


class Pure(dict):
    """Says of every function that it returns new arrays alone."""

    def get(self, key):
        return False


def tenfold(scene, y):
    scene.put(y, lambda x: 10 * x, y)


def twofold(scene, y):
    scene.put(y, lambda x: 2 * x, y)


def new(scene, x):
    return scene.plus(x, 1)


def other(scene, x):
    return scene.plus(x, 2)


# First calls


def read_and_overwritten(scene, function):
    y = scene.array(1)
    with scene.states.fork() as fork:
        z = fork.run(scene.plus, y, 1)
        fork.run(function, scene, y)
    return scene.read(y), scene.read(z)


@pytest.mark.parametrize("make", [lambda: tenfold, lambda: lambda scene, y: tenfold(scene, y)], ids=["function", "lambda"])
def test_g17_the_first_call_of_a_function_waits_for_readers_of_what_it_may_write(known, make):
    def scenario(scene):
        known.clear()
        return read_and_overwritten(scene, make())

    assert {*over_seeds(scenario)} == {(10, 2)}


@pytest.mark.unmeasured
def test_g17_control_a_function_that_is_taken_to_write_nothing_does_not(monkeypatch, without):
    monkeypatch.setattr(plain_calls, "_may_write", Pure())
    without("the errors of late writes")
    assert {*over_seeds(lambda scene: read_and_overwritten(scene, tenfold), control=True)} != {(10, 2)}


@pytest.mark.unmeasured
def test_g7_a_function_that_returned_new_arrays_waits_for_no_other_reader_from_its_second_call_on(scene):
    x = scene.array(1)
    ordered = []
    for _ in range(3):
        with scene.states.fork() as fork:
            for function in (new, other):
                fork.run(function, scene, x)
            ordered.append(len(leases_of(fork).slots) == 1)  # the second goes on where the first has run
    assert ordered == [True, False, False]


def test_a_lambda_is_known_again_by_its_code_and_by_the_functions_that_it_was_given(scene):
    x = scene.array(1)

    def is_guessed(function, *args):
        with scene.states.fork() as fork:
            guessed = bool(PlainCall(scene.driver, function, (scene, x, *args), {}).assumed_writes)
            fork.run(function, scene, x, *args)
        measuring.settle(scene)
        return guessed

    assert [is_guessed(lambda scene, x: scene.plus(x, 1)) for _ in range(3)] == [True, False, False]
    given = [is_guessed(lambda scene, x, function: function(scene, x), function) for function in (new, new, other, tenfold, new)]
    assert given == [True, False, True, True, False]


def raised(scene):
    def failing(scene, y):
        tenfold(scene, y)
        raise BranchError

    known_writes().clear()
    y = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(scene.plus, scene.array(1), 1)  # from now on it is known to write nothing
        with pytest.raises(BranchError):
            fork.run(failing, scene, y)
        z = fork.run(scene.plus, y, 1)
    return scene.read(z)


def test_g17_one_that_raises_may_have_written_what_it_was_given():
    assert {*over_seeds(raised)} == {11}


def raised_for_once(scene):
    """A function that returned new arrays before writes in place, and raises."""
    known_writes().clear()
    y = scene.array(1)

    def failing(scene, y, fails):
        if not fails:
            return new(scene, y)
        tenfold(scene, y)
        raise BranchError

    with scene.states.fork() as fork:
        fork.run(scene.plus, scene.array(1), 1)
        fork.run(failing, scene, scene.array(1), 0)
        with pytest.raises(BranchError):
            fork.run(failing, scene, y, 1)
        z = fork.run(scene.plus, y, 1)
    return scene.read(z)


def test_g17_one_that_raises_for_once_may_have_written_what_it_was_given():
    assert {*over_seeds(raised_for_once)} == {11}


@pytest.mark.unmeasured
def test_g17_control_one_that_raises_and_is_taken_to_have_read_alone_is_not_waited_for(without):
    without("writes of failed calls")
    assert {*over_seeds(raised, control=True)} != {11}
    assert {*over_seeds(raised_for_once, control=True)} != {11}


# What is reached


class Model:
    """What a user's class does with forks: lambdas in its methods, arrays in its attributes."""

    def __init__(self, scene):
        self.scene, self.h = scene, scene.array(1)

    def by_closure(self, fork):
        return fork.run(lambda: self.scene.plus(self.h, 1))

    def by_default(self, fork):
        return fork.run(lambda model=self: model.scene.plus(model.h, 1))

    def by_argument(self, fork):
        return fork.run(lambda model: model.scene.plus(model.h, 1), self)

    def in_a_list(self, fork):
        return fork.run(lambda models: models[0].scene.plus(models[0].h, 1), [self])

    def by_method(self, fork):
        return fork.run(self.plus_one)

    def plus_one(self):
        return self.scene.plus(self.h, 1)


class Holder:
    def __init__(self, scene, h):
        self.scene, self.h = scene, h


@dataclass
class WithoutField:
    scene: object

    def __post_init__(self):
        self.h = None


class Slotted:
    __slots__ = ("__h", "scene")

    def __init__(self, scene, h):
        self.scene, self.__h = scene, h

    @property
    def h(self):
        return self.__h


def without_field(scene, h):
    holder = WithoutField(scene)
    holder.h = h
    return holder


class InADeque:
    def __init__(self, scene, h):
        self.scene, self.parts = scene, deque([{"h": (h,)}])

    h = property(lambda self: self.parts[0]["h"][0])


def reads_an_attribute(scene, way):
    model = Model(scene)
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, model.h)
        z = getattr(model, way)(fork)
    return scene.read(z)


def reads_of_an_object(scene, kind):
    h = scene.array(1)
    holder = kind(scene, h)
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, h)
        z = fork.run(lambda: holder.scene.plus(holder.h, 1))
    return scene.read(z)


class AList(list):
    def __init__(self, scene, h):
        super().__init__([1])
        self.scene, self.h = scene, h


class InAView(InADeque):
    def __init__(self, scene, h):
        self.scene, self.parts = scene, {0: {"h": (h,)}}.values()

    h = property(lambda self: next(iter(self.parts))["h"][0])


class InAProxy(InADeque):
    def __init__(self, scene, h):
        self.scene, self.parts = scene, MappingProxyType({0: {"h": (h,)}})


class InAnArray(InADeque):
    def __init__(self, scene, h):
        self.scene, self.parts = scene, np.array([{"h": (h,)}], object)


class Exporting(Holder):
    def __dlpack__(self):
        raise NotImplementedError


class Generating(dict):
    def __init__(self, scene, h):
        super().__init__(h=h)
        self.scene = scene

    h = property(lambda self: self["h"])

    def values(self):
        return (self[key] for key in self)


space = {}
exec("class Executed:\n    def __init__(self, scene, h):\n        self.scene, self.h = scene, h", space)

WAYS = ["by_closure", "by_default", "by_argument", "in_a_list", "by_method"]
KINDS = [Holder, Slotted, without_field, InADeque, InAView, InAProxy, InAnArray, AList, Exporting, Generating, space["Executed"]]


@pytest.mark.parametrize("way", WAYS)
def test_g17_the_attributes_of_objects_that_a_function_is_given_are_read(way):
    assert {*over_seeds(lambda scene: reads_an_attribute(scene, way))} == {11}


@pytest.mark.parametrize("kind", KINDS)
def test_g17_whatever_kind_of_object_it_is(kind):
    assert {*over_seeds(lambda scene: reads_of_an_object(scene, kind))} == {11}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.unmeasured
def test_g17_control_where_objects_are_not_looked_into(way, without):
    without("arrays of attributes")
    assert {*over_seeds(lambda scene: reads_an_attribute(scene, way), control=True)} != {11}


def look_into_no_type_of_c(monkeypatch):
    monkeypatch.setattr(reachable, "_ends", {*reachable._ends})
    monkeypatch.setattr(reachable, "_is_looked_into", lambda _: False)


ITERATORS = {
    "generator": lambda ys: (y for y in ys),
    "map": lambda ys: map(same, ys),
    "enumerate": lambda ys: (y for _, y in enumerate(ys)),
    "list": iter,
    "values": lambda ys: iter(dict(enumerate(ys)).values()),
    "chain": itertools.chain,
    "inside": lambda ys: {"parts": [iter(ys)]},
    "function": lambda ys: generating(ys),
}


def same(y):
    return y


def generating(ys):
    yield from ys


def first_of(scene, ys):
    return scene.plus(next(iter(ys)), 1)


def found_inside(given):
    while isinstance(given, (dict, list)):
        (given,) = given.values() if isinstance(given, dict) else given
    return given


def reads_of_an_iterator(scene, form, way):
    h = scene.array(1)
    given = ITERATORS[form]([h])
    call = handlepool.operation(first_of) if way == "operation" else first_of
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, h)
        if way == "wait":
            z = call(scene, found_inside(fork.wait(given)))
        elif way == "closure":
            z = fork.run(lambda: call(scene, found_inside(given)))
        else:
            z = fork.run(lambda scene, given: call(scene, found_inside(given)), scene, given)
    return scene.read(z)


@pytest.mark.parametrize("way", ["argument", "closure", "wait"])
@pytest.mark.parametrize("form", ITERATORS)
def test_g17_iterators_and_generators_are_looked_into_and_nothing_is_taken(form, way):
    assert {*over_seeds(lambda scene: reads_of_an_iterator(scene, form, way))} == {11}


@pytest.mark.parametrize("form", ITERATORS)
def test_g17_control_iterators_that_are_not_looked_into(form, monkeypatch):
    look_into_no_type_of_c(monkeypatch)
    assert {*over_seeds(lambda scene: reads_of_an_iterator(scene, form, "argument"), control=True)} != {11}


def test_large_arrays_of_text_are_not_looked_through(scene):
    labels = np.array(["a"] * 2000, object)
    with mock.patch.object(reachable, "_begins_plain", wraps=reachable._begins_plain) as asked, scene.states.fork() as fork:
        y = fork.run(lambda x, names: scene.plus(x, len(names)), scene.array(1), labels)
    assert asked.called
    assert scene.read(y) == 2001
    assert len([*leaves(labels, calls=True)]) == 1


class Held:
    def __init__(self, y):
        self.y = y

    def get(self):
        return self.y

    def same(self, y):
        return y


def with_attribute(y):
    def read():
        return read.y

    read.y = y
    return read


HOLDERS = {
    "cache": lambda held: cached(held.y),
    "weakref": lambda held: functools.partial(lambda each: each().y, weakref.ref(held)),
    "weak method": lambda held: functools.partial(lambda get: get()(), weakref.WeakMethod(held.get)),
    "weak set": lambda held: functools.partial(lambda all: next(iter(all)).y, weakref.WeakSet([held])),
    "weak values": lambda held: functools.partial(lambda all: all["a"].y, weakref.WeakValueDictionary(a=held)),
    "attribute": lambda held: with_attribute(held.y),
    "methodcaller": lambda held: functools.partial(operator.methodcaller("same", held.y), Held(None)),
}


def cached(y):
    @functools.lru_cache
    def read():
        return y

    made = functools.lru_cache(lambda: read())
    made()
    return made


def reads_of_a_holder(scene, form):
    held = Held(scene.array(1))
    read = HOLDERS[form](held)
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, held.y)
        z = fork.run(lambda: scene.plus(read(), 1))
    return scene.read(z)


@pytest.mark.parametrize("form", HOLDERS)
def test_g17_caches_weak_references_and_attributes_of_functions_are_looked_into(form):
    assert {*over_seeds(lambda scene: reads_of_a_holder(scene, form))} == {11}


def filled_by_a_branch(scene):
    x = scene.array(2)

    @functools.lru_cache
    def factor(k):
        return scene.plus(x, k)

    with scene.states.fork() as fork:
        made = [fork.run(lambda k: scene.plus(factor(1), k), k) for k in range(4)]
    return tuple(scene.read(each) for each in made)


def test_g17_what_one_branch_puts_into_a_cache_is_read_by_the_next_ones():
    assert {*over_seeds(filled_by_a_branch)} == {(3, 4, 5, 6)}


def test_g17_control_caches_that_are_not_looked_into(monkeypatch):
    look_into_no_type_of_c(monkeypatch)
    assert {*over_seeds(filled_by_a_branch, control=True)} != {(3, 4, 5, 6)}


def test_an_object_with_a_cache_of_its_own_method_is_not_kept(scene):
    """By what is known of functions that were called."""

    class Net:
        def __init__(self):
            self.x = scene.array(1)
            self.cached = functools.lru_cache(self.get)

        def get(self, k):
            return scene.plus(self.x, k)

    kept = []
    for _ in range(3):
        net = Net()
        kept.append(weakref.ref(net))
        for function in (net.cached, net.get, functools.lru_cache(net.get)):
            with scene.states.fork() as fork:
                fork.run(function, 1)
        del net, function
    gc.collect()
    assert [each() for each in kept] == [None] * 3


class Odd:
    """What users' classes may do."""

    __slots__ = ("slot",)
    __module__ = None


class Raising:
    def __init__(self):
        self.proxy = None

    @property
    def __dict__(self):
        raise RuntimeError


def gone():
    holder = Holder(None, Holder(None, None))
    holder.h = weakref.proxy(holder.h)
    return holder


@pytest.mark.parametrize("value", [Odd(), gone(), mock.Mock(), mock.MagicMock(), iter([]), Raising(), ParallelStates, np])
def test_an_odd_object_in_a_closure_is_no_error(scene, value):
    with scene.states.fork() as fork:
        assert fork.run(lambda: value is None) is False


def test_g17_a_table_that_begins_with_none_is_walked():
    def scenario(scene):
        h = scene.array(1)
        table = [None] * 2000
        table[1500] = h
        with scene.states.fork() as fork:
            fork.run(tenfold, scene, h)
            z = fork.run(lambda table: scene.plus(table[1500], 1), table)
        return scene.read(z)

    assert {*over_seeds(scenario)} == {11}


MANY = range(10**5)
LONG = [["a" for _ in MANY], dict.fromkeys(MANY, 1), [("path", number) for number in MANY], {number: [1] for number in MANY}]


@pytest.mark.parametrize("container", LONG)
def test_a_long_container_of_numbers_or_text_is_not_walked(container):
    holder = Holder(None, container)
    assert len([*leaves(lambda: holder, calls=True)]) < 10
    holder.h = [holder, *container]
    assert type([*leaves(lambda: holder, calls=True)][-1]) is reachable.Opaque


@pytest.mark.parametrize("value", [np.ones(3), HandlePool, np, 7, "a"])
def test_of_what_is_no_users_object_no_attributes_are_looked_at(value):
    assert not _has_attributes(value)


def test_more_arrays_in_an_attribute_make_it_no_other_call(scene, known):
    model = Model(scene)
    model.made = []
    with scene.states.fork() as fork:
        for _ in range(4):
            model.made.append(model.by_closure(fork))
    assert len(known) == 1


def test_what_an_argument_collects_makes_it_no_other_call(scene, known):
    def step(model):
        y = scene.plus(model.h, 1)
        model.made.append(y)
        return y

    model = Model(scene)
    model.made = []
    with scene.states.fork() as fork:
        for _ in range(4):
            fork.run(step, model)
    assert len(known) == 1


def test_a_cache_of_a_function_is_not_kept(scene, known):
    def branch():
        x = scene.array(1)
        cached = functools.lru_cache(lambda: scene.plus(x, 1))
        with scene.states.fork() as fork:
            fork.run(apply, cached)
        return weakref.ref(cached)

    cached = branch()
    gc.collect()
    assert cached() is None


def made_by_one_that_raises(scene):
    def failing():
        UNSEEN.append(scene.array(1))
        tenfold(scene, UNSEEN[0])
        raise BranchError

    UNSEEN.clear()
    with scene.states.fork() as fork:
        with pytest.raises(BranchError):
            fork.run(failing)
        z = fork.run(scene.plus, UNSEEN[0], 1)
    return scene.read(z)


UNSEEN = []


def test_g17_what_one_that_raises_has_allocated_it_wrote():
    assert {*over_seeds(made_by_one_that_raises)} == {11}


# What it turns out to have given back


@pytest.mark.filterwarnings("error")
def test_what_a_function_does_is_not_learned_where_every_side_slot_is_out(scene):
    sides = scene.pool.internals.device(0).sides
    x, slots = scene.array(1), iter(sides.lease, None)
    with scene.states.fork() as fork:
        fork.run(new, scene, x)
    known = dict(known_writes())
    leased = list(slots)
    with scene.states.fork() as fork:
        assert scene.read(fork.run(added, scene, fork.run(new, scene, x))) == 3
        assert scene.read(fork.run(other, scene, x)) == 3
    for slot in leased:
        sides.release(slot, captured=False)
    assert known_writes() == known
    assert list(known.values()) == [False]


@handlepool.operation
def added(scene, y):
    return scene.plus(y, 1)


@handlepool.operation(mutates="y")
def multiplied(scene, y):
    tenfold(scene, y)


made = []
"""A global, which nobody sees."""


def remembered(scene, y):
    """Return a new array the first time, and the same one again."""
    if not made:
        made.append(new(scene, y))
    return made[0]


def given_back(scene, used=None):
    """One branch reads, one gives back what was there before, one overwrites; what was read, and what was left."""
    known_writes().clear()
    made.clear()
    y, function = scene.array(1), remembered if used is None else handlepool.operation(remembered)
    with scene.states.fork() as fork:
        z = fork.run(function, scene, y)
    with scene.states.fork() as fork:
        read = fork.run(added, scene, y if used is None else z)
        fork.run(function, scene, y)
        fork.run(multiplied, scene, y if used is None else z)
    return scene.read(read), scene.read(y if used is None else z)


@pytest.mark.parametrize("used", [None, "result"])
def test_g17_what_was_there_before_and_is_given_back_is_overwritten_after_all_who_read_it(used):
    assert {*over_seeds(lambda scene: given_back(scene, used))} == {(2, 10) if used is None else (3, 20)}


@pytest.mark.parametrize("used", [None, "result"])
@pytest.mark.unmeasured
def test_g17_control_whoever_only_notes_that_forgets_the_readers(used, monkeypatch):
    conflicts = DataOrder.conflicts
    monkeypatch.setattr(DataOrder, "conflicts", lambda order, reads, writes: conflicts(order, reads, writes) if reads else {})
    assert len({*over_seeds(lambda scene: given_back(scene, used), control=True)}) > 1


def numbered(scene, y, number):
    """Return a new array for 0, and write in place for 1, which nobody can tell before."""
    return new(scene, y) if number == 0 else tenfold(scene, y)


@pytest.mark.unmeasured
def test_a_function_that_writes_in_place_for_once_is_warned_of_where_another_branch_reads_that(make_driver):
    with Scene(make_driver(check_order=False)) as scene, scene.states.fork() as fork:  # which would find it first
        y = scene.array(1)
        fork.run(numbered, scene, scene.array(1), 0)
        fork.run(scene.plus, y, 1)
        with pytest.warns(UserWarning, match=r"^numbered returned new arrays before, and this call did not,") as told:
            fork.run(numbered, scene, y, 1)
        assert [warning.filename for warning in told] == [__file__]
        assert scene.read(fork.wait(fork.run(scene.plus, y, 1))) == 11  # whoever comes later waits for it


def test_one_that_nobody_else_was_given_the_array_of_is_none(scene):
    y = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(numbered, scene, scene.array(1), 0)
        fork.run(numbered, scene, y, 1)
        z = fork.run(scene.plus, y, 1)
    assert scene.read(z) == 11


def test_a_function_that_returns_what_it_made_once_is_none(scene):
    made.clear()
    y = scene.array(1)
    with scene.states.fork() as fork:
        for _ in range(3):
            z = fork.run(remembered, scene, y)
            fork.run(scene.plus, y, 1)
    assert scene.read(z) == 2


# Functions that have no code of Python's, or one with others


def without_code(driver, pure, in_place):
    """Whether a branch that reads an array came before one that writes it, where only their functions' kinds are known."""
    x, y = (driver.asarray(np.ones(8, np.float32)) for _ in range(2))
    with ParallelStates(4).fork() as fork:
        fork.run(*pure, x, 9)
        z = fork.run(lambda y: 3 * y, y)
        fork.run(*in_place, y, 10)
    return bool((z.get() == 3).all() and (y.get() == 10).all())


def apply(function, *args):
    return function(*args)


class Adds:
    def __call__(self, x, y):
        return x + y


class Multiplies:
    def __call__(self, x, y):
        x *= y


class Fused:
    """Calls what it was made of."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


PAIRS = {
    "functions of a module": ((operator.add,), (operator.imul,)),
    "a ufunc": ((np.add,), (operator.imul,)),
    "arguments": ((apply, np.add), (apply, operator.imul)),
    "arguments in a list": ((lambda fs, *args: fs[0](*args), [np.add]), (lambda fs, *args: fs[0](*args), [operator.imul])),
    "objects that are called": ((apply, Adds()), (apply, Multiplies())),
    "objects of one class": ((Fused(np.add),), (Fused(operator.imul),)),
    "their methods": ((Fused(operator.add).__call__,), (Fused(Multiplies()).__call__,)),
    "operations": (
        (apply, handlepool.operation(np.add, mutates=())),
        (apply, handlepool.operation(lambda y, z: apply(Multiplies(), y, z), mutates="y")),
    ),
    "partial functions": ((apply, functools.partial(np.add)), (apply, functools.partial(operator.imul))),
}


@pytest.mark.parametrize(("pure", "in_place"), PAIRS.values(), ids=PAIRS)
def test_g17_what_one_function_does_says_nothing_of_another_that_has_the_same_code_or_none(
    make_pool, make_default, known, pure, in_place
):
    for seed in range(20):
        known.clear()
        pool = make_pool(scheduler="adversarial", seed=seed)
        make_default(pool)
        with pool.driver.create_stream():
            assert without_code(pool.driver, pure, in_place), seed


def into_new_or_given(x, y, out=None):
    return np.add(x, y) if out is None else np.add(x, y, out=out)


FORMS = {
    "a ufunc": lambda fork, x, y: (fork.run(np.add, x, 9), fork.run(np.add, y, 9, y)),
    "an argument more": lambda fork, x, y: (fork.run(into_new_or_given, x, 9), fork.run(into_new_or_given, y, 9, y)),
    "an array for None": lambda fork, x, y: (fork.run(into_new_or_given, x, 9, None), fork.run(into_new_or_given, y, 9, y)),
    "a flag": lambda fork, x, y: (fork.run(told_how, x), fork.run(told_how, y, True)),
    "another flag": lambda fork, x, y: (fork.run(told_how, x, inplace=False), fork.run(told_how, y, inplace=True)),
    "a flag in a closure": lambda fork, x, y: (fork.run(told_how_by_closure(x, False)), fork.run(told_how_by_closure(y, True))),
    "a flag in a default": lambda fork, x, y: (fork.run(told_how_by_default(False), x), fork.run(told_how_by_default(True), y)),
    "a flag in a keyword's default": lambda fork, x, y: (
        fork.run(told_how_by_name(False), x),
        fork.run(told_how_by_name(True), y),
    ),
    "a flag of an object": lambda fork, x, y: (fork.run(Told(x, False).run), fork.run(Told(y, True).run)),
    "a keyword more": lambda fork, x, y: (fork.run(lent, x, 9), fork.run(lent, y, 9, to=y)),
}


def told_how(x, inplace=False):
    return into_new_or_given(x, 9, x if inplace else None)


def told_how_by_closure(x, flag):
    return lambda: told_how(x, flag)


def told_how_by_default(flag):
    return lambda x, inplace=flag: told_how(x, inplace)


def told_how_by_name(flag):
    return lambda x, *, inplace=flag: told_how(x, inplace)


class Told:
    def __init__(self, array, inplace):
        self.array, self.inplace = array, inplace

    def run(self):
        return told_how(self.array, self.inplace)


def lent(x, y, to=None):
    return into_new_or_given(x, y, to)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_g17_what_a_function_does_says_nothing_of_calls_with_more_arguments(make_pool, make_default, known, form):
    for seed in range(20):
        known.clear()
        pool = make_pool(scheduler="adversarial", seed=seed)
        make_default(pool)
        with pool.driver.create_stream():
            x, y = (pool.driver.asarray(np.ones(8, np.float32)) for _ in range(2))
            with ParallelStates(4).fork() as fork:
                z = fork.run(lambda y: 3 * y, y)
                form(fork, x, y)
            assert (z.get() == 3).all(), seed
            assert (y.get() == 10).all(), seed


@pytest.mark.unmeasured
def test_g17_control_where_all_of_them_are_one_function_a_branch_does_not_wait(make_pool, without, make_default):
    without("the codes of functions")
    found = []
    for seed in range(20):
        known_writes().clear()
        pool = make_pool(scheduler="adversarial", seed=seed, check_order=False)
        make_default(pool)
        with pool.driver.create_stream():
            found.append(without_code(pool.driver, (np.add,), (operator.imul,)))
    assert False in found


# The warning


def warnings_of(scene, functions, *, one_array):
    x = scene.array(1)
    with warnings.catch_warnings(record=True) as told, scene.states.fork() as fork:
        warnings.simplefilter("always")
        for function in functions:
            fork.run(function, scene, x if one_array else scene.array(1))
    return told


def test_one_warning_for_each_function_that_made_a_branch_wait_names_operation(scene):
    told = warnings_of(scene, [tenfold, twofold] * 3, one_array=True)
    assert [str(warning.message).split(" did not")[0] for warning in told] == [
        f"a branch waits because {name}" for name in ("tenfold", "twofold")
    ]
    assert all("@handlepool.operation(mutates=...)" in str(warning.message) for warning in told)
    assert {warning.filename for warning in told} == {__file__}
    assert not warnings_of(scene, [tenfold, twofold], one_array=True)


def test_two_functions_of_one_name_are_warned_of_each(scene):
    lambdas = [lambda scene, y: tenfold(scene, y), lambda scene, y: twofold(scene, y)]
    assert len(warnings_of(scene, lambdas * 3, one_array=True)) == 2


def test_no_warning_where_no_branch_waited_or_new_arrays_came_back(scene):
    assert not warnings_of(scene, [tenfold, twofold] * 3, one_array=False)
    warnings_of(scene, [new, other], one_array=True)  # their first calls
    assert not warnings_of(scene, [new, other] * 3, one_array=True)


def a_generator(scene, x):
    yield scene.plus(x, 1)


async def a_coroutine(scene, x):
    return scene.plus(x, 1)


def a_map(scene, x):
    return map(functools.partial(scene.plus, x), [1, 2])


def run(scene, function, x):
    with scene.states.fork() as fork:
        fork.run(function, scene, x)


def mapped(scene, function, x):
    with scene.states.fork() as fork:
        fork.map(function, [scene], [x])


def submitted(scene, function, x):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(function, scene, x).result()


@pytest.mark.parametrize("function", [a_generator, a_coroutine, a_map])
@pytest.mark.parametrize("use", [run, mapped, submitted])
def test_what_would_run_after_its_branch_is_refused_by_its_kind(scene, function, use):
    x = scene.array(1)
    kind = function.__name__.removeprefix("a_")
    with pytest.raises(
        ArgumentError, match=f"^{function.__name__} returned a {kind}, and none of its work has run. Pass a function"
    ):
        use(scene, function, x)
    assert scene.read(scene.states.map(scene.plus, [x], [1])[0]) == 2
