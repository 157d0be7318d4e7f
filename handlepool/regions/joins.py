"""The end of a fork: the caller's stream waits for every branch, whatever became of the rest, and states and memory go back.

What fails here is never passed over: a branch that nobody waits for may still read what was kept, so that is kept for good.
"""

import gc
from typing import TYPE_CHECKING

from handlepool.drivers.protocol import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import CaptureError
from handlepool.pool.context import thread
from handlepool.pool.slot import disown
from handlepool.pool.status import diagnose
from handlepool.regions.memory import lent
from handlepool.regions.stream_order import order

if TYPE_CHECKING:
    from handlepool.regions.fork import Fork


def given_up(fork: "Fork") -> bool:
    """Touch nothing in the child of a process that forked in here (guarantee 13), nor after a lost context."""
    if not fork._pool._forked and fork._pool._poison is None:
        return False
    fork._leased = []
    fork._own_region().abandon()
    return True


def join(fork: "Fork") -> None:
    """Let the caller's stream wait for every branch, then give the side slots back and let go of what was kept."""
    pool, driver, leased, pointer = fork._pool, fork._driver, fork._leased, fork._pointer
    captured = False
    failure: BaseException | None = None
    try:
        captured = pointer != LEGACY_STREAM and driver.is_capturing(pointer)
        if not captured:
            record, wait = driver.record_event, driver.wait_event
            for slot in leased:
                event = slot.end_event
                if slot.pointer in lent and driver.is_capturing(slot.pointer):  # Python ran there
                    raise _left_capturing(slot.pointer)
                record(event, slot.pointer)
                wait(pointer, event)
                if slot.owner is not None:
                    disown(slot)
    except BaseException as trouble:
        failure = trouble
    if captured or failure is not None:
        failure = _join_each(fork, captured, failure)
    else:
        if fork._region is not None:  # before they go to others
            for slot in leased:
                if slot.pointer in lent:
                    del lent[slot.pointer]
        fork._leased = []  # an interrupt that came before this finds all of them here, and they are joined again later
        fork._sides.free.extend(leased)
    try:
        late = _finish(fork, failure) if failure is not None or fork._callers or pool.unusable else None
    finally:
        del failure  # or it, its traceback and this frame would keep each other, and all that the callers had
    region = fork._region
    if region is None:
        fork._kept.clear()
    elif fork._inherited:
        region.leave(fork)
    else:
        region.release()
    try:
        if late is not None:
            raise late
    finally:
        del late


def _finish(fork: "Fork", failure: BaseException | None) -> BaseException | None:
    """End a join of which there is more to say; what went wrong too late to matter to it is returned."""
    late: BaseException | None = None
    if fork._pool.closed:  # in this order: `close` says so first and drops the free ones then, so that one of us sees it
        try:
            fork._sides.drop_free()
        except BaseException as trouble:  # something could not be destroyed yet
            late = trouble
            fork._pool.device(fork._ordinal).settle_later()
    if failure is None:
        try:
            for caller in fork._callers:
                order(fork._pool, fork._ordinal, fork._pointer, caller)
        except BaseException as trouble:
            failure = trouble
    try:
        if failure is not None:
            fork._own_region().abandon()
            diagnose(fork._pool, failure)
            raise failure
        return late
    finally:
        del failure, late


def _join_each(fork: "Fork", captured: bool, failure: BaseException | None) -> BaseException | None:
    """Join under a capture, or where something failed: every branch that can be is joined all the same."""
    driver, leased, abandoned = fork._driver, fork._leased, False
    while leased:  # an interrupt may come between any two of these steps: what is left is joined later
        slot = leased[0]
        try:
            if captured and not driver.capture_id(slot.pointer):
                raise CaptureError(
                    f"stream {fork._pointer:#x} began to be captured inside a fork, after a branch was run: the capture "
                    f"cannot wait for the branch. Begin it before the fork, or after"
                )
            if not captured and slot.pointer in lent and driver.is_capturing(slot.pointer):
                raise _left_capturing(slot.pointer)
            driver.record_event(slot.end_event, slot.pointer)
            driver.wait_event(fork._pointer, slot.end_event)
        except BaseException as trouble:
            failure = trouble
            if not abandoned:
                abandoned = True
                fork._own_region().abandon()
        if slot.owner is not None:
            disown(slot)
        lent.pop(slot.pointer, None)
        fork._sides.give_back(leased.pop(0), captured=True)
    if captured and thread.recording is not None and not fork._inherited:
        thread.recording.kept.add(fork._kept if fork._region is None else fork._region.kept)
    try:
        return failure
    finally:
        del failure


def _left_capturing(pointer: int) -> CaptureError:
    """The error for a branch that left its stream capturing: the join would draw the caller's stream into that capture."""
    return CaptureError(
        f"a branch began to capture its stream {pointer:#x} and did not end that: nothing can wait for the branch. End a "
        f"capture where it was begun, also where something raises in between"
    )


def settle(fork: "Fork") -> bool:
    """Leave a fork that nobody left; called later, by any thread."""
    if given_up(fork):
        return True
    try:
        with fork._pool.on_device(fork._ordinal):
            capturing = fork._driver.capture_id
            # Here the first means another stream; the other was destroyed by the collector in one go with the fork.
            if fork._pointer == PER_THREAD_STREAM or gc.is_finalized(fork._stream):
                fork._own_region().abandon()
                while fork._leased:
                    captured = capturing(fork._leased[-1].pointer) != 0
                    slot = fork._leased.pop()
                    if slot.owner is not None:
                        disown(slot)
                    lent.pop(slot.pointer, None)
                    fork._sides.give_back(slot, captured=captured)
                return True
            pointers = [slot.pointer for slot in fork._leased]
            if any(pointer and capturing(pointer) for pointer in (fork._pointer, *pointers)):
                return False
            join(fork)
    except Exception:
        fork._own_region().abandon()
    return not fork._leased or given_up(fork)
