"""A happens-before checker for accesses to device memory.

The checker finds accesses that no wait orders, whatever the schedule was (guarantees 5, 6, 8, 9 and 11). Every operation carries
a vector clock with one component for each stream. A component says how much of that stream's work has surely run before the
operation. The checker computes the clock when the operation is queued, from the clocks of the operations that it depends on. So
the clock follows from the waits of the program and never from the actual schedule.

If the host has waited for an operation, the operation comes before all operations that the host queues later. The checker does
not distinguish the threads of the host, so a wait of one thread counts for all threads.

Each block of memory remembers its accesses. Two accesses to the same bytes conflict if at least one of them writes. They also
conflict if the allocator gave the memory to another owner in between, because the new owner counts as a write. If two accesses
conflict and have no order, the checker raises an error that names both accesses.

The null stream is an ordinary stream to the checker. The host driver runs the null stream's work before a call returns, but a GPU
gives no such order.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from handlepool._util.frames import place_of_call
from handlepool.errors import ContractError
from handlepool.tensors.layout import share_bytes, span

if TYPE_CHECKING:
    from handlepool.drivers.host.scheduler import QueuedOperation

Array = np.ndarray[Any, Any]
Clock = dict[int, int]


class Access:
    """An access of an operation to a part of a block.

    Attributes
    ----------
    checked : bool
        Whether the order of the access is checked. It is not checked for the reads of a checksum, because no work depends on
        their values.
    """

    __slots__ = ("block", "checked", "view", "writes")

    def __init__(self, block: Any, view: Array, writes: bool, *, checked: bool = True) -> None:
        self.block = block
        self.view = view
        self.writes = writes
        self.checked = checked

    def meets(self, other: "Access") -> bool:
        """Return whether one access must wait for the other."""
        # The test compares bounds only. If it matches accesses that share no byte, this costs a needless wait and no error.
        return (self.writes or other.writes) and self.block is other.block and np.may_share_memory(self.view, other.view)


class Past:
    """A queued access, with the clock of its stream at that moment."""

    __slots__ = ("component", "generation", "moment", "start", "stop", "view", "what", "where", "writes")

    def __init__(self, access: Access, what: str, where: str, component: int, moment: int) -> None:
        self.component = component
        self.moment = moment
        self.generation: int = access.block.generation
        self.view = access.view
        view = access.view
        self.start, self.stop = span(view.__array_interface__["data"][0], view.shape, view.strides, view.itemsize)
        self.what = what
        self.where = where
        self.writes = access.writes

    def __str__(self) -> str:
        return f"{self.what!r} on {self.where} {'writes' if self.writes else 'reads'}"

    def conflicts(self, other: "Past") -> bool:
        """Return whether this access and ``other`` need an order."""
        if not (self.writes or other.writes or self.generation != other.generation):
            return False
        if self.stop <= other.start or other.stop <= self.start:
            return False
        # The exact test is slow, so the comparison of address ranges comes first.
        return share_bytes(self.view, other.view)

    def stands_for(self, earlier: "Past") -> bool:
        """Return whether the checker may forget ``earlier`` and keep this access.

        The answer is True if each later access that conflicts with ``earlier`` also conflicts with this access.
        """
        mine, theirs = self.view, earlier.view
        return (
            (self.writes or not earlier.writes)
            and self.start <= earlier.start
            and earlier.stop <= self.stop
            and (mine.flags.forc or (mine.shape, mine.strides, mine.dtype) == (theirs.shape, theirs.strides, theirs.dtype))
        )


class Order:
    """The clocks of one driver's operations, and of the host.

    Attributes
    ----------
    found : list of ContractError
        Every conflict that was raised, for tests whose code swallows errors.
    """

    def __init__(self) -> None:
        self.found: list[ContractError] = []
        self._host: Clock = {}
        self._moments: Clock = {}
        self._components = itertools.count(-1, -1)
        # A thread takes this lock while it holds the scheduler's lock, and never takes the two locks in the opposite order.
        self._lock = threading.Lock()

    def component(self) -> int:
        """Return a new clock component for work on no stream.

        A lane of a recorded graph is such work.
        """
        return next(self._components)

    def given(self, operation: "QueuedOperation", component: int, where: str, after: Sequence["QueuedOperation"]) -> None:
        """Set the clock of a new operation, and check its accesses.

        Raises
        ------
        ContractError
            For the first access without an order. The caller must not queue the operation then.
        """
        with self._lock:
            host = self._host
            clock: Clock = {}
            for earlier in after:
                for stream, moment in earlier.clock.items():
                    # An operation that the host has waited for precedes every later operation, so no clock has to list it.
                    if moment > clock.get(stream, 0) and moment > host.get(stream, 0):
                        clock[stream] = moment
            moment = self._moments[component] = self._moments.get(component, 0) + 1
            clock[component] = moment
            if operation.accesses:
                where = f"{where}, at {place_of_call()}"
            for access in operation.accesses:
                if access.view.size and access.checked:
                    self._accessed(Past(access, operation.label or "an operation", where, component, moment), access.block, clock)
            operation.clock = clock

    def _accessed(self, now: Past, block: Any, clock: Clock) -> None:
        kept = []
        for past in block.past:
            # The host has waited for the earlier access, so every later access follows it, and it need not be kept.
            if self._host.get(past.component, 0) >= past.moment:
                continue
            if clock.get(past.component, 0) >= past.moment:
                # The earlier access is ordered before the new access. It is forgotten if the new access can stand for it in later
                # checks.
                if not now.stands_for(past):
                    kept.append(past)
                continue
            kept.append(past)
            if now.conflicts(past):
                self._report(f"{now} bytes {_span(now, block)} of {block!r} and {past} bytes {_span(past, block)}", now, past)
        block.past = [*kept, now]

    def _report(self, what: str, now: Past, past: Past) -> None:
        reused = ", and in between the allocator gave the memory to another owner" if now.generation != past.generation else ""
        error = ContractError(
            f"not ordered: {what}, and neither waits for the other{reused}. Order the later access by the same stream, the join "
            "of the fork, the result of the task, or an event; in a fork's body, read after fork.wait(array) and write in a "
            "handlepool.operation"
        )
        self.found.append(error)
        raise error

    def forgive(self) -> None:
        """Treat all earlier accesses as if the host had waited for them.

        While the checker was off, it did not see the waits between earlier and later accesses.
        """
        with self._lock:
            self._host = dict(self._moments)

    def waited(self, operation: "QueuedOperation") -> None:
        """Note that the host has waited for an operation.

        A query that finds the operation done also counts as a wait.
        """
        with self._lock:
            for stream, moment in operation.clock.items():
                if moment > self._host.get(stream, 0):
                    self._host[stream] = moment

    def host_reads(self, block: Any, view: Array, what: str) -> None:
        """Note that the host reads a part of a block now.

        Raises
        ------
        ContractError
            If queued work writes to this part and the host has not waited for that work.
        """
        now = Past(Access(block, view, False), what, "the host", 0, 0)
        with self._lock:
            for past in block.past:
                if past.writes and self._host.get(past.component, 0) < past.moment and now.conflicts(past):
                    self._report(f"{now} bytes {_span(now, block)} of {block!r} and {past} bytes {_span(past, block)}", now, past)


def _span(past: Past, block: Any) -> str:
    return f"{past.start - block.address} to {past.stop - block.address}"
