"""`record(lanes=)`: the calls of sequential code become nodes that wait for what their data asks for alone (guarantee 17)."""

import json
import linecache
import re
import sys
import threading
from functools import partial
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
from harness.graphs import double
from harness.hidden import hidden
from harness.lines import DRIVERS, PACKAGE
from harness.operations import plus, times
from harness.scenes import TIMEOUT, Scene, Thread, leased, works

import handlepool
from handlepool import ArgumentError, CaptureError, ContractError, HandlePool, PoolClosedError, StateBusyError
from handlepool.drivers.host import captures as captured
from handlepool.drivers.host.array import raw_view
from handlepool.drivers.host.captures import Captures
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.graphs import RecordedGraph
from handlepool.pool.context import thread
from handlepool.recording import lanes as books

LANES = (1, 2, 3, 8)


class Watched(HostDriver):
    """Notes the sets that streams are put behind, and how it is told of what streams share; ``kept`` says what of a set stays."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sets, self.kept, self.report = [], tuple, None

    def set_dependencies(self, pointer, nodes):
        self.sets.append(len(nodes))
        super().set_dependencies(pointer, self.kept(nodes))

    def watch_shared_state(self, report, *, check=True):
        self.report = report
        return lambda: None


class WithoutTheCall(HostDriver):
    def dependencies(self, pointer):
        return None

    def set_dependencies(self, pointer, nodes):
        raise AssertionError("it has no such call")


@pytest.fixture
def scene():
    with Scene(Watched(scheduler="adversarial", check_order=True), default=True) as scene:
        yield scene


def add(scene, x, y):
    return scene.put(scene.array(), lambda x, y: x + y, x, y)


adding = handlepool.operation(add)


def diamond(scene, x):
    """Two chains that meet."""
    left, right = plus(scene, x, 1), plus(scene, x, 2)
    for _ in range(3):
        left, right = plus(scene, left, 10), plus(scene, right, 20)
    return adding(scene, left, right)


def replayed(scene, function, *args, lanes=8):
    with handlepool.record(function, scene, *args, lanes=lanes) as program:
        program.replay()
        return scene.read(program.outputs), program.explain()


# The order


@pytest.mark.parametrize("lanes", LANES)
def test_g17_calls_follow_what_they_read_and_nothing_else(scene, lanes):
    value, how = replayed(scene, diamond, scene.array(1), lanes=lanes)
    assert value == 95
    assert (how.limit, how.got) == (lanes, min(lanes, 2))
    assert how.nodes[-1].after == ((6, 7) if lanes > 1 else (7,))
    assert len({step.lane for step in how.nodes}) == min(lanes, 2)
    assert not how.serial


def test_g17_control_a_set_without_a_producer_is_caught(scene):
    x = scene.array(1)
    scene.driver.kept = lambda nodes: nodes[1:]
    with pytest.raises((ContractError, CaptureError), match=r"not ordered|not waited for"):
        replayed(scene, diamond, x)
    scene.driver.order.found.clear()


def in_place(scene, x):
    y = plus(scene, x, 1)
    before = plus(scene, y, 0)
    times(scene, y, 10)
    after = plus(scene, y, 0)
    times(scene, y, 10)
    return adding(scene, adding(scene, before, after), y)


@pytest.mark.parametrize("lanes", LANES)
def test_g17_what_is_written_in_place_comes_after_its_readers(scene, lanes):
    value, _ = replayed(scene, in_place, scene.array(1), lanes=lanes)
    assert value == 2 + 20 + 200


# What is no node


def plain_at(places):
    def function(scene, x):
        if "first" in places:
            x = x + 5
        left, right = plus(scene, x, 1), plus(scene, x, 2)
        if "between" in places:
            left = right * 2
            left -= 1
        left, right = plus(scene, left, 10), plus(scene, right, 20)
        y = adding(scene, left, right)
        return np.sqrt(y) if "last" in places else y

    return function


PLAIN = {"first": ["x = x + 5"], "between": ["left = right * 2", "left -= 1"], "last": ['return np.sqrt(y) if "last"']}


@pytest.mark.parametrize("places", [("first",), ("between",), ("last",), ("first", "between", "last")], ids=" ".join)
def test_g17_unseen_work_stands_after_all_before_it_and_before_all_after_it(scene, places):
    function = plain_at(places)
    x = scene.array(1)
    expected = scene.read(function(scene, x))
    value, how = replayed(scene, function, x)
    assert value == expected
    lines = [line for place in places for line in PLAIN[place]]
    for step, line in zip(how.serial, lines, strict=True):
        name, _, number = step.place.rpartition(":")
        assert name == __file__
        assert linecache.getline(name, int(number)).strip().startswith(line)
        assert "no graph function" in step.why


def test_work_that_no_driver_tells_of_lies_between_the_calls_around_it(scene):
    scene.driver.watch_untracked_work = lambda report: lambda: None  # as with CuPy
    function = plain_at(("between",))
    with handlepool.record(function, scene, scene.array(1), lanes=2) as program:
        (step,) = program.explain().serial
    numbers = [int(number) for number in re.findall(r"test_lanes\.py:(\d+)", step.place)]
    first = function.__code__.co_firstlineno
    lines = [linecache.getline(__file__, number).strip() for number in numbers]
    assert all(first < number < first + 20 for number in numbers)
    assert [line.partition(" = ")[2] for line in lines] == [
        "plus(scene, x, 1), plus(scene, x, 2)",
        "plus(scene, left, 10), plus(scene, right, 20)",
        "right * 2",
    ]


def test_g17_control_unseen_work_that_follows_no_leaf_is_caught(scene):
    x = scene.array(1)
    function = plain_at(("last",))
    scene.driver.kept = lambda nodes: nodes if len(nodes) < 2 else nodes[:1]
    with pytest.raises((ContractError, CaptureError), match=r"not ordered|not waited for"):
        replayed(scene, function, x)
    scene.driver.order.found.clear()


def forked(scene, x):
    left, right = plus(scene, x, 1), plus(scene, x, 2)
    with scene.states.fork() as fork:
        a = fork.run(scene.plus, left, 10)
        b = fork.run(plus, scene, right, 20)
    return adding(scene, a, b)


def test_g17_a_fork_stands_after_all_before_it_and_before_all_after_it_and_is_named(scene):
    value, how = replayed(scene, forked, scene.array(1))
    assert value == 12 + 23
    assert len(how.nodes) == 3
    (fork,) = how.serial
    assert fork.name == "a fork"
    assert fork.after == (0, 1)
    assert how.nodes[-1].after == (2,)
    assert fork.place.startswith(__file__)


def two_forks_of_graph_functions(scene, x):
    with scene.states.fork() as fork:
        ys = [fork.run(double, x) for _ in range(4)]
    with scene.states.fork() as fork:
        return [fork.run(double, y) for y in ys]


def test_a_fork_is_one_step_whose_branches_are_side_by_side(scene):
    x = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32))
    with handlepool.record(two_forks_of_graph_functions, scene, x, lanes=4) as program:
        how = program.explain()
    assert [step.name for step in how.steps] == ["a fork", "a fork"]
    assert how.longest == 2
    assert all(step.why.endswith(", its 4 branches side by side") for step in how.steps)
    assert [step.place for step in how.steps] == [f"{__file__}:{line}" for line in lines_of(two_forks_of_graph_functions, 2, 4)]


def lines_of(function, *lines):
    return [function.__code__.co_firstlineno + line for line in lines]


def test_a_fork_that_has_fewer_states_than_it_wanted_says_so(scene):
    x = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32))
    sides = scene.pool.internals.device(0).sides
    for free, told in ((4, "branches side by side on 3 of 4 states"), (1, "branches one after the other on 0 of 4 states")):
        taken = [sides.lease() for _ in range(32 - free)]
        with handlepool.record(two_forks_of_graph_functions, scene, x, lanes=4) as program:
            first, _ = program.explain().steps
            assert told in first.why
        for slot in taken:
            sides.release(slot, captured=False)


def test_the_same_work_in_one_place_is_one_line_with_a_count(scene):
    def function(scene, x):
        for _ in range(3):
            x = plus(scene, x + 1, 1)
        return x

    with handlepool.record(function, scene, scene.array(1), lanes=4) as program:
        assert len(program.explain().serial) == 3
        (line,) = [line for line in str(program.explain()).splitlines() if "no graph function" in line]
        assert line.startswith("  3 times ")


def test_g17_calls_inside_a_call_are_part_of_its_node(scene):
    @handlepool.operation
    def twice(x):
        with scene.states.fork() as fork:
            a, b = fork.run(plus, scene, x, 1), fork.run(plus, scene, x, 2)
        return adding(scene, a, plus(scene, b, 0))

    value, how = replayed(scene, lambda scene, x: twice(plus(scene, twice(x), 0)), scene.array(1))
    assert value == 13
    assert [step.name.rpartition(".")[2] for step in how.nodes] == ["twice", "plus", "twice"]


def buried(y):
    """Three levels down, where no walk sees an array."""
    return Buried(y)


class Buried:
    inner = property(lambda self: self.box.box)

    def __init__(self, y):
        self.box = SimpleNamespace(box=SimpleNamespace(y=y))


def seen_late(writes_first, says):
    """A call whose own calls use what it does not say, of an array that another call uses."""
    reads = (lambda scene, x, deep: deep.inner.y) if says else ()

    @handlepool.operation(reads=reads)
    def reading(scene, x, deep):
        return adding(scene, x, deep.inner.y)

    @handlepool.operation(mutates=reads)
    def writing(scene, x, deep):
        times(scene, deep.inner.y, 3)
        return scene.plus(x, 0)

    def function(scene, x, y):
        deep = buried(y)
        if writes_first:
            return writing(scene, x, deep), reading(scene, x, deep)
        return adding(scene, x, y), writing(scene, x, deep)

    return function


@pytest.mark.parametrize("writes_first", [True, False])
def test_calls_inside_a_call_that_use_more_than_it_says_are_refused_where_it_comes_after_less(scene, writes_first):
    y = scene.array(1)
    with pytest.raises(CaptureError, match=r"(reading|writing) at \S+ calls a function .* memory of \S*(writing|add) at"):
        handlepool.record(seen_late(writes_first, says=False), scene, scene.array(1), y, lanes=4)
    assert scene.read(y) == 3
    assert leased(scene) == 0
    for lanes, says in ((4, True), (1, False)):
        with handlepool.record(seen_late(writes_first, says), scene, scene.array(1), scene.array(1), lanes=lanes) as program:
            program.replay()
            assert [scene.read(y) for y in program.outputs] == ([1, 10] if writes_first else [4, 1])
    assert works(scene)


@pytest.mark.parametrize("writes_first", [True, False])
def test_what_a_call_reads_and_a_call_inside_it_writes_is_written(scene, writes_first):
    @handlepool.operation
    def tripling(scene, x, y):  # says that it reads both
        times(scene, y, 3)
        return scene.plus(x, 0)

    def function(scene, x, y):
        if writes_first:
            return tripling(scene, x, y), plus(scene, y, 0)
        return plus(scene, y, 0), tripling(scene, x, y)

    args = scene, scene.array(1), scene.array(1)
    if not writes_first:
        with pytest.raises(CaptureError, match=r"tripling at \S+ calls a function .* memory of plus at \S+ without declaring"):
            handlepool.record(function, *args, lanes=4)
        assert works(scene)
        return
    with handlepool.record(function, *args, lanes=4) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [1, 9]
        assert program.explain().steps[1].after == (0,)


def test_g17_what_calls_inside_a_call_use_is_known_to_those_that_follow(scene):
    @handlepool.operation
    def reading(scene, x, deep):
        return scene.plus(plus(scene, deep.inner.y, 0), 100)

    def function(scene, x, y):
        first = reading(scene, x, buried(y))
        times(scene, y, 3)
        return first, plus(scene, x, 1)

    with handlepool.record(function, scene, scene.array(1), scene.array(1), lanes=4) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [103, 2]
        assert program.explain().steps[1].after == (0,)


def test_g17_what_a_call_returns_it_wrote_wherever_it_has_that_from(scene):
    @handlepool.operation
    def returning(scene, x, deep):
        scene.put(deep.inner.y, lambda y, x: y + x, deep.inner.y, x)
        return deep.inner.y

    def function(scene, x, y):
        returning(scene, x, buried(y))
        return plus(scene, y, 0), plus(scene, x, 1)

    with handlepool.record(function, scene, scene.array(1), scene.array(1), lanes=4) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [3, 2]
        assert program.explain().steps[1].after == (0,)


def test_what_streams_share_is_used_beside_nothing_and_is_named(scene):
    @handlepool.operation
    def transformed(x):
        y = scene.plus(x, 0)
        if scene.driver.report is not None:
            scene.driver.report("cupy.fft")
        return scene.plus(y, 1)  # after its own work before that, too

    def function(scene, x):
        first, second = plus(scene, x, 1), plus(scene, x, 2)
        third = transformed(x)
        return adding(scene, adding(scene, first, second), adding(scene, third, plus(scene, x, 3)))

    with handlepool.record(function, scene, scene.array(1), lanes=8) as program:
        steps = program.explain().steps
        assert "cupy.fft" in steps[2].why
        assert steps[2].after == (0, 1)
        assert [step.after for step in steps[3:5]] == [(2,), (2,)]
        program.replay()
        assert scene.read(program.outputs) == 2 + 3 + 2 + 4


# Streams of the function's own, and of other calls


@pytest.fixture
def own(scene):
    """A stream that follows the current one with `work`, and events: `end` has the current stream wait for it."""
    driver, stream, (begin, end) = scene.driver, scene.driver.create_stream(), [scene.driver.create_event() for _ in range(2)]

    def work(out, function, *given, pointer=None):
        def run(out, *given):
            out[...] = function(*given)

        pointer = pointer or stream.ptr
        driver.record_event(begin, driver.current_stream().ptr)
        driver.wait_event(pointer, begin)
        driver.enqueue(pointer, run, writes=[out], reads=given)
        driver.record_event(end, pointer)

    return SimpleNamespace(work=work, end=lambda: driver.wait_event(driver.current_stream().ptr, end), stream=stream)


@pytest.mark.parametrize("lanes", LANES)
def test_a_call_on_a_stream_of_the_functions_own_is_no_node_and_is_recorded(scene, own, lanes):
    driver, (begin, end) = scene.driver, [scene.driver.create_event() for _ in range(2)]

    def function(scene, x):
        y = plus(scene, x, 1)
        driver.record_event(begin, driver.current_stream().ptr)
        driver.wait_event(own.stream.ptr, begin)
        with own.stream:
            z = plus(scene, y, 10)
        driver.record_event(end, own.stream.ptr)
        driver.wait_event(driver.current_stream().ptr, end)
        return adding(scene, y, z)

    value, how = replayed(scene, function, scene.array(1), lanes=lanes)
    assert value == 2 + 12
    assert len(how.nodes) == 2


@handlepool.operation
def ending(scene, own, x, y):
    own.end()
    return scene.put(scene.array(), lambda x, y: x + y, x, y)


@pytest.mark.parametrize("inside", [True, False], ids=["a call", "other work"])
@pytest.mark.parametrize("lanes", LANES)
def test_g17_work_on_a_stream_of_the_functions_own_comes_after_what_was_before_it(scene, own, inside, lanes):
    def function(scene, x, y):
        z = plus(scene, plus(scene, plus(scene, x, 1), 1), 1)
        own.work(y, lambda z: z * 10, z)
        beside = plus(scene, z, 1000)
        if not inside:
            own.end()
        return ending(scene, own, beside, y)

    assert replayed(scene, function, scene.array(1), scene.array(0), lanes=lanes)[0] == 1004 + 40
    assert not scene.driver.order.found


@handlepool.operation
def keeping(scene, x):
    scene.driver.kept_pointer = scene.driver.current_stream().ptr
    return scene.plus(x, 1)


def test_g17_work_on_a_lanes_stream_that_is_waited_for_stands_alone(scene, own):
    def function(scene, x, y):
        main = scene.driver.current_stream().ptr
        z = keeping(scene, x)
        if scene.driver.kept_pointer == main:  # in the first call
            scene.put(y, lambda z: z * 10, z)
        else:
            own.work(y, lambda z: z * 10, z, pointer=scene.driver.kept_pointer)
            own.end()
        times(scene, y, 2)
        return adding(scene, z, y)

    value, how = replayed(scene, function, scene.array(1), scene.array(0))
    assert value == 2 + 40
    assert [step.lane is None for step in how.steps] == [False, True, False, False]


@pytest.mark.parametrize("goes_on", [True, False])
def test_g17_work_on_a_lanes_stream_that_nothing_waits_for_is_refused(scene, goes_on):
    def function(scene, x, y):
        z = keeping(scene, x)
        later = plus(scene, z, 1)
        scene.driver.enqueue(scene.driver.kept_pointer, lambda y: y.fill(7), writes=[y])
        return plus(scene, later, 5) if goes_on else later

    with pytest.raises(CaptureError, match="not waited for"):
        replayed(scene, function, scene.array(1), scene.array(0))
    assert works(scene)


def test_g17_the_same_where_the_driver_does_not_mind_is_refused_by_what_no_call_made(scene, monkeypatch):
    """As CUDA: a stream that was put elsewhere is not missed at the end."""
    end = Captures.end

    def without_the_check(captures, queue):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captured, "_ancestors", lambda nodes: {*queue.capture.nodes} if queue.capture else set())
            return end(captures, queue)

    monkeypatch.setattr(Captures, "end", without_the_check)

    def function(scene, x, y):
        z = keeping(scene, x)
        later = plus(scene, z, 1)
        scene.driver.enqueue(scene.driver.kept_pointer, lambda y: y.fill(7), writes=[y])
        return plus(scene, later, 5)

    with pytest.raises(
        CaptureError, match=r"1 of \d nodes of the CUDA graph reached the stream of a call after the call had ended"
    ):
        replayed(scene, function, scene.array(1), scene.array(0))
    assert works(scene)


def test_an_error_of_the_functions_own_is_raised_also_where_a_stream_of_its_own_is_still_out(scene, own):
    calls = hidden([])

    def function(scene, x, y):
        calls().append(x)
        own.work(y, lambda x: x, plus(scene, x, 1))
        if len(calls()) > 1:
            raise ZeroDivisionError
        own.end()
        return y

    with pytest.raises(ZeroDivisionError):
        handlepool.record(function, scene, scene.array(1), scene.array(0), lanes=2)
    assert works(scene)


@pytest.mark.parametrize("caught", [False, True])
def test_a_lane_that_could_not_be_begun_is_none_and_what_was_to_be_on_it_is_missed(scene, monkeypatch, make_default, caught):
    def function(scene, x):
        made = []
        for value in range(6):
            try:
                made.append(plus(scene, x, value))
            except ZeroDivisionError:
                if not caught:
                    raise
                made.append(x)
        return made

    made, former = [], type(scene.driver).wait_event

    def wait_event(driver, pointer, event):
        if thread.recording is not None and pointer != thread.recording.lanes.main.pointer:
            made.append(pointer)
            if len(made) == 2:
                raise ZeroDivisionError
        former(driver, pointer, event)

    monkeypatch.setattr(type(scene.driver), "wait_event", wait_event)
    with pytest.raises(CaptureError if caught else ZeroDivisionError, match="other work" if caught else None):
        handlepool.record(function, scene, scene.array(1), lanes=8)
    assert len(made) == 2
    monkeypatch.undo()
    make_default(scene.pool)
    assert works(scene)


@pytest.mark.unmeasured
def test_undeclared_memory_of_a_call_that_raises_an_error_is_refused(scene):
    @handlepool.operation
    def failing(scene, x):
        times(scene, kept, 3)
        raise ZeroDivisionError

    def function(scene, x):
        for _ in range(4):
            x = plus(scene, x, 1)
        scene.put(kept, lambda x: x, x)
        y = plus(scene, kept, 1)
        with pytest.raises(ZeroDivisionError):
            failing(scene, x)
        return y

    kept = scene.array(0)
    with pytest.raises(CaptureError, match=r"failing at .* calls a function that uses memory of plus at .* without declaring"):
        replayed(scene, function, scene.array(1))
    assert works(scene)


def overwritten_where_it_was_given_back(scene):
    kept = scene.array(1)
    scene.driver.kept_array = kept  # where nobody sees it

    @handlepool.operation
    def given_back(scene, x):
        scene.plus(x, 1)
        return scene.driver.kept_array

    @handlepool.operation(mutates="y")
    def tenfold(scene, y):
        scene.put(y, lambda y: 10 * y, y)

    def function(scene, x, kept):
        read = [plus(scene, kept, 1), plus(scene, kept, 2)]
        tenfold(scene, given_back(scene, x))
        return adding(scene, *read)

    with handlepool.record(function, scene, scene.array(5), kept, lanes=8) as program:
        scene.put(kept, lambda: 1)
        program.replay()
        return scene.read(program.outputs), scene.read(kept), [step.after for step in program.explain().nodes]


def test_g17_what_was_there_before_and_is_given_back_is_overwritten_after_all_who_read_it(scene):
    read, kept, after = overwritten_where_it_was_given_back(scene)
    assert (read, kept) == (5, 10)
    assert after == [(), (), (), (0, 1, 2), (0, 1)]


def test_g17_control_what_is_given_back_without_its_readers_is_caught(scene, without):
    without("users of returned memory")
    with pytest.raises(ContractError, match="not ordered"):
        overwritten_where_it_was_given_back(scene)
    scene.driver.order.found.clear()


def test_what_streams_share_outside_of_calls_is_named_where_it_stands(scene):
    def shared(scene, x):
        if thread.recording is not None:
            scene.driver.report("cupy.fft")
        return scene.plus(x, 100)

    def function(scene, x):
        first = shared(scene, x)
        second, third = plus(scene, first, 1), plus(scene, first, 2)
        return adding(scene, shared(scene, second), shared(scene, third))

    value, how = replayed(scene, function, scene.array(1))
    assert value == 202 + 203
    named = [step for step in how.serial if step.name == "cupy.fft"]
    assert [step.place.startswith(__file__) for step in named] == [True] * 3
    assert named[0].after == ()
    assert named[1].after == (2, 3)  # both calls, which stand behind what was used before them
    assert [step.why for step in how.nodes] == [""] * 3


def test_a_call_of_another_pool_is_no_node_and_has_a_handle_of_its_own(scene):
    x = scene.driver.asarray(np.ones((1, 4, 8, 8), np.float32))
    w = scene.driver.asarray(np.ones((4, 4, 1, 1), np.float32))
    with HandlePool(driver=scene.driver) as other:

        def function(x):
            return handlepool.conv2d(handlepool.conv2d(double(x), w, pool=other), w)

        with handlepool.record(function, x, lanes=4) as program:
            how = program.explain()
            assert [len(how.nodes), [step.after for step in how.nodes]] == [2, [(), (1,)]]
            program.replay()
            assert np.unique(scene.driver.asnumpy(program.outputs)).tolist() == [32]
        assert other.stats()["handles_created"] > 0


def test_graph_functions_are_nodes(scene):
    x = scene.driver.asarray(np.ones((1, 4, 8, 8), np.float32))
    with handlepool.record(lambda x: [double(double(x)), double(x)], x, lanes=8) as program:
        program.replay()
        assert [np.unique(scene.driver.asnumpy(y)).tolist() for y in program.outputs] == [[4], [2]]
        assert [step.after for step in program.explain().nodes] == [(), (0,), ()]


# What a node costs


def chains(step, x, nodes):
    made = [x] * 8
    for number in range(nodes):
        made[number % 8] = step(made[number % 8])
    return made


def side_by_side(step, x, nodes):
    return [step(x) for _ in range(nodes)]


def overwritten(step, x, nodes):
    made = [step(x) for _ in range(8)]
    for number in range(nodes - 8):
        step(made[number % 8], made[number * 3 % 8])
    return made


log = hidden(SimpleNamespace(total=0, marks=[]))
"""A global: what a call's closure holds is looked at."""


