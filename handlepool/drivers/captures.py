"""Type the graphs that a driver captures, and the memory of a recording."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Edge = tuple[Any, Any]
"""Of a recorded graph, from one node to another, which waits for all of the one to end."""


class RecordedGraph(Protocol):
    """What was captured, to be launched again and again once it is ready; a graph never runs beside itself."""

    @property
    def nodes(self) -> int:
        """How many kernels, copies and the like are in it."""

    @property
    def launch(self) -> Callable[[int], None]:
        """``launch(pointer)`` enqueues all of it on a stream, as one launch. For one thread at a time, once it is ready."""

    def edges(self) -> Sequence[Edge]:
        """Return the edges as they were captured. Nodes compare as those of `Driver.dependencies`."""

    def allocations(self) -> Sequence[Any]:
        """Return the nodes that allocate memory each time the graph runs; they compare as those of `edges`."""

    def host_copies(self) -> Sequence[int]:
        """Return the addresses that the graph copies to from the host, where the driver refused no such copy before."""

    def arranged(self, add: Sequence[tuple[Any, Any]] = (), remove: Sequence[tuple[Any, Any]] = ()) -> "RecordedGraph":
        """Return a graph of the same nodes, with edges more and edges less; itself where there is nothing to do.

        The driver may add what makes launches quicker. Called inside `Driver.relaxed`. Raises `CaptureError` for a graph that
        cannot be copied, and `MemoryError` as `instantiate`.
        """

    def marked(
        self, add: Sequence[tuple[Any, Any]], remove: Sequence[tuple[Any, Any]], groups: Sequence[Sequence[Any]]
    ) -> "MarkedGraph":
        """Return a graph as `arranged`, which takes the time when all nodes of a group have ended; raises as that."""

    def instantiate(self) -> None:
        """Make it ready to be launched; called inside `Driver.relaxed`. Raises `MemoryError` where the device has none for it."""

    def upload(self, pointer: int) -> None:
        """Bring it to the device, in the order of a stream, so that the first launch does not have to."""

    def destroy(self) -> None:
        """Give it back; a launch that is under way goes on. Called inside `Driver.relaxed`."""


class MarkedGraph(RecordedGraph, Protocol):
    """A graph that takes times."""

    def times(self) -> list[float]:
        """Return for each group the microseconds from the beginning to its end, of the last launch, which has passed."""

    def cost(self) -> float:
        """Return how many microseconds it took to take a time, which whatever comes behind that waits for."""


class RecordingMemory(Protocol):
    """Memory for what is allocated while a function is recorded, and for nothing else."""

    @property
    def allocator(self) -> Any:
        """For `Driver.swap_allocator`. Harms no capture. What is freed comes back here, and is given to the recording alone."""

    @property
    def nbytes(self) -> int:
        """Bytes taken from the device."""

    @property
    def in_order(self) -> int:
        """Bytes that would have been taken, since `set_reuse_policy`, if all that was recorded ran one after the other."""

    def on_allocate(self, of: Callable[[object], None] | None) -> None:
        """Pass each block that is allocated from now on to a function; None ends that. See `Driver.block_range`."""

    def set_reuse_policy(self, may_have: Callable[[int, int], bool] | None, known: Callable[[object], bool] = bool) -> bool:
        """Give what was freed to the next array for which a function says so; None ends that.

        The function is told where a block begins and ends. Streams that are ``known``, by their pointers, get memory of each
        other; that of any other stream is for that stream alone. False where the driver cannot, and does as before.
        """

    def holds(self, value: object) -> bool:
        """Whether a value is an array in this memory, or what stands for a block of it."""

    def begins(self, pointer: int) -> bool:
        """Whether a block of this memory begins at an address."""

    def release(self) -> bool:
        """Give what no array has back to the device; called inside `Driver.relaxed`. Whether that was all."""
