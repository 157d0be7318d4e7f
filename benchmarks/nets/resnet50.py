"""resnet50, as torchvision has it."""

from typing import Any

from handlepool import ops as library

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Channels inside of a block, a quarter of those outside, and how many blocks."""


def resnet50(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("1", x, 64, 7)
    x = ops.conv2d(x, w, bias=b, stride=2, padding=3, activation="relu")
    x = ops.max_pool2d(x, 3, stride=2, padding=1)
    for stage, (channels, blocks) in enumerate(STAGES):
        for number in range(blocks):
            x = block(p, f"{stage}.{number}", x, channels, 2 if stage and not number else 1, ops)
    w, b = p.linear("fc", x, 1000)
    return ops.linear(ops.mean2d(x), w, bias=b)


def block(p: Any, name: str, x: Any, channels: int, stride: int, ops: Any) -> Any:
    """Narrow, convolve and widen, with the images that it began with added before the last relu."""
    w, b = p.conv(f"{name}.1", x, channels, 1)
    y = ops.conv2d(x, w, bias=b, activation="relu")
    w, b = p.conv(f"{name}.2", y, channels, 3)
    y = ops.conv2d(y, w, bias=b, stride=stride, padding=1, activation="relu")
    if name.endswith(".0"):
        w, b = p.conv(f"{name}.shortcut", x, 4 * channels, 1)
        x = ops.conv2d(x, w, bias=b, stride=stride)
    w, b = p.conv(f"{name}.3", y, 4 * channels, 1)
    return ops.conv2d(y, w, bias=b, add=x, activation="relu")
