"""What a pool has on one device: idle slots, side slots, scratch, and the handle that graphs are built with."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from handlepool.drivers.base import LEGACY_STREAM, PER_THREAD_STREAM, Driver, Handle
from handlepool.errors import OutOfMemoryError
from handlepool.sides import SideSlots
from handlepool.slots import Slot
from handlepool.streams import StreamReference
from handlepool.workspace import DeviceScratch

# NVIDIA recommends one synchronous cudnnCreate before any that may run beside another (guarantee 14). The lock is the
# process's, not a pool's, and is held for every create: the binding holds the GIL through the call in any case.
_create_lock = threading.Lock()


@dataclass(slots=True)
class Counts:
    """What happened to handles so far."""

    handles_created: int = 0
    handles_destroyed: int = 0
    handles_reused: int = 0
    handles_repaired: int = 0
    create_microseconds: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class DeviceSlots:
    """The slots of one device that no thread owns. Its methods are called with that device current.

    Parameters
    ----------
    pool : HandlePool
        Whose slots they are.
    driver : Driver
        Where handles, streams and memory come from.
    device : int
        Ordinal.
    scratch_limit, idle_limit : int or None, int
        As in `HandlePool`.
    drain : callable
        Takes in what threads and streams have left behind.
    """

    def __init__(
        self,
        pool: Any,
        driver: Driver,
        device: int,
        scratch_limit: int | None,
        idle_limit: int,
        drain: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.driver = driver
        self.device = device
        self.idle_limit = idle_limit
        self.counts = Counts()
        self.scratch = DeviceScratch(driver, device, scratch_limit, self.reclaim_scratch, self.describe)
        self.idle: list[Slot] = []  # reused last in, first out: the warmest scratch and the stream most likely alive
        self.sides = SideSlots(pool, driver, self.scratch, self.create_handle, self.destroy_handle, drain)
        self.live = 0
        self.builder: Handle | None = None
        self.build_lock = threading.Lock()  # the builder handle is used by one thread at a time (guarantee 1)
        self._drain = drain
        self._lock = threading.Lock()  # guards counts and live; no call is made under it

    # Handles

    def create_handle(self) -> Handle:
        """Create a handle; when that fails, give back what is idle, try once more, then say what is short (guarantee 12)."""
        try:
            return self._create_handle()
        except Exception:
            self.reclaim_scratch()
            self.drop_idle()
            self.sides.drop_free()
            with self.driver.relaxed():
                self.driver.release_cached()
        try:
            return self._create_handle()
        except Exception as error:
            with self.driver.relaxed():
                free, total = self.driver.memory_info()
            raise OutOfMemoryError(
                f"no cuDNN handle could be created on device {self.device} ({error}): {free:,} of {total:,} bytes are free, "
                f"the pool holds {self.describe()}. A handle takes 8 to 10 MiB; free arrays, or close forks and threads"
            ) from error

    def _create_handle(self) -> Handle:
        with _create_lock, self.driver.relaxed():
            start = time.perf_counter_ns()
            handle = self.driver.create_handle()
            took = time.perf_counter_ns() - start
        with self._lock:
            self.counts.handles_created += 1
            self.counts.create_microseconds += took // 1000
        return handle

    def builder_handle(self) -> Handle:
        """The handle that graphs are built with; called with `build_lock` held. It lives as long as plans do: they keep it."""
        if self.builder is None:
            self.builder = self.create_handle()
        return self.builder

    def destroy_handle(self, handle: Handle) -> None:
        """Destroy a handle that no slot has any more."""
        with self.driver.relaxed():
            self.driver.destroy_handle(handle)
        with self._lock:
            self.counts.handles_destroyed += 1

    def repair(self, slot: Slot) -> None:
        """Make a slot's handle right again that its caller destroyed or bound elsewhere."""
        if slot.handle.backend_handle is None:
            with self._lock:
                self.counts.handles_destroyed += 1
            slot.handle = self.create_handle()
        with self.driver.relaxed():
            self.driver.bind_handle(slot.handle, slot.pointer)
        with self._lock:
            self.counts.handles_repaired += 1

    # Idle slots

    def take_idle(self) -> Slot | None:
        """The slot that was given back last, or None."""
        while True:
            try:
                slot = self.idle.pop()
            except IndexError:
                return None
            if slot.handle.backend_handle is not None:
                with self._lock:
                    self.counts.handles_reused += 1
                return slot
            self._destroy(slot)  # its former owner had destroyed the handle

    def put_idle(self, slot: Slot) -> None:
        """Keep a slot for a later owner; the oldest beyond the idle limit is destroyed."""
        self.idle.append(slot)
        while len(self.idle) > self.idle_limit:
            try:
                self._destroy(self.idle.pop(0))
            except IndexError:
                return

    def _destroy(self, slot: Slot) -> None:
        slot.end()
        try:
            slot.release_scratch()
        finally:
            self.destroy_handle(slot.handle)

    def drop_idle(self) -> None:
        """Destroy every idle slot."""
        while self.idle:
            try:
                self._destroy(self.idle.pop())
            except IndexError:
                return

    # Between owners

    def acquire(self, reference: StreamReference) -> Slot:
        """A slot bound to a stream: the one that was given back last, or a new one."""
        idle = self.take_idle()
        slot = Slot(self.pool, self.driver, self.scratch, self.create_handle()) if idle is None else idle.successor()
        try:
            if idle is not None and slot.scratch_bytes and not self._order_after_previous(idle, reference):
                slot.release_scratch()
            with self.driver.relaxed():
                self.driver.bind_handle(slot.handle, reference.pointer)
        except BaseException:
            self.put_idle(slot if idle is None else idle)
            raise
        slot.key = reference.key
        slot.begin(reference.pointer)
        self._count_live(+1)
        return slot

    def _order_after_previous(self, idle: Slot, reference: StreamReference) -> bool:
        """Order a reused slot's new stream after its last one, so that the scratch may go with it; False where that cannot be.

        A destroyed stream may still be running, a per-thread stream was another thread's, and no edge may cross into or out of a
        capture. Nor may one touch the legacy stream: that would end the capture of any blocking stream, in whatever thread.
        """
        old = idle.watch() if idle.watch is not None else None
        if old is None or idle.pointer == PER_THREAD_STREAM:
            return False
        if old is reference.stream:
            return True
        driver = self.driver
        pointers = (idle.pointer, reference.pointer)
        if LEGACY_STREAM in pointers or any(driver.capture_id(pointer) for pointer in pointers):
            return False
        with driver.relaxed():
            event = driver.create_event()
            driver.record_event(event, idle.pointer)
            driver.wait_event(reference.pointer, event)
            driver.destroy_event(event)
        return True

    def take_in(self, slot: Slot) -> None:
        """Make a slot idle that its owner has left."""
        self._count_live(-1)
        stream = slot.watch() if slot.watch is not None else None
        try:
            if stream is None or slot.pointer == PER_THREAD_STREAM:
                slot.release_scratch()
            else:
                slot.forget_capture()
        finally:
            self.put_idle(slot)

    def _count_live(self, change: int) -> None:
        with self._lock:
            self.live += change

    def empty(self) -> None:
        """Destroy what nobody owns: idle slots, free side slots, and blocks that were replaced."""
        self.sides.end_quarantine()
        self.drop_idle()
        self.sides.drop_free()
        self.scratch.collect(wait=True)

    def close(self) -> None:
        """`empty`, and the handle that graphs were built with."""
        self.empty()
        builder, self.builder = self.builder, None
        if builder is not None:
            self.destroy_handle(builder)

    # Accounts

    def reclaim_scratch(self) -> None:
        """Give back the scratch of idle and free side slots, and what waits for its stream."""
        self._drain()
        self.scratch.collect(wait=True)
        for slots in (self.idle, self.sides.free):
            held = []
            while slots:
                try:
                    held.append(slots.pop())
                except IndexError:
                    break
            try:
                for slot in held:
                    slot.release_scratch()
            finally:
                slots.extend(reversed(held))

    def snapshot(self) -> dict[str, int]:
        """Counters by flat name."""
        free, held = len(self.sides.free), len(self.sides.quarantine)
        return self.counts.as_dict() | {
            "handles_live": self.live,
            "handles_idle": len(self.idle) + free,
            "handles_leased": self.sides.made - free - held,
            "handles_captured": held,
            "handles_building": int(self.builder is not None),
            "scratch_bytes": self.scratch.nbytes,
            "scratch_bytes_peak": self.scratch.peak,
        }

    def describe(self) -> str:
        """What is held, in words."""
        now = self.snapshot()
        return (
            f"{now['handles_live']} live, {now['handles_idle']} idle, {now['handles_leased']} leased handles, "
            f"{now['scratch_bytes']:,} bytes of scratch"
        )
