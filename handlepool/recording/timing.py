"""The explanation, measurement and drawing of a program. `handlepool.recording.program` has its use."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from handlepool._util.arguments import flag
from handlepool.errors import ArgumentError, CaptureError
from handlepool.pool.context import thread
from handlepool.recording import drawing
from handlepool.recording.explain import Explanation
from handlepool.recording.outside import Outside
from handlepool.recording.tuning import LanesRig, LanesTuning, checked

if TYPE_CHECKING:
    from handlepool.recording.program import Program

T = TypeVar("T")


def explain(self: "Program", *, measure: bool = False) -> Explanation:
    """Return how it was recorded: nodes, edges, lanes, memory, and which calls stood in the way.

    Parameters
    ----------
    measure : bool
        Measure the nodes' times, which `tune` does as well. The program is replayed for that, as there.

    Returns
    -------
    Explanation
        It can be printed, and has ``to_dict()`` and, for Graphviz, ``to_dot()``.

    Raises
    ------
    PoolClosedError
        After the program was closed.
    ArgumentError, CaptureError, MemoryError, OwnershipError
        With ``measure``, as in `tune`.
    """
    ends = tuple(_measured(self)) if flag(f"{self._name}: explain: measure", measure) else ()
    with self._lock:  # or another thread could end the graph that is asked
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
    self: "Program", lanes: Iterable[int] = (1, 2, 4, 8, 16), *, goal: str = "clock", seconds: float = 10.0, anew: bool = False
) -> LanesTuning:
    """Measure on how many lanes it runs best, and run it on so many from now on.

    Other lanes are another schedule of the same recording, by the times of its nodes, which are measured first: the
    function is not called again, and arrays that were handed out stay valid. The program is replayed for that, on the
    current stream, and this waits for the GPU. So outputs hold what the last of these replays gave, which is another thing
    where the function changes what it reads: replay it again. What replays write outside of the program's own memory is
    saved before, and restored. Of plain code, whose writes nobody sees, that is all that the function was given: what it
    writes elsewhere (globals) is changed. Other threads' uses of the program wait. On the host driver the times are
    NumPy's, and say nothing of a GPU.

    A pool with a plan directory keeps there what was found. For the same recording, with the same arguments and on such a
    device, it is taken from there, and nothing is replayed.

    Parameters
    ----------
    lanes : iterable of int
        Each 1 to 32, also above the number that `record` was given. Of those that are within 1 % of the best, the fewest are
        taken; and if 1 is among them, one lane stays unless another number wins by 3 %.
    goal : {"clock", "device"}
        What counts: the time that the host sees from a replay's launch to its end, or that of replays in a row on the device.
    seconds : float
        After which no more samples are taken; there are three of each at least.
    anew : bool
        Measure, whatever the plan directory has.

    Returns
    -------
    LanesTuning
        What was tried, which can be printed as a table. On a terminal progress is shown meanwhile.

    Raises
    ------
    ArgumentError
        For a program that was recorded without lanes, or with one; for what replays write and nobody can restore, by its
        place or the call's; for other arguments than these.
    CaptureError
        Inside a recording, a branch or a task; while the current stream is being captured; for a graph that cannot be copied.
    MemoryError
        For want of memory for graphs, or for what is saved.
    OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`.
    """
    self._status.check()
    asked = checked(self._name, lanes, goal, seconds)
    anew = flag(f"{self._name}: tune: anew", anew)
    _check_place(self)
    return self._use("tuned", lambda: _rig(self, lambda rig: rig.tune(*asked, self._run_on, anew)))


def draw(self: "Program", file: str | PathLike[str], *, dark: bool = False, measure: bool = True) -> None:
    """Draw its graph by lanes and, below that, its nodes on a time axis as they really ran.

    Parameters
    ----------
    file : str or path
        Where the picture goes; its ending says of which kind it is, as matplotlib has it (.png, .svg, .pdf).
    dark : bool
        For a dark page.
    measure : bool
        Replay the program to see when its nodes run, as `tune` does, with the same care and the same errors. Without that
        there is the graph alone, with all calls as long as each other where their times were not measured before.

    Raises
    ------
    PackageMissingError
        Where matplotlib is not installed.
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
    """Have something timed on the current stream, in the program's turn; what that returns."""
    recording = self._recording
    if recording is None:
        self._refuse()
    if recording.lanes is not None and not recording.lanes.exact:
        raise ArgumentError(
            f"{self._name} cannot be measured or tuned: the driver gives one lane, since it cannot put a node behind others "
            f"by choice"
        )
    if recording.schedule is None or recording.lanes is None or recording.lanes.limit == 1:
        how = "without lanes, and" if recording.lanes is None else "on one lane alone, and so"
        raise ArgumentError(
            f"{self._name} was recorded {how} cannot be measured or tuned: record it with several, as in record(function, "
            f"..., lanes=8), and its calls are ordered by their data. draw(measure=False) draws it as it was recorded"
        )
    outside = Outside(recording, self._name, self._inputs)
    return self._replayed(lambda pointer: act(LanesRig(recording, self._name, pointer, outside)))
