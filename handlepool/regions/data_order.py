"""Order by data: which branches of a region wait for which, by the memory that they read and write (guarantee 17).

A region has one set of books for each device. They hold what each call was given to read and to write, by addresses, and the
stream that it was given to. A later call that meets such memory waits for the earlier one: a read for the last write, a write
for the last write and for all reads since.

A wait is one event on the stream of the earlier call. It is recorded when a branch goes on behind that call by its data, since
others may follow the same call; else not before somebody has to wait, who then waits for all that the stream was given by then.
Each stream knows which calls of the others it waits for already, also by way of third streams, and does not wait again.

Nothing here takes a lock: books belong to one thread, and regions of different threads are not ordered with each other.
"""

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import sub
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.pool.context import UnderWay, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.regions.memory import underneath
from handlepool.tensors.layout import Layout, Piece, Token, share

MOST_MARKS = 64
"""Events that are kept for one stream. Whoever follows an older call waits for the first that is left."""
MOST_NEIGHBOURS = 64
"""Pieces of one stretch of memory that are told apart. More count as one."""

Needs = dict["Track", int]
"""By stream, the last call on it that is to be waited for."""


class Operands:
    """What the launches of one plan read and write, whatever the arrays are: the inputs come first.

    Attributes
    ----------
    layouts : tuple of Layout
    reaches : tuple of int, or None
        Bytes of each, where none has gaps.
    inputs : int
        How many are read.
    longest, longest_written : int
        Of the reaches.
    fresh : bool
        Whether the outputs are allocated for the launch.
    met, made : tuple of int
        The reaches of what may be known already, and of what is new.
    """

    __slots__ = ("fresh", "inputs", "layouts", "longest", "longest_written", "made", "met", "reaches")

    def __init__(self, layouts: Sequence[Layout], inputs: int, fresh: bool) -> None:
        self.layouts = tuple(layouts)
        pieces = [layout.piece(0) for layout in layouts]
        self.reaches = None if any(start or strided for start, _, strided in pieces) else tuple([stop for _, stop, _ in pieces])
        reaches = self.reaches or (0,)
        self.longest, self.longest_written = max(reaches), max(reaches[inputs:], default=0)
        self.met = reaches[:inputs] if fresh else reaches
        self.made = reaches[inputs:] if fresh and self.reaches else ()
        self.inputs = inputs
        self.fresh = fresh

    def are_apart(self, read: Sequence[int], written: Sequence[int]) -> bool:
        """Whether no launch of many writes what another one reads or writes, by the addresses of all; each writes one array."""
        if self.reaches is None or len(self.reaches) != self.inputs + 1:
            return False
        length, longest = self.longest_written, self.longest
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

    def pieces(self, addresses: Sequence[int]) -> list[Piece]:
        """Return the memory of arrays that begin at these addresses."""
        return [layout.piece(address) for layout, address in zip(self.layouts, addresses, strict=True)]


class Memory:
    """What a call reads and overwrites, where that is known before it starts.

    Attributes
    ----------
    reads, writes : list of Piece or Token
    guessed : list of Piece
        What it may write besides: it waits as if it did, and who it is says afterwards whether it has.
    name : str
        The function's, for messages.
    waited : bool
        Whether it waits for something for what it may write alone.
    met : tuple of (list of Use)
        What it reads and what it overwrites, as the books have it.
    """

    __slots__ = ("guessed", "met", "name", "reads", "waited", "writes")

    def __init__(
        self,
        reads: Sequence[Piece | Token],
        writes: Sequence[Piece | Token],
        guessed: Sequence[Piece] = (),
        name: str = "",
    ) -> None:
        self.reads = reads
        self.writes = writes
        self.guessed = guessed
        self.name = name
        self.waited = False
        self.met: tuple[list[Use], list[Use]] = [], []


_NOTHING: Needs = {}
"""Everybody's until there is something to note, so it is never written to: who writes looks at a name of its own before, since a
finaliser that runs in between could put this in its place."""


