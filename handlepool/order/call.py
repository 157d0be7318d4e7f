"""Define a call: one unit of work that data orders.

A call runs inside a region, inside a recording, or outside of both. There are three kinds: calls of graph functions, of
operations and of plain functions. A place (`handlepool.order.places`) orders a call by the memory that the call reads and
writes. The place then launches the call on a slot. A program is no `Call`, because it has a stream and no slot. `places.before`
orders the program, and the program launches itself.
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
        The owner of that memory, kept alive as long as the call may run.
    assumed_writes : sequence of Piece
        Further memory that the call may write, because its writes are not known yet. The call waits as if it wrote this memory.
    opaque : bool
        Whether the call may use any other memory. It waits for all calls before it, and all calls after it wait for it.
    what : tuple
        Values that identify the call. A recording calls its function twice, and these values must be equal both times.
    runs_python : bool
        Whether `launch` runs Python code of the user. The slot's stream is current meanwhile.
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
        """Return further memory that the call wrote, as its value shows."""
        return ()

    def compare_needs(self, known: object, assumed: object) -> None:
        """Compare the needs without and with the assumed writes.

        The needs are the calls that this call waits for. ``known`` leaves the assumed writes out, and ``assumed`` includes them.
        """


class PythonCall(Call):
    """A call that runs Python code of the user in a branch.

    Some of its writes are known only after its end.
    """

    __slots__ = ()

    runs_python = True

    def ended(self, order: Any, track: Any, allocated: Sequence[Any] | None, value: object) -> tuple[list[Piece], list[Piece]]:
        """Return the new memory and the further memory that were written.

        ``value`` is the call's value. The first list is memory that the call made. The second list is all other memory that
        counts as written in addition to `writes`.
        """
        raise NotImplementedError

    def failed(self, order: Any, track: Any, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Return memory that a call may have written before its error.

        The two lists are as in `ended`.
        """
        raise NotImplementedError
