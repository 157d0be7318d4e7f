"""Whether a pool can be used, and what is said where it cannot.

It cannot where it was closed, was inherited by a forked child after its driver was loaded, or lost its CUDA context.

A hit asks none of this. Whatever makes a pool unusable ends its slots, so that no hit succeeds and every call comes here.
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
    """Whether a pool can be used, and its driver: what the pool's parts know of it.

    Parameters
    ----------
    end_hits : callable
        Ends the pool's slots; calls nothing of CUDA.
    loaded : bool
        Whether the pool was given a driver that is made already.

    Attributes
    ----------
    unusable : bool
        Any of the next three.
    closed, forked : bool
        Whether `close` was called; whether this is a child made by ``os.fork``, and the pool's driver its parent's.
    poison : BaseException or None
        The error that the CUDA context was lost by.
    driver : Driver or None
        Once it is loaded.
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
        """Whether nothing may be destroyed or released: in a forked child (guarantee 13), and after a lost context."""
        return self.forked or self.poison is not None

    def close(self) -> None:
        """Let no later use succeed."""
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
        """The driver's name, for messages."""
        return "driver not loaded" if self.driver is None else self.driver.name

    def diagnose(self, error: BaseException | None) -> None:
        """Return where the context still lives; else tell every pool of that driver, and raise.

        Called on the way of an error alone, and before what destroys many things at once.

        Parameters
        ----------
        error : BaseException or None
            What a call raised; None to ask CUDA.

        Raises
        ------
        PoisonedContextError
            From the CUDA error.
        """
        cause = self.lost(error)
        if cause is not None:
            raise _poisoned(cause) from cause

    def lost(self, error: BaseException | None, *, ask: bool = True) -> BaseException | None:
        """Return the error that the context was lost by, None where it lives. Pools that share it are told.

        With ``ask=False`` nothing but the error itself is looked at: for errors that may be anybody's.
        """
        driver = self.driver
        if driver is None or self.forked or isinstance(error, PoisonedContextError):
            return None
        if isinstance(error, HandlePoolError) and error.__cause__ is None and error.__context__ is None:
            return None  # a mistake in a call, which no call to CUDA failed for
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
        """Know that the context was lost."""
        if self.poison is None:
            # Without the traceback, whose frames would keep the caller's arrays to the end of the process, where they complain of
            # the lost context: a copy has none, but for what has errors copied whole, as Dask does. (One that cannot be copied is
            # kept as it is.)
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
        """Know that this is a forked child: nothing inherited is used or destroyed (guarantee 13).

        A pool whose driver was not loaded has inherited nothing, and goes on.
        """
        if self._loaded or self.driver is not None:
            self.forked = self.unusable = True
            self._end_hits()


def _poisoned(cause: BaseException) -> PoisonedContextError:
    return PoisonedContextError(
        f"the CUDA context of this process was lost by an earlier error ({cause}), and no call can succeed in it any more: "
        f"restart the process. `compute-sanitizer python ...` names the kernel that did it"
    )


class Plans(Protocol):
    """A pool's plans, as far as the end of the process knows them."""

    def drop(self) -> None:
        """Forget every plan for good."""


class KnownPool(Protocol):
    """A pool that is told of forks, of a lost context and of the end of the process."""

    @property
    def status(self) -> Status:
        """Whether it can be used."""

    @property
    def plans(self) -> Plans:
        """What it compiled."""


class LivePools(set[KnownPool]):
    """The pools that were not closed, and those that something is left of.

    Strong references: a pool that its user dropped without closing it must not be collected, see `HandlePool`'s notes. No lock:
    an addition, a removal and a copy are one atomic step each, so a finaliser may make or close a pool at any line.
    """


live_pools = LivePools()


def _after_fork() -> None:
    for pool in list(live_pools):
        pool.status.fork()


os.register_at_fork(after_in_child=_after_fork)
