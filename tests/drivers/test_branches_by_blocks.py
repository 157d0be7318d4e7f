"""Guarantee 17 on the cuda driver without a GPU: branches over blocks of CuPy's pool, their views, and memory of others.

What waits for what is found from the events alone, and what has to from the bytes alone.
"""

import itertools
import random

import pytest
from harness.graphs import both, double, plus
from harness.insides import leases_of

pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("handlepool.drivers.cuda.driver", reason="the cuda driver's packages are not installed")

import cupy
from cupy.cuda import memory
from harness.no_gpu import NoGpuDriver, World

from handlepool.order.recent import Recent
from handlepool.tensors.layout import Layout, share

pytestmark = pytest.mark.cupy
INPUTS = {double: 1, plus: 2, both: 2}
SHAPE = (4, 64)


class OrderedDriver(NoGpuDriver):
    """Knows for each stream, and each event, what comes before it. Its memory is of CuPy's pool."""

    def __init__(self):
        super().__init__()
        self.before, self.events, self.handles = {}, {}, {}

    def record_event(self, event, pointer):
        self.events[event] = self.before.get(pointer, frozenset())

    def wait_event(self, pointer, event):
        self.before[pointer] = self.before.get(pointer, frozenset()) | self.events[event]

    def create_handle(self):
        handle = super().create_handle()
        return self.handles.setdefault(handle.backend_handle, handle)

    def alloc(self, nbytes, address=None, device=None):
        found = super().alloc(nbytes, address, device)
        if address is not None:
            return found
        chunk = memory._Chunk(found.mem, 0, nbytes, memory._Arena())
        return memory.MemoryPointer(memory.PooledMemory(chunk, lambda: None), 0)


class Program:
    """A random region, and its launches: what each reads and writes, and what it comes after."""

    def __init__(self, world, seed):
        self.world, self.driver, self.rng = world, world.driver, random.Random(seed)
        self.calls = []
        self.daring = self.rng.choice([0.0, 0.1, 0.4])
        self.arrays = [world.array(*SHAPE) for _ in range(4)]
        self.given = [world.array(*SHAPE) for _ in range(6)]
        self.quick = 0

    def run(self):
        with self.world.states.fork() as fork:
            for _ in range(self.rng.randrange(3, 14)):
                self.step(fork, self.rng.choice(list(INPUTS)))
            order = leases_of(fork).order
            self.quick = order is not None and order.recent is not None

    def step(self, fork, function):
        if function is double and self.rng.random() < 0.3:
            xs = [self.rng.choice(self.arrays) for _ in range(3)]
            xs = [x for x in xs if x.shape == xs[0].shape]
            self.call(lambda: fork.map(double, xs), [(x,) for x in xs])
            return
        first = self.seen(self.rng.choice(self.arrays))
        others = [y for y in self.arrays if y.shape == first.shape] or [first]
        inputs = (first, *[self.rng.choice(others) for _ in range(INPUTS[function] - 1)])
        self.call(lambda: [fork.run(function, *inputs, **self.out(function, first))], [inputs])

    def seen(self, x):
        """An array, a view of it, or another library's over the same memory."""
        if self.rng.random() >= self.daring:
            return x
        return self.rng.choice([
            lambda: x[1:],
            lambda: x[:2],
            lambda: x[:, :32],
            lambda: x.reshape(x.shape),
            lambda: cupy.ndarray(x.shape, x.dtype, self.driver.alloc(1 << 20, x.data.ptr), x.strides),
        ])()  # fmt: skip

    def out(self, function, x):
        if self.rng.random() < 0.5 or x.shape != SHAPE:
            return {}
        if self.rng.random() < self.daring:
            place = self.rng.choice([y for y in self.arrays + self.given if y.shape == x.shape])
        else:
            place = self.given[0]
            self.given = [*self.given[1:], self.world.array(*SHAPE)]
        return {"out": (place, self.world.array(*SHAPE)) if function is both else place}

    def call(self, function, inputs):
        """Run branches, and take down what the launches came after."""
        known = len(self.driver.launches)
        try:
            results = function()
        except Exception as error:
            if type(error).__name__ != "ArgumentError":  # an output over a part of an input
                raise
            return
        for launch, reads, result in zip(self.driver.launches[known:], inputs, results, strict=True):
            outs = result if isinstance(result, tuple) else (result,)
            assert launch.addresses == [each.data.ptr for each in (*reads, *outs)]
            self.arrays += outs
            pieces = [[Layout.of(each).piece(each.data.ptr) for each in some] for some in (reads, outs)]
            self.calls.append((*pieces, launch.number, launch.after))

    def unordered(self):
        """Pairs of launches that conflict, of which the later one does not wait for the earlier one."""
        for (reads, writes, number, _), (more, changed, other, after) in itertools.combinations(self.calls, 2):
            near = [(writes, more), (writes, changed), (reads, changed)]
            if number not in after and any(share(a, b) for one, two in near for a in one for b in two):
                yield number, other


class Launches(list):
    """Takes down which streams the launches were on, and what they came after."""

    def __init__(self, driver):
        super().__init__()
        self._driver = driver

    def append(self, launch):
        driver = self._driver
        pointer = driver.handles[launch.handle].stream
        launch.number = len(self)
        launch.after = driver.before.get(pointer, frozenset())
        driver.before[pointer] = launch.after | {launch.number}
        super().append(launch)


@pytest.fixture
def world():
    driver = OrderedDriver()
    driver.launches = Launches(driver)
    with World(driver=driver) as world:
        yield world


def test_g17_random_branches_wait_for_those_that_they_conflict_with(world):
    quick = waits = 0
    for seed in range(300):
        program = Program(world, seed)
        program.run()
        assert list(program.unordered()) == [], f"seed {seed}"
        quick += program.quick
        waits += any(after for *_, after in program.calls)
    assert 60 < quick < 240
    assert waits > 200


@pytest.mark.parametrize("blind", ["to what was written", "to the kind of memory"])
def test_g17_control_branches_that_do_not_look_at_blocks_do_not_wait(world, monkeypatch, blind):
    look_up = Recent.look_up

    def changed(self, addresses, operands, blocks):
        if blind == "to what was written":
            self._written = dict.fromkeys(self._written, False)
        else:
            self._block_type = memory.UnownedMemory
            blocks = [memory.UnownedMemory(1, 1, None, 0) for _ in blocks]
        return look_up(self, addresses, operands, blocks)

    monkeypatch.setattr(Recent, "look_up", changed)
    wrong = 0
    for seed in range(100):
        program = Program(world, seed)
        program.run()
        wrong += any(program.unordered())
    assert wrong > 10
