"""Schedule the steps of a recording on a bounded number of lanes.

A recording is first made with as many lanes as its data allows. To choose among few lanes during the recording would serialise
independent parts, because the rest of the graph is still unknown. Afterwards, this module gives the steps to fewer lanes.

The steps are placed in an order in which they could run. Among the ready steps, the step with the longest path to the end comes
first. A placed step gets an edge from the former last step of its lane, unless other edges imply that order. Then edges that
other edges imply are removed, which saves time on the device (transitive reduction). All recorded dependencies stay in force,
whether they come from data, from reused memory, or from scratch of a stream.
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
    """The schedule of a recorded graph: its steps' lanes and edges.

    Attributes
    ----------
    lanes : int
        Number of lanes.
    steps : tuple of Step
        The steps, with their lanes and dependencies.
    add, remove : list of (node, node)
        The edges that turn the recorded graph into this schedule. `RecordedGraph.arranged` takes them.
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
        ``entries`` are the nodes of the part that depend on no other node of the part. ``exits`` are the nodes on which no
        other node of the part depends.
    after : collection of int
        Steps on which at least one node of the part depends.
    whole : collection of int
        Steps on which all nodes of the part depend. Each exit of such a step has an edge to each entry of the part.
    """

    __slots__ = ("after", "entries", "exits", "whole")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.exits: list[Any] = []
        self.after: Collection[int] = ()
        self.whole: Collection[int] = ()

    def leading_to(self, other: "_Part") -> list[Pair]:
        """Return edges that make another part depend on this part.

        With these edges, all nodes of the other part depend on all nodes of this part.
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
        For each step, the nodes that later steps waited for. If a step counts as a part of the next step, it has none.
    lanes : int
        Number of recorded lanes.

    Attributes
    ----------
    recorded : Arrangement
        The graph as it was captured.

    Raises
    ------
    CaptureError
        For work in the graph that belongs to no step and on which no later work depends.
    """

    def __init__(self, graph: RecordedGraph, steps: Sequence[Step], ends: Sequence[Sequence[Any]], lanes: int) -> None:
        self.recorded = Arrangement(lanes, tuple(steps), [], [])
        self._owner = _owners(graph.edges(), ends)
        lost = graph.nodes - len(self._owner)
        if lost:
            raise CaptureError(
                f"{lost} of {graph.nodes} operations reached the stream of a call after the call had ended, so their "
                "order is unknown. Inside a call, launch all its work before it returns, and free there the memory that "
                "it allocates with cudaMallocAsync"
            )
        self._graph = graph
        self._parts: list[_Part] = []
        self._pairs: set[Pair] = set()

    def steps_of(self, nodes: Sequence[Any]) -> list[int | None]:
        """Return the step of each given node, or None."""
        return [self._owner.get(node) for node in nodes]

    def on(self, lanes: int, times: Sequence[float]) -> Arrangement:
        """Return a schedule on at most the given number of lanes.

        If the recording has no more lanes than that, return the recorded schedule.

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
        # If steps wait for each other in a cycle, they get no place. Then the recorded schedule stays.
        if len(places) < sum(bool(part.entries) for part in self._parts) or not places:
            return self.recorded
        return self._arrangement(places)

    def exits(self) -> list[list[Any]]:
        """Return the last nodes of each step.

        The list is empty for a step that added no node to the graph.
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
            # A step that added no node to the graph takes the lane of its dependencies.
            if step.lane is not None and number not in places:
                steps[number] = step._replace(lane=max([steps[each].lane or 0 for each in step.after], default=0))
        return Arrangement(len({step.lane for step in steps if step.lane is not None}), tuple(steps), add, remove)


class _Place:
    """The place of a step in a schedule.

    Attributes
    ----------
    lane, at : int
        The number of the lane, and the step's position on the lane.
    known : sequence of int
        For each lane, the number of its first steps that have certainly ended when this step has ended.
    behind : int or None
        The previous step of the lane, if an edge from it is necessary; else None.
    """

    __slots__ = ("at", "behind", "known", "lane")

    def __init__(self, lane: int, at: int, known: Sequence[int], behind: int | None) -> None:
        self.lane = lane
        self.at = at
        mine = [*known]
        mine[lane] = at
        # A tuple is used because Python's collector stops visiting a tuple of integers after the first time.
        self.known: Sequence[int] = tuple(mine)
        self.behind = behind


def _needed(steps: set[int], places: "dict[int, _Place]") -> set[int]:
    """Return the members of a set that no other member implies.

    A member is implied if it has certainly ended when another member has ended.
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
    """Return estimated times of steps in microseconds.

    The estimate depends on the memory that a step reads and writes.
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
    """Return the step of each node.

    A node belongs to the first step whose last nodes depend on the node, or include it.
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
    """Return the part of the graph for each step."""
    parts = [_Part() for _ in range(count)]
    # `leading` has nodes with an edge to a node of the same step, and `led` nodes with an edge from a node of the same step.
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
    # For pairs of steps with several exits or entries, the counter has the number of edges from exits to entries.
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

    A simulated clock advances from the end of a step to the next end. Steps with nodes are given to lanes when the lanes become
    free.

    Attributes
    ----------
    places : dict
        The places by step, in the order in which the steps begin. Steps that wait for each other in a cycle are missing.
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
            # The rank is the negative time of the longest path to the end, so that the heap gives the longest path first.
            for number in reversed(range(len(parts))):
                after = [self._rank[each] for each in self._followers[number]]
                self._rank[number] = min(after, default=0.0) - times[number]
        self._missing = [len(part.after) for part in parts]
        self._ready = [(self._rank[number], number) for number, part in enumerate(parts) if part.entries and not part.after]
        heapify(self._ready)
        self._running: list[tuple[float, int]] = []
        self._free, self._last, self._counts = [*range(lanes)], [-1] * lanes, [0] * lanes
        # `_left` is the time of the steps that have not begun. `_ends` is the sum of the running steps' ends.
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

        It is the ready step with the longest path to the end. But if that path has slack, a ready step that follows the last
        step of a free lane is preferred.
        """
        rank, number = self._ready[0]
        # The slack is the time by which the longest path may be delayed without delaying the end.
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
        # A step that was preferred begins before its turn in the heap. So the heap may still hold placed steps.
        while ready and ready[0][1] in places:
            heappop(ready)

    def _lane_for(self, part: _Part, known: Sequence[int]) -> int:
        """Return a free lane for a step.

        The best choice is a lane whose last step this step depends on. The second choice is a lane that needs no additional
        wait.
        """
        best = -1
        for lane in self._free:
            if known[lane] >= self._counts[lane]:
                if self._last[lane] in part.whole:
                    return lane
                # Among these, the lane with the most steps is taken, so that no new lane is used without need.
                if best < 0 or self._counts[best] < self._counts[lane]:
                    best = lane
        return self._free[0] if best < 0 else best

    def _end(self) -> None:
        """Advance the clock to the next end."""
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
    """Return the maximum of the known steps, lane by lane."""
    if len(known) < 2:
        return known[0] if known else (0,) * lanes
    return tuple(map(max, *known))
