"""Cases of `region_cases` on a GPU: how many calls they have, and what their arrays have in the beginning."""

import numpy as np
from harness.region_cases import WEIGHTS, Sizes
from harness.region_functions import weights

CALLS = 10, 40
SIZES = Sizes(17, 40), Sizes(64, 64), Sizes(96, 128), Sizes(128, 256), Sizes(256, 256)
"""With four graph functions over whole arrays: 20 geometries, whose plans are built once, for new outputs and for given ones."""


class Arrays:
    """What arrays of one size have in the beginning, on the device, to be copied."""

    def __init__(self, sizes):
        import cupy

        rng = np.random.default_rng(17)
        shape = sizes.shape((1, 4, 2, 4))
        self._values = [cupy.asarray(rng.integers(-8, 9, shape).astype(np.float32)) for _ in range(13)]
        self._weights = cupy.asarray(weights())

    def __call__(self, seed, number, shape):
        return (self._weights if number == WEIGHTS else self._values[(seed + number) % len(self._values)]).copy()
