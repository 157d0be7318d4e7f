"""`spread`: a lazy map over several devices, whose results come in order."""

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
from handlepool.pool.context import ThreadToken, thread
from handlepool.pool.default import default_pool
from handlepool.pool.deferred import abandon, defer
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.recording.program import Program
from handlepool.recording.sharing import rebuilt
from handlepool.spreading.items import check_copied, global_elsewhere
from handlepool.spreading.worker import DeviceWorker, Eager, InFlight

T = TypeVar("T")

_CUDA = 2
"""DLPack's number for a GPU's memory."""
_BETWEEN_LOOKS = 2e-5
"""Seconds between two looks at which of several devices has come to be free.

CUDA can wait for one event, and not for the first of several. To wait for the oldest item alone would leave a quicker device
without work until a slower one is done. To be called back by the driver costs each item more than a look, of one query a device,
and takes the interpreter's lock from the thread that gives items. So the devices are looked at in turn. That ends at the latest
with the oldest item, and at once where no item is left or no further one may be given: then there is one event to wait for.
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
    """Call a function for each item, on several devices of this process, and give the results in order.

    ``function(item, *shared)`` is recorded once for each device and geometry of an item, and replayed for each further one. An
    item goes to the device that has the fewest in flight. It is copied there on a stream of its own while others compute. One
    thread drives all devices: the one that takes the results. The default pool is used.

    Parameters
    ----------
    function : callable
        As for `record`: it gives the same work for each item of a geometry. A program's first item is computed twice, so it
        should do nothing but compute. Where it cannot be recorded it runs eagerly, from then on and on all devices, and a
        ``RuntimeWarning`` says why, once. Arrays in its closure must be on the one device in use; globals are looked at
        where an item fails by an array of another device, to name it. The function must not copy from the host: what it needs of
        there belongs in ``shared``.
    items : iterable
        Arrays of NumPy's or of the driver's, on any device, also in lists, tuples and dictionaries; a tuple stays one argument.
        They are taken as devices come to be free, and may be overwritten when the next one is taken, page-locked ones, too, and
        those on a device by the stream that was current there. An item that holds anything else runs eagerly; arrays of the
        driver's are not looked for in there to be copied, but refused. One of another device has no gaps between its elements.
        Arrays of one item that share memory share it on the device, too.
    shared : sequence
        Further arguments, weights say: read by all calls, and written by none. Their arrays are copied to each device once, and
        used as they are where they lie.
    devices : sequence of int, optional
        Ordinals, none of them twice. All that there are by default.
    lanes : int, optional
        As in `record`; None records the order of streams and forks.
    in_flight : int
        Most items that a device is given before it is done with the first of them. As many results again may wait to be taken.
    to : {None, "host"}
        Where results are to be: on the device that made them, or in arrays of NumPy's.
    errors : {"raise", "return"}
        What an item that fails does: end all, once what is in flight has run and results before it were taken, or stand as an
        `ItemError` in the place of its result.
    on_done : callable, optional
        Called with the item's index and its device before its result is given, also for one that failed. What it raises ends all.
    progress : bool
        Count the results on standard error, where that is a terminal.

    Returns
    -------
    Spread
        An iterator, to be used by one thread at a time. A result is complete when it is given, and the caller's own. Its memory
        belongs to the stream that was current on its device when its item was taken, as that of an array made there does. Leave
        it by ``close()``, by a ``with`` statement, or by taking all results; what is in flight when it is merely dropped is ended
        later.

    Raises
    ------
    ArgumentError
        For no device, one twice, or one that there is not; for an option that is none; for a program: pass the function that it
        was recorded from.
    ArrayTypeError
        For arrays of other libraries in ``shared``, and for such with a mask; for items with such in an `ItemError`.
    CaptureError
        Inside a recording, a branch or a task.
    DeviceMismatchError
        For an array in the closure that is on another device than one in use.
    DriverNotAvailableError
        As its name says.

    Notes
    -----
    What the items themselves raise is raised in the place of the item, after all results before it. What a device lacks to take
    part, memory for what is shared, say, makes the item fail that it was to compute.

    What the function itself allocates at its first item, CuPy allocates in its plain way, which CUDA forbids while another thread
    captures in global mode, as ``torch.cuda.graph`` does by default: take a result of each device before.

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
            f"spread({function!r}): a program has its memory on one device. Pass the function that it was recorded from, which "
            f"is recorded for each device; what it was recorded with beside the item belongs in shared="
        )
    if not isinstance(items, Iterable):
        raise ArgumentError(f"spread({name}): items={shown(items)}; pass what can be iterated over, as a list or a generator")
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
    """Raise for an array that the function reads beside its arguments, and that one of the devices does not have."""
    plain = getattr(function, "__func__", function)
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True) if isinstance(plain, FunctionType) else ()
    names = {id(content(cell)): variable for variable, cell in cells}
    call = bound_call(function)
    owner = getattr(call, "__self__", None)
    own = [] if isinstance(owner, (type, ModuleType)) else attributes(owner)  # other objects may have an array for each device
    for value in leaves(call, *own, calls=True, owners=[]):
        where = _device_of(driver, value)
        wrong = None if where is None else next((device for device in devices if device != where), None)
        if wrong is not None:
            called = f"{names[id(value)]}, {shown(value)}," if id(value) in names else shown(value)
            raise DeviceMismatchError(
                f"spread({name}): its closure holds {called} on device {where}, and it would run on device {wrong}, too: pass "
                f"the array in shared=, which is copied to each device, and take it as an argument after the item"
            )


