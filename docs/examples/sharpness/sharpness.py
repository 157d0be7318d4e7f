"""Detail of images at several scales: a small library that uses handlepool, and whose tests need no GPU.

It takes CuPy's arrays on a GPU, and the host driver's in its tests. NumPy's functions serve both.
"""

import numpy as np

import handlepool

STATES = handlepool.ParallelStates(4)  # of whatever the default pool is: in a test it is the test's own


@handlepool.graph
def smooth(g, x, w, *, padding):
    """Convolve and cut off below zero, in one cuDNN graph."""
    y = g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1], name="smooth")
    return g.relu(y)


def detail(x, w):
    """Return what smoothing takes away from images, twice as strong."""
    smoothed = smooth(x, w, padding=w.shape[2] // 2)
    scratch = handlepool.get_workspace(x.nbytes)  # this branch's own
    difference = scratch.view(np.float32).reshape(x.shape)
    np.subtract(x, smoothed, out=difference)
    return difference * 2


def brightness(x):
    """Return brighter images, to show beside the detail."""
    return x * 4


def details(x, filters):
    """Return the detail at each scale, and the brighter images, made in parallel.

    Returns
    -------
    list of array, array
    """
    with STATES.fork() as fork:
        scales = [fork.run(detail, x, w) for w in filters]
        bright = fork.run(brightness, x)
    return scales, bright


def bound_to(states=STATES):
    """Return the streams that cuDNN calls of one's own would run on in branches: each branch has a handle of its own."""
    return states.map(lambda _: handlepool.get_handle().stream, range(len(states)))


class Centred:
    """Take the mean off images, on a stream of its own, beside what the caller's stream does."""

    def __init__(self):
        self._driver = handlepool.default_pool().driver
        self._stream = self._driver.create_stream()

    def __call__(self, x):
        """Return centred images, ready on the caller's stream."""
        caller = self._driver.current_stream()
        self._stream.wait_event(caller.record())
        with self._stream:
            y = x - x.mean()
        caller.wait_event(self._stream.record())
        return y
