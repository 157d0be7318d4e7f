"""Explain, measure and draw a program.

`handlepool.recording.program` uses these functions as methods.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from handlepool._util.arguments import flag
from handlepool.errors import ArgumentError, CaptureError
from handlepool.graphs.tuning import check_gpu
from handlepool.pool.context import thread
from handlepool.recording import drawing
from handlepool.recording.explain import Explanation
from handlepool.recording.outside import Outside
from handlepool.recording.program_call import replayed
from handlepool.recording.replanning import Trials
from handlepool.recording.tuning import LanesRig, LanesTuning, checked, shown_progress

if TYPE_CHECKING:
    from handlepool.recording.program import Program

T = TypeVar("T")


def explain(self: "Program", *, measure: bool = False) -> Explanation:
    """Return a report on the recording.

    It has the nodes, edges, lanes and memory, and the calls that forced an order.

    Parameters
    ----------
    measure : bool
        Measure the nodes' times, as `tune` does. The program is replayed for the measurement, as in `tune`.

    Returns
    -------
    Explanation
        A report that can be printed, and has ``to_dict()`` and, for Graphviz, ``to_dot()``.

    Raises
    ------
    PoolClosedError
        After the program was closed.
    ArgumentError, CaptureError, MemoryError, OwnershipError
        With ``measure``, as in `tune`.
    """
    ends = tuple(_measured(self)) if flag(f"{self._name}: explain: measure", measure) else ()
    # Without the lock another thread could end the graph that is read here.
    with self._lock:
        recording = self._recording
        if recording is None:
            self._refuse()
        allocations = tuple(recording.allocations)
    lanes = recording.lanes
    if lanes is None:
        return Explanation(self._name, self.nodes, recording.nbytes, recording.scratch_bytes, allocations)
    arrangement = recording.arrangement
    steps, got = (lanes.steps, lanes.leased.got) if arrangement is None else (arrangement.steps, arrangement.lanes)
    known = lanes.limit, lanes.leased.wanted, lanes.leased.got, got, lanes.exact, tuple(steps), tuple(recording.times or ())
    data = tuple([step.after for step in lanes.steps])
    return Explanation(self._name, self.nodes, recording.nbytes, recording.scratch_bytes, allocations, *known, data, ends)


def tune(
    self: "Program",
    lanes: Iterable[int] = (1, 2, 4, 8, 16),
    *,
    goal: str = "clock",
    seconds: float = 10.0,
    anew: bool = False,
    plans: bool = False,
) -> LanesTuning:
    """Measure the best number of lanes for a program, and use it.

    Another number of lanes is another schedule of the same recording. The schedule depends on the times of the nodes, which
    are measured first. Without ``plans`` the function is not called again, and arrays that were handed out stay valid. The
    measurement replays the program on the current stream, and waits for the GPU. The outputs then hold the values of the last
    replay. They differ from before if the function changes its inputs: replay the program again. Replays may write memory outside
    the program. That memory is saved before, and restored. Writes of plain code are unknown, so all arguments of the function are
    saved. Arrays that plain code writes elsewhere, such as globals, are not restored. Other threads' uses of the program wait. On
    the host driver the times are NumPy's, and do not apply to a GPU.

    A pool with a plan directory keeps the result there. For the same recording and arguments, on a device of the same kind, the
    result is taken from there, and nothing is replayed.

    Parameters
    ----------
    lanes : iterable of int
        Each 1 to 32, also above the number that `record` was given. The fewest lanes within 1 % of the best are taken. If 1 is
        among ``lanes``, a single lane is taken unless another number is quicker by 3 %.
    goal : {"clock", "device"}
        The time that counts: the host's time from a replay's launch to its end, or the device's time of replays in a row.
    seconds : float
        Time after which no more samples are taken. Each number of lanes has at least three samples.
    anew : bool
        Measure, even if the plan directory has a result.
    plans : bool
        Choose plans and forms of the heaviest operations as well, by the time of whole replays. A few changes at a time are
        tried, until ``seconds`` have passed. The function is called and recorded again, and changes stay if replays become
        quicker by more than the noise. Later calls of the operations use the changes that stay. If any stay, ``outputs`` are new
        arrays, and arrays that were handed out keep their last values. Other uses of the program are refused meanwhile.

    Returns
    -------
    LanesTuning
        The trials and the result, which can be printed as a table. A terminal shows the progress meanwhile.

    Raises
    ------
    ArgumentError
        For a program that was recorded without lanes, or with a single lane. For memory that replays write and that cannot be
        restored, by its place or the call's place. For invalid arguments.
    CaptureError
        Inside a recording, a branch or a task; while the current stream is being captured; for a graph that cannot be copied.
    MemoryError
        If there is no memory for graphs or for saved arrays.
    OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`.
    DriverNotAvailableError, StateBusyError
        With ``plans``, as in `handlepool.tune`. The function's errors, and those of `record`, may come as well. The plans and the
        recording are then as before.
    """
    self._status.check()
    asked = checked(self._name, lanes, goal, seconds)
    anew, plans = flag(f"{self._name}: tune: anew", anew), flag(f"{self._name}: tune: plans", plans)
    _check_place(self)
    if plans:
        return _tune_plans(self, asked, anew)
    return self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(*asked, self._run_on, anew)))


def _tune_plans(self: "Program", asked: tuple[tuple[int, ...], str, float], anew: bool) -> LanesTuning:
    """Tune the lanes, then the plans for these lanes.

    The lanes are tuned again if a plan changed.
    """
    counts, goal, seconds = asked
    until = monotonic() + seconds
    if self._again is None:
        raise ArgumentError(
            f"{self._name} was not made by record on several lanes, so its plans cannot be tuned; use record(f, ..., lanes=8)"
        )
    check_gpu(self._driver, f"{self._name}: tune(plans=True)")
    show = shown_progress(self._name, seconds)
    tuning = self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(counts, goal, seconds / 4, self._run_on, anew)))
    with self._refusing() as pointer:
        recording = self._recording
        if recording is None:
            self._refuse()
        trials = Trials(recording, self._name, self._inputs, self._again, pointer, tuning.winner.got, goal)
        try:
            best = trials.run(until, show)
        finally:
            show(None)
    if best is not None:
        try:
            self._use("tuned", lambda: self._become(best))
        # Another thread may have closed the program meanwhile.
        except BaseException:
            if self._recording is not best.recording:
                best.end()
            raise
        tuning = self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(counts, goal, seconds / 4, self._run_on, True)))
    return replace(tuning, plans=tuple(trials.changes))


def draw(self: "Program", file: str | PathLike[str], *, dark: bool = False, measure: bool = True) -> None:
    """Draw a program's graph by lanes, and its nodes over time.

    The time axis is below the graph, and shows when the nodes really ran.

    Parameters
    ----------
    file : str or path
        File for the picture. Its ending chooses matplotlib's format (.png, .svg, .pdf).
    dark : bool
        Whether the picture is for a dark page.
    measure : bool
        Replay the program to measure when its nodes run, as `tune` does, with the same restoring and the same errors. Without the
        measurement there is only the graph. All its calls have equal length if their times were not measured before.

    Raises
    ------
    PackageMissingError
        If matplotlib is not installed.
    ArgumentError
        For a file that cannot be written, and for a program that was not recorded on several lanes.
    """
    measure, dark = flag(f"{self._name}: draw: measure", measure), flag(f"{self._name}: draw: dark", dark)
    drawing.check(self._name, file)
    drawing.draw(self.explain(measure=measure), file, dark=dark)


def _measured(self: "Program") -> list[float]:
    self._status.check()
    _check_place(self)
    return self._use("timed", lambda: _rig(self, LanesRig.measure))


def _check_place(self: "Program") -> None:
    for inside, where in ((thread.recording, "a recording"), (thread.region, "a branch or a task")):
        if inside is not None:
            raise CaptureError(f"{self._name} cannot be measured or tuned inside {where}: do that outside")


def _rig(self: "Program", act: Callable[[LanesRig], T]) -> T:
    """Run a timing on the current stream, in the program's turn.

    Return the value of the timing.
    """
    recording = self._recording
    if recording is None:
        self._refuse()
    if recording.lanes is not None and not recording.lanes.exact:
        raise ArgumentError(
            f"{self._name} cannot be measured or tuned: this driver cannot choose a node's dependencies, so it has a single lane"
        )
    if recording.schedule is None or recording.lanes is None or recording.lanes.limit == 1:
        how = "without lanes, and" if recording.lanes is None else "on one lane alone, and so"
        raise ArgumentError(
            f"{self._name} was recorded {how} cannot be measured or tuned: record it with several, as in record(function, "
            f"..., lanes=8), and its calls are ordered by their data. draw(measure=False) draws it as it was recorded"
        )
    outside = Outside(recording, self._name, self._inputs)
    return replayed(self, lambda pointer: act(LanesRig(recording, self._name, pointer, outside)))
