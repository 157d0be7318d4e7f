"""Random parameters of networks, made where a network first asks for them."""

from typing import Any

import numpy as np


class Parameters:
    """Filters, matrices and biases by name, the same at each call.

    Parameters
    ----------
    place : callable
        Makes a NumPy array one of the operations' kind, with the array's strides.
    dtype : str
    thin : int
        Divides every number of channels, for trials on the host driver.
    """

    def __init__(self, place: Any, dtype: str = "float16", thin: int = 1) -> None:
        self._place = place
        self._dtype = dtype
        self._rng = np.random.default_rng(0)
        self.thin = thin
        self.values: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self.placed: dict[str, tuple[Any, Any]] = {}

    def width(self, channels: int, least: int = 8) -> int:
        """How many channels that are here; at least so many that not all of them are zero behind a relu."""
        return max(least, channels // self.thin)

    def conv(self, name: str, x: Any, filters: int, kernel: int | tuple[int, int], least: int = 8) -> tuple[Any, Any]:
        """Filters for images, channels-last in memory, and their bias; in trials with few channels at least so many."""
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        return self._get(name, (self.width(filters, least), x.shape[1], *sides))

    def transposed(self, name: str, x: Any, filters: int, kernel: int) -> Any:
        """Filters of a transposed convolution, which come from as many channels as ``x`` has."""
        return self._get(name, (x.shape[1], self.width(filters), kernel, kernel))[0]

    def linear(self, name: str, x: Any, features: int) -> tuple[Any, Any]:
        """A matrix for rows, and its bias."""
        return self._get(name, (self.width(features), x.shape[1]))

    def depthwise(self, name: str, x: Any, kernel: int) -> tuple[Any, Any]:
        """A filter for each channel of images, and the bias."""
        return self._get(name, (x.shape[1], 1, kernel, kernel))

    def filters(self, name: str, filters: int, channels: int, kernel: int) -> tuple[Any, Any]:
        """So many filters, also in trials, and their bias."""
        return self._get(name, (filters, channels, kernel, kernel))

    def matrix(self, name: str, features: int, taken: int) -> tuple[Any, Any]:
        """A matrix for rows with so many features, also in trials, and its bias."""
        return self._get(name, (features, taken))

    def norm(self, name: str, channels: int) -> tuple[Any, Any]:
        """A weight and a bias of each channel."""
        return self._get(name, (channels,))

    def scale(self, name: str, channels: int) -> tuple[Any, Any]:
        """A number for each channel of images, and a bias."""
        return self._get(name, (channels, 1, 1))

    def tokens(self, name: str, count: int, features: int) -> tuple[Any, Any]:
        """So many rows, and a number."""
        return self._get(name, (1, count, features))

    def _get(self, name: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
        if name not in self.placed:
            scale = (2 / np.prod(shape[1:])) ** 0.5  # what keeps the variance through relu
            w = (self._rng.standard_normal(shape, np.float32) * scale).astype(self._dtype)
            b = (self._rng.standard_normal(shape[0], np.float32) * 0.1).astype(self._dtype)
            self.values[name] = w, b
            self.placed[name] = self._place(channels_last(w)), self._place(b)
        return self.placed[name]

    def elsewhere(self, place: Any) -> "Parameters":
        """The same values as arrays of another kind; for after the network ran once with these."""
        other = Parameters(place, self._dtype, self.thin)
        other.placed = {name: (place(channels_last(w)), place(b)) for name, (w, b) in self.values.items()}
        return other


def channels_last(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Lay images or filters out with their channels innermost; anything else is as it was."""
    if values.ndim != 4:
        return values
    return np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
