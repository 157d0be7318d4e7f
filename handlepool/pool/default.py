"""Choose the pool of a call that names no pool.

If this thread runs a branch or a task, the call uses the pool of that branch or task. If not, the call uses the default pool.
"""

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
# The lock guards the default pool and its substitutes. So two threads that ask at once get the same pool (guarantee 1). It is
# reentrant, because the collector may run a finalizer that asks for the default pool while this thread holds the lock.
_default_lock = threading.RLock()


class Substitutes:
    """The pools that act as the default pool in tests.

    The pool that was added last is used. `_default_lock` guards each change.
    """

    def __init__(self) -> None:
        # The list begins with the default pool's own internals, followed by the substitutes' internals. Without a substitute it
        # is empty.
        self._ranked: list[PoolInternals] = []

    def add(self, default: HandlePool, substitute: PoolInternals) -> None:
        """Let a pool act as the default pool from now on."""
        if not self._ranked:
            self._ranked.append(default.internals)
            # As long as `branch_pools` has an entry, `current_pool` reads the thread's pool. So a branch under way continues
            # with the pool of its fork.
            branch_pools.append(default.internals)
        self._ranked.append(substitute)
        substitute.is_shared = True
        self._activate_last(default)

    def remove(self, default: HandlePool, substitute: PoolInternals) -> None:
        """Undo `add`; substitutes may be removed in any order."""
        self._ranked.remove(substitute)
        substitute.is_shared = False
        self._activate_last(default)
        if len(self._ranked) == 1:
            branch_pools.remove(self._ranked.pop())

    def _activate_last(self, default: HandlePool) -> None:
        default.internals = self._ranked[-1]
        # The pool changes first, and the hits are unbound afterwards. If a miss in between binds `get_handle`, it binds the new
        # pool, or this call undoes its binding.
        _unbind()


_substitutes = Substitutes()


def default_pool() -> HandlePool:
    """Return the default pool; make it on the first call.

    Returns
    -------
    HandlePool
        The pool of `set_default_pool`, or a pool with default arguments.
    """
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                made = HandlePool()
                made.internals.is_default = made.internals.is_shared = True
                # This module's function replaces the pool's method, because the function uses a substitute as long as there is
                # one.
                made.get_handle = get_handle  # type: ignore[method-assign]
                _default = made if _default is None else _default
                # A finalizer that the collector ran meanwhile may have made a default pool. That pool stays, and the pool made
                # here is dropped.
                if _default is not made:
                    live_pools.discard(made.internals)
    return _default


def set_default_pool(pool: HandlePool) -> None:
    """Make a pool the default pool, before its first use.

    The function is for applications. A library should leave the choice of limits and checks to the application.

    If the parent of a forked child has loaded the driver of the default pool, the child may set a new default pool.
    `ParallelStates` made on the former default pool then use the new pool. The parent's arrays, programs, forks and used
    executors cannot be used in the child.

    Parameters
    ----------
    pool : HandlePool
        The caller still owns the pool. `HandlePool.close` ends it for good, for every user of the default pool.

    Raises
    ------
    ArgumentError
        For an object that is not a HandlePool.
    OwnershipError
        When there is a default pool already, because a call has used it or the application has set another pool. A forked child
        that cannot use its parent's pool gets no such error.
    PoolClosedError, ForkedProcessError, PoisonedContextError
        When the pool cannot be used.
    """
    global _default
    if not isinstance(pool, HandlePool):
        raise ArgumentError(f"set_default_pool was given {shown(pool)}; pass a HandlePool")
    pool.internals.status.check()
    # If two threads come here at once, the lock makes the second thread find the first thread's pool and raise.
    with _default_lock:
        if _default is pool:
            return
        former = _default
        if former is not None and not former.internals.status.forked:
            raise OwnershipError(
                f"set_default_pool came too late: {former!r} is the default pool already, and its handles may be in use. "
                "Call set_default_pool at the start of the program, before any call without pool="
            )
        pool.internals.is_default = True
        pool.get_handle = get_handle  # type: ignore[method-assign]
        _default = pool
        if former is not None:
            # A library may keep a reference to the parent's default pool. As with a substitute, the kept object now uses the
            # internals of the new pool.
            former.internals = pool.internals
            _unbind()


