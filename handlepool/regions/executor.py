"""Run tasks on side streams, as a `concurrent.futures` executor.

The executor is for work that also blocks on the host. A task starts after the work that the submitter's stream had received at
`submit`. For this order, `submit` records a start event on that stream, and the worker's side stream waits for the event. When
the task's function has returned, the worker records an end event. `StreamFuture.result` makes streams wait for the end event,
and `StreamFuture.synchronize` makes the host wait. The task's region keeps the task's arguments and allocations until a join.
Without a join the region keeps them until the GPU has passed the end event (guarantee 8).

An executor needs no shutdown. A worker's side slots are released when its thread ends, and all other resources are released
later (`Deferred.run`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from sys import modules
from types import ModuleType
from typing import Any, TypeVar, cast

from handlepool._util.arguments import as_integer, at_least, check_ran
from handlepool._util.names import shown
from handlepool._util.protocols import Wrapper
from handlepool.drivers.event_pool import Events
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, CaptureError, ForkedProcessError
from handlepool.order.operation import follow_branches
from handlepool.order.places import open_order
from handlepool.order.reached import Reached
from handlepool.order.stream_order import in_torch, order, torch_of
from handlepool.pool.context import active, on_device, process, run_on, thread
from handlepool.pool.default import check_pool, default_pool
from handlepool.pool.deferred import abandon, defer, deferred, run_some
from handlepool.pool.device import DeviceSlots
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import Slot, bind_to_thread
from handlepool.pool.stream import check_foreign, resolve
from handlepool.regions.future import StreamFuture, Task
from handlepool.regions.memory import branch_regions, inherited
from handlepool.regions.requests import Requests

T = TypeVar("T")

_Call = tuple[StreamFuture[Any], Task, PoolInternals, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A submitted call: future, task, pool, function and arguments."""


