"""Find the quickest of cuDNN's candidate plans.

Several states can run a plan side by side. The plan that is quickest alone need not be quickest side by side, because a plan
that spreads over the whole GPU leaves no room for the other states.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import itemgetter
from time import monotonic
from typing import Any, cast

import numpy as np

from handlepool._util.arguments import at_least
from handlepool._util.names import shown
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import (
    ArgumentError,
    CaptureError,
    DriverNotAvailableError,
    GraphNotSupportedError,
)
from handlepool.graphs.arrays import convert
from handlepool.graphs.choices import Site
from handlepool.graphs.plan import Plan
from handlepool.graphs.timing import FAR_BEHIND, PlanCandidate, SideStates, TimingRig, side_slots
from handlepool.order.stream_order import order
from handlepool.pool.context import thread
from handlepool.pool.default import current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.pool.stream import check_foreign, resolve
from handlepool.tensors.layout import Layout

MOST_VALUES = 1 << 16
"""The maximum number of random values for an operand.

Larger operands repeat these values along their longest axes.
"""
MOST_CANDIDATES = 10
"""The maximum number of candidates that are timed for a plan."""
MOST_TIME = 0.9
"""The share of the total time that the tuned plans take together.

The plans that take the largest shares are tuned.
"""
MOST_OTHERS = 2
"""The maximum number of a plan's candidates that become alternatives."""
NEARLY = 1.1
"""The maximum time of an alternative, relative to the used plan's time.

Both plans are timed alone. An alternative that is a little slower alone may still be quicker in a program.
"""
MOST_OF_FORMS = 4
"""The maximum number of candidates that are timed for another form."""
GAIN = 1.03
"""The minimum ratio of the used plan's time to the quickest time.

A smaller ratio is no reason to replace the used plan.
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `GraphFunction.tune`.

    Its text is a table, with the quickest plan first.

    Attributes
    ----------
    name : str
        Name of the graph function.
    states : int
        Number of states that ran side by side. 1 if one stream was timed alone.
    candidates : tuple of PlanCandidate
        Every proposed plan, in cuDNN's order: ``index``, ``engine``, ``workspace_size`` (bytes), ``alone`` and ``concurrent``
        (microseconds, or None), and ``skipped``, the reason that the plan was not timed.
    winner : PlanCandidate
        The plan for these arguments from now on.
    previous : PlanCandidate or None
        The plan for these arguments before, if that plan is among the candidates. It stays the winner unless another plan is
        quicker by 3 %.
    seconds, building : float
        Total time in seconds, and the part of it that built plans.
    inputs : tuple of Layout
        Shape, strides and type of the arrays in the tuning.
    form : str
        The form of the operation from now on, if the plan is part of an operation with several forms.
    forms : tuple of (str, float)
        Each form that was timed, with the total time of its launches in microseconds. Every launch uses its quickest plan.
    """

    name: str
    states: int
    candidates: tuple[PlanCandidate, ...]
    winner: PlanCandidate
    previous: PlanCandidate | None
    seconds: float = 0.0
    building: float = 0.0
    inputs: tuple[Layout, ...] = ()
    form: str = ""
    forms: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        timed = sorted((each for each in self.candidates if not each.skipped), key=lambda each: each.time)
        together = "" if self.winner.concurrent is None else f", and {self.states} states side by side"
        lines = [
            f"{self.name}: {len(timed)} of {len(self.candidates)} plans timed alone{together}; times in microseconds, "
            f"scratch in bytes"
        ]
        lines.append(f"{'plan':>5}{'alone':>11}{'concurrent':>11}{'scratch':>15}  engine")
        for each in timed:
            times = "".join(f"{'' if time is None else format(time, ',.2f'):>11}" for time in (each.alone, each.concurrent))
            notes = "".join(
                f", {note}" for note, which in (("chosen", self.winner), ("used before", self.previous)) if which is each
            )
            lines.append(f"{each.index:>5}{times}{each.workspace_size:>15,}  {each.engine}{notes}")
        lines += [f"{each.index:>5}  {each.skipped}" for each in self.candidates if each.skipped]
        lines += [f"{time:>16,.2f}  {form}{', chosen' * (form == self.form)}" for form, time in self.forms]
        return "\n".join(lines)


