"""Copies of captured graphs with other edges, by cuda-bindings of either generation, with graphs that are sets of edges."""

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest

from handlepool.drivers.cuda.rewiring import MOST_ENDS, Rewiring, are_many, ends
from handlepool.drivers.protocol import abort_capture
from handlepool.errors import CaptureError

PLAIN, PROGRAMMATIC = (0, 0, 0), (1, 0, 1)


class Status(int):
    name = "CUDA_ERROR_OF_A_TEST"


class Node(int):
    pass


class Bindings:
    """Graphs as sets of edges, behind the names of one generation."""

    def __init__(self, old=False, status=0):
        self.graphs, self.copies, self.events, self.numbers, self.status = {}, {}, {}, count(1000), status
        self.CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
        self.CUgraphNode, self.CUfunction, self.CUDA_KERNEL_NODE_PARAMS = Node, int, SimpleNamespace
        for name in ("cuGraphGetEdges", "cuGraphAddDependencies", "cuGraphRemoveDependencies"):
            setattr(self, f"{name}_v2" if old else name, getattr(self, name.removeprefix("cuGraph")))
            if old:
                setattr(self, name, self.without_data)

    def graph(self, nodes, edges=(), programmatic=()):
        number = next(self.numbers)
        self.graphs[number] = [*nodes], {**dict.fromkeys(edges, PLAIN), **dict.fromkeys(programmatic, PROGRAMMATIC)}
        return number

    def without_data(self, *_):
        raise AssertionError("the form without edge data")

    def GetEdges(self, graph, count=0):
        edges = self.graphs[graph][1]
        if not count:
            return Status(0), None, None, None, len(edges)
        data = [SimpleNamespace(from_port=p, to_port=q, type=bytes([kind]) if kind else kind) for p, q, kind in edges.values()]
        return Status(0), [Node(one) for one, _ in edges], [Node(other) for _, other in edges], data, len(edges)

    def cuGraphGetNodes(self, graph, count=0):
        nodes = self.graphs[graph][0]
        return Status(0), [Node(node) for node in nodes] if count else None, len(nodes)

    def cuGraphClone(self, graph):
        if self.status:
            return Status(self.status), None
        nodes, edges = self.graphs[graph]
        copied = self.graph([])
        self.copies[copied] = {node: next(self.numbers) for node in nodes}
        of = self.copies[copied]
        self.graphs[copied] = [*of.values()], {(of[one], of[other]): data for (one, other), data in edges.items()}
        return Status(0), copied

    def cuGraphNodeFindInClone(self, node, copied):
        return Status(0), Node(self.copies[copied][int(node)])

    def AddDependencies(self, graph, ones, others, data, count):
        assert data is None
        assert len(ones) == len(others) == count > 0
        for pair in zip(ones, others, strict=True):
            assert all(type(node) is Node for node in pair)
            assert pair not in self.graphs[graph][1]
            self.graphs[graph][1][pair] = PLAIN
        return (Status(0),)

    def RemoveDependencies(self, graph, ones, others, data, count):
        assert len(ones) == len(others) == count > 0
        if self.status:
            return (Status(self.status),)
        for pair, its in zip(zip(ones, others, strict=True), data or [None] * count, strict=True):
            kind = PLAIN if its is None else (its.from_port, its.to_port, its.type and its.type[0])
            if self.graphs[graph][1].pop(pair, None) != kind:
                return (Status(1),)
        return (Status(0),)

    def cuGraphAddEventRecordNode(self, graph, behind, count, event):
        assert len(behind) == count
        node = Node(next(self.numbers))
        self.events[node] = event
        self.graphs[graph][0].append(node)
        self.graphs[graph][1].update({(each, node): PLAIN for each in behind})
        return Status(0), node

    def cuGraphAddKernelNode(self, graph, behind, count, parameters):
        assert len(behind) == count
        assert vars(parameters) == {"func": 7, **{f"{of}Dim{axis}": 1 for of in ("grid", "block") for axis in "XYZ"}}
        node = Node(next(self.numbers))
        self.graphs[graph][0].append(node)
        self.graphs[graph][1].update({(each, node): PLAIN for each in behind})
        return Status(0), node


@pytest.fixture(params=[False, True], ids=["13", "12.9"])
def bindings(request):
    return Bindings(request.param)


def test_nodes_that_allocate_are_told(bindings):
    bindings.CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_MEM_ALLOC=10)
    bindings.cuGraphNodeGetType = lambda node: (Status(0), 10 if node in (2, 5) else 0)
    assert Rewiring(bindings).allocations(bindings.graph([1, 2, 3, 4, 5])) == [2, 5]
    assert Rewiring(bindings).allocations(bindings.graph([])) == []


def test_edges_are_told(bindings):
    assert Rewiring(bindings).edges(bindings.graph([1, 2, 3], [(1, 2), (2, 3)])) == [(1, 2), (2, 3)]
    assert Rewiring(bindings).edges(bindings.graph([1])) == []


