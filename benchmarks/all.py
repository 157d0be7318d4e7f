"""Run every benchmark, write its JSON into a folder, and draw: ``python benchmarks/all.py [FOLDER]``.

Each script runs in a process of its own, one after the other, with no other work beside it. A failed script does not stop the
next. The output ends with every bound, kept or missed.
"""

import argparse
import json
import math
import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from common import print_table
from options import DRIVER_HELP, loaded

GPU_ALONE = ("captures", "tune", "networks_jax")
SCRIPTS = (
    "acquire",
    "launch",
    "forks",
    "order",
    "overlap",
    "record",
    "wrong",
    "memory",
    "operations",
    "elementwise",
    "networks",
    "plans",
)
SCRIPTS += ("devices", "lifetimes", "exits", *GPU_ALONE)
VERDICTS = {True: "kept", False: "NOT KEPT", None: "not judged"}
HERE = Path(__file__).resolve().parent


def bounds(folder: Path, names: list[str]) -> list[tuple[str, str, str, str]]:
    """Return every bound in the results of some scripts: its name, its median, the most allowed, and the verdict."""
    rows = []
    for name in names:
        path = folder / f"{name}.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        for ratio, entry in results.get("ratios", {}).items():
            if entry["bound"] is not None:
                rows.append((f"{name}: {ratio}", f"{entry['median']:.3f}", f"{entry['bound']:.3f}", VERDICTS[entry["kept"]]))
        if "kept" in results:  # no ratio
            rows.append((f"{name}: {results['bound']}", "", "", VERDICTS[results["kept"]]))
    return rows


def seconds(text: str) -> float:
    """An option's value: more than 0, and not for ever."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; it must be a number of seconds above 0")
    return value


def new_folder(text: str) -> Path:
    """An option's value: a folder, or where one can be made."""
    path = Path(text)
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{nearest} is a file; name a folder")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder",
        type=new_folder,
        nargs="?",
        help="folder for JSON and pictures; its files are replaced (default: benchmarks/results/DRIVER-DATE)",
    )
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help="a selection of them")
    parser.add_argument("--driver", choices=("cuda", "host"), help=DRIVER_HELP)
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that the scripts run, and nothing else")
    parser.add_argument("--limit", type=seconds, default=600, help="seconds for each (default: %(default)s)")
    options = parser.parse_args()
    driver = loaded(parser, options.driver)
    folder = options.folder or HERE / "results" / f"{driver}-{datetime.now(UTC).date().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"results go to {folder}", flush=True)
    more = [*(("--driver", options.driver) if options.driver else ()), *(("--quick",) if options.quick else ())]
    names = [name for name in options.only if driver == "cuda" or name not in GPU_ALONE]
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        written = folder / f"{name}.json"
        # Otherwise the pictures and the bounds would include results of an earlier run.
        written.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(written), *more]
        try:
            status = subprocess.run(command, timeout=options.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {options.limit:g} seconds"
        if status:
            failed.append(f"{name} ({status})")
    print(*(f"== {name}: on a GPU alone" for name in options.only if name not in names), sep="\n")
    print_table(("bound", "median", "at most", ""), bounds(folder, names))
    if find_spec("matplotlib") is None:
        print("nothing is drawn: matplotlib is not installed")
    elif len(failed) < len(names):
        subprocess.run([sys.executable, str(HERE / "draw.py"), str(folder)], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
