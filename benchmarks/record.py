"""Find when recording pays: a recorded map, replayed, against eager maps; and the cost of a replay over the bare graph launch.

`record` runs the work once for real and once under capture, and instantiates the graph. Replays have to earn that back. The
host's time of a replay is compared with the launch of a graph that was captured by hand from the same work, with all its
arguments at hand.

Recording with lanes is measured for each call of sequential code, over the same call made eagerly. A replay on so many lanes is
measured over the launch of its graph.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import CLOCKS, Ratios, pool_on_a_stream, progress, publish, regions, summary, total
from options import arguments, parse, positive, side_streams
from work import SMALL, TINY, Shape, capture, check, graph_function

import handlepool

MOST_OF_A_LAUNCH = 1.2
MOST_OF_A_NODE = 25.0
"""The bound in microseconds of a node of a recording with lanes, beyond the cost of its call."""
MOST_OVER_A_LAUNCH = 1.0
"""Microseconds that a replay takes of the host's time, over the launch of its graph."""
MOST_OF_ONE_LANE = 1.5
"""The bound of the host's time for a replay on the most lanes, relative to one lane."""
FEW, MANY, LANES = 100, 10_000, 8


class Maps:
    """A map of the convolutions over so many states: eager, recorded, and captured by hand."""

    def __init__(self, pool: Any, stream: Any, shape: Shape, count: int, states: int, replays: int) -> None:
        self.driver = driver = pool.driver
        self.states = handlepool.ParallelStates(states)
        rng = np.random.default_rng(0)
        self.images = [shape.image(driver, rng) for _ in range(count)]
        self.filters = [shape.filter(driver, rng) for _ in range(count)]
        self.outs = [shape.output(driver) for _ in range(count)]
        self.conv = graph_function(shape)
        self.replays = replays
        self.right = [driver.asnumpy(y).astype(np.float64) for y in self.eager()]
        self.program = self.record()
        self.program.replay()
        self._check("replay", self.program.outputs)
        self.launch: Callable[[], object] | None = None
        if driver.name == "cuda":
            self.launch, self.graph = capture(self._given, stream)
            self.launch()
            self._check("graph captured by hand", self.outs)

    def _check(self, name: str, found: list[Any]) -> None:
        for y, expected in zip(found, self.right, strict=True):
            check(self.driver, name, y, expected)

    def eager(self) -> list[Any]:
        """One map."""
        return self.states.map(self.conv, self.images, self.filters)

    def _given(self) -> None:
        with self.states.fork() as fork:
            for x, w, y in zip(self.images, self.filters, self.outs, strict=True):
                fork.run(self.conv, x, w, out=y)

    def record(self) -> handlepool.Program:
        """Record a map."""
        return handlepool.record(self.states.map, self.conv, self.images, self.filters)

    def on_lanes(self, lanes: int) -> handlepool.Program:
        """Record the same convolutions as sequential code."""
        pairs = list(zip(self.images, self.filters, strict=True))
        program = handlepool.record(lambda: [self.conv(x, w) for x, w in pairs], lanes=lanes)
        program.replay()
        self._check(f"replay on {lanes} lanes", program.outputs)
        return program

    def eager_maps(self) -> None:
        """Many maps."""
        for _ in range(self.replays):
            self.eager()

    def recorded(self) -> None:
        """Record a map, and replay it as often."""
        with self.record() as program:
            replay = program.replay
            for _ in range(self.replays):
                replay()


class Nodes:
    """Sequential code of so many calls: made eagerly, and recorded with lanes."""

    def __init__(self, maps: Maps, count: int) -> None:
        self.count = count
        self._conv, self._pairs = maps.conv, list(zip(maps.images, maps.filters, maps.outs, strict=True))

    def calls(self) -> list[Any]:
        """Call so that each call writes the array of the previous call in its chain, with a chain for each lane."""
        conv, pairs = self._conv, self._pairs
        for number in range(self.count):
            x, w, out = pairs[number % len(pairs)]
            conv(x, w, out=out)
        return [out for _, _, out in pairs]

    def recorded(self) -> None:
        """Record the calls, and do not launch the program."""
        handlepool.record(self.calls, lanes=LANES).close()


