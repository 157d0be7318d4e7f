"""Run the tests marked ``two_gpus`` on all pairs of devices: ``python tests/gpu/pairs.py``.

Pairs that share no device run at once, each in a process that sees these two devices alone. The results are written after each
round, so a run that is cut off leaves the results of the rounds before. The exit status is 1 where a test failed or a pair did
not end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent


def rounds(devices: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs in rounds of disjoint ones, by the circle method: one device stays and the others go round."""
    circle: list[int | None] = [*devices, *([None] if len(devices) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) if a < b else (b, a) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return found


def told(path: Path, status: int | None) -> dict[str, Any]:
    """Return counts and the names of failed tests, of a file that pytest wrote."""
    found: dict[str, Any] = {"status": status, "passed": 0, "failed": [], "skipped": 0, "seconds": 0.0}
    if not path.exists():
        return found
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        found["seconds"] = round(found["seconds"] + float(case.get("time", 0)), 2)
        if kinds & {"failure", "error"}:
            found["failed"].append(name)
        elif "skipped" in kinds:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return found


def run(pairs: Sequence[tuple[int, int]], limit: float, more: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the tests on disjoint pairs at once, for so many seconds at most."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    end, running = monotonic() + limit, []
    for pair in pairs:
        visible = ",".join(str(device) if names is None else names[device].strip() for device in pair)
        path = folder / f"{pair[0]}-{pair[1]}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "two_gpus", "-p", "no:cacheprovider", f"--junitxml={path}"]
        with path.with_suffix(".txt").open("w") as log:
            process = subprocess.Popen(
                [*command, *more, str(HERE)],
                cwd=HERE.parents[1],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append((pair, path, process))
    found = {}
    for pair, path, process in running:
        try:
            process.wait(max(0.1, end - monotonic()))
        except subprocess.TimeoutExpired:
            # With the processes that tests of it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        status = process.returncode
        found[f"{pair[0]}, {pair[1]}"] = each = told(path, status)
        print(f"devices {pair[0]} and {pair[1]}: {each}", flush=True)
        if status:
            print(path.with_suffix(".txt").read_text()[-4000:], flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", help="ordinals (default: all)")
    parser.add_argument("--limit", type=float, default=600, help="seconds in all (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each round")
    parser.add_argument("more", nargs="*", help="further arguments of pytest, behind --")
    options = parser.parse_args(arguments)
    if options.devices is None:
        sys.path.insert(0, str(HERE.parents[1]))
        from handlepool import drivers

        options.devices = list(range(drivers.load("cuda").device_count()))
    start, found = monotonic(), {}
    results: dict[str, Any] = {"benchmark": "pairs", "devices": len(options.devices), "pairs": found, "not_run": []}
    with tempfile.TemporaryDirectory() as folder:
        for pairs in rounds(options.devices):
            left = options.limit - (monotonic() - start)
            if left < 1:
                results["not_run"] += [f"{a}, {b}" for a, b in pairs]
            else:
                found |= run(pairs, left, options.more, Path(folder))
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(bool(results["not_run"]) or any(each["status"] or each["failed"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
