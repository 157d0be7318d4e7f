"""Rewire captured graphs, given as raw pointers.

The module reads edges, copies graphs with other edges, and adds kernels before and after all nodes.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from handlepool.drivers.captures import Edge
from handlepool.drivers.cuda.edges import with_edge_data
from handlepool.errors import CaptureError

MOST_ENDS = 4
"""The maximum number of roots or leaves without gathering kernels.

A graph with more roots or leaves gets a kernel before and a kernel after all nodes. The reason is that each root or leaf costs
host time at a launch. An empty node in place of a kernel would not help.
"""


# cuda-bindings returns a field that is zero as an integer or as a byte.
_NONE = 0, b"\0"


class Rewiring:
    """Read and change a graph's edges; nodes and graphs are integers.

    Parameters
    ----------
    bindings : module
        ``cuda.bindings.driver``.
    """

    def __init__(self, bindings: ModuleType) -> None:
        self._bindings = bindings

    def edges(self, graph: int) -> list[Edge]:
        """Return a graph's edges."""
        return [(int(one), int(other)) for one, other, _ in self._with_data(graph)]

    def make_plain(self, graph: int) -> list[Edge]:
        """Replace each programmatic edge by a plain edge; return all edges.

        The second node of a plain edge waits for the end of the first.

        A kernel behind a programmatic edge begins early, and must itself wait for its predecessor. In cuDNN 9.19, convolutions
        with a residual wait too late. They gave wrong values behind one such edge, and in each replay behind two such edges.

        Raises
        ------
        CaptureError
            If CUDA refuses to remove an edge, as in a graph that allocates memory.
        """
        edges = self._with_data(graph)
        early = [each for each in edges if not _is_plain(each[2])]
        if early:
            self._replace(graph, *map(list, zip(*early, strict=True)))
        return [(int(one), int(other)) for one, other, _ in edges]

    def _replace(self, graph: int, ones: list[Any], others: list[Any], data: list[Any]) -> None:
        status, *_ = with_edge_data(self._bindings, "cuGraphRemoveDependencies")(graph, ones, others, data, len(ones))
        if status:
            raise CaptureError(
                "a captured kernel begins before the previous kernel ends, and CUDA refused to change this edge "
                f"({status.name}), for example because the graph allocates memory. Allocate before the recording, or from a pool "
                "that keeps freed memory"
            )
        self._change("cuGraphAddDependencies", graph, ones, others)

    def begins_early(self, graph: int) -> bool:
        """Return whether a node begins before its predecessor has ended."""
        return not all(_is_plain(data) for *_, data in self._with_data(graph))

    def _with_data(self, graph: int) -> list[tuple[Any, Any, Any]]:
        question = with_edge_data(self._bindings, "cuGraphGetEdges")
        # The first call asks for the number of edges, and the second call reads them.
        *_, count = self._answer(question(graph))
        return [*zip(*self._answer(question(graph, count))[:3], strict=True)] if count else []

    def allocations(self, graph: int) -> list[int]:
        """Return the nodes that allocate memory, such as captured `cudaMallocAsync` calls."""
        return [int(node) for node in self._of_kind(graph, "CU_GRAPH_NODE_TYPE_MEM_ALLOC")]

    def host_copies(self, graph: int) -> list[int]:
        """Return the addresses that nodes copy to from the host's memory."""
        found = []
        for node in self._of_kind(graph, "CU_GRAPH_NODE_TYPE_MEMCPY"):
            (copy,) = self._answer(self._bindings.cuGraphMemcpyNodeGetParams(node))
            if self._is_host(copy.srcMemoryType, copy.srcDevice) and not self._is_host(copy.dstMemoryType, copy.dstDevice):
                found.append(int(copy.dstDevice))
        return found

    def _is_host(self, kind: object, address: object) -> bool:
        kinds = self._bindings.CUmemorytype
        # A copy with unified addresses does not say where its memory is. So CUDA is asked about the address.
        if kind != kinds.CU_MEMORYTYPE_UNIFIED:
            return bool(kind == kinds.CU_MEMORYTYPE_HOST)
        attribute = self._bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, found = self._bindings.cuPointerGetAttribute(attribute, address)
        # For pageable host memory, which CUDA does not know, the query returns an error. So an error means host memory.
        return bool(status) or int(found) == int(kinds.CU_MEMORYTYPE_HOST)

    def _of_kind(self, graph: int, name: str) -> list[Any]:
        *_, count = self._answer(self._bindings.cuGraphGetNodes(graph))
        nodes = self._answer(self._bindings.cuGraphGetNodes(graph, count))[0] if count else ()
        kind = getattr(self._bindings.CUgraphNodeType, name)
        return [node for node in nodes if self._answer(self._bindings.cuGraphNodeGetType(node))[0] == kind]

    def copy(self, graph: int) -> int:
        """Return a copy of a graph.

        Raises
        ------
        CaptureError
            If CUDA cannot copy the graph, for example because the graph allocates memory.
        """
        status, copied = self._bindings.cuGraphClone(graph)
        if status == self._bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"CUDA driver error: {status.name}")
        if status:
            raise CaptureError(
                f"CUDA cannot copy the graph ({status.name}), for example because the graph allocates memory. Allocate before "
                "the recording, or from a pool that keeps freed memory"
            )
        return int(copied)

    def rewire(self, copied: int, add: Sequence[Edge], remove: Sequence[Edge]) -> None:
        """Add edges to a copied graph, and remove edges from it.

        ``add`` and ``remove`` name the edges by the nodes of the original graph.
        """
        found: dict[int, Any] = {}
        for node in {node for edge in (*add, *remove) for node in edge}:
            # CUDA maps a node of the original to its node in the copy.
            (found[node],) = self._answer(self._bindings.cuGraphNodeFindInClone(node, copied))
        for name, edges in (("cuGraphRemoveDependencies", remove), ("cuGraphAddDependencies", add)):
            if edges:
                self._change(name, copied, [found[one] for one, _ in edges], [found[other] for _, other in edges])

    def mark(self, copied: int, groups: Sequence[Sequence[int]], events: Sequence[int]) -> None:
        """Add two event nodes before a copy's nodes, and one per group.

        ``groups`` lists nodes of the original graph. A group's event node runs after the nodes of the group. The nodes behind a
        group then depend on the group's event node. Without such dependencies, each event node would be a branch of its own in
        the graph, and a branch costs many times the time of a node.
        """
        edges = self.edges(copied)
        roots = [self._bindings.CUgraphNode(node) for node in ends(self.nodes(copied), edges)[0]]
        following: dict[int, list[Any]] = {}
        for one, other in edges:
            following.setdefault(one, []).append(self._bindings.CUgraphNode(other))
        add: list[tuple[Any, Any]] = []
        remove: list[tuple[Any, Any]] = []
        first = self._record(copied, [], events[0])
        second = self._record(copied, [first], events[1])
        add += [(second, root) for root in roots]
        for group, event in zip(groups, events[2:], strict=True):
            behind = [self._answer(self._bindings.cuGraphNodeFindInClone(node, copied))[0] for node in group]
            mark = self._record(copied, behind, event)
            direct = [(node, other) for node in behind for other in following.get(int(node), ())]
            remove += direct
            add += [(mark, other) for other in {int(other): other for _, other in direct}.values()]
        for name, pairs in (("cuGraphRemoveDependencies", remove), ("cuGraphAddDependencies", add)):
            if pairs:
                self._change(name, copied, [one for one, _ in pairs], [other for _, other in pairs])

    def _record(self, graph: int, behind: list[Any], event: int) -> Any:
        return self._answer(self._bindings.cuGraphAddEventRecordNode(graph, behind, len(behind), event))[0]

    def nodes(self, graph: int) -> list[int]:
        """Return a graph's nodes."""
        *_, count = self._answer(self._bindings.cuGraphGetNodes(graph))
        return [*map(int, self._answer(self._bindings.cuGraphGetNodes(graph, count))[0])] if count else []

    def gather(self, copied: int, first: Sequence[int], last: Sequence[int], kernel: int) -> None:
        """Add a one-thread kernel before all nodes, and another after.

        ``first`` and ``last`` are the roots and leaves of ``copied``, given as nodes of the original graph. ``kernel`` is a
        ``CUfunction`` without arguments.
        """
        find = self._bindings.cuGraphNodeFindInClone
        roots, leaves = ([self._answer(find(node, copied))[0] for node in nodes] for nodes in (first, last))
        parameters = self._bindings.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = self._bindings.CUfunction(kernel)
        for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
            setattr(parameters, name, 1)
        (before,) = self._answer(self._bindings.cuGraphAddKernelNode(copied, [], 0, parameters))
        self._change("cuGraphAddDependencies", copied, [before] * len(roots), roots)
        self._answer(self._bindings.cuGraphAddKernelNode(copied, leaves, len(leaves), parameters))

    def _change(self, name: str, graph: int, ones: list[Any], others: list[Any]) -> None:
        # Edges that are added without edge data are plain.
        self._answer(with_edge_data(self._bindings, name)(graph, ones, others, None, len(ones)))

    def _answer(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = result
        # Callers handle a lack of memory apart from other errors, so it gets an exception of its own.
        if status == self._bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"CUDA driver error: {status.name}")
        if status:
            raise RuntimeError(f"CUDA driver error: {status.name}")
        return tuple(values)


def ends(nodes: Sequence[int], edges: Iterable[Sequence[Any]]) -> tuple[list[int], list[int]]:
    """Return a graph's roots and leaves.

    The first two items of an edge are its source and its target.
    """
    earlier, later = set(), set()
    for edge in edges:
        earlier.add(edge[0])
        later.add(edge[1])
    return [node for node in nodes if node not in later], [node for node in nodes if node not in earlier]


def are_many(roots: Sequence[int], leaves: Sequence[int]) -> bool:
    """Return whether a graph has enough roots or leaves for gathering kernels."""
    return max(len(roots), len(leaves)) > MOST_ENDS


def _is_plain(data: Any) -> bool:
    return data.type in _NONE and data.from_port in _NONE and data.to_port in _NONE
