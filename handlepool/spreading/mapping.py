"""Map a function lazily over items on several devices, in order."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import length_hint
from time import sleep
from types import FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

import numpy as np

from handlepool._util.arguments import as_integer, at_least, flag
from handlepool._util.cleanup import do_all
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import attributes, bound_call, content, leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, CaptureError, DeviceMismatchError, ItemError, OwnershipError
from handlepool.pool.context import thread
from handlepool.pool.default import default_pool
from handlepool.pool.deferred import abandon, defer
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.recording.program import Program
from handlepool.recording.sharing import rebuilt
from handlepool.spreading.item_function import Eager
from handlepool.spreading.items import check_copied, global_elsewhere
from handlepool.spreading.worker import DeviceWorker, InFlight

T = TypeVar("T")

_CUDA = 2
"""DLPack's number for the memory of a CUDA device."""
_BETWEEN_LOOKS = 2e-5
"""The time between two queries of the devices, in seconds.

CUDA can wait for one event, but not for the earliest of several events. If the thread waited only for the event of the oldest
item, a quick device would have no work until a slow device is done. A callback from CUDA would cost more than a query, and would
take the interpreter's lock from the thread that gives items to devices. So the thread queries the devices in turn, until the
oldest item is done. But if no item is left, or no further item may be given, the thread waits for the oldest item's event.
"""


