"""Launches that share a state, where the GPU keeps up with them, and what ends that."""

import itertools
import random

import numpy as np
import pytest
from harness.graphs import double, plus
from harness.region_worlds import BlindDriver, default_pool
from harness.scenes import Scene

from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.regions.fork import Fork
from handlepool.regions.pace import BETWEEN, ENOUGH, LONGEST_REST, TOO_MANY, Pace
from handlepool.regions.recent import Recent


class Gpu:
    """In the place of a driver: whether each look finds that all is done."""

    def __init__(self, *found):
        self.found = list(found)
        self.looks = 0

    def relaxed(self):
        return self

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass

    def stream_done(self, pointer):
        self.looks += 1
        return self.found.pop(0) if self.found else True


class Slot:
    pointer = 7


def launches(pace, gpu, count):
    """How many of so many launches on a shared state may stay there."""
    for number in range(count):
        if pace.left <= 0 and not pace.keeps_up(gpu, Slot):
            return number
        pace.left -= 1
    return count


def enough():
    pace = Pace()
    for _ in range(ENOUGH):
        assert not pace.begin()
        pace.look(Gpu(True), Slot)
    return pace


def test_launches_share_a_state_after_looks_that_found_the_gpu_without_work():
    assert enough().begin()


def test_one_look_that_found_it_at_work_begins_the_count_anew():
    pace = Pace()
    for number in range(2 * ENOUGH - 1):
        assert not pace.begin()
        pace.look(Gpu(number != ENOUGH - 1), Slot)
    assert not pace.begin()


def test_forks_that_used_one_state_count_as_well():
    pace = Pace()
    for _ in range(ENOUGH):
        assert not pace.begin()
        pace.one_was_enough()
    assert pace.begin()


def test_looks_are_seldom_and_not_always_in_the_same_place():
    pace, gpu, places = enough(), Gpu(), []
    for number in range(1000):
        before = gpu.looks
        assert launches(pace, gpu, 1) == 1
        places += [number] * (gpu.looks - before)
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert gaps == {*range(BETWEEN[0], BETWEEN[1] + 1)}


def test_it_ends_where_the_gpu_is_at_work_at_several_looks_one_after_the_other():
    pace, gpu = enough(), Gpu(*[False] * TOO_MANY)
    assert launches(pace, gpu, 100) == BETWEEN[0] + TOO_MANY - 1
    assert not pace.begin()


def test_one_such_look_ends_nothing():
    pace, gpu = enough(), Gpu(*[False] * (TOO_MANY - 1), True)
    assert launches(pace, gpu, 100) == 100
    assert pace.begin()


def test_such_a_look_at_the_end_of_a_fork_ends_it():
    pace = enough()
    assert launches(pace, Gpu(False), BETWEEN[0] + 1) == BETWEEN[0] + 1
    assert not pace.begin()


def test_each_time_it_was_wrong_nobody_looks_for_twice_as_many_forks():
    pace, rests = Pace(), []
    for _ in range(14):
        gpu, rest = Gpu(False), -1
        pace.look(gpu, Slot)
        while gpu.looks == 1:
            pace.begin()
            pace.look(gpu, Slot)
            rest += 1
            pace.one_was_enough()
            gpu.found = [True]
        rests.append(rest + 1)
    assert rests[:4] == [1, 2, 4, 8] or rests[:4] == [2, 3, 5, 9]
    assert max(rests) <= LONGEST_REST + 1


# In forks


def states_of(pool, count=4, left=100):
    """States whose forks share a state from the first launch on."""
    states = ParallelStates(count, pool=pool)
    states._pace._enough = ENOUGH
    states._pace.left = left
    return states


