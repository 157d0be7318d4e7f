"""Torch's modules as branches, over tensors in host memory: they are plain functions, which read their parameters and buffers."""

import pytest

from handlepool import HandlePool, ParallelStates
from handlepool.regions.plain_calls import PlainCall

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)


class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class InPlace(torch.nn.Module):
    def forward(self, x):
        return x.mul_(3)


@pytest.fixture
def pool(make_driver, monkeypatch):
    monkeypatch.setattr("handlepool.regions.plain_calls._may_write", {})
    monkeypatch.setattr("handlepool.regions.plain_calls._warned", set())
    with HandlePool(driver=make_driver()) as pool:
        yield pool


@pytest.mark.filterwarnings("default:a branch waits since")
def test_what_one_module_does_says_nothing_of_another_kind(pool):
    x = torch.ones(2, 3)
    modules = [Twice(), torch.nn.Identity(), torch.nn.Sequential(Twice()), torch.nn.Sequential(Twice(), torch.nn.Identity())]

    def is_taken_to_write(module):
        return bool(PlainCall(pool.driver, module, (x,), {}).guessed)

    assert all(map(is_taken_to_write, modules))
    for module in modules:
        with ParallelStates(3, pool=pool).fork() as fork:
            fork.run(module, x)
    assert [is_taken_to_write(module) for module in modules] == [False, True, False, False]
    assert not is_taken_to_write(Twice())


@pytest.mark.filterwarnings("default:a branch waits since")
def test_a_module_is_called_by_its_name_when_a_branch_waits_for_it(pool):
    x = torch.ones(2, 3)
    with ParallelStates(3, pool=pool).fork() as fork:
        fork.run(Twice(), x)
        with pytest.warns(UserWarning, match=r"a branch waits since \S*InPlace, which does not return new arrays alone"):
            fork.run(InPlace(), x)
    assert (x == 3).all()
