"""googlenet (Inception v1), as torchvision has it."""

from typing import Any

from handlepool import ops as library

MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(p: Any, x: Any, ops: Any = library, module: Any = None) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""
    module = module or inception
    x = conv(p, "1", x, 64, 7, ops, stride=2)
    x = ops.max_pool2d(x, 3, stride=2, ceil_mode=True)
    x = conv(p, "2", x, 64, 1, ops)
    x = conv(p, "3", x, 192, 3, ops)
    x = ops.max_pool2d(x, 3, stride=2, ceil_mode=True)
    for name, sizes in MODULES.items():
        if name == "4a":
            x = ops.max_pool2d(x, 3, stride=2, ceil_mode=True)
        if name == "5a":
            x = ops.max_pool2d(x, 2, stride=2, ceil_mode=True)
        x = module(p, name, x, sizes, ops)
    w, b = p.linear("fc", x, 1000)
    return ops.linear(ops.mean2d(x), w, bias=b)


def inception(p: Any, name: str, x: Any, sizes: tuple[int, ...], ops: Any) -> Any:
    """Four chains over the same images, side by side in the result's channels."""
    one, narrow3, three, narrow5, five, pooled = sizes
    a = conv(p, f"{name}.1", x, one, 1, ops)
    b = conv(p, f"{name}.2.0", x, narrow3, 1, ops)
    b = conv(p, f"{name}.2.1", b, three, 3, ops)
    c = conv(p, f"{name}.3.0", x, narrow5, 1, ops)
    c = conv(p, f"{name}.3.1", c, five, 3, ops)
    d = ops.max_pool2d(x, 3, stride=1, padding=1)
    d = conv(p, f"{name}.4", d, pooled, 1, ops)
    return ops.concat([a, b, c, d], 1)


def googlenet_stacked(p: Any, x: Any, ops: Any = library) -> Any:
    """The same, where the 1x1 convolutions over the same images are one, with all their filters."""
    return googlenet(p, x, ops, stacked)


def stacked(p: Any, name: str, x: Any, sizes: tuple[int, ...], ops: Any) -> Any:
    """As `inception`, with slices of channels instead of three arrays."""
    one, narrow3, three, narrow5, five, pooled = sizes
    all_three = one + narrow3 + narrow5
    w, b = p.conv(f"{name}.0", x, all_three, 1, 24)
    y = ops.conv2d(x, w, bias=b, activation="relu")
    # The sums, but in trials with fewer channels. By the eight, since operands begin at multiples of 16 bytes.
    share = y.shape[1] / all_three / 8
    end3 = max(8, int(narrow3 * share) * 8)
    end5 = max(end3 + 8, int((narrow3 + narrow5) * share) * 8)
    b = conv(p, f"{name}.2.1", y[:, :end3], three, 3, ops)
    c = conv(p, f"{name}.3.1", y[:, end3:end5], five, 3, ops)
    d = ops.max_pool2d(x, 3, stride=1, padding=1)
    d = conv(p, f"{name}.4", d, pooled, 1, ops)
    return ops.concat([y[:, end5:], b, c, d], 1)


def conv(p: Any, name: str, x: Any, filters: int, kernel: int, ops: Any, stride: int = 1) -> Any:
    """Convolve with bias and relu."""
    w, b = p.conv(name, x, filters, kernel)
    return ops.conv2d(x, w, bias=b, stride=stride, padding=kernel // 2, activation="relu")