def compare(
    ratios: Ratios,
    samples: dict[str, dict[str, list[float]]],
    totals: dict[str, list[float]],
    states: list[int],
    replays: int,
    *,
    bounded: bool,
) -> None:
    """The ratios at each number of states; all are bounded, or none."""
    for count in states:
        at = f", {count} states"
        most = MOST_OF_A_LAUNCH if bounded else None
        ratios.compare(samples["host"], f"replay{at}", f"bare graph launch{at}", most, ", host")
        ratios.compare(samples["host"], f"replay{at}", f"eager map{at}", None, ", host")
        ratios.compare(samples["wall"], f"replay{at}", f"eager map{at}", None, ", wall")
        most = 1.0 if bounded and replays == 100 else None
        ratios.compare(totals, f"record and {replays} replays{at}", f"{replays} eager maps{at}", most)


def compare_lanes(ratios: Ratios, host: dict[str, list[float]], lanes: list[int], *, bounded: bool) -> None:
    """Measure the host's time of replays on lanes."""
    for count in lanes:
        over = [a - b for a, b in zip(host[f"replay, {count} lanes"], host[f"launch of its graph, {count} lanes"], strict=True)]
        name = f"replay over the launch of its graph, {count} lanes, microseconds, host"
        ratios.add(name, over, MOST_OVER_A_LAUNCH if bounded else None)
    most = MOST_OF_ONE_LANE if bounded and max(lanes) == 16 else None
    ratios.compare(host, f"replay, {max(lanes)} lanes", f"replay, {min(lanes)} lanes", most, ", host")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=50, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--count", type=positive, default=16, help="convolutions in the map (default: %(default)s)")
    parser.add_argument("--states", type=side_streams, nargs="+", default=[1, 2, 4, 8, 16], help="(default: %(default)s)")
    parser.add_argument("--replays", type=positive, default=100, help="replays of one recording (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, default=SMALL, help="the convolution (default: %(default)s)")
    options = parse(parser, {"shape": TINY, "replays": 20}, calls=2, count=3, states=[1, 2], replays=3)
    shape, replays = options.shape, options.replays
    bounded = shape == SMALL and options.count == 16
    skipped: list[str] = []
    ratios = Ratios()
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        cases: dict[str, Callable[[], object]] = {}
        whole: dict[str, Callable[[], object]] = {}
        for count in options.states:
            maps = Maps(pool, stream, shape, options.count, count, replays)
            at = f", {count} states"
            cases |= {f"eager map{at}": maps.eager, f"replay{at}": maps.program.replay}
            if maps.launch is not None:
                cases[f"bare graph launch{at}"] = maps.launch
                cases[f"CuPy's Graph.launch{at}"] = maps.graph.launch
            whole |= {f"{replays} eager maps{at}": maps.eager_maps, f"record and {replays} replays{at}": maps.recorded}
            whole[f"record{at}"] = lambda maps=maps: maps.record().close()
            program = maps.on_lanes(count)
            graph = program._recording.graph
            at = f", {count} lanes"
            cases |= {f"replay{at}": program.replay, f"launch of its graph{at}": partial(graph.launch, stream.ptr)}
        few, many = (FEW, MANY) if options.replays > 3 else (4, 8)
        for count in (few, many):
            nodes = Nodes(maps, count)
            whole |= {f"{count} calls": nodes.calls, f"{count} nodes": nodes.recorded}
        if driver.name != "cuda":
            skipped.append("bare graph launch: on a GPU alone")
        samples = regions(cases, options.repeats, options.calls, driver, stream)
        totals: dict[str, list[float]] = {name: [] for name in whole}
        for repeat in progress(range(options.repeats + 1)):
            for name, run in whole.items():
                taken = total(driver, stream, run)
                if repeat:
                    totals[name].append(taken)
        compare(ratios, samples, totals, options.states, replays, bounded=bounded)
        compare_lanes(ratios, samples["host"], options.states, bounded=bounded)
        each = {
            f"each of {count} nodes": [
                (nodes - 2 * calls) / count  # `record` makes the calls twice
                for nodes, calls in zip(totals[f"{count} nodes"], totals[f"{count} calls"], strict=True)
            ]
            for count in (few, many)
        }
        for name, values in each.items():
            ratios.add(f"{name}, microseconds", values, MOST_OF_A_NODE if bounded else None)
        times = {f"microseconds, {clock}": {name: summary(values) for name, values in samples[clock].items()} for clock in CLOCKS}
        times["microseconds in all, wall"] = {name: summary(values) for name, values in totals.items()}
        more = {"count": options.count, "states": options.states, "replays": replays, "shape": str(shape)}
        publish(options, "record", driver.name, times, ratios, skipped, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
