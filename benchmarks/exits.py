"""Programs that end with handles, states, forks and executors alive in several threads: how many of 50 ends are clean.

Clean means the return code that the program asks for and nothing on standard error. The programs are in tests/harness/exits.py;
each end is a process of its own, a few of them at a time.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import conditions, print_table, progress
from options import arguments, loaded, parse, positive

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))
LIMIT = 120


def run(name: str, code: int, driver: str) -> str:
    """Return the fault of an exit, or an empty text for a clean exit."""
    paths = [str(TESTS.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"HANDLEPOOL_DRIVER": driver, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(TESTS / "harness" / "exits.py"), name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"not ended after {LIMIT} seconds"
    if (done.returncode, done.stderr) == (code, ""):
        return ""
    return f"return code {done.returncode}, asked for {code}; {done.stderr.strip()[-600:]}"


def main() -> int:
    from harness.exits import PROGRAMS

    parser = arguments(__doc__)
    parser.add_argument("--runs", type=positive, default=50, help="ends in all, spread over the programs (default: %(default)s)")
    parser.add_argument("--at-a-time", type=positive, default=8, help="processes beside each other (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help="some programs")
    options = parse(parser, runs=3)
    driver = loaded(parser, options.driver)
    chosen = [options.only[number % len(options.only)] for number in range(options.runs)]
    outcomes = []
    with ThreadPoolExecutor(options.at_a_time) as threads:
        ends_of = threads.map(lambda name: run(name, PROGRAMS[name][1], driver), chosen)
        for name in progress(chosen):
            trouble = next(ends_of)
            outcomes.append(trouble)
            if trouble:
                print(f"{name}: {trouble}", flush=True)
    ends = [{"program": name, "trouble": trouble} for name, trouble in zip(chosen, outcomes, strict=True)]
    clean = {name: [end["trouble"] for end in ends if end["program"] == name].count("") for name in dict.fromkeys(chosen)}
    print_table(("program", "ends", "clean"), [(name, chosen.count(name), count) for name, count in clean.items()])
    total = sum(clean.values())
    print(f"{total} of {options.runs} ends were clean ({driver} driver)")
    if options.json is not None:
        results = {"benchmark": "exits", "conditions": conditions(driver), "runs": options.runs, "clean": total, "ends": ends}
        results |= {"bound": f"all of {options.runs} ends are clean", "kept": total == options.runs}
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(total < options.runs)


if __name__ == "__main__":
    sys.exit(main())
