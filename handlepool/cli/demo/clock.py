"""Measure times by events on the caller's stream."""

from collections.abc import Callable
from typing import Any

from handlepool.drivers.protocol import Driver

_FEWEST, _MOST = 3, 31
"""The minimum and the maximum number of repeats."""


def time(driver: Driver, work: Callable[[], Any]) -> float:
    """Run ``work``; return its time on the caller's stream, in milliseconds."""
    # Another thread may be capturing, and these calls must not end its capture (guarantee 9).
    with driver.relaxed():
        start, end = driver.create_event(timing=True), driver.create_event(timing=True)
    caller = driver.current_stream().ptr
    driver.record_event(start, caller)
    work()
    driver.record_event(end, caller)
    driver.synchronize_stream(caller)
    elapsed = driver.elapsed(start, end)
    with driver.relaxed():
        driver.destroy_event(start)
        driver.destroy_event(end)
    return elapsed


def repeats_of(budget: float, once: float) -> int:
    """Return the number of repeats that fit into ``budget``.

    ``budget`` and the time ``once`` of one repeat are in milliseconds. The result is from `_FEWEST` to `_MOST`.
    """
    return int(min(max(budget / max(once, 1e-3), _FEWEST), _MOST))
