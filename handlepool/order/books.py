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
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from handlepool.drivers.protocol import Driver
from handlepool.errors import OwnershipError
from handlepool.order.accesses import Operands
from handlepool.order.assumed import AssumedWriter, warn_of_assumed_write
from handlepool.order.call import Call, PythonCall
from handlepool.order.recent import Recent
from handlepool.order.track import Needs, Track, end_tracks, last
from handlepool.order.uses import Use, Uses, needs_of, write_down
from handlepool.pool.context import ActiveRecording, active, thread
from handlepool.pool.deferred import abandon
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token

MOST_MARKS = 64
"""Events that are kept for one stream. Whoever follows an older call waits for the first that is left."""

Orders = dict[tuple[Driver, int, ActiveRecording | None], "DataOrder"]
"""Of one thread, by driver and device; and by recording, since what is captured waits for nothing outside of that."""


Accesses = tuple[Sequence[Piece | Token], Sequence[Piece | Token], bool]
"""The memory that a call reads, the memory that it writes, and whether it may use any other memory."""
Outer = tuple[Track | None, list[Accesses]]
"""The track of the branch around a branch, and what that one read and wrote on streams of its own choice."""


class Starts(Protocol):
    """The slots of a fork, as far as the books know them."""

    def start(self, order: "DataOrder", needs: Needs, *, owned: bool = False) -> Track:
        """Start the next branch on a track of the fork, or of its caller. ``owned`` binds the slot to this thread."""

    def undo_start(self) -> None:
        """Release what `start` leased just now: the branch did not come to run."""


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
    fork : object
        What stands for the fork that opens the books.

    Attributes
    ----------
    barrier : (Track, int) or None
        The last call that may have used any memory. Every later call waits for it.
    busy : bool
        Whether somebody is in the middle of the books, or they are closed.
    forks : set
        What stands for the forks that use the books. The last fork that is left closes them.
    running : Track or None
        Of the branch that runs Python just now, the innermost.
    foreign_writes : list
        What that branch read and wrote on streams of its own choice.
    recent : Recent or None
        The first launches, as long as nothing has to be looked up.
    tracks : dict
        By pointer, the streams.
    assumed_writers : dict
        Calls that may have written the memory they were given: their functions' names and codes.
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
        "assumed_writers",
        "barrier",
        "busy",
        "closed",
        "device",
        "driver",
        "foreign_writes",
        "forks",
        "kept",
        "pool",
        "recent",
        "root",
        "running",
        "tracks",
    )

    def __init__(self, pool: PoolInternals, device: int, root: Track, fork: object = None) -> None:
        self.pool = pool
        self.driver = pool.driver
        self.device = device
        self.root = root
        self.forks = {fork}
        self.busy = self.closed = False
        self.barrier: tuple[Track, int] | None = None
        self.running: Track | None = None
        self.foreign_writes: list[Accesses] = []
        self.tracks: dict[int, Track] = {root.pointer: root}
        self.assumed_writers: dict[tuple[Track, int], AssumedWriter] = {}
        self.kept: list[object] = []
        self._events = (pool.devices.get(device) or pool.device(device)).edges
        self._free = self._events.free
        self._record = self.driver.record_event
        self.recent: Recent | None = None
        self._uses = _NO_USES
        self._known = self._uses.known
        self._orders = _thread.orders
        self._key = getattr(self.driver, "checked_driver", self.driver), device, thread.recording

    def open(self) -> None:
        """Be this thread's books."""
        self._orders[self._key] = self
        active.append(self)  # after: a launch that sees it asks the thread
        self.driver.before_untracked_access(partial(_before_plain, self.driver))

    def __enter__(self) -> None:
        if self.busy:
            raise in_the_middle()
        self.busy = True

    def __exit__(self, *_: object) -> None:
        self.busy = False

    # Branches

    def start_launch(self, fork: Starts, launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Track:
        """Start a branch that launches one known plan, in the order of its data; the track that it runs on."""
        if self.busy:
            raise in_the_middle()
        try:
            self.busy = True
            recent, operands = self.recent, launch.operands
            if recent is None and self._uses is _NO_USES:
                recent = self.recent = Recent(self.driver.block_type)
            needs = None if recent is None else recent.look_up(addresses, operands, blocks)
            if needs is None:
                recent = None
                reads, writes, needs = self.look_up_launch(addresses, operands)
            if needs and self.assumed_writers:
                self._warn(needs)
            track = fork.start(self, needs)
            if needs and (len(needs) > 1 or track not in needs):
                self.follow(track, needs)
            call = track.next_call()
            if recent is not None:
                recent.note(addresses, operands, blocks, track, call)
            else:
                self.note_launch(track, call, reads, writes, addresses, operands)
        except BaseException:
            fork.undo_start()
            raise
        finally:
            self.busy = False
        return track

    def start_call(self, fork: Starts, call: Call) -> Track:
        """Start a branch that makes any call, in the order of its data, on a slot of this thread's; its track."""
        if self.busy:
            raise in_the_middle()
        try:
            self.busy = True
            reads, writes, needs = self.look_up(call)
            if needs and self.assumed_writers:
                self._warn(needs)
            track = fork.start(self, needs, owned=True)
            if needs and (len(needs) > 1 or track not in needs):
                self.follow(track, needs)
            number = track.next_call()
            write_down(track, number, reads, writes)
            if call.opaque:
                self.barrier = track, number
        except BaseException:
            fork.undo_start()
            raise
        finally:
            self.busy = False
        return track

    def _warn(self, needs: Needs) -> None:
        """Warn where a branch waits for a call that may have written the memory it was given."""
        for each in needs.items():
            if each in self.assumed_writers:
                warn_of_assumed_write(self.assumed_writers[each])

    def enter_branch(self, track: Track) -> Outer:
        """Let a branch run Python on a track; what `end_branch` is to be given."""
        outer = self.running, self.foreign_writes
        self.running, self.foreign_writes = track, []
        return outer

    def end_branch(self, outer: Outer, call: PythonCall, allocated: Sequence[Any] | None, ended: tuple[object] | None) -> None:
        """Write down what a branch that ran Python turned out to read and write.

        Parameters
        ----------
        outer : Outer
            From `enter_branch`.
        call : PythonCall
        allocated : sequence of block or None
            What the branch allocated, in order; None where that was not seen.
        ended : (object,) or None
            Its value; None where it raised an error.
        """
        track, given = self.running, self.foreign_writes
        self.running, self.foreign_writes = outer
        if self.running is track:  # no state was left for a fork in a branch
            self.foreign_writes += given
        if self.closed or track is None:
            return
        if self.busy:
            raise in_the_middle()
        try:
            self.busy = True
            uses = self._uses if self._uses is not _NO_USES else self._entered()
            opaque = call.opaque
            for reads, writes, uses_any in given:
                self.note(track, self.entries(reads), self.entries(writes))
                opaque = opaque or uses_any
            if ended is None:
                made, others = call.failed(self, track, allocated or ())
            else:
                self.kept.append(ended[0])  # it is in the books, also where its memory is another library's
                made, others = call.ended(self, track, allocated, ended[0])
            # What the branch was given is written down again: an event may stand behind less than all of it. Memory that it was
            # not ordered for the books forget with its other users, so the branch's stream waits for these now, and whoever
            # follows the branch comes after them.
            try:
                if others:
                    self.follow(track, self.conflicts((), others))
            finally:
                number = track.next_call()
                write_down(track, number, uses.pieces(call.reads), uses.pieces([*call.writes, *made, *others]))
                # The same holds for a barrier.
                if opaque:
                    self.barrier = track, number
        finally:
            self.busy = self.closed

    def enter_fork(self, fork: object, *, counted: bool) -> None:
        """Let another fork use the books. A fork in a branch is not counted: it is over with its branch."""
        if self.busy:
            raise in_the_middle()
        if counted:
            self.forks.add(fork)

    def leave_fork(self, fork: object, tracks: Sequence[Track], home: Track, kept: list[object] | None, stream: object) -> None:
        """Let a fork go that was joined: its caller's stream comes after all its branches. The last fork closes the books.

        ``kept`` is what the branches read and made, where that is not an outer fork's.
        """
        self.busy = True  # it may be so already, after an interrupt
        self.forks.discard(fork)
        if not self.forks:
            self.close()
        elif not self.closed:
            self.joined(tracks, home, stream)
            if kept is not None:
                self.kept.append(kept)
        self.busy = self.closed

    def abandon_fork(self, fork: object, tracks: Sequence[Track], home: Track, kept: list[object] | None, stream: object) -> None:
        """Let a fork go whose branches may still use all that is kept."""
        abandon(self.kept[:])
        self.leave_fork(fork, tracks, home, kept, stream)

    def recover(self) -> None:
        """Be usable again after an interrupt that came in the middle of the books."""
        self.busy = self.closed

    def admit(
        self,
        reads: Sequence[Piece | Token],
        writes: Sequence[Piece | Token],
        keep: object,
        pointer: int,
        *,
        opaque: bool = False,
    ) -> None:
        """Let a stream wait for the branches that a call on it conflicts with, and write the call down.

        An opaque call conflicts with all branches. Calls on the outermost caller's stream are not written down: whatever starts
        later comes after them.
        """
        with self:
            track = self.tracks.get(pointer) or Track(pointer)  # or one of the caller's own choice, who orders it with its own
            noted = track if pointer in self.tracks else self.running
            if opaque:
                self.follow(track, self.all_calls())
            if noted is None or noted is self.root:
                self.follow(track, self.conflicts(reads, writes))
                return
            self.kept.append(keep)
            read, written = self.entries(reads), self.entries(writes)
            needs = needs_of(read, written)
            self.follow(track, needs if self.barrier is None else self.behind_barrier(needs))
            self.note(noted, read, written)
            if opaque:
                self.barrier = noted, noted.count
            if noted is not track:
                self.foreign_writes.append((reads, writes, opaque))

    # Look-ups

    def look_up_launch(self, addresses: Sequence[int], operands: Operands) -> tuple[list[Use], list[Use], Needs]:
        """Look up what a launch reads, and what it overwrites that may be known already; and what it waits for."""
        if self._uses is _NO_USES:
            self._enter_recent()
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
        if not alone:
            if not operands.dense:
                pieces = operands.pieces(addresses)
                reads, writes = self.entries(pieces[: operands.inputs]), self.entries(pieces[operands.inputs :])
            needs = needs_of(reads, writes)
        return reads, writes, needs if self.barrier is None else self.behind_barrier(needs)

    def look_up(self, call: Call) -> tuple[list[Use], list[Use], Needs]:
        """Look up what any call reads and what it writes; and what it waits for."""
        if self._uses is _NO_USES:
            self._enter_recent()
        uses = self._uses
        reads, writes = uses.pieces(call.reads), uses.pieces(call.writes)
        if not call.assumed_writes:
            needs = needs_of(reads, writes)
        else:
            assumed = reads if call.assumed_writes is call.reads else uses.pieces(call.assumed_writes)
            needs = needs_of(reads, [*writes, *assumed])
            if needs:
                call.compare_needs(needs_of(reads, writes), needs)
        if call.opaque:
            needs = self.all_calls()
        return reads, writes, needs if self.barrier is None else self.behind_barrier(needs)

    def all_calls(self) -> Needs:
        """Return the last call of each stream."""
        return {track: track.count for track in self.tracks.values() if track.count}

    def behind_barrier(self, needs: Needs) -> Needs:
        """Add the last call that may have used any memory to the calls that a call waits for."""
        assert self.barrier is not None
        track, call = self.barrier
        return {**needs, track: max(call, needs.get(track, 0))}

    def _entered(self) -> Uses:
        """Return the entries of all memory, which the first launches have none of until they are asked for."""
        if self._uses is _NO_USES:
            self._enter_recent()
        return self._uses

    def _enter_recent(self) -> None:
        """Make entries of all that the first launches were given; after an interrupt there are none, and it is done again."""
        recent = self.recent
        try:
            self.recent = None
            self._uses = Uses()
            self._known = self._uses.known
            for addresses, operands, track, call in recent or ():
                reads, writes, _ = self.look_up_launch(addresses, operands)
                write_down(track, call, reads, writes)
                self._write_down_new(track, call, addresses, operands)
        except BaseException:
            self._uses.close()
            self._uses, self.recent = _NO_USES, recent
            self._known = _NO_USES.known
            raise

    def entries(self, pieces: Iterable[Piece | Token]) -> list[Use]:
        """Return the books' entries of any arrays, and tokens."""
        return self._entered().pieces(pieces)

    def conflicts(self, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token]) -> Needs:
        """Return what a call waits for that is not written down itself."""
        overlapping = self._entered().overlapping
        needs = needs_of(*[[use for piece in pieces for use in overlapping(piece)] for pieces in (reads, writes)])
        return needs if self.barrier is None else self.behind_barrier(needs)

    def note_launch(
        self, track: Track, call: int, reads: Sequence[Use], writes: Sequence[Use], addresses: Sequence[int], operands: Operands
    ) -> None:
        """Write down a launch that was looked up, as a call of a stream."""
        write_down(track, call, reads, writes)
        if operands.made:
            self._write_down_new(track, call, addresses, operands)

    def note(self, track: Track, reads: Sequence[Use], writes: Sequence[Use]) -> None:
        """Write down the next call of a stream."""
        write_down(track, track.next_call(), reads, writes)

    def _write_down_new(self, track: Track, call: int, addresses: Sequence[int], operands: Operands) -> None:
        for address, reach in zip(addresses[operands.inputs :], operands.made, strict=False):
            self._uses.new(address, reach, track, call)

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
            event = self._events.acquire()
        try:
            self._record(event, track.pointer)
        except BaseException:
            self._events.release(event)
            raise
        track.mark(event)

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

    def joined(self, tracks: Sequence[Track], home: Track, stream: object = None) -> None:
        """Note that a stream waits for all calls of other tracks, which no fork has from now on."""
        home.absorb(tracks, stream)
        for track in tracks:
            self.tracks.pop(track.pointer, None)
        end_tracks(tracks, self._give_back)

    def close(self) -> None:
        """Forget everything: the join was made, or never will be. By any thread, where their own has ended."""
        self.closed = self.busy = True
        if self._orders.get(self._key) is self:
            self._orders.pop(self._key, None)
        if self in active:  # or an interrupt came before it was
            active.remove(self)
        end_tracks(self.tracks.values(), self._give_back, closed=True)
        if self._uses is not _NO_USES:
            self._uses.close()
        self.kept.clear()

    def forget(self, pointer: int) -> None:
        """Forget a stream that no call was given to."""
        track = self.tracks.pop(pointer, None)
        if track is not None:
            end_tracks((track,), self._give_back)

    def _give_back(self, events: list[Any]) -> None:
        """Give events back that no stream is to wait for any more."""
        self._events.free.extend(events)
        self._events.note_released()


_NO_USES = Uses()
"""Stands for the entries of books that have looked nothing up yet. It is shared, so nothing is ever entered there."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.orders: Orders = {}


_thread = _Thread()


def in_the_middle() -> OwnershipError:
    """Return the error for a call by a finaliser that found its thread in the middle of the books."""
    return OwnershipError(
        "a finaliser that Python ran while its thread was starting a branch, or ending one, used a fork, a graph function, an "
        "operation or a program: what orders the branches was in the middle of a change. Do it later, outside of finalisers"
    )


def open_order(driver: Driver, device: int) -> DataOrder | None:
    """Return this thread's books of a device, where an ordered fork is open."""
    order = _thread.orders.get((getattr(driver, "checked_driver", driver), device, thread.recording)) if active else None
    return None if order is None or order.closed else order


def orders_of_thread() -> list[DataOrder]:
    """Return this thread's books that are open, of all devices."""
    recording = thread.recording
    return [order for (_, _, known), order in _thread.orders.items() if known is recording and not order.closed]


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
    _thread.orders.clear()


os.register_at_fork(after_in_child=_after_fork)
