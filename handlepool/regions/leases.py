"""Lease a fork's side slots, and start its branches.

A branch that depends on the last branch of a state continues on that state. Other branches take the states in turn. Each branch
starts after everything that the caller's stream has received by then. For this order, an event is recorded on the caller's
stream, and the side stream waits for the event (guarantee 6).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Stream
from handlepool.errors import OwnershipError
from handlepool.order.books import DataOrder
from handlepool.order.call import Call
from handlepool.order.captures import another_capture, captures_of
from handlepool.order.places import open_order
from handlepool.order.stream_order import order as order_streams
from handlepool.order.track import NO_TRACK, Needs, Track, record_mark
from handlepool.pool.context import active, recordings, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import SideSlots
from handlepool.pool.slot import Slot, bind_to_thread, unbind
from handlepool.regions.memory import Region, branch_regions

T = TypeVar("T")


class Leases:
    """The side slots, tracks and kept objects of a fork.

    Parameters
    ----------
    pool : PoolInternals
        The pool of the fork.
    count : int
        The maximum number of slots.
    stream : Stream
        The caller's stream.
    device : int
        The device's ordinal.
    sides : SideSlots
        The side slots of the device.
    region : Region or None
        The region of the branch or task that the fork is in. None for an outermost fork.

    Attributes
    ----------
    slots : list of Slot
        The leased slots. The join releases every slot in the list.
    kept : list
        Objects that live to the join.
    keep : callable
        Appends to ``kept``.
    order : DataOrder or None
        The books of this thread. None before the first branch.
    callers : tuple of int
        Further streams of the caller, such as torch's. Later branches start after these streams, and at the join these streams
        wait for the branches.
    mark : object
        The key of the fork in the books. It is an object of its own, because the books must not keep the fork alive.
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
        # The track of the branch that contains the body of the fork; None where the body is in no branch.
        order = open_order(self._driver, device) if active else None
        self.within = None if order is None else order.running
        # This is the track of the caller's stream.
        self._home = NO_TRACK
        # These are the tracks of the leased states.
        self._tracks: list[Track] = []
        self._next = 0
        # Each lease first saves the number of slots and the index of the next state here, so that a failed start can be undone.
        self._former: tuple[int, int] | None = None
        # This tells whether all leased states were started together, so that a branch needs no start event of its own.
        self._together = False
        self._callers_slot: Slot | None = None

    # Branches

    def begin(self, kept: object, launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Slot:
        """Start the next branch for a known plan, and return its slot.

        ``kept`` is kept alive until the join. If no side slot is free, the result is the slot of the caller's stream.
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
        """Start the next branch for any call, and return its slot.

        ``kept`` is kept alive until the join. The slot belongs to this thread, so a hit of `get_handle` in the branch finds the
        slot.
        """
        self.keep(kept)
        self._former = None
        order = self.order
        if order is None or order.closed:
            order = self._open_books()
        assert call is not None
        track = order.start_call(self, call)
        # The region is prepared after the lease, so that after a lost context the lease raises the error.
        if self.region is None:
            self.own_region().prepare()
        slot = self._callers_slot if track is self._home else track.slot
        assert slot is not None
        return slot

    def begin_unordered(self, kept: object, *_: object, owned: bool = False) -> Slot:
        """Start the next branch on the next state, without data order."""
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
        """Run a graph function's call as the next branch.

        The call's arguments are kept, and its value is returned.
        """
        self.check_body(f"fork.run({call.name})")
        if call.callers:
            self.follow(call.callers)
        return call.launch(self.begin_call((kept, call.keep), call))

    def check_body(self, what: str) -> None:
        """Raise for a call inside a branch, or outside of the recording.

        ``what`` is the name of the call, which belongs in the body of the fork.
        """
        order = self.order or open_order(self._driver, self._device)
        if order is not None and order.running is not self.within:
            raise OwnershipError(
                f"{what} was called inside a branch, but it belongs in the body of the fork. Inside a branch open "
                "another fork, for example `with states.fork() as inner:`"
            )
        if recordings and thread.recording is not None and what != "fork.wait":
            thread.recording.check("a fork", self._pointer, self._driver, self.mark)

    def follow(self, pointers: Sequence[int]) -> int:
        """Order the next branches after further streams of the caller.

        Torch's current stream is an example. The caller's stream waits for the further streams now, and branches start after the
        caller's stream. At the join the further streams wait for the caller's stream. Each wait takes one event. The result is
        the last entry of ``pointers``.
        """
        for pointer in pointers:
            order_streams(self.pool, self._device, pointer, self._pointer)
            if pointer != self._pointer and pointer not in self.callers:
                self.callers += (pointer,)
        return pointers[-1]

    def start(self, order: DataOrder, needs: Needs, *, owned: bool = False) -> Track:
        """Choose the next branch's track, and start the branch there.

        The branch starts after the present work of the caller's stream. The books call this method.
        """
        if needs:
            mark = self.mark
            for track, call in needs.items():
                if track.count == call and track.fork is mark:
                    if track.marked != call:
                        # Other branches may later follow the same call. So its event is recorded now, before this branch adds
                        # work to the stream.
                        record_mark(order.events, track)
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
        """Bind a slot to this thread and repair its handle."""
        bind_to_thread(slot if slot.handle.stream is slot.pointer else self.pool.repaired(slot))

    def undo_start(self) -> None:
        """Release the slot of a start whose branch did not run."""
        if self._former is not None:
            known, self._next = self._former
            self._former = None
            self._release_from(known)

    def _next_track(self, order: DataOrder, owned: bool) -> Track:
        """Return the track of the next state.

        If no side slot is free, return the track of the caller's stream.
        """
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
        """Lease states for more branches, and start all states together.

        All states wait for the same event on the caller's stream.
        """
        slots, free = self.slots, self.sides.free
        known, most = len(slots), self._next + branches
        try:
            try:
                for _ in range(known, most if most < self.count else self.count):
                    # Each slot is added to `slots` at once, because the join releases every slot in this list, also after an
                    # interrupt.
                    slots.append(free.pop())
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
        """Let each branch start by its own event from now on."""
        self._together = False

    def apart(self, run: Callable[..., T], *args: Any) -> T:
        """Call ``run`` between branches that started together.

        Each branch of ``run`` waits for a start event of its own. The branches before and after this call share one start event.
        """
        together, self._together = self._together, False
        try:
            return run(*args)
        finally:
            self._together = together

    def wait_for_all(self) -> None:
        """Let the caller's stream wait for all branches so far.

        Later branches start after the caller's stream, so they wait for these branches as well.
        """
        driver = self._driver
        for slot in self.slots:
            driver.record_event(slot.end_event, slot.pointer)
            driver.wait_event(self._pointer, slot.end_event)

    # Slots

    def _lease(self) -> bool:
        """Lease one more side slot, and return whether it succeeded.

        The lease fails if the fork has its maximum, or if no slot is free. If no slot is free, the fork lowers its maximum.
        """
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
        # The join releases every slot in this list.
        slots.append(slot)
        return True

    def _release_from(self, known: int) -> None:
        """Release the slots after the first ``known`` slots.

        Their branches did not start.
        """
        while len(self.slots) > known:
            slot = self.slots.pop()
            if slot.owner is not None:
                unbind(slot)
            if self.order is not None:
                self.order.forget(slot.pointer)
                del self._tracks[len(self.slots) :]
            # The slot's stream may already wait for a caller's stream that is being captured, and so take part in the capture.
            # With ``captured``, the slot is held until its stream takes part in no capture.
            self.sides.release(slot, captured=True)

    def give_back(self) -> None:
        """Leave the books and release all slots.

        At this point the caller's stream waits for every branch.
        """
        if self.region is not None:
            for slot in self.slots:
                if slot.pointer in branch_regions:
                    del branch_regions[slot.pointer]
        # Leave the books before the slots are free. Otherwise a fork in a finalizer of this thread could lease the same slots
        # while the books still have their tracks.
        self.leave_order(joined=True)
        # After an interrupt before this statement, all slots are still in the list, and a later join takes them again.
        slots, self.slots = self.slots, []
        self.sides.free.extend(slots)

    def abandon_all(self) -> None:
        """Forget the slots of a parent process or a lost context.

        No code may touch these slots.
        """
        self.slots = []

    def own_region(self) -> Region:
        """Return the region of the fork, and make it if needed."""
        region = self.region
        if region is None:
            region = self.region = Region(self._driver, self._stream, self._device, None, self.kept)
        return region

    def check_in_time(self) -> None:
        """Raise if the branch that contains this fork has been joined."""
        if self.inherited and self.own_region().ended:
            raise OwnershipError(
                "this fork was entered inside a branch, and the branch's own fork was left first, so no stream waits for "
                "this fork's branches. Leave each fork inside the branch that entered it, also if a generator holds the fork"
            )

    # Books

    def _open_books(self) -> DataOrder:
        """Return this thread's open books, or open new books."""
        root = Track(self._pointer)
        order = open_order(self._driver, self._device) if active else None
        if order is None:
            # Assign the books before `open()`, so a finalizer or an interrupt never finds them half registered.
            order = self.order = DataOrder(self.pool, self._device, root, self.mark)
            order.open()
        else:
            _check_captures(self._driver, self._pointer, order.root.pointer)
            order.enter_fork(self.mark, counted=not self.inherited)
        self._tracks.clear()
        home = order.tracks.get(self._pointer)
        # The body of an outer fork may have chosen a stream that the books do not know. Such a stream gets a track here.
        if home is None:
            home = order.tracks[self._pointer] = root
        self._home, self.order = home, order
        return order

    def leave_order(self, *, joined: bool) -> None:
        """Remove this fork from the books; the last fork closes the books.

        With ``joined=False`` no stream waits for the fork's branches, so the memory in the books is abandoned.
        """
        order = self.order
        if order is None:
            return
        leave = order.leave_fork if joined else order.abandon_fork
        leave(self.mark, self._tracks, self._home, None if self.inherited else self.kept[:], self._stream)
        self.order, self._home, self._tracks = None, NO_TRACK, []


def _check_captures(driver: Driver, pointer: int, outer: int) -> None:
    """Refuse a fork whose books belong to another capture, or to none.

    A branch outside of a capture would wait for a captured call, and that wait would draw the branch's stream into the capture.

    Raises
    ------
    CaptureError
        Unless the two streams take part in the same capture, or both take part in no capture.
    """
    captures = captures_of(driver, pointer, outer)
    if captures[0] != captures[1]:
        raise another_capture(
            "a fork", pointer, outer, captures, "Begin the capture before both forks, or leave the other fork first"
        )


class UnorderedLeases(Leases):
    """The side slots of a fork without order between its branches."""

    __slots__ = ()

    begin = Leases.begin_unordered  # type: ignore[assignment]

    def begin_call(self, kept: object, call: Call | None) -> Slot:
        """Start the next branch on the next state, without data order."""
        slot = self.begin_unordered(kept, owned=True)
        if self.region is None:
            self.own_region().prepare()
        return slot

    def leave_order(self, *, joined: bool) -> None:
        """Note joined states in the books of this thread.

        The books know a state of this fork if an ordered fork was opened in a branch on that state.
        """
        if not joined or not self.slots:
            return
        order = open_order(self._driver, self._device)
        inside = [] if order is None else [order.tracks[slot.pointer] for slot in self.slots if slot.pointer in order.tracks]
        if order is not None and inside:
            order.joined(inside, order.tracks.setdefault(self._pointer, Track(self._pointer)))
