"""The pool and threads: one owner, the first create alone, what a dead thread gives back. Guarantees 1, 11 and 14."""

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.scenes import TIMEOUT, Thread

from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.slot import Slot

THREADS = 12


def at_once(function, threads=THREADS):
    """Run ``function(i, meet)`` in threads that start together; its values. ``meet()`` waits for all of them."""
    barrier = threading.Barrier(threads, timeout=TIMEOUT)

    def body(i):
        barrier.wait()
        try:
            return function(i, barrier.wait)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(threads) as executor:
        futures = [executor.submit(body, i) for i in range(threads)]
        errors = [error for error in (future.exception(TIMEOUT) for future in futures) if error is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


# Guarantee 1: one owner


def handles_met_by_two_threads(driver, get_handle):
    """How many handles two threads that live at the same time were given, over default, shared and own streams."""
    shared = [driver.create_stream() for _ in range(3)]
    owners = {}

    def ask(i, meet):
        streams = [driver.legacy_stream, driver.per_thread_stream, *shared, driver.create_stream()]
        mine = []
        for turn in range(3):
            for stream in streams[turn:] + streams[:turn]:
                with stream:
                    mine.append(get_handle(stream))
        for handle in mine:
            owners.setdefault(handle, set()).add(i)
        meet()  # nobody ends before everybody has asked

    at_once(ask)
    return sum(len(threads) > 1 for threads in owners.values())


@pytest.mark.parametrize(
    "ask",
    [lambda pool, _: pool.get_handle(), HandlePool.get_handle, lambda pool, stream: pool.get_handle(stream.ptr)],
    ids=["current", "object", "pointer"],
)
def test_g1_no_handle_is_given_to_two_threads(make_pool, ask):
    pool = make_pool()
    assert handles_met_by_two_threads(pool.driver, lambda stream: ask(pool, stream)) == 0


@pytest.mark.parametrize("key", [lambda stream: 0, lambda stream: stream.ptr], ids=["device", "device and stream"])
def test_g1_control_a_cache_without_the_thread_in_its_key_is_caught(make_driver, key):
    driver, cache, lock = make_driver(), {}, threading.Lock()

    def get_handle(stream):
        with lock:
            if key(stream) not in cache:
                cache[key(stream)] = driver.create_handle()
            return cache[key(stream)]

    assert handles_met_by_two_threads(driver, get_handle) > 0


def use_beside_a_thread_inside(driver, get_handle):
    """Use a handle while another thread is inside a call with its own; the host driver raises where that is the same one."""
    entered, leave = threading.Event(), threading.Event()

    def hold():
        entered.set()
        assert leave.wait(TIMEOUT)

    thread = Thread(lambda: driver.use_handle(get_handle(), hold))  # the null stream runs it in the call
    try:
        assert entered.wait(TIMEOUT)
        with driver.create_stream():
            driver.use_handle(get_handle(), int)
    finally:
        leave.set()
        thread.finish()


def test_g1_a_thread_may_use_its_handle_while_another_is_inside_a_call(make_pool):
    pool = make_pool()
    use_beside_a_thread_inside(pool.driver, pool.get_handle)


def test_g1_control_a_shared_handle_is_an_error_of_the_contract(make_driver):
    driver = make_driver()
    handle = driver.create_handle()
    with pytest.raises(ContractError, match="must never be used by two threads at once"):
        use_beside_a_thread_inside(driver, lambda: handle)


@pytest.mark.parametrize("branches", [2, 8])
def test_g1_no_side_slot_is_leased_to_two_forks(make_pool, branches):
    """12 forks of 2 branches fit into the side slots there may be; 12 of 8 do not, and take fewer or run inline."""
    pool = make_pool()
    states = ParallelStates(branches, pool=pool)

    def fork(i, meet):
        with states.fork() as fork:
            handles = {fork.run(pool.get_handle) for _ in range(branches)}
            meet()  # all forks are open
        return handles

    handles = at_once(fork)
    assert len(set().union(*handles)) == sum(map(len, handles))
    assert pool.stats()["handles_created"] <= MOST_SIDE_SLOTS + THREADS
    if branches == 2:
        assert all(len(given) == 2 for given in handles)


def test_g1_side_slots_change_hands_between_forks_and_never_meet(make_pool):
    pool = make_pool()
    states = ParallelStates(8, pool=pool)
    holders, lock = {}, threading.Lock()
    trouble = []

    def fork(i, meet):
        for _ in range(15):
            with states.fork() as fork:
                mine = {fork.run(pool.get_handle) for _ in range(8)}
                with lock:
                    trouble.extend(handle for handle in mine if handle in holders)
                    holders.update(dict.fromkeys(mine, i))
                for _ in range(3):
                    fork.run(lambda: pool.driver.use_handle(pool.get_handle(), int))
                with lock:
                    for handle in mine:
                        del holders[handle]

    at_once(fork)
    assert not trouble


def test_g1_handles_have_one_holder_while_threads_and_streams_come_and_go(make_pool):
    pool = make_pool(idle_limit=4)
    driver = pool.driver
    shared = [driver.create_stream() for _ in range(2)]
    holders, lock = {}, threading.Lock()
    trouble = []

    def work(seed):
        rng, own, mine = random.Random(seed), [], set()
        for _ in range(25):
            act = rng.randrange(5)
            if act == 0:
                own.append(driver.create_stream())
            elif act == 1 and own:
                stream = own.pop(rng.randrange(len(own)))
                with lock:
                    gone = [handle for handle in mine if handle.stream == stream.ptr]
                    for handle in gone:
                        holders.pop(handle)
                        mine.discard(handle)
                del stream
            else:
                stream = rng.choice([*own, *shared, driver.legacy_stream, driver.per_thread_stream])
                handle = pool.get_handle(stream)
                with lock:
                    if holders.setdefault(handle, seed) != seed:
                        trouble.append((handle, seed))
                    mine.add(handle)
                driver.use_handle(handle, int)
                scratch = pool.get_workspace(rng.randrange(2000), stream)
                driver.enqueue(stream.ptr, lambda memory: memory.fill(1), writes=[scratch])
                driver.synchronize_stream(stream.ptr)
        with lock:
            for handle in mine:
                del holders[handle]

    for generation in range(4):
        for thread in [Thread(work, generation * 100 + i) for i in range(8)]:
            thread.finish()
    assert not trouble
    pool.internals.release_left()
    stats = pool.stats()
    assert stats["handles_live"] == 0
    assert stats["handles_idle"] <= 4
    pool.close()
    stats = pool.stats()
    assert (stats["handles_created"] - stats["handles_destroyed"], stats["scratch_bytes"]) == (0, 0)


# Guarantee 11: what a dead thread gives back


def test_g11_idle_slots_are_reused_last_in_first_out(make_pool, in_thread):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(3)]
    for stream in streams:
        pool.internals.slot(stream)
    handles = [pool.get_handle(stream) for stream in streams]
    keep = pool.internals.slot()
    del stream
    for _ in range(3):
        streams.pop(0)
        pool.internals.release_left()
    fresh = [pool.driver.create_stream() for _ in range(3)]
    assert [pool.get_handle(stream) for stream in fresh] == handles[::-1]
    assert pool.internals.slot() is keep


