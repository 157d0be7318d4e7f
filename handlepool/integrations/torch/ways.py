"""Time the ways to compute a kernel, on a GPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CYCLES = 2_000_000
"""GPU cycles of the wait before a measurement: about a millisecond."""
CALLS = 16
ROUNDS = 3
GAIN = 1.05
"""Least ratio of the preferred way's time to another way's time for which the other way is taken."""


def microseconds(function: Callable[..., Any], given: Sequence[Any]) -> float:
    """Return the device time of a call, as in a queue that is never empty."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles, taken = _CYCLES, list[float]()
    function(*given)
    while len(taken) < ROUNDS:
        torch.cuda.synchronize()
        # The GPU waits while the host launches, so that the launches follow each other without gaps.
        torch.cuda._sleep(cycles)
        start.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            function(*given)
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        # At 2 GHz the wait would have been too short for the launches.
        if host * 2e9 > cycles and cycles < 100 * _CYCLES:
            cycles *= 4
            continue
        taken.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(taken)


def quickest(ways: dict[str, Callable[..., Any]], given: Sequence[Any]) -> tuple[str, dict[str, float]]:
    """Return the name of the quickest way, with the microseconds of each.

    The first way stays unless another is quicker by a twentieth.
    """
    times = {name: microseconds(way, given) for name, way in ways.items()}
    first = next(iter(times))
    best = min(times, key=times.__getitem__)
    return (best if times[first] > GAIN * times[best] else first), times
