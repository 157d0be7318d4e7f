"""Hold the state of a thread: its branch, task and recording.

The module also runs a branch.
"""

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
    """The part of a region that modules below ``handlepool.regions`` use.

    A region keeps the memory of a branch or a task.
    """

    stream: Stream
    device: int
    ended: bool
    keep: Callable[[object], None]
    allocated: list[Any]

    allocator: Any

    def prepare(self) -> Any:
        """Return the allocator of the branches, and make it if needed."""

    @property
    def over(self) -> bool:
        """Return whether later work already waits for all work of the region."""


class Keeper(Protocol):
    """An object that keeps values alive for a program."""

    def add(self, *values: object) -> None:
        """Keep ``values``, and the objects they refer to."""


class CallRecorder(Protocol):
    """The recorder of a recording's calls: its lanes or its rehearsal.

    The class has the methods that modules below ``handlepool.recording`` call.
    """

    def takes(self, pool: object, pointer: int) -> bool:
        """Return whether a pool's call on a stream becomes a node."""

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

        The node reads and writes the given memory, and the memory that ``new`` returns for the value. `record` calls a function
        twice, and ``what``, which names the operation and its options, must be equal both times. In the first call, the
        rehearsal, the slot is None, and ``call`` launches on the current stream.
        """

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Note the reads and writes of a call that becomes no node.

        Such a call may run inside a node.
        """

    def expect(self, reads: Callable[[], Sequence[Any]] | None) -> None:
        """Note a function that returns the memory the next node reads.

        Pass the function before the node's outputs are allocated, and pass None afterwards.
        """

    def made(self, arrays: object) -> None:
        """Note the arrays that were allocated for a node's outputs."""

    def hit(self, attempt: Callable[..., Any], arrays: tuple[Any, ...], out: object) -> Any:
        """Record a shortcut's launch as a node, and return its value."""


class ActiveRecording(Protocol):
    """The part of an open recording that lower modules use."""

    @property
    def scratch(self) -> set[Any]:
        """Return the `DeviceScratch` objects that gave slots scratch during this capture."""

    @property
    def lanes(self) -> CallRecorder | None:
        """Return the lanes; None for a recording without lanes."""

    @property
    def kept(self) -> Keeper:
        """Return the keeper of all objects that the graph reads."""

    @property
    def held(self) -> list[Any]:
        """Return the objects that the recording holds until it ends.

        They own memory of other libraries, which these libraries might otherwise reuse before the recording ends.
        """

    def keep(self, plan: object) -> None:
        """Keep a launched plan alive for the program."""

    def note_empty_call(self) -> None:
        """Note a call that launches nothing, because its result has no elements."""

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Note the memory that a recorded call reads and writes."""

    def take(self, sides: Any, slot: Any) -> bool:
        """Take over a side slot that a fork has joined, if necessary.

        Return whether the recording took it. The recording takes a slot that must stay leased until the recording ends.
        """

    def check(self, what: str, pointer: int, driver: Driver, fork: object = None) -> None:
        """Raise for work on a stream outside of the recording.

        ``what`` names the work in the message. If the work is a branch, ``fork`` is the key of its fork.
        """

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Note a fork that got fewer states than it wanted.

        The reason is that no more side slots were free.
        """


Begin = Callable[[tuple[Any, ...], Any, tuple[int, ...], tuple[object, ...]], Any]
"""Start the launch of a known plan.

The function returns the slot to launch on. Its arguments are the operands, the object that launches the plan, and the addresses
and blocks of the operands.
"""


class BranchPlace(Protocol):
    """A fork as the place of its next branch.

    Modules below regions know only this part of the fork.
    """

    @property
    def pool(self) -> Any:
        """Return the internals of the fork's pool."""

    @property
    def begin(self) -> Begin | None:
        """Return the function that starts a known plan's launch as a branch.

        The result is None if the fork cannot launch known plans in this short way.
        """

    def run(self, call: Any, kept: object) -> Any:
        """Run a call as the branch, and return its value.

        The branch keeps the arguments of the call.
        """


class RunningPool(Protocol):
    """The part of a branch's or a task's pool that `run_on` uses."""

    is_default: bool

    @property
    def driver(self) -> Driver:
        """Return the driver."""


class ThreadToken:
    """Identify one thread, even after the thread has ended.

    After the end of a thread, CPython may give its `threading.get_ident` to a new thread. A token is compared with ``is``. As
    long as a fork, a handle or a program holds its owner's token, no other thread has the same token.
    """

    __slots__ = ("_life", "ident")

    def __init__(self, life: "_Life") -> None:
        self.ident = threading.get_ident()
        self._life = weakref.ref(life)

    @property
    def over(self) -> bool:
        """Return whether the thread has ended."""
        return self._life() is None

    def __repr__(self) -> str:
        if self.over:
            return "a thread that has ended"
        # The thread is alive, so no other thread has its number.
        names = [f"thread {each.name!r}" for each in threading.enumerate() if each.ident == self.ident]
        return names[0] if names else f"thread {self.ident}"