def tune(
    function: Callable[..., Any],
    /,
    *args: object,
    states: SideStates | None = None,
    candidates: int | None = MOST_CANDIDATES,
    **kwargs: object,
) -> tuple[Tuning, ...]:
    """Call a function once, and tune every plan that the call used.

    The function may be a network with convolutions, for example. Each plan is tuned as by `GraphFunction.tune`, but over
    random arrays. The result holds for all calls with the same shapes, strides, types and options. Only the call of the
    function reads the arrays among ``args``. If a convolution or product has a bias, a residual or an activation, other forms
    are timed as well: a plan with fewer of these parts followed by a kernel, and a plan with the residual before the bias. The
    quickest form is used from then on. With ``states``, other forms are not timed, and the form stays.

    Parameters
    ----------
    function : callable
        A function that calls graph functions, `conv2d` and the like, on the current device. The tuning does not see replays of
        programs.
    *args
        Positional arguments of the function.
    states : ParallelStates, optional
        The states that run each plan side by side. Only plans of the pool that owns the states are tuned, so the function has to
        use that pool. Without states, plans of the current pool are timed on one stream alone.
    candidates : int or None
        The maximum number of candidates to try for each plan, in the order in which cuDNN ranks them. None tries all candidates.
        If the plan in use comes later in that order, candidates are tried until the plan in use was tried.
    **kwargs
        Keyword arguments of the function.

    Returns
    -------
    tuple of Tuning
        A result for each plan that has alternatives, in the order of their last use. `Tuning.inputs` identifies the plan's
        arrays. The result includes plans that other threads use on the same pool meanwhile.

    Raises
    ------
    DriverNotAvailableError, CaptureError, StateBusyError, GraphNotSupportedError
        As in `GraphFunction.tune`. Plans that were tuned before an error stay tuned.
    Exception
        Any exception of the function. Then no plan was tuned.

    Examples
    --------
    >>> tunings = handlepool.tune(network, x)                                                            # doctest: +SKIP
    """
    most = candidates if candidates is None else at_least(1, "tune: candidates", candidates)
    if not callable(function):
        raise ArgumentError(f"tune takes a function, not {shown(function)}")
    pool, pointer = _pool_of("handlepool", states)
    # Note the time of the plan cache before the call. Every plan that the cache uses after this time is tuned.
    watched = pool.plans.watch()
    function(*args, **kwargs)
    found = []
    try:
        with pool.driver.relaxed(), side_slots(pool, "handlepool.tune", 1 if states is None else states.count) as slots:
            used = pool.plans.used_since(pool.driver.current_device(), watched)
            for plan in cast("list[Plan]", used):
                if plan.candidates > 1:
                    operands = [_random_operands(pool, plan.inputs, plan.outputs) for _ in slots]
                    tuning = _tuned(pool, plan, slots, operands, states is not None, pointer, monotonic(), most)
                    found.append(tuning if states is not None else _with_forms(pool, plan, tuning, slots, pointer))
    except Exception as error:
        pool.status.diagnose(error)
        raise
    return tuple(found)


def check_gpu(driver: Driver, what: str) -> None:
    """Refuse to time plans on a driver without a GPU.

    Raises
    ------
    DriverNotAvailableError
    """
    if driver.name == "host":
        raise DriverNotAvailableError(
            f"{what} times plans on a GPU, and the host driver has one plan for each graph and no times of a GPU. Use "
            f"{what} with the cuda driver"
        )


def tune_heaviest(
    pool: PoolInternals,
    what: str,
    launched: Sequence[tuple[Plan, int]],
    pointer: int,
    seconds: float,
    show: Callable[[str], object],
) -> tuple[Tuning, ...]:
    """Tune the plans that take the largest shares of time, largest first.

    No other launch runs beside a timed launch. A plan that cannot be timed stays unchanged. The caller must check that
    there is a GPU, and that no capture is active.

    Parameters
    ----------
    pool : PoolInternals
    what : str
        Name of the caller, for messages.
    launched : sequence of (Plan, int)
        Plans, each with its number of launches.
    pointer : int
        Pointer of the current stream.
    seconds : float
        Time in seconds after which no more plans are tried.
    show : callable
        Gets texts that report the progress.

    Raises
    ------
    StateBusyError
        If no side stream is free.
    """
    until = monotonic() + seconds
    found: list[Tuning] = []

    def tune_one(plan: Plan, _: int, slots: list[Slot]) -> None:
        operands = [_random_operands(pool, plan.inputs, plan.outputs)]
        tuning = _tuned(pool, plan, slots, operands, False, pointer, monotonic(), MOST_CANDIDATES, until)
        found.append(_with_forms(pool, plan, tuning, slots, pointer, until))

    _time_each(pool, what, launched, pointer, until, show, tune_one)
    return tuple(found)


