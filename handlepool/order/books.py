"""Order the branches of a region by the memory that they use.

This module keeps guarantee 17. A region has one set of books for each device. The books record, by address, the memory that
each call reads and writes, and the stream of the call. A later call waits for each earlier call that conflicts with it. A read
waits for the last write. A write waits for the last write and for all reads since.

`handlepool.order.track.follow` makes the waits.

This module takes no lock, because books belong to one thread, and regions of different threads are not ordered with each other.
Python may run a finalizer anywhere, so a finalizer may find its own thread in the middle of a change to the books. In that case
the books refuse the finalizer's calls.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from handlepool.drivers.protocol import Driver
from handlepool.errors import OwnershipError
from handlepool.order.assumed import AssumedWriter, warn_of_assumed_write
from handlepool.order.call import Call, PythonCall
from handlepool.order.captures import another_capture, captures_of
from handlepool.order.places import books_of_thread, open_order
from handlepool.order.recent import Recent
from handlepool.order.track import Needs, Track, end_tracks, follow, last
from handlepool.order.uses import Accesses, Operands, Use, Uses, needs_of, write_down
from handlepool.pool.context import active, thread
from handlepool.pool.deferred import abandon
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token

Outer = tuple[Track | None, list[Accesses]]
"""The enclosing branch's track, and its accesses on other streams.

