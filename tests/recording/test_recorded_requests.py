"""Requests: calls of recorded functions by `submit`, from threads and from asyncio, with arrays of the device and of the host."""

import asyncio
import concurrent.futures
import threading

import numpy as np
import pytest
from harness.arrays import value_of
from harness.insides import pending_of, requests_of
from harness.scenes import TIMEOUT, Scene, Thread

import handlepool
from handlepool import ArgumentError, HandlePool, ParallelStateExecutor
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.regions.future import Task
from handlepool.regions.requests import HostFuture, Requests
from handlepool.testing.pools import host_pool, substitute_default

pytestmark = pytest.mark.usefixtures("no_warnings")

SHAPE = (1, 4, 3, 4)


def numbers(value):
    return np.full(SHAPE, value, np.float32)


def doubled(x):
    return handlepool.add(x, x)


@handlepool.operation(mutates="h")
def increase(h, by):
    h += by


def test_the_result_is_where_the_arguments_are(driver, array):
    network = handlepool.recorded(lambda x, k: x * k)
    for value in range(4):
        assert isinstance(network.submit(array(value), 3).result(), driver.array_types)
        found = network.submit(numbers(value), 3).result()
        assert type(found) is np.ndarray
        assert value_of(found) == 3 * value
        assert value_of(network.submit(array(value), 3).result()) == 3 * value
    assert network.stats().keys == 1


@pytest.mark.parametrize("results", ["device", "host"])
def test_an_option_says_where_results_go(driver, array, results):
    network = handlepool.recorded(lambda x: {"sum": doubled(x), "given": x, "text": "a"})
    with ParallelStateExecutor(2, results=results) as executor:
        for give in (array, numbers, array, numbers):
            found = executor.submit(network, give(3)).result()
            kinds = (np.ndarray,) if results == "host" else driver.array_types
            assert isinstance(found["sum"], kinds)
            assert (value_of(found["sum"]), value_of(found["given"]), found["text"]) == (6, 3, "a")


def test_a_result_of_the_host_is_in_ordinary_memory_and_later_requests_leave_it_alone(driver):
    network = handlepool.recorded(doubled)
    kept = [network.submit(numbers(value)).result() for value in range(5)]
    assert [value_of(each) for each in kept] == [0, 2, 4, 6, 8]
    assert all(each.base is None or each.base.base is None for each in kept)
    kept[0][...] = 7


def test_an_array_of_the_host_may_be_overwritten_at_once(driver):
    network = handlepool.recorded(doubled)
    x, futures = numbers(0), []
    for value in range(6):
        x[...] = value
        futures.append(network.submit(x))
    assert [value_of(each.result()) for each in futures] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("layout", ["C", "F", "channels last", "part"])
def test_arrays_of_the_host_keep_their_layout(driver, layout):
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    lies = {
        "C": values,
        "F": np.asfortranarray(values),
        "channels last": values.transpose(0, 3, 1, 2),
        "part": values[:, ::2, 1:],
    }
    network = handlepool.recorded(lambda x: x * 2)
    for _ in range(3):
        assert np.array_equal(network.submit(lies[layout]).result(), 2 * lies[layout])


def test_what_the_arguments_are_copied_from_and_what_is_written_stays(driver, array):
    network = handlepool.recorded(lambda x, h: increase(h, 1) or handlepool.add(x, h))
    h = array(0)
    for number in range(1, 5):
        assert value_of(network.submit(array(10), h).result()) == 10 + number
        assert value_of(h) == number


def test_g6_requests_of_one_client_keep_their_order(driver, array):
    h = array(0)

    def function(x):
        increase(h, 1)
        return handlepool.add(x, h)

    network = handlepool.recorded(function, instances=3)
    futures = [network.submit(array(10)) for _ in range(12)]
    assert [value_of(each.result()) for each in futures] == [*range(11, 23)]


def in_order(seed, network_of, submits=8):
    """The values of requests that depend on each other, under an adversarial schedule."""
    with Scene(HostDriver(scheduler="adversarial", seed=seed, check_order=True), default=True) as scene:
        network = network_of(scene)
        x = scene.array(0)
        futures = []
        for _ in range(submits):
            futures.append(network.submit(x))
            x = scene.plus(x, 1)
        found = [scene.read(each.result()) for each in futures]
        network.clear()
        for each in requests_of(network)._streams.values():
            for stream in each:
                stream.synchronize()
        return found


