"""Hold the steps that destructors and ended threads leave to a caller that may call CUDA (guarantee 10).

A destructor may run at any line, under any lock, in a thread that captures, or after the interpreter has begun to end: it appends
a callable to `deferred` and no more. The next miss, fork or `HandlePool.trim` calls it.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from operator import call
from typing import TypeVar

T = TypeVar("T")


class Deferred(deque[Callable[[], bool]]):
    """Steps to be done later, by any thread. A step returns False where it is too early, and raises nothing.

    The deque itself is the object, so that ``if deferred:`` on hot paths costs one look at a length. It has no lock: an append
    and a pop are one step each for other threads, and for a finaliser that the collector runs in between (guarantee 10).
    """

    def run(self, most: int = 8) -> None:
        """Do some of the steps; few at a time, so that no caller pays for a long backlog."""
        run_some(self, call, most)

    def run_all(self) -> None:
        """Try each step once; not where a lock is held, since finalisers of the users' may run."""
        self.run(len(self))


class Abandoned(list[object]):
    """Objects that live as long as the process, since their end would call CUDA when no call is allowed any more (guarantee 10).

    No lock: the list only grows, by atomic appends.
    """


deferred = Deferred()
defer = deferred.append
abandoned = Abandoned()
abandon = abandoned.append
for _kept in (deferred, abandoned):
    # Python would take them down with its modules, and destroy what they hold.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def run_some(left: deque[T], do: Callable[[T], bool], most: int = 8) -> None:
    """Do some of the steps that a deque holds; a step that returns False goes back to its end."""
    for _ in range(min(len(left), most)):
        held: list[T] = []
        done = False
        try:
            # In one step: an interrupt finds the entry in one of the two.
            held.extend(map(deque.popleft, (left,)))
            done = do(held[0])
        except IndexError:
            if held:
                raise
            # Another thread has taken the last entry.
            return
        finally:
            # An interrupt comes here, too.
            if held and not done:
                left.append(held[0])


def _after_fork() -> None:
    """Abandon in a forked child the steps of its parent: the child destroys nothing inherited (guarantee 13)."""
    abandon(list(deferred))
    deferred.clear()


os.register_at_fork(after_in_child=_after_fork)
