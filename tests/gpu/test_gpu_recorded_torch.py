"""Recorded functions of torch's tensors, on a GPU. Collected only where torch is installed."""

import gc
import threading

import pytest
from harness.insides import version_of

import handlepool

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

ALL = 60  # seconds, of what is expected to happen


@pytest.fixture(autouse=True)
def default(pool, make_default):
    """The test's pool as the default one."""
    make_default(pool)
    return pool


@pytest.fixture
def torch():
    import torch

    torch.cuda.init()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.no_grad():
        yield torch


@pytest.fixture
def model(torch):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)]
    return torch.nn.Sequential(*layers).cuda().eval()


def same(torch, one, other):
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_g19_a_module_gives_its_own_values(torch, model):
    recorded = handlepool.recorded(model, strict=True)
    for size in (6, 8, 6, 8, 10):
        for _ in range(3):
            x = torch.randn(2, 8, size, size, device="cuda")
            y = recorded(x)
            assert isinstance(y, torch.Tensor)
            assert same(torch, y, model(x))
    assert recorded.stats().recorded == 3


def test_g19_weights_that_are_written_in_place_or_rebound_are_seen(torch, model):
    recorded = handlepool.recorded(model, strict=True)
    x = torch.randn(2, 8, 6, 6, device="cuda")
    recorded(x)
    assert same(torch, recorded(x), model(x))
    model[0].weight.mul_(2)
    assert same(torch, recorded(x), model(x))
    assert recorded.stats().recorded == 1
    model[0].weight = torch.nn.Parameter(torch.randn_like(model[0].weight))
    assert same(torch, recorded(x), model(x))
    assert recorded.stats().recorded == 2


def test_g19_a_tensor_that_is_written_is_copied_back_and_counted(torch):
    def function(x, h):
        h.add_(1)
        return x + h, h

    recorded = handlepool.recorded(function, strict=True)
    h = torch.zeros(4, 4, device="cuda")
    for number in range(1, 5):
        version = version_of(h)
        y, again = recorded(torch.full((4, 4), 10.0, device="cuda"), h)
        assert again is h
        assert version_of(h) > version
        assert (y == 10 + number).all()
        assert (h == number).all()


def test_tensors_run_on_torchs_current_stream(torch, model):
    recorded = handlepool.recorded(model, strict=True)
    x = torch.randn(2, 8, 6, 6, device="cuda")
    recorded(x)
    errors = []

    def work(number):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                generator = torch.Generator("cuda").manual_seed(number)
                for _ in range(50):
                    x = torch.randn(2, 8, 6, 6, device="cuda", generator=generator)
                    y = recorded(x)
                    right = model(x)
                    assert same(torch, y, right)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ALL)
    assert not errors, errors[0]


def test_out_reused_and_none_of_these_where_gradients_are_on(torch, model):
    x = torch.randn(2, 8, 6, 6, device="cuda")
    right = model(x)
    recorded, reused = handlepool.recorded(model, strict=True), handlepool.recorded(model, outputs="reused", strict=True)
    for _ in range(3):
        out = torch.empty_like(right)
        assert recorded(x, out=out) is out
        assert same(torch, out, right)
        y = reused(x)
        assert same(torch, y, right)
    x.requires_grad_()
    derived = handlepool.recorded(model)
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="gradient"):
            y = derived(x)
        y.sum().backward()
    assert x.grad is not None


def test_memory_of_closed_programs_is_used_again(torch, model):
    recorded = handlepool.recorded(model, programs=2)
    taken = []
    # Torch takes 2 MiB for each stream of each kept pool, once.
    for _ in range(40):
        for size in (6, 8, 10, 12):
            recorded(torch.randn(2, 8, size, size, device="cuda"))
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved())
    assert taken[-1] == taken[-15]


def test_programs_that_the_collector_finds_leave_later_ones_no_destroyed_stream(torch, model):
    x = torch.randn(2, 8, 6, 6, device="cuda")
    right = model(x)
    for _ in range(6):
        holder = [handlepool.recorded(model, strict=True)]
        holder.append(holder)
        for _ in range(3):
            assert same(torch, holder[0](x), right)
        del holder
        gc.collect()
