"""Order by data: which branches of a region wait for which, by the memory that they read and write (guarantee 17).

A region has one set of books for each device. They hold what each call was given to read and to write, by addresses, and the
stream that it was given to. A later call that meets such memory waits for the earlier one: a read for the last write, a write
for the last write and for all reads since.

A wait is one event on the stream of the earlier call. It is recorded when a branch goes on behind that call by its data, since
others may follow the same call; else not before somebody has to wait, who then waits for all that the stream was given by then.
Each stream knows which calls of the others it waits for already, also by way of third streams, and does not wait again.

Nothing here takes a lock: books belong to one thread, and regions of different threads are not ordered with each other. A
finaliser, which Python runs wherever it likes, may find its own thread in the middle of the books. Its calls are refused there.
"""

import os
import threading
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from handlepool.drivers.protocol import Driver
from handlepool.errors import OwnershipError
from handlepool.order.accesses import Memory, Operands
from handlepool.order.recent import Recent
from handlepool.order.track import Needs, Track, last
from handlepool.order.uses import Use, Uses, needs_of, write_down
from handlepool.pool.context import NodesByData, UnderWay, thread, unchecked
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token

MOST_MARKS = 64
"""Events that are kept for one stream. Whoever follows an older call waits for the first that is left."""

Orders = dict[tuple[Driver, int, UnderWay | None], "DataOrder"]
"""Of one thread, by driver and device; and by recording, since what is captured waits for nothing outside of that."""


