"""Models of torch as programs, on a GPU. Collected only where torch is installed."""

import copy
import threading
import warnings

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from harness.torch_random import made  # noqa: E402 - torch may be missing
from torch import nn  # noqa: E402

from handlepool.integrations.torch import recorded, report, together, width  # noqa: E402
from handlepool.integrations.torch.backend import handlepool as backend  # noqa: E402

ALL = 120  # seconds, of what is expected to happen


@pytest.fixture(autouse=True)
def default(pool, make_default):
    """The test's pool as the default one."""
    make_default(pool)
    torch.cuda.init()
    torch.manual_seed(0)
    # Torch and cuDNN use TF32 for different shapes, so errors in float32 would not compare.
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.no_grad(), exact, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield pool


class Net(nn.Module):
    """Two branches, a gate, a shuffle, attention and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU())
        self.left = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.right = nn.Sequential(
            nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 64, 1), nn.Hardsigmoid())
        self.shuffle = nn.ChannelShuffle(2)
        self.norm, self.attention = nn.LayerNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.stem(x)
        y = torch.cat([self.left(x) + x, self.right(x)], 1)
        y = self.shuffle(y * self.gate(x))
        one, two = nn.functional.max_pool2d(y, 2).split([30, 34], 1)
        rows = torch.cat([two, one], 1).flatten(2).transpose(1, 2)
        rows = rows + self.attention(*[self.norm(rows)] * 3, need_weights=False)[0]
        return self.head(rows.mean(1)), y


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def net(request):
    return Net().eval().cuda().to(request.param).to(memory_format=torch.channels_last)


def images(model, batch=2, side=16):
    x = torch.randn(batch, 3, side, side, device="cuda", dtype=next(model.parameters()).dtype)
    return x.contiguous(memory_format=torch.channels_last)


def close(model, ours, x):
    """The values are as near to float64's as torch's own, within a factor."""
    wide = copy.deepcopy(model).double()
    for got, own, right in zip(ours(x), model(x), wide(x.double()), strict=True):
        scale = right.abs().max()
        error, torchs = ((each.double() - right).abs().max() / scale for each in (got, own))
        assert error <= 3 * torchs + 1e-6, (error, torchs)
        assert got.stride() == own.stride()


@pytest.mark.parametrize("options", [{}, {"tune": True, "seconds": 0.3, "fallback": None}], ids=["plain", "tuned"])
def test_g19_a_model_gives_its_own_values(net, options):
    ours = recorded(net, strict=True, **options)
    for batch in (1, 3, 1, 3):
        for _ in range(3):
            close(net, ours, images(net, batch))
    assert "conv2d" in str(report(ours))


@pytest.mark.parametrize("seed", range(12))
def test_g19_a_random_network_has_the_values_of_float64(seed):
    net, shape = made(seed)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    net = net.cuda().to(dtype)
    ours = recorded(net, strict=True)
    for call in range(3):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if seed % 2 else x
        if call == 2:
            for weight in net.parameters():
                weight.mul_(1.1).add_(0.01)
        wide = copy.deepcopy(net).double()
        for got, own, right in zip(ours(x), net(x), wide(x.double()), strict=True):
            scale = right.abs().max() + 1e-6
            error, torchs = ((each.double() - right).abs().max() / scale for each in (got, own))
            assert error <= 3 * torchs + 20 * torch.finfo(dtype).eps, (error, torchs)


def test_g19_contiguous_images_and_other_modes(net):
    ours = recorded(net, strict=True)
    x = torch.randn(2, 3, 16, 16, device="cuda", dtype=next(net.parameters()).dtype)
    for _ in range(3):
        close(net, ours, x)
    with torch.inference_mode():
        close(net, ours, images(net))
        close(net, ours, images(net))


def test_g19_weights_that_change_are_seen(net):
    ours = recorded(net, strict=True)
    close(net, ours, images(net))
    net.stem[0].weight.mul_(1.5)
    net.left[1].running_mean.add_(0.5)
    close(net, ours, images(net))
    (program,) = ours.programs
    assert program.recorded.stats().recorded == 1
    net.right[0].weight = nn.Parameter(torch.randn_like(net.right[0].weight))
    close(net, ours, images(net))
    net.head[0].weight.data = torch.randn_like(net.head[0].weight)
    close(net, ours, images(net))


def test_many_models_one_after_the_other_leave_no_program_behind():
    taken = []
    for _ in range(6):
        net = Net().eval().cuda().half().to(memory_format=torch.channels_last)
        ours = recorded(net, strict=True)
        for _ in range(2):
            close(net, ours, images(net))
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved())
        del net, ours
    assert taken[-1] <= taken[2] * 1.5


def test_outputs_that_are_kept_stay_as_they_were(net):
    ours, kept = recorded(net, strict=True), []
    for number in range(60):
        x = images(net)
        value = ours(x)[0]
        if number < 20:
            kept.append((value, value.clone()))
        # Memory that is freed gets other values before it is used again.
        torch.full((64, 1024), float("nan"), device="cuda")
    assert all(torch.equal(value, copied) for value, copied in kept)


@pytest.mark.parametrize("door", ["recorded", "backend"])
def test_threads_on_streams_of_their_own_get_their_own_values(door):
    net = Net().eval().cuda().half().to(memory_format=torch.channels_last)
    ours = recorded(net, strict=True) if door == "recorded" else torch.compile(net, backend=backend, dynamic=False)
    xs = [images(net) for _ in range(16)]
    rights = [net(x)[0] for x in xs]
    ours(xs[0])
    ours(xs[0])
    torch.cuda.synchronize()
    errors = []

    def work(number):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    value = ours(xs[number])[0]
                    torch.cuda.current_stream().synchronize()
                    torch.testing.assert_close(value, rights[number], rtol=2e-2, atol=2e-2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ALL)
    assert not errors, errors[0]


@pytest.mark.parametrize("kernels", ["torch", "inductor"])
def test_g19_models_together_give_their_own_values(kernels):
    nets = [Net().eval().cuda().half().to(memory_format=torch.channels_last) for _ in range(3)]
    ours = together(*nets, kernels=kernels, strict=True)
    for _ in range(4):
        x = images(nets[0])
        for got, net in zip(ours(x), nets, strict=True):
            torch.testing.assert_close(got, net(x), rtol=2e-2, atol=2e-2)
    nets[1].head[2].weight.mul_(2)
    for _ in range(3):
        x = images(nets[0])
        for got, net in zip(ours(x), nets, strict=True):
            torch.testing.assert_close(got, net(x), rtol=2e-2, atol=2e-2)


def test_g19_a_compiled_model_gives_its_own_values(net):
    ours = torch.compile(net, backend=backend, dynamic=False, options={"strict": True})
    for batch in (1, 2, 1):
        close(net, ours, images(net, batch))
    net.stem[0].weight.mul_(1.5)
    close(net, ours, images(net))


def test_the_quicker_of_inductors_and_our_kernels_stays():
    net = Net().eval().cuda().half().to(memory_format=torch.channels_last)
    ours = recorded(net, strict=True, tune=True, seconds=0.3)
    for _ in range(3):
        close(net, ours, images(net))
    net.stem[0].weight.mul_(1.5)
    close(net, ours, images(net))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_g19_convolutions_of_rows_give_their_own_values(dtype):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up = nn.Conv1d(80, 64, 7, padding=3), nn.ConvTranspose1d(64, 32, 8, stride=4, padding=2)
            self.second, self.third = nn.Conv1d(32, 32, 3, padding=3, dilation=3), nn.Conv1d(32, 1, 7, padding=3)

        def forward(self, x):
            y = self.up(nn.functional.leaky_relu(self.first(x), 0.1))
            y = self.second(nn.functional.leaky_relu(y, 0.1)) + y
            return (torch.tanh(self.third(y)), y)

    model = Rows().eval().cuda().to(dtype)
    ours = recorded(model, strict=True)
    for x in (torch.randn(1, 80, 50, device="cuda"), torch.randn(2, 50, 80, device="cuda").transpose(1, 2)):
        for _ in range(3):
            close(model, ours, (x + torch.randn_like(x)).to(dtype))
    assert {name for each in report(ours) for name in each.kernels} >= {"conv1d", "conv1d_add", "conv_transpose1d"}


def test_the_width_is_measured_with_the_times_of_this_gpu():
    chain = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)]).eval().cuda().half()
    x = torch.randn(1, 32, 32, 32, device="cuda").half().contiguous(memory_format=torch.channels_last)
    found = width(chain, x)
    assert found.device == torch.cuda.get_device_name()
    assert found.width == pytest.approx(1.0)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([copy.deepcopy(chain) for _ in range(6)])

        def forward(self, x):
            return tuple([part(x) for part in self.parts])

    found = width(Several().eval(), x)
    assert found.nodes == 6 * found.longest
    assert found.width > 4
    # Six chains of small kernels run beside each other.
    assert found.gain > 2


def test_a_model_on_the_cpu_is_torchs():
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 8, 8)
    with pytest.warns(RuntimeWarning, match="cpu"):
        assert torch.equal(recorded(net)(x), net(x))
    with pytest.warns(RuntimeWarning, match="2 devices"), pytest.raises(RuntimeError):
        recorded(net.cuda())(x)


def test_a_call_inside_a_cuda_graph_becomes_a_part_of_it():
    net = Net().eval().cuda().half().to(memory_format=torch.channels_last)
    ours, x = recorded(net, strict=True), images(net)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            net(x)
            ours(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            value = ours(x)
        x.copy_(images(net))
        graph.replay()
        stream.synchronize()
        torch.testing.assert_close(value, net(x), rtol=2e-2, atol=2e-2)
