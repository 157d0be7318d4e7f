"""Where a network's operations come from, beside the library: a fork, NumPy in float64, torch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool import ops as library

Values = np.ndarray[Any, Any]


class Branches:
    """The library's operations, each call a branch of one fork."""

    def __init__(self, fork: Any) -> None:
        run = fork.run
        self.conv2d, self.linear = partial(run, library.conv2d), partial(run, library.linear)
        self.max_pool2d, self.mean2d = partial(run, library.max_pool2d), partial(run, library.mean2d)
        self.concat = partial(run, library.concat)


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
        padding: int = 0,
        groups: int = 1,
        add: Any = 0.0,
        activation: str = "",
    ) -> Values:
        """As `handlepool.conv2d`, with relu or no activation."""
        windows = _windows(x, w.shape[2], stride, padding, 0.0)
        if groups == 1:
            y = np.tensordot(windows, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        else:  # each channel with a filter of its own
            y = np.einsum("nchwrs,crs->nchw", windows, w[:, 0])
        y = y + bias[:, None, None] + add
        return np.maximum(y, 0) if activation else y

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


def _windows(x: Values, side: int, stride: int, padding: int, value: float, ceil_mode: bool = False) -> Values:
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=value)
    if ceil_mode:  # room for a last window that begins in the image; beyond what is padded there is nothing to count
        more = [max(0, _last(extent, side, stride, padding) + side - extent - 2 * padding) for extent in x.shape[2:]]
        padded = np.pad(padded, ((0, 0), (0, 0), *((0, each) for each in more)), constant_values=min(value, 0.0))
    return np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(2, 3))[:, :, ::stride, ::stride]


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
        padding: int = 0,
        groups: int = 1,
        add: Any = None,
        activation: str = "",
    ) -> Any:
        """As `handlepool.conv2d`, with relu or no activation."""
        y = self._functional.conv2d(x, w, bias, stride, padding, 1, groups)
        y = y if add is None else y.add_(add)
        return self._torch.relu_(y) if activation else y

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
