"""Run a small network with branches over the photograph.

The network is plain code. The demo measures four ways to run it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handlepool import ops as library
from handlepool.cli.demo.clock import repeats_of, time
from handlepool.pool.pool import HandlePool
from handlepool.recording.record import record
from handlepool.regions.states import ParallelStates
from handlepool.testing import reference

TOLERANCE = 2e-3
SIDE = 128
"""The maximum number of pixels along a side of the network's input."""
LANES = 4
MODULES, NARROW, WIDE = 3, 16, 64
"""The number of modules, and their numbers of channels.

Each module has four branches. A branch has `NARROW` channels, and all four branches together have `WIDE`.
"""
_BUDGET = 4000.0
"""The total time of all repeats, in milliseconds."""
ONE_STREAM, FORKED, ONE_LANE, RECORDED = "one stream", "forked", "recorded, one lane", f"recorded, {LANES} lanes"

Weights = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Ran:
    """Record when and on which lane a recorded call ran.

    The times are in microseconds from the beginning of a replay.
    """

    name: str
    lane: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, eq=False)
class NetworkReport:
    """Hold the demo's results for the network.

    Attributes
    ----------
    size : tuple of int
        Height and width of the input.
    pixels : ndarray of float32, shape (height, width, 3)
        The output of the network.
    relative : float
        The largest relative error of the four ways: the norm of the error divided by the norm of the reference.
    times : dict
        Median milliseconds of a run, by the name of the way to run the network.
    repeats : int
        Number of timed runs of each way.
    calls : tuple of Ran
        The calls of a replay on several lanes.
    """

    size: tuple[int, int]
    pixels: NDArray[np.float32]
    relative: float
    times: dict[str, float]
    repeats: int
    calls: tuple[Ran, ...]

    @property
    def right(self) -> bool:
        """Tell whether every way is within the tolerance."""
        return self.relative <= TOLERANCE


def network(x: Any, weights: Weights, ops: Any = library) -> Any:
    """Compute the network's output, a picture of half the size.

    The input has the shape (N, 3, H, W), the result (N, 3, H / 2, W / 2).

    The network consists of modules of four branches that do not depend on each other.
    """
    x = _convolved(x, weights["first"], ops, stride=2)
    for number in range(MODULES):
        a = _convolved(x, weights[f"{number}.a"], ops)
        b = _convolved(_convolved(x, weights[f"{number}.b1"], ops), weights[f"{number}.b2"], ops)
        c = _convolved(_convolved(x, weights[f"{number}.c1"], ops), weights[f"{number}.c2"], ops)
        d = _convolved(ops.max_pool2d(x, 3, stride=1, padding=1), weights[f"{number}.d"], ops)
        x = ops.concat([a, b, c, d], 1)
    return _convolved(x, weights["last"], ops, activation="sigmoid")


