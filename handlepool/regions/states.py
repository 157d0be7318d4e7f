"""Run concurrent cuDNN calls on forked and joined side streams.

A fork leases side slots (stream, handle, scratch) from its device's free list, without a lock. No other fork uses these slots
until the join, which releases them. No lock is held while user code runs, except by `ParallelStates.with_state`, where the
caller names the state (guarantee 15).
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from handlepool._util.arguments import as_integer, check_ran, flag
from handlepool._util.names import shown
from handlepool._util.reachable import bound_call
from handlepool.errors import ArgumentError, OwnershipError, StateBusyError, StateIndexError
from handlepool.pool.context import HeldState, process
from handlepool.pool.default import check_pool, default_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.slot import Slot
from handlepool.regions.fork import Fork

__all__ = ["Fork", "ParallelStates"]

T = TypeVar("T")


class ParallelStates:
    """Up to ``count`` side streams of the current device.

    Each stream has a handle and scratch of its own.

    Parameters
    ----------
    count : int
        The maximum number of side streams that a fork leases, 1 to 32. The pool owns the streams and leases them to each fork.
        So any number of threads and forks may use a `ParallelStates` at the same time.
    pool : HandlePool, optional
        The pool that lends the streams; the default pool if omitted.

    Examples
    --------
    >>> states = handlepool.ParallelStates(4)                                                            # doctest: +SKIP
    >>> with states.fork() as fork:                                                                      # doctest: +SKIP
    ...     a = fork.run(branch_a, x)
    ...     b = fork.run(branch_b, x)
    """

    def __init__(self, count: int, *, pool: HandlePool | None = None) -> None:
        self.count = as_integer(count, 0)
        if not 1 <= self.count <= MOST_SIDE_SLOTS:
            raise ArgumentError(
                f"ParallelStates({shown(count)}): the number of states must be 1 to {MOST_SIDE_SLOTS}, because a GPU has "
                f"only {MOST_SIDE_SLOTS} hardware queues"
            )
        if pool is None:
            pool = default_pool()
        check_pool("ParallelStates", pool)
        self.pool = pool
        self._locks: dict[tuple[int, int, int], threading.Lock] = {}

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<ParallelStates {self.count} of {self.pool!r}>"

    def fork(self, *, stream: Any = None, ordered: bool = True) -> Fork:
        """Open a parallel region over the caller's stream, for a ``with`` statement.

        Parameters
        ----------
        stream : stream, optional
            The caller's stream, as in `HandlePool.get_handle`; CuPy's current stream if omitted.
        ordered : bool
            Whether the reads and writes of branches decide their order, as `Fork.run` says. With False, branches have no order,
            which saves 0.5 to 3 microseconds a branch. False is right only if no branch writes memory that another branch uses.

        Returns
        -------
        Fork
            One thread enters the fork, once, and runs the branches.
        """
        if type(ordered) is not bool:
            ordered = flag("ordered", ordered)
        return Fork(self.pool.internals, self.count, stream, ordered=ordered)

    def map(
        self, function: Callable[..., T], /, *iterables: Iterable[Any], out: Iterable[Any] | None = None, **kwargs: Any
    ) -> list[T]:
        """Run ``function`` over the iterables, each call a branch.

        The results come in order, ready on the caller's stream.

        Parameters
        ----------
        function : callable
        *iterables : iterable
            The positional arguments. Each call takes an entry of each iterable. All iterables are equally long, except
            `itertools.repeat`, `count` and `cycle`, which give an entry for every call. A single generator is read while
            branches run. Beside other iterables or ``out``, a generator is read to its end before the first call.
        out : iterable of array, optional
            The ``out`` that each call writes to.
        **kwargs
            Keywords for every call, such as ``padding=1``. `map` takes the name ``out`` for itself. To give all calls the same
            ``out``, bind it with `functools.partial`.

        Returns
        -------
        list
            The value of each call.

        Raises
        ------
        ArgumentError
            For iterables that are not equally long. No call was made.

        Notes
        -----
        Outputs that a graph function allocates may share a block of memory if together they take 1 MiB at most. The block is
        released with the last of these outputs.
        """
        with Fork(self.pool.internals, self.count, once=True) as fork:
            return fork.map(function, *iterables, out=out, **kwargs)

    def with_state(self, index: int, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``function(state, *args, **kwargs)`` on a state by its index.

        The call is a branch that is joined at once.

        The method works like Caffe2's ``with_cudnn_state``. Calls with the same index exclude each other, also between threads.
        The calls of a thread never overlap on the GPU, because each call joins at once. Use `fork` for overlap.

        Parameters
        ----------
        index : int
            0 to ``count - 1``.
        function : callable
            Its first argument is the state, with ``handle``, ``stream``, ``device`` and ``workspace(nbytes)``. The state is valid
            until the function returns.
        *args, **kwargs
            Passed to the function after the state.

        Returns
        -------
        object
            The function's value, ready on the caller's stream.

        Raises
        ------
        OwnershipError
            For a state that is used after its call.
        StateIndexError
            For an index out of range.
        StateBusyError
            If the state is busy and this thread holds a state already, because a wait could deadlock.
        """
        number = as_integer(index, -1)
        if not 0 <= number < self.count:
            raise StateIndexError(f"state {shown(index)} does not exist: the index must be 0 to {self.count - 1}")
        self.pool.internals.status.check()
        # A lock that another thread held at an `os.fork` stays locked in the child. So each process has locks of its own.
        lock = self._locks.setdefault((process(), self.pool.driver.current_device(), number), threading.Lock())
        # Guarantee 15: only this lock is held while user code runs, so a thread that holds a state never waits for another state.
        # The thread counts as holding a state from before it takes the lock until after it releases the lock. So a finalizer
        # that the collector runs in between does not wait for its own thread.
        with HeldState() as held:
            if not held:
                # A ``with`` statement releases the lock after any interrupt. A bare call of `acquire` could leave the lock
                # taken.
                with lock:
                    return self._joined_at_once(function, args, kwargs)
            if not lock.acquire(blocking=False):
                raise StateBusyError(
                    f"state {number} is busy and this thread holds a state already, so waiting could deadlock. Inside "
                    "with_state use fork(), which leases free states"
                )
            try:
                return self._joined_at_once(function, args, kwargs)
            finally:
                lock.release()

    def _joined_at_once(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        with Fork(self.pool.internals, 1) as fork:
            return fork.run(_with_state, self.pool.internals, function, args, kwargs, bound_call(function))


def _with_state(pool: PoolInternals, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> T:
    slots = [pool.slot()]
    try:
        value = function(State(slots), *args, **kwargs)
        check_ran(function, value)
        return value
    finally:
        slots.clear()


class State:
    """The state that `ParallelStates.with_state` passes to its function.

    The state is valid as long as the function runs. Afterwards another branch may have its slot, so a later use is refused
    (guarantee 5).

    Attributes
    ----------
    handle : cudnn.Handle
        The state's handle, bound to its stream.
    stream, pointer
        The stream object, and its ``cudaStream_t``.
    device : int
        The device's ordinal.
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: list[Slot]) -> None:
        # The list holds the call's slot, and is empty once the call has ended.
        self._slots = slots

    def _mine(self) -> Slot:
        if not self._slots:
            raise OwnershipError(
                "the call of this state has ended, and another branch may have its handle, stream and scratch: use a "
                "state only inside the function that got it"
            )
        return self._slots[0]

    handle = property(lambda self: self._mine().handle)
    stream = property(lambda self: self._mine().stream)
    pointer = property(lambda self: self._mine().pointer)
    device = property(lambda self: self._mine().device)

    def workspace(self, nbytes: int) -> Any:
        """Return scratch memory on the state's stream.

        The memory is valid until the next call of this method.

        Parameters
        ----------
        nbytes : int
            Number of bytes, 0 or more.

        Returns
        -------
        array, shape (nbytes,), uint8
            As from `HandlePool.get_workspace`.

        Raises
        ------
        OwnershipError
            After the state's call has ended.
        ArgumentError, OutOfMemoryError
            As in `HandlePool.get_workspace`.
        """
        return self._mine().workspace(nbytes)

    def __reduce__(self) -> Any:
        """Refuse to be copied; a copy would outlive the call."""
        raise TypeError("a state belongs to its call and cannot be copied or pickled; get another state with with_state()")

    def __repr__(self) -> str:
        return f"<State {f'of {self._slots[0]!r}' if self._slots else 'whose call has ended'}>"
