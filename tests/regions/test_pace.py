"""Launches that stay on the caller's stream, where the GPU keeps up with them, and what ends that."""

import itertools
import random

import numpy as np
import pytest
from harness.graphs import double, plus
from harness.process import as_default
from harness.region_worlds import BlindDriver
from harness.scenes import Scene, leased

import handlepool
from handlepool import ContractError, HandlePool, ParallelStateExecutor, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.order.books import DataOrder
from handlepool.regions.fork import Fork
from handlepool.regions.pace import BETWEEN, ENOUGH, LONGEST_REST, TOO_MANY, Pace


class Gpu:
    """In the place of a driver: whether each look finds that all is done."""

    def __init__(self, *found):
        self.found = [True, *found]
        self.looks = 0

    def is_capturing(self, pointer):
        return False

    def relaxed(self):
        return self

    def __enter__(self):
        self.looks += 1
        self.found = self.found[1:] or [True]

    def __exit__(self, *_):
        pass

    def stream_done(self, pointer):
        return self.found[0]


STREAM = 7


def launches(pace, gpu, count):
    """How many of so many launches may stay."""
    for number in range(count):
        if pace.left <= 0 and not pace.keeps_up(gpu, STREAM):
            return number
        pace.left -= 1
    return count


def look(pace, done):
    """Look in a fork of many branches."""
    gpu = Gpu(*[done] * TOO_MANY)
    while pace.look(gpu, [STREAM]):
        pass
    assert gpu.looks == (1 if done else TOO_MANY)


def enough():
    pace = Pace()
    for _ in range(ENOUGH):
        assert not pace.begin()[0]
        assert not pace.look(Gpu(True), [STREAM])
    return pace


def test_it_may_be_at_work_for_a_few_branches():
    pace = Pace()
    for _ in range(ENOUGH):
        assert pace.begin() == (False, True)
        gpu = Gpu(*[False] * (TOO_MANY - 1))
        assert [pace.look(gpu, [STREAM]) for _ in range(TOO_MANY)] == [True] * (TOO_MANY - 1) + [False]
    assert pace.begin()[0]


def test_a_fork_that_ends_while_it_is_at_work_begins_the_count_anew():
    pace = enough()
    assert pace.look(Gpu(False), [STREAM])
    assert not pace.begin()[0]
    assert not pace.begin()[0]


def test_launches_stay_after_looks_that_found_the_gpu_without_work():
    assert enough().begin() == (True, False)


def test_a_fork_in_which_it_was_always_at_work_begins_the_count_anew():
    pace = Pace()
    for number in range(2 * ENOUGH - 1):
        assert not pace.begin()[0]
        look(pace, number != ENOUGH - 1)
    assert not pace.begin()[0]


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
    assert not pace.begin()[0]


def test_one_such_look_ends_nothing():
    pace, gpu = enough(), Gpu(*[False] * (TOO_MANY - 1), True)
    assert launches(pace, gpu, 100) == 100
    assert pace.begin()[0]


def test_such_a_look_at_the_end_of_a_fork_ends_it():
    pace = enough()
    assert launches(pace, Gpu(False), BETWEEN[0] + 1) == BETWEEN[0] + 1
    assert not pace.begin()[0]


def test_each_time_it_was_wrong_nobody_looks_for_twice_as_many_forks():
    pace, rests = Pace(), []
    for _ in range(13):
        look(pace, False)
        rests.append(0)
        while pace.begin() == (False, False):
            rests[-1] += 1
    assert rests == [min(1 << number, LONGEST_REST) for number in range(13)]


# In forks


def states_of(pool, count=4, left=100):
    """States whose forks let launches stay from the first on."""
    states = ParallelStates(count, pool=pool)
    states._pace._idle = ENOUGH
    states._pace.left = left
    return states


def warm(scene):
    """Make the plan known."""
    scene.states.map(double, [scene.array(0)])


class Places(Scene):
    """A scene whose GPU keeps up, or does not."""

    def __init__(self, done=True, **options):
        super().__init__(**options)
        self.driver.stream_done = lambda pointer: done
        warm(self)


def in_forks(scene, count, branches=4, **options):
    """By fork, how many states were leased."""
    found = []
    for _ in range(count):
        x = scene.array(3)
        with scene.states.fork(**options) as fork:
            ys = [fork.run(double, x) for _ in range(branches)]
            found.append(leased(scene))
        assert [scene.read(y) for y in ys] == [6] * branches
    return found


@pytest.mark.parametrize("ordered", [True, False])
def test_launches_stay_once_the_gpu_kept_up(ordered):
    with Places() as scene:
        assert in_forks(scene, ENOUGH + 3, ordered=ordered) == [4] * ENOUGH + [0] * 3


def test_one_state_is_enough_to_see_that():
    with Places() as scene:
        scene.states = ParallelStates(1, pool=scene.pool)
        assert in_forks(scene, ENOUGH + 3) == [1] * ENOUGH + [0] * 3


