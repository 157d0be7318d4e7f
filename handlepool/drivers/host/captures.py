"""Record stream captures, and the calls that invalidate them (G9).

As on the hardware, a capture is a graph and not a list. It begins on one stream. A stream that waits for an event of the
capture joins it. If no stream of the capture waited for a joined stream before the end, the end raises an error. A call that a
GPU forbids during a capture (see `Captures.forbid`) spoils the capture here as well: the call raises, and the capture's end
raises.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from handlepool.drivers.host.race_checker import Access
from handlepool.drivers.host.scheduler import NOTHING, QueuedOperation
from handlepool.drivers.operands import ASARRAY
from handlepool.errors import ArgumentError, CaptureError, ContractError

if TYPE_CHECKING:
    from handlepool.drivers.host.streams import Queue, Stream, StreamTable, ThreadState

MODES = ("global", "thread_local", "relaxed")


class Node:
    """One recorded operation, and the nodes that it depends on."""

    __slots__ = ("accesses", "after", "function", "label", "lane")

    def __init__(
        self,
        function: Callable[[], object],
        label: str,
        accesses: Sequence[Access],
        after: "tuple[Node, ...]",
        lane: object,
    ) -> None:
        self.function = function
        self.label = label
        self.accesses = accesses
        self.after = after
        self.lane = lane
        """Key of the node's lane; its nodes run in sequence."""


class Capture:
    """A capture under way."""

    def __init__(self, identity: int, mode: str, thread: object, origin: "Queue") -> None:
        self.id = identity
        self.mode = mode
        self.thread = thread
        self.thread_name = threading.current_thread().name
        self.origin = origin
        self.members = [origin]
        self.nodes: list[Node] = []
        self.last: dict[object, Node] = {}
        """The last node of each lane."""
        self.spoiled: str | None = None
        self.ended = False

    def lane_behind(self, nodes: "Sequence[Node]") -> object:
        """Return the lane for a node that depends on these nodes.

        It is the lane of one of these nodes that is still the last node of its lane. Without such a node it is a new lane.
        """
        return next((node.lane for node in nodes if self.last[node.lane] is node), None) or object()

    def add(self, node: Node) -> Node:
        """Add a node as the last of its lane."""
        self.nodes.append(node)
        self.last[node.lane] = node
        return node

    def __repr__(self) -> str:
        return f"<capture {self.id}, {self.mode}, begun by thread {self.thread_name!r} on {self.origin!r}>"

    def spoil(self, reason: str) -> None:
        """Invalidate the capture; the first reason stays."""
        self.spoiled = self.spoiled or reason

    def check(self) -> None:
        """Raise if the capture was invalidated."""
        if self.spoiled:
            raise CaptureError(f"{self!r} was invalidated by {self.spoiled}")


class Mark:
    """The state of an event that was recorded in a capture."""

    __slots__ = ("capture", "nodes")

    def __init__(self, capture: Capture, nodes: tuple[Node, ...]) -> None:
        self.capture = capture
        self.nodes = nodes


