"""Torch's tensors as arrays: values, streams, and torch's allocator. Collected only where torch is installed."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.insides import version_of

import handlepool
from handlepool import ArgumentError, ArrayTypeError, CaptureError, HandlePool, ParallelStateExecutor, ParallelStates, conv2d
from handlepool.testing.reference import conv2d as convolve
from handlepool.testing.reference import relative_error

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 2e-3}
BLOCK = 1 << 22
"""Elements of a float32 tensor that torch's allocator gives a block of its own."""


@pytest.fixture
def default(pool, make_default):
    """The test's pool as the default one."""
    make_default(pool)
    return pool


@pytest.fixture
def integers(torch):
    """Small integers, with which convolutions are exact in every type."""

    def make(*shape, seed=0, dtype="float32"):
        values = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
        return torch.from_numpy(values).to("cuda", getattr(torch, dtype))

    return make


@pytest.fixture
def theirs(torch):
    """A stream of torch's, current during the test; CuPy's current one is another."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


def exact(y, *arguments, **options):
    """Whether a convolution of integers is right: what cuDNN computes by another way than the sum is off by a rounding."""
    return same(y, torch_from(convolve(*[a.float().cpu().numpy() for a in arguments], **options)))


def torch_from(array):
    import torch

    return torch.from_numpy(array).to("cuda")


def same(y, integers):
    return bool(((y.double() - integers).abs() < 0.25).all())


def on(pointer):
    """Torch's stream as CuPy's current one, for the latch."""
    return cupy.cuda.Stream.from_external(pointer)


# Values


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_a_tensor_gives_a_tensor_with_its_layout(default, torch, dtype, layout):
    shape = torch.channels_last if layout == "channels last" else torch.contiguous_format
    x = torch.randn(2, 16, 14, 14, device="cuda").to(getattr(torch, dtype)).to(memory_format=shape)
    w = torch.randn(32, 16, 3, 3, device="cuda").to(getattr(torch, dtype)).to(memory_format=shape)
    expected = convolve(x.double().cpu().numpy(), w.double().cpu().numpy(), padding=1)
    y = conv2d(x, w, padding=1)
    assert (type(y), y.dtype, y.device) == (torch.Tensor, x.dtype, x.device)
    assert y.is_contiguous(memory_format=shape)
    assert relative_error(y.double().cpu().numpy(), expected) < TOLERANCE[dtype]
    out = torch.full_like(y, float("nan"))
    version = version_of(out)
    assert conv2d(x, w, padding=1, out=out) is out
    assert relative_error(out.double().cpu().numpy(), expected) < TOLERANCE[dtype]
    assert version_of(out) > version


def test_kinds_may_be_mixed(default, torch, integers, stream):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3, seed=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = conv2d(x, cupy.from_dlpack(w))
        z = conv2d(cupy.from_dlpack(x), w)
        out = cupy.full((1, 16, 6, 6), np.nan, np.float32)
        assert conv2d(x, w, out=out) is out
        assert exact(y, x, w)
    assert type(z) is cupy.ndarray
    assert cupy.array_equal(z, out)
    assert exact(torch.from_dlpack(out), x, w)


def test_activations_gradients_and_graph_functions(default, torch, integers):
    x, w, dy = integers(1, 16, 8, 8), integers(16, 16, 3, 3, seed=1), integers(1, 16, 6, 6, seed=2)
    bias = integers(16, seed=3)
    y = conv2d(x, w, bias=bias, activation="relu")
    assert same(y, torch.relu(conv2d(x, w) + bias[:, None, None]))
    gelu = conv2d(x, w, activation="gelu")  # an activation of its own where cuDNN does not fuse
    assert torch.allclose(gelu, torch.nn.functional.gelu(conv2d(x, w)), rtol=1e-2, atol=1e-2)
    dx = handlepool.conv2d_input_grad(dy, w, tuple(x.shape))
    dw = handlepool.conv2d_weight_grad(x, dy, tuple(w.shape))
    assert same(dx, torch.nn.grad.conv2d_input(x.shape, w.double(), dy.double()))
    assert same(dw, torch.nn.grad.conv2d_weight(x.double(), w.shape, dy.double()))

    @handlepool.graph
    def conv_relu(g, x, w):
        return g.relu(g.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1]))

    x, w = [
        array.to(memory_format=torch.channels_last)  # cuDNN fuses these alone
        for array in (integers(2, 16, 8, 8, dtype="float16"), integers(16, 16, 3, 3, seed=1, dtype="float16"))
    ]
    arrays = conv_relu.run({"x": x, "w": w})
    assert same(arrays["relu.0::OUT_0"], torch.relu(conv2d(x, w)).double())
    assert conv_relu.plan_for(x, w) is conv_relu.plan_for(cupy.from_dlpack(x), cupy.from_dlpack(w))


def test_the_forward_of_an_autograd_function_takes_parameters(default, torch, integers):
    class Conv(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return conv2d(x, w)

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            dy = dy.contiguous()
            return (
                handlepool.conv2d_input_grad(dy, w, tuple(x.shape)),
                handlepool.conv2d_weight_grad(x, dy, tuple(w.shape)),
            )

    x, w = integers(1, 16, 8, 8).requires_grad_(), torch.nn.Parameter(integers(16, 16, 3, 3, seed=1))
    y = Conv.apply(x, w)
    y.sum().backward()
    mine = x.grad, w.grad
    x.grad = w.grad = None
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    torch.nn.functional.conv2d(x64, w64).sum().backward()
    assert same(mine[0], x64.grad)
    assert same(mine[1], w64.grad)


def test_an_empty_batch_is_a_tensor_as_torch_gives(default, torch, integers):
    x, w = integers(0, 16, 8, 8), integers(16, 16, 3, 3)
    y = conv2d(x, w)
    theirs = torch.nn.functional.conv2d(x, w)
    assert (type(y), y.shape, y.dtype, y.device) == (type(theirs), theirs.shape, theirs.dtype, theirs.device)
    assert not handlepool.conv2d_weight_grad(x, theirs, tuple(w.shape)).any()
    assert handlepool.conv2d_input_grad(theirs, w, tuple(x.shape)).shape == x.shape


# Errors


def test_what_cannot_be_taken(default, torch, integers):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3)
    with pytest.raises(ArgumentError, match=r"argument 1, a torch.nn.parameter.Parameter: .* requires grad"):
        conv2d(x, torch.nn.Parameter(w))
    with torch.no_grad():
        conv2d(x, torch.nn.Parameter(w))
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor(size=(1, 16, 8, 8), device="cuda")
    for wrong, text in (
        (x.cpu(), "argument 0, a torch.Tensor: the array is in host memory"),
        (x.cpu().numpy(), "argument 0 is a numpy.ndarray in host memory"),
        (x.to(torch.complex64), "no data type 'complex64'"),
        (x.to("meta"), "memory"),
        (sparse, "without strided memory"),
    ):
        with pytest.raises(ArrayTypeError, match=text):
            conv2d(wrong, w)
    with pytest.raises(ArrayTypeError, match="host memory"):
        conv2d(x, w, out=torch.empty(1, 16, 6, 6))
    with pytest.raises(ArgumentError, match="shares memory"):
        conv2d(x, integers(16, 16, 1, 1), out=x)


@pytest.mark.two_gpus
def test_g3_a_tensor_of_another_device(default, torch, integers):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3)
    with pytest.raises(handlepool.DeviceMismatchError, match="on device 1 and the current device is 0"):
        conv2d(x.to("cuda:1"), w)


# Streams


def late_ones(torch, latch, x, stream):
    """Torch's stream is held back before it writes ones."""
    torch.cuda.synchronize()
    with on(stream):
        latch.hold()
    x.fill_(1)


