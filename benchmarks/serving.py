"""Requests from many threads of one process: throughput and latencies, ours beside torch's ways.

A closed loop has 1 to 32 clients, each of which sends its next request when it has its scores. An open loop has Poisson arrivals,
at a part of the capacity of torch's CUDA graphs with as many threads, and its latencies begin with the arrival. The clients use
one model for all, or eight unlike models at once.

A call measures the settings that its options select, and leaves out the settings that the JSON file has. Samples of the ways take
turns. Scores of each client are compared with those of a plain call. Latencies are those of all samples.

Processes under MPS need a daemon of the machine's owner, so they are left out where it is missing.
"""

import json
import math
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
from common import Ratios, no_collector, pool_on_a_stream, print_table, publish, summary, write
from options import arguments, parse, positive
from serving_ways import Client, Model, aoti, batched, launched, plain, recorded, submitted, torch_way

EIGHT = ("googlenet", "squeezenet1_1", "resnet18", "resnet50", "inception_v3@299", "unet", "resnet18@64", "squeezenet1_1@64")
MODELS = {"eight": EIGHT} | {
    name: (name,) for name in ("googlenet", "squeezenet1_1", "resnet18", "resnet50", "inception_v3", "unet")
}
MODELS["ensemble"] = ("ensemble",)
GRAPH, BATCHED = "torch, a CUDA graph each", "torch, a batching queue"
OURS = ("recorded", "recorded, one lane")
"""Ways of ours that the bounds are for; the quicker one counts."""
MOST_ERROR = 2e-2
PATIENCE = 300
"""Seconds that clients may take to be made."""
BOUNDS = {"one": (1 / 1.15, 1 / 1.05), "eight": (1.0, 1 / 1.2)}
"""The most of the throughput of torch's CUDA graph, and of the best peer, over ours."""
LOADS = (0.5, 0.8)
WARM_UP = 8
"""Samples' lengths that each way runs before the first sample."""


class Clients:
    """The clients of one way, each a thread with its stream, which wait between samples."""

    def __init__(self, makers: Sequence[tuple[Model, Client]], threads: int) -> None:
        self._todo: list[Any] = []
        self._errors: list[str] = []
        self._gate = threading.Barrier(threads + 1)
        self._made = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(*makers[number % len(makers)], number), daemon=True)
            for number in range(threads)
        ]
        for each in self._threads:
            each.start()
        self._meet()

    def _meet(self) -> None:
        try:
            self._gate.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise RuntimeError(self._errors[0] if self._errors else "a client was not made in time") from None
        if self._errors:
            raise RuntimeError(self._errors[0])

    def _serve(self, model: Model, client: Client, number: int) -> None:
        try:
            # Clients are made in turn, so that each way captures as it would alone.
            with _entered(client, self._made) as request:
                wrong = model.wrong(request())
                for _ in range(3):
                    request()
                if not wrong < MOST_ERROR:
                    raise ValueError(f"relative error {wrong:.1e} of {model.name}")
                self._gate.wait(PATIENCE)
                while True:
                    self._gate.wait(PATIENCE)
                    if not self._todo:
                        return
                    self._todo[0](request, number)
                    self._gate.wait(PATIENCE)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
            self._gate.abort()

    def sample(self, work: Callable[[Callable[[], Any], int], None]) -> float:
        """Let each client do its work; return the seconds."""
        self._todo[:] = [work]
        self._meet()
        begin = perf_counter()
        self._meet()
        return perf_counter() - begin

    def close(self) -> None:
        """End the threads."""
        self._todo.clear()
        try:
            self._gate.wait(PATIENCE)
        except threading.BrokenBarrierError:
            pass
        for each in self._threads:
            each.join(PATIENCE)


@contextmanager
def _entered(client: Client, lock: Any) -> Iterator[Any]:
    manager = client()
    with lock:
        request = manager.__enter__()
    try:
        yield request
    finally:
        manager.__exit__(None, None, None)


def closed(clients: Clients, seconds: float) -> tuple[float, list[float]]:
    """Return requests a second and latencies, in microseconds, of a closed loop."""
    taken: list[list[float]] = []

    def work(request: Callable[[], Any], number: int) -> None:
        mine: list[float] = []
        now = perf_counter()
        end = now + seconds
        while now < end:
            start = now
            request()
            now = perf_counter()
            mine.append(now - start)
        taken.append(mine)

    length = clients.sample(work)
    return sum(map(len, taken)) / length, [each * 1e6 for mine in taken for each in mine]


def arriving(clients: Clients, seconds: float, rate: float, seed: int) -> tuple[float, list[float]]:
    """Return requests a second and latencies of Poisson arrivals, each taken by the next free client."""
    gaps = random.Random(seed)
    arrivals, now = [], 0.0
    while (now := now + gaps.expovariate(rate)) < seconds:
        arrivals.append(now)
    turn, taken, begin = count(), list[float](), perf_counter() + 0.01

    def work(request: Callable[[], Any], number: int) -> None:
        while (at := next(turn)) < len(arrivals):
            due = begin + arrivals[at]
            # The clock of `sleep` is too coarse for the last part.
            while (left := due - perf_counter()) > 0:
                sleep(left - 1e-4 if left > 2e-4 else 0)
            request()
            taken.append((perf_counter() - due) * 1e6)

    length = clients.sample(work)
    return len(taken) / length, taken


