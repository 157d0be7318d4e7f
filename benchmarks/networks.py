"""Time whole networks, plainly written on the library's operations (`nets`), beside torch's and Inductor's.

`--way` selects from the ways to run each network:

    eager, forks            on one stream, and with one fork, in which each call is a branch; eagerly and recorded
    lanes                   recorded with each number of lanes
    tuned                   recorded with 16 lanes, then tuned: `Program.tune` finds the number of lanes
    plans                   one lane once more, with the plans that `handlepool.tune` found before; and as `inside`
    inside                  recorded with `plans=True`, and tuned by `Program.tune(plans=True)`
    convolutions            the network's convolutions alone, before that and after it
    torch, torch-graph      eagerly, and in a CUDA graph
    reduce-overhead         torch.compile(mode="reduce-overhead")
    inductor                Inductor with frozen weights and cudnn.benchmark, in a CUDA graph made by hand

Every output is compared with float64 before it is timed. Batch norm is folded into the weights, which are random. A peer that
cannot run a network becomes a line, and the next peer runs. The results are written after each network. JAX has a process of
its own: `networks_jax.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any

import compiled
import kernels
import numpy as np
from common import CLOCKS, Ratios, pool_on_a_stream, print_table, publish, regions, summary, write
from nets import MODERN, NETWORKS, Parameters
from nets.kinds import Reference, Torch, forked
from nets.parameters import channels_last
from operations import Noted
from options import arguments, parse, positive, side_streams
from peers import array_of, graph_of, graphed, tensor, torch_beside
from work import check

import handlepool
from handlepool import ops

WAYS = (
    *("eager", "forks", "lanes", "tuned", "plans", "inside", "convolutions"),
    *("torch", "torch-graph", "reduce-overhead", "inductor"),
)
ONE, RECORDED_ONE = "one stream", "recorded, one stream"
ONE_LANE, TUNED, PLANS = "recorded, 1 lane", "recorded, tuned", ", tuned plans"
TORCH, GRAPH, REDUCED, INDUCTOR = "torch", "torch graph", "reduce-overhead", "Inductor"
CONVOLUTIONS = "convolutions, one stream"
LANES_BEFORE = 16
"""Of a recording that is tuned."""
MOST_SECONDS = 20.0
"""Of tuning a network's plans."""
MOST_OF_ONE_STREAM = 1.3
"""The bound of googlenet with one fork, relative to one stream, run eagerly at batch 1 with 4 states."""
MOST_OF_INDUCTOR = {
    "googlenet": {"device": 0.66, "wall": 0.70},
    "squeezenet1_1": {"device": 0.90, "wall": 0.90},
    "resnet18": {"device": 0.92, "wall": 0.92},
}
MOST_OF_ONE_LANE = {"ensemble": 0.25}
"""On the device, at batch 1 in float16; of others, and elsewhere, `NO_SLOWER`."""
NO_SLOWER = 1.03
MOST_OF_TORCHS_ERROR = 1.5
TRIAL = "googlenet_stacked"
"""A network that is another one, written in another way."""
ANY = (Exception, SystemExit)
"""The errors that end a peer: a compiler may raise any error, and SystemExit means wrong scores."""
Scores = Callable[[], Any] | None


def several(found: Any) -> list[Any]:
    """Return the results of a network with one head or more as a list."""
    return list(found) if isinstance(found, (list, tuple)) else [found]


class Network:
    """Hold a network, its images, its right scores, and the functions to time.

    Attributes
    ----------
    cases : dict
        The functions by name, once their scores were right.
    errors, seconds, lanes : dict
        By case: the largest relative error of a head, the seconds to make it, and the lanes that tuning chose.
    plans : dict
        How many changes of plans were tried inside the program, and how many stayed.
    skipped : list of str
        The cases that could not be made, with the reason.
    """

    def __init__(self, driver: Any, name: str, options: Any) -> None:
        self.driver = driver
        self.name = name
        self.run = (NETWORKS | MODERN)[name]
        self.p = Parameters(driver.asarray, options.dtype, options.thin)
        shape = options.batch, 3, options.side, options.side
        images = np.random.default_rng(1).standard_normal(shape, np.float32).astype(options.dtype)
        self.x = driver.asarray(channels_last(images))
        self.run(self.p, self.x)  # which makes the parameters
        self.right = self.run(self.p.elsewhere(np.float64), np.float64(images), Reference())
        self.cases: dict[str, Callable[[], Any]] = {}
        self.errors: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.lanes: dict[str, int] = {}
        self.plans: dict[str, float] = {}
        self.skipped: list[str] = []

    def checked(self, name: str, case: Callable[[], Any], scores: Scores = None) -> Callable[[], Any]:
        """The case, after its scores were right."""
        found = several(case() if scores is None else (case(), scores())[1])
        pairs = zip(found, several(self.right), strict=True)
        self.errors[name] = max(check(self.driver, name, array_of(each), right) for each, right in pairs)
        return case

    def add(
        self, name: str, make: Callable[[], tuple[Callable[[], Any], Scores]], may_fail: tuple[type[BaseException], ...] = ()
    ) -> None:
        """Make a case and check it; an expected error becomes a line."""
        start = monotonic()
        try:
            self.cases[name] = self.checked(name, *make())
        except may_fail as error:
            first = next(iter(str(error).strip().splitlines()), "")
            self.skipped.append(f"{self.name}, {name}: {type(error).__name__}: {first[:200]}")
            print(f"not timed: {self.skipped[-1]}", flush=True)
        else:
            self.seconds[name] = monotonic() - start
            print(f"{self.name}, {name}: made and right after {self.seconds[name]:.1f} s", flush=True)

    def recorded(self, case: Callable[[], Any], **options: Any) -> tuple[Callable[[], Any], Scores]:
        """A program of it."""
        return result_of(handlepool.record(case, **options))

    def whole(self) -> Callable[[], Any]:
        """It, plainly called."""
        return partial(self.run, self.p, self.x)


