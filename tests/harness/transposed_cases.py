"""Random transposed convolutions, by `conv2d_input_grad`, with any output padding: how they are called, and float64's results."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A transposed convolution; ``more`` is the output padding, as torch has it."""

    dtype: str
    layouts: tuple[str, str]
    dy: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    more: tuple[int, int]
    groups: int

    @property
    def shape(self):
        """Of the images."""
        axes = zip(self.dy[2:], self.w[2:], self.stride, self.padding, self.dilation, self.more, strict=True)
        sizes = [(count - 1) * step + gap * (taps - 1) + 1 + more - 2 * pad for count, taps, step, pad, gap, more in axes]
        return (self.dy[0], self.w[1] * self.groups, *sizes)

    @property
    def options(self):
        """Of the call."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def wanted(self, dy, w):
        """The images, scattered tap by tap in float64."""
        (n, channels, *sizes), (top, left) = self.shape, self.padding
        full = np.zeros((n, channels, *(size + 2 * pad for size, pad in zip(sizes, self.padding, strict=True))))
        per, filters = channels // self.groups, w.shape[0] // self.groups
        for group in range(self.groups):
            c, k = slice(group * per, (group + 1) * per), slice(group * filters, (group + 1) * filters)
            for r, s in np.ndindex(w.shape[2:]):
                rows, columns = (
                    slice(tap * gap, tap * gap + (count - 1) * step + 1, step)
                    for tap, gap, count, step in zip((r, s), self.dilation, dy.shape[2:], self.stride, strict=True)
                )
                full[:, c, rows, columns] += np.einsum("nkpq,kc->ncpq", dy[:, k], w[k, :, r, s])
        return full[:, :, top : top + sizes[0], left : left + sizes[1]]


def random_case(seed):
    """A case whose output padding is less than stride or dilation on each axis, and whose images have pixels."""
    random = np.random.default_rng(seed)

    def pair(low, high):
        return tuple(int(each) for each in random.integers(low, high, 2))

    while True:
        groups = int(random.choice([1, 1, 2]))
        stride, dilation, padding = pair(1, 4), pair(1, 5), pair(0, 4)
        more = tuple(int(random.integers(0, max(each))) for each in zip(stride, dilation, strict=True))
        per, filters = (int(random.choice([1, 3, 8, 16])) for _ in range(2))
        case = Case(
            str(random.choice(["float16", "bfloat16", "float32"])),
            tuple(str(each) for each in random.choice(["NCHW", "NHWC"], 2)),
            (int(random.integers(1, 3)), filters * groups, *pair(1, 9)),
            (filters * groups, per, *pair(1, 5)),
            stride,
            padding,
            dilation,
            more,
            groups,
        )
        if min(case.shape[2:]) > 0:
            return case
