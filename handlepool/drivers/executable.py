"""Describe compiled graphs: the operands that a launch copies, plans in files, launches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlepool.drivers.streams import Handle

ALIGNMENT = 256
"""Bytes that scratch begins at multiples of."""


@dataclass(frozen=True, slots=True)
class OperandCopy:
    """An operand that a launch copies into scratch before, or, of an output, out of it afterwards.

    Attributes
    ----------
    operand : int
        Its place among the operands.
    output : bool
        Whether it is written.
    shape : tuple of int
        Axes of the dense copy, from the outermost to the innermost.
    strides : tuple of int
        Of the operand's memory along them, in bytes; 0 where the operand repeats.
    offset, nbytes : int
        Where the copy lies in the scratch of copies, and how large it is.
    first : int
        Bytes from there to its first element, where it is a part of what cuDNN takes or gives.
    steps : tuple of int
        Its strides in bytes then; none where it is all, and dense.
    zeros : bool
        Whether each launch sets the rest of the copy to zero, since cuDNN reads it.
    """

    operand: int
    output: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    first: int = 0
    steps: tuple[int, ...] = ()
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class AliasPair:
    """An output, and an operand before it that it must share no element with.

    Attributes
    ----------
    one, other : int
        Their places among the operands; the output's first.
    reach, others : int
        Bytes from where they begin to where they end.
    same : int or None
        How many bytes the other one may begin behind the output all the same, since each element is written where it was read.
    meet : callable or None
        Whether they share an element, by how many bytes the other one begins behind the output. None where bytes alone say so.
    """

    one: int
    other: int
    reach: int
    others: int
    same: int | None
    meet: Callable[[int], bool] | None


def scratch_of(copies: Iterable[OperandCopy]) -> int:
    """Bytes of scratch that copies take."""
    return max((copy.offset + -(-copy.nbytes // ALIGNMENT) * ALIGNMENT for copy in copies), default=0)


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A compiled graph as it is kept in a file.

    Attributes
    ----------
    engine, workspace_size, candidates
        As of `Executable`, without what its launches copy.
    data : bytes
        What the driver makes it of again.
    early : bool or None
        Whether its launches begin before what is before them has ended; None where no device was there to tell.
    """

    engine: str
    workspace_size: int
    candidates: int
    data: bytes
    early: bool | None = None


class Executable(Protocol):
    """A compiled graph, or a kernel of our own, on one device. Many threads may launch it, each with a handle and workspace.

    ``untried`` is whether it was made of a `SavedPlan` and has not been launched yet.
    """

    name: str
    titles: Sequence[str]
    workspace_size: int
    engine: str
    candidates: int
    untried: bool

    def save(self) -> SavedPlan | None:
        """Return what `Driver.compile` makes the same of in another process; None where there is no such thing."""

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Enqueue the graph on the handle's stream; where it cannot, for an operand, raise before anything is enqueued.

        Shapes, strides and types of the operands are those of the plan. What else may differ from call to call is checked:
        see `check_operands`.

        Parameters
        ----------
        handle : Handle
            Bound to the stream to run on.
        operands : sequence of array
            The arrays in the order of ``operands`` that was given to `Driver.compile`.
        workspace : int
            Device pointer to at least ``workspace_size`` bytes; never 0 when that is positive.
        check : callable, optional
            Called with the operands' addresses before anything is enqueued; what it raises goes on.
        """

    def shortcut(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        alias_pairs: Sequence[AliasPair] | None,
        single: bool,
        names: dict[str, Any],
    ) -> Callable[..., Any] | None:
        """Make a function that launches the graph at once where nothing stands against it.

        None where the driver has no better one than what can be written for any.

        It is ``launch(begin, arrays, out, fresh=None)``, and returns the outputs, or ``NOT_CACHED`` where the arrays are others
        than it was made for, or must not be launched with. ``begin`` is None, or what returns the slot to launch on when it is
        called with the operands, ``launch`` and the operands' addresses; outputs are allocated before, or are ``fresh``, one of
        the ``count`` tuples that ``launch.allocate(count)`` returned, which may share a block of memory.

        Parameters
        ----------
        inputs, outputs : sequence of Layout
            Of the arrays. The first input's shape is not compared: whoever looked the function up has done that.
        alias_pairs : sequence of AliasPair, optional
            What ``out`` must not lie over, as in `Plan`; None for outputs that are to be allocated.
        single : bool
            Whether there is one output, not a tuple.
        names : dict
            ``NOT_CACHED``; ``current_device`` and ``current_stream``;
            the pool's ``status``, ``find()`` and ``repaired(slot)``; ``cache``, its ``tick``, and ``entry``; ``diagnose(error)``.
        """