def _device_of(driver: Driver, value: Any) -> int | None:
    """Return the device that an array is on, of whatever library; None for what is none, or is in the host's memory."""
    if isinstance(value, np.ndarray):
        return None
    if isinstance(value, driver.array_types):
        return driver.array_device(value)
    if not holds_values(value) or not hasattr(type(value), "__dlpack_device__"):
        return None
    try:
        kind, ordinal = value.__dlpack_device__()
    except Exception:  # its library has no number for where it is
        return None
    return int(ordinal) if int(kind) == _CUDA else None


def _check_outside(name: str) -> None:
    if thread.recording is not None or thread.rehearsal is not None or thread.region is not None:
        raise CaptureError(f"spread({name}) cannot be used inside a recording, a branch or a task: use it outside")


class Spread(Iterator[Any]):
    """The results of `spread`, in order; an iterator.

    It ends after the last result, after an error, and by `close`, also at the end of a ``with`` statement over it.
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
        self._total = length_hint(items) if shows else 0  # what has no length may say so only when it is asked
        self._host = host
        self._in_flight = in_flight
        self._most = 2 * in_flight * len(workers)  # given, and not taken
        self._raises = raises
        self._on_done = on_done
        self._shows = shows
        self._given = 0
        self._taken = 0
        self._last = False  # whether no item is to be given any more
        self._failure: Exception | None = None  # of the items themselves, or of a capture that is under way
        self._flights: deque[InFlight] = deque()  # in order, those that are not taken
        # One advance at a time: another thread that finds the turn taken is refused, and so is this one, by `_taking`, where
        # `on_done` or the items call. It is an `RLock`, which whoever does not have it cannot release.
        self._turn = threading.RLock()
        self._taking = False
        # The thread that the programs belong to.
        self._thread: ThreadToken | None = None
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
            if self._thread is not thread.token:
                self._workers.take_over()
                self._thread = thread.token
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
        """Wait for what is in flight, and give back all that it has; no more results come. It may be called again.

        Raises
        ------
        OwnershipError
            While a result is being taken, by another thread, or by what called this.
        """
        self._alone(self._end)

    def _alone(self, act: Callable[[], T]) -> T:
        """Do something while nothing else is done with it; refuse what comes meanwhile."""
        turn = self._turn
        try:
            # CPython delivers an interrupt when a call has returned: one that comes with the turn in hand finds the `finally`.
            if not turn.acquire(blocking=False) or self._taking:
                raise OwnershipError(
                    f"spread({self._name}): a result is being taken by another thread, or by what called this: one at a time"
                )
            try:
                self._taking = True
                return act()
            finally:
                self._taking = False
        finally:
            try:
                turn.release()
            except RuntimeError:  # another thread has it
                pass

    def _end(self, failure: BaseException | None = None) -> None:
        """Give back all that it has. An error of that is a note of the failure that ends the spread, where there is one."""
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
                error.add_note(f"spread({self._name}): raised while it gave back what it had")
                raise
            failure.add_note(f"spread({self._name}): giving back what it had failed: {type(error).__name__}: {error}")
        finally:
            self._items = iter(())  # a generator ends, and what it has open is closed

    def _advance(self, workers: "Workers") -> Any:
        self._fill(workers)
        if not self._flights:
            failure, self._failure = self._failure, None
            try:
                raise StopIteration if failure is None else failure
            finally:
                del failure  # or its traceback would keep it, and what the device had
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
            # Or an error's traceback, this frame and the error would keep each other, and the item's memory.
            del flight, error

    def _fill(self, workers: "Workers") -> None:
        """Give items to devices that are free, in order, as long as there are both."""
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
                # The caller's mistake, which has nothing to do with the item.
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
        """Return what stands for a failed item: in no frame of the error's traceback, so both end with the last reference."""
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
        """Return a sentence for an array of another device that the function reads, where an error says that it met one."""
        if not (isinstance(error, DeviceMismatchError) or (isinstance(error, ValueError) and "current device" in str(error))):
            return ""
        name = global_elsewhere(self._function, lambda value: _device_of(self._driver, value) not in (None, device))
        read = "an array that it does not get as an argument" if name is None else f"its global {name}"
        return f"{read} is on another device; pass it in shared=, and take it as an argument after the item. "

    def _wait(self, workers: "Workers", flight: InFlight) -> None:
        """Wait for an item, and give others meanwhile to devices that come to be free."""
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
        """Refuse to be copied: two would end the same programs."""
        raise TypeError(f"spread({self._name}) owns streams and programs and cannot be copied or pickled")

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
        """Return that of a device."""
        return self._by_device[device]

    def free(self, in_flight: int) -> DeviceWorker | None:
        """Return the one with the fewest items in flight, fewer than so many; of several the one that got its last one first.

        Where it is known to have none, the others are not asked what they are done with: each question takes CUDA two
        microseconds. If it got the last item of all, they are: it may be one where all items fail.
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
        """Whether a device is not done with what it was given."""
        with self._driver.relaxed():
            for worker in self.all:
                worker.collect_done()
        return any(worker.running for worker in self.all)

    def take_over(self) -> None:
        """Have all programs belong to the calling thread, which takes the next result."""
        for worker in self.all:
            worker.take_over()

    def close(self) -> None:
        """Wait for what is in flight on each, and give back all that it has."""
        do_all([worker.close for worker in self.all])


def _settle(workers: Workers, status: Any) -> bool:
    """Close what was dropped, once nothing is in flight."""
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
    """Return an array of the host's in ordinary memory: what is page-locked is used again."""
    return np.array(value, order="K") if isinstance(value, np.ndarray) else value
