"""Hold the library's part of a pool: status, slots, devices and plans.

Slots are found by (thread, device, stream). `HandlePool` is the public class, and its attribute `internals` refers to the class
here. Nothing in this module is public.

The promises of a pool, and their foundations:

- A hit takes no lock. The slot of a CuPy-owned stream lives on the stream object, in a thread-local attribute. So neither
  another thread nor another stream can find it. Three comparisons show whether the slot is still valid. ``slot.owner is
  status`` fails for a slot that was released or belongs to another pool. ``handle.stream is slot.pointer`` fails for a handle
  that its caller destroyed (its stream is None then) or bound elsewhere. ``slot.device == device`` fails for a default stream
  on another device, because one object stands for the default streams of all devices. A hit makes one call to CUDA: it asks for
  the device, and passes the device on to CuPy's `get_current_stream`. (Guarantees 1, 2, 3, 4.)
- At the end of a thread, the destructor of a thread-local object leaves the thread's slots behind. At the end of a stream, a
  weak reference's callback does so with the stream's slots. To leave a slot behind is an append to a deque, which is atomic and
  calls nothing. So it is safe in a destructor, in the collector while this thread holds a lock, and after the interpreter has
  begun to exit. The next miss, fork or `trim` takes the slots in.
- A lock is held only for changes of lists and counts, never across a driver call or user code. Locks are reentrant, because the
  collector may run a user's finalizer under a lock, and the finalizer may call `trim`.
"""

import logging
import os
import threading
from collections.abc import Callable
from functools import cached_property, partial

from handlepool import drivers
from handlepool._util.cleanup import do_all
from handlepool.drivers.protocol import Driver
from handlepool.pool.checks import CheckedDriver, CheckedSlot
from handlepool.pool.context import on_device
from handlepool.pool.deferred import deferred
from handlepool.pool.device import DeviceSlots
from handlepool.pool.plan_cache import CachedPlan, PlanCache
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.pool.process_end import process_end as process_end
from handlepool.pool.slot import Slot, clear_stream, hits, put_on_stream, slot_on_stream
from handlepool.pool.stats import MEANINGS, Stats
from handlepool.pool.status import Status, live_pools
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.pool.thread_slots import LiveSlots

_log = logging.getLogger("handlepool")


