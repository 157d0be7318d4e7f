"""Captures on the host driver: graphs and not lists, and spoiled by what spoils them on a GPU."""

import threading

import numpy as np
import pytest

from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import ArgumentError, CaptureError, ContractError

SEEDS = range(50)
TIMEOUT = 60
MODES = ("global", "thread_local", "relaxed")


def give(driver, stream, log, entry):
    driver.enqueue(stream.ptr, lambda: log.append(entry), label=str(entry))


def order(driver, first, second):
    """What the second stream is given from now on comes after what the first was given."""
    with driver.relaxed():
        event = driver.create_event()
    driver.record_event(event, first.ptr)
    driver.wait_event(second.ptr, event)


def in_a_thread(function):
    """Run it there, and raise here what it raised."""
    caught = []

    def run():
        try:
            function()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join(TIMEOUT)
    if caught:
        raise caught[0]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_capturing_stream_is_given_runs_at_each_launch_and_not_before(driver, mode):
    stream, log = driver.create_stream(), []
    assert driver.capture_id(stream.ptr) == 0
    assert not stream.is_capturing()
    stream.begin_capture(mode)
    assert driver.capture_id(stream.ptr) > 0
    assert stream.is_capturing()
    for i in range(3):
        give(driver, stream, log, i)
    graph = stream.end_capture()
    assert driver.capture_id(stream.ptr) == 0
    driver.synchronize_stream(stream.ptr)
    assert log == []
    graph.launch()  # on the current stream, the null stream
    assert log == [0, 1, 2]
    graph.launch(stream)
    driver.synchronize_stream(stream.ptr)
    assert log == [0, 1, 2] * 2


def test_a_launch_runs_in_the_order_of_its_stream_and_a_graph_not_beside_itself(driver):
    a, b, log = driver.create_stream(), driver.create_stream(), []
    a.begin_capture()
    give(driver, a, log, "graph")
    graph = a.end_capture()
    latch = driver.latch(a.ptr)
    give(driver, a, log, "before")
    graph.launch(a)
    graph.launch(b)
    give(driver, b, log, "after")
    latch.release()
    driver.synchronize_stream(b.ptr)
    assert log == ["before", "graph", "graph", "after"]


def test_an_event_pulls_a_stream_into_the_capture_and_back(driver):
    origin, side, log = driver.create_stream(), driver.create_stream(), []
    origin.begin_capture()
    give(driver, origin, log, "fork")
    order(driver, origin, side)
    assert driver.capture_id(side.ptr) == driver.capture_id(origin.ptr)
    give(driver, side, log, "branch")
    order(driver, side, origin)
    give(driver, origin, log, "join")
    graph = origin.end_capture()
    assert driver.capture_id(side.ptr) == 0
    give(driver, side, log, "eager")
    driver.synchronize_stream(side.ptr)
    graph.launch()
    assert log == ["eager", "fork", "branch", "join"]


def fork_and_join(driver, log, branches=3):
    origin, sides = driver.create_stream(), [driver.create_stream() for _ in range(branches)]
    origin.begin_capture()
    give(driver, origin, log, "fork")
    for i, side in enumerate(sides):
        order(driver, origin, side)
        give(driver, side, log, i)
    for side in sides:
        order(driver, side, origin)
    give(driver, origin, log, "join")
    return origin.end_capture()


def behind_its_producers(driver, log, put):
    """Four operations on two streams that follow the first alone, and one that follows them all; ``put`` says who is put so."""
    origin, sides = driver.create_stream(), [driver.create_stream() for _ in range(2)]
    origin.begin_capture()
    give(driver, origin, log, "first")
    first, ends = driver.dependencies(origin.ptr), []
    for side in sides:
        order(driver, origin, side)
    for i in range(4):
        side = sides[i % 2].ptr
        if put:
            driver.set_dependencies(side, first)
        give(driver, sides[i % 2], log, i)
        ends += driver.dependencies(side)
    driver.set_dependencies(origin.ptr, ends)
    give(driver, origin, log, "last")
    return origin.end_capture()


