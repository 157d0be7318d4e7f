"""Prepare the argument of the checksum kernel in ``checksum.cu``.

This module needs no CUDA.
"""

from array import array as buffer
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from handlepool.drivers.checksum import Words

THREADS = 256
"""The number of threads of a block."""
MOST_BLOCKS = 256
"""The maximum number of blocks for each array."""
MOST_ARRAYS = 12
"""The maximum number of arrays per launch.

The launch's argument then stays below the 4 KiB that CUDA takes on every GPU.
"""
MOST_AXES = 16
"""The maximum number of an array's axes after axes are merged."""
MACROS = {"THREADS": THREADS, "MOST_ARRAYS": MOST_ARRAYS, "MOST_AXES": MOST_AXES}


@cache
def source() -> str:
    """Return the kernel's source."""
    return (Path(__file__).parent / "checksum.cu").read_text(encoding="utf-8")


def arguments(words: Sequence[Words], sums: int) -> tuple["buffer[int]", tuple[int, int]]:
    """Return the argument of a launch, and its grid of blocks.

    The launch writes the sums of the arrays to the address ``sums``.

    Raises
    ------
    ValueError
        For an array with more than `MOST_AXES` axes after axes are merged.
    """
    values = [sums]
    for each in words:
        rank = len(each.axes)
        if rank > MOST_AXES:
            raise ValueError(
                f"an array has {rank} axes that cannot be merged, and a checksum takes at most {MOST_AXES} axes; pass a copy "
                f"without gaps"
            )
        none = [0] * (MOST_AXES - rank)
        values += [each.start, each.size, each.count, rank]
        values += [*(extent for extent, _ in each.axes), *none, *(step for _, step in each.axes), *none]
    # The kernel's argument has room for `MOST_ARRAYS` arrays, so zeros fill the room that these arrays leave.
    values += [0] * ((MOST_ARRAYS - len(words)) * (4 + 2 * MOST_AXES))
    most = max(each.count for each in words)
    return buffer("Q", values), (min(max(-(-most // THREADS), 1), MOST_BLOCKS), len(words))
