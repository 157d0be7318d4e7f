"""Tune the number of lanes of a program.

For each number of lanes, a schedule of the same recording is timed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from statistics import median
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from handlepool._util.arguments import as_integer
from handlepool._util.cleanup import do_all, take_each
from handlepool._util.names import shown
from handlepool.drivers.captures import RecordedGraph
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, CaptureError
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.recording.outside import Outside
from handlepool.recording.schedule import Arrangement, Schedule, estimated
from handlepool.recording.tuned_lanes import TunedLanes, key_of, load, save

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

GOALS = ("clock", "device")
GAIN = 1.03
"""The minimum speed-up for which several lanes replace a single lane."""
CLOSE = 1.01
"""The maximum slow-down that is accepted in order to use fewer lanes.

The slow-down is relative to the quickest number of lanes.
"""
MOST_ROUNDS = 31
LEAST_ROUNDS = 3
"""The minimum number of rounds of samples, even after the time limit."""
A_SAMPLE = 1000.0
"""The microseconds that all replays of a sample should take together."""
MOST_REPLAYS = 8
"""The maximum number of replays in a sample."""
MARKED = 5
"""The number of replays that are measured for the times of nodes.

The median over these replays counts.
"""


@dataclass(frozen=True, slots=True)
class LanesTrial:
    """The trial of a single number of lanes.

    Attributes
    ----------
    lanes : int
        Number of lanes that the caller asked for.
    got : int
        Number of lanes that the schedule uses. It may be smaller than ``lanes``, if the data allows fewer lanes. The value is 0
        if the trial was not timed.
    edges : int
        Number of direct waits of steps for other steps.
    clock, device : float or None
        Microseconds of a replay; None if the trial was not timed. ``clock`` is the host's time from the launch until the host has
        seen the end. ``device`` is the device's time of a replay that directly follows another replay.
    skipped : str
        The reason why this number of lanes was not timed, or "".
    """

    lanes: int
    got: int = 0
    edges: int = 0
    clock: float | None = None
    device: float | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A trial of other plans or forms inside a program.

    Attributes
    ----------
    changes : tuple of str
        For each changed operation, its name and its other plan or form.
    before, after : float
        Microseconds of a replay without the changes, and with the changes, by the goal of the tuning.
    kept : bool
        Whether the changes made replays quicker, and so stay in force.
    """

    changes: tuple[str, ...]
    before: float
    after: float
    kept: bool


@dataclass(frozen=True, slots=True)
class LanesTuning:
    """The result of `Program.tune`, which can be printed as a table.

    Attributes
    ----------
    name : str
        The program's name.
    goal : {"clock", "device"}
        The time by which the trials were compared.
    trials : tuple of LanesTrial
        The trials, in the order of the argument ``lanes``.
    winner : LanesTrial
        The trial whose schedule the program uses from now on.
    previous : int
        Number of lanes before the tuning.
    rounds : int
        Number of samples of each trial, whose median counts.
    seconds : float
        Duration of the tuning in seconds.
    kept : bool
        Whether the result was measured by an earlier tuning, maybe in another process, and was read from the plan directory.
    plans : tuple of PlanChange
        The trials of other plans, in the order in which they were made.
    """

    name: str
    goal: str
    trials: tuple[LanesTrial, ...]
    winner: LanesTrial
    previous: int
    rounds: int
    seconds: float
    kept: bool = False
    plans: tuple[PlanChange, ...] = ()

    def __str__(self) -> str:
        kept = ", from the plan directory" if self.kept else ""
        lines = [
            f"{self.name}: lanes by {self.goal}, medians of {self.rounds} samples in {self.seconds:.1f} s{kept}; "
            f"microseconds per replay"
        ]
        lines.append(f"{'lanes':>5}{'got':>5}{'edges':>8}{'clock':>12}{'device':>12}")
        for trial in self.trials:
            if trial.skipped:
                lines.append(f"{trial.lanes:>5}  {trial.skipped}")
                continue
            note = ", ".join(
                word for word, is_so in (("chosen", trial is self.winner), ("before", trial.got == self.previous)) if is_so
            )
            lines.append(
                f"{trial.lanes:>5}{trial.got:>5}{trial.edges:>8}{trial.clock:>12,.2f}{trial.device:>12,.2f}  {note}".rstrip()
            )
        for change in self.plans:
            verdict = "kept" if change.kept else "undone"
            lines.append(f"{change.before:>12,.2f} -> {change.after:,.2f}, {verdict}: {'; '.join(change.changes)}")
        return "\n".join(lines)


