"""Whole networks, plainly written on the library's operations (`nets`): eagerly on one stream and with one fork, in which each
call is a branch; recorded, the same two, and with lanes; and torch, eagerly and in a CUDA graph. On a GPU the network is tuned,
too, and its convolutions are timed before and after, beside torch's.

Every output is compared with float64's before it is timed. Batch norm is folded into the weights, which are random.
"""

import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
from common import CLOCKS, Ratios, pool_on_a_stream, publish, regions, summary
from nets import NETWORKS, Parameters
from nets.kinds import Reference, Torch, forked
from nets.parameters import channels_last
from operations import Noted
from options import arguments, parse, positive, side_streams
from peers import array_of, graph_of, tensor, torch_beside
from work import check

import handlepool
from handlepool import ops

ONE, RECORDED_ONE = "one stream", "recorded, one stream"
CONVOLUTIONS = "convolutions, one stream"
MOST_SECONDS = 20.0
"""Of tuning a network."""
MOST_OF_ONE_STREAM = 1.3
"""What googlenet with one fork may take of one stream, run eagerly at batch 1 with 4 states."""


class Network:
    """A network, its images, and its right scores."""

    def __init__(self, driver: Any, name: str, options: Any) -> None:
        self.driver = driver
        self.run = NETWORKS[name]
        self.p = Parameters(driver.asarray, options.dtype, options.thin)
        shape = options.batch, 3, options.side, options.side
        images = np.random.default_rng(1).standard_normal(shape, np.float32).astype(options.dtype)
        self.x = driver.asarray(channels_last(images))
        self.run(self.p, self.x)  # which makes the parameters
        self.right = self.run(self.p.elsewhere(np.float64), np.float64(images), Reference())

    def checked(self, name: str, case: Callable[[], Any], scores: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """The case, after its scores were right."""
        y = case() if scores is None else (case(), scores())[1]
        check(self.driver, name, array_of(y), self.right)
        return case

    def cases(self, states: list[int]) -> dict[str, Callable[[], Any]]:
        """One stream and forks, eagerly and recorded."""
        found: dict[str, Callable[[], Any]] = {}
        for count in (None, *states):
            at = ONE if count is None else f"one fork, {count} states"
            case = partial(self.run, self.p, self.x)
            if count is not None:
                case = partial(forked, handlepool.ParallelStates(count), self.run, self.p, self.x)
            found[at] = self.checked(at, case)
            program = handlepool.record(case)
            at = f"recorded, {at}"
            found[at] = self.checked(at, program.replay, lambda program=program: program.outputs)
        return found

    def lane_cases(self, lanes: list[int]) -> dict[str, Callable[[], Any]]:
        """Recorded with so many lanes, as plain code."""
        found: dict[str, Callable[[], Any]] = {}
        for count in lanes:
            program = handlepool.record(self.run, self.p, self.x, lanes=count)
            how = program.explain()
            print(f"{count} lanes: {how.got} of {how.wanted} were there, {len(how.steps)} calls, {how.nbytes:,} bytes")
            at = f"recorded, {count} lanes"
            found[at] = self.checked(at, program.replay, lambda program=program: program.outputs)
        return found

    def torch_cases(self, torch: Any) -> dict[str, Callable[[], Any]]:
        """The same in torch."""
        place = partial(tensor, torch)
        p = self.p.elsewhere(lambda values: place(self.driver.asarray(values)))
        eager = partial(self.run, p, place(self.x), Torch(torch))
        return {"torch": self.checked("torch", eager), "torch graph": graph_of(torch, eager)}


def every(calls: list[tuple[Callable[[], Any], int]]) -> list[Any]:
    """Each call as often as its network has it."""
    return [call() for call, count in calls for _ in range(count)]


def tuned_cases(network: Network, torch: Any) -> tuple[dict[str, Callable[[], Any]], list[float]]:
    """A network's convolutions on one stream, with what is behind them, before `handlepool.tune` and after it; torch's, with the
    first plan and with the quickest; the network after it; and how many seconds it took."""
    noted = Noted()
    network.run(network.p, network.x, noted)
    found = [call for call in noted.calls.values() if call.operation == "conv2d"]

    def convolutions(kind: Any, place: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        return partial(every, [(call.on(kind, place), call.count) for call in found])

    own, run = convolutions(ops, lambda array: array), partial(network.run, network.p, network.x)
    cases: dict[str, Callable[[], Any]] = {CONVOLUTIONS: handlepool.record(own).replay}
    seconds = []
    if network.driver.name == "cuda":
        start = monotonic()
        tunings = handlepool.tune(run)
        seconds.append(monotonic() - start)
        print(
            f"{len(tunings)} plans tuned in {seconds[0]:.1f} s, of which {sum(each.building for each in tunings):.1f} built plans"
        )
        cases[f"{CONVOLUTIONS}, tuned"] = handlepool.record(own).replay
        program = handlepool.record(run)
        at = f"{RECORDED_ONE}, tuned"
        cases[at] = network.checked(at, program.replay, lambda: program.outputs)
    if torch is not None:
        theirs = convolutions(Torch(torch), partial(tensor, torch))
        cases[f"{CONVOLUTIONS}, torch graph"] = graph_of(torch, theirs)
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            cases[f"{CONVOLUTIONS}, torch graph, cudnn.benchmark"] = graph_of(torch, theirs)
        finally:
            torch.backends.cudnn.benchmark = before
    return cases, seconds


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=5, help="runs in one sample (default: %(default)s)")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="(default: all)")
    parser.add_argument("--states", type=side_streams, nargs="+", default=[2, 4, 8], help="(default: %(default)s)")
    parser.add_argument("--lanes", type=side_streams, nargs="+", default=[1, 4, 8, 16], help="(default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=1, help="images (default: %(default)s)")
    parser.add_argument("--side", type=positive, default=224, help="pixels, 33 or more (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the numbers of channels (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    small = {"thin": 16, "side": 40, "dtype": "float32"}
    options = parse(parser, small, calls=1, states=[2], lanes=[1, 4], network=["googlenet", "ensemble"])
    if options.side < 33:
        parser.error(f"--side {options.side}: nothing would be left of images of less than 33 pixels")
    times: dict[str, Any] = {}
    ratios = Ratios()
    skipped: list[str] = []
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        if torch is None:
            skipped.append(why)
        for name in options.network:
            network = Network(driver, name, options)
            cases = network.cases(options.states) | network.lane_cases(options.lanes)
            if torch is not None:
                cases |= network.torch_cases(torch)
            more, seconds = tuned_cases(network, torch)
            cases |= more
            if seconds:
                ratios.add(f"seconds of handlepool.tune, {name}", seconds, MOST_SECONDS)
            samples = regions(cases, options.repeats, options.calls, driver, stream)
            for clock in CLOCKS:
                times[f"{name}, microseconds, {clock}"] = {case: summary(values) for case, values in samples[clock].items()}
            bounded = name == "googlenet" and (options.batch, options.side, options.thin) == (1, 224, 1)
            for count in options.states:
                most = MOST_OF_ONE_STREAM if bounded and count == 4 else None
                ratios.compare(samples["wall"], f"one fork, {count} states", ONE, most, f", {name}, wall")
                recorded = f"recorded, one fork, {count} states"
                for peer in (RECORDED_ONE, "torch graph"):
                    ratios.compare(samples["device"], recorded, peer, None, f", {name}, device")
            for count in options.lanes:
                for peer in (RECORDED_ONE, "torch graph"):
                    ratios.compare(samples["device"], f"recorded, {count} lanes", peer, None, f", {name}, device")
            for mine, peer in ((ONE, "torch"), (RECORDED_ONE, "torch graph")):
                ratios.compare(samples["wall"], mine, peer, None, f", {name}, wall")
            tuned = f"{CONVOLUTIONS}, tuned"
            ratios.compare(samples["device"], tuned, CONVOLUTIONS, None, f", {name}, device")
            best = f"{CONVOLUTIONS}, torch graph, cudnn.benchmark"
            ratios.compare(samples["device"], tuned, best, 1.0 if options.thin == 1 else None, f", {name}, device")
            ratios.compare(samples["device"], f"{RECORDED_ONE}, tuned", RECORDED_ONE, None, f", {name}, device")
        sizes = {key: getattr(options, key) for key in ("batch", "side", "thin", "dtype", "states", "lanes")}
        publish(options, "networks", driver.name, times, ratios, skipped, **sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
