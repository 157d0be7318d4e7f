"""The work that the benchmark scripts time: convolutions of one shape, and a region of them captured by hand."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import handlepool

_FORM = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+):(float16|float32):(NHWC|NCHW)")


@dataclass(frozen=True, slots=True)
class Shape:
    """One convolution, padded so that the image keeps its size."""

    batch: int
    channels: int
    side: int
    filters: int
    kernel: int
    dtype: str
    layout: str

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """An option's value: batch x channels x side x filters x kernel : type : layout."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not like 1x64x14x64x3:float16:NHWC (batch, channels, side, filters, …)"
            )
        *extents, dtype, layout = match.groups()
        shape = cls(*map(int, extents), dtype=dtype, layout=layout)
        if not all(map(int, extents)):
            raise argparse.ArgumentTypeError(f"{text!r} has an extent of 0")
        if not shape.kernel % 2:
            raise argparse.ArgumentTypeError(f"{text!r}: the kernel must be odd, so that the image keeps its size")
        return shape

    def __str__(self) -> str:
        numbers = "x".join(map(str, (self.batch, self.channels, self.side, self.filters, self.kernel)))
        return f"{numbers}:{self.dtype}:{self.layout}"

    @property
    def padding(self) -> int:
        """Zeros on each side."""
        return self.kernel // 2

    def image(self, driver: Any, rng: np.random.Generator, batch: int = 1, channels: int = 1) -> Any:
        """Random images, ``batch`` and ``channels`` times as many."""
        return self._array(driver, rng, (self.batch * batch, self.channels * channels, self.side, self.side), 1.0)

    def filter(self, driver: Any, rng: np.random.Generator, filters: int = 1) -> Any:
        """Random filters, ``filters`` times as many, that keep the variance."""
        size = self.channels * self.kernel**2
        return self._array(driver, rng, (self.filters * filters, self.channels, self.kernel, self.kernel), size**-0.5)

    def output(self, driver: Any, batch: int = 1, filters: int = 1) -> Any:
        """An array for the result, full of NaN."""
        shape = (self.batch * batch, self.filters * filters, self.side, self.side)
        return driver.asarray(self._lay_out(np.full(shape, np.nan, self.dtype)))

    def _array(self, driver: Any, rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Any:
        return driver.asarray(self._lay_out((rng.standard_normal(shape, np.float32) * scale).astype(self.dtype)))

    def _lay_out(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.layout == "NCHW":
            return values
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


SMALL = Shape(1, 64, 14, 64, 3, "float16", "NHWC")
"""The convolution that the bounds are for."""
TINY = Shape(1, 4, 6, 4, 3, "float32", "NCHW")
"""For ``--quick``."""


def graph_function(shape: Shape) -> handlepool.GraphFunction:
    """A convolution as a user would write it, of images and filters alone."""
    padding = [shape.padding] * 2

    @handlepool.graph
    def conv(g: Any, x: Any, w: Any) -> Any:
        return g.conv_fprop(x, w, padding=padding, stride=[1, 1], dilation=[1, 1])

    return conv


def capture(region: Callable[[], object], stream: Any) -> tuple[Callable[[], object], Any]:
    """Capture a region by hand; return the runtime's bare launch on a stream, and the graph."""
    import cupy

    region()
    stream.synchronize()
    capturing = cupy.cuda.Stream(non_blocking=True)
    with capturing:
        capturing.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            region()
        finally:
            graph = capturing.end_capture()
    return partial(cupy.cuda.runtime.graphLaunch, graph.graphExec, stream.ptr), graph


def check(driver: Any, name: str, found: Any, right: np.ndarray[Any, Any]) -> float:
    """Return the relative error of an array, and stop at a wrong array, because a wrong result is not timed."""
    values = driver.asnumpy(found).astype(np.float64)
    wrong = np.linalg.norm(values - right) / np.linalg.norm(right)
    if not wrong < 1e-2:  # NaN is wrong too
        raise SystemExit(f"{name}: relative error {wrong:.1e}; its times would mean nothing")
    return float(wrong)
