"""Compute convolutions, products and pooling in float64, as a reference.

The functions share no code with the drivers. The functions need SciPy, which the extras ``demo`` and ``test`` install.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import signal, special

from handlepool._util.names import shown
from handlepool.errors import ArgumentError

Array = npt.NDArray[np.float64]

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda y: np.maximum(y, 0),
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "gelu": lambda y: y * special.ndtr(y),
    "swish": lambda y: y * special.expit(y),
    "hardsigmoid": lambda y: np.clip(y / 6 + 0.5, 0, 1),
    "hardswish": lambda y: y * np.clip(y / 6 + 0.5, 0, 1),
}
MODES: Mapping[str, Callable[..., Array]] = {
    "cross_correlation": signal.correlate2d,
    "convolution": signal.convolve2d,
}


def conv2d(
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Sequence[Sequence[int]] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    bias: npt.ArrayLike | None = None,
    add: npt.ArrayLike | None = None,
    activation: str | None = None,
) -> Array:
    """Convolve images with filters in float64.

    Each channel of an image is convolved with each filter separately, without Fourier transforms. So the only errors are the
    roundings of float64.

    Parameters
    ----------
    x : array_like, shape (N, C, H, W)
        Images.
    w : array_like, shape (K, C / groups, R, S)
        Filters.
    stride, dilation : int or sequence of two
        Along height and width, in pixels.
    padding : int, or sequence of two, or of two pairs
        Zeros added on both sides, along height and width, or ((above, below), (left, right)).
    groups : int
        Number of groups of channels that are convolved separately.
    mode : {"cross_correlation", "convolution"}
        "cross_correlation" is the convention of neural networks. "convolution" is the mathematical convention, which flips the
        filters.
    bias : array_like, shape (K,), optional
        Added to each channel.
    add : array_like, shape (N, K, P, Q), optional
        Added before the activation.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last; "gelu" with the exact error function.

    Returns
    -------
    ndarray of float64, shape (N, K, P, Q)

    Raises
    ------
    ArgumentError
        For shapes that do not fit each other, or an unknown mode or activation.
    """
    if mode not in MODES or (activation is not None and activation not in ACTIVATIONS):
        raise ArgumentError(
            f"reference conv2d: mode={shown(mode)}, activation={shown(activation)}; the modes are {', '.join(MODES)}, "
            f"the activations {', '.join(ACTIVATIONS)}"
        )
    images, filters = np.asarray(x, np.float64), np.asarray(w, np.float64)
    _check_shapes(images.shape, filters.shape, groups)
    steps, gaps = _pair(stride), _pair(dilation)
    margins = [_pair(entry) for entry in (padding if isinstance(padding, (Sequence, np.ndarray)) else _pair(padding))]
    images = np.pad(images, ((0, 0), (0, 0), *margins))
    filters = _dilate(filters, gaps)
    if images.shape[2] < filters.shape[2] or images.shape[3] < filters.shape[3]:
        raise ArgumentError(
            f"reference conv2d: filters of {filters.shape[2:]} after dilation exceed padded images of {images.shape[2:]} pixels; "
            "pass larger images or smaller filters"
        )

    slide = MODES[mode]
    width, per_group = filters.shape[1], filters.shape[0] // groups
    result = np.zeros(
        (
            images.shape[0],
            filters.shape[0],
            (images.shape[2] - filters.shape[2]) // steps[0] + 1,
            (images.shape[3] - filters.shape[3]) // steps[1] + 1,
        )
    )
    for n, k in np.ndindex(result.shape[:2]):
        first = k // per_group * width
        for c in range(width):
            result[n, k] += slide(images[n, first + c], filters[k, c], mode="valid")[:: steps[0], :: steps[1]]
    if bias is not None:
        result += np.asarray(bias, np.float64).reshape(1, -1, 1, 1)
    if add is not None:
        result = result + np.asarray(add, np.float64)
    return result if activation is None else ACTIVATIONS[activation](result)


def matmul(a: npt.ArrayLike, b: npt.ArrayLike, *, bias: npt.ArrayLike | None = None, activation: str | None = None) -> Array:
    """Multiply matrices in float64, one pair at a time.

    Parameters
    ----------
    a : array_like, shape (..., M, K)
    b : array_like, shape (..., K, N)
        Its batch axes broadcast with the batch axes of ``a``.
    bias : array_like, shape (N,), optional
        Added to each row.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last.

    Returns
    -------
    ndarray of float64, shape (..., M, N)

    Raises
    ------
    ArgumentError
        For an unknown activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"reference matmul: activation={shown(activation)}; it can be {', '.join(ACTIVATIONS)} or None")
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    result = np.einsum("...mk,...kn->...mn", first, second)
    if bias is not None:
        result = result + np.asarray(bias, np.float64)
    return result if activation is None else ACTIVATIONS[activation](result)


