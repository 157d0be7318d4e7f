"""Graph functions that many tests launch."""

import handlepool


@handlepool.graph
def double(g, x):
    return g.add(x, x)


@handlepool.graph
def plus(g, x, y):
    return g.add(x, y)


@handlepool.graph
def both(g, x, y):
    return g.add(x, y), g.mul(x, y)


@handlepool.graph
def convolution(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
