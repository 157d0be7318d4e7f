"""What a destructor or a thread's end leaves to do, for somebody who may call CUDA (guarantee 10).

A destructor may run at any line, under any lock, in a thread that captures, or after the interpreter has begun to end: it appends
a callable to `deferred` and no more. The next miss, fork or `HandlePool.trim` calls it.
"""

import atexit
import ctypes
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from threading import get_ident
from time import monotonic, sleep
from typing import Any

from handlepool._util.cleanup import do_all
from handlepool.pool.status import pools

deferred: deque[Callable[[], bool]] = deque()  # appends and pops are atomic
"""What there is to do. Each returns False where it is too early, and raises nothing."""
defer = deferred.append
_abandoned: list[object] = []
for _kept in (deferred, _abandoned):  # or Python would take them down with its modules
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
abandon = _abandoned.append
"""Let something live as long as the process, since its end would call CUDA when that must not be called any more."""


def settle(left: deque[Any] = deferred, do: Callable[[Any], bool] = call, most: int = 8) -> None:
    """Do what can be done of what was left to do; a few at a time, so that nobody pays for a long backlog."""
    for _ in range(min(len(left), most)):
        held: list[Any] = []
        done = False
        try:
            held.extend(map(deque.popleft, (left,)))  # in one step: what an interrupt finds is in one of the two
            done = do(held[0])
        except IndexError:  # another thread settles too
            if held:
                raise
            return
        finally:  # also where it was interrupted
            if held and not done:
                left.append(held[0])


def settle_all() -> None:
    """Do what can be done of all that was left to do; not where a lock is held, since finalisers of the users' may run."""
    settle(most=len(deferred))


def _after_fork() -> None:
    """In a forked child nothing inherited is destroyed or freed (guarantee 13)."""
    _abandoned.append(list(deferred))
    deferred.clear()


os.register_at_fork(after_in_child=_after_fork)


PATIENCE = 1.0
"""Seconds for all threads together that are inside a use of a program as the process ends, to come out of it; and for the process
to be gone, before whoever uses a program after that is told."""

ending: list[int] = []
"""The thread that ends the process, once programs come to an end: from then on nothing of theirs is destroyed."""

_numbers = itertools.count()
_ends: dict[int, weakref.WeakMethod[Callable[[float], None]]] = {}  # copied in one step, whatever other threads do


def remember(end: Callable[[float], None]) -> None:
    """Have a program's bound method called at exit, with a deadline; does not keep the program alive."""
    number = next(_numbers)
    _ends[number] = weakref.WeakMethod(end, lambda _: _ends.pop(number, None))


def remembered() -> list[object]:
    """List whose methods `remember` was given, of those that live and that somebody still holds."""
    owners = [getattr(reference(), "__self__", None) for reference in list(_ends.values())]
    dropped = {id(getattr(step, "__self__", None)) for step in list(deferred)}
    return [owner for owner in owners if owner is not None and id(owner) not in dropped]


def linger() -> None:
    """Have a daemon thread that uses a program too late end with the process: what it is told, it would print.

    But not for ever, since somebody may wait for it.
    """
    if get_ident() not in ending:
        sleep(PATIENCE)


def _at_exit() -> None:
    """Drop every plan: cuDNN's binding complains of those that outlive it."""
    ends = [reference() for reference in list(_ends.values())]
    # The collector clears references before it runs destructors.
    ends += [getattr(getattr(entry, "__self__", None), "_end_at_exit", None) for entry in list(deferred)]
    ending.append(get_ident())
    deadline = monotonic() + PATIENCE
    do_all([*[partial(end, deadline) for end in ends if end is not None], *[pool.plans.drop for pool in pools()]])


atexit.register(_at_exit)
