"""Run every benchmark, write its JSON into a folder, and draw: ``python benchmarks/all.py FOLDER``.

Each script runs in a process of its own, one after the other, with nothing beside it. What one cannot do does not stop the rest.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = ("acquire", "launch", "forks", "overlap", "record", "wrong", "memory")
HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where JSON and pictures go")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help="a selection of them")
    parser.add_argument("--driver", choices=("cuda", "host"), help="handlepool's driver (default: as handlepool chooses)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that the scripts run, and nothing else")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each (default: %(default)s)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    more = [*(("--driver", options.driver) if options.driver else ()), *(("--quick",) if options.quick else ())]
    failed = []
    for name in options.only:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(options.folder / f"{name}.json"), *more]
        try:
            status = subprocess.run(command, timeout=options.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {options.limit:g} seconds"
        if status:
            failed.append(f"{name} ({status})")
    if find_spec("matplotlib") is None:
        print("nothing is drawn: matplotlib is not installed")
    else:
        subprocess.run([sys.executable, str(HERE / "draw.py"), str(options.folder)], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
