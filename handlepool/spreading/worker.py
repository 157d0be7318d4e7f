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

The first item of a geometry goes the general way, by the means that programs have for all callers. Further items that hold plain
arrays alone go a short way, in the same order and with as few calls as possible: see `CopyPlan`. There an item of this device is
copied on the caller's stream itself, which spares three calls. It is copied into the program's input where the host has seen that
nothing is in flight, so that no work reads that input any more.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool._util.arguments import check_ends
from handlepool._util.cleanup import do_all
from handlepool._util.frames import frames_inside
from handlepool._util.names import kind_of
from handlepool._util.reachable import leaves
from handlepool.drivers.streams import LEGACY_STREAM, Stream
from handlepool.errors import ArgumentError, CaptureError
from handlepool.order.places import before
from handlepool.order.reached import pieces_of
from handlepool.pool.context import active, on_device, run_on
from handlepool.pool.pool import HandlePool
from handlepool.recording.outputs import Results, new_like
from handlepool.recording.program import Program
from handlepool.recording.record import record
from handlepool.recording.sharing import copier, rebuilt, relation, runs_apart
from handlepool.recording.update import copy_all
from handlepool.spreading.copy_plan import CopyPlan
from handlepool.spreading.items import check_copied, geometry, itself, steps
from handlepool.tensors.layout import one_run

MOST_PROGRAMS = 8
"""Of a device: the one that was used least recently is closed for another geometry."""


class InFlight:
    """An item that was given to a device.

    Attributes
    ----------
    index, device : int
    value
        Its result, ready once it is done. Arrays of the host must be copied: their memory is page-locked.
    kept
        The arrays that are held until then.
    event
        Recorded behind its last work.
    copy_plan : CopyPlan or None
        The owner of the copies that come first in ``kept``.
    error : Exception or None
        Why there is no result.
    done : bool
        Whether the host has seen that the device is done with it.
    """

    __slots__ = ("copy_plan", "device", "done", "error", "event", "index", "kept", "value")

    def __init__(
        self,
        index: int,
        device: int,
        value: object = None,
        kept: Sequence[Any] | None = None,
        event: object = None,
        copy_plan: "CopyPlan | None" = None,
    ) -> None:
        self.index, self.device, self.value, self.kept, self.event, self.copy_plan = index, device, value, kept, event, copy_plan
        self.error: Exception | None = None
        self.done = False


class Eager:
    """Whether a spread runs eagerly, and its one warning.

    Attributes
    ----------
    always : bool
        Whether nothing is recorded any more.
    """

    def __init__(self, name: str) -> None:
        self.always = False
        self._name = name
        self._said = False

    def stop_recording(self, why: str) -> None:
        """Record nothing from now on, and warn."""
        self.always = True
        self.say(why)

    def say(self, why: str) -> None:
        """Warn of the first thing that is not recorded."""
        if not self._said:
            self._said = True
            what = "its items run" if self.always else "such items run"
            text = f"spread({self._name}): {what} eagerly, which is slower on several devices, since they cannot be recorded"
            warnings.warn(f"{text}: {why}", RuntimeWarning, stacklevel=frames_inside())


