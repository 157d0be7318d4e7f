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
from time import monotonic
from typing import Any

from handlepool._util import do_all
from handlepool.pool.status import pools

deferred: deque[Callable[[], bool]] = deque()  # appends and pops are atomic
"""What there is to do. Each returns False where it is too early, and raises nothing."""
defer = deferred.append
_abandoned: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))  # or Python would take it down with its modules
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
    """In a forked child nothing inherited is given back or freed (guarantee 13)."""
    _abandoned.append(list(deferred))
    deferred.clear()


os.register_at_fork(after_in_child=_after_fork)


SECONDS = 1.0
"""For threads that are inside a use of a program to come out of it."""

under_way: list[bool] = []
"""Not empty once programs come to an end: from then on they are kept, and nothing of theirs is given back."""

_numbers = itertools.count()
_programs: dict[int, weakref.ref[Any]] = {}  # copied in one step, whatever other threads do


def remember(program: Any) -> None:
    """Have a program come to an end at exit; does not keep it alive."""
    number = next(_numbers)
    _programs[number] = weakref.ref(program, lambda _: _programs.pop(number, None))


def _at_exit() -> None:
    ends = [getattr(reference(), "_end_at_exit", None) for reference in list(_programs.values())]
    ends += [
        getattr(getattr(entry, "__self__", None), "_end_at_exit", None) for entry in list(deferred)
    ]  # the collector clears references before
    under_way.append(True)
    deadline = monotonic() + SECONDS
    busy: list[Callable[[], object]] = []

    def end_now(end: Callable[[float], bool]) -> None:
        if not end(0.0):
            busy.append(partial(end, deadline))

    # Those that nobody uses just now come first: one that does not return from a launch takes the time of all.
    first = [partial(end_now, end) for end in ends if end is not None]
    do_all([*first, lambda: do_all(busy), *[pool.plans.drop for pool in pools()]])
    abandon(list(deferred))  # its memory would go with the module, and complain where the context is lost


atexit.register(_at_exit)
