"""Side slots of one fork: leased when a branch needs one more state, and started after the caller's stream.

A branch that follows the last branch of a state by its data goes on there. The others take the states in turn. Each branch starts
after everything that the caller's stream has been given by then: one event, recorded there, that the side stream waits for
(guarantee 6).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from handlepool.drivers.streams import Stream
from handlepool.errors import OwnershipError
from handlepool.order.books import DataOrder, open_order
from handlepool.order.call import Call
from handlepool.order.stream_order import order as order_streams
from handlepool.order.track import NO_TRACK, Needs, Track
from handlepool.pool.context import active, recordings, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import SideSlots
from handlepool.pool.slot import Slot, bind_to_thread, unbind
from handlepool.regions.memory import Region, branch_regions

T = TypeVar("T")


class Leases:
    """The side slots that a fork has, their tracks in the region's books, and all that its branches keep.

    Parameters
    ----------
    pool : PoolInternals
    count : int
        The most slots.
    stream : Stream
        The caller's.
    device : int
    sides : SideSlots
        Of the device.
    region : Region or None
        Of the branch or task that the fork is in.

    Attributes
    ----------
    slots : list of Slot
        All that are leased. The join releases whatever is here.
    kept : list
        What lives to the join.
    keep : callable
        Appends to ``kept``.
    order : DataOrder or None
        The books, opened with the first branch.
    callers : tuple of int
        Further streams that branches start after, and that wait at the join.
    mark : object
        Stands for the fork in the books, which must not keep the fork itself.
    """

    __slots__ = (
        "_callers_slot",
        "_checked",
        "_device",
        "_driver",
        "_former",
        "_home",
        "_next",
        "_pointer",
        "_stream",
        "_together",
        "_tracks",
        "callers",
        "count",
        "inherited",
        "keep",
        "kept",
        "mark",
        "order",
        "pool",
        "region",
        "sides",
        "slots",
        "within",
    )

    def __init__(
        self, pool: PoolInternals, count: int, stream: Stream, device: int, sides: SideSlots, region: Region | None
    ) -> None:
        self.pool = pool
        self._driver = pool.driver
        self._checked = pool.checked
        self._stream = stream
        self._pointer: int = stream.ptr
        self._device = device
        self.sides = sides
        self.region = region
        self.inherited = region is not None
        self.count = count
        self.slots: list[Slot] = []
        self.kept: list[object] = []
        if region is not None:
            region.enter(self.slots)
            self.kept = region.kept
        self.keep = self.kept.append
        self.order: DataOrder | None = None
        self.mark = object()
        self.callers: tuple[int, ...] = ()
        # The branch whose Python is the body of the fork; None where that is no branch's.
        order = open_order(self._driver, device) if active else None
        self.within = None if order is None else order.running
        self._home = NO_TRACK  # the caller's
        self._tracks: list[Track] = []  # of the leased states
        self._next = 0
        self._former: tuple[int, int] | None = None  # how many slots there were, and whose turn it was, before a lease
        self._together = False  # whether the states that are to come were started ahead
        self._callers_slot: Slot | None = None

    # Branches

    def begin(self, kept: object, launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Slot:
        """Start the next branch, which launches one known plan, and keep what it reads; its slot.

        That is the caller's where every side slot is out.
        """
        self.keep(kept)
        self._former = None
        order = self.order
        if order is None or order.closed:
            order = self._open_books()
        track = order.start_launch(self, launch, addresses, blocks)
        slot = self._callers_slot if track is self._home else track.slot
        assert slot is not None
        return slot

    def begin_call(self, kept: object, call: Call | None) -> Slot:
        """Start the next branch, which makes any call, and keep what it reads; its slot, which is this thread's.

        So a hit of `get_handle` in the branch finds the slot.
        """
        self.keep(kept)
        self._former = None
        order = self.order
        if order is None or order.closed:
            order = self._open_books()
        assert call is not None
        track = order.start_call(self, call)
        # After the lease: of a lost context, that says so first.
        if self.region is None:
            self.own_region().prepare()
        slot = self._callers_slot if track is self._home else track.slot
        assert slot is not None
        return slot

    def begin_unordered(self, kept: object, *_: object, owned: bool = False) -> Slot:
        """Start the next branch on the next state, whatever it reads and writes."""
        self.keep(kept)
        slots, index = self.slots, self._next
        known = len(slots)
        if index >= known and (self._together or not self._lease()):
            if not known:
                return self.pool.slot(self._stream)
            index = 0
        self._former = known, self._next
        self._next = index + 1 if index + 1 < self.count else 0
        slot = slots[index]
        try:
            if slot.owner is None and (owned or self._checked):
                self._bind(slot)
            if not self._together:
                driver = self._driver
                driver.record_event(slot.start_event, self._pointer)
                driver.wait_event(slot.pointer, slot.start_event)
        except BaseException:
            self.undo_start()
            raise
        return slot

    def run(self, call: Any, kept: object) -> Any:
        """Run a call of a graph function as the next branch, and keep what it was given; its value."""
        self.check_body(f"fork.run({call.name})")
        if call.callers:
            self.follow(call.callers)
        return call.launch(self.begin_call((kept, call.keep), call))

    def check_body(self, what: str) -> None:
        """Refuse what belongs into the body of the fork where it is called inside a branch, or in another recording."""
        order = self.order or open_order(self._driver, self._device)
        if order is not None and order.running is not self.within:
            raise OwnershipError(
                f"{what} was called inside a branch: it is for the body of the fork. Inside a branch open another one, with "
                f"states.fork() as inner"
            )
        if recordings and thread.recording is not None and what != "fork.wait":
            thread.recording.check("a fork", self._pointer, self._driver, self.mark)

    def follow(self, pointers: Sequence[int]) -> int:
        """Let the next branches start after further callers' streams, as torch's current stream, and these wait at the join.

        The order goes through the caller's stream, which waits for the others now and they for it at the join: one event each.
        Returns the last pointer.
        """
        for pointer in pointers:
            order_streams(self.pool, self._device, pointer, self._pointer)
            if pointer != self._pointer and pointer not in self.callers:
                self.callers += (pointer,)
        return pointers[-1]

    def start(self, order: DataOrder, needs: Needs, *, owned: bool = False) -> Track:
        """Choose the track of the next branch, and start it after the caller's stream; called by the books."""
        if needs:
            mark = self.mark
            for track, call in needs.items():
                if track.count == call and track.fork is mark:
                    if track.marked != call:
                        order.mark(track)  # other branches may follow the same call
                    break
            else:
                track = self._next_track(order, owned)
        else:
            track = self._next_track(order, owned)
        slot = track.slot
        if slot is None or track is self._home:
            self._callers_slot = self.pool.slot(self._stream)
            return track
        if slot.owner is None and (owned or self._checked):
            self._bind(slot)
        if not self._together:
            driver = self._driver
            driver.record_event(slot.start_event, self._pointer)
            driver.wait_event(slot.pointer, slot.start_event)
        if self._home.known is not track.seen:
            track.follow_home()
        return track

    def _bind(self, slot: Slot) -> None:
        """Make a slot this thread's, with its handle right."""
        bind_to_thread(slot if slot.handle.stream is slot.pointer else self.pool.repaired(slot))

    def undo_start(self) -> None:
        """Release what the last start leased: its branch did not come to run."""
        if self._former is not None:
            known, self._next = self._former
            self._former = None
            self._release_from(known)

    def _next_track(self, order: DataOrder, owned: bool) -> Track:
        """Return the track of the state whose turn it is; the caller's where there is no state."""
        tracks, index = self._tracks, self._next
        if index >= len(tracks):
            slots = self.slots
            self._former = len(slots), index
            if index >= len(slots) and (self._together or not self._lease()):
                if not slots:
                    return self._home
                index = 0
            while len(tracks) <= index:
                slot = slots[len(tracks)]
                if owned and slot.owner is None and len(tracks) == index:
                    self._bind(slot)
                track = order.tracks[slot.pointer] = Track(slot.pointer, self._home, self.mark, slot)
                tracks.append(track)
        self._next = index + 1 if index + 1 < self.count else 0
        return tracks[index]

    # States that start together

    def start_together(self, branches: int) -> None:
        """Lease states for so many more branches, and start all states: one event stands for the caller's stream."""
        slots, free = self.slots, self.sides.free
        known, most = len(slots), self._next + branches
        try:
            try:
                for _ in range(known, most if most < self.count else self.count):
                    slots.append(free.pop())  # the join releases whatever is here
            except IndexError:
                while len(slots) < most and self._lease():
                    pass
            if slots:
                driver = self._driver
                event, wait = slots[0].start_event, driver.wait_event
                driver.record_event(event, self._pointer)
                for slot in slots:
                    wait(slot.pointer, event)
        except BaseException:
            self._release_from(known)
            raise
        self._together = True

    def end_together(self) -> None:
        """Let each branch start by an event of its own from now on."""
        self._together = False

    def apart(self, run: Callable[..., T], *args: Any) -> T:
        """Call a function whose branches start by events of their own, between branches that started together."""
        together, self._together = self._together, False
        try:
            return run(*args)
        finally:
            self._together = together

    def wait_for_all(self) -> None:
        """Let the caller's stream wait for all branches so far, and so the branches that are to come."""
        driver = self._driver
        for slot in self.slots:
            driver.record_event(slot.end_event, slot.pointer)
            driver.wait_event(self._pointer, slot.end_event)

    # Slots

    def _lease(self) -> bool:
        """Lease one more side slot; False where the fork may have no more, or none is free, and fewer have to do."""
        slots = self.slots
        if len(slots) >= self.count:
            return False
        try:
            slot: Slot | None = self.sides.free.pop()
        except IndexError:
            slot = self.sides.lease()
        if slot is None:
            if thread.recording is not None:
                thread.recording.lack(self.mark, len(slots), self.count)
            self.count = max(1, len(slots))
            return False
        slots.append(slot)  # the join releases whatever is here
        return True

    def _release_from(self, known: int) -> None:
        """Release the states that were leased for branches which did not come to start, all but the first ``known``."""
        while len(self.slots) > known:
            slot = self.slots.pop()
            if slot.owner is not None:
                unbind(slot)
            if self.order is not None:
                self.order.forget(slot.pointer)
                del self._tracks[len(self.slots) :]
            # The slot may wait for a caller's stream that is being captured.
            self.sides.release(slot, captured=True)

    def give_back(self) -> None:
        """Leave the books and release all slots: the caller's stream waits for every branch by now."""
        if self.region is not None:
            for slot in self.slots:
                if slot.pointer in branch_regions:
                    del branch_regions[slot.pointer]
        # Before another fork of this thread, in a finaliser, has the same states.
        self.leave_order(joined=True)
        # An interrupt that comes before this finds all of them here, and they are joined again later.
        slots, self.slots = self.slots, []
        self.sides.free.extend(slots)

    def abandon_all(self) -> None:
        """Forget the slots of a parent's process, or of a lost context: nothing may touch them."""
        self.slots = []

    def own_region(self) -> Region:
        """Return the region that the fork is, or is in; made when it is first needed."""
        region = self.region
        if region is None:
            region = self.region = Region(self._driver, self._stream, self._device, None, self.kept)
        return region

    def check_in_time(self) -> None:
        """Refuse a fork in a branch whose own fork was left before."""
        if self.inherited and self.own_region().ended:
            raise OwnershipError(
                "this fork was entered inside a branch, and the fork of that branch was left before it: nobody waits for its "
                "branches. Leave a fork where it was entered; a generator that holds one open must be finished there"
            )

    # Books

    def _open_books(self) -> DataOrder:
        """Return the books of the region: the thread's that are open, or else books that this fork opens."""
        root = Track(self._pointer)
        order = open_order(self._driver, self._device)
        if order is None:
            # The books are this fork's before a finaliser that runs just then can find them, and after an interrupt.
            order = self.order = DataOrder(self.pool, self._device, root, self.mark)
            order.open()
        else:
            order.enter_fork(self.mark, counted=not self.inherited)
        self._tracks.clear()
        home = order.tracks.get(self._pointer)
        if home is None:  # of a stream that the body chose
            home = order.tracks[self._pointer] = root
        self._home, self.order = home, order
        return order

    def leave_order(self, *, joined: bool) -> None:
        """Leave the books, which the last fork closes. Other forks go on with them, behind the join."""
        order = self.order
        if order is None:
            return
        leave = order.leave_fork if joined else order.abandon_fork
        leave(self.mark, self._tracks, self._home, None if self.inherited else self.kept[:], self._stream)
        self.order, self._home, self._tracks = None, NO_TRACK, []


class UnorderedLeases(Leases):
    """The side slots of a fork whose branches do not wait for each other."""

    __slots__ = ()

    begin = Leases.begin_unordered  # type: ignore[assignment]

    def begin_call(self, kept: object, call: Call | None) -> Slot:
        """Start the next branch on the next state, whatever it reads and writes."""
        slot = self.begin_unordered(kept, owned=True)
        if self.region is None:
            self.own_region().prepare()
        return slot

    def leave_order(self, *, joined: bool) -> None:
        """Note in the books of an outer fork that states were joined in which ordered forks had their bodies."""
        if not joined or not self.slots:
            return
        order = open_order(self._driver, self._device)
        inside = [] if order is None else [order.tracks[slot.pointer] for slot in self.slots if slot.pointer in order.tracks]
        if order is not None and inside:
            order.joined(inside, order.tracks.setdefault(self._pointer, Track(self._pointer)))
