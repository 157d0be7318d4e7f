"""Describe the memory that calls use, and record its last users.

Each piece of memory has an entry. The key of an entry is the piece's address. If the piece has gaps, or if another piece begins
at the same address, the key is the whole piece. An entry lists the other entries that share elements with it. So a call that
uses a piece finds them without a search.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add, sub
from typing import Any, NamedTuple

from handlepool.order.track import Needs, Track
from handlepool.tensors.layout import Layout, Piece, Token, share

MOST_NEIGHBOURS = 64
"""The maximum number of pieces in a stretch that are told apart.

A stretch is a gapless run of known pieces. A stretch with more pieces counts as a single piece.
"""

UNREAD: Needs = {}
"""The value of `Use.readers` after a write, until the next read.

All such entries share this dictionary, so it is never written to.
"""


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


class Use:
    """A piece of memory, or a token, with its last users.

    Attributes
    ----------
    reach : int
        Bytes of a piece without gaps that shares no elements with other pieces; -1 for any other entry.
    writer, call : Track or None, int
        The track and the number of the call that wrote the piece last.
    readers : dict
        For each track, the last call that read the piece since that write.
    others : sequence of Use
        Pieces that share elements with this piece.
    """

    __slots__ = ("call", "others", "piece", "reach", "readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, piece: Any = None, writer: Track | None = None, call: int = 0) -> None:
        self.start = start
        self.stop = stop
        self.reach = stop - start if piece is None else -1
        self.piece = piece
        self.writer = writer
        self.call = call
        self.readers = UNREAD
        self.others: Sequence[Use] = ()

    def overwritten(self) -> None:
        """Note a write that follows all earlier uses of the entry."""


class _Whole(Use):
    """A stretch that counts as a single piece.

    ``others`` holds its former pieces, whose last users count until the next write.
    """

    __slots__ = ()

    def overwritten(self) -> None:
        """Forget the former pieces."""
        self.others = ()


class _Stretch:
    """A gapless run of several known pieces."""

    __slots__ = ("coarse", "stop", "uses")

    def __init__(self, stop: int, uses: list[Use], coarse: bool) -> None:
        self.stop = stop
        self.uses = uses
        # This tells whether all of the stretch counts as a single piece.
        self.coarse = coarse


class Uses:
    """The entries of all memory that calls read or wrote.

    Attributes
    ----------
    known : dict
        The entries, by address, by piece or by token. The key is the whole piece where it has gaps, or where several pieces begin
        at one address.
    """

    __slots__ = ("_end", "_linked", "_starts", "_stretches", "_unplaced", "known")

    def __init__(self) -> None:
        self.known: dict[Any, Use] = {}
        # This is the end of the last piece.
        self._end = 0
        # These are the start addresses of stretches, ascending.
        self._starts: list[int] = []
        # A stretch is listed here only if it holds more than the entry in `known` at its address.
        self._stretches: dict[int, _Stretch] = {}
        # These are the entries that share elements with other entries.
        self._linked: list[Use] = []
        # These are the entries of newly allocated memory, which have no stretch yet.
        self._unplaced: list[Use] = []

    def dense(self, address: int, reach: int) -> Use:
        """Return the entry of ``reach`` bytes at ``address``, or make it."""
        stop = address + reach
        # A piece past all known memory overlaps nothing, so no search is needed.
        if address >= self._end and reach:
            self._starts.append(address)
            self._end = stop
            use = self.known[address] = Use(address, stop)
            return use
        if self._unplaced:
            self._place_all()
        starts = self._starts
        at = bisect_right(starts, address)
        if (at and self._stop(starts[at - 1]) > address) or (at < len(starts) and starts[at] < stop) or not reach:
            return self.piece((address, stop, None))
        use = self.known[address] = Use(address, stop)
        starts.insert(at, address)
        return use

    def piece(self, piece: Any) -> Use:
        """Return the entry of any piece or token, or make it."""
        if type(piece) is Token:
            use = self.known.get(piece)
            if use is None:
                use = self.known[piece] = Use(0, 0, piece)
            return use
        start, stop, strided = piece
        if strided is None:
            use = self.known.get(start)
            if use is not None and use.stop == stop:
                return use
        use = self.known.get(piece)
        if use is not None:
            return use
        self._place_all()
        return self._place(Use(start, stop, strided))

    def pieces(self, pieces: Iterable[Any]) -> list[Use]:
        """Return the entry of each piece in ``pieces``; make missing entries."""
        known, found = self.known, []
        for piece in pieces:
            if type(piece) is not tuple or piece[2] is not None:
                found.append(self.piece(piece))
                continue
            use = known.get(piece[0])
            found.append(use if use is not None and use.stop == piece[1] else self.dense(piece[0], piece[1] - piece[0]))
        return found

    def new(self, address: int, reach: int, writer: Track, call: int) -> None:
        """Make the entry of memory that was allocated for a call.

        The memory shares nothing with known memory, because all known memory is kept alive and cannot be allocated again.
        """
        use = self.known[address] = Use(address, address + reach, None, writer, call)
        self._unplaced.append(use)
        if use.stop > self._end:
            self._end = use.stop

    def overlapping(self, piece: Any) -> Iterable[Use]:
        """Return the entries that share elements with a piece or token.

        The piece or token gets no entry itself.
        """
        if type(piece) is Token:
            use = self.known.get(piece)
            return () if use is None else (use,)
        self._place_all()
        return [use for at in self._between(*piece[:2]) for use in self._at(at) if _overlap(use, piece)]

    def close(self) -> None:
        """Drop the references from entry to entry."""
        for use in self._linked:
            use.others = ()

    def _between(self, start: int, stop: int) -> list[int]:
        """Return the starts of the stretches that a piece touches."""
        starts = self._starts
        first = bisect_right(starts, start)
        if first and self._stop(starts[first - 1]) > start:
            first -= 1
        return starts[first : bisect_left(starts, stop, first)]

    def _place(self, use: Use) -> Use:
        """Place a new piece, and link entries that share its elements."""
        start, stop = use.start, use.stop
        if stop <= start:
            # An empty piece can share no element with any other piece.
            return use
        near = self._between(start, stop)
        if near:
            known = [each for at in near for each in self._at(at)]
            stretches = [self._stretches.pop(at) for at in near if at in self._stretches]
            at = min(start, near[0])
            first = bisect_left(self._starts, near[0])
            self._starts[first : first + len(near)] = [at]
            coarse = any(stretch.coarse for stretch in stretches)
            merged = self._stretches[at] = _Stretch(max(stop, *[each.stop for each in known]), known, coarse)
            self._end = max(self._end, merged.stop)
            # Each new piece is compared with all pieces of its stretch. Without the bound `MOST_NEIGHBOURS`, a loop over views
            # would take quadratic time.
            if coarse or len(known) >= MOST_NEIGHBOURS:
                return self._coarsen(at, merged)
            piece = (start, stop, use.piece)
            for each in known:
                if _overlap(each, piece):
                    self._link(each, use)
            merged.uses.append(use)
        # The address alone is the quickest key, but only one piece without gaps can have this key. The key of any other piece
        # at the address is the whole piece.
        dense = use.piece is None and start not in self.known
        self.known[start if dense else (start, stop, use.piece)] = use
        if not near:
            self._put(use)
        return use

    def _link(self, one: Use, other: Use) -> None:
        for use, neighbour in ((one, other), (other, one)):
            if not use.others:
                self._linked.append(use)
            use.others = (*use.others, neighbour)
            use.reach = -1

    def _put(self, use: Use) -> None:
        """Give a piece a stretch of its own."""
        start = use.start
        self._starts.insert(bisect_left(self._starts, start), start)
        if use.stop > self._end:
            self._end = use.stop
        if use.piece is not None or self.known.get(start) is not use:
            self._stretches[start] = _Stretch(use.stop, [use], False)

    def _at(self, start: int) -> Sequence[Use]:
        """Return the entries in the stretch that begins at an address."""
        stretch = self._stretches.get(start)
        return (self.known[start],) if stretch is None else stretch.uses

    def _stop(self, start: int) -> int:
        stretch = self._stretches.get(start)
        return self.known[start].stop if stretch is None else stretch.stop

    def _coarsen(self, start: int, stretch: _Stretch) -> Use:
        """Merge all entries of a stretch into a single piece.

        The stretch has too many pieces to tell them apart quickly.
        """
        former = stretch.uses
        if len(former) == 1 and (former[0].start, former[0].stop) == (start, stretch.stop):
            return former[0]
        for use in former:
            for key in (use.start, (use.start, use.stop, use.piece)):
                if self.known.get(key) is use:
                    del self.known[key]
        whole = _Whole(start, stretch.stop)
        whole.others = tuple({id(each): each for use in former for each in (use, *use.others)}.values())
        whole.reach = -1
        self._linked.append(whole)
        stretch.uses, stretch.coarse = [whole], True
        self.known[start] = whole
        return whole

    def _place_all(self) -> None:
        """Give each entry of newly allocated memory a stretch of its own."""
        for use in self._unplaced:
            self._put(use)
        self._unplaced.clear()


def needs_of(reads: Iterable[Use], writes: Iterable[Use]) -> Needs:
    """Return the calls that a call waits for.

    For memory that it reads, the call waits for the last write. For memory that it writes, the call waits for the last write
    and for all reads since.
    """
    needs: Needs = {}
    for use in reads:
        for each in (use, *use.others) if use.others else (use,):
            writer = each.writer
            if writer is not None and needs.get(writer, 0) < each.call:
                needs[writer] = each.call
    for use in writes:
        for each in (use, *use.others) if use.others else (use,):
            writer = each.writer
            if writer is not None and needs.get(writer, 0) < each.call:
                needs[writer] = each.call
            for reader, call in each.readers.items():
                if needs.get(reader, 0) < call:
                    needs[reader] = call
    return needs


def write_down(track: Track, call: int, reads: Iterable[Use], writes: Iterable[Use]) -> None:
    """Note a call as the last user of its reads and writes."""
    for use in reads:
        if use.readers is UNREAD:
            use.readers = {track: call}
        else:
            use.readers[track] = call
    for use in writes:
        # This writer waits for the former readers. A later call that waits for this writer comes after them anyway, so they are
        # dropped.
        use.writer, use.call, use.readers = track, call, UNREAD
        if use.others:
            use.overwritten()


def _overlap(use: Use, piece: Piece) -> bool:
    """Return whether two pieces share an element.

    Where an exact answer would take long, the answer is True.
    """
    start, stop, strided = piece
    if use.stop <= start or stop <= use.start:
        return False
    return (use.piece is None and strided is None) or share((use.start, use.stop, use.piece), piece)
