"""The workloads of the benchmark build, and a program computes their own values. Small sizes, on the host driver."""

import importlib
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from harness.torch_host import torchvision  # noqa: E402

from handlepool.integrations.torch import recorded, report  # noqa: E402

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    *("hrnet_w18", "nasnetalarge", "pnasnet5large", "retinanet", "fcos", "ssdlite", "unets", "unetplusplus", "hifigan"),
    *("cameras", "eight_unlike", "scene", "pyramid"),
)
LEFT = ("linear", "matmul")
"""Operations that torch computes in float32, where cuDNN has TF32 alone."""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_names_are_those_of_the_benchmark(module):
    assert {*NAMES, "hifigan_float32"} == {*module("workloads").WORKLOADS}


def test_layers_are_scaled_to_values_of_a_usual_size(module):
    ways = module("torch_ways")
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5), torch.nn.Linear(5, 64, bias=False)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data *= 100
    work = ways.Work(torch, [torch.nn.Sequential(*layers).eval()], [(16, 3, 8, 8)])
    ways.scaled(torch, work, "cpu")
    with torch.no_grad():
        (x,) = work.draw("cpu", torch.float32)
        assert 0.5 < float((layers[0](x) - layers[0].bias.reshape(-1, 1, 1)).std()) < 2
        assert float(work.model(x).std()) < 500
    scaled = layers[0].weight.clone()
    work.model(x)
    torch.testing.assert_close(layers[0].weight, scaled, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_gives_its_own_values(name, module, pool, torch_host):
    workloads, ways = module("workloads"), module("torch_ways")
    if torchvision() is None:
        pytest.skip("torchvision is not installed")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            work = workloads.made(torch, name, True, "cpu")
        except ImportError as error:
            pytest.skip(str(error))
        ours = recorded(work.model, strict=True)
        draws = [work.draw("cpu", torch.float32) for _ in range(2)]
        got = [[each.clone() for each in ways.flat(ours(*xs))] for xs in draws]
        eager = [ways.flat(work.model(*xs)) for xs in draws]
        work.model.double()
        right = [ways.flat(work.model(*[x.double() for x in xs])) for xs in draws]
    # Torch's own error has some scatter at two inputs.
    assert error_of(got, right) <= 2 * error_of(eager, right) + 1e-6
    (found,) = report(ours)
    assert {operation for operation, _ in found.torch} <= {*LEFT}


def error_of(values, right):
    pairs = [pair for outs, wants in zip(values, right, strict=True) for pair in zip(outs, wants, strict=True)]
    return max(float((out.double() - want).abs().max() / want.abs().max()) for out, want in pairs)
