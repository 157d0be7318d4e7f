"""Objects that answer to any attribute's name are what they are, not what their answers would make of them."""

import functools
import sys
import xmlrpc.client
from types import SimpleNamespace

import numpy as np
import pytest
from harness.graphs import double

import handlepool
from handlepool import ArgumentError, ArrayTypeError, HandlePool, ParallelStateExecutor, StreamError
from handlepool.pool.context import LAUNCHES


class Anything:
    """Answers to every name with something that can be called, and fails the test when it is."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: pytest.fail(f"{name} was called")

    def __call__(self, x):
        return x


MAKE = {"ServerProxy": lambda: xmlrpc.client.ServerProxy("http://127.0.0.1:9/"), "Anything": Anything}
ARGUMENT = {"ServerProxy": "transport", "Anything": 5}


@pytest.fixture(params=MAKE)
def kind(request):
    return request.param


@pytest.fixture
def proxy(kind):
    return MAKE[kind]()


class Tensor:
    is_cuda = False


@pytest.fixture(params=[False, True], ids=["", "beside torch"])
def torch(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))


@pytest.mark.usefixtures("torch")
def test_a_proxy_is_called_as_a_branch_and_as_a_task(pool, kind, proxy):
    argument = ARGUMENT[kind]
    expected = proxy(argument)
    states = handlepool.ParallelStates(2)
    with states.fork() as fork:
        assert fork.run(proxy, argument) == expected
        assert fork.run(functools.partial(proxy, argument)) == expected
    assert states.map(proxy, [argument] * 3) == [expected] * 3
    with ParallelStateExecutor(1) as executor:
        assert executor.submit(proxy, argument).result() == expected


def test_a_proxy_is_recorded_under_its_types_name(pool, kind, proxy):
    with pytest.raises(ArgumentError, match=f"^{kind} was given the iterator"):
        handlepool.record(proxy, iter(()))


def test_a_proxy_is_no_stream(pool, proxy):
    for call in (lambda: pool.get_handle(proxy), lambda: pool.get_workspace(9, proxy), lambda: pool.prewarm(stream=proxy)):
        with pytest.raises(StreamError, match=f"{type(proxy).__name__} has no __cuda_stream__"):
            call()


def test_a_proxy_is_no_array_in_a_call(pool, proxy):
    x = pool.driver.asarray(np.ones((4, 4), np.float32))
    for call in (lambda: double(proxy), lambda: double(x, out=proxy), lambda: double.run({"x": proxy})):
        with pytest.raises(ArrayTypeError, match=f"is a .*{type(proxy).__name__}; the host driver takes"):
            call()
    with pytest.raises(ArrayTypeError, match="pass an array or an ArraySpec"):
        double.compile(proxy)


def test_a_proxy_among_a_programs_arguments_is_no_array(pool, proxy):
    x = pool.driver.asarray(np.ones((4, 4), np.float32))
    with handlepool.record(lambda x, _: double(x), x, proxy) as program:
        program.update(pool.driver.asarray(np.full((4, 4), 3, np.float32)))  # what holds no array is left out
        program.replay()
        assert (pool.driver.asnumpy(program.outputs) == 6).all()


def test_a_proxy_is_no_driver(proxy):
    with pytest.raises(ArgumentError, match=r"HandlePool\(driver="):
        HandlePool(driver=proxy)


# Attributes that are there, and mean something else


READY = [each for name in handlepool.__all__ if getattr(each := getattr(handlepool, name), LAUNCHES, None) is each]
assert READY


@pytest.mark.parametrize("function", READY, ids=lambda function: function.__name__)
def test_what_is_wrapped_around_a_ready_made_operation_is_called(pool, function):
    @functools.wraps(function)
    def wrapper(*args):
        return "wrapper", args

    with handlepool.ParallelStates(2).fork() as fork:
        assert fork.run(wrapper, 1, 2) == ("wrapper", (1, 2))


def test_a_ready_made_operation_that_is_a_method_gets_its_object(pool):
    class Layer(np.ndarray):
        convolve = handlepool.conv2d

    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    with handlepool.ParallelStates(2).fork() as fork:
        y = fork.run(x.view(Layer).convolve, w)
    assert (pool.driver.asnumpy(y) == 9).all()
