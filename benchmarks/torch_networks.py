"""Networks of torchvision by both doors of handlepool's torch integration and by `together`, beside torch's own ways.

Each network runs in a process of its own and adds its figures to the file of `--json`. A second call leaves out the networks
that have figures there, so one network a call is a way to run all: `--networks googlenet`.

    eager, graph             torch's kernels, and these in a CUDA graph
    reduce-overhead          torch.compile(mode="reduce-overhead")
    inductor                 Inductor with frozen weights and cudnn.benchmark, in a CUDA graph made by hand
    max-autotune             Inductor with mode="max-autotune-no-cudagraphs", likewise; for googlenet and resnet18
    ours                     a call of `recorded(model)`, tuned, without the fallback to Inductor
    replay                   its program alone
    fallback                 the same with the rule that takes Inductor's kernels where these are quicker; with --fallback
    dynamo                   a call of torch.compile(model, backend="handlepool")
    together                 the ensembles: a call of `together` with torch's kernels
    together, inductor       with Inductor's kernels
    streams                  the ensembles: each part compiled by Inductor on a stream of its own, in one CUDA graph
    vmap                     the ensemble of equal networks: `torch.func.stack_module_state` with `vmap`, in a CUDA graph

For each way there are microseconds on the device, between two events around many calls, and by the clock, for one call until it
is done; the error against float64, and the seconds until the first value. What a peer cannot do is a line.
"""

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NETWORKS = (
    *("googlenet", "inception_v3", "squeezenet1_1", "resnet18", "resnet50", "densenet121", "mobilenet_v3_large"),
    *("efficientnet_b0", "convnext_tiny", "shufflenet_v2_x1_0", "regnet_y_400mf", "vit_b_16", "ensemble", "unlike"),
)
ENSEMBLES = {
    "ensemble": ("resnet18",) * 8,
    "unlike": ("googlenet", "squeezenet1_1", "resnet18", "mobilenet_v3_large", "shufflenet_v2_x1_0", "regnet_y_400mf"),
}
WAYS = (
    *("eager", "graph", "reduce-overhead", "inductor", "max-autotune", "ours", "replay", "fallback", "dynamo"),
    *("together", "together, inductor", "streams", "vmap"),
)
BOUNDS = {"googlenet": (0.60, 0.70), "inception_v3": (0.62, 1.0), "ensemble": (0.28, 0.40), "shufflenet_v2_x1_0": (0.80, 1.0)}
"""Of Inductor: the most for the device, and the most for a call by the clock. Of others 0.95 and 1.0."""
SIDES = {"inception_v3": 299}
INPUTS = 5
"""Fresh inputs whose values are compared."""
WORST = 1.5
"""The most of torch's own error."""
Case = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The timed call, and its value for an input."""


def main() -> None:
    """Run the networks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument(
        "--ways", nargs="+", default=[way for way in WAYS if way not in ("fallback", "max-autotune")], choices=WAYS
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one network")
    parser.add_argument("--json", type=Path, default=Path("torch_networks.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options)))
        return
    for network in options.networks:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        key = f"{network}, batch {options.batch}"
        if key in known:
            print(key, "has figures")
            continue
        arguments = [sys.executable, __file__, "--one", network, "--batch", options.batch, "--samples", options.samples]
        command = [*map(str, arguments), "--ways", *options.ways]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.seconds, check=False)
        except subprocess.TimeoutExpired:
            print(key, "took too long")
            continue
        if done.returncode:
            print(key, "ended with", done.returncode)
            continue
        known[key] = json.loads(done.stdout.splitlines()[-1])
        options.json.write_text(json.dumps(known, indent=1))
        show(network, key, known[key])


def show(network: str, key: str, found: dict[str, Any]) -> None:
    """Print the figures of a network."""
    print(f"\n{key}, {found['gpu']}, torch {found['torch']}")
    base = found["device"].get("inductor")
    for way, device in found["device"].items():
        ratio = "" if base is None else f"{device / base:8.2f}{found['clock'][way] / found['clock']['inductor']:8.2f}"
        error = found["error"].get(way)
        times = f"{device:10.1f}{found['clock'][way]:10.1f}{ratio}"
        print(f"  {way:20}{times}  error {'' if error is None else format(error, '.1e')}  {found['seconds'].get(way, '')} s")
    for way, why in found["failed"].items():
        print(f"  {way:20}{why}")
    if base is not None and (ours := found["device"].get("replay") or found["device"].get("together")):
        most, most_clock = BOUNDS.get(network, (0.95, 1.0))
        clock = (found["clock"].get("ours") or found["clock"]["together"]) / found["clock"]["inductor"]
        print(f"  device {ours / base:.2f} of at most {most}; clock {clock:.2f} of at most {most_clock}")


# One network


def measured(name: str, options: Any) -> dict[str, Any]:
    """Return the figures of a network."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")
    parts = ENSEMBLES.get(name, (name,))
    torch.manual_seed(0)
    models = [built(torch, part) for part in parts]
    model = models[0] if len(models) == 1 else several(torch, models)
    side = SIDES.get(name, 224)
    xs = [laid(torch, torch.randn(options.batch, 3, side, side, device="cuda").half()) for _ in range(INPUTS)]
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    found |= {"error": {}, "seconds": {}, "failed": {}, "device": {}, "clock": {}, "report": ""}
    with torch.no_grad():
        wide = copy.deepcopy(model).double()
        right = [flat(wide(x.double())) for x in xs]
        del wide
        cases: dict[str, Callable[[], Any]] = {}
        for way, make in ways(torch, model, models, xs[0], found).items():
            if way not in options.ways:
                continue
            start = time.perf_counter()
            try:
                run, value = make()
                found["error"][way] = error_of(torch, value, xs, right)
                found["seconds"][way] = round(time.perf_counter() - start, 1)
                cases[way] = run
            except Exception as error:
                found["failed"][way] = f"{type(error).__name__}: {str(error)[:200]}"
        time_all(torch, cases, options.samples, found)
    return found


def built(torch: Any, name: str) -> Any:
    """Return a network with random weights that lead to values of a usual size."""
    import torchvision

    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(weights=None, **more).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, torch.nn.Linear) and not module.weight.any():
                module.weight.normal_(0, 0.05)
    return model.cuda().half().to(memory_format=torch.channels_last)


def several(torch: Any, models: list[Any]) -> Any:
    """Return networks as one, for one input."""

    class Several(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(models)

        def forward(self, x: Any) -> Any:
            return tuple([part(x) for part in self.parts])

    return Several().eval()


def laid(torch: Any, x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last)


def flat(value: Any) -> list[Any]:
    """Return the tensors of a value."""
    return [each for part in value for each in flat(part)] if isinstance(value, (tuple, list)) else [value]


def error_of(torch: Any, value: Callable[[Any], Any], xs: list[Any], right: list[list[Any]]) -> float:
    """Return the largest error of an output, relative to its largest value, and check that outputs stay."""
    kept = [[each.clone() for each in flat(value(x))] for x in xs]
    errors = []
    for outs, wants in zip(kept, right, strict=True):
        pairs = zip(outs, wants, strict=True)
        errors += [float((out.double() - want).abs().max() / want.abs().max()) for out, want in pairs]
    return max(errors)


def graphed(torch: Any, function: Callable[[Any], Any], x: Any) -> Case:
    """Return a CUDA graph of a function, made by hand."""
    static = x.clone(memory_format=torch.preserve_format)
    for _ in range(3):
        function(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function(static)

    def value(x: Any) -> Any:
        static.copy_(x)
        graph.replay()
        return kept

    return graph.replay, value


def ways(torch: Any, model: Any, models: list[Any], x: Any, found: dict[str, Any]) -> dict[str, Callable[[], Case]]:
    """Return the ways to run a network, by name."""
    from handlepool.integrations import torch as ours
    from handlepool.integrations.torch.inductor import compiled

    def called(function: Any) -> Case:
        for _ in range(3):
            function(x)
        return lambda: function(x), function

    def reduce_overhead() -> Case:
        function = torch.compile(model, mode="reduce-overhead", dynamic=False)
        return called(lambda x: (torch.compiler.cudagraph_mark_step_begin(), function(x))[1])

    def autotuned() -> Case:
        return graphed(torch, torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False), x)

    def recorded() -> Case:
        function = made["ours"] = ours.recorded(model, strict=True, tune=True, fallback=None, lanes=16)
        case = called(function)
        found["report"] = str(ours.report(function))
        return case

    def replayed() -> Case:
        (program,) = made["ours"].programs
        return program.recorded.program(x).replay, made["ours"]

    def dynamo() -> Case:
        options = {"strict": True, "tune": True, "fallback": None, "lanes": 16}
        # Without an installed distribution there is no entry point.
        from handlepool.integrations.torch.backend import handlepool as backend

        return called(torch.compile(model, backend=backend, dynamic=False, options=options))

    def streams() -> Case:
        functions = [compiled(each) for each in models]
        side = [torch.cuda.Stream() for _ in models]

        def run(x: Any) -> Any:
            current, values = torch.cuda.current_stream(), []
            for function, stream in zip(functions, side, strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    values.append(function(x))
            for stream in side:
                current.wait_stream(stream)
            return values

        return graphed(torch, run, x)

    def vmapped() -> Case:
        parameters, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")

        def one(parameters: Any, buffers: Any, x: Any) -> Any:
            return torch.func.functional_call(base, (parameters, buffers), (x,))

        many = torch.func.vmap(one, (0, 0, None))
        return graphed(torch, lambda x: [*many(parameters, buffers, x)], x)

    made: dict[str, Any] = {}
    single: dict[str, Callable[[], Case]] = {
        "eager": lambda: called(model),
        "graph": lambda: graphed(torch, model, x),
        "reduce-overhead": reduce_overhead,
        "inductor": lambda: graphed(torch, compiled(model), x),
        "max-autotune": autotuned,
        "ours": recorded,
        "replay": replayed,
        "fallback": lambda: called(ours.recorded(model, strict=True, tune=True, lanes=16)),
        "dynamo": dynamo,
    }
    if len(models) == 1:
        return single
    return single | {
        "together": lambda: called(ours.together(*models, lanes=16, strict=True)),
        "together, inductor": lambda: called(ours.together(*models, lanes=16, kernels="inductor", strict=True)),
        "streams": streams,
        "vmap": vmapped,
    }


def time_all(torch: Any, cases: dict[str, Callable[[], Any]], samples: int, found: dict[str, Any]) -> None:
    """Time all ways in turn: the medians of interleaved samples, in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device: dict[str, list[float]] = {way: [] for way in cases}
    clock: dict[str, list[float]] = {way: [] for way in cases}
    for number, _ in enumerate(quiet(samples + 1)):
        for way, run in cases.items():
            run()
            begin.record()
            for _ in range(20):
                run()
            end.record()
            end.synchronize()
            walls = []
            for _ in range(5):
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                walls.append((time.perf_counter() - start) * 1e6)
            if number:
                device[way].append(begin.elapsed_time(end) * 1e3 / 20)
                clock[way].append(statistics.median(walls))
    found["device"] = {way: round(statistics.median(values), 1) for way, values in device.items()}
    found["clock"] = {way: round(statistics.median(values), 1) for way, values in clock.items()}


def quiet(rounds: int) -> Iterator[None]:
    """Yield for each round, with the collector off inside."""
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


if __name__ == "__main__":
    main()