def lines_of_nodes(scene, shape, nodes):
    """How many lines of the package run for each node that is recorded, but for drivers'."""
    calls = hidden([])

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and (not name.startswith(PACKAGE) or name.startswith(DRIVERS)):
            return None
        log().total += event == "line"
        return trace

    @handlepool.operation(mutates="y")
    def step(x, y=None):
        log().marks.append(log().total)
        return scene.plus(x, 1) if y is None else scene.put(y, lambda y, x: x + y, y, x)

    def function(x):
        calls().append(1)
        if len(calls()) == 1:
            return shape(step, x, nodes)
        log().marks.clear()
        sys.settrace(trace)
        try:
            return shape(step, x, nodes)
        finally:
            sys.settrace(None)

    handlepool.record(function, scene.array(1), lanes=8).close()
    return np.diff(log().marks)


@pytest.mark.parametrize("shape", [chains, side_by_side, overwritten])
def test_a_node_costs_the_same_however_many_there_were(scene, shape):
    lines = lines_of_nodes(scene, shape, 400)
    assert lines[300:].mean() < 1.05 * lines[50:150].mean()


def test_control_what_looks_at_every_node_is_found(scene, monkeypatch):
    def start(lanes, *given):
        for _ in lanes.steps:
            pass
        return former(lanes, *given)

    former = books.Lanes._start
    monkeypatch.setattr(books.Lanes, "_start", at_home(start))
    lines = lines_of_nodes(scene, chains, 400)
    assert lines[300:].mean() > 1.2 * lines[50:150].mean()


