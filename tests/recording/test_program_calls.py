"""A call of a program: update, replay and copies of the outputs in one turn, from any thread and on any stream."""

import threading
from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from harness.scenes import TIMEOUT, Scene, Thread, over_seeds, without_waits_of_the_last
from harness.uses import ON_A_SIDE_STREAM, STREAMS

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    ContractError,
    DeviceMismatchError,
    HandlePool,
    OwnershipError,
    PoolClosedError,
    ops,
)
from handlepool._util.names import kind_of

Pair = namedtuple("Pair", "first second")


def body(scene):
    return lambda x: scene.plus(scene.plus(x, 10), 100)


@pytest.fixture
def scene(make_driver, scheduler):
    with Scene(make_driver(scheduler=scheduler), default=True) as scene:
        yield scene


@pytest.fixture
def program(scene):
    with handlepool.record(body(scene), scene.array(0)) as program:
        yield program


# Values


def test_what_a_call_returns_is_the_callers(scene, program):
    values = [program(scene.array(value)) for value in range(4)]
    program.update(scene.array(50))
    program.replay()
    assert [scene.read(y) for y in values] == [110, 111, 112, 113]
    assert scene.read(program.outputs) == 160


def test_control_what_a_replay_leaves_is_overwritten(scene, program):
    values = []
    for value in range(4):
        program.update(scene.array(value))
        program.replay()
        values.append(program.outputs)
    assert [scene.read(y) for y in values] == [113] * 4


def test_the_values_have_the_structure_of_the_outputs(scene):
    def function(x):
        y = scene.plus(x, 1)
        return {"a": [y, (scene.plus(x, 2), y)], "b": Pair(scene.plus(x, 3), None), 7: "name", "x": x}

    with handlepool.record(function, scene.array(0)) as program:
        values = program(scene.array(5))
        assert [*values] == ["a", "b", 7, "x"]
        assert isinstance(values["a"], list)
        assert type(values["a"][1]) is tuple
        assert type(values["b"]) is Pair
        assert values["a"][0] is values["a"][1][1]
        assert (values["b"].second, values[7]) == (None, "name")
        found = values["a"][0], values["a"][1][0], values["b"].first, values["x"]
        assert [scene.read(y) for y in found] == [6, 7, 8, 5]
        assert not {id(y) for y in found} & {id(program.outputs["a"][0]), id(program.outputs["x"])}


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_copies_lie_as_the_outputs_do_and_have_no_gaps(scene, axes):
    x = scene.driver.asarray(np.arange(60.0).reshape(3, 4, 5))

    def function(x):
        return scene.put(scene.driver.asarray(np.zeros((3, 4, 5))), lambda x: x + 1, x).transpose(axes)[:, 1:]

    scene.driver.asarray = lambda values: scene.driver.empty(values.shape, values.strides, values.dtype)
    with handlepool.record(function, x) as program:
        y = program(None)
        expected = np.arange(1.0, 61).reshape(3, 4, 5).transpose(axes)[:, 1:]
        assert np.array_equal(y.get(), expected)
        assert sorted(y.strides) == sorted(np.empty_like(expected).strides)
        assert np.argsort(y.strides).tolist() == np.argsort(program.outputs.strides).tolist()


def test_out_is_written_and_returned(scene):
    with handlepool.record(lambda x: [scene.plus(x, 1), (scene.plus(x, 2), 3)], scene.array(0)) as program:
        first, second = scene.array(), scene.array()
        values = program(scene.array(10), out=[first, (second, None)])
        assert values[0] is first
        assert values[1][0] is second
        assert values[1][1] == 3
        assert (scene.read(first), scene.read(second)) == (11, 12)
        values = program(scene.array(20), out=(None, [second, None]))
        assert (scene.read(first), scene.read(values[0]), scene.read(second)) == (11, 21, 22)


def test_out_may_be_an_argument_or_memory_of_the_program(scene, program):
    x = scene.array(1)
    for expected in (111, 221, 331):
        program(x, out=x)
        assert scene.read(x) == expected
    assert program(scene.array(5), out=program.outputs) is program.outputs
    assert scene.read(program.outputs) == 115


def test_out_may_be_the_outputs_memory_in_another_order(scene):
    x = scene.driver.asarray(np.arange(9.0).reshape(3, 3))
    with handlepool.record(lambda x: x + 1, x) as program:
        y = program.outputs
        for other in (y.T, y[::-1], y):
            program(x, out=other)
            assert (other.get() == np.arange(9.0).reshape(3, 3) + 1).all()