def add_streams(network: Network, ways: Iterable[str], states: list[int]) -> None:
    """One stream and forks, eagerly and recorded."""
    for count in [*([None] if "eager" in ways else []), *(states if "forks" in ways else [])]:
        at, case = ONE, network.whole()
        if count is not None:
            at = f"one fork, {count} states"
            case = partial(forked, handlepool.ParallelStates(count), network.run, network.p, network.x)
        network.add(at, lambda case=case: (case, None))
        network.add(f"recorded, {at}", lambda case=case: network.recorded(case))


def add_lanes(network: Network, lanes: list[int]) -> None:
    """Recorded with so many lanes, as plain code."""
    for count in lanes:
        name = ONE_LANE if count == 1 else f"recorded, {count} lanes"
        network.add(name, lambda count=count: network.recorded(network.run, p=network.p, x=network.x, lanes=count))


def add_tuned(network: Network, options: Any) -> None:
    """Recorded with lanes, of which tuning finds the number."""
    network.add(TUNED, lambda: result_of(tuned(network, options, TUNED)[0]), (handlepool.HandlePoolError,))


def add_tuned_with_plans(network: Network, options: Any) -> None:
    """The same with the plans that make whole replays quickest, beginning with those that are quickest alone."""
    name = TUNED + PLANS

    def make() -> tuple[Callable[[], Any], Scores]:
        program, tuning = tuned(network, options, name, plans=True)
        network.plans |= {"changes that stayed": sum(change.kept for change in tuning.plans), "tried": len(tuning.plans)}
        return result_of(program)

    network.add(name, make, (handlepool.HandlePoolError,))


def tuned(network: Network, options: Any, name: str, *, plans: bool = False) -> tuple[handlepool.Program, Any]:
    """Return a program of the network, and the result of tuning it."""
    program = handlepool.record(network.run, network.p, network.x, lanes=LANES_BEFORE, plans=plans)
    seconds = options.plan_seconds if plans else options.seconds
    tuning = program.tune(options.lanes, goal=options.goal, seconds=seconds, plans=plans)
    print(tuning, flush=True)
    network.lanes[name] = tuning.winner.got
    return program, tuning


def result_of(program: handlepool.Program) -> tuple[Callable[[], Any], Scores]:
    """Return the function to time and its scores."""
    return program.replay, lambda: program.outputs


def add_torch(network: Network, torch: Any, ways: Iterable[str]) -> None:
    """The same in torch, and by its compiler."""
    place = partial(tensor, torch)
    p = network.p.elsewhere(lambda values: place(network.driver.asarray(values)))
    x = place(network.x)
    eager = partial(network.run, p, x, Torch(torch))

    def graph() -> tuple[Callable[[], Any], Scores]:
        replay, scores = graphed(torch, eager)
        return replay, lambda: scores

    torch.compiler.reset()  # or the networks before would count as recompilations
    makers = {
        "torch": (TORCH, lambda: (eager, None)),
        "torch-graph": (GRAPH, graph),
        "reduce-overhead": (REDUCED, lambda: compiled.reduce_overhead(torch, compiled.module_of(torch, network.run, p), x)),
        "inductor": (INDUCTOR, lambda: compiled.inductor(torch, compiled.module_of(torch, network.run, p), x)),
    }
    for way, (name, make) in makers.items():
        if way in ways:
            network.add(name, make, ANY)


def every(calls: list[tuple[Callable[[], Any], int]]) -> list[Any]:
    """Each call as often as its network has it."""
    return [call() for call, count in calls for _ in range(count)]


