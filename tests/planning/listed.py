"""A module as ``handlepool plans build`` takes it."""

import handlepool
from handlepool import ArraySpec


@handlepool.graph
def convolve(g, x, w, *, padding):
    return g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1])


def network(x, w, *, bias):
    y = handlepool.conv2d(x, w, bias=bias, padding=1, activation="relu")
    return handlepool.concat([handlepool.max_pool2d(y, 3, stride=2), convolve(x, w, padding=0)[:, :, :13, :13]], 1)


W = ArraySpec((32, 64, 3, 3), "float16", "NHWC")
PLANS = [
    (convolve, (ArraySpec((2, 64, 28, 28), "float16", "NHWC"), W), {"padding": 1}),
    (network, (ArraySpec((4, 64, 28, 28), "float16", "NHWC"), W), {"bias": ArraySpec((32,), "float16")}),
]