def _time_each(
    pool: PoolInternals,
    what: str,
    launched: Sequence[tuple[Plan, int]],
    pointer: int,
    until: float,
    show: Callable[[str], object],
    act: Callable[[Plan, int, list[Slot]], object],
) -> None:
    """Call ``act`` for each of the heaviest plans.

    The arguments of ``act`` are the plan, the number of its launches, and the slots for its timing. If a plan cannot be timed, it
    stays in use, and the other plans are still timed.
    """
    try:
        with pool.driver.relaxed(), side_slots(pool, what, 1) as slots:
            for count, plan in _heaviest(pool, launched, slots, pointer, until, show):
                show(f"other plans of {plan.name} are timed")
                with suppress(GraphNotSupportedError, MemoryError):
                    act(plan, count, slots)
    except Exception as error:
        pool.status.diagnose(error)
        raise


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan, or another form, for an operation.

    Attributes
    ----------
    name : str
        Name of the operation.
    title : str
        Text for the plan or the form.
    place : int
        A number that is equal for alternatives that exclude each other.
    gain : float
        Microseconds that the alternative saves over all launches of the operation, if each launch runs alone. It may be negative.
    make, undo : callable
        ``make`` uses the alternative for all later calls. ``undo`` returns to the former plan and form.
    """

    name: str
    title: str
    place: int
    gain: float
    make: Callable[[], None]
    undo: Callable[[], None]


def alternatives(
    pool: PoolInternals,
    what: str,
    launched: Sequence[tuple[Plan, int]],
    pointer: int,
    seconds: float,
    show: Callable[[str], object],
) -> list[Alternative]:
    """Return the promising alternatives of the heaviest plans, the largest gain first.

    Calls keep their present plans and forms. Parameters and errors are the same as in `tune_heaviest`.
    """
    until = monotonic() + seconds
    found: list[Alternative] = []

    def note(plan: Plan, count: int, slots: list[Slot]) -> None:
        found.extend(_alternatives_of(pool, plan, count, slots, pointer, until))

    _time_each(pool, what, launched, pointer, until, show, note)
    return sorted(found, key=lambda each: each.gain, reverse=True)


def _alternatives_of(
    pool: PoolInternals, plan: Plan, count: int, slots: list[Slot], pointer: int, until: float
) -> list[Alternative]:
    operands = [_random_operands(pool, plan.inputs, plan.outputs)]
    candidates, plans = _timed(pool, plan, slots, operands, False, pointer, MOST_CANDIDATES, until)[:2]
    used = next((each for each in candidates if each.engine == plan.engine and not each.skipped), None)
    if used is None:
        return []
    others = sorted((each for each in candidates if not each.skipped and each is not used), key=lambda each: each.time)
    found = [
        Alternative(
            plan.name,
            f"plan {each.index}, {each.engine}",
            id(plan),
            count * (used.time - each.time),
            plans[each.index].keep,
            plan.keep,
        )
        for each in others[:MOST_OTHERS]
        if each.time <= NEARLY * used.time
    ]
    site: Site | None = pool.plans.sites.get(id(plan))
    if site is None:
        return found
    times, form = form_times(pool, site, used.time, slots, pointer, until), site.form
    for other, time in times.items():
        if other != form and form in times and time <= NEARLY * times[form]:
            gain, undo = count * (times[form] - time), partial(site.choose, form)
            found.append(Alternative(plan.name, site.title(other), id(plan), gain, partial(site.choose, other), undo))
    return found


def _heaviest(
    pool: PoolInternals,
    launched: Sequence[tuple[Plan, int]],
    slots: list[Slot],
    pointer: int,
    until: float,
    show: Callable[[str], object],
) -> Iterator[tuple[int, Plan]]:
    """Yield the plans that take the largest shares of time, largest first.

    Together the plans take `MOST_TIME` of the total time. A plan with a single candidate is left out. Each plan comes after its
    number of launches.
    """
    show(f"{len(launched)} plans are timed")
    weights = [(count * _estimated(pool, plan, slots, pointer), count, plan) for plan, count in launched if monotonic() < until]
    left = sum(weight for weight, *_ in weights)
    enough = (1 - MOST_TIME) * left
    for weight, count, plan in sorted(weights, key=itemgetter(0), reverse=True):
        # The remaining plans take so small a share of the time that tuning is not worth it, or the time limit has passed.
        if left <= enough or monotonic() > until:
            break
        left -= weight
        if plan.candidates > 1:
            yield count, plan


def _estimated(pool: PoolInternals, plan: Plan, slots: list[Slot], pointer: int) -> float:
    with suppress(MemoryError):
        operands = [_random_operands(pool, plan.inputs, plan.outputs)]
        # The side stream is not ordered after the current stream, so wait until the operands are complete.
        pool.driver.synchronize_stream(pointer)
        rig = TimingRig(pool, slots, operands, concurrent=False)
        try:
            return rig.estimate(plan)
        finally:
            rig.close()
    return 0.0


def tune_plan(name: str, arrays: tuple[Any, ...], states: SideStates | None, find: Callable[[PoolInternals], Plan]) -> Tuning:
    """Time the candidates of a plan, and choose the best candidate.

    The plan in use stays unless the gain is large enough. ``find`` returns the plan for these arrays.

    See `GraphFunction.tune`.
    """
    pool, pointer = _pool_of(name, states)
    start = monotonic()
    try:
        with pool.driver.relaxed():
            plan = find(pool)
            if not plan.candidates:
                raise ArgumentError(
                    f"{name}.tune was given an empty array, for which cuDNN plans nothing; tune with arrays that have elements"
                )
            converted = convert(name, pool, arrays)
            if converted is not None:
                arrays = converted.arrays
                # The copies below read the arrays, so the current stream waits for the arrays' streams.
                for caller in converted.callers:
                    order(pool, converted.device, caller, pointer)
            with side_slots(pool, f"{name}.tune", 1 if states is None else states.count) as slots:
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
    until: float = float("inf"),
) -> Tuning:
    candidates, plans, building = _timed(pool, plan, slots, operands, concurrent, pointer, most, until)
    winner = min(candidates, key=lambda each: each.time)
    previous = next((each for each in candidates if each.engine == plan.engine), None)
    if winner.skipped:
        reasons = "; ".join(f"plan {each.index}: {each.skipped}" for each in candidates[:3])
        raise GraphNotSupportedError(f"{plan.name}: none of {len(candidates)} plans could be timed: {reasons}")
    # A smaller gain may be noise, so the plan in use stays.
    if previous is not None and previous.time < GAIN * winner.time:
        winner = previous
    else:
        plans[winner.index].keep()
    seconds = monotonic() - start
    return Tuning(plan.name, len(slots), tuple(candidates), winner, previous, seconds, building, plan.inputs)


def _timed(
    pool: PoolInternals,
    plan: Plan,
    slots: list[Slot],
    operands: Sequence[tuple[Any, ...]],
    concurrent: bool,
    pointer: int,
    most: int | None = None,
    until: float = float("inf"),
) -> tuple[list[PlanCandidate], dict[int, Plan], float]:
    """Time the candidates of a plan.

    Return the candidates, the timed plans by index, and the seconds that the builds took.
    """
    # The side streams are not ordered after the current stream, so wait until the operands are complete.
    pool.driver.synchronize_stream(pointer)
    rig = TimingRig(pool, slots, operands, concurrent=concurrent)
    try:
        candidates, plans = rig.time(plan, most, until)
    finally:
        rig.close()
    return candidates, plans, rig.building


def _with_forms(
    pool: PoolInternals, plan: Plan, tuning: Tuning, slots: list[Slot], pointer: int, until: float = float("inf")
) -> Tuning:
    """Choose the quickest form of a plan's operation.

    The form in use stays unless the gain is at least `GAIN`. Return ``tuning`` with the times of all forms.
    """
    site: Site | None = pool.plans.sites.get(id(plan))
    if site is None:
        return tuning
    times = form_times(pool, site, tuning.winner.time, slots, pointer, until)
    if site.form not in times:
        return tuning
    best = min(times, key=lambda form: times[form])
    if times[site.form] >= GAIN * times[best]:
        site.choose(best)
    told = tuple((site.title(form), time) for form, time in sorted(times.items(), key=itemgetter(1)))
    return replace(tuning, form=site.title(site.form), forms=told)


def form_times(
    pool: PoolInternals, site: Site, tuned: float, slots: list[Slot], pointer: int, until: float
) -> dict[Hashable, float]:
    """Time the quickest plans of each form.

    Return the best time per form, in microseconds. The result lacks forms that are refused, that are far too slow, or that came
    after the time limit. Calls use the quickest plans from then on. ``tuned`` is the time of the first plan of the form in use,
    in microseconds.
    """
    found: dict[Hashable, float] = {}
    arrays = _random_operands(pool, site.inputs, site.outs)
    given, outs = arrays[: len(site.inputs)], arrays[len(site.inputs) :]

    def time(plan: Plan, operands: tuple[Any, ...], most: int) -> float:
        return _tuned(pool, plan, slots, [operands], False, pointer, monotonic(), most, until).winner.time

    for form in sorted(site.forms(), key=lambda form: form != site.form):
        if found and monotonic() > until:
            break
        # If a form cannot be prepared, go on with the other forms.
        with suppress(GraphNotSupportedError, ArgumentError, MemoryError):
            (plan, operands), *more = site.prepare(form, given, outs[0] if outs else None).launched
            behind = sum(time(each, own, 1) for each, own in more)
            first = tuned if form == site.form else time(plan, operands, 1)
            # This form is far slower than the quickest form. To build its other candidates would take long, and no candidate is
            # so much quicker.
            if found and first + behind > FAR_BEHIND * min(found.values()):
                continue
            found[form] = behind + (first if form == site.form else time(plan, operands, MOST_OF_FORMS))
    return found


def _pool_of(name: str, states: SideStates | None) -> tuple[PoolInternals, int]:
    """Return the pool to tune on, and the caller's stream pointer."""
    if states is not None and not isinstance(states, SideStates):
        raise ArgumentError(f"{name}.tune was given states={shown(states)}: pass a ParallelStates, or None for a single stream")
    pool = current_pool() if states is None else states.pool.internals
    pool.status.check()
    return pool, _check(pool, name)


