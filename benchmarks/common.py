"""Share code among the benchmark scripts: interleaved timing, paired ratios, the conditions of a run, JSON and tables.

Every script imports this module first, because it makes the checkout's own handlepool importable.

There are two ways of timing. `interleaved` times a statement in a loop. That is host time alone, in which a call queues its
work. The queued work is waited for between samples, outside of the timed part. `regions` times a region of GPU work call by
call, by three clocks at once: *host*, until the call returns; *device*, between an event before it and an event after it on the
caller's stream; *wall*, until the host knows that the work is done. Host and wall begin with the call, when the first event is
recorded. The stream is idle when a region begins.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from timeit import Timer
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Streams that share a hardware queue wait for each other, and 8 queues are the default. Read when the context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

CLOCKS = ("host", "device", "wall")


@dataclass(frozen=True, slots=True)
class Case:
    """Hold a statement to time: the names it uses, its repeats in a sample, and the context of a sample."""

    statement: str
    names: dict[str, Any]
    calls: int
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def interleaved(cases: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    """Nanoseconds a call, ``repeats`` samples of each case, taken in turns so that a drift of the machine meets all alike."""
    timers = {name: Timer(case.statement, globals=case.names) for name, case in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in progress(range(repeats + 1)):
        for name, case in cases.items():
            with case.around():
                seconds = timers[name].timeit(case.calls)
            if repeat:  # the first round warms up
                samples[name].append(seconds / case.calls * 1e9)
    return samples


def regions(
    cases: dict[str, Callable[[], object]], repeats: int, calls: int, driver: Any, stream: Any
) -> dict[str, dict[str, list[float]]]:
    """Microseconds a call by clock and case: ``repeats`` samples, each the median of ``calls`` calls, the cases in turns."""
    samples: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in cases} for clock in CLOCKS}
    start, end = driver.create_event(timing=True), driver.create_event(timing=True)
    pointer = stream.ptr
    record, synchronize, elapsed = driver.record_event, driver.synchronize_stream, driver.elapsed
    for repeat in progress(range(repeats + 1)):
        with no_collector():
            for name, region in cases.items():
                synchronize(pointer)
                taken = []
                for _ in range(calls):
                    record(start, pointer)
                    before = perf_counter_ns()
                    region()
                    returned = perf_counter_ns()
                    record(end, pointer)
                    synchronize(pointer)
                    done = perf_counter_ns()
                    taken.append((returned - before, elapsed(start, end) * 1e6, done - before))
                if repeat:  # the first round warms up
                    for clock, values in zip(CLOCKS, zip(*taken, strict=True), strict=True):
                        samples[clock][name].append(statistics.median(values) / 1e3)
    driver.destroy_event(start)
    driver.destroy_event(end)
    return samples


def total(driver: Any, stream: Any, run: Callable[[], object]) -> float:
    """Microseconds until all is done, of something that runs once."""
    driver.synchronize_stream(stream.ptr)
    with no_collector():
        before = perf_counter_ns()
        run()
        driver.synchronize_stream(stream.ptr)
        return (perf_counter_ns() - before) / 1e3


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect before, not meanwhile, as `timeit` does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def progress(steps: Sequence[Any]) -> Iterator[Any]:
    """Go through the steps, with a count on a terminal and nothing in a pipe."""
    shown = sys.stderr.isatty()
    for number, step in enumerate(steps, 1):
        if shown:
            print(f"\r{number} of {len(steps)} ", end="", file=sys.stderr, flush=True)
        yield step
    if shown:
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr, flush=True)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and least."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {name: round(value, 4) for name, value in (("median", median), ("q1", low), ("q3", high), ("min", min(values)))}


def paired(above: Sequence[float], below: Sequence[float], empty: Sequence[float] | None = None) -> list[float]:
    """Each repeat's ratio; with ``empty``, after the empty loop's cost was taken off both."""
    off = empty or [0.0] * len(above)
    return [(a - c) / (b - c) for a, b, c in zip(above, below, off, strict=True)]


class Ratios:
    """Ratios of samples by name, each with the bound that its median must keep, or none."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[list[float], float | None]] = {}

    def add(self, name: str, values: Sequence[float], bound: float | None = None) -> None:
        """Add one that was computed."""
        self.found[name] = list(values), bound

    def compare(
        self, samples: dict[str, list[float]], above: str, below: str, bound: float | None = None, note: str = ""
    ) -> None:
        """Add one case over another, where both were timed."""
        if above in samples and below in samples:
            self.add(f"{above} / {below}{note}", paired(samples[above], samples[below]), bound)

    def summaries(self, *, judged: bool) -> dict[str, dict[str, Any]]:
        """As JSON has them; ``kept`` is None where there is no bound, or nothing to judge it by."""
        found = {}
        for name, (values, bound) in self.found.items():
            entry: dict[str, Any] = summary(values)
            entry["bound"] = bound
            entry["kept"] = entry["median"] <= bound if judged and bound is not None else None
            found[name] = entry
        return found


