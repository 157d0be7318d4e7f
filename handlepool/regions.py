"""Parallel regions: what outlives the branches of a fork, to the join of the outermost one (guarantee 8).

CuPy gives a freed block back to the arena of the stream that was current when it was allocated, and lets it be used again at
once: that is right for one stream and wrong for two. So everything that a branch reads or allocates is kept until the caller's
stream waits for the branch, and what it allocates comes from the *outermost* caller's arena, where a later use is ordered after
the join.
"""

import ctypes
import functools
import os
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from handlepool.drivers.base import Driver
from handlepool.drivers.objects import Stream

T = TypeVar("T")


class Region:
    """What the branches of one outermost fork share.

    Parameters
    ----------
    driver : Driver
        Whose allocator it replaces inside branches.
    stream : Stream
        The outermost caller's stream; arrays that branches make belong to its arena.
    device : int
        The ordinal.
    outer : Region, optional
        Of the branch or task that a task was submitted from. It takes over what is let go of, since what a task made may be
        read there after the task was joined.
    kept : list, optional
        What is kept already.
    """

    __slots__ = ("_allocator", "_outer", "awaited", "device", "driver", "ended", "inner", "keep", "kept", "stream")

    def __init__(
        self, driver: Driver, stream: Stream, device: int, outer: "Region | None" = None, kept: list[object] | None = None
    ) -> None:
        self._outer = outer
        self._allocator: Any = None
        self.kept: list[object] = [] if kept is None else kept
        self.inner: set[Any] | None = None  # forks inside branches, from where they are entered to their join
        self.ended = False  # whether the outermost caller has gone on
        self.awaited: frozenset[int] = frozenset()  # by pointer, the streams that waited for a task's end
        self.driver = driver
        self.device = device
        self.stream = stream
        self.keep = self.kept.append  # atomic: a task's region may be kept to by another thread

    @property
    def allocator(self) -> Any:
        """What branches allocate with; made when the first branch needs it."""
        allocator = self._allocator
        if allocator is None:
            allocator = self._allocator = self.driver.region_allocator(self.stream, self.keep, _allocator_of)
        return allocator

    def keep_call(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep a call's arguments, its function, and what the function's closure holds at this moment."""
        self.keep((function, arguments, keywords))
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, types.FunctionType) and function.__closure__:
            self.keep([*map(content, function.__closure__)])

    def enter(self, fork: Any) -> None:
        """Know an inner fork, to its join."""
        if self.inner is None:
            self.inner = set()
        self.inner.add(fork)

    def leave(self, fork: Any) -> None:
        """An inner fork was joined, or will be by whoever finds it parked. One whose join failed stays known."""
        if self.inner is not None:
            self.inner.discard(fork)

    @property
    def over(self) -> bool:
        """Whether all that ran in it is waited for by whatever is outside of regions."""
        return self.ended and (self._outer is None or self._outer.over)

    def joined(self, fork: Any) -> bool:
        """Whether an inner fork was, so that its caller's stream waits for it."""
        return not (fork._leased or fork in (self.inner or ()))

    def lenders(self, pointer: int) -> list[Any]:
        """The inner forks that a side stream was lent by, one inside the other, the innermost first."""
        by_pointer = {slot.pointer: fork for fork in self.inner or () for slot in fork._leased}
        lenders: list[Any] = []
        while (fork := by_pointer.pop(pointer, None)) is not None:
            lenders.append(fork)
            pointer = fork._pointer
        return lenders

    def release(self) -> None:
        """Let go of everything; the outermost caller's stream waits for every branch by now.

        But not for those of an inner fork that was never joined, as where an interrupt came just then.
        """
        self.ended = True
        if self.inner:
            inner, self.inner = self.inner, None
            if any(fork._leased for fork in inner):
                self.abandon()
        if self._outer is not None:
            self._outer.keep(self.kept[:])
        self.kept.clear()

    def abandon(self) -> None:
        """Let go of nothing, ever: a join failed, so branches may read what is kept, and nobody waits for them."""
        _abandoned.append(self.kept)
        self.kept = []
        self.keep = self.kept.append
        self._allocator = None  # a branch that is running allocates with the former one, and keeps to the former list


def content(cell: types.CellType) -> Any:
    """What a closure's cell holds; None for a name of the enclosing function that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


lent: dict[int, Region] = {}
"""By pointer, the side streams on which branches and tasks run Python, and the region of each, to the join or the task's end. By
pointer, since one stream may have several objects, and they need not be ours."""


def _allocator_of(pointer: int) -> Any:
    """The allocator of the region that a stream is lent in."""
    region = lent.get(pointer)
    return None if region is None or region.ended else region.allocator


def inherited(driver: Driver, device: int, pointer: int) -> "Region | None":
    """The region whose join waits for a stream, for what starts after that in a branch or task of this thread.

    None outside of any, and for another device, another driver, or a stream that the branch chose itself: no join waits for that,
    so what runs over it is a region of its own.
    """
    region = thread.region
    if region is None:
        return None
    if pointer != region.stream.ptr:
        region = lent.get(pointer)
    if region is None or region.ended or region.device != device or underneath(region.driver) is not underneath(driver):
        return None
    return region


def underneath(driver: Any) -> Any:
    """The driver that a pool which checks has wrapped."""
    return getattr(driver, "checked_driver", driver)


class _Thread(threading.local):
    pool: Any = None  # of the branch or task that this thread runs
    region: Region | None = None  # of the branch or task that this thread runs
    recording: Any = None  # of `handlepool.record`, while it captures what this thread does
    states_held: int = 0  # how many explicit states this thread holds (guarantee 15)


thread = _Thread()

elsewhere: list[object] = []
"""The pools of the branches and tasks under way, in whatever thread, that are not the default pool: where there is none, the
default pool is the one to use, and nobody needs to ask `thread`, which costs as much as a hit's half."""

recordings: list[object] = []
"""The recordings under way, in whatever thread: where there is one, launches ask `thread`."""

_UNCHANGED = object()


def run_on(
    pool: Any,
    stream: Any,
    device: int,
    region: Region | None,
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    """Call a function with a stream of the current device current and a region's allocator in place.

    Leaves stream, allocator and device as they were, whatever the function does.
    """
    driver = pool.driver
    previous = driver.current_stream()
    outer, outer_pool = thread.region, thread.pool
    allocator = _UNCHANGED
    pushed = False
    other = not pool.is_default
    if other:
        elsewhere.append(pool)
    try:
        if region is not None:
            allocator = driver.swap_allocator(region.allocator)
        thread.region, thread.pool = region, pool
        driver.push_stream(stream)
        pushed = True
        return function(*args, **kwargs)
    finally:
        thread.region, thread.pool = outer, outer_pool
        if other:
            elsewhere.remove(pool)
        if allocator is not _UNCHANGED:
            driver.swap_allocator(allocator)
        try:
            if driver.current_device() != device:  # the function left another one current
                driver.set_device(device)
        finally:
            if pushed:
                driver.pop_stream(stream, previous)


# Parking (guarantee 10): what a destructor or a thread's end leaves behind may not be given back there, since that calls CUDA.


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
    thread.recording = None
    recordings.clear()
    lent.clear()


os.register_at_fork(after_in_child=_after_fork)
