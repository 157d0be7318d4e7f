"""Limit the memory of a simulated device.

``HANDLEPOOL_HOST_MEMORY`` sets the limit. Without it, a device gets a share of the machine's free memory.
"""

import os
import re
from pathlib import Path

from handlepool._util.names import shown
from handlepool.errors import ArgumentError

VARIABLE = "HANDLEPOOL_HOST_MEMORY"
SHARE = 2
"""A device has the machine's free memory divided by this number.

The free memory is measured when the driver is made.
"""
UNKNOWN = 1 << 30
"""Bytes per device on machines that do not report their free memory."""
ADVICE = f"the memory is simulated: set the size per device by {VARIABLE}, for example {VARIABLE}=4G"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def limit() -> tuple[int, str]:
    """Return the bytes per simulated device, and the number's source.

    The source is a text for messages.

    Raises
    ------
    ArgumentError
        If ``HANDLEPOOL_HOST_MEMORY`` is no size.
    """
    setting = os.environ.get(VARIABLE)
    if setting:
        return parse(setting), f"set by {VARIABLE}"
    free = _free()
    if free is None:
        return UNKNOWN, f"the machine does not report its free memory; {VARIABLE} is not set"
    return free // SHARE, f"1/{SHARE} of the free memory; {VARIABLE} is not set"


def parse(text: str) -> int:
    """Read a number of bytes, with or without a unit.

    The units K, M, G and T are powers of 1024.

    Raises
    ------
    ArgumentError
        For a text that is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{VARIABLE}={shown(text)} is no size: pass bytes, or a number with K, M, G or T, for example 4G")
    number, unit = match.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


def _free() -> int | None:
    """Return the bytes that the machine or its container has free.

    So many bytes can be used without swapping. Return None if the machine does not report them.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        allowed, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        return max(0, min(free, allowed - used))
    except (OSError, ValueError):
        # The container has no memory limit: the file is missing, or holds the word "max".
        return free
