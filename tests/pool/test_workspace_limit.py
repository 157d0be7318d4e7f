"""The limit of scratch memory, per device, and what is said past it. Guarantee 5."""

import numpy as np
import pytest

from handlepool import OutOfMemoryError, ParallelStates
from handlepool.drivers.host.driver import HostDriver


def address(pool, array):
    return pool.driver.array_pointer(array)


def write(pool, stream, scratch, value):
    pool.driver.enqueue(stream.ptr, lambda memory: memory.fill(value), writes=[scratch])


def test_g5_all_scratch_of_a_device_counts_against_its_limit(make_pool):
    pool = make_pool(scratch_limit=4096)
    pool.get_workspace(1024)
    pool.get_workspace(1024, 2)
    pool.internals.slot().reserve(1024)
    with pool.driver.create_stream(), pytest.raises(OutOfMemoryError):
        pool.get_workspace(1025)
    with pool.driver.create_stream() as stream:
        pool.get_workspace(1024)
        assert pool.stats()["scratch_bytes"] == 4096
    del stream


def test_g5_each_device_has_the_limit_to_itself(make_pool):
    pool = make_pool(scratch_limit=4096)
    for device in (0, 1):
        with pool.driver.device(device):
            assert pool.get_workspace(4096).nbytes == 4096


def test_g5_a_growth_past_the_limit_takes_back_idle_scratch_first(make_pool, in_thread):
    pool = make_pool(scratch_limit=4096)
    with pool.driver.create_stream() as other:
        pool.prewarm(states=2, workspace=512)  # free side slots', and this thread's own
        growing = pool.internals.slot(2)
        in_thread(pool.get_workspace, 2048, other)  # a dead thread's, on a stream that lives
        assert pool.stats()["scratch_bytes"] == 3584
        assert growing.reserve(3500)
        stats = pool.stats()
        assert stats["scratch_bytes"] == 512 + 3584
        assert (stats["handles_live"], stats["handles_idle"], stats["handles_destroyed"]) == (2, 3, 0)  # scratch, not handles


def test_g5_a_growth_past_the_limit_takes_back_replaced_blocks_first(make_pool):
    pool = make_pool(scratch_limit=8192)
    stream = pool.driver.create_stream()
    for nbytes in (1024, 2048, 3072):
        write(pool, stream, pool.get_workspace(nbytes, stream), 7)
    pool.get_workspace(4096, 2)
    assert pool.stats()["scratch_bytes"] <= 8192


def test_g5_a_workspace_may_grow_to_the_limit_though_old_and_new_do_not_fit_together(make_pool, scheduler):
    pool = make_pool(scheduler=scheduler, scratch_limit=4096)
    with pool.driver.create_stream() as stream:
        for nbytes in (2048, 3072, 4096):
            scratch = pool.get_workspace(nbytes)
            write(pool, stream, scratch, 7)
        stream.synchronize()
        assert (scratch == 7).all()
    assert pool.stats()["scratch_bytes"] == 4096


def test_g5_past_the_limit_the_error_has_the_numbers_and_all_that_was_held_is_still_good(make_pool):
    pool = make_pool(scratch_limit=10_000, memory=1 << 20)
    kept = pool.get_workspace(5000, 2)
    message = (
        r"8,192 bytes of scratch on device 0 were refused: 1,043,456 of 1,048,576 bytes are free, and "
        r"the pool holds 5,120 bytes of scratch under a limit of 10,000 bytes "
        r"\(2 live, 0 idle, 0 leased handles, .*\)\. Raise scratch_limit"
    )
    with pytest.raises(OutOfMemoryError, match=message) as info:
        pool.get_workspace(8000)
    assert isinstance(info.value, MemoryError)
    assert address(pool, pool.get_workspace(5000, 2)) == address(pool, kept)
    assert pool.get_workspace(4000).nbytes == 4000
    ParallelStates(2, pool=pool).map(lambda n: pool.get_workspace(n), [10, 20])
    pool.driver.use_handle(pool.get_handle(), int)


def test_g5_a_limit_of_0_allows_workspaces_of_0_bytes(make_pool):
    pool = make_pool(scratch_limit=0)
    assert pool.get_workspace(0).nbytes == 0
    with pytest.raises(OutOfMemoryError):
        pool.get_workspace(1)


def test_g5_where_the_device_is_full_cached_arrays_and_idle_scratch_are_taken_back(make_pool, in_thread):
    pool = make_pool(memory=1 << 20)
    array = pool.driver.empty((1 << 19,), (1,), np.uint8)
    del array  # cached by the array library
    in_thread(pool.get_workspace, 1 << 18)
    assert pool.get_workspace((1 << 20) - 4096, 2).nbytes == (1 << 20) - 4096


def test_g5_where_the_device_is_full_the_error_says_that_there_is_no_limit(make_pool):
    pool = make_pool(memory=1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"1,048,576 of 1,048,576 bytes are free, .* under no limit"):
        pool.get_workspace(1 << 21)
    assert pool.stats()["scratch_bytes"] == 0


def test_g5_the_peak_is_counted(make_pool):
    pool = make_pool()
    pool.get_workspace(1024)
    pool.get_workspace(4096)
    pool.trim()
    stats = pool.stats()
    assert (stats["scratch_bytes"], stats["scratch_bytes_peak"]) == (4096, 5120)


def test_g5_two_threads_cannot_pass_one_limit(make_pool):
    """The count goes up before the memory is asked for: a second thread that comes in between is refused."""

    class Meeting(HostDriver):
        between = None

        def allocate(self, nbytes):
            between, self.between = self.between, None
            if between is not None:
                between()
            return super().allocate(nbytes)

    driver = Meeting()
    pool = make_pool(driver=driver, scratch_limit=4096)
    refused = []

    def come_between():
        try:
            pool.get_workspace(3000, 2)
        except OutOfMemoryError as error:
            refused.append(error)

    driver.between = come_between
    pool.get_workspace(3000)
    assert len(refused) == 1
    assert pool.stats()["scratch_bytes"] == 3072
