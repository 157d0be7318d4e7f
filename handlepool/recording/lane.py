"""The streams of a recording: its main stream, and its lanes.

A lane is a leased side slot with its nodes. A leaf is a node that no later node follows yet. Outside of nodes, the main stream
waits for all leaves. So untracked work runs after everything recorded before it.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.order.track import NOTHING, Needs, Track
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.slot import Slot, bind_to_thread
from handlepool.recording.other_work import OtherWork

LEFT_FREE = 4
"""Side slots that a recording leaves to other users.

The rule holds once the recording has as many lanes as were asked for.
"""


class Node:
    """A call that was recorded as a node.

    Attributes
    ----------
    track, call : Track, int
        The lane's track, and the call's number there.
    known : dict
        By track, the last call that this node follows, and the node itself.
    ends : tuple
        The nodes of the capture that a later call waits for.
    step : int
        Its number among all steps.
    steps : tuple of int
        The steps that a later call waits for.
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

    The track has neither events nor a caller, and none of their fields.
    """

    __slots__ = ()

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.count = 0
        self.known = NOTHING


class Lane:
    """A slot that nodes are recorded on, and its recent nodes.

    The nodes are those recorded since the last untracked work.

    Attributes
    ----------
    ends : tuple
        The dependencies of the stream (nodes of the capture) when they were last read.
    shown : bool
        Whether user code has had the stream, and may use it again.
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
        """Return the slot for user code, which may keep the stream."""
        self.shown = True
        return self.slot

    def add(self, direct: Sequence[Node], step: int) -> Node:
        """Add a node that follows some nodes directly."""
        track: _LaneTrack = self.track
        for each in direct:
            if each.known is not track.known:
                track.learn(each.known)
        track.count = call = track.count + 1
        # A new dictionary is made for each node, because the former node keeps its own.
        track.known = {**track.known, track: call}
        node = Node(track, call, track.known, step)
        self.nodes.append(node)
        return node

    def follow(self, others: Collection[Node]) -> None:
        """Let the last node follow other nodes too."""
        for each in others:
            self.track.learn(each.known)
        self.nodes[-1].known = self.track.known

    def end(self, ends: tuple[Any, ...], more: tuple[Any, ...], users: Sequence[Node]) -> tuple[Any, ...]:
        """End the last node; return the nodes a later call waits for.

        The node's stream waits for ``ends``, which are nodes of the capture. ``more`` are nodes that were captured elsewhere. A
        later call follows the ``users`` too.
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
    """The captured stream, which waits for all leaves outside of nodes.

    Attributes
    ----------
    slot : Slot
        The slot that captures. Set by `begin`.
    pointer : int
        Pointer of the slot's stream.
    deps : tuple
        The nodes of the capture that the stream was made to wait for.
    floor, floor_steps : tuple
        The nodes of the capture, and the steps, that every node follows.
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
        """Begin with the slot that captures.

        Return whether the driver can let the stream wait for nodes by choice.
        """
        self.slot, self.pointer = slot, slot.pointer
        floor = self._driver.dependencies(slot.pointer)
        self.floor = self.deps = floor or ()
        return floor is not None

    def new_work(self) -> tuple[Any, ...] | None:
        """Return the dependencies of a stream that was given untracked work.

        Return None if the stream was given no work since it was made to wait for `deps`.
        """
        # The stream's dependencies change with any work that it is given, so they tell of work that no caller reported.
        found, known = self._driver.dependencies(self.pointer) or (), self.deps
        # The sequences are compared first, because to make two sets costs more. Neither sequence has a node twice.
        return None if found == known or (len(found) == len(known) and {*found} == {*known}) else found

    def other_work(self) -> OtherWork:
        """Return the untracked work since the last node."""
        if self.others is None:
            self.others = OtherWork()
        return self.others

    def note_short_fork(self, fork: object, states: int, wanted: int) -> None:
        """Note a fork that has fewer states than it wanted."""
        if self.others is not None:
            self.others.note_short_fork(fork, states, wanted)

    def end_node(self, node: Node, place: str, ends: tuple[Any, ...] | None, *, follows_more: bool) -> None:
        """Make an ended node a leaf, and wait for all leaves.

        A later call of the node waits for ``ends``. They are None where the driver cannot let a stream wait by choice.
        ``follows_more`` says that the node follows more nodes than it did when it began.
        """
        # Untracked work that comes from now on lies between this node and the next node.
        self.last_place, self.others = place, None
        if follows_more:
            self.leaves = {leaf: None for leaf in self.leaves if node.known.get(leaf.track, 0) < leaf.call}
        self.leaves[node] = None
        if ends is not None:
            self.deps = (ends if len(self.leaves) == 1 else ends_of(self.leaves)) or self.floor
            self._driver.set_dependencies(self.pointer, self.deps)

    def begin_anew(self, steps: tuple[int, ...], deps: tuple[Any, ...]) -> None:
        """Let later nodes follow some steps, whose nodes are ``deps``.

        The stream waits for everything that was recorded so far.
        """
        # Nothing is known of the memory that untracked work used, so every later node follows that work.
        self.floor = self.deps = deps
        self.floor_steps, self.leaves = steps, {}

    def join(self, lanes: Iterable[Lane]) -> None:
        """Let the stream wait for all lanes.

        CUDA ends no capture while work of a forked stream is not joined.
        """
        driver = self._driver
        for lane in lanes:
            if lane.slot is self.slot:
                continue
            # The lane first gets the main stream's own dependencies, so its end event adds no dependency to the main stream.
            driver.set_dependencies(lane.pointer, self.deps)
            driver.record_event(lane.slot.end_event, lane.pointer)
            driver.wait_event(self.pointer, lane.slot.end_event)

    def forget(self) -> None:
        """Release the slot, the nodes and the capture's nodes."""
        self.slot = None
        self.leaves.clear()
        self.floor = self.deps = ()