@dataclass(slots=True)
class Candidate:
    """A schedule that is timed.

    Attributes
    ----------
    asked : int
        Number of lanes that the caller asked for.
    arrangement : Arrangement
        The schedule.
    graph : RecordedGraph
        The graph with this schedule.
    replays : int
        Number of replays in a sample.
    clock, device : list of float
        The samples of both times, see `LanesTrial`.
    """

    asked: int
    arrangement: Arrangement
    graph: RecordedGraph
    replays: int = 1
    clock: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def result(self) -> LanesTrial:
        """Return the trial, with the medians of the samples."""
        edges = sum(len(step.after) for step in self.arrangement.steps)
        return LanesTrial(self.asked, self.arrangement.lanes, edges, median(self.clock), median(self.device))


def checked(name: str, lanes: object, goal: object, seconds: object) -> tuple[tuple[int, ...], str, float]:
    """Check the arguments of `Program.tune`, and return them.

    Raises
    ------
    ArgumentError
    """
    if isinstance(lanes, (str, bytes)) or not isinstance(lanes, Iterable):
        raise ArgumentError(f"{name}: tune(lanes={shown(lanes)}); pass several numbers of lanes, such as (1, 2, 4, 8, 16)")
    counts = tuple(dict.fromkeys(as_integer(each, 0) for each in lanes))
    if not counts or not all(1 <= each <= MOST_SIDE_SLOTS for each in counts):
        raise ArgumentError(f"{name}: tune(lanes={shown(lanes)}); pass one or more integers from 1 to {MOST_SIDE_SLOTS}")
    if goal not in GOALS:
        raise ArgumentError(f"{name}: tune(goal={shown(goal)}); goal must be 'clock' or 'device'")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ArgumentError(f"{name}: tune(seconds={shown(seconds)}); seconds must be a finite number above 0")
    return counts, str(goal), float(seconds)


