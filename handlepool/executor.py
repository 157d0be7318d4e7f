"""A `concurrent.futures` executor whose tasks run on side streams, for work that also blocks on the host.

A task starts after what the submitter's stream had been given at `submit`: an event recorded there, waited for by the worker's
side stream. Its end is another event, recorded by the worker when the task's function has returned; `StreamFuture.result` makes
streams wait for it, `StreamFuture.synchronize` the host. What a task was given and what it allocated is kept by the task's
region until a join or, for a future that nobody asked, until the end event has passed (guarantee 8).
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from handlepool.devices import DeviceSlots
from handlepool.drivers.base import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, CaptureError
from handlepool.pool import HandlePool, default_pool
from handlepool.regions import Region
from handlepool.slots import Slot
from handlepool.states import disown, own, run_on
from handlepool.streams import check_foreign, resolve

T = TypeVar("T")


class _Task:
    """What a submitted call needs on the GPU: where it starts, where it ends, and what stays alive until then."""

    __slots__ = ("device", "end", "ended", "pointer", "region", "start", "stream")

    def __init__(self, device: DeviceSlots, stream: Any, start: Any, end: Any) -> None:
        self.device = device
        self.stream = stream  # kept: nobody may record on a stream that was destroyed
        self.pointer: int = stream.ptr
        self.start = start
        self.end = end
        self.ended = False  # whether the end event was recorded
        self.region = Region(device.driver, stream)


class StreamFuture(Future[T], Generic[T]):
    """A future whose result is ready on a stream: done means that the function returned, not that the GPU has run it."""

    _task: _Task | None = None
    _pool: HandlePool

    def result(self, timeout: float | None = None) -> T:
        """Return the function's value, ready on the calling thread's current stream and on the submitter's.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait on the host until the function has returned.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As in `concurrent.futures.Future.result`; and whatever the function raised.
        CaptureError
            When one of the two streams is being captured: the task was not.
        """
        try:
            return super().result(timeout)
        finally:
            task = self._task
            if task is not None and task.ended:
                self._join(task)

    def _join(self, task: _Task) -> None:
        driver = task.device.driver
        with self._pool.on_device(task.device.device):
            here = driver.current_stream().ptr
            for pointer in {here, task.pointer}:
                if pointer != LEGACY_STREAM and driver.capture_id(pointer):
                    raise CaptureError(
                        f"stream {pointer:#x} is being captured, and the task ran outside of the capture: ask for the result "
                        f"before the capture, or after it"
                    )
                driver.wait_event(pointer, task.end)
        task.region.release()

    def synchronize(self, timeout: float | None = None) -> T:
        """Return the function's value once the GPU has run it; blocks the host, and joins as `result` does."""
        value = self.result(timeout)
        task = self._task
        if task is not None and task.ended:
            task.device.driver.synchronize_event(task.end)
        return value