class DeviceWorker:
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
        self._kind: Any = self._driver.array_types[0]
        self._kinds = [{self._kind}, {np.ndarray}]
        self._given = shared
        self._shared: Any = None
        self._streams: list[Stream] = []  # brings, computes, takes
        self._programs: dict[Hashable, CopyPlan] = {}
        self._copy_plans: dict[Hashable, CopyPlan] = {}  # of `_programs` those that are plain, by items that were seen to go so
        self.running: deque[InFlight] = deque()

    def start(self, index: int) -> None:
        """Make the streams, and copy what is shared, where that was not done yet; for an item."""
        if self._shared is not None:
            return
        # Where this fails the device has had its turn, and the next item goes to another one.
        self.last = index
        driver = self._driver
        with on_device(driver, self.device):
            if not self._streams:
                with driver.relaxed():
                    self._streams = [driver.create_stream() for _ in range(3)]
                self._pointers = [stream.ptr for stream in self._streams]
                self._events = self._internals.device(self.device).edges
            caller = self._caller()
            try:
                self._shared = self._on(0, rebuilt, tuple(self._given), partial(self._brought, caller, True))
                self._order(0, 1)
                self._wait(self.device, caller.ptr, self.device, self._streams[1].ptr)  # for what the closure holds
            except BaseException:
                self._drain()
                raise

    def give(self, index: int, item: Any) -> InFlight:
        """Enqueue all that is to be done with an item; raises what its function does, when nothing of it runs any more."""
        arrays: list[Any] | None
        key: Hashable
        if type(item) is self._kind:  # as for any other, in a third of the time
            arrays, key, near = [item], (self._kind, (item.shape, item.strides, item.dtype)), True
        else:
            arrays = self._plain(item)
            try:
                key = None if arrays is None else (type(arrays[0]), geometry(item))
            except RecursionError:
                check_ends(f"item {index} holds", item)
                raise
            near = arrays is not None and key in self._copy_plans and self._near(arrays, self._copy_plans[key])
        copy_plan = self._copy_plans.get(key)
        if copy_plan is None or arrays is None or not near or active or self._eager.always:
            flight = self._give(index, item, arrays, key)
        else:
            flight = self._give_by(copy_plan, index, arrays)
        self.running.append(flight)
        return flight

    def _give(self, index: int, item: object, arrays: list[Any] | None, key: Hashable) -> InFlight:
        """Enqueue it the general way, and find out whether items like it can go the short one."""
        driver = self._driver
        with on_device(driver, self.device):
            caller = self._caller()
            self.last = index
            kept: list[Any] = [item]
            check_copied(f"item {index}", item, driver, inside=True)
            try:
                staged = self._on(0, self._staged, item, caller)
                kept.append(staged)
                self._order(0, 1)
                value = self._on(1, self._compute, staged, caller, kept)
                if self._host:
                    kept.append(value)
                    self._order(1, 2)
                    value = self._on(2, rebuilt, value, partial(self._to_host, kept))
                if arrays is not None and not self._eager.always:
                    self._learn(arrays, key, staged)
                return InFlight(index, self.device, value, kept, self._event(2 if self._host else 1))
            except BaseException:
                self._drain()  # `kept` is used no more after that
                raise

    def collect_done(self) -> None:
        """Collect the items that the device is done with; called inside `relaxed`."""
        while self.running:
            flight = self.running[0]
            try:
                if not self._driver.event_done(flight.event, failures=True):
                    return
            except Exception as error:
                flight.error = error
                self._wait_for(flight)  # the question may have failed alone, before the work has run
            self._collect(flight)

    def finish(self, flight: InFlight) -> None:
        """Wait on the host until it is done with an item, and so with those before it."""
        with self._driver.relaxed():
            while not flight.done:
                self._wait_for(self.running[0])
                self._collect(self.running[0])

    def take_over(self) -> None:
        """Have its programs belong to the calling thread."""
        for copy_plan in self._programs.values():
            copy_plan.program._take_over()  # noqa: SLF001 - a spread sees to it that one thread at a time uses them

    def close(self) -> None:
        """Wait for what it has in flight, and give back all that it has."""
        if not self._streams:
            return
        with on_device(self._driver, self.device):
            flights = [partial(self.finish, flight) for flight in self.running]
            self._copy_plans.clear()
            do_all([*flights, self._drain, *[copy_plan.program.close for copy_plan in self._programs.values()]])
            self._programs.clear()
            self._shared = None
            with self._driver.relaxed():  # the streams go with their last references
                self._streams.clear()

    def _wait_for(self, flight: InFlight) -> None:
        try:
            self._driver.synchronize_event(flight.event)
        except Exception as error:
            flight.error = error

    def _collect(self, flight: InFlight) -> None:
        """Take note that it is done with the first item in flight."""
        self.running.popleft()
        if flight.copy_plan is not None and flight.kept is not None:
            flight.copy_plan.spare.append(flight.kept[0])
        flight.done, flight.kept, flight.copy_plan = True, None, None
        self._events.release(flight.event)

    def _drain(self, *others: int) -> None:
        pointers = {*[stream.ptr for stream in self._streams], *others}
        with self._driver.relaxed():
            do_all([partial(self._driver.synchronize_stream, pointer) for pointer in pointers])

    # The short way

    def _plain(self, item: object) -> list[Any] | None:
        """Return the arrays of an item that holds nothing else, all NumPy's or all the driver's; None for any other."""
        found = [*leaves(item)] if isinstance(item, (list, tuple, dict)) else [item]
        kinds = {*map(type, found)}
        return found if kinds in self._kinds else None

    def _near(self, arrays: list[Any], copy_plan: CopyPlan) -> bool:
        """Whether arrays can be copied here as they are: from pageable memory, or all from one device, and each by itself."""
        driver = self._driver
        # A list in two places has its arrays once here.
        if len(copy_plan.sizes) > 1 and (len(arrays) != len(copy_plan.sizes) or not runs_apart(driver, arrays, copy_plan.sizes)):
            return False
        if type(arrays[0]) is np.ndarray:
            with driver.relaxed():
                return not any(map(driver.page_locked, arrays))
        return len(arrays) == 1 or len({driver.array_device(each) for each in arrays}) == 1

    def _learn(self, arrays: list[Any], key: Hashable, staged: object) -> None:
        """Let items like this one, which was copied and went to a program, go the short way, where they can."""
        copies = [*leaves(staged)]
        copy_plan = self._programs.get((geometry(staged), ()))
        if copy_plan is None or not copy_plan.plain or not len(arrays) == len(copies) == len(copy_plan.inputs):
            return
        for array, copy, target in zip(arrays, copies, copy_plan.inputs, strict=True):
            lies = copy.strides if type(array) is np.ndarray else array.strides
            runs = [one_run(copy.shape, copy.strides, each, copy.dtype.itemsize) for each in (lies, target.strides)]
            if array.dtype != copy.dtype or not all(runs):
                return
        self._copy_plans[key] = copy_plan

    def _give_by(self, copy_plan: CopyPlan, index: int, arrays: list[Any]) -> InFlight:
        driver, device = self._driver, self.device
        before = driver.current_device()
        if before != device:
            driver.set_device(device)
        try:
            caller = self._caller().ptr
            self.last = index
            if len(self._programs) > 1:  # it was used last
                self._programs[copy_plan.key] = self._programs.pop(copy_plan.key)
            source = None if type(arrays[0]) is np.ndarray else driver.array_device(arrays[0])
            with driver.relaxed():
                if source == device and not self._host and not self.running:
                    return self._enqueued_here(copy_plan, index, arrays, caller)
                return self._enqueued(copy_plan, index, arrays, source, caller)
        finally:
            if before != device:
                driver.set_device(before)

    def _enqueued(self, copy_plan: CopyPlan, index: int, arrays: list[Any], source: int | None, caller: int) -> InFlight:
        """Enqueue what `_give` does for an item of a known geometry, and of one device; None is the host."""
        driver, device = self._driver, self.device
        brings, computes, takes = self._pointers
        fresh = not copy_plan.spare
        copies, results = spare = self._spare(copy_plan) if fresh else copy_plan.spare.pop()
        event = self._events.acquire()  # each wait holds on to the record that it was given
        kept: list[Any] = [spare, arrays]
        try:
            if not self._host:
                results = [driver.empty(*each) for each in copy_plan.results]
            if source is None:
                kept.extend(driver.copy_from_host(copy, each, brings) for copy, each in zip(copies, arrays, strict=True))
            elif source == device:  # on the caller's stream, which made it and may overwrite it next
                if fresh:  # in memory that the stream which brings may still use
                    self._events.order(brings, caller)
                brings = caller
                for copy, each in zip(copies, arrays, strict=True):
                    driver.copy_run(copy, each, brings)
            else:
                caller_there = self._followed(source)
                for copy, each in zip(copies, arrays, strict=True):
                    driver.copy_from_device(copy, each, brings)
            driver.record_event(event, brings)
            driver.wait_event(computes, event)
            if source not in (None, device):
                driver.set_device(source)
                try:
                    driver.wait_event(caller_there, event)
                finally:
                    driver.set_device(device)
            for target, copy in zip(copy_plan.inputs, copies, strict=True):
                driver.copy_run(target, copy, computes)
            copy_plan.program.replay(self._streams[1])
            if not self._host:
                driver.record_event(event, caller)
                driver.wait_event(computes, event)
            for result, output in zip(results, copy_plan.outputs, strict=True):
                driver.copy_run(result, output, computes)
            if self._host:
                driver.record_event(event, computes)
                driver.wait_event(takes, event)
                kept.extend(driver.copy_to_host(result, takes) for result in results)  # at once: the next one may fail
                results = kept[-len(results) :]
            driver.record_event(event, takes if self._host else computes)
            value = results[0] if copy_plan.returned is copy_plan.outputs[0] else copy_plan.value(results)
            return InFlight(index, device, value, kept, event, copy_plan)
        except BaseException:
            self._drain(brings)  # `kept` is used no more after that
            self._events.release(event)
            raise

    def _enqueued_here(self, copy_plan: CopyPlan, index: int, arrays: list[Any], caller: int) -> InFlight:
        """As `_enqueued`, for an item and results of this device, where nothing is in flight."""
        driver, computes, event = self._driver, self._pointers[1], self._events.acquire()
        try:
            results = [driver.empty(*each) for each in copy_plan.results]
            for target, each in zip(copy_plan.inputs, arrays, strict=True):
                driver.copy_run(target, each, caller)
            driver.record_event(event, caller)
            driver.wait_event(computes, event)
            copy_plan.program.replay(self._streams[1])
            for result, output in zip(results, copy_plan.outputs, strict=True):
                driver.copy_run(result, output, computes)
            driver.record_event(event, computes)
            value = results[0] if copy_plan.returned is copy_plan.outputs[0] else copy_plan.value(results)
            return InFlight(index, self.device, value, arrays, event)
        except BaseException:
            self._drain(caller)  # what was allocated is used no more after that
            self._events.release(event)
            raise

    def _followed(self, source: int) -> int:
        """Let the stream that brings wait for the caller's of another device; the pointer of that."""
        driver, events = self._driver, self._internals.device(source).edges
        driver.set_device(source)
        try:
            caller = self._caller().ptr
            event = events.acquire()
            try:
                driver.record_event(event, caller)
                driver.wait_event(self._pointers[0], event)
            finally:
                events.release(event)
        finally:
            driver.set_device(self.device)
        return caller

    def _spare(self, copy_plan: CopyPlan) -> tuple[list[Any], list[Any]]:
        """Return new copies of an item, and of what it returns where that goes to the host, in memory of who writes them."""
        copies = self._on(0, partial(self._new, [(each.shape, each.strides, each.dtype) for each in copy_plan.inputs]))
        return copies, self._on(1, partial(self._new, copy_plan.results)) if self._host else []

    def _new(self, lie: Sequence[Any]) -> list[Any]:
        with self._driver.relaxed():
            return [self._driver.empty(*each) for each in lie]

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

    def _on(self, which: int, function: Callable[..., Any], *args: object) -> Any:
        return run_on(self._internals, self._streams[which], self.device, None, function, args, {})

    def _order(self, first: int, then: int) -> None:
        self._events.order(self._streams[first].ptr, self._streams[then].ptr)

    def _event(self, which: int) -> Any:
        event = self._events.acquire()
        try:
            self._driver.record_event(event, self._streams[which].ptr)
        except BaseException:
            self._events.release(event)
            raise
        return event

    def _wait(self, device: int, first: int, then_device: int, then: int) -> None:
        """Let a stream wait for what another one was given by now, of another device perhaps."""
        driver = self._driver
        with on_device(driver, device):
            events = self._internals.device(device).edges
            event = events.acquire()
            try:
                driver.record_event(event, first)
                with on_device(driver, then_device):
                    driver.wait_event(then, event)
            finally:
                events.release(event)  # a wait holds on to the record that it was given

    # Copies

    def _staged(self, item: object, caller: Stream) -> Any:
        """Return an item with copies on this device of its arrays, which share memory as they do."""
        return rebuilt(item, copier(self._driver, item, partial(self._brought, caller, False)))

    def _brought(self, caller: Stream, shared: bool, value: Any, target: Any = None) -> Any:
        """Return an array's copy on this device by the current stream, which brings; what is no array as it is.

        The copy is the target where one is given. What is shared and lies here is not copied.
        """
        driver = self._driver
        array: Any
        if isinstance(value, np.ndarray):
            with driver.relaxed():
                array = driver.asarray(value)
                if driver.page_locked(value):  # it is still to be read, and may be overwritten for the next item
                    driver.synchronize_stream(self._streams[0].ptr)
            if target is not None:
                driver.copy(target, array)
            return array
        if not isinstance(value, driver.array_types):
            return value
        array = value
        source, brings = driver.array_device(array), self._streams[0].ptr
        with on_device(driver, source):
            if source != self.device:
                caller = self._caller()
            if active:  # the caller's stream waits for branches of its forks that make the array
                before(self._internals, pieces_of(driver, [array]), (), array, caller.ptr)
        self._wait(source, caller.ptr, self.device, brings)
        if shared and source == self.device:
            return array
        target = new_like(driver, array) if target is None else target
        if source == self.device:
            driver.copy(target, array)
        elif not array.size or steps(target) == steps(array):
            with driver.relaxed():
                driver.copy_from_device(target, array, brings)
        else:
            raise ArgumentError(
                f"an array of shape {array.shape} on device {source} has gaps between its elements, which cannot be copied to "
                f"device {self.device} as it is; pass a contiguous copy of it"
            )
        self._wait(self.device, brings, source, caller.ptr)
        return target

    def _to_host(self, kept: list[Any], value: object) -> Any:
        if not isinstance(value, self._driver.array_types):
            return value
        with self._driver.relaxed():
            kept.append(self._driver.copy_to_host(value, self._streams[2].ptr))  # at once: the next one may fail
        return kept[-1]

    # The function

    def _compute(self, staged: object, caller: Stream, kept: list[Any]) -> Any:
        """Enqueue the function on the current stream, which computes; copies of what it returns."""
        driver, device = self._driver, self.device
        program = self._program(staged)
        if program is None:
            returned = self._function(rebuilt(staged, itself), *self._shared)  # what is kept stays whole
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
            self._events.order(caller.ptr, self._streams[1].ptr)
        copy_all(driver, results.copies)
        return results.value

    def _program(self, staged: object) -> Program | None:
        """Return the program for arrays that lie like these; None where the function is to run eagerly."""
        driver = self._driver
        if self._eager.always:
            return None
        plain = [kind_of(leaf) for leaf in leaves(staged) if not isinstance(leaf, driver.array_types)]
        if plain or not [*leaves(staged)]:  # a program would go on with the values that it was recorded with
            self._eager.say(f"an item holds a value of type {plain[0]}, which is no array" if plain else "an item holds no array")
            return None
        key = geometry(staged), relation(driver, staged)
        copy_plan = self._programs.pop(key, None)
        if copy_plan is None:
            while len(self._programs) >= MOST_PROGRAMS:
                self._copy_plans.clear()  # they are found again
                self._programs.pop(next(iter(self._programs))).program.close()
            function, shared = self._function, self._shared

            def call(item: object) -> Any:
                return function(rebuilt(item, itself), *shared)  # it may change the lists and dictionaries of its item

            call.__qualname__ = self._name
            try:
                inputs = rebuilt(staged, copier(driver, staged, self._own))  # its own: it overwrites them
                program = record(call, inputs, pool=self._pool, lanes=self._lanes)
            except CaptureError as error:
                self._eager.stop_recording(str(error))
                return None
            copy_plan = CopyPlan(driver, key, program, [*leaves(inputs)])
        self._programs[key] = copy_plan
        return copy_plan.program

    def _own(self, array: object, target: object = None) -> Any:
        copy = new_like(self._driver, array) if target is None else target
        self._driver.copy(copy, array)
        return copy