class ParallelStateExecutor(Executor):
    """Threads that run tasks on side streams of the submitter's device.

    Each thread has a handle and scratch of its own. The executor is for tasks that block on the host: reading files, asking for
    values, building plans. For many short launches from one thread, `ParallelStates` is faster.

    Parameters
    ----------
    max_workers : int
        Number of threads.
    pool : HandlePool, optional
        The default pool if omitted.
    max_pending : int, optional
        The maximum number of tasks and requests whose work the GPU has not finished. A request is a submitted call of a recorded
        function. At the maximum, `submit` of a request first waits on the host for the oldest task or request.
    results : {None, "device", "host"}
        Where the results of requests go. None means the host if an argument is a NumPy array, and the device otherwise.
    thread_name_prefix, initializer, initargs
        As in `concurrent.futures.ThreadPoolExecutor`.
    """

    def __init__(
        self,
        max_workers: int = 4,
        *,
        pool: HandlePool | None = None,
        max_pending: int | None = None,
        results: str | None = None,
        thread_name_prefix: str = "handlepool",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        # These are tasks whose end event the GPU has not passed. Appends and pops are atomic, so no lock is needed.
        self._pending: deque[Task] = deque()
        self._events: dict[DeviceSlots, Events] = {}
        workers = as_integer(max_workers, 0)
        if workers < 1:
            raise ArgumentError(f"ParallelStateExecutor({shown(max_workers)}): the number of workers must be 1 or more")
        if pool is None:
            pool = default_pool()
        check_pool("ParallelStateExecutor", pool)
        # A test may exchange the internals of a pool. So the executor keeps the pool, and each task keeps the internals that it
        # began with.
        self._pool = pool
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix, initializer or _nothing, initargs)
        # The value of `process()` at the first `submit`, which differs in a forked child; None before that call.
        self._began: int | None = None
        self._leases = _Leases()
        most = None if max_pending is None else at_least(1, "ParallelStateExecutor: max_pending", max_pending)
        if not (results is None or (isinstance(results, str) and results in ("device", "host"))):
            raise ArgumentError(f"ParallelStateExecutor(results={shown(results)}): results must be 'device', 'host' or None")
        self._requests = Requests(self._threads, self._pending, workers, most, results)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "StreamFuture[T]":
        """Run ``fn(*args, **kwargs)`` on a side stream as a task.

        The task starts after all work that the current stream has received by now.

        The call of a recorded function (`recorded`) is a request: this thread launches it on one of the executor's streams, and
        no worker thread takes part. A client is a thread or a task of asyncio. The requests of one client keep their order.
        Arrays of NumPy go to the device through page-locked memory. If no program fits the arguments yet, this thread records a
        program in a call on the current stream.

        Inside a fork the task also starts after the branches that read or wrote its arguments. Later calls do not wait for the
        task on their own. Only the future makes them wait.

        The memory of arrays that the task makes belongs to the stream that is current at `submit`. Before these arrays are
        freed, that stream has to wait for every other stream that reads them.

        Parameters
        ----------
        fn : callable
        *args, **kwargs
            Arguments of the function. They are kept alive until the GPU has finished the task, or a stream waits for the task.

        Returns
        -------
        StreamFuture
            Done when the function has returned. Its ``result`` makes the current stream wait for the GPU, or raises the
            function's error. For a function that returned a generator or a coroutine, ``result`` raises `ArgumentError`,
            because none of the function's code has run.

        Raises
        ------
        ArgumentError
            When the current stream is the per-thread default stream, because in a worker thread this name means another stream.
        CaptureError
            When the current stream is being captured, because a worker's work would not be a part of the capture.
        PoolClosedError, RuntimeError
            After the pool's `close`, or the executor's `shutdown`.
        ForkedProcessError
            In a forked child, if the executor was used before the fork.
        """
        pool = self._pool.internals
        if self._began != process():
            if self._began is not None:
                pool.status.check()
                raise ForkedProcessError(
                    "this executor's threads did not survive os.fork: make a ParallelStateExecutor in the child"
                )
            self._began = process()
        if (
            isinstance(fn, Wrapper)
            and thread.region is None
            and not (active and open_order(pool.driver, pool.current_device()) is not None)
        ):
            self._requests.make_room()
            request = fn._request(pool, self._requests, partial(self._task, pool, None), args, kwargs)  # noqa: SLF001 - as below
            if request is not None:
                run_some(self._pending, Task.settle)
                return cast("StreamFuture[T]", request)
        if isinstance(fn, Wrapper) and thread.region is None:
            done: StreamFuture[T] = StreamFuture()
            try:
                for value in fn._at_once(args, kwargs):  # noqa: SLF001 - the protocol is for this
                    done.set_result(value)
            except Exception as error:
                done.set_exception(error)
            if done.done():
                return done
        try:
            reached = Reached(pool.driver, fn, args, kwargs)
            if active:
                follow_branches(pool, fn, args, kwargs, reached)
            task = self._task(pool, torch_of(fn, reached.values) if "torch" in modules else None)
        except Exception as error:
            pool.status.diagnose(error)
            raise
        try:
            task.region.keep((fn, args, kwargs, reached.values))
            future: StreamFuture[T] = StreamFuture(task)
            # The worker takes the call out of this list. The traceback of the function's error leads to the thread pool's
            # frame, which keeps the list. If that frame kept the call itself, the error would keep the call's arguments, and
            # through the future also itself.
            call: list[_Call] = [(future, task, pool, fn, args, kwargs)]
        except BaseException:
            task.withdraw()
            raise
        try:
            inner = self._threads.submit(self._run, call)
        except BaseException as error:
            # `ThreadPoolExecutor` queues a call before it starts a thread for the call. So an existing thread may take the call
            # although no further thread could be started. Whichever thread empties the list runs or withdraws the task.
            if _taken(call) is not None:
                task.withdraw()
                raise
            if not isinstance(error, Exception):
                raise
            return future
        # A shutdown or a failed initializer may end the inner future before the call runs. Then `future` has to end in the same
        # way.
        inner.add_done_callback(lambda ended: _pass_on(ended, call))
        run_some(self._pending, Task.settle)
        return future

    def map(  # type: ignore[override]
        self, fn: Callable[..., T], /, *iterables: Iterable[Any], **kwargs: Any
    ) -> Iterator[T]:
        """Run ``fn`` over the iterables, each call a task.

        The method works like `concurrent.futures.Executor.map`.

        Parameters
        ----------
        fn : callable
        *iterables : iterable
            Positional arguments, one entry of each iterable per call. The shortest iterable decides the number of calls.
        **kwargs
            Keywords of the function, the same in every call. `map` keeps the names ``timeout``, ``chunksize`` and ``buffersize``,
            which `concurrent.futures.Executor.map` explains. To pass such names to ``fn``, bind them with `functools.partial`.

        Returns
        -------
        iterator
            The results in order. The iterator makes the current stream wait for the GPU before it yields a result, as
            `StreamFuture.result` does.

        Raises
        ------
        ArgumentError, CaptureError, PoolClosedError, RuntimeError
            As in `submit`.
        """
        own = {name: kwargs.pop(name) for name in ("timeout", "chunksize", "buffersize") if name in kwargs}
        return super().map(partial(fn, **kwargs) if kwargs else fn, *iterables, **own)

    def _task(self, pool: PoolInternals, torch: ModuleType | None) -> Task:
        pool.status.check()
        if deferred:
            deferred.run()
        driver = pool.driver
        reference = resolve(driver)
        check_foreign(driver, reference)
        stream = reference.stream or driver.wrap_stream(reference.pointer, reference.owner)
        if thread.recording is not None:
            thread.recording.check("a task", reference.pointer, driver)
        outer = inherited(driver, reference.device, reference.pointer)
        if reference.pointer == PER_THREAD_STREAM or (outer is not None and outer.stream.ptr == PER_THREAD_STREAM):
            raise ArgumentError(
                "the current stream is the per-thread default stream, and a worker thread cannot wait for it, because "
                "its name means another stream in each thread: submit inside `with cupy.cuda.Stream(non_blocking=True):`"
            )
        if reference.pointer != LEGACY_STREAM and driver.capture_id(reference.pointer):
            raise CaptureError(
                "the current stream is being captured, and the work of a worker thread would not be part of the capture: "
                "use ParallelStates.fork, whose branches are part of the capture"
            )
        device = pool.device(reference.device)
        events = self._events.get(device)
        if events is None:
            for other in list(self._events):
                if other.status.closed and (stale := self._events.pop(other, None)) is not None:
                    defer(stale.destroy)
            events = self._events.setdefault(device, Events(driver))
        theirs = 0
        # The submitter's stream waits for torch's stream now, so the task starts after torch's work too. At the join torch's
        # stream waits for the task.
        if torch is not None:
            theirs = torch.current_stream(reference.device)
            order(pool, reference.device, theirs, stream.ptr)
        return Task(device, stream, outer, events, torch, theirs)

    def _run(self, call: "list[_Call]") -> None:
        future: StreamFuture[Any]
        task: Task
        pool: PoolInternals
        taken = _taken(call)
        if taken is None:
            return
        future, task, pool, fn, args, kwargs = taken
        del taken
        try:
            if not future.set_running_or_notify_cancel():
                task.withdraw()
                return
            try:
                value = self._call(pool, task, fn, args, kwargs)
                check_ran(fn, value)
            except BaseException as error:
                pool.status.lost(error, ask=False)
                # If the task failed before it began, `withdraw` releases its start event.
                task.withdraw()
                future.set_exception(error)
            else:
                future.set_result(value)
        finally:
            # The future holds the error, the error's traceback holds this frame, and these names would close the cycle of
            # references. So the names are deleted.
            del future, task, fn, args, kwargs
        run_some(self._pending, Task.settle)

    def _call(self, pool: PoolInternals, task: Task, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        device = task.device
        pool.status.check()
        driver = pool.driver
        driver.set_device(device.device)
        slot = self._slot(pool, device)
        # If every side slot is leased, the task runs on the submitter's stream, with this thread's own handle. If a branch or
        # another task called `submit`, the task runs on the outermost submitter's stream instead, because another fork may get
        # the side stream of that branch after the join.
        stream: Any = task.region.stream if slot is None else slot.side_stream
        pointer = stream.ptr
        if slot is None and pointer != LEGACY_STREAM and driver.capture_id(pointer):
            raise CaptureError(
                "every side stream is in use, and the stream on which the task would run is being captured: ask for results "
                "before a capture begins, or use fewer workers and states"
            )
        task.begin(pointer)
        if task.torch is not None:
            fn, args, kwargs = in_torch(task.torch, pointer, task.theirs, device.device, fn, args, kwargs)
        if slot is not None:
            branch_regions[pointer] = task.region
        try:
            return run_on(pool, stream, device.device, task.region, fn, args, kwargs)
        finally:
            if slot is not None:
                branch_regions.pop(pointer, None)
            task.finish(pointer)
            self._pending.append(task)

    def _slot(self, pool: PoolInternals, device: DeviceSlots) -> Slot | None:
        """Return this worker's side slot of a device.

        The worker leases the slot for as long as it lives.
        """
        mine = self._leases.by_device
        lease = mine.get(device)
        if lease is None:
            for other in [known for known in mine if known.status.closed]:
                del mine[other]
            slot = device.sides.lease()
            if slot is None:
                return None
            lease = _Lease(device, slot)
            bind_to_thread(pool.repaired(slot))
            mine[device] = lease
        return lease.slot

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, as `concurrent.futures.Executor.shutdown` does.

        Each thread releases its side slots as it ends.

        Parameters
        ----------
        wait : bool
            Whether to wait on the host until the threads have ended. Afterwards every submitter's stream waits for its tasks,
            even where no caller asked for the result. The host does not wait for the GPU.
        cancel_futures : bool
            Whether to cancel the tasks that have not started.
        """
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if not wait or self._inherited():
            return
        while self._pending:
            task = self._pending.popleft()
            passed = False
            try:
                passed = task.settle()
                if not passed:
                    task.join(submitter_only=True)
            # A submitter's stream may be under capture, for example. The task then keeps its memory until the GPU has passed
            # its end event.
            except Exception:
                pass
            finally:
                if not passed:
                    defer(task.settle)
        for device, events in self._events.items():
            if not events.destroy():
                defer(events.destroy)
            if device.status.closed:
                with on_device(device.driver, device.device):
                    device.sides.destroy_free()

    def _inherited(self) -> bool:
        """Return whether threads and tasks belong to the parent process."""
        return self._pool.internals.status.forked or self._began not in (None, process())

    def __reduce__(self) -> Any:
        """Refuse to be copied, because both copies would have the same threads."""
        raise TypeError("a ParallelStateExecutor owns threads and streams and cannot be copied or pickled; make another executor")

    def __del__(self, _defer: Callable[[Any], None] = deferred.extend, _abandon: Callable[[Any], None] = abandon) -> None:
        # If this attribute is missing, the constructor raised at once, and there is nothing to release.
        if not hasattr(self, "_events"):
            return
        # A forked child touches nothing of its parent (guarantee 13). An executor without `_leases` never had a thread, because
        # its constructor refused the arguments.
        if hasattr(self, "_leases") and self._inherited():
            _abandon((self._pending, self._events))
            return
        _defer([*(task.settle for task in self._pending), *(events.destroy for events in self._events.values())])


class _Lease:
    """A worker's side slot of one device, released with its thread."""

    __slots__ = ("_device", "slot")

    def __init__(self, device: DeviceSlots, slot: Slot) -> None:
        self._device = device
        self.slot = slot

    def __del__(self, _defer: Callable[[Any], None] = defer) -> None:
        self.slot.end()
        self._device.sides.free.append(self.slot)
        if self._device.status.closed:
            _defer(self._settle)

    def _settle(self) -> bool:
        """Destroy the slots that were released after the pool was closed."""
        with on_device(self._device.driver, self._device.device):
            self._device.sides.destroy_free()
        return True


class _Leases(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[DeviceSlots, _Lease] = {}


def _taken(call: list[_Call]) -> _Call | None:
    """Take a submitted call out of its list, in one step.

    The result is None where another thread has taken the call.
    """
    try:
        return call.pop()
    except IndexError:
        return None


def _pass_on(inner: "Future[None]", call: list[_Call]) -> None:
    """End the future of a call that will not run.

    The future gets the reason: a shutdown cancelled the call, or an initializer failed.
    """
    taken = _taken(call)
    if taken is None:
        return
    future, task, *_ = taken
    task.withdraw()
    if inner.cancelled():
        if future.cancel():
            future.set_running_or_notify_cancel()
    elif (error := inner.exception()) is not None:
        try:
            future.set_exception(error)
        # The caller has cancelled the future before.
        except InvalidStateError:
            future.set_running_or_notify_cancel()


def _nothing(*_: Any) -> None:
    """Do nothing: the initializer of threads without a user's initializer."""
