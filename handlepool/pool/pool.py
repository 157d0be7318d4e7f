"""The pool: (thread, device, stream) to slot.

What it promises, and what the promise rests on:

- A hit takes no lock. The slot of a CuPy-owned stream lives on the stream object, in a thread-local attribute, so it can be met
  by neither another thread nor another stream. The slot says itself whether it is still good: `owner` is None after it was given
  back, and ``handle.stream is slot.pointer`` fails for a handle that its caller destroyed (its stream is None then) or bound
  elsewhere. The device is asked for first and handed to CuPy's `get_current_stream`, which would ask for it on its own: one CUDA
  call a hit, also for the default streams, whose one object stands for a stream of each device. (Guarantees 1, 2, 3, 4.)
- A thread's slots hang on a thread-local object whose end parks them; a stream's end parks its slots through a weak reference's
  callback. Parking is one append to a deque, which is atomic and calls nothing, so it may happen in a destructor, in the
  collector while this thread holds a lock, or after the interpreter has begun to exit. The next miss, fork or `trim` takes the
  parked in.
- A lock is held for list and count changes alone, never across a driver call or user code. It may be taken again by the thread
  that holds it: a finaliser of the user's that the collector runs just then may call `trim`.
"""

import itertools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from handlepool import drivers
from handlepool._util import at_least, do_all, flag, shown
from handlepool.drivers.protocol import Driver, Handle
from handlepool.errors import ArgumentError
from handlepool.pool import status
from handlepool.pool.checks import CheckedDriver, CheckedSlot
from handlepool.pool.deferred import parked, settle, settle_all
from handlepool.pool.device import DeviceSlots
from handlepool.pool.plan_cache import PlanCache
from handlepool.pool.slot import Slot, hits, place, placed, unplace
from handlepool.pool.stats import MEANINGS, Stats
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.pool.thread_slots import LiveSlots

CHECK_VARIABLE = "HANDLEPOOL_CHECK"
_OFF = ("", "0", "off", "no", "false")

_log = logging.getLogger("handlepool")
_numbers = itertools.count()


