"""When recording pays: a recorded map, replayed, against eager maps; and what a replay costs over the bare graph launch.

`record` runs the work once for real and once under capture, and instantiates the graph: that has to be earned back. The host's
time of a replay is compared with the launch of a graph that was captured by hand from the same work, with everything at hand.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from common import (
    CLOCKS,
    Ratios,
    arguments,
    parse,
    pool_on_a_stream,
    positive,
    progress,
    publish,
    regions,
    summary,
    total,
)
from work import SMALL, TINY, Shape, capture, check, graph_function

import handlepool

MOST_OF_A_LAUNCH = 1.2


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=50, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--count", type=positive, default=16, help="convolutions in the map (default: %(default)s)")
    parser.add_argument("--states", type=positive, default=8, help="states of the map (default: %(default)s)")
    parser.add_argument("--replays", type=positive, default=100, help="replays of one recording (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, default=SMALL, help="the convolution (default: %(default)s)")
    options = parse(parser, calls=2, count=3, states=2, replays=3, shape=TINY)
    shape, replays = options.shape, options.replays
    skipped = []
    with pool_on_a_stream(parser, options.driver) as (pool, stream):
        driver = pool.driver
        rng = np.random.default_rng(0)
        images = [shape.image(driver, rng) for _ in range(options.count)]
        filters = [shape.filter(driver, rng) for _ in range(options.count)]
        outs = [shape.output(driver) for _ in range(options.count)]
        conv = graph_function(shape)
        states = handlepool.ParallelStates(options.states)

        def eager() -> list[Any]:
            return states.map(conv, images, filters)

        def given() -> None:
            with states.fork() as fork:
                for x, w, y in zip(images, filters, outs, strict=True):
                    fork.run(conv, x, w, out=y)

        def eager_maps() -> None:
            for _ in range(replays):
                eager()

        def record() -> handlepool.Program:
            return handlepool.record(states.map, conv, images, filters)

        def recorded() -> None:
            with record() as program:
                replay = program.replay
                for _ in range(replays):
                    replay()

        right = [driver.asnumpy(y).astype(np.float64) for y in eager()]
        program = record()
        program.replay()
        for y, expected in zip(program.outputs, right, strict=True):
            check(driver, "replay", y, expected)
        cases: dict[str, Callable[[], object]] = {"eager map": eager, "replay": program.replay}
        if driver.name == "cuda":
            launch, _graph = capture(given, stream)
            launch()
            for y, expected in zip(outs, right, strict=True):
                check(driver, "graph captured by hand", y, expected)
            cases["bare graph launch"] = launch
        else:
            skipped.append("bare graph launch: on a GPU alone")
        samples = regions(cases, options.repeats, options.calls, driver, stream)
        eagerly, replayed = f"{replays} eager maps", f"record and {replays} replays"
        whole: dict[str, Callable[[], object]] = {eagerly: eager_maps, replayed: recorded, "record": lambda: record().close()}
        totals: dict[str, list[float]] = {name: [] for name in whole}
        for repeat in progress(range(options.repeats + 1)):
            for name, run in whole.items():
                taken = total(driver, stream, run)
                if repeat:
                    totals[name].append(taken)
        bounded = shape == SMALL and options.count == 16
        ratios = Ratios()
        ratios.compare(samples["host"], "replay", "bare graph launch", MOST_OF_A_LAUNCH if bounded else None, ", host")
        ratios.compare(samples["host"], "replay", "eager map", None, ", host")
        ratios.compare(samples["wall"], "replay", "eager map", None, ", wall")
        ratios.compare(totals, replayed, eagerly, 1.0 if bounded and replays == 100 else None)
        times = {f"microseconds, {clock}": {name: summary(values) for name, values in samples[clock].items()} for clock in CLOCKS}
        times["microseconds in all, wall"] = {name: summary(values) for name, values in totals.items()}
        more = {"count": options.count, "states": options.states, "replays": replays, "shape": str(shape)}
        publish(options, "record", driver.name, times, ratios, skipped, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