def test_plain_edges_stand_in_the_place_of_programmatic_ones(bindings):
    rewiring = Rewiring(bindings)
    graph = bindings.graph([1, 2, 3, 4], [(1, 2)], [(2, 3), (2, 4)])
    assert rewiring.begins_early(graph)
    assert sorted(rewiring.make_plain(graph)) == [(1, 2), (2, 3), (2, 4)]
    assert bindings.graphs[graph][1] == dict.fromkeys([(1, 2), (2, 3), (2, 4)], PLAIN)
    assert not rewiring.begins_early(graph)
    assert sorted(rewiring.make_plain(graph)) == sorted(rewiring.edges(graph))
    assert rewiring.make_plain(bindings.graph([1])) == []


def test_a_graph_whose_edges_cannot_be_made_plain_is_refused():
    bindings = Bindings(status=1)
    with pytest.raises(CaptureError, match=r"CUDA_ERROR_OF_A_TEST.*allocates memory"):
        Rewiring(bindings).make_plain(bindings.graph([1, 2], [], [(1, 2)]))


def test_a_copy_gets_other_edges(bindings):
    rewiring = Rewiring(bindings)
    graph = bindings.graph([1, 2, 3, 4], [(1, 2), (1, 3), (3, 4)])
    copied = rewiring.copy(graph)
    rewiring.rewire(copied, [(2, 3)], [(1, 3)])
    of = {number: node for node, number in bindings.copies[copied].items()}
    assert {(of[one], of[other]) for one, other in rewiring.edges(copied)} == {(1, 2), (2, 3), (3, 4)}
    assert len(rewiring.edges(graph)) == 3
    rewiring.rewire(copied, [], [])


@pytest.mark.parametrize(("status", "error"), [(2, MemoryError), (801, CaptureError)])
def test_what_cannot_be_copied_says_so(status, error):
    bindings = Bindings(status=status)
    with pytest.raises(error, match="CUDA_ERROR_OF_A_TEST"):
        Rewiring(bindings).copy(bindings.graph([1]))


@pytest.mark.parametrize(("chains", "joined"), [(MOST_ENDS, False), (MOST_ENDS + 1, False), (MOST_ENDS + 1, True)])
def test_many_roots_or_leaves_are_gathered_between_two_kernels(bindings, chains, joined):
    rewiring = Rewiring(bindings)
    nodes = [*range(2 * chains), *([99] if joined else [])]
    edges = [(each, each + chains) for each in range(chains)] + [(each + chains, 99) for each in range(chains) if joined]
    graph = bindings.graph(nodes, edges)
    roots, leaves = ends(rewiring.nodes(graph), rewiring.edges(graph))
    assert are_many(roots, leaves) == (chains > MOST_ENDS)
    copied = rewiring.copy(graph)
    rewiring.gather(copied, roots, leaves, 7)
    of = {number: node for node, number in bindings.copies[copied].items()}
    *_, first, last = bindings.graphs[copied][0]
    pairs = {edge[:2] for edge in rewiring.edges(copied)}
    assert {of[other] for one, other in pairs if one == first} == {*range(chains)}
    assert {of[one] for one, other in pairs if other == last} == ({99} if joined else {*range(chains, 2 * chains)})
    assert not are_many(*ends(rewiring.nodes(copied), rewiring.edges(copied)))


def test_events_stand_before_all_and_between_each_group_and_what_follows_it(bindings):
    rewiring = Rewiring(bindings)
    copied = rewiring.copy(bindings.graph([1, 2, 3, 4], [(1, 3), (2, 4), (3, 4), (1, 4)]))
    rewiring.mark(copied, [(1,), (2, 3)], [70, 71, 72, 73])
    of = {number: node for node, number in bindings.copies[copied].items()}
    *_, first, second, one, other = bindings.graphs[copied][0]
    assert [bindings.events[each] for each in (first, second, one, other)] == [70, 71, 72, 73]
    of |= {first: "first", second: "second", one: "one", other: "other"}
    assert {(of[a], of[b]) for a, b in rewiring.edges(copied)} == {
        ("first", "second"),
        ("second", 1),
        ("second", 2),
        (1, "one"),
        ("one", 3),
        ("one", 4),
        (2, "other"),
        (3, "other"),
        ("other", 4),
    }


@pytest.mark.cupy
@pytest.mark.parametrize("name", ["cuGraphAddDependencies", "cuGraphRemoveDependencies", "cuGraphGetEdges"])
def test_the_bindings_that_are_installed_have_the_forms_that_are_called(name):
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    from handlepool.drivers.cuda.edges import with_edge_data

    assert "edgeData" in with_edge_data(driver, name).__doc__
    parameters = driver.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = driver.CUfunction(7)
    parameters.gridDimX = 1
    assert (int(parameters.func), parameters.gridDimX, parameters.sharedMemBytes) == (7, 1, 0)


def test_an_invalidated_capture_is_ended_too():
    ended = []

    def refuse(pointer):
        raise RuntimeError("the capture was invalidated")

    driver = SimpleNamespace(relaxed=nullcontext, capture_id=refuse, end_capture=ended.append)  # which returns no graph
    abort_capture(driver, 7)
    driver.capture_id = lambda pointer: 0
    abort_capture(driver, 8)
    assert ended == [7]
