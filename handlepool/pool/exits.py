"""The end of the interpreter: compiled plans go before it.

Where daemon threads keep a pool or a program alive, cuDNN's binding would print its plans as leaked.
"""

import atexit
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from handlepool._util.cleanup import do_all
from handlepool.pool.deferred import keep_for_good, parked
from handlepool.pool.status import pools

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
    ends += [getattr(entry, "_end_at_exit", None) for entry in list(parked)]  # the collector clears references before
    under_way.append(True)
    deadline = monotonic() + SECONDS
    busy: list[Callable[[], object]] = []

    def end_now(end: Callable[[float], bool]) -> None:
        if not end(0.0):
            busy.append(partial(end, deadline))

    # Those that nobody uses just now come first: one that does not return from a launch takes the time of all.
    first = [partial(end_now, end) for end in ends if end is not None]
    do_all([*first, lambda: do_all(busy), *[pool.plans.drop for pool in pools()]])
    keep_for_good(list(parked))  # its memory would go with the module, and complain where the context is lost


atexit.register(_at_exit)