class LanesRig:
    """Time schedules of a recording.

    A rig is made and used while the program has no other use, with the program's device current.

    Parameters
    ----------
    recording : Recording
        A recording with lanes.
    name : str
        The program's name.
    pointer : int
        Pointer of the current stream, on which the replays run.
    outside : Outside
        Saves and restores the memory outside the program that replays write.
    """

    def __init__(self, recording: "Recording", name: str, pointer: int, outside: Outside) -> None:
        assert recording.schedule is not None
        assert recording.graph is not None
        assert recording.arrangement is not None
        self._recording = recording
        self._schedule: Schedule = recording.schedule
        self._driver = recording.pool.driver
        self._name = name
        self._pointer = pointer
        self._outside = outside
        self._graphs: list[RecordedGraph] = []
        self._events: list[Any] = []

    def tune(
        self,
        counts: Sequence[int],
        goal: str,
        seconds: float,
        take: Callable[[RecordedGraph, Arrangement], None],
        anew: bool = False,
    ) -> LanesTuning:
        """Time the schedules, and let the program use the best schedule.

        Return the result. If the plan directory has a result, nothing is measured unless ``anew`` is true. ``take`` makes the
        program use a graph.
        """
        key = key_of(self._recording, self._name, goal, counts)
        found = load(self._recording, key, counts) if key and not anew else None
        if found is not None:
            return self._take_found(found, goal, take)
        start = monotonic()
        progress = shown_progress(self._name, seconds)
        former, previous = self._recording.graph, self._recording.arrangement
        assert former is not None
        assert previous is not None
        with self._driver.relaxed():
            self._outside.save()
            try:
                for _ in range(2):
                    self._events.append(self._driver.create_event(timing=True))
                times = self._recording.measured(self.times)
                candidates, skipped = self._candidates(counts, start + seconds, progress)
                rounds = self._sample(candidates, start + seconds, progress)
                results = {each.asked: each.result() for each in candidates}
                winner = _best(candidates, results, goal)
                # The former graph is added to the list, so that `_end` destroys it unless the recording still owns it.
                self._graphs.append(former)
                take(winner.graph, winner.arrangement)
            finally:
                try:
                    self._end()
                # An interrupt may stop the first call of `_end`. So `_end` is called again, and does the steps that are left.
                finally:
                    self._end()
                    progress(None)
        trials = tuple([results.get(count) or skipped[count] for count in counts])
        took = monotonic() - start
        if key:
            told = [[*astuple(trial)] for trial in trials]
            save(self._recording, key, TunedLanes(counts.index(winner.asked), told, rounds, took, times))
        return LanesTuning(self._name, goal, trials, results[winner.asked], previous.lanes, rounds, took)

    def _take_found(self, found: TunedLanes, goal: str, take: Callable[[RecordedGraph, Arrangement], None]) -> LanesTuning:
        """Let the program use the schedule that won in an earlier tuning."""
        recording, previous = self._recording, self._recording.arrangement
        assert recording.graph is not None
        assert recording.captured is not None
        assert previous is not None
        trials = tuple([LanesTrial(*trial) for trial in found.trials])
        winner = trials[found.winner]
        with self._driver.relaxed():
            try:
                arrangement = self._schedule.on(winner.lanes, found.times)
                graph = recording.captured.arranged(*arrangement.edges)
                self._graphs.append(graph)
                graph.instantiate()
                self._graphs.append(recording.graph)
                take(graph, arrangement)
                recording.measured(lambda: found.times)
            finally:
                try:
                    self._end()
                # As in `tune`, an interrupt may have prevented the first call of `_end`.
                finally:
                    self._end()
        return LanesTuning(self._name, goal, trials, winner, previous.lanes, found.rounds, found.seconds, True)

    def measure(self) -> list[float]:
        """Measure the steps, and return when each step ended.

        First the steps are timed one after the other, and the recording keeps these times. Then some replays run on the program's
        present lanes. The method returns when each step ended in the last of these replays, in microseconds from its beginning.
        """
        arrangement = self._recording.arrangement
        assert arrangement is not None
        with self._driver.relaxed():
            self._outside.save()
            try:
                self._recording.measured(self.times)
                return self._ends(arrangement)[-1][0]
            finally:
                try:
                    self._end()
                # As in `tune`, an interrupt may have prevented the first call of `_end`.
                finally:
                    self._end()

    def arrange(self, lanes: int) -> None:
        """Move the recording to ``lanes`` lanes, by measured times of its steps."""
        recording = self._recording
        captured, former = recording.captured, recording.graph
        assert captured is not None
        assert former is not None
        with self._driver.relaxed():
            self._outside.save()
            try:
                arrangement = self._schedule.on(lanes, recording.measured(self.times))
                graph = captured.arranged(*arrangement.edges)
                self._graphs.append(graph)
                graph.instantiate()
                self._graphs.append(former)
                recording.adopt(graph)
                recording.arrange_as(graph, arrangement)
            finally:
                try:
                    self._end()
                # As in `tune`, an interrupt may have prevented the first call of `_end`.
                finally:
                    self._end()

    def times(self) -> list[float]:
        """Measure the microseconds of each step, one after the other."""
        lanes = self._recording.lanes
        assert lanes is not None
        exits = self._schedule.exits()
        samples: list[list[float]] = []
        for ends, cost in self._ends(self._schedule.on(1, estimated(lanes.used))):
            taken, last = [0.0] * len(ends), 0.0
            for number, end in enumerate(ends):
                # A step that added no node to the graph has no end, and gets the time 0.
                if exits[number]:
                    taken[number], last = max(end - last - cost, 0.0), end
            samples.append(taken)
        return [median(taken) for taken in zip(*samples, strict=True)]

    def _ends(self, arrangement: Arrangement) -> list[tuple[list[float], float]]:
        """Measure when each step ends, in several replays.

        Each replay gives a list of ends, and the time that a time stamp itself takes. An end is in microseconds from the
        beginning of the replay. For a step that added no node to the graph, it is 0.
        """
        exits = self._schedule.exits()
        numbers = [number for number, nodes in enumerate(exits) if nodes]
        captured = self._recording.captured
        assert captured is not None
        graph = captured.marked(*arrangement.edges, [exits[number] for number in numbers])
        self._graphs.append(graph)
        graph.instantiate()
        samples: list[tuple[list[float], float]] = []
        for _ in range(MARKED + 1):
            graph.launch(self._pointer)
            self._driver.synchronize_stream(self._pointer)
            known = dict(zip(numbers, graph.times(), strict=True))
            samples.append(([known.get(number, 0.0) for number in range(len(exits))], graph.cost()))
        # The first replay only warms up, so its sample is dropped.
        return samples[1:]

    def _candidates(
        self, counts: Sequence[int], until: float, progress: Callable[[str | None], None]
    ) -> tuple[list[Candidate], dict[int, LanesTrial]]:
        captured, times = self._recording.captured, self._recording.times
        assert captured is not None
        assert times is not None
        found: list[Candidate] = []
        skipped: dict[int, LanesTrial] = {}
        for count in sorted(counts):
            arrangement = self._schedule.on(count, times)
            same = next((each for each in found if each.arrangement is arrangement), None)
            if same is not None:
                more = f"the data allows only {arrangement.lanes} lanes" if arrangement.lanes else "the program has no nodes"
                why = f"the same schedule as on {same.asked} lanes: {more}"
                skipped[count] = LanesTrial(count, skipped=why)
                continue
            if found and monotonic() > until:
                skipped[count] = LanesTrial(count, skipped="not timed: the time limit, seconds=, had passed")
                continue
            progress(f"{count} lanes")
            try:
                graph = captured.arranged(*arrangement.edges)
                if graph is not captured:
                    self._graphs.append(graph)
                graph.instantiate()
            except (CaptureError, MemoryError) as error:
                # If no number of lanes could be tried, the tuning raises the error of the last number.
                if not found and count == max(counts):
                    raise
                skipped[count] = LanesTrial(count, skipped=f"the graph cannot be made: {error}")
                continue
            candidate = Candidate(count, arrangement, graph)
            # The first replay warms up. The time of the second replay decides the number of replays in a sample.
            self._clock(candidate, 1)
            candidate.replays = max(1, min(MOST_REPLAYS, int(A_SAMPLE / max(self._clock(candidate, 1), 1.0))))
            found.append(candidate)
        return found, skipped

    def _sample(self, candidates: Sequence[Candidate], until: float, progress: Callable[[str | None], None]) -> int:
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and monotonic() > until:
                return number
            progress(f"round {number + 1} of {MOST_ROUNDS}")
            for each in candidates:
                each.clock.append(self._clock(each, each.replays))
                each.device.append(self._device(each, each.replays))
        return MOST_ROUNDS

    def _clock(self, candidate: Candidate, replays: int) -> float:
        return clock(self._driver, candidate.graph, self._pointer, replays)

    def _device(self, candidate: Candidate, replays: int) -> float:
        return device(self._driver, candidate.graph, self._pointer, self._events, replays)

    def _end(self) -> None:
        """Restore saved memory; destroy graphs that the recording does not own.

        If the method is called again after an interrupt, it does not repeat steps that are done.
        """
        if not self._recording.pool.status.untouchable:
            do_all(self._last_steps())

    def _last_steps(self) -> Iterator[Callable[[], object]]:
        recording = self._recording
        yield self._outside.restore
        yield partial(self._driver.synchronize_stream, self._pointer)
        for graph in take_each(self._graphs):
            if not recording.owns(graph):
                yield graph.destroy
        for event in take_each(self._events):
            yield partial(recording.pool.device(recording.device).scratch.destroy_event, event)


