"""The host driver's streams, events, handles and checks, under both schedulers."""

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from harness.insides import memory_of, streams_of
from harness.scenes import Thread

from handlepool.drivers.host.array import raw_view
from handlepool.drivers.host.driver import HostDriver, Stream
from handlepool.drivers.host.scheduler import MAX_WORKERS
from handlepool.errors import ArgumentError, ContractError

SEEDS = range(50)
TIMEOUT = 60  # of barriers and events that are expected to be met


def give(driver, stream, log, entry):
    driver.enqueue(stream.ptr, lambda: log.append(entry), label=str(entry))


def record(driver, stream, *, timing=False):
    event = driver.create_event(timing=timing)
    driver.record_event(event, stream.ptr)
    return event


# Order


def test_a_stream_runs_what_it_was_given_in_order(driver):
    stream, log = driver.create_stream(), []
    for i in range(50):
        give(driver, stream, log, i)
    driver.synchronize_stream(stream.ptr)
    assert log == list(range(50))


def test_two_streams_have_no_order_between_them_nor_with_the_host(driver):
    blocked, free, log = driver.create_stream(), driver.create_stream(), []
    latch = driver.latch(blocked.ptr)
    give(driver, blocked, log, "blocked")  # returns
    give(driver, free, log, "free")
    driver.synchronize_stream(free.ptr)
    assert log == ["free"]
    assert not latch.passed
    assert not blocked.done
    latch.release()
    blocked.synchronize()
    assert log == ["free", "blocked"]
    assert latch.passed
    assert blocked.done


@pytest.mark.parametrize("pointer", [0, 1])
def test_the_null_stream_has_run_what_it_was_given_when_the_call_returns(driver, pointer):
    log = []
    driver.enqueue(pointer, lambda: log.append(1))
    assert log == [1]


def test_the_per_thread_default_stream_is_another_one_in_each_thread(driver, in_thread):
    log, latch = [], driver.latch(2)
    driver.enqueue(2, lambda: log.append("here"))

    def elsewhere():
        driver.enqueue(2, lambda: log.append("there"))
        driver.synchronize_stream(2)
        return driver.stream_id(2)

    assert in_thread(elsewhere) != driver.stream_id(2)
    assert log == ["there"]
    latch.release()
    driver.synchronize_stream(2)
    assert log == ["there", "here"]


def test_default_streams_have_a_queue_a_device(driver):
    with driver.device(1):
        first = driver.stream_id(0), driver.stream_id(2)
    assert not {driver.stream_id(0), driver.stream_id(2)} & set(first)


