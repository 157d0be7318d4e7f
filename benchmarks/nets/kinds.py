"""Where a network's operations come from, beside the library: a fork, NumPy in float64, torch, JAX."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool import ops as library

Values = np.ndarray[Any, Any]
Pair = int | tuple[int, int]


def apply(ops: Any, function: Any, *arrays: Any) -> Any:
    """Call an elementwise function of the library's; where operations come from elsewhere, as they say."""
    return function(*arrays) if ops is library else ops.apply(function, *arrays)


def permuted(x: Any, *axes: int) -> Any:
    """A view of an array of any library with its axes in another order."""
    return x.permute(*axes) if hasattr(x, "permute") else x.transpose(*axes)


class Branches:
    """The library's operations, each call a branch of one fork."""

    def __init__(self, fork: Any) -> None:
        run = fork.run
        self.conv2d, self.linear = partial(run, library.conv2d), partial(run, library.linear)
        self.max_pool2d, self.avg_pool2d = partial(run, library.max_pool2d), partial(run, library.avg_pool2d)
        self.mean2d = partial(run, library.mean2d)
        self.concat, self.conv2d_input_grad = partial(run, library.concat), partial(run, library.conv2d_input_grad)
        self.add, self.multiply, self.layer_norm = (
            partial(run, each) for each in (library.add, library.multiply, library.layer_norm)
        )
        self.scaled_dot_product_attention = partial(run, library.scaled_dot_product_attention)
        self.channel_shuffle, self.pad = partial(run, library.channel_shuffle), partial(run, library.pad)
        self.interpolate2d, self.squeeze_excite = partial(run, library.interpolate2d), partial(run, library.squeeze_excite)
        self.apply = run


def forked(states: Any, network: Callable[..., Any], p: Any, x: Any) -> Any:
    """Run a network with one fork, in which each call waits for those whose outputs it reads."""
    with states.fork() as fork:
        y = network(p, x, Branches(fork))
    return y


