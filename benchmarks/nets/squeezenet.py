"""squeezenet 1.1, as torchvision has it."""

from typing import Any

from handlepool import ops as library

MODULES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
POOLED_BEFORE = (0, 2, 4)


def squeezenet(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("1", x, 64, 3)
    x = ops.conv2d(x, w, bias=b, stride=2, activation="relu")
    for number, (narrow, wide) in enumerate(MODULES):
        if number in POOLED_BEFORE:
            x = ops.max_pool2d(x, 3, stride=2, ceil_mode=True)
        x = fire(p, f"{number}", x, narrow, wide, ops)
    w, b = p.conv("last", x, 1000, 1)
    return ops.mean2d(ops.conv2d(x, w, bias=b, activation="relu"))


def fire(p: Any, name: str, x: Any, narrow: int, wide: int, ops: Any) -> Any:
    """Squeeze to few channels, and expand them in two ways."""
    w, b = p.conv(f"{name}.squeeze", x, narrow, 1)
    x = ops.conv2d(x, w, bias=b, activation="relu")
    w, b = p.conv(f"{name}.1", x, wide, 1)
    one = ops.conv2d(x, w, bias=b, activation="relu")
    w, b = p.conv(f"{name}.3", x, wide, 3)
    three = ops.conv2d(x, w, bias=b, padding=1, activation="relu")
    return ops.concat([one, three], 1)
