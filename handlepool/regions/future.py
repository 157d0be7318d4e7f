"""Define tasks and futures for submitted calls on the GPU.

A task starts after its start event. Other streams wait for its end event.
"""

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
    """The start, the end and the kept memory of a submitted call.

    Parameters
    ----------
    device : DeviceSlots
        The slots of the current device.
    stream : Stream
        The submitter's stream. The task starts after the present work of this stream. The stream object is kept, because
        recording an event on a destroyed stream fails.
    outer : Region or None
        The region of the branch or task that submits. The new task then allocates from the outermost caller's arena.
    events : Events
        The device's events.
    torch : module, optional
        `handlepool.foreign.torch`, for a call with torch tensors.
    theirs : int, optional
        For a call with torch tensors, torch's current stream at `submit`. At the join that stream waits for the end event, as
        the submitter's stream does.

    Attributes
    ----------
    region : Region
        Keeps the arguments and the allocations of the task.
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
        # After the end of the submitting branch or task, another fork may have its side stream. So side streams are in a set of
        # their own, and `join` uses them only while that branch or task runs.
        self._sides = set() if outer is None else {pointer for pointer in submitters if branch_regions.get(pointer) is outer}
        self._homes = {(device.device, pointer) for pointer in submitters - self._sides | {self.region.stream.ptr}}
        # This tells whether the streams of `_homes` already wait for the end event.
        self._joined = False
        self._events = events
        # The lock guards the two events and the number of borrowers of the end event. It is reentrant, because a finalizer may
        # take it again in the same thread.
        self._lock = threading.RLock()
        self._users = 0
        # The end event, from its recording until the GPU is known to have passed it; otherwise None.
        self._end: Any = None
        self._start: Any = events.acquire()
        try:
            device.driver.record_event(self._start, stream.ptr)
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Release the start event, which is no longer needed.

        Either the task has begun, or the task will never begin.
        """
        with self._lock:
            start, self._start = self._start, None
        if start is not None:
            self._events.release(start)

    def restart(self, pointer: int) -> None:
        """Record the start event again, and let a stream wait for it.

        The stream then waits for all present work of the submitter's stream.
        """
        with self._lock:
            start = self._start
        self.device.driver.record_event(start, self.stream.ptr)
        self.begin(pointer)

    def begin(self, pointer: int) -> None:
        """Let a stream wait for the start event, and release the event."""
        with self._lock:
            start, self._start = self._start, None
        try:
            self.device.driver.wait_event(pointer, start)
        finally:
            # The event can be reused at once, because a later recording does not change a wait that was issued before.
            self._events.release(start)

    def finish(self, pointer: int) -> None:
        """Record the end event on the task's stream.

        The task's function has returned, and its stream has received all its work.
        """
        driver = self.device.driver
        try:
            if pointer != LEGACY_STREAM and driver.capture_id(pointer):
                raise CaptureError(
                    f"stream {pointer:#x} ran a task, and a capture began on it before the task's end, so no stream can wait "
                    "for the task. Begin a capture before any task is submitted, or after result() of every task was called"
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
        """Let streams wait for the end event, and release the kept memory.

        The streams are the calling thread's current stream and the submitter's stream. If a branch or another task called
        `submit`, the outermost submitter's stream waits instead of the side stream of that branch or task. As long as the
        calling thread is still inside that branch or task, its side stream waits as well. With ``submitter_only``, the calling
        thread's current stream does not wait.

        Raises
        ------
        CaptureError
            When any of these streams is being captured. Then this call makes no stream wait.
        ForkedProcessError
            In a forked child.
        """
        end = self._borrow()
        if end is None:
            return
        status, driver, device = self.device.status, self.device.driver, self.device.device
        try:
            if status.forked:
                # A forked child cannot use its parent's events, and `check` raises the error for that.
                status.check()
            streams = set() if self._joined else set(self._homes)
            # As long as this thread is inside the branch or task that called `submit`, no other fork gets the side streams of
            # that branch or task. So these streams can wait, too.
            if self._sides and thread.region is self._outer:
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
        """Tell torch's allocator that torch's current stream uses the value.

        For a task without torch tensors, the method does nothing.
        """
        if self.torch is not None:
            self.torch.record(value, self.torch.current_stream(self.device.device), self.device.device)

    def synchronize(self) -> None:
        """Wait on the host until the GPU has passed the end event."""
        end = self._borrow()
        if end is not None:
            try:
                with self.device.driver.relaxed():
                    self.device.driver.synchronize_event(end)
            finally:
                self._put_back()

    @property
    def passed(self) -> bool:
        """Whether the GPU has passed the end event."""
        end = self._borrow()
        if end is None:
            return True
        try:
            with self.device.driver.relaxed():
                return self.device.driver.event_done(end)
        finally:
            self._put_back()

    def settle(self) -> bool:
        """Release memory and end event once the GPU has passed the event.

        Return False if the GPU has not passed the end event, or if another thread still uses the event.
        """
        # A forked child touches nothing of its parent (guarantee 13).
        if self.device.status.forked:
            self.region.abandon()
            return True
        end = self._borrow()
        if end is None:
            return True
        passed = False
        try:
            with self.device.driver.relaxed():
                passed = self.device.driver.event_done(end)
        # Queued work may have failed, for example. The memory then stays with the task.
        except Exception:
            pass
        finally:
            self._put_back()
        if passed:
            self.region.release()
            with self._lock:
                # Another thread uses the event now, so a later call releases it.
                if self._users:
                    return False
                self._end = None
            self._events.release(end)
        return passed

    def _borrow(self) -> Any:
        """Borrow the end event, or return None if it was released.

        No thread releases the event while it is borrowed.
        """
        with self._lock:
            if self._end is not None:
                self._users += 1
            return self._end

    def _put_back(self) -> None:
        with self._lock:
            self._users -= 1


class StreamFuture(Future[T], Generic[T]):
    """A future whose result is ready on a stream.

    Done means that the function returned. The GPU may still be running the function's work.
    """

    def __init__(self, task: Task | None = None) -> None:
        super().__init__()
        self._task = task

    def result(self, timeout: float | None = None) -> T:
        """Return the function's value, ready on the caller's and submitter's streams.

        The caller's stream is the calling thread's current stream. The method does not wait for the GPU. Any thread may call it
        many times. Where a branch or another task submitted the task, the outermost caller's stream counts as the submitter's
        stream. To use the result inside that branch or task, call this method there.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait on the host until the function has returned.

        Returns
        -------
        object
            The function's value.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As in `concurrent.futures.Future.result`. Any error of the function is raised as well. The streams wait for the task
            also in this case.
        CaptureError
            When one of the two streams is being captured, because the task is not part of the capture.
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
        # The function's own error matters more, so the join's error becomes a note.
        except Exception as trouble:
            error.add_note(f"No stream waits for the work of the task, because the join failed as well: {trouble}")
        try:
            raise error
        finally:
            # If this frame kept these names, the error, its traceback and this frame would keep each other and the task's
            # arguments alive.
            del self, error

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an asyncio event loop, then act like `result`.

        The loop runs other code until the function has returned. Then the current stream of the loop's thread waits for the
        task.
        """
        from asyncio import wrap_future

        return wrap_future(self).__await__()

    def _join(self) -> None:
        if self._task is not None:
            self._task.join()

    def synchronize(self, timeout: float | None = None) -> T:
        """Return the function's value after the GPU has done its work.

        The method blocks the host. It also makes streams wait as `result` does.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait on the host until the function has returned. The wait for the GPU has no limit.

        Returns
        -------
        object
            The function's value.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError, CaptureError
            As in `result`.
        """
        value = self.result(timeout)
        if self._task is not None:
            self._task.synchronize()
        return value
