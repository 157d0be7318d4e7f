"""Guarantee 9 on a GPU: captures survive what the pool does, and what a capture was given stays its own."""

import pytest

import handlepool
from handlepool import CaptureError, HandlePool, ParallelStateExecutor, ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

MODES = {
    "global": cupy.cuda.runtime.streamCaptureModeGlobal,
    "thread-local": cupy.cuda.runtime.streamCaptureModeThreadLocal,
    "relaxed": cupy.cuda.runtime.streamCaptureModeRelaxed,
}
N = 1 << 12


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def misses(pool, size):
    """What makes handles, streams, events and scratch, and gives them back."""
    own = cupy.cuda.Stream(non_blocking=True)
    pool.get_handle(own)
    pool.get_workspace(size, own)
    pool.get_workspace(4 * size, own)
    pool.get_handle(own.ptr)
    pool.prewarm(states=2, workspace=size, stream=own)
    pool.trim()


def capture(stream, mode, function):
    """Capture what a function gives the stream; the capture is ended also when the function fails."""
    stream.begin_capture(mode)
    try:
        value = function()
    finally:
        graph = stream.end_capture()
    return graph, value


def test_g9_the_pools_work_in_another_thread_leaves_a_capture_alive(stream, kernels, in_thread, mode):
    array = kernels.full(N, 0)
    with HandlePool(driver="cuda") as pool:
        misses(pool, 1 << 12)

        def body():
            kernels.write(array, 1)
            in_thread(misses, pool, 1 << 16)
            cupy.add(array, 1, out=array)

        body()
        graph, _ = capture(stream, mode, body)
    array.fill(0)
    graph.launch(stream)
    assert (array.get() == 2).all()


def test_g9_the_pools_work_in_the_capturing_thread_leaves_its_capture_alive(pool, stream, kernels, mode):
    array = kernels.full(N, 0)

    def body():
        kernels.write(array, 1)
        handle = pool.get_handle()
        assert handle.stream == stream.ptr
        assert pool.get_handle() is handle
        assert pool.get_handle(stream.ptr).stream == stream.ptr
        memory = pool.get_workspace(4 * N).view(cupy.float32)
        misses(pool, 1 << 16)
        kernels.copy(array, memory)
        kernels.write(array, 5)
        kernels.copy(memory, array)
        return memory

    graph, _ = capture(stream, mode, body)
    array.fill(0)
    graph.launch(stream)
    assert (array.get() == 1).all()


def test_g9_scratch_of_a_capture_is_never_handed_out_again(pool, stream, kernels):
    eager = pool.get_workspace(4 * N)
    graph, captured = capture(stream, MODES["global"], lambda: [pool.get_workspace(4 * N << i).data.ptr for i in range(3)])
    graph.launch(stream)
    assert pool.get_workspace(4 * N).data.ptr == eager.data.ptr
    pool.trim()
    later = [pool.get_workspace(4 * N << i).data.ptr for i in range(4)]
    with cupy.cuda.Stream(non_blocking=True):
        later += [pool.get_workspace(4 * N << i).data.ptr for i in range(4)]
    _, again = capture(stream, MODES["global"], lambda: [pool.get_workspace(4 * N << i).data.ptr for i in range(3)])
    assert not {*captured} & {eager.data.ptr, *later, *again}


def test_g9_a_plan_can_be_built_while_a_stream_is_captured(pool, stream, random_array, mode):
    x, w = random_array((2, 16, 14, 14)), random_array((8, 16, 3, 3))
    y, z = cupy.empty((2, 8, 14, 14), "float32"), cupy.empty((2, 8, 12, 12), "float32")
    handlepool.conv2d(x, w, padding=1, out=y, pool=pool)  # the first plan of a process loads libraries
    expected = y.get()

    def body():
        handlepool.conv2d(x, w, padding=0, out=z, pool=pool)
        handlepool.conv2d(x, w, padding=1, out=y, pool=pool)

    graph, _ = capture(stream, mode, body)
    y.fill(cupy.nan)
    z.fill(cupy.nan)
    graph.launch(stream)
    assert (y.get() == expected).all()
    assert cupy.allclose(z, y[:, :, 1:-1, 1:-1], rtol=1e-2, atol=1e-2)


def test_g9_a_captured_fork_is_parallel_in_the_graph_replays_right_and_keeps_its_side_slots_to_the_captures_end(
    pool, stream, random_array, edges, mode
):
    w = random_array((64, 64, 3, 3))
    images = [random_array((1, 64, 14, 14), seed=seed) for seed in range(8)]
    expected = [handlepool.conv2d(x, w, padding=1, pool=pool) for x in images]
    inputs, outputs = [cupy.empty_like(x) for x in images], [cupy.empty_like(y) for y in expected]
    states = ParallelStates(4, pool=pool)

    def body():
        with states.fork() as fork:
            for x, y in zip(inputs, outputs, strict=True):
                fork.run(handlepool.conv2d, x, w, padding=1, out=y)
        return pool.stats()["handles_captured"]

    graph, held = capture(stream, mode, body)
    assert held == 4
    nodes, pairs = edges(graph.graph)
    assert len(nodes) >= 8
    assert len(set(nodes) - {after for _, after in pairs}) == 4  # begin on nothing
    assert len(set(nodes) - {before for before, _ in pairs}) == 4  # end in nothing but the graph's end
    for shift in range(3):
        for x, image in zip(inputs, images[shift:] + images[:shift], strict=True):
            x[...] = image
        for y in outputs:
            y.fill(cupy.nan)
        graph.launch(stream)
        for y, z in zip(outputs, expected[shift:] + expected[:shift], strict=True):
            assert (y == z).all()
    mapped = states.map(lambda x: handlepool.conv2d(x, w, padding=1), images)
    assert all((y == z).all() for y, z in zip(mapped, expected, strict=True))
    assert pool.stats()["handles_captured"] == 0


def test_g9_a_task_submitted_under_capture_is_an_error_and_the_capture_survives(pool, stream, kernels):
    array = kernels.full(N, 0)
    with ParallelStateExecutor(1, pool=pool) as executor:
        executor.submit(int).result()

        def body():
            with pytest.raises(CaptureError):
                executor.submit(int)
            kernels.write(array, 3)

        graph, _ = capture(stream, MODES["global"], body)
    graph.launch(stream)
    assert (array.get() == 3).all()
