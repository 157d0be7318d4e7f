"""Schedule the steps of a recording on a bounded number of lanes.

A recording is first made with as many lanes as its data allows. If it were made on few lanes at once, independent parts would
often get the same lane, because the rest of the graph is still unknown. So this module moves the steps to fewer lanes after the
recording, when the whole graph is known.

The steps are placed on lanes in an order in which they could run. Among the ready steps, the step with the longest path to the
end of the graph comes first. A placed step gets an edge from the previous step of its lane, unless other edges imply this order.
Then edges that other edges imply are removed, which saves time on the device (transitive reduction). All recorded dependencies
stay in force, whether they come from data, from reused memory, or from the scratch of a stream.

In this module, a node is a CUDA node: a kernel or a copy in the captured graph. A step owns none, one or several of them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

from handlepool.drivers.captures import Edge, RecordedGraph
from handlepool.errors import CaptureError
from handlepool.recording.explain import Step
from handlepool.tensors.layout import Piece, Token

LEAST_TIME = 2.0
"""The estimated microseconds of a step that moves no bytes."""
BYTES_A_MICROSECOND = 1_000_000
"""The estimated number of bytes that a step moves in a microsecond."""

Pair = tuple[Any, Any]


class Arrangement(NamedTuple):
    """A schedule of a recorded graph: its steps' lanes and edges.

    Attributes
    ----------
    lanes : int
        Number of lanes.
    steps : tuple of Step
        The steps, with their lanes and dependencies.
    add, remove : list of (node, node)
        The edges to add to the recorded graph, and the edges to remove from it, so that it has this schedule. They are the
        arguments of `RecordedGraph.arranged`.
    """

    lanes: int
    steps: tuple[Step, ...]
    add: list[Pair]
    remove: list[Pair]

    @property
    def edges(self) -> tuple[list[Pair], list[Pair]]:
        """The edges to add, and the edges to remove."""
        return self.add, self.remove


class _Part:
    """The nodes of the graph that belong to one step.

    Attributes
    ----------
    entries, exits : list of node
        ``entries`` are the nodes that depend on no other node of this part. ``exits`` are the nodes on which no other node of
        this part depends.
    after : collection of int
        Steps on which at least one node of this part directly depends.
    whole : collection of int
        Steps on which all nodes of this part depend, because each exit of the step has an edge to each entry of this part.
    """

    __slots__ = ("after", "entries", "exits", "whole")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.exits: list[Any] = []
        self.after: Collection[int] = ()
        self.whole: Collection[int] = ()

    def leading_to(self, other: "_Part") -> list[Pair]:
        """Return the edges that make another part depend on this part.

        They lead from each exit of this part to each entry of the other part.
        """
        exits, entries = self.exits, other.entries
        if len(exits) == len(entries) == 1:
            return [(exits[0], entries[0])]
        return [(end, entry) for end in exits for entry in entries]


class Schedule:
    """The steps of a captured recording, to be moved onto fewer lanes.

    Parameters
    ----------
    graph : RecordedGraph
    steps : sequence of Step
        Steps in the order of the recording.
    ends : sequence of tuple of node
        For each step, the nodes that later steps waited for. The entry is empty if the nodes of a step count as nodes of the
        next step.
    lanes : int
        Number of recorded lanes.

    Attributes
    ----------
    recorded : Arrangement
        The graph as it was captured.

    Raises
    ------
    CaptureError
        If the graph has work that belongs to no step and on which no later work depends.
    """

    def __init__(self, graph: RecordedGraph, steps: Sequence[Step], ends: Sequence[Sequence[Any]], lanes: int) -> None:
        self.recorded = Arrangement(lanes, tuple(steps), [], [])
        self._owner = _owners(graph.edges(), ends)
        lost = graph.nodes - len(self._owner)
        if lost:
            raise CaptureError(
                f"{lost} of {graph.nodes} nodes of the CUDA graph reached the stream of a call after the call had ended, so "
                "their order is unknown. Let each call launch all its work, and free all memory that it allocates with "
                "cudaMallocAsync, before it returns"
            )
        self._graph = graph
        self._parts: list[_Part] = []
        self._pairs: set[Pair] = set()

    def steps_of(self, nodes: Sequence[Any]) -> list[int | None]:
        """Return the number of each node's step; None for an unknown node."""
        return [self._owner.get(node) for node in nodes]

    def on(self, lanes: int, times: Sequence[float]) -> Arrangement:
        """Return a schedule on at most ``lanes`` lanes.

        If the recording has at most ``lanes`` lanes, return the recorded schedule.

        Parameters
        ----------
        lanes : int
        times : sequence of float
            Time of each step, in any unit; see `estimated`.
        """
        if lanes >= self.recorded.lanes:
            return self.recorded
        self._look()
        places = _Placing(self._parts, times, lanes).run()
        # Steps that wait for each other in a cycle get no place. If there are such steps, the recorded schedule is returned.
        if len(places) < sum(bool(part.entries) for part in self._parts) or not places:
            return self.recorded
        return self._arrangement(places)

    def exits(self) -> list[list[Any]]:
        """Return the exits of each step, see `_Part`.

        The list of exits is empty for a step that added no node to the graph.
        """
        self._look()
        return [part.exits for part in self._parts]

    def _look(self) -> None:
        if not self._parts:
            edges = self._graph.edges()
            self._parts = _parts(edges, self._owner, len(self.recorded.steps))
            self._pairs = {*edges}

    def _arrangement(self, places: "dict[int, _Place]") -> Arrangement:
        parts = self._parts
        add: list[Pair] = []
        remove: list[Pair] = []
        steps = list(self.recorded.steps)
        for number, place in places.items():
            part = parts[number]
            waits = part.after
            if place.behind is not None or len(part.whole) > 1:
                before = {*part.whole}
                if place.behind is not None:
                    before.add(place.behind)
                    add += [pair for pair in parts[place.behind].leading_to(part) if pair not in self._pairs]
                needed = _needed(before, places)
                for each in part.whole:
                    if each not in needed:
                        remove += parts[each].leading_to(part)
                waits = {*needed, *(each for each in part.after if each not in part.whole)}
            step = steps[number]
            lane = None if step.lane is None else place.lane
            steps[number] = Step(step.name, step.place, lane, tuple(sorted(waits)), step.why)
        for number, step in enumerate(steps):
            # A step that added no node to the graph has no place. It gets a lane of the steps that it waits for.
            if step.lane is not None and number not in places:
                steps[number] = step._replace(lane=max([steps[each].lane or 0 for each in step.after], default=0))
        return Arrangement(len({step.lane for step in steps if step.lane is not None}), tuple(steps), add, remove)


