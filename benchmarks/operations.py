"""Time single operations on the sizes of networks: the library's, torch's own kernels, and Inductor's.

A call is too short to be timed alone, and its launch would cost more than the call. So each operation is recorded many times
over in one program, and the program is replayed, beside a CUDA graph of as many torch calls. The result is the device's time
for one call. The same calls are also made eagerly, where the host is the limit. All calls find their operands in the cache.

A depthwise convolution is timed by cuDNN's plan and by the library's own kernel. A concatenation is timed together with the calls
that make its arrays: each array separate, or in its slice of the result.

Sizes come from the networks in `nets`, and for mobilenet_v3_large from a table. Every result is first compared with float64.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from common import Ratios, paired, pool_on_a_stream, publish, regions, summary
from nets import NETWORKS, Parameters
from nets.kinds import Reference, Torch
from nets.parameters import channels_last
from options import arguments, parse, positive
from peers import array_of, graph_of, tensor, torch_beside
from work import check

import handlepool
from handlepool import ops

OURS, EAGER = "handlepool", "handlepool, eager"
APART, SLICED = "made and concatenated", "made in slices"
TORCH_GRAPH, TORCH, INDUCTOR = "torch graph", "torch, eager", "Inductor graph"
OWN_KERNELS = ("add", "avg_pool2d", "concat", "max_pool2d", "mean2d")
SUMMED = "googlenet"
MOST_OF_TORCH, MOST_OF_THE_SUM = 1.0, 0.9
MOBILENET = "mobilenet_v3_large"
DEPTHWISE = {  # channels, kernel, stride, side: how often
    (16, 3, 1, 112): 1,
    (64, 3, 2, 112): 1,
    (72, 3, 1, 56): 1,
    (72, 5, 2, 56): 1,
    (120, 5, 1, 28): 2,
    (160, 3, 1, 28): 0,
    (240, 3, 2, 28): 1,
    (200, 3, 1, 14): 1,
    (184, 3, 1, 14): 2,
    (480, 3, 1, 14): 1,
    (672, 3, 1, 14): 1,
    (672, 5, 2, 14): 1,
    (960, 5, 1, 7): 2,
}
"""The depthwise convolutions of mobilenet_v3_large, and one that is none of its but was measured before."""
RESIDUALS = {(16, 112): 1, (24, 56): 1, (40, 28): 2, (80, 14): 3, (112, 14): 1, (160, 7): 2}
"""Channels and side of its sums without activation."""
SQUEEZED = {(72, 28): 1, (120, 28): 2, (480, 14): 1, (672, 14): 1, (672, 7): 1, (960, 7): 3}
"""Channels and side of its means."""


@dataclass(slots=True)
class Call:
    """An operation with its operands, and how often a network has it."""

    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int = 1
    # The calls that made the arrays of a concatenation.
    makers: tuple["Call", ...] = ()

    def __str__(self) -> str:
        shapes = "x".join(map(str, _first(self.args).shape))
        if self.operation in ("conv2d", "linear"):
            shapes += " by " + "x".join(map(str, self.args[1].shape))
        if self.operation == "concat":
            shapes = " and ".join("x".join(map(str, each.shape)) for each in self.args[0])
        window = [str(each) for each in self.args[1:] if isinstance(each, int)] if self.operation != "concat" else []
        names = [key if hasattr(value, "shape") else f"{key}={value}" for key, value in self.kwargs.items() if key != "bias"]
        return " ".join([self.operation, ", ".join([shapes, *window, *names])])

    def on(self, kind: Any, place: Callable[[Any], Any]) -> Callable[[], Any]:
        """The same call of another library's operation, with its operands there."""
        return partial(getattr(kind, self.operation), *_moved(self.args, place), **_moved(self.kwargs, place))


def _first(args: tuple[Any, ...]) -> Any:
    return args[0][0] if isinstance(args[0], list) else args[0]


def _moved(value: Any, place: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, place) for each in value)
    if isinstance(value, dict):
        return {key: _moved(each, place) for key, each in value.items()}
    return place(value) if hasattr(value, "shape") else value


