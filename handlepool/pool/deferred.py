"""What a destructor or a thread's end leaves behind, for somebody who may call CUDA (guarantee 10).

A destructor may run at any line, under any lock, in a thread that captures, or after the interpreter has begun to end: it appends
to a list and no more. The next miss, fork or `HandlePool.trim` does what there is to do.
"""

import ctypes
import os
from collections import deque
from typing import Any, Protocol


class Parked(Protocol):
    """What was left behind with something to do about it."""

    def _settle(self) -> bool:
        """Do it; False where it is too early. Raises nothing."""


parked: deque[Parked] = deque()  # appends and pops are atomic
_abandoned: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))  # or Python would take it down with its modules
keep_for_good = _abandoned.append
"""Let something live as long as the process, since its end would call CUDA when that must not be called any more."""


def settle(left: deque[Any] = parked, most: int = 8) -> None:
    """Do what can be done about some of what was left behind; a few at a time, so that nobody pays for a long backlog."""
    for _ in range(min(len(left), most)):
        held: list[Any] = []
        done = False
        try:
            held.extend(map(deque.popleft, (left,)))  # in one step: what an interrupt finds is in one of the two
            done = held[0]._settle()
        except IndexError:  # another thread settles too
            if held:
                raise
            return
        finally:  # also where it was interrupted
            if held and not done:
                left.append(held[0])


def settle_all() -> None:
    """Do what can be done about all that was left behind; not where a lock is held, since finalisers of the users' may run."""
    settle(most=len(parked))


def _after_fork() -> None:
    """In a forked child nothing inherited is given back or freed (guarantee 13)."""
    _abandoned.append(list(parked))
    parked.clear()


os.register_at_fork(after_in_child=_after_fork)