def _best(candidates: Sequence[Candidate], results: dict[int, LanesTrial], goal: str) -> Candidate:
    """Return the best candidate.

    This is the candidate with the fewest lanes among those that are at most 1 % slower than the quickest. But if a candidate
    has a single lane, it is the best unless another candidate is quicker by more than 3 %.
    """

    def time(candidate: Candidate) -> float:
        taken: float = getattr(results[candidate.asked], goal)
        return taken

    one = next((each for each in candidates if each.asked == 1), None)
    most = CLOSE * min(map(time, candidates))
    near = [each for each in candidates if time(each) <= most and (one is None or time(one) > GAIN * time(each))]
    if near or one is None:
        return min(near, key=lambda each: each.arrangement.lanes)
    return one


def clock(driver: Driver, graph: RecordedGraph, pointer: int, replays: int) -> float:
    """Return the host's microseconds from a replay's launch to its end."""
    begin = perf_counter()
    for _ in range(replays):
        graph.launch(pointer)
        driver.synchronize_stream(pointer)
    return (perf_counter() - begin) * 1e6 / replays


def device(driver: Driver, graph: RecordedGraph, pointer: int, events: Sequence[Any], replays: int) -> float:
    """Return the mean microseconds of a replay on the device.

    The measured replays follow each other directly on the stream.
    """
    start, end = events
    # The replay before the start event keeps the device busy, so that the latency of the first launch is not measured.
    graph.launch(pointer)
    driver.record_event(start, pointer)
    for _ in range(replays):
        graph.launch(pointer)
    driver.record_event(end, pointer)
    driver.synchronize_event(end)
    return driver.elapsed(start, end) * 1e3 / replays


def shown_progress(name: str, seconds: float) -> Callable[[str | None], None]:
    """Return a function that shows a tuning's progress on a terminal.

    The function takes a text to show. If it gets None, it clears the line.
    """
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        return lambda what: None
    start = monotonic()

    def show(what: str | None) -> None:
        line = "" if what is None else f"{name}: {what}, {monotonic() - start:.1f} of {seconds:.0f} s"
        # If the terminal cannot be written to, the tuning goes on.
        with suppress(OSError, ValueError):
            stream.write(f"\r\x1b[K{line}")
            stream.flush()

    return show