class ParallelStateExecutor(Executor):
    """Threads that run tasks on side streams of the submitter's device, each thread with a handle and scratch of its own.

    For tasks that block on the host: reading files, asking for values, building plans. For many short launches from one thread,
    `ParallelStates` is faster.

    Parameters
    ----------
    max_workers : int
        Threads.
    pool : HandlePool, optional
        The default pool where none is given.
    thread_name_prefix, initializer, initargs
        As in `concurrent.futures.ThreadPoolExecutor`.
    """

    def __init__(
        self,
        max_workers: int = 4,
        *,
        pool: HandlePool | None = None,
        thread_name_prefix: str = "handlepool",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 1:
            raise ArgumentError(f"ParallelStateExecutor({max_workers!r}): 1 worker or more")
        if pool is None:
            pool = default_pool()
        self._pool = pool
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix, initializer or _nothing, initargs)
        self._pending: deque[_Task] = deque()  # ended tasks whose memory may still be read; appends and pops are atomic
        self._events: dict[int, list[Any]] = {}  # by device, for reuse: a wait holds on to the record that it was given
        self._leases = _Leases()
        self._lock = threading.Lock()  # guards the set of leases, which shutdown gives back
        self._leased: set[tuple[DeviceSlots, Slot]] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "StreamFuture[T]":
        """Run ``fn(*args, **kwargs)`` on a side stream, after what the current stream has been given by now.

        Raises
        ------
        ArgumentError
            When the current stream is the per-thread default stream, which means another stream in a worker thread.
        CaptureError
            When the current stream is being captured: a worker's work would not be a part of it.
        RuntimeError
            After `shutdown`.
        """
        task = self._task()
        task.region.keep_call(fn, args, kwargs)
        future: StreamFuture[T] = StreamFuture()
        future._pool = self._pool
        inner = self._threads.submit(self._run, future, task, fn, args, kwargs)
        # What happens to the inner future before it runs (shutdown, a failed initializer) happens to ours.
        inner.add_done_callback(lambda ended: _pass_on(ended, future))
        return future

    def _task(self) -> _Task:
        pool = self._pool
        pool._check_usable()
        driver = pool.driver
        reference = resolve(driver)
        check_foreign(driver, reference)
        if reference.pointer == PER_THREAD_STREAM:
            raise ArgumentError(
                "the current stream is the per-thread default stream, which is another stream in each thread, so a worker cannot "
                "wait for it: submit inside `with cupy.cuda.Stream(non_blocking=True):`"
            )
        if reference.pointer != LEGACY_STREAM and driver.capture_id(reference.pointer):
            raise CaptureError(
                "the current stream is being captured, and a worker thread's work would not be a part of the capture: use "
                "ParallelStates.fork, whose branches are"
            )
        device = pool.device(reference.device)
        stream = reference.stream or driver.wrap_stream(reference.pointer, reference.owner)
        free = self._events.setdefault(reference.device, [])
        start, end = (self._event(free) for _ in range(2))
        driver.record_event(start, reference.pointer)
        return _Task(device, stream, start, end)

    def _event(self, free: list[Any]) -> Any:
        try:
            return free.pop()
        except IndexError:
            driver = self._pool.driver
            with driver.relaxed():
                return driver.create_event()

    def _run(
        self,
        future: "StreamFuture[T]",
        task: _Task,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        driver = self._pool.driver
        ordinal = task.device.device
        try:
            driver.set_device(ordinal)
            slot = self._slot(task.device)
            # Where every side slot is out, the task runs on the submitter's stream, with this thread's own handle for it.
            stream = task.stream if slot is None else slot.side_stream
            pointer = task.pointer if slot is None else slot.pointer
            driver.wait_event(pointer, task.start)
            try:
                value = run_on(self._pool, stream, ordinal, task.region, fn, args, kwargs)
            finally:
                driver.record_event(task.end, pointer)
                task.ended = True
                future._task = task
                self._pending.append(task)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)
        self._collect()

    def _slot(self, device: DeviceSlots) -> Slot | None:
        """This worker's side slot of a device, leased for as long as the worker lives."""
        mine = self._leases.slots
        slot = mine.get(device.device)
        if slot is None:
            slot = device.sides.lease()
            if slot is None:
                return None
            own(self._pool.sound(slot))
            mine[device.device] = slot
            with self._lock:
                self._leased.add((device, slot))
        return slot

    def _collect(self) -> None:
        """Let go of what ended tasks keep whose end the GPU has passed."""
        driver = self._pool.driver
        for _ in range(len(self._pending)):
            try:
                task = self._pending.popleft()
            except IndexError:
                return
            with driver.relaxed():
                done = driver.event_done(task.end)
            if done:
                task.region.release()
            else:
                self._pending.append(task)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, as `concurrent.futures.Executor.shutdown`; their side slots go back with the last of them."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if not wait:
            threading.Thread(target=self._finish, name="handlepool-shutdown", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        self._threads.shutdown(wait=True)
        with self._lock:
            leased, self._leased = self._leased, set()
        for device, slot in leased:
            disown(slot)
            with self._pool.on_device(device.device):
                device.sides.give_back(slot, captured=False)


class _Leases(threading.local):
    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}


def _pass_on(inner: "Future[None]", outer: "Future[Any]") -> None:
    if inner.cancelled():
        if outer.cancel():
            outer.set_running_or_notify_cancel()
    elif (error := inner.exception()) is not None and not outer.done():
        outer.set_exception(error)


def _nothing(*_: Any) -> None:
    """The initializer of those who give none."""
