"""Arrays for tests that run on both drivers: random and fresh, poisoned, and compared with a reference in float64."""

import numpy as np

from handlepool.tensors.layout import as_dtype
from handlepool.testing.reference import relative_error

TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 2e-3}
"""Relative error by type; that of float32 is TF32's."""
FULL = 1e-5
"""Of float32 without TF32."""


def laid_out(values, layout):
    """A host copy, contiguous or channels-last."""
    values = np.asarray(values)
    if layout == "NCHW" or values.ndim < 3:
        return np.ascontiguousarray(values)
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)


def value_of(found):
    """Return the value of all elements of an array, which have one."""
    (value,) = np.unique(found if isinstance(found, np.ndarray) else found.get())
    return float(value)


class Arrays:
    """Makes arrays on a pool's driver; the seed is printed, which pytest shows of tests that fail."""

    def __init__(self, pool, dtype="float32", layout="NCHW"):
        self.driver = pool.driver
        self.dtype = as_dtype(dtype)
        self.layout = layout
        seed = np.random.SeedSequence().entropy
        print(f"seed {seed}")
        self._random = np.random.default_rng(seed)

    def random(self, *shape, layout=None):
        """Normal values."""
        return self.put(self._random.standard_normal(shape), layout)

    def put(self, values, layout=None):
        """A copy on the device, of this type and layout."""
        return self.driver.asarray(laid_out(np.asarray(values).astype(self.dtype), layout or self.layout))

    def poisoned(self, *shape, layout=None):
        """All NaN."""
        return self.put(np.full(shape, np.nan), layout)

    def take(self, array):
        """A copy on the host in float64, after the current stream."""
        return self.driver.asnumpy(array).astype(np.float64)

    def error(self, array, expected):
        """The relative error; infinite where a NaN was left."""
        assert tuple(array.shape) == expected.shape
        return relative_error(self.take(array), expected)


MARK = 123456
"""In every value of every array; -MARK where an integer is taken."""


class Tensor:
    """A tensor of a library that gives its memory away, shows its values, and can be hashed, as torch's."""

    shape, dtype = (2,), "float32"

    def __dlpack__(self, **_):
        raise BufferError("not now")

    def __dlpack_device__(self):
        return (1, 0)

    def __repr__(self):
        return f"tensor([{MARK}.789, {MARK}.789])"