class PoolInternals:
    """The library's part of a pool.

    Parameters
    ----------
    choice : str, Driver or None
        The argument ``driver`` of `HandlePool`.
    scratch_limit, idle_limit, plan_limit, checked, strict
        As in `HandlePool`.

    Attributes
    ----------
    status : Status
        Knows whether the pool can be used.
    plans : PlanCache
        The compiled graphs of graph functions.
    plan_files : PlanDirectory or None
        The directory that keeps plans for later processes.
    devices : dict of DeviceSlots
        The pool's resources by device ordinal. `device` adds a missing entry.
    is_default : bool
        Whether the pool is known to be the default pool.
    is_shared : bool
        Whether libraries share the pool. This holds for the default pool that `default_pool` made, and for its substitutes.
        `close` only trims a shared pool.
    get_handle, slot : callable
        Return this thread's handle, or its slot, for a stream. The argument is as in `HandlePool.get_handle`.
    current_device : callable
        Does the same as `Driver.current_device`, without a call to CUDA on a machine with one device.
    """

    def __init__(
        self,
        choice: str | Driver | None,
        scratch_limit: int | None,
        idle_limit: int,
        plan_limit: int,
        checked: bool,
        strict: bool,
        plan_files: PlanDirectory | None = None,
    ) -> None:
        self.is_default = False
        self.is_shared = False
        self.checked = checked
        self.plans: PlanCache[CachedPlan] = PlanCache(plan_limit)
        self.plan_files = plan_files
        self.status = Status(self._end_hits, loaded=not (choice is None or isinstance(choice, str)))
        self.current_device: Callable[[], int] = lambda: self.driver.current_device()
        self._choice = choice
        self._strict = strict
        self._scratch_limit = scratch_limit
        self._idle_limit = idle_limit
        self.devices: dict[int, DeviceSlots] = {}
        self._live = LiveSlots()
        self._new_slot = partial(CheckedSlot if checked else Slot, self.status)
        self.get_handle, self.slot, self._use = hits(self.missed)
        live_pools.add(self)

    # Misses

    def missed(self, stream: object = None) -> Slot:
        """Return this thread's slot for a stream after a hit failed."""
        status = self.status
        if status.unusable:
            self._destroy_closed()
            status.check()
        try:
            return self._find(self.driver, stream)
        except Exception as error:
            status.diagnose(error)
            raise

    def _find(self, driver: Driver, stream: object) -> Slot:
        reference = resolve(driver, stream)
        if reference.stream is not None:
            here = slot_on_stream(reference.stream)
            if here is not None and here.owner is self.status and here.device == reference.device:
                return self.repaired(here)
        mine = self._live.of_this_thread()
        known = mine.slots.get(reference.key)
        if known is not None and known.owner is not None and self._is_of(known, reference):
            if reference.stream is None:
                mine.touch(reference.key)
            else:
                put_on_stream(reference.stream, known)
            return self.repaired(known)
        return self._acquire(reference)

    @staticmethod
    def _is_of(slot: Slot, reference: StreamReference) -> bool:
        return reference.stream is None or (slot.watch is not None and slot.watch() is reference.stream)

    def repaired(self, slot: Slot) -> Slot:
        """Return a slot after repairing its handle if necessary.

        A handle needs repair if its caller destroyed it or bound it elsewhere.
        """
        if slot.handle.stream is not slot.pointer:
            self.devices[slot.device].repair(slot)
        return slot

    def _acquire(self, reference: StreamReference) -> Slot:
        check_foreign(self.driver, reference)
        device = self.device(reference.device)
        if deferred:
            deferred.run()
        self.release_left()
        slot = device.acquire(reference)
        self._live.add(slot, reference.stream)
        # `close()` sets `closed` before it takes in all slots. So either `close()` takes in this slot, or this thread sees
        # `closed` and cleans up.
        if self.status.closed:
            self._live.defer(slot)
            self.release_left()
            device.destroy_idle()
            self.status.check()
        if reference.stream is not None:
            put_on_stream(reference.stream, slot)
        return slot

    # Taking back

    def release_left(self) -> None:
        """Take in the slots that threads and streams have left behind."""
        do_all(partial(self._release, slot) for slot in self._live.left_behind())
        here = self.devices.get(self.driver.current_device()) if self.devices else None
        if here is not None:
            here.scratch.free_passed()

    def _release(self, slot: Slot) -> None:
        try:
            device = on_device(self.driver, slot.device)
        except BaseException:
            self._live.defer_again(slot)
            raise
        with device:
            self.devices[slot.device].release(slot)

    def trim(self, *, captured: bool = False) -> None:
        """Do the work of `HandlePool.trim`."""
        self.status.check()
        self.status.diagnose(None)
        deferred.run_all()
        self.release_left()
        before = self.stats()
        for device in list(self.devices.values()):
            with on_device(self.driver, device.device):
                if captured:
                    device.scratch.free_captured(self._live.defer)
                    self.release_left()
                device.empty()
        _log.debug("trimmed: %s", {name: change for name, change in (self.stats() - before).items() if change})

    def trim_if_usable(self) -> None:
        """Trim the pool if it can still be used."""
        if not self.status.unusable and self.status.lost(None) is None:
            self.trim()

    def close(self) -> None:
        """Do the work of `HandlePool.close`."""
        status = self.status
        if status.forked:
            return
        if self.is_shared:
            self.trim_if_usable()
            return
        if not (status.closed and self._live.is_empty() and all(map(DeviceSlots.is_empty, self.devices.values()))):
            status.close()
            if status.poison is not None or status.lost(None) is not None:
                # The context is lost, so nothing can be destroyed, and an attempt would make CuPy's destructors print errors.
                # The process has to end anyway.
                return
            self.plans.clear()
            for slot in self._live.take_all():
                self.devices[slot.device].owned.append(slot)
                if slot.watch is not None and (stream := slot.watch()) is not None:
                    clear_stream(stream)
            devices = [partial(self._close_device, device) for device in list(self.devices.values())]
            do_all([deferred.run_all, self.release_left, *devices])
        if isinstance(status.driver, CheckedDriver):
            status.driver.close()
        live_pools.discard(self)

    def _destroy_closed(self) -> None:
        """Destroy resources of a closed pool that `close` left in use.

        `close` does not destroy the resources of a launch under way. If this thread was inside that launch,
        the launch has ended by now.
        """
        if self.status.closed and not self.status.untouchable:
            for device in list(self.devices.values()):
                if not device.is_empty():
                    device.destroy_rest()

    def _close_device(self, device: DeviceSlots) -> None:
        with on_device(self.driver, device.device):
            device.close()

    def _end_hits(self) -> None:
        for device in list(self.devices.values()):
            for slot in list(device.slots):
                slot.end()

    # Parts

    @cached_property
    def driver(self) -> Driver:
        """Return the driver; load it on the first use."""
        self.status.check()
        choice = self._choice
        driver = drivers.load(choice, strict=self._strict) if choice is None or isinstance(choice, str) else choice
        if self.checked:
            driver = CheckedDriver(driver)
        self.status.driver = driver
        # A single device has the ordinal 0. `int()` returns 0 in half the time of a call to CUDA.
        self.current_device = int if driver.device_count() == 1 else driver.current_device
        self._use(driver.current_stream, self.status, self.current_device)
        return driver

    def device(self, ordinal: int) -> DeviceSlots:
        """Return the pool's resources on a device."""
        device = self.devices.get(ordinal)
        if device is None:
            made = DeviceSlots(
                self.status, self.driver, ordinal, self._scratch_limit, self._idle_limit, self._new_slot, self.release_left
            )
            # Another thread or a finalizer may have added the device meanwhile. `setdefault` is one atomic step, so all get the
            # same object. A losing duplicate owns no resources yet.
            device = self.devices.setdefault(ordinal, made)
        return device

    # Accounts

    def slots_of_other_threads(self) -> int:
        """Count the slots that threads other than the calling thread own."""
        return self._live.of_other_threads()

    def stats(self, device: int | None = None) -> Stats:
        """Do the work of `HandlePool.stats`."""
        total = Stats(dict.fromkeys(MEANINGS, 0))
        for ordinal in list(self.devices) if device is None else [device]:
            slots = self.devices.get(ordinal)
            for name, value in ({} if slots is None else slots.snapshot() | self.plans.snapshot(ordinal)).items():
                total[name] += value
        total.update({} if self.plan_files is None else self.plan_files.counts())
        return total

    def __repr__(self) -> str:
        name = self.status.driver_name
        if self.status.closed:
            return f"<HandlePool {name}, closed>"
        held = "; ".join(f"device {ordinal}: {slots.describe()}" for ordinal, slots in sorted(self.devices.items()))
        return f"<HandlePool {name}{', ' if held else ''}{held}>"


def _after_fork() -> None:
    """Let a forked child load drivers.

    Before Python 3.12, a `cached_property` has one lock for all objects of the class. A thread of the parent that was loading a
    driver may have held this lock during the fork, so the child replaces the lock.
    """
    loading = vars(PoolInternals)["driver"]
    if hasattr(loading, "lock"):
        loading.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
