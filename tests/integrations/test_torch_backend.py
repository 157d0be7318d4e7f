"""The back end of torch.compile. On the host driver."""

import pathlib
import tomllib
import warnings
from importlib import import_module

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from torch import nn  # noqa: E402

from handlepool import ArgumentError  # noqa: E402
from handlepool.integrations.torch import report  # noqa: E402
from handlepool.integrations.torch.backend import handlepool as backend  # noqa: E402


@pytest.fixture(autouse=True)
def place(pool, torch_host):
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.norm.running_mean.normal_()

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture
def net():
    return Net().eval()


def test_torch_finds_the_back_end_by_its_entry_point():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["handlepool"].partition(":")
    assert getattr(import_module(module), name) is backend


def test_g19_a_compiled_model_gives_its_own_values(net):
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    for size in (6, 6, 8, 7, 8):
        x = torch.randn(2, 3, size, size)
        same(compiled(x), net(x))
    found = report(net)
    assert any(each.kernels.get("conv2d_relu") for each in found)
    assert not any(each.left for each in found)


def test_g19_weights_that_change_are_seen(net):
    compiled = torch.compile(net, backend=backend)
    x = torch.randn(2, 3, 6, 6)
    same(compiled(x), net(x))
    net.norm.weight.mul_(2)
    same(compiled(x), net(x))
    net.conv.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    same(compiled(x), net(x))
    net.norm.running_var = torch.rand(8) + 0.5
    same(compiled(x), net(x))
    net.head.weight.data = torch.randn(4, 8)
    same(compiled(x), net(x))


def test_g19_buffers_and_arguments_that_the_model_writes(net):
    class State(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count += x
            x.mul_(2)
            return self.count * x, x

    mine, theirs = State().eval(), State().eval()
    compiled = torch.compile(mine, backend=backend)
    for _ in range(4):
        x = torch.randn(3)
        y = x.clone()
        got, want = compiled(x), theirs(y)
        same(got, want)
        assert got[1] is x
        same(x, y)
        same(mine.count, theirs.count)


def test_g19_python_values_and_control_flow_are_dynamos(net):
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.calls = True, 0

        def forward(self, x, scale=1):
            self.calls += 1
            return x * scale + self.calls if self.up else x - scale

    mine, theirs = Switch().eval(), Switch().eval()
    compiled = torch.compile(mine, backend=backend)
    x = torch.randn(3)
    for scale, up in ((1, True), (2, True), (2, False), (3, True)):
        mine.up = theirs.up = up
        same(compiled(x, scale), theirs(x, scale))


def test_graph_breaks_run_as_torch_runs_them():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.one(x)
            torch._dynamo.graph_break()
            return self.two(torch.relu(y))

    net = Broken().eval()
    compiled = torch.compile(net, backend=backend)
    for _ in range(3):
        x = torch.randn(2, 3)
        same(compiled(x), net(x))
    assert len(report(net)) == 2


def test_gradients_are_torchs(net):
    compiled = torch.compile(net, backend=backend)
    x = torch.randn(2, 3, 6, 6)
    with torch.enable_grad(), pytest.warns(RuntimeWarning, match="no_grad"):
        compiled(x).sum().backward()
    assert net.conv.weight.grad is not None
    same(compiled(x), net(x))


def test_random_operations_are_torchs():
    class Random(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    compiled, x = torch.compile(Random().eval(), backend=backend), torch.zeros(100)
    with pytest.warns(RuntimeWarning, match="random"):
        first = compiled(x)
    assert not torch.equal(first, compiled(x))


def test_options_are_those_of_the_direct_door(net):
    x = torch.randn(2, 3, 6, 6)
    same(torch.compile(net, backend=backend, options={"lanes": 2, "instances": 1})(x), net(x))
    with pytest.raises(ArgumentError, match="lane"):
        backend(net, [x], options={"lane": 2})
    with pytest.raises(ArgumentError, match="mode"):
        backend(net, [x], mode="max-autotune")