def orders_of(make):
    orders = set()
    for seed in range(200):
        driver, log = HostDriver(scheduler="adversarial", seed=seed), []
        make(driver, log).launch()
        assert (log[0], log[-1]) == ("first", "last")
        orders.add(tuple(log[1:-1]))
    return orders


def test_an_operation_that_is_put_behind_its_producers_runs_beside_all_others():
    assert len(orders_of(lambda driver, log: behind_its_producers(driver, log, put=True))) == 24


def test_control_an_operation_that_is_not_put_elsewhere_follows_its_stream():
    orders = orders_of(lambda driver, log: behind_its_producers(driver, log, put=False))
    assert len(orders) == 6
    assert all(order.index(0) < order.index(2) and order.index(1) < order.index(3) for order in orders)


def written_twice(put):
    """Two operations of one stream that write one array; with ``put`` the second is not behind the first."""
    driver = HostDriver(scheduler="adversarial", check_order=True)
    stream = driver.create_stream()
    with stream:
        array = driver.asarray(np.zeros(4))
    stream.begin_capture()
    ends = []
    for value in range(2):
        if put:
            driver.set_dependencies(stream.ptr, ())
        driver.enqueue(stream.ptr, lambda out, value=value: out.fill(value), writes=[array])
        ends += driver.dependencies(stream.ptr)
    driver.set_dependencies(stream.ptr, ends)
    graph = stream.end_capture()
    graph.launch(stream)
    driver.synchronize_stream(stream.ptr)
    return driver


def test_the_checker_sees_what_is_behind_nothing_on_its_own_stream():
    with pytest.raises(ContractError, match="not ordered"):
        written_twice(put=True)


def test_control_the_checker_takes_what_follows_its_stream():
    assert not written_twice(put=False).order.found


def test_what_is_behind_nothing_and_is_followed_by_nothing_is_named_at_the_end(driver):
    stream, log = driver.create_stream(), []
    stream.begin_capture()
    give(driver, stream, log, "lost")
    driver.set_dependencies(stream.ptr, ())
    with pytest.raises(CaptureError, match="not waited for: lost"):
        stream.end_capture()


def test_dependencies_are_those_of_a_capture_and_of_that_one_alone(driver):
    one, other, log = driver.create_stream(), driver.create_stream(), []
    for call in (driver.dependencies, lambda pointer: driver.set_dependencies(pointer, ())):
        with pytest.raises(CaptureError, match="not capturing"):
            call(one.ptr)
    one.begin_capture()
    other.begin_capture()
    assert driver.dependencies(one.ptr) == ()
    give(driver, one, log, "one")
    with pytest.raises(ContractError, match="cannot depend on a node outside of"):
        driver.set_dependencies(other.ptr, driver.dependencies(one.ptr))
    one.end_capture()
    other.end_capture()


def test_branches_of_a_graph_stay_without_order_and_fork_and_join_hold():
    orders = set()
    for seed in SEEDS:
        driver, log = HostDriver(scheduler="adversarial", seed=seed), []
        fork_and_join(driver, log).launch()
        assert (log[0], log[-1]) == ("fork", "join")
        orders.add(tuple(log[1:-1]))
    assert len(orders) == 6


def test_a_graph_launched_on_a_capturing_stream_becomes_part_of_the_capture(driver):
    stream, log = driver.create_stream(), []
    inner = fork_and_join(driver, log, branches=1)
    stream.begin_capture()
    give(driver, stream, log, "first")
    inner.launch(stream)
    give(driver, stream, log, "last")
    graph = stream.end_capture()
    assert log == []
    graph.launch()
    assert log == ["first", "fork", 0, "join", "last"]


def test_replays_read_and_write_device_memory(driver):
    stream, array = driver.create_stream(), driver.asarray(np.zeros(4))
    stream.begin_capture()
    driver.enqueue(stream.ptr, lambda a: np.add(a, 1, out=a), writes=[array])
    graph = stream.end_capture()
    for _ in range(3):
        graph.launch()
    assert (array == 3).all()


