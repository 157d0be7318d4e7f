"""Recorded graphs of the host driver, and the memory of a recording."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from handlepool.drivers.captures import Edge
from handlepool.drivers.freed_blocks import FreedBlocks
from handlepool.drivers.host.array import HostArray, owner_of
from handlepool.drivers.host.captures import HostGraph, Node, rewired
from handlepool.drivers.host.memory import Block, DeviceMemory, Owner
from handlepool.drivers.host.streams import StreamTable
from handlepool.errors import ContractError


class RecordedGraph:
    """Wrap a `HostGraph`; see `handlepool.drivers.captures.RecordedGraph`."""

    def __init__(self, graph: HostGraph, table: StreamTable, note: Callable[[str], None]) -> None:
        self.graph = graph
        self.nodes = len(graph.nodes)
        self._table = table
        self._note = note
        self._destroyed = False

    def edges(self) -> Sequence[Edge]:
        """Return the edges as they were captured."""
        return [(earlier, node) for node in self.graph.nodes for earlier in node.after]

    def allocations(self) -> Sequence[Any]:
        """Return no nodes, because an allocation under a capture happens at once."""
        return ()

    def host_copies(self) -> Sequence[int]:
        """Return no copies, because `Driver.watch_host_data` reports them earlier."""
        return ()

    def arranged(self, add: Sequence[tuple[Any, Any]] = (), remove: Sequence[tuple[Any, Any]] = ()) -> "RecordedGraph":
        """Return a graph of the same nodes with edges added and removed."""
        self._note("arrange_graph")
        if not add and not remove:
            return self
        return RecordedGraph(HostGraph(self._table, rewired(self.graph.nodes, add, remove)), self._table, self._note)

    def marked(
        self, add: Sequence[tuple[Any, Any]], remove: Sequence[tuple[Any, Any]], groups: Sequence[Sequence[Any]]
    ) -> "MarkedGraph":
        """Return a graph like `arranged`, with a time mark per group.

        A mark is a node that takes the time when all nodes of its group have ended.
        """
        self._note("mark_graph")
        moments: dict[int, float] = {}
        first, *marks = [Node(partial(_take, moments, place), "a mark", (), (), object()) for place in range(len(groups) + 1)]
        later = {node for _, node in add}
        # The first mark must run before every node, so each root of the graph depends on it.
        more = [(first, node) for node in self.graph.nodes if not node.after and node not in later]
        more += [(node, mark) for mark, group in zip(marks, groups, strict=True) for node in (*group, first)]
        nodes = rewired([first, *self.graph.nodes, *marks], [*add, *more], remove)
        return MarkedGraph(HostGraph(self._table, nodes), self._table, self._note, moments)

    def instantiate(self) -> None:
        """Raise if the call harms a capture; the host prepares nothing."""
        self._note("instantiate_graph")
        self._table.captures.forbid("instantiate_graph")

    def launch(self, pointer: int) -> None:
        """Queue the graph on a stream."""
        self._note("launch_graph")
        # CUDA would fail for a destroyed graph. The host has no CUDA object, so this method checks it.
        if self._destroyed:
            raise ContractError(f"a graph of {self.nodes} nodes is launched after it was destroyed; record another graph")
        self._table.launch_on(self.graph, self._table.resolve(pointer))

    def upload(self, pointer: int) -> None:
        """Raise for a wrong stream pointer; the host uploads nothing."""
        self._note("upload_graph")
        self._table.resolve(pointer)

    def destroy(self) -> None:
        """Mark the graph as destroyed, so that later launches raise."""
        self._note("destroy_graph")
        self._table.captures.forbid("destroy_graph")
        self._destroyed = True


class MarkedGraph(RecordedGraph):
    """A graph with time marks; see `handlepool.drivers.captures.MarkedGraph`."""

    def __init__(self, graph: HostGraph, table: StreamTable, note: Callable[[str], None], moments: dict[int, float]) -> None:
        super().__init__(graph, table, note)
        self._moments = moments

    def times(self) -> list[float]:
        """Return the microseconds from the launch's start to each group's end."""
        return [(self._moments[place] - self._moments[0]) * 1e6 for place in range(1, len(self._moments))]

    def cost(self) -> float:
        """Return 0 microseconds, because marks delay no other node."""
        return 0.0


def _take(moments: dict[int, float], place: int) -> None:
    moments[place] = perf_counter()


class RecordingMemory:
    """The memory of one recording, in arenas of its own.

    See `handlepool.drivers.captures.RecordingMemory`.
    """

    def __init__(self, table: StreamTable) -> None:
        self._table = table
        self._arenas: dict[tuple[DeviceMemory, object], FreedBlocks[Block]] = {}
        self._blocks: set[Block] = set()
        self.allocator = self
        self.nbytes = 0
        self._tell: Callable[[object], None] | None = None
        self._may_have: Callable[[int, int], bool] | None = None
        self._known: Callable[[object], bool] = bool

    def take(self, device: DeviceMemory, key: object, nbytes: int) -> Owner:
        """Return a free block of the recording, or a new block.

        The allocation harms no capture, because `_fresh` makes it in relaxed mode.
        """
        size = DeviceMemory.rounded(nbytes)
        # Under a reuse policy, all streams that the policy knows may reuse each other's memory, so they share an arena.
        arena = self._arenas.setdefault((device, None if self._may_have and self._known(key) else key), FreedBlocks())
        # Without a policy the arena works as a stack, as CuPy's arenas do: the block freed last comes first.
        if self._may_have is None:
            home = arena.of_size(size)
            block = home.pop() if home else None
        else:
            block, home = arena.take(size, self._free) or (None, arena.of_size(size))
        if block is None:
            block = self._fresh(device, size)
        else:
            block.generation += 1
        arena.note_given(block, size)
        owner = Owner(block, home)
        if self._tell is not None:
            self._tell(owner)
        return owner

    def _free(self, block: Block) -> bool:
        return self._may_have is None or self._may_have(block.address, block.address + block.nbytes)

    def on_allocate(self, of: Callable[[object], None] | None) -> None:
        """Pass each later allocated block to a function."""
        self._tell = of

    def set_reuse_policy(self, may_have: Callable[[int, int], bool] | None, known: Callable[[object], bool] = bool) -> bool:
        """Set the functions that decide the reuse of blocks.

        ``may_have(begin, end)`` decides whether the next array may reuse the freed block with these addresses. ``known(pointer)``
        decides whether a stream shares its freed blocks with other streams.
        """
        self._may_have, self._known = may_have, known
        return True

    def _fresh(self, device: DeviceMemory, size: int) -> Block:
        thread = self._table.thread
        # Outside of relaxed mode, an allocation of device memory would harm captures.
        thread.relaxed += 1
        try:
            block = device.fresh(size)
        finally:
            thread.relaxed -= 1
        self._blocks.add(block)
        self.nbytes += size
        return block

    @property
    def in_order(self) -> int:
        """Bytes that the recording would need if all its work ran serially."""
        return sum(arena.in_order() for arena in self._arenas.values())

    def holds(self, value: object) -> bool:
        """Return whether an array or a block's owner is in this memory."""
        owner = owner_of(value) if isinstance(value, HostArray) else value
        return isinstance(owner, Owner) and owner.block in self._blocks

    def begins(self, pointer: int) -> bool:
        """Return whether a block of this memory begins at an address."""
        return any(block.address == pointer for block in self._blocks)

    def release(self) -> bool:
        """Free the blocks that no array uses.

        Return whether all blocks have been freed.
        """
        self._table.captures.forbid("release of a recording's memory")
        for (device, _), arena in self._arenas.items():
            for block in arena.take_all():
                device.give_back(block)
                self._blocks.discard(block)
                self.nbytes -= block.nbytes
        return not self._blocks
