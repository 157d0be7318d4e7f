"""Memory of a recording on lanes: a block that was freed goes to those alone who come after all of its users (guarantee 8)."""

import re
from pathlib import Path

import numpy as np
import pytest
from harness.operations import plus
from harness.scenes import Scene, leased, works

import handlepool
from handlepool import CaptureError, ContractError, OutOfMemoryError
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.graphs import RecordingMemory
from handlepool.recording.memory import Unwritten

LANES = (1, 2, 3, 8)
WIDTHS = {"googlenet": 4, "squeezenet1_1": 2}
"""How many lanes the calls of a network use."""


def kept(monkeypatch):
    """All memory is kept to the end of the recording."""
    monkeypatch.setattr(RecordingMemory, "set_reuse_policy", lambda memory, *_: False)


def add(scene, x, y):
    return scene.put(scene.array(), lambda x, y: x + y, x, y)


adding = handlepool.operation(add)


@handlepool.operation
def inside(scene, x, y, temporaries):
    for value in range(temporaries):
        x = scene.plus(x, value)
    return add(scene, x, y)


def freed(scene, x):
    """Arrays that nobody holds any more while nodes may still read them."""
    total = plus(scene, x, 0)
    for value in range(8):
        total = adding(scene, total, plus(scene, plus(scene, x, value), 1))
        total = total + inside(scene, x, plus(scene, x, -value), value % 3)
    return total


@pytest.mark.parametrize("lanes", LANES)
def test_g8_freed_memory_is_used_again_and_the_values_are_right(scene, lanes):
    x = scene.array(1)
    expected = scene.read(freed(scene, x))
    with handlepool.record(freed, scene, x, lanes=lanes) as program:
        program.replay()
        assert scene.read(program.outputs) == expected
        assert program.nbytes <= 512 * (5 + lanes)


def test_control_where_all_memory_is_kept_there_is_more(scene, monkeypatch):
    kept(monkeypatch)
    with handlepool.record(freed, scene, scene.array(1), lanes=2) as program:
        program.replay()
        assert program.nbytes > 512 * 30


def beside(scene, x):
    """Chains without an order between them, each of which frees memory that the others would take."""
    chains = [x] * 4
    for step in range(6):
        for place in range(4):
            chains[place] = inside(scene, plus(scene, chains[place], step), x, 2)
    return chains


@pytest.mark.parametrize("lanes", LANES)
def test_g8_chains_beside_each_other_have_memory_of_their_own(scene, lanes):
    x = scene.array(1)
    expected = [scene.read(y) for y in beside(scene, x)]
    sizes = []
    for number in (1, lanes):
        with handlepool.record(beside, scene, x, lanes=number) as program:
            program.replay()
            assert [scene.read(y) for y in program.outputs] == expected
            sizes.append(program.nbytes)
            used = program.explain().recorded
    assert sizes[1] <= sizes[0] * used * 1.1


def test_g8_control_memory_that_goes_to_whoever_asks_is_caught(scene, without):
    without("the last users of memory")
    program = handlepool.record(beside, scene, scene.array(1), lanes=8)
    with pytest.raises(ContractError, match="not ordered"):
        program.replay()
    scene.driver.order.found.clear()


@handlepool.operation
def popping(scene, held, more):
    """Reads an array that it lets go of, and allocates after that."""
    y = scene.plus(held.pop(), 1)
    for value in range(more):
        y = scene.plus(y, value)
    return y


def let_go_of_inside(scene, x):
    held = [plus(scene, x, 1)]
    reader = plus(scene, held[0], 5)  # so who pops it may not have the memory
    popped = popping(scene, held, 2)
    return [popped, plus(scene, reader, 7), plus(scene, reader, 8)]


def in_several_lives(scene, x):
    """A block that was asked for in vain, is given, freed again, and asked for by who knows of its first life alone."""
    y = plus(scene, x, 1)
    first, other = plus(scene, y, 5), plus(scene, x, 2)
    del y
    other = plus(scene, other, 3)  # asks in vain: it does not know the reader
    last = plus(scene, first, 4)
    beside = plus(scene, first, 6)
    made = plus(scene, last, 1)
    del last
    return [other, plus(scene, beside, 3), plus(scene, first, 9), plus(scene, made, 2), beside]


@pytest.mark.parametrize("function", [let_go_of_inside, in_several_lives])
def test_g8_memory_is_known_by_all_its_users_whenever_it_was_asked_for(scene, function):
    x = scene.array(1)
    expected = [scene.read(y) for y in function(scene, x)]
    with handlepool.record(function, scene, x, lanes=8) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == expected


