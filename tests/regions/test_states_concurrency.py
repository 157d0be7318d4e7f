"""Guarantee 7: branches are concurrent; many threads, and fewer side slots than branches (guarantees 1 and 6)."""

import pytest
from harness.graphs import double
from harness.scenes import Scene, Thread, over_seeds

from handlepool import ParallelStates
from handlepool.graphs import launch as calls

# Branches are concurrent


def two_branches(scene):
    log = []

    def branch(name):
        scene.driver.enqueue(scene.driver.current_stream().ptr, lambda: log.append(name))

    with scene.states.fork() as fork:
        fork.run(branch, "first")
        fork.run(branch, "second")
    scene.stream.synchronize()
    return tuple(log)


def test_g7_two_branches_on_different_side_slots_run_in_either_order():
    assert set(over_seeds(two_branches)) == {("first", "second"), ("second", "first")}


def test_g7_control_two_branches_of_one_state_run_one_after_the_other():
    assert set(over_seeds(two_branches, count=1)) == {("first", "second")}


def test_g7_branches_take_the_states_in_turn():
    with Scene(count=3) as scene:
        streams = scene.states.map(lambda _: scene.driver.current_stream().ptr, range(7))
    assert streams == (streams[:3] * 3)[:7]
    assert len(set(streams)) == 3


@pytest.mark.parametrize("form", ["run", "map"])
def test_g7_branches_of_a_graph_function_that_is_known_take_the_states_in_turn(monkeypatch, form):
    with Scene(count=3) as scene:
        xs, pointers = [scene.array(1) for _ in range(7)], []
        scene.states.map(double, xs)
        launch = calls.launch

        def noting(pool, plan, slot, operands, given, **more):
            pointers.append(slot.pointer)
            launch(pool, plan, slot, operands, given, **more)

        monkeypatch.setattr(calls, "launch", noting)
        with scene.states.fork() as fork:
            if form == "map":
                fork.map(double, xs)
            else:
                for x in xs:
                    fork.run(double, x)
    assert pointers == (pointers[:3] * 3)[:7]
    assert len(set(pointers)) == 3


def test_g7_a_branch_that_is_held_up_does_not_hold_up_its_sibling(make_driver):
    with Scene(make_driver()) as scene:

        def held():
            latches.append(scene.driver.latch(scene.driver.current_stream().ptr))
            return scene.array(1)

        def free():
            streams.append(scene.driver.current_stream())
            return scene.array(2)

        latches, streams = [], []
        with scene.states.fork() as fork:
            first = fork.run(held)
            second = fork.run(free)
            streams[0].synchronize()  # the sibling's work is done
            assert not latches[0].passed
            latches[0].release()
        assert (scene.read(first), scene.read(second)) == (1, 2)


def test_g7_leaving_a_fork_does_not_wait_for_the_device(make_driver):
    with Scene(make_driver()) as scene:
        with scene.states.fork() as fork:
            y, latch = fork.run(lambda: (scene.array(1), scene.driver.latch(scene.driver.current_stream().ptr)))
        assert not latch.passed
        assert not scene.stream.done
        latch.release()
        assert scene.read(y) == 1


def test_g7_states_of_one_thread_never_overlap_in_with_state():
    def scenario(scene):
        log = []

        def branch(state, name):
            scene.driver.enqueue(state.stream.ptr, lambda: log.append(name))

        for index, name in ((0, "first"), (1, "second")):
            scene.states.with_state(index, branch, name)
        scene.stream.synchronize()
        return tuple(log)

    assert set(over_seeds(scenario)) == {("first", "second")}


def test_g7_branches_of_two_forks_in_a_row_are_in_order():
    def scenario(scene):
        x = scene.array(0)
        for value in range(1, 4):
            scene.states.map(lambda array, value=value: scene.put(array, lambda old: old * 10 + value, array), [x])
        return scene.read(x)

    assert set(over_seeds(scenario)) == {123}


# Several threads over one ParallelStates


def test_g6_several_threads_may_use_one_parallel_states_at_a_time(make_pool, scheduler):
    pool = make_pool(scheduler=scheduler)
    states = ParallelStates(4, pool=pool)

    def work(number):
        scene = Scene.__new__(Scene)
        scene.driver, scene.pool, scene.states, scene.stream = pool.driver, pool, states, pool.driver.create_stream()
        results = []
        with scene.stream:
            for turn in range(10):
                x = scene.array(number * 100)
                results.append([scene.read(y) for y in states.map(scene.plus, [x] * 5, range(turn, turn + 5))])
        return results

    threads = [Thread(work, number) for number in range(6)]
    for number, thread in enumerate(threads):
        assert thread.finish() == [[number * 100 + turn + i for i in range(5)] for turn in range(10)]
    assert pool.stats()["handles_leased"] == 0


# More branches at a time than there are side slots


@pytest.mark.parametrize("taken", [30, 31, 32])
def test_g6_a_fork_that_finds_fewer_side_slots_has_the_same_results(taken):
    def scenario(scene):
        x = scene.array(1)
        with ParallelStates(32, pool=scene.pool).fork() as hoard:
            for _ in range(taken):
                hoard.run(lambda: None)
            outputs = scene.states.map(scene.plus, [x] * 6, range(6))
            streams = set(scene.states.map(lambda _: scene.driver.current_stream().ptr, range(6)))
        assert len(streams) == max(1, 32 - taken)
        assert (scene.stream.ptr in streams) is (taken == 32)
        return tuple(scene.read(output) for output in outputs)

    assert set(over_seeds(scenario, seeds=range(15))) == {(1, 2, 3, 4, 5, 6)}


def test_g6_a_branch_that_runs_inline_leaves_a_stream_of_the_body_current():
    with Scene() as scene, ParallelStates(32, pool=scene.pool).fork() as hoard:
        for _ in range(32):
            hoard.run(lambda: None)
        other = scene.driver.create_stream()
        with scene.states.fork() as fork, other:
            assert fork.run(scene.driver.current_stream) is scene.stream
            assert scene.driver.current_stream() is other


def test_g6_side_slots_that_come_back_serve_a_fork_that_began_without():
    with Scene() as scene:
        with ParallelStates(32, pool=scene.pool).fork() as hoard:
            for _ in range(32):
                hoard.run(lambda: None)
            late = scene.states.fork()
            late.__enter__()
            assert late.run(scene.driver.current_stream) is scene.stream
        assert late.run(scene.driver.current_stream) is not scene.stream
        late.__exit__(None, None, None)
