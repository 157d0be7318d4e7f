"""Map a function lazily over several devices, results in order."""

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
"""DLPack's number for the memory of a GPU."""
_BETWEEN_LOOKS = 2e-5
"""The time between two queries of the devices, in seconds.

CUDA can wait for one event, but not for the first of several events. If the thread waited only for the oldest item, a quicker
device would be without work until a slower device is done. A callback from the driver would cost more than a query, and would
take the interpreter's lock from the thread that gives items. So the thread queries the devices in turn, until the oldest item
is done. If no item is left, or no further item may be given, it waits for the oldest item's event instead.
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

    The results come in order. ``function(item, *shared)`` is recorded once for each device and geometry of an item, and
    replayed for each further item. An item goes to the device with the fewest items in flight. It is copied there on a
    separate stream while other streams compute. One thread drives all devices: the thread that takes the results. The
    default pool is used.

    Parameters
    ----------
    function : callable
        As for `record`: the function does the same work for each item of a geometry. For a program's first item
        the function is called twice, so it should do nothing but compute. If it cannot be recorded, it runs eagerly from
        then on and on all devices, and a ``RuntimeWarning`` gives the reason, once. Arrays in its closure must be on
        the one device in use. If an item fails because of an array on another device, `spread` searches the globals
        to name the array. The function must not copy from the host; pass such values in ``shared``.
    items : iterable
        Arrays of NumPy or of the driver, on any device, also in lists, tuples and dictionaries; a tuple stays one
        argument. `spread` takes an item whenever a device becomes free. The caller may overwrite an item when the
        next item is taken. This holds for page-locked arrays, too; an array on a device may be overwritten by the
        stream that was current there. An item that holds any other value runs eagerly; arrays of the driver inside
        such a value are refused, not copied. An array of another device has no gaps between its elements. Arrays of
        one item that share memory also share it on the device.
    shared : sequence
        Further arguments, such as weights. All calls read them, and no call writes them. Their arrays are copied to
        each device once. An array that is already on the device is used in place.
    devices : sequence of int, optional
        Ordinals without repetition. The default is every device.
    lanes : int, optional
        As in `record`; None records the order of streams and forks.
    in_flight : int
        The maximum number of items in flight on a device. The same number of finished results may wait for the caller.
    to : {None, "host"}
        The place of results: on the device that made them, or in NumPy arrays on the host.
    errors : {"raise", "return"}
        The effect of a failed item. "raise" ends the spread, after the items in flight have run and the caller has
        taken all earlier results. "return" puts an `ItemError` in the place of the result.
    on_done : callable, optional
        Called with the item's index and its device before its result is given, also for a failed item. An exception
        from ``on_done`` ends the spread.
    progress : bool
        Count the results on standard error, where that is a terminal.

    Returns
    -------
    Spread
        An iterator, for one thread at a time. A returned result is complete and belongs to the caller. Its memory
        belongs to the stream that was current on its device when its item was taken, like an array made there. Leave
        the iterator by ``close()``, by a ``with`` statement, or by taking all results. If it is merely dropped, work
        in flight is ended later.

    Raises
    ------
    ArgumentError
        For no device, a repeated device, or a missing device; for an unknown option; for a program, since `spread`
        needs the function that was recorded.
    ArrayTypeError
        For arrays of other libraries in ``shared``, and for arrays with a mask; for such arrays in an item, in an
        `ItemError`.
    CaptureError
        Inside a recording, a branch or a task.
    DeviceMismatchError
        For an array in the closure that is on another device than a device in use.
    DriverNotAvailableError
        If the driver is not available.

    Notes
    -----
    An exception from ``items`` is raised in the place of the item, after all results before it. If a device lacks a
    resource, such as memory for ``shared``, the item that it was to compute fails.

    At its first item, CuPy makes the function's own allocations in its plain way. CUDA forbids this while another thread
    captures in global mode, as ``torch.cuda.graph`` does by default. Take a result of each device before such a capture.

    Examples
    --------
    >>> for scores in handlepool.spread(network, images, shared=(weights,), to="host"):                  # doctest: +SKIP
    ...     keep(scores)
    """
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None)]
    name = next((name for name in names if isinstance(name, str)), type(function).__name__)
    if not callable(function):
        raise ArgumentError(f"spread({shown(function)}): pass a function of an item")
    if isinstance(function, Program):
        raise ArgumentError(
            f"spread({function!r}): a program has its memory on one device. Pass the function that it was recorded "
            "from, which spread records for each device, and pass its fixed arguments in shared="
        )
    if not isinstance(items, Iterable):
        raise ArgumentError(f"spread({name}): items={shown(items)}; pass an iterable, as a list or a generator")
    if holds_values(shared) or not isinstance(shared, (list, tuple)):
        raise ArgumentError(f"spread({name}): shared={shown(shared)}; pass a tuple of arguments, (weights,) for one")
    if lanes is not None and not 1 <= as_integer(lanes, 0) <= MOST_SIDE_SLOTS:
        raise ArgumentError(f"spread({name}): lanes={shown(lanes)}; it must be an integer from 1 to {MOST_SIDE_SLOTS}, or None")
    if not (to is None or (isinstance(to, str) and to == "host")):
        raise ArgumentError(f"spread({name}): to={shown(to)}; it must be 'host', or None")
    if not (isinstance(errors, str) and errors in ("raise", "return")):
        raise ArgumentError(f"spread({name}): errors={shown(errors)}; it must be 'raise' or 'return'")
    if not (on_done is None or callable(on_done)):
        raise ArgumentError(f"spread({name}): on_done={shown(on_done)}; pass a function of an index and a device, or None")
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
        raise ArgumentError(f"spread({name}): devices={shown(devices)}; pass a list of ordinals")
    chosen: list[int] = []
    for device in devices:
        ordinal = as_integer(device, -1)
        if not 0 <= ordinal < count:
            raise ArgumentError(f"spread({name}): devices holds {shown(device)}; there are devices 0 to {count - 1}")
        if ordinal in chosen:
            raise ArgumentError(f"spread({name}): devices holds {ordinal} twice; name each device once")
        chosen.append(ordinal)
    if not chosen:
        raise ArgumentError(f"spread({name}): devices is empty; name at least one, or leave it out for all {count}")
    return chosen


