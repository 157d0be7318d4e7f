"""Kernels of our own, as what they compute: each driver has every one (`Driver.kernel`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from handlepool.drivers.expression import Elementwise
from handlepool.tensors.layout import Layout


@dataclass(frozen=True, slots=True)
class Add:
    """The sum of arrays of one shape, in float32 and in their order, and an activation of it; the output may be an input.

    The sum of no arrays is 0.
    """

    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Concat:
    """Arrays of one type, one behind the other along an axis; those that lie in their places there already stay as they are."""

    axis: int

    def firsts(self, inputs: Sequence[Layout], output: Layout) -> list[int]:
        """Return where in the output each array begins, in bytes."""
        ends = accumulate((x.shape[self.axis] * output.strides[self.axis] for x in inputs), initial=0)
        return [*ends][:-1]


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
    ceiling : bool
        Whether there is a last window that exceeds the padded image, if it begins in the image or before it. What is beyond
        never counts.
    """

    kind: Literal["max", "mean"]
    window: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    counted: bool = True
    ceiling: bool = False

    def count(self, height: int, width: int) -> tuple[int, int]:
        """Return how many windows an image has along its axes; below 1 where they exceed it."""
        rows, columns = (self._along(*axis) for axis in zip((height, width), self.padding, self.window, self.stride, strict=True))
        return rows, columns

    def _along(self, extent: int, padding: int, window: int, stride: int) -> int:
        room = extent + 2 * padding - window
        if not self.ceiling or room < 0:
            return room // stride + 1
        return min(-(-room // stride), (extent + padding - 1) // stride) + 1


@dataclass(frozen=True, slots=True)
class Depthwise:
    """Each channel of images with a filter of its own of (C, 1, R, S), without gaps, in float32.

    Then come a bias (C,), if there is one, and an activation.

    Attributes
    ----------
    stride, padding, dilation : (int, int)
        Along height and width; zeros before the image. How many are behind it, the output says.
    activation : str or None
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    activation: str | None = None


MOST_TAPS = 49
"""Of a filter that `Depthwise` takes."""

Kernel = Add | Concat | Windows | Depthwise | Elementwise