class DataOrder:
    """The books of a thread's outermost region on one device.

    Whoever reads or changes them does so inside ``with order``, or sets `busy` meanwhile: that raises OwnershipError in a
    finaliser which found its thread there.

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
    busy : bool
        Whether somebody is in the middle of the books, or they are closed.
    forks : int
        How many use them; the last that is left closes them.
    running : Track or None
        Of the branch that runs Python just now, the innermost.
    elsewhere : list
        What that branch gave to streams of its own choice.
    recent : Recent or None
        The first launches, as long as nothing has to be looked up.
    tracks : dict
        By pointer, the streams.
    guesses : dict
        Calls that may have written what they were given: their functions' names and codes.
    kept : list
        Whatever has memory in the books: what is freed could be given out as something else.
    """

    __slots__ = (
        "_events",
        "_free",
        "_key",
        "_known",
        "_orders",
        "_record",
        "_uses",
        "busy",
        "closed",
        "device",
        "driver",
        "elsewhere",
        "forks",
        "guesses",
        "kept",
        "pool",
        "recent",
        "root",
        "running",
        "tracks",
    )

    def __init__(self, pool: PoolInternals, device: int, root: Track) -> None:
        self.pool = pool
        self.driver = pool.driver
        self.device = device
        self.root = root
        self.forks = 1
        self.busy = self.closed = False
        self.running: Track | None = None
        self.elsewhere: list[tuple[Sequence[Piece | Token], Sequence[Piece | Token]]] = []
        self.tracks: dict[int, Track] = {root.pointer: root}
        self.guesses: dict[tuple[Track, int], tuple[str, Hashable]] = {}
        self.kept: list[object] = []
        self._events = pool.device(device).edges
        self._free = self._events.free
        self._record = self.driver.record_event
        self.recent: Recent | None = Recent(self.driver.block_type)
        self._uses = Uses()
        self._known = self._uses.known
        self._orders = _thread.orders
        self._key = unchecked(self.driver), device, thread.recording

    def open(self) -> None:
        """Be this thread's books."""
        self._orders[self._key] = self
        opened.append(self)  # after: a launch that sees it asks the thread
        self.driver.order_plain(partial(_before_plain, self.driver))

    def __enter__(self) -> None:
        if self.busy:
            raise in_the_middle()
        self.busy = True

    def __exit__(self, *_: object) -> None:
        self.busy = False

    # What a call meets

    def meet(self, addresses: Sequence[int], operands: Operands) -> tuple[list[Use], list[Use], Needs]:
        """Look up what a launch reads, and what it overwrites that may be known already; and what it waits for."""
        if self.recent is not None:
            self._look_up()
        reads: list[Use] = []
        writes: list[Use] = []
        needs: Needs = {}
        known, index, alone = self._known, 0, operands.dense
        for reach in operands.read:  # counted by hand: a `zip` takes as long as two look-ups
            address = addresses[index]
            index += 1
            use = known.get(address)
            if use is None or use.reach != reach:
                use = self._uses.dense(address, reach)
                if use.reach < 0:
                    alone = False
            elif (writer := use.writer) is not None and (writer not in needs or needs[writer] < use.call):
                needs[writer] = use.call
            reads.append(use)
        for reach in operands.written:
            address = addresses[index]
            index += 1
            use = known.get(address)
            if use is None or use.reach != reach:
                use = self._uses.dense(address, reach)
                if use.reach < 0:
                    alone = False
            else:
                if (writer := use.writer) is not None and (writer not in needs or needs[writer] < use.call):
                    needs[writer] = use.call
                for reader, call in use.readers.items():
                    if reader not in needs or needs[reader] < call:
                        needs[reader] = call
            writes.append(use)
        if alone:
            return reads, writes, needs
        if not operands.dense:
            pieces = operands.pieces(addresses)
            reads, writes = self.entries(pieces[: operands.inputs]), self.entries(pieces[operands.inputs :])
        return reads, writes, needs_of(reads, writes)

    def meet_any(self, memory: Memory) -> tuple[list[Use], list[Use], Needs]:
        """Look up what any call reads and what it writes; and what it waits for."""
        reads, writes = self.entries(memory.reads), self.entries(memory.writes)
        needs = needs_of(reads, [*writes, *self.entries(memory.guessed)])
        if memory.guessed:
            memory.waited = needs != needs_of(reads, writes)
        return reads, writes, needs

    def _look_up(self) -> None:
        """Make entries of all that the first launches were given; after an interrupt there are none, and it is done again."""
        recent = self.recent
        try:
            self.recent = None
            for addresses, operands, track, call in recent or ():
                reads, writes, _ = self.meet(addresses, operands)
                write_down(track, call, reads, writes)
                self._write_down_new(track, call, addresses, operands)
        except BaseException:
            self._uses.close()
            self._uses, self.recent = Uses(), recent
            self._known = self._uses.known
            raise

    def entries(self, pieces: Iterable[Piece | Token]) -> list[Use]:
        """Return the books' entries of any arrays, and tokens."""
        if self.recent is not None:
            self._look_up()
        return [self._uses.piece(piece) for piece in pieces]

    def conflicts(self, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token]) -> Needs:
        """Return what a call waits for that is not written down itself."""
        if self.recent is not None:
            self._look_up()
        meeting = self._uses.meeting
        return needs_of(*[[use for piece in pieces for use in meeting(piece)] for pieces in (reads, writes)])

    def note_launch(
        self, track: Track, reads: Sequence[Use], writes: Sequence[Use], addresses: Sequence[int], operands: Operands
    ) -> None:
        """Write down a launch that was looked up, as the next call of a stream."""
        call = track.count = track.count + 1
        write_down(track, call, reads, writes)
        if operands.made:
            self._write_down_new(track, call, addresses, operands)

    def note(self, track: Track, reads: Sequence[Use], writes: Sequence[Use]) -> None:
        """Write down the next call of a stream."""
        track.count += 1
        write_down(track, track.count, reads, writes)

    def _write_down_new(self, track: Track, call: int, addresses: Sequence[int], operands: Operands) -> None:
        for address, reach in zip(addresses[operands.inputs :], operands.made, strict=False):
            self._uses.new(address, reach, track, call)

    def note_again(self, track: Track, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token]) -> None:
        """Write down, at the end of a branch, what it was given before: an event may stand behind less than all of it."""
        self.note(track, self.entries(reads), self.entries(writes))

    def note_found(self, track: Track, made: Iterable[Piece | Token], others: Sequence[Piece | Token]) -> None:
        """Write down what a call turned out to write: memory that it allocated, and other memory, which it was not ordered for.

        Its stream waits now for who used that: the books forget them, so whoever follows the call has to follow them with it.
        """
        try:
            if others:
                self.follow(track, self.conflicts((), others))
        finally:
            self.note(track, (), self.entries([*made, *others]))

    # Waits

    def waits_for_all(self, track: Track, writes: Iterable[Piece | Token]) -> bool:
        """Whether a stream comes after every call that used what it was found to write."""
        return all(track.waits_for(*last(*each)) for each in self.conflicts((), writes).items())

    def mark(self, track: Track) -> None:
        """Let an event stand for all that a stream was given by now: a branch goes on there, and others may follow the same."""
        marks = track.marks
        try:
            # The event of an old mark will do: a wait holds on to the record that it was given.
            event = self._free.pop() if len(marks) < MOST_MARKS else marks.pop(0)[1]
        except IndexError:
            event = self._events.take()
        try:
            self._record(event, track.pointer)
        except BaseException:
            self._events.put(event)
            raise
        marks.append((track.count, event, track.known))
        track.marked = track.count  # after: an interrupt may come between the two

    def follow(self, track: Track, needs: Needs) -> None:
        """Let a stream wait for calls, where it does not yet."""
        for needed, given in needs.items():
            other, call = last(needed, given)
            if not track.waits_for(other, call):
                if other.marked < call:
                    self.mark(other)
                reached, event, known = other.passed(call)
                self.driver.wait_event(track.pointer, event)
                track.learn({**known, other: reached})

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
        self.closed = self.busy = True
        if self._orders.get(self._key) is self:
            self._orders.pop(self._key, None)
        if self in opened:  # or an interrupt came before it was
            opened.remove(self)
        for track in self.tracks.values():
            self._end_track(track)
            track.home = None
        self._uses.close()
        self.kept.clear()

    def forget(self, pointer: int) -> None:
        """Forget a stream that no call was given to."""
        track = self.tracks.pop(pointer, None)
        if track is not None:
            self._end_track(track)

    def _end_track(self, track: Track) -> None:
        """Give the events back, and let go of what leads from track to track."""
        if track.marks:
            self._events.free.extend([event for _, event, _ in track.marks])
            self._events.returned()
            track.marks.clear()
        track.end()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.orders: Orders = {}