def _check(pool: PoolInternals, name: str) -> int:
    """Check that a tuning may run now; return the caller's stream.

    The stream is returned as its pointer. The function only checks, and launches nothing.
    """
    driver = pool.driver
    check_gpu(driver, f"{name}.tune")
    if thread.recording is not None:
        raise CaptureError(f"{name} cannot be tuned inside a recording, where nothing runs: tune {name} before the recording")
    if thread.region is not None:
        raise CaptureError(
            f"{name} cannot be tuned inside a branch or a task, because other work runs at the same time: tune {name} elsewhere"
        )
    home = resolve(driver)
    check_foreign(driver, home)
    # The legacy stream cannot be captured, so ask CUDA only about other streams.
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(f"{name} cannot be tuned while the current stream is being captured: tune {name} before the capture")
    return home.pointer


def _operands(pool: PoolInternals, plan: Plan, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of one state: copies of the arrays, and outputs.

    Arrays of other libraries are not copied: every state reads them in place.
    """
    driver = pool.driver
    operands = []
    for array in arrays:
        if isinstance(array, driver.array_types):
            given: Any = array
            array = driver.empty(given.shape, given.strides, given.dtype)
            driver.copy(array, given)
        operands.append(array)
    return (*operands, *(driver.empty(layout.shape, layout.strides, layout.dtype) for layout in plan.outputs))


def _random_operands(pool: PoolInternals, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Any, ...]:
    """Return operands of one state: random inputs, and outputs.

    A tuning without the caller's arrays uses such operands.
    """
    driver = pool.driver
    # A fixed seed gives every state the same values.
    values = np.random.default_rng(0).standard_normal(MOST_VALUES)
    operands = []
    for layout in inputs:
        array = driver.empty(layout.shape, layout.strides, layout.dtype)
        shape = [*layout.shape]
        # An extent of 1 broadcasts in the copy, so a few values fill a large array.
        while prod(shape) > MOST_VALUES:
            shape[shape.index(max(shape))] = 1
        driver.copy(array, driver.asarray(np.resize(values, shape).astype(layout.dtype)))
        operands.append(array)
    return (*operands, *(driver.empty(layout.shape, layout.strides, layout.dtype) for layout in outputs))