def plus_ten(scene):
    plus = handlepool.operation(scene.plus)
    return handlepool.recorded(lambda x: plus(x, 10), instances=2, lanes=1)


def test_g6_a_request_reads_what_the_current_stream_made_and_the_result_is_ready_there():
    for seed in range(20):
        assert in_order(seed, plus_ten) == [*range(10, 18)]


@pytest.mark.parametrize("method", ["restart", "join"])
def test_g6_control_without_the_order_before_or_after_a_request_is_caught(monkeypatch, method):
    def restart(task, pointer):
        task.withdraw()

    monkeypatch.setattr(Task, method, restart if method == "restart" else lambda task, **_: None)
    with pytest.raises((handlepool.ContractError, AssertionError)):
        assert [in_order(seed, plus_ten) for seed in range(20)] == [[*range(10, 18)]] * 20


def test_clients_have_streams_of_their_own_in_turn(driver, array):
    network = handlepool.recorded(doubled, instances=2)
    network(array(0))
    gate = threading.Barrier(4)
    used = []

    def client(number):
        stream = driver.create_stream()
        with stream:
            gate.wait(TIMEOUT)
            found = [value_of(network.submit(array(number + each)).result()) for each in range(5)]
            requests = requests_of(network)
            used.append(requests._client() % requests._count)
            return found

    for number, thread in enumerate([Thread(client, number) for number in range(4)]):
        assert thread.finish() == [2 * (number + each) for each in range(5)]
    assert sorted(used) == [0, 0, 1, 1]


def test_tasks_of_asyncio_are_clients(driver, array):
    network = handlepool.recorded(doubled, instances=3)
    network(array(0))

    async def client(number):
        found = [value_of(await network.submit(numbers(number + each))) for each in range(4)]
        assert found == [2 * (number + each) for each in range(4)]
        requests = requests_of(network)
        return requests._client() % requests._count

    async def serve():
        return await asyncio.gather(*[client(number) for number in range(6)])

    assert sorted(asyncio.run(serve())) == [0, 0, 1, 1, 2, 2]


def test_futures_of_the_host_work_with_wait_and_callbacks(driver):
    network = handlepool.recorded(doubled)
    futures = [network.submit(numbers(value)) for value in range(6)]
    done, left = concurrent.futures.wait(futures, TIMEOUT)
    assert (len(done), len(left)) == (6, 0)
    assert {value_of(each.result()) for each in done} == {0, 2, 4, 6, 8, 10}
    called, found = threading.Event(), []
    network.submit(numbers(5)).add_done_callback(lambda future: (found.append(future), called.set()))
    assert called.wait(TIMEOUT)
    assert value_of(found[0].result()) == 10
    future = network.submit(numbers(6))
    assert value_of(future.result(TIMEOUT)) == 12
    assert future.done()
    assert future.exception() is None
    assert value_of(network.submit(numbers(7)).synchronize()) == 14
    assert not future.cancel()


def test_a_future_is_done_when_the_gpu_has_passed_it():
    driver = HostDriver()
    with HandlePool(driver=driver) as pool, substitute_default(pool):
        network = handlepool.recorded(doubled)
        for _ in range(2):
            network.submit(numbers(0)).result()
        stream = driver.create_stream()
        with stream:
            latch = driver.latch(stream.ptr)
            future = network.submit(numbers(4))
            assert not future.done()
            latch.release()
            assert value_of(future.result()) == 8
            assert future.done()
        network.clear()


def test_an_error_of_the_function_is_the_futures(array):
    network = handlepool.recorded(lambda x, fail: doubled(x) if not fail else 1 / 0)
    assert value_of(network.submit(array(1), False).result()) == 2
    for make in (array, numbers):
        future = network.submit(make(1), True)
        with pytest.raises(ZeroDivisionError):
            future.result()
    assert value_of(network.submit(array(2), False).result()) == 4


def test_a_known_request_is_launched_on_the_clients_stream(array, long_way):
    network = handlepool.recorded(lambda x, k: x * k, instances=2)
    for value in range(4):
        network.submit(array(value), 2).result()
    long_way.clear()
    for value in range(4):
        assert value_of(network.submit(array(value), 2).result()) == 2 * value
        assert value_of(network.submit(numbers(value), 2).result()) == 2 * value
    assert not long_way
    assert network.stats().programs == 2