class _Life:
    """An object that is destroyed with the locals of a thread.

    A token refers weakly to this object. So the token can tell whether the thread has ended, and keeps no thread's locals
    alive.
    """

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self._life = _Life()
        self.token = ThreadToken(self._life)
        """ThreadToken: the calling thread's identity."""
        self.branches: list[BranchPlace] = []
        """list of BranchPlace: forks that are calling a function of this library.

        The function takes the last fork as its place.
        """

    # The next two attributes belong to the branch or task that this thread runs.
    pool: RunningPool | None = None
    region: BranchRegion | None = None
    recording: ActiveRecording | None = None
    """ActiveRecording or None: the `handlepool.record` that captures this thread's work."""
    rehearsal: CallRecorder | None = None
    """CallRecorder or None: notes the calls in a rehearsal.

    It is set during the first of the two calls in which `record` runs a function with lanes.
    """
    launched: Callable[[Any, Any, Any], None] | None = None
    """callable or None: gets each launched plan and its new arrays.

    It is set while a function that is recorded without lanes is called.
    """
    told: list[Any] | None = None
    """list or None: memory that calls write inside a measured call.

    The list is set while a call is measured to find its undeclared writes. The list may also hold `UNSURE`.
    """
    # This is the number of states that the thread holds by `with_state` (guarantee 15).
    states_held: int = 0


thread = _Thread()


class HeldState:
    """Count a state that `with_state` holds, inside a ``with`` statement.

    ``with HeldState() as held`` sets ``held`` to the number of states that this thread held before.
    """

    __slots__ = ("_former",)

    def __enter__(self) -> int:
        self._former = thread.states_held
        thread.states_held = self._former + 1
        return self._former

    def __exit__(self, *_: object) -> None:
        # The former count is restored, because an interrupt may have left an inner count undone.
        thread.states_held = self._former


def tell(told: list[Any] | None) -> list[Any] | None:
    """Set this thread's ``thread.told``, and return the former value."""
    outer, thread.told = thread.told, told
    return outer


class BranchPools(list[RunningPool]):
    """The pools of branches and tasks under way, in any thread.

    The list has an entry for each branch or task whose pool is not the default pool.

    If the list is empty, the current pool is the default pool. Then no call reads `thread`, which would cost half a hit. The
    list needs no lock. A thread appends its pool before it reads the list, so it always sees its own pool. An append and a
    removal are one atomic step each.
    """


class Recordings(list[object]):
    """The recordings and the watchers of first calls, in any thread.

    A watcher is an object that observes the launches of a function's first call.

    Launches ask `thread` only while the list has an entry. The list needs no lock. A thread appends its recording before its
    first launch, so its launches see the recording. An append and a removal are one atomic step each.
    """

    def around(self, watcher: object, name: str, told: object, function: Callable[..., T], *args: Any) -> T:
        """Call a function while a watcher sees this thread's launches.

        Meanwhile the attribute ``name`` of `thread` has the value ``told``, which leads launches to the watcher.
        """
        outer = getattr(thread, name)
        try:
            setattr(thread, name, told)
            # The attribute is set before the lists change, because a launch reads it as soon as a list has an entry.
            active.append(watcher)
            self.append(watcher)
            return function(*args)
        finally:
            # An interrupt may come after any call. So the attribute is restored in either case: if the watcher was not yet
            # added, and if it was already removed.
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
    """The regions, recordings and first-call watchers under way, in any thread.

    If the list is empty, a call launches at once, without a search for a region or recording that would order it. The list
    needs no lock. A thread appends its region before its first call, so its calls see the region. An append and a removal are
    one atomic step each.
    """


branch_pools = BranchPools()
recordings = Recordings()
active = Active()

UNSURE: Any = object()
"""Stand for unknown writes in a list of written memory.

A call with unknown writes is ordered as if it wrote all memory that it may write.
"""

NOT_CACHED: Any = object()
"""The result of shortcuts and their look-up if nothing was launched."""

LAUNCHES = "__handlepool_launches__"
"""Name the attribute that marks functions which only launch a plan.

A marked function runs no Python code of the user. The attribute's value is the function itself. So a wrapper to which
`functools.wraps` copied the attribute is not taken for a marked function. On a type, the value is a function that makes an
object of the type launch for a fork.
"""


_UNCHANGED = object()


def unchecked(driver: Driver) -> Driver:
    """Return the driver inside the wrapper of a pool with ``check=True``."""
    return getattr(driver, "checked_driver", driver)


def on_device(driver: Driver, ordinal: int) -> AbstractContextManager[Any]:
    """Return a context in which a device is current.

    The context does nothing if the device is current already.
    """
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
    """Call a function on a stream, with a region's allocator.

    The stream belongs to the current device. The call restores stream, allocator and device afterwards, also after an error.
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
            # The function may have changed the current device.
            if driver.current_device() != device:
                driver.set_device(device)
        finally:
            if pushed:
                driver.pop_stream(stream, previous)


def process() -> int:
    """Return a number that differs in a forked child."""
    return _forks


_forks = 0


def _after_fork() -> None:
    """Clear the parent's recordings and branches in a forked child (guarantee 13)."""
    global _forks
    _forks += 1
    thread.recording = thread.rehearsal = thread.launched = None
    thread.branches.clear()
    recordings.clear()
    active.clear()


os.register_at_fork(after_in_child=_after_fork)
