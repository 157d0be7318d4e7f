"""Run one device of a spread.

A worker owns the device's streams, the copies on the device, its programs, and its items in flight. It uses three streams, so
that copies overlap with computation: the first stream brings items to the device, the second stream computes, and the third
stream takes results to the host. The streams wait for each other as follows:

- The stream that brings items waits for the caller's current stream on the item's device, because that stream made the item's
  array. Then the caller's stream waits for the copy, so the caller may change or free the array.
- At first, the stream that computes waits for the caller's stream, which may have made the arrays of the function's closure.
- For each item, the stream that computes waits for the copies of the item, and the stream that takes results waits for the
  stream that computes.
- Arrays for results are allocated for the caller's stream, and their memory returns to this stream when they are freed. Earlier
  work on the caller's stream may still read this memory. So the stream that computes waits for the caller's stream before it
  writes results.
- All other allocations are held until the host has seen that the item is done, so no memory is reused too early.

The first item of a geometry goes the general way, by a recorded function. If later items hold only plain arrays, they go a short
way: the same work in the same order, but with as few calls as possible, see `CopyPlan`. On the short way, the caller's stream
itself copies an item of this device, which saves three calls. If the host has seen that nothing is in flight, no work reads the
program's inputs, and the copy goes directly into them.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool._util.arguments import check_ends
from handlepool._util.cleanup import do_all
from handlepool._util.names import kind_of
from handlepool._util.reachable import leaves
from handlepool.drivers.streams import LEGACY_STREAM, Stream
from handlepool.errors import ArgumentError, CaptureError
from handlepool.order.places import before
from handlepool.order.reached import pieces_of
from handlepool.pool.context import active, on_device, run_on
from handlepool.pool.pool import HandlePool
from handlepool.recording.outputs import Results, new_like
from handlepool.recording.sharing import copier, rebuilt, relation, runs_apart
from handlepool.recording.update import copy_all
from handlepool.spreading.copy_plan import CopyPlan
from handlepool.spreading.item_function import Eager, ItemFunction
from handlepool.spreading.items import check_copied, geometry, itself, steps
from handlepool.tensors.layout import one_run


class InFlight:
    """An item that was given to a device.

    Attributes
    ----------
    index, device : int
        The item's number, and the ordinal of the device.
    value
        The item's result, which is complete when the item is done. Host arrays in the result must be copied before the caller
        gets them, because their page-locked memory is reused.
    kept
        The arrays that are held until the item is done.
    event
        An event that was recorded after the item's last work.
    copy_plan : CopyPlan or None
        The plan that gets its staging arrays back when the item is done. They come first in ``kept``. None for an item
        that went the general way.
    error : Exception or None
        The error of the item, if there is no result.
    done : bool
        Whether the host has seen that the device is done with the item.
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


