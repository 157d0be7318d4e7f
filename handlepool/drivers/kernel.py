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

    The kernel adds in float32, in the order of the arrays. The output array may be one of the inputs. The sum of no arrays is 0.
    """

    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenate arrays of one type along an axis.

    An input may already lie in the output, at exactly the place where the kernel would copy it.
    """

    axis: int

    def firsts(self, inputs: Sequence[Layout], output: Layout) -> list[int]:
        """Return the byte offset in the output at which each input begins."""
        ends = accumulate((x.shape[self.axis] * output.strides[self.axis] for x in inputs), initial=0)
        return [*ends][:-1]


@dataclass(frozen=True, slots=True)
class Windows:
    """Reduce each window of images (N, C, H, W) to one number.

    The number is the window's largest element or the window's mean, computed in float32.

    Attributes
    ----------
    kind : {"max", "mean"}
        The window's largest element, or its mean. For "max", NaN is larger than any number.
    window, stride, padding : (int, int)
        Sizes in pixels along height and width. A padded pixel is never the largest element, and is 0 in a mean. No window lies
        entirely in the padding.
    counted : bool
        Whether the divisor of a mean counts padded pixels.
    ceiling : bool
        Whether the last window of a row or column may exceed the padded image. Such a window must begin in the image, or in the
        padding before the image. Pixels beyond the padded image never count.
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
            return room // stride + 1
        # The last window may exceed the padded image, but it must not begin behind the image.
        return min(-(-room // stride), (extent + padding - 1) // stride) + 1


@dataclass(frozen=True, slots=True)
class Depthwise:
    """Convolve each channel of images with its own filter, in float32.

    The filters are an array (C, 1, R, S) without gaps, or a single filter that is repeated for all channels. The kernel adds an
    optional bias (C,), and applies an optional activation.

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
"""The maximum number of elements in a filter of `Depthwise`."""


@dataclass(frozen=True, slots=True)
class Normalise:
    """Normalise rows of an array, in float32.

    Operands are x, then the weight and the bias if there are any, then the result. Weight and bias have the extents of ``axes``.
    If ``groups`` is given, they have one element for each channel.

    Attributes
    ----------
    kind : {"mean", "square", "softmax"}
        "mean" subtracts the mean and divides by the standard deviation. "square" divides by the root of the mean square.
        "softmax" makes the elements of a row positive, with the sum 1.
    axes : tuple of int
        Axes of a row, in ascending order. If ``groups`` is given, they are all axes behind the channels.
    groups : int or None
        The number of groups that the channels, which are axis 1, are divided into. A row then consists of ``axes`` and the
        channels of one group.
    eps : float
        A number that is added to the variance or to the mean square.
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

    The kernel then multiplies by the weight, adds the bias and applies the activation, if there are any. Operands are x, the
    means and variances (C,), the weight and the bias if there are any, then the result.

    Attributes
    ----------
    eps : float
        A number that is added to the variance.
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
    """Put elements around an array of any type, or cut elements off.

    Attributes
    ----------
    before : tuple of int
        The number of elements to add before the first element of each axis. A negative number cuts off elements of the input. The
        output's shape determines the number of elements to add at the end.
    mode : {"constant", "reflect", "replicate"}
        "reflect" does not repeat the outermost element.
    bits : int
        The constant: the bytes of one element, as an integer in the machine's byte order.
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
        If true, the centres of the corner pixels of the input and of the output coincide. If false, the outer edges of the corner
        pixels coincide.
    """

    mode: Literal["nearest", "bilinear"]
    scale: tuple[float, float]
    corners: bool = False


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Sum the pixels of images for each channel, in float32.

    The images are (N, C, H, W). The kernel divides the pixels of an image into ``parts`` parts of equal size, except that the
    last part may be smaller. The result has a sum for each part and channel: float32 of the shape (N, parts, C).

    Attributes
    ----------
    parts : int
    """

    parts: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Apply a dense layer to the mean of each channel, in float32.

    Operands are the images, the sums of `Squeeze`, the weights (S, C) and the bias (S,), then the result, which is float32 of the
    shape (N, S). The kernel uses the size of the images, and not their pixels. Weights and bias have no gaps.

    Attributes
    ----------
    activation : str or None
    """

    activation: str | None


@dataclass(frozen=True, slots=True)
class Excite:
    """Scale the channels of images by gates, in float32.

    Two dense layers compute the gates from the channels' means.

    Operands are the images, the sums of `Squeeze`, the first layer's weights (S, C) and bias (S,), the second layer's weights
    (C, S) and bias (C,), then the result. The result of `Layer` may take the place of the sums and of the first layer. Weights
    and biases have no gaps.

    Attributes
    ----------
    gate : {"sigmoid", "hardsigmoid"}
        The activation of the second layer.
    layered : bool
        Whether the result of `Layer` is given in place of the sums and of the first layer.
    activation : str or None
        The activation of the first layer.
    """

    gate: Literal["sigmoid", "hardsigmoid"]
    layered: bool
    activation: str | None = None


MOST_EXCITED, MOST_SQUEEZED = 8192, 1024
"""The maximum of channels, and of the first layer's outputs, in `Excite`."""
NetworkKernel = Normalise | Affine | Pad | Shuffle | Resample | Squeeze | Layer | Excite
"""Kernels that normalise, pad, reorder, resize, or scale channels by gates."""
Kernel = Add | Concat | Windows | Depthwise | Elementwise | NetworkKernel