def _check_closure(driver: Driver, name: str, function: object, devices: Sequence[int]) -> None:
    """Raise for a closure's array on a wrong device."""
    plain = getattr(function, "__func__", function)
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True) if isinstance(plain, FunctionType) else ()
    names = {id(content(cell)): variable for variable, cell in cells}
    call = bound_call(function)
    owner = getattr(call, "__self__", None)
    # Other objects may have an array for each device, so only attributes of the owner count.
    own = [] if isinstance(owner, (type, ModuleType)) else attributes(owner)
    for value in leaves(call, *own, calls=True, owners=[]):
        where = _device_of(driver, value)
        wrong = None if where is None else next((device for device in devices if device != where), None)
        if wrong is not None:
            called = f"{names[id(value)]}, {shown(value)}," if id(value) in names else shown(value)
            raise DeviceMismatchError(
                f"spread({name}): its closure holds {called} on device {where}, but it also runs on device {wrong}: pass "
                "the array in shared=, which is copied to each device, and take it as an argument after the item"
            )


def _device_of(driver: Driver, value: Any) -> int | None:
    """Return the device of an array of any library.

    The result is None for other values, and for arrays in the host's memory.
    """
    if isinstance(value, np.ndarray):
        return None
    if isinstance(value, driver.array_types):
        return driver.array_device(value)
    if not holds_values(value) or not hasattr(type(value), "__dlpack_device__"):
        return None
    try:
        kind, ordinal = value.__dlpack_device__()
    # The array's library has no DLPack number for this kind of memory.
    except Exception:
        return None
    return int(ordinal) if int(kind) == _CUDA else None


def _check_outside(name: str) -> None:
    if thread.recording is not None or thread.rehearsal is not None or thread.region is not None:
        raise CaptureError(f"spread({name}) cannot be used inside a recording, a branch or a task: use it outside")


