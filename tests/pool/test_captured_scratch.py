"""Guarantee 9 and the accounts: scratch that captures were given, and `trim(captured=True)`."""

import pytest
from harness.accounts import Accounts

from handlepool import ContractError, ParallelStates
from handlepool.pool.workspace import DeviceScratch


def capture(pool, stream, *sizes):
    """Capture the use of workspaces; gives their addresses."""
    stream.begin_capture()
    with stream:
        addresses = [pool.driver.array_pointer(pool.get_workspace(size)) for size in sizes]
    stream.end_capture()
    return addresses


def captured(pool):
    stats = pool.stats()
    return stats["captures_met"], stats["scratch_bytes_captured"], stats["scratch_bytes"]


def capturing(pool):
    """The slots that take part in captures, by capture."""
    return pool.internals.device(0).scratch._capturing


def test_g9_a_capture_keeps_its_scratch_and_trim_leaves_it_alone(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    pool.get_workspace(256, stream)
    capture(pool, stream, 512, 1024)
    assert captured(pool) == (1, 1536, 1792)
    pool.get_workspace(256, stream)
    pool.trim()
    assert captured(pool) == (1, 1536, 1792)


def test_g9_scratch_that_grows_beside_a_global_capture_of_another_stream_harms_it_not(make_pool):
    pool = make_pool()
    stream, other = pool.driver.create_stream(), pool.driver.create_stream()
    pool.get_workspace(256, other)
    stream.begin_capture("global")
    assert pool.get_workspace(5000, other).nbytes == 5000
    stream.end_capture()  # raises if anything spoiled it
    assert pool.stats()["scratch_bytes"] == 256 + 5120  # the block that was replaced waits for its stream


def test_trim_captured_gives_back_what_captures_were_given(make_pool):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(3)]
    for stream in streams:
        capture(pool, stream, 512)
    assert captured(pool) == (3, 1536, 1536)
    pool.trim(captured=True)
    assert captured(pool) == (3, 0, 0)
    assert all(capture(pool, stream, 512) for stream in streams)
    assert captured(pool) == (6, 1536, 1536)


