"""Create, count and destroy the handles of one device, for any holder."""

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

# NVIDIA recommends that the first cudnnCreate of a process has returned before another begins (guarantee 14). So one lock for
# the whole process is held during each create. That costs nothing, because the binding holds the GIL through the call anyway.
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
    """The handles of one device.

    The caller makes that device current before each method call.

    Parameters
    ----------
    status : Status
        The status of the pool that owns the handles.
    driver : Driver
        The source of handles.
    device : int
        Ordinal.
    make_room : callable
        Destroys idle resources of the device when it is short of memory.
    describe : callable
        Returns the pool's holdings on the device, in words.

    Attributes
    ----------
    counts : dict of int
        Counters by name; `handlepool.pool.stats.MEANINGS` explains the names.
    builder : cudnn.Handle or None
        The handle that builds graphs.
    build_lock : RLock
        Held by the thread that uses `builder` (guarantee 1). The lock is reentrant. So a finalizer that the collector runs while
        this thread holds the lock may build too. cuDNN's binding is not inside a call at such a time.
    builds : int
        Number of builds under way, in the thread that holds the lock.
    doomed : list of cudnn.Handle
        Handles without an owner whose destruction failed. `destroy_doomed` tries again.
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
        # The lock guards `counts`. No driver is called under it.
        self._lock = threading.RLock()

    def count(self, **changes: int) -> None:
        """Add ``changes`` to `counts`, in one step for other threads."""
        with self._lock:
            counts = self.counts
            for name, change in changes.items():
                counts[name] += change
            if "handles_created" in changes:
                counts["handles_peak"] = max(counts["handles_peak"], counts["handles_created"] - counts["handles_destroyed"])

    def create(self, *, forgotten: bool = True) -> Handle:
        """Create a handle (guarantee 12).

        If the driver cannot create a handle, the method destroys idle resources and tries once more. With ``forgotten``, it
        also ends dropped forks and programs before the second try. Pass ``forgotten=False`` where a lock is held, see
        `Deferred.run_all`. The error of the second failure gives the free memory and the pool's holdings.
        """
        # A handle whose destruction failed still exists. So its destruction is tried again first, because otherwise the new
        # handle could raise the number of handles beyond the peak.
        if self.doomed:
            try:
                self.destroy_doomed()
            except Exception as error:
                _log.debug("device %d: a handle can still not be destroyed (%s)", self._device, error)
        try:
            return self._create()
        except Exception as error:
            self._status.diagnose(error)
            _log.debug("device %d: no handle could be created (%s); idle slots are destroyed", self._device, error)
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
                f"and the pool holds {self._describe()}. A handle takes 8 to 10 MiB: free arrays, leave forks or end threads"
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
        """Destroy a handle without a slot; on failure `destroy_doomed` tries again."""
        try:
            with self._driver.relaxed():
                self._driver.destroy_handle(handle)
        except BaseException:
            self.doomed.append(handle)
            raise
        self.count(handles_destroyed=1)
        _log.debug("device %d: handle destroyed", self._device)

    def destroy_doomed(self) -> None:
        """Destroy the handles whose destruction failed before."""
        do_all(partial(self.destroy, handle) for handle in take_each(self.doomed))

    @contextmanager
    def building(self) -> Iterator[None]:
        """Hold the right to build during a ``with`` statement.

        Meanwhile no other thread builds on the device, and no `close` takes a handle of the device from this thread.
        """
        # In CPython 3.11, an interrupt at the line of a `try` inside a `with` would not release the lock of the `with`. So the
        # `try` is in a method of its own, `_counted`.
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
        """Yield whether no build is under way, and keep builds from beginning.

        The method does not wait for a build. It also detects a build of the calling thread.
        """
        free = self.build_lock.acquire(blocking=False)
        try:
            yield free and not self.builds
        finally:
            if free:
                self.build_lock.release()

    def for_building(self) -> Handle:
        """Return the handle that builds graphs, with `build_lock` held.

        The plans that the handle built keep it alive.
        """
        if self.builder is None:
            # `close()` sets `closed` before it takes the lock. So either this thread sees `closed`, or `close()` sees the
            # handle made here.
            self._status.check()
            # The build lock is held here, so deferred steps must not run.
            made = self.create(forgotten=False)
            self.builder = made if self.builder is None else self.builder
            # If a finalizer that the collector ran meanwhile has made the builder, that handle stays, and this handle is
            # destroyed.
            if self.builder is not made:
                self.destroy(made)
        return self.builder

    def defer_builder(self) -> None:
        """Let `destroy_doomed` destroy the building handle; call inside `no_build`."""
        builder, self.builder = self.builder, None
        if builder is not None:
            self.doomed.append(builder)


def _after_fork() -> None:
    global _create_lock
    # Another thread of the parent may have held the lock, and cannot release it in the child.
    _create_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
