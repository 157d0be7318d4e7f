"""Find the place that orders and launches a call.

A call outside of regions and recordings runs at once, on its slot's stream. Inside a region the books of the thread order the
call. Inside a recording with lanes the call becomes a node. A fork is the place of the calls that it receives as branches.

If no thread has an open region or recording, the list `active` is empty, and a call looks for no place.
"""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from handlepool.drivers.protocol import Driver
from handlepool.order.call import Call
from handlepool.order.stream_order import in_torch, torch_in_use
from handlepool.pool.context import ActiveRecording, Begin, CallRecorder, active, run_on, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot

if TYPE_CHECKING:
    from handlepool.order.books import DataOrder

T = TypeVar("T")

Orders = dict[tuple[Driver, int, ActiveRecording | None], "DataOrder"]
"""The books of one thread, by driver, device and recording.

The recording is part of the key because captured work cannot wait for work outside of its recording.
"""


class _BooksOfThread(threading.local):
    def __init__(self) -> None:
        self.orders: Orders = {}


books_of_thread = _BooksOfThread()


def open_order(driver: Driver, device: int) -> "DataOrder | None":
    """Return this thread's open books of a device, or None.

    The books are open as long as an ordered fork is open.
    """
    # `active` is one list for all threads. Mostly it is empty, and then this call need not make a key.
    order = books_of_thread.orders.get((getattr(driver, "checked_driver", driver), device, thread.recording)) if active else None
    return None if order is None or order.closed else order


def orders_of_thread() -> "list[DataOrder]":
    """Return this thread's open books of all devices."""
    recording = thread.recording
    return [order for (_, _, known), order in books_of_thread.orders.items() if known is recording and not order.closed]


def run(pool: PoolInternals, call: Call, slot: Slot) -> Any:
    """Put a call in order, launch it, and return its value.

    Parameters
    ----------
    pool : PoolInternals
        The pool of the call.
    call : Call
        The call to launch.
    slot : Slot
        The slot of the call's stream. A node is launched on its lane's slot instead.
    """
    # `active` lists the open regions and recordings of all threads. Usually there are none, and the call skips every look-up
    # below.
    if active:
        lanes = lanes_for(pool, slot.pointer)
        if lanes is not None:
            return run_as_node(lanes, pool, call, slot)
        if thread.told is not None:
            thread.told.extend(call.writes)
        order = open_order(pool.driver, pool.current_device())
        if order is not None:
            order.admit(call.reads, call.writes, call.keep, slot.pointer)
    return call.launch(slot)


def begin_for(pool: PoolInternals) -> Begin | None:
    """Return a function that orders a known plan's launch, or None.

    The launch runs on the current stream, after the branches that it conflicts with. The result is None where this thread has
    no open books.
    """
    order = open_order(pool.driver, pool.current_device())
    if order is None:
        return None

    def begin(operands: tuple[Any, ...], launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Slot:
        pieces = launch.operands.pieces(addresses)
        inputs = launch.operands.inputs
        slot = pool.slot()
        if thread.told is not None:
            thread.told.extend(pieces[inputs:])
        order.admit(pieces[:inputs], pieces[inputs:], operands, slot.pointer)
        return slot

    return begin


def lanes_for(pool: PoolInternals, pointer: int) -> CallRecorder | None:
    """Return the lanes or the rehearsal that records a call, or None.

    `record` runs a function twice. The rehearsal notes each call of the first run. The lanes record each call of the second run
    as a node. The result is None inside a region, inside a node, and for a stream that is not recorded.
    """
    lanes = thread.rehearsal if thread.recording is None else thread.recording.lanes
    # Inside a branch the fork orders the call. If the call became a node as well, it would be ordered twice.
    if lanes is None or thread.region is not None or not lanes.takes(pool, pointer):
        return None
    return lanes if open_order(pool.driver, pool.current_device()) is None else None


def run_as_node(lanes: CallRecorder, pool: PoolInternals, call: Call, slot: Slot | None) -> Any:
    """Record a call as a node.

    While a call runs Python, the stream of its lane is current for CuPy and for torch.
    """
    device = pool.current_device()

    def launch(lane: Slot | None) -> Any:
        if lane is None or not call.runs_python:
            return call.launch(lane or slot)
        torch = torch_in_use(pool.driver)
        rest: tuple[Any, Any, Any] = call.launch, (lane,), {}
        if torch is not None:
            rest = in_torch(torch, lane.pointer, lane.pointer, device, *rest)
        return run_on(pool, lane.side_stream, device, None, *rest)

    # The launch of a graph function writes its operands and nothing else. Python code may return further arrays, which
    # `Call.new` finds.
    new = call.new if call.runs_python else None
    options: dict[str, Any] = {"what": call.what, "assumed_writes": call.assumed_writes}
    result = lanes.run(call.name, call.reads, call.writes, call.keep, launch, new, **options)
    if call.allocated:
        lanes.made(result)
    return result


def ordering_pool() -> PoolInternals | None:
    """Return the pool of this thread's open fork, or None.

    The fork is on the current device and orders calls by their memory.
    """
    for order in orders_of_thread():
        if order.pool.current_device() == order.device:
            return order.pool
    return None


def before(
    pool: PoolInternals,
    reads: Sequence[Any],
    writes: Sequence[Any],
    keep: object,
    pointer: int | None = None,
    *,
    opaque: bool = False,
) -> None:
    """Let a stream wait for the branches that a call conflicts with.

    The call is about to run on the stream ``pointer``, by default the current stream. The books note the call, so that later
    branches wait for it.
    """
    if thread.told is not None:
        thread.told.extend(writes)
    device = pool.current_device()
    order = open_order(pool.driver, device)
    if order is not None:
        stream = pool.driver.current_stream(device).ptr if pointer is None else pointer
        order.admit(reads, writes, keep, stream, opaque=opaque)


def _after_fork() -> None:
    """Forget the parent's regions in a forked child (guarantee 13)."""
    # The events of the regions belong to the parent's context. So the child drops the regions and releases no event.
    books_of_thread.orders.clear()


os.register_at_fork(after_in_child=_after_fork)
