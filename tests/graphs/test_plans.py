"""Plans: built once however many ask, bounded, and errors to all that waited."""

import gc
import threading
import weakref

import numpy as np
import pytest
from harness.graphs import double
from harness.scenes import TIMEOUT, Scene, Thread

import handlepool
from handlepool import ArgumentError, GraphNotSupportedError
from handlepool.pool.plan_cache import PlanCache


class BuildError(Exception):
    def __init__(self, number):
        super().__init__(f"no plan: {number}")
        self.number = number


def test_a_thread_that_comes_during_a_build_waits_for_its_plan():
    cache, inside, go_on, plan = PlanCache(), threading.Event(), threading.Event(), object()

    def build():
        inside.set()
        assert go_on.wait(TIMEOUT)
        return plan

    first = Thread(cache.get_or_build, 0, "key", build)
    assert inside.wait(TIMEOUT)
    others = [Thread(cache.get_or_build, 0, "key", lambda: pytest.fail("built twice")) for _ in range(7)]
    go_on.set()
    assert {id(thread.finish()) for thread in [first, *others]} == {id(plan)}
    assert cache.snapshot(0)["plans_built"] == 1


class Held:
    """Stands for an array in a thread's frame."""


class Asked:
    """A build's lock that says when somebody is about to wait for it."""

    def __init__(self, lock, asked):
        self.lock, self.asked = lock, asked

    def __enter__(self):
        self.asked.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def fail_together(cache, fail):
    """The errors of eight threads that wait for one build which fails, the builder's first, and what each of them held."""
    inside, go_on, builds, held = threading.Event(), threading.Event(), [], []

    def build():
        builds.append(threading.get_ident())
        inside.set()
        assert go_on.wait(TIMEOUT)
        fail()

    def ask():
        mine = Held()
        held.append(weakref.ref(mine))
        return cache.get_or_build(0, "key", build)

    first = Thread(ask)
    assert inside.wait(TIMEOUT)
    running = cache._builds[0, "key"]
    asked = threading.Semaphore(0)
    running.lock = Asked(running.lock, asked)
    threads = [first]
    for _ in range(7):
        threads.append(Thread(ask))
        assert asked.acquire(timeout=TIMEOUT)
    go_on.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(builds) == 1
    return [thread._error for thread in threads], held


def refuse():
    try:
        raise KeyError("why")
    except KeyError as cause:
        raise BuildError(3) from cause


def test_each_thread_that_waits_gets_an_error_of_its_own_and_the_next_call_builds():
    cache = PlanCache()
    (first, *others), _ = fail_together(cache, refuse)
    assert len({id(error) for error in (first, *others)}) == 8
    for error in others:
        assert [type(link) for link in causes(error)] == [BuildError, BuildError, KeyError]
        assert str(error) == str(error.__cause__) == str(first) == "no plan: 3"
        assert error.number == 3
        assert error.__cause__.__traceback__ is None
    assert [type(link) for link in causes(first)] == [BuildError, KeyError]
    assert cache.get_or_build(0, "key", lambda: "plan") == "plan"


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_who_keeps_the_error_of_a_build_keeps_no_other_threads_frames(kept):
    errors, held = fail_together(PlanCache(), refuse)
    error = errors.pop(kept)
    errors.clear()
    gc.collect()
    assert [place for place, mine in enumerate(held) if mine() is not None] == [kept]
    assert isinstance(error, BuildError)


def test_a_build_that_was_interrupted_is_done_by_another_that_waited():
    cache, inside, go_on = PlanCache(), threading.Event(), threading.Event()

    def interrupted():
        inside.set()
        assert go_on.wait(TIMEOUT)
        raise KeyboardInterrupt

    first = Thread(cache.get_or_build, 0, "key", interrupted)
    assert inside.wait(TIMEOUT)
    second = Thread(cache.get_or_build, 0, "key", lambda: "plan")
    go_on.set()
    with pytest.raises(KeyboardInterrupt):
        first.finish()
    assert second.finish() == "plan"


def test_two_keys_are_built_at_a_time():
    cache, meeting = PlanCache(), threading.Barrier(2)
    threads = [Thread(cache.get_or_build, 0, key, lambda: meeting.wait(TIMEOUT)) for key in "ab"]
    assert sorted(thread.finish() for thread in threads) == [0, 1]


def test_a_refusal_is_remembered_and_raised_anew_each_time():
    cache, builds = PlanCache(), []

    def build():
        builds.append(1)
        raise GraphNotSupportedError("no plan")

    errors = []
    for _ in range(3):
        with pytest.raises(GraphNotSupportedError, match="no plan") as raised:
            cache.get_or_build(0, "key", build)
        errors.append(raised.value)
    assert len(builds) == 1
    assert errors[1] is not errors[2]


def test_a_build_that_asks_for_itself_is_told():
    cache = PlanCache()
    with pytest.raises(ArgumentError, match="called itself"):
        cache.get_or_build(0, "key", lambda: cache.get_or_build(0, "key", lambda: "plan"))