def on_streams(scene, others, x):
    """Work on streams of the function's own, beside the current one, of which each frees memory that the others would take."""
    main, made = scene.driver.current_stream(), []
    for other in others:
        other.wait_event(main.record())
        with other:
            y = x
            for value in range(3):
                y = y + value
            made.append(y)
    y = x
    for value in range(3):
        y = y * value
    for other in others:
        main.wait_event(other.record())
    return [*made, y]


def in_branches(scene, others, x):
    return scene.states.map(lambda x: on_streams(scene, others, x), [x])[0]


as_a_call = handlepool.operation(on_streams)


def as_calls(scene, others, x):
    return [y for value in range(2) for y in as_a_call(scene, others, plus(scene, x, value))]


@pytest.mark.parametrize("function", [on_streams, in_branches, as_calls])
@pytest.mark.parametrize("lanes", [1, 8])
def test_g8_streams_of_the_functions_own_have_memory_of_their_own(scene, function, lanes):
    others = [scene.driver.create_stream() for _ in range(2)]
    x = scene.array(1)
    scene.read(x)  # who made it is waited for
    expected = [scene.read(y) for y in function(scene, others, x)]
    with handlepool.record(function, scene, others, x, lanes=lanes) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == expected


@pytest.mark.parametrize("function", [on_streams, in_branches, as_calls])
def test_g8_control_memory_for_whatever_stream_asks_is_caught(scene, function, monkeypatch):
    original = RecordingMemory.set_reuse_policy
    monkeypatch.setattr(
        RecordingMemory, "set_reuse_policy", lambda memory, may_have, *_: original(memory, may_have, lambda stream: True)
    )
    others = [scene.driver.create_stream() for _ in range(2)]
    program = handlepool.record(function, scene, others, scene.array(1), lanes=8)
    with pytest.raises(ContractError, match="not ordered"):
        program.replay()
    scene.driver.order.found.clear()


def sizes_of(network, lanes):
    from nets import NETWORKS, Parameters

    with Scene(HostDriver(), count=1) as scene:
        p = Parameters(scene.driver.asarray, "float32", 8)
        x = scene.driver.asarray(np.zeros((1, 3, 32, 32), np.float32))
        found = []
        for number in lanes:
            with handlepool.record(NETWORKS[network], p, x, lanes=number, pool=scene.pool) as program:
                found.append((program.nbytes, program.nbytes - program.explain().scratch))
                how, width = program.explain(), WIDTHS[network]
                assert (how.recorded, how.got) == (1 if number == 1 else width, min(number, width))
        return found