def test_g6_a_call_runs_on_torchs_current_stream(default, torch, integers, stream, latch, theirs):
    x, w = torch.zeros(1, 16, 8, 8, device="cuda"), integers(16, 16, 3, 3)
    conv2d(x, w)
    late_ones(torch, latch, x, theirs)
    y = conv2d(x, w)
    after = theirs.record_event()
    assert not after.query()
    latch.release()
    assert exact(y, torch.ones_like(x), w)


def test_g6_control_on_cupys_stream_the_call_comes_too_early(default, torch, integers, stream, latch, theirs, comes_to_pass):
    x, w = torch.zeros(1, 16, 8, 8, device="cuda"), integers(16, 16, 3, 3)
    theirs.synchronize()
    x_too, w_too = cupy.from_dlpack(x), cupy.from_dlpack(w)
    conv2d(x_too, w_too)
    late_ones(torch, latch, x, theirs)
    y = conv2d(x_too, w_too)
    assert comes_to_pass(stream)
    latch.release()
    assert not y.get().any()


def test_g6_mixed_arrays_are_ordered_with_both_streams(default, torch, integers, stream, kernels, latch, theirs):
    x, w = torch.zeros(1, 16, 8, 8, device="cuda"), integers(16, 16, 3, 3)
    w_late = cupy.zeros((16, 16, 3, 3), np.float32)
    conv2d(x, w_late)
    late_ones(torch, latch, x, theirs)
    latch.hold()  # CuPy's
    kernels.write(w_late.ravel(), 1)
    y, z = conv2d(x, w_late), conv2d(cupy.from_dlpack(x.detach()), w)
    latch.release()
    assert exact(y, torch.ones_like(x), torch.ones_like(w))
    stream.synchronize()
    assert exact(torch.from_dlpack(z), torch.ones_like(x), w)