def test_a_replay_after_its_memory_was_freed_is_an_error(driver):
    stream, pointer = driver.create_stream(), driver.allocate(64)
    scratch = driver.scratch_array(pointer, 64, None)
    stream.begin_capture()
    driver.enqueue(stream.ptr, lambda a: a.fill(1), writes=[scratch], label="captured")
    graph = stream.end_capture()
    graph.launch()
    driver.free(pointer)
    with pytest.raises(ContractError, match=r"captured ran and touches .*freed before"):
        graph.launch()


def test_work_given_by_another_thread_to_a_side_stream_in_a_capture_is_recorded_silently(driver):
    origin, side, log = driver.create_stream(), driver.create_stream(), []
    origin.begin_capture()
    order(driver, origin, side)
    in_a_thread(lambda: give(driver, side, log, "from another thread"))
    order(driver, side, origin)
    graph = origin.end_capture()
    assert log == []
    graph.launch()
    assert log == ["from another thread"]


# Ends


def test_a_branch_that_was_not_joined_is_named_at_the_end(driver):
    origin, side, log = driver.create_stream(), driver.create_stream(), []
    origin.begin_capture()
    order(driver, origin, side)
    give(driver, side, log, "lost branch")
    with pytest.raises(CaptureError, match="not waited for: lost branch"):
        origin.end_capture()
    for stream in (origin, side):
        assert not stream.is_capturing()
        give(driver, stream, log, "usable")
        driver.synchronize_stream(stream.ptr)
    assert log == ["usable", "usable"]


def test_a_capture_ends_on_its_own_stream(driver):
    origin, side = driver.create_stream(), driver.create_stream()
    with pytest.raises(CaptureError, match="is not capturing"):
        origin.end_capture()
    origin.begin_capture()
    order(driver, origin, side)
    with pytest.raises(CaptureError, match="end a capture on the stream that it began on"):
        side.end_capture()
    origin.end_capture()


def test_a_capture_begins_once_and_not_on_the_null_stream(driver):
    stream = driver.create_stream()
    with pytest.raises(CaptureError, match="legacy default stream"):
        driver.legacy_stream.begin_capture()
    with pytest.raises(ArgumentError, match="lazy"):
        stream.begin_capture("lazy")
    stream.begin_capture()
    with pytest.raises(CaptureError, match="already"):
        stream.begin_capture()
    stream.end_capture()
    driver.per_thread_stream.begin_capture()
    driver.per_thread_stream.end_capture()


@pytest.mark.parametrize("mode", MODES)
def test_only_a_relaxed_capture_may_be_ended_by_another_thread(driver, mode):
    stream = driver.create_stream()
    stream.begin_capture(mode)
    if mode == "relaxed":
        in_a_thread(stream.end_capture)
    else:
        with pytest.raises(CaptureError, match="end_capture in thread 'another'"):
            in_a_thread(stream.end_capture)
        with pytest.raises(CaptureError, match="invalidated"):
            stream.end_capture()
    assert not stream.is_capturing()


# What spoils a capture


def spoiled(driver, origin, log):
    """The capture refuses more work, raises at its end, and leaves its stream usable, beside another that is under way."""
    with pytest.raises(CaptureError, match="invalidated"):
        give(driver, origin, log, "refused")
    with pytest.raises(CaptureError, match="invalidated"):
        origin.end_capture()
    give(driver, origin, log, "usable")
    with driver.relaxed():
        driver.synchronize_stream(origin.ptr)
    assert log[-1] == "usable"


def test_what_a_capturing_stream_cannot_be_asked_spoils_its_capture_in_every_mode(driver):
    calls = {
        "id": lambda stream: driver.stream_id(stream.ptr),
        "synchronize": lambda stream: stream.synchronize(),
        "copy": lambda stream: driver.asnumpy(np.zeros(1)),
        "latch": lambda stream: driver.latch(stream.ptr),
    }
    for mode in MODES:
        for call in calls.values():
            stream, log = driver.create_stream(), []
            stream.begin_capture(mode)
            with stream, driver.relaxed(), pytest.raises(CaptureError, match="invalidated"):
                call(stream)
            spoiled(driver, stream, log)


