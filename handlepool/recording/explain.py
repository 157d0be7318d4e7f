"""What `Program.explain` returns: which calls became nodes, what they wait for, and what stood in the way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A call that was recorded as a node, or, on no lane, other work between nodes.

    Attributes
    ----------
    name : str
    place : str
        File and line of the call; of other work that could not be seen, the last call before it and the first after it.
    lane : int or None
    after : tuple of int
        The steps that it waits for, by their places; others follow from these.
    why : str
        Why it stands after all before it, and before all after it; empty for what does not. Of nodes that fail, or that give work
        to other streams than their lane's, only what comes later waits.
    """

    name: str
    place: str
    lane: int | None
    after: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a program was recorded. It can be printed.

    Attributes
    ----------
    name : str
        Of the program.
    operations : int
        Kernels, copies and the like in the graph, which CUDA calls its nodes: a call may give it none, or several.
    nbytes : int
        Device memory of arrays and scratch.
    scratch : int
        How many of these are scratch.
    allocations : tuple of (int or None)
        For each allocation of memory in the graph, made whenever that runs, as ``cudaMallocAsync`` becomes one, the place of its
        step in ``steps``; None where that is not known.
    limit : int or None
        The ``lanes`` that `record` was given.
    wanted, recorded : int
        Lanes that the calls could have used, up to 32, and those that they were recorded on: its memory is for so many.
    got : int
        Lanes that they run on, up to the limit.
    exact : bool
        Whether the driver can put a node behind its producers alone. Where it cannot there is one lane.
    steps : tuple of Step
    times : tuple of float
        Microseconds of each step, with nothing beside it; none where they were not measured.
    data : tuple of tuple of int
        For each step, what it was recorded to wait for, before all were brought onto fewer lanes.
    ends : tuple of float
        Microseconds from the beginning of a replay to the end of each step; none where no replay was measured for this.
    """

    name: str
    operations: int
    nbytes: int
    scratch: int = 0
    allocations: tuple[int | None, ...] = ()
    limit: int | None = None
    wanted: int = 1
    recorded: int = 1
    got: int = 1
    exact: bool = True
    steps: tuple[Step, ...] = ()
    times: tuple[float, ...] = ()
    data: tuple[tuple[int, ...], ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def nodes(self) -> list[Step]:
        """The calls that became nodes."""
        return [step for step in self.steps if step.lane is not None]

    @property
    def serial(self) -> list[Step]:
        """What stands after all before it, and before all after it."""
        return [step for step in self.steps if step.why]

    @property
    def edges(self) -> int:
        """How many waits there are between steps."""
        return sum(len(step.after) for step in self.steps)

    @property
    def longest(self) -> int:
        """How many steps there are on the longest way through them on the lanes that there are."""
        return int(_longest(self._after, [1.0] * len(self.steps)))

    @property
    def longest_by_data(self) -> int:
        """How many steps there are on the longest way through them by their data alone, on however many lanes."""
        return int(_longest(self.data or self._after, [1.0] * len(self.steps)))

    @property
    def critical(self) -> float:
        """Microseconds of the longest way through the steps by their data alone; 0 where they were not measured."""
        return _longest(self.data or self._after, self.times) if self.times else 0.0

    @property
    def planned(self) -> float:
        """Microseconds of the longest way through the steps on the lanes that there are; 0 where they were not measured."""
        return _longest(self._after, self.times) if self.times else 0.0

    @property
    def total(self) -> float:
        """Microseconds of all steps, one after the other; 0 where they were not measured."""
        return sum(self.times)

    @property
    def ran(self) -> list[tuple[float, float]]:
        """From when to when each step ran, in microseconds: from the end of the last that it waits for; none without `ends`."""
        if not self.ends:
            return []
        begins = [max([self.ends[before] for before in step.after], default=0.0) for step in self.steps]
        return [(min(begin, end), end) for begin, end in zip(begins, self.ends, strict=True)]

    @property
    def use(self) -> list[tuple[int, float]]:
        """Of each lane, how many nodes it has, and the microseconds that these take."""
        found: dict[int, list[float]] = {}
        for number, step in enumerate(self.steps):
            if step.lane is not None:
                found.setdefault(step.lane, []).append(self.times[number] if self.times else 0.0)
        return [(len(times), sum(times)) for _, times in sorted(found.items())]

    def order(self) -> list[int]:
        """Return the steps' places, each behind those that it waits for."""
        return _ordered(self._after)

    @property
    def _after(self) -> list[tuple[int, ...]]:
        return [step.after for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in dictionaries, lists, numbers and strings, as JSON takes them."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        known["allocations"], known["times"], known["ends"] = [*self.allocations], [*self.times], [*self.ends]
        known["data"] = [[*after] for after in self.data]
        known["steps"] = [{**step._asdict(), "after": [*step.after]} for step in self.steps]
        counts = {"nodes": len(self.nodes), "edges": self.edges, "serial": len(self.serial), "longest": self.longest}
        counts["longest_by_data"] = self.longest_by_data
        ways = {"critical": self.critical, "planned": self.planned, "total": self.total}
        return {**known, **counts, "use": [[*each] for each in self.use], **ways}

    def to_dot(self) -> str:
        """Return the graph of the steps in the language of Graphviz: a box for what nothing runs beside."""
        lines = [f"digraph {_quoted(self.name)} {{"]
        for number, step in enumerate(self.steps):
            shape = "box" if step.why else "ellipse"
            lane = "" if step.lane is None else f"\nlane {step.lane}"
            why = f": {step.why}" if step.why else ""
            lines.append(
                f"  {number} [shape={shape}, label={_quoted(f'{step.name}{lane}')}, tooltip={_quoted(f'{step.place}{why}')}];"
            )
            lines += [f"  {before} -> {number};" for before in step.after]
        return "\n".join([*lines, "}"])

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.operations} kernels and copies, {self.nbytes:,} bytes, {self.scratch:,} of them scratch"]
        if self.limit is None:
            lines[0] += ". Recorded in the order of streams and forks; record(lanes=...) orders calls by their data"
            return "\n".join(lines + self._who_allocates())
        least = "" if self.longest_by_data == self.longest else f", and by data alone {self.longest_by_data}"
        lines.append(
            f"{len(self.nodes)} nodes, {self.edges} edges, {self.got} of {self.limit} lanes; the longest way has {self.longest} "
            f"steps of {len(self.steps)}{least}"
        )
        if not self.nodes:
            lines.append("No call of a graph function or an operation is in it, and lanes are for those alone")
        if not self.exact:
            lines.append("The driver cannot put a node behind others by choice, so all run one after the other")
        elif self.wanted > self.recorded and self.recorded < self.limit:
            lines.append(f"Up to {self.wanted} lanes were wanted: no more side streams of the device were free")
        if self.recorded > self.got:
            lines.append(f"Recorded on {self.recorded} lanes, as the data allows, and brought onto {self.got} by edges")
        if self.times:
            use = ", ".join(f"{count} {time:,.1f}" for count, time in self.use)
            lines.append(
                f"Measured: {self.total:,.1f} microseconds one after the other, {self.critical:,.1f} on the longest way by data, "
                f"{self.planned:,.1f} on these lanes; on each lane, nodes and microseconds: {use}"
            )
        elif self.got > 1:
            lines.append(f"Nodes on each lane: {', '.join(str(count) for count, _ in self.use)}")
        lines += self._who_allocates()
        if self.serial:
            lines.append("After all before it, and before all after it:")
            told = Counter(f"{step.name}, {step.place}: {step.why}" for step in self.serial)
            lines += [f"  {line}" if count == 1 else f"  {count} times {line}" for line, count in told.items()]
        return "\n".join(lines)

    def _who_allocates(self) -> list[str]:
        if not self.allocations:
            return []
        known = Counter(self.allocations)
        return [
            f"Allocations of memory at each replay (cudaMallocAsync): {len(self.allocations)}",
            *[
                f"  {count} by "
                + ("calls that are not known" if each is None else f"{self.steps[each].name}, {self.steps[each].place}")
                for each, count in known.items()
            ],
        ]


def _ordered(after: Sequence[Sequence[int]]) -> list[int]:
    return [*TopologicalSorter(dict(enumerate(after))).static_order()]


def _longest(after: Sequence[Sequence[int]], times: Sequence[float]) -> float:
    ways: dict[int, float] = {}
    for number in _ordered(after):
        ways[number] = times[number] + max([ways[before] for before in after[number]], default=0.0)
    return max(ways.values(), default=0.0)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
