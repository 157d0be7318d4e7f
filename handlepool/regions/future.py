"""Tasks: what a submitted call needs on the GPU, from the event that it starts after to the one that others wait for; futures."""

import threading
from collections.abc import Generator
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Generic, TypeVar

from handlepool.drivers.event_pool import Events
from handlepool.drivers.streams import LEGACY_STREAM, Stream
from handlepool.errors import CaptureError
from handlepool.pool.context import on_device, thread
from handlepool.pool.device import DeviceSlots
from handlepool.regions.memory import Region, branch_regions

T = TypeVar("T")


class Task:
    """Where a submitted call starts, where it ends, and what stays alive until then.

    Parameters
    ----------
    device : DeviceSlots
        The current device's.
    stream : Stream
        The submitter's, which the task starts after; kept, since nobody may record on a stream that was destroyed.
    outer : Region or None
        Of the branch or task that submits: the new task allocates from the outermost caller's arena all the same.
    events : Events
        The device's.
    torch : module, optional
        `handlepool.integrations.torch`, for a call with torch tensors.
    theirs : int, optional
        Then, the submitter's current stream of torch: it waits for the end as the submitter's stream does.
    """

    __slots__ = (
        "_end",
        "_events",
        "_homes",
        "_joined",
        "_lock",
        "_outer",
        "_sides",
        "_start",
        "_users",
        "device",
        "region",
        "stream",
        "theirs",
        "torch",
    )

    def __init__(
        self,
        device: DeviceSlots,
        stream: Stream,
        outer: Region | None,
        events: Events,
        torch: ModuleType | None = None,
        theirs: int = 0,
    ) -> None:
        self.device = device
        self.torch = torch
        self.theirs = theirs
        self.stream = stream
        self.region = Region(device.driver, stream if outer is None else outer.stream, device.device, outer=outer)
        self._outer = outer
        submitters = {stream.ptr} if torch is None else {stream.ptr, theirs}
        # A side stream that the submitter had is somebody else's by the end of the branch or task that submitted.
        self._sides = set() if outer is None else {pointer for pointer in submitters if branch_regions.get(pointer) is outer}
        self._homes = {(device.device, pointer) for pointer in submitters - self._sides | {self.region.stream.ptr}}
        self._joined = False  # whether the streams of `_homes` wait for the end
        self._events = events
        # Guards the two events and the count of those who use the second. A finaliser of this thread may come in again.
        self._lock = threading.RLock()
        self._users = 0
        self._end: Any = None  # recorded and not known to have passed
        self._start: Any = events.acquire()
        try:
            device.driver.record_event(self._start, stream.ptr)
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Give the start event back; the task will not begin, or has begun."""
        with self._lock:
            start, self._start = self._start, None
        if start is not None:
            self._events.release(start)

    def begin(self, pointer: int) -> None:
        """Let a stream wait for the start."""
        with self._lock:
            start, self._start = self._start, None
        try:
            self.device.driver.wait_event(pointer, start)
        finally:
            self._events.release(start)  # a wait holds on to the record that it was given

    def finish(self, pointer: int) -> None:
        """Set the task's end: its function has returned, and its stream was given all of it."""
        driver = self.device.driver
        try:
            if pointer != LEGACY_STREAM and driver.capture_id(pointer):
                raise CaptureError(
                    f"stream {pointer:#x}, which a task ran on, began to be captured meanwhile: nothing can wait for the task's "
                    f"end. Begin a capture before tasks are submitted, or after their results"
                )
            end = self._events.acquire()
            try:
                driver.record_event(end, pointer)
            except BaseException:
                self._events.release(end)
                raise
        except BaseException:
            self.region.abandon()
            raise
        self._end = end

    def join(self, *, submitter_only: bool = False) -> None:
        """Let the calling thread's current stream and the submitter's wait for the end, and let go of what was kept.

        The submitter's is that of the outermost one where a branch or a task submitted; and, as long as the calling thread is in
        it, the side stream that it was submitted from, too.

        Raises
        ------
        CaptureError
            When one of them is being captured. Then none waits that did not before.
        ForkedProcessError
            In a forked child.
        """
        end = self._borrow()
        if end is None:
            return
        status, driver, device = self.device.status, self.device.driver, self.device.device
        try:
            if status.forked:
                status.check()  # raises
            streams = set() if self._joined else set(self._homes)
            if self._sides and thread.region is self._outer:  # in that still, in its thread: nobody else gets them meanwhile
                streams |= {(device, pointer) for pointer in self._sides if branch_regions.get(pointer) is self._outer}
            if not submitter_only:
                current = {(driver.current_device(), driver.current_stream().ptr)}
                with on_device(driver, device):
                    current.add((device, driver.current_stream().ptr))
                    if self.torch is not None:
                        current.add((device, self.torch.current_stream(device)))
                streams |= current - self._homes
            for ordinal, pointer in streams:
                with on_device(driver, ordinal):
                    if pointer != LEGACY_STREAM and driver.capture_id(pointer):
                        raise CaptureError(
                            f"stream {pointer:#x} is being captured, and the task ran outside of the capture: ask for the "
                            f"result before the capture, or after it"
                        )
            for ordinal, pointer in streams:
                with on_device(driver, ordinal):
                    driver.wait_event(pointer, end)
        finally:
            self._put_back()
        self._joined = True
        self.region.release()

    def record(self, value: Any) -> None:
        """Tell torch's allocator, where it is in use, that the tensors of the task's value are used on torch's current stream."""
        if self.torch is not None:
            self.torch.record(value, self.torch.current_stream(self.device.device), self.device.device)

    def synchronize(self) -> None:
        """Wait on the host for the end."""
        end = self._borrow()
        if end is not None:
            try:
                with self.device.driver.relaxed():
                    self.device.driver.synchronize_event(end)
            finally:
                self._put_back()

    def settle(self) -> bool:
        """Once the GPU has passed the end: let go of everything. Whether it has."""
        if self.device.status.forked:  # guarantee 13
            self.region.abandon()
            return True
        end = self._borrow()
        if end is None:
            return True
        passed = False
        try:
            with self.device.driver.relaxed():
                passed = self.device.driver.event_done(end)
        except Exception:  # queued work failed, say; the memory stays with the task
            pass
        finally:
            self._put_back()
        if passed:
            self.region.release()
            with self._lock:
                if self._users:  # somebody is making a stream wait for it just now
                    return False
                self._end = None
            self._events.release(end)
        return passed

    def _borrow(self) -> Any:
        """Return the end event, which is not released while it is borrowed; None where there is nothing to wait for any more."""
        with self._lock:
            if self._end is not None:
                self._users += 1
            return self._end

    def _put_back(self) -> None:
        with self._lock:
            self._users -= 1


