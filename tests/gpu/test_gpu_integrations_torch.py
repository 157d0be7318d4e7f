"""Convolutions of torch's dispatcher, and torch's modules as branches, on a GPU. Collected only where torch is installed."""

import itertools

import pytest
from harness.insides import dynamo, torch_sleep

import handlepool
from handlepool import ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-4}
GEOMETRIES = [{"padding": 1}, {"stride": 2, "padding": (1, 0)}, {"dilation": (2, 1), "padding": 2}, {"groups": 2, "padding": 1}]
SLEEP = 40_000_000
"""Cycles; some twenty milliseconds."""


@pytest.fixture(autouse=True)
def default(pool, make_default):
    """The test's pool as the default one."""
    make_default(pool)
    return pool


@pytest.fixture
def torch():
    import torch

    torch.cuda.init()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield torch


@pytest.fixture
def conv2d(torch):
    from handlepool.integrations.torch import conv2d

    return conv2d


def random(*shape, seed=0, dtype="float32", layout="contiguous"):
    import torch

    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", getattr(torch, dtype))
    if layout == "channels last":
        values = values.to(memory_format=torch.channels_last)
    return values.requires_grad_()


# Convolutions


@pytest.mark.filterwarnings("default")  # torch's own, once in a process, of a plan that it could not build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_an_empty_batch_has_torchs_values_and_gradients(torch, conv2d, dtype, layout, geometry):
    groups = geometry.get("groups", 1)
    x, w, b = (
        random(0, 16, 15, 14, dtype=dtype, layout=layout),
        random(32, 16 // groups, 3, 3, dtype=dtype),
        random(32, dtype=dtype),
    )
    y, theirs = conv2d(x, w, b, **geometry), torch.nn.functional.conv2d(x, w, b, **geometry)
    assert y.shape == theirs.shape
    for mine, wanted in zip(*(torch.autograd.grad(each.sum(), (x, w, b)) for each in (y, theirs)), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.filterwarnings("default")  # torch's own, once in a process, of a plan that it could not build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_and_gradients_are_torchs(torch, conv2d, dtype, layout, geometry):
    groups = geometry.get("groups", 1)
    x = random(2, 16, 15, 14, dtype=dtype, layout=layout)
    w, b = random(32, 16 // groups, 3, 3, seed=1, dtype=dtype, layout=layout), random(32, seed=2, dtype=dtype)
    y = conv2d(x, w, b, **geometry)
    exact = [value.detach().double().requires_grad_() for value in (x, w, b)]
    expected = torch.nn.functional.conv2d(*exact, **geometry)
    assert y.stride() == torch.nn.functional.conv2d(x, w, b, **geometry).stride()
    dy = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, w, b), dy)]
    right = [expected, *torch.autograd.grad(expected, exact, dy.double())]
    for got, value in zip(found, right, strict=True):
        assert got.dtype is x.dtype
        assert float((got.double() - value).norm() / value.norm()) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_in_groups_and_mixed_layouts_are_right_or_typed_errors(torch, conv2d, dtype):
    layouts, right, refused = ("contiguous", "channels last"), 0, 0
    steps = ({"padding": 1}, {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)})
    for groups, of_x, of_w, geometry in itertools.product((1, 2, 5, 10), layouts, layouts, steps):
        x = random(2, 10, 9, 8, dtype=dtype, layout=of_x)
        w = random(20, 10 // groups, 3, 3, seed=1, dtype=dtype, layout=of_w)
        exact = [value.detach().double().requires_grad_() for value in (x, w)]
        expected = torch.nn.functional.conv2d(*exact, groups=groups, **geometry)
        dy = random(*expected.shape, seed=2, dtype=dtype).detach()
        try:
            found = torch.autograd.grad(conv2d(x, w, groups=groups, **geometry), (x, w), dy)
        except (handlepool.ArgumentError, handlepool.GraphNotSupportedError):
            refused += 1
            continue
        for got, value in zip(found, torch.autograd.grad(expected, exact, dy.double()), strict=True):
            error = float((got.double() - value).norm() / value.norm())
            assert error < TOLERANCE[dtype], (groups, of_x, of_w, geometry)
        right += 1
    assert right >= refused


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("geometry", [{"padding": 1, "stride": 2}, {"groups": 2}], ids=str)
def test_gradcheck_in_float32_without_tf32(torch, conv2d, geometry):
    arguments = random(1, 4, 6, 6), random(4, 4 // geometry.get("groups", 1), 3, 3, seed=1), random(4, seed=2)

    def function(*arguments):
        return conv2d(*arguments, allow_tf32=False, **geometry)

    tolerance = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2, "nondet_tol": 1e-3}
    assert torch.autograd.gradcheck(function, arguments, **tolerance)
    assert torch.autograd.gradgradcheck(function, arguments, **tolerance | {"atol": 1e-1})


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_control_gradcheck_sees_a_gradient_that_is_wrong(torch, conv2d, monkeypatch):
    right = handlepool.conv2d_input_grad
    monkeypatch.setattr(handlepool, "conv2d_input_grad", lambda *a, **k: right(*a, **k).mul_(1.1))
    arguments = random(1, 4, 6, 6), random(4, 4, 3, 3, seed=1)
    tolerance = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2, "nondet_tol": 1e-3}
    assert not torch.autograd.gradcheck(conv2d, arguments, **tolerance, raise_exception=False)


