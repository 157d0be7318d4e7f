"""Run torch models by handlepool's torch integration and by torch's own ways, each workload in a process of its own.

`torch_networks.py` and `workloads.py` name the models; this module has the ways to run them.

    eager, graph             torch's kernels, and these in a CUDA graph
    reduce-overhead          torch.compile(mode="reduce-overhead")
    inductor                 Inductor with frozen weights and cudnn.benchmark, in a CUDA graph made by hand
    max-autotune             Inductor with mode="max-autotune-no-cudagraphs", likewise
    aot                      AOTInductor's library, in a CUDA graph made by hand
    torchsched               the back end of apex that spreads Inductor's kernels over streams, likewise
    ours                     a call of `recorded(model)`, tuned, without the fallback to Inductor
    replay                   its program alone
    fallback                 the same with the rule that takes Inductor's kernels where these are quicker
    dynamo                   a call of torch.compile(model, backend="handlepool")
    together                 several models: a call of `together` with torch's kernels
    together, inductor       with Inductor's kernels
    streams                  several models: each compiled by Inductor on a stream of its own, in one CUDA graph
    vmap                     equal models: `torch.func.stack_module_state` with `vmap`, in a CUDA graph
    vmap, inductor           the same compiled by Inductor

For each way there are microseconds on the device, between two events around many calls, and by the clock, for one call until it
is done; the error against float64, the seconds until the first value, and the MiB of the device that the way keeps. A way that
cannot run a workload becomes a line with the reason.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WAYS = (
    *("eager", "graph", "reduce-overhead", "inductor", "max-autotune", "aot", "torchsched", "ours", "replay", "fallback"),
    *("dynamo", "together", "together, inductor", "streams", "vmap", "vmap, inductor"),
)
LEFT_OUT = ("fallback", "max-autotune", "aot", "torchsched", "vmap, inductor")
"""Ways that run only where they are asked for."""
INPUTS = 5
"""Fresh inputs whose values are compared."""
LANES = 16
Case = tuple[Callable[[], Any], Callable[..., Any]]
"""The timed call, and its value for inputs."""


class Work:
    """Hold the modules of a workload, as one module.

    Parameters
    ----------
    parts : sequence of Module
        In eval mode. A network may stand in several places.
    shapes : sequence of tuple of int
        The shape of each part's input. A single shape is that of one input for all parts.

    Attributes
    ----------
    model : Module
        The part, or all parts as one module.
    """

    def __init__(self, torch: Any, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
        self.torch, self.parts, self.shapes = torch, [*parts], [*shapes]
        self.model = parts[0] if len(parts) == 1 else several(torch, self.parts)

    def draw(self, device: str, dtype: Any) -> tuple[Any, ...]:
        """Return new inputs."""
        drawn = [self.torch.randn(shape, device=device).to(dtype) for shape in self.shapes]
        return tuple([laid(self.torch, each) for each in drawn])

    def each(self, xs: Sequence[Any]) -> Sequence[Any]:
        """Return the input of each part."""
        return xs if len(xs) == len(self.parts) else [*xs] * len(self.parts)


def several(torch: Any, models: list[Any]) -> Any:
    """Return networks as one, for one input or for an input each."""

    class Several(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(models)

        def forward(self, *xs: Any) -> Any:
            given = xs if len(xs) == len(self.parts) else xs * len(self.parts)
            return tuple([part(x) for part, x in zip(self.parts, given, strict=True)])

    return Several().eval()


def laid(torch: Any, x: Any) -> Any:
    """Return images in the layout that is quickest on a GPU."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def weighted(torch: Any, model: Any) -> Any:
    """Give a network's norms and empty layers random weights that lead to values of a usual size."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, torch.nn.Linear) and not module.weight.any():
                module.weight.normal_(0, 0.05)
    return model.eval()


def scaled(torch: Any, work: Work, device: str) -> None:
    """Scale the weights of each layer, so that its values are of a usual size in float16.

    Weights that no training found may let values grow from layer to layer.
    """
    known: set[Any] = set()

    def scale(module: Any, _: Any, value: Any) -> Any:
        bias: Any = 0 if module.bias is None else module.bias
        if module.bias is not None and not isinstance(module, torch.nn.Linear):
            bias = module.bias.reshape(-1, *[1] * (value.dim() - 2))
        size = float((value - bias).std())
        # A layer that runs more than once is scaled by its first value. Zeros and infinities stay.
        if module not in known and 0 < size < float("inf"):
            module.weight /= size
            value = (value - bias) / size + bias
        known.add(module)
        return value

    layers = tuple(getattr(torch.nn, name) for name in ("Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Linear"))
    hooks = [each.register_forward_hook(scale) for each in work.model.modules() if isinstance(each, layers)]
    with torch.no_grad():
        work.model(*work.draw(device, torch.float32))
    for hook in hooks:
        hook.remove()


def flat(value: Any) -> list[Any]:
    """Return the tensors of a value."""
    return [each for part in value for each in flat(part)] if isinstance(value, (tuple, list)) else [value]


# Scripts


def options_of(script: str, about: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a script's options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--ways", nargs="+", default=[way for way in WAYS if way not in LEFT_OUT], choices=WAYS, metavar="WAY")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one network")
    parser.add_argument("--json", type=Path, default=Path(f"{script}.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def run_each(script: str, options: Any, keys: dict[str, str], show: Callable[[str, str, dict[str, Any]], None]) -> None:
    """Run the networks that have no figures yet, each in a process.

    ``keys`` has the name of each network's figures in the file. The options of this script go to the process.
    """
    more = [each for each in sys.argv[1:] if each != "--one"]
    for network, key in keys.items():
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        if key in known:
            print(key, "has figures")
            continue
        command = [sys.executable, script, *more, "--one", network]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.seconds, check=False)
        except subprocess.TimeoutExpired:
            print(f"{key}: no figures after {options.seconds:.0f} seconds")
            continue
        if done.returncode:
            print(f"{key}: the process ended with {done.returncode}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        if "unavailable" in found:
            print(f"{key}: not available: {found['unavailable']}")
            continue
        known[key] = found
        options.json.write_text(json.dumps(known, indent=1))
        show(network, key, found)


def show_times(found: dict[str, Any]) -> None:
    """Print the figures of a network's ways."""
    base = found["device"].get("inductor")
    for way, device in found["device"].items():
        ratio = "" if base is None else f"{device / base:8.2f}{found['clock'][way] / found['clock']['inductor']:8.2f}"
        error = found["error"].get(way)
        times = f"{device:10.1f}{found['clock'][way]:10.1f}{ratio}"
        rest = f"{found['seconds'].get(way, '')} s, {found['memory'].get(way, '')} MiB"
        print(f"  {way:20}{times}  error {'' if error is None else format(error, '.1e')}  {rest}")
    for way, why in found["failed"].items():
        print(f"  {way:20}{why}")