@contextmanager
def pool_on_a_stream(driver: str | None) -> Iterator[tuple[Any, Any]]:
    """The default pool, on the driver that was asked for, with a stream of the script's own in use."""
    if driver is not None:
        os.environ["HANDLEPOOL_DRIVER"] = driver
    import handlepool

    pool = handlepool.default_pool()
    stream = pool.driver.create_stream()
    with stream:
        try:
            yield pool, stream
        finally:
            pool.driver.synchronize_stream(stream.ptr)
            pool.close()


def synchronised(driver: Any, stream: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Give `Case.around` an idle stream before a sample, and the wait for its queued work after it."""

    @contextmanager
    def around() -> Iterator[None]:
        driver.synchronize_stream(stream.ptr)
        yield
        driver.synchronize_stream(stream.ptr)

    return around


def conditions(driver: str) -> dict[str, Any]:
    """Return hardware, versions and time of a run, and no name of the machine."""
    from handlepool.cli import info

    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "driver": driver,
        "python": platform.python_version(),
        "packages": {name: version for name, version in info.packages().items() if version is not None},
    }
    if driver == "cuda":
        import cupy

        found["cudnn"] = info.cudnn_backend()["version"]
        found["gpu"] = info.device_name(cupy.cuda.runtime.getDevice())
        found["cuda_driver"] = f"CUDA {info.cuda_driver()['cuda']}"
        found["hardware_queues"] = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    return found


def publish(
    options: argparse.Namespace,
    benchmark: str,
    driver: str,
    times: dict[str, dict[str, dict[str, Any]]],
    ratios: Ratios | None = None,
    skipped: Sequence[str] = (),
    **more: Any,
) -> None:
    """Print tables and write JSON where a file was asked for.

    ``times`` are summaries by heading, "microseconds, host" say, and by case.
    """
    results = write(options, benchmark, driver, times, ratios, skipped, **more)
    found, compared = results["conditions"], results["ratios"]
    print(f"{found.get('gpu', 'no GPU: the host driver, whose times say nothing about one')}, {options.repeats} samples each\n")
    for heading, cases in times.items():
        print_table(
            (heading, "median", "quartiles"),
            [(name, f"{t['median']:,.1f}", f"{t['q1']:,.1f} to {t['q3']:,.1f}") for name, t in cases.items()],
        )
    if compared:
        print_table(
            ("ratio", "median", "quartiles", "at most", ""),
            [
                (
                    name,
                    f"{r['median']:.3f}",
                    f"{r['q1']:.3f} to {r['q3']:.3f}",
                    "" if r["bound"] is None else f"{r['bound']:.3f}",
                    {None: "", True: "kept", False: "NOT KEPT"}[r["kept"]],
                )
                for name, r in compared.items()
            ],
        )
    for reason in skipped:
        print(f"not timed: {reason}")


def write(
    options: argparse.Namespace,
    benchmark: str,
    driver: str,
    times: dict[str, dict[str, dict[str, Any]]],
    ratios: Ratios | None = None,
    skipped: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the results as `publish` writes them, for scripts that write partial results."""
    judged = driver == "cuda" and not options.quick
    results: dict[str, Any] = {"benchmark": benchmark, "conditions": conditions(driver), "repeats": options.repeats}
    results |= {"times": times, "ratios": (ratios or Ratios()).summaries(judged=judged), "not_timed": list(skipped)} | more
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns, the first to the left and the others to the right."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        print(f"{name:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True)), sep="  ")
    print()
