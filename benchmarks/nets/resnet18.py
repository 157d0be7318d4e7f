"""resnet18, as torchvision has it."""

from typing import Any

from handlepool import ops as library


def resnet18(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    w, b = p.conv("1", x, 64, 7)
    x = ops.conv2d(x, w, bias=b, stride=2, padding=3, activation="relu")
    x = ops.max_pool2d(x, 3, stride=2, padding=1)
    for stage, channels in enumerate((64, 128, 256, 512)):
        for number in (0, 1):
            x = block(p, f"{stage}.{number}", x, channels, 2 if stage and not number else 1, ops)
    w, b = p.linear("fc", x, 1000)
    return ops.linear(ops.mean2d(x), w, bias=b)


def block(p: Any, name: str, x: Any, channels: int, stride: int, ops: Any) -> Any:
    """Two convolutions, and the images that they began with added before the last relu."""
    w, b = p.conv(f"{name}.1", x, channels, 3)
    y = ops.conv2d(x, w, bias=b, stride=stride, padding=1, activation="relu")
    if stride > 1:
        w, b = p.conv(f"{name}.shortcut", x, channels, 1)
        x = ops.conv2d(x, w, bias=b, stride=stride)
    w, b = p.conv(f"{name}.2", y, channels, 3)
    return ops.conv2d(y, w, bias=b, padding=1, add=x, activation="relu")
