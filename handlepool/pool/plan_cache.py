"""Cache compiled plans: bounded, and built once for concurrent callers."""

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from handlepool.drivers.executable import OperandCopy
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.pool.context import ThreadToken, thread

Shortcut = Callable[[Any, tuple[Any, ...], Any], Any]
MOST_RECOLLECTED = 1024
MOST_SHORTCUTS = 16
"""The maximum number of shortcuts under one key, one for each geometry.

A call tries them in turn, and each try costs a fiftieth of a launch. A call whose shortcut was dropped is slower, because it
looks for its plan in the cache.
"""


class CachedPlan(Protocol):
    """The part of `handlepool.graphs.plan.Plan` that the cache knows."""

    @property
    def device(self) -> int:
        """Return the ordinal of the plan's device."""

    @property
    def copies(self) -> Sequence[OperandCopy]:
        """Return the operands that each launch copies for cuDNN."""


P = TypeVar("P", bound=CachedPlan)


class _Build(Generic[P]):
    """A build under way.

    A thread that asks for the same key waits for the build's lock, and then finds the outcome.
    """

    def __init__(self) -> None:
        # The building thread holds the lock until the build succeeds or fails.
        self.lock = threading.RLock()
        # This is the thread that builds. It is None after the build.
        self.thread: ThreadToken | None = thread.token
        self.plan: P | None = None
        self.error: Exception | None = None
        self.start = 0