def test_worker_threads_overlap_for_real():
    driver, meeting = HostDriver(), threading.Barrier(MAX_WORKERS // 2)
    streams = [driver.create_stream() for _ in range(MAX_WORKERS // 2)]
    for stream in streams:
        driver.enqueue(stream.ptr, lambda: meeting.wait(TIMEOUT))
    for stream in streams:
        driver.synchronize_stream(stream.ptr)  # raises if the barrier broke


def test_five_thousand_short_lived_streams_keep_no_threads_and_no_queues(driver):
    before, log = threading.active_count(), []
    for i in range(5000):
        give(driver, driver.create_stream(), log, i)
    driver.synchronize_stream(0)
    while len(log) < 5000:
        driver.event_done(driver.create_event())  # polling lets the adversarial scheduler run
    assert sorted(log) == list(range(5000))
    assert threading.active_count() - before <= MAX_WORKERS
    assert len(streams_of(driver)._queues) == 1


# Events


def test_a_wait_orders_what_comes_after_it(driver):
    first, second, log = driver.create_stream(), driver.create_stream(), []
    latch = driver.latch(first.ptr)
    give(driver, first, log, "first")
    give(driver, second, log, "before the wait")
    driver.wait_event(second.ptr, record(driver, first))
    give(driver, second, log, "after the wait")
    while not log:
        driver.event_done(driver.create_event())
    assert log == ["before the wait"]
    latch.release()
    second.synchronize()
    assert log == ["before the wait", "first", "after the wait"]


def test_a_wait_keeps_the_record_that_it_saw(driver):
    source, early, late = (driver.create_stream() for _ in range(3))
    log, event = [], driver.create_event()
    give(driver, source, log, "one")
    driver.record_event(event, source.ptr)
    driver.wait_event(early.ptr, event)
    latch = driver.latch(source.ptr)
    driver.record_event(event, source.ptr)  # again, behind a latch
    driver.wait_event(late.ptr, event)
    give(driver, early, log, "early")
    give(driver, late, log, "late")
    driver.synchronize_stream(early.ptr)
    assert log == ["one", "early"]
    assert not driver.event_done(event)
    latch.release()
    driver.synchronize_stream(late.ptr)
    assert driver.event_done(event)
    assert log == ["one", "early", "late"]


def test_an_event_stands_only_for_what_was_given_before_it_and_for_nothing_if_never_recorded(driver):
    stream, log, never = driver.create_stream(), [], driver.create_event()
    give(driver, stream, log, "before")
    event = record(driver, stream)
    latch = driver.latch(stream.ptr)
    driver.wait_event(0, never)
    for each in (never, event):
        driver.synchronize_event(each)
        assert driver.event_done(each)
    assert log == ["before"]
    latch.release()


def test_a_stream_may_wait_for_another_device_and_events_are_recorded_on_their_own(driver):
    here = driver.create_stream()
    log, latch = [], driver.latch(here.ptr)
    give(driver, here, log, "here")
    event = record(driver, here)
    with driver.device(1):
        there = driver.create_stream()
        driver.wait_event(there.ptr, event)
        give(driver, there, log, "there")
        with pytest.raises(ContractError, match="use a stream of the event's device"):
            driver.record_event(event, there.ptr)
    latch.release()
    driver.synchronize_stream(there.ptr)
    assert log == ["here", "there"]


def test_timing_events_take_their_time_when_the_stream_comes_to_them(driver):
    stream = driver.create_stream()
    start, latch = record(driver, stream, timing=True), driver.latch(stream.ptr)
    middle = record(driver, stream, timing=True)
    with pytest.raises(ContractError, match="has not passed"):
        driver.elapsed(start, middle)
    other = driver.create_stream()
    released = record(driver, other, timing=True)
    latch.release()
    end = record(driver, stream, timing=True)
    driver.synchronize_event(end)
    assert driver.elapsed(start, released) >= 0
    assert driver.elapsed(released, middle) >= 0
    assert driver.elapsed(start, end) >= driver.elapsed(start, middle) >= 0


def test_elapsed_refuses_events_without_timing(driver):
    plain, timing = record(driver, driver.legacy_stream), record(driver, driver.legacy_stream, timing=True)
    for pair in ((plain, timing), (timing, plain), (timing, driver.create_event(timing=True))):
        with pytest.raises(ContractError, match="timing event"):
            driver.elapsed(*pair)


def test_a_destroyed_event_cannot_be_used_and_queued_waits_for_it_hold(driver):
    source, stream, log = driver.create_stream(), driver.create_stream(), []
    latch = driver.latch(source.ptr)
    give(driver, source, log, 1)
    event = record(driver, source)
    driver.wait_event(stream.ptr, event)
    driver.destroy_event(event)
    give(driver, stream, log, 2)
    for call in (
        lambda: driver.record_event(event, 0),
        lambda: driver.wait_event(0, event),
        lambda: driver.event_done(event),
        lambda: driver.synchronize_event(event),
        lambda: driver.destroy_event(event),
    ):
        with pytest.raises(ContractError, match="after it was destroyed"):
            call()
    latch.release()
    driver.synchronize_stream(stream.ptr)
    assert log == [1, 2]


# The adversarial scheduler


def produce_and_consume(seed, *, wait):
    """What a consumer on another stream reads of what a producer of three steps writes."""
    driver = HostDriver(scheduler="adversarial", seed=seed)
    producer, consumer = driver.create_stream(), driver.create_stream()
    cell, seen = driver.asarray(np.zeros(1)), driver.asarray(np.zeros(1))
    for _ in range(3):
        driver.enqueue(producer.ptr, lambda a: np.add(a, 1, out=a), writes=[cell])
    if wait:
        driver.wait_event(consumer.ptr, record(driver, producer))
    driver.enqueue(consumer.ptr, np.copyto, writes=[seen], reads=[cell])
    driver.synchronize_stream(consumer.ptr)
    return float(raw_view(seen)[0][0])


def test_with_the_wait_every_seed_reads_the_right_value():
    assert {produce_and_consume(seed, wait=True) for seed in SEEDS} == {3}


def test_control_without_the_wait_most_seeds_read_a_wrong_value():
    values = [produce_and_consume(seed, wait=False) for seed in SEEDS]
    assert sum(value != 3 for value in values) > len(SEEDS) // 2
    assert set(values) == {0, 1, 2, 3}  # any moment is met
    assert values == [produce_and_consume(seed, wait=False) for seed in SEEDS]  # and met again


def test_queued_work_may_run_long_before_anybody_waits():
    ran = []
    for seed in SEEDS:
        driver, log = HostDriver(scheduler="adversarial", seed=seed), []
        stream = driver.create_stream()
        for i in range(4):
            give(driver, stream, log, i)
        ran.append(len(log))
    assert {0, 1} <= set(ran)


def test_several_python_threads_may_queue_and_wait(driver):
    def work(cell):
        stream = driver.create_stream()
        for _ in range(50):
            driver.enqueue(stream.ptr, lambda a: np.add(a, 1, out=a), writes=[cell])
            driver.wait_event(0, record(driver, stream))  # on the host, as the null stream does
        return cell[0]

    threads = [Thread(work, driver.asarray(np.zeros(1))) for _ in range(4)]
    assert [thread.finish() for thread in threads] == [50] * 4


# Waits that cannot end, and work that fails


def test_a_wait_that_can_never_end_raises_and_names_the_latch(driver):
    stream, other = driver.create_stream(), driver.create_stream()
    latch = driver.latch(stream.ptr)
    driver.wait_event(other.ptr, record(driver, stream))
    with pytest.raises(ContractError, match=rf"waiting for <stream {other.ptr:#x}.*latch on <stream {stream.ptr:#x}"):
        driver.synchronize_stream(other.ptr)
    latch.release()
    driver.synchronize_stream(other.ptr)


def test_the_null_stream_goes_on_after_a_wait_that_could_not_end(driver):
    side, log = driver.create_stream(), []
    latch, event = driver.latch(side.ptr), None
    event = record(driver, side)
    with pytest.raises(ContractError, match="would never end"):
        driver.wait_event(0, event)
    with pytest.raises(ContractError, match="would never end"):
        driver.enqueue(0, lambda: log.append("late"))
    latch.release()
    driver.enqueue(0, lambda: log.append("next"))
    assert log == ["late", "next"]


def test_a_latch_that_another_thread_releases_is_waited_for(driver):
    stream, log = driver.create_stream(), []
    latch, waiting = driver.latch(stream.ptr), threading.Event()
    give(driver, stream, log, 1)

    def release():
        driver.current_device()
        waiting.wait(TIMEOUT)
        latch.release()
        latch.release()  # harmless

    thread = Thread(release)
    waiting.set()
    driver.synchronize_stream(stream.ptr)
    thread.finish()
    assert log == [1]


def test_what_fails_in_queued_work_is_raised_by_the_next_wait_and_only_there(driver):
    stream, log = driver.create_stream(), []
    driver.enqueue(stream.ptr, lambda: 1 // 0)
    driver.enqueue(stream.ptr, lambda: [][0])
    give(driver, stream, log, "goes on")
    with pytest.raises(ZeroDivisionError) as caught:
        driver.synchronize_stream(stream.ptr)
    assert log == ["goes on"]
    assert "IndexError" in caught.value.__notes__[0]
    driver.synchronize_stream(stream.ptr)


def test_queued_work_that_waits_for_a_stream_is_an_error_and_no_deadlock(driver):
    stream = driver.create_stream()
    driver.enqueue(stream.ptr, lambda: driver.synchronize_stream(stream.ptr), label="waits for itself")
    with pytest.raises(ContractError, match="'waits for itself' waits"):
        driver.synchronize_stream(stream.ptr)


def test_an_exit_raised_by_queued_work_is_a_failure_like_others():
    driver = HostDriver()
    stream, log = driver.create_stream(), []
    driver.enqueue(stream.ptr, sys.exit)
    give(driver, stream, log, "goes on")
    latch = driver.latch(stream.ptr)
    releaser = threading.Thread(target=latch.release)
    releaser.start()
    with pytest.raises(SystemExit):
        driver.synchronize_stream(stream.ptr)
    releaser.join(TIMEOUT)
    assert log == ["goes on"]


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "handlepool-host-worker"]


def test_work_of_a_dropped_driver_runs_and_its_workers_end():
    others, driver, ran = set(workers()), HostDriver(), threading.Event()
    stream = driver.create_stream()
    latch = driver.latch(stream.ptr)
    driver.enqueue(stream.ptr, ran.set)
    scheduler = weakref.ref(streams_of(driver).scheduler)
    del driver, stream
    gc.collect()
    latch.release()
    assert ran.wait(TIMEOUT)
    del latch
    for worker in set(workers()) - others:
        worker.join(TIMEOUT)  # it ends by itself when it has been idle
    gc.collect()
    assert scheduler() is None


ENDS = {
    "while an operation never ends": """
import threading
from handlepool.drivers.host.driver import HostDriver
driver, entered = HostDriver(), threading.Event()
stream = driver.create_stream()
driver.enqueue(stream.ptr, lambda: (entered.set(), threading.Event().wait()))
driver.enqueue(stream.ptr, print)
entered.wait()
""",
    "in an exit handler that waits for queued work": """
import atexit
def finish():
    driver.synchronize_stream(stream.ptr)
    assert log == list(range(100))
atexit.register(finish)  # before ours, so it runs after ours
from handlepool.drivers.host.driver import HostDriver
driver, log = HostDriver(), []
stream = driver.create_stream()
for i in range(100):
    driver.enqueue(stream.ptr, lambda i=i: log.append(i))
""",
    "in a forked child while its parent holds the scheduler": """
import os, sys, warnings
warnings.simplefilter("ignore")  # of a fork beside threads
from handlepool.drivers.host.driver import HostDriver
driver = HostDriver()
stream = driver.create_stream()
driver.enqueue(stream.ptr, lambda: None)
driver.synchronize_stream(stream.ptr)
with driver._streams.scheduler._lock:
    child = os.fork()
    if child == 0:
        sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "with work queued and running": """
import numpy as np
from handlepool.drivers.host.driver import HostDriver
driver = HostDriver()
streams = [driver.create_stream() for _ in range(8)]
big = np.ones((400, 400), np.float32)
for stream in streams:
    for _ in range(200):
        driver.enqueue(stream.ptr, lambda: big @ big)
driver.latch(streams[0].ptr)
array = driver.asarray(big)
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_cleanly(end):
    done = subprocess.run([sys.executable, "-c", ENDS[end]], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Streams as objects


def test_a_new_stream_takes_the_pointer_of_the_one_destroyed_last_and_a_new_id(driver):
    streams = [driver.create_stream() for _ in range(3)]
    pointers = [stream.ptr for stream in streams]
    identities = [driver.stream_id(pointer) for pointer in pointers]
    assert len(set(pointers)) == 3
    streams.pop(0)
    streams.pop(0)
    again = [driver.create_stream(), driver.create_stream()]
    assert [stream.ptr for stream in again] == [pointers[1], pointers[0]]
    assert driver.stream_id(again[0].ptr) not in identities


def test_work_of_a_destroyed_stream_runs_beside_that_of_the_next_at_its_address(driver):
    old, log = driver.create_stream(), []
    pointer, latch = old.ptr, driver.latch(old.ptr)
    give(driver, old, log, "old")
    left = record(driver, old)
    del old
    new = driver.create_stream()
    assert new.ptr == pointer
    give(driver, new, log, "new")
    driver.synchronize_stream(new.ptr)
    assert log == ["new"]
    latch.release()
    driver.synchronize_event(left)
    assert log == ["new", "old"]


def test_pointers_that_name_no_live_stream_are_refused(driver):
    stranger = HostDriver().create_stream()
    stream = driver.create_stream()
    gone = stream.ptr
    del stream
    for pointer in (gone, stranger.ptr, 12345):
        for call in (driver.stream_id, driver.capture_id, driver.stream_device, driver.synchronize_stream, driver.latch):
            with pytest.raises(ContractError, match="names no live stream"):
                call(pointer)
        for call in (lambda p: driver.record_event(driver.create_event(), p), lambda p: driver.enqueue(p, int)):
            with pytest.raises(ContractError, match="names no live stream"):
                call(pointer)


def test_streams_are_equal_by_pointer_and_take_weak_references_and_attributes(driver):
    stream = driver.create_stream()
    wrapped = driver.wrap_stream(stream.ptr, stream)
    assert stream == wrapped
    assert hash(stream) == hash(wrapped)
    assert stream != driver.create_stream()
    assert stream != stream.ptr
    stream.slot = weakref.ref(stream)
    assert stream.slot() is stream
    assert stream.__cuda_stream__() == (0, stream.ptr)


def test_a_wrapped_stream_keeps_its_owner_and_is_not_owned(driver):
    stream = driver.create_stream()
    reference = weakref.ref(stream)
    wrapped = driver.wrap_stream(stream.ptr, stream)
    assert driver.owns_stream(stream)
    del stream
    assert reference() is not None
    assert wrapped.device_id == -1
    assert not driver.owns_stream(wrapped)
    assert driver.owns_stream(driver.legacy_stream)
    assert driver.owns_stream(driver.per_thread_stream)
    assert driver.wrap_stream(0, None) is driver.legacy_stream  # the one object that lasts
    assert driver.wrap_stream(2, None) is driver.per_thread_stream
    assert not driver.owns_stream(HostDriver().create_stream())
    assert not driver.owns_stream(object())


def test_a_stream_may_be_destroyed_while_a_lock_is_held(driver):
    stream = driver.create_stream()
    array = driver.empty((4,), (4,), np.float32)
    stream.itself, stream.array = stream, array  # a cycle, for the collector
    pointer = stream.ptr
    del stream, array
    with streams_of(driver).scheduler._lock, streams_of(driver).captures._lock, memory_of(driver).current._lock:
        gc.collect()
    assert driver.create_stream().ptr == pointer


@pytest.mark.parametrize("scheduler", ["threads", "adversarial"])
def test_a_driver_that_was_used_is_collected(scheduler):
    driver = HostDriver(scheduler=scheduler)
    stream = driver.create_stream()
    with stream:
        driver.asarray(np.ones(3))
    driver.synchronize_stream(stream.ptr)
    reference = weakref.ref(driver)
    del driver, stream
    gc.collect()
    assert reference() is None


# What is current


def test_the_current_stream_is_one_per_thread_and_device_and_the_null_stream_at_first(driver, in_thread):
    stream = driver.create_stream()
    assert driver.current_stream() is driver.legacy_stream
    driver.push_stream(stream)
    assert driver.current_stream() is stream
    assert in_thread(driver.current_stream) is driver.legacy_stream
    with driver.device(1):
        assert driver.current_stream() is driver.legacy_stream
    assert driver.current_stream() is stream


def test_streams_and_devices_nest_as_contexts_and_restore_after_an_exception(driver):
    outer, inner = driver.create_stream(), driver.create_stream()
    with outer:
        with pytest.raises(KeyError, match=str(inner.ptr)), inner:
            raise KeyError(driver.current_stream().ptr)
        assert driver.current_stream() is outer
    assert driver.current_stream() is driver.legacy_stream
    assert driver.device_count() == 2
    with driver.device(1):
        assert driver.current_device() == 1
        with pytest.raises(KeyError, match="0"), driver.device(0):
            raise KeyError(driver.current_device())
        assert driver.current_device() == 1
    assert driver.current_device() == 0
    driver.set_device(1)
    assert driver.current_device() == 1


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_device_that_does_not_exist_is_refused(driver, ordinal):
    with pytest.raises(ArgumentError, match="does not exist"):
        driver.set_device(ordinal)
    with pytest.raises(ArgumentError, match="does not exist"), driver.device(ordinal):
        pass
    assert driver.current_device() == 0


def test_a_stream_of_another_device_cannot_be_used_nor_given_work(driver):
    stream = driver.create_stream()
    assert (stream.device_id, driver.stream_device(stream.ptr)) == (0, 0)
    with driver.device(1):
        for call in (stream.use, stream.__enter__, lambda: driver.push_stream(stream)):
            with pytest.raises(ContractError, match="while device 1 is current"):
                call()
        with pytest.raises(ContractError, match="while device 1 is current"):
            driver.enqueue(stream.ptr, int)
        assert driver.current_stream() is driver.legacy_stream
    with pytest.raises(ContractError, match="default stream"):
        driver.stream_device(0)


# Handles


def test_a_handle_is_bound_to_the_very_pointer_object(driver):
    handle, stream = driver.create_handle(), driver.create_stream()
    assert (handle.stream, handle.device) == (0, 0)
    assert isinstance(handle.backend_handle, int)
    pointer = int(str(stream.ptr))
    driver.bind_handle(handle, pointer)
    assert handle.stream is pointer
    log = []
    driver.use_handle(handle, lambda: log.append(1))
    driver.synchronize_stream(pointer)
    assert log == [1]
    driver.bind_handle(handle, 1)
    driver.use_handle(handle, lambda: log.append(2))
    assert log == [1, 2]


def test_a_handle_bound_to_the_per_thread_stream_runs_on_the_calling_threads(driver, in_thread):
    handle, log = driver.create_handle(), []
    driver.bind_handle(handle, 2)
    latch = driver.latch(2)
    in_thread(lambda: (driver.use_handle(handle, lambda: log.append(1)), driver.synchronize_stream(2)))
    assert log == [1]
    latch.release()


def test_a_destroyed_handle_cannot_be_used_and_may_be_destroyed_again(driver):
    handle = driver.create_handle()
    driver.destroy_handle(handle)
    driver.destroy_handle(handle)
    assert (handle.backend_handle, handle.stream) == (None, None)
    for call in (lambda: driver.bind_handle(handle, 0), lambda: driver.use_handle(handle, int)):
        with pytest.raises(ContractError, match="destroyed"):
            call()


def test_a_handle_is_used_on_its_own_device_only(driver):
    handle, stream = driver.create_handle(), driver.create_stream()
    with driver.device(1):
        other = driver.create_stream()
        for call in (lambda: driver.use_handle(handle, int), lambda: driver.bind_handle(handle, stream.ptr)):
            with pytest.raises(ContractError, match=r"device 0.* while device 1 is current"):
                call()
    with pytest.raises(ContractError, match="another device"):
        driver.bind_handle(handle, other.ptr)


def test_a_handle_that_was_rebound_or_whose_pointer_was_recycled_behind_the_drivers_back_is_noticed(driver):
    handle, stream, other = driver.create_handle(), driver.create_stream(), driver.create_stream()
    pointer = stream.ptr
    driver.bind_handle(handle, pointer)
    handle.stream = other.ptr
    with pytest.raises(ContractError, match=rf"{other.ptr:#x}.*<stream {stream.ptr:#x}"):
        driver.use_handle(handle, int)
    handle.stream = pointer
    del stream
    new = driver.create_stream()
    assert new.ptr == pointer
    with pytest.raises(ContractError, match=r"was destroyed \(.*\); bind the handle again"):
        driver.use_handle(handle, int)
    driver.bind_handle(handle, pointer)
    driver.use_handle(handle, int)


@pytest.mark.parametrize("call", ["use_handle", "bind_handle", "destroy_handle"])
def test_a_handle_in_two_threads_at_once_is_an_error_that_names_both(driver, call):
    handle, entered, leave = driver.create_handle(), threading.Event(), threading.Event()

    def hold():
        entered.set()
        assert leave.wait(TIMEOUT)

    holder = threading.Thread(target=driver.use_handle, args=(handle, hold), name="the holder")
    holder.start()
    assert entered.wait(TIMEOUT)
    calls = {
        "use_handle": lambda: driver.use_handle(handle, int),
        "bind_handle": lambda: driver.bind_handle(handle, 0),
        "destroy_handle": lambda: driver.destroy_handle(handle),
    }
    with pytest.raises(ContractError, match=r"'the holder'.*'MainThread'"):
        calls[call]()
    leave.set()
    holder.join(TIMEOUT)
    calls[call]()


def test_without_checks_a_handle_is_trusted():
    driver = HostDriver(checks=False)
    handle = driver.create_handle()
    with driver.device(1):
        driver.use_handle(handle, int)


# Counts and faults


def test_calls_are_counted_by_name(driver):
    stream = driver.create_stream()
    driver.calls.clear()
    driver.current_stream()
    driver.current_stream()
    driver.current_device()
    with driver.device(1), driver.relaxed():
        pass
    record(driver, stream)
    assert driver.calls == {
        "current_stream": 2,
        "current_device": 1,
        "device": 1,
        "relaxed": 1,
        "create_event": 1,
        "record_event": 1,
    }


def test_every_method_of_the_protocol_is_counted():
    from handlepool.drivers.protocol import Driver

    methods = {name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_")}
    # What a driver knows, not what it does.
    methods -= {
        "array_pointers",
        "block_range",
        "capture_failure",
        "context_lost",
        "end_scratch",
        "launch_buffer",
        "before_untracked_access",
    }
    methods -= {"watch_host_data", "watch_untracked_work", "watch_shared_state"}
    source = (getattr(HostDriver, name) for name in methods)
    missing = [value for value in source if value.__name__ not in value.__code__.co_consts]
    assert missing == []


def test_the_kth_call_fails_once_and_has_no_effect(driver):
    driver.fail_at(2)
    driver.create_handle()
    free = driver.memory_info  # the second call
    with pytest.raises(RuntimeError, match="injected failure of memory_info"):
        free()
    free()


def test_a_fault_may_be_of_one_method_with_an_error_of_its_own(driver):
    driver.fail_at(2, "allocate", MemoryError("full"))
    driver.allocate(1)
    driver.create_handle()
    before = driver.memory_info()
    with pytest.raises(MemoryError, match="full"):
        driver.allocate(1)
    assert driver.memory_info() == before
    driver.fail_at(1)
    driver.fail_at(0)
    driver.allocate(1)


@pytest.mark.parametrize("options", [{"devices": 0}, {"scheduler": "fair"}, {"memory": -1}])
def test_options_without_meaning_are_refused(options):
    with pytest.raises(ArgumentError):
        HostDriver(**options)


def test_reprs_say_which(driver):
    stream = driver.create_stream()
    handle = driver.create_handle()
    driver.bind_handle(handle, stream.ptr)
    assert f"{stream.ptr:#x}" in repr(stream)
    assert f"bound to {stream.ptr:#x}" in repr(handle)
    assert "2 devices" in repr(driver)
    assert "seed 7" in repr(HostDriver(scheduler="adversarial", seed=7))
    event = driver.create_event()
    assert "new" in repr(event)
    driver.record_event(event, 0)
    assert "recorded" in repr(event)
    assert isinstance(stream, Stream)
