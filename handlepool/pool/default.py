"""Which pool is meant where none is given: that of the branch or task that this thread runs, else the default pool."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from handlepool._util.names import shown
from handlepool.errors import ArgumentError, OwnershipError
from handlepool.pool.context import branch_pools, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import UNOWNED, GetHandle, Slot, hits
from handlepool.pool.stats import Stats
from handlepool.pool.status import live_pools

_default: HandlePool | None = None
# Guards which pool the default one is (guarantee 1: two threads get one pool), and its substitutes. A finaliser that the
# collector runs inside may ask for the default pool, too.
_default_lock = threading.RLock()


class Substitutes:
    """The pools that act as the default pool for tests, the last one first in rank. Changed under `_default_lock`."""

    def __init__(self) -> None:
        # The default pool's own internals, then those of its substitutes. Empty while there is no substitute.
        self._ranked: list[PoolInternals] = []

    def add(self, default: HandlePool, substitute: PoolInternals) -> None:
        """Let a pool act as the default pool from now on."""
        if not self._ranked:
            self._ranked.append(default.internals)
            # From now on `current_pool` asks the thread: a branch goes on with its own pool.
            branch_pools.append(default.internals)
        self._ranked.append(substitute)
        substitute.is_shared = True
        self._activate_last(default)

    def remove(self, default: HandlePool, substitute: PoolInternals) -> None:
        """End `add`, in whatever order."""
        self._ranked.remove(substitute)
        substitute.is_shared = False
        self._activate_last(default)
        if len(self._ranked) == 1:
            branch_pools.remove(self._ranked.pop())

    def _activate_last(self, default: HandlePool) -> None:
        default.internals = self._ranked[-1]
        # After that, so that a miss which binds `get_handle` in between sees the change.
        _unbind()


_substitutes = Substitutes()


def default_pool() -> HandlePool:
    """Return the pool that is used where none is given; made when first asked for.

    Returns
    -------
    HandlePool
        That of `set_default_pool`, or one with default arguments.
    """
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                made = HandlePool()
                made.internals.is_default = made.internals.is_shared = True
                made.get_handle = get_handle  # type: ignore[method-assign]  # follows its substitutes
                _default = made if _default is None else _default
                if _default is not made:  # but what such a finaliser got meanwhile
                    live_pools.discard(made.internals)
    return _default


def set_default_pool(pool: HandlePool) -> None:
    """Make a pool the default one, before anything has used that.

    It is for applications, which know what limits or checks they want. A library, as one of several, leaves the choice to them.

    A forked child may set it anew where its parent has loaded the default pool's driver. `ParallelStates` that were made on the
    former default pool go on with the new one. Arrays, programs, forks, and executors that have run something stay the parent's.

    Parameters
    ----------
    pool : HandlePool
        Stays the caller's: its `HandlePool.close` ends it for good, for whoever uses the default pool, too.

    Raises
    ------
    ArgumentError
        For what is no pool.
    OwnershipError
        When there is a default pool: something has used it, or another one was set. Not in a forked child that cannot use it.
    PoolClosedError, ForkedProcessError, PoisonedContextError
        When the pool cannot be used.
    """
    global _default
    if not isinstance(pool, HandlePool):
        raise ArgumentError(f"set_default_pool was given {shown(pool)}; pass a HandlePool")
    pool.internals.status.check()
    with _default_lock:  # of two threads that come at once, the second is told
        if _default is pool:
            return
        former = _default
        if former is not None and not former.internals.status.forked:
            raise OwnershipError(
                f"set_default_pool came too late: {former!r} is the default pool, and others may have kept what is its. Set "
                f"yours at the start of the program, before the first call that is given no pool"
            )
        pool.internals.is_default = True
        pool.get_handle = get_handle  # type: ignore[method-assign]
        _default = pool
        if former is not None:
            # As with a substitute: whatever a library keeps of the parent's default pool is on this one.
            former.internals = pool.internals
            _unbind()


@contextmanager
def substitute_default(pool: HandlePool) -> Iterator[None]:
    """Let a pool do what the default pool is asked for, in every thread, to the end of a ``with`` statement; for tests.

    `default_pool` still returns what it returned before. So what a library keeps meanwhile (`ParallelStates`, an executor, the
    pool itself, its `HandlePool.get_handle`) is on the default pool, then and afterwards, and nothing of it is left on ``pool``.
    Only arrays, programs, and forks and tasks under way belong to the pool that they were made on. Meanwhile ``pool`` is
    shared: its `HandlePool.close` destroys what is idle. Of several substitutes the last one counts, in whatever order they end.

    Parameters
    ----------
    pool : HandlePool
        To be closed after the ``with`` statement, by whoever made it.
    """
    default, mine = default_pool(), pool.internals
    mine.status.check()
    with _default_lock:
        _substitutes.add(default, mine)
    try:
        yield
    finally:
        with _default_lock:
            _substitutes.remove(default, mine)


def lazy_get_handle(find: Callable[[], HandlePool]) -> tuple[GetHandle, Callable[[], None]]:
    """Make the `HandlePool.get_handle` of a pool that the first call asks for; from then on it costs what the pool's own does.

    The other function has the next call ask again.
    """

    def missed(stream: object = None) -> Slot:
        while True:
            pool = find().internals
            slot = pool.slot(stream)  # loads the driver
            use(pool.driver.current_stream, pool.status, pool.current_device)
            if find().internals is pool:  # no substitute has come since
                return slot

    made, _, use = hits(missed)
    return made, lambda: use(None, UNOWNED, None)


get_handle, _unbind = lazy_get_handle(default_pool)


def get_workspace(nbytes: int, stream: object = None) -> Any:
    """As `HandlePool.get_workspace`, of the default pool."""
    return (_default or default_pool()).get_workspace(nbytes, stream)


def prewarm(*, states: int = 0, workspace: int = 0, stream: object = None) -> None:
    """As `HandlePool.prewarm`, of the default pool."""
    default_pool().prewarm(states=states, workspace=workspace, stream=stream)


def stats(device: int | None = None) -> Stats:
    """As `HandlePool.stats`, of the default pool."""
    return default_pool().stats(device)


def trim(*, captured: bool = False) -> None:
    """As `HandlePool.trim`, of the default pool."""
    default_pool().trim(captured=captured)


_functions: tuple[Any, ...] = get_handle, get_workspace, prewarm, stats, trim
for _function in _functions:
    _function.__module__, _function.__qualname__ = __name__, _function.__name__
    _function.__doc__ = getattr(HandlePool, _function.__name__).__doc__


def close() -> None:
    """Destroy what is idle in the default pool: handles and scratch memory that no thread, stream or fork has.

    It does what `HandlePool.trim` does, and nothing where the pool was not used yet or cannot be used any more. The pool stays
    usable, since other libraries of the process use it, too. To end a pool for good, make one of your own and close that.
    """
    pool = _default
    if pool is not None:
        pool.internals.trim_if_usable()


def check_pool(who: str, pool: object) -> None:
    """Raise `ArgumentError` for what was passed as a pool and is none."""
    if not isinstance(pool, HandlePool):
        raise ArgumentError(f"{who} was given pool={shown(pool)}; pass a HandlePool, or None for the default pool")


def current_pool() -> PoolInternals:
    """Return the pool of the branch or task that this thread runs, and the default pool outside of any."""
    if branch_pools and thread.pool is not None:
        return cast(PoolInternals, thread.pool)  # of no other class: see `RunningPool`
    return (default_pool() if _default is None else _default).internals


def pool_so_far() -> PoolInternals | None:
    """Return what `current_pool` does; None where that would make the default pool."""
    if branch_pools and thread.pool is not None:
        return cast(PoolInternals, thread.pool)
    return None if _default is None else _default.internals


def chosen_pool(who: str, pool: HandlePool | None) -> PoolInternals:
    """Return the pool that was passed, and where none was, the current one.

    Raises
    ------
    ArgumentError
        For what was passed as a pool and is none.
    """
    if pool is None:
        return current_pool()
    check_pool(who, pool)
    return pool.internals


def _after_fork() -> None:
    global _default_lock
    _default_lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
