"""Show the effect of a shared workspace: wrong results, of convolutions side by side on streams that have handles of their own.

Every stream has its own handle in all cases. With one workspace for all, each convolution writes its scratch over its
neighbours'. With a workspace each, and in a fork of handlepool's, no scratch is overwritten. A result is wrong if it differs by
more than 1e-2, relative norm, from the result of one stream alone.
"""

import sys
from typing import Any

import numpy as np
from common import Ratios, pool_on_a_stream, print_table, progress, publish
from options import arguments, parse, positive, side_streams
from work import Shape, graph_function

from handlepool import ParallelStates
from handlepool.graphs.plan import Plan

NEEDY = Shape(4, 256, 14, 256, 3, "float32", "NCHW")
NEEDY_ON_HOST = Shape(2, 16, 12, 16, 3, "float32", "NCHW")


class ByHand:
    """Hold a stream with its handle, as a user writes it without a pool."""

    def __init__(self, driver: Any) -> None:
        with driver.relaxed():
            self.stream = driver.create_stream()
            self.handle = driver.create_handle()
            driver.bind_handle(self.handle, self.stream.ptr)
            self.start, self.end = driver.create_event(), driver.create_event()


def round_by_hand(driver: Any, caller: int, states: list[ByHand], spaces: list[int], plan: Plan, calls: list[Any]) -> None:
    """One convolution on each stream, forked from the caller's and joined to it."""
    for state in states:
        driver.record_event(state.start, caller)
        driver.wait_event(state.stream.ptr, state.start)
    for state, space, operands in zip(states, spaces, calls, strict=True):
        plan.executable.launch(state.handle, operands, space)
    for state in states:
        driver.record_event(state.end, state.stream.ptr)
        driver.wait_event(caller, state.end)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--states", type=side_streams, default=8, help="streams side by side (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=40, help="times that each runs (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[NEEDY, Shape(64, 256, 14, 256, 3, "float32", "NCHW")])
    options = parse(parser, {"shape": [NEEDY_ON_HOST]}, states=3, rounds=3)
    counts: dict[str, dict[str, int]] = {}
    skipped = []
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        by_hand = [ByHand(driver) for _ in range(options.states)]
        for shape in options.shape:
            rng = np.random.default_rng(0)
            conv = graph_function(shape)
            images = [shape.image(driver, rng) for _ in by_hand]
            filters = [shape.filter(driver, rng) for _ in by_hand]
            outs = [shape.output(driver) for _ in by_hand]
            plan = conv.plan_for(images[0], filters[0], out=outs[0])
            if not plan.workspace_size:
                skipped.append(f"{shape}: its plan needs no scratch")
                continue
            right = [conv(x, w) for x, w in zip(images, filters, strict=True)]
            driver.synchronize_stream(stream.ptr)
            calls = list(zip(images, filters, outs, strict=True))
            with driver.relaxed():
                spaces = [driver.allocate(plan.workspace_size) for _ in by_hand]
            fork = ParallelStates(options.states).fork

            def forked(fork: Any = fork, conv: Any = conv, calls: Any = calls) -> None:
                with fork() as region:
                    for x, w, y in calls:
                        region.run(conv, x, w, out=y)

            def by(spaces: list[int], plan: Plan = plan, calls: Any = calls) -> None:
                round_by_hand(driver, stream.ptr, by_hand, spaces, plan, calls)

            cases = {
                "one workspace for all": lambda by=by, spaces=spaces: by(spaces[:1] * options.states),
                "a workspace each": lambda by=by, spaces=spaces: by(spaces),
                "handlepool's fork": forked,
            }
            wrong = dict.fromkeys(cases, 0)
            for _ in progress(range(options.rounds)):
                for name, region in cases.items():
                    for y in outs:
                        y[...] = np.nan
                    region()
                    driver.synchronize_stream(stream.ptr)
                    for y, expected in zip(outs, right, strict=True):  # in the arrays' own library
                        off = ((y - expected) ** 2).sum() / (expected**2).sum()
                        wrong[name] += not float(off) < 1e-4  # NaN is wrong too
            counts[str(shape)] = wrong | {"of": options.rounds * options.states, "workspace_bytes": plan.workspace_size}
            with driver.relaxed():
                driver.synchronize_stream(stream.ptr)
                for space in spaces:
                    driver.free(space)
        for shape, wrong in counts.items():
            rows = [(name, count) for name, count in wrong.items() if name not in ("of", "workspace_bytes")]
            print_table((f"{shape}, {wrong['workspace_bytes']:,} bytes of scratch", f"wrong of {wrong['of']}"), rows)
        ratios = Ratios()
        for shape, wrong in counts.items():
            ratios.add(f"wrong results of handlepool's fork, {shape}", [wrong["handlepool's fork"]], 0.0)
        publish(options, "wrong", driver.name, {}, ratios, skipped, wrong=counts, states=options.states)
        with driver.relaxed():
            for state in by_hand:
                driver.destroy_handle(state.handle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
