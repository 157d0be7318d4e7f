"""Schedules: the steps of a recording as parts of its graph, and edges so that at most so many of them run at once.

A recording is made with as many lanes as its data allows. Only then is the whole graph known: who chooses among few lanes while
recording puts independent parts behind each other. Here steps are given to lanes in the order in which they could run, and of
those that are ready the one with the longest way to the end comes first. An edge is added from the last step of the lane, unless
others imply it. Edges that are implied then are taken away, which spares the device (transitive reduction). All order that was
recorded stays: of data, of memory that was given out again, and of scratch that is kept by stream.
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
"""Microseconds that a step is taken for, where nobody measured, beside what it moves."""
BYTES_A_MICROSECOND = 1_000_000
"""That a step is taken to move."""

Pair = tuple[Any, Any]


class Arrangement(NamedTuple):
    """What makes a schedule of a recorded graph, and how its steps lie then.

    Attributes
    ----------
    lanes : int
        How many there are.
    steps : tuple of Step
        With their lanes, and what they wait for.
    add, remove : list of (node, node)
        Edges, for `RecordedGraph.arranged`.
    """

    lanes: int
    steps: tuple[Step, ...]
    add: list[Pair]
    remove: list[Pair]

    @property
    def edges(self) -> tuple[list[Pair], list[Pair]]:
        """Those to add, and those to take away."""
        return self.add, self.remove


class _Part:
    """What a step became in the graph.

    Attributes
    ----------
    entries, exits : list of node
        Those that come after, and before, no other one of it.
    after : collection of int
        The steps that some of it come after.
    whole : collection of int
        Of these, the ones that all of it come after: each exit there leads to each entry here.
    """

    __slots__ = ("after", "entries", "exits", "whole")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.exits: list[Any] = []
        self.after: Collection[int] = ()
        self.whole: Collection[int] = ()

    def leading_to(self, other: "_Part") -> list[Pair]:
        """Return the edges by which all of another one comes after all of this one."""
        exits, entries = self.exits, other.entries
        if len(exits) == len(entries) == 1:
            return [(exits[0], entries[0])]
        return [(end, entry) for end in exits for entry in entries]


class Schedule:
    """The steps of a recording that was captured, to be brought onto fewer lanes.

    Parameters
    ----------
    graph : RecordedGraph
    steps : sequence of Step
        In the order in which they were recorded.
    ends : sequence of tuple of node
        For each step, what whatever followed it waited for; none for a step that is counted with the next one.
    lanes : int
        How many were recorded.

    Attributes
    ----------
    recorded : Arrangement
        The graph as it was captured.

    Raises
    ------
    CaptureError
        For work in the graph that no step is known to have made, and that nothing waits for.
    """

    def __init__(self, graph: RecordedGraph, steps: Sequence[Step], ends: Sequence[Sequence[Any]], lanes: int) -> None:
        self.recorded = Arrangement(lanes, tuple(steps), [], [])
        self._owner = _owners(graph.edges(), ends)
        lost = graph.nodes - len(self._owner)
        if lost:
            raise CaptureError(
                f"{lost} of {graph.nodes} operations were given to the stream of a call after the call had ended, so that nobody "
                f"knows what comes after them: a call has to give its work while it runs, and to free there what it allocates "
                f"with cudaMallocAsync"
            )
        self._graph = graph
        self._parts: list[_Part] = []
        self._pairs: set[Pair] = set()

    def steps_of(self, nodes: Sequence[Any]) -> list[int | None]:
        """Return the step that made each of some nodes of the graph."""
        return [self._owner.get(node) for node in nodes]

    def on(self, lanes: int, times: Sequence[float]) -> Arrangement:
        """Return the steps on at most so many lanes.

        As it was recorded where that has no more lanes.

        Parameters
        ----------
        lanes : int
        times : sequence of float
            Of the steps, in any unit; see `estimated`.
        """
        if lanes >= self.recorded.lanes:
            return self.recorded
        self._look()
        places = _Placing(self._parts, times, lanes).run()
        if len(places) < sum(bool(part.entries) for part in self._parts) or not places:
            return self.recorded
        return self._arrangement(places)

    def exits(self) -> list[list[Any]]:
        """Return the nodes that each step ends with: none of a step that gave the graph nothing."""
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
            if step.lane is not None and number not in places:  # it gave the graph nothing
                steps[number] = step._replace(lane=max([steps[each].lane or 0 for each in step.after], default=0))
        return Arrangement(len({step.lane for step in steps if step.lane is not None}), tuple(steps), add, remove)


class _Place:
    """Where a step is in a schedule.

    Attributes
    ----------
    lane, at : int
        Which lane, and which of its steps.
    known : sequence of int
        Of each lane, how many of its steps are over when this one is.
    behind : int or None
        The last step of the lane, where nothing else says that this one comes after that.
    """

    __slots__ = ("at", "behind", "known", "lane")

    def __init__(self, lane: int, at: int, known: Sequence[int], behind: int | None) -> None:
        self.lane = lane
        self.at = at
        mine = [*known]
        mine[lane] = at
        self.known: Sequence[int] = tuple(mine)  # which Python's collector need not look at again and again
        self.behind = behind


def _needed(steps: set[int], places: "dict[int, _Place]") -> set[int]:
    """Return those of some steps that no other one of them comes after."""
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
    """Return what steps may take, in microseconds, by the memory that they read and write."""
    times = []
    for reads, writes in used:
        moved = 0
        for piece in chain(reads, writes):
            if type(piece) is tuple:
                moved += piece[1] - piece[0]
        times.append(LEAST_TIME + moved / BYTES_A_MICROSECOND)
    return times


def _owners(edges: Sequence[Edge], ends: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """Return the step of each node: the first one at whose end it was over."""
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
    """Return what each of so many steps became."""
    parts = [_Part() for _ in range(count)]
    leading, led = set(), set()  # to, and from, another node of their own step
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
    found: Counter[tuple[int, int]] = Counter()  # edges from exits to entries, of steps that have several
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
    """A list schedule: steps that are in the graph are given to lanes as these become free, while a clock goes from end to end.

    Attributes
    ----------
    places : dict
        By step, in the order in which they begin. Of steps in a circle some are missing.
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
        self._rank = [0.0] * len(parts)  # on one lane steps begin as they were recorded
        if lanes > 1:
            for number in reversed(range(len(parts))):  # less the time to the end, the longest way
                after = [self._rank[each] for each in self._followers[number]]
                self._rank[number] = min(after, default=0.0) - times[number]
        self._missing = [len(part.after) for part in parts]
        self._ready = [(self._rank[number], number) for number, part in enumerate(parts) if part.entries and not part.after]
        heapify(self._ready)
        self._running: list[tuple[float, int]] = []
        self._free, self._last, self._counts = [*range(lanes)], [-1] * lanes, [0] * lanes
        self._now, self._left, self._ends = 0.0, sum(times), 0.0  # left of steps to begin; the ends of those that run, in all

    def run(self) -> dict[int, _Place]:
        """Place all steps."""
        while self._ready or self._running:
            while self._ready and self._free:
                self._begin(self._next())
            self._end()
        return self.places

    def _next(self) -> int:
        """Take the step that begins now: of those with the longest way to the end, or one more in a row where there is time."""
        rank, number = self._ready[0]
        slack = (self._left + self._ends - len(self._running) * self._now) / self._lanes + rank  # the longest way may begin later
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
        while ready and ready[0][1] in places:  # some begin before their turn
            heappop(ready)

    def _lane_for(self, part: _Part, known: Sequence[int]) -> int:
        """Return a free lane: where the last step is one that this follows, where it waits for nothing more, or any."""
        best = -1
        for lane in self._free:
            if known[lane] >= self._counts[lane]:
                if self._last[lane] in part.whole:
                    return lane
                if best < 0 or self._counts[best] < self._counts[lane]:  # a lane in use, rather than one more
                    best = lane
        return self._free[0] if best < 0 else best

    def _end(self) -> None:
        """Let the clock go on to the next end."""
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
    """Return of each lane the most that is known."""
    if len(known) < 2:
        return known[0] if known else (0,) * lanes
    return tuple(map(max, *known))
