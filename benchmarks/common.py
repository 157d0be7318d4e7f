"""What the benchmark scripts share: interleaved timing, paired ratios, what ran where, and the two outputs, JSON and a table.

Imported first by every script: it makes the checkout's own handlepool the one that is imported.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from timeit import Timer
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True, slots=True)
class Case:
    """A statement to time: the names it uses, how often it runs in one sample, and what surrounds a sample."""

    statement: str
    names: dict[str, Any]
    calls: int
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def interleaved(cases: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    """Nanoseconds a call, ``repeats`` samples of each case, taken in turns so that a drift of the machine meets all alike."""
    timers = {name: Timer(case.statement, globals=case.names) for name, case in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            with case.around():
                seconds = timers[name].timeit(case.calls)
            if repeat:  # the first round warms up
                samples[name].append(seconds / case.calls * 1e9)
    return samples


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and least."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {name: round(value, 4) for name, value in (("median", median), ("q1", low), ("q3", high), ("min", min(values)))}


def paired(above: Sequence[float], below: Sequence[float], empty: Sequence[float] | None = None) -> list[float]:
    """Each repeat's ratio; with ``empty``, after the empty loop's cost was taken off both."""
    off = empty or [0.0] * len(above)
    return [(a - c) / (b - c) for a, b, c in zip(above, below, off, strict=True)]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each case (default: %(default)s)")
    parser.add_argument("--driver", choices=("cuda", "host"), help="handlepool's driver (default: as handlepool chooses)")
    return parser


def conditions(driver: str) -> dict[str, Any]:
    """What ran where and when; nothing that names the machine."""
    from handlepool import info

    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "driver": driver,
        "python": platform.python_version(),
        "packages": info.packages(),
    }
    if driver == "cuda":
        import cupy

        found["cudnn"] = info.cudnn_backend()["version"]
        found["gpu"] = info.device_name(cupy.cuda.runtime.getDevice())
        found["cuda_driver"] = info.cuda_driver()
    return found


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns, the first to the left and the others to the right."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        print(f"{name:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True)), sep="  ")
    print()
