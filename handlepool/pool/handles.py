"""The handles of one device: made, counted and destroyed, whoever has them meanwhile."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from handlepool._util.cleanup import do_all, take_each
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.errors import OutOfMemoryError
from handlepool.pool.deferred import deferred
from handlepool.pool.status import Status

# NVIDIA recommends one synchronous cudnnCreate before any that may run beside another (guarantee 14). The lock is the
# process's, not a pool's, and is held for every create: the binding holds the GIL through the call in any case.
_create_lock = threading.RLock()

_log = logging.getLogger("handlepool")


COUNTED = (
    "handles_created",
    "handles_destroyed",
    "handles_live",
    "handles_peak",
    "handles_reused",
    "handles_rebound",
    "handles_repaired",
    "create_microseconds",
)


class DeviceHandles:
    """The handles of one device. Its methods are called with that device current.

    Parameters
    ----------
    status : Status
        Of the pool whose handles they are.
    driver : Driver
        Where handles come from.
    device : int
        Ordinal.
    make_room : callable
        Destroys what is idle on the device, where it is short of memory.
    describe : callable
        What the pool holds there, in words.

    Attributes
    ----------
    counts : dict of int
        By the names that `handlepool.pool.stats.MEANINGS` explains.
    builder : cudnn.Handle or None
        The handle that graphs are built with.
    build_lock : RLock
        Held by the thread that uses it (guarantee 1). A finaliser that the collector runs in between may build, too: the binding
        has returned by then.
    builds : int
        How many builds are under way, in the thread that holds the lock.
    doomed : list of cudnn.Handle
        Those that nobody has and that could not be destroyed; `destroy_doomed` tries again.
    """

    def __init__(
        self, status: Status, driver: Driver, device: int, make_room: Callable[[], None], describe: Callable[[], str]
    ) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.builder: Handle | None = None
        self.build_lock = threading.RLock()
        self.builds = 0
        self.doomed: list[Handle] = []
        self._status = status
        self._driver = driver
        self._device = device
        self._make_room = make_room
        self._describe = describe
        self._lock = threading.RLock()  # guards `counts`; no call is made under it

    def count(self, **changes: int) -> None:
        """Change counts, all of them at once for other threads."""
        with self._lock:
            counts = self.counts
            for name, change in changes.items():
                counts[name] += change
            if "handles_created" in changes:
                counts["handles_peak"] = max(counts["handles_peak"], counts["handles_created"] - counts["handles_destroyed"])

    def create(self, *, forgotten: bool = True) -> Handle:
        """Create a handle; when that fails, destroy what is idle, try once more, then say what is short (guarantee 12).

        With ``forgotten`` also what nobody left or closed; without it where a lock is held, see `Deferred.run_all`.
        """
        if self.doomed:  # or there would be one more than the high-water mark allows
            try:
                self.destroy_doomed()
            except Exception as error:
                _log.debug("device %d: a handle can still not be destroyed (%s)", self._device, error)
        try:
            return self._create()
        except Exception as error:
            self._status.diagnose(error)
            _log.debug("device %d: no handle could be created (%s); what is idle is destroyed", self._device, error)
            if forgotten:
                deferred.run_all()
            self._make_room()
            with self._driver.relaxed():
                self._driver.release_cached()
        try:
            return self._create()
        except Exception as error:
            with self._driver.relaxed():
                free, total = self._driver.memory_info()
            raise OutOfMemoryError(
                f"no cuDNN handle could be created on device {self._device} ({error}): {free:,} of {total:,} bytes are free, "
                f"the pool holds {self._describe()}. A handle takes 8 to 10 MiB; free arrays, or close forks and threads"
                f"{self._driver.memory_advice}"
            ) from error

    def _create(self) -> Handle:
        with _create_lock, self._driver.relaxed():
            start = time.perf_counter_ns()
            handle = self._driver.create_handle()
            took = time.perf_counter_ns() - start
        self.count(handles_created=1, create_microseconds=took // 1000)
        _log.debug("device %d: handle created in %d microseconds", self._device, took // 1000)
        return handle

    def destroy(self, handle: Handle) -> None:
        """Destroy a handle that no slot has any more; where that fails, `destroy_doomed` tries again."""
        try:
            with self._driver.relaxed():
                self._driver.destroy_handle(handle)
        except BaseException:
            self.doomed.append(handle)
            raise
        self.count(handles_destroyed=1)
        _log.debug("device %d: handle destroyed", self._device)

    def destroy_doomed(self) -> None:
        """Destroy the handles that could not be destroyed before."""
        do_all(partial(self.destroy, handle) for handle in take_each(self.doomed))

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build alone: until the end no handle of the device is taken from this thread by a `close`."""
        # Two parts: CPython 3.11 leaves the line of a `try` inside a `with` out of the block that releases the lock.
        with self.build_lock, self._counted():
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.builds += 1
        try:
            yield
        finally:
            self.builds -= 1

    @contextmanager
    def no_build(self) -> Iterator[bool]:
        """Say whether no build is under way, and keep it so. This waits for none, and sees one of this thread, too."""
        free = self.build_lock.acquire(blocking=False)
        try:
            yield free and not self.builds
        finally:
            if free:
                self.build_lock.release()

    def for_building(self) -> Handle:
        """Return the handle that graphs are built with, with `build_lock` held. It lives as long as plans do: they keep it."""
        if self.builder is None:
            self._status.check()  # `close` says so first and takes the lock then, so that one of us sees it
            made = self.create(forgotten=False)  # whoever builds has settled before
            self.builder = made if self.builder is None else self.builder
            if self.builder is not made:  # a finaliser that the collector ran meanwhile has built, too
                self.destroy(made)
        return self.builder

    def defer_builder(self) -> None:
        """Let `destroy_doomed` destroy the handle that graphs were built with; inside `no_build`."""
        builder, self.builder = self.builder, None
        if builder is not None:
            self.doomed.append(builder)


def _after_fork() -> None:
    global _create_lock
    _create_lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
