"""Find when side streams pay: convolutions of several sizes over 1 to 16 states, eager and recorded, beside alternatives.

The work is always the same number of independent convolutions of one shape, each with its own image and filters. The
alternatives are torch on one stream, torch with streams by hand, a CUDA graph of each, and one native convolution of as much
arithmetic if the work has such a form: *grouped* (images and filters concatenated along channels), *stacked* (one image, all
filters) or *batched* (all images, one set of filters). Their operands lie together beforehand; that copy is not timed.

There are three clocks, each from an idle stream: *host*, until the call returns; *device*, between an event before and an event
after on the caller's stream, fork to join; *wall*, until the host knows that all work is done. Bounds are for the device's
clock. On the wall clock both sides of a ratio include the host's wait for the GPU, which is the same for both.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from common import CLOCKS, Ratios, pool_on_a_stream, publish, regions, summary
from options import arguments, parse, positive, side_streams
from peers import graph_of, over_streams, tensor, torch_beside
from work import SMALL, TINY, Shape, check, graph_function

import handlepool

SHAPES = [
    SMALL,
    Shape(1, 256, 14, 256, 3, "float16", "NHWC"),
    Shape(8, 64, 56, 32, 3, "float16", "NHWC"),
    Shape(2, 512, 14, 512, 3, "float32", "NHWC"),
    Shape(1, 512, 28, 512, 3, "float16", "NHWC"),
    Shape(16, 256, 28, 256, 3, "float16", "NHWC"),
]
BOUNDED = 16  # convolutions of the shape SMALL

TORCH_ONE, TORCH_GRAPH_ONE = "torch, one stream", "torch graph, one stream"


class Work:
    """``count`` convolutions of a shape, and their right results."""

    def __init__(self, pool: Any, shape: Shape, count: int) -> None:
        self.pool = pool
        self.driver = driver = pool.driver
        self.shape = shape
        self.count = count
        self.rng = rng = np.random.default_rng(0)
        self.images = [shape.image(driver, rng) for _ in range(count)]
        self.filters = [shape.filter(driver, rng) for _ in range(count)]
        self.outs = [shape.output(driver) for _ in range(count)]
        self.conv = graph_function(shape)
        self.right = [driver.asnumpy(self.conv(x, w)).astype(np.float64) for x, w in zip(self.images, self.filters, strict=True)]

    def one_stream(self) -> Callable[[], object]:
        """Calls on the caller's stream, one after the other."""
        conv, outs = self.conv, self.outs
        calls = list(zip(self.images, self.filters, outs, strict=True))

        def region() -> list[Any]:
            for x, w, y in calls:
                conv(x, w, out=y)
            return outs

        return self.checked("one stream", region)

    def forked(self, states: int, convolve: Any = None, **options: Any) -> Callable[[], object]:
        """A fork with a branch for each, outputs given."""
        fork, outs = handlepool.ParallelStates(states).fork, self.outs
        convolve = convolve or self.conv
        calls = list(zip(self.images, self.filters, outs, strict=True))

        def region() -> list[Any]:
            with fork() as forked:
                run = forked.run
                for x, w, y in calls:
                    run(convolve, x, w, out=y, **options)
            return outs

        return self.checked(f"fork, {states} states", region)

    def mapped(self, states: int, *, given: bool = False) -> Callable[[], object]:
        """A map of the graph function, which allocates its outputs, or has them given."""
        over, conv, images, filters = handlepool.ParallelStates(states).map, self.conv, self.images, self.filters
        outs = self.outs if given else None

        def region() -> list[Any]:
            return over(conv, images, filters, out=outs)

        if given:
            return self.checked(f"map into outputs, {states} states", region)
        for number, y in enumerate(region()):
            check(self.driver, f"map, {states} states", y, self.right[number])
        return region

    def checked(self, name: str, region: Callable[[], object]) -> Callable[[], object]:
        """The region, after it wrote every output right."""
        for y in self.outs:
            y[...] = np.nan
        region()
        for y, right in zip(self.outs, self.right, strict=True):
            check(self.driver, name, y, right)
        return region

    def native(self) -> tuple[dict[str, Callable[[], object]], dict[str, tuple[Any, Any, int]], list[str]]:
        """Return one convolution instead of many: the function, its operands and groups for torch, and cuDNN's refusal."""
        shape, driver, rng, count = self.shape, self.driver, self.rng, self.count
        operands = {
            "grouped": (shape.image(driver, rng, channels=count), shape.filter(driver, rng, count), count),
            "stacked": (shape.image(driver, rng), shape.filter(driver, rng, count), 1),
            "batched": (shape.image(driver, rng, batch=count), shape.filter(driver, rng), 1),
        }
        cases: dict[str, Callable[[], object]] = {}
        refused = []
        for name, (x, w, groups) in operands.items():
            y = shape.output(driver, count, 1) if name == "batched" else shape.output(driver, 1, count)

            def region(x: Any = x, w: Any = w, y: Any = y, groups: int = groups) -> None:
                handlepool.conv2d(x, w, padding=shape.padding, groups=groups, out=y)

            try:
                region()
            except handlepool.GraphNotSupportedError:
                refused.append(f"{shape}: {name}: cuDNN has no plan")
            else:
                cases[name] = region
        return cases, operands, refused

    def torch_cases(self, torch: Any, states: list[int], operands: dict[str, tuple[Any, Any, int]]) -> dict[str, Any]:
        """The same in torch, eager and as CUDA graphs."""
        conv2d, padding = torch.nn.functional.conv2d, self.shape.padding
        pairs = [(tensor(torch, x), tensor(torch, w)) for x, w in zip(self.images, self.filters, strict=True)]
        calls: list[Callable[[], object]] = [lambda x=x, w=w: conv2d(x, w, padding=padding) for x, w in pairs]

        def one_stream() -> list[object]:
            return [conv2d(x, w, padding=padding) for x, w in pairs]

        cases: dict[str, Callable[[], object]] = {TORCH_ONE: one_stream, TORCH_GRAPH_ONE: graph_of(torch, one_stream)}
        for count in states:
            if count > 1:
                region = over_streams(torch, count, calls)
                cases[f"torch, {count} streams"] = region
                cases[f"torch, {count} streams, one context each"] = over_streams(torch, count, calls, gathered=True)
                cases[f"torch graph, {count} streams"] = graph_of(torch, region)
        for name, (x, w, groups) in operands.items():
            tx, tw = tensor(torch, x), tensor(torch, w)
            cases[f"torch, {name}"] = lambda tx=tx, tw=tw, groups=groups: conv2d(tx, tw, padding=padding, groups=groups)
        return cases


