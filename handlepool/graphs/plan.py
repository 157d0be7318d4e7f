"""A compiled plan: what cuDNN chose for a graph of one geometry on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool.drivers.executable import AliasPair, Executable, OperandCopy
from handlepool.errors import ArgumentError
from handlepool.tensors.layout import Layout, meeting


@dataclass(frozen=True)
class Plan:
    """One compiled graph on one device, ready to launch.

    Attributes
    ----------
    name : str
        Of the function that built the graph.
    device : int
        Ordinal.
    engine : str
        cuDNN's name of the chosen engine and its knobs, or the host driver's.
    workspace_size : int
        Bytes of scratch that a launch needs.
    candidates : int
        Number of plans that cuDNN proposed for the graph; 0 where an array is empty.
    graph : str
        The graph as text: JSON of its nodes and tensors, as the frontend writes it.
    inputs, outputs : tuple of Layout
        What it takes and gives, in order.
    single : bool
        Whether the function gave one tensor, not a tuple of them.
    in_place : tuple of int or None
        How many bytes behind the output each input may begin all the same, since there is one output, and what is written there
        depends on that input's element at the same place alone; None where nowhere. Empty where that holds for no input.
    keys : tuple of str or int
        What `GraphFunction.run` calls the outputs.
    places : tuple of int
        For each operand the place of its array in the arguments; -1 for an output that is to be allocated.
    copies : tuple of OperandCopy
        Operands that each launch copies, since cuDNN is not known to compute rightly from where they lie: see
        `handlepool.graphs.forms`.
    key : str
        What a plan directory has it by; "" where the pool has none, or nothing tells the graph from others.
    asked : object
        Equal for plans of one function, for the same arrays and options, whichever of the proposed plans they are.
    """

    name: str
    device: int
    executable: Executable = field(repr=False)
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    single: bool
    in_place: tuple[int | None, ...]
    _graph: Any = field(repr=False, default=None)
    keys: tuple[str | int, ...] = ()
    places: tuple[int, ...] = ()
    _choose: "Callable[[int | Plan | None, bool], Plan] | None" = field(repr=False, compare=False, default=None)
    copies: tuple[OperandCopy, ...] = ()
    key: str = field(repr=False, compare=False, default="")
    asked: object = field(repr=False, compare=False, default=None)

    @cached_property
    def alias_pairs(self) -> tuple[AliasPair, ...]:
        """Of each output and each operand before it."""  # found when it is first launched with ``out=``
        layouts, inputs = self.inputs + self.outputs, len(self.inputs)
        full = [place for place, layout in enumerate(layouts) if layout.size]
        pairs = [(one, other) for one in full if one >= inputs for other in full if other < one]
        return tuple(self._pair(layouts, one, other) for one, other in pairs)

    def _pair(self, layouts: tuple[Layout, ...], one: int, other: int) -> AliasPair:
        output, before = layouts[one], layouts[other]
        same = self.in_place[other] if other < len(self.in_place) else None
        return AliasPair(one, other, output.reach, before.reach, same, meeting(output, before))

    def check_aliases(self, addresses: Sequence[int]) -> None:
        """Raise where an output shares an element with an input or another output; slices of one block may share none.

        Elements are written before all that need the input have read it. Where there is one output, and each element depends on
        those at its place alone, it may be an input, exactly.

        Parameters
        ----------
        addresses : sequence of int
            Of the operands, inputs before outputs.
        """
        for pair in self.alias_pairs:
            start, begin = addresses[pair.one], addresses[pair.other]
            if begin >= start + pair.reach or start >= begin + pair.others or begin - start == pair.same:
                continue
            if pair.meet is None or pair.meet(begin - start):
                what = f"argument {pair.other}" if pair.other < len(self.inputs) else "another output"
                raise ArgumentError(f"out= of {self.name} shares memory with {what}; pass an array of its own")

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.executable.engine

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch for a launch."""
        return self.executable.workspace_size

    @property
    def candidates(self) -> int:
        """Number of plans proposed."""
        return self.executable.candidates

    @cached_property
    def launches(self) -> bool:
        """Whether it launches anything: a result without elements needs nothing."""
        return any(layout.size for layout in self.outputs)

    @property
    def graph(self) -> str:
        """The graph as text."""
        return str(self._graph)

    def select(self, index: int) -> "Plan":
        """Build another of the proposed plans, and make it the one that these arguments get from now on.

        Parameters
        ----------
        index : int
            0 to ``candidates - 1``, in the order in which cuDNN ranked them.

        Returns
        -------
        Plan
            The other one.

        Raises
        ------
        ArgumentError
            For an index out of range.
        GraphNotSupportedError
            When cuDNN cannot build it, or a setting excludes it. The plan stays what it was.
        """
        return self._other(index, True)

    def build(self, index: int) -> "Plan":
        """Build another of the proposed plans, and leave what these arguments get as it is.

        Parameters
        ----------
        index : int
            As in `select`.

        Returns
        -------
        Plan
            The other one.

        Raises
        ------
        ArgumentError, GraphNotSupportedError
            As in `select`.
        """
        return self._other(index, False)

    def keep(self) -> None:
        """Make this plan, as `build` returned it, the one that these arguments get from now on: `select` without a second build.

        Raises
        ------
        ArgumentError
            For a plan that no graph function built.
        """
        self._chooser()(self, True)

    def __reduce__(self) -> Any:
        """Refuse to be copied: what cuDNN built is of this process."""
        raise TypeError(
            f"a plan of {self.name} cannot be copied or pickled; call the graph function in the other process, and give both a "
            f"plan directory"
        )

    def _other(self, index: int, keep: bool) -> "Plan":
        if not self.candidates:
            raise ArgumentError(
                f"{self.name}: plan {shown(index)} of none: an array is empty, and cuDNN computes nothing; select a plan for "
                f"arrays with elements"
            )
        number = as_integer(index, -1)
        if not 0 <= number < self.candidates:
            last = self.candidates - 1
            raise ArgumentError(f"{self.name}: plan {shown(index)} of {self.candidates}; the index must be 0 to {last}")
        return self._chooser()(number, keep)

    def built_anew(self) -> "Plan":
        """Build the plan that a saved one was of, and make it the one that these arguments get: the saved one is of no use.

        Returns
        -------
        Plan
            The new one.

        Raises
        ------
        ArgumentError, GraphNotSupportedError
            As in `select`.
        """
        return self._chooser()(None, True)

    def _chooser(self) -> "Callable[[int | Plan | None, bool], Plan]":
        if self._choose is None:
            raise ArgumentError(f"{self.name}: this plan was not built by a graph function, so there is none to select from")
        return self._choose


def at_their_places(inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[int | None, ...]:
    """Return `Plan.in_place` where each element depends on those at its own place alone."""
    if len(outputs) != 1:  # of several, one is read again after another was written
        return ()
    return tuple(0 if layout.lies_as(outputs[0]) else None for layout in inputs)