`enter_branch` returns both, and `end_branch` restores both. The other streams are streams that the enclosing branch chose
itself, in addition to its side stream.
"""


class Starts(Protocol):
    """The methods of a fork with which the books start branches."""

    def start(self, order: "DataOrder", needs: Needs, *, owned: bool = False) -> Track:
        """Start the next branch and return its track.

        ``needs`` are the calls that the branch waits for. The track belongs to a side slot of the fork. If no
        side slot is free, the track belongs to the caller's stream. With ``owned``, the slot is bound to this thread.
        """

    def undo_start(self) -> None:
        """Release the slot that `start` leased, because the branch did not run."""


class DataOrder:
    """The books of a thread's outermost region on one device.

    Code that reads or changes the books runs inside ``with order``, or sets `busy` itself. A finalizer that uses the books
    while `busy` is set gets an OwnershipError.

    Parameters
    ----------
    pool : PoolInternals
        The pool of the fork that opens the books.
    device : int
        The device's ordinal.
    root : Track
        The track of the outermost caller's stream. A call on that stream waits for conflicting branches. The books do not note
        the call, because every branch that starts later comes after the call anyway.
    fork : object
        The key of the fork that opens the books.

    Attributes
    ----------
    events : Events
        The pool of events for the waits between the device's streams.
    barrier : (Track, int) or None
        The last call that may have used any memory. Every later call waits for it.
    busy : bool
        Whether a change to the books is under way, or the books are closed.
    forks : set
        The keys of the forks that use the books. The last fork to leave closes the books.
    running : Track or None
        The track of the innermost branch that runs Python now.
    foreign_writes : list
        The accesses of the ``running`` branch on streams that the branch itself chose.
    recent : Recent or None
        The first launches of the region. None as soon as a launch needs entries of `Uses`.
    tracks : dict
        The tracks by stream pointer.
    assumed_writers : dict
        For each call that may have written its arguments, the name and the code of its function.
    kept : list
        Owners of all memory in the books. They are kept so that the allocator cannot reuse the memory for another array.
    """

    __slots__ = (
        "_key",
        "_known",
        "_orders",
        "_uses",
        "assumed_writers",
        "barrier",
        "busy",
        "closed",
        "device",
        "driver",
        "events",
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
        self.events = (pool.devices.get(device) or pool.device(device)).edges
        self.recent: Recent | None = None
        self._uses = _NO_USES
        self._known = self._uses.known
        self._orders = books_of_thread.orders
        # A pool with ``check=True`` wraps its driver, and the wrapper stands for the same GPUs. The key has the wrapped driver,
        # so pools with and without checks find the same books.
        self._key = getattr(self.driver, "checked_driver", self.driver), device, thread.recording

    def open(self) -> None:
        """Register these books as the open books of this thread."""
        self._orders[self._key] = self
        # The line above registers the books before `active` lists them, because a launch that finds `active` non-empty looks
        # for the books of its thread.
        active.append(self)
        self.driver.before_untracked_access(partial(_before_plain, self.driver))

    def __enter__(self) -> None:
        if self.busy:
            raise in_the_middle()
        # A finalizer may run at any allocation below, and may use a fork of this thread. It would find the books in the middle
        # of a change. `busy` makes the books refuse the finalizer.
        self.busy = True

    def __exit__(self, *_: object) -> None:
        self.busy = False

    # Branches

    def start_launch(self, fork: Starts, launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Track:
        """Start a branch for one launch and return its track.

        The launch runs a known plan. The memory that it reads and writes decides the branch's order.
        """
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
                follow(self.events, track, needs)
            call = track.next_call()
            if recent is not None:
                recent.note(addresses, operands, blocks, track, call)
            else:
                self.note_launch(track, call, reads, writes, addresses, operands)
        except BaseException:
            # `fork.start` may have leased a slot before the error. Without `undo_start` the slot would stay leased until the
            # join.
            fork.undo_start()
            raise
        finally:
            self.busy = False
        return track

    def start_call(self, fork: Starts, call: Call) -> Track:
        """Start a branch for any call and return its track.

        The memory that the call reads and writes decides its order. The branch runs on a slot that this thread owns.
        """
        if self.busy:
            raise in_the_middle()
        try:
            self.busy = True
            reads, writes, needs = self.look_up(call)
            if needs and self.assumed_writers:
                self._warn(needs)
            track = fork.start(self, needs, owned=True)
            if needs and (len(needs) > 1 or track not in needs):
                follow(self.events, track, needs)
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
        """Warn where a branch waits for a call with assumed writes."""
        for each in needs.items():
            if each in self.assumed_writers:
                warn_of_assumed_write(self.assumed_writers[each])

    def enter_branch(self, track: Track) -> Outer:
        """Make ``track`` the running branch, and return the outer state.

        Call this method before a branch that runs Python. After the branch, pass the outer state to `end_branch`, which restores
        the state.
        """
        # Branches nest, and a generator may interleave them. So each caller of this method keeps the outer state itself. A
        # stack in the books could restore the state of another branch.
        outer = self.running, self.foreign_writes
        self.running, self.foreign_writes = track, []
        return outer

    def end_branch(self, outer: Outer, call: PythonCall, allocated: Sequence[Any] | None, ended: tuple[object] | None) -> None:
        """Write down the accesses of a branch that ran Python.

        The method also restores the outer state: the enclosing branch is the running branch again.

        Parameters
        ----------
        outer : Outer
            The result of `enter_branch`.
        call : PythonCall
            The branch's call.
        allocated : sequence of block or None
            Blocks that the branch allocated, in order. None if its allocations were not observed.
        ended : (object,) or None
            The branch's value in a tuple. None where the branch raised an error.
        """
        track, given = self.running, self.foreign_writes
        self.running, self.foreign_writes = outer
        # If a fork inside a branch found no free state, its branch ran on the track of the outer branch. Then the outer branch
        # takes over the accesses of the inner branch.
        if self.running is track:
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
                # `call.ended` notes the memory of the value in the books, also if another library owns that memory. So the
                # value is kept alive, and the memory is not reused.
                self.kept.append(ended[0])
                made, others = call.ended(self, track, allocated, ended[0])
            # The branch's arguments are noted again under a new call number, because an event for the first number may have
            # been recorded before the branch's last work. When memory is noted as written, the books forget its former users.
            # So the branch's stream waits for these users first, and each call that follows the branch comes after them.
            try:
                if others:
                    follow(self.events, track, self.conflicts((), others))
            finally:
                number = track.next_call()
                write_down(track, number, uses.pieces(call.reads), uses.pieces([*call.writes, *made, *others]))
                # For an opaque call too, an event for the first number may have been recorded before the branch's last work. So
                # the barrier moves to the new call number.
                if opaque:
                    self.barrier = track, number
        finally:
            self.busy = self.closed

    def enter_fork(self, fork: object, *, counted: bool) -> None:
        """Let another fork use the books.

        Pass ``counted=False`` for a fork inside a branch. Such a fork ends with that branch, and until then the outer fork
        keeps the books open.
        """
        if self.busy:
            raise in_the_middle()
        if counted:
            self.forks.add(fork)

    def leave_fork(self, fork: object, tracks: Sequence[Track], home: Track, kept: list[object] | None, stream: object) -> None:
        """Remove a fork that was joined, and close unused books.

        The caller's stream comes after all branches of the fork by now. The last fork to leave closes the books. ``kept`` holds
        the owners of memory that the branches read and made, or is None where an outer fork keeps these owners.
        """
        # This method does not check `busy`, because an interrupt may have left it set, and the books must still be closed.
        self.busy = True
        self.forks.discard(fork)
        if not self.forks:
            self.close()
        elif not self.closed:
            self.joined(tracks, home, stream)
            if kept is not None:
                self.kept.append(kept)
        self.busy = self.closed

    def abandon_fork(self, fork: object, tracks: Sequence[Track], home: Track, kept: list[object] | None, stream: object) -> None:
        """Remove a fork that was not joined, and abandon all kept memory.

        The fork's branches may still use this memory.
        """
        # A branch that was not joined may still read this memory, and no event tells when it ends. So the memory is never
        # released.
        abandon(self.kept[:])
        self.leave_fork(fork, tracks, home, kept, stream)

    def recover(self) -> None:
        """Clear `busy` after an interrupt has ended a change to the books."""
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
        """Let a call wait for conflicting branches, and write the call down.

        ``pointer`` is the call's stream. This stream waits for the branches. An opaque call conflicts with all
        branches. Calls on the outermost caller's stream are not written down, because everything that starts later comes after
        them.
        """
        with self:
            # The books may not know the stream of the call, because a branch chose it. The branch itself orders that stream, so
            # the books note the call as a call of the running branch.
            track = self.tracks.get(pointer) or Track(pointer)
            noted = track if pointer in self.tracks else self.running
            if track is not noted and self._is_apart(pointer, reads, writes, opaque):
                return
            if opaque:
                follow(self.events, track, self.all_calls())
            if noted is None or noted is self.root:
                follow(self.events, track, self.conflicts(reads, writes))
                return
            self.kept.append(keep)
            read, written = self.entries(reads), self.entries(writes)
            needs = needs_of(read, written)
            follow(self.events, track, needs if self.barrier is None else self.behind_barrier(needs))
            self.note(noted, read, written)
            if opaque:
                self.barrier = noted, noted.count
            if noted is not track:
                self.foreign_writes.append((reads, writes, opaque))

    def _is_apart(self, pointer: int, reads: Sequence[Piece | Token], writes: Sequence[Piece | Token], opaque: bool) -> bool:
        """Return whether a call and the branches belong to different captures.

        Then the call and the branches run at different times, and no event can order them. The branch that chose the call's
        stream has to order this stream with its own side stream.

        Raises
        ------
        CaptureError
            If another branch uses memory that the call uses.
        """
        captures = captures_of(self.driver, pointer, self.root.pointer)
        if captures[0] == captures[1]:
            return False
        needs = self.all_calls() if opaque else self.conflicts(reads, writes)
        if any(track is not self.running for track in needs):
            fix = "Make the call outside of the fork, or with arrays that no branch uses"
            raise another_capture("a call", pointer, self.root.pointer, captures, fix)
        return True

    # Look-ups

    def look_up_launch(self, addresses: Sequence[int], operands: Operands) -> tuple[list[Use], list[Use], Needs]:
        """Return a launch's reads, its overwritten memory, and its needs.

        Reads and overwritten memory are returned as entries of the books. The needs are the calls that the launch waits for.
        New outputs without gaps are left out, because `note_launch` makes their entries.
        """
        if self._uses is _NO_USES:
            self._enter_recent()
        reads: list[Use] = []
        writes: list[Use] = []
        needs: Needs = {}
        known, index, alone = self._known, 0, operands.dense
        # Count the index by hand, because a `zip` takes as long as two look-ups.
        for reach in operands.read:
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
        # Memory with gaps, and memory that shares elements with other entries, has further entries that the loops above do not
        # visit.
        if not alone:
            if not operands.dense:
                pieces = operands.pieces(addresses)
                reads, writes = self.entries(pieces[: operands.inputs]), self.entries(pieces[operands.inputs :])
            needs = needs_of(reads, writes)
        return reads, writes, needs if self.barrier is None else self.behind_barrier(needs)

    def look_up(self, call: Call) -> tuple[list[Use], list[Use], Needs]:
        """Return the entries of a call's reads and writes, and its needs.

        The needs are the calls that ``call`` waits for.
        """
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
        """Return ``needs`` with the barrier added.

        The barrier is the last call that may have used any memory.
        """
        assert self.barrier is not None
        track, call = self.barrier
        return {**needs, track: max(call, needs.get(track, 0))}

    def _entered(self) -> Uses:
        """Return the entries of all memory, and make them first if needed.

        The first launches have no entries until a look-up asks for them.
        """
        if self._uses is _NO_USES:
            self._enter_recent()
        return self._uses

    def _enter_recent(self) -> None:
        """Make entries for all memory of the first launches.

        After an interrupt there are no entries, and the next look-up starts again.
        """
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
        """Return the books' entries of ``pieces``; make missing entries."""
        return self._entered().pieces(pieces)

    def conflicts(self, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token]) -> Needs:
        """Return the calls that a call with these accesses waits for.

        The call itself is not written down.
        """
        overlapping = self._entered().overlapping
        needs = needs_of(*[[use for piece in pieces for use in overlapping(piece)] for pieces in (reads, writes)])
        return needs if self.barrier is None else self.behind_barrier(needs)

    def note_launch(
        self, track: Track, call: int, reads: Sequence[Use], writes: Sequence[Use], addresses: Sequence[int], operands: Operands
    ) -> None:
        """Write down a launch, with the entries from `look_up_launch`."""
        write_down(track, call, reads, writes)
        if operands.made:
            self._write_down_new(track, call, addresses, operands)

    def note(self, track: Track, reads: Sequence[Use], writes: Sequence[Use]) -> None:
        """Count a call of a stream, and write down its accesses."""
        write_down(track, track.next_call(), reads, writes)

    def _write_down_new(self, track: Track, call: int, addresses: Sequence[int], operands: Operands) -> None:
        for address, reach in zip(addresses[operands.inputs :], operands.made, strict=False):
            self._uses.new(address, reach, track, call)

    # Waits

    def waits_for_all(self, track: Track, writes: Iterable[Piece | Token]) -> bool:
        """Return whether a stream waits for all calls that used ``writes``."""
        return all(track.waits_for(*last(*each)) for each in self.conflicts((), writes).items())

    def joined(self, tracks: Sequence[Track], home: Track, stream: object = None) -> None:
        """Note that a caller's stream waits for all calls of joined tracks.

        ``home`` is the track of that stream. The books forget the joined tracks.
        """
        home.absorb(tracks, stream)
        for track in tracks:
            self.tracks.pop(track.pointer, None)
        end_tracks(self.events, tracks)

    def close(self) -> None:
        """Close the books and drop all their references.

        Call this method after the last join, or if no join will ever be made. Any thread may close books whose own thread has
        ended.
        """
        self.closed = self.busy = True
        if self._orders.get(self._key) is self:
            self._orders.pop(self._key, None)
        # An interrupt may have ended `open` before it added these books to `active`.
        if self in active:
            active.remove(self)
        end_tracks(self.events, self.tracks.values(), closed=True)
        if self._uses is not _NO_USES:
            self._uses.close()
        # Either the join was made, and the caller's stream follows every reader, or `abandon_fork` has kept this memory for
        # good.
        self.kept.clear()

    def forget(self, pointer: int) -> None:
        """Remove the track of a stream that received no call."""
        track = self.tracks.pop(pointer, None)
        if track is not None:
            end_tracks(self.events, (track,))


_NO_USES = Uses()
"""The value of `DataOrder._uses` before the first look-up of entries.

All books share this object, so it stays empty.
"""


def in_the_middle() -> OwnershipError:
    """Return the error for a finalizer's call during a change.

    The finalizer ran while its own thread was changing the books.
    """
    return OwnershipError(
        "a finalizer used a fork, a graph function, an operation or a program while its thread was starting or "
        "ending a branch, so the order of the branches was incomplete. Do that work later, outside of finalizers"
    )


def _before_plain(driver: Driver, pointer: int, reads: Sequence[Piece], writes: Sequence[Piece]) -> None:
    """Let plain code wait for branches that use the same memory.

    A driver that sees the accesses of plain code calls this function before an access in a fork's body.
    """
    order = open_order(driver, driver.current_device())
    if order is not None and order.running is None and (track := order.tracks.get(pointer)) is not None:
        with order:
            follow(order.events, track, order.conflicts(reads, writes))