@pytest.fixture
def careless_pool(stream):
    """A pool whose driver leaves every wait out."""
    from handlepool.drivers.cuda.driver import CudaDriver

    class Careless(CudaDriver):
        wait_event = staticmethod(lambda pointer, event: None)

    with HandlePool(driver=Careless()) as pool:
        pool.prewarm(states=4)
        yield pool


def branch_over_late_ones(pool, torch, latch, theirs, run):
    """A branch copies what torch's stream writes late; torch's stream copies the branch's result."""
    x = torch.zeros(1 << 16, device="cuda")
    x.clone()
    late_ones(torch, latch, x, theirs)
    with ParallelStates(2, pool=pool).fork() as fork:
        y = run(fork, x)
    z = y.clone()
    return z, theirs.record_event()


def by_argument(fork, x):
    return fork.run(torch_clone, x)


def by_closure(fork, x):
    return fork.run(lambda: torch_clone(x))


def torch_clone(x):
    import torch

    assert torch.cuda.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr
    return x.clone()


@pytest.mark.parametrize("run", [by_argument, by_closure])
def test_g6_a_branch_starts_after_torchs_stream_which_goes_on_after_it(pool, torch, stream, latch, theirs, run):
    z, after = branch_over_late_ones(pool, torch, latch, theirs, run)
    assert not after.query()
    assert torch.cuda.current_stream() == theirs
    latch.release()
    assert (z.cpu() == 1).all()


def test_g6_control_without_the_waits_a_branch_over_tensors_starts_too_early(
    careless_pool, torch, stream, latch, theirs, comes_to_pass
):
    x = torch.zeros(1 << 16, device="cuda")
    x.clone()
    late_ones(torch, latch, x, theirs)
    with ParallelStates(2, pool=careless_pool).fork() as fork:
        y, done = fork.run(lambda x: (x.clone(), cupy.cuda.get_current_stream().record()), x)
    assert comes_to_pass(done)
    latch.release()
    assert not y.cpu().any()


