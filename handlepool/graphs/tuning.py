"""Tuning: which of cuDNN's candidate plans is the quickest while several states run it side by side.

The quickest plan alone need not be the quickest side by side with others: one that spreads over the whole GPU leaves its
neighbours nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import monotonic
from typing import Any, cast

import numpy as np

from handlepool._util import at_least, do_all, shown
from handlepool.drivers.protocol import LEGACY_STREAM, RecordedGraph, abort_capture
from handlepool.errors import (
    ArgumentError,
    CaptureError,
    DriverNotAvailableError,
    GraphNotSupportedError,
    HandlePoolError,
    OutOfMemoryError,
    StateBusyError,
)
from handlepool.graphs.arrays import convert
from handlepool.graphs.compile import shorten
from handlepool.graphs.plan import Plan
from handlepool.pool.context import thread
from handlepool.pool.default import current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot, bind_to_thread, unbind
from handlepool.pool.stream import check_foreign, resolve
from handlepool.regions.states import ParallelStates
from handlepool.regions.stream_order import order
from handlepool.tensors.layout import Layout

ROUNDS = 9
"""Samples of each candidate, taken in turns, of which the median counts."""
MOST_LAUNCHES = 16
"""Launches of each state in one sample, of plans that are quick."""
ENOUGH = 500.0
"""Microseconds that the launches of one state in a sample need not exceed."""
TOO_SLOW = 4
"""A plan that takes more than so many times as long as the quickest, or more than as many times as there are states, is not timed
further: launches of the quickest are done sooner one after the other."""
SCREENING = 3
"""Samples of each, after which those that are far behind get no more."""
FAR_BEHIND = 1.5
"""More than so many times the median of the quickest."""
MOST_VALUES = 1 << 16
"""Random values; larger arrays have them repeated."""
GAIN = 1.03
"""How many times as long as the quickest plan the one that was used before must take to be replaced."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was proposed.

    Attributes
    ----------
    index : int
        For `Plan.select`.
    engine : str
        cuDNN's name of the engine and its knobs; "" where the plan could not be built.
    workspace_size : int
        Bytes of scratch that a launch needs.
    alone : float or None
        Microseconds a launch on one stream with nothing beside it; None where it was not timed.
    concurrent : float or None
        Microseconds for one launch of every state, side by side; None where one state was timed alone, or it was not timed.
    skipped : str
        Why it was not timed, or "".
    """

    index: int
    engine: str = ""
    workspace_size: int = 0
    alone: float | None = None
    concurrent: float | None = None
    skipped: str = ""

    @property
    def time(self) -> float:
        """What counts: ``concurrent``, else ``alone``; infinite where there is neither."""
        return next((time for time in (self.concurrent, self.alone) if time is not None), float("inf"))


@dataclass(slots=True)
class _Trial:
    """A candidate while it is timed; times in microseconds."""

    index: int
    plan: Plan
    estimate: float = 0.0
    graphs: list[RecordedGraph] = field(default_factory=list)  # alone, and side by side where there are several states
    samples: list[list[float]] = field(default_factory=list)

    def result(self, skipped: str = "") -> Candidate:
        """Return what is told of it."""
        times = [] if skipped else [median(samples) for samples in self.samples]
        alone, concurrent = (*times, None, None)[:2]
        return Candidate(self.index, self.plan.engine, self.plan.workspace_size, alone, concurrent, skipped)


@contextmanager
def side_slots(pool: PoolInternals, name: str, count: int) -> Iterator[list[Slot]]:
    """Lease so many side slots of the current device.

    They are released without scratch: of what was tried, the largest may be far more than the winner needs.

    Raises
    ------
    StateBusyError
        When fewer are free.
    """
    device = pool.device(pool.driver.current_device())
    sides = device.sides
    slots: list[Slot] = []

    def give_back(slot: Slot) -> None:
        unbind(slot)
        sides.release(slot, captured=True)  # until `release_captured` has seen that no capture was left open

    try:
        while len(slots) < count:
            slot = sides.lease()
            if slot is None:
                raise StateBusyError(
                    f"{name}.tune needs {count} side streams, and {len(slots)} are free: tune outside of forks, and with "
                    f"executors that have fewer workers"
                )
            slots.append(slot)
            bind_to_thread(pool.sound(slot))
        yield slots
    finally:
        if not pool.status.untouchable:
            waits = [partial(pool.driver.synchronize_stream, slot.pointer) for slot in slots]
            frees = [*(slot.release_scratch for slot in slots), device.scratch.collect]
            do_all([*waits, *frees, *(partial(give_back, slot) for slot in slots), sides.release_captured])


class TimingRig:
    """Where candidates are timed: side slots, each with operands of its own. Used inside `Driver.relaxed`.

    Parameters
    ----------
    slots : list of Slot
        From `side_slots`.
    operands : list of tuple of array
        For each slot the inputs and outputs to launch with, on the device by now.
    concurrent : bool
        Whether to time what all slots run side by side, too, and not one alone.
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
        self._skipped: list[Candidate] = []
        self._graphs: list[RecordedGraph] = []
        self._events: list[Any] = []  # before and after what is timed
        self._start = monotonic()
        self.building = 0.0  # seconds

    def close(self) -> None:
        """Give graphs and events back."""
        if not self._pool.status.untouchable:
            destroy = self._pool.device(self._slots[0].device).scratch.destroy_event
            wait = partial(self._driver.synchronize_stream, self._pointer)
            do_all([wait, *(graph.destroy for graph in self._graphs), *(partial(destroy, event) for event in self._events)])

    def time(self, plan: Plan, most: int | None = None) -> tuple[list[Candidate], dict[int, Plan]]:
        """Return every candidate of a plan in cuDNN's order, with times or the reason for none; and by index the plans timed.

        With ``most``, so many are tried, or more until that plan itself was met.
        """
        for _ in range(2):
            self._events.append(self._driver.create_event(timing=True))
        trials = self._built(plan, most)
        self.building = monotonic() - self._start
        trials = self._reserved(trials)
        trials = self._worthwhile(self._tried(trials, self._warm))
        trials = self._tried(trials, self._capture_all)
        self._sample(trials)
        results = {trial.index: trial.result() for trial in trials}
        plans = {trial.index: trial.plan for trial in trials}
        return sorted([*self._skipped, *results.values()], key=lambda candidate: candidate.index), plans

    def _sample(self, trials: list[_Trial]) -> None:
        """Time graphs in turns: all of them first, and then those that may yet be the quickest."""
        for turn in range(ROUNDS + 1):
            for trial in trials:
                for samples, graph in zip(trial.samples, trial.graphs, strict=True):
                    sample = self._time(graph.launch, self._pointer) / self._launches
                    if turn:  # the first one warms up
                        samples.append(sample)
            if turn == SCREENING:
                most = FAR_BEHIND * min((median(trial.samples[-1]) for trial in trials), default=0.0)
                trials = [trial for trial in trials if median(trial.samples[-1]) <= most]

    # What can be timed

    def _built(self, plan: Plan, most: int | None) -> list[_Trial]:
        trials: list[_Trial] = []
        for index in range(plan.candidates):
            if most is not None and index >= most and any(trial.plan.engine == plan.engine for trial in trials):
                self._skipped.append(Candidate(index, skipped=f"not tried, since it is behind the first {most}"))
                continue
            try:
                trials.append(_Trial(index, plan.build(index)))
            except GraphNotSupportedError as error:
                answer = shorten(str(error.__cause__ or error))
                self._skipped.append(Candidate(index, skipped=f"excluded by a setting, or not to be built: {answer}"))
        return trials

    def _reserved(self, trials: list[_Trial]) -> list[_Trial]:
        """Those for which there is scratch on every stream at a time."""

        def reserve(trial: _Trial) -> None:
            for slot in self._slots:
                slot.reserve(trial.plan.workspace_size)

        trials = self._tried(sorted(trials, key=lambda trial: trial.plan.workspace_size), reserve)
        most = max((trial.plan.workspace_size for trial in trials), default=0)
        self._spaces = [slot.reserve(most) for slot in self._slots]  # only now: scratch that grows moves
        return sorted(trials, key=lambda trial: trial.index)

    def _worthwhile(self, trials: list[_Trial]) -> list[_Trial]:
        """Those that are not much too slow; and how many launches a sample is to have."""
        least = min((trial.estimate for trial in trials), default=0.0)
        self._launches = max(1, min(MOST_LAUNCHES, int(ENOUGH / max(least, 1.0))))
        most = least * max(len(self._slots), TOO_SLOW)
        for trial in trials:
            if trial.estimate > most:
                reason = f"too slow: a launch takes {trial.estimate:,.0f} microseconds, and {least:,.0f} of the quickest"
                self._skipped.append(trial.result(reason))
        return [trial for trial in trials if trial.estimate <= most]

    def _tried(self, trials: list[_Trial], attempt: Callable[[_Trial], None]) -> list[_Trial]:
        """Those that an attempt succeeds with."""
        kept = []
        for trial in trials:
            try:
                attempt(trial)
            except OutOfMemoryError:
                size, count = trial.plan.workspace_size, len(self._slots)
                self._skipped.append(trial.result(f"no room for {size:,} bytes of scratch on {count} streams at a time"))
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
        """Launch on every stream, which loads the kernels, and see roughly how long it takes, the host's time included."""
        for number, slot in enumerate(self._slots):
            self._launch(trial.plan, number)
            self._driver.synchronize_stream(slot.pointer)
        trial.estimate = min(self._time(self._launch, trial.plan, 0) for _ in range(3))

    def _capture_all(self, trial: _Trial) -> None:
        trial.graphs = [self._capture(trial.plan, count) for count in self._counts]
        trial.samples = [[] for _ in self._counts]

    def _capture(self, plan: Plan, count: int) -> RecordedGraph:
        """Return a graph with a chain of launches for each of the first ``count`` slots, side by side."""
        driver, (first, *others) = self._driver, self._slots[:count]
        driver.begin_capture(first.pointer)
        try:
            driver.record_event(first.start_event, first.pointer)
            for slot in others:
                driver.wait_event(slot.pointer, first.start_event)
            for number in range(count):
                for _ in range(self._launches):
                    self._launch(plan, number)
            for slot in others:
                driver.record_event(slot.end_event, slot.pointer)
                driver.wait_event(first.pointer, slot.end_event)
            graph = driver.end_capture(first.pointer)
            self._graphs.append(graph)
            graph.instantiate()
        except BaseException:
            abort_capture(driver, first.pointer)
            raise
        graph.upload(self._pointer)
        return graph

    def _time(self, run: Callable[..., object], *args: Any) -> float:
        """Microseconds of something on the first stream, queued while the same runs before it."""
        driver, (start, end) = self._driver, self._events
        run(*args)
        driver.record_event(start, self._pointer)
        run(*args)
        driver.record_event(end, self._pointer)
        driver.synchronize_event(end)
        return driver.elapsed(start, end) * 1e3


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `GraphFunction.tune` tried and found; as text a table, the quickest first.

    Attributes
    ----------
    name : str
        Of the graph function.
    states : int
        How many ran side by side; 1 where one stream was timed alone.
    candidates : tuple of Candidate
        Every plan that was proposed, in cuDNN's order: ``index``, ``engine``, ``workspace_size`` (bytes), ``alone`` and
        ``concurrent`` (microseconds, or None), and ``skipped``, why it was not timed.
    winner : Candidate
        The plan that these arguments get from now on.
    previous : Candidate or None
        The plan that they got before, where it is among the candidates. It stays the winner unless another one is quicker by 3 %.
    seconds, building : float
        How long all of it took, and the part of it that plans were built in.
    inputs : tuple of Layout
        Shape, strides and type of the arrays that it was tuned for.
    """

    name: str
    states: int
    candidates: tuple[Candidate, ...]
    winner: Candidate
    previous: Candidate | None
    seconds: float = 0.0
    building: float = 0.0
    inputs: tuple[Layout, ...] = ()

    def __str__(self) -> str:
        timed = sorted((each for each in self.candidates if not each.skipped), key=lambda each: each.time)
        together = "" if self.winner.concurrent is None else f", and {self.states} states side by side"
        lines = [
            f"{self.name}: {len(timed)} of {len(self.candidates)} plans timed alone{together}; microseconds, bytes of scratch"
        ]
        lines.append(f"{'plan':>5}{'alone':>11}{'concurrent':>11}{'scratch':>15}  engine")
        for each in timed:
            times = "".join(f"{'' if time is None else format(time, ',.2f'):>11}" for time in (each.alone, each.concurrent))
            notes = "".join(
                f", {note}" for note, which in (("chosen", self.winner), ("used before", self.previous)) if which is each
            )
            lines.append(f"{each.index:>5}{times}{each.workspace_size:>15,}  {each.engine}{notes}")
        return "\n".join([*lines, *(f"{each.index:>5}  {each.skipped}" for each in self.candidates if each.skipped)])


def tune(
    function: Callable[..., Any], /, *args: Any, states: ParallelStates | None = None, candidates: int | None = 10, **kwargs: Any
) -> tuple[Tuning, ...]:
    """Call a function once, and tune every plan that it used: those of a network's convolutions, say.

    Each plan is tuned as by `GraphFunction.tune`, but over random arrays. So it is for all calls of the same form, and the
    function's own arrays are read by its one call alone.

    Parameters
    ----------
    function : callable
        Of graph functions, `conv2d` and the like, on the current device. Replays of programs are not seen.
    *args
        For the function.
    states : ParallelStates, optional
        What to time side by side, and whose pool the function uses. One stream alone, and the current pool, where none is given.
    candidates : int or None
        How many plans to try of those that cuDNN proposes, from the one that it ranks first; all of them for None. Where the plan
        in use is further behind, as many as it takes to meet it.
    **kwargs
        For the function.

    Returns
    -------
    tuple of Tuning
        For each plan that has alternatives, in the order of their last use. `Tuning.inputs` says what it was for. What other
        threads use on the same pool meanwhile is among them.

    Raises
    ------
    DriverNotAvailableError, CaptureError, StateBusyError, GraphNotSupportedError
        As in `GraphFunction.tune`. Plans that were tuned before an error stay so.
    Exception
        Whatever the function raised; then nothing was tuned.

    Examples
    --------
    >>> tunings = handlepool.tune(network, x)                                                            # doctest: +SKIP
    """
    most = candidates if candidates is None else at_least(1, "tune: candidates", candidates)
    if not callable(function):
        raise ArgumentError(f"tune takes a function, not {shown(function)}")
    pool, pointer = _pool_of("handlepool", states)
    watched = pool.plans.watch()
    function(*args, **kwargs)
    found = []
    try:
        with pool.driver.relaxed(), side_slots(pool, "handlepool", 1 if states is None else states.count) as slots:
            used = pool.plans.used_since(pool.driver.current_device(), watched)
            for plan in cast("list[Plan]", used):
                if plan.candidates > 1:
                    operands = [_random_operands(pool, plan) for _ in slots]
                    found.append(_tuned(pool, plan, slots, operands, states is not None, pointer, monotonic(), most))
    except Exception as error:
        pool.status.diagnose(error)
        raise
    return tuple(found)


def tune_plan(name: str, arrays: tuple[Any, ...], states: ParallelStates | None, find: Callable[[PoolInternals], Plan]) -> Tuning:
    """Time the candidates of the plan that ``find`` gives for these arrays, and use the quickest if it is worth the change.

    See `GraphFunction.tune`.
    """
    pool, pointer = _pool_of(name, states)
    start = monotonic()
    try:
        with pool.driver.relaxed():
            plan = find(pool)
            converted = convert(name, pool, arrays)
            if converted is not None:
                arrays = converted.arrays
                for caller in converted.callers:
                    order(pool, converted.device, caller, pointer)
            with side_slots(pool, name, 1 if states is None else states.count) as slots:
                operands = [_operands(pool, plan, arrays) for _ in slots]
                return _tuned(pool, plan, slots, operands, states is not None, pointer, start)
    except Exception as error:
        pool.status.diagnose(error)
        raise


def _tuned(
    pool: PoolInternals,
    plan: Plan,
    slots: list[Slot],
    operands: Sequence[tuple[Any, ...]],
    concurrent: bool,
    pointer: int,
    start: float,
    most: int | None = None,
) -> Tuning:
    pool.driver.synchronize_stream(pointer)  # the operands are there
    rig = TimingRig(pool, slots, operands, concurrent=concurrent)
    try:
        candidates, plans = rig.time(plan, most)
    finally:
        rig.close()
    winner = min(candidates, key=lambda each: each.time)
    previous = next((each for each in candidates if each.engine == plan.engine), None)
    if winner.skipped:
        reasons = "; ".join(f"plan {each.index}: {each.skipped}" for each in candidates[:3])
        raise GraphNotSupportedError(f"{plan.name}: none of {len(candidates)} plans could be timed: {reasons}")
    if previous is not None and previous.time < GAIN * winner.time:
        winner = previous
    else:
        plans[winner.index].keep()
    seconds = monotonic() - start
    return Tuning(plan.name, len(slots), tuple(candidates), winner, previous, seconds, rig.building, plan.inputs)


def _pool_of(name: str, states: ParallelStates | None) -> tuple[PoolInternals, int]:
    """Return the pool to tune on, and the caller's stream."""
    if states is not None and not isinstance(states, ParallelStates):
        raise ArgumentError(f"{name}.tune with states={shown(states)}: pass a ParallelStates, or None for one stream alone")
    pool = current_pool() if states is None else states.pool.internals
    pool.status.check()
    return pool, _check(pool, name)