@pytest.fixture
def in_networks(monkeypatch, make_default):
    """The networks of the benchmarks; their operations use the scene's pool."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    original = Scene.__init__

    def init(scene, *args, **options):
        original(scene, *args, **options)
        make_default(scene.pool)

    monkeypatch.setattr(Scene, "__init__", init)


@pytest.mark.parametrize("network", WIDTHS)
def test_a_network_takes_at_most_half_as_much_again_as_on_one_lane(in_networks, network):
    one, *others = sizes_of(network, (1, 2, 3, 8))
    for which in (0, 1):  # with scratch, and without
        assert max(size[which] for size in others) <= 1.5 * one[which]


def test_control_googlenet_with_all_memory_kept_takes_more_than_that(in_networks, monkeypatch):
    ((_, one),) = sizes_of("googlenet", (1,))
    kept(monkeypatch)
    ((_, more),) = sizes_of("googlenet", (8,))
    assert more > 1.5 * one


# What was allocated and not written


def test_memory_that_nobody_wrote_is_not_read_and_call_and_array_are_named(scene):
    def function(x):
        z = scene.array()
        return adding(scene, x, z)

    line = function.__code__.co_firstlineno
    message = rf"add at \S+:{line + 2} reads <\S+ of shape \(8,\), float64>, which was allocated at \S+ while recording"
    with pytest.raises(CaptureError, match=message):
        handlepool.record(function, scene.array(1), lanes=4)
    assert leased(scene) == 0
    assert works(scene)


def test_memory_of_a_call_that_gave_no_work_is_not_read_before_it_is_written(scene):
    @handlepool.operation
    def buffer(scene):
        return scene.array()

    @handlepool.operation(mutates="z")
    def filled(scene, z):
        scene.put(z, lambda: 5)

    def function(x, fills):
        z = buffer(scene)
        if fills:
            filled(scene, z)
        return adding(scene, x, z)

    with pytest.raises(CaptureError, match=r"add at .* reads .* allocated at .* never written"):
        handlepool.record(function, scene.array(1), False, lanes=4)
    assert works(scene)
    with handlepool.record(function, scene.array(1), True, lanes=4) as program:
        program.replay()
        assert scene.read(program.outputs) == 6


@pytest.mark.parametrize("by", ["a call", "plain code"])
def test_an_output_that_nothing_recorded_writes_is_refused(scene, by):
    """It was made on a stream that is no part of the recording: at once, and at no replay."""
    other = scene.driver.create_stream()

    def elsewhere(x):
        with other:
            return scene.plus(x, 1)

    call = handlepool.operation(elsewhere) if by == "a call" else elsewhere

    def function(x):
        return {"a": plus(scene, x, 1), "b": [call(x)]}

    x = scene.array(1)
    scene.read(x)  # who made it is waited for
    message = (
        r"function returned <\S+ of shape \(8,\), float64>, which was allocated at \S+:\d+ while recording, and no recorded call"
    )
    with pytest.raises(CaptureError, match=message):
        handlepool.record(function, x, lanes=4)
    assert leased(scene) == 0
    assert works(scene)


@pytest.mark.parametrize("how", ["a call", "a part by a call", "plain code"])
def test_memory_that_was_written_is_read(scene, how):
    @handlepool.operation(mutates="y")
    def filled(y, value):
        y[...] = value

    def function(x):
        z = scene.driver.empty((8,), (8,), np.dtype(np.float64))
        if how == "plain code":
            z[...] = 5
        else:
            filled(z if how == "a call" else z[2:], 5)
        return adding(scene, x, z)

    with handlepool.record(function, scene.array(1), lanes=4) as program:
        program.replay()
        assert program.outputs.get()[4] == 6


def test_memory_that_was_freed_unwritten_is_another_calls_to_write(scene):
    def function(x):
        z = scene.array()
        del z
        return adding(scene, x, plus(scene, x, 1))

    with handlepool.record(function, scene.array(1), lanes=4) as program:
        program.replay()
        assert scene.read(program.outputs) == 3


@pytest.mark.parametrize(
    ("before", "given"),
    [([(0, 512), (512, 1024)], (0, 1024)), ([(0, 1024)], (512, 1024)), ([(0, 1024)], (0, 1024))],
    ids=["several in one", "a part", "the same"],
)
def test_memory_that_is_given_out_again_in_other_blocks_is_known_by_its_last_block(before, given):
    books = Unwritten()
    for start, stop in before:
        books.add(start, stop, "before")
    books.add(*given, "now")
    for place in (0, 0, 512, 512):
        books.add(place, place, "nothing")
    inside = (max(given[0], 512), 600, None)
    with pytest.raises(CaptureError, match="allocated at now"):
        books.check("call", "here", [inside], [], ())
    books.wrote([(*given, None)])
    books.check("call", "here", [inside], [], ())


# Too little


def test_too_little_memory_says_how_far_it_came_and_how_much_there_was():
    with Scene(HostDriver(memory=512 * 50, check_order=True), default=True) as scene:
        held = [[]]

        def function(x):
            made = [plus(scene, x, value) for value in range(40)]
            for each in held:
                each += made
            return made

        message = r"function found no memory on device 0 .*, at call 1\d of 40, when it used [\d,]+ bytes on 1\d lanes"
        with pytest.raises(OutOfMemoryError, match=message):
            handlepool.record(function, scene.array(1), lanes=8)
        assert leased(scene) == 0
        held.clear()
        handlepool.record(function, scene.array(1), lanes=8).close()


def test_too_little_memory_for_several_lanes_says_what_one_takes():
    with Scene(HostDriver(memory=512 * 14, check_order=True), default=True) as scene:
        x = scene.array(1)
        expected = [scene.read(y) for y in beside(scene, x)]
        with pytest.raises(OutOfMemoryError, match="record it with lanes=1") as caught:
            handlepool.record(beside, scene, x, lanes=8)
        assert leased(scene) == 0
        took, one = re.search(r"used ([\d,]+) bytes on \d lanes \(on 1 lane about ([\d,]+) bytes\)", str(caught.value)).groups()
        with handlepool.record(beside, scene, x, lanes=1) as program:  # as it says
            program.replay()
            assert [scene.read(y) for y in program.outputs] == expected
            assert int(one.replace(",", "")) <= program.nbytes < int(took.replace(",", ""))


def test_what_one_lane_takes_is_told_without_a_try(scene):
    recordings = []
    original = RecordingMemory.release

    def release(memory):
        recordings.append(memory.in_order)
        return original(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingMemory, "release", release)
        for lanes in (8, 1):
            with handlepool.record(beside, scene, scene.array(1), lanes=lanes) as program:
                took = program.nbytes
    assert recordings == [took, took]
