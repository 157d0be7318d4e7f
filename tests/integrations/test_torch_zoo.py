"""Models of torchvision and timm give their own values on the host driver, or are left to torch with a reason."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from harness import torch_zoo  # noqa: E402 - it needs torch

from handlepool.integrations.torch import recorded, report  # noqa: E402

leaves = torch.utils._pytree.tree_leaves


NAMES = (*torch_zoo.TORCHVISION, *torch_zoo.TIMM)
BRIEF = ("squeezenet1_0", "shufflenet_v2_x0_5", "tinynet_e", "lcnet_050")
"""Small ones, which continuous integration runs."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name if name in BRIEF else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_a_model_gives_its_own_values(name, pool, torch_host):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        made = torch_zoo.made(name)
        if made is None:
            pytest.skip(f"the library of {name} is not installed")
        model, shape = made
        ours = recorded(model)
        for _ in range(2):
            x = torch.randn(shape)
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            for got, right in zip(leaves(ours(x)), leaves(model(x)), strict=True):
                assert (got - right).abs().max() <= 1e-4 * right.abs().max()
    (found,) = report(ours)
    assert found.left or found.kernels


def test_there_are_fifty_models_beside_those_of_the_benchmark():
    assert len({*NAMES}) >= 50
    assert {*NAMES} > {*BRIEF}
