"""A compiled plan for a graph of one geometry on one device.

cuDNN chooses the plan.
"""

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
        Name of the function that built the graph.
    device : int
        Device ordinal.
    engine : str
        cuDNN's name of the chosen engine and its knobs. On the host driver, that driver's own name.
    workspace_size : int
        Bytes of scratch that a launch needs.
    candidates : int
        Number of plans that cuDNN proposed for the graph. 0 if an array is empty.
    graph : str
        The graph as text: JSON of its nodes and tensors, as the frontend writes it.
    inputs, outputs : tuple of Layout
        Layouts of the inputs and of the outputs, in order.
    single : bool
        Whether the function returned one tensor instead of a tuple of tensors.
    in_place : tuple of int or None
        For each input, the offset in bytes from the start of the output at which the input may begin. An offset exists only if
        there is a single output, and if each of its elements depends only on that input's element at the same place. None means
        that the input may share no element with the output. An empty tuple means None for every input.
    keys : tuple of str or int
        References of the outputs in `GraphFunction.run`.
    places : tuple of int
        For each operand, the place of its array in the arguments. -1 means that the call allocates the output.
    copies : tuple of OperandCopy
        Operands that each launch copies, because cuDNN is not known to compute rightly from their layout. See
        `handlepool.graphs.forms`.
    key : str
        The plan's key in a plan directory. "" if the pool has no plan directory, or if no text identifies the graph.
    asked : object
        A value that is equal for all plans of one function with the same arrays and options. The choice among the
        proposed plans does not change the value.
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
        """Pairs of each output with each operand before it.

        The property is computed at the first launch with ``out=``.
        """
        layouts, inputs = self.inputs + self.outputs, len(self.inputs)
        # An empty array shares no element with any array.
        full = [place for place, layout in enumerate(layouts) if layout.size]
        pairs = [(one, other) for one in full if one >= inputs for other in full if other < one]
        return tuple(self._pair(layouts, one, other) for one, other in pairs)

    def _pair(self, layouts: tuple[Layout, ...], one: int, other: int) -> AliasPair:
        output, before = layouts[one], layouts[other]
        same = self.in_place[other] if other < len(self.in_place) else None
        return AliasPair(one, other, output.reach, before.reach, same, meeting(output, before))

    def check_aliases(self, addresses: Sequence[int]) -> None:
        """Raise if an output shares an element with another operand.

        A launch may write such an element before it has read the same memory as an input. Two slices of one block that share no
        element pass the check. A single output may be the same array as an input if each output element depends only on the input
        element at the same place.

        Parameters
        ----------
        addresses : sequence of int
            Addresses of the operands, inputs before outputs.
        """
        for pair in self.alias_pairs:
            start, begin = addresses[pair.one], addresses[pair.other]
            # Two spans of memory that do not overlap share no element. An input at its allowed offset passes as well.
            if begin >= start + pair.reach or start >= begin + pair.others or begin - start == pair.same:
                continue
            # Overlapping spans may interleave without a shared element.
            if pair.meet is None or pair.meet(begin - start):
                what = f"argument {pair.other}" if pair.other < len(self.inputs) else "another output"
                raise ArgumentError(f"out= of {self.name} shares memory with {what}; pass an array with memory of its own")

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
        """Number of plans that cuDNN proposed for the graph."""
        return self.executable.candidates

    @cached_property
    def launches(self) -> bool:
        """Whether the plan launches anything: a result without elements needs no launch."""
        return any(layout.size for layout in self.outputs)

    @property
    def graph(self) -> str:
        """The graph as text."""
        return str(self._graph)

    def select(self, index: int) -> "Plan":
        """Build another proposed plan, and use the new plan from now on.

        Later calls launch the new plan instead of this plan.

        Parameters
        ----------
        index : int
            0 to ``candidates - 1``, in the order in which cuDNN ranked the plans.

        Returns
        -------
        Plan
            The other plan.

        Raises
        ------
        ArgumentError
            For an index out of range.
        GraphNotSupportedError
            If cuDNN cannot build the plan, or a setting excludes it. Calls then go on with this plan.
        """
        return self._other(index, True)

    def build(self, index: int) -> "Plan":
        """Build another proposed plan, but do not use it for calls.

        Parameters
        ----------
        index : int
            As in `select`.

        Returns
        -------
        Plan
            The other plan.

        Raises
        ------
        ArgumentError, GraphNotSupportedError
            As in `select`.
        """
        return self._other(index, False)

    def keep(self) -> None:
        """Use this plan, which `build` returned, from now on.

        Calls with the arguments of this plan launch it. The effect is that of `select`, without a second build.

        Raises
        ------
        ArgumentError
            For a plan that no graph function built.
        """
        self._chooser()(self, True)

    def __reduce__(self) -> Any:
        """Refuse copies and pickles, because cuDNN's build belongs to this process."""
        raise TypeError(
            f"a plan of {self.name} cannot be copied or pickled; call the graph function in the other process, and give both "
            f"processes the same plan directory"
        )

    def _other(self, index: int, keep: bool) -> "Plan":
        if not self.candidates:
            raise ArgumentError(
                f"{self.name}: there is no plan {shown(index)}, because an array is empty, so cuDNN proposed no plans; select a "
                f"plan for arrays with elements"
            )
        # A value that is no integer becomes -1, which is out of range.
        number = as_integer(index, -1)
        if not 0 <= number < self.candidates:
            last = self.candidates - 1
            raise ArgumentError(f"{self.name}: there is no plan {shown(index)}; the index must be 0 to {last}")
        return self._chooser()(number, keep)

    def built_anew(self) -> "Plan":
        """Replace a saved plan that failed by a newly built plan.

        Calls that launched the saved plan launch the new plan.

        Returns
        -------
        Plan
            The new plan.

        Raises
        ------
        ArgumentError, GraphNotSupportedError
            As in `select`.
        """
        return self._chooser()(None, True)

    def _chooser(self) -> "Callable[[int | Plan | None, bool], Plan]":
        if self._choose is None:
            raise ArgumentError(
                f"{self.name}: no graph function built this plan, so it has no alternatives; use a plan from plan_for"
            )
        return self._choose


def at_their_places(inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[int | None, ...]:
    """Return `Plan.in_place` for a function that computes each element alone.

    Each element of the output must depend only on the input elements at the same place.
    """
    # With several outputs, a launch may read an input again after it wrote another output.
    if len(outputs) != 1:
        return ()
    return tuple(0 if layout.lies_as(outputs[0]) else None for layout in inputs)