class Track:
    """A stream of a region: what it was given, and what it waits for.

    Attributes
    ----------
    pointer : int
        The stream.
    home : Track or None
        Of the caller that its fork is of, which gives it nothing new while a branch runs.
    slot, fork : Slot, object
        Of a side stream, and what stands for the fork that has it.
    count : int
        How many calls it was given.
    known : dict
        By other track, up to which call this stream waits for it. Replaced, never changed, so that a mark can have it.
    seen : dict
        What ``home`` knew when a branch last started here.
    marked : int
        The last call that an event stands behind.
    marks : list of (int, event, dict)
        Such calls, ascending, the event, and what was known there.
    """

    __slots__ = ("count", "fork", "home", "into", "known", "marked", "marks", "pointer", "seen", "slot", "stream")

    def __init__(self, pointer: int, home: "Track | None" = None, fork: object = None, slot: Slot | None = None) -> None:
        self.pointer = pointer
        self.home = home
        self.fork = fork
        self.slot = slot
        self.stream: object = None  # kept once no fork has it: nobody may record on a stream that was destroyed
        self.count = 0
        self.known = self.seen = _NOTHING
        self.marked = -1
        self.marks: list[tuple[int, Any, Needs]] = []
        self.into: tuple[Track, int] | None = None  # once it was joined: where, and by which call

    def passed(self, call: int) -> tuple[int, Any, Needs]:
        """Return the first mark behind a call."""
        return self.marks[bisect_left(self.marks, (call,))]

    def learn(self, more: Needs) -> None:
        """Know what another track knows that this one waits for now."""
        if more:
            known = dict(self.known)
            for track, call in more.items():
                if known.get(track, 0) < call:
                    known[track] = call
            self.known = known

    def covers(self, track: "Track") -> bool:
        """Whether what another track was given comes before all that this one is: it is the caller's, or that one's caller's."""
        home = self.home
        while home is not None:
            if home is track:
                return True
            home = home.home
        return False


NOBODYS = Track(0)
"""Stands for the track of a fork that has no branches."""