class Reference:
    """The operations in float64, of NumPy alone."""

    def conv2d(
        self,
        x: Values,
        w: Values,
        *,
        bias: Values,
        stride: int = 1,
        padding: Pair = 0,
        groups: int = 1,
        add: Any = 0.0,
        activation: str = "",
    ) -> Values:
        """As `handlepool.conv2d`."""
        windows = _windows(x, w.shape[2:], stride, padding, 0.0)
        if groups == 1:
            y = np.tensordot(windows, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        else:  # each channel with a filter of its own
            y = np.einsum("nchwrs,crs->nchw", windows, w[:, 0])
        return activated(y + bias[:, None, None] + add, activation)

    def conv2d_input_grad(self, dy: Values, w: Values, shape: Sequence[int], *, stride: int) -> Values:
        """As `handlepool.conv2d_input_grad`, with windows that do not overlap: the filters' extent is the stride."""
        y = np.zeros(shape)
        rows, columns = (stride * extent for extent in dy.shape[2:])
        y[:, :, :rows, :columns] = np.einsum("nkhw,kcrs->nchrws", dy, w).reshape(len(dy), -1, rows, columns)
        return y

    def add(self, x: Values, *others: Values, activation: str = "") -> Values:
        """As `handlepool.ops.add`."""
        return activated(np.asarray(sum(others, x)), activation)

    def multiply(self, x: Values, *others: Values) -> Values:
        """As `handlepool.ops.multiply`."""
        return np.asarray(math.prod(others, start=x))

    def apply(self, function: Any, *arrays: Values) -> Values:
        """The plain function of an elementwise one."""
        return np.asarray(function.__wrapped__(*arrays))

    def layer_norm(self, x: Values, *, weight: Values, bias: Values, eps: float, axis: int = -1) -> Values:
        """As `handlepool.ops.layer_norm`."""
        centred = np.moveaxis(x - x.mean(axis, keepdims=True), axis, -1)
        found = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias
        return np.moveaxis(found, -1, axis)

    def scaled_dot_product_attention(self, q: Values, k: Values, v: Values) -> Values:
        """As `handlepool.ops.scaled_dot_product_attention`, without a mask."""
        scores = np.exp(np.einsum("nhqd,nhkd->nhqk", q, k) / q.shape[-1] ** 0.5)
        return np.asarray(np.einsum("nhqk,nhkd->nhqd", scores / scores.sum(-1, keepdims=True), v))

    def channel_shuffle(self, x: Values, groups: int) -> Values:
        """As `handlepool.ops.channel_shuffle`."""
        n, c, *sides = x.shape
        return x.reshape(n, groups, c // groups, *sides).swapaxes(1, 2).reshape(x.shape)

    def pad(self, x: Values, pad: Sequence[int]) -> Values:
        """As `handlepool.ops.pad`, where it leaves the first channels out."""
        return x[:, -pad[4] :]

    def squeeze_excite(self, x: Values, w1: Values, b1: Values, w2: Values, b2: Values, *, activation: str, gate: str) -> Values:
        """As `handlepool.ops.squeeze_excite`."""
        hidden = self.linear(x.mean((2, 3)), w1, bias=b1, activation=activation)
        return np.asarray(x * self.linear(hidden, w2, bias=b2, activation=gate)[:, :, None, None])

    def interpolate2d(self, x: Values, *, size: tuple[int, int], mode: str) -> Values:
        """As `handlepool.ops.interpolate2d`, bilinearly."""
        down, along = (_weights(old, new) for old, new in zip(x.shape[2:], size, strict=True))
        return np.asarray(down @ x @ along.T)

    def avg_pool2d(self, x: Values, window: int, *, stride: int, padding: int = 0, ceil_mode: bool = False) -> Values:
        """As `handlepool.ops.avg_pool2d`."""
        counted = _windows(np.ones((1, 1, *x.shape[2:])), window, stride, padding, 1.0, ceil_mode)
        return np.asarray(_windows(x, window, stride, padding, 0.0, ceil_mode).sum(axis=(4, 5)) / counted.sum(axis=(4, 5)))

    def max_pool2d(self, x: Values, window: int, *, stride: int, padding: int = 0, ceil_mode: bool = False) -> Values:
        """As `handlepool.ops.max_pool2d`."""
        return np.asarray(_windows(x, window, stride, padding, -np.inf, ceil_mode).max(axis=(4, 5)))

    def mean2d(self, x: Values) -> Values:
        """As `handlepool.ops.mean2d`."""
        return np.asarray(x.mean(axis=(2, 3)))

    def concat(self, arrays: Sequence[Values], axis: int) -> Values:
        """As `handlepool.ops.concat`."""
        return np.concatenate(arrays, axis)

    def linear(self, x: Values, w: Values, *, bias: Values, activation: str = "") -> Values:
        """As `handlepool.linear`."""
        return activated(np.asarray(x @ w.T + bias), activation)


def activated(y: Values, kind: str) -> Values:
    """Values behind an activation; "" is none."""
    gate = np.clip(y + 3, 0, 6) / 6
    kinds: dict[str, Callable[[], Any]] = {
        "": lambda: y,
        "relu": lambda: np.maximum(y, 0),
        "sigmoid": lambda: 1 / (1 + np.exp(-y)),
        "swish": lambda: y / (1 + np.exp(-y)),
        "gelu": lambda: y * (1 + np.vectorize(math.erf)(y / 2**0.5)) / 2,
        "hardsigmoid": lambda: gate,
        "hardswish": lambda: y * gate,
    }
    return np.asarray(kinds[kind]())


def _weights(old: int, new: int) -> Values:
    """How much each old pixel along an axis counts for each new one."""
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def _windows(x: Values, sides: Pair, stride: int, padding: Pair, value: float, ceil_mode: bool = False) -> Values:
    sides, padding = _pair(sides), _pair(padding)
    padded = np.pad(x, ((0, 0), (0, 0), *((each, each) for each in padding)), constant_values=value)
    if ceil_mode:  # room for a last window that begins in the image; beyond what is padded there is nothing to count
        axes = zip(x.shape[2:], sides, padding, strict=True)
        more = [max(0, _last(extent, side, stride, pad) + side - extent - 2 * pad) for extent, side, pad in axes]
        padded = np.pad(padded, ((0, 0), (0, 0), *((0, each) for each in more)), constant_values=min(value, 0.0))
    return np.lib.stride_tricks.sliding_window_view(padded, sides, axis=(2, 3))[:, :, ::stride, ::stride]


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _last(extent: int, side: int, stride: int, padding: int) -> int:
    """Where the last window begins that may exceed the padded image, but not begin behind the image."""
    begins = range(0, extent + padding, stride)
    return next(begin for begin in begins if begin + side >= extent + 2 * padding or begin == begins[-1])


class Torch:
    """The operations of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._functional = torch, torch.nn.functional

    def conv2d(
        self,
        x: Any,
        w: Any,
        *,
        bias: Any,
        stride: int = 1,
        padding: Pair = 0,
        groups: int = 1,
        add: Any = None,
        activation: str = "",
    ) -> Any:
        """As `handlepool.conv2d`."""
        y = self._functional.conv2d(x, w, bias, stride, padding, 1, groups)
        return self._activated(y if add is None else y.add_(add), activation)

    def _activated(self, y: Any, kind: str) -> Any:
        if kind == "gelu":
            return self._functional.gelu(y)
        if kind == "sigmoid":
            return self._torch.sigmoid_(y)
        names = {"relu": "relu", "swish": "silu", "hardsigmoid": "hardsigmoid", "hardswish": "hardswish"}
        return getattr(self._functional, names[kind])(y, inplace=True) if kind else y

    def conv2d_input_grad(self, dy: Any, w: Any, shape: Sequence[int], *, stride: int) -> Any:
        """As `handlepool.conv2d_input_grad`, without padding."""
        beyond = [
            whole - (part - 1) * stride - side for whole, part, side in zip(shape[2:], dy.shape[2:], w.shape[2:], strict=True)
        ]
        return self._functional.conv_transpose2d(dy, w, None, stride, 0, beyond)

    def add(self, x: Any, *others: Any, activation: str = "") -> Any:
        """As `handlepool.ops.add`."""
        for other in others:
            x = x + other
        return self._activated(x, activation)

    def multiply(self, x: Any, other: Any) -> Any:
        """As `handlepool.ops.multiply`."""
        return x * other

    def apply(self, function: Any, *arrays: Any) -> Any:
        """The plain function of an elementwise one."""
        return function.__wrapped__(*arrays)

    def layer_norm(self, x: Any, *, weight: Any, bias: Any, eps: float, axis: int = -1) -> Any:
        """As `handlepool.ops.layer_norm`."""
        x = x.movedim(axis, -1)
        return self._functional.layer_norm(x, weight.shape, weight, bias, eps).movedim(-1, axis)

    def scaled_dot_product_attention(self, q: Any, k: Any, v: Any) -> Any:
        """As `handlepool.ops.scaled_dot_product_attention`, without a mask."""
        return self._functional.scaled_dot_product_attention(q, k, v)

    def channel_shuffle(self, x: Any, groups: int) -> Any:
        """As torchvision writes it, since torch's own keeps Inductor from fusing it."""
        n, c, *sides = x.shape
        return x.view(n, groups, c // groups, *sides).transpose(1, 2).reshape(x.shape)

    def pad(self, x: Any, pad: Sequence[int]) -> Any:
        """As `handlepool.ops.pad`, where it leaves the first channels out; torch's convolutions take views."""
        return x[:, -pad[4] :]

    def squeeze_excite(self, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *, activation: str, gate: str) -> Any:
        """As `handlepool.ops.squeeze_excite`, with torch's own operations."""
        hidden = self.linear(self.mean2d(x), w1, bias=b1, activation=activation)
        return x * self.linear(hidden, w2, bias=b2, activation=gate)[:, :, None, None]

    def interpolate2d(self, x: Any, *, size: tuple[int, int], mode: str) -> Any:
        """As `handlepool.ops.interpolate2d`."""
        return self._functional.interpolate(x, size=size, mode=mode)

    def avg_pool2d(self, x: Any, window: int, *, stride: int, padding: int = 0, ceil_mode: bool = False) -> Any:
        """As `handlepool.ops.avg_pool2d`."""
        return self._functional.avg_pool2d(x, window, stride, padding, ceil_mode)

    def max_pool2d(self, x: Any, window: int, *, stride: int, padding: int = 0, ceil_mode: bool = False) -> Any:
        """As `handlepool.ops.max_pool2d`."""
        return self._functional.max_pool2d(x, window, stride, padding, 1, ceil_mode)

    def mean2d(self, x: Any) -> Any:
        """As `handlepool.ops.mean2d`."""
        return x.mean((2, 3))

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """As `handlepool.ops.concat`."""
        return self._torch.cat(list(arrays), axis)

    def linear(self, x: Any, w: Any, *, bias: Any, activation: str = "") -> Any:
        """As `handlepool.linear`."""
        return self._activated(self._functional.linear(x, w, bias), activation)


class Jax:
    """The operations of JAX, to be traced."""

    def __init__(self, jax: Any) -> None:
        self._lax, self._numpy = jax.lax, jax.numpy

    def conv2d(
        self, x: Any, w: Any, *, bias: Any, stride: int = 1, padding: Pair = 0, add: Any = None, activation: str = ""
    ) -> Any:
        """As `handlepool.conv2d`, with relu or no activation."""
        forms = "NCHW", "OIHW", "NCHW"
        around = [(each, each) for each in _pair(padding)]
        y = self._lax.conv_general_dilated(x, w, (stride, stride), around, dimension_numbers=forms)
        y = y + bias[:, None, None] if add is None else y + bias[:, None, None] + add
        return self._numpy.maximum(y, 0) if activation else y

    def conv2d_input_grad(self, dy: Any, w: Any, shape: Sequence[int], *, stride: int) -> Any:
        """As `handlepool.conv2d_input_grad`, without padding."""
        sides = zip(shape[2:], dy.shape[2:], w.shape[2:], strict=True)
        around = [(side - 1, whole - (part - 1) * stride - 1) for whole, part, side in sides]
        forms = "NCHW", "IOHW", "NCHW"
        turned = self._lax.rev(w, (2, 3))
        return self._lax.conv_general_dilated(dy, turned, (1, 1), around, (stride, stride), dimension_numbers=forms)

    def max_pool2d(self, x: Any, window: int, *, stride: int, padding: int = 0, ceil_mode: bool = False) -> Any:
        """As `handlepool.ops.max_pool2d`."""
        beyond = [
            max(0, _last(extent, window, stride, padding) + window - extent - 2 * padding) if ceil_mode else 0
            for extent in x.shape[2:]
        ]
        around = [(0, 0), (0, 0), *((padding, padding + more) for more in beyond)]
        least = np.array(-np.inf, x.dtype)
        return self._lax.reduce_window(x, least, self._lax.max, (1, 1, window, window), (1, 1, stride, stride), around)

    def avg_pool2d(self, x: Any, window: int, *, stride: int, padding: int = 0) -> Any:
        """As `handlepool.ops.avg_pool2d`, with the zeros around the images counted."""
        around = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
        zero = np.array(0, np.float32)  # summed in float32, as everybody does
        sums = self._lax.reduce_window(
            x.astype(np.float32), zero, self._lax.add, (1, 1, window, window), (1, 1, stride, stride), around
        )
        return (sums / window**2).astype(x.dtype)

    def mean2d(self, x: Any) -> Any:
        """As `handlepool.ops.mean2d`."""
        return self._numpy.mean(x, (2, 3))

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """As `handlepool.ops.concat`."""
        return self._numpy.concatenate(arrays, axis)

    def linear(self, x: Any, w: Any, *, bias: Any) -> Any:
        """As `handlepool.linear`."""
        return x @ w.T + bias
