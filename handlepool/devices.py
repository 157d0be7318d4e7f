"""What a pool has on one device: idle slots, side slots, scratch, and the handle that graphs are built with."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from handlepool.cleanup import do_all, take_each
from handlepool.condition import diagnose
from handlepool.drivers.base import PER_THREAD_STREAM, Driver
from handlepool.drivers.objects import Handle
from handlepool.errors import OutOfMemoryError
from handlepool.events import Events
from handlepool.regions import parked
from handlepool.sides import SideSlots
from handlepool.slots import Slot
from handlepool.streams import StreamReference
from handlepool.workspace import DeviceScratch

# NVIDIA recommends one synchronous cudnnCreate before any that may run beside another (guarantee 14). The lock is the
# process's, not a pool's, and is held for every create: the binding holds the GIL through the call in any case.
_create_lock = threading.RLock()

_log = logging.getLogger("handlepool")


@dataclass(slots=True)
class Counts:
    """What happened to handles so far."""

    handles_created: int = 0
    handles_destroyed: int = 0
    handles_peak: int = 0
    handles_reused: int = 0
    handles_rebound: int = 0
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
        self.edges = Events(driver)  # between streams that no fork orders
        self.sides = SideSlots(pool, driver, self.scratch, self.make_slot, self.destroy_handle, drain)
        self.doomed: list[Handle] = []  # that nobody has, and that could not be destroyed; `empty` tries again
        self.live = 0
        self.builder: Handle | None = None
        # The builder handle is used by one thread at a time (guarantee 1). A finaliser that the collector runs in between may
        # build, too: the binding has returned by then.
        self.build_lock = threading.RLock()
        self._drain = drain
        self._lock = threading.RLock()  # guards counts and live; no call is made under it

    # Handles

    def create_handle(self) -> Handle:
        """Create a handle; when that fails, give back what is idle, try once more, then say what is short (guarantee 12)."""
        if self.doomed:  # or there would be one more than the high-water mark allows
            try:
                self.drop_doomed()
            except Exception as error:
                _log.debug("device %d: a handle can still not be destroyed (%s)", self.device, error)
        try:
            return self._create_handle()
        except Exception as error:
            diagnose(self.pool, error)
            _log.debug("device %d: no handle could be created (%s); what is idle is given back", self.device, error)
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
            counts = self.counts
            counts.handles_created += 1
            counts.handles_peak = max(counts.handles_peak, counts.handles_created - counts.handles_destroyed)
            counts.create_microseconds += took // 1000
        _log.debug("device %d: handle created in %d microseconds", self.device, took // 1000)
        return handle

    def builder_handle(self) -> Handle:
        """The handle that graphs are built with; called with `build_lock` held. It lives as long as plans do: they keep it."""
        if self.builder is None:
            self.pool._check_usable()  # `close` says so first and takes the lock then, so that one of us sees it
            made = self.create_handle()
            self.builder = made if self.builder is None else self.builder
            if self.builder is not made:  # a finaliser that the collector ran meanwhile has built, too
                self.destroy_handle(made)
        return self.builder

    def destroy_handle(self, handle: Handle) -> None:
        """Destroy a handle that no slot has any more; where that fails, `empty` tries again."""
        try:
            with self.driver.relaxed():
                self.driver.destroy_handle(handle)
        except BaseException:
            self.doomed.append(handle)
            raise
        with self._lock:
            self.counts.handles_destroyed += 1
        _log.debug("device %d: handle destroyed", self.device)

    def make_slot(self) -> Slot:
        """A new slot, with a new handle, that is bound to no stream yet."""
        handle = self.create_handle()
        try:
            slot: Slot = self.pool.slot_type(self.pool, self.driver, self.scratch, handle)
        except BaseException:
            self.destroy_handle(handle)
            raise
        return slot

    def repair(self, slot: Slot) -> None:
        """Make a slot's handle right again that its caller destroyed or bound elsewhere."""
        if not slot.intact:
            with self._lock:
                self.counts.handles_destroyed += 1  # by its caller
            try:
                slot.replace_handle(self.create_handle())
            except BaseException:
                with self._lock:
                    self.counts.handles_destroyed -= 1  # to be counted at the next try
                raise
        with self.driver.relaxed():
            self.driver.bind_handle(slot.handle, slot.pointer)
        with self._lock:
            self.counts.handles_repaired += 1
            self.counts.handles_rebound += 1
        _log.debug("device %d: handle repaired and bound to stream %#x", self.device, slot.pointer)

    # Idle slots

    def take_idle(self) -> Slot | None:
        """The slot that was given back last, or None."""
        while True:
            try:
                slot = self.idle.pop()
            except IndexError:
                return None
            if slot.intact:
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
        do_all([slot.release_scratch, partial(self.destroy_handle, slot.handle)])

    def drop_idle(self) -> None:
        """Destroy every idle slot."""
        do_all(partial(self._destroy, slot) for slot in take_each(self.idle))

    def drop_doomed(self) -> None:
        """Destroy the handles that could not be destroyed before."""
        do_all(partial(self.destroy_handle, handle) for handle in take_each(self.doomed))

    # Between owners

    def acquire(self, reference: StreamReference) -> Slot:
        """A slot bound to a stream: the one that was given back last, or a new one."""
        idle = self.take_idle()
        slot = kept = self.make_slot() if idle is None else idle
        try:
            if idle is not None:
                slot = idle.successor()
                if slot.scratch_bytes and not _is_still_on(idle, reference):
                    slot.release_scratch()
            with self.driver.relaxed():
                self.driver.bind_handle(slot.handle, reference.pointer)
        except BaseException:
            self.put_idle(kept)
            raise
        slot.key = reference.key
        slot.begin(reference.pointer)
        with self._lock:
            self.live += 1
            self.counts.handles_rebound += idle is not None
        _log.debug("device %d: %s handle bound to stream %#x", self.device, "new" if idle is None else "reused", slot.pointer)
        return slot

    def take_in(self, slot: Slot) -> None:
        """Make a slot idle that its owner has left."""
        self._count_live(-1)
        stream = slot.watch() if slot.watch is not None else None
        try:
            if stream is None or slot.pointer == PER_THREAD_STREAM:
                slot.release_scratch()
            else:
                slot.forget_capture(over=False)  # its thread has ended, and may have left the capture to another
        finally:
            self.put_idle(slot)

    def _count_live(self, change: int) -> None:
        with self._lock:
            self.live += change

    def empty(self) -> None:
        """Destroy what nobody owns: idle slots, free side slots, and blocks that were replaced."""
        collect = partial(self.scratch.collect, wait=True)
        do_all([self.sides.end_quarantine, self.drop_doomed, self.drop_idle, self.sides.drop_free, collect])

    def close(self) -> None:
        """Destroy all; what captures under way have, once they end."""
        try:
            self._end()
        finally:
            if not self.edges._settle():
                parked.append(self.edges)
            self.settle_later()

    def _end(self) -> None:
        """Do as `empty`, and destroy the handle that graphs were built with."""
        with self.build_lock:
            builder, self.builder = self.builder, None
        if builder is not None:
            self.doomed.append(builder)
        self.empty()

    def settle_later(self) -> None:
        """Have what is left of a closed pool destroyed when that can be."""
        if not self.is_empty() and self not in parked:
            parked.append(self)

    def is_empty(self) -> bool:
        """Whether nothing is left that nobody owns."""
        sides = self.sides
        return not (sides.quarantine or sides.free or self.idle or self.doomed or self.builder or self.scratch.retired)

    def _settle(self) -> bool:
        """After the pool was closed: destroy what captures had that have ended since, and what could not be destroyed before."""
        try:
            with self.pool.on_device(self.device):
                self._end()
        except Exception:
            pass
        return self.is_empty()

    # Accounts

    def reclaim_scratch(self) -> None:
        """Give back the scratch of idle and free side slots, and what waits for its stream."""
        self._drain()
        self.scratch.collect(wait=True)
        for slots in (self.idle, self.sides.free):
            held: list[Slot] = []
            try:
                held.extend(take_each(slots))
                do_all([slot.release_scratch for slot in held])
            finally:
                slots[:0] = held

    def snapshot(self) -> dict[str, int]:
        """Counters by flat name."""
        free, held = len(self.sides.free), len(self.sides.quarantine)
        return self.counts.as_dict() | {
            "handles_live": self.live,
            "handles_idle": len(self.idle) + len(self.doomed) + free,
            "handles_leased": self.sides.made - free - held,
            "handles_captured": held,
            "handles_building": int(self.builder is not None),
            "scratch_bytes": self.scratch.nbytes,
            "scratch_bytes_captured": self.scratch.captured_nbytes,
            "scratch_bytes_recorded": self.scratch.recorded_nbytes,
            "scratch_bytes_peak": self.scratch.peak,
            "captures_met": self.scratch.captures_met,
        }

    def describe(self) -> str:
        """What is held, in words."""
        now = self.snapshot()
        return (
            f"{now['handles_live']} live, {now['handles_idle']} idle, {now['handles_leased']} leased handles, "
            f"{now['scratch_bytes']:,} bytes of scratch"
        )


def _is_still_on(idle: Slot, reference: StreamReference) -> bool:
    """Whether a slot's last stream is the very stream that it is to be bound to, so that the scratch may go with it.

    To another one it could go after an edge between the two. But that means a call with the last stream, and nobody knows whether
    there still is one: a weak reference answers until the stream's destructor has returned, which destroys it first.
    """
    if idle.watch is None or idle.pointer == PER_THREAD_STREAM:  # each thread's is another
        return False
    return reference.stream is not None and idle.watch() is reference.stream