class Use:
    """A piece of memory, or a token, and who used it last.

    Attributes
    ----------
    writer, call : Track or None, int
        Of the last write.
    readers : dict
        By track, the last read since.
    others : sequence of Use
        Pieces that share elements with this one.
    """

    __slots__ = ("call", "others", "piece", "readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, writer: Track | None = None, call: int = 0, piece: Any = None) -> None:
        self.start = start
        self.stop = stop
        self.writer = writer
        self.call = call
        self.piece = piece
        self.readers = _NOTHING
        self.others: Sequence[Use] = ()

    def wrote(self, track: Track, call: int) -> None:
        """Note a write, behind all that was noted before."""
        self.writer = track
        self.call = call
        if self.readers:
            self.readers = _NOTHING


class _Whole(Use):
    """A stretch that counts as one piece; the others are those that it was, for what they were used for until then."""

    __slots__ = ()

    def wrote(self, track: Track, call: int) -> None:
        """Note a write, which comes after all that was before."""
        super().wrote(track, call)
        self.others = ()


class _Stretch:
    """Memory without a gap between the pieces that are known in it, where there are several."""

    __slots__ = ("coarse", "stop", "uses")

    def __init__(self, stop: int, uses: list[Use], coarse: bool) -> None:
        self.stop = stop
        self.uses = uses
        self.coarse = coarse  # whether all of it counts as one piece


class DataOrder:
    """The books of a thread's outermost region on one device.

    Parameters
    ----------
    pool : PoolInternals
        Of the fork that opens the books.
    device : int
    root : Track
        Of the outermost caller's stream. What is given to that comes before every branch that starts later, so its calls wait,
        and are not written down.

    Attributes
    ----------
    forks : int
        How many use them; the last that is left closes them.
    running : Track or None
        Of the branch that runs Python just now, the innermost.
    """

    __slots__ = (
        "_end",
        "_events",
        "_found",
        "_key",
        "_linked",
        "_reads_from",
        "_reads_to",
        "_record",
        "_spare",
        "_starts",
        "_stretches",
        "_unplaced",
        "_uses",
        "_writes_from",
        "_writes_to",
        "closed",
        "device",
        "driver",
        "forks",
        "guesses",
        "kept",
        "log",
        "pool",
        "root",
        "running",
        "tracks",
    )

    def __init__(self, pool: PoolInternals, device: int, root: Track) -> None:
        driver = pool.driver
        events = pool.device(device).edges
        self.pool = pool
        self.driver = driver
        self._record = driver.record_event
        self._events = events
        self._spare = events.free
        self._key = underneath(driver), device, thread.recording
        self.device = device
        self.root = root
        self.forks = 1
        self.running: Track | None = None
        self.closed = False
        self.tracks: dict[int, Track] = {root.pointer: root}
        self._uses: dict[Any, Use] = {}  # by address, by piece where several begin at one address, by token
        self._starts: list[int] = []  # of stretches, ascending
        self._stretches: dict[int, _Stretch] = {}  # where there is more in one than what `_uses` has at its address
        self._end = 0  # of the last piece
        self._linked: list[Use] = []  # pieces that have others
        self._unplaced: list[Use] = []  # new memory that no stretch has yet
        self._found: list[Use] = []  # what the launch that comes next reads and overwrites
        self.log: list[tuple[tuple[int, ...], Operands, Track, int]] | None = []  # as long as no two calls come near each other
        self._reads_from = self._writes_from = 1 << 63  # the first byte of what is in the log, and the last
        self._reads_to = self._writes_to = -1
        self.guesses: dict[tuple[Track, int], str] = {}  # calls that may have written what they were given, by name
        self.kept: list[object] = []  # whatever has memory in the books: what is freed could be given out as something else

    def open(self) -> None:
        """Be this thread's books."""
        _thread.orders[self._key] = self
        opened.append(self)  # after: a launch that sees it asks the thread
        self.driver.order_plain(partial(_before_plain, self.driver))

    # What a call meets

    def apart(self, addresses: tuple[int, ...], operands: Operands) -> bool:
        """Whether a launch is far from all calls in the log: then it needs nothing, and there is nothing to look up.

        From the first byte that they read to the last, and the same of what they write. New outputs are apart from everything.
        """
        if operands.reaches is None:
            return False
        inputs, longest = operands.inputs, operands.longest
        first, last = self._writes_from, self._writes_to
        low, high = self._reads_from, self._reads_to
        for address in addresses[:inputs]:
            if first < address + longest and address < last:
                return False
            if address < low:
                low = address
            if address + longest > high:
                high = address + longest
        former_low, former_high = self._reads_from, self._reads_to
        longest, fresh = operands.longest_written, operands.fresh
        start, stop = first, last
        for address in addresses[inputs:]:
            end = address + longest
            if not fresh and ((former_low < end and address < former_high) or (first < end and address < last)):
                return False
            if address < start:
                start = address
            if end > stop:
                stop = end
        self._reads_from, self._reads_to, self._writes_from, self._writes_to = low, high, start, stop
        return True

    def _look_up(self) -> None:
        """Write the log into the books: two calls have come near each other."""
        log, self.log = self.log, None
        for addresses, operands, track, call in log or ():
            self.meet(addresses, operands)
            count, track.count = track.count, call - 1
            self.write(track, addresses, operands)
            track.count = count

    def meet(self, addresses: Sequence[int], operands: Operands) -> Needs:
        """Look up what a launch reads and overwrites, for `write`, which is to come next; what it waits for."""
        if self.log is not None:
            self._look_up()
        if operands.reaches is None:
            found = self._found = self.entries(operands.pieces(addresses))
            return self.needs(found[: operands.inputs], found[operands.inputs :])
        uses = self._uses
        found = self._found = []
        needs: Needs = {}
        plain = True
        for address, reach in zip(addresses, operands.met, strict=False):
            use = uses.get(address)
            if use is None:
                if address >= self._end:  # past all that is known
                    use = uses[address] = Use(address, address + reach)
                    self._starts.append(address)
                    self._end = use.stop
                else:
                    use = self._use((address, address + reach, None))
            elif use.stop != address + reach:
                use = self._use((address, address + reach, None))
            found.append(use)
            writer = use.writer
            if writer is not None:
                needs[writer] = max(use.call, needs[writer]) if writer in needs else use.call
            if use.others:
                plain = False
        if not plain:
            return self.needs(found[: operands.inputs], found[operands.inputs :])
        if not operands.fresh:
            for use in found[operands.inputs :]:
                if use.readers:
                    for reader, call in use.readers.items():
                        if needs.get(reader, 0) < call:
                            needs[reader] = call
        return needs

    def write(self, track: Track, addresses: Sequence[int], operands: Operands) -> None:
        """Write down the launch that was looked up, as the next call of a stream."""
        call = track.count = track.count + 1
        inputs = operands.inputs
        for use in self._found:
            if inputs:
                inputs -= 1
                if readers := use.readers:
                    readers[track] = call
                else:
                    use.readers = {track: call}
            else:
                use.wrote(track, call)
        if operands.made:
            for address, reach in zip(addresses[operands.inputs :], operands.made, strict=True):
                use = self._uses[address] = Use(address, address + reach, track, call)
                self._unplaced.append(use)
                if use.stop > self._end:
                    self._end = use.stop

    def entries(self, pieces: Iterable[Piece | Token]) -> list[Use]:
        """Return the books' entries of any arrays, and tokens."""
        if self.log is not None:
            self._look_up()
        return [self._use(piece) for piece in pieces]

    @staticmethod
    def needs(reads: Iterable[Use], writes: Iterable[Use]) -> Needs:
        """Return what a call waits for."""
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

    def conflicts(self, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token]) -> Needs:
        """Return what a call waits for that is not written down itself."""
        if self.log is not None:
            self._look_up()
        found = [[use for piece in pieces for use in self._meeting(piece)] for pieces in (reads, writes)]
        return self.needs(*found)

    def note(self, track: Track, reads: Iterable[Use], writes: Iterable[Use]) -> None:
        """Write down the next call of a stream."""
        call = track.count = track.count + 1
        for use in reads:
            if readers := use.readers:
                readers[track] = call
            else:
                use.readers = {track: call}
        for use in writes:
            use.wrote(track, call)

    # Waits

    def mark(self, track: Track) -> None:
        """Let an event stand for all that a stream was given by now: a branch goes on there, and others may follow the same."""
        marks = track.marks
        try:
            # Of an old mark: a wait holds on to the record that it was given.
            event = self._spare.pop() if len(marks) < MOST_MARKS else marks.pop(0)[1]
        except IndexError:
            event = self._events.take()
        try:
            self._record(event, track.pointer)
        except BaseException:
            self._events.put(event)
            raise
        count = track.marked = track.count
        marks.append((count, event, track.known))

    def follow(self, track: Track, needs: Needs) -> None:
        """Let a stream wait for calls, where it does not yet."""
        for other, call in self._missing(track, needs):
            if other.marked < call:
                self.mark(other)
            reached, event, known = other.passed(call)
            self.driver.wait_event(track.pointer, event)
            track.learn({**known, other: reached})

    @staticmethod
    def _missing(track: Track, needs: Needs) -> Iterator[tuple[Track, int]]:
        """Yield the calls that a stream does not wait for, nor by what it was made to wait for meanwhile."""
        for each, last in needs.items():
            other, call = each, last
            while other.into is not None:
                other, call = other.into
            if not (other is track or track.known.get(other, 0) >= call or track.covers(other)):
                yield other, call

    def follows(self, track: Track, needs: Needs) -> bool:
        """Whether a stream waits for calls already."""
        return not any(True for _ in self._missing(track, needs))

    def joined(self, tracks: Iterable[Track], home: Track) -> None:
        """Note that a stream waits for all that others were given, which are nobody's from now on."""
        home.count += 1
        for track in tracks:
            track.into = (home, home.count)
            home.learn(track.known)
            self.tracks.pop(track.pointer, None)
            self._end_track(track)

    def close(self) -> None:
        """Forget everything: the join was made, or never will be. By any thread, where their own has ended."""
        self.closed = True
        if _thread.orders.get(self._key) is self:
            _thread.orders.pop(self._key, None)
        if self in opened:  # or an interrupt came before it was
            opened.remove(self)
        for track in self.tracks.values():
            self._end_track(track)
            track.home = track.stream = None
        for use in self._linked:
            use.others = ()
        self.kept.clear()

    def forget(self, pointer: int) -> None:
        """Forget a stream that no call was given to."""
        track = self.tracks.pop(pointer, None)
        if track is not None:
            self._end_track(track)

    def _end_track(self, track: Track) -> None:
        """Give the events back, and let go of what leads from track to track."""
        if track.marks:
            self._spare += [event for _, event, _ in track.marks]
            self._events.returned()
            track.marks.clear()
        track.known = track.seen = _NOTHING
        track.slot = track.fork = None

    # Memory

    def _use(self, piece: Any) -> Use:
        """Return the books' entry of a piece, new where there is none."""
        if type(piece) is Token:
            use = self._uses.get(piece)
            if use is None:
                use = self._uses[piece] = Use(0, 0, piece=piece)
            return use
        start, stop, strided = piece
        if strided is None:
            use = self._uses.get(start)
            if use is not None and use.stop == stop:
                return use
        use = self._uses.get(piece)
        if use is not None:
            return use
        self._place_all()
        return self._place(Use(start, stop, piece=strided))

    def _meeting(self, piece: Any) -> Iterable[Use]:
        """Return the entries that share elements with a piece, which is not written down."""
        if type(piece) is Token:
            use = self._uses.get(piece)
            return () if use is None else (use,)
        self._place_all()
        return [use for at in self._between(*piece[:2]) for use in self._at(at) if _meet(use, piece)]

    def _between(self, start: int, stop: int) -> list[int]:
        """Return where the stretches begin that a piece of memory touches."""
        if start >= self._end:
            return []
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
                if _meet(each, piece):
                    self._link(each, use)
            merged.uses.append(use)
        dense = use.piece is None and start not in self._uses
        self._uses[start if dense else (start, stop, use.piece)] = use
        if not near:
            self._put(use)
        return use

    def _link(self, one: Use, other: Use) -> None:
        for use, neighbour in ((one, other), (other, one)):
            if not use.others:
                self._linked.append(use)
            use.others = (*use.others, neighbour)

    def _put(self, use: Use) -> None:
        """Give a piece a stretch of its own."""
        start, starts = use.start, self._starts
        if not starts or start > starts[-1]:
            starts.append(start)
        else:
            insort(starts, start)
        if use.stop > self._end:
            self._end = use.stop
        if use.piece is not None or self._uses.get(start) is not use:
            self._stretches[start] = _Stretch(use.stop, [use], False)

    def _at(self, start: int) -> Sequence[Use]:
        """Return what is known in the stretch that begins at an address."""
        stretch = self._stretches.get(start)
        return (self._uses[start],) if stretch is None else stretch.uses

    def _stop(self, start: int) -> int:
        stretch = self._stretches.get(start)
        return self._uses[start].stop if stretch is None else stretch.stop

    def _coarsen(self, start: int, stretch: _Stretch) -> Use:
        """Take all of a stretch as one piece from now on: too many are in it to tell them apart quickly."""
        former = stretch.uses
        if len(former) == 1 and (former[0].start, former[0].stop) == (start, stretch.stop):
            return former[0]
        for use in former:
            for key in (use.start, (use.start, use.stop, use.piece)):
                if self._uses.get(key) is use:
                    del self._uses[key]
        whole = _Whole(start, stretch.stop)
        whole.others = tuple({id(each): each for use in former for each in (use, *use.others)}.values())
        self._linked.append(whole)
        stretch.uses, stretch.coarse = [whole], True
        self._uses[start] = whole
        return whole

    def _place_all(self) -> None:
        """Give new memory its place."""
        for use in self._unplaced:
            self._put(use)
        self._unplaced.clear()


