"""How soon a process has its plans: built by cuDNN, and from a plan directory. Each sample is a process of its own, in turns.

Times are those that building, or loading, takes inside the process, without imports. The first plan loads cuDNN's libraries,
which takes as long either way: the bounds are for the others, and both forms are printed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from common import Ratios, progress, publish, summary
from options import arguments, loaded, parse, positive
from work import Shape, graph_function

TEN = 10
BUT_THE_FIRST = " but the first"
READY, NETWORK = 0.10, 0.15
"""What a second process may take of the first one's time: for ten graph functions, and for a network's plans."""
TEN_MILLISECONDS, MANY_SECONDS = 20.0, 0.5
"""Of loading ten plans, and the many."""


def shapes(count: int, small: bool) -> list[Shape]:
    """So many geometries of convolutions as networks have them."""
    found = []
    for number in range(count):
        channels, side = 32 * (1 + number % 8), (7, 14, 28, 56)[number // 8 % 4]
        batch = 1 + number // 32
        found.append(Shape(batch, channels, 5 if small else side, 8 if small else channels, 3, "float16", "NHWC"))
    return found


def work(what: str, small: bool) -> dict[str, Any]:
    """Have the plans of one case, in this process: the microseconds that each took, and what was counted of files."""
    import handlepool
    from handlepool import ArraySpec
    from handlepool.graphs import function

    taken: list[float] = []
    build = function.build

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        plan = build(*args, **kwargs)
        taken.append((perf_counter_ns() - start) / 1e3)
        return plan

    function.build = timed
    pool = handlepool.default_pool()
    driver = pool.driver
    if what.isdigit():
        for shape in shapes(int(what), small):
            x = ArraySpec((shape.batch, shape.channels, shape.side, shape.side), shape.dtype, shape.layout)
            w = ArraySpec((shape.filters, shape.channels, shape.kernel, shape.kernel), shape.dtype, shape.layout)
            graph_function(shape).compile(x, w)
    else:
        import numpy as np
        from nets import NETWORKS, Parameters
        from nets.parameters import channels_last

        side = 33 if small else 224
        images = np.random.default_rng(1).standard_normal((1, 3, side, side), np.float32).astype("float16")
        with driver.create_stream() as stream:
            NETWORKS[what](Parameters(driver.asarray, "float16", 32 if small else 1), driver.asarray(channels_last(images)))
            driver.synchronize_stream(stream.ptr)
    counts = pool.stats()
    pool.close()
    return {"taken": taken} | {name: counts[f"plan_files_{name}"] for name in ("loaded", "missed", "rejected")}


def in_a_process(what: str, small: bool, driver: str, directory: Path | None) -> dict[str, Any]:
    """As `work`, in a process of its own."""
    environment = {**os.environ, "HANDLEPOOL_DRIVER": driver, "HANDLEPOOL_PLAN_DIRECTORY": str(directory or "")}
    command = [sys.executable, __file__, "--only", what, *(["--small"] if small else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = arguments(__doc__)
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
        cases = (str(TEN), "googlenet", str(options.many))
        for repeat in progress(range(options.repeats + 1)):
            for what in cases:
                directory = Path(folder) / what
                # Of the large case, building is timed once: the first round fills the directories.
                ways = [("loaded", directory)] if repeat and what == cases[-1] else [("built", None), ("loaded", directory)]
                for how, path in ways if repeat else [("built", directory)]:
                    found = in_a_process(what, options.small, driver, path)
                    if how == "loaded" and (found["missed"] or found["rejected"] or found["loaded"] != len(found["taken"])):
                        raise RuntimeError(f"{what} was not loaded: {found}")
                    name = f"{what} plans" if what.isdigit() else f"plans of {what}"
                    if repeat or what == cases[-1]:
                        samples.setdefault(f"{name}, {how}", []).append(sum(found["taken"]) / 1e3)
                        samples.setdefault(f"{name}{BUT_THE_FIRST}, {how}", []).append(sum(found["taken"][1:]) / 1e3)
    ratios = Ratios()
    ten, network, many = f"{TEN} plans", "plans of googlenet", f"{options.many} plans"
    full = driver == "cuda" and not options.small
    for name, most in ((ten, READY), (network, NETWORK)):
        ratios.compare(samples, f"{name}, loaded", f"{name}, built")
        name += BUT_THE_FIRST
        ratios.compare(samples, f"{name}, loaded", f"{name}, built", most if full else None)
    for name, unit, size, most in ((ten, "milliseconds", 1.0, TEN_MILLISECONDS), (many, "seconds", 1e3, MANY_SECONDS)):
        name += f"{BUT_THE_FIRST}, loaded"
        ratios.add(f"{name}, {unit}", [value / size for value in samples[name]], most if full else None)
    publish(options, "plans", driver, {"milliseconds": {name: summary(values) for name, values in samples.items()}}, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
