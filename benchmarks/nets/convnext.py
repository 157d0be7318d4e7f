"""convnext_tiny, as torchvision has it, with its layers of pixels as convolutions of 1x1."""

from typing import Any

import handlepool
from handlepool import ops as library
from nets.kinds import apply

STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))
"""Channels, and how many blocks."""
EPS = 1e-6


@handlepool.elementwise
def scaled_sum(x, scale, shortcut):
    return x * scale + shortcut


def convnext_tiny(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("stem", x, 96, 4)
    x = normalised(p, "stem.norm", ops.conv2d(x, w, bias=b, stride=4), ops)
    for stage, (channels, blocks) in enumerate(STAGES):
        if stage:
            x = normalised(p, f"{stage}.norm", x, ops)
            w, b = p.conv(f"{stage}.down", x, channels, 2)
            x = ops.conv2d(x, w, bias=b, stride=2)
        for number in range(blocks):
            x = block(p, f"{stage}.{number}", x, ops)
    x = normalised(p, "norm", ops.mean2d(x), ops)
    w, b = p.linear("fc", x, 1000)
    return ops.linear(x, w, bias=b)


def block(p: Any, name: str, x: Any, ops: Any) -> Any:
    """Convolve each channel; normalise, widen and narrow each pixel; scale, and add the images that it began with."""
    channels = x.shape[1]
    w, b = p.depthwise(f"{name}.depthwise", x, 7)
    y = normalised(p, f"{name}.norm", ops.conv2d(x, w, bias=b, padding=3, groups=channels), ops)
    w, b = p.filters(f"{name}.widen", 4 * channels, channels, 1)
    y = ops.conv2d(y, w, bias=b, activation="gelu")
    w, b = p.filters(f"{name}.narrow", channels, 4 * channels, 1)
    y = ops.conv2d(y, w, bias=b)
    scale, _ = p.scale(f"{name}.scale", channels)
    return apply(ops, scaled_sum, y, scale, x)


def normalised(p: Any, name: str, x: Any, ops: Any) -> Any:
    """Normalise each pixel, or image, over its channels."""
    w, b = p.norm(name, x.shape[1])
    return ops.layer_norm(x, axis=1, weight=w, bias=b, eps=EPS)