def test_g11_all_slots_of_a_thread_are_given_back(make_pool, in_thread):
    pool = make_pool()
    streams = [pool.driver.create_stream() for _ in range(5)]

    def use():
        for stream in streams:
            pool.get_handle(stream)
            pool.get_handle(stream.ptr)

    in_thread(use)
    pool.internals.release_left()
    assert (pool.stats()["handles_live"], pool.stats()["handles_idle"]) == (0, 10)


def test_g11_a_slot_whose_thread_and_stream_have_both_ended_is_given_back_once(make_pool, in_thread):
    pool = make_pool()

    def use():
        stream = pool.driver.create_stream()
        pool.get_handle(stream)
        return stream

    stream = in_thread(use)
    del stream
    pool.internals.release_left()
    assert (pool.stats()["handles_live"], pool.stats()["handles_idle"]) == (0, 1)


def read_back_after_reuse(driver, get_workspace, change_owner):
    """One owner writes its scratch and copies it away; the next, on another stream, overwrites its own; what was read."""
    first, second = driver.create_stream(), driver.create_stream()
    read = driver.empty((64,), (1,), "u1")

    def begin():
        scratch = get_workspace(first)
        driver.enqueue(first.ptr, lambda memory: memory.fill(1), writes=[scratch])
        driver.enqueue(first.ptr, lambda out, memory: out.__setitem__(..., memory), writes=[read], reads=[scratch])

    change_owner(begin)
    driver.enqueue(second.ptr, lambda memory: memory.fill(2), writes=[get_workspace(second)])
    for stream in (second, first):
        stream.synchronize()
    return set(read.tolist())


def test_g11_scratch_that_goes_with_a_handle_is_ordered_after_its_last_stream(make_pool, in_thread):
    for seed in range(60):
        pool = make_pool(scheduler="adversarial", seed=seed)
        assert read_back_after_reuse(pool.driver, lambda s, pool=pool: pool.get_workspace(64, s), in_thread) == {1}, seed
        assert pool.stats()["handles_reused"] == 1


def test_g11_control_scratch_passed_on_without_the_order_is_corrupted_at_some_seeds(make_driver, in_thread):
    def pass_on(seed, check):
        driver = make_driver(scheduler="adversarial", seed=seed, check_order=check)
        passed_on = driver.scratch_array(driver.allocate(64), 64, None)
        return read_back_after_reuse(driver, lambda _: passed_on, in_thread)

    assert any(pass_on(seed, False) != {1} for seed in range(60))
    with pytest.raises(ContractError, match="not ordered"):
        pass_on(0, True)


