"""The written-out call of a recorded function: when it serves a call, when the long way does, and that both give the same."""

import gc
import itertools
import threading

import numpy as np
import pytest
from harness.arrays import value_of
from harness.lines import at_line, interrupt, line_of, some_lines
from harness.scenes import TIMEOUT, Scene, Thread
from test_recorded_calls import python_calls

import handlepool
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred
from handlepool.recording import hits, matching
from handlepool.recording.program import Program
from handlepool.testing.pools import host_pool, substitute_default

pytestmark = pytest.mark.usefixtures("no_warnings")


FORMS = {
    "an array": (lambda x: handlepool.add(x, x), lambda array: (array(3),), 6),
    "an array and values": (lambda x, k, name, flag, nothing: x * k, lambda array: (array(3), 2, "a", True, None), 6),
    "two arrays": (handlepool.add, lambda array: (array(3), array(4)), 7),
    "three arrays": (lambda x, y, z: handlepool.add(handlepool.add(x, y), z), lambda array: (array(1), array(2), array(3)), 6),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", ["new", "reused"])
def test_g19_a_known_call_is_written_out(array, long_way, form, outputs):
    function, arguments, value = FORMS[form]
    network = handlepool.recorded(function, outputs=outputs)
    for _ in range(2):
        assert value_of(network(*arguments(array))) == value
    long_way.clear()
    for _ in range(3):
        assert value_of(network(*arguments(array))) == value
    assert not long_way
    assert len(python_calls(network, *arguments(array))) <= 12


OTHERS = {
    "another type": (lambda array: (array(3), 2.0), 6),
    "a truth value": (lambda array: (array(3), True), 3),
    "another value": (lambda array: (array(3), 4), 12),
    "another shape": (lambda array: (array(3, 1, 4, 3, 2), 2), 6),
    "other strides": (lambda array: (array(3, 1, 4, 6, 4)[:, :, ::2], 2), 6),
    "a list": (lambda array: ([array(3)], 2), 6),
    "one argument": (lambda array: (array(3),), 3),
    "an object with a shape": (lambda array: (Shaped(array(3)), 2), 6),
}


class Shaped:
    def __init__(self, array):
        self.array = array
        self.shape = array.shape


def scaled(x, k=1):
    x = x[0] if isinstance(x, list) else getattr(x, "array", x)
    return x * k


@pytest.mark.parametrize("other", OTHERS)
def test_g19_a_call_of_another_key_takes_the_long_way(array, long_way, other):
    make, value = OTHERS[other]
    network = handlepool.recorded(scaled)
    for _ in range(3):
        network(array(3), 2)
    long_way.clear()
    assert value_of(network(*make(array))) == value
    assert len(long_way) == 1
    assert value_of(network(array(5), k=2)) == 10
    assert len(long_way) == 2
    assert value_of(network(array(5), 2)) == 10


def test_g19_keys_of_one_shape_are_tried_in_turn(array, long_way):
    network = handlepool.recorded(scaled)
    for _ in range(2):
        for k in range(1, 4):
            network(array(1), k)
    long_way.clear()
    for k in (1, 2, 3, 2, 1):
        assert value_of(network(array(2), k)) == 2 * k
    assert not long_way
    for k in range(1, 8):
        assert value_of(network(array(3), k)) == 3 * k


def test_g19_arrays_that_share_memory_take_the_long_way(driver, array):
    weight = array(1)
    network = handlepool.recorded(lambda x, y: handlepool.add(handlepool.add(x, y), weight))
    three = handlepool.recorded(lambda x, y, z: handlepool.add(handlepool.add(x, y), z))
    wide = driver.asarray(np.arange(96, dtype=np.float32).reshape(1, 4, 6, 4))
    parts = wide[:, :, :3], wide[:, :, 2:5]
    for _ in range(3):
        assert value_of(network(array(1), array(2))) == 4
        x = array(5)
        assert value_of(network(x, x)) == 11
        assert value_of(network(x, weight)) == 7
        assert value_of(three(array(1), array(2), array(3))) == 6
        assert value_of(three(x, array(2), x)) == 12
        assert np.array_equal(network(*parts).get(), parts[0].get() + parts[1].get() + 1)


def test_pieces_overlap_as_intervals_do():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        begins = rng.integers(0, 40, rng.integers(1, 6)).tolist()
        ends = [begin + int(rng.integers(1, 8)) for begin in begins]
        pieces = [{*range(*each)} for each in zip(begins, ends, strict=True)]
        plain = any(one & two for one, two in itertools.combinations(pieces, 2))
        assert hits._overlap(begins, ends) == plain


def test_g19_a_changed_value_is_seen(array):
    class Network:
        scale = 2.0

        def __call__(self, x):
            return x * self.scale

    plain = Network()
    network = handlepool.recorded(plain)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        plain.scale = scale
        assert value_of(network(array(5))) == 5 * scale
    assert network.stats().recorded == 2


def test_g19_control_a_written_out_call_without_its_guards_is_stale(array, monkeypatch):
    made = matching.made
    unguarded = lambda text, name, space: made(text.replace(" or not holds()", ""), name, space)  # noqa: E731
    monkeypatch.setattr(hits, "made", unguarded)
    with pytest.raises(AssertionError):
        test_g19_a_changed_value_is_seen(array)


def test_g19_control_a_written_out_call_that_compares_no_memory_is_wrong(array, monkeypatch):
    made = matching.made
    blind = lambda text, name, space: made(text.replace("current_pool() is not pool or", "False and"), name, space)  # noqa: E731

    def run():
        h = array(0)
        network = handlepool.recorded(lambda x: handlepool.add(increased(h), x))
        for _ in range(3):
            network(array(10))
        return value_of(network(h))

    assert run() == 8
    monkeypatch.setattr(hits, "made", blind)
    assert run() != 8


@handlepool.operation(mutates="h")
def add_one(h):
    h += 1


def increased(h):
    add_one(h)
    return h


def test_a_closed_program_a_cleared_function_and_another_pool_are_recorded_anew(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    for _ in range(3):
        network(array(1))
    network.program(array(1)).close()
    assert value_of(network(array(2))) == 4
    network.clear()
    assert value_of(network(array(3))) == 6
    assert network.stats().recorded == 3
    with host_pool() as pool:
        other = pool.driver.asarray(np.full((1, 4, 3, 4), 4, np.float32))
        for _ in range(3):
            assert value_of(network(other)) == 8
    assert value_of(network(array(5))) == 10


def test_g6_streams_take_instances_of_their_own(driver, array, long_way):
    network = handlepool.recorded(lambda x: handlepool.add(x, x), instances=2)
    streams = [driver.create_stream() for _ in range(3)]
    for number in range(6):
        with streams[number % 3]:
            network(array(number))
    long_way.clear()
    found = []
    for number in range(9):
        with streams[number % 3] as stream:
            found.append((network(array(number)), stream))
    assert not long_way
    for number, (y, stream) in enumerate(found):
        with stream:
            assert value_of(y) == 2 * number
    assert network.stats().programs == 2


def test_g17_in_a_fork_data_decides(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    for _ in range(3):
        network(array(1))
    with handlepool.ParallelStates(2).fork() as fork:
        a = fork.run(network, array(2))
        b = network(a)
    assert (value_of(a), value_of(b)) == (4, 8)


def test_the_reused_outputs_of_another_thread_are_left_alone(driver, array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x), outputs="reused", instances=1)
    for _ in range(3):
        held = network(array(1))
    stream = driver.current_stream()

    def other():
        with stream:
            return value_of(network(array(7)))

    assert Thread(other).finish() == 14
    assert value_of(held) == 2


# Where only a tracer can interrupt: nothing is called before, or a lock is freed.
SPARED = ("try:", "self._busy = None", "lock.release()", "self._unmarked = False")


def used(scene, k):
    """Interrupt a known call at the k-th line; later calls on other streams are right. Return whether there was such a line."""
    driver, where = scene.driver, ""
    network = handlepool.recorded(lambda x: scene.plus(scene.plus(x, 10), 100), instances=1, lanes=None)
    for _ in range(3):
        network(scene.array(1))
    try:
        where = at_line(k, lambda: network(scene.array(2)), interrupt)
    except KeyboardInterrupt as error:
        if line_of(error) in SPARED:
            return True
    for _ in range(2):
        with driver.create_stream() as stream:
            assert Thread(lambda stream=stream: on(stream, network, scene, 3)).finish() == 113, where
            assert scene.read(network(scene.array(4))) == 114
    network.clear()
    for each in (stream, scene.stream):
        each.synchronize()
    gc.collect()
    deferred.deferred.run(1000)
    assert not driver.order.found
    return where is not None


def on(stream, network, scene, value):
    with stream:
        return scene.read(network(scene.array(value)))


def test_g8_an_interrupt_at_every_line_of_a_known_call_leaves_the_instance_in_order():
    for k in some_lines(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True), default=True) as scene:
            if not used(scene, k):
                break
    assert k > 20


def test_g8_control_a_use_whose_event_is_missing_goes_unordered(monkeypatch):
    def unmarked(program):
        program._unmarked = False

    monkeypatch.setattr(Program, "_mark", unmarked)
    scene = Scene(HostDriver(scheduler="adversarial", check_order=True), default=True)
    with pytest.raises((handlepool.ContractError, AssertionError)), scene:
        used(scene, 10**9)


def test_g19_threads_in_a_closed_loop_get_their_own_values():
    driver = HostDriver()
    with handlepool.HandlePool(driver=driver) as pool, substitute_default(pool):
        network = handlepool.recorded(lambda x, k: x * k, instances=2)
        gate, wrong = threading.Barrier(6), []

        def client(number):
            with driver.create_stream() as stream:
                gate.wait(TIMEOUT)
                for call in range(60):
                    x = driver.asarray(np.full((1, 4, 3, 4), call, np.float32))
                    if value_of(network(x, number % 3)) != call * (number % 3):
                        wrong.append((number, call))
                driver.synchronize_stream(stream.ptr)

        for thread in [Thread(client, number) for number in range(6)]:
            thread.finish()
        network.clear()
    assert not wrong