def test_outputs_may_be_carried_into_the_inputs(scene):
    state = scene.array(1)

    def function(state):
        return scene.plus(state, 10), state

    with handlepool.record(function, state) as program:
        last = scene.array()
        scene.put(state, lambda: 1)
        for before in (1, 11, 21):  # every output is read before the first array is written
            program(None, out=(state, last))
            assert (scene.read(last), scene.read(state)) == (before, before + 10)


def test_what_was_recorded_without_an_array_stays_and_is_said_to(scene):
    with handlepool.record(lambda x, factor: scene.plus(x, factor), scene.array(1), factor=2) as program:
        with pytest.raises(ArgumentError, match=r"factor was recorded as 2 and is now 3\. .* pass the same value"):
            program(scene.array(2), factor=3)
        assert scene.read(program(scene.array(2))) == 4


class Weighted:
    """An object that holds an array, and compares elementwise."""

    def __init__(self, weight):
        self.weight = weight

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = None


@dataclass(frozen=True)
class Options:
    factor: float
    names: tuple = ()


@dataclass
class Changing:
    factor: float


def test_a_program_takes_the_arguments_that_it_was_recorded_with(scene):
    net = Weighted(scene.array(7))

    def function(net, x, factor, more, *, scale):
        return scene.put(scene.array(), np.add, scene.plus(x, factor * scale + len(more)), net.weight)

    with handlepool.record(function, net, scene.array(1), 2.0, [1, (2, "a")], scale=10) as program:
        assert scene.read(program(net, scene.array(2), 2.0, [1, (2, "a")], scale=10)) == 31
        assert scene.read(program(net, scene.array(3), 2.0, (1, [2, "a"]))) == 32
        assert scene.read(program(scene.array(4), scale=10)) == 33
        assert scene.read(program(net, None, 2.0, [1, (2, "a")])) == 33
        program.update(net, scene.array(5), 2.0, [1, (2, "a")], scale=10)
        program.replay()
        assert scene.read(program.outputs) == 34


EQUAL = [
    (True, True),
    (2**70, 2**70),
    ("ab" * 9, "".join(["ab"] * 9)),
    (-0.0, -0.0),
    (1 + 2j, complex(1, 2)),
    (np.float32(3), np.float32(3)),
    (np.dtype("f4"), np.dtype("f4")),
    (slice(1, 2.0), slice(1, 2.0)),
    (range(3), range(3)),
    (Fraction(1, 3), Fraction(1, 3)),
    (Options(0.5, ("a",)), Options(0.5, ("a",))),
    ({"a": [1, None]}, {"a": (1, None)}),
]


@pytest.mark.parametrize(("was", "now"), EQUAL, ids=kind_of)
def test_equal_values_are_taken(scene, was, now):
    with handlepool.record(lambda x, value: scene.plus(x, 1), scene.array(1), was) as program:
        assert scene.read(program(scene.array(2), now)) == 3
        assert scene.read(program(scene.array(3), was)) == 4


NAN = float("nan")
UNEQUAL = [
    (1, True),
    (True, 1),
    (1, 1.0),
    (2.0, 3.0),
    (0.0, -0.0),
    (complex(0, 0.0), complex(0, -0.0)),
    (NAN, -NAN),
    (np.float32(1), np.float64(1)),
    (np.float64(0), np.float64(-0.0)),
    (np.float64(1), 1.0),
    (2.0, None),
    (None, 2.0),
    ("a", b"a"),
    ([1, 2], [1, 3]),
    ([1, 2], [1, 2, 3]),
    ({"a": 1}, {"b": 1}),
    ({"a": 0.0}, {"a": -0.0}),
    (slice(0, 1), slice(False, 1)),
    (Options(0.0), Options(-0.0)),
    (Changing(1.0), Changing(1.0)),
    (Weighted(None), Weighted(None)),
    (np.sum, np.prod),
]


@pytest.mark.parametrize(("was", "now"), UNEQUAL, ids=kind_of)
@pytest.mark.parametrize("by", ["position", "keyword", "update"])
def test_another_value_is_named_with_both(scene, was, now, by):
    with handlepool.record(lambda x, value: scene.plus(x, 1), scene.array(1), was) as program:
        with pytest.raises(ArgumentError, match=r"argument 1.* was recorded .*now|argument 1 was recorded with"):
            (program.update if by == "update" else program)(scene.array(2), now)
        assert scene.read(program(None)) == 2
    with handlepool.record(lambda x, value: scene.plus(x, 1), scene.array(1), value=was) as program:
        with pytest.raises(ArgumentError, match=r"value.* was recorded .*now|value was recorded with"):
            program(scene.array(2), value=now)
        assert scene.read(program(None)) == 2


