"""Torch's streams as keys. Collected only where torch is installed."""

import pytest
from harness.insides import torch_sleep

import handlepool
from handlepool import ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


def test_g4_a_torch_stream_is_a_key_by_its_own_identity(pool, backend_stream):
    import torch

    streams = [torch.cuda.Stream() for _ in range(3)]
    handles = [pool.get_handle(stream) for stream in streams]
    assert len({id(handle) for handle in handles}) == 3
    for stream, handle in zip(streams, handles, strict=True):
        assert backend_stream(handle) == stream.cuda_stream
        assert pool.get_handle(stream) is handle is pool.get_handle(stream.cuda_stream)
        assert pool.get_workspace(1000, stream).shape == (1000,)
    with torch.cuda.stream(streams[0]):
        assert pool.get_handle(torch.cuda.current_stream()) is handles[0]
    assert pool.get_handle(torch.cuda.default_stream()) is pool.get_handle(cupy.cuda.Stream.null)


def test_g6_a_fork_over_a_torch_stream_is_ordered_with_torchs_work(pool, random_array):
    import torch

    w = random_array((16, 16, 3, 3))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(2, 16, 14, 14, device="cuda")
        x = cupy.from_dlpack(tensor)
        stream.synchronize()
        torch_sleep(20_000_000)
        tensor.fill_(1)
        with ParallelStates(2, pool=pool).fork(stream=stream) as fork:
            y = fork.run(handlepool.conv2d, x, w)
        stream.synchronize()
    ones = cupy.ones_like(x)
    assert cupy.allclose(y, handlepool.conv2d(ones, w, pool=pool))


def test_g17_an_operation_of_torch_in_the_body_is_ordered_with_branches_on_either_librarys_stream(pool, stream):
    """Torch's current stream is another one than CuPy's."""
    import torch

    theirs = torch.cuda.Stream()
    y = torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()

    @handlepool.operation(mutates="y")
    def add_late(y, value):
        torch_sleep(20_000_000)
        y.add_(value)

    with torch.cuda.stream(theirs):
        with ParallelStates(2, pool=pool).fork() as fork:
            fork.run(add_late, y, 1)
            add_late(y, 2)
            z = fork.run(handlepool.operation(torch.mul), y, 10)
        stream.synchronize()
    assert (z == 30).all()


def test_g17_a_tensor_that_was_written_beside_its_reader_and_not_declared_is_an_error(pool, stream):
    import torch

    y = torch.zeros(1 << 16, device="cuda")
    read, write = handlepool.operation(torch.sum), handlepool.operation(lambda y: y.add_(1) is None, mutates=())
    with ParallelStates(3, pool=pool).fork() as fork:
        fork.run(read, y)
        # The first call is ordered as a writer.
        fork.run(write, y)
        fork.run(read, y)
        with pytest.raises(handlepool.ContractError, match="wrote argument y without declaring it"):
            fork.run(write, y)