class Use:
    """The share of time in which the GPU computes, as nvidia-smi samples it."""

    def __enter__(self) -> "Use":
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        found = shutil.which("nvidia-smi")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if found else None
        return self

    def __exit__(self, *_: object) -> None:
        self.percent: float | None = None
        if self._process is not None:
            self._process.terminate()
            values = [int(line) for line in self._process.communicate()[0].split() if line.isdigit()]
            self.percent = float(np.median(values[2:])) if len(values) > 2 else None


def ways_of(torch: Any, options: Any, threads: int, models: str) -> dict[str, Callable[[Model, Any], Client]]:
    """Return the ways by name."""
    instances = options.instances or threads
    ways: dict[str, Any] = {"recorded": recorded(options.lanes, instances), "recorded, one lane": recorded(1, instances)}
    ways |= {"submit": submitted(options.lanes, instances), "one thread launches": launched(options.lanes, instances)}
    ways["eager"] = plain
    if torch is not None:
        ways |= {GRAPH: torch_way(torch, "graph"), "torch, Inductor, a graph each": torch_way(torch, "inductor")}
        ways |= {"torch, eager": torch_way(torch, "eager"), "torch, AOTInductor": aoti(torch, 4)}
        if models != "eight":
            ways[BATCHED] = batched(torch)
    return {name: way for name, way in ways.items() if not options.way or any(name.startswith(each) for each in options.way)}


def free_bytes(driver: Any) -> int:
    """Return the device's free memory, in bytes."""
    return int(driver.memory_info()[0]) if hasattr(driver, "memory_info") else 0


class Served:
    """The figures by setting and way, in the JSON file from the start."""

    def __init__(self, options: Any, driver: str) -> None:
        self.options, self.driver = options, driver
        known = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else {}
        self.settings: dict[str, dict[str, Any]] = known.get("served", {}) if known.get("benchmark") == "serving" else {}
        self.skipped: list[str] = known.get("not_timed", []) if self.settings else []

    def lacks(self, setting: str, ways: Sequence[str]) -> list[str]:
        """Return the ways that a setting has no figures of, and no reason."""
        known = self.settings.get(setting, {})
        return [
            way for way in ways if way not in known and not any(line.startswith(f"{setting}: {way}: ") for line in self.skipped)
        ]

    def skip(self, setting: str, way: str, error: object) -> None:
        """Note why there are no figures."""
        self.skipped.append(f"{setting}: {way}: {error}")
        print(f"not timed: {self.skipped[-1]}", flush=True)

    def add(self, setting: str, way: str, rates: list[float], taken: list[float], **more: Any) -> None:
        """Add a way's figures, and write the file."""
        p50, p99 = [round(float(each), 1) for each in np.percentile(taken, (50, 99))]
        found = {"requests_a_second": summary(rates), "rates": [round(each, 1) for each in rates], "p50": p50, "p99": p99}
        self.settings.setdefault(setting, {})[way] = found | {"latency": summary(taken)} | more
        if self.options.json is not None:
            write(self.options, "serving", self.driver, {}, Ratios(), self.skipped, served=self.settings)

    def ratios(self) -> Ratios:
        """Compare ours with the peers."""
        ratios = Ratios()
        for setting, ways in self.settings.items():
            ours = [ways[name] for name in OURS if name in ways]
            peers = {name: each for name, each in ways.items() if name.startswith("torch") and name != BATCHED}
            if not ours or not peers:
                continue
            kind = "eight" if setting.startswith("eight") else "one"
            best = max(peers, key=lambda name: peers[name]["requests_a_second"]["median"])
            mine = max(ours, key=lambda each: each["requests_a_second"]["median"])
            quick = min(ours, key=lambda each: each["p99"])
            if "closed" in setting:
                for name, bound in zip((GRAPH, best), BOUNDS[kind], strict=True):
                    if name in peers:
                        pairs = zip(peers[name]["rates"], mine["rates"], strict=False)
                        title = "best peer" if name is best else "torch's CUDA graphs"
                        ratios.add(f"{setting}: requests a second, {title} / ours", [a / b for a, b in pairs], bound)
            least = min(each["p99"] for each in peers.values())
            ratios.add(f"{setting}: p99, ours / best peer", [quick["p99"] / least], 1.0)
            if f"open {LOADS[0]:.0%}" in setting:
                ratios.add(f"{setting}: p99 / p50", [quick["p99"] / quick["p50"]], 5.0)
        return ratios


