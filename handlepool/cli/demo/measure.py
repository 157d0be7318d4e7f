"""Run, check and time the demo's filters.

The module also runs a chain of two filters, and renders the results as text.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handlepool.cli.demo import network
from handlepool.cli.demo.clock import repeats_of, time
from handlepool.cli.demo.filters import Filter, chain_of
from handlepool.drivers.protocol import Driver
from handlepool.graphs.plan import Plan
from handlepool.ops import conv2d, conv2d_plan
from handlepool.pool.pool import HandlePool
from handlepool.recording.record import record
from handlepool.regions.states import ParallelStates
from handlepool.tensors.graph_types import DeviceArray
from handlepool.testing.reference import conv2d as reference_conv2d

TOLERANCE = 2e-3
CHAIN = "fork.run(g, fork.run(f, x)): its second branch reads the result of its first, and so starts after it"
DRAWN = 2048
"""The maximum number of pixels along a side of a drawn result."""
# This is the total time of all repeats, in milliseconds.
_BUDGET = 4000.0
# If the warm-up takes more than this many milliseconds, no work is repeated.
_ENDURED = 10 * _BUDGET


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Hold the result of one filter or of a chain.

    In a chain the second filter processes the result of the first filter.

    Attributes
    ----------
    name : str
        The names of the filters.
    sizes : tuple of int
        Sizes of the kernels.
    pixels : ndarray of float32, shape (height, width, 3)
        The pixels for the drawing. For a large picture, only every second, third or further pixel in each direction is kept.
    weight, absolute_weight : float
        The sum of the kernel's numbers, and the sum of their magnitudes. For a chain, each value is the product of
        the values of both kernels.
    largest, relative : float
        The largest absolute error against float64, and the norm of the error divided by the norm of the reference.
    engine : str
        cuDNN's name for the plan of the last filter.
    workspace : int
        Bytes of scratch of the plan that needs the largest scratch.
    """

    name: str
    sizes: tuple[int, ...]
    pixels: NDArray[np.float32]
    weight: float
    absolute_weight: float
    largest: float
    relative: float
    engine: str
    workspace: int

    @property
    def right(self) -> bool:
        """Tell whether the result is within the tolerance."""
        return self.relative <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Span:
    """Record when and on which lane a recorded filter ran.

    The times are in milliseconds from the beginning of the replay. ``result`` is the index of the filter's result.
    """

    name: str
    result: int
    lane: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Times:
    """Hold median times of three ways to filter, in milliseconds.

    The ways are the forked region, the same work on one stream, and one convolution for all filters of the same size. If
    ``repeats`` is 0, the times are from the warm-up.
    """

    forked: float
    single: float
    stacked: float
    stacked_convolutions: int
    repeats: int


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Hold all results of the demo.

    ``spans`` belong to a replay of the filters, which were recorded on ``states`` lanes. They are empty if the driver took
    several steps for a filter.
    """

    driver: str
    states: int
    results: tuple[Result, ...]
    spans: tuple[Span, ...]
    differing: tuple[str, ...]
    times: Times
    network: network.NetworkReport

    @property
    def wrong(self) -> list[str]:
        """Return the names of results outside the tolerance."""
        network_is = [] if self.network.right else ["the network"]
        recorded = [f"{name}, recorded" for name in self.differing]
        return [result.name for result in self.results if not result.right] + recorded + network_is

    @property
    def overlap(self) -> float:
        """Return the mean number of filters running at a time."""
        return at_a_time([(span.start, span.end) for span in self.spans])


class _Work:
    """Hold photograph and weights on the device, and convolve them."""

    def __init__(self, photograph: NDArray[np.float32], filters: Sequence[Filter], states: int, pool: HandlePool) -> None:
        self.pool = pool
        self.driver: Driver = pool.driver
        self.states = ParallelStates(states, pool=pool)
        # The scratch of all states and the caller's stream must fit on the device, beside the photograph and its results.
        free = self.driver.memory_info()[0] - (len(filters) + 1) * photograph.nbytes
        self.workspace_limit = max(free, 0) // (2 * (states + 1))
        self.x = self._channels_last(photograph[np.newaxis].transpose(0, 3, 1, 2))
        self.weights = [self._channels_last(filter.weights()) for filter in filters]
        self.chain = [self._channels_last(filter.weights()) for filter in chain_of(filters)]
        by_size: dict[int, list[NDArray[np.float32]]] = {}
        for filter in filters:
            by_size.setdefault(filter.size, []).append(filter.weights())
        self.stacks = [self._channels_last(np.concatenate(group)) for group in by_size.values()]

    def _channels_last(self, values: NDArray[np.float32]) -> Any:
        """Copy ``values`` to the device in cuDNN's preferred layout.

        The channels are innermost in memory.
        """
        return self.driver.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)

    def options(self, w: DeviceArray) -> dict[str, Any]:
        """Return convolution options that keep image size and full float32 precision.

        If a kernel's weights sum to zero, the result is a small difference of large numbers. With TF32, the rounding error of
        the pixels would be about ten times larger in the result. For three channels, the plans without TF32 are also faster on
        an H200.
        """
        return {
            "padding": w.shape[2] // 2,
            "allow_tf32": False,
            "workspace_limit": self.workspace_limit,
            "pool": self.pool,
        }

    def convolve(self, x: DeviceArray, w: DeviceArray) -> Any:
        return conv2d(x, w, **self.options(w))

    def plan(self, w: DeviceArray) -> Plan:
        return conv2d_plan(self.x, w, **self.options(w))

    def forked(self) -> list[Any]:
        """Run each filter as a branch, and a chain.

        The second branch of the chain reads the result of the first branch.
        """
        blur, edges = self.chain
        with self.states.fork() as fork:
            made = [fork.run(conv2d, self.x, w, **self.options(w)) for w in self.weights]
            chained = fork.run(conv2d, fork.run(conv2d, self.x, blur, **self.options(blur)), edges, **self.options(edges))
        return [*made, chained]

    def single(self) -> list[Any]:
        return self.plain(self.x, self.weights, self.chain)

    def stacked(self) -> list[Any]:
        return self.plain(self.x, self.stacks, self.chain)

    def plain(self, x: DeviceArray, weights: Sequence[DeviceArray], chain: Sequence[DeviceArray]) -> list[Any]:
        """Filter in plain code, one call after the other."""
        blur, edges = chain
        return [*(self.convolve(x, w) for w in weights), self.convolve(self.convolve(x, blur), edges)]

    def recorded(self, names: Sequence[str], results: Sequence[Result]) -> tuple[list[Span], list[str]]:
        """Record the filters on lanes, and replay them once with times.

        Returns
        -------
        list of Span
            The last two spans belong to the chain.
        list of str
            Names of results that differ from the results of the forked region.
        """
        with record(self.plain, self.x, self.weights, self.chain, pool=self.pool, lanes=self.states.count) as program:
            how = program.explain(measure=True)
            wrong = [
                result.name
                for result, y in zip(results, program.outputs, strict=True)
                if not np.allclose(drawn(self.driver.asnumpy(y)), result.pixels, rtol=0, atol=TOLERANCE * result.absolute_weight)
            ]
        ran = [(step.lane, *times) for step, times in zip(how.steps, how.ran, strict=True) if step.lane is not None]
        # A driver may take several steps for a filter. Then the steps cannot be matched to filters, and are not drawn.
        if len(ran) != len(names):
            return [], wrong
        # Both filters of the chain belong to one result, so they share its colour.
        places = [*range(len(results)), len(results) - 1]
        spans = [
            Span(name, result, lane, start / 1e3, end / 1e3)
            for name, result, (lane, start, end) in zip(names, places, ran, strict=True)
        ]
        return spans, wrong


def measure(
    photograph: NDArray[np.float32],
    filters: Sequence[Filter],
    *,
    states: int,
    pool: HandlePool,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Apply all filters and a chain concurrently; check and time them.

    Parameters
    ----------
    photograph : ndarray of float32, shape (height, width, 3)
        Red, green and blue from 0 to 1.
    filters : sequence of Filter
        Each filter becomes one branch of the region. Two of them also form a chain of two more branches.
    states : int
        Number of side streams.
    pool : HandlePool
        Decides the driver; its current device and stream are used.
    progress : callable
        Called with the name of each step before the step begins.
    """
    progress("planning and filtering")
    work = _Work(photograph, filters, states, pool)
    # The first run builds the plans and loads the kernels. Both may wait for the device, so this run is not timed.
    chain = chain_of(filters)
    given: list[tuple[Sequence[Filter], Sequence[Any]]] = [((f,), (w,)) for f, w in zip(filters, work.weights, strict=True)]
    outputs = zip([*given, (chain, work.chain)], work.forked(), strict=True)
    results = []
    for number, (each, y) in enumerate(outputs, 1):
        progress(f"comparing filter {number} of {len(given) + 1} with SciPy")
        results.append(_check(photograph, *each, work.driver.asnumpy(y), work))
    # The next region needs as much memory as these outputs take, so the outputs are freed first.
    del outputs, y
    times = _times(work, progress)
    progress("recording the filters")
    spans, differing = work.recorded([filter.name for filter in (*filters, *chain)], results)
    return Report(
        driver=work.driver.name,
        states=states,
        results=tuple(results),
        spans=tuple(spans),
        differing=tuple(differing),
        times=times,
        network=network.measure(photograph, states=states, pool=pool, progress=progress),
    )


