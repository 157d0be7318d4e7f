"""Decide whether a pool can be used; raise if not.

A pool cannot be used after it was closed, after it lost its CUDA context, or in a forked child if its driver was loaded before
the fork.

A hit does not check the status. Instead, each event that makes a pool unusable ends the pool's slots. Then no hit succeeds, and
every call comes here.
"""

import logging
import os
from collections.abc import Callable
from copy import copy
from typing import Protocol

from handlepool.drivers.protocol import Driver
from handlepool.errors import ForkedProcessError, HandlePoolError, PoisonedContextError, PoolClosedError

_log = logging.getLogger("handlepool")


class Status:
    """The driver of a pool, and whether the pool can be used.

    Parameters
    ----------
    end_hits : callable
        Ends the pool's slots, without a call to CUDA.
    loaded : bool
        Whether the pool's driver is already loaded.

    Attributes
    ----------
    unusable : bool
        Whether the pool is closed, forked or poisoned.
    closed, forked : bool
        Whether `close` was called, and whether the process is a forked child whose parent had loaded the pool's driver.
    poison : BaseException or None
        The error that cost the process its CUDA context.
    driver : Driver or None
        Set once the driver is loaded.
    """

    __slots__ = ("_end_hits", "_loaded", "closed", "driver", "forked", "poison", "unusable")

    def __init__(self, end_hits: Callable[[], None], loaded: bool = False) -> None:
        self._end_hits = end_hits
        self._loaded = loaded
        self.unusable = False
        self.closed = False
        self.forked = False
        self.poison: BaseException | None = None
        self.driver: Driver | None = None

    @property
    def untouchable(self) -> bool:
        """Return whether the pool's resources must not be destroyed or released.

        The result is True in a forked child (guarantee 13), and after a lost context.
        """
        return self.forked or self.poison is not None

    def close(self) -> None:
        """Make each later use fail."""
        self.closed = self.unusable = True

    def check(self) -> None:
        """Raise where the pool cannot be used.

        Raises
        ------
        ForkedProcessError, PoisonedContextError, PoolClosedError
        """
        if not self.unusable:
            return
        if self.forked:
            raise ForkedProcessError(f"this pool's driver was loaded before os.fork, and {self._remedy()}")
        if self.poison is not None:
            raise _poisoned(self.poison) from self.poison
        raise PoolClosedError(f"<HandlePool {self.driver_name}, closed> was closed; make a new HandlePool")

    def _remedy(self) -> str:
        if self.driver_name == "cuda":
            return (
                "CUDA does not survive a fork: start the child with multiprocessing.get_context('spawn'), or fork before "
                "anything uses CUDA"
            )
        return (
            "the driver's threads do not survive a fork: start the child with multiprocessing.get_context('spawn'), or make a "
            "HandlePool in the child. There handlepool.set_default_pool(handlepool.HandlePool()) replaces the default pool"
        )

    @property
    def driver_name(self) -> str:
        """Return the driver's name, for messages."""
        return "driver not loaded" if self.driver is None else self.driver.name

    def diagnose(self, error: BaseException | None) -> None:
        """Raise if the context was lost.

        All pools that share the context are poisoned first, so that their later calls raise.

        Call this method only in two cases: while an error is handled, and before a call that destroys many objects at once.

        Parameters
        ----------
        error : BaseException or None
            The error that a call raised; None to ask CUDA.

        Raises
        ------
        PoisonedContextError
            If the context was lost. The cause is the CUDA error.
        """
        cause = self.lost(error)
        if cause is not None:
            raise _poisoned(cause) from cause

    def lost(self, error: BaseException | None, *, ask: bool = True) -> BaseException | None:
        """Return the error that destroyed the context, or None.

        The other pools that share the context are poisoned too. With ``ask=False`` the method inspects only the given error and
        does not ask CUDA. Callers do so for errors that may have nothing to do with CUDA.
        """
        driver = self.driver
        if driver is None or self.forked or isinstance(error, PoisonedContextError):
            return None
        if isinstance(error, HandlePoolError) and error.__cause__ is None and error.__context__ is None:
            # The error reports a mistake in the arguments, so no call to CUDA has failed.
            return None
        cause = self.poison
        if cause is None:
            cause = driver.context_lost(error, ask)
            if cause is not None:
                for pool in list(live_pools):
                    other = pool.status
                    if other.driver is not None and other.driver.context_lost(cause, False) is not None:
                        other.poison_by(cause)
                self.poison_by(cause)
        return cause

    def poison_by(self, cause: BaseException) -> None:
        """Note that the context was lost, and end the pool's slots."""
        if self.poison is None:
            # The error is kept without its traceback. A traceback would keep the caller's arrays until the process ends, and
            # their destructors would then fail in the lost context. A copy of an error usually has no traceback; Dask's errors
            # are an exception. An error that cannot be copied is kept as it is.
            try:
                kept = copy(cause)
                if kept is not cause:
                    kept.__traceback__ = kept.__cause__ = kept.__context__ = None
            except Exception:
                kept = cause
            self.poison = kept
            self.unusable = True
            self._end_hits()
            _log.debug("the context is lost: %s", cause)

    def fork(self) -> None:
        """Note that this process is a forked child (guarantee 13).

        The child neither uses nor destroys inherited resources. A pool whose driver was not loaded before the fork has
        inherited nothing, and stays usable.
        """
        if self._loaded or self.driver is not None:
            self.forked = self.unusable = True
            self._end_hits()


def _poisoned(cause: BaseException) -> PoisonedContextError:
    return PoisonedContextError(
        f"the CUDA context of this process was lost by an earlier error ({cause}), and no call can succeed in it any more: "
        f"restart the process. `compute-sanitizer python ...` names the kernel that caused the error"
    )


class Plans(Protocol):
    """The part of a pool's plans that `handlepool.pool.process_end` uses."""

    def drop(self) -> None:
        """Forget every plan for good."""


class KnownPool(Protocol):
    """The attributes of a pool that the users of `live_pools` need."""

    @property
    def status(self) -> Status:
        """Return the status, which says whether the pool can be used."""

    @property
    def plans(self) -> Plans:
        """Return the compiled plans."""


class LivePools(set[KnownPool]):
    """The open pools, and closed pools that still have resources.

    The references are strong, because the collector must not collect a pool that its user dropped without closing, see the
    notes of `HandlePool`. The set needs no lock. An addition, a removal and a copy are one atomic step each, so a finalizer may
    make or close a pool at any line.
    """


live_pools = LivePools()


def _after_fork() -> None:
    for pool in list(live_pools):
        pool.status.fork()


os.register_at_fork(after_in_child=_after_fork)
