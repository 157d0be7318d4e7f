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

    allocator: Any

    def prepare(self) -> Any:
        """Return what branches allocate with, made where ``allocator`` is None."""

    @property
    def over(self) -> bool:
        """Whether all that ran in it is waited for by whatever is outside of regions."""


class Keeper(Protocol):
    """What keeps values for a program."""

    def add(self, *values: object) -> None:
        """Keep what can be reached from values."""


class CallRecorder(Protocol):
    """The lanes of a recording, or its rehearsal, for the rooms below recordings."""

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
        assumed_writes: Sequence[Any] = (),
    ) -> T:
        """Record ``call(slot)`` as a node, and return its value.

        The node reads and writes this memory, and the memory that ``new`` returns for the value. ``what`` is the operation with
        its options. The second call of the function must give the same. While nothing is recorded yet, the slot is None, and the
        call launches on the current stream.
        """

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Note the memory that a call reads and writes that is no node, or is inside one."""

    def expect(self, reads: Callable[[], Sequence[Any]] | None) -> None:
        """Note a function that gives the memory that the next node reads, before its outputs are allocated; None afterwards."""

    def made(self, arrays: object) -> None:
        """Note new arrays that a node has made."""

    def hit(self, attempt: Callable[..., Any], arrays: tuple[Any, ...], out: object) -> Any:
        """Record the launch of a shortcut as a node, and return its value."""


class ActiveRecording(Protocol):
    """A recording under way, for the rooms below recordings."""

    launches_nothing: bool
    """Whether a call had a result without elements, for which nothing is launched."""

    @property
    def scratch(self) -> set[Any]:
        """Where slots were given scratch under its capture."""

    @property
    def lanes(self) -> CallRecorder | None:
        """The lanes, where calls become nodes that are ordered by their data."""

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


Begin = Callable[[tuple[Any, ...], Any, tuple[int, ...], tuple[object, ...]], Any]
"""Starts the launch of a known plan: told the operands, what launches them, their addresses and blocks, it returns the slot to
launch on."""


class BranchPlace(Protocol):
    """A fork as the place of the call that is its next branch, as far as what stands below regions knows it."""

    @property
    def pool(self) -> Any:
        """The internals of the fork's pool."""

    @property
    def begin(self) -> Begin | None:
        """What starts the launch of a known plan as a branch; None where no known plan may be launched at once."""

    def run(self, call: Any, kept: object) -> Any:
        """Run a call as the branch, and keep what it was given; its value."""


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
        self.branches: list[BranchPlace] = []
        """The forks that call a function of ours just now, which takes the last of them as its place."""

    pool: RunningPool | None = None  # of the branch or task that this thread runs
    region: BranchRegion | None = None  # of the branch or task that this thread runs
    recording: ActiveRecording | None = None
    """The recording of `handlepool.record` while it captures the work of this thread."""
    rehearsal: CallRecorder | None = None
    """It notes the calls while a function is called for the first time to be recorded with lanes."""
    launched: Callable[[Any, Any, Any], None] | None = None
    """It gets each plan, and the new arrays, while a function is called to be recorded without lanes."""
    told: list[Any] | None = None
    """The memory that calls inside of a measured call write, and `UNSURE`, while that call runs."""
    states_held: int = 0  # how many explicit states this thread holds (guarantee 15)


thread = _Thread()


def tell(told: list[Any] | None) -> list[Any] | None:
    """Let this thread's calls tell another list of their writes; return the former list."""
    outer, thread.told = thread.told, told
    return outer


class BranchPools(list[RunningPool]):
    """The pools of the branches and tasks under way, in any thread, that are not the default pool; repeated for each branch.

    Where there is none, the current pool is the default pool, and no call asks `thread`, which costs half a hit. No lock: a
    thread appends its pool before it looks, so it always sees its own, and an append and a removal are one atomic step each.
    """


class Recordings(list[object]):
    """The recordings under way, and the watchers of calls before a recording, in any thread.

    Launches ask `thread` only while the list has an entry. No lock: a thread appends its recording before its first launch, so
    its launches see the recording, and an append and a removal are one atomic step each.
    """

    def around(self, watcher: object, name: str, told: object, function: Callable[..., T], *args: Any) -> T:
        """Call a function while an attribute of `thread` leads this thread's launches to a watcher."""
        outer = getattr(thread, name)
        try:
            setattr(thread, name, told)
            # Afterwards, since a launch that sees the watcher asks the thread.
            active.append(watcher)
            self.append(watcher)
            return function(*args)
        finally:
            # An interrupt comes when a call has returned. One that comes before the watcher is there, or once it is gone, finds
            # the attribute put back.
            try:
                if watcher in self:
                    self.remove(watcher)
            finally:
                try:
                    if watcher in active:
                        active.remove(watcher)
                finally:
                    setattr(thread, name, outer)


class Active(list[object]):
    """Regions and recordings under way, and watchers of a first call, in any thread.

    Where there is none, a call looks for no place. No lock: a thread appends its region before its first call, so its calls see
    the region, and an append and a removal are one atomic step each.
    """


branch_pools = BranchPools()
recordings = Recordings()
active = Active()

UNSURE: Any = object()
"""Stands among the memory that is told of for a call that is not known to write it, and is ordered as if it did."""

NOT_CACHED: Any = object()
"""What a look at the cache returns where nothing was launched."""

LAUNCHES = "__handlepool_launches__"
"""The attribute of a function of ours that launches a plan for its arguments, and runs no Python of the user's.

Its value is the function itself, since `functools.wraps` copies attributes. Of a type, the value is a function that has an object
launch for a fork."""


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
        branch_pools.append(pool)
    try:
        if region is not None:
            allocator = driver.swap_allocator(region.allocator or region.prepare())
        thread.region, thread.pool = region, pool
        driver.push_stream(stream)
        pushed = True
        return function(*args, **kwargs)
    finally:
        thread.region, thread.pool = outer, outer_pool
        if other:
            branch_pools.remove(pool)
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
    thread.branches.clear()
    recordings.clear()
    active.clear()


os.register_at_fork(after_in_child=_after_fork)
