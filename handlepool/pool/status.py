"""Whether a pool can be used, and what is said where it cannot: it was closed, inherited by a forked child, or its CUDA context
is lost.

A hit asks none of this. Whatever makes a pool unusable ends its slots, so that no hit succeeds and every call comes here.
"""

import logging
import os
from copy import copy
from typing import Any

from handlepool.errors import ForkedProcessError, HandlePoolError, PoisonedContextError, PoolClosedError

_log = logging.getLogger("handlepool")
_pools: set[Any] = set()  # strong: a pool that nobody closed must not be collected, see HandlePool's notes


def remember(pool: Any) -> None:
    """Keep a pool alive, and tell it of forks and of a lost context."""
    _pools.add(pool)


def forget(pool: Any) -> None:
    """Let go of a pool that was closed."""
    _pools.discard(pool)


def pools() -> list[Any]:
    """Those that were not closed, and those that something is left of."""
    return list(_pools)


def check_usable(pool: Any) -> None:
    """Raise where a pool cannot be used.

    Raises
    ------
    ForkedProcessError, PoisonedContextError, PoolClosedError
    """
    if not pool.unusable:
        return
    if pool._forked:
        raise ForkedProcessError(
            "this pool was made before os.fork, and CUDA does not survive a fork: start the child with "
            "multiprocessing.get_context('spawn'), or make a HandlePool in the child before CUDA is used in the parent"
        )
    if pool._poison is not None:
        raise _poisoned(pool._poison) from pool._poison
    raise PoolClosedError(f"{pool!r} was closed; make a new HandlePool")


def _poisoned(cause: BaseException) -> PoisonedContextError:
    return PoisonedContextError(
        f"the CUDA context of this process was lost by an earlier error ({cause}), and no call can succeed in it any more: "
        f"restart the process. `compute-sanitizer python ...` names the kernel that did it"
    )


def diagnose(pool: Any, error: BaseException | None) -> None:
    """Return where the context still lives; else tell every pool of that driver, and raise.

    Called on the way of an error alone, and before what destroys many things at once.

    Parameters
    ----------
    pool : HandlePool
    error : BaseException or None
        What a call raised; None to ask CUDA.

    Raises
    ------
    PoisonedContextError
        From the CUDA error.
    """
    cause = lost(pool, error)
    if cause is not None:
        raise _poisoned(cause) from cause


def lost(pool: Any, error: BaseException | None, *, ask: bool = True) -> BaseException | None:
    """The error that the context was lost by, None where it lives. Pools that share it are told.

    With ``ask=False`` nothing but the error itself is looked at: for errors that may be anybody's.
    """
    driver = pool._driver
    if driver is None or pool._forked or isinstance(error, PoisonedContextError):
        return None
    if isinstance(error, HandlePoolError) and error.__cause__ is None and error.__context__ is None:
        return None  # a mistake in a call, which no call to CUDA failed for
    cause: BaseException | None = pool._poison
    if cause is None:
        cause = driver.context_lost(error, ask)
        if cause is not None:
            for other in list(_pools):
                if other._driver is not None and other._driver.context_lost(cause, False) is not None:
                    _poison(other, cause)
            _poison(pool, cause)
    return cause


def _poison(pool: Any, cause: BaseException) -> None:
    if pool._poison is None:
        # Without the traceback, whose frames would keep the caller's arrays to the end of the process, where they complain of the
        # lost context. (An error that cannot be copied is kept as it is.)
        try:
            pool._poison = copy(cause)
        except Exception:
            pool._poison = cause
        pool.unusable = True
        _end_hits(pool)
        _log.debug("the context is lost: %s", cause)


def _end_hits(pool: Any) -> None:
    pool._live.disown()
    for device in list(pool._devices.values()):
        device.sides.end()


def _after_fork() -> None:
    """In a forked child nothing inherited is used or destroyed (guarantee 13)."""
    for pool in list(_pools):
        pool._forked = pool.unusable = True
        _end_hits(pool)


os.register_at_fork(after_in_child=_after_fork)
