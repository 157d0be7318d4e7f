"""What calls read and overwrite: of the launches of one plan by their addresses, and of any call by the memory that it names."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from operator import add, sub

from handlepool.tensors.layout import Layout, Piece, Token


class Operands:
    """What the launches of one plan read and write, whatever the arrays are: the inputs come first.

    Attributes
    ----------
    layouts : tuple of Layout
    inputs : int
        How many are read.
    fresh : bool
        Whether the outputs are allocated for the launch.
    dense : bool
        Whether none has gaps.
    reaches : tuple of int
        From each array's address to its end, in bytes.
    read, outputs : tuple of int
        Where none has gaps, the bytes of each input, and of each output.
    written, made : tuple of int
        Those of the outputs that are given, and that are allocated.
    longest : int
        Of all.
    simple : bool
        Whether none has gaps and there is one output.
    sizes : tuple of int
        Bytes from the first to the last element of each output.
    """

    __slots__ = (
        "dense",
        "fresh",
        "inputs",
        "layouts",
        "longest",
        "made",
        "outputs",
        "reaches",
        "read",
        "simple",
        "sizes",
        "written",
    )

    def __init__(self, layouts: Sequence[Layout], inputs: int, fresh: bool) -> None:
        self.layouts = tuple(layouts)
        pieces = [layout.piece(0) for layout in layouts]
        reaches = tuple([stop for _, stop, _ in pieces])
        self.dense = not any(start or strided for start, _, strided in pieces)
        self.reaches = reaches
        self.longest = max(reaches)
        self.read = reaches[:inputs] if self.dense else ()
        self.outputs = reaches[inputs:] if self.dense else ()
        self.simple = len(self.outputs) == 1
        self.sizes = tuple([stop - start for start, stop, _ in pieces[inputs:]])
        self.written = () if fresh else self.outputs
        self.made = self.outputs if fresh else ()
        self.inputs = inputs
        self.fresh = fresh

    def are_apart(self, read: Sequence[int], written: Sequence[int]) -> bool:
        """Whether no launch of many writes what another one reads or writes, by the addresses of all; each writes one array."""
        if len(self.written) != 1:
            return False
        length, longest = self.written[0], max(self.read + self.written)
        starts = sorted(written)
        if min(map(sub, starts[1:], starts), default=length) < length:
            return False
        if max(read) + longest <= starts[0] or min(read) >= starts[-1] + length:
            return True
        for address in set(read):
            index = bisect_left(starts, address + longest)
            if index and starts[index - 1] + length > address:
                return False
        return True

    def pieces(self, addresses: Sequence[int]) -> tuple[Piece, ...]:
        """Return the memory of arrays that begin at these addresses."""
        if self.dense:
            return tuple(zip(addresses, map(add, addresses, self.reaches), repeat(None)))
        return tuple([layout.piece(address) for layout, address in zip(self.layouts, addresses, strict=True)])


class Memory:
    """What a call reads and overwrites, where that is known before it starts.

    Attributes
    ----------
    reads, writes : sequence of Piece or Token
    guessed : sequence of Piece
        What it may write besides: it waits as if it did, and who it is says afterwards whether it has.
    name : str
        The function's, for messages.
    opaque : bool
        Whether it may use any memory besides: it waits for all calls before it, and all calls after it wait for it.
    waited : bool
        Whether it waits for something for what it may write alone.
    """

    __slots__ = ("guessed", "name", "opaque", "reads", "waited", "writes")

    def __init__(
        self,
        reads: Sequence[Piece | Token],
        writes: Sequence[Piece | Token],
        guessed: Sequence[Piece] = (),
        name: str = "",
        *,
        opaque: bool = False,
    ) -> None:
        self.opaque = opaque
        self.reads = reads
        self.writes = writes
        self.guessed = guessed
        self.name = name
        self.waited = False
