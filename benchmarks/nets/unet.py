"""A U-Net with two heads, a mask of classes and distances to edges, each with a decoder of its own behind one encoder.

And a U-Net with one head, which upsamples bilinearly.
"""

from typing import Any

from handlepool import ops as library

CHANNELS = (32, 64, 128, 256)
"""Of each level, from whole images to the smallest ones."""
HEADS = {"mask": 16, "distances": 8}
DOWN, UP = (64, 128, 256, 512, 512), (64, 64, 128, 256)
"""Channels of each level of the U-Net with one head, on the way down and on the way up."""


def unet(p: Any, x: Any, ops: Any = library) -> Any:
    """Of images (N, 3, H, W) a mask (N, 16, H, W) and distances (N, 8, H, W)."""
    levels = []
    for level, channels in enumerate(CHANNELS):
        if level:
            x = ops.max_pool2d(x, 2, stride=2)
        x = twice(p, f"{level}", x, channels, ops)
        levels.append(x)
    return [head(p, name, levels, channels, ops) for name, channels in HEADS.items()]


def head(p: Any, name: str, levels: Any, channels: int, ops: Any) -> Any:
    """From the smallest images up to whole ones, at each level beside what the encoder made there."""
    *levels, x = levels
    for level in reversed(range(len(levels))):
        beside = levels[level]
        w = p.transposed(f"{name}.{level}.up", x, CHANNELS[level], 2)
        shape = (len(x), w.shape[1], *beside.shape[2:])
        x = ops.conv2d_input_grad(x, w, shape, stride=2)  # a transposed convolution
        x = twice(p, f"{name}.{level}", ops.concat([beside, x], 1), CHANNELS[level], ops)
    w, b = p.conv(f"{name}.last", x, channels, 1)
    return ops.conv2d(x, w, bias=b)


def twice(p: Any, name: str, x: Any, channels: int, ops: Any) -> Any:
    """Two convolutions of 3x3."""
    for number in (1, 2):
        w, b = p.conv(f"{name}.{number}", x, channels, 3)
        x = ops.conv2d(x, w, bias=b, padding=1, activation="relu")
    return x


def unet_bilinear(p: Any, x: Any, ops: Any = library) -> Any:
    """A mask (N, 8, H, W) of images (N, 3, H, W)."""
    levels = []
    for level, channels in enumerate(DOWN):
        if level:
            x = ops.max_pool2d(x, 2, stride=2)
        x = twice(p, f"{level}", x, channels, ops)
        levels.append(x)
    for level in reversed(range(len(UP))):
        beside = levels[level]
        x = ops.interpolate2d(x, size=tuple(beside.shape[2:]), mode="bilinear")
        x = twice(p, f"up.{level}", ops.concat([beside, x], 1), UP[level], ops)
    w, b = p.conv("last", x, 8, 1)
    return ops.conv2d(x, w, bias=b)
