"""Where a network's operations come from, beside the library: a fork, NumPy in float64, torch, JAX."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool import ops as library

Values = np.ndarray[Any, Any]
Pair = int | tuple[int, int]


class Branches:
    """The library's operations, each call a branch of one fork."""

    def __init__(self, fork: Any) -> None:
        run = fork.run
        self.conv2d, self.linear = partial(run, library.conv2d), partial(run, library.linear)
        self.max_pool2d, self.avg_pool2d = partial(run, library.max_pool2d), partial(run, library.avg_pool2d)
        self.mean2d = partial(run, library.mean2d)
        self.concat, self.conv2d_input_grad = partial(run, library.concat), partial(run, library.conv2d_input_grad)


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
        """As `handlepool.conv2d`, with relu or no activation."""
        windows = _windows(x, w.shape[2:], stride, padding, 0.0)
        if groups == 1:
            y = np.tensordot(windows, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        else:  # each channel with a filter of its own
            y = np.einsum("nchwrs,crs->nchw", windows, w[:, 0])
        y = y + bias[:, None, None] + add
        return np.maximum(y, 0) if activation else y

    def conv2d_input_grad(self, dy: Values, w: Values, shape: Sequence[int], *, stride: int) -> Values:
        """As `handlepool.conv2d_input_grad`, with windows that do not overlap: the filters' extent is the stride."""
        y = np.zeros(shape)
        rows, columns = (stride * extent for extent in dy.shape[2:])
        y[:, :, :rows, :columns] = np.einsum("nkhw,kcrs->nchrws", dy, w).reshape(len(dy), -1, rows, columns)
        return y

    def add(self, x: Values, *others: Values, activation: str = "") -> Values:
        """As `handlepool.ops.add`, with relu or no activation."""
        y = np.asarray(sum(others, x))
        return np.maximum(y, 0) if activation else y

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

    def linear(self, x: Values, w: Values, *, bias: Values) -> Values:
        """As `handlepool.linear`."""
        return np.asarray(x @ w.T + bias)


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
        """As `handlepool.conv2d`, with relu or no activation."""
        y = self._functional.conv2d(x, w, bias, stride, padding, 1, groups)
        y = y if add is None else y.add_(add)
        return self._torch.relu_(y) if activation else y

    def conv2d_input_grad(self, dy: Any, w: Any, shape: Sequence[int], *, stride: int) -> Any:
        """As `handlepool.conv2d_input_grad`, without padding."""
        beyond = [
            whole - (part - 1) * stride - side for whole, part, side in zip(shape[2:], dy.shape[2:], w.shape[2:], strict=True)
        ]
        return self._functional.conv_transpose2d(dy, w, None, stride, 0, beyond)

    def add(self, x: Any, *others: Any, activation: str = "") -> Any:
        """As `handlepool.ops.add`, with relu or no activation."""
        for other in others:
            x = x + other
        return self._torch.relu_(x) if activation else x

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

    def linear(self, x: Any, w: Any, *, bias: Any) -> Any:
        """As `handlepool.linear`."""
        return self._functional.linear(x, w, bias)


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
