"""Makes random programs of regions, and judges them on the host driver: right, with a silent race checker, and controls wrong.

    python tests/properties/random_regions.py --programs 5000 --seed 7
    python tests/properties/random_regions.py --only 7000123

prints a summary as JSON. Each program comes from its seed alone, and a fault is told as the shortest program that has it. How
programs are made stands in `harness.region_maker`.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import measuring
from harness.region_cases import Case
from harness.region_maker import make_case
from harness.region_shrink import shrunk, told
from harness.region_worlds import World, expected_of

from handlepool.pool.side_streams import MOST_SIDE_SLOTS

FREE = (MOST_SIDE_SLOTS, 0, 1, 2)
"""How many side slots are free; each program runs with each."""
CHUNK = 25


@dataclass
class Summary:
    """What came of programs.

    Attributes
    ----------
    controls : Counter
        By what was left out, and by what told that it was missing.
    faults : list of str
    """

    programs: int = 0
    runs: int = 0
    calls: int = 0
    deepest: int = 0
    widest: int = 0
    controls: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Summary") -> None:
        self.programs += other.programs
        self.runs += other.runs
        self.calls += other.calls
        self.deepest, self.widest = max(self.deepest, other.deepest), max(self.widest, other.widest)
        self.controls += other.controls
        self.faults += other.faults


def seeds_of(seed: int, count: int) -> range:
    """The seeds of a run's programs."""
    return range(seed * 1_000_000, seed * 1_000_000 + count)


class Judge:
    """Runs programs, in worlds that serve one after the other."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self.summary = Summary()

    def world(self, free: int) -> World:
        if free not in self._worlds:
            self._worlds[free] = World(free)
        return self._worlds[free]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def judge(self, seed: int) -> None:
        """Run the program of a seed, and its control."""
        case, summary = make_case(seed), self.summary
        expected = expected_of(case)
        summary.programs += 1
        summary.calls += case.calls
        summary.deepest, summary.widest = max(summary.deepest, case.depth), max(summary.widest, case.width)
        for free in FREE:
            summary.runs += 1
            if free == FREE[-1]:
                measuring.forget()  # so that functions are new again, each after others
            try:
                outcome = self.world(free).run(case)
                complaint = outcome.differs(expected) or self.world(free).left_behind()
                if not complaint and free == FREE[0]:
                    left_out, why = self.world(free).control(case, outcome.trace, expected)
                    kind = "none is needed" if left_out is None else "by data" if left_out.by_data else "of the fork"
                    summary.controls[kind] += 1
                    if why:
                        summary.controls[why.partition(":")[0]] += 1
                    elif left_out is not None:
                        complaint = f"nothing went wrong without {left_out}"
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                complaint = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            if complaint:
                self._worlds.pop(free, None)  # whatever is wrong with it now
                summary.faults.append(
                    f"seed {seed}, {free} free side slots: {complaint}\n{self._shortest(case, free, complaint)}"
                )
                return

    def _shortest(self, case: Case, free: int, complaint: str) -> str:
        """The shortest program that goes wrong in this way, as text."""

        def fails(smaller: Case) -> bool:
            try:
                return bool(World(free).run(smaller).differs(expected_of(smaller)))
            except Exception as error:
                return complaint.startswith(f"{type(error).__name__}: ")

        return told((shrunk(case, fails) if fails(case) else case).steps)


def survey(seeds: Iterable[int]) -> Summary:
    """Judge the programs of some seeds."""
    judge = Judge()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a branch waits because")
            warnings.filterwarnings("ignore", ".* returned new arrays and wrote")
            for seed in seeds:
                judge.judge(seed)
    finally:
        judge.close()
    return judge.summary


def survey_all(seeds: range, workers: int, report: Callable[[Summary, list[str]], None]) -> Summary:
    """Judge the programs of seeds in some processes."""
    summary = Summary()
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    if workers == 1:
        results: Iterable[Summary] = map(survey, chunks)
    else:
        results = multiprocessing.get_context("spawn").Pool(workers).imap_unordered(survey, chunks)
    for found in results:
        summary.add(found)
        report(summary, found.faults)
    return summary


def report(summary: Summary, faults: list[str]) -> None:
    """Say how far it is, and what was found just now."""
    for fault in faults:
        print(fault, end="\n\n", flush=True)
    print(f"\r{summary.programs} programs, {len(summary.faults)} faults", end="", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the seed of one program")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    begun = time.monotonic()
    if options.only is not None:
        print(told(make_case(options.only).steps), flush=True)
        summary = survey([options.only])
        report(summary, summary.faults)
    else:
        summary = survey_all(seeds_of(options.seed, options.programs), options.workers, report)
    print(file=sys.stderr)
    print(json.dumps({**vars(summary), "faults": len(summary.faults), "seconds": round(time.monotonic() - begun)}))
    return bool(summary.faults)


if __name__ == "__main__":
    sys.exit(main())