class Noted:
    """Offer the library's operations, and note the arguments of each call."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self._made: dict[int, tuple[Any, Call]] = {}

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            makers = [self._made.get(id(array)) for array in args[0]] if operation == "concat" else []
            call = Call(operation, args, kwargs, makers=tuple(maker[1] for maker in makers if maker is not None))
            self.note(call)
            result = getattr(ops, operation)(*args, **kwargs)
            self._made[id(result)] = result, call  # kept, or another array could have its identity
            return result

        return noted

    def note(self, call: Call) -> None:
        """Count a call; those of the same geometry are one."""
        known = self.calls.setdefault(str(call), call)
        if known is not call:
            known.count += call.count


def calls_of(network: str, driver: Any, options: Any) -> Iterable[Call]:
    """The operations of a network, each geometry once."""
    p = Parameters(driver.asarray, options.dtype, options.thin)
    rng = np.random.default_rng(1)

    def images(channels: int, side: int) -> Any:
        values = rng.standard_normal((options.batch, channels, side, side), np.float32).astype(options.dtype)
        return driver.asarray(channels_last(values))

    noted = Noted()
    if network != MOBILENET:
        NETWORKS[network](p, images(3, options.side), noted)
    else:
        for (channels, kernel, stride, side), count in DEPTHWISE.items():
            filters = (rng.standard_normal((p.width(channels), 1, kernel, kernel), np.float32) / kernel).astype(options.dtype)
            bias = np.zeros(p.width(channels), options.dtype)
            how = {"bias": driver.asarray(bias), "stride": stride, "padding": kernel // 2, "groups": p.width(channels)}
            operands = images(p.width(channels), side), driver.asarray(channels_last(filters))
            noted.note(Call("conv2d", operands, how, count))
        for (channels, side), count in RESIDUALS.items():
            noted.note(Call("add", (images(p.width(channels), side), images(p.width(channels), side)), {}, count))
        for (channels, side), count in SQUEEZED.items():
            noted.note(Call("mean2d", (images(p.width(channels), side),), {}, count))
    if network == SUMMED:  # it has neither averages nor sums; its sizes are those that they are bounded on
        pooled = [call for call in noted.calls.values() if call.operation == "max_pool2d"]
        for call in pooled:
            noted.note(Call("avg_pool2d", call.args, call.kwargs, 0))
            x = call.args[0]
            noted.note(Call("add", (x, ops.add(x)), {"activation": "relu"}, 0))
    return noted.calls.values()


def repeated(call: Callable[[], Any], times: int) -> Callable[[], Any]:
    """So many calls in a row; the result is the last one's."""

    def run() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    return run


def cases_of(call: Call, driver: Any, torch: Any, options: Any, skipped: list[str]) -> dict[str, Callable[[], object]]:
    """Return the functions to time, once each gave the right result."""
    right = call.on(Reference(), lambda array: driver.asnumpy(array).astype(np.float64))()
    own = call.on(ops, lambda array: array)
    many = partial(repeated, times=options.times)
    program = handlepool.record(many(own))
    program.replay()
    check(driver, f"{call}, recorded", program.outputs, right)
    check(driver, str(call), own(), right)
    cases: dict[str, Callable[[], object]] = {OURS: program.replay, EAGER: many(own)}
    if torch is not None:
        theirs = call.on(Torch(torch), partial(tensor, torch))
        check(driver, f"{call}, torch", array_of(theirs()), right)
        cases |= {TORCH_GRAPH: graph_of(torch, many(theirs)), TORCH: many(theirs)}
        if options.inductor == "all" or (options.inductor == "kernels" and call.operation in OWN_KERNELS):
            try:
                torch.compiler.reset()  # or the geometries before count as recompilations
                fused = torch.compile(theirs.func, dynamic=False)
                fused = partial(fused, *theirs.args, **theirs.keywords)
                check(driver, f"{call}, Inductor", array_of(fused()), right)
                cases[INDUCTOR] = graph_of(torch, many(fused))
            # A compiler may raise any error. Its times are left out.
            except Exception as error:
                skipped.append(f"{call}, Inductor: {type(error).__name__}")
    return cases


def made(call: Call, driver: Any, options: Any) -> dict[str, Callable[[], object]]:
    """Time a concatenation with the calls that make its arrays: separate arrays, and each array in its slice of one."""
    if not call.makers or any(array.shape[1] % 8 for array in call.args[0]):  # a slice begins at a multiple of 16 bytes
        return {}
    arrays, axis = call.args
    makers = [maker.on(ops, lambda array: array) for maker in call.makers]
    whole = ops.concat(arrays, axis)
    right = driver.asnumpy(whole).astype(np.float64)
    ends = np.cumsum([0, *(array.shape[axis] for array in arrays)]).tolist()
    slices = [whole[:, start:stop] for start, stop in pairwise(ends)]

    def apart() -> Any:
        return ops.concat([make() for make in makers], axis, out=whole)

    def sliced() -> Any:
        for make, part in zip(makers, slices, strict=True):
            make(out=part)
        return whole

    cases: dict[str, Callable[[], object]] = {}
    for name, case in ((APART, apart), (SLICED, sliced)):
        program = handlepool.record(repeated(case, options.times))
        whole[...] = 0
        program.replay()
        check(driver, f"{call}, {name}", whole, right)
        cases[name] = program.replay
    return cases


