"""Kernels of our own, as what they compute: each driver has every one (`Driver.kernel`)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Add:
    """The sum of arrays of one shape, in float32 and in their order, and an activation of it; the output may be an input."""

    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Concat:
    """Arrays of one type, one behind the other along an axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Windows:
    """One number for each window of (N, C, H, W): its largest element, or its mean, in float32.

    Attributes
    ----------
    kind : {"max", "mean"}
        NaN is the largest.
    window, stride, padding : (int, int)
        Along height and width. What is padded is never the largest, and 0 in a mean; no window lies in it as a whole.
    counted : bool
        Whether the pixels that are padded count in a mean.
    """

    kind: Literal["max", "mean"]
    window: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    counted: bool = True

    def count(self, height: int, width: int) -> tuple[int, int]:
        """Return how many windows an image has along its axes; below 1 where they exceed it."""
        rows, columns = (
            (extent + 2 * padding - window) // stride + 1
            for extent, padding, window, stride in zip((height, width), self.padding, self.window, self.stride, strict=True)
        )
        return rows, columns


Kernel = Add | Concat | Windows