class HostGraph:
    """A recorded graph, with CuPy's `Graph` interface.

    `launch` queues it on a stream.
    """

    def __init__(self, table: "StreamTable", nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.last: QueuedOperation = NOTHING
        """The end of the last launch: a graph never runs beside itself."""
        self.lanes: dict[object, int] = {}
        """The component of the checker's clocks for each lane."""
        self._table = table

    def launch(self, stream: "Stream | None" = None) -> None:
        """Queue the graph on a stream, by default the current stream.

        Nodes without an edge between them have no order.
        """
        self._table.launch(self, stream)


class Captures:
    """All captures of a driver."""

    def __init__(self, thread: "ThreadState") -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self.active: tuple[Capture, ...] = ()
        """Captures under way.

        The tuple is replaced and never changed, so that readers need no lock.
        """

    def refuse_plain(self, queue: "Queue", what: str) -> None:
        """Raise if a captured launch would write memory of no driver.

        A reader of such memory cannot wait for a replay.
        """
        if queue.capture is not None:
            what = f"{what}, which is NumPy's memory or another library's on the host,"
            queue.capture.spoil(what)
            raise CaptureError(
                f"{what} while {queue!r} is captured: nothing there waits for a replay. Pass an array of the driver's, as "
                f"{ASARRAY} makes one"
            )

    def forbid(self, call: str) -> None:
        """Spoil the captures that a call harms, and raise.

        As on a GPU, the call harms captures in global mode of any thread and captures in thread-local mode of this thread. It
        harms none if this thread has exchanged its own mode for *relaxed*.
        """
        if not self.active or self._thread.relaxed:
            return
        # The token identifies a thread for good, whereas `threading.get_ident` is reused after a thread has ended.
        own = self._thread.token
        harmed = [
            capture
            for capture in self.active
            if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread is own)
        ]
        if harmed:
            caller = threading.current_thread().name
            for capture in harmed:
                capture.spoil(f"{call} in thread {caller!r} without relaxed()")
            raise ContractError(
                f"{call} in thread {caller!r} harms {harmed[0]!r}: such calls belong inside `with driver.relaxed():`"
            )

    def refuse(self, queue: "Queue", what: str) -> None:
        """Raise and spoil the capture, for a call it cannot take.

        If the stream is not capturing, the method does nothing.
        """
        capture = queue.capture
        if capture is not None:
            capture.spoil(what)
            raise CaptureError(f"{what} on {queue!r}, which takes part in {capture!r}: that invalidates the capture")

    def begin(self, queue: "Queue", mode: str) -> None:
        """Begin a capture on a stream."""
        if mode not in MODES:
            raise ArgumentError(f"capture mode {mode!r} is none of {', '.join(MODES)}")
        if queue.synchronous:
            raise CaptureError("the legacy default stream cannot be captured: use another stream")
        with self._lock:
            if queue.capture is not None:
                raise CaptureError(f"{queue!r} takes part in {queue.capture!r} already")
            capture = Capture(next(self._ids), mode, self._thread.token, queue)
            queue.capture, queue.frontier = capture, ()
            self.active = (*self.active, capture)

    def end(self, queue: "Queue") -> list[Node]:
        """End the capture that began on a stream.

        Raises
        ------
        CaptureError
            If there is none, if it was invalidated, or if a stream that joined it was not waited for.
        """
        with self._lock:
            capture = queue.capture
            if capture is None:
                raise CaptureError(f"{queue!r} is not capturing")
            if capture.origin is not queue:
                raise CaptureError(f"{capture!r} must be ended there, not on {queue!r}")
            # As on a GPU, only the thread that began a capture may end it, unless the capture is relaxed.
            if capture.mode != "relaxed" and capture.thread is not self._thread.token:
                capture.spoil(f"an end_capture in thread {threading.current_thread().name!r}")
                capture.check()
            # Only nodes that the first stream depends on belong to the graph. Any other node is work that a joined stream has
            # left over.
            joined = _ancestors(queue.frontier)
            for member in capture.members:
                member.capture, member.frontier = None, ()
            capture.ended = True
            # Readers take the tuple without the lock, so it is replaced and never changed.
            self.active = tuple(other for other in self.active if other is not capture)
        capture.check()
        lost = [node.label or "an operation" for node in capture.nodes if node not in joined]
        if lost:
            raise CaptureError(
                f"{capture!r} ended while work of a joined stream was not waited for: {', '.join(lost)}. Record an event "
                "there, and let the first stream wait for it"
            )
        return capture.nodes

    def add(self, queue: "Queue", function: Callable[[], object], accesses: Sequence[Access], label: str) -> bool:
        """Record an operation; False if the stream is not capturing."""
        # Another thread may have ended the capture since the caller looked, so the stream is checked again under the lock.
        with self._lock:
            capture = queue.capture
            if capture is None:
                return False
            capture.check()
            after = queue.frontier
            queue.frontier = (capture.add(Node(function, label, accesses, after, capture.lane_behind(after))),)
            return True

    def embed(self, queue: "Queue", nodes: Sequence[Node]) -> bool:
        """Record a graph's nodes in a capture; False if not capturing."""
        with self._lock:
            capture = queue.capture
            if capture is None:
                return False
            capture.check()
            copies: dict[Node, Node] = {}
            lanes: dict[object, object] = {}
            for node in nodes:
                after = tuple(copies[earlier] for earlier in node.after) or queue.frontier
                # The copies get new lanes, because nodes without an order must not share a lane.
                lane = lanes.setdefault(node.lane, object())
                copies[node] = capture.add(Node(node.function, node.label, node.accesses, after, lane))
            # An empty graph adds no node, so the stream's next operation still depends on the earlier frontier.
            queue.frontier = tuple(copies.values()) or queue.frontier
            return True

    def dependencies(self, queue: "Queue") -> tuple[Node, ...]:
        """Return the nodes that the stream's next operation depends on."""
        with self._lock:
            return self._of(queue).frontier

    def set_dependencies(self, queue: "Queue", nodes: Sequence[Node]) -> None:
        """Make the stream's next operation depend on these nodes alone."""
        with self._lock:
            capture = self._of(queue).capture
            for node in nodes:
                if capture is None or capture.last.get(node.lane) is None:
                    raise ContractError(f"{queue!r} cannot depend on a node outside of {capture!r}")
            queue.frontier = tuple(dict.fromkeys(nodes))

    @staticmethod
    def _of(queue: "Queue") -> "Queue":
        if queue.capture is None:
            raise CaptureError(f"{queue!r} is not capturing")
        queue.capture.check()
        return queue

    def mark(self, queue: "Queue") -> Mark | None:
        """Return the mark of an event recorded now; None if not capturing."""
        with self._lock:
            capture = queue.capture
            if capture is None:
                return None
            capture.check()
            return Mark(capture, queue.frontier)

    def join(self, queue: "Queue", mark: Mark) -> None:
        """Let a stream join the capture of an event it waits for."""
        with self._lock:
            capture = mark.capture
            if capture.ended:
                raise CaptureError(f"{queue!r} waits for an event of {capture!r}, which has ended: record the event anew")
            capture.check()
            other = queue.capture
            if queue.synchronous:
                reason = "the legacy default stream's wait for an event of it"
            elif other is not None and other is not capture:
                reason = f"a wait that would merge {capture!r} and {other!r}"
                # The wait would merge two captures, so both become invalid.
                other.spoil(reason)
            else:
                reason = ""
            if reason:
                capture.spoil(reason)
                capture.check()
            if other is None:
                queue.capture, queue.frontier = capture, mark.nodes
                capture.members.append(queue)
            else:
                # The stream keeps its own dependencies and adds the dependencies of the event, each once.
                queue.frontier = tuple(dict.fromkeys(queue.frontier + mark.nodes))


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes and all nodes that they depend on."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.after
    return found


