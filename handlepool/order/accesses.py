"""Describe the memory that a plan's launches read and overwrite, by address."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from operator import add, sub
from typing import NamedTuple

from handlepool.tensors.layout import Layout, Piece, Token

Accesses = tuple[Sequence[Piece | Token], Sequence[Piece | Token], bool]
"""Read memory, written memory, and a flag for an opaque call.

An opaque call may use any other memory as well.
"""


class Operands:
    """The operands of one plan's launches, independent of their addresses.

    The inputs come first, then the outputs.

    Attributes
    ----------
    layouts : tuple of Layout
        The layout of each input, then of each output.
    inputs : int
        Number of arrays that a launch reads.
    fresh : bool
        Whether the outputs are allocated for the launch.
    dense : bool
        Whether no operand has gaps between its elements.
    reaches : tuple of int
        Distance from each array's address to its end, in bytes.
    read, outputs : tuple of int
        The reach of each input, and of each output. Both tuples are empty if an operand has gaps.
    written, made : tuple of int
        One of the two is equal to ``outputs``, and the other is empty: ``made`` holds the outputs if they are allocated for the
        launch, and ``written`` holds them if the caller passes them.
    longest : int
        The largest reach of all operands, in bytes.
    simple : bool
        Whether there is exactly one output, and no operand has gaps.
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
        # Most plans have one dense output. For these plans `Recent` skips its loop over the outputs.
        self.simple = len(self.outputs) == 1
        self.sizes = tuple([stop - start for start, stop, _ in pieces[inputs:]])
        # Outputs that are allocated for the launch have no earlier user in the region. So the books look up only outputs that
        # the caller passes.
        self.written = () if fresh else self.outputs
        self.made = self.outputs if fresh else ()
        self.inputs = inputs
        self.fresh = fresh

    def are_apart(self, read: Sequence[int], written: Sequence[int]) -> bool:
        """Return whether many launches, each writing a single array, cannot conflict.

        ``read`` and ``written`` hold the addresses that all the launches read and write. Two launches conflict if one launch
        writes memory that the other launch reads or writes. The result may be False although no launches conflict.
        """
        # The check below expects that each launch writes one array of the caller without gaps. All other launches count as
        # conflicting.
        if len(self.written) != 1:
            return False
        length, longest = self.written[0], max(self.read + self.written)
        starts = sorted(written)
        if min(map(sub, starts[1:], starts), default=length) < length:
            return False
        if max(read) + longest <= starts[0] or min(read) >= starts[-1] + length:
            return True
        # The written arrays are sorted and disjoint. So if any of them overlaps a read, the last array that starts before the
        # end of the read overlaps it.
        for address in set(read):
            index = bisect_left(starts, address + longest)
            if index and starts[index - 1] + length > address:
                return False
        return True

    def pieces(self, addresses: Sequence[int]) -> tuple[Piece, ...]:
        """Return the memory of operands that begin at ``addresses``."""
        if self.dense:
            return tuple(zip(addresses, map(add, addresses, self.reaches), repeat(None)))
        return tuple([layout.piece(address) for layout, address in zip(self.layouts, addresses, strict=True)])


class Memory(NamedTuple):
    """The memory that a program reads and overwrites.

    Attributes
    ----------
    reads, writes : sequence of Piece or Token
        Memory that the program reads, and memory that it overwrites.
    """

    reads: Sequence[Piece | Token]
    writes: Sequence[Piece | Token]
