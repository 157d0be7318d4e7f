"""Guarantee 15: no deadlock, regions compose, and library code in a region gets the side slot's own."""

import threading

import pytest
from harness.scenes import TIMEOUT, Scene, Thread, over_seeds, without_joins, without_starts
from harness.uses import FOREIGN, ON_A_SIDE_STREAM, in_a_branch

import handlepool
from handlepool import ContractError, OwnershipError, ParallelStates
from handlepool.pool import context
from handlepool.regions import memory

# Regions inside regions, with the order of all of them


def branches(scene, x, y, value):
    """Two nested branches over ``x``, into ``y``, which was made before them."""
    with scene.states.fork() as fork:
        fork.run(scene.put, y, lambda x: x + value, x)
        fork.run(lambda: None)
    scene.put(y, lambda y: y * 10, y)
    return y


def fork_in_a_branch(scene):
    x, y, z = scene.array(1), scene.array(), scene.array()
    with scene.states.fork() as fork:
        fork.run(branches, scene, x, y, 1)
        fork.run(branches, scene, x, z, 2)
    return scene.read(y), scene.read(z)


def map_in_a_map(scene):
    x, outputs = scene.array(1), [[scene.array() for _ in range(3)] for _ in range(3)]

    def inner(y, value):
        return scene.put(y, lambda x: x + value, x)

    scene.states.map(lambda row: scene.states.map(inner, row, range(3)), outputs)
    return tuple(scene.read(y) for row in outputs for y in row)


def fork_in_with_state(scene):
    x, y = scene.array(1), scene.array()
    scene.states.with_state(1, lambda state: branches(scene, x, y, 1))
    return scene.read(y)


def with_state_in_a_branch(scene):
    x, y = scene.array(1), scene.array()

    def branch():
        scene.states.with_state(1, lambda state: scene.put(y, lambda x: x + 1, x))
        scene.put(y, lambda y: y * 10, y)

    with scene.states.fork() as fork:
        fork.run(branch)
    return scene.read(y)


def with_state_in_with_state(scene):
    x, y = scene.array(1), scene.array()

    def outer(state):
        scene.states.with_state(2, lambda state: scene.put(y, lambda x: x + 1, x))
        scene.put(y, lambda y: y * 10, y)

    scene.states.with_state(1, outer)
    return scene.read(y)


def graph_function_in_a_branch(scene):
    x = scene.array(1)
    with scene.states.fork() as fork:
        (y,) = fork.run(scene.states.map, twice, [x])
    return scene.read(y)


@handlepool.graph
def twice(g, x):
    return g.add(x, x)


NESTED = [
    (fork_in_a_branch, (20, 30)),
    (map_in_a_map, (1, 2, 3) * 3),
    (fork_in_with_state, 20),
    (with_state_in_a_branch, 20),
    (with_state_in_with_state, 20),
    (graph_function_in_a_branch, 2),
]


@pytest.mark.parametrize(("scenario", "expected"), NESTED, ids=lambda value: getattr(value, "__name__", ""))
def test_g15_a_region_inside_a_region_is_ordered(scenario, expected):
    assert set(over_seeds(scenario)) == {expected}


