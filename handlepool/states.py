"""Parallel states: concurrent cuDNN calls on side streams, forked from and joined to the caller's stream by events.

A fork leases, it does not lock: it takes side slots (stream, handle, scratch) from its device's free list, has them alone until
the join, and puts them back. Two events a branch carry the order (guarantee 6): one recorded on the caller's stream when the
branch is run, which the side stream waits for, and one recorded on the side stream at the join, which the caller's stream waits
for. Between two branches stands nothing (guarantee 7). No lock is held while user code runs, except by
`ParallelStates.with_state`, where the caller names the state (guarantee 15).
"""

import threading
from collections.abc import Callable, Iterable
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar

from handlepool.devices import DeviceSlots
from handlepool.drivers.base import LEGACY_STREAM
from handlepool.errors import ArgumentError, OwnershipError, PoolClosedError, StateBusyError, StateIndexError
from handlepool.pool import HandlePool, default_pool
from handlepool.regions import Region, thread
from handlepool.sides import MOST_SIDE_SLOTS
from handlepool.slots import Slot, place
from handlepool.streams import check_foreign, resolve

T = TypeVar("T")


class Fork:
    """One parallel region: its branches start after the caller's stream, and end before that goes on.

    Made by `ParallelStates.fork` and used in a ``with`` statement, by the thread that made it.
    """

    __slots__ = (
        "_capture",
        "_count",
        "_device",
        "_driver",
        "_inherited",
        "_leased",
        "_next",
        "_open",
        "_ordinal",
        "_pointer",
        "_pool",
        "_region",
        "_stream",
        "_thread",
    )

    def __init__(self, pool: HandlePool, count: int, stream: Any = None) -> None:
        self._pool = pool
        self._count = count
        self._stream = stream
        self._open = False
        self._leased: list[Slot] = []
        self._next = 0

    def __enter__(self) -> "Fork":
        if self._open:
            raise OwnershipError("this fork was entered already; make a new one with states.fork()")
        pool = self._pool
        pool._check_usable()
        driver = self._driver = pool.driver
        stream = driver.current_stream() if self._stream is None else None
        if stream is None or not driver.owns_stream(stream):
            reference = resolve(driver, self._stream)
            check_foreign(driver, reference)
            stream = reference.stream or driver.wrap_stream(reference.pointer, reference.owner)
        self._stream = stream
        self._pointer: int = stream.ptr
        self._ordinal: int = driver.current_device()
        self._device: DeviceSlots = pool.device(self._ordinal)
        self._capture = 0 if self._pointer == LEGACY_STREAM else driver.capture_id(self._pointer)
        outer = thread.region
        self._inherited = outer is not None and outer.device == self._ordinal
        self._region: Region = outer if outer is not None and self._inherited else Region(driver, stream)
        self._thread = get_ident()
        self._open = True
        return self

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run one branch: ``function(*args, **kwargs)`` with a side stream as the current stream.

        The branch starts after everything that the caller's stream has been given by now. Branches share the states in turn;
        two that share one run one after the other. Where every side slot of the device is out, the branch runs on the caller's
        stream, with the same result.

        Returns
        -------
        object
            What the function returned. Its arrays may be read on the caller's stream after the fork.

        Raises
        ------
        OwnershipError
            In another thread than the fork's.
        PoolClosedError
            After the fork was left.
        """
        self._check_open()
        slot = self._state()
        region = self._region
        prepare = getattr(function, "__handlepool_prepare__", None)
        if prepare is not None:
            # A graph function: its outputs are known, so they are allocated before the edge that starts the branch, on
            # the caller's stream, and nothing is allocated inside the branch.
            if self._driver.current_stream() is self._stream and self._driver.current_device() == self._ordinal:
                call = prepare(self._pool, args, kwargs)
            else:  # inside `with other_stream:` in the fork's body
                call = self._on_caller(prepare, (self._pool, args, kwargs), {})
            region.keep((args, kwargs, call.operands))
            if slot is None:
                result: T = call.launch(self._pool.slot(self._stream))
                return result
            self._driver.record_event(slot.start_event, self._pointer)
            self._driver.wait_event(slot.pointer, slot.start_event)
            result = call.launch(slot)
            return result
        region.keep_call(function, args, kwargs)
        if slot is None:
            return self._on_caller(function, args, kwargs)
        self._driver.record_event(slot.start_event, self._pointer)
        self._driver.wait_event(slot.pointer, slot.start_event)
        return run_on(self._pool, slot.side_stream, self._ordinal, region, function, args, kwargs)

    def _on_caller(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        return run_on(self._pool, self._stream, self._ordinal, thread.region, function, args, kwargs)

    def _state(self) -> Slot | None:
        """The side slot for the next branch, leased when it is the first of its state; None to run inline."""
        index = self._next
        self._next = (index + 1) % self._count
        leased = self._leased
        if index >= len(leased) and len(leased) < self._count:
            with self._pool.on_device(self._ordinal):
                slot = self._device.sides.lease()
            if slot is not None:
                own(self._pool.sound(slot))
                leased.append(slot)
                return slot
            self._count = max(1, len(leased))  # fewer are to be had: do with those
            self._next = 1 % self._count
            index = 0
        return leased[index] if leased else None

    def _check_open(self) -> None:
        if not self._open:
            raise PoolClosedError("this fork was left, or not entered; run branches inside `with states.fork() as fork:`")
        if self._thread != get_ident():
            raise OwnershipError(
                f"a fork belongs to the thread that entered it ({self._thread}), and this is thread {get_ident()}; make a "
                f"fork in each thread, or use ParallelStateExecutor"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._check_open()
        self._open = False
        leased, self._leased = self._leased, []
        failure: BaseException | None = None
        with self._pool.on_device(self._ordinal):  # the null stream's pointer means another stream on another device
            for slot in leased:
                try:
                    self._driver.record_event(slot.end_event, slot.pointer)
                    self._driver.wait_event(self._pointer, slot.end_event)
                except Exception as trouble:  # every other branch is joined all the same
                    failure = trouble
                disown(slot)
                self._device.sides.give_back(slot, captured=self._capture != 0 or failure is not None)
        if failure is not None:
            raise failure  # and what the branches used stays alive with this fork, since nothing waits for them
        if not self._inherited:
            self._region.release()

    def __repr__(self) -> str:
        state = f"{len(self._leased)} of {self._count} states leased" if self._open else "not open"
        return f"<Fork of {self._pool!r}, {state}>"


def own(slot: Slot) -> None:
    """Make a leased side slot this thread's: a hit of `get_handle` on its stream gives its handle."""
    slot.begin(slot.pointer)
    place(slot.side_stream, slot)