def spread(
    function: Callable[..., Any],
    items: Iterable[Any],
    *,
    shared: Sequence[Any] = (),
    devices: Sequence[int] | None = None,
    lanes: int | None = 8,
    in_flight: int = 2,
    to: str | None = None,
    errors: str = "raise",
    on_done: Callable[[int, int], object] | None = None,
    progress: bool = False,
) -> "Spread":
    """Call a function for each item, on several devices.

    The results come in the order of the items. For each device and each geometry of items, ``function(item, *shared)`` is
    recorded at the first item, and replayed for each further item. An item goes to the device with the fewest items in flight.
    The item is copied to that device on a separate stream, while other streams compute. The thread that takes the results drives
    all devices. The default pool is used.

    Parameters
    ----------
    function : callable
        As for `record`, the function must do the same work for all items of the same geometry. For the first item of a
        program the function is called twice, so it should do nothing but compute. If the function cannot be recorded, it runs
        eagerly from then on, on all devices, and a single ``RuntimeWarning`` gives the reason. If the function's closure holds
        arrays, only their device can be used. If an item fails because of an array on another device, `spread` searches the
        globals for the array, to name it in the error. The function must not copy from the host; pass such values in ``shared``.
    items : iterable
        Each item is an array of NumPy or of the driver, on any device, or a list, tuple or dictionary of such arrays. A tuple
        is passed as a single argument. `spread` takes the next item from the iterable whenever a device becomes free. From
        then on the caller may overwrite the item before, even if it is page-locked; an array on a device may be overwritten by
        work on the stream that was current on that device. If an item holds any other value, the function runs eagerly for it,
        and arrays of the driver inside such a value are refused. An array on another device must have no gaps between its
        elements. If arrays of an item share memory, their copies share memory alike.
    shared : sequence
        Further arguments, such as weights. All calls may read these arguments, and no call may write them. Their arrays are
        copied to each device once. An array that is already on the device is used in place.
    devices : sequence of int, optional
        Ordinals without repetition. The default is every device.
    lanes : int, optional
        As in `record`. With None, the program keeps the order of streams and forks.
    in_flight : int
        The maximum number of items in flight on a device. As many finished results may wait for the caller.
    to : {None, "host"}
        The place of the results. With None, they stay on the device that made them. With "host", they are NumPy arrays.
    errors : {"raise", "return"}
        The effect of a failed item. "raise" raises an `ItemError` after the caller has taken all earlier results, and ends the
        spread. "return" puts an `ItemError` in the place of the result.
    on_done : callable, optional
        Called with the index of an item and its device, before the caller gets the item's result or error. An exception from
        ``on_done`` ends the spread.
    progress : bool
        Whether to show the number of taken results on standard error, if that is a terminal.

    Returns
    -------
    Spread
        An iterator, for one thread at a time. A result is complete when it is returned, and belongs to the caller. The memory of
        a result belongs to the stream that was current on the result's device when the item was taken, as for an array that was
        made on that stream. End the iterator by ``close()``, by a ``with`` statement, or by taking all results. If the iterator
        is only dropped, its resources are released later.

    Raises
    ------
    ArgumentError
        If no device is given, or a device is given twice or does not exist. If an option is invalid. If ``function`` is a
        `Program`, because `spread` needs the function that was recorded.
    ArrayTypeError
        If ``shared`` holds an array of another library or an array with a mask. If an item holds such an array, the item fails
        with an `ItemError` instead.
    CaptureError
        If `spread` is called inside a recording, a branch or a task.
    DeviceMismatchError
        If the closure holds an array, and a device in use is not the array's device.
    DriverNotAvailableError
        If the driver is not available.

    Notes
    -----
    If taking an item from ``items`` raises an exception, it is raised in the place of the item, after all results before it. If a
    device lacks a resource, such as memory for ``shared``, the item that it was to compute fails.

    At the first item of a device, CuPy allocates memory for the function by calls that CUDA forbids while another thread captures
    in global mode, as ``torch.cuda.graph`` does by default. So take a result of each device before such a capture.

    Examples
    --------
    >>> for scores in handlepool.spread(network, images, shared=(weights,), to="host"):                  # doctest: +SKIP
    ...     keep(scores)
    """
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None)]
    name = next((name for name in names if isinstance(name, str)), type(function).__name__)
    if not callable(function):
        raise ArgumentError(f"spread({shown(function)}): the argument is not callable; pass a function that takes an item")
    if isinstance(function, Program):
        raise ArgumentError(
            f"spread({function!r}): a program runs only on the device that it was recorded on. Pass the recorded function "
            "itself, which spread records for each device, and pass its fixed arguments in shared="
        )
    if not isinstance(items, Iterable):
        raise ArgumentError(f"spread({name}): items={shown(items)}; pass an iterable, such as a list or a generator")
    if holds_values(shared) or not isinstance(shared, (list, tuple)):
        raise ArgumentError(f"spread({name}): shared={shown(shared)}; pass a tuple of arguments, such as (weights,)")
    if lanes is not None and not 1 <= as_integer(lanes, 0) <= MOST_SIDE_SLOTS:
        raise ArgumentError(
            f"spread({name}): lanes={shown(lanes)}; lanes must be an integer from 1 to {MOST_SIDE_SLOTS}, or None"
        )
    if not (to is None or (isinstance(to, str) and to == "host")):
        raise ArgumentError(f"spread({name}): to={shown(to)}; the place of results must be 'host', or None for the device")
    if not (isinstance(errors, str) and errors in ("raise", "return")):
        raise ArgumentError(f"spread({name}): errors={shown(errors)}; errors must be 'raise' or 'return'")
    if not (on_done is None or callable(on_done)):
        raise ArgumentError(
            f"spread({name}): on_done={shown(on_done)}; pass a function that takes an index and a device, or None"
        )
    in_flight = at_least(1, f"spread({name}): in_flight", in_flight)
    shows = flag(f"spread({name}): progress", progress) and sys.stderr.isatty()
    _check_outside(name)
    pool = default_pool()
    pool.internals.status.check()
    driver = pool.driver
    chosen = _chosen(driver, name, devices)
    check_copied(f"spread({name}): shared", shared, driver, inside=False)
    _check_closure(driver, name, function, chosen)
    eager = Eager(name)
    rest = name, function, tuple(shared), None if lanes is None else as_integer(lanes), to == "host", eager
    workers = [DeviceWorker(pool, device, *rest) for device in chosen]
    return Spread(pool, name, function, workers, items, to == "host", in_flight, errors == "raise", on_done, shows)


def _chosen(driver: Driver, name: str, devices: object) -> list[int]:
    count = driver.device_count()
    if devices is None:
        return [*range(count)]
    if holds_values(devices) or isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise ArgumentError(f"spread({name}): devices={shown(devices)}; pass a list of ordinals, such as [0, 1]")
    chosen: list[int] = []
    for device in devices:
        ordinal = as_integer(device, -1)
        if not 0 <= ordinal < count:
            raise ArgumentError(f"spread({name}): devices holds {shown(device)}; pass ordinals from 0 to {count - 1}")
        if ordinal in chosen:
            raise ArgumentError(f"spread({name}): devices holds {ordinal} twice; name each device once")
        chosen.append(ordinal)
    if not chosen:
        raise ArgumentError(f"spread({name}): devices is empty; name at least one device, or leave devices out for all {count}")
    return chosen


