"""What drivers hand out: streams, handles, compiled graphs and recorded ones, as far as the rest of handlepool knows them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ALIGNMENT = 256
"""Bytes that scratch begins at multiples of."""


class Stream(Protocol):
    """The array library's stream object: weakly referenceable, with free attributes, equal by pointer."""

    ptr: int
    device_id: int

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Handle(Protocol):
    """A cuDNN handle object, as `cudnn.Handle`: `stream` is the pointer it is bound to, None once it was destroyed."""

    backend_handle: int | None
    stream: int | None


@dataclass(frozen=True, slots=True)
class Copy:
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
    """

    operand: int
    output: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int


def scratch_of(copies: Iterable[Copy]) -> int:
    """Bytes of scratch that copies take."""
    return max((copy.offset + -(-copy.nbytes // ALIGNMENT) * ALIGNMENT for copy in copies), default=0)


class Executable(Protocol):
    """A compiled graph on one device. `launch` may be called by many threads, each with its own handle and workspace."""

    name: str
    titles: Sequence[str]
    workspace_size: int
    engine: str
    candidates: int

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
        apart: Sequence[tuple[int, int, int, int, bool]] | None,
        single: bool,
        names: dict[str, Any],
    ) -> Callable[..., Any] | None:
        """Make a function that launches the graph at once where nothing stands against it; None where the driver has no better
        one than what can be written for any.

        It is ``launch(begin, arrays, out, fresh=None)``, and returns the outputs, or ``NOT_CACHED`` where the arrays are others
        than it was made for, or must not be launched with. ``begin`` is None, or what returns the slot to launch on when it is
        called with the operands and ``launch``; outputs are allocated before, or are ``fresh``, one of the ``count`` tuples that
        ``launch.allocate(count)`` returned, which may share a block of memory.

        Parameters
        ----------
        inputs, outputs : sequence of Layout
            Of the arrays. The first input's shape is not compared: whoever looked the function up has done that.
        apart : sequence of tuple, optional
            What ``out`` must not lie over, as in `Plan`; None for outputs that are to be allocated.
        single : bool
            Whether there is one output, not a tuple.
        names : dict
            ``NOT_CACHED``; ``recordings``, which is empty while nothing is recorded; ``current_device`` and ``current_stream``;
            ``pool``, its ``find()`` and ``sound(slot)``; ``cache``, its ``tick``, and ``entry``; ``diagnose(pool, error)``.
        """


class RecordedGraph(Protocol):
    """What was captured, ready to be launched again and again; a graph never runs beside itself."""

    @property
    def nodes(self) -> int:
        """Number of operations in it."""

    @property
    def launch(self) -> Callable[[int], None]:
        """``launch(pointer)`` enqueues all of it on a stream, as one launch. Used by one thread at a time."""

    def upload(self, pointer: int) -> None:
        """Bring it to the device, in the order of a stream, so that the first launch does not have to."""

    def destroy(self) -> None:
        """Give it back; a launch that is under way goes on. Called inside `Driver.relaxed`."""


class RecordingMemory(Protocol):
    """Memory for what is allocated while a function is recorded, and for nothing else."""

    @property
    def allocator(self) -> Any:
        """For `Driver.swap_allocator`. Harms no capture. What is freed comes back here, and is given to the recording alone."""

    @property
    def nbytes(self) -> int:
        """Bytes taken from the device."""

    def holds(self, value: object) -> bool:
        """Whether a value is an array in this memory, or what stands for a block of it."""

    def release(self) -> bool:
        """Give what no array has back to the device; called inside `Driver.relaxed`. Whether that was all."""
