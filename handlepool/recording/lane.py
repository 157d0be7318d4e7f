"""Manage the streams of a recording: its main stream, and its lanes.

A node is a recorded call. A lane is a leased side slot with the nodes that are recorded on its stream. A leaf is a node that no
later node follows yet. Between two nodes, the main stream waits for all leaves. So untracked work, which is no node, runs after
everything recorded before it. CUDA nodes are the kernels and copies in the captured graph. A node adds none, one or several CUDA
nodes.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.order.track import NOTHING, Needs, Track
from handlepool.order.uses import Use
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.slot import Slot, bind_to_thread
from handlepool.recording.other_work import OtherWork
from handlepool.recording.rehearsal import CallSignature
from handlepool.tensors.layout import Piece, Token

LEFT_FREE = 4
"""The number of side slots that a recording leaves to other users.

A recording may lease the lanes that were asked for without regard to this number.
"""


class Node:
    """A call that was recorded as a node.

    Attributes
    ----------
    track, call : Track, int
        The lane's track, and the number of the call on this track.
    known : dict
        For each track, the number of the last call that this node follows. For its own track, the number of the node itself.
    ends : tuple
        The CUDA nodes that a later call waits for in order to follow this node.
    step : int
        The number of this node among all steps.
    steps : tuple of int
        The steps that a later call waits for in order to follow this node.
    """

    __slots__ = ("call", "ends", "known", "step", "steps", "track")

    def __init__(self, track: Track, call: int, known: Needs, step: int) -> None:
        self.track = track
        self.call = call
        self.known = known
        self.ends: tuple[Any, ...] = ()
        self.step = step
        self.steps: tuple[int, ...] = (step,)


class _LaneTrack(Track):
    """The track of a lane, whose calls are nodes.

    The track has no events and no caller, so the fields for them are not set.
    """

    __slots__ = ()

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.count = 0
        self.known = NOTHING


class Lane:
    """A slot that nodes are recorded on, and its recent nodes.

    The recent nodes are the nodes since the last untracked work.

    Attributes
    ----------
    ends : tuple
        The CUDA nodes that the stream's next work depends on, as last read from the driver.
    shown : bool
        Whether user code got the stream, and may therefore give it work at any time.
    """

    def __init__(self, slot: Slot, number: int, ends: tuple[Any, ...], *, shown: bool) -> None:
        self.slot = slot
        self.pointer = slot.pointer
        self.number = number
        self.ends = ends
        self.shown = shown
        self.track = _LaneTrack(slot.pointer)
        self.nodes: list[Node] = []

    def show(self) -> Slot:
        """Return the slot for user code.

        From then on, user code may give work to the slot's stream at any time, as `shown` says.
        """
        self.shown = True
        return self.slot

    def add(self, direct: Sequence[Node], step: int) -> Node:
        """Add a node that directly follows the nodes ``direct``."""
        track: _LaneTrack = self.track
        for each in direct:
            if each.known is not track.known:
                track.learn(each.known)
        track.count = call = track.count + 1
        # Each node needs a new dictionary, because the previous node keeps the present one.
        track.known = {**track.known, track: call}
        node = Node(track, call, track.known, step)
        self.nodes.append(node)
        return node

    def follow(self, others: Collection[Node]) -> None:
        """Let the lane's last node also follow ``others``."""
        for each in others:
            self.track.learn(each.known)
        self.nodes[-1].known = self.track.known

    def end(self, ends: tuple[Any, ...], more: tuple[Any, ...], users: Sequence[Node]) -> tuple[Any, ...]:
        """End the last node; return the CUDA nodes its followers wait for.

        ``ends`` are the CUDA nodes that the lane's stream waits for now, and ``more`` are the node's CUDA nodes on other streams.
        A call that follows the node also follows the nodes ``users``.
        """
        node, self.ends = self.nodes[-1], ends
        if more or users:
            ends = tuple(dict.fromkeys([*ends, *more, *chain.from_iterable(each.ends for each in users)]))
        if users:
            node.steps = tuple(sorted({node.step, *(each.step for each in users)}))
        node.ends = ends
        return ends

    def begin(self) -> None:
        """Begin a new track that follows all nodes so far."""
        self.track = _LaneTrack(self.pointer)
        self.nodes = []


