"""Hold a pool's handles, slots and scratch on one device."""

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from sys import getrefcount
from typing import Any

from handlepool._util.cleanup import do_all, take_each
from handlepool.drivers.event_pool import Events
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import PER_THREAD_STREAM, Handle
from handlepool.pool.context import on_device
from handlepool.pool.deferred import defer, deferred
from handlepool.pool.handles import DeviceHandles
from handlepool.pool.side_streams import SideSlots
from handlepool.pool.slot import ClosedHandle, Slot
from handlepool.pool.status import Status
from handlepool.pool.stream import StreamReference
from handlepool.pool.workspace import DeviceScratch

_log = logging.getLogger("handlepool")


class DeviceSlots:
    """The slots of one device that no thread owns.

    The caller makes that device current before each method call.

    Parameters
    ----------
    status : Status
        The status of the pool that owns the slots.
    driver : Driver
        The source of handles, streams and memory.
    device : int
        Ordinal.
    scratch_limit, idle_limit : int or None, int
        As in `HandlePool`.
    new_slot : callable
        Makes a slot from the driver, the device's scratch and a handle.
    release_left : callable
        Takes in slots that ended threads and streams have left behind.
    """

    def __init__(
        self,
        status: Status,
        driver: Driver,
        device: int,
        scratch_limit: int | None,
        idle_limit: int,
        new_slot: Callable[[Driver, DeviceScratch, Handle], Slot],
        release_left: Callable[[], None],
    ) -> None:
        self.status = status
        self.driver = driver
        self.device = device
        self.idle_limit = idle_limit
        self.handles = DeviceHandles(status, driver, device, self._make_room, self.describe)
        self.scratch = DeviceScratch(driver, device, scratch_limit, self.release_idle_scratch, self.describe)
        # The slot that was added last is reused first, because its stream is the most likely to be alive. On a live stream a
        # slot keeps its scratch.
        self.idle: list[Slot] = []
        # When the pool is closed, some threads may be inside launches. This list has the slots that these threads own.
        self.owned: list[Slot] = []
        # These events make waits between streams, except the start and the end of branches, for which side slots have events of
        # their own.
        self.edges = Events(driver)
        # All slots that are not destroyed. A slot that an interrupt lost is in no other container.
        self.slots: set[Slot] = set()
        self.sides = SideSlots(
            status, driver, self.scratch, self.slots, self.make_slot, self.handles.destroy, release_left, self.defer_rest
        )
        self._new_slot = new_slot
        self._release_left = release_left
        self._closed_handle = ClosedHandle(status)
        # `repair` and `_release_owned` both replace the handle of a slot. The lock keeps two threads from doing so at once. No
        # driver is called under the lock.
        self._lock = threading.RLock()

    # Slots

    def make_slot(self) -> Slot:
        """Return a new slot with a handle, bound to no stream."""
        slot = self._new_slot(self.driver, self.scratch, self.handles.create())
        self.slots.add(slot)
        return slot

    def repair(self, slot: Slot) -> None:
        """Repair a handle that a caller destroyed or bound elsewhere."""
        with slot.in_launch():
            if not slot.intact:
                # The caller destroyed the handle, and the pool has not yet counted that.
                self.handles.count(handles_destroyed=1)
                try:
                    self._replace_handle(slot, self.handles.create())
                except BaseException:
                    # The next call of this method counts the destruction again, so this call takes its count back.
                    self.handles.count(handles_destroyed=-1)
                    raise
            with self.driver.relaxed():
                self.driver.bind_handle(slot.handle, slot.pointer)
        self.handles.count(handles_repaired=1, handles_rebound=1)
        _log.debug("device %d: handle repaired and bound to stream %#x", self.device, slot.pointer)

    def _replace_handle(self, slot: Slot, handle: Handle) -> None:
        with self._lock:
            closed = self.status.closed
            if not closed:
                slot.replace_handle(handle)
        if closed:
            self.handles.destroy(handle)
            self.status.check()

    # Idle slots

    def take_idle(self) -> Slot | None:
        """Return the slot that was released last, or None."""
        while True:
            try:
                slot = self.idle.pop()
            except IndexError:
                return None
            if slot.intact:
                self.handles.count(handles_reused=1)
                return slot
            # This slot is of no use, because its former owner has destroyed its handle.
            self._destroy(slot)

    def put_idle(self, slot: Slot) -> None:
        """Keep a slot for a later owner.

        The oldest slots beyond the idle limit are destroyed.
        """
        self.idle.append(slot)
        while len(self.idle) > self.idle_limit:
            try:
                self._destroy(self.idle.pop(0))
            except IndexError:
                return

    def _destroy(self, slot: Slot) -> None:
        slot.end()
        self.slots.discard(slot)
        do_all([slot.release_scratch, partial(self.handles.destroy, slot.handle)])

    def destroy_idle(self) -> None:
        """Destroy every idle slot."""
        do_all(partial(self._destroy, slot) for slot in take_each(self.idle))

    # Between owners

    def acquire(self, reference: StreamReference) -> Slot:
        """Return a slot bound to a stream.

        It is the idle slot that was released last, or a new slot.
        """
        idle = self.take_idle()
        slot = self.make_slot() if idle is None else idle
        try:
            if idle is not None:
                # A new thread has no current CUDA context yet, and a launch needs one. `set_device` makes the device's context
                # current.
                self.driver.set_device(self.device)
                slot = idle.successor()
                # The set changes in one step. So after an interrupt it has exactly one of the two slots.
                self.slots ^= {idle, slot}
                if slot.scratch_bytes and not _is_still_on(idle, reference):
                    slot.release_scratch()
            with self.driver.relaxed():
                self.driver.bind_handle(slot.handle, reference.pointer)
        except BaseException:
            self.put_idle(slot)
            raise
        slot.key = reference.key
        slot.begin(reference.pointer)
        self.handles.count(handles_live=1, handles_rebound=int(idle is not None))
        _log.debug("device %d: %s handle bound to stream %#x", self.device, "new" if idle is None else "reused", slot.pointer)
        return slot

    def release(self, slot: Slot) -> None:
        """Make a slot idle after its owner has left it."""
        self.handles.count(handles_live=-1)
        stream = slot.watch() if slot.watch is not None else None
        try:
            if stream is None or slot.pointer == PER_THREAD_STREAM:
                slot.release_scratch()
            else:
                # The slot's thread has ended, but its stream lives, and another thread may continue a capture of this stream.
                slot.forget_capture(over=False)
        finally:
            self.put_idle(slot)

    def empty(self) -> None:
        """Destroy all resources without an owner.

        These are idle slots, free side slots, and blocks that larger blocks have replaced.
        """
        collect = partial(self.scratch.free_passed, wait=True)
        do_all([self.sides.release_captured, self.handles.destroy_doomed, self.destroy_idle, self.sides.destroy_free, collect])

    def close(self) -> None:
        """Destroy all resources.

        Resources of captures under way are destroyed once the captures end.
        """
        try:
            self._end()
        finally:
            self.defer_rest()

    def _end(self) -> None:
        """Release the building handle and unused slots of threads, then `empty`.

        Finally, the free events are destroyed, even if an earlier step failed, so that no failure leaves these events for good.
        """
        try:
            with self.handles.no_build() as nothing_is_built:
                if nothing_is_built:
                    self.handles.defer_builder()
                    self._release_owned()
            self.empty()
        finally:
            self.edges.destroy()

    def _release_owned(self) -> None:
        """Release the slots that threads owned at the close.

        A slot that a launch uses stays for a later try.
        """
        in_use: list[Slot] = []
        try:
            for slot in take_each(self.owned):
                with self._lock:
                    heir = slot.release_unless_busy(self._closed_handle)
                if heir is None:
                    in_use.append(slot)
                    continue
                self.slots ^= {slot, heir}
                heir.watch = slot.watch
                self.release(heir)
        finally:
            self.owned += in_use

    def defer_rest(self) -> None:
        """Defer the destruction of a closed pool's remaining resources."""
        if not self.is_empty() and self.destroy_rest not in deferred:
            defer(self.destroy_rest)

    def is_empty(self) -> bool:
        """Return whether nothing is left for `destroy_rest` to destroy."""
        sides, handles = self.sides, self.handles
        owned = self.owned or self.idle or sides.capturing or sides.free
        building = handles.builder or handles.builds
        return not (owned or building or handles.doomed or self.scratch.deferred_blocks or self.edges.free)

    def destroy_rest(self) -> bool:
        """Retry destruction for a closed pool; return whether all is destroyed.

        The retry concerns resources that were in use or captured at the close, and resources whose destruction failed.
        """
        try:
            with on_device(self.driver, self.device):
                self._end()
        except Exception:
            pass
        return self.is_empty()

    # Accounts

    def _make_room(self) -> None:
        """Free the scratch of unused slots, and then destroy these slots.

        Unused slots are idle slots, and side slots that are not leased.
        """
        self._release_scratch()
        self.destroy_idle()
        self.sides.destroy_free()

    def release_idle_scratch(self) -> None:
        """Free the scratch of idle slots and free side slots.

        This also frees blocks that wait for their stream, and the scratch of forks and programs that were dropped before they
        were left or closed.
        """
        deferred.run_all()
        self._release_scratch()

    def _release_scratch(self) -> None:
        self._release_left()
        self.scratch.free_passed(wait=True)
        for slots in (self.idle, self.sides.free):
            held: list[Slot] = []
            try:
                held.extend(take_each(slots))
                do_all([slot.release_scratch for slot in held])
            finally:
                slots[:0] = held

    def snapshot(self) -> dict[str, int]:
        """Return the device's counters by the names of `HandlePool.stats`."""
        free, held = len(self.sides.free), len(self.sides.capturing)
        return self.handles.counts | {
            "handles_idle": len(self.idle) + len(self.handles.doomed) + free,
            "handles_leased": self.sides.made - free - held,
            "handles_captured": held,
            "handles_building": int(self.handles.builder is not None),
            "scratch_bytes": self.scratch.nbytes,
            "scratch_bytes_captured": self.scratch.captured_nbytes,
            "scratch_bytes_recorded": self.scratch.recorded_nbytes,
            "scratch_bytes_peak": self.scratch.peak,
            "captures_met": self.scratch.captures_met,
            "slots_lost": sum(count <= _NOBODY for count in _holders(self.slots)),
        }

    def describe(self) -> str:
        """Return the held resources in words."""
        now = self.snapshot()
        recorded = f", {now['scratch_bytes_recorded']:,} of them held by programs" if now["scratch_bytes_recorded"] else ""
        return (
            f"{now['handles_live']} live, {now['handles_idle']} idle, {now['handles_leased']} leased handles, "
            f"{now['scratch_bytes']:,} bytes of scratch{recorded}"
        )


def _holders(slots: Iterable[Any]) -> list[int]:
    """Count the references to each slot from its possible owners.

    Two references are not counted, because they come from no owner: the reference of the callback that watches the slot's
    stream, and the reference of the stream object.
    """
    return [
        getrefcount(slot) - (getattr(slot.watch, "__callback__", None) is not None) - (slot.owner is not None)
        for slot in [*slots]
    ]


class _Alone:
    watch = owner = None


# This is the count of a slot that only the set of all slots holds.
(_NOBODY,) = _holders([_Alone()])


def _is_still_on(idle: Slot, reference: StreamReference) -> bool:
    """Return whether a slot's last stream is the stream to bind.

    Only then may the scratch stay with the slot. On another stream, the new work would have to wait for the last stream's work.
    The wait needs an event on the last stream, which may no longer exist. Even a live weak reference does not prove that the
    stream exists: while the destructor of a stream object destroys the stream, the reference still answers.
    """
    # The per-thread default stream is a different stream in each thread, although its pointer is the same.
    if idle.watch is None or idle.pointer == PER_THREAD_STREAM:
        return False
    return reference.stream is not None and idle.watch() is reference.stream