def chosen(calls: Iterable[Call], options: Any) -> list[Call]:
    """The calls of the operations that were asked for, at most so many of each."""
    kept: list[Call] = []
    for call in calls:
        same = sum(call.operation == other.operation for other in kept)
        if call.operation in options.operation and (options.most is None or same < options.most):
            kept.append(call)
    return kept


def compare(ratios: Ratios, network: str, found: dict[str, tuple[Call, dict[str, list[float]]]], options: Any) -> None:
    """Compare each operation with torch's by its bound, and the sum over a network of the operations with kernels of the
    library's own.
    """
    judged = (options.batch, options.side, options.thin, options.dtype) == (1, 224, 1, "float16")
    for name, (call, samples) in found.items():
        bounded = judged and (
            (network == SUMMED and call.operation in OWN_KERNELS) or (network == MOBILENET and call.operation == "conv2d")
        )
        ratios.compare(samples, OURS, TORCH_GRAPH, MOST_OF_TORCH if bounded else None, f", {network}, {name}")
        ratios.compare(samples, OURS, INDUCTOR, None, f", {network}, {name}")
        ratios.compare(samples, SLICED, APART, None, f", {network}, {name}")
    for peer in (TORCH_GRAPH, INDUCTOR):
        both = [
            (call.count, samples[OURS], samples[peer])
            for call, samples in found.values()
            if call.operation in OWN_KERNELS and call.count and peer in samples
        ]
        if both:
            sums = [
                [sum(count * values[place][sample] for count, *values in both) for sample in range(options.repeats)]
                for place in (0, 1)
            ]
            bounded = judged and network == SUMMED and peer == TORCH_GRAPH and options.most is None
            most = MOST_OF_THE_SUM if bounded and set(options.operation) >= set(OWN_KERNELS) else None
            ratios.add(f"{OURS} / {peer}, {network}, the sum of own kernels", paired(*sums), most)


def main() -> int:
    parser = arguments(__doc__)
    networks = [*NETWORKS, MOBILENET]
    every = [*OWN_KERNELS, "conv2d", "linear"]
    parser.add_argument("--calls", type=positive, default=3, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--times", type=positive, default=50, help="calls in one program (default: %(default)s)")
    usual = [SUMMED, "resnet18", MOBILENET]
    parser.add_argument("--network", nargs="+", choices=networks, default=usual, help="(default: three)")
    parser.add_argument("--operation", nargs="+", choices=every, default=every, help="(default: all)")
    parser.add_argument("--most", type=positive, help="geometries of each operation (default: all)")
    parser.add_argument("--batch", type=positive, default=1, help="images (default: %(default)s)")
    parser.add_argument("--side", type=positive, default=224, help="pixels, 33 or more (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the numbers of channels (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    told = "operations that Inductor, which compiles for seconds, also runs: own kernels, all, or none (default: %(default)s)"
    parser.add_argument("--inductor", choices=("kernels", "all", "none"), default="kernels", help=told)
    small = {"thin": 16, "side": 40, "dtype": "float32", "times": 5, "most": 3}
    options = parse(parser, small, calls=1, times=2, most=1)
    if options.side < 33:
        parser.error(f"--side {options.side}: nothing would be left of images of less than 33 pixels")
    times: dict[str, Any] = {}
    ratios = Ratios()
    skipped: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        if torch is None:
            skipped.append(why)
        for network in options.network:
            found = {}
            for call in chosen(calls_of(network, driver, options), options):
                cases = cases_of(call, driver, torch, options, skipped)
                cases |= made(call, driver, options)
                samples = regions(cases, options.repeats, options.calls, driver, stream)["device"]
                samples = {name: [value / options.times for value in values] for name, values in samples.items()}
                found[str(call)] = call, samples
                times[f"{network}, {call}, microseconds a call, device"] = {n: summary(v) for n, v in samples.items()}
            counts[network] = {name: call.count for name, (call, _) in found.items()}
            compare(ratios, network, found, options)
        sizes = {key: getattr(options, key) for key in ("batch", "side", "thin", "dtype")}
        more = {"times_in_a_program": options.times, "counts": counts}
        publish(options, "operations", driver.name, times, ratios, skipped, **sizes, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
