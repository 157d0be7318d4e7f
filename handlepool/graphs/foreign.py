"""Calls with arrays of other libraries.

A call with the driver's own arrays alone never comes here. What a foreign array adds to a call is *callers*: streams that its
memory is in use on. The call starts after what they were given by then, and they wait for it, unless they are the stream that it
runs on. A fork does the same for all of its branches together: see `Fork`. Of guarantee 8:

- memory of a library that can neither be told of a stream nor be asked for one (DLPack, the CUDA array interface) is kept until
  the GPU has passed the call;
- nothing here makes the host wait.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from handlepool.drivers.protocol import LEGACY_STREAM
from handlepool.graphs.launch import AnyCall
from handlepool.graphs.plan import Plan
from handlepool.pool.context import thread
from handlepool.pool.deferred import keep_for_good, parked, settle
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import Slot
from handlepool.regions.stream_order import order

if TYPE_CHECKING:
    from handlepool.graphs.arrays import Adapted


class ForeignCall:
    """A `GraphCall` with arrays of other libraries."""

    __slots__ = ("_adapted", "_call", "_result", "operands")

    def __init__(self, adapted: "Adapted", call: AnyCall, result: Any) -> None:
        self._adapted = adapted
        self._call = call
        self._result = result
        self.operands = call.operands

    @property
    def plan(self) -> Plan:
        """As `GraphCall.plan`."""
        return self._call.plan

    @property
    def result(self) -> Any:
        """The outputs, which are not of the first array's kind everywhere before `launch` has returned."""
        return self._result

    @property
    def stream(self) -> int | None:
        """As `Adapted.stream`."""
        return self._adapted.stream

    @property
    def callers(self) -> list[int]:
        """As `Adapted.callers`."""
        return self._adapted.callers

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, in order with the callers, and return the outputs."""
        adapted = self._adapted
        pointer = slot.pointer
        for caller in adapted.callers:
            order(adapted.pool, adapted.device, caller, pointer)
        self._call.launch(slot)
        for caller in adapted.callers:
            order(adapted.pool, adapted.device, pointer, caller)
        return self._finish(slot)

    def enqueue(self, slot: Slot) -> Any:
        """Enqueue a branch: the fork has seen to the order."""
        self._call.launch(slot)
        return self._finish(slot)

    def _finish(self, slot: Slot) -> Any:
        adapted = self._adapted
        if adapted.kept:
            self._keep_until_run(slot)
        if adapted.wrap is None or not adapted.made:
            return self._result
        # The library's stream is made to wait for the current one, which is to be the one that writes the outputs.
        driver = adapted.pool.driver
        previous = driver.current_stream()
        if previous.ptr == slot.pointer:
            return _wrapped(adapted.wrap, self._result)
        stream = slot.side_stream or driver.wrap_stream(slot.pointer, None)
        driver.push_stream(stream)
        try:
            return _wrapped(adapted.wrap, self._result)
        finally:
            driver.pop_stream(stream, previous)

    def _keep_until_run(self, slot: Slot) -> None:
        adapted = self._adapted
        if thread.recording is not None:
            thread.recording.keep(adapted.kept)
        elif slot.pointer == LEGACY_STREAM or not adapted.pool.driver.capture_id(slot.pointer):
            if parked:
                settle()
            parked.append(_Kept(adapted.pool, adapted.device, slot.pointer, adapted.kept))

    def then(self, make: Callable[[Any], Any]) -> "ForeignCall":
        """As `GraphCall.then`."""
        return ForeignCall(self._adapted, self._call.then(make), self._result)


def _wrapped(wrap: Callable[[Any], Any], made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple([_wrapped(wrap, array) for array in made])
    try:
        return wrap(made)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):  # a type or a layout that the library has not
        return made


class _Kept:
    """Arrays that a stream may still read."""

    def __init__(self, pool: HandlePool, device: int, pointer: int, arrays: list[Any]) -> None:
        self._arrays = arrays
        self._pool = pool
        self._device = device
        self._event = pool.device(device).edges.take()
        pool.driver.record_event(self._event, pointer)

    def _settle(self) -> bool:
        pool = self._pool
        if pool._forked or pool._poison is not None:
            keep_for_good(self)
            return True
        try:
            with pool.on_device(self._device):
                with pool.driver.relaxed():
                    passed = pool.driver.event_done(self._event)
                if passed:
                    pool.device(self._device).edges.put(self._event)
                return passed
        except Exception:  # queued work failed, say
            return False
