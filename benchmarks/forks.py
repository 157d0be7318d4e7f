"""Measure the host cost of a fork: fork and join around nothing, a further branch, a map.

The floor is the event calls of a fork. For each state an event is recorded on the caller's stream and the side stream waits for
it. Another event is recorded on the side stream and the caller's stream waits for it. An *empty* branch starts its state and
launches nothing. A branch of a Python *function* that does nothing also makes the side stream current, and then the caller's.
The bound is for a fork of all states without any branch, which starts the states together, as a map does.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

from common import Case, Ratios, interleaved, paired, pool_on_a_stream, publish, summary, synchronised
from options import arguments, parse, positive, side_streams
from work import SMALL, TINY, Shape, graph_function

MOST_OF_THE_EVENTS = 1.5
MANY = 16


def at_once(begin: Any, arrays: Any, out: Any, fresh: Any = None) -> None:
    """Stand in for the launch of a plan."""
    begin((), at_once, (), ())


at_once.operands = SimpleNamespace(fresh=True)  # type: ignore[attr-defined]
at_once.allocate = lambda count: [()] * count  # type: ignore[attr-defined]


class Empty:
    """A branch that begins as a graph function's does, and has nothing to launch."""

    def launch(self, branch: Any, args: Any, kwargs: Any) -> None:
        """How a fork launches it."""
        at_once(branch.begin, args, None)


def bare_events(driver: Any, stream: Any, count: int, names: dict[str, Any]) -> str:
    """The event calls of a fork of ``count`` states as statements, without a loop around them."""
    side = [driver.create_stream() for _ in range(count)]
    names |= {"record": driver.record_event, "wait": driver.wait_event, "caller": stream.ptr, "keep": side}
    lines = []
    for number, branch in enumerate(side):
        names |= {f"s{number}": branch.ptr, f"a{number}": driver.create_event(), f"b{number}": driver.create_event()}
        lines.append(f"record(a{number}, caller); wait(s{number}, a{number})")
    lines += [f"record(b{number}, s{number}); wait(caller, b{number})" for number in range(count)]
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=50, help="forks in one sample (default: %(default)s)")
    parser.add_argument("--states", type=side_streams, default=4, help="states of a fork (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, default=SMALL, help="the branches' convolution (default: %(default)s)")
    options = parse(parser, {"shape": TINY}, calls=2)
    count, shape = options.states, options.shape
    with pool_on_a_stream(options.driver) as (pool, stream):
        import numpy as np

        from handlepool import ParallelStates
        from handlepool.pool.context import LAUNCHES

        setattr(Empty, LAUNCHES, Empty.launch)
        driver = pool.driver
        rng = np.random.default_rng(0)
        x, w, y = shape.image(driver, rng), shape.filter(driver, rng), shape.output(driver)
        outs = [shape.output(driver) for _ in range(MANY)]
        conv = graph_function(shape)
        conv(x, w, out=y)
        states = ParallelStates(count)
        names: dict[str, Any] = {
            "states": states,
            "fork": partial(states.fork, ordered=False),  # the order is looked at in order.py
            "map": states.map,
            "items": range(MANY),
            "few": range(count),
        }
        names |= {"empty": Empty(), "nothing": lambda *_: None, "conv": conv, "x": x, "w": w, "outs": outs}
        events = f"bare events of {count} states"
        started = f"fork, start and join of {count} states"
        few = f"map of {count} empty branches"
        empty, function = f"fork of {count} empty branches", f"fork of {count} functions"
        many_empty, many_functions = f"fork of {MANY} empty branches", f"fork of {MANY} functions"
        many_convs, convs = f"fork of {MANY} convolutions", f"{MANY} convolutions, no fork"

        def around_run(run: str, number: int) -> str:
            return "with fork() as f:\n    run = f.run\n" + f"    {run}\n" * number

        conv_lines = [f"run(conv, x, w, out=outs[{number}])" for number in range(MANY)]
        statements = {
            events: bare_events(driver, stream, count, names),
            "fork without branches": "with fork() as f: pass",
            started: f"with fork() as f: f._leases.start_together({count})",
            few: "map(empty, few)",
            empty: around_run("run(empty)", count),
            function: around_run("run(nothing)", count),
            many_empty: around_run("run(empty)", MANY),
            many_functions: around_run("run(nothing)", MANY),
            f"map of {MANY} functions": "map(nothing, items)",
            many_convs: "with fork() as f:\n    run = f.run\n    " + "\n    ".join(conv_lines),
            convs: "\n".join(line.replace("run(conv, ", "conv(") for line in conv_lines),
            "with_state, a function": "states.with_state(0, nothing)",
        }
        around = synchronised(driver, stream)
        samples = interleaved({n: Case(s, names, options.calls, around) for n, s in statements.items()}, options.repeats)
        samples = {name: [value / 1e3 for value in values] for name, values in samples.items()}

        def each(many: str, few: str, more: int) -> list[float]:
            return [(a - b) / more for a, b in zip(samples[many], samples[few], strict=True)]

        each_taken = {"an empty branch more": each(many_empty, empty, MANY - count)} if count < MANY else {}
        if count < MANY:
            each_taken["a function's branch more"] = each(many_functions, function, MANY - count)
        each_taken["a convolution's branch, over the call alone"] = each(many_convs, convs, MANY)
        ratios = Ratios()
        ratios.compare(samples, started, events, MOST_OF_THE_EVENTS)
        ratios.compare(samples, few, events)
        ratios.compare(samples, empty, events)
        ratios.compare(samples, function, events)
        ratios.add(f"{many_convs} / {convs}", paired(samples[many_convs], samples[convs]))
        times = {
            "microseconds, host": {name: summary(values) for name, values in samples.items()},
            "microseconds each, host": {name: summary(values) for name, values in each_taken.items()},
        }
        publish(options, "forks", driver.name, times, ratios, states=count, shape=str(shape), calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
