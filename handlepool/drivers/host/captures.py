"""Stream captures: what is recorded instead of run, and what ends a recording badly (G9).

As on the hardware, a capture is a graph and not a list. It begins on one stream; a stream that waits for one of its events
joins it; a stream that did not come back to the first by the end is an error. What a GPU forbids while a capture is under way
(see `Captures.forbid`) spoils it here, too: the call raises, and the capture's end raises.
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
    """One recorded operation, and those that it runs after."""

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
        """Nodes of one lane run one after the other."""


class Capture:
    """A recording under way."""

    def __init__(self, identity: int, mode: str, thread: object, origin: "Queue") -> None:
        self.id = identity
        self.mode = mode
        self.thread = thread
        self.thread_name = threading.current_thread().name
        self.origin = origin
        self.members = [origin]
        self.nodes: list[Node] = []
        self.last: dict[object, Node] = {}
        """By lane, its last node."""
        self.spoiled: str | None = None
        self.ended = False

    def lane_behind(self, nodes: "Sequence[Node]") -> object:
        """Return the lane that a node behind these goes on with: of one that nothing on its lane follows yet, or a new one."""
        return next((node.lane for node in nodes if self.last[node.lane] is node), None) or object()

    def add(self, node: Node) -> Node:
        """Take a node in, as the last of its lane."""
        self.nodes.append(node)
        self.last[node.lane] = node
        return node

    def __repr__(self) -> str:
        return f"<capture {self.id}, {self.mode}, begun by thread {self.thread_name!r} on {self.origin!r}>"

    def spoil(self, reason: str) -> None:
        """Invalidate it; the first reason stays."""
        self.spoiled = self.spoiled or reason

    def check(self) -> None:
        """Raise if it was invalidated."""
        if self.spoiled:
            raise CaptureError(f"{self!r} was invalidated by {self.spoiled}")


class Mark:
    """What an event that was recorded in a capture stands for."""

    __slots__ = ("capture", "nodes")

    def __init__(self, capture: Capture, nodes: tuple[Node, ...]) -> None:
        self.capture = capture
        self.nodes = nodes


class HostGraph:
    """A recorded graph, as CuPy's `Graph`: `launch` queues it on a stream."""

    def __init__(self, table: "StreamTable", nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.last: QueuedOperation = NOTHING
        """The end of the last launch: a graph never runs beside itself."""
        self.lanes: dict[object, int] = {}
        """A component of the checker's clocks for each lane."""
        self._table = table

    def launch(self, stream: "Stream | None" = None) -> None:
        """Queue all of it on a stream, the current one by default. Nodes without an edge between them have no order."""
        self._table.launch(self, stream)


class Captures:
    """All captures of a driver."""

    def __init__(self, thread: "ThreadState") -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self.active: tuple[Capture, ...] = ()
        """Replaced and never changed, so that it is read without the lock."""

    def refuse_plain(self, queue: "Queue", what: str) -> None:
        """Raise for memory that no driver made and that a captured launch would write: whoever reads it waits for no replay."""
        if queue.capture is not None:
            what = f"{what}, which is NumPy's memory or another library's on the host,"
            queue.capture.spoil(what)
            raise CaptureError(
                f"{what} while {queue!r} is captured: nothing there waits for a replay. Pass an array of the driver's, as "
                f"{ASARRAY} makes one"
            )

    def forbid(self, call: str) -> None:
        """Spoil the captures that a call would harm on a GPU, and raise.

        It harms captures in global mode of any thread and captures in thread-local mode of this thread, unless this thread has
        exchanged its own mode for *relaxed*.
        """
        if not self.active or self._thread.relaxed:
            return
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
        """Something that a capturing stream cannot take: it spoils the capture and raises."""
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
            if capture.mode != "relaxed" and capture.thread is not self._thread.token:
                capture.spoil(f"an end_capture in thread {threading.current_thread().name!r}")
                capture.check()
            joined = _ancestors(queue.frontier)
            for member in capture.members:
                member.capture, member.frontier = None, ()
            capture.ended = True
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
        """Record an operation; False if the stream is not capturing after all."""
        with self._lock:
            capture = queue.capture
            if capture is None:
                return False
            capture.check()
            after = queue.frontier
            queue.frontier = (capture.add(Node(function, label, accesses, after, capture.lane_behind(after))),)
            return True

    def embed(self, queue: "Queue", nodes: Sequence[Node]) -> bool:
        """Record a graph's nodes as part of a capture; False if the stream is not capturing after all."""
        with self._lock:
            capture = queue.capture
            if capture is None:
                return False
            capture.check()
            copies: dict[Node, Node] = {}
            lanes: dict[object, object] = {}
            for node in nodes:
                after = tuple(copies[earlier] for earlier in node.after) or queue.frontier
                lane = lanes.setdefault(node.lane, object())
                copies[node] = capture.add(Node(node.function, node.label, node.accesses, after, lane))
            queue.frontier = tuple(copies.values()) or queue.frontier
            return True

    def dependencies(self, queue: "Queue") -> tuple[Node, ...]:
        """Return the nodes that whatever the stream is given next will run after."""
        with self._lock:
            return self._of(queue).frontier

    def set_dependencies(self, queue: "Queue", nodes: Sequence[Node]) -> None:
        """Let whatever the stream is given next run after these nodes alone."""
        with self._lock:
            capture = self._of(queue).capture
            for node in nodes:
                if capture is None or capture.last.get(node.lane) is None:
                    raise ContractError(f"{queue!r} cannot be put behind a node of another capture than {capture!r}")
            queue.frontier = tuple(dict.fromkeys(nodes))

    @staticmethod
    def _of(queue: "Queue") -> "Queue":
        if queue.capture is None:
            raise CaptureError(f"{queue!r} is not capturing")
        queue.capture.check()
        return queue

    def mark(self, queue: "Queue") -> Mark | None:
        """Return what an event stands for that is recorded now; None if the stream is not capturing after all."""
        with self._lock:
            capture = queue.capture
            if capture is None:
                return None
            capture.check()
            return Mark(capture, queue.frontier)

    def join(self, queue: "Queue", mark: Mark) -> None:
        """Let a stream take part, from now on, in the capture of an event that it waits for."""
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
                queue.frontier = tuple(dict.fromkeys(queue.frontier + mark.nodes))


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes, and all that they run after."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.after
    return found


def rewired(nodes: Sequence[Node], add: Sequence[tuple[Node, Node]], remove: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Return copies of nodes, with edges more and edges less, each behind all that it runs after.

    Their lanes are those of the edges that there are then: two nodes that lost their order are on one lane no more.

    Raises
    ------
    ContractError
        For an edge to be taken away that is not there, and for edges in a circle.
    """
    after = {node: dict.fromkeys(node.after) for node in nodes}
    for earlier, later in remove:
        if earlier not in after[later]:
            raise ContractError(f"there is no edge from {earlier.label!r} to {later.label!r} that could be taken away")
        del after[later][earlier]
    for earlier, later in add:
        after[later][earlier] = None
    order = TopologicalSorter(after)
    try:
        sequence = [*order.static_order()]
    except CycleError as error:
        raise ContractError(f"edges of {len(nodes)} nodes lead in a circle: {error}") from error
    copies: dict[Node, Node] = {}
    last: dict[object, Node] = {}
    for node in sequence:
        behind = tuple(copies[earlier] for earlier in after[node])
        lane = next((earlier.lane for earlier in behind if last[earlier.lane] is earlier), None) or object()
        copies[node] = last[lane] = Node(node.function, node.label, node.accesses, behind, lane)
    return [*copies.values()]