def test_g6_a_branch_whose_tensors_cannot_be_seen_is_right_all_the_same(default, torch, integers, stream, latch, theirs):
    class Model:
        def __init__(self):
            self.x = [[[torch.zeros(1, 16, 8, 8, device="cuda")]]]
            self.w = [[[integers(16, 16, 3, 3)]]]

    model = Model()
    (((x,),),), (((w,),),) = model.x, model.w
    hidden = {"model": SimpleNamespace(inner=model)}
    torch.relu(conv2d(x * 1, w) * 1)
    late_ones(torch, latch, x, theirs)

    def branch(hidden):
        (((x,),),), (((w,),),) = hidden["model"].inner.x, hidden["model"].inner.w
        return conv2d(x * 1, w) * 1

    with ParallelStates(2, pool=default).fork() as fork:
        y = fork.run(branch, hidden)
    latch.release()
    assert exact(y, torch.ones_like(x), w)


def test_g7_branches_over_tensors_are_concurrent(default, torch, integers, stream, latch, theirs, comes_to_pass):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3, seed=1)
    conv2d(x, w)
    torch.cuda.synchronize()
    held, free = torch.zeros(1, 16, 6, 6, device="cuda"), torch.zeros(1, 16, 6, 6, device="cuda")
    torch.cuda.synchronize()
    with ParallelStates(2, pool=default).fork() as fork:
        fork.run(latch.hold)
        fork.run(conv2d, x, w, out=free)
        fork.run(conv2d, x, w, out=held)  # on the state that is held back
        finished = fork.run(lambda: cupy.cuda.get_current_stream().record())
        assert comes_to_pass(finished)
    after = theirs.record_event()
    assert not after.query()
    latch.release()
    assert exact(held, x, w)
    assert exact(free, x, w)


def test_a_map_over_tensors(default, torch, integers, stream, theirs):
    images, w = [integers(1, 16, 8, 8, seed=i) for i in range(12)], integers(16, 16, 3, 3, seed=99)
    states = ParallelStates(4)
    for function in (conv2d, lambda image, w: torch.relu(conv2d(image, w)) - torch.relu(-conv2d(image, w))):
        outputs = states.map(function, images, [w] * 12)
        assert {type(y) for y in outputs} == {torch.Tensor}
        assert all(exact(y, image, w) for y, image in zip(outputs, images, strict=True))


def test_tasks_over_tensors(default, torch, integers, stream, latch, theirs):
    x, w = torch.zeros(1, 16, 8, 8, device="cuda"), integers(16, 16, 3, 3)
    torch.relu(conv2d(x, w))

    def task(x, w):
        assert torch.cuda.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr
        return {"y": [conv2d(x, w) * 1]}

    late_ones(torch, latch, x, theirs)
    with ParallelStateExecutor(2, pool=default) as executor:
        futures = [executor.submit(task, x, w) for _ in range(4)] + [executor.submit(conv2d, x, w)]
        results = [future.result() for future in futures]
    clones = [result["y"][0].clone() for result in results[:4]] + [results[4].clone()]
    after = theirs.record_event()
    assert not after.query()
    latch.release()
    assert all(exact(y, torch.ones_like(x), w) for y in clones)


def test_inline_branches_where_no_side_slot_is_free(default, torch, integers, stream, latch, theirs, monkeypatch):
    x, w = torch.zeros(1, 16, 8, 8, device="cuda"), integers(16, 16, 3, 3)
    conv2d(x, w) * 1
    monkeypatch.setattr(default.internals.device(0).sides, "lease", lambda: None)
    late_ones(torch, latch, x, theirs)
    with ParallelStates(2, pool=default).fork() as fork:
        y = fork.run(conv2d, x, w)
        z = fork.run(lambda x: conv2d(x, w) * 1, x)
    clones = y.clone(), z.clone()
    latch.release()
    assert all(exact(clone, torch.ones_like(x), w) for clone in clones)


# Torch's allocator


def overwrite_what_is_free(torch):
    return [torch.full((BLOCK,), 9.0, device="cuda") for _ in range(4)]


