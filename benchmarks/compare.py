"""Two trees of the package beside each other: host times of the hot paths, old against new.

Each tree runs in a process of its own, which takes one sample whenever it is asked. The processes are asked in turns, so that a
drift of the machine meets both alike. The ratio of a path is that of the medians of its samples, and below it stand the quartiles
of both. An old tree comes from `git archive COMMIT handlepool | tar -x -C FOLDER`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if len(sys.argv) > 2 and sys.argv[1] == "--serve":  # a tree's process: that tree comes before the checkout's
    sys.path.insert(0, sys.argv[2])
    import handlepool  # noqa: F401 - the first one that is imported stays

from common import no_collector, progress, summary

MOST = 1.03
"""Of the new tree's median over the old tree's."""


def paths(calls: int, nodes: int) -> dict[str, Any]:
    """For each hot path, a function that takes one sample: nanoseconds a call."""
    from timeit import Timer

    import numpy as np

    import handlepool

    driver = handlepool.default_pool().driver
    rng = np.random.default_rng(0)

    def make(*shape: int) -> Any:
        values = rng.standard_normal(shape).astype(np.float16 if driver.name == "cuda" else np.float32)
        return driver.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))

    x, w = make(1, 64, 14, 14), make(64, 64, 3, 3)
    y = handlepool.conv2d(x, w, padding=1)
    states = handlepool.ParallelStates(4)
    stream = driver.create_stream()

    def sequence(x: Any) -> Any:
        for _ in range(nodes):
            x = handlepool.conv2d(x, w, padding=1)
        return x

    program = handlepool.record(sequence, x.copy(order="K"), lanes=4)
    xs, ys = [x] * 16, [driver.empty(y.shape, y.strides, y.dtype) for _ in range(16)]

    def branches() -> None:
        with states.fork() as fork:
            for out in ys:
                fork.run(handlepool.conv2d, x, w, padding=1, out=out)

    names = {"handlepool": handlepool, "x": x, "w": w, "y": y, "program": program, "branches": branches}
    names |= {"states": states, "xs": xs, "ys": ys, "ws": [make(64, 64, 1, 1)] * 16}

    def timed(statement: str, count: int, each: int = 1) -> Any:
        timer = Timer(statement, globals=names)

        def sample() -> float:
            with stream:
                taken = timer.timeit(count) / count / each * 1e9
                driver.synchronize_stream(stream.ptr)
            return taken

        return sample

    def recorded() -> float:
        with stream, no_collector():
            started = Timer("handlepool.record(sequence, x, lanes=4).close()", globals={**names, "sequence": sequence})
            return started.timeit(1) / nodes * 1e9

    return {
        "get_handle": timed("handlepool.get_handle()", 20 * calls),
        "planned call": timed("handlepool.conv2d(x, w, padding=1, out=y)", calls),
        "branch": timed("branches()", max(1, calls // 16), 16),
        "map into outputs": timed("states.map(handlepool.conv2d, xs, ws, out=ys)", max(1, calls // 16), 16),
        "replay": timed("program.replay()", max(1, calls // 4)),
        "call of a program": timed("program(x)", max(1, calls // 8)),
        "recording a node": recorded,
    }


def serve(calls: int, nodes: int) -> None:
    """Take a sample of a path for each line that comes."""
    import handlepool

    found = paths(calls, nodes)
    print(json.dumps({"paths": [*found], "package": str(Path(handlepool.__file__).parent)}), flush=True)
    for line in sys.stdin:
        with no_collector():
            print(json.dumps(found[line.strip()]()), flush=True)


class Tree:
    """A process that takes samples with one tree."""

    def __init__(self, tree: Path, calls: int, nodes: int) -> None:
        command = [sys.executable, __file__, "--serve", str(tree), str(calls), str(nodes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        ready = self._answer()
        self.paths: list[str] = ready["paths"]
        if Path(ready["package"]).resolve() != (tree / "handlepool").resolve():
            raise SystemExit(
                f"the process of {tree} imported {ready['package']}: give a folder that holds the package handlepool"
            )

    def sample(self, path: str) -> float:
        """Nanoseconds a call."""
        assert self.process.stdin is not None
        print(path, file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a tree's process ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder that holds the old package")
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parents[1], help="the same of the new one")
    parser.add_argument("--repeats", type=int, default=31, help="samples of each path (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=400, help="of a planned convolution in a sample (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=100, help="of a recording (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    trees = {name: Tree(tree, options.calls, options.nodes) for name, tree in (("old", options.old), ("new", options.new))}
    samples: dict[str, dict[str, list[float]]] = {path: {name: [] for name in trees} for path in trees["old"].paths}
    for repeat in progress(range(options.repeats + 1)):
        for path, taken in samples.items():
            for name in ("old", "new") if repeat % 2 else ("new", "old"):
                value = trees[name].sample(path)
                if repeat:  # the first round warms up
                    taken[name].append(value)
    for tree in trees.values():
        tree.end()
    times = {path: {name: summary(values) for name, values in taken.items()} for path, taken in samples.items()}
    ratios = {path: found["new"]["median"] / found["old"]["median"] for path, found in times.items()}
    for path, found in times.items():
        old, new = (f"{found[name]['median']:,.0f} ({found[name]['q1']:,.0f} to {found[name]['q3']:,.0f})" for name in trees)
        print(
            f"{path:20} old {old} ns, new {new} ns: {ratios[path]:.3f}{'' if ratios[path] <= MOST else ' more than ' + str(MOST)}"
        )
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "compare", "times": times, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
