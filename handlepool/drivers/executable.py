"""Describe compiled graphs, their operand copies, saved plans and launches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlepool.drivers.streams import Handle

ALIGNMENT = 256
"""The alignment of scratch, in bytes."""


@dataclass(frozen=True, slots=True)
class OperandCopy:
    """An operand that a launch copies through scratch.

    An input is copied into scratch before the launch. An output is copied out of scratch after it.

    Attributes
    ----------
    operand : int
        Index of the operand.
    output : bool
        Whether the operand is written.
    shape : tuple of int
        Axes of the dense copy, from the outermost to the innermost.
    strides : tuple of int
        Strides in bytes of the operand's memory along these axes; 0 where the operand repeats.
    offset, nbytes : int
        Offset of the copy in the scratch of copies and its size, in bytes.
    first : int
        If the operand is only a part of cuDNN's tensor, the bytes from ``offset`` to its first element.
    steps : tuple of int
        If the operand is only a part, its strides in bytes; empty if it is the whole dense tensor.
    zeros : bool
        Whether each launch sets the rest of cuDNN's tensor to zero, because cuDNN reads it.
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
    """An output, and an earlier operand that must not overlap it.

    Attributes
    ----------
    one, other : int
        The output's index and the other operand's index.
    reach, others : int
        Size in bytes of the output's memory and of the other operand's memory, gaps included.
    same : int or None
        The byte distance at which an overlap is allowed, because each element is written where it was read.
    meet : callable or None
        Returns, for the other operand's distance in bytes from the output, whether the pair shares an element. None if a
        comparison of the byte ranges is enough.
    """

    one: int
    other: int
    reach: int
    others: int
    same: int | None
    meet: Callable[[int], bool] | None


def scratch_of(copies: Iterable[OperandCopy]) -> int:
    """Return the bytes of scratch that copies take."""
    return max((copy.offset + -(-copy.nbytes // ALIGNMENT) * ALIGNMENT for copy in copies), default=0)


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A compiled graph as it is kept in a file.

    Attributes
    ----------
    engine, workspace_size, candidates
        As in `Executable`, without the scratch of operand copies.
    data : bytes
        The serialised plan, from which the driver restores the graph.
    early : bool or None
        Whether launches begin before earlier work on the stream has ended; None if no device was present to test it.
    """

    engine: str
    workspace_size: int
    candidates: int
    data: bytes
    early: bool | None = None


class Executable(Protocol):
    """A compiled graph, or a kernel of this package, on one device.

    Many threads may launch it, each with a handle and workspace.

    ``untried`` is whether it was made of a `SavedPlan` and has not been launched yet.
    """

    name: str
    titles: Sequence[str]
    workspace_size: int
    engine: str
    candidates: int
    untried: bool

    def save(self) -> SavedPlan | None:
        """Return the data to restore the executable in another process.

        `Driver.compile` takes this data. Return None if the executable cannot be saved.
        """

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Enqueue the graph on the handle's stream.

        If an operand does not fit, the method raises before it enqueues anything.

        The caller ensures that shapes, strides and types of the operands equal those of the plan. The method checks properties
        that may differ from call to call: see `check_operands`.

        Parameters
        ----------
        handle : Handle
            Bound to the stream to run on.
        operands : sequence of array
            The arrays in the order of ``operands`` that was given to `Driver.compile`.
        workspace : int
            Device pointer to at least ``workspace_size`` bytes; never 0 when that is positive.
        check : callable, optional
            Called with the operands' addresses before anything is enqueued. Its errors propagate.
        """

    def shortcut(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        alias_pairs: Sequence[AliasPair] | None,
        single: bool,
        names: dict[str, Any],
    ) -> Callable[..., Any] | None:
        """Make a function that launches the graph on a fast path.

        Return None if the driver has no faster launch than `launch`.

        The function is ``launch(begin, arrays, out, fresh=None)``. It returns the outputs, or ``NOT_CACHED`` where the arrays
        differ from the arrays it was made for, or must not be launched with. ``begin`` is None, or returns the slot to launch on
        when it is called with the operands, ``launch`` and the operands' addresses. Outputs are allocated before, or are
        ``fresh``: an element of the ``count`` tuples that ``launch.allocate(count)`` returned, which may share a block of memory.

        Parameters
        ----------
        inputs, outputs : sequence of Layout
            Layouts of the arrays. The first input's shape is not compared, because the look-up of the function has compared it.
        alias_pairs : sequence of AliasPair, optional
            The operands that ``out`` must not overlap, as in `Plan`; None for outputs that are to be allocated.
        single : bool
            Whether there is one output, not a tuple.
        names : dict
            ``NOT_CACHED``; ``current_device`` and ``current_stream``;
            the pool's ``status``, ``find()`` and ``repaired(slot)``; ``cache``, its ``tick``, and ``entry``; ``diagnose(error)``.
        """
