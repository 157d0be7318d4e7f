"""Parallel regions: what outlives the branches of a fork, to the join of the outermost one (guarantee 8).

CuPy gives a freed block back to the arena of the stream that was current when it was allocated, and lets it be used again at
once: that is right for one stream and wrong for two. So everything that a branch reads or allocates is kept until the caller's
stream waits for the branch, and what it allocates comes from the *outermost* caller's arena, where a later use is ordered after
the join.
"""

import functools
import threading
import types
from typing import Any

from handlepool.drivers.base import Driver, Stream


class Region:
    """What the branches of one outermost fork share.

    Parameters
    ----------
    driver : Driver
        Whose allocator it replaces inside branches.
    stream : Stream
        The outermost caller's stream; arrays that branches make belong to its arena.
    """

    __slots__ = ("_allocator", "_driver", "_kept", "device", "keep", "stream")

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver = driver
        self._allocator: Any = None
        self._kept: list[object] = []
        self.device = driver.current_device()
        self.stream = stream
        self.keep = self._kept.append  # atomic: a task's region may be kept to by another thread

    @property
    def allocator(self) -> Any:
        """What branches allocate with; made when the first branch needs it."""
        allocator = self._allocator
        if allocator is None:
            allocator = self._allocator = self._driver.region_allocator(self.stream, self.keep)
        return allocator

    def keep_call(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep a call's arguments, its function, and what the function's closure holds at this moment."""
        self.keep((function, arguments, keywords))
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, types.MethodType):
            function = function.__func__
        closure = getattr(function, "__closure__", None)
        if closure:
            self.keep([cell.cell_contents for cell in closure if _is_set(cell)])

    def release(self) -> None:
        """Let go of everything; the outermost caller's stream waits for every branch by now."""
        self._kept.clear()


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name of the enclosing function that has no value yet
        return False
    return True


class _Thread(threading.local):
    pool: Any = None  # of the branch or task that this thread runs
    region: Region | None = None  # of the branch or task that this thread runs
    states_held: int = 0  # how many explicit states this thread holds (guarantee 15)


thread = _Thread()