@contextmanager
def substitute_default(pool: HandlePool) -> Iterator[None]:
    """Let ``pool`` do the work of the default pool in tests.

    The substitution lasts to the end of a ``with`` statement, and holds in every thread. Meanwhile the default pool forwards each
    call to ``pool``, and `default_pool` still returns the default pool. So a library may keep the default pool, its
    `HandlePool.get_handle`, a `ParallelStates` or an executor, and uses ``pool`` only during the substitution. Arrays, programs,
    and forks and tasks under way belong to the pool that made them. During the substitution, ``pool`` is shared: its
    `HandlePool.close` destroys only idle handles and scratch. With several substitutes, the default pool uses the latest. The
    substitutions may end in any order.

    Parameters
    ----------
    pool : HandlePool
        The caller closes it after the ``with`` statement.
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
    """Make a `HandlePool.get_handle` that finds its pool on the first call.

    After the first call, the made function is as fast as the pool's own method. The second result is a function that makes the
    next call look for the pool again.
    """

    def missed(stream: object = None) -> Slot:
        while True:
            pool = find().internals
            # The first look-up of a slot also loads the driver, which the next line needs.
            slot = pool.slot(stream)
            use(pool.driver.current_stream, pool.status, pool.current_device)
            # Another thread may have added a substitute meanwhile. So the slot is returned only if `find` still returns its
            # pool.
            if find().internals is pool:
                return slot

    made, _, use = hits(missed)
    return made, lambda: use(None, UNOWNED, None)


get_handle, _unbind = lazy_get_handle(default_pool)


def get_workspace(nbytes: int, stream: object = None) -> Any:
    """Call `HandlePool.get_workspace` of the default pool."""
    return (_default or default_pool()).get_workspace(nbytes, stream)


def prewarm(*, states: int = 0, workspace: int = 0, stream: object = None) -> None:
    """Call `HandlePool.prewarm` of the default pool."""
    default_pool().prewarm(states=states, workspace=workspace, stream=stream)


def stats(device: int | None = None) -> Stats:
    """Call `HandlePool.stats` of the default pool."""
    return default_pool().stats(device)


def trim(*, captured: bool = False) -> None:
    """Call `HandlePool.trim` of the default pool."""
    default_pool().trim(captured=captured)


_functions: tuple[Any, ...] = get_handle, get_workspace, prewarm, stats, trim
for _function in _functions:
    _function.__module__, _function.__qualname__ = __name__, _function.__name__
    _function.__doc__ = getattr(HandlePool, _function.__name__).__doc__


def close() -> None:
    """Destroy idle handles and idle scratch memory of the default pool.

    Idle handles and scratch belong to no thread, stream or fork. The function does the same as `HandlePool.trim`. It does
    nothing if the pool was not used yet, or can no longer be used. The pool stays usable, because other libraries of the
    process use it too. To end a pool for good, make a pool of your own and close that pool.
    """
    pool = _default
    if pool is not None:
        pool.internals.trim_if_usable()


def check_pool(who: str, pool: object) -> None:
    """Raise `ArgumentError` unless ``pool`` is a HandlePool."""
    if not isinstance(pool, HandlePool):
        raise ArgumentError(f"{who} was given pool={shown(pool)}; pass a HandlePool, or None for the default pool")


def current_pool() -> PoolInternals:
    """Return this thread's current pool.

    If this thread runs a branch or a task, the current pool is the pool of that branch or task. If not, it is the default pool.
    """
    if branch_pools and thread.pool is not None:
        # The cast is safe, because only `PoolInternals` implements `RunningPool`.
        return cast(PoolInternals, thread.pool)
    return (default_pool() if _default is None else _default).internals


def pool_so_far() -> PoolInternals | None:
    """Return the current pool, or None if no default pool exists yet."""
    if branch_pools and thread.pool is not None:
        return cast(PoolInternals, thread.pool)
    return None if _default is None else _default.internals


def chosen_pool(who: str, pool: HandlePool | None) -> PoolInternals:
    """Return the given pool, or the current pool if ``pool`` is None.

    Raises
    ------
    ArgumentError
        For an object that is not a HandlePool.
    """
    if pool is None:
        return current_pool()
    check_pool(who, pool)
    return pool.internals


def _after_fork() -> None:
    global _default_lock
    # Another thread of the parent may have held the lock, and cannot release it in the child.
    _default_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
