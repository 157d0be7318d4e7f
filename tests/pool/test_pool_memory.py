"""What the pool costs in memory of the host, measured; so nothing else may run beside it."""

import gc
import threading
import tracemalloc

import pytest

from handlepool import ParallelStates

pytestmark = pytest.mark.alone


def grown(work, times):
    """Bytes of Python's memory that ``times`` runs of ``work`` leave behind, after a warm-up of as many."""
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(times):
            work()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_g2_a_hit_keeps_no_memory(make_pool):
    pool = make_pool(check_order=False)
    assert grown(pool.get_handle, 10_000) < 10_000


def test_g2_control_what_a_hit_would_keep_is_seen(make_pool):
    pool = make_pool(check_order=False)
    kept = []
    assert grown(lambda: kept.append((pool.get_handle(), None)), 10_000) > 100_000


def test_g11_short_threads_keep_no_memory_and_no_handles(make_pool):
    pool = make_pool(check_order=False)
    assert grown(lambda: in_a_thread(pool.get_handle), 1_000) < 100_000
    assert pool.stats()["handles_created"] <= 2


def test_g11_short_streams_keep_no_memory_and_no_handles(make_pool):
    pool = make_pool(check_order=False)

    def work():
        with pool.driver.create_stream():
            pool.get_handle()

    assert grown(work, 1_000) < 100_000
    assert pool.stats()["handles_created"] <= 2


def test_g8_forks_keep_no_memory(make_pool):
    states = ParallelStates(4, pool=make_pool(check_order=False))
    assert grown(lambda: states.map(lambda i: bytes(1000), range(8)), 500) < 50_000
