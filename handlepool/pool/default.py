"""Which pool is meant where none is given: that of the branch or task that this thread runs, else the default pool."""

import os
import threading
from collections.abc import Callable
from typing import Any, cast

from handlepool._util import shown
from handlepool.errors import ArgumentError, OwnershipError
from handlepool.pool.context import elsewhere, thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import GetHandle, Slot, hits
from handlepool.pool.stats import Stats
from handlepool.pool.status import forget

_default: HandlePool | None = None
_default_lock = threading.RLock()  # a finaliser that the collector runs inside may ask for the default pool, too


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
                made.internals.is_default = made.internals.everybodys = True
                _default = made if _default is None else _default
                if _default is not made:  # but what such a finaliser got meanwhile
                    forget(made.internals)
    return _default


def set_default_pool(pool: HandlePool) -> None:
    """Make a pool the default one, before anything has used that.

    It is for applications, which know what limits or checks they want. A library, as one of several, leaves the choice to them.

    Parameters
    ----------
    pool : HandlePool
        Stays the caller's: its `HandlePool.close` ends it for good, for whoever uses the default pool, too.

    Raises
    ------
    ArgumentError
        For what is no pool.
    OwnershipError
        When there is a default pool: something has used it, or another one was set.
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
        if _default is not None:
            raise OwnershipError(
                f"set_default_pool came too late: {_default!r} is the default pool, and others may have kept what is its. Set "
                f"yours at the start of the program, before the first call that is given no pool"
            )
        pool.internals.is_default = True
        _default = pool


def of_pool_to_come(find: Callable[[], HandlePool]) -> GetHandle:
    """Make the `HandlePool.get_handle` of a pool that the first call asks for; from then on it costs what the pool's own does."""

    def missed(stream: Any = None) -> Slot:
        pool = find().internals
        slot = pool.slot(stream)  # loads the driver
        use(pool.driver, pool.status, pool.current_device)
        return slot

    made, _, use = hits(missed)
    return made


get_handle = of_pool_to_come(default_pool)


def get_workspace(nbytes: int, stream: Any = None) -> Any:
    """As `HandlePool.get_workspace`, of the default pool."""
    return (_default or default_pool()).get_workspace(nbytes, stream)


def prewarm(*, states: int = 0, workspace: int = 0, stream: Any = None) -> None:
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
    if elsewhere and thread.pool is not None:
        return cast(PoolInternals, thread.pool)  # of no other class: see `RunningPool`
    return (default_pool() if _default is None else _default).internals


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
