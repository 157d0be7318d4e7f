"""Recorded functions: each call gives the value of the plain function, and writes the arguments that the function writes."""

import inspect
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness.arrays import value_of

import handlepool
from handlepool import ArgumentError, CaptureError

pytestmark = pytest.mark.usefixtures("no_warnings")

Pair = namedtuple("Pair", "first second")


@handlepool.operation(mutates="x")
def increase(x, by):
    x += by


# Geometries


def test_g19_each_geometry_has_a_program_and_each_call_its_own_value(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    shapes = [(1, 4, h, w) for h in (1, 2, 3) for w in (2, 4)]
    kept = [(network(array(value, *shape)), value, shape) for value in range(4) for shape in shapes]
    for y, value, shape in kept:
        assert y.shape == shape
        assert value_of(y) == 2 * value
    stats = network.stats()
    assert (stats.keys, stats.recorded, stats.eager) == (6, 6, 0)


def test_the_least_recently_used_key_is_closed_for_another(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x), programs=2)
    for width in (2, 3, 2, 4, 2, 3):
        assert value_of(network(array(width, 1, 4, 3, width))) == 2 * width
    stats = network.stats()
    assert (stats.keys, stats.recorded, stats.closed) == (2, 4, 2)


def test_strides_and_types_are_of_the_key(driver):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    values = np.arange(48, dtype=np.float32).reshape(1, 4, 3, 4)
    for array in (values, values.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2), values.astype(np.float16)):
        for _ in range(2):
            y = network(driver.asarray(array))
            assert np.array_equal(y.get(), 2 * array)
            assert y.dtype == array.dtype
    assert network.stats().keys == 3


@pytest.mark.parametrize("part", [np.s_[:, :, ::2], np.s_[:, 1:, :, 1:3]], ids=str)
def test_arrays_with_gaps_are_taken_as_they_lie(driver, part):
    network = handlepool.recorded(lambda x: x * 2)
    for number in range(3):
        values = np.arange(96, dtype=np.float32).reshape(1, 4, 6, 4) + number
        assert np.array_equal(network(driver.asarray(values)[part]).get(), 2 * values[part])
    assert network.stats().recorded == 1


# Arguments


def test_plain_values_are_of_the_key_with_type_and_sign(array):
    network = handlepool.recorded(lambda x, k: x * (len(k) if isinstance(k, str) else 1 / k if k else np.copysign(1, k)))
    plain = network.__wrapped__
    for _ in range(2):
        for k in (1, 1.0, True, 2, "ab", 0.0, -0.0):
            x = array(3)
            assert value_of(network(x, k)) == value_of(plain(x, k))
    assert network.stats().keys == 7


def test_containers_and_data_classes_are_looked_into(array):
    @dataclass
    class Config:
        weight: Any
        scale: float

    def function(values, config, more=None):
        y = handlepool.add(values[0], values[1]["a"]) * config.scale
        return {"sum": handlepool.add(y, config.weight), "pair": Pair(y, more)}

    network = handlepool.recorded(function)
    for number in range(3):
        found = network([array(number), {"a": array(10)}], Config(array(100), 2.0), more="text")
        assert value_of(found["sum"]) == 2 * (number + 10) + 100
        assert type(found["pair"]) is Pair
        assert value_of(found["pair"].first) == 2 * (number + 10)
        assert found["pair"].second == "text"
    assert network.stats().recorded == 1
    assert value_of(network([array(1), {"a": array(10)}], Config(array(100), 3.0))["sum"]) == 133
    assert network.stats().recorded == 2


def test_other_objects_are_known_by_identity_and_kept_alive_by_no_key(array):
    class Scale:
        def __init__(self, by):
            self.by = by

    network = handlepool.recorded(lambda x, scale: x * scale.by)
    one, two = Scale(2), Scale(3)
    for _ in range(2):
        assert value_of(network(array(5), one)) == 10
        assert value_of(network(array(5), two)) == 15
    assert network.stats().recorded == 2
    one.by = 4
    assert value_of(network(array(5), one)) == 20
    import weakref

    gone = weakref.ref(one)
    del one
    assert gone() is None


