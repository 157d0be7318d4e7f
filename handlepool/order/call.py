"""Call: one unit of work that data orders, in a region, in a recording or outside of both.

Calls of graph functions, of operations and of plain functions are its kinds. A place (`handlepool.order.places`) puts a call in
order by what it reads and writes, and launches it on the slot that it chose. A program has a stream and no slot: `places.before`
puts it in order, and it launches itself.
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
        For messages.
    reads, writes : sequence of Piece or Token
        Memory that the call reads, and memory that it overwrites.
    keep : object
        Has that memory. It lives as long as the call may run.
    assumed_writes : sequence of Piece
        Memory that the call may write besides. The call waits as if it did, and says afterwards whether it has.
    opaque : bool
        Whether the call may use any other memory. It waits for all calls before it, and all calls after it wait for it.
    what : tuple
        The same again when the function that makes the call is called again: what a recording compares.
    runs_python : bool
        Whether `launch` runs a user's Python, for which its slot's stream is made current.
    allocated : bool
        Whether the value of `launch` is arrays that were allocated for the call.
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
        """The parts that a recording compares."""
        return ()

    @property
    def allocated(self) -> bool:
        """Whether the value is new arrays."""
        return False

    def launch(self, slot: Any) -> Any:
        """Give the work to the slot's stream; the value of the call. One that runs Python needs no slot, but a current stream."""
        raise NotImplementedError

    def new(self, value: Any) -> Iterable[Piece | Token]:
        """Return memory that the value shows to be written besides."""
        return ()

    def compare_needs(self, known: object, assumed: object) -> None:
        """Be told which calls this one waits for, without its assumed writes and with them."""


class PythonCall(Call):
    """A call that runs a user's Python as a branch: what it wrote besides is known once it has ended."""

    __slots__ = ()

    runs_python = True

    def ended(self, order: Any, track: Any, allocated: Sequence[Any] | None, value: object) -> tuple[list[Piece], list[Piece]]:
        """Be told of the value; new memory that was written, and other memory that the call was not ordered for."""
        raise NotImplementedError

    def failed(self, order: Any, track: Any, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Be told that the call raised an error; what it may have written."""
        raise NotImplementedError