def test_g8_a_tensor_that_a_branch_reads_late_is_kept_to_the_join(pool, torch, stream, latch, theirs):
    torch.cuda.empty_cache()
    y = torch.zeros(BLOCK, device="cuda")
    overwrite_what_is_free(torch)
    theirs.synchronize()

    def late_copy(x):
        latch.hold()
        return y.copy_(x)

    with ParallelStates(2, pool=pool).fork() as fork:
        result = fork.run(late_copy, torch.ones(BLOCK, device="cuda"))
        taken = overwrite_what_is_free(torch)
    taken += overwrite_what_is_free(torch)
    latch.release()
    assert result is y
    assert (y.cpu() == 1).all()


def test_g8_control_without_a_region_a_late_reader_of_a_tensor_reads_what_came_after(torch, stream, latch, theirs):
    torch.cuda.empty_cache()
    y = torch.zeros(BLOCK, device="cuda")
    overwrite_what_is_free(torch)
    x = torch.ones(BLOCK, device="cuda")
    theirs.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with on(side):
            latch.hold()
        y.copy_(x)
    del x
    taken = overwrite_what_is_free(torch)
    theirs.synchronize()
    latch.release()
    side.synchronize()
    assert (y.cpu() == 9).all(), taken


def reuse_what_a_branch_returned(pool, torch, latch, theirs):
    """The caller reads a branch's tensor late and drops it; a branch of another caller allocates on the same side stream."""
    torch.cuda.empty_cache()
    like, target = torch.zeros(1, device="cuda"), torch.zeros(BLOCK, device="cuda")
    target.clone()
    torch.cuda.synchronize()
    states = ParallelStates(1, pool=pool)

    def make(like, value):
        return torch.full((BLOCK,), value, device=like.device), cupy.cuda.get_current_stream().ptr

    with states.fork() as fork:
        y, side = fork.run(make, like, 1.0)
    with on(theirs):
        latch.hold()
    target.copy_(y)
    address = y.data_ptr()
    del y
    another = torch.cuda.Stream()
    with torch.cuda.stream(another), cupy.cuda.Stream(non_blocking=True), states.fork() as fork:
        z, side_too = fork.run(make, like, 7.0)
    assert side_too == side, "another side stream, so this test shows nothing"
    return target, address == z.data_ptr(), another


def test_g8_torchs_allocator_is_told_that_the_caller_uses_what_a_branch_returned(pool, torch, stream, latch, theirs):
    target, reused, another = reuse_what_a_branch_returned(pool, torch, latch, theirs)
    another.synchronize()
    assert not reused
    latch.release()
    assert (target.cpu() == 1).all()


def test_g8_control_untold_torchs_allocator_reuses_the_block(pool, torch, stream, latch, theirs, monkeypatch):
    from handlepool.foreign import torch as integration

    monkeypatch.setattr(integration, "record", lambda value, pointer, device: None)
    target, reused, another = reuse_what_a_branch_returned(pool, torch, latch, theirs)
    another.synchronize()
    assert reused
    latch.release()
    assert (target.cpu() == 7).all()


# Threads


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_sixteen_threads_call_one_graph_function_a_thousand_times_each_on_their_own_streams(
    default, torch, integers, in_threads, kind
):
    @handlepool.graph
    def conv(g, x, w):
        return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])

    x = [integers(1, 16, 8, 8, seed=i) for i in range(16)]
    w = [integers(16, 16, 3, 3, seed=100 + i) for i in range(4)]
    expected = [[torch.nn.functional.conv2d(a.double(), b.double(), padding=1) for b in w] for a in x]
    torch.cuda.synchronize()

    def calls(i):
        if kind == "torch":
            with torch.cuda.stream(torch.cuda.Stream()):
                outputs = torch.stack([conv(x[i], w[n % 4]) for n in range(1000)])
                return [same(outputs[n::4], expected[i][n]) for n in range(4)]
        mine, weights = cupy.from_dlpack(x[i]), [cupy.from_dlpack(b) for b in w]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            outputs = cupy.stack([conv(mine, weights[n % 4]) for n in range(1000)])
            stream.synchronize()
        outputs = torch.from_dlpack(outputs)
        return [same(outputs[n::4], expected[i][n]) for n in range(4)]

    assert in_threads(16, calls) == [[True] * 4] * 16
    assert default.stats()["plans_built"] == 1