def test_an_array_without_axes_is_an_argument(driver, array):
    network = handlepool.recorded(lambda x, k: x * k)
    for k in range(12):
        assert value_of(network(array(3), driver.asarray(np.float32(k)))) == 3 * k
    assert network.stats().recorded == 1


def test_after_eight_values_a_warning_names_the_argument(array):
    network = handlepool.recorded(lambda x, k: x * k, programs=20)
    for k in range(7):
        network(array(1), k)
    with pytest.warns(RuntimeWarning, match="argument 1.*without axes"):
        network(array(1), 7)
    for k in range(8, 12):
        assert value_of(network(array(1), k)) == k


def test_arguments_that_share_memory_are_another_key(array):
    def function(x, y):
        z = handlepool.add(x, y)
        return z

    network = handlepool.recorded(function)
    x, wide = array(2), array(5, 1, 4, 6, 4)
    assert value_of(network(x, array(3))) == 5
    assert value_of(network(x, x)) == 4
    assert value_of(network(wide[:, :, :3], wide[:, :, 2:5])) == 10
    assert value_of(network(array(7), array(8))) == 15
    assert network.stats().recorded >= 3


def test_an_argument_in_place_is_read_where_it_is(array):
    network = handlepool.recorded(lambda x, params: handlepool.add(x, params), in_place="params")
    params = array(10)
    for number in range(3):
        params[...] = 10 * number
        assert value_of(network(array(1), params)) == 1 + 10 * number
        assert value_of(network(array(1), params=params)) == 1 + 10 * number
    assert network.stats().recorded == 2
    other = array(100)
    assert value_of(network(array(1), other)) == 101


# What the function writes


def test_g19_an_argument_that_is_written_is_copied_back(array):
    def function(x, h):
        increase(h, 1)
        return handlepool.add(x, h)

    network = handlepool.recorded(function)
    h = array(0)
    for number in range(4):
        assert value_of(network(array(10), h)) == 11 + number
        assert value_of(h) == number + 1
    assert network.stats().recorded == 1


def test_g19_control_without_the_copy_back_the_argument_is_stale(array, without):
    without("copies of written arguments")
    network = handlepool.recorded(lambda h: increase(h, 1) or handlepool.add(h, h))
    h = array(0)
    for _ in range(3):
        network(h)
    assert value_of(h) != 3


