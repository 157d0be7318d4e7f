"""Turns at what one thread uses at a time: the graph and the memory of a program."""

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic, sleep
from typing import Any

from handlepool.errors import OwnershipError, PoolClosedError

PATIENCE = 2.0
"""Seconds for which whoever comes after the end waits for the process to be gone, before it is told."""


class Bias:
    """Who may replay without the lock, and whether it does just now."""

    __slots__ = ("launching", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.launching = False


class Turns:
    """One use of a program at a time.

    Whoever uses the program holds the lock. That costs 0.2 microseconds, so the thread that used it last may launch without (a
    biased lock): it says in its `bias` that it launches, *then* looks whether that is still the program's bias. Whoever has the
    lock takes the bias away, *then* looks whether it launches, and waits for that. Whatever the order in which the two run (under
    the GIL, stores come to pass in the order they are written), one of them sees the other. Each bias is a new object, so none
    comes back that was taken away.

    A finaliser that the collector runs inside a use of the same program cannot wait for its own thread, and is refused; one that
    comes before anything was done finds a free program. The lock is taken by ``with`` alone: CPython to 3.13 delivers no
    interrupt between the taking of it and the block, as it does after a call of `acquire`.

    Parameters
    ----------
    name : str
        For messages.

    Attributes
    ----------
    bias : Bias or None
        None while somebody holds the lock.
    """

    __slots__ = ("_busy", "_end", "_former", "_lock", "_name", "_user", "bias")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._busy: str | None = None  # what the holder of the lock has the program: replayed, updated or closed
        self._user = 0  # the thread that holds the lock, or held it last
        self._former: Bias | None = None  # what was taken away last
        self.bias: Bias | None = None
        self._end: float | None = None  # after `end`: when to tell whoever comes

    def take(self, what: str, act: Callable[..., Any], *args: Any) -> Any:
        """Do something while no other thread uses the program.

        Raises
        ------
        OwnershipError
            While another thread updates, but for a close, which waits; in a finaliser inside another use.
        PoolClosedError
            After `end`.
        """
        thread = get_ident()
        for bias in (self.bias, self._former):  # `_former` is set first, so that one of the two is what this thread launches with
            if bias is not None and bias.launching and bias.thread == thread:
                self._refuse_inside("replayed")
        if self._busy == "updated" and self._user != thread and what != "closed":
            # Another thread's launch is short, and is waited for; an update is for its own thread to order.
            raise OwnershipError(
                f"{self._name} is being updated by another thread: whether a replay would see the old values or the new ones is "
                f"for the program to say, so let one thread do both, or use a lock of your own"
            )
        own, granted = Bias(thread), None
        with self._lock:
            if self._busy is not None:
                self._refuse_inside(self._busy)
            if self._end is not None:
                self._refuse_at_exit(self._end)
            try:
                self._busy, self._user = what, thread
                self._take_bias()
                pause = 0.0
                while self._former is not None and self._former.launching:
                    sleep(pause)
                    pause = min(pause + 1e-6, 1e-3)  # a launch may have to wait for the GPU, with its queue full
                granted = own
                return act(*args)
            finally:  # no bias where the wait was interrupted: the next one waits for `_former`, too
                self.bias, self._busy = granted, None

    def end(self, deadline: float, act: Callable[[], object]) -> bool:
        """Do something at exit, after which nobody uses the program any more.

        Daemon threads that come then are kept waiting for a while, in which the process ends as a rule: what they would be told,
        they would print. But not for ever, since somebody may wait for them.

        Parameters
        ----------
        deadline : float
            By the monotonic clock, in seconds.
        act : callable

        Returns
        -------
        bool
            False where another thread is inside until then, and nothing was done.
        """
        if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            return False
        try:
            self._take_bias()
            while self._former is not None and self._former.launching:
                if monotonic() >= deadline:
                    return False
                sleep(1e-4)
            self._user, self._end = get_ident(), monotonic() + PATIENCE
            act()
            return True
        finally:
            self._lock.release()

    def _take_bias(self) -> None:
        if self.bias is not None:
            self._former = self.bias
            self.bias = None

    def _refuse_at_exit(self, moment: float) -> None:
        if self._user != get_ident():
            sleep(max(0.0, moment - monotonic()))
        raise PoolClosedError(f"{self._name} came to its end with the interpreter, which is being taken down")

    def _refuse_inside(self, what: str) -> None:
        raise OwnershipError(
            f"{self._name} is being {what} by this very thread, and this call comes from a finaliser that Python runs meanwhile: "
            f"do it later"
        )
