"""The cache of compiled plans: bounded, and each built once however many threads ask at the same time."""

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
"""Geometries that share a shortcut's key. Each that is tried costs a fiftieth of a launch; without one, a launch is slower."""


class CachedPlan(Protocol):
    """What is cached, as far as the cache knows it: see `handlepool.graphs.plan.Plan`."""

    @property
    def device(self) -> int:
        """Ordinal."""

    @property
    def copies(self) -> Sequence[OperandCopy]:
        """Operands that each launch copies."""


P = TypeVar("P", bound=CachedPlan)


class _Build(Generic[P]):
    """A build under way: whoever asks for the same key waits for its lock, and finds the outcome."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # its thread's until it is past the build, by whatever way
        # The thread that builds. None afterwards.
        self.thread: ThreadToken | None = thread.token
        self.plan: P | None = None
        self.error: Exception | None = None
        self.start = 0


def _retold(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Copy another thread's error and its cause, without the tracebacks, whose frames keep all that its callers have."""
    told = type(error).__new__(type(error), *error.args)  # without its constructor, which may take other arguments
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
        When it was used last, as `PlanCache.tick` tells the time.
    shortcuts : dict
        What was made of the plan, by key in `PlanCache.shortcuts`; None where its driver has none.
    """

    __slots__ = ("plan", "shortcuts", "used")

    def __init__(self, plan: P, used: int) -> None:
        self.plan = plan
        self.used = used
        self.shortcuts: dict[Hashable, Shortcut | None] = {}


class Recollection(dict[Hashable, int]):
    """Numbers by key; all of them are forgotten where there are too many."""

    def __setitem__(self, key: Hashable, value: int) -> None:
        if len(self) >= MOST_RECOLLECTED:
            self.clear()
        super().__setitem__(key, value)


class PlanCache(Generic[P]):
    """Plans by key, least recently used out first.

    A build runs without the cache's lock, since it calls the user's function; the threads that ask for the same key meanwhile
    wait for it and get its plan, or each an error like its own. A failed build leaves nothing behind: a later call tries again.

    Parameters
    ----------
    limit : int
        Most plans of one device.

    Attributes
    ----------
    shortcuts : dict of list
        Functions that launch a plan at once (`Executable.shortcut`), by what is quicker to make than the key of a plan, and may
        stand for several: each of a list is tried. Read without the lock.
    tick : callable
        Tells the time: a number that grows from call to call.
    fused_stage_counts : Recollection
        How much of an operation one plan can be, where that is not all of it: found by asking for plans that are refused.
    recent : Entry or None
        The one whose shortcut was used last, which need not be told the time again.
    """

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)  # by device
        self.shortcuts: dict[Hashable, list[Shortcut]] = {}
        self.tick = count().__next__
        self.fused_stage_counts = Recollection()
        self.recent: Entry[Any] | None = None
        self._dropped = False
        self._plans: dict[int, dict[Hashable, Entry[P]]] = {}
        self._builds: dict[Hashable, _Build[P]] = {}
        self._refusals: OrderedDict[tuple[int, Hashable], tuple[Any, ...]] = OrderedDict()  # what the errors said
        # Guards what is above; a hit does without. A finaliser that the collector runs inside may come again (guarantee 10), so
        # every section under it holds where the dictionaries change between any two of its steps.
        self._lock = threading.RLock()

    def get(self, device: int, key: Hashable) -> P | None:
        """Return the plan of a key, now the most recently used, or None."""
        plans = self._plans.get(device)
        entry = None if plans is None else plans.get(key)
        if entry is None:
            return None
        entry.used = self.tick()
        self.recent = None
        return entry.plan

    def watch(self) -> int:
        """Return the time, after which whatever is used is told of it; for `used_since`."""
        self.recent = None
        return self.tick()

    def used_since(self, device: int, time: int) -> list[P]:
        """Return a device's plans that were used after `watch` told a time, by whichever thread; the last one used comes last."""
        entries = [entry for entry in list(self._plans.get(device, {}).values()) if entry.used > time]
        return [entry.plan for entry in sorted(entries, key=lambda entry: entry.used)]

    def add_shortcut(self, device: int, key: Hashable, shortcut: Hashable, make: Callable[[Entry[P]], Shortcut | None]) -> None:
        """Make a shortcut to the plan of a key, where there is none yet; it stays for as long as the cache has the plan."""
        with self._lock:
            entry = self._plans.get(device, {}).get(key)
            if entry is None or shortcut in entry.shortcuts or self._dropped:
                return
            entry.shortcuts[shortcut] = made = make(entry)
            if made is not None:
                # A new list: whoever goes through the former one goes on. The newest is tried first.
                self.shortcuts[shortcut] = [made, *self.shortcuts.get(shortcut, ())][:MOST_SHORTCUTS]

    def get_or_build(self, device: int, key: Hashable, build: Callable[[], P]) -> P:
        """Return the plan of a key, building it when there is none and no other thread does.

        Raises
        ------
        Exception
            What the build raised. In a thread that waited for it an error of its own, with the builder's as its cause.
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
                            "a graph function called itself, or was called by a finaliser, with the same arrays while its graph "
                            "is being built"
                        )
                    with running.lock, self._lock:
                        if self._builds.get((device, key)) is running:  # an interrupt came in the last steps of it
                            del self._builds[device, key]
                    if running.plan is not None:
                        return running.plan
                    if running.error is not None:
                        raise _retold(running.error) from _retold(running.error, running.error.__cause__)
                    # The builder was interrupted: that was meant for its thread alone, so another one builds.
        finally:
            mine.thread = None  # no call, so that no interrupt comes before
            running = mine  # or an error, its traceback and this frame would keep each other, and all that the callers had
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
            del mine  # as above

    def put(self, device: int, key: Hashable, plan: P) -> None:
        """Make a plan that was built elsewhere the one of a key."""
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
                # Asked for at each call where a fallback stands behind it; cuDNN takes milliseconds to refuse.
                self._refusals[device, key] = build.error.args
                while len(self._refusals) > self.limit:
                    self._refusals.popitem(last=False)
            self._builds.pop((device, key), None)

    def __len__(self) -> int:
        return sum(len(plans) for plans in list(self._plans.values()))

    def drop(self) -> None:
        """Forget every plan for good, at exit; without the lock, which in a forked child a thread of the parent may hold."""
        self._dropped = True
        self._clear()

    def _clear(self) -> None:
        self._plans.clear()
        self.shortcuts.clear()
        self.fused_stage_counts.clear()
        self.recent = None

    def clear(self) -> None:
        """Forget every plan; those in use live on with their users."""
        with self._lock:
            self._clear()
            self._refusals.clear()

    def discard(self, match: Callable[[Hashable], bool]) -> None:
        """Forget the plans, and what was refused, whose keys match."""
        with self._lock:
            for plans in list(self._plans.values()):
                for key in [key for key in list(plans) if match(key)]:
                    self._forget(plans, key)
            for refused in [refused for refused in list(self._refusals) if match(refused[1])]:
                self._refusals.pop(refused, None)
            self.fused_stage_counts.clear()

    def count_copies(self, plan: P) -> None:
        """Count the operands that a launch of a plan copied."""
        with self._lock:
            self._counts[plan.device].update(
                operands_copied=len(plan.copies), bytes_copied=sum(copy.nbytes for copy in plan.copies)
            )

    def snapshot(self, device: int) -> dict[str, int]:
        """Return what happened on a device so far, by the flat names of `HandlePool.stats`."""
        return {**self._counts.get(device, {}), "plans_cached": len(self._plans.get(device, ()))}