@pytest.mark.parametrize("ordered", [True, False])
def test_branches_take_the_states_in_turn_where_it_does_not(ordered):
    with Places(done=False) as scene:
        assert in_forks(scene, ENOUGH + 3, ordered=ordered) == [4] * (ENOUGH + 3)


def test_they_come_back_to_the_states_where_the_gpu_falls_behind():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        scene.driver.stream_done = lambda pointer: False
        assert in_forks(scene, 1, BETWEEN[0] + TOO_MANY + 10) == [4]
        assert in_forks(scene, 3) == [4] * 3


def test_launches_that_stay_need_no_event():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        scene.driver.calls.clear()
        assert in_forks(scene, 1) == [0]
        assert scene.driver.calls["record_event"] == scene.driver.calls["wait_event"] == 0


def test_what_runs_python_and_maps_go_to_the_states():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        x, others = scene.array(1), [scene.array(1) for _ in range(2)]
        with scene.states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(2)]
            ys += [fork.run(scene.plus, each, 1) for each in others]
            assert leased(scene) == 2
            ys += [fork.run(double, x)]
            assert leased(scene) == 3
        assert [scene.read(y) for y in ys] == [2] * 5
        with scene.states.fork() as fork:
            ys = [fork.run(double, x), *fork.map(double, [x] * 4)]
            assert leased(scene) == 4
        assert [scene.read(y) for y in ys] == [2] * 5


def test_what_goes_to_another_stream_does_not_stay():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        x = scene.array(1)
        with scene.states.fork() as fork:
            with scene.driver.create_stream():
                y = fork.run(double, x)
            assert leased(scene) == 1
        assert scene.read(y) == 2


def test_nobody_looks_in_a_fork_that_is_captured_and_it_takes_the_states_in_turn():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        x = scene.array(1)
        scene.driver.stream_done = lambda pointer: pytest.fail("to look would end the capture")
        scene.driver.begin_capture(scene.stream.ptr)
        with scene.states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(4)]
            assert leased(scene) == 4
        scene.driver.end_capture(scene.stream.ptr)
        del ys


def test_a_capture_that_begins_in_the_body_is_not_harmed_by_looks():
    with Places() as scene:
        x, y, states = scene.array(1), scene.array(0), states_of(scene.pool, left=1)
        scene.states.map(double, [x], out=[y])
        scene.driver.stream_done = lambda pointer: pytest.fail("to look would end the capture")
        with states.fork() as fork:
            scene.driver.begin_capture(scene.stream.ptr)
            for _ in range(TOO_MANY - 1):
                fork.run(double, x, out=y)
            graph = scene.driver.end_capture(scene.stream.ptr)
        assert graph.nodes == TOO_MANY - 1


def test_forks_in_branches_do_not_stay_there():
    with Places() as scene:
        in_forks(scene, ENOUGH)
        inner, found = states_of(scene.pool), []

        def branch(x):
            with inner.fork() as fork:
                y = fork.run(double, x)
                found.append(leased(scene))
            return y

        with scene.states.fork() as fork:
            y = fork.run(branch, scene.array(1))
        assert scene.read(y) == 2
        assert found == [2]


def beside_a_capture(states_of):
    """Have a fork look while another stream is captured by everybody's mode."""
    with Scene(HostDriver()) as scene:
        x, states, other = scene.array(1), states_of(scene.pool), scene.driver.create_stream()
        warm(scene)
        other.begin_capture("global")
        with states.fork() as fork:
            ys = [fork.run(double, x) for _ in range(2)]
        other.end_capture()  # raises if anything spoiled it
        assert scene.driver.calls["stream_done"]
        return [scene.read(y) for y in ys]


def learning(pool):
    return ParallelStates(4, pool=pool)


def staying(pool):
    return states_of(pool, left=1)


@pytest.mark.parametrize("states_of", [learning, staying])
def test_a_look_harms_no_capture_of_another_stream(states_of):
    assert beside_a_capture(states_of) == [2, 2]


@pytest.mark.parametrize("states_of", [learning, staying])
def test_control_a_look_that_is_not_relaxed_does(states_of, monkeypatch):
    monkeypatch.setattr("handlepool.regions.pace._done", lambda driver, pointer: driver.stream_done(pointer))
    with pytest.raises(ContractError, match="relaxed"):
        beside_a_capture(states_of)


def test_launches_on_a_pool_that_checks_go_to_the_states():
    with Scene(check=True) as scene:
        warm(scene)
        scene.states = states_of(scene.pool)
        assert in_forks(scene, 2) == [4] * 2


# What comes before launches that stay, and after them, is in order with them


WAYS = {"run": 12, "out": 2, "python": 1, "body": 1, "map": 1, "wait": 1, "inner": 1, "branch": 1}


