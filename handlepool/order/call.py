"""Define a call: one unit of work that data orders.

A call runs inside a region, inside a recording, or outside of both. There are three kinds: calls of graph functions, of
operations and of plain functions. A place (`handlepool.order.places`) orders a call by the memory that the call reads and
writes. The place then launches the call on a slot. A replay of a program is no `Call`, because it needs only a stream and no
slot. `places.before` orders the replay, and the program launches itself.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from handlepool.tensors.layout import Piece, Token

Pieces = Sequence[Piece | Token]


class Call:
    """A unit of work that data orders.

    Attributes
    ----------
    name : str
        The name of the call in messages.
    reads, writes : sequence of Piece or Token
        Memory that the call reads, and memory that it overwrites.
    keep : object
        The owner of the memory in ``reads`` and ``writes``. It is kept alive as long as the call may run.
    assumed_writes : sequence of Piece
        Further memory that the call may write, because its writes are not known yet. The call waits as if it wrote this memory.
    opaque : bool
        Whether the call may use memory beyond ``reads`` and ``writes``. An opaque call waits for all earlier calls, and all
        later calls wait for the opaque call.
    what : tuple
        Values that identify the call. A recording calls its function twice, and these values must be equal both times.
    runs_python : bool
        Whether `launch` runs Python code of the user. The slot's stream is current while this code runs.
    allocated : bool
        Whether `launch` returns arrays that were allocated for the call.
    """

    __slots__ = ()

    name: str
    reads: Pieces
    writes: Pieces
    keep: object
    assumed_writes: Sequence[Piece] = ()
    opaque: bool = False
    runs_python: bool = False

    @property
    def what(self) -> tuple[object, ...]:
        """The values that identify the call in a recording."""
        return ()

    @property
    def allocated(self) -> bool:
        """Whether `launch` returns arrays that were allocated for the call."""
        return False

    def launch(self, slot: Any) -> Any:
        """Launch the work on the slot's stream, and return its value.

        A call that runs Python uses the current stream, and ignores the slot.
        """
        raise NotImplementedError

    def new(self, value: Any) -> Iterable[Piece | Token]:
        """Return memory that the call wrote beyond `writes`.

        ``value`` is the result of `launch`. The memory of new arrays in ``value`` counts as written.
        """
        return ()

    def compare_needs(self, known: object, assumed: object) -> None:
        """Compare the needs without and with the assumed writes.

        The needs are the calls that this call waits for. ``known`` holds the needs without the assumed writes, and ``assumed``
        the needs with them.
        """


class PythonCall(Call):
    """A call that runs Python code of the user in a branch.

    Some of its writes are known only after its end.
    """

    __slots__ = ()

    runs_python = True

    def ended(self, order: Any, track: Any, allocated: Sequence[Any] | None, value: object) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the call allocated, and other memory it wrote.

        ``allocated`` holds the blocks that the call allocated, or is None if its allocations were not seen. ``value`` is the
        result of `launch`. The first list is memory that the call allocated. The second list is all other memory that counts as
        written in addition to `writes`.
        """
        raise NotImplementedError

    def failed(self, order: Any, track: Any, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the call may have written before its error.

        The two lists are as in `ended`.
        """
        raise NotImplementedError