def test_the_value_that_is_not_a_number_is_equal_by_identity(scene):
    with handlepool.record(lambda x, value: scene.plus(x, 1), scene.array(1), NAN) as program:
        assert scene.read(program(scene.array(2), NAN)) == 3
        with pytest.raises(ArgumentError, match="argument 1 was recorded as nan and is now another nan"):
            program(scene.array(2), float("nan"))


def test_a_list_that_was_changed_since_is_another_value(scene):
    sizes = [1, 2]
    with handlepool.record(lambda x, sizes: scene.plus(x, sizes[0]), scene.array(1), sizes) as program:
        assert scene.read(program(scene.array(2), sizes)) == 3
        sizes[0] = 5
        with pytest.raises(ArgumentError, match=r"argument 1\[0\] was recorded as 1 and is now 5"):
            program(scene.array(2), sizes)


def test_the_count_says_which_arguments_are_meant(scene):
    def function(x, factor, y):
        return scene.plus(scene.put(scene.array(), np.add, x, y), factor)

    with handlepool.record(function, scene.array(1), 2.0, scene.array(3)) as program:
        assert scene.read(program(scene.array(5), scene.array(6))) == 13
        assert scene.read(program(scene.array(5), 2.0, scene.array(6))) == 13
        with pytest.raises(ArrayTypeError, match="argument 1 is a float"):
            program(scene.array(5), 2.0)
        with pytest.raises(ArgumentError, match=r"argument 1 was recorded as 2\.0 and is now <"):
            program(scene.array(5), scene.array(6), None)
        for wrong in ([scene.array(5)], [scene.array(5)] * 4):
            says = r"2 of which are arrays or contain arrays, and was given [14]: give all .*, or only these 2\. Pass None"
            with pytest.raises(ArgumentError, match=says):
                program(*wrong)


def test_what_is_recorded_with_an_array_of_numpys_reads_it_at_each_call(make_driver):
    with HandlePool(driver=make_driver(check_order=True)) as pool, pool.driver.create_stream():
        program = handlepool.record(lambda x: ops.add(x, x, pool=pool), np.ones((1, 1, 4, 4), np.float32), pool=pool)
        for value in (2, 3):
            assert np.unique(program(np.full((1, 1, 4, 4), value, np.float32)).get()).tolist() == [2 * value]
        program.close()


def test_a_recorded_array_is_refused_where_it_holds_another_ones_values_by_now(scene):
    images = [scene.array(value) for value in range(3)]
    refused = r"argument 0 is the array that .* was recorded with, and a call or an update has overwritten it"
    with handlepool.record(body(scene), images[0]) as program:
        assert [scene.read(program(x)) for x in images] == [110, 111, 112]
        for use in (program, program.update):
            with pytest.raises(ArgumentError, match=refused):
                use(images[0])
        assert scene.read(program(None)) == 112
        program(None, out=images[0])  # its values are the caller's choice again
        assert scene.read(program(images[0])) == 222
        program.update(images[1])
        with pytest.raises(ArgumentError, match=refused):
            program(images[0][:])
    with handlepool.record(body(scene), images[2].copy()) as program:
        assert [scene.read(program(x)) for _ in range(2) for x in images[1:]] == [111, 112] * 2


def test_windows_of_a_signal_whose_first_one_was_recorded_are_refused_where_it_was_overwritten(scene):
    right = np.arange(20.0)
    signal = scene.driver.asarray(right)

    def is_right(program, first):
        return (scene.driver.asnumpy(program(signal[first : first + 8])) == right[first : first + 8]).all()

    with handlepool.record(lambda x: scene.plus(x, 0), signal[:8]) as program:
        assert is_right(program, 0)
        assert is_right(program, 1)
        for use in (program, program.update):
            with pytest.raises(ArgumentError, match=r"argument 0 overlaps an array that .* was recorded with, and .* over"):
                use(signal[2:10])
        assert is_right(program, 9)
    signal = scene.driver.asarray(right)
    with handlepool.record(lambda x: scene.plus(x, 0), signal[:8].copy()) as program:
        assert all(is_right(program, first) for first in range(12))


def test_other_parts_of_an_array_whose_part_was_recorded_are_taken(scene):
    """Every second column, and what begins between the columns of the first one, shares no element with it."""
    right = np.arange(32.0).reshape(8, 4)
    whole = scene.driver.asarray(right)
    with handlepool.record(lambda x: scene.plus(x, 0), whole[:, 0]) as program:
        for column in (1, 2, 3, 1, 2):
            assert (scene.driver.asnumpy(program(whole[:, column])) == right[:, column]).all()
        with pytest.raises(ArgumentError, match="argument 0 is the array that"):
            program(whole[:, 0])