def _meet(use: Use, piece: Piece) -> bool:
    """Whether two pieces share an element, as far as that can be told quickly."""
    start, stop, strided = piece
    if use.stop <= start or stop <= use.start:
        return False
    return (use.piece is None and strided is None) or share((use.start, use.stop, use.piece), piece)


class _Thread(threading.local):
    def __init__(self) -> None:
        # By driver and device; and by recording, since what is captured waits for nothing outside of that.
        self.orders: dict[tuple[Driver, int, UnderWay | None], DataOrder] = {}


_thread = _Thread()

opened: list[DataOrder] = []
"""The books that are open, in whatever thread: where there are none, launches need not ask for their thread's."""


def open_order(driver: Driver, device: int) -> DataOrder | None:
    """Return this thread's books of a device, where an ordered fork is open."""
    order = _thread.orders.get((underneath(driver), device, thread.recording)) if opened else None
    return None if order is None or order.closed else order


def ordering_pool() -> PoolInternals | None:
    """Return the pool of this thread's fork that orders calls on the current device; None outside of any."""
    for (_, _, recording), order in _thread.orders.items():
        if recording is thread.recording and not order.closed and order.pool.current_device() == order.device:
            return order.pool
    return None


def before(
    pool: PoolInternals,
    reads: Iterable[Piece | Token],
    writes: Iterable[Piece | Token],
    keep: object,
    pointer: int | None = None,
) -> None:
    """Let a stream wait for the branches that a call conflicts with which is about to be given to it, and write the call down.

    Parameters
    ----------
    pool : PoolInternals
    reads, writes : iterable of Piece or Token
        What the call reads, and what it overwrites.
    keep : object
        Whose memory that is.
    pointer : int, optional
        The stream; the current one by default.
    """
    device = pool.current_device()
    order = open_order(pool.driver, device)
    if order is None:
        return
    if pointer is None:
        pointer = pool.driver.current_stream(device).ptr
    track = order.tracks.get(pointer) or Track(pointer)  # or one of the caller's own choice, who orders it with its own
    noted = track if pointer in order.tracks else order.running
    if noted is None or noted is order.root:
        order.follow(track, order.conflicts(reads, writes))
    else:
        order.kept.append(keep)
        met, changed = order.entries(reads), order.entries(writes)
        order.follow(track, order.needs(met, changed))
        order.note(noted, met, changed)


def _before_plain(driver: Driver, pointer: int, reads: Sequence[Piece], writes: Sequence[Piece]) -> None:
    """Let plain code in a fork's body wait for the branches that it conflicts with, where the driver sees it."""
    order = open_order(driver, driver.current_device())
    if order is not None and order.running is None and (track := order.tracks.get(pointer)) is not None:
        order.follow(track, order.conflicts(reads, writes))


def beside(pool: PoolInternals, writes: Iterable[Piece | Token]) -> bool:
    """Whether branches that the current stream does not wait for were given what a call on it was found to write."""
    device = pool.current_device()
    order = open_order(pool.driver, device)
    if order is None:
        return False
    pointer = pool.driver.current_stream(device).ptr
    return not order.follows(order.tracks.get(pointer) or Track(pointer), order.conflicts((), writes))


def _after_fork() -> None:
    """Let a forked child be in no region of its parent's (guarantee 13)."""
    opened.clear()
    _thread.orders.clear()


os.register_at_fork(after_in_child=_after_fork)