def _check(pool: PoolInternals, name: str) -> int:
    """Check what can be checked before anything is done, and return the caller's stream."""
    driver = pool.driver
    if driver.name == "host":
        raise DriverNotAvailableError(
            f"{name}.tune times plans on a GPU; this is the host driver, which has one plan for each graph, and whose times say "
            f"nothing about a GPU. Tune where the cuda driver runs"
        )
    if thread.recording is not None:
        raise CaptureError(f"{name} cannot be tuned inside a recording, where nothing runs that could be timed: tune it before")
    if thread.region is not None:
        raise CaptureError(f"{name} cannot be tuned inside a branch or a task, beside which others run: tune it outside")
    home = resolve(driver)
    check_foreign(driver, home)
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(f"{name} cannot be tuned while the current stream is being captured: tune it before")
    return home.pointer


def _operands(pool: PoolInternals, plan: Plan, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return what one state launches with: copies of the arrays, and outputs. Other libraries' arrays are read where they are."""
    driver = pool.driver
    operands = []
    for array in arrays:
        if isinstance(array, driver.array_types):
            given: Any = array
            array = driver.empty(given.shape, given.strides, given.dtype)
            driver.copy(array, given)
        operands.append(array)
    return (*operands, *(driver.empty(layout.shape, layout.strides, layout.dtype) for layout in plan.outputs))


def _random_operands(pool: PoolInternals, plan: Plan) -> tuple[Any, ...]:
    """Return what one state launches with where there are no arrays: inputs of random values, and outputs."""
    driver = pool.driver
    values = np.random.default_rng(0).standard_normal(MOST_VALUES)
    operands = []
    for layout in plan.inputs:
        array = driver.empty(layout.shape, layout.strides, layout.dtype)
        driver.copy(array, driver.asarray(np.resize(values, layout.shape).astype(layout.dtype)))
        operands.append(array)
    return (*operands, *(driver.empty(layout.shape, layout.strides, layout.dtype) for layout in plan.outputs))
