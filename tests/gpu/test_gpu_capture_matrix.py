"""Guarantee 9 on a GPU: mode of capture, thread and operation, ours beside plain calls; and whose scratch is whose afterwards."""

import pytest

from handlepool import HandlePool

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)
from capture_operations import MODES, OURS, PLAIN, WHO, survives  # noqa: E402

N = 1 << 12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("operation", OURS)
def test_g9_a_capture_survives_the_pool(kernels, operation, who, mode):
    with HandlePool(driver="cuda") as pool:
        assert survives(kernels, OURS[operation], mode, who, pool) == ""


@pytest.mark.parametrize("operation", ["cudnnCreate", "cudnnDestroy", "cudaFree", "cudaEventQuery"])
def test_g9_control_a_plain_call_in_another_thread_kills_a_global_capture(kernels, operation):
    assert survives(kernels, PLAIN[operation], "global", "another thread") != ""


def test_g9_control_reading_a_captured_streams_id_kills_the_capture(kernels):
    assert survives(kernels, PLAIN["cuStreamGetId of the captured stream"], "relaxed", "same thread") != ""


def test_g9_replays_and_eager_work_of_one_slot_never_touch_each_others_scratch(pool, stream, kernels):
    eager_out, captured_out = kernels.full(N, 0), kernels.full(N, 0)
    kernels.write(pool.get_workspace(4 * N).view(cupy.float32), 5)
    stream.begin_capture()
    memory = pool.get_workspace(4 * N).view(cupy.float32)
    kernels.write(memory, 1)
    kernels.copy(memory, captured_out)
    graph = stream.end_capture()
    for value in range(3, 8):
        memory = pool.get_workspace(4 * N).view(cupy.float32)
        kernels.write(memory, value)
        graph.launch(stream)
        kernels.copy(memory, eager_out)
        assert (eager_out.get() == value).all()
        assert (captured_out.get() == 1).all()
        pool.trim()


def test_g9_control_scratch_that_both_have_is_overwritten_by_the_replay(stream, kernels):
    shared, eager_out = kernels.full(N, 0), kernels.full(N, 0)
    stream.begin_capture()
    kernels.write(shared, 1)
    graph = stream.end_capture()
    kernels.write(shared, 5)
    graph.launch(stream)
    kernels.copy(shared, eager_out)
    assert (eager_out.get() == 1).all()


@pytest.mark.alone
def test_trim_gives_back_what_captures_were_given_when_it_is_told_to(pool, stream):
    size = 1 << 26
    for _ in range(3):
        stream.begin_capture()
        pool.get_workspace(size)
        stream.end_capture()
    pool.trim()
    assert pool.stats()["scratch_bytes_captured"] == 3 * size
    free, _ = cupy.cuda.runtime.memGetInfo()
    pool.trim(captured=True)
    assert pool.stats()["scratch_bytes_captured"] == pool.stats()["scratch_bytes"] == 0
    assert pool.stats()["captures_met"] == 3
    assert cupy.cuda.runtime.memGetInfo()[0] >= free + 2 * size


def test_a_null_stream_object_that_is_dropped_leaves_the_null_streams_slot(pool, backend_stream):
    stream = cupy.cuda.Stream(null=True)
    handle = pool.get_handle(stream)
    del stream
    assert pool.get_handle(cupy.cuda.Stream.null) is handle is pool.get_handle(cupy.cuda.Stream(null=True)) is pool.get_handle(0)
    assert backend_stream(handle) == 0
    assert pool.stats()["handles_created"] == 1