_thread = _Thread()

opened: list[DataOrder] = []
"""The books that are open, in whatever thread: where there are none, launches need not ask for their thread's."""


def in_the_middle() -> OwnershipError:
    """Return the error for a call by a finaliser that found its thread in the middle of the books."""
    return OwnershipError(
        "a finaliser that Python ran while its thread was starting a branch, or ending one, used a fork, a graph function, an "
        "operation or a program: what orders the branches was in the middle of a change. Do it later, outside of finalisers"
    )


def open_order(driver: Driver, device: int) -> DataOrder | None:
    """Return this thread's books of a device, where an ordered fork is open."""
    order = _thread.orders.get((unchecked(driver), device, thread.recording)) if opened else None
    return None if order is None or order.closed else order


def lanes_for(pool: PoolInternals, pointer: int) -> NodesByData | None:
    """Return the lanes of this thread's recording where a call on a stream is to be a node: outside of regions and nodes.

    Or what takes note of such calls, in the first call of a function that is recorded.
    """
    lanes = thread.rehearsal if thread.recording is None else thread.recording.lanes
    if lanes is None or thread.region is not None or not lanes.takes(pool, pointer):
        return None
    return lanes if not opened or open_order(pool.driver, pool.current_device()) is None else None


def ordering_pool() -> PoolInternals | None:
    """Return the pool of this thread's fork that orders calls on the current device; None outside of any."""
    for (_, _, recording), order in _thread.orders.items():
        if recording is thread.recording and not order.closed and order.pool.current_device() == order.device:
            return order.pool
    return None


def before(
    pool: PoolInternals,
    reads: Sequence[Piece | Token],
    writes: Sequence[Piece | Token],
    keep: object,
    pointer: int | None = None,
) -> None:
    """Let a stream wait for the branches that a call conflicts with which is about to be given to it, and write the call down.

    Parameters
    ----------
    pool : PoolInternals
    reads, writes : sequence of Piece or Token
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
    with order:
        if pointer is None:
            pointer = pool.driver.current_stream(device).ptr
        track = order.tracks.get(pointer) or Track(pointer)  # or one of the caller's own choice, who orders it with its own
        noted = track if pointer in order.tracks else order.running
        if noted is None or noted is order.root:
            order.follow(track, order.conflicts(reads, writes))
            return
        order.kept.append(keep)
        met, changed = order.entries(reads), order.entries(writes)
        order.follow(track, needs_of(met, changed))
        order.note(noted, met, changed)
        if noted is not track:
            order.elsewhere.append((reads, writes))


def _before_plain(driver: Driver, pointer: int, reads: Sequence[Piece], writes: Sequence[Piece]) -> None:
    """Let plain code in a fork's body wait for the branches that it conflicts with, where the driver sees it."""
    order = open_order(driver, driver.current_device())
    if order is not None and order.running is None and (track := order.tracks.get(pointer)) is not None:
        with order:
            order.follow(track, order.conflicts(reads, writes))


def beside(pool: PoolInternals, writes: Sequence[Piece | Token]) -> bool:
    """Whether branches that the current stream does not wait for were given what a call on it was found to write."""
    device = pool.current_device()
    order = open_order(pool.driver, device)
    if order is None:
        return False
    pointer = pool.driver.current_stream(device).ptr
    track = order.tracks.get(pointer) or Track(pointer)
    with order:
        return not order.waits_for_all(track, writes)


def calls_so_far(pool: PoolInternals) -> Needs | None:
    """Return the last call of each stream of this thread's region on the current device; None outside of any."""
    order = open_order(pool.driver, pool.current_device())
    return None if order is None else {track: track.count for track in order.tracks.values()}


def written_since(pool: PoolInternals, memory: Piece, since: Needs) -> bool:
    """Whether a call after those wrote memory."""
    order = open_order(pool.driver, pool.current_device())
    if order is None:
        return False
    with order:
        needs = [last(*each) for each in order.conflicts((memory,), ()).items()]
        return any(call > since.get(track, 0) for track, call in needs)


def _after_fork() -> None:
    """Let a forked child be in no region of its parent's (guarantee 13)."""
    opened.clear()
    _thread.orders.clear()


os.register_at_fork(after_in_child=_after_fork)