def test_control_where_nobody_tells_a_call_gives_another_ones_result(scene, without):
    without("copies of inputs")
    images = [scene.array(value) for value in range(3)]
    with handlepool.record(body(scene), images[0]) as program:
        assert [scene.read(program(x)) for _ in range(2) for x in images] == [110, 111, 112, 112, 111, 112]


# Bad input


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda s: s.array(), ArgumentError, "out was recorded as a dictionary"),
        (lambda s: {"a": [s.array()]}, ArgumentError, "without the key|with the key 'b'"),
        (lambda s: {"a": [s.array()] * 2, "b": None}, ArgumentError, r"out\['a'\] was recorded with 1 entries"),
        (lambda s: {"a": [s.array(size=9)], "b": None}, ArgumentError, r"out\['a'\]\[0\] has shape \(9,\)"),
        (lambda s: {"a": [s.array().view(np.int64)], "b": None}, ArgumentError, "has type int64"),
        (lambda s: {"a": [[1.0] * 8], "b": None}, ArrayTypeError, r"out\['a'\]\[0\] is a list"),
        (lambda s: {"a": [s.array()], "b": s.array()}, ArgumentError, r"out\['b'\] stands for a str"),
    ],
)
def test_another_out_names_the_place_and_nothing_is_enqueued(scene, out, error, message):
    with handlepool.record(lambda x: {"a": [scene.plus(x, 1)], "b": "name"}, scene.array(0)) as program:
        program(scene.array(1))
        given = out(scene)
        with pytest.raises(error, match=message):
            program(scene.array(2), out=given)
        assert scene.read(program.outputs["a"][0]) == 2


def test_out_of_arrays_that_share_memory_is_refused(scene):
    with handlepool.record(lambda x: (scene.plus(x, 1), scene.plus(x, 2), x), scene.array(0)) as program:
        both = scene.array(size=12)
        with pytest.raises(ArgumentError, match=r": out\[0\] and out\[1\] share memory, .*; pass arrays"):
            program(None, out=(both[:8], both[4:], None))
        program(None, out=(both[:8], None, None))