class Spread(Iterator[Any]):
    """Give the results of `spread` in order, as an iterator.

    The iterator ends after the last result, after an error, and by `close`, also at the end of a ``with`` statement.
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
        # Some iterables without a length raise when asked, so they are asked only if progress is shown.
        self._total = length_hint(items) if shows else 0
        self._host = host
        self._in_flight = in_flight
        # This bounds the items that were given and not yet taken.
        self._most = 2 * in_flight * len(workers)
        self._raises = raises
        self._on_done = on_done
        self._shows = shows
        self._given = 0
        self._taken = 0
        # True once no further item is to be given.
        self._last = False
        # The error of the items themselves, or of a capture that is under way.
        self._failure: Exception | None = None
        # The items in order, except items that the caller has taken.
        self._flights: deque[InFlight] = deque()
        # The lock lets one call at a time advance the spread, and a call of another thread is refused. `_taking` refuses a call
        # of the same thread, which `on_done` or the items may make. The lock is an `RLock`, because only its owner can release
        # it.
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

        No more results come. A second call is harmless.

        Raises
        ------
        OwnershipError
            While another thread, or the caller of this method, is taking a result.
        """
        self._alone(self._end)

    def _alone(self, act: Callable[[], T]) -> T:
        """Run an action alone, and refuse concurrent calls."""
        turn = self._turn
        try:
            # CPython delivers an interrupt after a call has returned. If the interrupt comes after the lock was acquired, the
            # `finally` releases the lock.
            if not turn.acquire(blocking=False) or self._taking:
                raise OwnershipError(
                    f"spread({self._name}): another thread, or an outer call of this thread, is taking a result: take results "
                    "one at a time"
                )
            try:
                self._taking = True
                return act()
            finally:
                self._taking = False
        finally:
            try:
                turn.release()
            # Another thread has the turn, so this thread must not release it.
            except RuntimeError:
                pass

    def _end(self, failure: BaseException | None = None) -> None:
        """Release all resources of the spread.

        If a failure ends the spread, an error of the release becomes a note of that failure.
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
                error.add_note(f"spread({self._name}): raised while it released its resources")
                raise
            failure.add_note(f"spread({self._name}): the release of its resources failed: {type(error).__name__}: {error}")
        finally:
            # Dropping a generator ends it, and closes the resources that it has open.
            self._items = iter(())

    def _advance(self, workers: "Workers") -> Any:
        self._fill(workers)
        if not self._flights:
            failure, self._failure = self._failure, None
            try:
                raise StopIteration if failure is None else failure
            finally:
                # The traceback would keep the failure alive, and the device's resources with it.
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
            # The error's traceback, this frame and the error would otherwise keep each other alive, and the item's memory.
            del flight, error

    def _fill(self, workers: "Workers") -> None:
        """Give items in order while a device is free."""
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
                error.add_note(f"spread({self._name}): the items raised this in the place of item {index}")
                self._last, self._failure = True, error
                return
            self._given += 1
            try:
                worker.start(index)
            except CaptureError as error:
                # The caller made the mistake; the item has nothing to do with it.
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
        """Return an `InFlight` for a failed item.

        No frame of the error's traceback holds the object, so both end with the last reference.
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
        """Return a remedy if the function read another device's array.

        The error must say that the function used such an array. The remedy is a sentence.
        """
        if not (isinstance(error, DeviceMismatchError) or (isinstance(error, ValueError) and "current device" in str(error))):
            return ""
        name = global_elsewhere(self._function, lambda value: _device_of(self._driver, value) not in (None, device))
        read = "an array that it does not get as an argument" if name is None else f"its global {name}"
        return f"{read} is on another device; pass it in shared=, and take it as an argument after the item. "

    def _wait(self, workers: "Workers", flight: InFlight) -> None:
        """Wait for an item, and keep free devices busy meanwhile."""
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
        """Refuse to be copied: two copies would end the same programs."""
        raise TypeError(f"spread({self._name}) owns streams and programs and cannot be copied or pickled; call spread again")

    def __repr__(self) -> str:
        state = "ended" if self._workers is None else f"{len(self._flights)} in flight"
        return f"<Spread {self._name}: {self._given} items given, {self._taken} results taken, {state}>"


class Workers:
    """The devices of a spread.

    Parameters
    ----------
    driver : Driver
    all : sequence of DeviceWorker
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

        Workers at the limit are left out. Among equals, the worker whose last item is oldest is taken. If that worker has
        nothing in flight, the other workers are not queried, because a query takes two microseconds. But if that worker also
        got the very last item, the others are queried: on a device where all items fail, nothing is ever in flight.
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
        """Tell whether a device still has items in flight."""
        with self._driver.relaxed():
            for worker in self.all:
                worker.collect_done()
        return any(worker.running for worker in self.all)

    def close(self) -> None:
        """Wait for items in flight, and release all resources."""
        do_all([worker.close for worker in self.all])


def _settle(workers: Workers, status: Any) -> bool:
    """Close a dropped spread once nothing is in flight."""
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
