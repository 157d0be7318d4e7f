"""Define the types of captured graphs, and of a recording's memory."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Edge = tuple[Any, Any]
"""An edge of a recorded graph, from one node to another.

The second node waits until the first node has ended.
"""


class RecordedGraph(Protocol):
    """A captured graph, which can be launched repeatedly once it is ready.

    A graph never runs concurrently with itself.
    """

    @property
    def nodes(self) -> int:
        """The number of kernels, copies and the like in the graph."""

    @property
    def launch(self) -> Callable[[int], None]:
        """Return ``launch(pointer)``, which enqueues the whole graph on a stream.

        The graph counts as one launch. One thread at a time may call it, once the graph is ready.
        """

    def edges(self) -> Sequence[Edge]:
        """Return the edges as they were captured.

        Nodes compare like the nodes of `Driver.dependencies`.
        """

    def allocations(self) -> Sequence[Any]:
        """Return the nodes that allocate memory each time the graph runs.

        Nodes compare like the nodes of `edges`.
        """

    def host_copies(self) -> Sequence[int]:
        """Return the addresses that the graph copies host data to.

        The list has only the copies that the driver did not refuse earlier.
        """

    def arranged(self, add: Sequence[tuple[Any, Any]] = (), remove: Sequence[tuple[Any, Any]] = ()) -> "RecordedGraph":
        """Return a graph of the same nodes with edges added and removed.

        If there is nothing to add or remove, the method may return the graph itself.

        The driver may add nodes that make launches quicker. Called inside `Driver.relaxed`. Raises `CaptureError` for a graph
        that cannot be copied, and `MemoryError` like `instantiate`.
        """

    def marked(
        self, add: Sequence[tuple[Any, Any]], remove: Sequence[tuple[Any, Any]], groups: Sequence[Sequence[Any]]
    ) -> "MarkedGraph":
        """Return a graph like `arranged` that also times groups of nodes.

        A group's time is taken when all its nodes have ended. Raises the same errors as `arranged`.
        """

    def instantiate(self) -> None:
        """Make the graph ready to be launched; called inside `Driver.relaxed`.

        Raises `MemoryError` where the device has no memory for the graph.
        """

    def upload(self, pointer: int) -> None:
        """Upload the graph to the device in stream order.

        The first launch then does not have to upload it.
        """

    def destroy(self) -> None:
        """Destroy the graph; called inside `Driver.relaxed`.

        A launch that is under way goes on.
        """


class MarkedGraph(RecordedGraph, Protocol):
    """A graph that also measures times."""

    def times(self) -> list[float]:
        """Return each group's time in microseconds since the start of the launch.

        The last launch is measured, and it must have ended.
        """

    def cost(self) -> float:
        """Return the microseconds that one time measurement takes.

        The work after a measurement waits for that long.
        """


class RecordingMemory(Protocol):
    """The memory for the allocations of one recording, and for nothing else."""

    @property
    def allocator(self) -> Any:
        """Return the allocator for `Driver.swap_allocator`.

        It harms no capture. Freed blocks return to this memory, which serves this recording alone.
        """

    @property
    def nbytes(self) -> int:
        """Bytes taken from the device."""

    @property
    def in_order(self) -> int:
        """Bytes that the recording would have taken in serial order.

        Counted since `set_reuse_policy`, as if all recorded work ran one after the other.
        """

    def on_allocate(self, of: Callable[[object], None] | None) -> None:
        """Pass each newly allocated block to a function; None stops that.

        See `Driver.block_range`.
        """

    def set_reuse_policy(self, may_have: Callable[[int, int], bool] | None, known: Callable[[object], bool] = bool) -> bool:
        """Let a function decide which freed blocks the next array may reuse.

        ``may_have`` receives the addresses where a block begins and ends; None ends the policy. ``known`` receives a stream's
        pointer. Streams for which it is true share memory, and memory of any other stream stays with that stream. The method
        returns False if the driver has no such policy. Then the driver goes on to reuse blocks as before.
        """

    def holds(self, value: object) -> bool:
        """Return whether this memory holds an array or a block."""

    def begins(self, pointer: int) -> bool:
        """Return whether a block of this memory begins at an address."""

    def release(self) -> bool:
        """Return unused memory to the device; called inside `Driver.relaxed`.

        Returns whether all the memory was returned.
        """
