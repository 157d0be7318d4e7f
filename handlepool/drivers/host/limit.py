"""How much memory a simulated device has: what ``HANDLEPOOL_HOST_MEMORY`` says, else a share of what the machine has free."""

import os
import re
from pathlib import Path

from handlepool._util.names import shown
from handlepool.errors import ArgumentError

VARIABLE = "HANDLEPOOL_HOST_MEMORY"
SHARE = 2
"""Each device may have one part in so many of the memory that is free when the driver is made."""
UNKNOWN = 1 << 30
"""For machines that do not say what is free."""
ADVICE = f"the memory is simulated: {VARIABLE}, as in {VARIABLE}=4G, sets how much each device has"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def limit() -> tuple[int, str]:
    """Say how many bytes each simulated device has, and why so many.

    Raises
    ------
    ArgumentError
        For a setting that is no size.
    """
    setting = os.environ.get(VARIABLE)
    if setting:
        return parse(setting), f"set by {VARIABLE}"
    free = _free()
    if free is None:
        return UNKNOWN, f"the machine does not say what is free; {VARIABLE} is not set"
    return free // SHARE, f"1/{SHARE} of what is free; {VARIABLE} is not set"


def parse(text: str) -> int:
    """Read a number of bytes, with or without a unit: K, M, G and T are powers of 1024.

    Raises
    ------
    ArgumentError
        For what is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{VARIABLE}={shown(text)} is no size: pass bytes, or a number with K, M, G or T, as 4G")
    number, unit = match.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


def _free() -> int | None:
    """Read what the machine can give without swapping, or a container allows; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        allowed, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        return max(0, min(free, allowed - used))
    except (OSError, ValueError):  # no container's limit, which may be the word "max"
        return free
