"""Hold steps of destructors and ended threads for later (guarantee 10).

A destructor may run at any line, under any lock, in a thread that captures, or after the interpreter has begun to end. So it
only appends a callable to `deferred`. The next miss, fork or `HandlePool.trim` calls the callable, because such a caller may
call CUDA.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from operator import call
from typing import TypeVar

T = TypeVar("T")


class Deferred(deque[Callable[[], bool]]):
    """Steps that any thread does later.

    A step returns False where it is too early, and raises nothing. The deque itself is the object, so that ``if deferred:`` on
    hot paths costs one look at a length. The deque has no lock. An append and a pop are one step each for other threads, and
    for a finalizer that the collector runs in between (guarantee 10).
    """

    def run(self, most: int = 8) -> None:
        """Do at most ``most`` steps.

        The bound keeps a caller from paying for a long backlog.
        """
        run_some(self, call, most)

    def run_all(self) -> None:
        """Try each step once.

        Do not call this where a lock is held, because users' finalizers may run.
        """
        self.run(len(self))


class Abandoned(list[object]):
    """Objects that live as long as the process (guarantee 10).

    Their destructors would call CUDA when no call is allowed any more. The list needs no lock, because it only grows, by atomic
    appends.
    """


deferred = Deferred()
defer = deferred.append
abandoned = Abandoned()
abandon = abandoned.append
for _kept in (deferred, abandoned):
    # Python would otherwise destroy both containers with its modules, and with them the objects they hold.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def run_some(left: deque[T], do: Callable[[T], bool], most: int = 8) -> None:
    """Do some steps of a deque.

    ``do`` gets each step. A step for which it returns False goes back to the end of the deque.
    """
    for _ in range(min(len(left), most)):
        held: list[T] = []
        done = False
        try:
            # The entry moves in one step, so an interrupt finds the entry in either container.
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