def rewired(nodes: Sequence[Node], add: Sequence[tuple[Node, Node]], remove: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Return copies of nodes with changed edges, in topological order.

    The lanes follow from the new edges: two nodes that lost their order no longer share a lane.

    Raises
    ------
    ContractError
        If an edge to remove does not exist, or the edges form a circle.
    """
    after = {node: dict.fromkeys(node.after) for node in nodes}
    for earlier, later in remove:
        if earlier not in after[later]:
            raise ContractError(f"no edge leads from {earlier.label!r} to {later.label!r}, so none can be removed")
        del after[later][earlier]
    for earlier, later in add:
        after[later][earlier] = None
    # The copies need the copies of their dependencies, so the nodes are visited in topological order.
    order = TopologicalSorter(after)
    try:
        sequence = [*order.static_order()]
    except CycleError as error:
        raise ContractError(f"edges of {len(nodes)} nodes lead in a circle: {error}") from error
    copies: dict[Node, Node] = {}
    last: dict[object, Node] = {}
    for node in sequence:
        behind = tuple(copies[earlier] for earlier in after[node])
        # A lane continues only from its last node. A second branch from the same node therefore starts a new lane.
        lane = next((earlier.lane for earlier in behind if last[earlier.lane] is earlier), None) or object()
        copies[node] = last[lane] = Node(node.function, node.label, node.accesses, behind, lane)
    return [*copies.values()]