class _Place:
    """The place of a step in a schedule.

    Attributes
    ----------
    lane, at : int
        The number of the lane, and the step's position on the lane, counted from 1.
    known : sequence of int
        For each lane, a position on that lane: when this step has ended, all steps up to this position have certainly ended.
    behind : int or None
        The previous step of the lane, if an edge from that step to this step is necessary; else None.
    """

    __slots__ = ("at", "behind", "known", "lane")

    def __init__(self, lane: int, at: int, known: Sequence[int], behind: int | None) -> None:
        self.lane = lane
        self.at = at
        mine = [*known]
        mine[lane] = at
        # A tuple of integers costs Python's garbage collector less than a list: the collector visits it only once.
        self.known: Sequence[int] = tuple(mine)
        self.behind = behind


def _needed(steps: set[int], places: "dict[int, _Place]") -> set[int]:
    """Return the steps whose ends imply the ends of all ``steps``.

    A step is left out if it has certainly ended when another of the steps has ended.
    """
    if len(steps) < 2:
        return steps
    needed = set()
    for each in steps:
        lane, at = places[each].lane, places[each].at
        for other in steps:
            if other != each and places[other].known[lane] >= at:
                break
        else:
            needed.add(each)
    return needed


def estimated(used: Sequence[tuple[Sequence[Piece | Token], Sequence[Piece | Token]]]) -> list[float]:
    """Return the estimated time of each step, in microseconds.

    The estimate grows with the bytes that a step reads and writes. ``used`` has this memory for each step.
    """
    times = []
    for reads, writes in used:
        moved = 0
        for piece in chain(reads, writes):
            # Tokens have no bytes.
            if type(piece) is tuple:
                moved += piece[1] - piece[0]
        times.append(LEAST_TIME + moved / BYTES_A_MICROSECOND)
    return times


