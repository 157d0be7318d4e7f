"""Compute checksums of arrays' bits.

If an array changes, its checksum stays the same only with a probability of 1 in 2^64.

Each driver computes checksums on a stream (`Driver.checksums`). The driver reads an array as words, and mixes each word with its
position. The checksum is the sum of all mixed words. Different words give different mixed words, so a change inside a single word
always changes the sum.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from handlepool.tensors.layout import bytes_at, span

STEP = 0x9E3779B97F4A7C15
"""The number by which `fold` multiplies the position of a word.

`fold` adds the product to the word. This number and the function `_mixed` are those of the random number generator splitmix64.
"""
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_AT_ONCE = 1 << 18
"""Number of words that NumPy mixes per step.

The number is limited to keep NumPy's temporary arrays small.
"""


class Sums(Protocol):
    """Represent checksums that a stream computes.

    The caller of `Driver.checksums` keeps this object until the checksums are ready.
    """

    def ready(self) -> bool:
        """Return whether the stream has written the checksums; called inside `Driver.relaxed`."""

    def wait(self) -> None:
        """Wait on the host until the stream has written the checksums.

        Called inside `Driver.relaxed`.
        """

    def values(self) -> list[int] | None:
        """Return a checksum for each array.

        Called when the checksums are ready. Returns None if the driver could not compute the checksums.
        """


@dataclass(frozen=True, slots=True)
class Words:
    """Describe an array's memory as words of equal size.

    Attributes
    ----------
    start : int
        Address of the first word.
    size : int
        Bytes of a word: 1, 2, 4 or 8.
    axes : tuple of (int, int)
        For each axis, innermost first, the number of words and the stride in bytes. Along the first axis, words are adjacent.
        Two axes are merged if a single axis can describe the same memory.
    """

    start: int
    size: int
    axes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> "Words":
        """Return the words of an array whose first element is at ``address``.

        Strides are in bytes and may be negative.
        """
        if 0 in shape or not itemsize:
            return cls(address, 1, ((0, 1),))
        start, _ = span(address, shape, strides, itemsize)
        # If the stride of an axis is 0, all elements along the axis are the same memory. So the axis adds no words.
        steps = sorted((abs(step), extent) for extent, step in zip(shape, strides, strict=True) if extent > 1 and step)
        axes = [(itemsize, 1)]
        for step, extent in steps:
            count, inner = axes[-1]
            if step == count * inner:
                axes[-1] = count * extent, inner
            else:
                axes.append((extent, step))
        (run, _), *outer = axes
        # A word must divide the address and all strides, so that every word is aligned.
        size = math.gcd(8, start, run, *(step for _, step in outer))
        return cls(start, size, ((run // size, size), *outer))

    @property
    def count(self) -> int:
        """The number of words in the array."""
        return math.prod(extent for extent, _ in self.axes)

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the words of a host array as a NumPy array.

        The last axis is the innermost.
        """
        shape, strides = (tuple(axis[place] for axis in self.axes[::-1]) for place in (0, 1))
        if 0 in shape:
            return np.empty(shape, f"u{self.size}")
        start, stop = span(self.start, shape, strides, self.size)
        return np.ndarray(shape, f"u{self.size}", bytes_at(start, stop, None), 0, strides)


def of_host(array: np.ndarray[Any, Any]) -> int:
    """Return the checksum of an array in the host's memory."""
    address = array.__array_interface__["data"][0]
    return fold(Words.of(address, array.shape, array.strides, array.itemsize).as_numpy())


def fold(words: np.ndarray[Any, Any]) -> int:
    """Mix each word with its position, and return the sum."""
    flat, total = words.reshape(-1), 0
    for first in range(0, len(flat), _AT_ONCE):
        part = flat[first : first + _AT_ONCE].astype(np.uint64)
        places = np.arange(first + 1, first + 1 + len(part), dtype=np.uint64)
        total += int(_mixed(part + places * np.uint64(STEP)).sum(dtype=np.uint64))
    return total % (1 << 64)


def _mixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(FACTORS[1])
    return values ^ (values >> np.uint64(31))
