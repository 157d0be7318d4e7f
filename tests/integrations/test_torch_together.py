"""Several models of torch as one program. On the host driver."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from torch import nn  # noqa: E402

from handlepool import ArgumentError, CaptureError  # noqa: E402
from handlepool.integrations.torch import report, together  # noqa: E402


@pytest.fixture(autouse=True)
def place(pool, torch_host):
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@pytest.fixture
def models():
    made = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, count, 1)) for count in (2, 3, 4)]
    return [each.eval() for each in made]


def same(values, wants):
    torch.testing.assert_close(tuple(values), tuple(wants), rtol=1e-5, atol=1e-5)


def test_each_model_has_its_value_with_one_tuple_for_all(models):
    ours = together(*models, strict=True)
    for size in (8, 6, 8, 8, 6):
        x = torch.randn(2, 3, size, size)
        same(ours(x), [each(x) for each in models])
        same(ours((x,)), [each(x) for each in models])
    assert ours.recorded.stats().keys == 2
    assert report(ours)[0].torch == {("Sequential", ""): 3}


def test_each_model_has_its_value_with_a_tuple_each(models):
    ours = together(*models, strict=True)
    for _ in range(4):
        xs = [torch.randn(1, 3, 6 + number, 6) for number in range(3)]
        same(ours(*xs), [each(x) for each, x in zip(models, xs, strict=True)])
    x = torch.randn(1, 3, 8, 8)
    for _ in range(3):
        same(ours(x, (x,), x), [each(x) for each in models])


def test_the_models_are_on_lanes_of_their_own(models):
    ours = together(*models, strict=True)
    x = torch.randn(1, 3, 8, 8)
    for _ in range(2):
        ours(x)
    assert "3 nodes, 0 edges, 3 of 8 lanes" in ours.recorded.explain()


def test_g19_weights_that_change_are_seen(models):
    ours, x = together(*models, strict=True), torch.randn(1, 3, 8, 8)
    for _ in range(2):
        ours(x)
    models[0][0].weight.mul_(2)
    models[1][0].bias.data.add_(1)
    same(ours(x), [each(x) for each in models])
    assert ours.recorded.stats().recorded == 1
    models[2][3].weight = nn.Parameter(torch.randn(4, 8, 1, 1))
    for _ in range(3):
        same(ours(x), [each(x) for each in models])
    models[0][0].weight.data = torch.randn(8, 3, 3, 3)
    for _ in range(3):
        same(ours(x), [each(x) for each in models])


def test_g19_models_that_write_a_buffer_are_torchs(models):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * self.count

    counting = Counting().eval()
    ours, other = together(models[0], counting), copy.deepcopy(counting)
    x = torch.randn(1, 3, 8, 8)
    same(ours(x), [models[0](x), other(x)])
    with pytest.warns(RuntimeWarning, match="buffer"):
        same(ours(x), [models[0](x), other(x)])
    for _ in range(3):
        same(ours(x), [models[0](x), other(x)])
    assert counting.count == other.count == 5


def test_g19_an_argument_that_a_model_writes_is_torchs():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    ours = together(InPlace().eval(), nn.ReLU().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            x, y = torch.ones(3), torch.ones(3)
            values = ours(x, y)
            assert values[0].tolist() == x.tolist() == [2, 2, 2]


def test_gradients_and_training_are_torchs(models):
    ours, x = together(*models), torch.randn(1, 3, 8, 8)
    ours(x)
    with torch.enable_grad(), pytest.warns(RuntimeWarning, match="no_grad"):
        ours(x)[0].sum().backward()
    assert models[0][0].weight.grad is not None
    same(ours(x), [each(x) for each in models])
    models[1].train()
    x = torch.randn(4, 3, 8, 8)
    others = copy.deepcopy(models)
    same(ours(x), [each(x) for each in others])
    same(models[1].buffers(), others[1].buffers())
    with pytest.raises(CaptureError, match="training"):
        together(*models, strict=True)(x)


def test_a_model_on_another_device_is_torchs(models):
    with pytest.warns(RuntimeWarning, match="2 devices"), pytest.raises(RuntimeError):
        together(models[0], copy.deepcopy(models[1]).to("meta"))(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("given", "options", "match"),
    [
        ((), {}, "no model"),
        ((lambda x: x,), {}, "Module"),
        ((nn.ReLU(),), {"kernels": "jax"}, "kernels"),
        ((nn.ReLU(),), {"lanes": 0}, "lanes"),
    ],
)
def test_other_arguments_are_refused(given, options, match):
    with pytest.raises(ArgumentError, match=match):
        together(*given, **options)


def test_a_wrong_number_of_tuples_is_refused(models):
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ArgumentError, match="2 tuples of arguments were given for 3 models"):
        together(*models)(x, x)