def max_pool2d(
    x: npt.ArrayLike,
    window: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
) -> Array:
    """Take each window's largest element, in float64.

    A window that contains a NaN gives NaN.

    Parameters
    ----------
    x : array_like, shape (N, C, H, W)
        Images.
    window, stride, padding, ceil_mode
        As in `handlepool.max_pool2d`.

    Returns
    -------
    ndarray of float64, shape (N, C, P, Q)
    """
    return _pooled(x, window, stride, padding, ceil_mode, lambda pixels, _: pixels.max((2, 3)))


def avg_pool2d(
    x: npt.ArrayLike,
    window: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """Take the mean of each window of images, in float64.

    Parameters
    ----------
    x : array_like, shape (N, C, H, W)
        Images.
    window, stride, padding, ceil_mode, count_include_pad
        As in `handlepool.avg_pool2d`.

    Returns
    -------
    ndarray of float64, shape (N, C, P, Q)
    """

    def mean(pixels: Array, area: int) -> Array:
        return np.asarray(pixels.sum((2, 3)) / (area if count_include_pad else pixels[0, 0].size))

    return _pooled(x, window, stride, padding, ceil_mode, mean)


def _pooled(
    x: npt.ArrayLike,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] | None,
    padding: int | tuple[int, int],
    ceil_mode: bool,
    take: Callable[[Array, int], Array],
) -> Array:
    """Apply a function to each window's pixels that lie inside the image."""
    images = np.asarray(x, np.float64)
    (rows, columns), (top, left) = _pair(window), _pair(padding)
    down, right = (rows, columns) if stride is None else _pair(stride)
    height, width = images.shape[2:]
    begins = [
        range(-pad, min(extent, extent + pad - size + step) if ceil_mode else extent + pad - size + 1, step)
        for extent, pad, size, step in ((height, top, rows, down), (width, left, columns, right))
    ]
    found = [
        [
            take(
                images[:, :, max(p, 0) : p + rows, max(q, 0) : q + columns],
                (min(p + rows, height + top) - p) * (min(q + columns, width + left) - q),
            )
            for q in begins[1]
        ]
        for p in begins[0]
    ]
    return np.moveaxis(np.array(found), (0, 1), (2, 3))


def _check_shapes(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> None:
    if len(x) != 4 or len(w) != 4 or groups < 1 or x[1] != w[1] * groups or w[0] % groups or 0 in w:
        raise ArgumentError(
            f"reference conv2d: x {x}, w {w} and groups={shown(groups)} do not fit; give x as (N, C, H, W), w as (K, C / groups, "
            "R, S), and a number of groups that divides K"
        )


def _dilate(filters: Array, gaps: tuple[int, int]) -> Array:
    (k, c, r, s), (rows, columns) = filters.shape, gaps
    spread = np.zeros((k, c, (r - 1) * rows + 1, (s - 1) * columns + 1))
    spread[:, :, ::rows, ::columns] = filters
    return spread


def _pair(value: Any) -> tuple[int, int]:
    one, other = (value, value) if np.ndim(value) == 0 else value
    return int(one), int(other)


def relative_error(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the norm of the error relative to the expected norm.

    The result is 0 if the error is 0. Otherwise it is infinite if the expected norm is 0, or if there is a NaN.
    """
    right = np.asarray(expected, np.float64)
    error, norm = (float(np.linalg.norm(part)) for part in (np.asarray(actual, np.float64) - right, right))
    # If the expected norm is 0 as well, the division would be 0 / 0.
    if error == 0:
        return 0.0
    return error / norm if norm > 0 and np.isfinite(error) else float("inf")
