"""Ordinary code of CuPy's in branches, maps, tasks and recordings gives NumPy's values."""

import numpy as np
import pytest
from harness.ordinary import SHAPES, Place, Plain, flat

from handlepool import HandlePool

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.mark.parametrize("name", SHAPES)
def test_ordinary_code_gives_numpys_values(name):
    expected = flat(SHAPES[name](Plain()))
    with HandlePool(driver="cuda") as pool:
        for _ in range(3):
            with cupy.cuda.Stream(non_blocking=True):
                results = [cupy.asnumpy(y) for y in flat(SHAPES[name](Place(pool, cupy, cupy.asarray)))]
            for y, wanted in zip(results, expected, strict=True):
                assert np.array_equal(y, wanted)
