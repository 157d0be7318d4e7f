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

    An input is copied into scratch before the launch. An output is copied out of scratch after the launch.

    Attributes
    ----------
    operand : int
        Index of the operand.
    output : bool
        Whether the operand is written.
    shape : tuple of int
        Axes of the dense copy, from the outermost to the innermost.
    strides : tuple of int
        Strides in bytes of the operand's own memory along these axes. If one element serves a whole axis, the stride is 0.
    offset, nbytes : int
        The copy's offset in the scratch for copies, and the copy's size, in bytes.
    first : int
        The bytes from ``offset`` to the operand's first element. Positive only if the operand is a part of cuDNN's tensor.
    steps : tuple of int
        The operand's strides in bytes within cuDNN's tensor, if the operand is a part of that tensor. Empty if the operand is the
        whole dense tensor.
    zeros : bool
        Whether each launch sets the rest of cuDNN's tensor to zero. cuDNN reads that rest.
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
        Distance in bytes from the output's first byte to the other operand's first byte. At this distance, an overlap is allowed,
        because each element is then written where it was read. None if no overlap is allowed.
    meet : callable or None
        Gets the other operand's distance in bytes from the output, and returns whether the two operands share an element. None if
        a comparison of the byte ranges is enough.
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
    """Hold the data of a compiled graph, as a file stores them.

    Attributes
    ----------
    engine, workspace_size, candidates
        As in `Executable`. ``workspace_size`` does not count the scratch for operand copies.
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

    Many threads may launch the executable at once, each with its own handle and workspace.

    ``untried`` is True if the executable was made from a `SavedPlan` and has not been launched yet.
    """

    name: str
    titles: Sequence[str]
    workspace_size: int
    engine: str
    candidates: int
    untried: bool

    def save(self) -> SavedPlan | None:
        """Return the data to restore the executable in another process.

        `Driver.compile` takes this data as ``saved``. Return None if the executable cannot be saved.
        """

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Enqueue the graph on the handle's stream.

        The caller ensures that the operands have the plan's shapes, strides and types. The method checks properties that may
        differ from call to call: see `check_operands`. If an operand does not fit, the method raises before it enqueues any work.

        Parameters
        ----------
        handle : Handle
            A handle that is bound to the stream to run on.
        operands : sequence of array
            The arrays, in the order of the ``operands`` of `Driver.compile`.
        workspace : int
            Device pointer to at least ``workspace_size`` bytes. It may be 0 only if ``workspace_size`` is 0.
        check : callable, optional
            Called with the operands' addresses before any work is enqueued. If ``check`` raises an error, the launch raises that
            error.
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

        The function is ``launch(begin, arrays, out, fresh=None)``. It returns the outputs. If the arrays have another geometry
        than ``inputs`` and ``outputs``, or may not be used in a launch, it returns ``NOT_CACHED``.

        If ``begin`` is None, the launch uses the slot of the current stream. If not, ``begin`` gets the operands, ``launch``, the
        operands' addresses and their blocks, and returns the slot. Without ``out``, the function allocates the outputs, or uses
        ``fresh``: one of the ``count`` tuples that ``launch.allocate(count)`` returned. Such tuples may share a block of memory.

        Parameters
        ----------
        inputs, outputs : sequence of Layout
            Layouts of the arrays. The function does not compare the first input's shape, because the look-up of the function in
            the cache has compared that shape.
        alias_pairs : sequence of AliasPair, optional
            The pairs of operands that must not overlap, as in `Plan`. None if the function allocates the outputs.
        single : bool
            Whether the function takes and returns one output, and not a tuple of outputs.
        names : dict
            Objects that the function uses, by name: ``NOT_CACHED``; ``current_device`` and ``current_stream``; the pool's
            ``status``, ``find()`` and ``repaired(slot)``; ``cache``, its ``tick``, and ``entry``; ``diagnose(error)``.
        """
