"""Tuning: which of cuDNN's candidate plans is the quickest while several states run it side by side.

The quickest plan alone need not be the quickest in company: one that spreads over the whole GPU leaves its neighbours nothing.
How plans are timed is in `handlepool.trials`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool._util.wording import shown
from handlepool.drivers.protocol import LEGACY_STREAM
from handlepool.errors import ArgumentError, CaptureError, DriverNotAvailableError, GraphNotSupportedError
from handlepool.graphs.arrays import adapt
from handlepool.graphs.plan import Plan
from handlepool.graphs.trials import Candidate, Stand, side_slots
from handlepool.pool.context import thread
from handlepool.pool.default import current_pool
from handlepool.pool.pool import HandlePool
from handlepool.pool.status import diagnose
from handlepool.pool.stream import check_foreign, resolve
from handlepool.regions.states import ParallelStates
from handlepool.regions.stream_order import order


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `GraphFunction.tune` tried and found; as text a table, the quickest first.

    Attributes
    ----------
    name : str
        Of the graph function.
    states : int
        How many ran side by side; 1 where there was no company.
    candidates : tuple of Candidate
        Every plan that was proposed, in cuDNN's order: ``index``, ``engine``, ``workspace_size`` (bytes), ``alone`` and
        ``company`` (microseconds, or None), and ``skipped``, why it was not timed.
    winner : Candidate
        The plan that these arguments get from now on.
    previous : Candidate or None
        The plan that they got before, where it is among the candidates.
    """

    name: str
    states: int
    candidates: tuple[Candidate, ...]
    winner: Candidate
    previous: Candidate | None

    def __str__(self) -> str:
        timed = sorted((each for each in self.candidates if not each.skipped), key=lambda each: each.time)
        company = "" if self.winner.company is None else f", and {self.states} states side by side"
        lines = [
            f"{self.name}: {len(timed)} of {len(self.candidates)} plans timed alone{company}; microseconds, bytes of scratch"
        ]
        lines.append(f"{'plan':>5}{'alone':>11}{'company':>11}{'scratch':>15}  engine")
        for each in timed:
            times = "".join(f"{'' if time is None else format(time, ',.2f'):>11}" for time in (each.alone, each.company))
            notes = "".join(
                f", {note}" for note, which in (("chosen", self.winner), ("used before", self.previous)) if which is each
            )
            lines.append(f"{each.index:>5}{times}{each.workspace_size:>15,}  {each.engine}{notes}")
        return "\n".join([*lines, *(f"{each.index:>5}  {each.skipped}" for each in self.candidates if each.skipped)])


def tune(name: str, arrays: tuple[Any, ...], states: ParallelStates | None, find: Callable[[HandlePool], Plan]) -> Tuning:
    """Time the candidates of the plan that ``find`` gives for these arrays, and make the quickest the one to use.

    See `GraphFunction.tune`.
    """
    if states is not None and not isinstance(states, ParallelStates):
        raise ArgumentError(f"{name}.tune with states={shown(states)}: pass a ParallelStates, or None for one stream alone")
    pool = current_pool() if states is None else states.pool
    pool._check_usable()
    driver = pool.driver
    pointer = _check(pool, name)
    try:
        with driver.relaxed():
            plan = find(pool)
            adapted = adapt(name, pool, arrays)
            if adapted is not None:
                arrays = adapted.arrays
                for caller in adapted.callers:
                    order(pool, adapted.device, caller, pointer)
            with side_slots(pool, name, 1 if states is None else states.count) as slots:
                operands = [_operands(pool, plan, arrays) for _ in slots]
                driver.synchronize_stream(pointer)  # the copies are there
                stand = Stand(pool, slots, operands, company=states is not None)
                try:
                    candidates = tuple(stand.time(plan))
                finally:
                    stand.close()
    except Exception as error:
        diagnose(pool, error)
        raise
    winner = min(candidates, key=lambda each: each.time)
    if winner.skipped:
        reasons = "; ".join(f"plan {each.index}: {each.skipped}" for each in candidates[:3])
        raise GraphNotSupportedError(f"{name}: none of {len(candidates)} plans could be timed: {reasons}")
    plan.select(winner.index)
    previous = next((each for each in candidates if each.engine == plan.engine), None)
    return Tuning(name, 1 if states is None else states.count, candidates, winner, previous)


def _check(pool: HandlePool, name: str) -> int:
    """What can be said before anything is done; the caller's stream."""
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


def _operands(pool: HandlePool, plan: Plan, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """What one state launches with: copies of the arrays, and outputs. Other libraries' arrays are read where they are."""
    driver = pool.driver
    operands = []
    for array in arrays:
        if isinstance(array, driver.array_type):
            given: Any = array
            array = driver.empty(given.shape, given.strides, given.dtype)
            driver.copy(array, given)
        operands.append(array)
    return (*operands, *(driver.empty(layout.shape, layout.strides, layout.dtype) for layout in plan.outputs))
