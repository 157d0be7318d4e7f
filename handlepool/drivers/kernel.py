"""Describe the computations of this package's kernels.

Each driver implements every kernel (`Driver.kernel`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from handlepool.drivers.expression import Elementwise
from handlepool.tensors.layout import Layout


@dataclass(frozen=True, slots=True)
class Add:
    """Sum arrays of one shape, and apply an activation.

    The sum is in float32 and in the order of the arrays. The output may be an input. The sum of no arrays is 0.
    """

    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenate arrays of one type along an axis.

    An array that already lies at its place in the output stays there.
    """

    axis: int

    def firsts(self, inputs: Sequence[Layout], output: Layout) -> list[int]:
        """Return where in the output each array begins, in bytes."""
        ends = accumulate((x.shape[self.axis] * output.strides[self.axis] for x in inputs), initial=0)
        return [*ends][:-1]


@dataclass(frozen=True, slots=True)
class Windows:
    """Reduce each window of (N, C, H, W) to one number.

    The number is the window's largest element, or its mean, in float32.

    Attributes
    ----------
    kind : {"max", "mean"}
        "max" treats NaN as the largest element.
    window, stride, padding : (int, int)
        Sizes in pixels along height and width. A padded pixel is never the largest, and is 0 in a mean. No window lies
        entirely in the padding.
    counted : bool
        Whether padded pixels count in a mean.
    ceiling : bool
        Whether a last window may exceed the padded image. Such a window must begin in the image or before it. Pixels beyond the
        padded image never count.
    """

    kind: Literal["max", "mean"]
    window: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    counted: bool = True
    ceiling: bool = False

    def count(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of windows along an image's axes.

        A number below 1 means that a window exceeds the padded image.
        """
        rows, columns = (self._along(*axis) for axis in zip((height, width), self.padding, self.window, self.stride, strict=True))
        return rows, columns

    def _along(self, extent: int, padding: int, window: int, stride: int) -> int:
        room = extent + 2 * padding - window
        if not self.ceiling or room < 0:
            # A last window may exceed the padded image, but it must not begin behind the image.
            return room // stride + 1
        return min(-(-room // stride), (extent + padding - 1) // stride) + 1


@dataclass(frozen=True, slots=True)
class Depthwise:
    """Convolve each channel of images with its own filter, in float32.

    The filters are (C, 1, R, S) without gaps, or a single filter repeated for all channels. An optional bias (C,) is added, and
    an optional activation is applied.

    Attributes
    ----------
    stride, padding, dilation : (int, int)
        Sizes in pixels along height and width. The padding is the number of zeros before the image. The output's shape determines
        the zeros behind the image.
    activation : str or None
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    activation: str | None = None


MOST_TAPS = 49
"""Largest number of taps in a filter of `Depthwise`."""


@dataclass(frozen=True, slots=True)
class Normalise:
    """Normalise rows of an array, in float32.

    Operands are x, then a weight and a bias where there are such, then the result. A weight has the extents of ``axes``, or, with
    ``groups``, one element for each channel.

    Attributes
    ----------
    kind : {"mean", "square", "softmax"}
        "mean" subtracts the mean and divides by the standard deviation, "square" divides by the root of the mean square.
    axes : tuple of int
        Axes of a row, in ascending order. With ``groups`` these are all behind the channels.
    groups : int or None
        Groups of channels, of axis 1. A row then also has the channels of its group.
    eps : float
        Is added to the variance or to the mean square.
    weighted, biased : bool
        Whether there is a weight, and whether there is a bias.
    """

    kind: Literal["mean", "square", "softmax"]
    axes: tuple[int, ...]
    groups: int | None = None
    eps: float = 0.0
    weighted: bool = False
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Affine:
    """Normalise channels by given means and variances, in float32.

    Then come a weight, a bias and an activation, as far as there are such. Operands are x, the means and variances (C,), the
    weight and the bias, then the result.

    Attributes
    ----------
    eps : float
        Is added to the variance.
    weighted, biased : bool
        Whether there is a weight, and whether there is a bias.
    activation : str or None
    """

    eps: float
    weighted: bool = False
    biased: bool = False
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Pad:
    """Put elements around an array of any type.

    Attributes
    ----------
    before : tuple of int
        Number of elements added before the first element of each axis. A negative number leaves out elements of x. The output's
        shape determines the number of elements added at the end.
    mode : {"constant", "reflect", "replicate"}
        "reflect" does not repeat the outermost element.
    bits : int
        The constant, as the bytes of one element in the machine's order.
    """

    before: tuple[int, ...]
    mode: Literal["constant", "reflect", "replicate"] = "constant"
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Interleave the channels of groups, for an array of any type.

    Axis 1 has the channels. The result begins with the first channel of each group, followed by the second channel of each
    group, and so on.
    """

    groups: int


@dataclass(frozen=True, slots=True)
class Resample:
    """Resize images (N, C, H, W), in float32.

    Attributes
    ----------
    mode : {"nearest", "bilinear"}
    scale : (float, float)
        Input pixels per output pixel, along height and width, in float32.
    corners : bool
        Whether the centres of the corner pixels of both images coincide. Otherwise the outer edges of the corner pixels
        coincide.
    """

    mode: Literal["nearest", "bilinear"]
    scale: tuple[float, float]
    corners: bool = False


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Sum the pixels of images for each channel, in float32.

    The images are (N, C, H, W). The result is float32 of the shape (N, parts, C). All parts have equally many pixels, except that
    the last part may have fewer.

    Attributes
    ----------
    parts : int
    """

    parts: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Compute a layer of the means of images, in float32.

    Operands are the images, whose size alone counts, the sums of `Squeeze`, the weights (S, C) and the bias (S,), without gaps,
    then the result: float32 of the shape (N, S).

    Attributes
    ----------
    activation : str or None
    """

    activation: str | None


@dataclass(frozen=True, slots=True)
class Excite:
    """Scale the channels of images by gates, in float32.

    Two layers compute the gates from the channels' means.

    Operands are the images, the sums of `Squeeze`, the first layer's weights (S, C) and bias (S,), the second layer's weights
    (C, S) and bias (C,), then the result. The result of `Layer` may take the place of the sums and of the first layer. Weights
    and biases have no gaps.

    Attributes
    ----------
    gate : {"sigmoid", "hardsigmoid"}
        Of the second layer.
    layered : bool
        Whether the first layer's result is given.
    activation : str or None
        Of the first layer.
    """

    gate: Literal["sigmoid", "hardsigmoid"]
    layered: bool
    activation: str | None = None


MOST_EXCITED, MOST_SQUEEZED = 8192, 1024
"""The maximum of channels, and of numbers between layers, in `Excite`."""
NetworkKernel = Normalise | Affine | Pad | Shuffle | Resample | Squeeze | Layer | Excite
"""Kernels of normalisations, and of copies to other places or sizes."""
Kernel = Add | Concat | Windows | Depthwise | Elementwise | NetworkKernel