class LeasedLanes:
    """Lease the lanes of a recording, and choose one lane per node.

    Parameters
    ----------
    pool : PoolInternals
    device : int
    limit : int
        Maximum number of nodes that will run at once. With 1 there is one lane. With more, there are as many as the data allows.
    slots : list of Slot
        Gets each slot that is leased.

    Attributes
    ----------
    all : list of Lane
    wanted, got : int
        The number of lanes that the data allows, and of lanes that were leased.
    pointers : set of int
        The streams of the lanes, and the main stream.
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

        Without exact dependencies there is one lane.
        """
        self._main = main
        self._width = self._width if exact else 1
        self._exact = exact
        self.pointers.add(main.pointer)

    def nodes(self, calls: Needs) -> list[Node]:
        """Return the nodes of calls, given by track."""
        of = self.of
        return [of[track].nodes[call - 1] for track, call in calls.items()]

    def choose(self, producers: Sequence[Node], ends: tuple[Any, ...]) -> Lane:
        """Return the lane for a node.

        In order of preference, the lane is a producer's, a lane that the node already follows, a new lane, or the lane that has
        been idle for longest. A new lane waits for ``ends``, as the main stream does.
        """
        # If a producer is the last node of its lane, a node on that lane waits for no other node of the lane.
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
        """Release all that was kept for the recording."""
        self.all.clear()
        self.of.clear()
        # The slot is about to be released, and the recording may live on.
        self.__dict__.pop("_main", None)

    def _lease(self, ends: tuple[Any, ...]) -> Lane | None:
        """Lease one more lane, or return None.

        If no slot is free for the first lane, the main stream becomes this lane. Return None if the present lanes must suffice.
        """
        if len(self.all) >= self._width:
            return None
        count, sides = len(self.all), self._sides
        # The lanes that were asked for are leased from all free slots. Beyond these lanes, some slots are left to forks and to
        # other recordings.
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
            # A side stream takes part in the capture once it waits for an event that the main stream recorded.
            self._pool.driver.record_event(slot.start_event, self._main.pointer)
            self._pool.driver.wait_event(slot.pointer, slot.start_event)
        lane = Lane(slot, count, ends, shown=slot is self._main)
        self.all.append(lane)
        self.of[lane.track] = lane
        self.got = len(self.all)
        self.pointers.add(slot.pointer)
        return lane


def direct(producers: Sequence[Node]) -> list[Node]:
    """Return the nodes that no other given node follows.

    To wait for a node is to wait for all nodes that it follows.
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


def ends_of(nodes: Collection[Node]) -> tuple[Any, ...]:
    """Return the captured nodes that a follower of some nodes waits for."""
    ends = [each.ends for each in nodes]
    return ends[0] if len(ends) == 1 else tuple(dict.fromkeys(chain.from_iterable(ends)))


def steps_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Return the steps that a later call of some nodes waits for."""
    return nodes[0].steps if len(nodes) == 1 else tuple(sorted([step for each in nodes for step in each.steps]))


def _last_step(lane: Lane) -> int:
    return lane.nodes[-1].step
