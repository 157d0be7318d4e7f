"""Define a call: one unit of work that data orders.

A call is part of a region, of a recording, or of neither. Its kinds are calls of graph functions, of operations and of plain
functions. A place (`handlepool.order.places`) orders a call by the memory that it reads and writes, and launches it on the slot
that the place chose. A program has a stream and no slot. `places.before` orders the program, and the program launches itself.
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
        Owner of that memory. It lives as long as the call may run.
    assumed_writes : sequence of Piece
        Further memory that the call may write. The call waits as if it wrote this memory, and afterwards says whether it did.
    opaque : bool
        Whether the call may use any other memory. It waits for all calls before it, and all calls after it wait for it.
    what : tuple
        The values that a recording compares. They are equal when the function that makes the call is called again.
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
        """The values that a recording compares."""
        return ()

    @property
    def allocated(self) -> bool:
        """Whether the value is new arrays."""
        return False

    def launch(self, slot: Any) -> Any:
        """Launch the work on the slot's stream, and return its value.

        A call that runs Python needs a current stream and no slot.
        """
        raise NotImplementedError

    def new(self, value: Any) -> Iterable[Piece | Token]:
        """Return further memory that the value shows to be written."""
        return ()

    def compare_needs(self, known: object, assumed: object) -> None:
        """Compare the needs without assumed writes and with assumed writes.

        The needs are the calls that this call waits for.
        """


class PythonCall(Call):
    """A branch's call of a user's Python.

    Its further writes are known once it has ended.
    """

    __slots__ = ()

    runs_python = True

    def ended(self, order: Any, track: Any, allocated: Sequence[Any] | None, value: object) -> tuple[list[Piece], list[Piece]]:
        """Return the new memory and the unordered memory that were written.

        ``value`` is the call's value. The second list is memory that the call was not ordered for.
        """
        raise NotImplementedError

    def failed(self, order: Any, track: Any, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Return memory that a call may have written before its error."""
        raise NotImplementedError