def tune_plans(network: Network, name: str, **options: Any) -> None:
    """Tune the plans that a network uses."""
    start = monotonic()
    tunings = handlepool.tune(network.whole(), **options)
    network.seconds[name] = monotonic() - start
    building = sum(each.building for each in tunings)
    print(f"{name}: {len(tunings)} plans in {network.seconds[name]:.1f} s, of which {building:.1f} built plans", flush=True)


def add_tuned_plans(network: Network, torch: Any, options: Any) -> None:
    """Time one lane, and tuned lanes, with the plans that `handlepool.tune` finds. The convolutions with their epilogues run on
    one stream: before tuning, after tuning, and torch's, with the first plan and with the quickest.
    """
    apart = "convolutions" in options.way
    noted = Noted()
    if apart:
        network.run(network.p, network.x, noted)
    found = [call for call in noted.calls.values() if call.operation == "conv2d"]

    def convolutions(kind: Any, place: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        return partial(every, [(call.on(kind, place), call.count) for call in found])

    own = convolutions(ops, lambda array: array)
    if apart:
        network.cases[CONVOLUTIONS] = handlepool.record(own).replay
    if network.driver.name == "cuda":
        tune_plans(network, "handlepool.tune")
        if "plans" in options.way:
            network.add(ONE_LANE + PLANS, lambda: network.recorded(network.run, p=network.p, x=network.x, lanes=1))
            add_tuned_with_plans(network, options)
        if apart:
            network.cases[f"{CONVOLUTIONS}{PLANS}"] = handlepool.record(own).replay
    if torch is not None and apart:
        theirs = convolutions(Torch(torch), partial(tensor, torch))
        network.cases[f"{CONVOLUTIONS}, torch graph"] = graph_of(torch, theirs)
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            network.cases[f"{CONVOLUTIONS}, torch graph, cudnn.benchmark"] = graph_of(torch, theirs)
        finally:
            torch.backends.cudnn.benchmark = before


def best_of_ours(cases: Iterable[str]) -> str:
    """The case that stands for the library: tuned, with tuned plans if they were."""
    names = (TUNED + PLANS, TUNED, ONE_LANE + PLANS, ONE_LANE)
    return next((name for name in names if name in cases), ONE_LANE)


def compare(ratios: Ratios, network: Network, samples: dict[str, dict[str, list[float]]], options: Any) -> None:
    """Ratios of a network, with the bounds that hold for it at full size."""
    name, full = network.name, (options.side, options.thin) == (224, 1)
    # The bounds are for these two options.
    small = full and (options.batch, options.dtype) == (1, "float16")
    ours = best_of_ours(samples["device"])
    one = ONE_LANE + PLANS if ours.endswith(PLANS) else ONE_LANE
    for clock in ("device", "wall"):
        taken, note = samples[clock], f", {name}, {clock}"
        ratios.compare(taken, ours, INDUCTOR, MOST_OF_INDUCTOR.get(name, {}).get(clock) if small else None, note)
        for peer in (GRAPH, REDUCED, TORCH):
            ratios.compare(taken, ours, peer, None, note)
        ratios.compare(taken, one, INDUCTOR, None, note)
        if ours != one:
            most = MOST_OF_ONE_LANE.get(name, NO_SLOWER) if small and clock == "device" else NO_SLOWER
            judged = full and (clock == "device" or options.goal == "clock")
            ratios.compare(taken, ours, one, most if judged else None, note)
    for count in options.states:
        most = MOST_OF_ONE_STREAM if small and name == "googlenet" and count == 4 else None
        ratios.compare(samples["wall"], f"one fork, {count} states", ONE, most, f", {name}, wall")
        for peer in (RECORDED_ONE, GRAPH):
            ratios.compare(samples["device"], f"recorded, one fork, {count} states", peer, None, f", {name}, device")
    for count in options.lanes:
        ratios.compare(samples["device"], f"recorded, {count} lanes", ONE_LANE, None, f", {name}, device")
    ratios.compare(samples["wall"], ONE, TORCH, None, f", {name}, wall")
    ratios.compare(samples["device"], f"{CONVOLUTIONS}{PLANS}", CONVOLUTIONS, None, f", {name}, device")
    theirs = f"{CONVOLUTIONS}, torch graph, cudnn.benchmark"
    ratios.compare(samples["device"], f"{CONVOLUTIONS}{PLANS}", theirs, 1.0 if full else None, f", {name}, device")
    if "handlepool.tune" in network.seconds:
        ratios.add(f"seconds of handlepool.tune, {name}", [network.seconds["handlepool.tune"]], MOST_SECONDS)
    if ours in network.errors and TORCH in network.errors:
        error = network.errors[ours] / network.errors[TORCH]
        ratios.add(f"error of {ours} / torch's, {name}", [error], MOST_OF_TORCHS_ERROR if full else None)


def network_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script that runs networks."""
    parser = arguments(description)
    parser.add_argument("--calls", type=positive, default=5, help="runs in one sample (default: %(default)s)")
    whole = [name for name in NETWORKS if name != TRIAL]
    parser.add_argument(
        "--network",
        nargs="+",
        choices=NETWORKS | MODERN,
        default=whole,
        help=f"(default: all but {TRIAL}, and none of {', '.join(MODERN)})",
    )
    parser.add_argument(
        "--lanes", type=side_streams, nargs="+", default=[1, 2, 4, 8, 16], help="also of tuning (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=1, help="images (default: %(default)s)")
    parser.add_argument("--side", type=positive, default=224, help="pixels, 33 or more (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the numbers of channels (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    parser.add_argument("--goal", choices=("clock", "device"), default="clock", help="of tuning (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also time each kernel, of ours and of the strongest peers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of tuning the lanes, at most (default: %(default)s)")
    parser.add_argument("--plan-seconds", type=float, default=20.0, help="of tuning plans in programs (default: %(default)s)")
    return parser


def parse_network(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The options of a script that runs networks."""
    small = {"thin": 16, "side": 40, "dtype": "float32"}
    options = parse(parser, small, calls=1, lanes=[1, 4], seconds=0.2, **quick)
    if options.side < 33:
        parser.error(f"--side {options.side}: nothing would be left of images of less than 33 pixels")
    return options


class Results:
    """Return the results of the networks so far."""

    def __init__(self) -> None:
        self.times: dict[str, Any] = {}
        self.ratios = Ratios()
        self.skipped: list[str] = []
        self.more: dict[str, dict[str, Any]] = {"errors": {}, "seconds": {}, "lanes_chosen": {}, "plans": {}}

    def add(self, network: Network, samples: dict[str, dict[str, list[float]]]) -> None:
        """A network's times, and a short table of them."""
        for clock, taken in samples.items():
            self.times[f"{network.name}, microseconds, {clock}"] = {case: summary(values) for case, values in taken.items()}
        found = {"errors": network.errors, "seconds": network.seconds, "lanes_chosen": network.lanes, "plans": network.plans}
        for key, values in found.items():
            self.more[key][network.name] = values
        self.skipped += network.skipped
        print_table(
            (f"{network.name}, microseconds", *samples),
            [
                (case, *(f"{summary(taken[case])['median']:,.1f}" if case in taken else "" for taken in samples.values()))
                for case in network.cases
            ],
        )
        sys.stdout.flush()

    def profile(self, network: Network, cases: dict[str, Callable[[], Any]], torch: Any) -> None:
        """Profile each kernel of ours and of the strongest peers; a case that cannot be profiled becomes a line."""
        found = {}
        for name in dict.fromkeys((best_of_ours(cases), ONE_LANE + PLANS, ONE_LANE, INDUCTOR, GRAPH, "JAX")):
            if name not in cases:
                continue
            try:
                found[name] = kernels.profiled(torch, cases[name])
            except Exception as error:
                self.skipped.append(f"{network.name}, {name}, profile: {type(error).__name__}: {str(error)[:200]}")
                print(f"not profiled: {self.skipped[-1]}", flush=True)
        kernels.show(network.name, found)
        sys.stdout.flush()
        self.more.setdefault("kernels", {})[network.name] = found


def main() -> int:
    parser = network_arguments(__doc__)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--states", type=side_streams, nargs="+", default=[2, 4, 8], help="(default: %(default)s)")
    options = parse_network(parser, states=[2], network=["googlenet", "ensemble"])
    results = Results()
    sizes = {key: getattr(options, key) for key in ("batch", "side", "thin", "dtype", "states", "lanes", "goal")}
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        if torch is None:
            results.skipped.append(why)
        elif options.profile:
            kernels.prepare(torch)
        for name in options.network:
            network = Network(driver, name, options)
            add_streams(network, options.way, options.states)
            if "lanes" in options.way:
                add_lanes(network, options.lanes)
            if "tuned" in options.way:
                add_tuned(network, options)
            if {"plans", "convolutions"} & set(options.way):
                add_tuned_plans(network, torch, options)
            if "inside" in options.way and "plans" not in options.way and driver.name == "cuda":
                add_tuned_with_plans(network, options)
            if torch is not None:
                add_torch(network, torch, options.way)
            samples = regions(network.cases, options.repeats, options.calls, driver, stream)
            results.add(network, {clock: samples[clock] for clock in CLOCKS})
            if options.profile and torch is not None:
                results.profile(network, network.cases, torch)
            compare(results.ratios, network, samples, options)
            write(options, "networks", driver.name, results.times, results.ratios, results.skipped, **results.more, **sizes)
        publish(options, "networks", driver.name, results.times, results.ratios, results.skipped, **results.more, **sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
