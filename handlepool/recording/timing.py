"""Explain, measure, tune and draw a program.

The class `Program` in `handlepool.recording.program` has these functions as methods.
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
    """Return a report on the program.

    The report has the nodes, edges, lanes and memory, and the calls that all later calls had to wait for.

    Parameters
    ----------
    measure : bool
        Whether to measure the times of the nodes. For this, the program is replayed, as in `tune`.

    Returns
    -------
    Explanation
        A report that can be printed. Its ``to_dict()`` returns a dictionary, and its ``to_dot()`` returns text for Graphviz.

    Raises
    ------
    PoolClosedError
        If the program was closed.
    ArgumentError, CaptureError, MemoryError, OwnershipError
        With ``measure``, as in `tune`.
    """
    ends = tuple(_measured(self)) if flag(f"{self._name}: explain: measure", measure) else ()
    # The lock prevents another thread from destroying the graph that is read here.
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

    For each number of lanes, another schedule of the same recording is timed. The schedules depend on the times of the nodes,
    which are measured first. Without ``plans`` the function is not called again, and arrays that the program returned stay valid.
    The measurement replays the program on the current stream, and waits for the GPU. Afterwards the outputs hold the values of
    the last replay. If the function changes its own inputs, these values differ from the former values; then replay the program
    again. Replays may write memory outside the program. This memory is saved before the measurement, and restored after it.
    Writes of plain code are unknown, so all arguments of the function are saved. Arrays that plain code writes elsewhere, such as
    globals, are not restored. Uses of the program by other threads wait until the measurement has ended. On the host driver the
    times are NumPy's, and do not apply to a GPU.

    If the pool has a plan directory, the result is kept there. For the same recording and arguments, on a device of the same
    kind, a later `tune` takes the result from the directory, and replays nothing.

    Parameters
    ----------
    lanes : iterable of int
        The numbers of lanes to try, each from 1 to 32. They may be above the number that `record` was given. The smallest number
        whose time is within 1 % of the best time is taken. But if 1 is among ``lanes``, a single lane is taken unless another
        number is quicker by 3 %.
    goal : {"clock", "device"}
        The time to compare: ``"clock"`` is the host's time from a replay's launch to its end, ``"device"`` is the device's time
        of a replay in a row of replays.
    seconds : float
        The time after which no more samples are taken. Each number of lanes gets at least three samples.
    anew : bool
        Whether to measure even if the plan directory has a result.
    plans : bool
        Whether to choose also plans and forms of the operations that take the most time, by the time of whole replays. For
        each trial, a few plans or forms are changed, and the function is called and recorded again. A change stays if it makes
        replays quicker by more than the noise. Trials go on until ``seconds`` have passed. Later calls of the operations use the
        changes that stay. If any change stays, ``outputs`` are new arrays, and arrays that the program returned earlier keep
        their last values. During the trials, other uses of the program are refused.

    Returns
    -------
    LanesTuning
        The trials and the result, which can be printed as a table. On a terminal, the progress is shown.

    Raises
    ------
    ArgumentError
        If the program was recorded without lanes, or with a single lane. If replays write memory that cannot be restored; the
        message names the array or the call. If an argument is invalid.
    CaptureError
        If `tune` is called inside a recording, a branch or a task, or while the current stream is being captured. If the graph
        cannot be copied.
    MemoryError
        If there is no memory for graphs or for saved arrays.
    OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`.
    DriverNotAvailableError, StateBusyError
        With ``plans``, as in `handlepool.tune`. With ``plans``, errors of the function and of `record` may also occur. After such
        an error, the plans and the recording are as before.
    """
    self._status.check()
    asked = checked(self._name, lanes, goal, seconds)
    anew, plans = flag(f"{self._name}: tune: anew", anew), flag(f"{self._name}: tune: plans", plans)
    _check_place(self)
    if plans:
        return _tune_plans(self, asked, anew)
    return self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(*asked, self._run_on, anew)))


def _tune_plans(self: "Program", asked: tuple[tuple[int, ...], str, float], anew: bool) -> LanesTuning:
    """Tune the number of lanes, then the plans for this number.

    If a plan changed, the number of lanes is tuned again.
    """
    counts, goal, seconds = asked
    until = monotonic() + seconds
    if self._again is None:
        raise ArgumentError(
            f"{self._name} was not made by record with several lanes, so its plans cannot be tuned; use record(f, ..., lanes=8)"
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
        # If another thread has closed the program since the trials, the program does not take the new recording.
        except BaseException:
            if self._recording is not best.recording:
                best.end()
            raise
        tuning = self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(counts, goal, seconds / 4, self._run_on, True)))
    return replace(tuning, plans=tuple(trials.changes))


def draw(self: "Program", file: str | PathLike[str], *, dark: bool = False, measure: bool = True) -> None:
    """Draw a program's graph by lanes, and its nodes over time.

    The upper panel of the picture shows the graph. The lower panel shows when each node ran in a replay.

    Parameters
    ----------
    file : str or path
        The file for the picture. Its ending selects the format of matplotlib (.png, .svg, .pdf).
    dark : bool
        Whether the picture is for a dark page.
    measure : bool
        Whether to replay the program in order to measure when its nodes run. As in `tune`, memory that the replays write is
        restored, and the same errors are raised. Without the measurement, the picture has only the upper panel. If the times of
        the calls were not measured before, all calls are drawn with the same length.

    Raises
    ------
    PackageMissingError
        If matplotlib is not installed.
    ArgumentError
        If the file cannot be written. If the program was recorded without lanes, or, with ``measure``, with a single lane.
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
            raise CaptureError(f"{self._name} cannot be measured or tuned inside {where}: measure or tune it outside of {where}")


def _rig(self: "Program", act: Callable[[LanesRig], T]) -> T:
    """Call ``act`` with a timing rig, and return its value.

    The caller has the program's turn. Replays run on the current stream.
    """
    recording = self._recording
    if recording is None:
        self._refuse()
    if recording.lanes is not None and not recording.lanes.exact:
        raise ArgumentError(
            f"{self._name} cannot be measured or tuned: this driver cannot choose a node's dependencies, so the program has a "
            "single lane"
        )
    if recording.schedule is None or recording.lanes is None or recording.lanes.limit == 1:
        how = "without lanes" if recording.lanes is None else "with lanes=1"
        raise ArgumentError(
            f"{self._name} was recorded {how}, so it cannot be measured or tuned: record it with several lanes, as in "
            f"record(function, ..., lanes=8). draw(measure=False) draws a program without measuring it"
        )
    outside = Outside(recording, self._name, self._inputs)
    return replayed(self, lambda pointer: act(LanesRig(recording, self._name, pointer, outside)))