class Program:
    """A random fork, mostly of launches of which the first stay, and what it should compute.

    Attributes
    ----------
    values, expected : list of float
    """

    def __init__(self, seed, driver):
        choose = random.Random(seed)
        self.driver, self.expected = driver, [0.0, 1.0, 2.0]
        with HandlePool(driver=driver) as pool, as_default(pool), driver.create_stream():
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
            with ParallelStates(4, pool=self.pool).fork() as inner:  # whose branches go to the states
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
def test_g17_whatever_is_beside_launches_that_stay_is_in_order_with_them(part):
    for seed in range(part * 60, part * 60 + 60):
        program = checked(seed)
        assert program.driver.order.found == [], seed
        assert program.values == program.expected, seed


def test_g17_control_without_a_branchs_start_they_are_not(monkeypatch):
    start = Fork._begin

    def early(fork, *args, **kwargs):
        driver, fork._driver = fork._driver, Careless()
        try:
            return start(fork, *args, **kwargs)
        finally:
            fork._driver = driver

    class Careless:
        record_event = wait_event = staticmethod(lambda *_: None)

        def __getattr__(self, name):
            return getattr(driver, name)

    monkeypatch.setattr(Fork, "_begin", early)
    wrong = 0
    for seed in range(60):
        driver = BlindDriver(scheduler="adversarial", seed=seed, check_order=True)
        driver.blind = True
        try:
            Program(seed, driver)
            wrong += driver.order.found != []
        except ContractError:
            wrong += 1
    assert wrong > 10


def test_g17_control_launches_do_not_stay_beside_a_fork_in_the_body(monkeypatch):
    begin = Fork._begin_here

    def stubborn(fork, *given):
        order = fork._order or fork._open_order()
        order.stays = True
        return begin(fork, *given)

    monkeypatch.setattr(Fork, "_begin_here", stubborn)
    wrong = 0
    for seed in range(240):
        try:
            wrong += checked(seed).driver.order.found != []
        except ContractError:
            wrong += 1
    assert wrong > 3


# Other streams in the body


class Elsewhere(Scene):
    """A body of which a launch stays, and another stream."""

    def __init__(self, **options):
        super().__init__(**options)
        warm(self)
        self.states = states_of(self.pool)
        self.other = self.driver.create_stream()


@handlepool.operation(mutates="array")
def increased(scene, array):
    scene.put(array, lambda value: value + 1, array)


def waits(scene, fork, y):
    return scene.plus(fork.wait(y), 1)


def launches_there(scene, fork, y):
    return double(y)


def has_an_operation(scene, fork, y):
    increased(scene, y)
    return y


def overwrites(scene, fork, y):
    double(scene.array(100), out=scene.x)
    return scene.plus(fork.wait(y), 0)


def submits(scene, fork, y):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        return scene.plus(executor.submit(double, y).result(), 0)


def forks_there(scene, fork, y):
    with ParallelStates(2, pool=scene.pool).fork() as inner:
        return inner.run(double, y)


def forks_that_stay_there(scene, fork, y):
    with states_of(scene.pool).fork() as inner:
        return inner.run(double, inner.run(double, y))


BODIES = {
    waits: 7,
    launches_there: 12,
    has_an_operation: 7,
    overwrites: 6,
    submits: 12,
    forks_there: 12,
    forks_that_stay_there: 24,
}


def on_another_stream(scene, body):
    with as_default(scene.pool), scene.states.fork() as fork:
        scene.x = scene.array(3)
        y = fork.run(double, scene.x)
        assert leased(scene) == 0
        with scene.other:
            return scene.read(body(scene, fork, y))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_g17_another_stream_of_the_body_waits_for_launches_that_stay(body):
    for seed in range(10):
        with Elsewhere(seed=seed) as scene:
            assert on_another_stream(scene, body) == BODIES[body], seed


@pytest.mark.parametrize("body", [body for body in BODIES if body is not waits], ids=lambda body: body.__name__)
def test_g17_control_it_does_not_where_nothing_puts_it_behind_them(body, monkeypatch):
    monkeypatch.setattr(DataOrder, "after_stayed", lambda *_: None)
    with Elsewhere() as scene, pytest.raises(ContractError, match="not ordered"):
        on_another_stream(scene, body)


def dropped(scene):
    """A launch reads an array of another stream's arena, which the body drops."""
    with scene.other:
        x = scene.array(3)
    scene.driver.synchronize_stream(scene.other.ptr)
    with scene.states.fork() as fork:
        y = fork.run(double, x)
        del x
        with scene.other:
            z = scene.array(100)
    return scene.read(y), z


def test_g8_what_a_launch_that_stays_was_given_is_kept_to_the_join():
    for seed in range(10):
        with Elsewhere(seed=seed) as scene:
            assert dropped(scene)[0] == 6, seed


def test_g8_control_it_is_not_safe_where_it_is_not_kept(monkeypatch):
    begin = Fork._begin_here

    def forgetful(fork, *given):
        slot = begin(fork, *given)
        fork._kept.clear()
        return slot

    monkeypatch.setattr(Fork, "_begin_here", forgetful)
    with Elsewhere() as scene, pytest.raises(ContractError, match="not ordered"):
        dropped(scene)