def _convolved(x: object, layer: tuple[Any, Any], ops: Any, stride: int = 1, activation: str = "relu") -> Any:
    w, b = layer
    return ops.conv2d(x, w, bias=b, stride=stride, padding=w.shape[2] // 2, activation=activation, allow_tf32=False)


def made_up() -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Make random weights that keep the variance of their input.

    The weights are the same each time.
    """
    sizes = {"first": (WIDE, 3, 3)}
    for number in range(MODULES):
        of = {"a": (WIDE, 1), "b1": (WIDE, 1), "b2": (NARROW, 3), "c1": (WIDE, 1), "c2": (NARROW, 5), "d": (WIDE, 1)}
        sizes |= {f"{number}.{branch}": (NARROW, *size) for branch, size in of.items()}
    sizes["last"] = (3, WIDE, 1)
    # A fixed seed makes the picture and its error the same in each run.
    rng = np.random.default_rng(11)
    weights = {}
    for name, (filters, channels, side) in sizes.items():
        scale = (2 / (channels * side**2)) ** 0.5
        w = (rng.standard_normal((filters, channels, side, side)) * scale).astype(np.float32)
        weights[name] = w, (rng.standard_normal(filters) * 0.1).astype(np.float32)
    return weights


class _Reference:
    """Compute the network's operations in float64."""

    max_pool2d = staticmethod(reference.max_pool2d)
    concat = staticmethod(np.concatenate)

    def conv2d(self, x: Any, w: Any, *, allow_tf32: bool, **how: Any) -> Any:
        return reference.conv2d(x, w, **how)


def measure(
    photograph: NDArray[np.float32], *, states: int, pool: HandlePool, progress: Callable[[str], None] = lambda step: None
) -> NetworkReport:
    """Run the network in four ways; check, time and trace it.

    Parameters
    ----------
    photograph : ndarray of float32, shape (height, width, 3)
        Of a large photograph, only every second, third or further pixel is used.
    states : int
        Number of side streams for the forks.
    pool : HandlePool
        Decides the driver; its current device and stream are used.
    progress : callable
        Called with the name of each step before the step begins.
    """
    step = -(-max(photograph.shape) // SIDE)
    picture = np.ascontiguousarray(photograph[np.newaxis, ::step, ::step])
    driver, values = pool.driver, made_up()

    def placed(array: NDArray[np.float32]) -> Any:
        if array.ndim != 4:
            return driver.asarray(array)
        return driver.asarray(np.ascontiguousarray(array.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)

    x = driver.asarray(picture).transpose(0, 3, 1, 2)
    weights = {name: (placed(w), placed(b)) for name, (w, b) in values.items()}
    plain = SimpleNamespace(
        conv2d=partial(library.conv2d, pool=pool),
        max_pool2d=partial(library.max_pool2d, pool=pool),
        concat=partial(library.concat, pool=pool),
    )
    several = ParallelStates(states, pool=pool)

    def forked() -> Any:
        with several.fork() as fork:
            branch = SimpleNamespace(
                conv2d=partial(fork.run, library.conv2d),
                max_pool2d=partial(fork.run, library.max_pool2d),
                concat=partial(fork.run, library.concat),
            )
            y = network(x, weights, branch)
        return y

    progress("recording the network")
    with (
        record(network, x, weights, pool=pool, lanes=1) as one,
        record(network, x, weights, pool=pool, lanes=LANES) as program,
    ):
        ways: dict[str, Callable[[], Any]] = {ONE_STREAM: partial(network, x, weights, plain), FORKED: forked}
        ways |= {ONE_LANE: one.replay, RECORDED: program.replay}
        given = {name: way() for name, way in ways.items()} | {ONE_LANE: one.outputs, RECORDED: program.outputs}
        found = {name: driver.asnumpy(y) for name, y in given.items()}
        progress("comparing the network with SciPy")
        expected = network(picture.transpose(0, 3, 1, 2).astype(np.float64), values, _Reference())
        relative = max(float(reference.relative_error(y, expected)) for y in found.values())
        times, repeats = _times(ways, pool, progress)
        how = program.explain(measure=True)
        calls = [
            Ran(step.name.rpartition(".")[2], step.lane, start, end)
            for step, (start, end) in zip(how.steps, how.ran, strict=True)
            if step.lane is not None
        ]
        # Some of these outputs belong to the two programs, which end with this ``with`` statement. So no reference to the
        # outputs may outlive them.
        del given
    pixels = np.array(found[RECORDED][0].transpose(1, 2, 0), dtype=np.float32, order="C")
    return NetworkReport((picture.shape[1], picture.shape[2]), pixels, relative, times, repeats, tuple(calls))


def _times(
    ways: Mapping[str, Callable[[], Any]], pool: HandlePool, progress: Callable[[str], None]
) -> tuple[dict[str, float], int]:
    """Return the median time of each way, and the number of repeats."""
    repeats = repeats_of(_BUDGET, sum(time(pool.driver, way) for way in ways.values()))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order: Sequence[str] = list(ways)
    for repeat in range(repeats):
        progress(f"timing the network, {repeat + 1} of {repeats}")
        for index in range(len(order)):
            # The order rotates, so that each way takes each place.
            name = order[(index + repeat) % len(order)]
            samples[name].append(time(pool.driver, ways[name]))
    return {name: statistics.median(taken) for name, taken in samples.items()}, repeats
