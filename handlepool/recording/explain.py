"""Explain how a program was recorded: its nodes, waits and obstacles.

`Program.explain` returns an `Explanation`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A call that became a node, or other work between such calls.

    Attributes
    ----------
    name : str
    place : str
        File and line of the call. If the place of other work is unknown, ``place`` names the last call before the work and the
        first call after the work.
    lane : int or None
        The lane of the node; None for other work.
    after : tuple of int
        The numbers of the steps that this step waits for directly. If this step waits for a step only through another step, that
        number is left out.
    why : str
        The reason why all later steps wait for this step; empty for an ordinary node. Other work runs alone: it also waits for
        all earlier steps. A node has a reason if it failed, or if it gave work to other streams than its lane's.
    """

    name: str
    place: str
    lane: int | None
    after: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A printable report on a program's nodes, lanes, waits and memory.

    Attributes
    ----------
    name : str
        The name of the program.
    operations : int
        The number of kernels, copies and similar operations in the CUDA graph. CUDA calls these operations nodes. A call may add
        none, one or several.
    nbytes : int
        Bytes of device memory for arrays and scratch.
    scratch : int
        Bytes of scratch, which ``nbytes`` includes.
    allocations : tuple of (int or None)
        For each memory allocation in the graph, the number of its step in ``steps``, or None if the step is unknown. A call of
        ``cudaMallocAsync`` in the recorded function becomes such an allocation, which each replay repeats.
    limit : int or None
        The argument ``lanes`` of `record`; None for a program without lanes.
    wanted, recorded : int
        ``wanted`` is the number of lanes that the calls could have used, at most 32. ``recorded`` is the number of lanes that
        the calls were recorded on. It decides how much memory the program uses.
    got : int
        The number of lanes on which the calls run in a replay, at most ``limit``.
    exact : bool
        Whether the driver can choose the dependencies of each node. If it cannot, there is one lane.
    steps : tuple of Step
    times : tuple of float
        Microseconds of each step when it runs alone; empty if the steps were not measured.
    data : tuple of tuple of int
        For each step, the numbers of the steps that it waited for on the ``recorded`` lanes. ``Step.after`` has the waits on the
        ``got`` lanes.
    ends : tuple of float
        Microseconds from the beginning of a replay to the end of each step; empty if no such replay was measured.
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
        """The steps that all later steps wait for, as ``why`` tells."""
        return [step for step in self.steps if step.why]

    @property
    def edges(self) -> int:
        """The number of direct waits of steps for other steps."""
        return sum(len(step.after) for step in self.steps)

    @property
    def longest(self) -> int:
        """The number of steps on the longest path of waits."""
        return int(_longest(self._after, [1.0] * len(self.steps)))

    @property
    def longest_by_data(self) -> int:
        """The number of steps on the longest path of waits by data.

        `longest` is larger if nodes also wait because they share a lane.
        """
        return int(_longest(self.data or self._after, [1.0] * len(self.steps)))

    @property
    def critical(self) -> float:
        """Microseconds of the longest path of waits by data.

        The value is 0 if the steps were not measured.
        """
        return _longest(self.data or self._after, self.times) if self.times else 0.0

    @property
    def planned(self) -> float:
        """Microseconds of the longest path of waits on the present lanes.

        The value is 0 if the steps were not measured.
        """
        return _longest(self._after, self.times) if self.times else 0.0

    @property
    def total(self) -> float:
        """The sum of the microseconds of all steps; 0 if not measured."""
        return sum(self.times)

    @property
    def ran(self) -> list[tuple[float, float]]:
        """The begin and end of each step, in microseconds.

        Only ends are measured. So a step is taken to begin when the last step that it waits for ends. The list is empty if `ends`
        is empty.
        """
        if not self.ends:
            return []
        begins = [max([self.ends[before] for before in step.after], default=0.0) for step in self.steps]
        # By a measurement error, a step may seem to end before a step that it waits for. Without `min`, the step would then end
        # before it begins.
        return [(min(begin, end), end) for begin, end in zip(begins, self.ends, strict=True)]

    @property
    def use(self) -> list[tuple[int, float]]:
        """For each lane, the number of its nodes and their total microseconds."""
        found: dict[int, list[float]] = {}
        for number, step in enumerate(self.steps):
            if step.lane is not None:
                found.setdefault(step.lane, []).append(self.times[number] if self.times else 0.0)
        return [(len(times), sum(times)) for _, times in sorted(found.items())]

    def order(self) -> list[int]:
        """Return the numbers of the steps in an order of execution.

        Each step comes after the steps that it waits for.
        """
        return _ordered(self._after)

    @property
    def _after(self) -> list[tuple[int, ...]]:
        return [step.after for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as a dictionary that JSON can store.

        It contains only dictionaries, lists, numbers, strings, booleans and None.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        # Tuples become lists, because JSON has no tuples.
        known["allocations"], known["times"], known["ends"] = [*self.allocations], [*self.times], [*self.ends]
        known["data"] = [[*after] for after in self.data]
        known["steps"] = [{**step._asdict(), "after": [*step.after]} for step in self.steps]
        counts = {"nodes": len(self.nodes), "edges": self.edges, "serial": len(self.serial), "longest": self.longest}
        counts["longest_by_data"] = self.longest_by_data
        ways = {"critical": self.critical, "planned": self.planned, "total": self.total}
        return {**known, **counts, "use": [[*each] for each in self.use], **ways}

    def to_dot(self) -> str:
        """Return the graph of the steps in the language of Graphviz.

        A step in `serial` is drawn as a box, and any other step as an ellipse.
        """
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
        least = "" if self.longest_by_data == self.longest else f", and {self.longest_by_data} if only waits by data count"
        lines.append(
            f"{len(self.nodes)} nodes, {self.edges} edges, {self.got} of {self.limit} lanes; the longest path of waits has "
            f"{self.longest} of {len(self.steps)} steps{least}"
        )
        if not self.nodes:
            lines.append("The program has no call of a graph function or an operation, and only such calls run on lanes")
        if not self.exact:
            lines.append("The driver cannot choose the dependencies of a node, so all steps run one after the other")
        elif self.wanted > self.recorded and self.recorded < self.limit:
            lines.append(f"The calls could use {self.wanted} lanes, but no more side streams of the device were free")
        if self.recorded > self.got:
            lines.append(
                f"The nodes were recorded on {self.recorded} lanes, and then brought onto {self.got} lanes by further edges"
            )
        if self.times:
            use = ", ".join(f"{count} {time:,.1f}" for count, time in self.use)
            lines.append(
                f"Measured: {self.total:,.1f} microseconds one after the other, {self.critical:,.1f} on the longest path by "
                f"data, {self.planned:,.1f} on these lanes; number of nodes and microseconds of each lane: {use}"
            )
        elif self.got > 1:
            lines.append(f"Nodes on each lane: {', '.join(str(count) for count, _ in self.use)}")
        lines += self._who_allocates()
        if self.serial:
            lines.append("Steps that all later steps wait for:")
            # Equal lines are printed once with their count, because a loop may make the same step many times.
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
    # In this order, a step comes after the steps that it waits for. So their longest paths are already known.
    for number in _ordered(after):
        ways[number] = times[number] + max([ways[before] for before in after[number]], default=0.0)
    return max(ways.values(), default=0.0)


def _quoted(text: str) -> str:
    # Graphviz reads a backslash, a quote and a line break as syntax.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
