"""Lease side slots, the streams of branches and tasks, without locks.

Each side slot has a stream, a handle, scratch and two events.
"""

import gc
import logging
import threading
from collections.abc import Callable
from functools import partial

from handlepool._util.cleanup import do_all, take_each
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle, Stream
from handlepool.pool.deferred import deferred
from handlepool.pool.slot import Slot
from handlepool.pool.status import Status
from handlepool.pool.workspace import DeviceScratch

_log = logging.getLogger("handlepool")

MOST_SIDE_SLOTS = 32
"""The maximum number of side slots of a device.

A GPU serves streams through at most 32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS).
"""


class SideSlots:
    """The side slots of one device.

    The caller makes that device current before each method call.

    Parameters
    ----------
    status : Status
        The status of the pool that owns the slots.
    driver : Driver
        The source of streams and events.
    scratch : DeviceScratch
        The source of the slots' scratch.
    slots : set of Slot
        All slots of the device that are not destroyed.
    make_slot, destroy_handle : callable
        `DeviceSlots.make_slot` and `DeviceHandles.destroy` of the device.
    release_left : callable
        Takes in slots that ended threads and streams have left behind.
    defer_rest : callable
        Defers the destruction of a closed pool's remaining resources.
    """

    def __init__(
        self,
        status: Status,
        driver: Driver,
        scratch: DeviceScratch,
        slots: set[Slot],
        make_slot: Callable[[], Slot],
        destroy_handle: Callable[[Handle], None],
        release_left: Callable[[], None],
        defer_rest: Callable[[], None],
    ) -> None:
        # Pop and append are atomic, so a lease takes no lock.
        self.free: list[Slot] = []
        # Side slots whose streams still take part in a capture (guarantee 9).
        self.capturing: list[Slot] = []
        self.made = 0
        self._status = status
        self._driver = driver
        self._scratch = scratch
        self._slots = slots
        self._make_slot = make_slot
        self._destroy_handle = destroy_handle
        self._release_left = release_left
        self._defer_rest = defer_rest
        # These are streams of closed programs, for reuse. Appends and pops are atomic.
        self._streams: list[Stream] = []
        # The lock guards `made`. No driver is called under it.
        self._lock = threading.RLock()

    @property
    def spare(self) -> int:
        """Return how many slots this thread could lease now.

        The number holds only if no other thread leases slots meanwhile.
        """
        return len(self.free) + MOST_SIDE_SLOTS - self.made

    def lease(self) -> Slot | None:
        """Lease a side slot, or return None (guarantee 1).

        None means that all side slots are leased.
        """
        try:
            return self.free.pop()
        except IndexError:
            pass
        if deferred:
            deferred.run()
        self._release_left()
        self.release_captured()
        try:
            return self.free.pop()
        except IndexError:
            pass
        with self._lock:
            if self.made >= MOST_SIDE_SLOTS:
                return None
            self.made += 1
        try:
            return self._make()
        except BaseException:
            with self._lock:
                self.made -= 1
            raise

    def _make(self) -> Slot:
        slot = self._make_slot()
        try:
            with self._driver.relaxed():
                stream = slot.side_stream = self._driver.create_stream()
                slot.pointer = stream.ptr
                slot.start_event = self._driver.create_event()
                slot.end_event = self._driver.create_event()
                self._driver.bind_handle(slot.handle, slot.pointer)
        except BaseException:
            self._destroy(slot)
            raise
        return slot

    def prewarm(self, count: int, workspace: int) -> None:
        """Make side slots until the device has ``count``, if possible.

        Each of them gets ``workspace`` bytes of scratch for its launches.
        """
        leased = []
        try:
            for _ in range(count):
                slot = self.lease()
                if slot is None:
                    break
                leased.append(slot)
                slot.begin(slot.pointer)
                slot.reserve(workspace)
        finally:
            for slot in leased:
                slot.end()
                self.release(slot, captured=False)

    def release(self, slot: Slot, *, captured: bool) -> None:
        """Release a leased side slot.

        A slot that took part in a capture is held until the capture ends.
        """
        if captured:
            self.capturing.append(slot)
            _log.debug("stream %#x: side slot held until its capture ends", slot.pointer)
            # The slot is added before `closed` is read, so that either `close()` or this thread finds the slot.
            if self._status.closed:
                self._defer_rest()
            return
        self.free.append(slot)
        # `close()` sets `closed` before it destroys the free slots, so either `close()` or this thread destroys this slot.
        if self._status.closed:
            self.destroy_free()

    def replace_stream(self, slot: Slot) -> Stream | None:
        """Replace the stream of a leased slot; return the old stream.

        The slot must be bound to no thread. From now on the old stream belongs to the caller.
        """
        with self._driver.relaxed():
            try:
                stream = self._streams.pop()
            except IndexError:
                stream = self._driver.create_stream()
            pointer = stream.ptr
            slot.forget_capture()
            self._driver.bind_handle(slot.handle, pointer)
        old, slot.side_stream, slot.pointer = slot.side_stream, stream, pointer
        return old

    def reuse(self, stream: Stream | None) -> None:
        """Take back an unused stream that `replace_stream` returned.

        Streams are reused, because torch keeps memory for each stream that it has seen, and never gives this memory up.
        """
        # If the collector found a dropped program in a cycle, it has already run the destructors of the program's streams. Such
        # a stream cannot be reused.
        if stream is not None and not gc.is_finalized(stream) and not self._status.closed:
            self._streams.append(stream)

    def release_captured(self) -> None:
        """Release the side slots whose captures have ended."""
        for _ in range(len(self.capturing)):
            try:
                slot = self.capturing.pop(0)
            except IndexError:
                return
            try:
                capture = self._driver.capture_id(slot.pointer)
            except BaseException:
                self.capturing.append(slot)
                raise
            if capture:
                self.capturing.append(slot)
            else:
                slot.forget_capture()
                self.free.append(slot)

    def destroy_free(self) -> None:
        """Destroy the free side slots, and the streams without a slot."""
        # A stream is destroyed with its last reference. `_streams` has the last references to these streams.
        with self._driver.relaxed():
            self._streams.clear()
        do_all(partial(self.destroy, slot) for slot in take_each(self.free))

    def destroy(self, slot: Slot) -> None:
        """Destroy a side slot without an owner."""
        try:
            self._destroy(slot)
        finally:
            with self._lock:
                self.made -= 1

    def _destroy(self, slot: Slot) -> None:
        slot.end()
        self._slots.discard(slot)
        events = [event for event in (slot.start_event, slot.end_event) if event is not None]
        slot.start_event = slot.end_event = None
        destroy = [partial(self._scratch.destroy_event, event) for event in events]
        do_all([slot.release_scratch, partial(self._destroy_handle, slot.handle), *destroy, partial(self._release_stream, slot)])

    def _release_stream(self, slot: Slot) -> None:
        with self._driver.relaxed():
            # This is the last reference to the stream, so dropping it destroys the stream.
            slot.side_stream = None