def _retold(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Copy another thread's error and its cause, without their tracebacks.

    A traceback would keep the frames of the callers, and with them all their objects.
    """
    # `__init__` is not called, because it may take other arguments than `args`.
    told = type(error).__new__(type(error), *error.args)
    told.__dict__.update(error.__dict__)
    if cause is not None:
        told.__cause__ = _retold(cause)
    return told


class Entry(Generic[P]):
    """A plan in the cache.

    Attributes
    ----------
    plan : Plan
    used : int
        Time of the last use, as a number from `PlanCache.tick`.
    shortcuts : dict
        The shortcuts that launch the plan, by their key in `PlanCache.shortcuts`. The value None means that the driver has no
        shortcut for the plan.
    """

    __slots__ = ("plan", "shortcuts", "used")

    def __init__(self, plan: P, used: int) -> None:
        self.plan = plan
        self.used = used
        self.shortcuts: dict[Hashable, Shortcut | None] = {}


class Recollection(dict[Hashable, Any]):
    """A bounded table that forgets all its values when it is full."""

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= MOST_RECOLLECTED:
            self.clear()
        super().__setitem__(key, value)


class PlanCache(Generic[P]):
    """Plans by key; the least recently used plan leaves first.

    A build runs without the cache's lock, since it calls the user's function. Threads that ask for the same key meanwhile wait
    for the build. Each of them gets the plan, or a copy of the builder's error. A failed build leaves no entry behind, so a
    later call builds again.

    Parameters
    ----------
    limit : int
        The maximum number of plans for one device.

    Attributes
    ----------
    shortcuts : dict of list
        Functions that launch a plan without a cache lookup (`Executable.shortcut`), by a key that is quicker to make than a
        plan's key. Such a key may stand for several plans, so a call tries each function of its list. The attribute is read
        without the lock.
    tick : callable
        Returns the time: a number that grows from call to call.
    fused_parts : Recollection
        For some operations, the parts of the epilogue that their plans contain. An entry deviates from the default, because
        cuDNN refused the default plan or a measurement found a quicker plan.
    sites : Recollection
        For each plan, by its identity, the forms between which the plan's operation can choose
        (`handlepool.graphs.choices.Site`).
    recent : Entry or None
        The entry whose shortcut was used last. If the next call uses the same entry, it need not set the time again.
    """

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        # The keys are device ordinals, the values counters by name.
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self.shortcuts: dict[Hashable, list[Shortcut]] = {}
        self.tick = count().__next__
        self.fused_parts = Recollection()
        self.sites = Recollection()
        self.recent: Entry[Any] | None = None
        self._dropped = False
        self._plans: dict[int, dict[Hashable, Entry[P]]] = {}
        self._builds: dict[Hashable, _Build[P]] = {}
        # Builds that cuDNN refused are not tried again. The values are the arguments of the errors.
        self._refusals: OrderedDict[tuple[int, Hashable], tuple[Any, ...]] = OrderedDict()
        # The lock guards the attributes above. A hit takes no lock. The lock is reentrant, because a finalizer that the
        # collector runs inside may use the cache again (guarantee 10). So each section under the lock is written for
        # dictionaries that may change between any two of its steps.
        self._lock = threading.RLock()

    def use(self, entry: Entry[Any]) -> None:
        """Note the use of an entry by its shortcut."""
        # A shortcut whose entry is `recent` already does not call this method.
        self.recent = entry
        entry.used = self.tick()

    def get(self, device: int, key: Hashable) -> P | None:
        """Return a key's plan, now marked as used, or None."""
        plans = self._plans.get(device)
        entry = None if plans is None else plans.get(key)
        if entry is None:
            return None
        entry.used = self.tick()
        self.recent = None
        return entry.plan

    def watch(self) -> int:
        """Return the present time, for `used_since`.

        Each later use of a plan gets a later time.
        """
        self.recent = None
        return self.tick()

    def used_since(self, device: int, time: int) -> list[P]:
        """Return a device's plans that any thread used after a `watch` time.

        They are in the order of their last uses.
        """
        entries = [entry for entry in list(self._plans.get(device, {}).values()) if entry.used > time]
        return [entry.plan for entry in sorted(entries, key=lambda entry: entry.used)]

    def add_shortcut(self, device: int, key: Hashable, shortcut: Hashable, make: Callable[[Entry[P]], Shortcut | None]) -> None:
        """Add a shortcut to a key's plan, if it is missing.

        ``shortcut`` is the shortcut's key, and ``make`` makes the function. The shortcut is dropped together with the plan.
        """
        with self._lock:
            entry = self._plans.get(device, {}).get(key)
            if entry is None or shortcut in entry.shortcuts or self._dropped:
                return
            entry.shortcuts[shortcut] = made = make(entry)
            if made is not None:
                # A new list is made, because another thread may be iterating over the old list. The newest shortcut comes
                # first.
                self.shortcuts[shortcut] = [made, *self.shortcuts.get(shortcut, ())][:MOST_SHORTCUTS]

    def get_or_build(self, device: int, key: Hashable, build: Callable[[], P]) -> P:
        """Return the plan of a key, or build it.

        If another thread builds the plan already, this thread waits for that build.

        Raises
        ------
        Exception
            The error of the build. A thread that waited for the build gets an error of its own, with the builder's error as its
            cause.
        """
        mine: _Build[P] = _Build()
        try:
            with mine.lock:
                while True:
                    with self._lock:
                        plan = self.get(device, key)
                        if plan is not None:
                            return plan
                        refusal = self._refusals.get((device, key))
                        if refusal is not None:
                            raise GraphNotSupportedError(*refusal)
                        running = self._builds.setdefault((device, key), mine)
                    if running is mine:
                        return self._build(device, key, mine, build)
                    if running.thread is mine.thread:
                        raise ArgumentError(
                            "a graph function called itself, or a finalizer called the function, with the same arrays "
                            "while its graph was being built; call the function after the build has ended"
                        )
                    with running.lock, self._lock:
                        # An interrupt in the last steps of the build may have left its entry in `_builds`.
                        if self._builds.get((device, key)) is running:
                            del self._builds[device, key]
                    if running.plan is not None:
                        return running.plan
                    if running.error is not None:
                        raise _retold(running.error) from _retold(running.error, running.error.__cause__)
                    # An interrupt ended the build without a plan or an error. The interrupt concerned only the builder's
                    # thread, so this thread builds now.
        finally:
            # The next line makes no call, so no interrupt can come before it.
            mine.thread = None
            # An error refers to its traceback, and the traceback to this frame. If the frame still referred to the error, the
            # cycle would keep all objects of the callers alive.
            running = mine
            del mine, running

    def _build(self, device: int, key: Hashable, mine: _Build[P], build: Callable[[], P]) -> P:
        mine.start = time.perf_counter_ns()
        try:
            plan = mine.plan = build()
            return plan
        except Exception as error:
            mine.error = error
            raise
        finally:
            self._end_build(device, key, mine)
            # As in `get_or_build`, the frame must not refer to the build, because the build refers to the error.
            del mine

    def put(self, device: int, key: Hashable, plan: P) -> None:
        """Put a plan that was built elsewhere under a key."""
        with self._lock:
            self._keep(device, key, plan)
            self._refusals.pop((device, key), None)

    def _keep(self, device: int, key: Hashable, plan: P) -> None:
        self._counts[device]["plans_built"] += 1
        plans = self._plans.setdefault(device, {})
        self._forget(plans, key)
        if self._dropped:
            return
        while len(plans) >= self.limit:
            oldest, _ = min(list(plans.items()), key=lambda item: item[1].used)
            self._forget(plans, oldest)
            self._counts[device]["plans_evicted"] += 1
        plans[key] = Entry(plan, self.tick())

    def _forget(self, plans: dict[Hashable, Entry[P]], key: Hashable) -> None:
        entry = plans.pop(key, None)
        self.recent = None
        for shortcut, gone in {} if entry is None else entry.shortcuts.items():
            left = [made for made in self.shortcuts.get(shortcut, ()) if made is not gone]
            if left:
                self.shortcuts[shortcut] = left
            else:
                self.shortcuts.pop(shortcut, None)

    def _end_build(self, device: int, key: Hashable, build: _Build[P]) -> None:
        with self._lock:
            self._counts[device]["plan_build_microseconds"] += (time.perf_counter_ns() - build.start) // 1000
            if build.plan is not None:
                self._keep(device, key, build.plan)
            elif isinstance(build.error, GraphNotSupportedError):
                # The refusal is kept. A call with a fallback asks for the refused plan each time, and cuDNN would take
                # milliseconds to refuse it again.
                self._refusals[device, key] = build.error.args
                while len(self._refusals) > self.limit:
                    self._refusals.popitem(last=False)
            self._builds.pop((device, key), None)

    def __len__(self) -> int:
        return sum(len(plans) for plans in list(self._plans.values()))

    def drop(self) -> None:
        """Forget every plan for good, at exit.

        The lock is not taken, because in a forked child a thread of the parent may have left it locked.
        """
        self._dropped = True
        self._clear()

    def _clear(self) -> None:
        self._plans.clear()
        self.shortcuts.clear()
        self.fused_parts.clear()
        self.sites.clear()
        self.recent = None

    def clear(self) -> None:
        """Forget every plan.

        A plan that a launch or a program still uses lives on until its last use.
        """
        with self._lock:
            self._clear()
            self._refusals.clear()

    def discard(self, match: Callable[[Hashable], bool]) -> None:
        """Forget the plans and the refusals whose keys match."""
        with self._lock:
            for plans in list(self._plans.values()):
                for key in [key for key in list(plans) if match(key)]:
                    self._forget(plans, key)
            for refused in [refused for refused in list(self._refusals) if match(refused[1])]:
                self._refusals.pop(refused, None)
            self.fused_parts.clear()
            self.sites.clear()

    def drop_shortcuts(self, key: Hashable, shape: tuple[int, ...]) -> None:
        """Forget shortcuts by option key and shape of the first array.

        The operation of these shortcuts uses another plan from now on. The cached plans stay.
        """
        with self._lock:
            gone = [shortcut for shortcut in list(self.shortcuts) if isinstance(shortcut, tuple) and shortcut[1:] == (key, shape)]
            for shortcut in gone:
                self.shortcuts.pop(shortcut, None)
                for plans in list(self._plans.values()):
                    for entry in list(plans.values()):
                        entry.shortcuts.pop(shortcut, None)
            self.recent = None

    def count_copies(self, plan: P) -> None:
        """Count the operands that one launch of a plan copied."""
        with self._lock:
            self._counts[plan.device].update(
                operands_copied=len(plan.copies), bytes_copied=sum(copy.nbytes for copy in plan.copies)
            )

    def snapshot(self, device: int) -> dict[str, int]:
        """Return a device's counters by the flat names of `HandlePool.stats`."""
        return {**self._counts.get(device, {}), "plans_cached": len(self._plans.get(device, ()))}
