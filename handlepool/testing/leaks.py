"""Check that a test leaks no slots, scratch, programs or captures."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from handlepool.drivers.host.testing import Controls
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.pool.checks import CheckedDriver
from handlepool.pool.pool import HandlePool
from handlepool.pool.process_end import process_end
from handlepool.recording.program import Program

ADVICE = {
    "captures that are not over": ("capture that is not over", "end each capture"),
    "side slots that are leased": ("side slot that is leased", "leave each fork, and shut down each executor"),
    "side slots that a capture holds": ("side slot that a capture holds", "end each capture"),
    "slots of other threads that live on": ("slot of another thread that lives on", "join each thread"),
    "bytes of scratch that captured graphs hold": (
        "byte of scratch that captured graphs hold",
        "record with handlepool.record, or call trim(captured=True) when done",
    ),
    "bytes of the driver's memory that no slot has": (
        "byte of the driver's memory that no slot has",
        "free the memory that driver.allocate returned",
    ),
    "handles that no slot has": ("handle that no slot has", "destroy the handles that driver.create_handle returned"),
}
"""The singular and the remedy for each counted resource.

The keys are the plurals.
"""


@contextmanager
def leak_check(pool: HandlePool) -> Iterator[None]:
    """Check that a ``with`` block leaks nothing of a pool.

    Parameters
    ----------
    pool : HandlePool
        The pool to check. At the end, `HandlePool.trim` destroys the pool's idle handles and scratch.

    Raises
    ------
    AssertionError
        At the end, if the block leaked. The message gives name, count and remedy for each leaked resource.
    """
    before, programs = _held(pool), _programs()
    yield
    # Dropped objects in reference cycles release their resources only when the collector finds them. Such objects are no leak,
    # so run the collector first.
    gc.collect()
    # Some released resources are deferred: they wait for a call that may destroy them. `trim` is such a call.
    pool.trim()
    leaked = [_said(count, what) for what, count in (_held(pool) - before).items()]
    leaked += [f"{program!r} (close it)" for program in _programs() if program not in programs]
    if leaked:
        raise AssertionError(f"this test leaks {', '.join(leaked)}")


def _said(count: int, what: str) -> str:
    one, advice = ADVICE[what]
    return f"{count:,} {one if count == 1 else what} ({advice})"


def _held(pool: HandlePool) -> Counter[str]:
    """Count the resources that can leak, by their plural in `ADVICE`."""
    internals, stats = pool.internals, pool.stats()
    counts = Counter(
        {
            "side slots that are leased": stats["handles_leased"],
            "side slots that a capture holds": stats["handles_captured"],
            "slots of other threads that live on": internals.slots_of_other_threads(),
            "bytes of scratch that captured graphs hold": stats["scratch_bytes_captured"],
        }
    )
    driver = internals.status.driver
    if isinstance(driver, CheckedDriver):
        driver = driver.checked_driver
    if driver is None:
        return counts
    # With a GPU, only a capture of the current stream can be detected.
    if not isinstance(driver, Controls):
        pointer = driver.current_stream().ptr
        counts["captures that are not over"] = int(pointer != LEGACY_STREAM and driver.is_capturing(pointer))
    else:
        there = driver.alive()
        counts["captures that are not over"] = driver.captures_under_way()
        counts["handles that no slot has"] = there["handles"] - stats["handles_created"] + stats["handles_destroyed"]
        counts["bytes of the driver's memory that no slot has"] = there["scratch_bytes"] - stats["scratch_bytes"]
    return counts


def _programs() -> list[Program]:
    return [program for program in process_end.programs() if isinstance(program, Program) and not program.closed]
