"""A `concurrent.futures` executor whose tasks run on side streams, for work that also blocks on the host.

A task starts after what the submitter's stream had been given at `submit`: an event recorded there, waited for by the worker's
side stream. Its end is another event, recorded by the worker when the task's function has returned; `StreamFuture.result` makes
streams wait for it, `StreamFuture.synchronize` the host. What a task was given and what it allocated is kept by the task's
region until a join or, for a future that nobody asked, until the end event has passed (guarantee 8).

Nothing has to be shut down for that: a worker's side slots are released with its thread, and what an executor leaves is deferred.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from sys import modules
from types import ModuleType
from typing import Any, TypeVar

from handlepool._util.arguments import as_integer, check_ran
from handlepool._util.names import shown
from handlepool._util.protocols import Wrapper
from handlepool.drivers.event_pool import Events
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, CaptureError, ForkedProcessError
from handlepool.order.operation import follow_branches
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

T = TypeVar("T")

_Call = tuple[StreamFuture[Any], Task, PoolInternals, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A submitted call: future, task, pool, function and arguments."""


class ParallelStateExecutor(Executor):
    """Threads that run tasks on side streams of the submitter's device, each thread with a handle and scratch of its own.

    It is for tasks that block on the host: reading files, asking for values, building plans. For many short launches from one
    thread, `ParallelStates` is faster.

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
        self._pending: deque[Task] = deque()  # tasks whose end the GPU has not passed; appends and pops are atomic
        self._events: dict[DeviceSlots, Events] = {}
        workers = as_integer(max_workers, 0)
        if workers < 1:
            raise ArgumentError(f"ParallelStateExecutor({shown(max_workers)}): 1 worker or more")
        if pool is None:
            pool = default_pool()
        check_pool("ParallelStateExecutor", pool)
        self._pool = pool  # another may stand in for it, for tests: a task keeps to the internals that it began with
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix, initializer or _nothing, initargs)
        # The process that its threads belong to, once it may have some.
        self._began: int | None = None
        self._leases = _Leases()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "StreamFuture[T]":
        """Run ``fn(*args, **kwargs)`` on a side stream, after what the current stream has been given by now.

        A recorded function (`recorded`) that has no program yet for such arguments is called, and recorded, in this thread.

        Inside a fork it starts after the branches that read or wrote what it is given, too. What the task itself does is ordered
        for others by its future alone.

        Arrays that it makes are memory of the stream that is current here. Before they are let go of, that stream has to wait for
        whoever reads them on another.

        Parameters
        ----------
        fn : callable
        *args, **kwargs
            For the function. They are kept alive until the GPU has passed the task, or a stream waits for it.

        Returns
        -------
        StreamFuture
            Done when the function has returned; its ``result`` makes the current stream wait for the GPU. It raises what the
            function raised, and `ArgumentError` for one that returned a generator or a coroutine, of which nothing has run.

        Raises
        ------
        ArgumentError
            When the current stream is the per-thread default stream, which means another stream in a worker thread.
        CaptureError
            When the current stream is being captured: a worker's work would not be a part of it.
        PoolClosedError, RuntimeError
            After the pool's `close`, or the executor's `shutdown`.
        ForkedProcessError
            In a forked child, where the executor has run something before the fork.
        """
        pool = self._pool.internals
        if self._began != process():
            if self._began is not None:
                pool.status.check()
                raise ForkedProcessError(
                    "this executor's threads did not survive os.fork: make a ParallelStateExecutor in the child"
                )
            self._began = process()
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
            # A list that the worker empties, since the frames of an error's traceback lead to the thread pool's own, which keeps
            # what it was given: the error would keep itself, through the future, and the arguments.
            call: list[_Call] = [(future, task, pool, fn, args, kwargs)]
        except BaseException:
            task.withdraw()
            raise
        try:
            inner = self._threads.submit(self._run, call)
        except BaseException as error:
            # `ThreadPoolExecutor` queues a call before it starts a thread for the call. So a thread that is there may take the
            # call although no further thread could be started. The thread that empties the list runs or withdraws the task.
            if _taken(call) is not None:
                task.withdraw()
                raise
            if not isinstance(error, Exception):
                raise
            return future
        # What happens to the inner future before it runs (shutdown, a failed initializer) happens to ours.
        inner.add_done_callback(lambda ended: _pass_on(ended, call))
        run_some(self._pending, Task.settle)
        return future

    def map(  # type: ignore[override]
        self, fn: Callable[..., T], /, *iterables: Iterable[Any], **kwargs: Any
    ) -> Iterator[T]:
        """Run ``fn`` over the iterables, as `concurrent.futures.Executor.map`, each call a task.

        Parameters
        ----------
        fn : callable
        *iterables : iterable
            Of its positional arguments, one entry of each for a call. The shortest says how many calls there are.
        **kwargs
            For the function, the same in every call. `map` keeps the names ``timeout``, ``chunksize`` and ``buffersize``, which
            `concurrent.futures.Executor.map` explains: bind these with `functools.partial`.

        Returns
        -------
        iterator
            Of the results, in order. Each makes the current stream wait for the GPU, as `StreamFuture.result` does.

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
                "the current stream is the per-thread default stream, which is another stream in each thread, so a worker cannot "
                "wait for it: submit inside `with cupy.cuda.Stream(non_blocking=True):`"
            )
        if reference.pointer != LEGACY_STREAM and driver.capture_id(reference.pointer):
            raise CaptureError(
                "the current stream is being captured, and a worker thread's work would not be a part of the capture: use "
                "ParallelStates.fork, whose branches are"
            )
        device = pool.device(reference.device)
        events = self._events.get(device)
        if events is None:
            for other in list(self._events):
                if other.status.closed and (stale := self._events.pop(other, None)) is not None:
                    defer(stale.destroy)
            events = self._events.setdefault(device, Events(driver))
        theirs = 0
        if torch is not None:  # the submitter's stream waits for torch's now, and that for the task at the join
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
                task.withdraw()  # where it has not begun
                future.set_exception(error)
            else:
                future.set_result(value)
        finally:
            del future, task, fn, args, kwargs  # an error's traceback holds this frame, and the future holds the error
        run_some(self._pending, Task.settle)

    def _call(self, pool: PoolInternals, task: Task, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        device = task.device
        pool.status.check()
        driver = pool.driver
        driver.set_device(device.device)
        slot = self._slot(pool, device)
        # Where every side slot is out, the task runs on the submitter's stream, with this thread's own handle for it; on that of
        # the outermost one where a branch or a task submitted it, whose side stream is somebody else's after the join.
        stream: Any = task.region.stream if slot is None else slot.side_stream
        pointer = stream.ptr
        if slot is None and pointer != LEGACY_STREAM and driver.capture_id(pointer):
            raise CaptureError(
                "every side stream is in use, and the stream that the task was submitted from is being captured by now: ask for "
                "results before a capture begins, or use fewer workers and states"
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
        """Return this worker's side slot of a device, leased for as long as the worker lives."""
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
        """End the threads, as `concurrent.futures.Executor.shutdown`; each releases its side slots as it ends.

        Parameters
        ----------
        wait : bool
            Whether to wait on the host until the threads have ended. Then every stream that something was submitted from waits
            for it, also where nobody asked for the result. The host does not wait for the GPU.
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
            except Exception:  # as for a stream that is being captured: what the task holds is held until its end has passed
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
        """Whether its threads and its tasks are of the process that forked this one."""
        return self._pool.internals.status.forked or self._began not in (None, process())

    def __reduce__(self) -> Any:
        """Refuse to be copied: two would have the same threads."""
        raise TypeError("a ParallelStateExecutor owns threads and streams and cannot be copied or pickled; make another one")

    def __del__(self, _defer: Callable[[Any], None] = deferred.extend, _abandon: Callable[[Any], None] = abandon) -> None:
        if not hasattr(self, "_events"):  # it was never made
            return
        if hasattr(self, "_leases") and self._inherited():  # guarantee 13; without leases its arguments were refused
            _abandon((self._pending, self._events))
            return
        _defer([*(task.settle for task in self._pending), *(events.destroy for events in self._events.values())])


class _Lease:
    """A worker's side slot of one device; released when the worker's thread ends."""

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
        """After the pool was closed: destroy what came back too late."""
        with on_device(self._device.driver, self._device.device):
            self._device.sides.destroy_free()
        return True


class _Leases(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[DeviceSlots, _Lease] = {}


def _taken(call: list[_Call]) -> _Call | None:
    """Take a submitted call out of its list, in one step. None where another thread has taken the call."""
    try:
        return call.pop()
    except IndexError:
        return None


def _pass_on(inner: "Future[None]", call: list[_Call]) -> None:
    """Pass on why a call will not run: it was cancelled by a shutdown, or the executor is broken."""
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
        except InvalidStateError:  # cancelled before
            future.set_running_or_notify_cancel()


def _nothing(*_: Any) -> None:
    """Do nothing: the initializer of those who give none."""
