"""Measure the host cost of order by data: a branch alone, a branch that follows another, a chain, a map, many branches in one
fork.

A branch's cost is over the same call without a fork, as a part of the raw entry beneath `pygraph.execute`: the least that a
launch takes from Python. A chain is compared with the same calls on one stream, once with the device as the limit and once with
the launches as the limit.
"""

import sys
from collections.abc import Callable
from typing import Any

from common import Case, Ratios, interleaved, paired, pool_on_a_stream, publish, regions, summary, synchronised
from launch import frontend_cases
from options import arguments, parse, positive
from work import SMALL, TINY, Shape, graph_function

ALONE, FOLLOWING = 0.60, 0.75
LAUNCHING, DEVICE = 1.4, 1.05
MAPPED = 1.05
BRANCHES = 16
DEEP = 20
FEW, MOST = 100, 10_000
LARGE = Shape(16, 256, 56, 256, 3, "float16", "NHWC")
"""Of which one call keeps the device busy for longer than it takes to launch several."""


def chained(states: Any, conv: Any, shape: Shape, driver: Any, x: Any, w: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A chain of convolutions, each over the one before, on one stream and as branches; outputs given."""
    import numpy as np

    outs = [shape.output(driver) for _ in range(DEEP)]

    def one_stream() -> Any:
        y = x
        for out in outs:
            y = conv(y, w, out=out)
        return y

    def branches() -> Any:
        y = x
        with states.fork() as fork:
            run = fork.run
            for out in outs:
                y = run(conv, y, w, out=out)
        return y

    right = driver.asnumpy(one_stream())
    assert np.array_equal(driver.asnumpy(branches()), right), "the chain is wrong"
    return one_stream, branches


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=20, help="forks in one sample (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, default=SMALL, help="the convolution (default: %(default)s)")
    parser.add_argument(
        "--large", type=Shape.parse, default=LARGE, help="that the device is the limit for (default: %(default)s)"
    )
    options = parse(parser, {"shape": TINY, "large": TINY}, calls=2)
    shape: Shape = options.shape
    with pool_on_a_stream(options.driver) as (pool, stream):
        import numpy as np

        from handlepool import ParallelStates

        driver, conv = pool.driver, graph_function(shape)
        rng = np.random.default_rng(0)
        x, w, y = shape.image(driver, rng), shape.filter(driver, rng), shape.output(driver)
        outs = [shape.output(driver) for _ in range(BRANCHES)]
        states = ParallelStates(4)
        one_stream, branches = chained(ParallelStates(4), conv, shape, driver, x, w)
        names: dict[str, Any] = {"x": x, "w": w, "outs": outs, "conv": conv, "fork": states.fork, "map": states.map}
        names |= {"one_stream": one_stream, "branches": branches, "xs": [x] * BRANCHES, "ws": [w] * BRANCHES}

        def forked(lines: list[str], ordered: bool = True) -> str:
            return f"with fork(ordered={ordered}) as f:\n    run = f.run\n    " + "\n    ".join(lines)

        given = [f"conv(x, w, out=outs[{number}])" for number in range(BRANCHES)]
        chain = ["y = conv(x, w, out=outs[0])"] + [f"y = conv(y, w, out=outs[{number}])" for number in range(1, BRANCHES)]
        allocated = ["y = conv(x, w)"] + ["y = conv(y, w)"] * (BRANCHES - 1)
        held = ["y0 = conv(x, w)"] + [f"y{number} = conv(y{number - 1}, w)" for number in range(1, BRANCHES)]
        statements = {
            "calls": "\n".join(given),
            "branches": forked([line.replace("conv(", "run(conv, ") for line in given]),
            "branches without order": forked([line.replace("conv(", "run(conv, ") for line in given], ordered=False),
            "calls in a chain": "\n".join(chain),
            "branches in a chain": forked([line.replace("conv(", "run(conv, ") for line in chain]),
            "branches in a chain without order": forked([line.replace("conv(", "run(conv, ") for line in chain], ordered=False),
            "calls in a chain, allocated": "\n".join(allocated),
            "branches in a chain, allocated": forked([line.replace("conv(", "run(conv, ") for line in allocated]),
            "calls in a chain, allocated and held": "\n".join(held),
            "branches in a chain, allocated and held": forked([line.replace("conv(", "run(conv, ") for line in held]),
            "map into outputs": "map(conv, xs, ws, out=outs)",
            "map into outputs without order": "with fork(ordered=False) as f: f.map(conv, xs, ws, out=outs)",
            f"chain of {DEEP} on one stream": "one_stream()",
            f"chain of {DEEP} as branches": "branches()",
        }
        skipped = []
        if driver.name == "cuda":
            statements |= {"raw entry": frontend_cases(pool, shape, x, w, y, names)["raw entry"]}
        else:
            skipped.append("the raw entry: on a GPU alone")
        around = synchronised(driver, stream)
        cases = {n: Case(s, names, options.calls, around) for n, s in statements.items()}
        few, most = (FEW, MOST) if options.calls > 2 else (4, 8)
        for count in (few, most):
            text = f"with fork() as f:\n    run = f.run\n    for _ in range({count}): run(conv, x, w)"
            calls = max(1, 2 * few // count) if options.calls > 2 else 1
            cases[f"fork of {count} branches"] = Case(text, names, calls, around)
        samples = interleaved(cases, options.repeats)
        samples = {name: [value / 1e3 for value in values] for name, values in samples.items()}

        def each(many: str, few: str) -> list[float]:
            return [(a - b) / BRANCHES for a, b in zip(samples[many], samples[few], strict=True)]

        more = {
            "a branch, over the call alone": each("branches", "calls"),
            "a branch without order, over the call alone": each("branches without order", "calls"),
            "a branch over a sibling's output": each("branches in a chain", "calls in a chain"),
            "the same without order": each("branches in a chain without order", "calls in a chain"),
            "the same, allocated": each("branches in a chain, allocated", "calls in a chain, allocated"),
            "the same, allocated and held by both": each(
                "branches in a chain, allocated and held", "calls in a chain, allocated and held"
            ),
            f"each of {few} branches": [value / few for value in samples[f"fork of {few} branches"]],
            f"each of {most} branches": [value / most for value in samples[f"fork of {most} branches"]],
        }
        bounded = shape == SMALL
        ratios = Ratios()
        if driver.name == "cuda":
            raw = samples["raw entry"]
            for name, bound in zip(more, (ALONE, None, FOLLOWING, None, FOLLOWING, FOLLOWING), strict=False):
                ratios.add(f"{name} / raw entry", paired(more[name], raw), bound if bounded else None)
        ratios.compare(samples, "map into outputs", "map into outputs without order", MAPPED if bounded else None)
        ratios.compare(samples, f"chain of {DEEP} as branches", f"chain of {DEEP} on one stream", LAUNCHING if bounded else None)
        ratios.compare(more, f"each of {most} branches", f"each of {few} branches")
        large: Shape = options.large
        image, filters = large.image(driver, rng), large.filter(driver, rng)
        pair = dict(
            zip(
                ("one stream", "branches"),
                chained(ParallelStates(4), graph_function(large), large, driver, image, filters),
                strict=True,
            )
        )
        clocks = regions(pair, options.repeats, 2, driver, stream)
        ratios.add(
            "a chain that the device is the limit for, branches / one stream, wall",
            paired(clocks["wall"]["branches"], clocks["wall"]["one stream"]),
            DEVICE if bounded else None,
        )
        times = {
            "microseconds, host": {name: summary(values) for name, values in samples.items()},
            "microseconds each, host": {name: summary(values) for name, values in more.items()},
            f"microseconds, {large}": {f"{name}, {clock}": summary(clocks[clock][name]) for clock in clocks for name in pair},
        }
        publish(options, "order", driver.name, times, ratios, skipped, shape=str(shape), calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
