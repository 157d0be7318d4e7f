"""The width of models of torch. On the host driver, whose times are NumPy's."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from torch import nn  # noqa: E402

from handlepool import ArgumentError, CaptureError  # noqa: E402
from handlepool.integrations.torch import Width, recorded, width  # noqa: E402


@pytest.fixture(autouse=True)
def place(pool, torch_host):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


class Branches(nn.Module):
    """Four convolutions of one image, and their sum's convolution."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(8, 8, size, padding="same") for size in (1, 3, 5, 7)])
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        return self.last(torch.cat([branch(x) for branch in self.branches], 1))


def test_a_chain_has_the_width_one_and_branches_have_more():
    x = torch.randn(1, 8, 6, 6)
    chain = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]).eval()
    found = width(chain, x)
    assert (found.nodes, found.longest, found.lanes) == (3, 3, 1)
    assert found.width == pytest.approx(1.0)
    found = width(Branches().eval(), x)
    assert (found.nodes, found.longest, found.lanes) == (6, 3, 4)
    assert found.width > 1


def test_the_width_is_the_limit_and_the_gain_is_of_a_replay():
    found = Width(nodes=6, longest=3, total=60.0, critical=30.0, replay=40.0, lanes=4, device="a GPU")
    assert (found.width, found.gain) == (2.0, 1.5)
    assert "CPU" not in str(found)
    empty = Width(nodes=0, longest=0, total=0.0, critical=0.0, replay=0.0, lanes=1, device="a GPU")
    assert (empty.width, empty.gain) == (1.0, 1.0)


def test_times_of_the_host_driver_are_named_so():
    found = width(Branches().eval(), torch.randn(1, 8, 6, 6))
    assert found.device == "the host driver"
    assert "CPU" in str(found)
    assert 0 < found.critical <= found.total
    assert found.width >= 1


def test_a_recorded_model_is_measured_with_its_own_program():
    model, x = Branches().eval(), torch.randn(1, 8, 6, 6)
    ours = recorded(model, lanes=2, strict=True)
    assert width(ours, x).lanes == 2
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(ours.programs) == 1


def test_several_arguments_and_names_are_passed_on():
    class Sum(nn.Module):
        def forward(self, x, *, y):
            return (x + y) * 2

    assert width(Sum().eval(), torch.ones(2, 3), y=torch.ones(2, 3)).nodes == 1


def test_a_model_without_a_program_is_refused_with_the_reason():
    x = torch.randn(1, 8, 6, 6)
    with pytest.raises(CaptureError, match="training mode"):
        width(Branches(), x)

    class Decides(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="trace"):
        width(Decides().eval(), x)
    with pytest.warns(RuntimeWarning, match="leaves Decides"), pytest.raises(CaptureError, match="trace"):
        width(recorded(Decides().eval()), x)
    with pytest.raises(ArgumentError, match="function"):
        width(lambda x: x, x)


def test_a_model_of_constants_has_no_program():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            return self.value * 2

    with pytest.raises(CaptureError, match="constants"):
        width(Constant().eval(), torch.ones(2))