def _check(
    photograph: NDArray[np.float32], filters: Sequence[Filter], weights: Sequence[Any], y: NDArray[Any], work: _Work
) -> Result:
    """Compare the result of a filter or chain with the reference."""
    plans = [work.plan(w) for w in weights]
    # The reference gets the same work in another form: three groups of one channel, in float64.
    expected: NDArray[Any] = photograph[np.newaxis].transpose(0, 3, 1, 2)
    for filter in filters:
        kernels = np.broadcast_to(filter.kernel, (3, 1, filter.size, filter.size))
        expected = reference_conv2d(expected, kernels, padding=filter.size // 2, groups=3)
    norm = float(np.linalg.norm(expected))
    # The difference overwrites the reference, which is the largest array of the check.
    error = np.subtract(y, expected, out=expected)
    wrong = float(np.linalg.norm(error))
    return Result(
        name=", then ".join(filter.name for filter in filters),
        sizes=tuple([filter.size for filter in filters]),
        pixels=drawn(y),
        weight=math.prod(float(filter.kernel.sum(dtype=np.float64)) for filter in filters),
        absolute_weight=math.prod(float(np.abs(filter.kernel).sum(dtype=np.float64)) for filter in filters),
        largest=float(max(error.max(), -error.min())),
        relative=wrong / norm if norm else (np.inf if wrong else 0.0),
        engine=plans[-1].engine,
        workspace=max(plan.workspace_size for plan in plans),
    )


def drawn(y: NDArray[Any]) -> NDArray[np.float32]:
    """Return a result's pixels, reduced to the size of the drawing."""
    step = -(-max(y.shape) // DRAWN)
    return np.array(y[0, :, ::step, ::step].transpose(1, 2, 0), dtype=np.float32, order="C")


def at_a_time(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the mean number of intervals that overlap at a time.

    The mean is taken over all times at which at least one interval lasts.
    """
    busy, until = 0.0, 0.0
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return sum(end - start for start, end in intervals) / busy if busy else 1.0


def _times(work: _Work, progress: Callable[[str], None]) -> Times:
    """Return the median time of each way to filter.

    The repeats of the three ways are interleaved, so that a change of the GPU's clock rate affects all ways alike. If the
    warm-up takes too long, the result has the times of the warm-up.
    """
    ways = (work.forked, work.single, work.stacked)
    convolutions = len(work.stacks) + len(work.chain)
    progress("warming up")
    warm_up = [time(work.driver, way) for way in ways]
    if sum(warm_up) > _ENDURED:
        return Times(warm_up[0], warm_up[1], warm_up[2], convolutions, 0)
    repeats = repeats_of(_BUDGET, sum(warm_up))
    samples: list[list[float]] = [[], [], []]
    for repeat in range(repeats):
        progress(f"timing the filters, {repeat + 1} of {repeats}")
        for index in range(3):
            # The order rotates, so that each way takes each place.
            way = (index + repeat) % 3
            samples[way].append(time(work.driver, ways[way]))
    forked, single, stacked = (statistics.median(sample) for sample in samples)
    return Times(forked, single, stacked, convolutions, repeats)


def render(report: Report) -> str:
    """Render the report: a line for each filter, then the times."""
    rows = [("filter", "size", "largest error", "relative", "", "workspace", "plan")]
    rows += [
        (
            result.name,
            ", ".join(f"{size} x {size}" for size in result.sizes),
            f"{result.largest:.1e}",
            f"{result.relative:.1e}",
            "" if result.right else "WRONG",
            _bytes(result.workspace),
            result.engine,
        )
        for result in report.results
    ]
    times = report.times
    clock = [("", "ms", "")]
    for what, value in (
        (f"forked over {counted(report.states, 'state')}", times.forked),
        ("the same on one stream", times.single),
        (f"same-size filters as one convolution ({times.stacked_convolutions} in all)", times.stacked),
    ):
        clock.append((what, f"{value:.3f}", f"{times.single / value:.2f} x as fast as one stream"))
    # The ratios are relative to the second way, so the second way's own ratio is left out.
    clock[2] = (*clock[2][:2], "")
    samples = f"medians of {times.repeats} interleaved repeats after a warm-up" if times.repeats else "one run of each"
    lines = [
        *_columns(rows, right=(2, 3, 5)),
        f"errors are against SciPy in float64, pixels from 0 to 1; the relative error may be at most {TOLERANCE:g}",
        f"the last is a chain, {CHAIN}",
        "",
        *_columns(clock, right=(1,)),
        f"{samples}, from events on the caller's stream",
        *([f"recorded on {counted(report.states, 'lane')}: {report.overlap:.1f} filters at a time"] if report.spans else []),
    ]
    lines += ["", *_network(report)]
    if report.driver != "cuda":
        lines.append(f"these are times of the {report.driver} driver: they say nothing about a GPU")
    return "\n".join(lines)


def _network(report: Report) -> list[str]:
    """Render the times of the network."""
    found = report.network
    height, width = found.size
    verdict = "" if found.right else ", WRONG"
    clock = [(f"a small network, {len(found.calls)} calls over {width} x {height}", "ms", "")]
    one = found.times[network.ONE_STREAM]
    for way, value in found.times.items():
        what = f"forked over {counted(report.states, 'state')}" if way == network.FORKED else way
        clock.append((what, f"{value:.3f}", "" if way == network.ONE_STREAM else f"{one / value:.2f} x as fast as one stream"))
    return [
        *_columns(clock, right=(1,)),
        f"medians of {found.repeats} interleaved repeats; relative error {found.relative:.1e} at most{verdict}",
    ]


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, as "1 state" or "2 states"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def milliseconds(value: float) -> str:
    """Format milliseconds with three figures.

    A number with more than three figures before its decimal point keeps all of these figures.
    """
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.0f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"
