"""What the kernels of a call take on the device, as torch's profiler sees them: everybody's, also those in CUDA graphs."""

from collections.abc import Callable
from typing import Any

CALLS = 5
MOST = 25
"""Kernels that are told apart; the others are one line."""
REST = "all others"
Profile = dict[str, dict[str, float]]
"""By kernel its launches in a call, and the microseconds that all of them take; those that take longest first."""


def profiled(torch: Any, case: Callable[[], Any]) -> Profile:
    """Profile some calls. Kernels that run beside each other count in full, so the sum may exceed a call's time."""
    case()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            case()
        torch.cuda.synchronize()
    return summed([(event.key, event.count, event.self_device_time_total) for event in profiler.key_averages()])


def summed(events: list[tuple[str, int, float]]) -> Profile:
    """The kernels of one call, of names, counts and microseconds of all of them."""
    ran = sorted([event for event in events if event[2] > 0], key=lambda event: -event[2])
    found = {name: {"launches": count / CALLS, "microseconds": round(us / CALLS, 2)} for name, count, us in ran[:MOST]}
    if ran[MOST:]:
        count, us = (sum(column) / CALLS for column in list(zip(*ran[MOST:], strict=True))[1:])
        found[REST] = {"launches": count, "microseconds": round(us, 2)}
    return found