class StreamFuture(Future[T], Generic[T]):
    """A future whose result is ready on a stream: done means that the function returned, not that the GPU has run it."""

    def __init__(self, task: Task | None = None) -> None:
        super().__init__()
        self._task = task

    def result(self, timeout: float | None = None) -> T:
        """Return the function's value, ready on the calling thread's current stream and on the submitter's.

        It does not wait for the GPU, and may be called many times, by any thread. Where a branch or another task submitted the
        task, the submitter's stream is the outermost caller's. To go on in the branch itself, ask for the result there.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait on the host until the function has returned.

        Returns
        -------
        object
            What the function returned.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As in `concurrent.futures.Future.result`; and whatever the function raised, after the same join.
        CaptureError
            When one of the two streams is being captured: the task was not.
        """
        error = self.exception(timeout)
        if error is None:
            self._join()
            value = super().result()
            if self._task is not None:
                self._task.record(value)
            return value
        try:
            self._join()
        except Exception as trouble:  # the function's own error matters more
            error.add_note(f"Nothing waits for what the task launched, since the join failed, too: {trouble}")
        try:
            raise error
        finally:
            del self, error  # or the error, its traceback and this frame would keep each other, and the task's arguments

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop of asyncio until the function has returned; then as `result`, for the loop's current stream."""
        from asyncio import wrap_future

        return wrap_future(self).__await__()

    def _join(self) -> None:
        if self._task is not None:
            self._task.join()

    def synchronize(self, timeout: float | None = None) -> T:
        """Return the function's value once the GPU has run it; blocks the host, and joins as `result` does.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait on the host until the function has returned. The GPU is waited for without a limit.

        Returns
        -------
        object
            What the function returned.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError, CaptureError
            As in `result`.
        """
        value = self.result(timeout)
        if self._task is not None:
            self._task.synchronize()
        return value
