"""shufflenet_v2_x1_0, as torchvision has it."""

from typing import Any

from handlepool import ops as library

STAGES = ((116, 4), (232, 8), (464, 4))
"""Channels, and how many blocks."""


def shufflenet_v2(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("stem", x, 24, 3)
    x = ops.conv2d(x, w, bias=b, stride=2, padding=1, activation="relu")
    x = ops.max_pool2d(x, 3, stride=2, padding=1)
    for stage, (channels, blocks) in enumerate(STAGES):
        for number in range(blocks):
            x = block(p, f"{stage}.{number}", x, channels, ops)
    w, b = p.conv("last", x, 1024, 1)
    x = ops.mean2d(ops.conv2d(x, w, bias=b, activation="relu"))
    w, b = p.linear("fc", x, 1000)
    return ops.linear(x, w, bias=b)


def block(p: Any, name: str, x: Any, channels: int, ops: Any) -> Any:
    """Convolve one half of the channels, and shuffle both; the first block of a stage makes both halves of all of them."""
    if not name.endswith(".0"):
        half = x.shape[1] // 2
        # The second half begins where no launch takes it, so it is copied.
        one, other = x[:, :half], ops.pad(x, (0, 0, 0, 0, -half, 0))
        y = ops.concat([one, chain(p, name, other, channels, 1, ops)], 1)
    else:
        one = convolved(p, f"{name}.1", each(p, f"{name}.0", x, 2, ops), channels // 2, ops)
        y = ops.concat([one, chain(p, name, x, channels, 2, ops)], 1)
    return ops.channel_shuffle(y, 2)


def chain(p: Any, name: str, x: Any, channels: int, stride: int, ops: Any) -> Any:
    """1x1, each channel by itself, 1x1."""
    x = convolved(p, f"{name}.2", x, channels // 2, ops)
    return convolved(p, f"{name}.4", each(p, f"{name}.3", x, stride, ops), channels // 2, ops)


def convolved(p: Any, name: str, x: Any, filters: int, ops: Any) -> Any:
    """1x1 with relu."""
    w, b = p.conv(name, x, filters, 1)
    return ops.conv2d(x, w, bias=b, activation="relu")


def each(p: Any, name: str, x: Any, stride: int, ops: Any) -> Any:
    """Convolve each channel."""
    w, b = p.depthwise(name, x, 3)
    return ops.conv2d(x, w, bias=b, stride=stride, padding=1, groups=x.shape[1])