def test_values_that_are_no_plain_arrays_are_tasks(driver, array):
    network = handlepool.recorded(lambda xs: handlepool.add(*xs))
    assert [value_of(network.submit([array(1), array(value)]).result()) for value in range(4)] == [1, 2, 3, 4]
    masked = handlepool.recorded(lambda x: driver.asarray(np.asarray(x)) * 2)
    with pytest.warns(RuntimeWarning, match="eagerly"):
        assert value_of(masked.submit(np.ma.MaskedArray(numbers(1))).result()) == 2


def test_keywords_are_taken(array):
    network = handlepool.recorded(lambda x, k=1: x * k)
    for value in range(3):
        assert value_of(network.submit(array(value), k=4).result()) == 4 * value
        assert value_of(network.submit(numbers(value), k=4).result()) == 4 * value


def test_at_most_so_many_requests_are_pending(driver, array, monkeypatch):
    network = handlepool.recorded(doubled)
    waited = []
    synchronize = Task.synchronize
    monkeypatch.setattr(Task, "synchronize", lambda self: waited.append(self) or synchronize(self))
    with ParallelStateExecutor(2, max_pending=3) as executor:
        executor.submit(network, array(0)).result()
        pending = pending_of(executor)
        monkeypatch.setattr(Task, "settle", lambda self: self in waited)
        futures = []
        for value in range(10):
            futures.append(executor.submit(network, array(value)))
            assert len(pending) <= 3
        assert waited
        monkeypatch.undo()
        assert [value_of(each.result()) for each in futures] == [2 * value for value in range(10)]


@pytest.mark.parametrize("options", [{"max_pending": 0}, {"max_pending": 1.5}, {"results": "gpu"}, {"results": 1}], ids=str)
def test_options_that_cannot_be_are_refused(options):
    with host_pool(), pytest.raises(ArgumentError):
        ParallelStateExecutor(2, **options)


def test_a_long_lived_executor_serves_many_clients_and_holds_nothing(driver, array):
    network = handlepool.recorded(lambda x, k: x * k, instances=2)
    with ParallelStateExecutor(2, max_pending=8) as executor:

        def client(number):
            with driver.create_stream() as stream:
                for value in range(5):
                    make = numbers if value % 2 else array
                    assert value_of(executor.submit(network, make(value), number % 3).result()) == value * (number % 3)
                driver.synchronize_stream(stream.ptr)

        for round_ in range(3):
            for thread in [Thread(client, number) for number in range(6)]:
                thread.finish()
            executor.submit(network, array(1), 1).synchronize()
            assert len(pending_of(executor)) <= 8, round_
    network.clear()


def test_after_close_and_fork_errors_are_typed(array):
    network = handlepool.recorded(doubled)
    executor = ParallelStateExecutor(2)
    executor.submit(network, array(1)).result()
    executor.shutdown()
    assert isinstance(executor._requests, Requests)
    assert HostFuture.__mro__[1] is handlepool.StreamFuture


def test_g8_memory_that_the_current_stream_still_reads_is_not_written_by_a_request():
    """A block that another thread freed on the same stream, after its work was enqueued, serves the request's result."""
    for seed in range(20):
        with Scene(HostDriver(scheduler="adversarial", seed=seed, check_order=True), default=True) as scene:
            network = plus_ten(scene)
            for _ in range(3):
                network.submit(scene.array(0)).result()
            read = []
            for value in range(6):
                block = scene.array(value)
                read.append(scene.plus(block, 100))
                del block
                future = network.submit(scene.array(value))
                read.append(future.result())
                del future
            assert [scene.read(each) for each in read] == [each for value in range(6) for each in (100 + value, 10 + value)]
            network.clear()
            deferred.deferred.run(1000)
            assert not scene.driver.order.found


def test_control_an_instance_of_a_request_that_follows_no_event_goes_wrong(without):
    without("waits for the last replay")

    def run(seed):
        with Scene(HostDriver(scheduler="adversarial", seed=seed, check_order=True), default=True) as scene:
            network = handlepool.recorded(lambda x: scene.plus(x, 10), instances=1, lanes=None)
            network(scene.array(0))
            network(scene.array(0))
            futures = [network.submit(scene.array(1)), *[network(scene.array(2)) for _ in range(2)]]
            return [scene.read(futures[0].result()), *[scene.read(each) for each in futures[1:]]]

    with pytest.raises((handlepool.ContractError, AssertionError)):
        assert [run(seed) for seed in range(20)] == [[11, 12, 12]] * 20
