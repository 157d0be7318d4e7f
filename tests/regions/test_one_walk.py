"""The arguments of a call are walked once: for its order, for what is kept, for torch, and for its first calls.

An undeclared function is known again by its code, and by the code of functions that it is given. That look is a second one. A
measured call looks for the names of its arrays, which is one more. The other tests leave measurements out.
"""

import pytest
from harness import measuring

import handlepool


class Counting(dict):
    """A dictionary that counts how often its entries are walked.

    It has no ``__iter__`` of its own: an object of a class with that method may compute its entries, so it is looked at again.
    """

    walks = 0

    def values(self):
        self.walks += 1
        return super().values()


def plain(scene):
    return lambda xs: scene.plus(xs["x"], 1)


def declared(scene):
    @handlepool.operation(mutates=())
    def shifted(xs):
        return scene.plus(xs["x"], 1)

    return shifted


@pytest.fixture(params=[plain, declared], ids=lambda make: make.__name__)
def function(scene, request):
    return request.param(scene)


def walks_of(call, scene):
    given = Counting(x=scene.array(1))
    call(given)
    return given.walks


@pytest.mark.unmeasured
def test_a_branch_of_an_operation_walks_its_arguments_once(scene):
    function = declared(scene)
    with scene.states.fork() as fork:
        assert [walks_of(lambda xs: fork.run(function, xs), scene) for _ in range(3)] == [1, 1, 1]


@pytest.mark.unmeasured
def test_a_branch_of_a_plain_function_walks_its_arguments_once_for_arrays_and_once_for_functions(scene):
    function = plain(scene)
    with scene.states.fork() as fork:
        assert [walks_of(lambda xs: fork.run(function, xs), scene) for _ in range(3)] == [2, 2, 2]


def test_a_measured_call_walks_its_arguments_once_more_for_their_names(scene, function):
    more = []
    for _ in range(12):
        with scene.states.fork() as fork:
            more.append(walks_of(lambda xs: fork.run(function, xs), scene))
        measuring.settle(scene)
    once = min(more)
    assert [number for number, walks in enumerate(more, 1) if walks > once] == [1, 3, 10]
    assert max(more) == once + 1


@pytest.mark.unmeasured
def test_a_branch_without_order_walks_its_arguments_once(scene, function):
    with scene.states.fork(ordered=False) as fork:
        assert walks_of(lambda xs: fork.run(function, xs), scene) == 1


@pytest.mark.unmeasured
def test_a_call_of_an_operation_in_the_body_walks_its_arguments_once(scene):
    function = declared(scene)
    with scene.states.fork() as fork:
        fork.run(plain(scene), {"x": scene.array(1)})
        assert walks_of(function, scene) == 1


def test_a_task_walks_its_arguments_once(scene):
    with handlepool.ParallelStateExecutor(1, pool=scene.pool) as executor:
        assert walks_of(lambda xs: executor.submit(plain(scene), xs).result(60), scene) == 1


def test_arrays_and_numbers_alone_are_not_walked(scene, monkeypatch):
    monkeypatch.setattr("handlepool.order.reached.leaves", None)
    x = scene.array(1)
    with scene.states.fork() as fork:
        y = fork.run(add, x, 1)
    assert scene.read(y) == 2


def add(x, number):
    return x + number
