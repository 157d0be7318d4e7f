"""efficientnet_b0, as torchvision has it."""

from typing import Any

from handlepool import ops as library
from nets.gates import squeeze_excite

STAGES = (
    (1, 3, 1, 32, 16, 1),
    (6, 3, 2, 16, 24, 2),
    (6, 5, 2, 24, 40, 2),
    (6, 3, 2, 40, 80, 3),
    (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4),
    (6, 3, 1, 192, 320, 1),
)
"""How much wider a block is inside, its kernel, its first stride, the channels it takes and gives, and how many blocks."""


def efficientnet_b0(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("stem", x, 32, 3)
    x = ops.conv2d(x, w, bias=b, stride=2, padding=1, activation="swish")
    for stage, (wider, kernel, stride, taken, given, blocks) in enumerate(STAGES):
        for number in range(blocks):
            channels = given if number else taken
            x = block(p, f"{stage}.{number}", x, channels, wider * channels, given, kernel, 1 if number else stride, ops)
    w, b = p.conv("last", x, 1280, 1)
    x = ops.conv2d(x, w, bias=b, activation="swish")
    w, b = p.linear("fc", x, 1000)
    return ops.linear(ops.mean2d(x), w, bias=b)


def block(p: Any, name: str, x: Any, taken: int, inside: int, given: int, kernel: int, stride: int, ops: Any) -> Any:
    """Widen, convolve each channel, gate and narrow; add the images that it began with where they fit."""
    y = x
    if inside != taken:
        w, b = p.conv(f"{name}.widen", y, inside, 1)
        y = ops.conv2d(y, w, bias=b, activation="swish")
    w, b = p.depthwise(f"{name}.depthwise", y, kernel)
    y = ops.conv2d(y, w, bias=b, stride=stride, padding=kernel // 2, groups=y.shape[1], activation="swish")
    y = squeeze_excite(p, name, y, max(1, taken // 4), "swish", "sigmoid", ops)
    w, b = p.conv(f"{name}.narrow", y, given, 1)
    if stride == 1 and taken == given:
        return ops.conv2d(y, w, bias=b, add=x)
    return ops.conv2d(y, w, bias=b)