@pytest.mark.parametrize("make", [without_starts, without_joins])
@pytest.mark.parametrize(("scenario", "expected"), NESTED, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.unmeasured
def test_g15_control_a_region_inside_a_region_without_waits(scenario, expected, make):
    assert any(result != expected for result in over_seeds(scenario, make=make))


@pytest.mark.parametrize(("scenario", "expected"), NESTED, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("free", [0, 1, 2])
def test_g15_a_region_inside_a_region_runs_inline_where_side_slots_are_short(scenario, expected, free):
    def with_few(scene):
        with ParallelStates(32, pool=scene.pool).fork() as hoard:
            for _ in range(32 - free):
                hoard.run(lambda: None)
            return scenario(scene)

    assert set(over_seeds(with_few, seeds=range(10))) == {expected}


def test_g15_a_branch_and_the_branches_inside_it_have_side_streams_of_their_own():
    with Scene() as scene:

        def pointer():
            return scene.driver.current_stream().ptr

        def outer():
            return [pointer(), *scene.states.map(lambda _: pointer(), range(4))]

        with scene.states.fork() as fork:
            pointers = fork.run(outer)
    assert len(set(pointers)) == 5
    assert scene.stream.ptr not in pointers


def test_g15_forks_forty_deep_have_right_results():
    def scenario(scene):
        def deeper(depth):
            if depth:
                with scene.states.fork() as fork:
                    return fork.run(deeper, depth - 1)
            return scene.array(7)

        return scene.read(deeper(40))

    assert set(over_seeds(scenario, seeds=range(20))) == {7}


def test_g15_forks_may_be_left_in_another_order_than_they_were_entered():
    def scenario(scene):
        first, second = scene.states.fork(), scene.states.fork()
        first.__enter__()
        second.__enter__()
        x, y = first.run(scene.array, 1), second.run(scene.array, 2)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        return scene.read(x), scene.read(y)

    assert set(over_seeds(scenario)) == {(1, 2)}


def test_g15_regions_of_two_pools_over_two_drivers_may_nest(make_driver):
    with Scene() as outer, Scene() as inner:

        def branch():
            x = inner.array(1)
            (y,) = inner.states.map(inner.plus, [x], [1])
            return inner.read(y)

        with outer.states.fork(stream=outer.stream) as fork:
            assert fork.run(branch) == 2


# Streams that a branch makes current or names itself


def temporaries(scene, x):
    """Work with memory that is let go of at once."""
    scene.plus(scene.plus(x, 1), 1)


def a_fork_over_it(scene, other, x):
    with scene.states.fork(stream=other) as fork:
        fork.run(temporaries, scene, x)


def a_fork_inside_it(scene, other, x):
    with other:
        scene.states.map(lambda _: temporaries(scene, x), range(2))


def itself(scene, other, x):
    with other:
        temporaries(scene, x)


def on_a_stream_of_its_own(run, work):
    def scenario(scene):
        other, x = scene.driver.create_stream(), scene.array(1)
        scene.driver.wait_event(other.ptr, scene.stream.record())
        run(scene, lambda: (work(scene, other, x), scene.array())[1])
        values = tuple(scene.read(y) for y in [scene.array(5) for _ in range(6)])
        other.synchronize()
        return values

    return scenario


WORKS = [a_fork_over_it, a_fork_inside_it, itself]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("run", ON_A_SIDE_STREAM)
def test_g8_work_of_a_branch_on_another_stream_has_memory_of_that_stream(run, work):
    assert set(over_seeds(on_a_stream_of_its_own(run, work), seeds=range(40))) == {(5,) * 6}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.unmeasured
def test_g8_control_memory_of_the_outer_regions_is_handed_on_while_that_stream_uses_it(without, work):
    without("streams of regions")
    values = set(over_seeds(on_a_stream_of_its_own(in_a_branch, work), control=True, seeds=range(40)))
    assert values - {(5,) * 6}


def on_another_devices_null_stream(scene):
    """In a branch over a null stream, forks over that of another device, whose pointer is 0 as well.

    While a branch of the second one runs, another thread gives that null stream work that reads what the first one made, and
    frees it.
    """
    made, results = [], []

    def reads_and_frees():
        with scene.driver.device(1):
            results.append(scene.plus(made.pop(), 10))

    def branch():
        with scene.driver.device(1):
            with scene.states.fork() as fork:
                made.append(fork.run(scene.array, 1))
            with scene.states.fork() as fork:
                results.append(fork.run(lambda: (Thread(reads_and_frees).finish(), scene.array(100))[1]))
            return tuple(map(scene.read, results))

    with scene.driver.legacy_stream, scene.states.fork() as fork:
        return fork.run(branch)


def test_g8_a_fork_in_a_branch_over_the_null_stream_of_another_device_is_a_region_of_its_own():
    assert set(over_seeds(on_another_devices_null_stream, seeds=range(20))) == {(11, 100)}


NAMES = FOREIGN | {"itself": lambda driver, stream: stream}


def over_its_own_stream(name, run):
    def scenario(scene):
        other, x, found = scene.driver.create_stream(), scene.array(1), []

        def branch(function):
            with scene.states.fork(stream=NAMES[name](scene.driver, scene.driver.current_stream())) as fork:
                found.append(fork.run(function))

        run(scene, lambda: branch(lambda: scene.plus(x, 1)))
        z = scene.plus(found.pop(), 10)
        with other:
            run(scene, lambda: branch(lambda: scene.put(scene.array(), lambda: 100)))
        value = scene.read(z)
        other.synchronize()
        return value

    return scenario


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", ON_A_SIDE_STREAM)
def test_g8_a_branchs_own_stream_is_its_own_by_whatever_name(name, run):
    assert set(over_seeds(over_its_own_stream(name, run), seeds=range(30))) == {12}


def test_g8_control_memory_of_a_region_over_a_side_stream_is_handed_on_with_it(without):
    without("inherited regions")
    assert set(over_seeds(over_its_own_stream("itself", in_a_branch), control=True, seeds=range(30))) - {12}


def on_the_outer_branchs_stream(work):
    def scenario(scene):
        other, x = scene.driver.create_stream(), scene.array(1)
        scene.driver.wait_event(other.ptr, scene.stream.record())

        def outer():
            mine = scene.driver.current_stream()
            with scene.states.fork() as own:
                with other, scene.states.fork() as fork:
                    fork.run(lambda: work(scene, mine, own, x))
                with other:
                    return [scene.read(y) for y in [scene.array(5) for _ in range(6)]]

        with scene.states.fork() as fork:
            return tuple(fork.run(outer))

    return scenario


def made_current(scene, mine, own, x):
    with mine:
        temporaries(scene, x)


def forked_over(scene, mine, own, x):
    with scene.states.fork(stream=mine) as fork:
        fork.run(temporaries, scene, x)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("work", [made_current, forked_over])
def test_g8_a_branch_inside_that_goes_back_to_the_outer_ones_stream_has_memory_of_the_outer_region(work, short):
    def scenario(scene):
        sides = scene.pool.internals.device(0).sides
        hoard = [sides.lease() for _ in range(30 if short else 0)]
        try:
            return on_the_outer_branchs_stream(work)(scene)
        finally:
            for slot in hoard:
                sides.release(slot, captured=False)

    assert set(over_seeds(scenario, seeds=range(30))) == {(5,) * 6}


def test_g8_control_memory_of_the_inner_region_is_handed_on_while_the_outer_branch_uses_it(monkeypatch, without):
    its = lambda pointer: context.thread.region.allocator if pointer in memory.branch_regions else None  # noqa: E731
    monkeypatch.setattr("handlepool.regions.memory._allocator_of", its)
    # The books would keep the memory, too.
    without("the order of forks")
    values = over_seeds(on_the_outer_branchs_stream(made_current), control=True, seeds=range(30))
    assert set(values) - {(5,) * 6}


def test_nothing_is_lent_after_the_join(make_driver):
    before = set(memory.branch_regions)  # of forks that a lost context ended, in other tests
    with Scene(make_driver()) as scene:
        for run in ON_A_SIDE_STREAM:
            run(scene, lambda: scene.states.map(scene.array, range(3)))
            assert set(memory.branch_regions) == before


def in_two_pools(check):
    def scenario(scene):
        inner = Scene(scene.driver, check=check)
        other, x = scene.driver.create_stream(), scene.array(1)
        with scene.states.fork() as fork:
            ys = fork.run(lambda: inner.states.map(lambda i: scene.plus(x, i), range(2)))
        zs = [scene.plus(y, 10) for y in ys]
        del ys
        with other, scene.states.fork() as fork:
            fork.run(lambda: inner.states.map(lambda i: scene.put(scene.array(), lambda: 100), range(2)))
        values = tuple(map(scene.read, zs))
        other.synchronize()
        inner.pool.close()
        return values

    return scenario


@pytest.mark.parametrize("checks", [(False, True), (True, False), (True, True)])
def test_g8_a_region_inside_a_region_of_a_pool_that_checks_is_a_part_of_it(checks):
    assert set(over_seeds(in_two_pools(checks[1]), seeds=range(30), check=checks[0])) == {(11, 12)}


def test_g8_control_a_region_that_is_no_part_of_the_outer_one_lets_go_too_early(without):
    without("checked drivers of one device")
    with pytest.raises(ContractError, match="not ordered"):
        over_seeds(in_two_pools(True), control=True, seeds=range(30), check=True)


# No lock is held while user code runs


def test_g15_a_branch_holds_up_no_other_thread(make_pool):
    pool = make_pool()
    states = ParallelStates(4, pool=pool)
    inside, go_on = threading.Event(), threading.Event()

    def branch():
        inside.set()
        assert go_on.wait(TIMEOUT)

    def work():
        with pool.driver.create_stream():
            states.map(branch_of_another, range(4))
            pool.get_handle()
            pool.get_workspace(100)
            pool.stats()
            pool.prewarm(states=2)
            pool.trim()
            states.with_state(0, lambda state: None)

    def branch_of_another(_):
        pool.get_workspace(10)

    def hold():
        with pool.driver.create_stream(), states.fork() as fork:
            fork.run(branch)

    holder = Thread(hold)
    assert inside.wait(TIMEOUT)
    Thread(work).finish()
    go_on.set()
    holder.finish()


def test_g15_a_branch_may_wait_for_a_thread_that_forks(make_pool):
    pool = make_pool()
    states = ParallelStates(2, pool=pool)

    def fork_elsewhere():
        with pool.driver.create_stream():
            return states.map(lambda value: value, range(3))

    with pool.driver.create_stream():
        assert states.map(lambda _: Thread(fork_elsewhere).finish(), range(3)) == [[0, 1, 2]] * 3


# Library code in a region: the side slot's own handle and scratch


@pytest.mark.parametrize("region", ["fork", "map", "with_state"])
def test_g15_get_handle_and_get_workspace_in_a_region_give_the_side_slots_own(region):
    with Scene() as scene:
        pool, pointer = scene.pool, scene.driver.array_pointer
        mine = pool.get_handle(), pointer(pool.get_workspace(1000))

        def library(*_):
            handle, scratch = pool.get_handle(), pool.get_workspace(1000)
            assert handle.stream == scene.driver.current_stream().ptr
            assert handle is pool.get_handle() is pool.internals.slot().handle
            return handle, pointer(scratch)

        if region == "fork":
            with scene.states.fork() as fork:
                found = [fork.run(library) for _ in range(4)]
        elif region == "map":
            found = scene.states.map(library, range(4))
        else:
            found = [scene.states.with_state(1, library)]
        assert len({id(handle) for handle, _ in [mine, *found]}) == len(found) + 1
        assert len({scratch for _, scratch in [mine, *found]}) == len(found) + 1
        assert (pool.get_handle(), pointer(pool.get_workspace(1000))) == mine


def test_g15_an_inline_branch_has_the_callers_handle():
    with Scene() as scene, ParallelStates(32, pool=scene.pool).fork() as hoard:
        for _ in range(32):
            hoard.run(lambda: None)
        assert scene.states.map(lambda _: scene.pool.get_handle(), [0]) == [scene.pool.get_handle()]
        assert scene.states.with_state(0, lambda state: state.handle) is scene.pool.get_handle()


def test_g15_a_handle_that_a_branch_destroyed_is_replaced_for_the_next():
    with Scene(count=1) as scene:
        used = []

        def branch():
            used.append(scene.pool.get_handle())
            scene.driver.use_handle(used[-1], lambda: None)
            scene.driver.destroy_handle(used[-1])

        scene.states.map(lambda _: branch(), range(2))
        scene.states.map(lambda _: branch(), range(2))
        assert len({id(handle) for handle in used}) == 4


@pytest.mark.parametrize("form", ["run", "map", "a map of a graph function"])
def test_g6_a_fork_that_outlives_the_branch_it_was_entered_in_is_refused(form):
    with Scene() as scene:
        ran = []
        xs = [scene.array(value) for value in (1, 2)]
        scene.states.map(twice, xs)

        def branches():
            with scene.states.fork() as fork:
                for value in (1, 2):
                    if form == "run":
                        ran.append(fork.run(scene.array, value))
                    else:
                        ran.append(fork.map(scene.plus, xs, [1, 2]) if form == "map" else fork.map(twice, xs))
                    yield

        with scene.states.fork() as outer:
            left_open, side = outer.run(lambda: (found := branches(), scene.driver.current_stream(), next(found))[:2])
        with side, pytest.raises(OwnershipError, match="was left first"):
            next(left_open)
        assert len(ran) == 1
        assert scene.pool.stats()["handles_leased"] == 0


@pytest.mark.parametrize("how", ["an error of the body", "left after the outer one"])
def test_g6_a_fork_that_is_left_after_the_branch_it_was_entered_in_says_so_and_an_error_of_the_body_goes_on(how):
    with Scene() as scene:

        def branches():
            with scene.states.fork() as fork:
                yield fork.run(scene.array, 1)

        with scene.states.fork() as outer:
            left_open = outer.run(lambda: (found := branches(), next(found))[0])
        if how == "an error of the body":
            with pytest.raises(LookupError, match="the body's own"):
                left_open.throw(LookupError("the body's own"))
        else:
            with pytest.raises(OwnershipError, match="was left first"):
                next(left_open)
        assert scene.pool.stats()["handles_leased"] == 0