@pytest.mark.filterwarnings("default")  # torch's own, of how it compiles its rules
@pytest.mark.parametrize("geometry", [{"padding": 1}, {"groups": 2, "stride": 2}], ids=str)
def test_derivatives_forward_and_by_torch_func_are_torchs(torch, conv2d, geometry):
    f, forward = torch.func, torch.autograd.forward_ad
    shapes = (3, 8, 9, 8), (16, 8 // geometry.get("groups", 1), 3, 3), (16,)
    points = [random(*shape, seed=seed).detach() for seed, shape in enumerate(shapes)]
    tangents = [random(*shape, seed=seed + 3).detach() for seed, shape in enumerate(shapes)]

    def run(convolve, points, tangents):
        x, w, b = points

        def bent(x, w, b):
            return convolve(x, w, b, **geometry).sin()

        def loss(*operands):
            return bent(*operands).square().sum()

        with forward.dual_level():
            dual = forward.unpack_dual(bent(x, forward.make_dual(w, tangents[1]), forward.make_dual(b, tangents[2])))
        gradient = f.grad(loss, argnums=(0, 1, 2))
        each = f.vmap(f.grad(lambda w, x: loss(x[None], w, b)), in_dims=(None, 0))(w, x)
        return [
            *dual,
            *f.jvp(bent, (x, w, b), tuple(tangents)),
            *gradient(x, w, b),
            *f.jvp(gradient, (x, w, b), tuple(tangents))[1],
            f.jacfwd(lambda b: bent(x, w, b).sum((0, 2, 3)))(b),
            f.jacrev(lambda b: bent(x, w, b).sum((0, 2, 3)))(b),
            each,
            f.vmap(bent, in_dims=(0, None, None))(torch.stack([x, 2 * x]), w, b),
            f.vmap(bent, in_dims=(None, 0, 0))(x, torch.stack([w, 2 * w]), torch.stack([b, -b])),
        ]

    found = run(conv2d, points, tangents)
    exact = run(torch.nn.functional.conv2d, [v.double() for v in points], [v.double() for v in tangents])
    for got, value in zip(found, exact, strict=True):
        assert float((got.double() - value).norm() / value.norm()) < 1e-3


def test_a_tangent_is_refused_by_graph_functions_branches_operations_and_programs(torch, pool):
    x, tangent = random(2, 8, 6, 6).detach(), random(2, 8, 6, 6, seed=1).detach()
    doubled = handlepool.operation(lambda x: 2 * x)
    program = handlepool.record(handlepool.mean2d, x.clone(), pool=pool)
    forward = torch.autograd.forward_ad

    def branch(function):
        def call(x):
            with ParallelStates(2, pool=pool).fork() as fork:
                return fork.run(function, x)

        return call

    for call in (handlepool.mean2d, branch(handlepool.mean2d), branch(lambda x: 2 * x), branch(doubled), program):
        with forward.dual_level(), pytest.raises(handlepool.ArgumentError, match="has a tangent of torch's forward mode"):
            call(forward.make_dual(x, tangent))
        with pytest.raises(handlepool.ArgumentError, match=r"is inside a transform of torch\.func"):
            torch.func.vmap(call)(x[None])


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_opcheck(torch, conv2d, layout):
    x, w, b = random(2, 8, 9, 8, layout=layout), random(8, 8, 3, 3, seed=1, layout=layout), random(8, seed=2)
    dy = torch.randn_like(conv2d(x, w, b, stride=2, padding=1)).requires_grad_()
    ops, options = torch.ops.handlepool, ([2, 2], [1, 1], [1, 1], 1, False, True)
    for operation, arguments in (
        (ops.conv2d, (x, w, b)),
        (ops.conv2d_input_grad, (dy, w, list(x.shape))),
        (ops.conv2d_weight_grad, (x, dy, list(w.shape))),
    ):
        assert set(torch.library.opcheck(operation, (*arguments, *options)).values()) == {"SUCCESS"}


def network(torch, convolve):
    """Two convolutions, with what torch has around them."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 16, 3)
            self.norm, self.last = torch.nn.BatchNorm2d(16), torch.nn.Linear(16, 4)

        def forward(self, x):
            x = torch.relu(self.norm(convolve(x, self.first.weight, self.first.bias, padding=1)))
            return self.last(convolve(x, self.second.weight, self.second.bias, stride=2).mean((2, 3)))

    return Network().cuda()


def trained(torch, network, steps=3, seed=0):
    """The losses of a few steps, and the parameters after them."""
    optimizer, losses = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9), []
    x, labels = random(4, 8, 16, 16, seed=seed).detach(), torch.arange(4, device="cuda")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in network.parameters())]


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_compiled_network_trains_whole(torch, conv2d):
    dynamo().reset()
    compiled = torch.compile(network(torch, conv2d), fullgraph=True)
    expected = trained(torch, network(torch, torch.nn.functional.conv2d))
    torch.testing.assert_close(trained(torch, compiled), expected, rtol=2e-3, atol=1e-4)


def test_training_on_four_streams_in_four_threads_at_once_is_torchs(torch, conv2d, in_threads):
    expected = [trained(torch, network(torch, torch.nn.functional.conv2d), seed=i) for i in range(4)]
    networks = [network(torch, conv2d) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()

    def train(i):
        with torch.cuda.stream(streams[i]):
            found = trained(torch, networks[i], seed=i)
            streams[i].synchronize()
            return found

    for found, right in zip(in_threads(4, train), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-4)


def test_a_captured_training_pass_is_replayed(torch, conv2d):
    w = random(16, 8, 3, 3, seed=1)
    x, y = random(2, 8, 12, 12), random(2, 8, 12, 12, seed=3).detach()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(conv2d(x, w, padding=1).square().sum(), w)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        (dw,) = torch.autograd.grad(conv2d(x, w, padding=1).square().sum(), w)
    with torch.no_grad():
        x.copy_(y)
    graph.replay()
    (expected,) = torch.autograd.grad(torch.nn.functional.conv2d(y, w, padding=1).square().sum(), w)
    torch.testing.assert_close(dw, expected, rtol=1e-3, atol=1e-2)
    graph.reset()


def test_a_tensor_on_another_device_is_a_typed_error(torch, conv2d):
    with pytest.raises(handlepool.DeviceMismatchError, match="w is on cpu and x is on cuda:0"):
        conv2d(random(1, 8, 6, 6), random(8, 8, 3, 3, seed=1).cpu())


@pytest.mark.two_gpus
def test_tensors_on_two_devices_are_a_typed_error_and_the_other_device_works(torch, conv2d):
    x, w = random(1, 8, 6, 6), random(8, 8, 3, 3, seed=1)
    with pytest.raises(handlepool.DeviceMismatchError, match="w is on cuda:1 and x is on cuda:0"):
        conv2d(x, w.to("cuda:1"))
    with torch.cuda.device(1):
        y = conv2d(x.to("cuda:1"), w.to("cuda:1"))
    torch.testing.assert_close(y.cpu(), torch.nn.functional.conv2d(x, w).cpu(), rtol=1e-4, atol=1e-4)


# Modules as branches


@pytest.fixture
def late(torch):
    """A convolution that keeps its stream busy first."""

    class Late(torch.nn.Module):
        def __init__(self, seed=0, cycles=SLEEP):
            super().__init__()
            torch.manual_seed(seed)
            self.convolution, self.cycles = torch.nn.Conv2d(8, 8, 3, padding=1), cycles

        def forward(self, x):
            torch_sleep(self.cycles)
            return self.convolution(x)

    def make(*arguments):
        return Late(*arguments).cuda()

    return make


@pytest.fixture
def warm(torch, late, pool):
    """Every kernel is loaded, and what modules of this kind return is known."""
    states, x = ParallelStates(4, pool=pool), random(2, 8, 12, 12).detach()
    with torch.no_grad():
        for _ in range(2):
            with states.fork() as fork:
                for seed in range(4):
                    fork.run(late(seed, 0), x)
    torch.cuda.synchronize()
    return states, x


def test_g17_a_module_is_ordered_after_the_one_whose_output_it_reads(torch, late, warm):
    states, x = warm
    first, second = late(0), late(1, 0)
    with torch.no_grad():
        with states.fork() as fork:
            y = fork.run(second, fork.run(first, x))
        torch.testing.assert_close(y, second(first(x)))


def test_g17_control_a_module_in_a_fork_without_order_reads_too_early(torch, late, warm):
    states, x = warm
    first, second = late(0), late(1, 0)
    with torch.no_grad():
        expected = second(first(x))
        torch.cuda.synchronize()
        for image in (-x, x):  # the first leaves other values in the blocks that the second takes
            with states.fork(ordered=False) as fork:
                middle = fork.run(first, image)
                y = fork.run(second, middle)
        torch.cuda.synchronize()
        assert not torch.allclose(y, expected, rtol=1e-3, atol=1e-3)


def test_g17_modules_that_share_a_normalization_in_training_run_one_after_the_other(torch, warm):
    states, x = warm

    class Normalized(torch.nn.Module):
        def __init__(self, norm, cycles):
            super().__init__()
            self.norm, self.cycles = norm, cycles

        def forward(self, x):
            torch_sleep(self.cycles)
            return self.norm(x)

    def run(call):
        norm = torch.nn.BatchNorm2d(8).cuda()
        with torch.no_grad():
            for cycles, scale in ((0, 1), (SLEEP, 2), (0, 3)):
                call(Normalized(norm, cycles), scale * x)
        return norm

    with states.fork() as fork:
        norm = run(fork.run)
    expected = run(lambda module, x: module(x))
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    assert norm.num_batches_tracked == 3


@pytest.mark.alone  # it takes times
def test_g7_modules_overlap(torch, late, warm):
    states, x = warm
    modules = [late(seed) for seed in range(4)]

    def milliseconds(run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def branches():
        with states.fork() as fork:
            for module in modules:
                fork.run(module, x)

    with torch.no_grad():
        one_after_the_other = milliseconds(lambda: [module(x) for module in modules])
        assert milliseconds(branches) < 0.5 * one_after_the_other


def test_modules_in_branches_have_their_gradients(torch, conv2d, warm):
    states, x = warm

    class Convolution(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.w = torch.nn.Parameter(random(8, 8, 3, 3, seed=seed).detach())

        def forward(self, x):
            return conv2d(x, self.w, padding=1)

    modules = [Convolution(seed) for seed in range(4)]
    with states.fork() as fork:
        outputs = [fork.run(module, x) for module in modules]
    torch.stack(outputs).square().sum().backward()
    for module in modules:
        w = module.w.detach().requires_grad_()
        torch.nn.functional.conv2d(x, w, padding=1).square().sum().backward()
        torch.testing.assert_close(module.w.grad, w.grad, rtol=1e-3, atol=1e-2)