def at_home(function):
    """The function, as if it stood in the package."""
    code = function.__code__.replace(co_filename=f"{PACKAGE}recording/late.py")
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


# Lanes


def wide(scene, x):
    return [plus(scene, x, value) for value in range(6)]


def test_g1_lanes_are_leased_one_at_a_time_and_given_back(scene):
    x = scene.array(1)
    for lanes, got in ((1, 1), (4, 4), (32, 6)):
        with handlepool.record(wide, scene, x, lanes=lanes) as program:
            assert program.explain().got == got
            assert leased(scene) == 0
            program.replay()
            assert [scene.read(y) for y in program.outputs] == [1, 2, 3, 4, 5, 6]
    assert works(scene)


def test_where_no_slot_is_free_nodes_share_what_there_is(scene):
    x = scene.array(1)
    sides = scene.pool.internals.device(0).sides
    for free in (1, 2, 3):  # the main stream takes one
        taken = [sides.lease() for _ in range(32 - free)]
        with handlepool.record(wide, scene, x, lanes=8) as program:
            program.replay()
            assert [scene.read(y) for y in program.outputs] == [1, 2, 3, 4, 5, 6]
            how = program.explain()
            assert how.got == max(free - 1, 1)
            assert how.wanted > how.got
            assert "could use" in str(how)
        for slot in taken:
            sides.release(slot, captured=False)
    assert works(scene)


