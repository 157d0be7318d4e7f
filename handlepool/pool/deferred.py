"""Hold clean-up steps of destructors and ended threads (guarantee 10).

A destructor may run at any line, under any lock, in a thread that captures, or after the interpreter has begun to end. So it
only appends a callable to `deferred`. The next miss, fork or `HandlePool.trim` calls this callable, at a point where calls to
CUDA are allowed.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from operator import call
from typing import TypeVar

T = TypeVar("T")


class Deferred(deque[Callable[[], bool]]):
    """Clean-up steps that any thread may do later.

    A step that comes too early returns False and is kept. No step raises. The class is a deque itself, so that ``if deferred:``
    on hot paths only reads a length. The deque has no lock. An append and a pop are one step each for other threads, and
    for a finalizer that the collector runs in between (guarantee 10).
    """

    def run(self, most: int = 8) -> None:
        """Do at most ``most`` steps.

        The bound keeps a caller from doing a long list of steps that other threads deferred.
        """
        run_some(self, call, most)

    def run_all(self) -> None:
        """Try each step once.

        Do not call this method while this thread holds a lock, because users' finalizers may run.
        """
        self.run(len(self))


class Abandoned(list[object]):
    """Objects that live as long as the process (guarantee 10).

    Their destructors would call CUDA at a time when no call is allowed. The list needs no lock: it only grows, and an append is
    atomic.
    """


deferred = Deferred()
defer = deferred.append
abandoned = Abandoned()
abandon = abandoned.append
for _kept in (deferred, abandoned):
    # This reference is never released. Without it, Python would destroy both containers and their objects when it unloads
    # modules.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def run_some(left: deque[T], do: Callable[[T], bool], most: int = 8) -> None:
    """Take at most ``most`` entries, and call ``do`` with each.

    An entry for which ``do`` returns False goes back to the end of ``left``.
    """
    for _ in range(min(len(left), most)):
        held: list[T] = []
        done = False
        try:
            # The entry moves in one step, so after an interrupt it is in one of the two containers.
            held.extend(map(deque.popleft, (left,)))
            done = do(held[0])
        except IndexError:
            if held:
                raise
            # Another thread has taken the last entry.
            return
        finally:
            # This runs after an interrupt too, so the entry is not lost.
            if held and not done:
                left.append(held[0])


def _after_fork() -> None:
    """Abandon the parent's steps in a forked child (guarantee 13).

    The child destroys nothing that it inherited.
    """
    abandon(list(deferred))
    deferred.clear()


os.register_at_fork(after_in_child=_after_fork)
