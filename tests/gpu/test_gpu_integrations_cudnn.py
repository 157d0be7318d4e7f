"""Fourteen ways in which public code keeps cuDNN handles, on the pool while `handlepool.integrations.cudnn` is installed.

Each has a control: what goes wrong with the frontend's own handles. The ways are written anew here, as small as they go.
Collected only where torch is installed.
"""

import threading
import weakref

import cudnn
import numpy as np
import pytest
from harness.insides import torch_sleep

import handlepool
from handlepool import DeviceMismatchError, ParallelStates
from handlepool.integrations import cudnn as shim

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

LIMIT = 60
MEBIBYTE = 1 << 20
SHAPE, FILTERS = (1, 16, 16, 16), (16, 16, 3, 3)
SUM = 16 * 9
"""What a pixel away from the border is of an image of ones and filters of ones."""


# The ways. `handle()` gives the handle for the current stream, as the code that it stands for does before each use.


def torchs_stream():
    import torch

    return torch.cuda.current_stream().cuda_stream


def cupys_stream():
    return cupy.cuda.get_current_stream().ptr


def device():
    return cupy.cuda.runtime.getDevice()


class PerDevice:
    """One for each device, in a dictionary, bound before each use."""

    stream = staticmethod(torchs_stream)

    def __init__(self):
        self.handles = {}

    def handle(self):
        if device() not in self.handles:
            self.handles[device()] = cudnn.create_handle()
        cudnn.set_stream(handle=self.handles[device()], stream=self.stream())
        return self.handles[device()]


class PerDeviceOfCupy(PerDevice):
    """The same, on CuPy's current stream."""

    stream = staticmethod(cupys_stream)


class Lazy:
    """One for the whole process, made when first needed, bound before each use."""

    made = None

    def handle(self):
        if self.made is None:
            self.made = cudnn.create_handle()
        cudnn.set_stream(self.made, torchs_stream())
        return self.made


class NeverBound:
    """One for the whole process, made by the thread that imports, which is never bound."""

    def __init__(self):
        self.made = cudnn.create_handle()

    def handle(self):
        return self.made


class OfGraphs(NeverBound):
    """The same, given to graphs when they are built, which are executed without one."""

    passed = False


class PerThread:
    """One for each thread and device, which nobody destroys when the thread ends."""

    def __init__(self):
        self.mine = threading.local()

    def handle(self):
        handles = vars(self.mine)
        if device() not in handles:
            handles[device()] = cudnn.create_handle()
        cudnn.set_stream(handles[device()], torchs_stream())
        return handles[device()]


class ListPerThread(PerThread):
    """The same, by a list of which each entry is a device's."""

    def handle(self):
        handles = vars(self.mine).setdefault("handles", [None] * 8)
        if handles[device()] is None:
            handles[device()] = cudnn.create_handle()
        cudnn.set_stream(handles[device()], torchs_stream())
        return handles[device()]


class Finalized(PerThread):
    """The same, destroyed when the thread's storage ends."""

    class Owner:
        def __init__(self):
            self.handle = cudnn.create_handle()
            weakref.finalize(self, cudnn.destroy_handle, self.handle)

    def handle(self):
        owners = vars(self.mine)
        if device() not in owners:
            owners[device()] = self.Owner()
        cudnn.set_stream(owners[device()].handle, torchs_stream())
        return owners[device()].handle


class PerStream:
    """One for each device and stream, bound once."""

    def __init__(self):
        self.handles = {}

    def handle(self):
        key = device(), torchs_stream()
        if key not in self.handles:
            self.handles[key] = cudnn.create_handle()
            cudnn.set_stream(self.handles[key], key[1])
        return self.handles[key]


class PerUse:
    """Made before each use; whoever used it destroys it."""

    def handle(self):
        handle = cudnn.create_handle()
        cudnn.set_stream(handle, torchs_stream())
        return handle

    def done(self, handle):
        cudnn.destroy_handle(handle)


class Default:
    """The frontend's default handle of the thread and device."""

    def handle(self):
        from cudnn import wrapper

        return wrapper.get_default_handle()


WAYS = {
    "the frontend's default handle": (Default, "leak"),
    "the frontend's norms": (PerThread, "leak"),
    "the frontend's grouped product": (PerDevice, "wrong"),
    "the frontend's swiglu": (PerStream, "capture"),
    "FlashInfer's products": (Lazy, "wrong"),
    "FlashInfer's prefill": (Lazy, "wrong"),
    "FlashInfer's linear attention": (Lazy, "wrong"),
    "FlashInfer's decode": (Finalized, "capture"),
    "TransformerEngine": (ListPerThread, "leak"),
    "Lightning Thunder": (OfGraphs, "wrong"),
    "tinyfusers": (NeverBound, "wrong"),
    "CuPy 13's tests": (PerDeviceOfCupy, "wrong"),
    "PyTorch's threads": (PerUse, "capture"),
}
"""Thirteen; the fourteenth, the frontend's `cudnn.Graph`, is below. And what is wrong with each as it is."""


