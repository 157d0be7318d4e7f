"""The end of the interpreter: compiled plans go before it.

Where daemon threads keep a pool or a program alive, cuDNN's binding would print its plans as leaked.
"""

import atexit
import itertools
import weakref
from time import monotonic
from typing import Any

from handlepool.condition import pools
from handlepool.regions import parked

under_way: list[bool] = []
"""Not empty once programs have come to an end: from then on they are kept, and nothing of theirs is given back."""

_numbers = itertools.count()
_programs: dict[int, weakref.ref[Any]] = {}  # copied in one step, whatever other threads do


def remember(program: Any) -> None:
    """Have a program come to an end at exit; does not keep it alive."""
    number = next(_numbers)
    _programs[number] = weakref.ref(program, lambda _: _programs.pop(number, None))


def _at_exit() -> None:
    ends = [getattr(reference(), "_end_at_exit", None) for reference in list(_programs.values())]
    ends += [getattr(entry, "_end_at_exit", None) for entry in list(parked)]  # the collector clears references before
    deadline = monotonic() + 1
    for end in ends:
        if end is not None:
            end(deadline)
    under_way.append(True)
    for pool in pools():
        pool.plans.drop()


atexit.register(_at_exit)