def measure(
    served: Served, models: str, threads: int, load: float | None, torch: Any, options: Any, made: dict[str, Any]
) -> None:
    """Measure the ways of one setting."""
    name = f"{models}, {threads} threads, " + ("closed loop" if load is None else f"open {load:.0%}")
    rate = 0.0
    if load is not None:
        closed_loop = served.settings.get(f"{models}, {threads} threads, closed loop", {})
        basis = closed_loop.get(GRAPH) or next(iter(closed_loop.values()), None)
        if basis is None:
            served.skip(name, "all", "the closed loop with as many threads comes first")
            return
        rate = load * basis["requests_a_second"]["median"]
    ways = ways_of(torch, options, threads, models)
    missing = served.lacks(name, list(ways))
    if not missing:
        return
    driver, start = made["driver"], monotonic()
    clients: dict[str, Clients] = {}
    memory: dict[str, int] = {}
    for way in missing:
        before = free_bytes(driver)
        try:
            makers = []
            for each in MODELS[models]:
                model = made.get(each)
                if model is None:
                    model = made[each] = Model(driver, each, options)
                # Of the models in turn, each client has one.
                options.clients = len(range(len(makers), threads, len(MODELS[models])))
                if options.clients:
                    makers.append((model, ways[way](model, options)))
            clients[way] = Clients(makers, threads)
        except Exception as error:
            served.skip(name, way, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}")
            continue
        memory[way] = before - free_bytes(driver)
        print(f"{name}: {way} made after {monotonic() - start:.1f} s", flush=True)
    rates: dict[str, list[float]] = {way: [] for way in clients}
    taken: dict[str, list[float]] = {way: [] for way in clients}
    for each in clients.values():
        # Recorded functions capture further instances where calls meet.
        closed(each, WARM_UP * options.seconds)
    for repeat in range(options.repeats + 1):
        for way, each in clients.items():
            with no_collector():
                length = options.seconds
                found = closed(each, length) if load is None else arriving(each, length, rate, repeat)
            if repeat:  # the first round warms up
                rates[way].append(found[0])
                taken[way] += found[1]
    for way, each in clients.items():
        with Use() as use:
            if load is None and options.use > 0:
                closed(each, options.use)
        served.add(name, way, rates[way], taken[way], mib=round(memory[way] / 2**20, 1), gpu_percent=use.percent)
        each.close()
    rows = [
        (way, f"{f['requests_a_second']['median']:,.0f}", f"{f['p50']:,.0f}", f"{f['p99']:,.0f}", f["mib"], f["gpu_percent"])
        for way, f in served.settings.get(name, {}).items()
    ]
    if rows:
        print_table((name, "requests a second", "p50 µs", "p99 µs", "MiB", "GPU %"), rows)
        sys.stdout.flush()


def torch_or_none(driver: Any, skipped: list[str]) -> Any:
    """Return torch where it can be compared with."""
    if driver.name != "cuda":
        reason = "torch: compared on a GPU alone"
    else:
        try:
            import torch

            return torch
        except ImportError:
            reason = "torch: not installed"
    if reason not in skipped:
        skipped.append(reason)
    return None


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=tuple(MODELS), default=["googlenet", "eight"], help="(default: %(default)s)"
    )
    parser.add_argument("--threads", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32], help="(default: %(default)s)")
    parser.add_argument("--way", nargs="+", default=[], help="ways that begin so (default: all)")
    parser.add_argument(
        "--open", nargs="*", type=float, default=list(LOADS), help="loads of the open loop (default: %(default)s)"
    )
    parser.add_argument("--open-threads", type=positive, default=16, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.15, help="that a sample lasts (default: %(default)s)")
    parser.add_argument("--use", type=float, default=0.8, help="seconds in which the GPU's use is sampled (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no setting begins")
    parser.add_argument("--lanes", type=positive, default=8, help="(default: %(default)s)")
    parser.add_argument("--instances", type=positive, help="(default: one for each client)")
    parser.add_argument("--side", type=positive, default=224, help="pixels of an image (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the channels, for trials (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    small = {"side": 33, "thin": 32, "dtype": "float32", "models": ["ensemble"], "threads": [1, 2], "open_threads": 2}
    small |= {"seconds": 0.02, "use": 0.0, "lanes": 2, "instances": 2}
    options = parse(parser, small=small)
    start = monotonic()
    with pool_on_a_stream(options.driver) as (pool, _):
        driver = pool.driver
        served = Served(options, driver.name)
        torch = torch_or_none(driver, served.skipped)
        if shutil.which("nvidia-cuda-mps-control") is None:
            reason = "processes under MPS: this machine has no nvidia-cuda-mps-control"
            served.skipped += [] if reason in served.skipped else [reason]
        made: dict[str, Any] = {"driver": driver}
        settings = [(models, threads, None) for models in options.models for threads in options.threads]
        settings += [(models, options.open_threads, load) for models in options.models for load in options.open]
        for models, threads, load in settings:
            if monotonic() - start > options.budget:
                break
            measure(served, models, threads, load, torch, options, made)
        heading = "microseconds of a request"
        times = {f"{heading}, {name}": {way: f["latency"] for way, f in ways.items()} for name, ways in served.settings.items()}
        publish(options, "serving", driver.name, times, served.ratios(), served.skipped, served=served.settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