def test_forks_of_other_threads_take_what_is_left(scene):
    calls = hidden([])

    def others():
        with scene.driver.create_stream():
            x = scene.array(1)
            # A function of its own: where no state is free, it counts from then on as one that may write what it was given.
            return [scene.read(y) for y in scene.states.map(lambda x, value: scene.plus(x, value), [x] * 6, range(6))]

    def function(scene, x, lanes):
        made = [plus(scene, x, value) for value in range(lanes)]
        calls().append(Thread(others).finish())
        return made

    for lanes in (3, 30, 31, 32):  # the main stream takes one; 31 leave none
        with handlepool.record(function, scene, scene.array(1), lanes, lanes=lanes) as program:
            assert program.explain().got == min(lanes, 31)
            assert calls().pop() == calls().pop() == [1, 2, 3, 4, 5, 6]
            program.replay()
            assert [scene.read(y) for y in program.outputs] == [1 + value for value in range(lanes)]
    assert leased(scene) == 0


def much_wider_than_asked_for(scene, x, beside):
    made = [plus(scene, x, value) for value in range(40)]
    beside()
    return made


@pytest.mark.parametrize("left", [4, 0])
def test_a_wide_recording_leaves_side_streams_for_others_and_is_named_where_it_has_them_all(scene, limits, left):
    limits(LEFT_FREE=left)
    found = hidden([])

    def other():
        with scene.driver.create_stream():
            return handlepool.record(diamond, scene, scene.array(1), lanes=2).explain()

    def beside():
        if thread.recording is not None:
            found().append(Thread(other))
            if left:
                assert found()[0].finish().got == 2
            else:
                with pytest.raises(
                    StateBusyError, match="needs a free side stream; another recording has leased 31 side streams as lanes"
                ):
                    found()[0].finish()

    with handlepool.record(much_wider_than_asked_for, scene, scene.array(1), beside, lanes=2) as program:
        assert program.explain().recorded == 31 - left
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [*range(1, 41)]
    assert len(found()) == 1


