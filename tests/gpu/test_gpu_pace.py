"""Whether launches stay on the caller's stream, by what a GPU has to do."""

import numpy as np
import pytest
from harness.graphs import double

from handlepool import ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

FORKS, BRANCHES = 200, 6


def forks(pool, states, x, kernels=None):
    """By fork, how many states were leased; with kernels, the caller's stream is busy for two milliseconds."""
    found = []
    for _ in range(FORKS):
        with states.fork() as fork:
            if kernels is not None:
                kernels.spin(2)
            ys = [fork.run(double, x) for _ in range(BRANCHES)]
            found.append(pool.stats()["handles_leased"])
        cupy.cuda.get_current_stream().synchronize()
        assert all((y == 2 * x).all() for y in ys)
    return found


@pytest.fixture
def x(pool, stream):
    x = cupy.arange(64, dtype=np.float32).reshape(1, 4, 4, 4)
    ParallelStates(4, pool=pool).map(double, [x] * 2)
    return x


@pytest.mark.alone  # others would keep the GPU at work
def test_small_launches_stay_on_the_callers_stream(pool, x):
    found = forks(pool, ParallelStates(4, pool=pool), x)
    assert found[0] == 4
    assert 0 in found


def test_where_the_gpu_is_behind_they_go_to_the_states(pool, x, kernels):
    assert forks(pool, ParallelStates(4, pool=pool), x, kernels) == [4] * FORKS