def disown(slot: Slot) -> None:
    """End `own`."""
    slot.end()
    place(slot.side_stream, None)


def run_on(
    pool: HandlePool,
    stream: Any,
    device: int,
    region: Region | None,
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    """Call a function with a stream current and a region's allocator in place; leave both, and the device, as they were."""
    driver = pool.driver
    before = driver.current_device()
    if before != device:
        driver.set_device(device)
    previous = driver.current_stream()
    outer, outer_pool = thread.region, thread.pool
    allocator = driver.swap_allocator(region.allocator) if region is not None else None
    thread.region, thread.pool = region, pool
    driver.use_stream(stream)
    try:
        return function(*args, **kwargs)
    finally:
        if driver.current_device() != device:  # the function left another one current
            driver.set_device(device)
        driver.use_stream(previous)
        thread.region, thread.pool = outer, outer_pool
        if region is not None:
            driver.swap_allocator(allocator)
        if before != device:
            driver.set_device(before)


class ParallelStates:
    """Up to ``count`` side streams of the current device, each with a handle and scratch of its own.

    Parameters
    ----------
    count : int
        1 to 32. What a fork gets at most; the states are the pool's, leased for each fork, so any number of threads and forks
        may use one `ParallelStates` at a time.
    pool : HandlePool, optional
        The default pool where none is given.

    Examples
    --------
    >>> states = handlepool.ParallelStates(4)                                                            # doctest: +SKIP
    >>> with states.fork() as fork:                                                                      # doctest: +SKIP
    ...     a = fork.run(branch_a, x)
    ...     b = fork.run(branch_b, x)
    """

    def __init__(self, count: int, *, pool: HandlePool | None = None) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SIDE_SLOTS:
            raise ArgumentError(f"ParallelStates({count!r}): 1 to {MOST_SIDE_SLOTS} states, as many as the GPU has queues")
        if pool is None:
            pool = default_pool()
        self.count = count
        self.pool = pool
        self._locks: dict[tuple[int, int], threading.Lock] = {}

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<ParallelStates {self.count} of {self.pool!r}>"

    def fork(self, *, stream: Any = None) -> Fork:
        """A parallel region over the caller's stream, for a ``with`` statement.

        Parameters
        ----------
        stream : stream, optional
            The caller's stream, as in `HandlePool.get_handle`; CuPy's current stream where none is given.
        """
        return Fork(self.pool, self.count, stream)

    def map(self, function: Callable[..., T], *iterables: Iterable[Any]) -> list[T]:
        """Run ``function`` over the iterables, each call a branch; results in order, ready on the caller's stream."""
        with Fork(self.pool, self.count) as fork:
            run = fork.run
            return [run(function, *arguments) for arguments in zip(*iterables, strict=False)]

    def with_state(self, index: int, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``function(state, *args, **kwargs)`` on the state of an index, forked and joined at once.

        The form of Caffe2's ``with_cudnn_state``: calls with one index exclude each other, also between threads. Since each joins
        at once, calls of one thread never overlap on the GPU; for that there is `fork`.

        Parameters
        ----------
        index : int
            0 to ``count - 1``.
        function : callable
            Gets the state first: it has ``handle``, ``stream``, ``device`` and ``workspace(nbytes)``.

        Raises
        ------
        StateIndexError
            For an index out of range.
        StateBusyError
            When the state is busy and this thread holds a state already, since waiting then could deadlock.
        """
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.count:
            raise StateIndexError(f"state {index!r} of {self.count}: the index must be 0 to {self.count - 1}")
        self.pool._check_usable()
        lock = self._locks.setdefault((self.pool.driver.current_device(), index), threading.Lock())
        # Guarantee 15: the one lock that is held while user code runs. A thread that holds a state never waits for another.
        if not lock.acquire(blocking=thread.states_held == 0):
            raise StateBusyError(
                f"state {index} is busy and this thread holds a state already: waiting could deadlock. Use fork() inside, which "
                f"leases states that are free"
            )
        thread.states_held += 1
        try:
            with Fork(self.pool, 1) as fork:
                fork._region.keep_call(function, args, kwargs)
                return fork.run(_with_slot, self.pool, function, args, kwargs)
        finally:
            thread.states_held -= 1
            lock.release()


def _with_slot(pool: HandlePool, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return function(pool.slot(), *args, **kwargs)