@pytest.mark.parametrize("left", [4, 0])
def test_a_fork_behind_a_wide_part_has_states(scene, limits, left):
    limits(LEFT_FREE=left)

    def function(scene, x):
        made = [plus(scene, x, value) for value in range(40)]
        with scene.states.fork() as fork:
            return [fork.run(scene.plus, y, 1) for y in made[:4]]

    with handlepool.record(function, scene, scene.array(1), lanes=2) as program:
        fork = next(step for step in program.explain().serial if step.name == "a fork")
        assert ("on 0 of 4 states" in fork.why) is not bool(left)
        assert ("4 branches side by side" in fork.why) is bool(left)


def test_a_driver_without_the_call_gives_one_lane():
    with Scene(WithoutTheCall(scheduler="adversarial", check_order=True), default=True) as scene:
        value, how = replayed(scene, diamond, scene.array(1))
        assert value == 95
        assert (how.got, how.exact) == (1, False)
        assert "one after the other" in str(how)


# Torch


@pytest.mark.parametrize(("driver", "initialised"), [("cuda", True), ("cuda", False), ("host", True)])
def test_torchs_stream_is_set_while_recording_wherever_it_uses_the_gpu(scene, torch_door, monkeypatch, driver, initialised):
    """Also where tensors are in globals alone."""

    def run_branch(pointer, caller, device, function, args, kwargs, held=None):
        streams.append(pointer)
        try:
            return function(*args, **kwargs)
        finally:
            streams.pop()

    @handlepool.operation
    def both(x):
        found().append((streams[-1], scene.driver.current_stream().ptr))
        return scene.plus(x, 1)

    def function(x):
        left, right = both(x), both(x)
        found().append((streams[-1], scene.driver.current_stream().ptr))
        return left, right

    torch = SimpleNamespace(Tensor=type("Tensor", (), {}), cuda=SimpleNamespace(is_initialized=lambda: initialised))
    monkeypatch.setitem(sys.modules, "torch", torch)
    foreign = SimpleNamespace(
        run_branch=run_branch, recording_pool=lambda device: None, current_stream=lambda device: scene.driver.current_stream().ptr
    )
    torch_door(lambda: foreign, "order.stream_order", "recording.tensors")
    scene.driver.name = driver
    for lanes in (None, 1, 4):
        streams, found = [None], hidden([])
        handlepool.record(function, scene.array(1), lanes=lanes).close()
        first, second = found()[:3], found()[3:]
        if driver == "cuda" and initialised and lanes is not None:
            assert {theirs for theirs, _ in first} == {ours for _, ours in first}  # one stream, as everything runs on it then
        else:
            assert {theirs for theirs, _ in first} == {None}
        if driver == "cuda" and initialised:
            assert all(theirs == ours for theirs, ours in second)
            assert len({ours for _, ours in second}) == {None: 1, 1: 2, 4: 3}[lanes]
        else:
            assert {theirs for theirs, _ in second} == {None}


# Bad input


@pytest.mark.parametrize("lanes", [0, -1, 33, "8", 2.0, True, [8]], ids=str)
def test_lanes_are_an_integer_from_1_to_32(scene, lanes):
    with pytest.raises(ArgumentError, match=r"record\(lanes="):
        handlepool.record(wide, scene, scene.array(1), lanes=lanes)
    assert works(scene)


def test_a_function_of_such_a_parameter_is_wrapped(scene):
    def function(x, lanes):
        return plus(scene, x, lanes)

    with handlepool.record(partial(function, lanes=5), scene.array(1), lanes=2) as program:
        program.replay()
        assert scene.read(program.outputs) == 6


def test_a_recording_has_so_many_nodes_at_most(scene, limits):
    limits(MOST_NODES=5)
    with pytest.raises(CaptureError, match="would be node 6"):
        handlepool.record(wide, scene, scene.array(1), lanes=8)
    assert works(scene)


@pytest.mark.parametrize("where", ["between", "inside"])
def test_an_error_in_the_middle_goes_on_and_leaves_nothing_open(scene, where):
    @handlepool.operation
    def failing(x):
        y = scene.plus(x, 1)
        if len(calls()) > 1 and where == "inside":
            raise ZeroDivisionError
        return y

    def function(scene, x):
        calls().append(x)
        y = failing(plus(scene, x, 1))
        if len(calls()) > 1:
            raise ZeroDivisionError
        return y

    calls = hidden([])
    with pytest.raises(ZeroDivisionError):
        handlepool.record(function, scene, scene.array(1), lanes=8)
    assert leased(scene) == 0
    assert works(scene)


