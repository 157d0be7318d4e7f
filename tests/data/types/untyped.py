# mypy: allow-untyped-defs
# pyright: standard
"""A graph function without types is as checked as Python's defaults allow: by names. Never run."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import handlepool


@handlepool.graph
def conv_relu(g, x, w, *, padding):
    y = g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1])
    return g.relu(y)


@handlepool.graph(allow_tf32=False)
def biased(g, x, b=None):
    return g.relu(x if b is None else g.bias(x, b))


@handlepool.operation(mutates="y")
def scaled(y, factor=2.0):
    y *= factor


def calls(x: NDArray[np.float32]) -> None:
    assert_type(conv_relu(x, x, padding=1), NDArray[np.float32])
    assert_type(biased(x), NDArray[np.float32])
    assert_type(biased(x, x), NDArray[np.float32])
    conv_relu(x, x, pading=1)  # expect: error
    conv_relu(x, padding=1)  # expect: error
    conv_relu(x, x)  # expect: error
    biased(x, c=x)  # expect: error
    scaled(x)
    scaled(x, factr=3.0)  # expect: error
