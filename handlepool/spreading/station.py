"""One device of a spread: its streams, what was copied to it, its programs, and what it has in flight.

Three streams of its own, so that copies run while it computes: one that brings items, one that computes, one that takes results
to the host. What orders them, and what each order serves:

- The stream that brings an item waits for the stream that was the caller's on the item's device when it was given: whoever made
  the array did so there. That stream waits for the copy in turn, so that the caller may change or free the array afterwards.
- The stream that computes waits at first for the caller's, which may have made what the function's closure holds.
- The stream that computes waits for the copies of the item, and the one that takes results to the host for what computes them.
- Arrays for results come from the arena of the caller's stream, to which they go back when they are freed. The stream that
  computes waits for that one before it writes them: their memory may be read there until then.
- All else that is allocated is held until the host has seen that the item is done, so nothing of it is used again too early.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool._util import attributes, do_all, frames_inside, kind_of, leaves, shown
from handlepool.drivers.protocol import ASARRAY, LEGACY_STREAM, Driver, Stream
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError
from handlepool.pool.context import on_device, run_on
from handlepool.pool.pool import HandlePool
from handlepool.recording.outputs import Results
from handlepool.recording.program import Program
from handlepool.recording.record import record
from handlepool.recording.update import PLAIN, copy_all, is_foreign
from handlepool.regions.data_order import before, opened
from handlepool.regions.plain_calls import pieces_of
from handlepool.tensors.inference import dense_strides

MOST_PROGRAMS = 8
"""Of a device: the one that was used least recently is closed for another geometry."""


class Flight:
    """An item that was given to a device.

    Attributes
    ----------
    index, device : int
    value
        Its result, there once it is done. The host's arrays are to be copied: their memory is page-locked.
    error : Exception or None
        Why there is no result.
    done : bool
        Whether the host has seen that the device is done with it.
    """

    __slots__ = ("device", "done", "error", "event", "index", "kept", "value")

    def __init__(self, index: int, device: int, value: Any = None, kept: object = None, event: Any = None) -> None:
        self.index, self.device, self.value, self.kept, self.event = index, device, value, kept, event
        self.error: Exception | None = None
        self.done = False


class Eager:
    """What is not recorded, which is said once.

    Attributes
    ----------
    always : bool
        Whether nothing is recorded any more.
    """

    def __init__(self, name: str) -> None:
        self.always = False
        self._name = name
        self._said = False

    def say(self, why: str) -> None:
        """Warn of the first thing that is not recorded."""
        if not self._said:
            self._said = True
            what = "its items run" if self.always else "such items run"
            text = f"spread({self._name}): {what} eagerly, which is slower on several devices, since they cannot be recorded"
            warnings.warn(f"{text}: {why}", RuntimeWarning, stacklevel=frames_inside())


class Station:
    """One device of a spread. One thread at a time uses it; nothing is made before `start`.

    Parameters
    ----------
    pool : HandlePool
    device : int
    name : str
        Of the function, for messages.
    function : callable
    shared : sequence
    lanes : int or None
    host : bool
        Whether results are taken to the host.
    eager : Eager
        What all devices know of that.
    """

    def __init__(
        self,
        pool: HandlePool,
        device: int,
        name: str,
        function: Callable[..., Any],
        shared: Sequence[Any],
        lanes: int | None,
        host: bool,
        eager: Eager,
    ) -> None:
        self.device = device
        self.last = -1  # the item that was given last
        self._pool, self._internals, self._driver = pool, pool.internals, pool.driver
        self._name, self._function, self._lanes, self._host, self._eager = name, function, lanes, host, eager
        self._given = shared
        self._shared: Any = None
        self._streams: list[Stream] = []  # brings, computes, takes
        self._programs: dict[Hashable, Program] = {}
        self._running: deque[Flight] = deque()

    def start(self) -> None:
        """Make the streams, and copy what is shared, where that was not done yet."""
        if self._shared is not None:
            return
        driver = self._driver
        with on_device(driver, self.device):
            if not self._streams:
                with driver.relaxed():
                    self._streams = [driver.create_stream() for _ in range(3)]
            caller = self._caller()
            try:
                self._shared = self._on(0, rebuilt, tuple(self._given), partial(self._brought, caller, True))
                self._order(0, 1)
                self._wait(self.device, caller.ptr, self.device, self._streams[1].ptr)  # for what the closure holds
            except BaseException:
                self._drain()
                raise

    def give(self, index: int, item: Any) -> Flight:
        """Enqueue all that is to be done with an item; raises what its function does, when nothing of it runs any more."""
        driver = self._driver
        with on_device(driver, self.device):
            caller = self._caller()
            self.last = index
            kept: list[Any] = [item]
            check_copied(f"item {index}", item, driver, inside=True)
            try:
                staged = self._on(0, rebuilt, item, partial(self._brought, caller, False))
                kept.append(staged)
                self._order(0, 1)
                value = self._on(1, self._compute, staged, caller, kept)
                if self._host:
                    kept.append(value)
                    self._order(1, 2)
                    value = self._on(2, rebuilt, value, self._to_host)
                    kept.append(value)
                flight = Flight(index, self.device, value, kept, self._event(2 if self._host else 1))
            except BaseException:
                self._drain()  # `kept` is used no more after that
                raise
        self._running.append(flight)
        return flight

    def running(self) -> int:
        """Return how many items it is not done with."""
        driver = self._driver
        while self._running:
            with on_device(driver, self.device), driver.relaxed():
                if not driver.event_done(self._running[0].event):
                    break
            self.finish(self._running[0])  # it waits for nothing, and hears of work that failed
        return len(self._running)

    def finish(self, flight: Flight) -> None:
        """Wait on the host until it is done with an item, and so with those before it."""
        driver = self._driver
        while not flight.done:
            first = self._running[0]
            try:
                with on_device(driver, self.device), driver.relaxed():
                    driver.synchronize_event(first.event)
            except Exception as error:
                first.error = error
            self._landed(self._running.popleft())

    def close(self) -> None:
        """Wait for what it has in flight, and give back all that it has."""
        if not self._streams:
            return
        with on_device(self._driver, self.device):
            flights = [partial(self.finish, flight) for flight in self._running]
            do_all([*flights, self._drain, *[program.close for program in self._programs.values()]])
            self._programs.clear()
            self._shared = None
            with self._driver.relaxed():  # the streams go with their last references
                self._streams.clear()

    def _landed(self, flight: Flight) -> None:
        flight.done, flight.kept = True, None
        self._internals.device(self.device).edges.put(flight.event)

    def _drain(self) -> None:
        with self._driver.relaxed():
            do_all([partial(self._driver.synchronize_stream, stream.ptr) for stream in self._streams])

    # Streams

    def _caller(self) -> Stream:
        """Return the stream of the current device that is this thread's."""
        stream = self._driver.current_stream()
        if stream.ptr != LEGACY_STREAM and self._driver.is_capturing(stream.ptr):
            raise CaptureError(
                f"spread({self._name}): the current stream of device {self._driver.current_device()} is being captured; take "
                f"results before, or after"
            )
        return stream

    def _on(self, which: int, function: Callable[..., Any], *args: Any) -> Any:
        return run_on(self._internals, self._streams[which], self.device, None, function, args, {})

    def _order(self, first: int, then: int) -> None:
        self._internals.device(self.device).edges.order(self._streams[first].ptr, self._streams[then].ptr)

    def _event(self, which: int) -> Any:
        events = self._internals.device(self.device).edges
        event = events.take()
        try:
            self._driver.record_event(event, self._streams[which].ptr)
        except BaseException:
            events.put(event)
            raise
        return event

    def _wait(self, device: int, first: int, then_device: int, then: int) -> None:
        """Let a stream wait for what another one was given by now, of another device perhaps."""
        driver = self._driver
        with on_device(driver, device):
            events = self._internals.device(device).edges
            event = events.take()
            try:
                driver.record_event(event, first)
                with on_device(driver, then_device):
                    driver.wait_event(then, event)
            finally:
                events.put(event)  # a wait holds on to the record that it was given

    # Copies

    def _brought(self, caller: Stream, shared: bool, value: Any) -> Any:
        """Return an array's copy on this device by the current stream, which brings; what is no array as it is.

        What is shared and lies here is not copied.
        """
        driver = self._driver
        array: Any
        if isinstance(value, np.ndarray):
            with driver.relaxed():
                array = driver.asarray(value)
                if driver.page_locked(value):  # it is still to be read, and may be overwritten for the next item
                    driver.synchronize_stream(self._streams[0].ptr)
            return array
        if not isinstance(value, driver.array_types):
            return value
        array = value
        source, brings = driver.array_device(array), self._streams[0].ptr
        with on_device(driver, source):
            if source != self.device:
                caller = self._caller()
            if opened:  # the caller's stream waits for branches of its forks that make the array
                before(self._internals, pieces_of(driver, [array]), (), array, caller.ptr)
        self._wait(source, caller.ptr, self.device, brings)
        if shared and source == self.device:
            return array
        target = self._like(array)
        if source == self.device:
            driver.copy(target, array)
        elif _steps(target) == _steps(array):
            with driver.relaxed():
                driver.copy_from_device(target, array, brings)
        else:
            raise ArgumentError(
                f"an array of shape {array.shape} on device {source} has gaps between its elements, which cannot be copied to "
                f"device {self.device} as it is; pass a contiguous copy of it"
            )
        self._wait(self.device, brings, source, caller.ptr)
        return target

    def _like(self, array: Any) -> Any:
        """Return a new array without gaps, with its axes in the order of another one's."""
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        strides = [step * array.dtype.itemsize for step in dense_strides(array.shape, order)]
        with self._driver.relaxed():
            return self._driver.empty(array.shape, strides, array.dtype)

    def _to_host(self, value: Any) -> Any:
        if not isinstance(value, self._driver.array_types):
            return value
        with self._driver.relaxed():
            return self._driver.copy_to_host(value, self._streams[2].ptr)

    # The function

    def _compute(self, staged: Any, caller: Stream, kept: list[Any]) -> Any:
        """Enqueue the function on the current stream, which computes; copies of what it returns."""
        driver, device = self._driver, self.device
        program = self._program(staged)
        if program is None:
            returned = self._function(staged, *self._shared)
        else:
            program.update(staged)
            program.replay()
            returned = program.outputs
        kept.append(returned)
        make = partial(Results, driver, self._name, device, returned, None)
        if self._host:
            results = make()
        else:
            results = run_on(self._internals, caller, device, None, make, (), {})
            self._internals.device(device).edges.order(caller.ptr, self._streams[1].ptr)
        copy_all(driver, results.copies)
        return results.value

    def _program(self, staged: Any) -> Program | None:
        """Return the program for arrays that lie like these; None where the function is to run eagerly."""
        driver = self._driver
        if self._eager.always:
            return None
        plain = [kind_of(leaf) for leaf in leaves(staged) if not isinstance(leaf, driver.array_types)]
        if plain or not [*leaves(staged)]:  # a program would go on with the values that it was recorded with
            self._eager.say(f"an item holds a value of type {plain[0]}, which is no array" if plain else "an item holds no array")
            return None
        key = geometry(staged)
        program = self._programs.pop(key, None)
        if program is None:
            while len(self._programs) >= MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs))).close()
            function, shared = self._function, self._shared

            def call(item: Any) -> Any:
                return function(item, *shared)

            call.__qualname__ = self._name
            try:
                # Its inputs are its own: it overwrites them.
                program = record(call, rebuilt(staged, self._own), pool=self._pool, lanes=self._lanes)
            except CaptureError as error:
                self._eager.always = True
                self._eager.say(str(error))
                return None
        self._programs[key] = program
        return program

    def _own(self, array: Any) -> Any:
        copy = self._like(array)
        self._driver.copy(copy, array)
        return copy