def test_after_an_error_that_was_caught_all_follows_what_the_call_gave(scene):
    @handlepool.operation(mutates="y")
    def failing(y):
        scene.put(y, lambda x: x + 100, y)
        raise ZeroDivisionError

    def function(scene, x):
        y, z = plus(scene, x, 1), plus(scene, x, 2)
        with pytest.raises(ZeroDivisionError):
            failing(y)
        return adding(scene, y, z)

    value, _ = replayed(scene, function, scene.array(1))
    assert value == 105


@pytest.mark.parametrize(
    ("calls", "difference"),
    [
        ([[plus, plus], [plus, times]], "call 2 was plus at .* and times at"),
        ([[plus], [plus, plus]], "call 2 was none the first time, and plus at"),
        ([[plus, plus], [plus]], "call 2 was plus at .*, and none the second"),
        ([[adding, plus], [plus, adding]], "call 1 was add at .* and plus at"),
    ],
)
def test_other_calls_at_the_second_call_are_refused_and_the_first_difference_is_named(scene, calls, difference):
    given = hidden(iter(calls))

    def function(scene, x):
        for call in next(given()):
            call(scene, x, x if call is adding else 1)
        return x

    with pytest.raises(CaptureError, match=difference) as caught:
        handlepool.record(function, scene, scene.array(1), lanes=8)
    assert not re.search("waits for the GPU|recording/capture.py|0 bytes", str(caught.value))  # it is about nothing else
    assert leased(scene) == 0
    assert works(scene)


def test_another_size_at_the_second_call_is_refused(scene):
    arrays = hidden(iter([scene.driver.asarray(np.ones((1, 4, size, size), np.float32)) for size in (8, 6)]))
    with pytest.raises(CaptureError, match=r"call 1 was double at .*1,024 bytes the first time, .* 576 bytes the second"):
        handlepool.record(lambda: double(next(arrays())), lanes=8)
    assert works(scene)


def changing(scene):
    """Functions of how often they were called, each with what is another thing the second time, and how that is told."""
    x, small = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32)), scene.array(1)
    here = re.escape(__file__)
    return {
        "option": (
            lambda n: handlepool.add(x, x, activation="relu" if n == 1 else "tanh"),
            rf"call 1 was add at {here}:\d+, which writes 576 bytes the first time, and add at {here}:.*, with other options",
        ),
        "option of an operation": (lambda n: plus(scene, small, n), "plus at .*, with 1 the first .*, with 2 the second"),
    }


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("what", ["option", "option of an operation"])
def test_other_options_at_the_second_call_are_refused(scene, what, lanes):
    function, told = changing(scene)[what]
    calls = hidden(iter((1, 2)))
    with pytest.raises(CaptureError, match=told):
        handlepool.record(lambda: function(next(calls())), lanes=lanes)
    assert leased(scene) == 0
    assert works(scene)
    handlepool.record(lambda: function(1), lanes=lanes).close()


def by_a_cache(scene):
    made = {}

    def cached(x):
        if "y" not in made:
            made["y"] = handlepool.add(x, x)
        return handlepool.add(made["y"], x)

    return cached


def by_a_list(scene):
    left = [1, 2]

    def emptying(x):
        while left:
            x = handlepool.add(x, x, activation="relu" if left.pop() == 1 else None)
        return np.add(x, 1)

    return emptying


def by_a_fork(scene):
    counts = hidden(iter([1, 3]))

    def forking(x):
        return scene.states.map(double, [x] * next(counts()))[0]

    return forking


@pytest.mark.parametrize("lanes", [None, 1, 4])
@pytest.mark.parametrize("make", [by_a_cache, by_a_list])
def test_what_is_made_at_the_first_call_alone_is_refused(scene, make, lanes):
    x = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32))
    with pytest.raises(CaptureError, match="did other work in its second call"):
        handlepool.record(make(scene), x, lanes=lanes)
    assert leased(scene) == 0
    assert works(scene)


class Cell:
    """Keeps state from call to call, in a new array each time or in one array, and shows an array of each call."""

    def __init__(self, scene):
        self.h = scene.driver.asarray(np.ones((2, 8), np.float32))
        self.kept = {"h": self.h}
        self.seen = None

    def attribute(self, x):
        self.h = handlepool.add(self.h, x)
        return self.h

    def container(self, x):
        self.kept["h"] = handlepool.add(self.kept["h"], x)
        return self.kept["h"] + 1

    def in_place(self, x):
        return handlepool.add(self.h, x, out=self.h) + 1

    def looked_at(self, x):
        self.seen = handlepool.add(x, x)
        return handlepool.add(self.seen, x)

    @handlepool.operation
    def operation(self, x):
        self.seen = handlepool.add(x, x)
        return handlepool.add(self.seen, x)


def by_a_name(scene):
    h = scene.driver.asarray(np.ones((2, 8), np.float32))

    def step(x):
        nonlocal h
        h = handlepool.add(h, x)
        return h + 1

    return step


def by_a_context_variable(scene):
    kept = hidden([scene.driver.asarray(np.ones((2, 8), np.float32))])

    def step(x):
        kept()[0] = handlepool.add(kept()[0], x)
        return kept()[0] + 1

    return step


@pytest.mark.parametrize("lanes", [None, 1, 4])
@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (by_a_name, "step changed nonlocal h "),
        (lambda s: Cell(s).attribute, r"Cell.attribute changed self\.h "),
        (lambda s: Cell(s).container, r"Cell.container changed self\.kept\[h\] "),
        (lambda s: Cell(s).looked_at, r"Cell.looked_at changed self\.seen "),
        (lambda s: Cell(s).operation, r"Cell.operation changed self\.seen "),
        (by_a_context_variable, r"step keeps state in a new array at each call: .*made by add at .*test_lanes"),
    ],
)
def test_state_in_a_new_array_each_time_is_refused(scene, make, changed, lanes):
    """Each replay would begin with the same, and no attribute would hold the array that a replay has made."""
    x = scene.driver.asarray(np.ones((2, 8), np.float32))
    with pytest.raises(CaptureError, match=changed):
        handlepool.record(make(scene), x, lanes=lanes)
    assert leased(scene) == 0
    assert works(scene)


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_state_in_one_array_is_recorded(scene, lanes):
    x, cell = scene.driver.asarray(np.ones((2, 8), np.float32)), Cell(scene)
    with handlepool.record(cell.in_place, x, lanes=lanes) as program:
        before = scene.driver.asnumpy(cell.h)
        found = [scene.driver.asnumpy(program(None))[0, 0] for _ in range(3)]
    assert found == [before[0, 0] + k for k in (2, 3, 4)]


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_program_inside_a_recording_is_refused_with_what_to_do(scene, lanes):
    x = scene.driver.asarray(np.ones((2, 8), np.float32))
    with (
        handlepool.record(lambda x: handlepool.add(x, x), x) as inner,
        pytest.raises(CaptureError, match="a program cannot be used inside another recording: in the recorded function, call"),
    ):
        handlepool.record(lambda x: inner(x), scene.driver.asarray(np.ones((2, 8), np.float32)), lanes=lanes)
    assert works(scene)