def test_trim_captured_leaves_the_scratch_of_eager_work(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    eager = pool.driver.array_pointer(pool.get_workspace(256, stream))
    capture(pool, stream, 256)
    pool.trim(captured=True)
    assert pool.driver.array_pointer(pool.get_workspace(256, stream)) == eager
    assert captured(pool) == (1, 0, 256)


@pytest.mark.parametrize("where", ["the stream", "a branch"])
def test_trim_captured_spares_a_capture_that_is_under_way(make_pool, in_thread, where):
    pool = make_pool()
    stream = pool.driver.create_stream()
    with stream:
        stream.begin_capture()
        if where == "a branch":
            with ParallelStates(2, pool=pool).fork() as fork:
                fork.run(pool.get_workspace, 512)
                in_thread(pool.trim, captured=True)
                assert captured(pool) == (1, 512, 512)
        else:
            first = pool.driver.array_pointer(pool.get_workspace(512))
            in_thread(pool.trim, captured=True)
        pool.trim(captured=True)
        assert captured(pool) == (1, 512, 512)
        assert where == "a branch" or pool.driver.array_pointer(pool.get_workspace(512)) == first
        stream.end_capture()
    pool.trim(captured=True)
    assert captured(pool) == (1, 0, 0)


def test_a_capture_that_several_streams_take_part_in_is_one(make_pool):
    pool = make_pool()
    stream = pool.driver.create_stream()
    with stream:
        stream.begin_capture()
        pool.get_workspace(512)
        with ParallelStates(2, pool=pool).fork() as fork:
            for _ in range(2):
                fork.run(pool.get_workspace, 512)
        stream.end_capture()
    assert captured(pool) == (1, 1536, 1536)


def test_trim_captured_takes_the_slot_of_a_bare_pointer_as_well(make_pool):
    """Its stream may be gone, so nothing is asked of it; a capture that goes on gets a new slot, with scratch of its own."""
    pool = make_pool()
    stream = pool.driver.create_stream()
    stream.begin_capture()
    handle = pool.get_handle(stream.ptr)
    pool.get_workspace(512, stream.ptr)
    pool.trim(captured=True)
    assert captured(pool) == (1, 0, 0)
    stats = pool.stats()
    assert (stats["handles_live"], stats["handles_created"], stats["handles_destroyed"]) == (0, 1, 1)
    assert pool.get_handle(stream.ptr) is not handle
    pool.get_workspace(512, stream.ptr)
    stream.end_capture()
    assert captured(pool) == (1 + 1, 512, 512)


def test_g1_a_bare_pointer_whose_slot_a_trim_took_gets_another_that_is_its_threads_own(make_pool, in_thread):
    pool = make_pool()
    stream = pool.driver.create_stream()
    stream.begin_capture()
    pool.get_workspace(512, stream.ptr)
    pool.trim(captured=True)
    mine = pool.get_handle(stream.ptr)
    theirs, live = in_thread(lambda: (pool.get_handle(stream.ptr), pool.stats()["handles_live"]))
    assert theirs is not mine
    assert live == 2
    Accounts(pool).check()
    stream.end_capture()


def test_trim_captured_after_the_stream_and_the_thread_have_gone(make_pool, in_thread):
    pool = make_pool()

    def body():
        capture(pool, pool.driver.create_stream(), 512)
        capture(pool, pool.driver.create_stream(), 512)

    in_thread(body)
    assert captured(pool) == (2, 1024, 1024)
    pool.trim(captured=True)
    assert captured(pool) == (2, 0, 0)


def a_capture_whose_other_thread_ends_before_a_trim(pool, in_thread):
    """The scratch that is left of it, while it goes on and afterwards."""
    stream = pool.driver.create_stream()
    stream.begin_capture("relaxed")

    def use():
        scratch = pool.get_workspace(512, stream)
        pool.driver.enqueue(stream.ptr, lambda memory: memory.fill(1), writes=[scratch])

    in_thread(use)
    pool.internals.release_left()  # takes in what the thread left behind; only the stream can tell of the capture from now on
    pool.trim(captured=True)
    during = pool.stats()["scratch_bytes_captured"]
    stream.end_capture().launch(stream)
    stream.synchronize()
    pool.trim(captured=True)
    return during, pool.stats()["scratch_bytes_captured"]


def test_g9_trim_captured_spares_a_capture_that_goes_on_after_a_thread_that_took_part_has_ended(make_pool, in_thread):
    assert a_capture_whose_other_thread_ends_before_a_trim(make_pool(), in_thread) == (512, 0)


def test_g9_control_a_capture_that_is_forgotten_with_the_thread_loses_its_scratch(make_pool, in_thread, monkeypatch):
    leave = DeviceScratch.leave_capture
    monkeypatch.setattr(DeviceScratch, "leave_capture", lambda *args, over: leave(*args, over=True))
    with pytest.raises(ContractError, match="was freed before"):
        a_capture_whose_other_thread_ends_before_a_trim(make_pool(), in_thread)


def test_g9_trim_captured_knows_that_a_capture_is_over_whose_threads_have_all_ended(make_pool, in_thread):
    pool = make_pool()
    stream = pool.driver.create_stream()
    for _ in range(3):
        in_thread(capture, pool, stream, 512)
        pool.internals.release_left()
    assert captured(pool) == (3, 1536, 1536)
    pool.trim(captured=True)
    assert captured(pool) == (3, 0, 0)
    assert not capturing(pool)


def test_g11_a_capture_that_was_given_no_bytes_is_forgotten_with_the_thread_that_took_part(make_pool, in_thread):
    pool = make_pool()
    stream = pool.driver.create_stream()
    stream.begin_capture("relaxed")
    in_thread(pool.get_workspace, 0, stream)
    assert capturing(pool)
    pool.internals.release_left()
    assert not capturing(pool)
    stream.end_capture()


@pytest.mark.parametrize("k", [1, 2])
def test_a_free_that_fails_loses_nothing(make_pool, k):
    pool = make_pool()
    stream = pool.driver.create_stream()
    capture(pool, stream, 512, 1024)
    pool.driver.fail_at(k, "free")
    with pytest.raises(RuntimeError, match="injected"):
        pool.trim(captured=True)
    pool.trim(captured=True)
    assert captured(pool) == (1, 0, 0)
    assert pool.driver.memory_info()[0] == pool.driver.memory_info()[1]
