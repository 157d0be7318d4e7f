"""mobilenet_v3_large, as torchvision has it."""

from typing import Any

from handlepool import ops as library
from nets.gates import squeeze_excite

BLOCKS = (
    (16, 3, 16, 16, False, "relu", 1),
    (16, 3, 64, 24, False, "relu", 2),
    (24, 3, 72, 24, False, "relu", 1),
    (24, 5, 72, 40, True, "relu", 2),
    (40, 5, 120, 40, True, "relu", 1),
    (40, 5, 120, 40, True, "relu", 1),
    (40, 3, 240, 80, False, "hardswish", 2),
    (80, 3, 200, 80, False, "hardswish", 1),
    (80, 3, 184, 80, False, "hardswish", 1),
    (80, 3, 184, 80, False, "hardswish", 1),
    (80, 3, 480, 112, True, "hardswish", 1),
    (112, 3, 672, 112, True, "hardswish", 1),
    (112, 5, 672, 160, True, "hardswish", 2),
    (160, 5, 960, 160, True, "hardswish", 1),
    (160, 5, 960, 160, True, "hardswish", 1),
)
"""Channels taken, the kernel, channels inside and given, whether there is a gate, the activation, and the stride."""


def mobilenet_v3_large(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("stem", x, 16, 3)
    x = ops.conv2d(x, w, bias=b, stride=2, padding=1, activation="hardswish")
    for number, how in enumerate(BLOCKS):
        x = block(p, f"{number}", x, how, ops)
    w, b = p.conv("last", x, 960, 1)
    x = ops.mean2d(ops.conv2d(x, w, bias=b, activation="hardswish"))
    w, b = p.linear("wide", x, 1280)
    x = ops.linear(x, w, bias=b, activation="hardswish")
    w, b = p.linear("fc", x, 1000)
    return ops.linear(x, w, bias=b)


def block(p: Any, name: str, x: Any, how: Any, ops: Any) -> Any:
    """Widen, convolve each channel, gate and narrow; add the images that it began with where they fit."""
    taken, kernel, inside, given, gated, activation, stride = how
    y = x
    if inside != taken:
        w, b = p.conv(f"{name}.widen", y, inside, 1)
        y = ops.conv2d(y, w, bias=b, activation=activation)
    w, b = p.depthwise(f"{name}.depthwise", y, kernel)
    y = ops.conv2d(y, w, bias=b, stride=stride, padding=kernel // 2, groups=y.shape[1], activation=activation)
    if gated:
        y = squeeze_excite(p, name, y, by_eight(inside // 4), "relu", "hardsigmoid", ops)
    w, b = p.conv(f"{name}.narrow", y, given, 1)
    if stride == 1 and taken == given:
        return ops.conv2d(y, w, bias=b, add=x)
    return ops.conv2d(y, w, bias=b)


def by_eight(channels: int) -> int:
    """Round to a multiple of 8, down by no more than a tenth."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
