"""Elementwise functions over torch's tensors on the host driver, and torch's functions as traced."""

import numpy as np
import pytest

import handlepool
from handlepool import TraceError, add, elementwise, multiply

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)


@pytest.fixture
def x():
    return torch.from_numpy(np.random.default_rng(1).standard_normal((2, 24, 7, 5)).astype(np.float32))


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 24, 1, 1), (24, 1, 1), (5,), (), (2, 1, 7, 5)])
def test_tensors_broadcast_as_torchs_and_keep_their_layout(pool, x, layout, shape):
    images = x.contiguous(memory_format=getattr(torch, layout))
    s = torch.full(shape, 1.5)
    for y, expected in ((multiply(images, s), images * s), (add(images, s, 0.5), images + s + 0.5)):
        assert y.stride() == images.stride()
        torch.testing.assert_close(y, expected)


def test_results_have_torchs_types(pool, x):
    half, brain = x.half(), x.bfloat16()
    assert multiply(half, half).dtype == torch.float16
    assert multiply(brain, 2.0).dtype == torch.bfloat16
    assert multiply(half, brain).dtype == multiply(half, x).dtype == torch.float32
    assert elementwise(lambda x: x > 0)(x).dtype == torch.bool


def test_torchs_functions_are_traced(pool, x):
    def function(x):
        inner = torch.nn.functional.hardswish(x) + torch.clamp(x, -1, 1) * torch.sigmoid(x)
        return torch.where(x > 0.5, inner, torch.tanh(x) + torch.nn.functional.silu(x))

    torch.testing.assert_close(elementwise(function)(x), function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda x: torch.cumsum(x, 0), "torch.cumsum"),
        (lambda x: torch.nn.functional.softmax(x, 1), "softmax"),
        (lambda x: torch.add(x, x, alpha=2), "alpha="),
        (lambda x: x * torch.ones(5), "pass each array to the elementwise function"),
    ],
)
def test_other_functions_of_torch_are_refused_by_their_name(pool, x, function, part):
    with pytest.raises(TraceError, match=part):
        elementwise(function)(x)


def test_a_tensor_that_requires_grad_is_refused(pool, x):
    with pytest.raises(handlepool.ArgumentError, match="requires grad"):
        multiply(x.requires_grad_(), 2.0)
