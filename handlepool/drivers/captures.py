"""Define the types of captured graphs, and of a recording's memory."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Edge = tuple[Any, Any]
"""An edge of a recorded graph: a pair of nodes.

The second node of the pair waits until the first node has ended.
"""


class RecordedGraph(Protocol):
    """A captured graph, which can be launched many times after `instantiate`.

    A graph never runs concurrently with itself.
    """

    @property
    def nodes(self) -> int:
        """The number of kernels, copies and the like in the graph."""

    @property
    def launch(self) -> Callable[[int], None]:
        """Return ``launch(pointer)``, which enqueues the whole graph on a stream.

        The whole graph counts as one launch. After `instantiate`, one thread at a time may call ``launch``.
        """

    def edges(self) -> Sequence[Edge]:
        """Return the edges that the graph had when its capture ended.

        The nodes of the edges are hashable, and equal to the nodes that `Driver.dependencies` returned for the same work.
        """

    def allocations(self) -> Sequence[Any]:
        """Return the nodes that allocate memory each time the graph runs.

        The nodes are equal to the nodes in `edges`.
        """

    def host_copies(self) -> Sequence[int]:
        """Return the addresses that the graph copies host data to.

        If a driver refuses such copies during the capture, the list does not contain them.
        """

    def arranged(self, add: Sequence[tuple[Any, Any]] = (), remove: Sequence[tuple[Any, Any]] = ()) -> "RecordedGraph":
        """Return this graph with the edges ``add`` and without ``remove``.

        If ``add`` and ``remove`` are empty, the method may return the graph itself.

        The driver may add nodes that make launches quicker. Called inside `Driver.relaxed`. Raises `CaptureError` for a graph
        that cannot be copied, and `MemoryError` if the device has no memory for the copy.
        """

    def marked(
        self, add: Sequence[tuple[Any, Any]], remove: Sequence[tuple[Any, Any]], groups: Sequence[Sequence[Any]]
    ) -> "MarkedGraph":
        """Return a graph like `arranged`, which also times groups of nodes.

        At each launch, the graph records the time when all nodes of a group have ended. Raises the same errors as `arranged`.
        """

    def instantiate(self) -> None:
        """Make the graph ready to be launched; called inside `Driver.relaxed`.

        Raises `MemoryError` if the device has no memory for the graph.
        """

    def upload(self, pointer: int) -> None:
        """Upload the graph to the device, on the stream ``pointer``.

        The first launch then does not have to upload the graph.
        """

    def destroy(self) -> None:
        """Destroy the graph; called inside `Driver.relaxed`.

        A launch that is under way goes on.
        """


class MarkedGraph(RecordedGraph, Protocol):
    """A graph that also measures when groups of its nodes end."""

    def times(self) -> list[float]:
        """Return the microseconds from the launch's start to each group's end.

        These are the times of the graph's last launch, which must have ended.
        """

    def cost(self) -> float:
        """Return the microseconds that one time measurement takes.

        Each measurement delays the work that follows it by this time.
        """


class RecordingMemory(Protocol):
    """The memory for the allocations of one recording, and for nothing else."""

    @property
    def allocator(self) -> Any:
        """Return the allocator for `Driver.swap_allocator`.

        An allocation by this allocator harms no capture. A freed block returns to this memory, which serves this recording alone.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that this memory has taken from the device."""

    @property
    def in_order(self) -> int:
        """Bytes that the recording would need if its work ran serially.

        Serial work could reuse each freed block at once. The count begins when `set_reuse_policy` is called.
        """

    def on_allocate(self, of: Callable[[object], None] | None) -> None:
        """Call ``of(block)`` for each block that is allocated later.

        If ``of`` is None, no function is called. `Driver.block_range` returns the addresses of a block.
        """

    def set_reuse_policy(self, may_have: Callable[[int, int], bool] | None, known: Callable[[object], bool] = bool) -> bool:
        """Let ``may_have`` decide which freed blocks the next array may reuse.

        ``may_have`` receives the addresses where a freed block begins and ends. If ``may_have`` is None, the policy ends.
        ``known`` receives a stream's pointer. All streams for which ``known`` returns True share their freed blocks. The freed
        blocks of any other stream serve that stream alone. If the driver has no such policy, the method returns False, and the
        driver goes on to reuse blocks as before.
        """

    def holds(self, value: object) -> bool:
        """Return whether ``value`` is an array or a block in this memory."""

    def begins(self, pointer: int) -> bool:
        """Return whether a block of this memory begins at an address."""

    def release(self) -> bool:
        """Return unused memory to the device; called inside `Driver.relaxed`.

        Returns whether all the memory was returned.
        """
