"""Join a fork: order its caller's stream after every branch.

The join then releases the fork's leases and the kept memory.
"""

import gc
from collections import deque
from typing import Any

from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import CaptureError
from handlepool.order.stream_order import order as order_streams
from handlepool.pool.context import on_device, thread
from handlepool.pool.deferred import run_some
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import unbind
from handlepool.regions.leases import Leases
from handlepool.regions.memory import branch_regions


class Join:
    """The end of a fork.

    The fork's own thread makes the join at the end of the ``with`` statement. If the fork was never left, any thread may make the
    join later, in `settle`.
    """

    __slots__ = ("_claim", "_device", "_driver", "_leases", "_pointer", "_pool", "_sides", "_status", "_stream")

    def __init__(self, pool: PoolInternals, leases: Leases, stream: Any, device: int) -> None:
        self._pool = pool
        self._driver = pool.driver
        self._status = pool.status
        self._leases = leases
        self._stream = stream
        self._pointer: int = stream.ptr
        self._device = device
        self._sides = leases.sides
        # An interrupt may have deferred this join twice. The thread that settles first takes the one entry, so that two threads
        # never release a slot twice (guarantee 1).
        self._claim = deque((leases,))

    @property
    def pool(self) -> PoolInternals:
        """The pool of the fork."""
        return self._pool

    @property
    def leases(self) -> Leases:
        """The leases that the join releases."""
        return self._leases

    def make(self) -> None:
        """Join every branch, then release slots and kept memory.

        The caller's stream waits for every branch first.
        """
        driver, leases, pointer = self._driver, self._leases, self._pointer
        leased = leases.slots
        captured = False
        failure: BaseException | None = None
        try:
            captured = pointer != LEGACY_STREAM and driver.is_capturing(pointer)
            if not captured:
                record, wait = driver.record_event, driver.wait_event
                for slot in leased:
                    event = slot.end_event
                    # Only a branch that ran Python can have left its stream capturing. So only the streams of such branches are
                    # asked.
                    if slot.pointer in branch_regions and driver.is_capturing(slot.pointer):
                        raise _left_capturing(slot.pointer)
                    record(event, slot.pointer)
                    wait(pointer, event)
                    if slot.owner is not None:
                        unbind(slot)
        except BaseException as trouble:
            failure = trouble
        if captured or failure is not None:
            failure = self._join_each(captured, failure)
        else:
            leases.give_back()
        try:
            late = self._finish(failure) if failure is not None or leases.callers or self._status.unusable else None
        finally:
            if leases.order is not None:
                leases.leave_order(joined=failure is None)
            # If this frame kept the error, the error, its traceback and this frame would keep each other and the callers'
            # objects alive.
            del failure
        region = leases.region
        if region is None:
            leases.kept.clear()
        elif leases.inherited:
            region.leave(leased)
        else:
            region.release()
        try:
            if late is not None:
                raise late
        finally:
            del late

    def _finish(self, failure: BaseException | None) -> BaseException | None:
        """Finish a join that has errors, further streams or a closed pool.

        The caller's further streams wait for the caller's stream. The free side slots of a closed pool are destroyed. If the
        clean-up fails, this method returns the error of the clean-up, and `make` raises it after the join is complete.
        """
        late: BaseException | None = None
        # `close()` sets `closed` before it destroys the free slots. So either `close()` or this thread destroys them.
        if self._status.closed:
            try:
                self._sides.destroy_free()
            # If a resource could not be destroyed yet, its destruction is deferred.
            except BaseException as trouble:
                late = trouble
                self._pool.device(self._device).defer_rest()
        if failure is None:
            try:
                for caller in self._leases.callers:
                    order_streams(self._pool, self._device, self._pointer, caller)
            except BaseException as trouble:
                failure = trouble
        try:
            if failure is not None:
                self._leases.own_region().abandon()
                self._status.diagnose(failure)
                raise failure
            return late
        finally:
            del failure, late

    def _join_each(self, captured: bool, failure: BaseException | None) -> BaseException | None:
        """Join branches one by one, under a capture or after errors.

        Every branch that can be joined is joined.
        """
        driver, leases, abandoned = self._driver, self._leases, False
        leased = leases.slots
        # An interrupt may come between any two of these steps. A later join takes the slots that are left in the list.
        while leased:
            slot = leased[0]
            try:
                if captured and not driver.capture_id(slot.pointer):
                    raise CaptureError(
                        f"a capture of stream {self._pointer:#x} began inside a fork, after a branch had run, and the capture "
                        "cannot wait for that branch. Begin the capture before the fork, or after it"
                    )
                if not captured and slot.pointer in branch_regions and driver.is_capturing(slot.pointer):
                    raise _left_capturing(slot.pointer)
                driver.record_event(slot.end_event, slot.pointer)
                driver.wait_event(self._pointer, slot.end_event)
            except BaseException as trouble:
                failure = trouble
                if not abandoned:
                    abandoned = True
                    leases.own_region().abandon()
            if slot.owner is not None:
                unbind(slot)
            branch_regions.pop(slot.pointer, None)
            leased.pop(0)
            if not captured or thread.recording is None or not thread.recording.take(self._sides, slot):
                self._sides.release(slot, captured=True)
        if captured and thread.recording is not None and not leases.inherited:
            thread.recording.kept.add(leases.kept if leases.region is None else leases.region.kept)
        try:
            return failure
        finally:
            del failure

    # Forks that were not left

    def fail(self) -> None:
        """Prepare this fork for a later join by `settle`.

        If this fork is inside a branch, the outer fork's region abandons its memory, because this fork may still use the memory.
        """
        leases = self._leases
        if leases.inherited:
            region = leases.own_region()
            # Without `abandon`, the outer fork would release memory that branches of this fork may still use.
            region.abandon()
            region.leave(leases.slots)

    def given_up(self) -> bool:
        """Abandon a fork that this process must not touch.

        The result is True in a forked child (guarantee 13) and after a lost context. In any other case the method does nothing
        and returns False.
        """
        if not self._status.untouchable:
            return False
        leases = self._leases
        leases.abandon_all()
        leases.own_region().abandon()
        leases.leave_order(joined=False)
        return True

    def settle(self) -> bool:
        """Join a fork that was not left; return whether this is done.

        Any thread may call this method.
        """
        run_some(self._claim, self._settle, 1)
        return not self._claim

    def _settle(self, leases: Leases) -> bool:
        if leases.order is not None and leases.order.busy and not leases.order.closed:
            # The fork's thread is in the middle of a change to its books, and this call comes from a finalizer or from another
            # thread. So a later call joins the fork.
            return False
        if self.given_up():
            return True
        try:
            with on_device(self._driver, self._device):
                capturing = self._driver.capture_id
                # This thread cannot join the fork in two cases. The per-thread default stream means a different stream in each
                # thread. A finalized stream object was collected together with this fork, so its stream may be destroyed.
                if self._pointer == PER_THREAD_STREAM or gc.is_finalized(self._stream):
                    leases.own_region().abandon()
                    while leases.slots:
                        captured = capturing(leases.slots[-1].pointer) != 0
                        slot = leases.slots.pop()
                        if slot.owner is not None:
                            unbind(slot)
                        branch_regions.pop(slot.pointer, None)
                        self._sides.release(slot, captured=captured)
                    leases.leave_order(joined=False)
                    return True
                pointers = [slot.pointer for slot in leases.slots]
                if any(pointer and capturing(pointer) for pointer in (self._pointer, *pointers)):
                    return False
                self.make()
        except Exception:
            leases.own_region().abandon()
        return (not leases.slots and leases.order is None) or self.given_up()


def _left_capturing(pointer: int) -> CaptureError:
    """Return the error for a branch that left its stream capturing.

    A join of that branch would draw the caller's stream into the capture.
    """
    return CaptureError(
        f"a branch began to capture its stream {pointer:#x} and did not end the capture, so no stream can wait "
        "for the branch. End a capture in the branch that began it, also after an error"
    )
