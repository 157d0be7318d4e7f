"""Which pool is meant where none is given: that of the branch or task that this thread runs, else the default pool."""

import os
import threading

from handlepool import condition
from handlepool.errors import ArgumentError
from handlepool.pool import HandlePool
from handlepool.regions import elsewhere, thread

_default: HandlePool | None = None
_default_lock = threading.RLock()  # a finaliser that the collector runs inside may ask for the default pool, too


def default_pool() -> HandlePool:
    """The pool that the module's functions and whatever is given no pool use; made when first asked for."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                made = HandlePool()
                made.is_default = True
                _default = made if _default is None else _default
                if _default is not made:  # but what such a finaliser got meanwhile
                    condition.forget(made)
    return _default


def check_pool(who: str, pool: object) -> None:
    """Raise `ArgumentError` for what was passed as a pool and is none."""
    if not isinstance(pool, HandlePool):
        raise ArgumentError(f"{who} was given pool={pool!r}; pass a HandlePool, or None for the default pool")


def current_pool() -> HandlePool:
    """The pool of the branch or task that this thread runs, and the default pool outside of any."""
    pool: HandlePool | None = thread.pool if elsewhere else _default
    return default_pool() if pool is None else pool


def _after_fork() -> None:
    global _default_lock
    _default_lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