class MainStream:
    """The captured stream, which waits for all leaves between two nodes.

    Attributes
    ----------
    slot : Slot
        The slot that captures. Set by `begin`.
    pointer : int
        Pointer of the slot's stream.
    deps : tuple
        The CUDA nodes that the stream was made to wait for.
    floor, floor_steps : tuple
        The CUDA nodes, and the steps, that every later node follows.
    leaves : dict of Node
        The nodes that no later node follows. The dictionary serves as an ordered set.
    others : OtherWork or None
        The untracked work since the last node.
    last_place : str
        The place of the last node.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.slot: Slot | None = None
        self.pointer = -1
        self.deps: tuple[Any, ...] = ()
        self.floor: tuple[Any, ...] = ()
        self.floor_steps: tuple[int, ...] = ()
        self.leaves: dict[Node, None] = {}
        self.others: OtherWork | None = None
        self.last_place = "the beginning"

    def begin(self, slot: Slot) -> bool:
        """Begin with the slot whose stream is captured.

        Return whether the driver can choose the CUDA nodes that the stream waits for.
        """
        self.slot, self.pointer = slot, slot.pointer
        floor = self._driver.dependencies(slot.pointer)
        self.floor = self.deps = floor or ()
        return floor is not None

    def new_work(self) -> tuple[Any, ...] | None:
        """Return the stream's dependencies if it got untracked work.

        Return None if the stream got no work since it was made to wait for `deps`.
        """
        # Any work on the stream changes the stream's dependencies. So they also show work that no caller reported.
        found, known = self._driver.dependencies(self.pointer) or (), self.deps
        # The sequences are compared first, because making two sets costs more time. No sequence has a CUDA node twice.
        return None if found == known or (len(found) == len(known) and {*found} == {*known}) else found

    def other_work(self) -> OtherWork:
        """Return the untracked work since the last node."""
        if self.others is None:
            self.others = OtherWork()
        return self.others

    def note_short_fork(self, fork: object, states: int, wanted: int) -> None:
        """Note that a fork asked for ``wanted`` states and got ``states``."""
        if self.others is not None:
            self.others.note_short_fork(fork, states, wanted)

    def end_node(self, node: Node, place: str, ends: tuple[Any, ...] | None, *, follows_more: bool) -> None:
        """Make an ended node a leaf; let the stream wait for leaves.

        ``ends`` are the CUDA nodes that a follower of the node waits for, or None if the driver cannot choose dependencies.
        ``follows_more`` says that the node follows more nodes now than when it began.
        """
        # Untracked work is noted anew, because later work lies between this node and the next node.
        self.last_place, self.others = place, None
        if follows_more:
            self.leaves = {leaf: None for leaf in self.leaves if node.known.get(leaf.track, 0) < leaf.call}
        self.leaves[node] = None
        if ends is not None:
            self.deps = (ends if len(self.leaves) == 1 else ends_of(self.leaves)) or self.floor
            self._driver.set_dependencies(self.pointer, self.deps)

    def begin_anew(self, steps: tuple[int, ...], deps: tuple[Any, ...]) -> None:
        """Let all later nodes follow ``steps``.

        ``deps`` are the last CUDA nodes of these steps. The caller makes sure that these steps follow everything that was
        recorded so far.
        """
        # The memory that untracked work used is unknown. So every later node follows that work.
        self.floor = self.deps = deps
        self.floor_steps, self.leaves = steps, {}

    def join(self, lanes: Iterable[Lane]) -> None:
        """Let the stream wait for all lanes.

        CUDA cannot end a capture before the captured stream waits for all work of the streams that joined the capture.
        """
        driver = self._driver
        for lane in lanes:
            if lane.slot is self.slot:
                continue
            # The lane first gets the same dependencies as the main stream. So the wait for its event adds no dependency to the
            # main stream, and only tells CUDA that the lane is joined.
            driver.set_dependencies(lane.pointer, self.deps)
            driver.record_event(lane.slot.end_event, lane.pointer)
            driver.wait_event(self.pointer, lane.slot.end_event)

    def forget(self) -> None:
        """Let go of the slot, the nodes and the CUDA nodes."""
        self.slot = None
        self.leaves.clear()
        self.floor = self.deps = ()


OpenNode = tuple[CallSignature, Lane, Node, Sequence[Piece | Token], Sequence[Piece | Token], list[Use], list[Use]]
"""A node that is being recorded.