def compare(ratios: Ratios, clock: str, samples: dict[str, list[float]], *, judged: bool) -> None:
    """The ratios that have bounds, and where they have."""

    def add(above: str, below: str, bound: float) -> None:
        ratios.compare(samples, above, below, bound if judged else None, f", {clock}")

    add("map into outputs, 4 states", "torch, 4 streams", 0.42)
    add("map into outputs, 4 states", TORCH_ONE, 0.85)
    add("map, 4 states", "torch, 4 streams", 0.6)
    add("map, 4 states", TORCH_ONE, 1.0)
    add("recorded, 8 states", "torch graph, 8 streams", 1.0)
    add("recorded, 8 states", "recorded, one stream", 0.25)
    for peer in ("torch, 4 streams", "torch, 4 streams, one context each", TORCH_ONE):
        ratios.compare(samples, "fork, 4 states", peer, None, f", {clock}")
    ratios.compare(samples, "recorded, 8 states", TORCH_GRAPH_ONE, None, f", {clock}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=10, help="regions in one sample (default: %(default)s)")
    parser.add_argument("--count", type=positive, default=BOUNDED, help="convolutions in a region (default: %(default)s)")
    parser.add_argument("--states", type=side_streams, nargs="+", default=[1, 2, 4, 8, 16], help="(default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES, help="such as 1x64x14x64x3:float16:NHWC")
    options = parse(parser, {"shape": [TINY]}, calls=2, count=3, states=[1, 2])
    times: dict[str, Any] = {}
    ratios = Ratios()
    skipped: list[str] = []
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        for shape in options.shape:
            work = Work(pool, shape, options.count)
            cases: dict[str, Callable[[], object]] = {"one stream": work.one_stream()}
            for count in options.states:
                cases[f"fork, {count} states"] = work.forked(count)
                cases[f"map, {count} states"] = work.mapped(count)
                cases[f"map into outputs, {count} states"] = work.mapped(count, given=True)
            if 4 in options.states:
                cases["fork of conv2d, 4 states"] = work.forked(4, handlepool.conv2d, padding=shape.padding)
            for count in (None, *options.states):
                name = "recorded, one stream" if count is None else f"recorded, {count} states"
                program = handlepool.record(work.one_stream() if count is None else work.forked(count))
                cases[name] = work.checked(name, program.replay)
            native, operands, refused = work.native()
            cases |= native
            skipped += refused
            if torch is not None:
                cases |= work.torch_cases(torch, options.states, operands)
            samples = regions(cases, options.repeats, options.calls, driver, stream)
            for clock in CLOCKS:
                heading = f"{options.count} x {shape}, microseconds, {clock}"
                times[heading] = {name: summary(values) for name, values in samples[clock].items()}
            if (shape, options.count) == (SMALL, BOUNDED):
                compare(ratios, "device", samples["device"], judged=True)
                compare(ratios, "wall", samples["wall"], judged=False)
        if torch is None:
            skipped.append(why)
        more = {"count": options.count, "states": options.states}
        publish(options, "overlap", driver.name, times, ratios, skipped, shapes=list(map(str, options.shape)), **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
