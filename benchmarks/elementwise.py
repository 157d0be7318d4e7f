"""Time kernels over elements of broadcasting arrays on the sizes of networks: the library's, torch's own, and Inductor's.

Each case is recorded many times over in one program, and the program is replayed, beside a CUDA graph of as many torch calls.
The result is the device's time for one call, with the operands in the cache. A gate is one kernel here and two of torch's, so
the product alone is timed as well. Every result is first compared with float64.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Ratios, paired, pool_on_a_stream, publish, regions, summary
from nets.parameters import channels_last
from operations import repeated
from options import arguments, parse, positive
from peers import array_of, graph_of, tensor, torch_beside
from work import check

import handlepool
from handlepool import math as over

OURS, EAGER = "handlepool", "handlepool, eager"
TORCH_GRAPH, INDUCTOR = "torch graph", "Inductor graph"
MOST_OF_TORCH, MOST_OF_INDUCTOR = 1.05, 1.1

GATES = {
    "efficientnet_b0": {
        (32, 112): 1,
        (96, 56): 1,
        (144, 56): 1,
        (144, 28): 1,
        (240, 28): 1,
        (240, 14): 1,
        (480, 14): 3,
        (672, 14): 2,
        (672, 7): 1,
        (1152, 7): 4,
    },
    "mobilenet_v3_large": {(72, 28): 1, (120, 28): 2, (480, 14): 1, (672, 14): 1, (672, 7): 1, (960, 7): 2},
}
"""Count the squeeze-and-excite scalings of a network, by channels and side of the scaled array."""
SCALES = {(96, 56): 3, (192, 28): 3, (384, 14): 9, (768, 7): 3}
"""Channels and side of the layer scales of convnext_tiny, with the residual that follows."""
SUMS = {
    "by channel": ((64, 112, 112), (64, 1, 1)),
    "by row": ((197, 3072), (3072,)),
    "positions of ViT-B/16": ((197, 768), (1, 197, 768)),
    "scores of a window": ((64, 3, 49, 49), (3, 49, 49)),
}
"""Shapes of sums that broadcast, the first one without the images."""


@handlepool.elementwise
def sigmoid_gate(x, s):
    return x * over.sigmoid(s)


@handlepool.elementwise
def hardsigmoid_gate(x, s):
    return x * over.hardsigmoid(s)


@handlepool.elementwise
def layer_scale(x, scale, shortcut):
    return x * scale + shortcut


@dataclass(frozen=True, slots=True)
class Case:
    """Hold arrays, the computation of each library over them, and the count of that computation in a network."""

    network: str
    name: str
    arrays: Sequence[Any]
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    right: Callable[..., Any]
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}, {' and '.join('x'.join(map(str, array.shape)) for array in self.arrays)}"


def cases_of(driver: Any, torch: Any, options: Any) -> Iterable[Case]:
    """All cases, with random arrays."""
    rng = np.random.default_rng(1)

    def array(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32).astype(options.dtype)
        return driver.asarray(channels_last(values) if len(shape) == 4 and options.layout == "nhwc" else values)

    def thin(channels: int) -> int:
        return max(channels // options.thin, 1)

    functional = None if torch is None else torch.nn.functional
    gates: dict[str, tuple[Any, Any, Any]] = {
        "efficientnet_b0": (sigmoid_gate, lambda x, s: x * torch.sigmoid(s), lambda x, s: x / (1 + np.exp(-s))),
        "mobilenet_v3_large": (
            hardsigmoid_gate,
            lambda x, s: x * functional.hardsigmoid(s),
            lambda x, s: x * np.clip(s + 3, 0, 6) / 6,
        ),
    }
    for network, sizes in GATES.items():
        for (channels, side), count in sizes.items():
            x = array(options.batch, thin(channels), side, side)
            s = array(options.batch, thin(channels), 1, 1)
            yield Case(network, "gate", (x, s), *gates[network], count)
            yield Case(network, "product", (x, s), handlepool.multiply, lambda x, s: x * s, lambda x, s: x * s, count)
    for (channels, side), count in SCALES.items():
        x, shortcut = (array(options.batch, thin(channels), side, side) for _ in range(2))
        scale = array(1, thin(channels), 1, 1)
        scaled = lambda x, scale, shortcut: x * scale + shortcut  # noqa: E731 - of torch's tensors, and of NumPy's arrays
        yield Case("convnext_tiny", "layer scale", (x, scale, shortcut), layer_scale, scaled, scaled, count)
    for name, (shape, other) in SUMS.items():
        x = array(options.batch, *shape)
        yield Case("sums", name, (x, array(*other)), handlepool.add, lambda x, y: x + y, lambda x, y: x + y)


def regions_of(case: Case, driver: Any, torch: Any, options: Any, skipped: list[str]) -> dict[str, Callable[[], object]]:
    """Return the functions to time, once each gave the right result."""
    right = case.right(*(driver.asnumpy(array).astype(np.float64) for array in case.arrays))

    def own() -> Any:
        return case.ours(*case.arrays)

    program = handlepool.record(repeated(own, options.times))
    program.replay()
    check(driver, f"{case}, recorded", program.outputs, right)
    check(driver, str(case), own(), right)
    found: dict[str, Callable[[], object]] = {OURS: program.replay, EAGER: repeated(own, options.times)}
    if torch is None:
        return found
    tensors = [tensor(torch, array) for array in case.arrays]

    def theirs() -> Any:
        return case.torchs(*tensors)

    check(driver, f"{case}, torch", array_of(theirs()), right)
    found[TORCH_GRAPH] = graph_of(torch, repeated(theirs, options.times))
    if options.inductor:
        try:
            torch.compiler.reset()  # or the geometries before count as recompilations
            fused = torch.compile(case.torchs, dynamic=False)
            check(driver, f"{case}, Inductor", array_of(fused(*tensors)), right)
            found[INDUCTOR] = graph_of(torch, repeated(lambda: fused(*tensors), options.times))
        # A compiler may raise any error. Its times are left out.
        except Exception as error:
            skipped.append(f"{case}, Inductor: {type(error).__name__}")
    return found


def compare(ratios: Ratios, network: str, found: list[tuple[Case, dict[str, list[float]]]], options: Any) -> None:
    """Each case against torch's kernels, and the sum over a network against Inductor's."""
    judged = (options.thin, options.dtype) == (1, "float16")
    for case, samples in found:
        ratios.compare(samples, OURS, TORCH_GRAPH, MOST_OF_TORCH if judged else None, f", {network}, {case}")
        ratios.compare(samples, OURS, INDUCTOR, None, f", {network}, {case}")
    both = [(case.count, samples) for case, samples in found if case.name != "product" and INDUCTOR in samples]
    if both:
        ours, theirs = (
            [sum(count * samples[name][sample] for count, samples in both) for sample in range(options.repeats)]
            for name in (OURS, INDUCTOR)
        )
        bound = MOST_OF_INDUCTOR if judged else None
        ratios.add(f"{OURS} / {INDUCTOR}, {network}, the sum", paired(ours, theirs), bound)


def main() -> int:
    parser = arguments(__doc__)
    networks = [*GATES, "convnext_tiny", "sums"]
    parser.add_argument("--calls", type=positive, default=3, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--times", type=positive, default=50, help="calls in one program (default: %(default)s)")
    parser.add_argument("--network", nargs="+", choices=networks, default=networks, help="(default: all)")
    parser.add_argument("--most", type=positive, help="cases of each network (default: all)")
    parser.add_argument("--batch", type=positive, default=1, help="images (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the numbers of channels (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    parser.add_argument("--layout", choices=("nhwc", "nchw"), default="nhwc", help="of images (default: %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="time Inductor's kernels as well, which it compiles for seconds")
    options = parse(parser, {"thin": 16, "dtype": "float32", "times": 5, "most": 3}, calls=1, times=2, most=2)
    times: dict[str, Any] = {}
    ratios = Ratios()
    skipped: list[str] = []
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        if torch is None:
            skipped.append(why)
        every = [case for case in cases_of(driver, torch, options) if case.network in options.network]
        for network in options.network:
            found = []
            for case in [case for case in every if case.network == network][: options.most]:
                timed = regions_of(case, driver, torch, options, skipped)
                samples = regions(timed, options.repeats, options.calls, driver, stream)["device"]
                samples = {name: [value / options.times for value in values] for name, values in samples.items()}
                found.append((case, samples))
                times[f"{network}, {case}, microseconds a call, device"] = {n: summary(v) for n, v in samples.items()}
            compare(ratios, network, found, options)
        counts = {f"{case.network}, {case}": case.count for case in every}
        sizes = {key: getattr(options, key) for key in ("batch", "thin", "dtype", "layout")}
        publish(
            options, "elementwise", driver.name, times, ratios, skipped, **sizes, times_in_a_program=options.times, counts=counts
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