The tuple has the node's signature, lane and `Node`, the memory that it reads, the memory that it writes, and the entries of the
books for the read memory and for the written memory.
"""


class LeasedLanes:
    """Lease the lanes of a recording, and choose one lane per node.

    Parameters
    ----------
    pool : PoolInternals
    device : int
    limit : int
        Maximum number of nodes that will run at once. With 1 there is one lane. With more, as many lanes are leased as the data
        allows.
    slots : list of Slot
        The list to which each leased slot is added.

    Attributes
    ----------
    all : list of Lane
    wanted, got : int
        The number of lanes that the data allows, and the number of lanes that were leased.
    pointers : set of int
        Pointers of the lanes' streams and of the main stream.
    of : dict
        The lane of each track.
    """

    def __init__(self, pool: PoolInternals, device: int, limit: int, slots: list[Slot]) -> None:
        self.all: list[Lane] = []
        self.wanted = self.got = 0
        self.pointers: set[object] = set()
        self._limit = limit
        self._width = 1 if limit == 1 else MOST_SIDE_SLOTS
        self._pool = pool
        self._sides = pool.device(device).sides
        self._slots = slots
        self.of: dict[Track, Lane] = {}

    def begin(self, main: Slot, *, exact: bool) -> None:
        """Begin with the slot of the main stream.

        ``exact`` says whether the driver can choose dependencies. If it cannot, there is only one lane.
        """
        self._main = main
        self._width = self._width if exact else 1
        self._exact = exact
        self.pointers.add(main.pointer)

    def nodes(self, calls: Needs) -> list[Node]:
        """Return the nodes for ``calls``, which maps tracks to call numbers."""
        of = self.of
        return [of[track].nodes[call - 1] for track, call in calls.items()]

    def choose(self, producers: Sequence[Node], ends: tuple[Any, ...]) -> Lane:
        """Return the lane for a new node that follows ``producers``.

        The first choice is the lane of a producer. Next come a lane whose nodes the new node follows anyway, a new lane, and the
        lane that has been idle for longest. A new lane waits for ``ends``, as the main stream does.
        """
        # The producer must be the last node of its lane. Otherwise the new node would also wait for the nodes after the producer.
        last: Node | None = None
        for each in producers:
            if self.of[each.track].nodes[-1] is each and (last is None or each.step > last.step):
                last = each
        if last is not None:
            return self.of[last.track]
        for lane in self.all:
            track = lane.track
            if not track.count:
                return lane
            for each in producers:
                if each.known.get(track, 0) >= track.count:
                    return lane
        return self._lease(ends) or min(self.all, key=_last_step)

    def begin_anew(self) -> None:
        """Begin new tracks that follow all nodes so far."""
        self.of = {}
        for lane in self.all:
            lane.begin()
            self.of[lane.track] = lane

    def forget(self) -> None:
        """Let go of the lanes and of the main stream's slot."""
        self.all.clear()
        self.of.clear()
        # The recording may outlive the lease of this slot, so it must not refer to the slot.
        self.__dict__.pop("_main", None)

    def _lease(self, ends: tuple[Any, ...]) -> Lane | None:
        """Lease one more lane; return None if the present lanes must suffice.

        If no slot is free for the first lane, the main stream becomes the first lane.
        """
        if len(self.all) >= self._width:
            return None
        count, sides = len(self.all), self._sides
        # Up to the number of lanes that were asked for, a lane may take any free slot. A further lane must leave `LEFT_FREE`
        # slots to forks and other recordings.
        free = self._exact and self.wanted <= count and (count < self._limit or sides.spare > LEFT_FREE)
        slot = sides.lease() if free else None
        self.wanted = max(self.wanted, count + 1)
        if slot is None:
            if self.all:
                return None
            slot = self._main
        else:
            self._slots.append(slot)
            bind_to_thread(self._pool.repaired(slot))
            # The side stream joins the capture because it waits for an event that the captured main stream records.
            self._pool.driver.record_event(slot.start_event, self._main.pointer)
            self._pool.driver.wait_event(slot.pointer, slot.start_event)
        lane = Lane(slot, count, ends, shown=slot is self._main)
        self.all.append(lane)
        self.of[lane.track] = lane
        self.got = len(self.all)
        self.pointers.add(slot.pointer)
        return lane


def direct(producers: Sequence[Node]) -> list[Node]:
    """Return the producers that no other producer follows.

    A stream that waits for a node thereby waits for all nodes that the node follows. So it need not wait for the other producers.
    """
    found = []
    for each in producers:
        track, call = each.track, each.call
        for other in producers:
            if other is not each and other.known.get(track, 0) >= call:
                break
        else:
            found.append(each)
    return found


def known_to(nodes: Iterable[Node]) -> Needs:
    """Return the calls that a node follows if it follows ``nodes``."""
    known: Needs = {}
    for node in nodes:
        for track, last in node.known.items():
            if known.get(track, 0) < last:
                known[track] = last
    return known


def ends_of(nodes: Collection[Node]) -> tuple[Any, ...]:
    """Return the CUDA nodes that a follower of ``nodes`` waits for."""
    ends = [each.ends for each in nodes]
    return ends[0] if len(ends) == 1 else tuple(dict.fromkeys(chain.from_iterable(ends)))


def steps_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Return the steps that a follower of ``nodes`` waits for."""
    return nodes[0].steps if len(nodes) == 1 else tuple(sorted([step for each in nodes for step in each.steps]))


def _last_step(lane: Lane) -> int:
    return lane.nodes[-1].step
