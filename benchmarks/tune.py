"""Measure the worth of the choice of a plan: recorded convolutions side by side, with the plan that cuDNN ranks first, the plan
that is quickest alone, and the plan that is quickest side by side, as `GraphFunction.tune` finds them. Needs a GPU.

The timing is independent of the tuning: replays of a recorded fork, interleaved, by the clocks of overlap.py.
"""

import sys
from collections.abc import Callable
from typing import Any

from common import CLOCKS, Ratios, pool_on_a_stream, publish, regions, summary
from options import arguments, parse, positive, side_streams
from overlap import SHAPES, Work
from work import Shape

import handlepool

FIRST, ALONE, TOGETHER = "ranked first", "quickest alone", "quickest side by side"


def tuned(work: Work, count: int) -> tuple[dict[str, Callable[[], object]], dict[str, Any]]:
    """Time replays of a fork over so many states, with each of the three plans; return the tuning side by side as well."""
    operands = work.images[0], work.filters[0]
    states = handlepool.ParallelStates(count)
    cases: dict[str, Callable[[], object]] = {}
    tuning = None
    for name, together in ((FIRST, None), (ALONE, None), (TOGETHER, states)):
        if name != FIRST:
            tuning = work.conv.tune(*operands, out=work.outs[0], states=together)
        cases[name] = work.checked(name, handlepool.record(work.forked(count)).replay)
    print(f"{work.shape}\n{tuning}\n")
    found = [{"index": c.index, "engine": c.engine, "workspace_bytes": c.workspace_size} for c in tuning.candidates]
    for entry, candidate in zip(found, tuning.candidates, strict=True):
        entry |= {"alone": candidate.alone, "concurrent": candidate.concurrent, "skipped": candidate.skipped}
    return cases, {"winner": tuning.winner.index, "candidates": found}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=20, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--count", type=positive, default=16, help="convolutions in the fork (default: %(default)s)")
    parser.add_argument("--states", type=side_streams, nargs="+", default=[4, 8], help="(default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES[:5], help="such as 1x64x14x64x3:float16:NHWC")
    options = parse(parser, calls=2, count=4, states=[4], shape=SHAPES[:1])
    times: dict[str, Any] = {}
    ratios = Ratios()
    tunings: dict[str, Any] = {}
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        if driver.name != "cuda":
            parser.error("plans are tuned on a GPU alone")
        for shape in options.shape:
            for count in options.states:
                work = Work(pool, shape, options.count)
                what = f"{options.count} x {shape}, {count} states"
                cases, tunings[what] = tuned(work, count)
                samples = regions(cases, options.repeats, options.calls, driver, stream)
                for clock in CLOCKS:
                    times[f"{what}, microseconds, {clock}"] = {name: summary(v) for name, v in samples[clock].items()}
                ratios.compare(samples["device"], TOGETHER, FIRST, None, f", {what}, device")
                ratios.compare(samples["device"], TOGETHER, ALONE, None, f", {what}, device")
        publish(options, "tune", driver.name, times, ratios, tunings=tunings, count=options.count, states=options.states)
    return 0


if __name__ == "__main__":
    sys.exit(main())