def test_other_branches_at_the_second_call_are_refused_without_lanes(scene):
    x = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32))
    with pytest.raises(CaptureError, match="call 2 was none the first time, and double at"):
        handlepool.record(by_a_fork(scene), x)
    assert works(scene)


@pytest.mark.parametrize("lanes", [None, 2])
def test_another_result_at_the_second_call_is_refused(scene, lanes):
    sizes = hidden(iter([8, 16]))
    with pytest.raises(CaptureError, match=r"returned something else .*\(8,\).* the first time, and .*\(16,\).* the second"):
        handlepool.record(lambda: scene.array(1, size=next(sizes())), lanes=lanes)
    assert works(scene)


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_an_operation_and_a_graph_function_that_are_defined_anew_at_each_call_are_the_same(scene, lanes):
    def function(x):
        @handlepool.operation
        def adding(x, value):
            return scene.plus(x, value)

        @handlepool.graph
        def twice(g, x):
            return g.add(x, x)

        return adding(twice(x), 1)

    x = scene.driver.asarray(np.ones((8,), np.float32))
    with handlepool.record(function, x, lanes=lanes) as program:
        program.replay()
        assert scene.read(program.outputs) == 3


def of_a_factory(scene):
    """Functions that share their code, and compute other things."""

    def graphs(number):
        @handlepool.graph
        def layer(g, x):
            return g.add(x, x) if number == 1 else g.mul(x, x)

        return layer

    def operations(number):
        @handlepool.operation
        def layer(x):
            return scene.plus(x, number)

        return layer

    def options(number):
        return partial(by_option, how=lambda g, x: g.add(x, x) if number == 1 else g.mul(x, x))

    return {"graph functions": graphs, "operations": operations, "options": options}


@handlepool.graph
def by_option(g, x, *, how):
    return how(g, x)


@pytest.mark.parametrize("kind", ["graph functions", "operations", "options"])
def test_other_functions_of_one_factory_at_the_second_call_are_refused(scene, kind):
    factory, x = of_a_factory(scene)[kind], scene.driver.asarray(np.ones(8, np.float32))
    layers, calls = [factory(1), factory(2)], hidden(iter((0, 1)))
    with pytest.raises(CaptureError, match="did other work in its second call"):
        handlepool.record(lambda x: layers[next(calls())](x), x, lanes=2)
    assert works(scene)
    handlepool.record(lambda x: factory(1)(x), x, lanes=2).close()  # made anew each time, and the same
    if kind != "operations":  # which are not compared without lanes
        calls = hidden(iter((0, 1)))
        with pytest.raises(CaptureError, match="did other work in its second call"):
            handlepool.record(lambda x: layers[next(calls())](x), x)
    handlepool.record(lambda x: factory(1)(x), x).close()


def test_what_is_returned_beside_arrays_may_differ(scene):
    log = hidden([])

    def function(x):
        log().append(len(log()))
        return scene.plus(x, 1), log()[-1], None if log()[-1] else "first"

    with handlepool.record(function, scene.array(1)) as program:
        program.replay()
        assert scene.read(program.outputs[0]) == 2


def test_views_of_dictionaries_are_refused(scene):
    with pytest.raises(ArgumentError, match=r"a view of a dictionary; pass the dictionary, or a list"):
        handlepool.record(lambda xs: [scene.plus(x, 1) for x in xs], {"a": scene.array(1)}.values())


def test_lanes_in_the_body_of_a_fork_are_refused(scene):
    x = scene.array(1)
    with scene.states.fork() as fork:
        y = fork.run(scene.plus, x, 1)
        with pytest.raises(
            CaptureError, match="with lanes in the body of a fork: record it before the fork, or record it without lanes"
        ):
            handlepool.record(double, x, lanes=2)
    assert scene.read(y) == 2
    with handlepool.record(double, x, lanes=2) as program:
        program.replay()
        assert scene.read(program.outputs) == 2


def test_a_plan_that_was_built_anew_and_arrays_of_the_functions_own_are_the_same_call(scene):
    x = scene.driver.asarray(np.ones((1, 4, 6, 6), np.float32))

    def function():
        double.cache_clear()
        made = np.add(x, 1)  # plain work, in memory that is another one each time
        with scene.states.fork() as fork:
            branches = [fork.run(double, made) for _ in range(2)]
        new = np.ones(x.shape, np.float32)  # NumPy's, which nobody can tell from what was there
        return handlepool.add(handlepool.add(*branches), handlepool.add(double(made), new))

    with handlepool.record(function, lanes=4) as program:
        program.replay()
        assert np.all(np.asarray(program.outputs) == 4 + 4 + 4 + 1)


def test_a_function_whose_forks_and_plain_code_call_the_same_again_is_taken(scene):
    def function(scene, x):
        return forked(scene, np.add(x, 1))

    with handlepool.record(function, scene, scene.array(1), lanes=8) as program:
        assert [step.name for step in program.explain().nodes] == ["plus", "plus", "add"]


def test_an_undeclared_write_in_place_is_found_where_the_pool_checks():
    @handlepool.operation
    def sly(scene, x):
        scene.put(x, lambda x: x + 1, x)
        return scene.plus(x, 1)

    with Scene(check=True, default=True) as scene:
        with pytest.raises(ContractError, match="sly wrote argument x without declaring it"):
            handlepool.record(sly, scene, scene.array(1), lanes=2)
        assert replayed(scene, lambda scene, x: plus(scene, x, 1), scene.array(1))[0] == 2
        assert works(scene)


def test_work_of_another_library_that_the_capture_did_not_get_is_refused(scene):
    W = np.ones(8)
    x = scene.array(1)

    @handlepool.operation
    def doubled(values):
        return values * 2  # NumPy's, at once

    @handlepool.operation(mutates="y")
    def filled(y):
        raw_view(y)[0][...] = 5

    def function(call):
        return lambda: [plus(scene, x, 1), call()]

    for call in (partial(doubled, W), partial(filled, x)):
        with pytest.raises(CaptureError, match=r"(doubled|filled) at .*test_lanes.py:\d+ gave no work to the stream"):
            handlepool.record(function(call), lanes=4)
        assert leased(scene) == 0
    assert works(scene)


