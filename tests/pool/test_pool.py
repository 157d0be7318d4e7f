"""The pool's hits and what they cost, and devices. Guarantees 2 and 3."""

import pytest
from harness.uses import ASKING, EFFECTS, FOREIGN, STREAMS, assert_usable, calls, fails_at

from handlepool import DeviceMismatchError, HandlePool

# Guarantee 2: bound once


@pytest.mark.parametrize("kind", STREAMS)
def test_g2_a_hit_asks_for_the_device_and_the_current_stream_and_no_more(make_pool, kind):
    pool = make_pool()
    with STREAMS[kind](pool.driver):
        handle = pool.get_handle()
        assert calls(pool.driver, pool.get_handle) == {"current_device": 1, "current_stream": 1}
        assert pool.get_handle() is handle


def test_g2_a_hit_for_a_stream_object_asks_for_the_device_alone(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    handle = pool.get_handle(stream)
    assert calls(pool.driver, pool.get_handle, stream) == {"current_device": 1}
    assert pool.get_handle(stream) is handle


def test_g2_streams_that_take_turns_are_each_bound_once(make_pool):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(3)]
    pool.driver.calls.clear()
    for _ in range(5):
        for stream in streams:
            with stream:
                assert pool.get_handle().stream is stream.ptr
    assert pool.driver.calls["bind_handle"] == 3


@pytest.mark.parametrize("kind", FOREIGN)
def test_g2_a_hit_for_a_foreign_stream_costs_one_capture_query_and_one_id_read(make_pool, kind):
    pool = make_pool()
    stream = pool.driver.create_stream()
    foreign = FOREIGN[kind](pool.driver, stream)
    handle = pool.get_handle(foreign)
    made = calls(pool.driver, pool.get_handle, foreign)
    assert {name: count for name, count in made.items() if name not in ASKING} == {"capture_id": 1, "stream_id": 1}
    assert pool.get_handle(foreign) is handle


@pytest.mark.parametrize("kind", ["owned", "per-thread"])
def test_g2_a_hit_of_get_workspace_adds_a_capture_query(make_pool, kind):
    pool = make_pool()
    with STREAMS[kind](pool.driver):
        pool.get_workspace(1000)
        made = calls(pool.driver, pool.get_workspace, 1000)
    assert made == {"current_device": 1, "current_stream": 1, "capture_id": 1, "scratch_array": 1}


def test_g2_control_a_miss_is_seen_by_the_count(make_pool):
    pool = make_pool()
    assert {"create_handle", "bind_handle"} <= calls(pool.driver, pool.get_handle).keys()


# Guarantee 3: right device


@pytest.mark.parametrize("kind", STREAMS)
def test_g3_handles_are_made_and_bound_on_their_own_device(make_pool, kind):
    pool = make_pool(devices=3)
    seen = []
    for _ in range(2):
        for device in (2, 0, 1):
            with pool.driver.device(device), STREAMS[kind](pool.driver):
                handle = pool.get_handle()
                pool.driver.use_handle(handle, int)  # the host driver checks device and stream
                seen.append((handle.device, pool.internals.slot().device))
    assert seen == [(2, 2), (0, 0), (1, 1)] * 2


def test_g3_the_null_stream_has_a_handle_on_each_device_and_keeps_it(make_pool):
    pool = make_pool()
    handles = []
    for _ in range(3):
        for device in (0, 1):
            with pool.driver.device(device):
                handles.append(pool.get_handle())
    assert handles == handles[:2] * 3
    assert pool.stats()["handles_created"] == 2


def test_g3_workspaces_are_of_their_own_device(make_pool):
    pool = make_pool()
    for device in (0, 1):
        with pool.driver.device(device):
            assert pool.driver.array_device(pool.get_workspace(100)) == device
    assert pool.stats(0)["scratch_bytes"] == pool.stats(1)["scratch_bytes"] == 256


@pytest.mark.parametrize("ask", [HandlePool.get_handle, lambda pool, stream: pool.get_workspace(100, stream)])
@pytest.mark.parametrize("kind", ["owned", *FOREIGN])
def test_g3_a_stream_of_another_device_is_refused_before_anything_happens(make_pool, kind, ask):
    pool = make_pool()
    with pool.driver.device(1):
        stream = pool.driver.create_stream()
    passed = stream if kind == "owned" else FOREIGN[kind](pool.driver, stream)
    pool.driver.calls.clear()
    with pytest.raises(
        DeviceMismatchError, match=r"belongs to device 1 and the current device is 0; make device 1 current"
    ) as info:
        ask(pool, passed)
    assert repr(passed) in str(info.value)
    assert not EFFECTS & pool.driver.calls.keys()
    assert pool.driver.current_device() == 0
    assert_usable(pool)


def test_g3_a_stream_that_was_hot_on_its_device_is_still_refused_on_another(make_pool):
    pool = make_pool()
    with pool.driver.device(1):
        stream = pool.driver.create_stream()
        handle = pool.get_handle(stream)
    with pytest.raises(DeviceMismatchError):
        pool.get_handle(stream)
    with pytest.raises(DeviceMismatchError):
        pool.get_handle(stream.ptr)
    with pool.driver.device(1):
        assert pool.get_handle(stream) is handle


def leave_behind_on_device_1(pool, in_thread):
    """A dead thread's slot with scratch, a dead stream's slot with scratch, and free side slots, all of device 1."""
    driver = pool.driver

    def use():
        with driver.device(1):
            pool.get_workspace(1000)

    in_thread(use)
    with driver.device(1):
        with driver.create_stream():
            pool.get_workspace(1000)
        pool.prewarm(states=2, workspace=1000)


@pytest.mark.parametrize(
    "call", [HandlePool.trim, HandlePool.close, HandlePool.get_handle, lambda pool: pool.internals.release_left()]
)
def test_g3_what_another_device_left_behind_is_taken_back_there_and_the_caller_stays(make_pool, in_thread, call):
    pool = make_pool()
    leave_behind_on_device_1(pool, in_thread)
    with pool.driver.create_stream() as stream:
        call(pool)  # the host driver refuses handles and memory of another device than the current one
        assert pool.driver.current_device() == 0
        assert pool.driver.current_stream() is stream


@pytest.mark.parametrize("call", [HandlePool.trim, HandlePool.close, HandlePool.get_handle])
def test_g3_the_callers_device_and_stream_are_left_as_they_were_whatever_fails(make_pool, in_thread, call):
    k, failed = 0, True
    while failed:
        k += 1
        pool = make_pool()
        leave_behind_on_device_1(pool, in_thread)
        with pool.driver.create_stream() as stream:
            failed = fails_at(k, pool.driver, call, pool)
            assert (pool.driver.current_device(), pool.driver.current_stream()) == (0, stream)
    assert k > 5