@pytest.fixture
def slots(monkeypatch):
    """The slots that branches were started on."""
    found, begin = [], Fork._begin

    def noted(*args, **kwargs):
        found.append(begin(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Fork, "_begin", noted)
    return found


def warm(scene):
    """Make the plan known."""
    scene.states.map(double, [scene.array(0)])


class Places(Scene):
    """A scene whose GPU keeps up, or does not."""

    def __init__(self, done=True, **options):
        super().__init__(**options)
        self.driver.stream_done = lambda pointer: done
        warm(self)


def in_forks(scene, slots, count, branches=4):
    """By fork, on how many states its branches ran."""
    found = []
    for _ in range(count):
        slots.clear()
        x = scene.array(3)
        with scene.states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(branches)]
        assert [scene.read(y) for y in ys] == [6] * branches
        found.append(len({slot.pointer for slot in slots}))
    return found


def test_branches_share_a_state_once_the_gpu_kept_up(slots):
    with Places() as scene:
        assert in_forks(scene, slots, ENOUGH + 3) == [4] * ENOUGH + [1] * 3


def test_branches_take_the_states_in_turn_where_it_does_not(slots):
    with Places(done=False) as scene:
        assert in_forks(scene, slots, ENOUGH + 3) == [4] * (ENOUGH + 3)


def test_it_comes_back_to_the_states_where_the_gpu_falls_behind(slots):
    with Places() as scene:
        in_forks(scene, slots, ENOUGH)
        scene.driver.stream_done = lambda pointer: False
        assert in_forks(scene, slots, 1, BETWEEN[0] + TOO_MANY + 10) == [4]
        assert in_forks(scene, slots, 3) == [4] * 3


def test_maps_and_what_runs_python_take_the_states_in_turn(slots):
    with Places() as scene:
        in_forks(scene, slots, ENOUGH)
        slots.clear()
        x, others = scene.array(1), [scene.array(1) for _ in range(2)]
        with scene.states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(2)]
            ys += [fork.run(scene.plus, each, 1) for each in others]
        assert [scene.read(y) for y in ys] == [2] * 4
        assert len({slot.pointer for slot in slots}) == 3
        with scene.states.fork() as fork:
            ys = [fork.run(double, x), *fork.map(double, [x] * 4)]
            leased = scene.pool.stats()["handles_leased"]
        assert [scene.read(y) for y in ys] == [2] * 5
        assert leased == 4


def test_one_state_is_shared_at_once(slots):
    with Scene() as scene:
        looks = []
        scene.driver.stream_done = looks.append
        x, states = scene.array(1), ParallelStates(1, pool=scene.pool)
        warm(scene)
        scene.driver.calls.clear()
        with states.fork() as fork:
            y = x
            for _ in range(3 * BETWEEN[1]):
                y = fork.run(double, y)
        assert scene.driver.calls["record_event"] == 3 * BETWEEN[1] + 1  # the starts, and the join
        assert looks == []


def test_a_fork_that_is_captured_takes_the_states_in_turn_and_nobody_looks(slots):
    with Places() as scene:
        in_forks(scene, slots, ENOUGH)
        slots.clear()
        x = scene.array(1)
        scene.driver.stream_done = lambda pointer: pytest.fail("to look would end the capture")
        scene.driver.begin_capture(scene.stream.ptr)
        with scene.states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(4)]
        scene.driver.end_capture(scene.stream.ptr)
        assert len({slot.pointer for slot in slots}) == 4
        del ys


def beside_a_capture():
    """Have a fork look while another stream is captured by everybody's mode."""
    with Scene(HostDriver()) as scene:
        x, states, other = scene.array(1), states_of(scene.pool, left=0), scene.driver.create_stream()
        warm(scene)
        other.begin_capture("global")
        with states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(2)]
        other.end_capture()  # raises if anything spoiled it
        assert scene.driver.calls["stream_done"] == 2
        return [scene.read(y) for y in ys]


def test_a_look_harms_no_capture_of_another_stream():
    assert beside_a_capture() == [2, 2]


def test_control_a_look_that_is_not_relaxed_does(monkeypatch):
    monkeypatch.setattr("handlepool.regions.pace._done", lambda driver, slot: driver.stream_done(slot.pointer))
    with pytest.raises(ContractError, match="relaxed"):
        beside_a_capture()