@pytest.mark.parametrize("what", ["work outside the capture", "legacy default stream"])
def test_a_wait_between_a_capture_and_what_is_outside_it_spoils_it(driver, what):
    stream, outside, log = driver.create_stream(), driver.create_stream(), []
    give(driver, outside, log, "outside")
    stream.begin_capture()
    waits = (outside, stream) if "outside" in what else (stream, driver.legacy_stream)
    with pytest.raises(CaptureError, match=what.removeprefix("work ")):
        order(driver, *waits)
    spoiled(driver, stream, log)


def test_two_captures_cannot_merge(driver):
    first, second, log = driver.create_stream(), driver.create_stream(), []
    first.begin_capture()
    second.begin_capture()
    assert driver.capture_id(first.ptr) != driver.capture_id(second.ptr)
    with pytest.raises(CaptureError, match="merge"):
        order(driver, first, second)
    for stream in (first, second):
        spoiled(driver, stream, log)


def test_a_captured_event_stands_for_nothing_that_runs(driver):
    stream, log = driver.create_stream(), []
    event = driver.create_event()
    for call in (driver.event_done, driver.synchronize_event):
        stream.begin_capture()
        driver.record_event(event, stream.ptr)
        assert "captured" in repr(event)
        with driver.relaxed(), pytest.raises(ContractError, match="recorded in a capture"):
            call(event)
        spoiled(driver, stream, log)
    with pytest.raises(CaptureError, match="has ended"):
        driver.wait_event(0, event)
    driver.record_event(event, 0)
    driver.wait_event(0, event)


HARMFUL = {
    "create_handle": lambda d, made: d.create_handle(),
    "destroy_handle": lambda d, made: d.destroy_handle(made["handle"]),
    "create_stream": lambda d, made: d.create_stream(),
    "create_event": lambda d, made: d.create_event(),
    "destroy_event": lambda d, made: d.destroy_event(made["event"]),
    "event_done": lambda d, made: d.event_done(made["event"]),
    "synchronize_event": lambda d, made: d.synchronize_event(made["event"]),
    "synchronize_stream": lambda d, made: d.synchronize_stream(made["stream"].ptr),
    "allocate": lambda d, made: d.allocate(64),
    "free": lambda d, made: d.free(made["pointer"]),
    "release_cached": lambda d, made: d.release_cached(),
    "allocation": lambda d, made: d.empty((1000,), (8,), np.dtype(np.float64)),
}


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", ["same thread", "other thread"])
@pytest.mark.parametrize("call", HARMFUL)
def test_the_matrix_of_harmful_calls(call, who, mode, relaxed):
    driver = HostDriver()
    made = {
        "handle": driver.create_handle(),
        "event": driver.create_event(),
        "stream": driver.create_stream(),
        "pointer": driver.allocate(64),
    }
    stream, log = driver.create_stream(), []
    stream.begin_capture(mode)
    give(driver, stream, log, "captured")

    def act():
        if relaxed:
            with driver.relaxed(), driver.relaxed():  # it nests
                pass
            with driver.relaxed():
                HARMFUL[call](driver, made)
        else:
            HARMFUL[call](driver, made)

    run = in_a_thread if who == "other thread" else lambda function: function()
    harmful = not relaxed and (mode == "global" or (mode == "thread_local" and who == "same thread"))
    if harmful:
        thread = "another" if who == "other thread" else "MainThread"
        with pytest.raises(
            ContractError, match=rf"{call}.* in thread '{thread}' harms <capture 1, {mode}, begun by thread 'MainThread'"
        ):
            run(act)
        spoiled(driver, stream, log)
    else:
        run(act)
        stream.end_capture().launch()
        assert log == ["captured"]


def test_an_allocation_that_an_arena_can_satisfy_and_a_stream_that_is_dropped_harm_no_capture(driver):
    stream, dropped = driver.create_stream(), driver.create_stream()
    driver.empty((4,), (8,), np.dtype(np.float64))
    stream.begin_capture()
    driver.empty((4,), (8,), np.dtype(np.float64))
    del dropped
    stream.end_capture()