class DeviceWorker:
    """Drive one device of a spread.

    One thread at a time uses the worker. Before `start`, the worker has no streams and no memory.

    Parameters
    ----------
    pool : HandlePool
    device : int
    name : str
        Name of the function, for messages.
    function : callable
    shared : sequence
    lanes : int or None
    host : bool
        Whether results are taken to the host.
    eager : Eager
        The state of eager runs, shared by all devices.
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
        # The index of the last item that was given to this worker.
        self.last = -1
        self._pool, self._internals, self._driver = pool, pool.internals, pool.driver
        self._name, self._function, self._lanes, self._host, self._eager = name, function, lanes, host, eager
        self._kind: Any = self._driver.array_types[0]
        self._kinds = [{self._kind}, {np.ndarray}]
        self._given = shared
        self._shared: Any = None
        # The stream that brings items, the stream that computes, and the stream that takes results.
        self._streams: list[Stream] = []
        self._recorded: ItemFunction | None = None
        # The copy plans for items that take the short way, by the geometry of the items.
        self._copy_plans: dict[Hashable, CopyPlan] = {}
        self.running: deque[InFlight] = deque()

    def start(self, index: int) -> None:
        """Make the streams and copy ``shared``, at the first call only.

        ``index`` is the number of the item that needs the streams.
        """
        if self._shared is not None:
            return
        # `last` is set before anything can fail. So if the start fails, `Workers.free` gives the next item to another device.
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
                # The stream that computes waits for the caller's stream, which may have made the arrays of the function's
                # closure.
                self._wait(self.device, caller.ptr, self.device, self._streams[1].ptr)
            except BaseException:
                self._drain()
                raise

    def give(self, index: int, item: Any) -> InFlight:
        """Enqueue all work of an item.

        If the function raises an error, the caller gets it after all work of the item has ended.
        """
        arrays: list[Any] | None
        key: Hashable
        # For a single array, this branch makes the same key as the other branch, in a third of the time.
        if type(item) is self._kind:
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
        if copy_plan is None or arrays is None or not near or active or self._eager.always or not copy_plan.holds():
            flight = self._give(index, item, arrays, key)
        else:
            flight = self._give_by(copy_plan, index, arrays)
        self.running.append(flight)
        return flight

    def _give(self, index: int, item: object, arrays: list[Any] | None, key: Hashable) -> InFlight:
        """Enqueue an item the general way, by the recorded function.

        Afterwards `_learn` decides whether later items of the same geometry can take the short way.
        """
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
                # `_drain` waits until no stream uses the arrays in `kept`, which are then freed.
                self._drain()
                raise

    def collect_done(self) -> None:
        """Mark finished items as done; the caller is inside `Driver.relaxed`."""
        while self.running:
            flight = self.running[0]
            try:
                if not self._driver.event_done(flight.event, failures=True):
                    return
            except Exception as error:
                flight.error = error
                # Although the query failed, work of the item may still be running. So the host waits for the item.
                self._wait_for(flight)
            self._collect(flight)

    def finish(self, flight: InFlight) -> None:
        """Wait on the host for an item and all earlier items."""
        with self._driver.relaxed():
            while not flight.done:
                self._wait_for(self.running[0])
                self._collect(self.running[0])

    def close(self) -> None:
        """Wait for items in flight, and release all resources."""
        if not self._streams:
            return
        with on_device(self._driver, self.device):
            flights = [partial(self.finish, flight) for flight in self.running]
            self._copy_plans.clear()
            recorded, self._recorded = self._recorded, None
            do_all([*flights, self._drain, *([] if recorded is None else [recorded.close])])
            self._shared = None
            # `clear` drops the last references to the streams, which destroys the streams by CUDA calls. So `relaxed` is
            # needed.
            with self._driver.relaxed():
                self._streams.clear()

    def _wait_for(self, flight: InFlight) -> None:
        try:
            self._driver.synchronize_event(flight.event)
        except Exception as error:
            flight.error = error

    def _collect(self, flight: InFlight) -> None:
        """Mark the oldest item in flight as done; release its arrays."""
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
        """Return an item's arrays if it holds only arrays of one kind.

        All arrays must be of NumPy, or all of the driver. Return None for any other item.
        """
        found = [*leaves(item)] if isinstance(item, (list, tuple, dict)) else [item]
        kinds = {*map(type, found)}
        return found if kinds in self._kinds else None

    def _near(self, arrays: list[Any], copy_plan: CopyPlan) -> bool:
        """Return whether an item's arrays can be copied the short way.

        They can if all are in pageable host memory, or all on one device, and if no two share memory.
        """
        driver = self._driver
        # If a list occurs in an item twice, its arrays are only once in ``arrays``. So the numbers of arrays are compared.
        if len(copy_plan.sizes) > 1 and (len(arrays) != len(copy_plan.sizes) or not runs_apart(driver, arrays, copy_plan.sizes)):
            return False
        if type(arrays[0]) is np.ndarray:
            with driver.relaxed():
                return not any(map(driver.page_locked, arrays))
        return len(arrays) == 1 or len({driver.array_device(each) for each in arrays}) == 1

    def _learn(self, arrays: list[Any], key: Hashable, staged: object) -> None:
        """Make a copy plan for later items like this item, if possible.

        ``arrays`` are the item's arrays, and ``key`` is its geometry. ``staged`` is the item with copies on this device, for
        which the recorded function was called.
        """
        driver = self._driver
        recorded = self._recorded
        found = None if recorded is None else recorded.served_by(staged)
        if recorded is None or found is None:
            return
        # If the recorded function has dropped a variant, the plans for it are dropped too. Otherwise they would keep its programs
        # alive.
        self._copy_plans = {known: plan for known, plan in self._copy_plans.items() if recorded.keeps(plan.variant)}
        copies, copy_plan = [*leaves(staged)], CopyPlan(driver, *found)
        if relation(driver, staged) or not copy_plan.plain or not len(arrays) == len(copies) == len(copy_plan.inputs):
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
            source = None if type(arrays[0]) is np.ndarray else driver.array_device(arrays[0])
            with driver.relaxed():
                if source == device and not self._host and not self.running:
                    return self._enqueued_here(copy_plan, index, arrays, caller)
                return self._enqueued(copy_plan, index, arrays, source, caller)
        finally:
            if before != device:
                driver.set_device(before)

    def _enqueued(self, copy_plan: CopyPlan, index: int, arrays: list[Any], source: int | None, caller: int) -> InFlight:
        """Enqueue an item the short way, by its geometry's copy plan.

        The work is the same as in `_give`. All arrays are on the device ``source``, or on the host if ``source`` is None.
        """
        driver, device = self._driver, self.device
        brings, computes, takes = self._pointers
        fresh = not copy_plan.spare
        copies, results = spare = self._spare(copy_plan) if fresh else copy_plan.spare.pop()
        # One event serves for all waits below, because a wait refers to the last record before the wait.
        event = self._events.acquire()
        kept: list[Any] = [spare, arrays]
        try:
            if not self._host:
                results = [driver.empty(*each) for each in copy_plan.results]
            if source is None:
                kept.extend(driver.copy_from_host(copy, each, brings) for copy, each in zip(copies, arrays, strict=True))
            # If the item is on this device, the caller's stream itself copies it. That stream made the item and may overwrite it
            # next, so no waits are needed.
            elif source == device:
                # New staging arrays were allocated for the stream that brings items, which may still use their memory. So the
                # caller's stream waits for that stream.
                if fresh:
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
            copy_plan.instance.replay(self._streams[1])
            if not self._host:
                driver.record_event(event, caller)
                driver.wait_event(computes, event)
            for result, output in zip(results, copy_plan.outputs, strict=True):
                driver.copy_run(result, output, computes)
            if self._host:
                driver.record_event(event, computes)
                driver.wait_event(takes, event)
                # Each result is added to ``kept`` as soon as its copy is enqueued, because a later copy may fail.
                kept.extend(driver.copy_to_host(result, takes) for result in results)
                results = kept[-len(results) :]
            driver.record_event(event, takes if self._host else computes)
            value = results[0] if copy_plan.returned is copy_plan.outputs[0] else copy_plan.value(results)
            return InFlight(index, device, value, kept, event, copy_plan)
        except BaseException:
            # `_drain` waits until no stream uses the arrays in `kept`, which are then freed.
            self._drain(brings)
            self._events.release(event)
            raise

    def _enqueued_here(self, copy_plan: CopyPlan, index: int, arrays: list[Any], caller: int) -> InFlight:
        """Enqueue an item of this device while nothing is in flight.

        The work is the same as in `_enqueued`, but the item is copied directly into the program's inputs. The results stay on
        this device.
        """
        driver, computes, event = self._driver, self._pointers[1], self._events.acquire()
        try:
            results = [driver.empty(*each) for each in copy_plan.results]
            for target, each in zip(copy_plan.inputs, arrays, strict=True):
                driver.copy_run(target, each, caller)
            driver.record_event(event, caller)
            driver.wait_event(computes, event)
            copy_plan.instance.replay(self._streams[1])
            for result, output in zip(results, copy_plan.outputs, strict=True):
                driver.copy_run(result, output, computes)
            driver.record_event(event, computes)
            value = results[0] if copy_plan.returned is copy_plan.outputs[0] else copy_plan.value(results)
            return InFlight(index, self.device, value, arrays, event)
        except BaseException:
            # `_drain` waits until no stream uses the new arrays, which are then freed.
            self._drain(caller)
            self._events.release(event)
            raise

    def _followed(self, source: int) -> int:
        """Let the stream that brings items wait for the device ``source``.

        It waits for the caller's current stream on that device. Return the pointer of the caller's stream.
        """
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
        """Allocate staging arrays for an item's inputs and its results.

        Arrays for results are only needed with ``to="host"``. Each array is allocated for the stream that writes it.
        """
        copies = self._on(0, partial(self._new, [(each.shape, each.strides, each.dtype) for each in copy_plan.inputs]))
        return copies, self._on(1, partial(self._new, copy_plan.results)) if self._host else []

    def _new(self, lie: Sequence[Any]) -> list[Any]:
        with self._driver.relaxed():
            return [self._driver.empty(*each) for each in lie]

    # Streams

    def _caller(self) -> Stream:
        """Return this thread's current stream on the current device."""
        stream = self._driver.current_stream()
        if stream.ptr != LEGACY_STREAM and self._driver.is_capturing(stream.ptr):
            raise CaptureError(
                f"spread({self._name}): the current stream of device {self._driver.current_device()} is being captured; take "
                f"results before or after the capture"
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
        """Let the stream ``then`` wait for the present work of ``first``.

        The streams are pointers, and may belong to different devices.
        """
        driver = self._driver
        with on_device(driver, device):
            events = self._internals.device(device).edges
            event = events.acquire()
            try:
                driver.record_event(event, first)
                with on_device(driver, then_device):
                    driver.wait_event(then, event)
            finally:
                # The enqueued wait refers to the record above, so the event can be recorded again at once.
                events.release(event)

    # Copies

    def _staged(self, item: object, caller: Stream) -> Any:
        """Return an item with copies of its arrays on this device.

        If arrays of the item share memory, their copies share memory alike.
        """
        return rebuilt(item, copier(self._driver, item, partial(self._brought, caller, False)))

    def _brought(self, caller: Stream, shared: bool, value: Any, target: Any = None) -> Any:
        """Copy an array to this device; return other values unchanged.

        The stream that brings items is current, and copies. If ``target`` is given, the array is copied into it. ``shared`` says
        that ``value`` is an argument that all calls share: such an array is not copied if it is already on this device.
        """
        driver = self._driver
        array: Any
        if isinstance(value, np.ndarray):
            with driver.relaxed():
                array = driver.asarray(value)
                # The device reads page-locked memory only later. So the host waits for the copy here, because the caller may
                # overwrite the memory for the next item.
                if driver.page_locked(value):
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
            # If branches of the caller's forks write the array, the caller's stream waits for these branches.
            if active:
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
                f"an array of shape {array.shape} on device {source} has gaps between its elements, so it cannot be copied to "
                f"device {self.device}; pass a contiguous copy of the array"
            )
        self._wait(self.device, brings, source, caller.ptr)
        return target

    def _to_host(self, kept: list[Any], value: object) -> Any:
        if not isinstance(value, self._driver.array_types):
            return value
        with self._driver.relaxed():
            # The result is added to ``kept`` as soon as its copy is enqueued, because a later copy may fail.
            kept.append(self._driver.copy_to_host(value, self._streams[2].ptr))
        return kept[-1]

    # The function

    def _compute(self, staged: object, caller: Stream, kept: list[Any]) -> Any:
        """Enqueue the function for an item, and return copies of its results.

        The stream that computes is current.
        """
        driver, device = self._driver, self.device
        # The function may change the lists and dictionaries of its item. So it gets copies of them, and the kept item keeps all
        # its arrays alive.
        if self._recordable(staged):
            returned = self._recorded_function()(staged)
        else:
            returned = self._function(rebuilt(staged, itself), *self._shared)
        kept.append(returned)
        make = partial(Results, driver, self._name, device, returned, None)
        if self._host:
            results = make()
        else:
            results = run_on(self._internals, caller, device, None, make, (), {})
            self._events.order(caller.ptr, self._streams[1].ptr)
        copy_all(driver, results.copies)
        return results.value

    def _recordable(self, staged: object) -> bool:
        """Return whether a program can serve the item: it has only arrays."""
        if self._eager.always:
            return False
        plain = [kind_of(leaf) for leaf in leaves(staged) if not isinstance(leaf, self._driver.array_types)]
        # An item with any other value runs eagerly, because a program would use the recorded value for each item.
        if plain or not [*leaves(staged)]:
            self._eager.say(
                f"an item holds a value of type {plain[0]}, which is no array: pass the value as an array"
                if plain
                else "an item holds no array"
            )
            return False
        return True

    def _recorded_function(self) -> ItemFunction:
        if self._recorded is None:
            self._recorded = ItemFunction(self._name, self._function, self._shared, self._driver, self._lanes, self._eager)
        return self._recorded