def _check_closure(driver: Driver, name: str, function: object, devices: Sequence[int]) -> None:
    """Refuse an array in the function's closure that a device cannot read."""
    plain = getattr(function, "__func__", function)
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True) if isinstance(plain, FunctionType) else ()
    names = {id(content(cell)): variable for variable, cell in cells}
    call = bound_call(function)
    owner = getattr(call, "__self__", None)
    # Only the attributes of the method's owner are searched. Any other object may rightly hold an array for each device.
    own = [] if isinstance(owner, (type, ModuleType)) else attributes(owner)
    for value in leaves(call, *own, calls=True, owners=[]):
        where = _device_of(driver, value)
        wrong = None if where is None else next((device for device in devices if device != where), None)
        if wrong is not None:
            called = f"{names[id(value)]}, {shown(value)}," if id(value) in names else shown(value)
            raise DeviceMismatchError(
                f"spread({name}): the function's closure holds {called} on device {where}, but the function also runs on device "
                f"{wrong}: pass the array in shared=, which copies it to each device, and take it as an argument after the item"
            )


def _device_of(driver: Driver, value: Any) -> int | None:
    """Return the device of an array of any library.

    Return None for an array in host memory, and for a value that is no array.
    """
    if isinstance(value, np.ndarray):
        return None
    if isinstance(value, driver.array_types):
        return driver.array_device(value)
    if not holds_values(value) or not hasattr(type(value), "__dlpack_device__"):
        return None
    try:
        kind, ordinal = value.__dlpack_device__()
    # The array's library may have no DLPack number for this kind of memory, and then raises any error.
    except Exception:
        return None
    return int(ordinal) if int(kind) == _CUDA else None


def _check_outside(name: str) -> None:
    if thread.recording is not None or thread.rehearsal is not None or thread.region is not None:
        raise CaptureError(f"spread({name}) cannot be used inside a recording, a branch or a task: call it outside of these")