def test_a_pool_that_checks_has_branches_take_the_states_in_turn(slots):
    with Scene(check=True) as scene:
        warm(scene)
        scene.states = states_of(scene.pool)
        assert in_forks(scene, slots, 2) == [4] * 2


# What comes after launches that share a state is in order with them


WAYS = {"run": 12, "out": 2, "python": 1, "body": 1, "map": 1, "wait": 1, "inner": 1, "branch": 1}


class Program:
    """A random fork, mostly of launches of which the first share a state, and what it should compute.

    Attributes
    ----------
    values, expected : list of float
    """

    def __init__(self, seed, driver):
        choose = random.Random(seed)
        self.driver, self.expected = driver, [0.0, 1.0, 2.0]
        with HandlePool(driver=driver) as pool, default_pool(pool), driver.create_stream():
            self.pool, self.arrays = pool, [driver.asarray(np.full((2, 4), value, np.float32)) for value in self.expected]
            for out in (None, driver.asarray(np.zeros((2, 4), np.float32))):  # make the plans known
                double(self.arrays[0], out=out)
                plus(self.arrays[0], self.arrays[0])
            with states_of(pool, left=choose.randrange(12)).fork() as fork:
                for _ in range(choose.randrange(2, 14)):
                    self.step(fork, *choose.choices([*WAYS], [*WAYS.values()]), *choose.choices(range(len(self.arrays)), k=2))
            self.values = [float(driver.asnumpy(each).reshape(-1)[0]) for each in self.arrays]

    def step(self, fork, way, i, j):
        x, y, sum_of_both = self.arrays[i], self.arrays[j], self.expected[i] + self.expected[j]
        if way == "out":
            fork.run(double, x, out=y)
            self.expected[j] = 2 * self.expected[i]
            return
        if way == "run":
            made = [fork.run(plus, x, y)]
        elif way == "python":
            made = [fork.run(self.added, x, y)]
        elif way == "body":
            made = [plus(x, y)]
        elif way == "map":
            made = fork.map(plus, [x] * 2, [y] * 2)
        elif way == "wait":
            made = [self.added(*(fork.wait(each) for each in (x, y)))]
        elif way == "inner":
            with states_of(self.pool).fork() as inner:
                made = [inner.run(plus, x, y)]
                made.append(fork.run(plus, made[0], self.arrays[0]))
                self.expected.append(sum_of_both + self.expected[0])
            self.arrays.append(made.pop())
        else:
            made = [fork.run(self.in_a_fork, x, y)]
        self.arrays += made
        self.expected += [sum_of_both] * len(made)

    def added(self, x, y):
        """Queue a sum that nobody else sees."""
        out = self.driver.empty((2, 4), (16, 4), np.dtype(np.float32))
        work = [out], [x, y]
        self.driver.enqueue(
            self.driver.current_stream().ptr, lambda out, x, y: np.add(x, y, out=out), writes=work[0], reads=work[1]
        )
        return out

    def in_a_fork(self, x, y):
        with states_of(self.pool).fork() as fork:
            return fork.run(plus, x, y)


def checked(seed, check_order=True):
    driver = BlindDriver(scheduler="adversarial", seed=seed, check_order=check_order)
    driver.blind = True
    return Program(seed, driver)


@pytest.mark.parametrize("part", range(4))
def test_g17_whatever_follows_launches_that_share_a_state_is_in_order_with_them(part):
    for seed in range(part * 60, part * 60 + 60):
        program = checked(seed)
        assert program.driver.order.found == [], seed
        assert program.values == program.expected, seed


def test_g17_control_it_is_not_where_they_are_not_written_down(monkeypatch):
    monkeypatch.setattr(Recent, "note_unmet", lambda *_: None)
    wrong = 0
    for seed in range(60):
        try:
            wrong += checked(seed).driver.order.found != []
        except ContractError:
            wrong += 1
    assert wrong > 10
