"""Time the ways to compute a kernel, on a GPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CYCLES = 2_000_000
"""GPU cycles of the delay before a measurement, about a millisecond."""
CALLS = 16
ROUNDS = 3
GAIN = 1.05
"""The minimum gain for which another way replaces the preferred way.

The gain is the ratio of the preferred way's time to the other way's time.
"""


def microseconds(function: Callable[..., Any], given: Sequence[Any]) -> float:
    """Return the microseconds of device time that a call takes.

    The queue of the GPU is kept full, so the host's time for launches does not count.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles, taken = _CYCLES, list[float]()
    function(*given)
    while len(taken) < ROUNDS:
        torch.cuda.synchronize()
        # The GPU is kept busy while the host enqueues all calls. Then the calls run on the GPU without gaps.
        torch.cuda._sleep(cycles)
        start.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            function(*given)
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        # At 2 GHz, the delay was shorter than the time that the host took to enqueue the calls. So the GPU may have waited for
        # the host, and the measurement is repeated with a longer delay.
        if host * 2e9 > cycles and cycles < 100 * _CYCLES:
            cycles *= 4
            continue
        taken.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(taken)


def quickest(ways: dict[str, Callable[..., Any]], given: Sequence[Any]) -> tuple[str, dict[str, float]]:
    """Return the name of the quickest way, and each way's microseconds.

    The first of ``ways`` is preferred: another way must be quicker by the factor `GAIN` to be returned.
    """
    times = {name: microseconds(way, given) for name, way in ways.items()}
    first = next(iter(times))
    best = min(times, key=times.__getitem__)
    return (best if times[first] > GAIN * times[best] else first), times