def test_an_argument_that_is_not_written_is_not_touched(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    x = array(1)
    for _ in range(3):
        assert value_of(network(x)) == 2
        assert value_of(x) == 1
        x[...] = 1


def test_g19_a_function_that_returns_nothing_writes_its_argument(array):
    network = handlepool.recorded(lambda h: increase(h, 2))
    h = array(0)
    for _ in range(4):
        assert network(h) is None
    assert value_of(h) == 8
    assert network.stats().recorded == 1


def test_g19_plain_code_that_writes_an_argument_is_seen(array):
    def function(h):
        h += 1
        return h * 2

    network = handlepool.recorded(function)
    h = array(0)
    for number in range(1, 5):
        assert value_of(network(h)) == 2 * number
    assert value_of(h) == 4


def test_g19_overlapping_arguments_of_which_one_is_written_run_eagerly(array):
    def function(x, h):
        increase(h, 1)
        return handlepool.add(x, h)

    network = handlepool.recorded(function)
    wide = array(0, 1, 4, 6, 4)
    with pytest.warns(RuntimeWarning, match="shares memory with another"):
        assert value_of(network(wide[:, :, :3], wide[:, :, :3])) == 2
    for number in range(1, 4):
        wide = array(number, 1, 4, 6, 4)
        assert value_of(network(wide[:, :, :3], wide[:, :, :3])) == 2 * (number + 1)
    assert network.stats().programs == 0


def test_g19_an_argument_over_the_functions_own_state_runs_eagerly(array):
    h = array(0)

    def function(x):
        increase(h, 1)
        return handlepool.add(x, h)

    network = handlepool.recorded(function)
    assert value_of(network(array(10))) == 11
    assert value_of(network(array(10))) == 12
    assert value_of(network(h)) == 6
    assert value_of(network(array(10))) == 14


def test_g19_state_in_one_array_advances_once_a_call(driver, array):
    h = array(0)

    def function(x):
        increase(h, 1)
        return handlepool.add(x, h)

    network = handlepool.recorded(function, instances=3)
    streams = [driver.current_stream(), *[driver.create_stream() for _ in range(2)]]
    values = []
    for number in range(9):
        stream, former = streams[number % 3], streams[(number - 1) % 3]
        event = driver.create_event()
        driver.record_event(event, former.ptr)
        driver.wait_event(stream.ptr, event)
        with stream:
            values.append(network(array(10)))
    with stream:
        assert [value_of(y) for y in values] == [*range(11, 20)]
    driver.synchronize_stream(stream.ptr)
    assert network.stats().programs > 1


# Results


def test_a_result_that_is_an_argument_a_weight_or_another_result_stays_that(array):
    weight = array(7)

    def function(x, h):
        increase(h, 1)
        y = handlepool.add(x, weight)
        return [h, weight, y, y, h[:, :2]]

    network = handlepool.recorded(function)
    for number in range(3):
        h = array(number)
        found = network(array(1), h)
        assert found[0] is h
        assert found[1] is weight
        assert found[2] is found[3]
        assert value_of(found[2]) == 8
        assert value_of(found[4]) == number + 1
        found[4][...] = 50
        assert {*np.unique(h.get())} == {50, number + 1}


def test_results_that_share_a_part_of_their_memory_are_refused(array):
    def function(x):
        y = handlepool.add(x, x)
        return y, y[:, :2]

    network = handlepool.recorded(function)
    with pytest.warns(RuntimeWarning, match="returned arrays that share memory"):
        first = network(array(1))
    for y, part in (first, network(array(1))):
        part[...] = 9
        assert {*np.unique(y.get())} == {2, 9}


def test_results_are_the_callers(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    kept = [network(array(number)) for number in range(5)]
    assert [value_of(y) for y in kept] == [0, 2, 4, 6, 8]


def test_out_is_written_whether_by_a_program_or_not(array):
    network = handlepool.recorded(lambda x: {"a": handlepool.add(x, x), "b": [x * 3]})
    for number in range(3):
        out = array(0)
        found = network(array(number), out={"a": out, "b": None})
        assert found["a"] is out
        assert value_of(out) == 2 * number
        assert value_of(found["b"][0]) == 3 * number
    x = array(5)
    network(x, out={"a": x, "b": [None]})
    assert value_of(x) == 10


def test_a_parameter_of_the_name_out_is_the_functions_own(array):
    def function(x, out):
        return handlepool.add(x, x, out=out)

    network = handlepool.recorded(function)
    for number in range(3):
        out = array(0)
        assert network(array(number), out=out) is out
        assert value_of(out) == 2 * number


def test_reused_outputs_are_valid_until_the_next_call_there(driver, array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x), outputs="reused")
    network(array(0))
    y = network(array(1))
    assert value_of(y) == 2
    other = driver.create_stream()
    with other:
        z = network(array(2))
        assert value_of(z) == 4
    assert value_of(y) == 2
    again = network(array(3))
    assert again is y
    assert value_of(y) == 6


# What it is


def test_it_keeps_the_functions_name_docstring_and_signature():
    @handlepool.recorded
    def network(x: int, *, scale: float = 2.0) -> int:
        """Do it."""
        return x

    @handlepool.recorded(lanes=2)
    def other(x):
        return x

    assert (network.__name__, network.__doc__, network.__module__) == ("network", "Do it.", __name__)
    assert str(inspect.signature(network)) == "(x: int, *, scale: float = 2.0) -> int"
    assert other.__name__ == "other"
    assert "other" in repr(other)


def test_arguments_at_the_wrong_place_name_record(array):
    with pytest.raises(ArgumentError, match=r"record\(function"):
        handlepool.recorded(lambda x: x, array(1))


@pytest.mark.parametrize(
    "options",
    [{"lanes": 0}, {"lanes": 33}, {"instances": 0}, {"programs": 0}, {"outputs": "old"}, {"strict": 1}, {"in_place": "nothing"}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ArgumentError):
        handlepool.recorded(lambda x: x, **options)


def test_methods_have_programs_of_each_object_which_end_with_it(array):
    import gc
    import weakref

    class Network:
        def __init__(self, by):
            self.w = array(by)

        @handlepool.recorded
        def step(self, x):
            return handlepool.add(x, self.w)

        @handlepool.recorded(lanes=2)
        def twice(self, x):
            return handlepool.add(handlepool.add(x, self.w), self.w)

    one, two = Network(1), Network(10)
    for number in range(3):
        assert value_of(one.step(array(number))) == number + 1
        assert value_of(two.step(array(number))) == number + 10
        assert value_of(one.twice(array(number))) == number + 2
    assert one.step is one.step
    assert one.step is not two.step
    assert one.step.stats().recorded == two.step.stats().recorded == 1
    assert Network.step.stats().recorded == 0
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    import copy

    assert value_of(copy.deepcopy(two).step(array(1))) == 11


def test_an_object_that_can_be_called_is_a_function(array):
    class Network:
        def __init__(self):
            self.w = array(3)

        def __call__(self, x):
            return handlepool.add(x, self.w)

    network = handlepool.recorded(Network())
    for number in range(3):
        assert value_of(network(array(number))) == number + 3
    assert network.stats().recorded == 1


# Fallbacks


def test_a_function_that_cannot_be_recorded_runs_eagerly_with_one_warning(array):
    def function(x):
        nonlocal calls
        calls += 1
        return x * calls

    calls = 0
    network = handlepool.recorded(function)
    with pytest.warns(RuntimeWarning, match="calls"):
        assert value_of(network(array(1))) == 1
    for number in range(2, 5):
        assert value_of(network(array(1))) == number
    assert calls == 4


def test_strict_raises_instead(array):
    def function(x):
        nonlocal calls
        calls += 1
        return x * calls

    calls = 0
    with pytest.raises(CaptureError, match="calls"):
        handlepool.recorded(function, strict=True)(array(1))
    assert calls == 1


def test_in_a_recording_it_is_a_part_of_that(array):
    inner = handlepool.recorded(lambda x: handlepool.add(x, x))
    inner(array(1))
    outer = handlepool.recorded(lambda x: handlepool.add(inner(x), x))
    for number in range(3):
        assert value_of(outer(array(number))) == 3 * number
    with handlepool.record(lambda x: inner(x), array(0), lanes=2) as program:
        assert value_of(program(array(4))) == 8
    assert inner.stats().recorded == outer.stats().recorded == 1


def test_recursion_is_a_part_of_the_outermost_call(array):
    @handlepool.recorded
    def power(x, n):
        return x if n == 0 else handlepool.add(power(x, n - 1), x)

    for number in range(3):
        assert value_of(power(array(number), 3)) == 4 * number
    assert power.stats().recorded == 1


def test_under_a_callers_capture_it_is_captured(driver, array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    x = array(1)
    network(x)
    stream = driver.current_stream()
    out = array(0)
    # A capture takes memory that is free in the stream's arena.
    network.__wrapped__(x)
    driver.begin_capture(stream.ptr)
    network(x, out=out)
    with driver.relaxed():
        graph = driver.end_capture(stream.ptr)
        graph.instantiate()
    x[...] = 5
    graph.launch(stream.ptr)
    assert value_of(out) == 10
    with driver.relaxed():
        graph.destroy()


def test_g17_in_a_forks_body_and_its_branches_data_decides(array):
    weight = array(1)
    network = handlepool.recorded(lambda x: handlepool.add(x, weight))
    network(array(0))

    def doubled(x):
        return handlepool.add(x, x)

    states = handlepool.ParallelStates(3)
    with states.fork() as fork:
        a = fork.run(doubled, array(1))
        b = network(a)
        c = fork.run(network, b)
        fork.run(increase, weight, 10)
        d = fork.run(network, b)
    assert [value_of(each) for each in (a, b, c, d)] == [2, 3, 4, 14]


def test_a_task_and_submit_give_the_same(array):
    network = handlepool.recorded(lambda x: handlepool.add(x, x))
    with handlepool.ParallelStateExecutor(2) as executor:
        futures = [executor.submit(network, array(number)) for number in range(6)]
        assert [value_of(each.result()) for each in futures] == [0, 2, 4, 6, 8, 10]
    other = handlepool.recorded(lambda x: handlepool.add(x, x))
    futures = [other.submit(array(number)) for number in range(6)]
    assert [value_of(each.result()) for each in futures] == [0, 2, 4, 6, 8, 10]
    assert network.stats().recorded >= 1
    assert other.stats().recorded >= 1
    assert network.stats().eager == other.stats().eager == 0


def test_a_future_can_be_awaited(array):
    import asyncio

    network = handlepool.recorded(lambda x: handlepool.add(x, x))

    async def client():
        return [await network.submit(array(number)) for number in range(4)]

    assert [value_of(y) for y in asyncio.run(client())] == [0, 2, 4, 6]


# Books


def test_explain_program_tune_prewarm_and_clear(driver, array):
    network = handlepool.recorded(lambda x: handlepool.add(handlepool.add(x, x), handlepool.add(x, 2 * x)))
    network.prewarm(handlepool.ArraySpec((1, 4, 3, 4), "float32"), tune=False)
    assert network.stats().recorded == 1
    assert "(1, 4, 3, 4)" in network.explain()
    program = network.program(array(0))
    assert program is network.program(array(1))
    assert len(network.tune(lanes=(1, 2), seconds=0.1)) == 1
    assert value_of(network(array(3))) == 15
    assert network.stats().nbytes == program.nbytes > 0
    del program
    network.clear()
    driver.synchronize_stream(driver.current_stream().ptr)
    network.clear()
    assert network.stats().programs == network.stats().nbytes == 0
    assert value_of(network(array(3))) == 15
    assert network.stats().recorded == 2


# Calls


def python_calls(function, *args):
    """The Python functions above the driver that a call makes; the checks of a pool's driver are the driver's."""
    found, depth = [], 0

    def watch(frame, event, _):
        nonlocal depth
        code = frame.f_code
        below = "/drivers/" in code.co_filename or code.co_filename.endswith("checks.py")
        if event == "call":
            if not depth and not below:
                found.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
            depth += below
        elif event == "return":
            depth -= below

    sys.setprofile(watch)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found


def test_a_programs_call_makes_at_most_20_python_calls_and_a_recorded_functions_40(array):
    weights = [array(number) for number in range(10)]

    def function(x):
        for weight in weights:
            x = handlepool.add(x, weight)
        return x

    network, x = handlepool.recorded(function), array(1)
    with handlepool.record(function, array(0), lanes=2) as program:
        for call in (program, network):
            call(x)
            call(x)
        of_program, of_network = python_calls(program, x), python_calls(network, x)
    assert len(of_program) <= 20, of_program
    assert len(of_network) <= 40, of_network
