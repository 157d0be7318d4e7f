"""Memory that a region's calls were given, and who used it last.

Each piece of memory has one entry, found by its address, or by the whole piece where it has gaps or several begin at one address.
An entry knows the others that share elements with it. So whoever uses a piece need not search.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from handlepool.order.track import Needs, Track
from handlepool.tensors.layout import Piece, Token, share

MOST_NEIGHBOURS = 64
"""Pieces of one stretch of memory that are told apart. More count as one."""

UNREAD: Needs = {}
"""The readers of what nobody has read since its last write. It is everybody's, so it is never written to."""


class Use:
    """A piece of memory, or a token, and who used it last.

    Attributes
    ----------
    reach : int
        Bytes of a piece that shares none with others and has no gaps; -1 of any other.
    writer, call : Track or None, int
        Of the last write.
    readers : dict
        By track, the last read since.
    others : sequence of Use
        Pieces that share elements with this one.
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
        """Be told of a write, which comes after all that was noted of it before."""


class _Whole(Use):
    """A stretch that counts as one piece; the others are those that it was, for what they were used for until then."""

    __slots__ = ()

    def overwritten(self) -> None:
        """Forget the pieces that it was."""
        self.others = ()


class _Stretch:
    """Memory without a gap between the pieces that are known in it, where there are several."""

    __slots__ = ("coarse", "stop", "uses")

    def __init__(self, stop: int, uses: list[Use], coarse: bool) -> None:
        self.stop = stop
        self.uses = uses
        self.coarse = coarse  # whether all of it counts as one piece


class Uses:
    """The memory that calls were given, piece by piece.

    Attributes
    ----------
    known : dict
        The entries: by address, by piece where several begin at one address, by token.
    """

    __slots__ = ("_end", "_linked", "_starts", "_stretches", "_unplaced", "known")

    def __init__(self) -> None:
        self.known: dict[Any, Use] = {}
        self._end = 0  # of the last piece
        self._starts: list[int] = []  # of stretches, ascending
        self._stretches: dict[int, _Stretch] = {}  # where there is more in one than what `known` has at its address
        self._linked: list[Use] = []  # entries that have others
        self._unplaced: list[Use] = []  # new memory that no stretch has yet

    def dense(self, address: int, reach: int) -> Use:
        """Return the entry of a piece without gaps, new where there is none."""
        stop = address + reach
        if address >= self._end and reach:  # past all that is known
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
        """Return the entry of any piece, or of a token, new where there is none."""
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
        """Return the entries of some pieces."""
        known, found = self.known, []
        for piece in pieces:
            if type(piece) is not tuple or piece[2] is not None:
                found.append(self.piece(piece))
                continue
            use = known.get(piece[0])
            found.append(use if use is not None and use.stop == piece[1] else self.dense(piece[0], piece[1] - piece[0]))
        return found

    def new(self, address: int, reach: int, writer: Track, call: int) -> None:
        """Make the entry of what was allocated for a call: it shares nothing with what is known, since all that is kept."""
        use = self.known[address] = Use(address, address + reach, None, writer, call)
        self._unplaced.append(use)
        if use.stop > self._end:
            self._end = use.stop

    def overlapping(self, piece: Any) -> Iterable[Use]:
        """Return the entries that share elements with a piece, or a token, which gets none itself."""
        if type(piece) is Token:
            use = self.known.get(piece)
            return () if use is None else (use,)
        self._place_all()
        return [use for at in self._between(*piece[:2]) for use in self._at(at) if _overlap(use, piece)]

    def close(self) -> None:
        """Let go of what leads from entry to entry."""
        for use in self._linked:
            use.others = ()

    def _between(self, start: int, stop: int) -> list[int]:
        """Return where the stretches begin that a piece of memory touches."""
        starts = self._starts
        first = bisect_right(starts, start)
        if first and self._stop(starts[first - 1]) > start:
            first -= 1
        return starts[first : bisect_left(starts, stop, first)]

    def _place(self, use: Use) -> Use:
        """Give a new piece its place among the others, and find those that share elements with it."""
        start, stop = use.start, use.stop
        if stop <= start:
            return use  # nothing can share an element with it
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
            if coarse or len(known) >= MOST_NEIGHBOURS:
                return self._coarsen(at, merged)
            piece = (start, stop, use.piece)
            for each in known:
                if _overlap(each, piece):
                    self._link(each, use)
            merged.uses.append(use)
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
        """Return what is known in the stretch that begins at an address."""
        stretch = self._stretches.get(start)
        return (self.known[start],) if stretch is None else stretch.uses

    def _stop(self, start: int) -> int:
        stretch = self._stretches.get(start)
        return self.known[start].stop if stretch is None else stretch.stop

    def _coarsen(self, start: int, stretch: _Stretch) -> Use:
        """Take all of a stretch as one piece from now on: too many are in it to tell them apart quickly."""
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
        """Give new memory its place."""
        for use in self._unplaced:
            self._put(use)
        self._unplaced.clear()


def needs_of(reads: Iterable[Use], writes: Iterable[Use]) -> Needs:
    """Return what a call waits for: for the last write of what it reads, and for reads, too, of what it writes."""
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
    """Note a call as the last that used what it reads and what it writes."""
    for use in reads:
        if use.readers is UNREAD:
            use.readers = {track: call}
        else:
            use.readers[track] = call
    for use in writes:
        use.writer, use.call, use.readers = track, call, UNREAD
        if use.others:
            use.overwritten()


def _overlap(use: Use, piece: Piece) -> bool:
    """Whether two pieces share an element, as far as that can be told quickly."""
    start, stop, strided = piece
    if use.stop <= start or stop <= use.start:
        return False
    return (use.piece is None and strided is None) or share((use.start, use.stop, use.piece), piece)