def test_g11_scratch_is_freed_where_an_edge_would_touch_the_legacy_stream(make_pool, in_thread):
    """An event recorded on it, or a wait of it, ends the capture of any blocking stream."""
    for first, then in ((0, None), (None, 0)):
        pool = make_pool()
        streams = [pool.driver.create_stream() if pointer is None else pointer for pointer in (first, then)]
        in_thread(pool.get_workspace, 1000, streams[0])
        pool.driver.calls.clear()
        pool.get_handle(streams[1])
        assert pool.stats()["handles_reused"] == 1
        assert pool.stats()["scratch_bytes"] == 0
        assert not {"record_event", "wait_event"} & pool.driver.calls.keys()


def test_g11_scratch_stays_with_a_handle_that_is_reused_on_the_same_stream(make_pool, in_thread):
    pool = make_pool()
    stream = pool.driver.create_stream()
    for passed in (pool.driver.legacy_stream, stream):
        address = in_thread(lambda passed=passed: pool.driver.array_pointer(pool.get_workspace(1000, passed)))
        pool.driver.calls.clear()
        assert pool.driver.array_pointer(pool.get_workspace(1000, passed)) == address
        assert not {"record_event", "wait_event", "free"} & pool.driver.calls.keys()


def test_g11_many_short_streams_of_one_thread_leave_nothing_behind(make_pool):
    pool = make_pool()
    for _ in range(300):
        with pool.driver.create_stream():
            pool.get_handle()
    assert pool.stats()["handles_created"] <= 2
    gc.collect()
    assert sum(isinstance(thing, Slot) and thing._status is pool.internals.status for thing in gc.get_objects()) < 50


def test_g11_streams_that_went_leave_nothing_with_their_thread_where_none_is_at_an_old_ones_place(make_pool):
    """A thread's slots are known by their streams' places in Python's memory, which a next stream takes as a rule."""
    pool = make_pool()
    places, others = set(), []
    for _ in range(300):
        stream = pool.driver.create_stream()
        pool.get_handle(stream)
        places.add(id(stream))
        del stream
        others.append(pool.driver.wrap_stream(0x7000, None))  # an object of the same kind, to take its place
    assert len(places) > 250
    gc.collect()
    assert sum(isinstance(thing, Slot) and thing._status is pool.internals.status for thing in gc.get_objects()) < 50


def test_g11_many_short_threads_cost_one_handle(make_pool, in_thread):
    pool = make_pool()
    for _ in range(200):
        in_thread(pool.get_workspace, 1000)
    stats = pool.stats()
    assert stats["handles_created"] == 1
    assert stats["scratch_bytes_peak"] == 1024


# Guarantee 14: the first create alone


class Watched(HostDriver):
    """Sees creates that overlap: each waits inside, until another comes in or its patience ends."""

    def __init__(self, patience):
        super().__init__()
        self.patience = patience
        self.inside = 0
        self.most = 0
        self.met = threading.Event()
        self.guard = threading.Lock()

    def create_handle(self):
        with self.guard:
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.inside > 1:
                self.met.set()
        self.met.wait(self.patience)
        with self.guard:
            self.inside -= 1
        return super().create_handle()


def test_g14_creates_of_many_threads_never_overlap():
    driver = Watched(patience=0.02)
    with HandlePool(driver=driver) as pool:
        at_once(lambda i, meet: (pool.get_handle(), meet()), threads=6)  # nobody ends before all have a handle
        assert pool.stats()["handles_created"] == 6
    assert driver.most == 1


def test_g14_creates_of_two_pools_and_of_side_slots_never_overlap():
    driver = Watched(patience=0.02)
    with HandlePool(driver=driver) as first, HandlePool(driver=driver) as second:
        pools = [first, second]
        at_once(lambda i, meet: (pools[i % 2].prewarm(states=1), meet()), threads=4)
        assert min(pool.stats()["handles_created"] for pool in pools) >= 3
    assert driver.most == 1


def test_g14_control_creates_without_the_lock_are_seen_to_overlap():
    driver = Watched(patience=TIMEOUT)
    at_once(lambda i, meet: driver.create_handle(), threads=6)
    assert driver.most > 1


def test_g14_a_create_that_fails_leaves_the_way_free(make_pool, in_thread):
    pool = make_pool()
    for _ in range(2):
        pool.driver.fail_at(1, "create_handle", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            pool.get_handle()
    assert in_thread(pool.get_handle) is not None


def test_g3_a_thread_that_takes_over_a_handle_makes_the_device_current(make_pool, in_thread):
    """A new thread has no context until a call of the runtime's gives it one, and a kernel that the driver launches needs it."""
    pool = make_pool()
    in_thread(pool.get_handle)
    pool.driver.calls.clear()
    in_thread(pool.get_handle)
    assert pool.stats()["handles_reused"] == 1
    assert pool.driver.calls["set_device"] == 1
