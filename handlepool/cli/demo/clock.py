"""Measure times by events on the caller's stream."""

from collections.abc import Callable, Sequence
from typing import Any

from handlepool.drivers.protocol import Driver

_FEWEST, _MOST = 3, 31
"""Bound the number of repeats."""


def timing_events(driver: Driver, count: int) -> list[Any]:
    """Make events that record times."""
    # Another thread may be capturing, and this call must not end its capture (guarantee 9).
    with driver.relaxed():
        return [driver.create_event(timing=True) for _ in range(count)]


def destroy(driver: Driver, events: Sequence[Any]) -> None:
    """Destroy timing events."""
    with driver.relaxed():
        for event in events:
            driver.destroy_event(event)


def time(driver: Driver, work: Callable[[], Any]) -> float:
    """Return the milliseconds of some work on the caller's stream."""
    events = timing_events(driver, 2)
    caller = driver.current_stream().ptr
    driver.record_event(events[0], caller)
    work()
    driver.record_event(events[1], caller)
    driver.synchronize_stream(caller)
    elapsed = driver.elapsed(*events)
    destroy(driver, events)
    return elapsed


def repeats_of(budget: float, once: float) -> int:
    """Return the number of repeats that fit into a budget.

    Both arguments are in milliseconds. The result is at least three.
    """
    return int(min(max(budget / max(once, 1e-3), _FEWEST), _MOST))