class Spread(Iterator[Any]):
    """Give the results of `spread` in order, as an iterator.

    The iterator ends after the last result, after an error, and by `close`. The end of a ``with`` statement calls `close`.
    """

    _workers: "Workers | None" = None

    def __init__(
        self,
        pool: HandlePool,
        name: str,
        function: Callable[..., Any],
        workers: Sequence[DeviceWorker],
        items: Iterable[Any],
        host: bool,
        in_flight: int,
        raises: bool,
        on_done: Callable[[int, int], object] | None,
        shows: bool,
    ) -> None:
        self._status = pool.internals.status
        self._driver = pool.driver
        self._function = function
        self._name = name
        self._items = iter(items)
        # The length is only used to show progress. Otherwise it is not asked for, because some iterables raise an error then.
        self._total = length_hint(items) if shows else 0
        self._host = host
        self._in_flight = in_flight
        # The maximum number of items that were given to devices and whose results were not taken.
        self._most = 2 * in_flight * len(workers)
        self._raises = raises
        self._on_done = on_done
        self._shows = shows
        self._given = 0
        self._taken = 0
        # True when no further item will be given to a device.
        self._last = False
        # An error that ends the spread and belongs to no item: from the iterable, or because a capture was under way.
        self._failure: Exception | None = None
        # The given items in order, without the items whose results were taken.
        self._flights: deque[InFlight] = deque()
        # Only one call at a time advances the spread. The lock refuses a call of another thread. `_taking` refuses a nested call
        # of the same thread, which `on_done` or the iterable may make. The lock is an `RLock`, because a thread that did not
        # acquire an `RLock` cannot release it.
        self._turn = threading.RLock()
        self._taking = False
        self._workers = Workers(pool.driver, workers)

    def __iter__(self) -> "Spread":
        return self

    def __next__(self) -> Any:
        _check_outside(self._name)
        return self._alone(self._next)

    def _next(self) -> Any:
        try:
            if self._workers is None:
                raise StopIteration
            if self._status.unusable:
                self._status.check()
            return self._advance(self._workers)
        except BaseException as error:
            failed = isinstance(error, Exception) and not isinstance(error, StopIteration)
            try:
                if failed:
                    self._status.diagnose(error)
            finally:
                self._end(error if failed else None)
            raise

    def close(self) -> None:
        """Wait for items in flight and release all resources.

        Afterwards the iterator gives no results. A second call has no effect.

        Raises
        ------
        OwnershipError
            If another thread, or an outer call of this thread, is taking a result.
        """
        self._alone(self._end)

    def _alone(self, act: Callable[[], T]) -> T:
        """Call ``act``; refuse this if another call is under way."""
        turn = self._turn
        try:
            # The lock is acquired inside the `try`. So the `finally` releases it even if an interrupt comes right after `acquire`
            # has returned.
            if not turn.acquire(blocking=False) or self._taking:
                raise OwnershipError(
                    f"spread({self._name}): another thread, or an outer call of this thread, is taking a result: take one result "
                    "at a time"
                )
            try:
                self._taking = True
                return act()
            finally:
                self._taking = False
        finally:
            try:
                turn.release()
            # If another thread has the lock, `release` raises this error, and the lock stays acquired.
            except RuntimeError:
                pass

    def _end(self, failure: BaseException | None = None) -> None:
        """Release all resources of the spread.

        ``failure`` is the error that ends the spread, if any. If the release fails too, its error becomes a note of ``failure``.
        """
        workers, self._workers = self._workers, None
        self._flights.clear()
        if self._shows and workers is not None:
            sys.stderr.write("\r\x1b[K")
        if workers is None:
            return
        if self._status.untouchable:
            abandon(workers)
            return
        try:
            workers.close()
        except BaseException as error:
            defer(partial(_settle, workers, self._status))
            if failure is None or not isinstance(error, Exception):
                error.add_note(f"spread({self._name}) raised this error while it released its resources")
                raise
            failure.add_note(f"spread({self._name}): the release of its resources failed: {type(error).__name__}: {error}")
        finally:
            # If the items come from a generator, dropping it ends it, which closes the resources that it has open.
            self._items = iter(())

    def _advance(self, workers: "Workers") -> Any:
        self._fill(workers)
        if not self._flights:
            failure, self._failure = self._failure, None
            try:
                raise StopIteration if failure is None else failure
            finally:
                # The traceback of the error refers to this frame. Without `del`, the frame would keep the error alive, and with
                # it the device's resources.
                del failure
        flight = self._flights[0]
        if not flight.done:
            self._wait(workers, flight)
        error = flight.error
        if error is not None and not isinstance(error, ItemError):
            error = self._failed(flight.index, flight.device, error)
        self._flights.popleft()
        self._taken += 1
        if self._shows:
            sys.stderr.write(f"\r\x1b[Kspread({self._name}): {self._taken} of {self._total or '?'} items")
            sys.stderr.flush()
        try:
            if self._on_done is not None:
                self._on_done(flight.index, flight.device)
            if error is None:
                return rebuilt(flight.value, _copied) if self._host else flight.value
            if self._raises:
                raise error
            return error
        finally:
            # Without `del`, this frame and the error, whose traceback refers to the frame, would keep each other alive, and with
            # them the item's memory.
            del flight, error

    def _fill(self, workers: "Workers") -> None:
        """Give items to devices, in order, while a device is free."""
        while not self._last and len(self._flights) < self._most:
            worker = workers.free(self._in_flight)
            if worker is None:
                return
            index = self._given
            try:
                item = next(self._items)
            except StopIteration:
                self._last = True
                return
            except Exception as error:
                error.add_note(f"spread({self._name}): the iterable of items raised this error in the place of item {index}")
                self._last, self._failure = True, error
                return
            self._given += 1
            try:
                worker.start(index)
            except CaptureError as error:
                # The caller called the spread inside a capture. The error does not come from the item, so it ends the spread.
                self._last, self._failure = True, error
                return
            except Exception as error:
                self._last = self._last or self._raises
                self._flights.append(self._not_given(index, worker.device, error))
                continue
            self._flights.append(self._give(worker, index, item))

    def _give(self, worker: DeviceWorker, index: int, item: object) -> InFlight:
        try:
            return worker.give(index, item)
        except Exception as error:
            self._last = self._last or self._raises
            return self._not_given(index, worker.device, error)

    def _not_given(self, index: int, device: int, error: Exception) -> InFlight:
        """Return an `InFlight` for an item that no device got.

        The object is made here, in a frame that is not in the error's traceback. So the error and the object form no reference
        cycle.
        """
        flight = InFlight(index, device)
        flight.error, flight.done = self._failed(index, device, error), True
        return flight

    def _failed(self, index: int, device: int, error: Exception) -> ItemError:
        self._status.diagnose(error)
        remedy = self._remedy(device, error)
        failed = ItemError(
            f"spread({self._name}): item {index} failed on device {device}: {remedy}{type(error).__name__}: {error}"
        )
        failed.index, failed.device, failed.__cause__ = index, device, error
        return failed

    def _remedy(self, device: int, error: Exception) -> str:
        """Return a sentence with the remedy for a misplaced array.

        If ``error`` does not say that the function used an array of another device, return "".
        """
        if not (isinstance(error, DeviceMismatchError) or (isinstance(error, ValueError) and "current device" in str(error))):
            return ""
        name = global_elsewhere(self._function, lambda value: _device_of(self._driver, value) not in (None, device))
        read = "an array that it does not get as an argument" if name is None else f"its global {name}"
        return f"{read} is on another device; pass it in shared=, and take it as an argument after the item. "

    def _wait(self, workers: "Workers", flight: InFlight) -> None:
        """Wait for an item; meanwhile give further items to free devices."""
        while not flight.done:
            if self._last or len(self._flights) >= self._most or len(workers.all) == 1:
                workers.of(flight.device).finish(flight)
            else:
                self._fill(workers)
                if not flight.done:
                    sleep(_BETWEEN_LOOKS)

    def __enter__(self) -> "Spread":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self, _defer: Callable[[Callable[[], bool]], None] = defer) -> None:
        if self._workers is not None:
            _defer(partial(_settle, self._workers, self._status))

    def __reduce__(self) -> Any:
        """Refuse `copy` and `pickle`: two copies would close the same programs."""
        raise TypeError(f"spread({self._name}) owns streams and programs and cannot be copied or pickled; call spread again")

    def __repr__(self) -> str:
        state = "ended" if self._workers is None else f"{len(self._flights)} in flight"
        return f"<Spread {self._name}: {self._given} items given, {self._taken} results taken, {state}>"


