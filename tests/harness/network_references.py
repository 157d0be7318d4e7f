"""Operations of modern networks in float64, with NumPy, as their definitions have them."""

import math

import numpy as np

from handlepool.testing import reference


def double(x):
    return np.asarray(x).astype(np.float64)


def activated(y, kind):
    return y if kind is None else reference.ACTIVATIONS[kind](y)


def rows_normalised(x, axes, eps, *, centred=True):
    x = double(x)
    centre = x.mean(axes, keepdims=True) if centred else 0
    return (x - centre) / np.sqrt(((x - centre) ** 2).mean(axes, keepdims=True) + eps)


def along(parameter, ndim, axes):
    """A parameter with an axis for each axis of an array; 1 where it has none of its own."""
    extents = iter(np.shape(parameter))
    return double(parameter).reshape([next(extents) if axis in axes else 1 for axis in range(ndim)])


def scaled(y, axes, weight, bias):
    y = y if weight is None else y * along(weight, y.ndim, axes)
    return y if bias is None else y + along(bias, y.ndim, axes)


def layer_norm(x, axis=-1, weight=None, bias=None, eps=1e-5):
    axes = tuple(sorted(each % x.ndim for each in np.atleast_1d(axis)))
    return scaled(rows_normalised(x, axes, eps), axes, weight, bias)


def rms_norm(x, axis=-1, weight=None, eps=1e-6):
    axes = tuple(sorted(each % x.ndim for each in np.atleast_1d(axis)))
    return scaled(rows_normalised(x, axes, eps, centred=False), axes, weight, None)


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    y, each = np.empty(x.shape), x.shape[1] // groups
    for n in range(x.shape[0]):
        for group in range(groups):
            own = n, slice(group * each, (group + 1) * each)
            y[own] = rows_normalised(x[own], None, eps)
    return scaled(y, (1,), weight, bias)


def instance_norm(x, weight=None, bias=None, eps=1e-5):
    return group_norm(x, x.shape[1], weight, bias, eps)


def batch_norm(x, mean, variance, weight=None, bias=None, eps=1e-5, activation=None):
    y = (double(x) - along(mean, x.ndim, (1,))) / np.sqrt(along(variance, x.ndim, (1,)) + eps)
    return activated(scaled(y, (1,), weight, bias), activation)


def softmax(x, axis=-1):
    axes = tuple(each % x.ndim for each in np.atleast_1d(axis))
    power = np.exp(double(x) - double(x).max(axes, keepdims=True))
    return power / power.sum(axes, keepdims=True)


def pad(x, widths, mode="constant", value=0):
    pairs = [*zip(widths[::2], widths[1::2], strict=True)]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    more = [(max(one, 0), max(other, 0)) for one, other in pairs]
    how = {"constant_values": value} if mode == "constant" else {}
    padded = np.pad(x, more, {"replicate": "edge"}.get(mode, mode), **how)
    return padded[tuple(slice(max(-one, 0), padded.shape[axis] - max(-other, 0)) for axis, (one, other) in enumerate(pairs))]


def channel_shuffle(x, groups):
    each = x.shape[1] // groups
    return np.stack([x[:, group * each + place] for place in range(each) for group in range(groups)], 1)


def _places(extent, count, factor, mode, corners):
    """For each pixel of the output: pixels of the input, and their weights."""
    scale = np.float32(extent) / np.float32(count) if factor is None else np.float32(1 / factor)
    if corners:
        scale = np.float32(extent - 1) / np.float32(count - 1) if count > 1 else np.float32(0)
    for place in range(count):
        if mode == "nearest":
            yield [(min(math.floor(np.float32(place) * scale), extent - 1), 1.0)]
            continue
        where = float(scale) * place if corners else max(0.0, float(scale) * (place + 0.5) - 0.5)
        first = min(math.floor(where), extent - 1)
        yield [(first, 1 - (where - first)), (min(first + 1, extent - 1), where - first)]


def interpolate2d(x, size=None, scale_factor=None, mode="nearest", align_corners=False):
    factors = (None, None) if scale_factor is None else np.broadcast_to(scale_factor, 2)
    counts = (
        [math.floor(extent * float(factor)) for extent, factor in zip(x.shape[2:], factors, strict=True)]
        if size is None
        else size
    )
    rows, columns = (
        [*_places(extent, count, factor, mode, align_corners)]
        for extent, count, factor in zip(x.shape[2:], np.broadcast_to(counts, 2), factors, strict=True)
    )
    y = np.zeros((*x.shape[:2], len(rows), len(columns)))
    for p, across in enumerate(rows):
        for q, down in enumerate(columns):
            for row, one in across:
                for column, other in down:
                    y[:, :, p, q] += one * other * double(x[:, :, row, column])
    return y


def conv_transpose2d(
    x, w, *, stride=(1, 1), padding=((0, 0), (0, 0)), output_padding=(0, 0), dilation=(1, 1), groups=1, bias=None
):
    """Each pixel of x adds a filter, times its value, to the result."""
    x, w = double(x), double(w)
    own = x.shape[1] // groups
    whole = [
        (extent - 1) * s + d * (taps - 1) + 1 + more
        for extent, s, d, taps, more in zip(x.shape[2:], stride, dilation, w.shape[2:], output_padding, strict=True)
    ]
    y = np.zeros((x.shape[0], w.shape[1] * groups, *whole))
    for group in range(groups):
        made = slice(group * w.shape[1], (group + 1) * w.shape[1])
        for row, column in np.ndindex(x.shape[2:]):
            for r, s in np.ndindex(w.shape[2:]):
                added = x[:, group * own : (group + 1) * own, row, column] @ w[group * own : (group + 1) * own, :, r, s]
                y[:, made, row * stride[0] + r * dilation[0], column * stride[1] + s * dilation[1]] += added
    (above, below), (left, right) = padding
    y = y[:, :, above : y.shape[2] - below, left : y.shape[3] - right]
    return y if bias is None else y + double(bias)[:, None, None]


def attention(q, k, v, attn_mask=None, is_causal=False, scale=None):
    q, k, v = map(double, (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    if attn_mask is not None:
        scores = np.where(attn_mask, scores, -np.inf) if attn_mask.dtype == bool else scores + double(attn_mask)
    return softmax(scores) @ v


def layer(x, w, b, activation):
    """A layer of rows, whose weights may be filters of 1x1."""
    return activated(double(x) @ double(w).reshape(w.shape[:2]).T + double(b), activation)


def excited(x, hidden, w2, b2, gate):
    """Images by the gates that the second layer makes."""
    return double(x) * layer(hidden, w2, b2, gate)[:, :, None, None]


def squeeze_excite(x, w1, b1, w2, b2, activation="relu", gate="sigmoid"):
    return excited(x, layer(double(x).mean((2, 3)), w1, b1, activation), w2, b2, gate)
