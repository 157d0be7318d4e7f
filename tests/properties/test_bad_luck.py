"""What nobody plans for: closes at a bad moment, late threads, finalisers that use the pool. Nothing leaks, and nothing hangs."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness.accounts import Accounts
from harness.scenes import TIMEOUT, Scene, Thread
from harness.uses import assert_usable

import handlepool
from handlepool import OutOfMemoryError, ParallelStates, PoolClosedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred

NOTHING = {"handles": 0, "events": 0, "scratch_bytes": 0}


@pytest.fixture
def scene():
    with Scene(HostDriver(scheduler="adversarial", check_order=True), idle_limit=2) as scene:
        yield scene
        scene.pool.close()
        for _ in range(1000):
            deferred.deferred.run(1000)
        alive = scene.driver.alive()
        del alive["streams"]
        assert alive == NOTHING
        assert not scene.driver.order.found


# Closes


def test_a_thread_that_comes_late_is_told_that_the_pool_was_closed(scene):
    used, closed = threading.Event(), threading.Event()

    def late():
        with scene.stream:
            scene.pool.get_workspace(1000)
            used.set()
            assert closed.wait(TIMEOUT)
            for call in (scene.pool.get_handle, lambda: scene.pool.get_workspace(1), scene.pool.trim, scene.pool.prewarm):
                with pytest.raises(PoolClosedError, match="was closed"):
                    call()
            with pytest.raises(PoolClosedError, match="was closed"):
                scene.states.map(str, [1])

    thread = Thread(late)
    assert used.wait(TIMEOUT)
    scene.pool.close()
    closed.set()
    thread.finish()


@pytest.mark.parametrize("who", ["the body", "a branch", "another thread", "twice"])
def test_a_close_during_a_fork_refuses_further_branches_and_joins_those_that_ran(scene, who):
    x = scene.array(1)

    def close():
        scene.pool.close()
        if who == "twice":
            scene.pool.close()

    with scene.states.fork() as fork:
        y = fork.run(scene.plus, x, 1)
        if who == "a branch":
            z = fork.run(lambda: (scene.plus(x, 2), close())[0])
        elif who == "another thread":
            z = fork.run(scene.plus, x, 2)
            Thread(close).finish()
        else:
            z = fork.run(scene.plus, x, 2)
            close()
        with pytest.raises(PoolClosedError, match="was closed"):
            fork.run(pytest.fail, "it ran")
    assert (scene.read(y), scene.read(z)) == (2, 3)


def test_a_close_by_every_thread_at_once_is_one_close(make_driver):
    with Scene(make_driver()) as scene:
        scene.pool.prewarm(states=4, workspace=1000)
        barrier = threading.Barrier(8, timeout=TIMEOUT)
        for thread in [Thread(lambda: (barrier.wait(), scene.pool.close())) for _ in range(8)]:
            thread.finish()
        assert scene.driver.alive()["handles"] == 0


def test_a_close_that_fails_halfway_may_be_called_again(scene):
    scene.pool.prewarm(states=3, workspace=1000)
    scene.driver.fail_at(1, "destroy_handle")
    with pytest.raises(RuntimeError, match="injected"):
        scene.pool.close()
    assert scene.driver.alive()["handles"] == 1  # all the others are gone
    scene.pool.close()
    assert scene.driver.alive()["handles"] == 0


def test_what_a_close_could_not_destroy_goes_with_the_next_fork_of_any_pool(scene):
    scene.pool.prewarm(states=1)
    scene.driver.fail_at(1, "destroy_handle")
    with pytest.raises(RuntimeError, match="injected"):
        scene.pool.close()
    with Scene() as other:
        other.states.map(str, [1])
    assert scene.driver.alive()["handles"] == 0


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_g9_a_close_under_a_capture_harms_it_not_and_what_it_has_goes_with_its_end(scene, mode):
    y = scene.array()
    scene.stream.begin_capture(mode)
    with scene.states.fork() as fork:
        fork.run(scene.put, y, lambda: 5)
    scene.pool.close()
    assert scene.driver.alive()["handles"] == 1
    graph = scene.stream.end_capture()
    deferred.deferred.run(1000)
    assert scene.driver.alive()["handles"] == 0
    graph.launch(scene.stream)
    assert scene.read(y) == 5


@pytest.mark.parametrize("method", ["record_event", "current_device"])  # in the join, and before it
def test_g8_after_an_inner_join_that_failed_what_comes_later_is_let_go_of_at_the_outer_join(scene, method):
    class Held:
        pass

    def branch():
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as inner:  # noqa: PT012
            inner.run(lambda: None)
            scene.driver.fail_at(1, method)

    with ParallelStates(1, pool=scene.pool).fork() as fork:  # or its second lease would join the inner one
        fork.run(branch)
        thing = Held()
        gone = weakref.ref(thing)
        fork.run(lambda _: None, thing)
        del thing
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


# Streams and threads that go


def ends_inside_a_fork(scene):
    def enter():
        with scene.stream:
            scene.states.fork().__enter__().run(scene.array, 1)

    Thread(enter).finish()
    assert scene.pool.stats()["handles_leased"] == 1


def drops_a_program(scene):
    def work(x):
        scene.pool.get_workspace(500_000)
        return scene.plus(x, 1)

    program = handlepool.record(work, scene.array(1), pool=scene.pool)
    program.replay()
    scene.stream.synchronize()
    assert scene.pool.stats()["scratch_bytes_recorded"] == 500_224
    del program
    gc.collect()


@pytest.mark.parametrize("leave", [ends_inside_a_fork, drops_a_program])
@pytest.mark.parametrize("how", ["trim", "close", "a miss"])
def test_g10_what_nobody_ended_is_given_back_without_a_fork_or_task(how, leave):
    driver = HostDriver(check_order=True)
    with Scene(driver) as scene:
        leave(scene)
        if how == "a miss":
            scene.pool.get_handle(driver.create_stream())
        else:
            getattr(scene.pool, how)()
        stats = scene.pool.stats()
        assert (stats["handles_leased"], stats["scratch_bytes_recorded"]) == (0, 0)
        Accounts(scene.pool).check()
        scene.pool.close()
    assert {kind: count for kind, count in driver.alive().items() if kind != "streams"} == NOTHING


@pytest.mark.parametrize("limited", [True, False])
def test_g12_a_growth_without_memory_takes_back_what_dropped_programs_had(limited):
    options = {"scratch_limit": 1 << 20} if limited else {}
    with Scene(HostDriver(memory=1 << (30 if limited else 20)), **options) as scene:
        drops_a_program(scene)
        assert scene.pool.get_workspace(700_000).nbytes == 700_000


class Locking:
    """Something that takes a lock as it goes, while another thread builds under that."""

    def __init__(self, lock, goes):
        self.lock, self.goes = lock, goes

    def __del__(self):
        self.goes.set()
        with self.lock:
            pass


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 4, 6, 6)], ids=["the same plan", "another plan"])
def test_g15_what_is_given_back_for_room_may_wait_for_a_thread_that_builds(make_pool, shape):
    pool = make_pool(driver=Crowded())
    stream = pool.driver.create_stream()
    lock, goes, held = threading.Lock(), threading.Event(), threading.Event()

    def convolve(shape):
        x, w = (np.zeros(shape, np.float32) for shape in (shape, (4, 4, 3, 3)))
        pool.driver.room += 1
        with pool.driver.create_stream():
            handlepool.conv2d(x, w, pool=pool)

    def builds_under_the_lock():
        with lock:
            held.set()
            assert goes.wait(TIMEOUT)
            convolve(shape)

    with stream:
        pool.driver.room = 2
        pool.get_handle()
        ParallelStates(1, pool=pool).fork().__enter__().run(lambda _: None, Locking(lock, goes))
        gc.collect()
        builder = Thread(builds_under_the_lock)
        assert held.wait(TIMEOUT)
        x, w = (np.zeros(shape, np.float32) for shape in ((1, 4, 8, 8), (4, 4, 3, 3)))
        handlepool.conv2d(x, w, pool=pool)
    builder.finish()


def test_g12_where_programs_have_the_memory_the_error_says_so():
    with Scene(HostDriver(memory=1 << 30), scratch_limit=1 << 20) as scene:
        with (
            handlepool.record(
                lambda x: (scene.pool.get_workspace(500_000), scene.plus(x, 1))[1], scene.array(1), pool=scene.pool
            ),
            pytest.raises(OutOfMemoryError, match=r"500,224 bytes of scratch, 500,224 of them held by programs"),
        ):
            scene.pool.get_workspace(700_000)
        assert scene.pool.get_workspace(700_000).nbytes == 700_000


@pytest.mark.parametrize("kind", ["ordinary", "daemon", "of a thread pool", "one that dies of an error"])
def test_g11_a_thread_of_any_kind_gives_its_slots_back_at_its_end_without_a_driver_call(scene, kind, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    calls = []

    def use():
        with scene.stream:
            scene.pool.get_workspace(300)
        calls.append(scene.driver.calls.copy())
        if kind == "one that dies of an error":
            raise LookupError

    if kind == "of a thread pool":
        with ThreadPoolExecutor(1) as executor:
            executor.submit(use).result(TIMEOUT)
    else:
        thread = threading.Thread(target=use, daemon=kind == "daemon")
        thread.start()
        thread.join(TIMEOUT)
    gc.collect()
    assert scene.driver.calls == calls[0]
    handle = scene.pool.get_handle()
    stats = scene.pool.stats()
    assert (stats["handles_created"], stats["handles_reused"], stats["handles_live"]) == (1, 1, 1)
    scene.driver.use_handle(handle, int)


# Finalisers that use the pool


def uses_of_all_kinds(scene):
    pool = scene.pool
    pool.get_workspace(500)
    Thread(lambda: [pool.get_workspace(500, stream) for stream in (scene.stream, 0)]).finish()
    with scene.driver.create_stream():
        pool.get_workspace(700)
    scene.states.map(lambda _: pool.get_workspace(300), range(3))
    pool.get_workspace(5000)
    pool.trim()


class Interrupted:
    """A lock inside which the collector runs a finaliser."""

    def __init__(self, lock, finaliser):
        self.lock, self.finaliser = lock, finaliser

    def __enter__(self):
        assert self.lock.acquire(timeout=5), "the thread waits for itself"
        self.finaliser()

    def __exit__(self, *error):
        self.lock.release()


def test_g10_a_trim_by_a_finaliser_inside_every_lock_of_the_pool(make_driver):
    with Scene(make_driver(scheduler="adversarial"), idle_limit=2) as scene:
        inside = []

        def trim():
            if not inside and not scene.pool.closed:
                inside.append(True)
                scene.pool.trim()
                inside.clear()

        slots = scene.pool.internals.device(0)
        for holder in (slots.handles, slots.scratch, slots.sides):
            holder._lock = Interrupted(holder._lock, trim)
        uses_of_all_kinds(scene)
        Accounts(scene.pool).check()
        assert_usable(scene.pool)


def test_g10_a_pool_is_used_by_finalisers_of_arrays_kept_by_a_region(scene):
    """What a region lets go of at the join may be anything, so its finaliser may use the pool."""

    class Kept:
        def __del__(self):
            scene.pool.get_workspace(100)
            scene.pool.trim()

    with scene.states.fork() as fork:
        fork.run(lambda _: None, Kept())
    Accounts(scene.pool).check()
    assert np.isfinite(scene.read(scene.array(1)))


# Guarantee 12: a create without memory


class Crowded(HostDriver):
    """A device with room for so many handles."""

    room = 1

    def create_handle(self):
        if self.alive()["handles"] >= self.room:
            raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
        return super().create_handle()


def uses_a_handle(pool, stream):
    pool.get_handle(stream)


def uses_a_side_slot(pool, _):
    ParallelStates(1, pool=pool).map(lambda _: None, [0])


def leaves_no_fork(pool, stream):
    with stream:
        ParallelStates(1, pool=pool).fork().__enter__().run(lambda: None)


@pytest.mark.parametrize(
    ("leave", "want"),
    [(uses_a_handle, uses_a_side_slot), (uses_a_side_slot, uses_a_handle), (leaves_no_fork, uses_a_handle)],
)
def test_g12_a_create_without_memory_takes_back_what_is_idle(make_pool, leave, want):
    pool = make_pool(driver=Crowded())
    stream = pool.driver.create_stream()
    Thread(leave, pool, stream).finish()
    want(pool, stream)
    stats = pool.stats()
    assert (stats["handles_created"], stats["handles_destroyed"]) == (2, 1)


def test_g12_a_create_without_memory_is_an_error_with_numbers_and_works_when_it_is_back(make_pool):
    pool = make_pool(driver=Crowded(memory=1 << 20))
    pool.driver.room = 2
    streams = [pool.driver.create_stream() for _ in range(3)]
    first, second = map(pool.get_handle, streams[:2])
    message = (
        r"no cuDNN handle could be created on device 0 \(CUDNN_STATUS_ALLOC_FAILED\): 1,048,576 of 1,048,576 bytes are free, "
        r"and the pool holds 2 live, 0 idle, 0 leased handles, 0 bytes of scratch. A handle takes"
    )
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=message) as info:
            pool.get_handle(streams[2])
        assert isinstance(info.value, MemoryError)
        assert isinstance(info.value.__cause__, RuntimeError)
    assert list(map(pool.get_handle, streams[:2])) == [first, second]
    pool.driver.room = 3
    assert pool.get_handle(streams[2]).stream == streams[2].ptr
    assert pool.stats()["handles_live"] == 3
