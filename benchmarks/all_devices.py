"""Everything that wants several GPUs of one host, in order of importance: ``python benchmarks/all_devices.py [FOLDER]``.

Each part runs in processes of its own, and ends by its budget or by the time that is left in all. A part that fails or is cut
off leaves the results that it has written, and the next part follows. In the end stand the bounds, requests and pairs. `log.txt`
has the output of all parts. On the host driver, and with --quick, sizes are small.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from all import HERE, bounds, new_folder, seconds
from common import print_table
from options import DRIVER_HELP, loaded

LENGTHS = ("--items", "20", "2", "0.2")
PARTS: dict[str, tuple[float, str, tuple[str, ...], tuple[str, ...]]] = {
    "devices": (
        *(170, "devices.py", ("--way", "recorded", "spread", "processes")),
        (*LENGTHS, "--seconds", "0.25", "--repeats", "9"),
    ),
    "devices-dask": (140, "devices.py", ("--way", "dask"), (*LENGTHS, "--seconds", "0.1", "--repeats", "5")),
    "device_serving": (90, "device_serving.py", (), ()),
    "sizing": (80, "sizing.py", (), ()),
    "devices-eager": (75, "devices.py", ("--way", "eager"), (*LENGTHS, "--seconds", "0.1", "--repeats", "5")),
    "pairs": (600, "../tests/gpu/pairs.py", (), ()),
}
"""Of each the seconds at most, the script, and its options, the last of which are not given with --quick."""
SPARE = 8
"""Seconds left to write the results."""


def command_of(name: str, left: float, written: Path, options: argparse.Namespace) -> list[str]:
    """Return the commands of a part."""
    _, script, always, full = PARTS[name]
    command = [sys.executable, "-u", str((HERE / script).resolve()), *always, "--json", str(written)]
    if options.devices:
        command += ["--devices", *map(str, options.devices)]
    if name == "pairs":
        return [*command, "--limit", f"{left:.0f}"]
    command += ["--driver", options.driver] if options.driver else []
    return command + (["--quick"] if options.quick else list(full))


def run(command: list[str], limit: float, log: Path) -> str:
    """Run a command for so many seconds at most, with its output in the log; return how it ended."""
    with log.open("ab") as output:
        output.write(f"\n== {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        try:
            # The processes that it started would otherwise keep the devices busy beside the next part.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return "done" if status == 0 else f"cut off after {limit:.0f} s" if status is None else f"status {status}"


def requests(folder: Path) -> list[tuple[Any, ...]]:
    """Return requests a second and latencies of the serving benchmark."""
    path = folder / "device_serving.json"
    served = json.loads(path.read_text())["served"] if path.exists() else {}
    return [(name, f"{each['requests_a_second']['median']:,.0f}", each["p50"], each["p99"]) for name, each in served.items()]


def pairs(folder: Path) -> list[tuple[Any, ...]]:
    """Return counts of the tests of each pair."""
    path = folder / "pairs.json"
    found = json.loads(path.read_text())["pairs"] if path.exists() else {}
    return [(name, each["passed"], len(each["failed"]), each["skipped"], each["status"]) for name, each in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=new_folder, help="where JSON and the log go; results of the same names are replaced")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="NAME", help="a selection")
    parser.add_argument("--devices", type=int, nargs="+", help="ordinals (default: all)")
    parser.add_argument("--driver", choices=("cuda", "host"), help=DRIVER_HELP)
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that the parts run, and nothing else")
    parser.add_argument("--limit", type=seconds, default=570, help="seconds in all (default: %(default)s)")
    options = parser.parse_args()
    loaded(parser, options.driver)
    folder, start, ends = options.folder, monotonic(), []
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    log.write_text("")
    for name in options.only:
        written = folder / f"{name}.json"
        written.unlink(missing_ok=True)
        left = options.limit - SPARE - (monotonic() - start)
        if left < 1:
            ends.append((name, "not begun", 0))
            continue
        limit, begun = min(left, PARTS[name][0]), monotonic()
        end = run(command_of(name, max(1, limit - 2), written, options), limit, log)
        ends.append((name, end, round(monotonic() - begun)))
        print(f"{name}: {end}, {ends[-1][2]} s", flush=True)
        if end != "done":
            print("".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    print_table(("part", "", "s"), ends)
    names = [name for name in options.only if name != "pairs"]
    rows = [row for row in bounds(folder, names) if "beside the formula" not in row[0] or row[-1] == "NOT KEPT"]
    print_table(("bound", "median", "at most", ""), rows)
    print_table(("device_serving", "requests a second", "p50 µs", "p99 µs"), requests(folder))
    print_table(("pair", "passed", "failed", "skipped", "status"), pairs(folder))
    return int(any(end != "done" for _, end, _ in ends))


if __name__ == "__main__":
    sys.exit(main())