# The bound


def test_the_least_recently_used_plan_goes_first():
    cache = PlanCache(limit=3)
    for key in "abc":
        cache.get_or_build(0, key, lambda key=key: key)
    assert cache.get(0, "a") == "a"
    cache.get_or_build(0, "d", lambda: "d")
    assert [cache.get(0, key) for key in "abcd"] == ["a", None, "c", "d"]
    assert len(cache) == 3


def test_the_bound_is_each_devices_own():
    cache = PlanCache(limit=2)
    for device in range(2):
        for key in "abc":
            cache.get_or_build(device, key, lambda key=key: key)
    assert len(cache) == 4
    assert cache.get(1, "b") == "b"


def test_plans_that_were_dropped_while_in_use_work_on(make_driver):
    with Scene(make_driver(), plan_limit=1) as scene:

        def work(size):
            with scene.driver.create_stream():
                for value in range(20):
                    assert scene.read(scene.states.map(double, [scene.array(value, size=size)])[0]) == 2 * value

        for thread in [Thread(work, size) for size in range(1, 7)]:
            thread.finish()
        assert scene.pool.stats()["plans_cached"] == 1


# What a plan is built for


def built(scene, function, *arrays, **options):
    before = scene.pool.stats()["plans_built"]
    scene.states.map(lambda *_: function(*arrays, **options), [0])
    return scene.pool.stats()["plans_built"] - before


def test_a_plan_is_built_once_for_a_geometry_and_again_for_another(scene):
    x = scene.array(1)
    assert built(scene, double, x) == 1
    assert built(scene, double, scene.array(2)) == 0
    assert built(scene, double, scene.array(2, size=16)) == 1
    assert built(scene, double, scene.driver.empty((8,), (4,), np.dtype(np.float32))) == 1
    assert built(scene, double, scene.driver.empty((2, 4), (32, 8), np.dtype(np.float64))) == 1
    assert built(scene, double, x, out=scene.array()) <= 1


def test_a_plan_is_a_devices_own(scene):
    assert built(scene, double, scene.array(1)) == 1
    with scene.driver.device(1), scene.driver.create_stream():
        assert built(scene, double, scene.array(1)) == 1


def test_options_are_a_part_of_the_key(scene):
    @handlepool.graph
    def scale(g, x, *, times):
        y = x
        for _ in range(times):
            y = g.add(y, x)
        return y

    x = scene.array(1)
    assert [built(scene, scale, x, times=times) for times in (1, 2, 1, 2)] == [1, 1, 0, 0]


def test_eight_threads_that_ask_for_what_cannot_be_built_are_told_the_same(scene):
    meeting, builds = threading.Barrier(8), []

    @handlepool.graph
    def wrong(g, x):
        builds.append(threading.get_ident())
        raise BuildError(5)

    def work():
        with scene.driver.create_stream():
            x = scene.array(1)
            meeting.wait(TIMEOUT)
            scene.states.map(wrong, [x])

    for thread in [Thread(work) for _ in range(8)]:
        with pytest.raises(ArgumentError, match="wrong raised BuildError: no plan: 5") as raised:
            thread.finish()
        assert isinstance([*causes(raised.value)][-1], BuildError)
    assert 1 <= len(builds) <= 8
    assert scene.read(scene.states.map(double, [scene.array(1)])[0]) == 2


def test_a_graph_function_of_two_outputs(scene):
    @handlepool.graph
    def both(g, x):
        return g.add(x, x), g.mul(x, x)

    with scene.states.fork() as fork:
        y, z = fork.run(both, scene.array(5))
    assert (scene.read(y), scene.read(z)) == (10, 25)


def test_options_that_are_equal_and_of_other_types_have_plans_of_their_own(make_pool, make_default):
    pool = make_pool()
    make_default(pool)

    @handlepool.graph
    def choose(g, x, *, which):
        return g.relu(x) if which is True else g.sigmoid(x)

    x = pool.driver.asarray(np.full((1, 4, 8, 8), -1.0, np.float32))
    for _ in range(2):
        assert choose(x, which=1).ravel()[0] > 0
        assert choose(x, which=True).ravel()[0] == 0


def test_g10_a_finaliser_inside_the_caches_lock_may_clear_it(make_pool):
    pool = make_pool()
    x, w = (pool.driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 1, 4, 4), (1, 1, 3, 3)))

    class Finaliser:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            pool.cache_clear()

    threshold = gc.get_threshold()
    gc.disable()
    gc.freeze()
    try:
        for allocations in range(1, 300, 3):
            pool.cache_clear()
            Finaliser()
            gc.set_threshold(allocations, 10_000, 10_000)  # the youngest generation alone, where the finaliser is
            gc.enable()
            handlepool.conv2d(x, w, padding=1, pool=pool)
            gc.disable()
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        gc.enable()