@pytest.mark.parametrize("strides", [(4, 4), (0, 4), (4, 0), (4, 8), (-4, 4)])
def test_out_whose_elements_overlap_is_refused_and_one_with_gaps_is_not(scene, strides):
    """What comes last into an element that two places share would be found in both."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with handlepool.record(lambda x: handlepool.add(x, x), scene.driver.asarray(values)) as program:
        memory = np.zeros(64, np.float32)
        with pytest.raises(ArgumentError, match=r"out has strides .* bytes: its elements overlap; pass an array"):
            program(None, out=np.lib.stride_tricks.as_strided(memory[16:], (3, 4), strides))
        apart = memory[:48].reshape(4, 12)[:3, 8::-2][:, :4]
        program(None, out=apart)
        scene.driver.synchronize_stream(scene.stream.ptr)
        assert (apart == 2 * values).all()


def test_out_on_another_device_is_refused(scene, program):
    with scene.driver.device(1), scene.driver.create_stream():
        far = scene.array()
        with pytest.raises(DeviceMismatchError):
            program(None)
    with pytest.raises(DeviceMismatchError, match="out is on device 1"):
        program(None, out=far)


def test_arguments_are_those_of_update(scene, program):
    with pytest.raises(ArgumentError, match=r"was given 0: give all positional arguments\. Pass None for"):
        program()
    with pytest.raises(ArgumentError, match="shape"):
        program(scene.array(size=9))
    assert scene.read(program(None)) == 110


def test_outputs_that_may_hold_arrays_unseen_are_refused(scene):
    class Box:
        def __init__(self, y):
            self.y = y

    with handlepool.record(lambda x: Box(scene.plus(x, 1)), scene.array(0)) as program:
        with pytest.raises(ArgumentError, match=r"returned a .*Box, which a call cannot copy"):
            program(None)
        program.replay()


def test_a_call_of_a_closed_program_says_so(scene, program):
    program.close()
    with pytest.raises(PoolClosedError):
        program(None)


# Threads and streams


@pytest.mark.parametrize("kind", STREAMS)
def test_a_call_is_ordered_on_every_kind_of_stream(scene, program, kind):
    for value in range(3):
        with STREAMS[kind](scene.driver):
            there = program(scene.array(value))
            assert scene.read(there) == 110 + value
        assert scene.read(program(scene.array(value + 50))) == 160 + value


@pytest.mark.parametrize("use", ON_A_SIDE_STREAM)
def test_a_call_in_a_branch_or_a_task(scene, program, use):
    found = []
    x = scene.array(3)
    use(scene, lambda: found.append(program(x)))
    assert scene.read(program(scene.array(4))) == 114
    assert scene.read(found[0]) == 113


def test_g17_calls_as_branches_follow_their_data(scene, program):
    with scene.states.fork() as fork:
        first = fork.run(program, fork.run(scene.plus, scene.array(1), 1))
        second = fork.run(program, fork.run(scene.plus, first, 1))
        third = program(second)
        fourth = fork.run(scene.plus, third, 1)
    assert [scene.read(y) for y in (first, second, third, fourth)] == [112, 223, 333, 334]


def two_streams(scene):
    with handlepool.record(body(scene), scene.array(0), pool=scene.pool) as program:
        values = []
        for value in range(4):
            with scene.driver.create_stream() as stream:
                values.append((stream, program(scene.array(value))))
        found = []
        for stream, y in values:
            with stream:
                found.append(scene.read(y))
        return found


def test_g6_calls_on_several_streams_are_ordered():
    assert over_seeds(two_streams, seeds=range(30)) == [[110, 111, 112, 113]] * 30


def test_g6_control_without_the_order_of_streams_a_call_is_wrong():
    found = over_seeds(two_streams, seeds=range(30), make=without_waits_of_the_last)
    assert any(values != [110, 111, 112, 113] for values in found)


def in_threads(scene, call, count=6, rounds=8):
    barrier = threading.Barrier(count)

    def run(number):
        with scene.driver.create_stream():
            found = []
            barrier.wait(TIMEOUT)
            for turn in range(rounds):
                value = 100 * number + turn
                found.append((scene.read(call(scene.array(value), barrier)), value + 110))
            return found

    threads = [Thread(run, number) for number in range(count)]
    return [pair for thread in threads for pair in thread.finish()]


def test_calls_in_many_threads_each_get_the_value_of_their_own(scene, program):
    assert all(got == wanted for got, wanted in in_threads(scene, lambda x, _: program(x)))


def test_control_where_the_steps_are_no_turn_threads_get_the_values_of_others(program, scene):
    turn = threading.Lock()

    def call(x, barrier):
        with turn:
            program.update(x)
            program.hand_over()
        barrier.wait(TIMEOUT)
        with turn:
            program.replay()
            value = scene.plus(program.outputs, 0)
            program.hand_over()
            return value

    assert any(got != wanted for got, wanted in in_threads(scene, call, count=2))


def beside_branches(scene):
    """In the body of a fork, a call of a program, of which a branch writes what it reads, or reads what it writes."""
    weight, out = scene.array(1), scene.array(7)

    def function(x):
        return scene.put(scene.array(), lambda x, w: x + w, x, weight)

    with handlepool.record(function, scene.array(0), pool=scene.pool) as program:
        with scene.states.fork() as fork:
            fork.run(writing, scene, weight, 5)
            seen = fork.run(reading, scene, out)
            program(scene.array(10), out=out)
        return scene.read(out), scene.read(seen)


@handlepool.operation(mutates="y")
def writing(scene, y, value):
    scene.put(y, lambda y: y + value, y)


@handlepool.operation
def reading(scene, x):
    return scene.plus(x, 0)


def test_g17_a_call_in_the_body_follows_branches_by_what_it_reads_and_writes():
    assert {*over_seeds(beside_branches)} == {(16, 7)}


def test_a_call_waits_for_another_threads_update_which_replays_do_not(scene, program):
    inside, go = threading.Event(), threading.Event()
    copy = scene.driver.copy

    def waiting(target, source):
        scene.driver.copy = copy
        inside.set()
        go.wait(TIMEOUT)
        copy(target, source)

    def update():
        with scene.driver.create_stream():
            program.update(scene.array(7))

    scene.driver.copy = waiting
    updating = Thread(update)
    assert inside.wait(TIMEOUT)
    with pytest.raises(OwnershipError, match="belongs to thread"):
        program.replay()
    started = threading.Event()

    def call():
        with scene.driver.create_stream():
            x = scene.array(9)
            started.set()
            return scene.read(program(x))

    calling = Thread(call)
    assert started.wait(TIMEOUT)
    go.set()
    updating.finish()
    assert calling.finish() == 119


def test_after_a_copy_that_failed_the_program_can_be_called(scene, program):
    copy = scene.driver.copy

    def failing(target, source):
        scene.driver.copy = copy
        raise ContractError("no copy")

    scene.driver.copy = failing
    with pytest.raises(ContractError, match="no copy"):
        program(scene.array(1))
    assert scene.read(program(scene.array(2))) == 112
