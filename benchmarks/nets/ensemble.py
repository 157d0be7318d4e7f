"""Eight small networks over the same images, independent of each other."""

from typing import Any

from handlepool import ops as library

MEMBERS = 8
LAYERS = ((32, 2), (64, 2), (64, 1), (128, 2), (128, 1))
"""Filters of each 3x3 convolution, and its stride."""


def ensemble(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 8 * 1000) of images (N, 3, H, W), those of one member after those of the one before."""
    return ops.concat([member(p, f"{number}", x, ops) for number in range(MEMBERS)], 1)


def member(p: Any, name: str, x: Any, ops: Any) -> Any:
    """Five convolutions, and a linear layer."""
    for layer, (filters, stride) in enumerate(LAYERS):
        w, b = p.conv(f"{name}.{layer}", x, filters, 3)
        x = ops.conv2d(x, w, bias=b, stride=stride, padding=1, activation="relu")
    x = ops.mean2d(x)
    w, b = p.linear(f"{name}.fc", x, 1000)
    return ops.linear(x, w, bias=b)