def _owners(edges: Sequence[Edge], ends: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """Return the number of each node's step.

    A node belongs to the first step whose ``ends`` contain the node or depend on it.
    """
    before: dict[Any, list[Any]] = {}
    for one, other in edges:
        before.setdefault(other, []).append(one)
    owner: dict[Any, int] = {}
    for number, last in enumerate(ends):
        left = [*last]
        while left:
            node = left.pop()
            if node not in owner:
                owner[node] = number
                left += before.get(node, ())
    return owner


def _parts(edges: Sequence[Edge], owner: Mapping[Any, int], count: int) -> list[_Part]:
    """Return the part of the graph that belongs to each step."""
    parts = [_Part() for _ in range(count)]
    # ``leading`` has the nodes with an edge to a node of the same step. ``led`` has the nodes with an edge from such a node.
    leading, led = set(), set()
    across: list[tuple[Any, Any, int, int]] = []
    for one, other in edges:
        first, second = owner[one], owner[other]
        if first == second:
            leading.add(one)
            led.add(other)
        else:
            across.append((one, other, first, second))
    for node, number in owner.items():
        part = parts[number]
        if node not in led:
            part.entries.append(node)
        if node not in leading:
            part.exits.append(node)
    # For each pair of steps with several exits or entries, ``found`` counts the edges from exits of the first step to entries of
    # the second step.
    found: Counter[tuple[int, int]] = Counter()
    for one, other, first, second in across:
        part = parts[second]
        if first not in part.after:
            part.after = (*part.after, first)
        if one not in leading and other not in led:
            if len(parts[first].exits) == 1 and len(part.entries) == 1:
                part.whole = (*part.whole, first)
            else:
                found[first, second] += 1
    for (first, second), known in found.items():
        part = parts[second]
        if known == len(parts[first].exits) * len(part.entries):
            part.whole = (*part.whole, first)
    return parts


class _Placing:
    """Place steps on lanes by list scheduling.

    A simulated clock advances from one end of a step to the next. Whenever a lane is free, a ready step with nodes begins on it.

    Attributes
    ----------
    places : dict
        The place of each step, in the order in which the steps begin. Steps that wait for each other in a cycle are missing.
    """

    def __init__(self, parts: Sequence[_Part], times: Sequence[float], lanes: int) -> None:
        self.places: dict[int, _Place] = {}
        self._parts = parts
        self._times = times
        self._lanes = lanes
        self._followers: list[list[int]] = [[] for _ in parts]
        for number, part in enumerate(parts):
            for each in part.after:
                self._followers[each].append(number)
        # On a single lane, all ranks are equal, and ready steps begin in the recorded order.
        self._rank = [0.0] * len(parts)
        if lanes > 1:
            # The rank of a step is the negative time of the longest path from the step to the end of the graph. So the heap,
            # which gives the smallest rank first, gives the step with the longest path.
            for number in reversed(range(len(parts))):
                after = [self._rank[each] for each in self._followers[number]]
                self._rank[number] = min(after, default=0.0) - times[number]
        self._missing = [len(part.after) for part in parts]
        self._ready = [(self._rank[number], number) for number, part in enumerate(parts) if part.entries and not part.after]
        heapify(self._ready)
        self._running: list[tuple[float, int]] = []
        self._free, self._last, self._counts = [*range(lanes)], [-1] * lanes, [0] * lanes
        # `_left` is the total time of the steps that have not begun. `_ends` is the sum of the end times of the running steps.
        self._now, self._left, self._ends = 0.0, sum(times), 0.0

    def run(self) -> dict[int, _Place]:
        """Place all steps, and return the places."""
        while self._ready or self._running:
            while self._ready and self._free:
                self._begin(self._next())
            self._end()
        return self.places

    def _next(self) -> int:
        """Return the step that begins now.

        The usual choice is the ready step with the longest path to the end. But if this path has slack, a ready step that follows
        the last step of a free lane is preferred, because it needs no additional edge.
        """
        rank, number = self._ready[0]
        # The slack is the time by which the longest path can be delayed without delaying the end of the whole graph.
        slack = (self._left + self._ends - len(self._running) * self._now) / self._lanes + rank
        if slack <= 0 or self._lanes == 1:
            return number
        best: tuple[float, int] | None = None
        for lane in self._free:
            for each in self._followers[self._last[lane]] if self._counts[lane] else ():
                found = self._rank[each], each
                if not self._missing[each] and each not in self.places and self._times[each] <= slack:
                    best = found if best is None else min(best, found)
        return number if best is None else best[1]

    def _begin(self, number: int) -> None:
        part, places, time = self._parts[number], self.places, self._times[number]
        known = _merged([places[each].known for each in part.whole], self._lanes)
        lane = self._lane_for(part, known)
        self._free.remove(lane)
        behind = None
        if self._counts[lane] > known[lane]:
            behind = self._last[lane]
            known = _merged([known, places[behind].known], self._lanes)
        self._counts[lane] += 1
        self._last[lane] = number
        self._left -= time
        places[number] = _Place(lane, self._counts[lane], known, behind)
        end = self._now + time
        self._ends += end
        heappush(self._running, (end, number))
        ready = self._ready
        # A preferred step begins before it comes to the top of the heap. So steps that already have a place are removed here.
        while ready and ready[0][1] in places:
            heappop(ready)

    def _lane_for(self, part: _Part, known: Sequence[int]) -> int:
        """Return a free lane for a step.

        The best choice is a lane whose last step this step depends on. The second choice is a lane whose steps all end
        before this step can begin anyway, so that no further edge is needed.
        """
        best = -1
        for lane in self._free:
            if known[lane] >= self._counts[lane]:
                if self._last[lane] in part.whole:
                    return lane
                # Among the lanes of the second choice, the lane with the most steps is taken. So an unused lane stays unused if
                # possible.
                if best < 0 or self._counts[best] < self._counts[lane]:
                    best = lane
        return self._free[0] if best < 0 else best

    def _end(self) -> None:
        """Advance the clock to the end of a step; free its lane."""
        self._now = self._running[0][0]
        while self._running and self._running[0][0] <= self._now:
            end, number = heappop(self._running)
            self._ends -= end
            self._free.append(self.places[number].lane)
            for each in self._followers[number]:
                self._missing[each] -= 1
                if not self._missing[each]:
                    heappush(self._ready, (self._rank[each], each))


def _merged(known: Sequence[Sequence[int]], lanes: int) -> Sequence[int]:
    """Return, for each lane, the maximum of several values of `_Place.known`."""
    if len(known) < 2:
        return known[0] if known else (0,) * lanes
    return tuple(map(max, *known))