class Workers:
    """The workers of a spread, one for each device.

    Parameters
    ----------
    driver : Driver
    all : sequence of DeviceWorker
        A worker for each device.
    """

    def __init__(self, driver: Driver, all: Sequence[DeviceWorker]) -> None:
        self.all = all
        self._driver = driver
        self._by_device = {worker.device: worker for worker in all}

    def of(self, device: int) -> DeviceWorker:
        """Return the worker of a device."""
        return self._by_device[device]

    def free(self, in_flight: int) -> DeviceWorker | None:
        """Return the worker with the fewest items in flight.

        Return None if each worker has ``in_flight`` items. Among workers with equally many items, the worker that got an item the
        longest time ago is chosen. If this worker has nothing in flight, the workers are not queried, because a query takes two
        microseconds. But if this worker also got the most recent item, they are queried: on a device where all items fail,
        nothing is ever in flight, so it would get all items.
        """
        first = self._first()
        known = not first.running and first.last < max([worker.last for worker in self.all])
        if not known and (len(self.all) > 1 or len(first.running) >= in_flight):
            with self._driver.relaxed():
                for worker in self.all:
                    worker.collect_done()
            first = self._first()
        return first if len(first.running) < in_flight else None

    def _first(self) -> DeviceWorker:
        first = self.all[0]
        for worker in self.all:
            if (len(worker.running), worker.last) < (len(first.running), first.last):
                first = worker
        return first

    def in_flight(self) -> bool:
        """Return whether any device still has items in flight."""
        with self._driver.relaxed():
            for worker in self.all:
                worker.collect_done()
        return any(worker.running for worker in self.all)

    def close(self) -> None:
        """Wait for items in flight, and release all resources."""
        do_all([worker.close for worker in self.all])


def _settle(workers: Workers, status: Any) -> bool:
    """Close a dropped spread; return whether it is closed.

    If items are in flight, or if the close fails, the spread is left for a later call.
    """
    if status.untouchable:
        abandon(workers)
        return True
    try:
        if workers.in_flight():
            return False
        workers.close()
        return True
    except Exception:
        return False


def _copied(value: object) -> Any:
    """Copy a host array into ordinary memory.

    The page-locked memory of the array is reused for later items.
    """
    return np.array(value, order="K") if isinstance(value, np.ndarray) else value