class HandlePool:
    """cuDNN handles and workspaces for each (thread, device, stream), made when first asked for.

    Parameters
    ----------
    driver : {"cuda", "host"} or Driver, optional
        As `handlepool.drivers.choose` decides where none is given. Loaded at the first use, not here.
    scratch_limit : int, optional
        Most bytes of scratch on each device, all slots together.
    idle_limit : int
        Most handles of one device that are kept, beside the side slots', for threads and streams to come.
    plan_limit : int
        Most compiled graphs of one device that are kept.
    check : bool, optional
        Whether to check what cuDNN and CuPy leave unchecked: that a handle is used by the thread that owns it, a workspace on its
        own stream, and ``cupy.fft`` and ``cupy.random`` not in concurrent branches. Where it is not given, the environment
        variable ``HANDLEPOOL_CHECK`` decides: unset, ``0``, ``off``, ``no`` and ``false`` are off. Calls cost more with checks,
        and nothing more without.

    Notes
    -----
    A pool lives until `close`, or to the end of a ``with`` statement over it. Losing the last reference to it closes nothing:
    destroying handles calls CUDA, which must not happen whenever the collector likes.
    """

    def __init__(
        self,
        *,
        driver: str | Driver | None = None,
        scratch_limit: int | None = None,
        idle_limit: int = 32,
        plan_limit: int = 512,
        check: bool | None = None,
    ) -> None:
        self.is_default = False  # known to be
        self.everybodys = False  # nobody's own: the default pool that was made when first asked for, which is never over
        made = hasattr(type(driver), "current_device")
        if not (driver is None or isinstance(driver, str) or made):
            raise ArgumentError(f"HandlePool(driver={shown(driver)}): pass 'cuda', 'host', a driver object, or None")
        self._choice = driver
        self._driver: Driver | None = None
        self._scratch_limit = None if scratch_limit is None else at_least(0, "scratch_limit", scratch_limit, " bytes")
        self._idle_limit = at_least(0, "idle_limit", idle_limit, " handles")
        self.checked = os.environ.get(CHECK_VARIABLE, "").lower() not in _OFF if check is None else flag("check", check)
        self.slot_type: type[Slot] = CheckedSlot if self.checked else Slot
        self.plans: PlanCache[Any] = PlanCache(at_least(1, "plan_limit", plan_limit, " plan"))
        self._devices: dict[int, DeviceSlots] = {}
        self._live = LiveSlots()
        self.unusable = False  # any of the next three
        self._closed = False
        self._forked = False
        self._poison: BaseException | None = None
        number = next(_numbers)
        self.attribute = f"_handlepool_{number}" if number else "_handlepool"
        self.current_device: Callable[[], int] = lambda: self.driver.current_device()
        self.get_handle, self.slot, self._use_driver = hits(self)  # type: ignore[method-assign]
        status.remember(self)

    # Hits

    def get_handle(self, stream: Any = None) -> Handle:
        """Return this thread's cuDNN handle for a stream of the current device.

        Parameters
        ----------
        stream : stream, optional
            None for CuPy's current stream; a CuPy stream, any object with ``__cuda_stream__`` (torch from 2.10 on, JAX,
            cuda.core), or a ``cudaStream_t`` as an integer. CuPy does not see torch's current stream: pass
            ``torch.cuda.current_stream()``.

        Returns
        -------
        cudnn.Handle
            Bound to the stream. It belongs to the calling thread and stays the pool's. Do not destroy it, and do not keep it for
            another thread or stream: ask again, which costs next to nothing.

        Raises
        ------
        DeviceMismatchError
            When the stream is one of another device than the current one.
        StreamError
            When it is no stream.
        PoolClosedError, ForkedProcessError, PoisonedContextError, OutOfMemoryError, DriverNotAvailableError
            As their names say; each message names the remedy.
        """
        return self.slot(stream).handle

    def get_workspace(self, nbytes: int, stream: Any = None) -> Any:
        """Return scratch memory for work on a stream of the current device.

        Parameters
        ----------
        nbytes : int
            0 is legal.
        stream : stream, optional
            As in `get_handle`.

        Returns
        -------
        array, shape (nbytes,), uint8
            The caller's until the next `get_workspace` of the same thread, device and stream; 256-byte aligned, never shared
            with another stream, nor with the scratch of our own launches. Contents are not kept.

        Raises
        ------
        ArgumentError
            For a size that is negative or no integer.
        OutOfMemoryError
            When neither the scratch limit nor the device allows it.
        """
        slot = self.slot(stream)
        try:
            return slot.workspace(nbytes)
        except Exception as error:
            status.diagnose(self, error)
            raise

    # Misses

    def slot(self, stream: Any = None) -> Slot:
        """Return this thread's slot for a stream: what `get_handle` and `get_workspace` take theirs from."""
        self._check_usable()
        try:
            return self._find(self.driver, stream)
        except Exception as error:
            status.diagnose(self, error)
            raise

    def _find(self, driver: Driver, stream: Any) -> Slot:
        reference = resolve(driver, stream)
        if reference.stream is not None:
            here = placed(self, reference.stream)
            if here is not None and here.owner is self and here.device == reference.device:
                return self.sound(here)
        mine = self._live.of_this_thread()
        known = mine.slots.get(reference.key)
        if known is not None and known.owner is self and self._is_of(known, reference):
            if reference.stream is None:
                mine.touch(reference.key)
            else:
                place(self, reference.stream, known)
            return self.sound(known)
        return self._acquire(reference)

    @staticmethod
    def _is_of(slot: Slot, reference: StreamReference) -> bool:
        return reference.stream is None or (slot.watch is not None and slot.watch() is reference.stream)

    def sound(self, slot: Slot) -> Slot:
        """Return a slot after making its handle right where its caller destroyed it or bound it elsewhere."""
        if slot.handle.stream is not slot.pointer:
            self._devices[slot.device].repair(slot)
        return slot

    def _acquire(self, reference: StreamReference) -> Slot:
        check_foreign(self.driver, reference)
        device = self.device(reference.device)
        if parked:
            settle()
        self.drain()
        slot = device.acquire(reference)
        self._live.add(slot, reference.stream)
        if self._closed:  # in this order: `close` says so first and takes all in then, so that one of us sees it
            self.park(slot)
            self.drain()
            device.drop_idle()
            self._check_usable()
        if reference.stream is not None:
            place(self, reference.stream, slot)
        return slot

    # Taking back

    def park(self, slot: Slot) -> None:
        """Take a slot from its owner; the next miss, fork or `trim` takes it in."""
        self._live.park(slot)

    def drain(self) -> None:
        """Take in the slots that threads and streams have left behind."""
        do_all(partial(self._take_in, slot) for slot in self._live.left_behind())
        here = self._devices.get(self.driver.current_device()) if self._devices else None
        if here is not None:
            here.scratch.collect()

    def _take_in(self, slot: Slot) -> None:
        try:
            device = self.on_device(slot.device)
        except BaseException:
            self._live.put_back(slot)
            raise
        with device:
            self._devices[slot.device].take_in(slot)

    def prewarm(self, *, states: int = 0, workspace: int = 0, stream: Any = None) -> None:
        """Make what first calls would make: this key's handle and scratch, and side slots for forks.

        Parameters
        ----------
        states : int
            Side slots to have on the current device, each with a handle (8 to 10 MiB, 1.3 ms) and ``workspace`` bytes.
        workspace : int
            Bytes of scratch for the launches of each.
        stream : stream, optional
            As in `get_handle`.

        Raises
        ------
        ArgumentError
            For a count or a size that is negative or no integer.
        OutOfMemoryError
            When the memory for it is not there.
        """
        states = at_least(0, "prewarm: states", states)
        workspace = at_least(0, "prewarm: workspace", workspace, " bytes")
        own = self.slot(stream)
        own.reserve(workspace)
        self.device(own.device).sides.prewarm(states, workspace)

    def trim(self, *, captured: bool = False) -> None:
        """Destroy what is idle: handles and scratch that no thread, stream or fork has, and blocks that were replaced.

        It also ends what was dropped, of whatever pool: forks that nobody left, and programs that nobody closed and whose last
        replay has passed.

        Parameters
        ----------
        captured : bool
            Whether to free the scratch of CUDA graphs, too, that somebody else than handlepool captured. *A graph that is
            replayed afterwards writes into freed memory*, and nothing tells whether one still lives. So do this only when every
            graph that was captured with this pool's workspaces or graph functions is gone, or will not be replayed again.
            Captures that are not over are left alone. But on a bare pointer or another library's stream object nobody can ask
            for that: end such captures before. ``stats()["scratch_bytes_captured"]`` says what would be freed.

        Raises
        ------
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say.
        """
        self._check_usable()
        status.diagnose(self, None)
        settle_all()
        self.drain()
        before = self.stats()
        for device in list(self._devices.values()):
            with self.on_device(device.device):
                if captured:
                    device.scratch.free_captured()
                    self.drain()
                device.empty()
        _log.debug("trimmed: %s", {name: change for name, change in (self.stats() - before).items() if change})

    def give_back(self) -> None:
        """Do what `trim` does, and nothing where the pool cannot be used any more."""
        if not self.unusable and status.lost(self, None) is None:
            self.trim()

    def cache_clear(self) -> None:
        """Forget every compiled graph; those in use live on with their users."""
        self.plans.clear()

    def close(self) -> None:
        """Destroy every handle and free all scratch but what captures were given; later uses raise `PoolClosedError`.

        Handles that threads still hold are destroyed too, so close a pool when its users are done. It may be called again, by any
        thread. It then does what an earlier call could not do since the driver failed it, or nothing.

        The default pool that was made when first asked for is everybody's. It destroys what is idle, and stays usable.
        """
        if self._forked:
            return
        if self.everybodys:
            self.give_back()
            return
        if not (self._closed and self._live.is_empty() and all(map(DeviceSlots.is_empty, self._devices.values()))):
            self._closed = self.unusable = True
            if self._poison is not None or status.lost(self, None) is not None:
                return  # nothing can be given back, and trying would make CuPy's destructors complain; the process ends soon
            self.plans.clear()
            for slot in self._live.end_all():
                if slot.watch is not None and (stream := slot.watch()) is not None:
                    unplace(self, stream)
            do_all([settle_all, self.drain, *(partial(self._close_device, device) for device in list(self._devices.values()))])
        if isinstance(self._driver, CheckedDriver):
            self._driver.close()
        status.forget(self)

    def _close_device(self, device: DeviceSlots) -> None:
        with self.on_device(device.device):
            device.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied: two would own the same handles."""
        raise TypeError("a HandlePool owns handles, streams and memory and cannot be copied or pickled; make another one")

    def __enter__(self) -> "HandlePool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What the layers above stand on

    @property
    def driver(self) -> Driver:
        """The driver, loaded on first use."""
        driver = self._driver
        if driver is None:
            self._check_usable()
            choice = self._choice
            driver = drivers.load(choice) if choice is None or isinstance(choice, str) else choice
            if self.checked:
                driver = CheckedDriver(driver)
            self._driver = driver
            self._use_driver(driver)
        return driver

    def device(self, ordinal: int) -> DeviceSlots:
        """What the pool has on a device."""
        device = self._devices.get(ordinal)
        if device is None:
            made = DeviceSlots(self, self.driver, ordinal, self._scratch_limit, self._idle_limit, self.drain)
            # One atomic step, for threads and for a finaliser that comes while `made` is made; what is too many has nothing yet.
            device = self._devices.setdefault(ordinal, made)
        return device

    def on_device(self, ordinal: int) -> AbstractContextManager[Any]:
        """Make a device current where it is not."""
        return nullcontext() if self.driver.current_device() == ordinal else self.driver.device(ordinal)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _check_usable(self) -> None:
        if self.unusable:
            status.check_usable(self)

    # Accounts

    def stats(self, device: int | None = None) -> Stats:
        """Count what the pool holds and has done.

        Parameters
        ----------
        device : int, optional
            Ordinal; zeros where the device was not used. All devices together where none is given.

        Returns
        -------
        Stats
            A dictionary of counters by flat name, which `handlepool.pool.stats.MEANINGS` explains. Two can be subtracted.

        Raises
        ------
        ArgumentError
            For what is no ordinal.
        """
        chosen = list(self._devices) if device is None else [at_least(0, "stats: device", device)]
        total = Stats(dict.fromkeys(MEANINGS, 0))
        for ordinal in chosen:
            slots = self._devices.get(ordinal)
            for name, value in ({} if slots is None else slots.snapshot() | self.plans.snapshot(ordinal)).items():
                total[name] += value
        return total

    def __repr__(self) -> str:
        name = self._driver.name if self._driver is not None else "driver not loaded"
        if self._closed:
            return f"<HandlePool {name}, closed>"
        held = "; ".join(f"device {ordinal}: {slots.describe()}" for ordinal, slots in sorted(self._devices.items()))
        return f"<HandlePool {name}{', ' if held else ''}{held}>"
