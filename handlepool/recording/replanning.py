"""Choose plans inside a program by the time of whole replays.

A node may take longer inside a program than alone, because other nodes run beside it. So plans are compared by trials. A trial
makes a few changes (other plans or forms of operations), and records the program's call again. Replays of this recording and of
the best recording so far are timed in turns.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from time import monotonic
from typing import TYPE_CHECKING, Any

from handlepool._util.cleanup import do_all, take_each
from handlepool.graphs.tuning import Alternative, alternatives
from handlepool.pool.stream import resolve
from handlepool.recording.first_call import Take
from handlepool.recording.outside import Outside
from handlepool.recording.tuning import A_SAMPLE, MOST_REPLAYS, LanesRig, PlanChange, clock, device
from handlepool.recording.update import Inputs

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

AT_ONCE = 4
"""The maximum number of changes in one trial."""
SAMPLES = 15
"""The number of samples of each recording in a trial."""
LEAST_GAIN = 0.002
"""The share of a replay's time that counts as noise.

A smaller gain is ignored.
"""
SHARE_ALONE = 0.5
"""The share of the tuning's time for timing plans alone.

The rest of the time is for trials in the program.
"""


class Trials:
    """Try other plans and forms in new recordings of a program's call.

    The object is made and used while the program refuses all other uses, with the program's device current.

    Parameters
    ----------
    recording : Recording
        The program's own recording.
    name : str
        The program's name.
    inputs : Inputs
    again : callable
        ``again(home, finish, counted=)`` records the call again: see `handlepool.recording.record`.
    pointer : int
        Pointer of the current stream.
    lanes : int
        Number of lanes of each recording.
    goal : {"clock", "device"}

    Attributes
    ----------
    changes : list of PlanChange
        The trials so far.
    """

    def __init__(
        self,
        recording: "Recording",
        name: str,
        inputs: Inputs,
        again: Callable[..., Take],
        pointer: int,
        lanes: int,
        goal: str,
    ) -> None:
        self.changes: list[PlanChange] = []
        self._pool = recording.pool
        self._driver = recording.pool.driver
        self._own = recording
        self._name, self._inputs, self._again = name, inputs, again
        self._pointer, self._lanes, self._goal = pointer, lanes, goal
        self._events: list[Any] = []
        # These are the changes of the present trial, until it is decided.
        self._made: list[Alternative] = []

    def run(self, until: float, show: Callable[[str | None], None]) -> Take | None:
        """Try changes until a time; return the best new recording, or None.

        ``until`` is the time by `time.monotonic`. Changes that made replays quicker stay in force. If no change did so, return
        None. If an error occurs, all changes are undone, and the recordings of the trials are destroyed.
        """
        outside = Outside(self._own, self._name, self._inputs)
        best: Take | None = None
        kept: list[Alternative] = []
        outside.save()
        try:
            for _ in range(2):
                with self._driver.relaxed():
                    self._events.append(self._driver.create_event(timing=True))
            for batch in self._batches(until, show):
                show(f"trying {len(batch)} other plans in the program")
                take, before, after, better = self._trial(batch, self._own if best is None else best.recording)
                titles = tuple(f"{each.name}: {each.title}" for each in batch)
                self.changes.append(PlanChange(titles, before, after, better))
                loser: Take | None = take
                if better:
                    kept += self._made
                    self._made = []
                    best, loser = take, best
                else:
                    self._undo()
                if loser is not None:
                    loser.end()
            return best
        except BaseException:
            self._made = kept + self._made
            self._undo()
            if best is not None:
                best.end()
            raise
        finally:
            if not self._pool.status.untouchable:
                wait = partial(self._driver.synchronize_stream, self._pointer)
                destroy = self._pool.device(self._own.device).scratch.destroy_event
                with self._driver.relaxed():
                    do_all([outside.restore, wait, *(partial(destroy, event) for event in take_each(self._events))])

    def _batches(self, until: float, show: Callable[[str | None], None]) -> Iterator[list[Alternative]]:
        """Yield batches of changes: first several together, then each alone.

        If a batch made replays quicker, its changes are not tried one by one.
        """
        counted = self._taken(counted=True)
        launched = counted.launched
        counted.end()
        alone = SHARE_ALONE * max(0.0, until - monotonic())
        left = alternatives(self._pool, f"{self._name}: tune(plans=True)", launched, self._pointer, alone, show)
        while left:
            batch: list[Alternative] = []
            for each in left:
                if len(batch) < AT_ONCE and all(each.place != other.place for other in batch):
                    batch.append(each)
            left = [each for each in left if each not in batch]
            singles = [[each] for each in batch] if len(batch) > 1 else []
            for some in (batch, *singles):
                if monotonic() > until:
                    return
                yield some
                if self.changes[-1].kept:
                    # Further changes of the same operations are dropped, because they would replace a plan that won its trial.
                    places = {each.place for each in some}
                    left = [each for each in left if each.place not in places]
                    if some is batch:
                        break

    def _taken(self, *, counted: bool = False) -> Take:
        """Record the call again on the program's lanes."""
        take: Take = self._again(resolve(self._driver), lambda take: take, counted=counted)
        return take

    def _trial(self, batch: list[Alternative], against: "Recording") -> tuple[Take, float, float, bool]:
        """Record with the changes in ``batch``; time it against ``against``.

        Return the new recording, the median times of a replay without and with the changes, and whether the changes helped.
        """
        for each in batch:
            # The change is noted before it is made, so that `run` undoes it even if an interrupt comes in between.
            self._made.append(each)
            each.make()
        take = self._taken()
        try:
            rig = LanesRig(take.recording, self._name, self._pointer, Outside(take.recording, self._name, self._inputs))
            rig.arrange(self._lanes)
            before, after = self._samples(against, take.recording)
        except BaseException:
            try:
                with self._driver.relaxed():
                    self._driver.synchronize_stream(self._pointer)
            finally:
                take.end()
            raise
        gains = [one - other for one, other in zip(before, after, strict=True)]
        # The changes helped if three quarters of the pairs of samples are quicker with them, and if the median gain is more than
        # noise.
        better = quantiles(gains)[0] > 0 and median(gains) > LEAST_GAIN * median(before)
        return take, median(before), median(after), better

    def _samples(self, *recordings: "Recording") -> list[list[float]]:
        graphs = [recording.graph for recording in recordings]
        found: list[list[float]] = [[] for _ in graphs]
        with self._driver.relaxed():
            replays = 1
            for number in range(-2, SAMPLES):
                for graph, samples in zip(graphs, found, strict=True):
                    assert graph is not None
                    if self._goal == "clock":
                        took = clock(self._driver, graph, self._pointer, replays)
                    else:
                        took = device(self._driver, graph, self._pointer, self._events, replays)
                    # The two rounds with negative numbers warm up. The second of them decides the number of replays in a sample.
                    if number >= 0:
                        samples.append(took)
                if number == -1:
                    replays = max(1, min(MOST_REPLAYS, int(A_SAMPLE / max(took, 1.0))))
        return found

    def _undo(self) -> None:
        while self._made:
            self._made.pop().undo()
