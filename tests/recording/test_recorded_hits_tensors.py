"""The written-out call of a recorded function over tensors: which calls it serves. A stand-in has the program."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from handlepool.foreign import torch as foreign  # noqa: E402 - it needs torch
from handlepool.recording import hits  # noqa: E402
from handlepool.testing.pools import host_pool  # noqa: E402

MISSED = hits.MISSED


@pytest.fixture
def pool(monkeypatch):
    with host_pool() as pool, torch.no_grad():
        monkeypatch.setattr(foreign, "current_stream", lambda device: pool.driver.current_stream().ptr)
        yield pool


@pytest.fixture
def hit(pool):
    """Makes the written-out call for arguments; its value is twice the first tensor."""

    def made(*args, edges=()):
        class Program:
            def _turn(self, run, arrays, stream, begin, checked):
                return run(arrays)

        stream = pool.driver.current_stream()
        instance = SimpleNamespace(stream=stream, away=False, direct=False, single=True, program=Program())
        instance.run = lambda given: [given[0] * 2]
        return hits.hit(pool.internals, args, 0, list(edges), [instance], 1, lambda: True, False)

    return made


def test_a_call_with_such_tensors_is_served(hit):
    call = hit(torch.ones(2, 3), torch.ones(3), 2, "a")
    x = torch.full((2, 3), 3.0)
    assert torch.equal(call((x, torch.ones(3), 2, "a")), x * 2)
    assert call((x, torch.ones(3), 3, "a")) is MISSED
    assert call((x, torch.ones(3), 2)) is MISSED


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(3, 2).t(),
        torch.ones(2, 3).double(),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3).as_subclass(Own),
        torch.ones(2, 3, dtype=torch.complex64).conj().imag,
        None,
        3,
    ],
)
def test_other_tensors_take_the_long_way(hit, other):
    call = hit(torch.ones(2, 3))
    assert call((torch.ones(2, 3),)) is not MISSED
    assert call((other,)) is MISSED


def test_other_modes_of_torch_take_the_long_way(hit):
    call, x = hit(torch.ones(2, 3)), torch.ones(2, 3)
    assert call((x,)) is not MISSED
    for mode in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.autograd.forward_ad.dual_level()):
        if isinstance(mode, torch.autocast) and not torch.is_autocast_enabled():
            continue
        with mode:
            assert call((x,)) is MISSED
    assert torch.func.vmap(lambda _: torch.tensor(call((x,)) is MISSED))(torch.ones(1)).all()


def test_another_stream_of_torch_takes_the_long_way(hit, monkeypatch):
    call, x = hit(torch.ones(2, 3)), torch.ones(2, 3)
    monkeypatch.setattr(foreign, "current_stream", lambda device: 12345)
    other = hit(torch.ones(2, 3))
    assert call((x,)) is not MISSED
    assert other((x,)) is MISSED


def test_tensors_that_share_memory_take_the_long_way(hit):
    x = torch.ones(4, 3)
    call = hit(torch.ones(2, 3), torch.ones(2, 3))
    assert call((x[:2], x[2:])) is not MISSED
    assert call((x[:2], x[1:3])) is MISSED
    inside = hit(torch.ones(2, 3), edges=(x.data_ptr(), x.data_ptr() + 48))
    assert inside((torch.ones(2, 3),)) is not MISSED
    assert inside((x[1:3],)) is MISSED


def test_arrays_beside_tensors_take_the_long_way(hit, pool):
    assert hit(torch.ones(2, 3), pool.driver.asarray([1.0])) is None
