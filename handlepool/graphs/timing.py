"""Time plans on side streams, alone and side by side.

The candidates take turns. In a turn, a CUDA graph launches a candidate many times.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from handlepool._util.cleanup import do_all
from handlepool.drivers.captures import RecordedGraph
from handlepool.drivers.protocol import abort_capture
from handlepool.errors import GraphNotSupportedError, HandlePoolError, OutOfMemoryError, StateBusyError
from handlepool.graphs.compile import shorten
from handlepool.graphs.plan import Plan
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import Slot, bind_to_thread, unbind

ROUNDS = 9
"""The number of samples of each candidate, of which the median counts."""
MOST_LAUNCHES = 16
"""The maximum number of launches that each state makes in a sample."""
ENOUGH = 500.0
"""The microseconds that one state's launches in a sample should take."""
TOO_SLOW = 4
"""The ratio to the quickest time above which plans are too slow.

A plan that is too slow is not timed further. If there are more states than this ratio, the number of states is the ratio. Above
the ratio, one launch of the plan takes longer than the launches of the quickest plan for all states, one after the other.
"""
SCREENING = 3
"""The number of samples after which candidates far behind are dropped."""
FAR_BEHIND = 1.5
"""The ratio to the quickest median above which candidates are far behind.

A candidate that is far behind gets no more samples.
"""


