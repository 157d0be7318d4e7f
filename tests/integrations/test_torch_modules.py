"""Torch's modules as branches, over tensors in host memory: they are plain functions, which read their parameters and buffers."""

import pytest

from handlepool import HandlePool, ParallelStates
from handlepool.order.plain_calls import PlainCall

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)


class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class InPlace(torch.nn.Module):
    def forward(self, x):
        return x.mul_(3)


@pytest.fixture
def pool(make_driver, known):
    with HandlePool(driver=make_driver()) as pool:
        yield pool


@pytest.mark.filterwarnings("default:a branch waits because")
def test_what_one_module_does_says_nothing_of_another_kind(pool):
    x = torch.ones(2, 3)
    modules = [Twice(), torch.nn.Identity(), torch.nn.Sequential(Twice()), torch.nn.Sequential(Twice(), torch.nn.Identity())]

    def is_taken_to_write(module):
        return bool(PlainCall(pool.driver, module, (x,), {}).assumed_writes)

    assert all(map(is_taken_to_write, modules))
    for module in modules:
        with ParallelStates(3, pool=pool).fork() as fork:
            fork.run(module, x)
    assert [is_taken_to_write(module) for module in modules] == [False, True, False, False]
    assert not is_taken_to_write(Twice())


@pytest.mark.filterwarnings("default:a branch waits because")
def test_a_module_is_called_by_its_name_when_a_branch_waits_for_it(pool):
    x = torch.ones(2, 3)
    with ParallelStates(3, pool=pool).fork() as fork:
        fork.run(Twice(), x)
        with pytest.warns(UserWarning, match=r"a branch waits because \S*InPlace did not return new arrays alone"):
            fork.run(InPlace(), x)
    assert (x == 3).all()


class Cell(torch.nn.Module):
    """Keeps a state that is neither parameter nor buffer, as many networks do."""

    def __init__(self, flag=False):
        super().__init__()
        self._h, self.cache, self.flag = torch.ones(3), [torch.ones(4)], flag
        hooked = torch.ones(5)
        self.register_forward_hook(lambda *_: None if len(hooked) else _)

    def forward(self, x):
        return x + self._h


def test_tensors_in_a_modules_attributes_and_hooks_are_read(pool):
    cell = Cell()
    reads = PlainCall(pool.driver, cell, (), {}).reads
    assert sorted(stop - start for start, stop, _ in reads) == [12, 16, 20]


def test_flags_of_a_module_tell_its_calls_apart(pool):
    x = torch.ones(3)
    for module in (torch.nn.ReLU(), Cell()):
        with ParallelStates(2, pool=pool).fork() as fork:
            fork.run(module, x)
        assert not PlainCall(pool.driver, type(module)(), (x,), {}).assumed_writes
        assert PlainCall(pool.driver, type(module)(True), (x,), {}).assumed_writes


def test_tensors_without_memory_of_their_own_are_no_error(pool):
    class Graph:
        adjacency, lazy = torch.eye(3).to_sparse(), torch.nn.LazyLinear(2)

    graph = Graph()
    graph.x = torch.ones(3, 1)
    graph.adjacency, graph.lazy = Graph.adjacency, Graph.lazy
    with ParallelStates(2, pool=pool).fork() as fork:
        y = fork.run(lambda: torch.sparse.mm(graph.adjacency, graph.x))
    assert (y == 1).all()
