"""Record stream captures, and the calls that invalidate them (G9).

As on a GPU, a capture is a graph and not a list. A capture begins on one stream. A stream that waits for an event of the capture
joins the capture. Before the end, the first stream must wait for the work of each joined stream, or the end raises an error. A
call that a GPU forbids during a capture (see `Captures.forbid`) spoils the capture here as well: the call raises, and the
capture's end raises.
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
        """Key of the node's lane, whose nodes run one after another."""


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
        """Return the lane for a new node that depends on ``nodes``.

        If a node of ``nodes`` is still the last node of its lane, the new node continues that lane. If not, it gets a new lane.
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
            raise CaptureError(f"{self!r} was invalidated by {self.spoiled}; capture again without this call")


class Mark:
    """The moment of an event that was recorded in a capture.

    ``nodes`` are the nodes that the event's stream depended on when the event was recorded.
    """

    __slots__ = ("capture", "nodes")

    def __init__(self, capture: Capture, nodes: tuple[Node, ...]) -> None:
        self.capture = capture
        self.nodes = nodes


class HostGraph:
    """A recorded graph, with CuPy's `Graph` interface.

    `launch` queues the graph on a stream.
    """

    def __init__(self, table: "StreamTable", nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.last: QueuedOperation = NOTHING
        """The end of the last launch. The next launch waits for it."""
        self.lanes: dict[object, int] = {}
        """The component of the race checker's clocks, by lane."""
        self._table = table

    def launch(self, stream: "Stream | None" = None) -> None:
        """Queue the graph on a stream, by default the current stream.

        Only the graph's edges order its nodes.
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
        """Raise if a captured launch would write memory that no driver owns.

        A reader of such memory cannot wait for a replay. ``what`` names the write.
        """
        if queue.capture is not None:
            what = f"{what} (memory of NumPy or another library on the host)"
            queue.capture.spoil(what)
            raise CaptureError(
                f"{what} cannot be captured on {queue!r}, because a reader of that memory cannot wait for a replay. Pass an "
                f"array of the driver, made by {ASARRAY}"
            )

    def forbid(self, call: str) -> None:
        """Spoil the captures that a call harms, and raise.

        As on a GPU, the call harms captures in global mode of any thread and captures in thread-local mode of this thread. If
        this thread has exchanged its own mode for *relaxed*, the call harms no capture.
        """
        if not self.active or self._thread.relaxed:
            return
        # No other thread ever has the same token. `threading.get_ident` would reuse the number of a thread that has ended.
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
                f"{call} in thread {caller!r} harms {harmed[0]!r}; make such a call inside `with driver.relaxed():`"
            )

    def refuse(self, queue: "Queue", what: str) -> None:
        """Raise if a stream is capturing, and spoil its capture.

        ``what`` names the call that a capture cannot take.
        """
        capture = queue.capture
        if capture is not None:
            capture.spoil(what)
            raise CaptureError(
                f"{what} on {queue!r} invalidated {capture!r}, in which this stream takes part; make such a call before the "
                "capture or after it"
            )

    def begin(self, queue: "Queue", mode: str) -> None:
        """Begin a capture on a stream."""
        if mode not in MODES:
            raise ArgumentError(f"mode={mode!r}; the mode of a capture must be one of {', '.join(MODES)}")
        if queue.synchronous:
            raise CaptureError("the legacy default stream cannot be captured: use another stream")
        with self._lock:
            if queue.capture is not None:
                raise CaptureError(f"{queue!r} takes part in {queue.capture!r} already; end that capture first")
            capture = Capture(next(self._ids), mode, self._thread.token, queue)
            queue.capture, queue.frontier = capture, ()
            self.active = (*self.active, capture)

    def end(self, queue: "Queue") -> list[Node]:
        """End the capture that began on a stream.

        Raises
        ------
        CaptureError
            If no capture began on the stream, if the capture was invalidated, or if the stream did not wait for all work of the
            streams that joined.
        """
        with self._lock:
            capture = queue.capture
            if capture is None:
                raise CaptureError(f"{queue!r} is not capturing, so it has no capture to end; begin a capture first")
            if capture.origin is not queue:
                raise CaptureError(f"{capture!r} cannot be ended on {queue!r}; end a capture on the stream that it began on")
            # As on a GPU, only the thread that began a capture may end it, unless the capture is relaxed.
            if capture.mode != "relaxed" and capture.thread is not self._thread.token:
                capture.spoil(f"an end_capture in thread {threading.current_thread().name!r}, which did not begin the capture")
                capture.check()
            # The graph may have only nodes that the first stream depends on. Any other node is work of a joined stream that the
            # first stream did not wait for.
            joined = _ancestors(queue.frontier)
            for member in capture.members:
                member.capture, member.frontier = None, ()
            capture.ended = True
            # Other threads read `active` without the lock, so the tuple is replaced and never changed.
            self.active = tuple(other for other in self.active if other is not capture)
        capture.check()
        lost = [node.label or "an operation" for node in capture.nodes if node not in joined]
        if lost:
            raise CaptureError(
                f"{capture!r} ended while this work of another stream was not waited for: {', '.join(lost)}. Record an event "
                "behind that work, and let the capture's first stream wait for the event"
            )
        return capture.nodes

    def add(self, queue: "Queue", function: Callable[[], object], accesses: Sequence[Access], label: str) -> bool:
        """Record an operation in the stream's capture.

        Return False if the stream is not capturing.
        """
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
        """Record copies of a graph's nodes in the stream's capture.

        Return False if the stream is not capturing.
        """
        with self._lock:
            capture = queue.capture
            if capture is None:
                return False
            capture.check()
            copies: dict[Node, Node] = {}
            lanes: dict[object, object] = {}
            for node in nodes:
                after = tuple(copies[earlier] for earlier in node.after) or queue.frontier
                # The copies get new lanes. A graph may be embedded twice without an order, and nodes without an order must not
                # share a lane.
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
        """Make the stream's next operation depend on ``nodes`` alone."""
        with self._lock:
            capture = self._of(queue).capture
            for node in nodes:
                if capture is None or capture.last.get(node.lane) is None:
                    raise ContractError(f"{queue!r} cannot depend on a node outside of {capture!r}; pass nodes of this capture")
            queue.frontier = tuple(dict.fromkeys(nodes))

    @staticmethod
    def _of(queue: "Queue") -> "Queue":
        if queue.capture is None:
            raise CaptureError(f"{queue!r} is not capturing, so its next operation has no dependencies; begin a capture first")
        queue.capture.check()
        return queue

    def mark(self, queue: "Queue") -> Mark | None:
        """Return a mark for an event that the stream records now.

        If the stream is not capturing, return None.
        """
        with self._lock:
            capture = queue.capture
            if capture is None:
                return None
            capture.check()
            return Mark(capture, queue.frontier)

    def join(self, queue: "Queue", mark: Mark) -> None:
        """Let a stream that waits for an event join the event's capture.

        ``mark`` is the moment of the event.
        """
        with self._lock:
            capture = mark.capture
            if capture.ended:
                raise CaptureError(
                    f"{queue!r} waits for an event that was recorded in {capture!r}, which has ended; record the event again"
                )
            capture.check()
            other = queue.capture
            if queue.synchronous:
                reason = "a wait of the legacy default stream for an event of the capture"
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
                # The stream keeps its own dependencies, and gets the event's dependencies in addition, each once.
                queue.frontier = tuple(dict.fromkeys(queue.frontier + mark.nodes))


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return ``nodes`` and all nodes that they depend on."""
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

    The copies' lanes follow from the new edges, so two nodes that have lost their order share no lane.

    Raises
    ------
    ContractError
        If an edge to remove does not exist, or the edges form a circle.
    """
    after = {node: dict.fromkeys(node.after) for node in nodes}
    for earlier, later in remove:
        if earlier not in after[later]:
            raise ContractError(
                f"no edge leads from {earlier.label!r} to {later.label!r}, so no edge can be removed; pass an edge of the graph"
            )
        del after[later][earlier]
    for earlier, later in add:
        after[later][earlier] = None
    # The copies need the copies of their dependencies, so the nodes are visited in topological order.
    order = TopologicalSorter(after)
    try:
        sequence = [*order.static_order()]
    except CycleError as error:
        raise ContractError(
            f"the edges between {len(nodes)} nodes lead in a circle ({error}); pass edges that form no circle"
        ) from error
    copies: dict[Node, Node] = {}
    last: dict[object, Node] = {}
    for node in sequence:
        behind = tuple(copies[earlier] for earlier in after[node])
        # A node continues a lane only behind the lane's last node. So if two nodes depend on the same node, the second node
        # starts a new lane.
        lane = next((earlier.lane for earlier in behind if last[earlier.lane] is earlier), None) or object()
        copies[node] = last[lane] = Node(node.function, node.label, node.accesses, behind, lane)
    return [*copies.values()]
