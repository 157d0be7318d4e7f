"""What a thread is in the middle of: the branch or task that it runs, the recording that it makes; and how a branch is run."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Stream

T = TypeVar("T")


class BranchRegion(Protocol):
    """The region of a branch or a task, as far as what stands below regions knows it."""

    stream: Stream
    device: int
    ended: bool
    keep: Callable[[object], None]
    allocated: list[Any]

    @property
    def allocator(self) -> Any:
        """What branches allocate with."""

    @property
    def over(self) -> bool:
        """Whether all that ran in it is waited for by whatever is outside of regions."""


class Keeper(Protocol):
    """What keeps values for a program."""

    def add(self, *values: object) -> None:
        """Keep what can be reached from values."""


class NodesByData(Protocol):
    """The lanes of a recording, as far as what stands below recordings knows them."""

    def takes(self, pool: object, pointer: int) -> bool:
        """Whether a call of a pool on a stream becomes a node."""

    def run(
        self,
        name: str,
        reads: Sequence[Any],
        writes: Sequence[Any],
        keep: object,
        call: Callable[[Any], T],
        new: Callable[[T], Iterable[Any]] | None = None,
        *,
        what: tuple[object, ...] = (),
    ) -> T:
        """Record ``call(slot)`` as a node that reads and writes this memory, and what ``new`` says of its value; the value.

        ``what`` is called, and with which options: the same again when the function is.
        Where nothing is recorded yet, the slot is None: whatever is current then is what to launch on.
        """

    def other(self, what: str, why: str = ...) -> None:
        """Be told of work that is no node."""

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Be told what a call reads and writes that is no node, or is inside one."""

    def expect(self, reads: Callable[[], Sequence[Any]] | None) -> None:
        """Be told what gives the memory that the next node reads, before its outputs are allocated, and nothing afterwards."""

    def made(self, arrays: object) -> None:
        """Be told of new arrays that a node has made."""

    def hit(self, attempt: Callable[..., Any], arrays: tuple[Any, ...], out: Any) -> Any:
        """Record what a shortcut launches at once as a node; what that returns."""


class UnderWay(Protocol):
    """A recording under way, as far as what stands below recordings knows it."""

    launches_nothing: bool
    """Whether a call had a result without elements, for which nothing is launched."""

    @property
    def scratch(self) -> set[Any]:
        """Where slots were given scratch under its capture."""

    @property
    def lanes(self) -> NodesByData | None:
        """Where calls become nodes that are ordered by their data."""

    @property
    def kept(self) -> Keeper:
        """What the graph reads."""

    @property
    def held(self) -> list[Any]:
        """What is held until the recording has ended: other libraries' memory, which they might give to others before."""

    def keep(self, plan: object) -> None:
        """Keep a plan that was launched."""

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Take note of the memory that a recorded call reads, and that it writes."""

    def take(self, sides: Any, slot: Any) -> bool:
        """Take over a side slot that a fork has joined, if it is to be kept to the recording's end; whether it is."""

    def check(self, what: str, pointer: int, driver: Driver, fork: object = None) -> None:
        """Raise for work on a stream that is no part of what is recorded; ``fork`` stands for the one that makes a branch."""

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Be told of a fork that has fewer states than it wanted, since no more side slots are free."""


class RunningPool(Protocol):
    """The pool of a branch or a task, as far as what stands below pools knows it: its internals."""

    is_default: bool

    @property
    def driver(self) -> Driver:
        """The driver."""


class ThreadToken:
    """Stand for one thread, as long as anything refers to the token.

    CPython gives the number of `threading.get_ident` to another thread once its thread has ended. A token is compared with
    ``is``, and no other thread has it while a fork, a handle or a program still holds the token of its owner.
    """

    __slots__ = ("_life", "ident")

    def __init__(self, life: "_Life") -> None:
        self.ident = threading.get_ident()
        self._life = weakref.ref(life)

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return self._life() is None

    def __repr__(self) -> str:
        if self.over:
            return "a thread that has ended"
        # The thread lives, so its number is its own.
        names = [f"thread {each.name!r}" for each in threading.enumerate() if each.ident == self.ident]
        return names[0] if names else f"thread {self.ident}"


class _Life:
    """Die with the locals of a thread. A token refers to it weakly, so whoever holds a token keeps no thread's locals."""

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self._life = _Life()
        self.token = ThreadToken(self._life)
        """The calling thread's identity."""

    pool: RunningPool | None = None  # of the branch or task that this thread runs
    region: BranchRegion | None = None  # of the branch or task that this thread runs
    recording: UnderWay | None = None  # of `handlepool.record`, while it captures what this thread does
    rehearsal: NodesByData | None = None  # of the first call of a function that is recorded with lanes
    launched: Callable[[Any, Any, Any], None] | None = None  # told plans and new arrays in the first call
    states_held: int = 0  # how many explicit states this thread holds (guarantee 15)


thread = _Thread()

elsewhere: list[RunningPool] = []
"""The pools of the branches and tasks under way, in whatever thread, that are not the default pool: where there is none, the
default pool is the one to use, and nobody needs to ask `thread`, which costs as much as a hit's half."""

recordings: list[object] = []
"""The recordings under way, and who watches a call before, in whatever thread: where there is one, launches ask `thread`."""

NOT_CACHED: Any = object()
"""What a look at the cache returns where nothing was launched."""

Launcher = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
launchers: dict[Any, Launcher] = {}
"""How a fork launches what is no Python to it, by type, or by itself where it is a plain function. The first, tried before the
other, is ``hit(function, pool, begin, args, kwargs)``, and may be None; the second ``prepare(function, pool, args, kwargs)``. Not
attributes: proxies answer to any name, and `functools.wraps` gives a function's to what is around it."""
NO_LAUNCHER: Launcher = (None, None)

_UNCHANGED = object()


def unchecked(driver: Driver) -> Driver:
    """Return the driver beneath the wrapper of a pool that checks."""
    return getattr(driver, "checked_driver", driver)


def on_device(driver: Driver, ordinal: int) -> AbstractContextManager[Any]:
    """Make a device current where it is not."""
    return nullcontext() if driver.current_device() == ordinal else driver.device(ordinal)


def run_on(
    pool: RunningPool,
    stream: Any,
    device: int,
    region: BranchRegion | None,
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


def process() -> int:
    """Return a number that is another one in a forked child."""
    return _forks


_forks = 0


def _after_fork() -> None:
    """Let a forked child be in the middle of nothing that its parent recorded (guarantee 13)."""
    global _forks
    _forks += 1
    thread.recording = thread.rehearsal = thread.launched = None
    recordings.clear()


os.register_at_fork(after_in_child=_after_fork)