def ways(*faults):
    return [pytest.param(way, id=name.replace(" ", "_")) for name, (way, fault) in WAYS.items() if fault in (faults or [fault])]


# What they are tried with


@pytest.fixture(autouse=True)
def default(pool, make_default):
    """The test's pool as the default one, with a handle, so that the first of the process is there; nothing stays installed."""
    import torch

    torch.cuda.init()
    make_default(pool)
    pool.get_handle()
    yield pool
    shim.uninstall()
    torch.cuda.synchronize()


@pytest.fixture
def installed(default):
    shim.install()
    return default


@pytest.fixture
def own_handles(monkeypatch):
    """The frontend's own handles, destroyed after the test."""
    create, made = cudnn.create_handle, []

    def recorded():
        made.append(create())
        return made[-1]

    monkeypatch.setattr(cudnn, "create_handle", recorded)
    yield made
    cupy.cuda.Device().synchronize()
    for handle in made:
        cudnn.destroy_handle(handle)


class Convolution:
    """A graph of the frontend's, as its users build it, over arrays of its own for each user."""

    def __init__(self, handle, users):
        self.x = [cupy.zeros(SHAPE, np.float32) for _ in range(users)]
        self.y = [cupy.zeros(SHAPE, np.float32) for _ in range(users)]
        self.w = cupy.ones(FILTERS, np.float32)
        kind = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(handle=handle, io_data_type=kind, intermediate_data_type=kind, compute_data_type=kind)
        x, w = (
            graph.tensor(name=name, dim=list(shape), stride=[size // 4 for size in array.strides], data_type=kind)
            for name, shape, array in (("x", SHAPE, self.x[0]), ("w", FILTERS, self.w))
        )
        y = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y.set_output(True).set_data_type(kind).set_dim(list(SHAPE)).set_stride([size // 4 for size in self.y[0].strides])
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph, self.operands = graph, (x, w, y)
        self.spaces = [cupy.empty(max(1, graph.get_workspace_size()), np.uint8) for _ in range(users)]

    def run(self, i, handle):
        x, w, y = self.operands
        pack = {x: self.x[i].data.ptr, w: self.w.data.ptr, y: self.y[i].data.ptr}
        self.graph.execute(pack, self.spaces[i].data.ptr, handle=handle)

    def pixel(self, i):
        return float(self.y[i][0, 0, 8, 8])


class On:
    """A stream of torch's, current for torch and CuPy."""

    def __init__(self, stream):
        import torch

        self.contexts = torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream)

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


USERS = 4


@pytest.fixture
def outcomes(in_threads, kernels, latch):
    """What users in threads of their own get, each from a stream that is held back until all have been given their work.

    Their handles are asked for one after the other. Then the streams are let go of, the last user's first. So whatever was given
    to another stream than its user's has run before its image was written.
    """
    import torch

    def run(way):
        streams, latches = [torch.cuda.Stream() for _ in range(USERS)], [type(latch)() for _ in range(USERS)]
        turns, together = [threading.Event() for _ in range(USERS + 1)], threading.Barrier(USERS)
        convolution = Convolution(way.handle(), USERS)
        cupy.cuda.Device().synchronize()

        def use(i):
            with On(streams[i]):
                for held in (False, True):
                    kernels.write(convolution.x[i], 0)
                    kernels.write(convolution.y[i], 0)
                    streams[i].synchronize()
                    together.wait(LIMIT)
                    if held:
                        latches[i].hold()
                    kernels.write(convolution.x[i], i + 1)
                    if i:
                        assert turns[i].wait(LIMIT)
                    handle = way.handle()
                    turns[i + 1].set()
                    together.wait(LIMIT)
                    convolution.run(i, handle if getattr(way, "passed", True) else None)
                    together.wait(LIMIT)
                    if held and not i:
                        for latch, stream in zip(reversed(latches), reversed(streams), strict=True):
                            latch.release()
                            stream.synchronize()
                    together.wait(LIMIT)
                    streams[i].synchronize()
                    if hasattr(way, "done"):
                        way.done(handle)
                    together.wait(LIMIT)
                    turns[i + 1].clear()
                    together.wait(LIMIT)
            return convolution.pixel(i)

        try:
            return in_threads(USERS, use)
        finally:
            for each in latches:
                each.release()
            cupy.cuda.Device().synchronize()

    return run


RIGHT = [SUM * (i + 1) for i in range(USERS)]


@pytest.mark.parametrize("way", ways())
def test_each_way_is_right_in_threads_on_streams(installed, outcomes, way):
    assert outcomes(way()) == RIGHT


@pytest.mark.parametrize("way", ways("wrong"))
def test_control_its_own_handle_is_bound_to_another_users_stream(own_handles, outcomes, way):
    assert outcomes(way()) != RIGHT


@pytest.mark.parametrize("way", ways())
def test_g1_each_way_gives_each_thread_a_handle_of_its_own(installed, in_threads, way):
    way = way()
    import torch

    stream = torch.cuda.Stream()

    def number(_):
        with On(stream):
            return way.handle().backend_handle

    assert len(set(in_threads(4, number))) == 4


@pytest.mark.parametrize("way", ways("wrong"))
def test_g1_control_its_own_handle_is_one_in_all_threads(own_handles, in_threads, way):
    way = way()
    way.handle()  # or threads that come first at once make one each
    assert len({handle.backend_handle for handle in in_threads(4, lambda _: way.handle())}) == 1


# Memory


def short_threads(count, function):
    for _ in range(count):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join(LIMIT)
        assert not thread.is_alive()


def lost(count, function):
    """Bytes of device memory that threads, one after the other, have left behind."""
    short_threads(2, function)
    cupy.cuda.Device().synchronize()
    before, _ = cupy.cuda.runtime.memGetInfo()
    short_threads(count, function)
    cupy.cuda.Device().synchronize()
    return before - cupy.cuda.runtime.memGetInfo()[0]


@pytest.mark.alone
@pytest.mark.parametrize("way", ways())
def test_g11_short_threads_leave_nothing(installed, way):
    way = way()
    assert lost(24, lambda: way.handle().backend_handle) < 4 * MEBIBYTE


@pytest.mark.alone
@pytest.mark.parametrize("way", ways("leak"))
def test_g11_control_its_own_handles_are_kept(own_handles, way):
    """Memory tells too little here: what a control before this one gave back is used again."""
    way, kept = way(), []
    short_threads(24, lambda: kept.append(way.handle()))
    try:
        assert len({handle.backend_handle for handle in kept}) == 24  # all at once, though no thread has one any more
    finally:
        if way.__class__ is Default:
            from cudnn import wrapper

            wrapper._default_handle_registry.clear()
        else:
            for handle in kept:
                cudnn.destroy_handle(handle)


# Captures


def survives(function):
    """Whether a capture in global mode survives what another thread does meanwhile."""
    own = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(16, np.float32)
    cupy.cuda.Device().synchronize()

    def quietly():
        try:
            function()
        except RuntimeError:
            pass

    thread = threading.Thread(target=quietly)
    own.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, own.ptr)
    thread.start()
    thread.join(LIMIT)
    try:
        own.end_capture()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


def used_once(way):
    import torch

    way, stream = way(), torch.cuda.Stream()

    def use():
        with On(stream):
            handle = way.handle()
            assert handle.backend_handle
            if hasattr(way, "done"):
                way.done(handle)

    return use


@pytest.mark.parametrize("way", ways())
def test_g9_captures_of_other_threads_survive_each_way(installed, way):
    if way is Default:
        from cudnn import wrapper  # noqa: F401 - imported before the capture
    assert survives(used_once(way))


@pytest.mark.parametrize("way", ways("capture"))
def test_g9_control_its_own_handles_end_a_capture(own_handles, way):
    assert not survives(used_once(way))


@pytest.mark.parametrize("way", ways())
def test_g9_each_way_can_be_captured_and_replayed(installed, way, kernels):
    import torch

    way, stream = way(), torch.cuda.Stream()
    with On(stream):
        convolution = Convolution(way.handle(), 1)
        convolution.run(0, way.handle())
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            handle = way.handle()
            convolution.run(0, handle)
        kernels.write(convolution.x[0], 7)
        graph.replay()
        stream.synchronize()
        assert convolution.pixel(0) == 7 * SUM
        graph.reset()


# The fourteenth: the frontend's `cudnn.Graph`


def wrapped():
    """One graph for all, whose plan needs scratch, with images, filters and what is right."""
    import torch

    shape = (64, 256, 14, 14)
    images = [torch.randn(shape, device="cuda") for _ in range(8)]
    w = torch.randn(256, 256, 3, 3, device="cuda") / 48
    kind = cudnn.data_type.FLOAT
    with cudnn.Graph(
        io_data_type=kind,
        intermediate_data_type=kind,
        compute_data_type=kind,
        handle="auto",
        inputs=["conv::image", "conv::weight"],
        outputs=["y"],
    ) as graph:
        y = graph.conv_fprop(image=images[0], weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv")
        y.set_output(True).set_name("y")
    if not graph.get_workspace_size():
        pytest.skip("its plan needs no scratch here")
    expected = [torch.nn.functional.conv2d(x, w, padding=1) for x in images]
    torch.cuda.synchronize()
    return graph, images, w, expected


def wrong_of(rounds=30):
    import torch

    graph, images, w, expected = wrapped()
    gate, streams, wrong = torch.cuda.Stream(), [torch.cuda.Stream() for _ in images], 0
    for _ in range(rounds):
        with torch.cuda.stream(gate):
            torch_sleep(10_000_000)  # all begin at once, however slow their launches are
            begin = gate.record_event()
        outputs = []
        for stream, x in zip(streams, images, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                outputs.append(graph(x, w))
        torch.cuda.synchronize()
        wrong += sum(float((y - right).norm() / right.norm()) > 1e-2 for y, right in zip(outputs, expected, strict=True))
    return wrong


def test_g5_a_wrapped_graph_is_right_on_eight_streams(installed):
    assert wrong_of() == 0


def test_g5_control_a_wrapped_graph_of_its_own_overwrites_its_scratch(default):
    assert wrong_of() > 0


def test_g5_a_wrapped_graph_is_right_in_eight_threads(installed, in_threads):
    import torch

    graph, images, w, expected = wrapped()
    streams = [torch.cuda.Stream() for _ in images]

    def use(i):
        found = []
        with torch.cuda.stream(streams[i]):
            for _ in range(10):
                y = graph(images[i], w)
                streams[i].synchronize()
                found.append(float((y - expected[i]).norm() / expected[i].norm()))
        return max(found)

    assert max(in_threads(8, use)) < 1e-2


@pytest.mark.alone
def test_g11_two_hundred_short_threads_through_a_wrapped_graph_leave_device_memory_flat(installed):
    import torch

    graph, images, w, _ = wrapped()

    def use():
        graph(images[0], w)
        torch.cuda.current_stream().synchronize()

    assert lost(200, use) < 4 * MEBIBYTE


# Beside the pool's own users


def test_in_a_branch_a_kept_handle_is_the_side_slots(installed, stream):
    way = PerDeviceOfCupy()

    def branch():
        return way.handle().actual() is handlepool.get_handle(), handlepool.get_handle().stream

    with ParallelStates(2).fork() as fork:
        found = [fork.run(branch) for _ in range(2)]
    assert all(same for same, _ in found)
    assert len({pointer for _, pointer in found}) == 2


def test_a_graph_without_a_handle_runs_on_the_current_stream(installed, stream, latch, kernels):
    convolution = Convolution(None, 1)
    convolution.run(0, None)
    stream.synchronize()
    latch.hold()
    kernels.write(convolution.x[0], 3)
    convolution.run(0, None)
    latch.release()
    stream.synchronize()
    assert convolution.pixel(0) == 3 * SUM


def test_control_without_it_such_a_graph_runs_on_the_default_stream(default, stream, latch, kernels):
    convolution = Convolution(None, 1)
    convolution.run(0, None)
    cupy.cuda.Device().synchronize()
    latch.hold()
    kernels.write(convolution.x[0], 3)
    convolution.run(0, None)
    cupy.cuda.Stream.null.synchronize()
    latch.release()
    stream.synchronize()
    assert convolution.pixel(0) == 0


def test_g2_a_kept_set_stream_leaves_the_pools_handle_bound_right(default, backend_stream):
    kept, other = cudnn.set_stream, cupy.cuda.Stream(non_blocking=True)
    shim.install()
    handle = cudnn.create_handle()
    kept(handle, other.ptr)
    assert backend_stream(handle) == other.ptr
    assert backend_stream(handlepool.get_handle()) == handlepool.get_handle().stream == cupys_stream()


@pytest.mark.two_gpus
def test_g3_one_handle_for_all_devices_is_right_on_each_and_a_stream_of_another_is_an_error(installed):
    way = Lazy()
    values = []
    for ordinal in (0, 1):
        with cupy.cuda.Device(ordinal):
            import torch

            with torch.cuda.device(ordinal):
                convolution = Convolution(way.handle(), 1)
                convolution.x[0][...] = 5
                cupy.cuda.Device().synchronize()
                convolution.run(0, way.handle())
                cupy.cuda.Device().synchronize()
                values.append(convolution.pixel(0))
                there = torch.cuda.Stream()
    assert values == [5 * SUM] * 2
    cudnn.set_stream(way.made, there.cuda_stream)
    with pytest.raises(DeviceMismatchError):
        way.made.actual()