# Captures


def test_g9_a_capture_of_torchs(default, torch, integers):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3, seed=1)
    conv2d(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(x, w)
        with ParallelStates(2).fork(stream=torch.cuda.current_stream()) as fork:
            branches = [fork.run(conv2d, x, w) for _ in range(2)]
    x.copy_(integers(1, 16, 8, 8, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    assert all(exact(output, x, w) for output in [y, *branches])
    graph.reset()


def test_g9_a_capture_of_torchs_with_arrays_of_a_stream_outside_is_refused_and_goes_on(default, torch, integers, stream):
    x, w = integers(1, 16, 8, 8), integers(16, 16, 3, 3, seed=1)
    torch.cuda.synchronize()
    w_too = cupy.from_dlpack(w)
    conv2d(x, w_too)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="is not"):
            conv2d(x, w_too)
        with pytest.raises(CaptureError, match="is not"), ParallelStates(2).fork() as fork:
            fork.run(conv2d, x, w)
        y = conv2d(x, w)
    graph.replay()
    torch.cuda.synchronize()
    assert exact(y, x, w)
    graph.reset()


def test_a_recorded_map_over_tensors(default, torch, integers, stream):
    images, w = [integers(1, 16, 8, 8, seed=i) for i in range(6)], integers(16, 16, 3, 3, seed=99)
    torch.cuda.synchronize()
    program = handlepool.record(ParallelStates(3).map, conv2d, images, [w] * 6)
    for i, image in enumerate(images):
        image.copy_(integers(1, 16, 8, 8, seed=50 + i))
    torch.cuda.synchronize()
    program.replay()
    stream.synchronize()
    assert {type(y) for y in program.outputs} == {torch.Tensor}
    assert all(exact(y, image, w) for y, image in zip(program.outputs, images, strict=True))
    program.close()


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is not here")
def test_the_lines_for_torch_of_readme_and_docs(default, torch, integers, monkeypatch):
    for name in ("get_handle", "get_workspace"):
        monkeypatch.setattr(handlepool, name, getattr(default, name), raising=False)
    names = {"torch": torch, "handlepool": handlepool, "x": integers(1, 16, 8, 8), "w": integers(16, 16, 3, 3)}
    names |= {"images": [names["x"]] * 8, "weights": [names["w"]] * 8}
    blocks = [
        block
        for page in ("README.md", "docs/arrays.md")
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "torch" in block
    ]
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)
    assert names["handle"].backend_handle
    assert names["scratch"].nbytes == 1 << 20
    assert exact(names["y"], names["x"], names["w"], padding=1)
    assert all(isinstance(y, torch.Tensor) for y in names["outputs"])


@pytest.mark.parametrize("layout", ["channels_last", "contiguous_format"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_residual_and_a_layer_are_what_torch_makes_of_them(default, torch, theirs, integers, dtype, layout):
    functional = torch.nn.functional
    x, w, add = (integers(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((2, 16, 8, 8), (16, 16, 3, 3), (2, 16, 8, 8))))
    x, w, add = (tensor.contiguous(memory_format=getattr(torch, layout)) for tensor in (x, w, add))
    y = conv2d(x, w, padding=1, add=add, activation="relu")
    assert torch.allclose(y, torch.relu(functional.conv2d(x, w, padding=1) + add), rtol=1e-2)
    rows, weights, bias = integers(4, 64, dtype=dtype), integers(32, 64, dtype=dtype), integers(32, dtype=dtype)
    y = handlepool.linear(rows, weights, bias=bias, activation="relu")
    assert torch.allclose(y, torch.relu(functional.linear(rows, weights, bias)), rtol=1e-2)
    assert torch.allclose(handlepool.matmul(weights, rows.T), weights @ rows.T, rtol=1e-2)
