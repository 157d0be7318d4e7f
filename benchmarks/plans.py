"""Measure how soon a process has its plans: built by cuDNN, and from a plan directory. Each sample is a process, in turns.

Times begin when Python's modules are imported. Two parts take as long either way and are timed separately. "libraries" is the
device's context and a handle. "set-up" is the part that cuDNN loads at its first request for plans, or its first given plan;
the request is for a graph that is not timed. Everything else counts, from the first plan on, and the bounds are for it. The
output also has the ratio with both parts on both sides. "10 plans" are plans of one convolution in as many geometries. "10
functions" are convolutions with and without an epilogue, their gradients, and products. Then they are called, so that work that
a plan leaves to its first launch counts as well.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from common import Ratios, no_collector, progress, publish, summary, write
from options import arguments, loaded, parse, positive
from work import Shape, graph_function

TEN = 10
FUNCTIONS = "functions"
CASES = ("ten", FUNCTIONS, "network", "many")
READY, NETWORK = 0.10, 0.15
"""The bounds of a second process relative to the first: for ten graph functions, and for a network's plans."""
TEN_MILLISECONDS, MANY_SECONDS = 20.0, 0.5
"""Of loading ten plans, and the many, beyond the libraries."""


def shapes(count: int, small: bool) -> list[Shape]:
    """So many geometries of convolutions as networks have them."""
    found = []
    for number in range(count):
        channels, side = 32 * (1 + number % 8), (7, 14, 28, 56)[number // 8 % 4]
        batch = 1 + number // 32
        found.append(Shape(batch, channels, 5 if small else side, 8 if small else channels, 3, "float16", "NHWC"))
    return found


def ten_functions(small: bool) -> list[tuple[Any, ...]]:
    """Return ten graph functions as a user writes them, each with the arguments to compile it for."""
    from handlepool import ArraySpec, graph

    half, same = "float16", {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    wide, side, rows = (8, 6, 8) if small else (64, 28, 512)
    x = ArraySpec((2, wide, side, side), half, "NHWC")
    w, bias = ArraySpec((wide, wide, 3, 3), half, "NHWC"), ArraySpec((1, wide, 1, 1), half, "NHWC")
    narrow = ArraySpec((wide, wide, 1, 1), half, "NHWC")
    point = {"padding": [0, 0], "stride": [2, 2], "dilation": [1, 1]}
    matrix, batch = ArraySpec((rows, rows), half), ArraySpec((4, rows, rows), half)
    row = ArraySpec((1, rows), half)
    return [
        (graph(lambda g, x, w: g.conv_fprop(x, w, **same)), x, w),
        (graph(lambda g, x, w, b: g.bias(g.conv_fprop(x, w, **same), b)), x, w, bias),
        (graph(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, **same), b))), x, w, bias),
        (graph(lambda g, x, w, b, z: g.relu(g.add(g.bias(g.conv_fprop(x, w, **same), b), z))), x, w, bias, x),
        (graph(lambda g, x, w, b: g.gelu(g.bias(g.conv_fprop(x, w, **same), b))), x, w, bias),
        (graph(lambda g, x, w, b: g.swish(g.bias(g.conv_fprop(x, w, **point), b))), x, narrow, bias),
        (graph(lambda g, dy, w: g.conv_dgrad(dy, w, **same).set_dim([2, wide, side, side])), x, w),
        (graph(lambda g, x, dy: g.conv_wgrad(x, dy, **same).set_dim([wide, wide, 3, 3])), x, x),
        (graph(lambda g, a, b: g.matmul(a, b)), batch, batch),
        (graph(lambda g, a, b, c: g.gelu(g.add(g.matmul(a, b), c))), matrix, matrix, row),
    ]


def set_up(pool: Any) -> None:
    """Have cuDNN asked for plans of a graph, of which none is built, and NVRTC loaded, as cuDNN does to read a compiled plan."""
    if pool.driver.name != "cuda":
        return
    import cudnn
    from cupy.cuda import nvrtc

    nvrtc.getVersion()
    handle = pool.get_handle()

    half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(handle=handle, io_data_type=half, intermediate_data_type=single, compute_data_type=single)
    x = graph.tensor(dim=[1, 8, 5, 5], stride=[200, 1, 40, 8])
    w = graph.tensor(dim=[8, 8, 1, 1], stride=[8, 1, 8, 8])
    graph.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1]).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])


class Clock:
    """Collect the milliseconds of parts of the work by name, for each time that a part ran."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part of it."""
        start = perf_counter_ns()
        yield
        self.taken.setdefault(name, []).append((perf_counter_ns() - start) / 1e6)


