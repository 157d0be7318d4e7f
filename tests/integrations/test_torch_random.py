"""Random networks of torch, recorded on the host driver, have the values of float64's."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from harness.torch_random import made  # noqa: E402

from handlepool.integrations.torch import recorded  # noqa: E402


@pytest.mark.parametrize("seed", [*range(10), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 60)]])
def test_g19_a_random_network_has_the_values_of_float64(seed, pool, torch_host):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, shape = made(seed)
        ours = recorded(net, strict=True)
        for call in range(3):
            x = torch.randn(shape)
            x = x.contiguous(memory_format=torch.channels_last) if seed % 2 else x
            if call == 2:
                for weight in net.parameters():
                    weight.mul_(1.1).add_(0.01)
            wide = copy.deepcopy(net).double()
            for got, own, right in zip(ours(x), net(x), wide(x.double()), strict=True):
                assert (got.shape, got.dtype) == (own.shape, own.dtype)
                scale = right.abs().max() + 1e-6
                error, torchs = ((each - right).abs().max() / scale for each in (got, own))
                assert error <= 3 * torchs + 1e-5