def rebuilt(value: Any, of: Callable[[Any], Any]) -> Any:
    """Return lists, tuples and dictionaries anew, with what a function makes of all else that they hold."""
    if isinstance(value, dict):
        return {key: rebuilt(entry, of) for key, entry in value.items()}
    if not isinstance(value, (list, tuple)):
        return of(value)
    entries = [rebuilt(entry, of) for entry in value]
    if isinstance(value, list):
        return entries
    named: Any = type(value)
    return named(*entries) if hasattr(named, "_fields") else tuple(entries)


def geometry(value: Any) -> Hashable:
    """Return what two items have in common that one program is for."""
    if isinstance(value, dict):
        return dict, tuple([(key, geometry(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return type(value), tuple([geometry(entry) for entry in value])
    return value.shape, value.strides, value.dtype


def check_copied(place: str, value: Any, driver: Driver, *, inside: bool) -> None:
    """Raise for an array that is not copied to devices: of another library, with a mask, which would be lost.

    With ``inside`` also for one of the driver's inside an object: nothing would order its use after whoever writes it.
    """
    for leaf in leaves(value):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArrayTypeError(f"{place} holds {shown(leaf)}, whose mask is not copied to devices: pass its data and its mask")
        if isinstance(leaf, (np.ndarray, *driver.array_types, *PLAIN)):
            continue
        if is_foreign(leaf):
            converter = "cupy.from_dlpack" if driver.name == "cuda" else ASARRAY
            raise ArrayTypeError(
                f"{place} holds {shown(leaf)}, which is not copied to devices: pass what {converter} makes of it, or an array of "
                f"NumPy's"
            )
        for array in leaves(leaf, attributes(leaf), calls=True) if inside else ():
            if isinstance(array, driver.array_types) and not isinstance(array, np.ndarray):
                raise ArrayTypeError(
                    f"{place} holds a {kind_of(leaf)} with {shown(array)} in it, which is not copied to devices: pass arrays in "
                    f"lists, tuples and dictionaries"
                )


def _steps(array: Any) -> tuple[int, ...]:
    """Strides of the axes that have any: those of extent 1 say nothing."""
    return tuple([step for extent, step in zip(array.shape, array.strides, strict=True) if extent != 1])