def work(what: str, small: bool) -> dict[str, Any]:
    """Get the plans of one case in this process; return the milliseconds of each part, and the counts of files."""
    import numpy as np
    from nets import NETWORKS, Parameters
    from nets.parameters import channels_last

    import handlepool
    from handlepool import ArraySpec
    from handlepool.graphs import function

    clock = Clock()
    pool = handlepool.default_pool()
    driver = pool.driver
    with clock("libraries"):
        pool.get_handle()
    with clock("set-up"):
        set_up(pool)
    if what == FUNCTIONS or what.isdigit():
        made = ten_functions(small) if what == FUNCTIONS else []
        for shape in shapes(int(what) if what.isdigit() else 0, small):
            x = ArraySpec((shape.batch, shape.channels, shape.side, shape.side), shape.dtype, shape.layout)
            w = ArraySpec((shape.filters, shape.channels, shape.kernel, shape.kernel), shape.dtype, shape.layout)
            made.append((graph_function(shape), x, w))
        with no_collector():
            for f, *specs in made:
                with clock("plans"):
                    f.compile(*specs)
        with driver.create_stream() as stream:
            calls = [(f, *(driver.empty(s.shape, s.strides, s.dtype) for s in specs)) for f, *specs in made[:TEN]]
            driver.synchronize_stream(stream.ptr)
            with clock("first calls"):
                for call, *arrays in calls:
                    call(*arrays)
                driver.synchronize_stream(stream.ptr)
    else:
        build = function.build

        def timed(*args: Any, **kwargs: Any) -> Any:
            with clock("plans"):
                return build(*args, **kwargs)

        function.build = timed
        side = 33 if small else 224
        images = np.random.default_rng(1).standard_normal((1, 3, side, side), np.float32).astype("float16")
        with driver.create_stream() as stream, no_collector():
            NETWORKS[what](Parameters(driver.asarray, "float16", 32 if small else 1), driver.asarray(channels_last(images)))
            driver.synchronize_stream(stream.ptr)
    counts = pool.stats()
    pool.close()
    files = {name: counts[f"plan_files_{name}"] for name in ("loaded", "missed", "rejected")}
    return {"taken": {name: sum(each) for name, each in clock.taken.items()}, "files": files, "plans": len(clock.taken["plans"])}


def in_a_process(what: str, small: bool, driver: str, directory: Path | None) -> dict[str, Any]:
    """As `work`, in a process of its own."""
    environment = {**os.environ, "HANDLEPOOL_DRIVER": driver, "HANDLEPOOL_PLAN_DIRECTORY": str(directory or "")}
    command = [sys.executable, __file__, "--only", what, *(["--small"] if small else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(samples: dict[str, list[float]], options: Any, driver: str) -> tuple[dict[str, Any], Ratios]:
    """Return the results so far: times, and ratios with their bounds."""
    ratios = Ratios()
    ten, functions, network, many = f"{TEN} plans", f"{TEN} {FUNCTIONS}", "plans of googlenet", f"{options.many} plans"
    full = driver == "cuda" and not options.small
    for name, most in ((ten, READY), (functions, READY), (network, NETWORK)):
        ratios.compare(samples, f"{name}, loaded", f"{name}, built", most if full else None)
    for name in (f"{each} and {what}" for each in (ten, functions, network) for what in ("set-up", "libraries", "first calls")):
        ratios.compare(samples, f"{name}, loaded", f"{name}, built")
    few, lots = ("milliseconds", 1.0, TEN_MILLISECONDS), ("seconds", 1e3, MANY_SECONDS)
    for name, (unit, size, most) in ((ten, few), (functions, few), (many, lots)):
        name += ", loaded"
        if name not in samples:
            continue
        ratios.add(f"{name}, {unit}", [value / size for value in samples[name]], most if full else None)
    return {"milliseconds": {name: summary(values) for name, values in samples.items()}}, ratios


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--many", type=positive, default=500, help="plans of the largest case (default: %(default)s)")
    parser.add_argument("--only", help="run one case in this process, and print it")
    parser.add_argument("--small", action="store_true", help="small shapes")
    if (given := parser.parse_known_args()[0]).only:
        print(json.dumps(work(given.only, given.small)))
        return 0
    options = parse(parser, {"small": True, "many": 12})
    driver = loaded(parser, options.driver)
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        called = dict(zip(CASES, (str(TEN), FUNCTIONS, "googlenet", str(options.many)), strict=True))
        cases = [called[case] for case in options.case]
        for repeat in progress(range(options.repeats + 1)):
            for what in cases:
                directory = Path(folder) / what
                # Of the large case, building is timed once: the first round fills the directories.
                ways = [("loaded", directory)] if repeat and what == called["many"] else [("built", None), ("loaded", directory)]
                for how, path in ways if repeat else [("built", directory)]:
                    found = in_a_process(what, options.small, driver, path)
                    files = found["files"]
                    if how == "loaded" and files != {"loaded": found["plans"], "missed": 0, "rejected": 0}:
                        raise RuntimeError(f"{what} was not loaded: {found}")
                    name = f"{what} plans" if what.isdigit() else f"{TEN} {what}" if what == FUNCTIONS else f"plans of {what}"
                    if repeat or what == called["many"]:
                        taken = found["taken"]
                        samples.setdefault(f"{name}, {how}", []).append(taken["plans"])
                        began = taken["plans"] + taken["set-up"]
                        samples.setdefault(f"{name} and set-up, {how}", []).append(began)
                        samples.setdefault(f"{name} and libraries, {how}", []).append(began + taken["libraries"])
                        if what in (called["ten"], FUNCTIONS):
                            samples.setdefault(f"{name} and first calls, {how}", []).append(taken["plans"] + taken["first calls"])
            if repeat:
                write(options, "plans", driver, *compared(samples, options, driver), repeats=repeat)
    publish(options, "plans", driver, *compared(samples, options, driver))
    return 0


if __name__ == "__main__":
    sys.exit(main())