# One workload


def measured(torch: Any, work: Work, wanted: Sequence[str], samples: int, dtype: Any) -> dict[str, Any]:
    """Return the figures of a workload."""
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")
    draws = [work.draw("cuda", dtype) for _ in range(INPUTS)]
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "dtype": str(dtype)}
    found |= {"error": {}, "seconds": {}, "memory": {}, "failed": {}, "device": {}, "clock": {}, "report": "", "width": {}}
    with torch.no_grad():
        wide = copy.deepcopy(work.model).double()
        right = [flat(wide(*[x.double() for x in xs])) for xs in draws]
        del wide
        cases: dict[str, Callable[[], Any]] = {}
        for way, make in ways(torch, work, draws[0], found).items():
            if way not in wanted:
                continue
            before = free(torch)
            start = time.perf_counter()
            try:
                run, value = make()
                found["error"][way] = error_of(value, draws, right)
                found["seconds"][way] = round(time.perf_counter() - start, 1)
                cases[way] = run
                found["memory"][way] = round((before - free(torch)) / 2**20)
            except Exception as error:
                found["failed"][way] = f"{type(error).__name__}: {str(error)[:200]}"
        time_all(torch, cases, samples, found)
    return found


def free(torch: Any) -> int:
    """Return the free bytes of the device, without torch's cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    bytes_free: int = torch.cuda.mem_get_info()[0]
    return bytes_free


def error_of(value: Callable[..., Any], draws: Sequence[tuple[Any, ...]], right: list[list[Any]]) -> float:
    """Return the largest error of an output, relative to its largest value, and check that outputs stay."""
    kept = [[each.clone() for each in flat(value(*xs))] for xs in draws]
    errors = []
    for outs, wants in zip(kept, right, strict=True):
        pairs = zip(outs, wants, strict=True)
        errors += [float((out.double() - want).abs().max() / want.abs().max()) for out, want in pairs]
    return max(errors)


def graphed(torch: Any, function: Callable[..., Any], xs: Sequence[Any]) -> Case:
    """Return a CUDA graph of a function, made by hand."""
    static = [x.clone(memory_format=torch.preserve_format) for x in xs]
    for _ in range(3):
        function(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function(*static)

    def value(*xs: Any) -> Any:
        for place, x in zip(static, xs, strict=True):
            place.copy_(x)
        graph.replay()
        return kept

    return graph.replay, value


def ways(torch: Any, work: Work, xs: tuple[Any, ...], found: dict[str, Any]) -> dict[str, Callable[[], Case]]:
    """Return the ways to run a workload, by name."""
    from handlepool.integrations import torch as ours
    from handlepool.integrations.torch.inductor import compiled

    model, models = work.model, work.parts
    tuned = {"strict": True, "tune": True, "lanes": LANES}

    def called(function: Any) -> Case:
        for _ in range(3):
            function(*xs)
        return lambda: function(*xs), function

    def reduce_overhead() -> Case:
        function = torch.compile(model, mode="reduce-overhead", dynamic=False)
        return called(lambda *xs: (torch.compiler.cudagraph_mark_step_begin(), function(*xs))[1])

    def autotuned() -> Case:
        return graphed(torch, torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False), xs)

    def ahead_of_time() -> Case:
        from torch._inductor import aoti_compile_and_package, aoti_load_package

        return graphed(torch, aoti_load_package(aoti_compile_and_package(torch.export.export(model, xs))), xs)

    def scheduled() -> Case:
        import apex.contrib.torchsched  # noqa: F401 - it registers the back end

        return graphed(torch, torch.compile(model, backend="torchsched", dynamic=False), xs)

    def recorded() -> Case:
        function = made["ours"] = ours.recorded(model, fallback=None, **tuned)
        case = called(function)
        found["report"] = str(ours.report(function))
        width = ours.width(function, *xs)
        found["width"] = {name: getattr(width, name) for name in ("nodes", "longest", "total", "critical", "width", "gain")}
        return case

    def replayed() -> Case:
        return made["ours"].program(*xs).replay, made["ours"]

    def dynamo() -> Case:
        # Without an installed distribution there is no entry point.
        from handlepool.integrations.torch.backend import handlepool as backend

        return called(torch.compile(model, backend=backend, dynamic=False, options={"fallback": None, **tuned}))

    def streams() -> Case:
        functions = [compiled(each) for each in models]
        side = [torch.cuda.Stream() for _ in models]

        def run(*xs: Any) -> Any:
            current, values = torch.cuda.current_stream(), []
            for function, stream, x in zip(functions, side, work.each(xs), strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    values.append(function(x))
            for stream in side:
                current.wait_stream(stream)
            return values

        return graphed(torch, run, xs)

    def vmapped(by: Callable[..., Any]) -> Case:
        parameters, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        shared = len(xs) == 1

        def one(parameters: Any, buffers: Any, x: Any) -> Any:
            return torch.func.functional_call(base, (parameters, buffers), (x,))

        many = by(torch.func.vmap(one, (0, 0, None if shared else 0)))
        return graphed(torch, lambda *xs: [*many(parameters, buffers, xs[0] if shared else torch.stack(xs))], xs)

    made: dict[str, Any] = {}
    single: dict[str, Callable[[], Case]] = {
        "eager": lambda: called(model),
        "graph": lambda: graphed(torch, model, xs),
        "reduce-overhead": reduce_overhead,
        "inductor": lambda: graphed(torch, compiled(model), xs),
        "max-autotune": autotuned,
        "aot": ahead_of_time,
        "torchsched": scheduled,
        "ours": recorded,
        "replay": replayed,
        "fallback": lambda: called(ours.recorded(model, **tuned)),
        "dynamo": dynamo,
    }
    if len(models) == 1:
        return single
    return single | {
        "together": lambda: called(ours.together(*models, lanes=LANES, strict=True)),
        "together, inductor": lambda: called(ours.together(*models, lanes=LANES, kernels="inductor", strict=True)),
        "streams": streams,
        "vmap": lambda: vmapped(lambda function: function),
        "vmap, inductor": lambda: vmapped(lambda function: torch.compile(function, dynamic=False)),
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