@runtime_checkable
class SideStates(Protocol):
    """The states that run a plan side by side, such as `handlepool.ParallelStates`.

    Attributes
    ----------
    count : int
        Number of states.
    pool : HandlePool
        The pool that owns the states.
    """

    count: int
    pool: HandlePool


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan that cuDNN proposed.

    Attributes
    ----------
    index : int
        Index for `Plan.select`.
    engine : str
        cuDNN's name of the engine and its knobs. "" if the plan could not be built.
    workspace_size : int
        Bytes of scratch that a launch needs.
    alone : float or None
        Microseconds for a launch on one stream, with no other work beside it. None if the plan was not timed.
    concurrent : float or None
        Microseconds for one launch of every state, side by side. None if one state was timed alone, or if the plan was not timed.
    skipped : str
        Reason that the plan was not timed, or "".
    """

    index: int
    engine: str = ""
    workspace_size: int = 0
    alone: float | None = None
    concurrent: float | None = None
    skipped: str = ""

    @property
    def time(self) -> float:
        """The time that counts: ``concurrent``, else ``alone``, else infinity."""
        return next((time for time in (self.concurrent, self.alone) if time is not None), float("inf"))


@dataclass(slots=True)
class _Trial:
    """A candidate while it is timed; all times are in microseconds."""

    index: int
    plan: Plan
    estimate: float = 0.0
    # The graph that launches on one state alone. With several states, also the graph that launches on all states side by side.
    graphs: list[RecordedGraph] = field(default_factory=list)
    samples: list[list[float]] = field(default_factory=list)

    def result(self, skipped: str = "") -> PlanCandidate:
        """Return the public record of the candidate."""
        times = [] if skipped else [median(samples) for samples in self.samples]
        alone, concurrent = (*times, None, None)[:2]
        return PlanCandidate(self.index, self.plan.engine, self.plan.workspace_size, alone, concurrent, skipped)


@contextmanager
def side_slots(pool: PoolInternals, what: str, count: int) -> Iterator[list[Slot]]:
    """Lease ``count`` side slots of the current device for a with block.

    ``what`` is the caller's name for messages. After the block, the slots are released without scratch, because the largest
    candidate may need far more scratch than the winner.

    Raises
    ------
    StateBusyError
        If fewer slots are free.
    """
    device = pool.device(pool.driver.current_device())
    sides = device.sides
    slots: list[Slot] = []

    def release(slot: Slot) -> None:
        unbind(slot)
        # The slot counts as captured until `release_captured` has checked that no capture was left open.
        sides.release(slot, captured=True)

    try:
        while len(slots) < count:
            slot = sides.lease()
            if slot is None:
                plural = "s" * (count > 1)
                raise StateBusyError(
                    f"{what} needs {count} side stream{plural}, and {len(slots)} are free: call {what} outside of forks, and "
                    f"give executors fewer workers"
                )
            slots.append(slot)
            bind_to_thread(pool.repaired(slot))
        yield slots
    finally:
        if not pool.status.untouchable:
            # A stream may still run a launch with the scratch, so wait for all streams before freeing the scratch.
            waits = [partial(pool.driver.synchronize_stream, slot.pointer) for slot in slots]
            frees = [*(slot.release_scratch for slot in slots), device.scratch.free_passed]
            # `do_all` runs every step even after a failure, so every slot is released.
            do_all([*waits, *frees, *(partial(release, slot) for slot in slots), sides.release_captured])


class TimingRig:
    """Side slots with their own operands, on which candidates are timed.

    Use the rig inside `Driver.relaxed`.

    Parameters
    ----------
    slots : list of Slot
        Side slots from `side_slots`.
    operands : list of tuple of array
        For each slot, the inputs and outputs of its launches. The GPU must have finished all writes to these arrays.
    concurrent : bool
        Whether to time all slots side by side as well, and not only one slot alone.
    """

    def __init__(self, pool: PoolInternals, slots: list[Slot], operands: Sequence[tuple[Any, ...]], *, concurrent: bool) -> None:
        self._pool = pool
        self._driver = pool.driver
        self._slots = slots
        self._operands = operands
        self._counts = [1, len(slots)] if concurrent else [1]
        self._pointer = slots[0].pointer
        self._spaces = [0] * len(slots)
        self._launches = 1
        self._skipped: list[PlanCandidate] = []
        self._graphs: list[RecordedGraph] = []
        # The first event comes before the timed launches, and the second event comes after them.
        self._events: list[Any] = []
        self._start = monotonic()
        self.building = 0.0  # seconds

    def close(self) -> None:
        """Destroy the graphs and events."""
        if not self._pool.status.untouchable:
            destroy = self._pool.device(self._slots[0].device).scratch.destroy_event
            wait = partial(self._driver.synchronize_stream, self._pointer)
            do_all([wait, *(graph.destroy for graph in self._graphs), *(partial(destroy, event) for event in self._events)])

    def estimate(self, plan: Plan) -> float:
        """Return a rough time of a launch of ``plan``, in microseconds.

        The time is 0 if the plan cannot be launched.
        """
        self._make_events()
        return sum(trial.estimate for trial in self._tried(self._reserved([_Trial(0, plan)]), self._warm))

    def time(
        self, plan: Plan, most: int | None = None, until: float = float("inf")
    ) -> tuple[list[PlanCandidate], dict[int, Plan]]:
        """Time the candidates of a plan.

        Return every candidate in cuDNN's order, with times or the reason for no times, and the timed plans by index. ``most``
        limits the number of candidates. ``until`` is the time in seconds, by `time.monotonic`, after which no candidate is tried.
        Neither limit applies until the plan in use was tried.
        """
        self._make_events()
        trials = self._built(plan, most, until)
        self.building = monotonic() - self._start
        trials = self._reserved(trials)
        trials = self._worthwhile(self._tried(trials, self._warm))
        trials = self._tried(trials, self._capture_all)
        self._sample(trials)
        results = {trial.index: trial.result() for trial in trials}
        plans = {trial.index: trial.plan for trial in trials}
        return sorted([*self._skipped, *results.values()], key=lambda candidate: candidate.index), plans

    def _make_events(self) -> None:
        while len(self._events) < 2:
            # CUDA tells the time between two events only if both were created for timing.
            self._events.append(self._driver.create_event(timing=True))

    def _sample(self, trials: list[_Trial]) -> None:
        """Time the trials' graphs in turns.

        After `SCREENING` samples of each graph, trials that are far behind get no more samples.
        """
        for turn in range(ROUNDS + 1):
            for trial in trials:
                for samples, graph in zip(trial.samples, trial.graphs, strict=True):
                    sample = self._time(graph.launch, self._pointer) / self._launches
                    # The first turn only warms up.
                    if turn:
                        samples.append(sample)
            if turn == SCREENING:
                most = FAR_BEHIND * min((median(trial.samples[-1]) for trial in trials), default=0.0)
                trials = [trial for trial in trials if median(trial.samples[-1]) <= most]

    # Candidates that can be timed

    def _built(self, plan: Plan, most: int | None, until: float) -> list[_Trial]:
        trials: list[_Trial] = []
        if plan.candidates < 2:
            # A plan of this package's kernels cannot be built again by index, so time the plan itself.
            return [_Trial(0, plan)]
        for index in range(plan.candidates):
            why = "the time was up" if monotonic() > until else ""
            if most is not None and index >= most:
                why = f"it comes after the first {most} plans"
            if why and any(trial.plan.engine == plan.engine for trial in trials):
                self._skipped.append(PlanCandidate(index, skipped=f"not tried, because {why}"))
                continue
            try:
                trials.append(_Trial(index, plan.build(index)))
            except GraphNotSupportedError as error:
                answer = shorten(str(error.__cause__ or error))
                self._skipped.append(PlanCandidate(index, skipped=f"excluded by a setting, or cuDNN cannot build it: {answer}"))
        return trials

    def _reserved(self, trials: list[_Trial]) -> list[_Trial]:
        """Return the trials whose scratch fits into memory for all streams."""

        def reserve(trial: _Trial) -> None:
            for slot in self._slots:
                slot.reserve(trial.plan.workspace_size)

        # Reserve the smallest scratch first. So a plan whose scratch finds no room leaves the room of all smaller plans.
        trials = self._tried(sorted(trials, key=lambda trial: trial.plan.workspace_size), reserve)
        most = max((trial.plan.workspace_size for trial in trials), default=0)
        # Note the addresses only now: a slot's scratch gets another address when it grows.
        self._spaces = [slot.reserve(most) for slot in self._slots]
        return sorted(trials, key=lambda trial: trial.index)

    def _worthwhile(self, trials: list[_Trial]) -> list[_Trial]:
        """Return the trials that are not far too slow.

        The method also sets the number of launches of a sample.
        """
        least = min((trial.estimate for trial in trials), default=0.0)
        self._launches = max(1, min(MOST_LAUNCHES, int(ENOUGH / max(least, 1.0))))
        most = least * max(len(self._slots), TOO_SLOW)
        for trial in trials:
            if trial.estimate > most:
                reason = f"too slow: a launch takes {trial.estimate:,.0f} microseconds, and {least:,.0f} with the quickest plan"
                self._skipped.append(trial.result(reason))
        return [trial for trial in trials if trial.estimate <= most]

    def _tried(self, trials: list[_Trial], attempt: Callable[[_Trial], None]) -> list[_Trial]:
        """Return the trials for which an attempt succeeds."""
        kept = []
        for trial in trials:
            try:
                attempt(trial)
            except OutOfMemoryError:
                size, count = trial.plan.workspace_size, len(self._slots)
                self._skipped.append(trial.result(f"no room for {size:,} bytes of scratch on each of {count} streams"))
            except Exception as error:
                self._pool.status.diagnose(error)
                if isinstance(error, HandlePoolError):
                    raise
                self._skipped.append(trial.result(f"its launch failed: {error}"))
            else:
                kept.append(trial)
        return kept

    # Launches

    def _launch(self, plan: Plan, number: int) -> None:
        slot = self._slots[number]
        space = self._spaces[number] if plan.workspace_size else 0
        plan.executable.launch(slot.handle, self._operands[number], space)

    def _warm(self, trial: _Trial) -> None:
        """Launch on every stream, and estimate the time of a launch.

        The first launch loads the kernels, so it is not timed. The estimate includes the time that the host takes to launch.
        """
        for number, slot in enumerate(self._slots):
            self._launch(trial.plan, number)
            self._driver.synchronize_stream(slot.pointer)
        # Other work on the GPU can only lengthen a time, so the shortest of three times is the best estimate.
        trial.estimate = min(self._time(self._launch, trial.plan, 0) for _ in range(3))

    def _capture_all(self, trial: _Trial) -> None:
        trial.graphs = [self._capture(trial.plan, count) for count in self._counts]
        trial.samples = [[] for _ in self._counts]

    def _capture(self, plan: Plan, count: int) -> RecordedGraph:
        """Return a graph with a chain of launches for each slot.

        The first ``count`` slots take part, and their chains run side by side.
        """
        driver, (first, *others) = self._driver, self._slots[:count]
        driver.begin_capture(first.pointer)
        try:
            # So far only the first stream is captured. A wait for an event of this stream brings another stream into the
            # capture.
            driver.record_event(first.start_event, first.pointer)
            for slot in others:
                driver.wait_event(slot.pointer, first.start_event)
            for number in range(count):
                for _ in range(self._launches):
                    self._launch(plan, number)
            # A capture must end with all its streams joined to the first stream.
            for slot in others:
                driver.record_event(slot.end_event, slot.pointer)
                driver.wait_event(first.pointer, slot.end_event)
            graph = driver.end_capture(first.pointer)
            self._graphs.append(graph)
            graph.instantiate()
        except BaseException:
            # A capture left open would make the stream unusable for launches.
            abort_capture(driver, first.pointer)
            raise
        # Upload the graph now, so that no timed launch includes the upload.
        graph.upload(self._pointer)
        return graph

    def _time(self, run: Callable[..., object], *args: object) -> float:
        """Return the microseconds that a call takes on the first stream.

        ``run`` is called twice, and the second call is timed. The host queues the second call while the first call runs.
        """
        driver, (start, end) = self._driver, self._events
        run(*args)
        driver.record_event(start, self._pointer)
        run(*args)
        driver.record_event(end, self._pointer)
        driver.synchronize_event(end)
        return driver.elapsed(start, end) * 1e3
