"""Guarantee 17 on a GPU: random regions give, bit for bit, what one stream gives."""

import warnings

import numpy as np
import pytest
from harness.graphs import double
from harness.process import as_default
from harness.region_gpu import CALLS, SIZES, Arrays
from harness.region_maker import make_case
from harness.region_runs import Regional, Sequential
from harness.region_shrink import told
from harness.region_worlds import books_of

from handlepool import ParallelStates

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

PROGRAMS, PARTS = 3000, len(SIZES)
PLANS = 2 * 4  # of one size, which a part has to itself
HELD = 2  # milliseconds that the caller's stream is kept busy, so that what follows waits in queues


class Held(Regional):
    """Regions behind a kernel that keeps the caller's stream busy while they are queued."""

    spin = staticmethod(lambda milliseconds: None)

    def begin(self):
        super().begin()
        self.spin(HELD)


class World:
    """Runs cases on a pool, the default one, as regions and on one stream."""

    def __init__(self, pool, kernels):
        self.pool = pool
        self.arrays = [Arrays(sizes) for sizes in SIZES]
        self.kernels = kernels

    def wrong(self, case, **options):
        """What differs, by bits; nothing where all is right."""
        place = case.seed % len(SIZES)
        make, sizes = self.arrays[place], SIZES[place]
        run = Held(self.pool, make, cupy.copy, sizes=sizes, **options)
        run.spin = self.kernels.spin
        with books_of(case):
            found = run.run(case)
        expected = Sequential(make, cupy.copy, numpy=False, sizes=sizes).run(case)
        assert found.keys() == expected.keys()
        names = [name for name, array in found.items() if array.size]
        flags = [(found[name].view(np.int32) != expected[name].view(np.int32)).any() for name in names]
        return [name for name, flag in zip(names, cupy.stack(flags).get(), strict=True) if flag]


@pytest.fixture
def world(pool, stream, kernels):
    with as_default(pool), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a branch waits because")
        warnings.filterwarnings("ignore", ".* returned new arrays and wrote")
        yield World(pool, kernels)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))  # which processes share
def test_g17_random_regions_give_what_one_stream_gives_bit_for_bit(world, eager_work, part):
    for seed in range(part, PROGRAMS, PARTS):
        case = make_case(seed, CALLS, few=True)
        wrong = world.wrong(case)
        assert not wrong, f"seed {seed}: {wrong}\n{told(case.steps)}"
    assert world.pool.stats()["plans_built"] == PLANS
    assert world.pool.stats()["handles_leased"] == 0


def test_g17_control_regions_that_do_not_order_by_data_give_something_else(world):
    cases = [make_case(seed, CALLS, few=True) for seed in range(60)]
    assert sum(bool(world.wrong(case, ordered=False)) for case in cases) >= 10


# The most natural thing to write


def a_chain(world, value, **options):
    def make(x):
        world.kernels.spin(20)
        return x * 2

    x = cupy.full((1, 4, 64, 64), value, np.float32)
    with ParallelStates(4, pool=world.pool).fork(**options) as fork:
        b = fork.run(double, fork.run(make, x))
        c = fork.wait(b) + 1 if not options else b
    return b, c


def test_g17_a_branch_may_be_given_what_another_makes(world):
    for value in range(1, 20):
        b, c = a_chain(world, value)
        assert (b.get() == 4 * value).all()
        assert (c.get() == 4 * value + 1).all()


def test_g17_control_a_fork_that_does_not_order_by_data_starts_it_too_early(world):
    a_chain(world, 1)
    assert any((a_chain(world, value, ordered=False)[0].get() != 4 * value).any() for value in range(101, 111))