@pytest.mark.parametrize("also_here", [False, True])
def test_work_for_the_recorded_stream_itself_is_alone_or_refused(scene, also_here):
    """What takes the stream before the call, and launches on it inside."""

    @handlepool.operation
    def elsewhere(x, stream):
        y = scene.plus(x, 1) if also_here else x
        with stream:
            return scene.plus(y, 10)

    def function(scene, x):
        stream = scene.driver.current_stream()
        first = plus(scene, x, 1)
        return [elsewhere(first, stream), plus(scene, first, 2)]

    expected = [scene.read(y) for y in function(scene, scene.array(1))]
    if also_here:
        with pytest.raises(CaptureError, match=r"elsewhere at .*test_lanes.py:\d+ gave work both to the current stream and to"):
            handlepool.record(function, scene, scene.array(1), lanes=4)
        assert works(scene)
        return
    with handlepool.record(function, scene, scene.array(1), lanes=4) as program:
        program.replay()
        assert [scene.read(y) for y in program.outputs] == expected
        (step,) = program.explain().serial
        assert "not only to its own lane" in step.why
        assert program.explain().steps[2].after == (1,)


def test_a_refusal_that_the_function_catches_is_told_all_the_same(scene, limits):
    @handlepool.operation(mutates="y")
    def filled(y):
        raw_view(y)[0][...] = 5

    @handlepool.operation
    def both(x, stream):
        with stream:
            y = scene.plus(x, 1)
        return y, scene.plus(x, 1)

    def unwritten(x):
        return plus(scene, scene.array(), 1)

    def twice(x):
        return both(x, scene.driver.current_stream())

    def many(x):
        return [plus(scene, x, value) for value in range(4)]

    def function(call, x):
        y = plus(scene, x, 1)
        try:
            call(x)
        except CaptureError:
            y = plus(scene, x, 2)
        return y

    limits(MOST_NODES=4)
    for call, message in ((filled, "gave no work"), (unwritten, "never written"), (twice, "work both"), (many, "node 5")):
        with pytest.raises(CaptureError, match=message):
            handlepool.record(partial(function, call), scene.array(1), lanes=4)
        assert leased(scene) == 0
    assert works(scene)


def test_an_operation_that_gives_no_work_and_writes_nothing_is_taken(scene):
    @handlepool.operation
    def half(x):
        return x[: x.size // 2]

    @handlepool.operation
    def nothing(x):
        return np.empty(0)

    def function(x):
        nothing(x)
        return half(plus(scene, half(x), 1))

    with handlepool.record(function, scene.array(1, size=16), lanes=4) as program:
        program.replay()
        assert scene.read(program.outputs) == 2


@pytest.mark.parametrize("inside", [False, True])
def test_a_call_that_synchronises_is_refused_with_its_line(scene, inside):
    @handlepool.operation
    def waiting(x):
        y = scene.plus(x, 1)
        return y, float(y[0])

    def function(scene, x):
        y = plus(scene, x, 1)
        return waiting(y) if inside else y.get()

    line = (waiting.function if inside else function).__code__.co_firstlineno + (3 if inside else 2)
    with pytest.raises(CaptureError, match=rf"test_lanes.py:{line} \(a wait for the values.* docs/host-arrays") as told:
        handlepool.record(function, scene, scene.array(1), lanes=4)
    assert str(told.value).count("test_lanes.py") == 1
    assert leased(scene) == 0
    assert works(scene)


def test_two_threads_record_at_once(scene):
    x = scene.array(1)
    scene.read(x)
    found, barrier = [], threading.Barrier(2)

    def function(scene, x):
        barrier.wait(TIMEOUT)
        return diamond(scene, x)

    def run():
        with scene.driver.create_stream():
            found.append(replayed(scene, function, x)[0])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT)
    assert found == [95, 95]


def test_a_program_of_a_closed_pool_and_a_closed_program_say_so(scene):
    program = handlepool.record(wide, scene, scene.array(1), lanes=2)
    scene.pool.close()
    with pytest.raises(PoolClosedError):
        program.replay()
    program.close()
    with pytest.raises(PoolClosedError):
        program.explain()


# What it says


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_what_allocates_at_each_replay_is_counted_and_its_callers_are_named(scene, monkeypatch, lanes):
    def function(scene, x):
        left, right = plus(scene, x, 1), twice(scene, x)
        left *= 2
        return adding(scene, left, right)

    @handlepool.operation
    def twice(scene, x):
        return scene.plus(scene.plus(x, 1), 1)

    monkeypatch.setattr(RecordedGraph, "allocations", lambda graph: graph.graph.nodes)  # as if each were one
    with handlepool.record(function, scene, scene.array(1), lanes=lanes) as program:
        how = program.explain()
        assert len(how.allocations) == program.nodes == 5
        text = str(how)
        assert "Allocations of memory at each replay (cudaMallocAsync): 5" in text
        if lanes is None:
            assert how.allocations == (None,) * 5
            assert "5 by calls that are not known" in text
        else:
            assert sorted(how.allocations) == [0, 1, 1, 2, 3]
            assert re.search(r"2 by \S*twice, \S+test_lanes\.py:\d+", text)
        assert how.to_dict()["allocations"] == [*how.allocations]


def test_a_recording_that_allocates_nothing_when_it_runs_says_nothing_of_it(scene):
    with handlepool.record(diamond, scene, scene.array(1), lanes=4) as program:
        assert program.explain().allocations == ()
        assert "Allocations" not in str(program.explain())


def test_an_explanation_can_be_printed_and_stored_and_drawn(scene):
    with handlepool.record(forked, scene, scene.array(1), lanes=4) as program:
        how = program.explain()
        assert "3 nodes, 3 edges, 2 of 4 lanes; the longest path of waits has 3 of 4 steps" in str(how)
        assert re.search(r"  a fork, \S+test_lanes.py:\d+, \S+test_lanes.py:\d+: recorded in the order of streams", str(how))
        known = json.loads(json.dumps(how.to_dict()))
        assert (known["nodes"], known["edges"], known["serial"], known["limit"]) == (3, 3, 1, 4)
        assert known["nbytes"] == program.nbytes
        drawn = how.to_dot()
        assert drawn.startswith('digraph "forked" {')
        assert drawn.count("shape=ellipse") == 3
        assert "0 -> 2;" in drawn
        assert "2 -> 3;" in drawn
    with handlepool.record(diamond, scene, scene.array(1)) as program:
        assert "order of streams and forks" in str(program.explain())
        assert program.explain().to_dict()["nodes"] == 0
