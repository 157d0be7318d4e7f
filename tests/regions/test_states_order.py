"""Guarantee 6: a fork orders. Each control leaves one wait out and must go wrong."""

import numpy as np
import pytest
from harness.scenes import CarelessDriver, Scene, over_seeds, without_joins, without_starts


class BranchError(Exception):
    pass


def distinct(results):
    """As texts, since NaN (memory that nobody has written) equals nothing."""
    return set(map(str, results))


# A branch starts after what the caller's stream had been given


def reads_the_caller(scene):
    # The branch allocates nothing: an allocation is followed by a wait of its own.
    x, y = scene.array(1), scene.array()
    scene.put(x, lambda value: value + 1, x)
    with scene.states.fork() as fork:
        fork.run(scene.put, y, lambda value: value + 10, x)
    return scene.read(y)


def test_g6_a_branch_starts_after_what_the_callers_stream_was_given():
    assert set(over_seeds(reads_the_caller)) == {12}


def test_g6_control_without_the_start_wait_a_branch_reads_too_early():
    assert len(distinct(over_seeds(reads_the_caller, make=without_starts))) > 1


def reads_the_body(scene):
    x, early, late = scene.array(1), scene.array(), scene.array()
    sides = []

    def branch(out, value):
        sides.append(scene.driver.current_stream())
        scene.put(out, lambda x: x + value, x)

    with scene.states.fork() as fork:
        fork.run(branch, early, 10)
        sides[0].synchronize()
        scene.put(x, lambda: 2)
        fork.run(branch, late, 20)
    for side in sides:
        side.synchronize()
    return scene.read(early), scene.read(late)


def test_g6_a_branch_starts_after_what_the_body_gave_the_callers_stream_before_it_was_run():
    assert set(over_seeds(reads_the_body)) == {(11, 22)}


def test_g6_control_one_start_event_for_all_branches_of_a_fork_is_too_early(monkeypatch):
    record = CarelessDriver.record_event

    def make(scene):
        recorded = []

        def only_the_first_on_the_callers_stream(driver, event, pointer):
            if pointer == scene.stream.ptr:
                recorded.append(event)
            if pointer != scene.stream.ptr or len(recorded) == 1:
                record(driver, event, pointer)

        monkeypatch.setattr(CarelessDriver, "record_event", only_the_first_on_the_callers_stream)

    assert len(distinct(over_seeds(reads_the_body, make=make))) > 1


# What the caller's stream is given after the fork starts after every branch


def read_after_the_fork(scene):
    with scene.states.fork() as fork:
        outputs = [fork.run(scene.array, value) for value in range(6)]  # more branches than states
    return tuple(scene.read(scene.plus(output, 1)) for output in outputs)


def test_g6_what_comes_after_the_fork_starts_after_every_branch():
    assert set(over_seeds(read_after_the_fork)) == {(1, 2, 3, 4, 5, 6)}


def test_g6_control_without_the_join_wait_the_caller_reads_too_early():
    assert len(distinct(over_seeds(read_after_the_fork, make=without_joins))) > 1


def overwrites_after_the_fork(scene):
    x, y = scene.array(1), scene.array()
    with scene.states.fork() as fork:
        fork.run(scene.put, y, lambda value: value + 1, x)
    scene.put(x, lambda: 100)
    return scene.read(y)


def test_g6_what_a_branch_reads_may_be_overwritten_after_the_fork():
    assert set(over_seeds(overwrites_after_the_fork)) == {2}


def test_g6_control_without_the_join_wait_it_is_overwritten_under_the_branch():
    def scenario(scene):
        x, y, sides = scene.array(1), scene.array(), []

        def branch():
            sides.append(scene.driver.current_stream())
            scene.put(y, lambda value: value + 1, x)

        with scene.states.fork() as fork:
            fork.run(branch)
        scene.put(x, lambda: 100)
        sides[0].synchronize()
        return scene.read(y)

    assert 101 in over_seeds(scenario, make=without_joins)


def maps(scene):
    x, outputs = scene.array(5), [scene.array() for _ in range(6)]
    scene.states.map(lambda y, value: scene.put(y, lambda x: x + value, x), outputs, range(6))
    return tuple(scene.read(output) for output in outputs)


def test_g6_map_orders_in_and_out():
    assert set(over_seeds(maps)) == {(5, 6, 7, 8, 9, 10)}


def test_g6_map_gives_results_in_order():
    with Scene() as scene:
        assert scene.states.map(lambda *values: values, "abcdefg", range(9)) == list(zip("abcdefg", range(7), strict=True))


@pytest.mark.parametrize("make", [without_starts, without_joins])
def test_g6_control_map_without_a_wait(make):
    assert len(distinct(over_seeds(maps, make=make))) > 1


def with_a_state(scene):
    x, y = scene.array(5), scene.array()
    scene.states.with_state(2, lambda state: scene.put(y, lambda x: x + 1, x))
    return scene.read(y)


def test_g6_with_state_orders_in_and_out():
    assert set(over_seeds(with_a_state)) == {6}


@pytest.mark.parametrize("make", [without_starts, without_joins])
def test_g6_control_with_state_without_a_wait(make):
    assert len(distinct(over_seeds(with_a_state, make=make))) > 1


def test_g6_a_fork_of_a_stream_that_is_given_orders_with_that_stream():
    def scenario(scene):
        other = scene.driver.create_stream()
        with other:
            x = scene.array(1)
        with scene.states.fork(stream=other) as fork:
            y = fork.run(scene.plus, x, 1)
        with other:
            return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g6_control_a_fork_of_another_stream_than_the_one_that_reads():
    def scenario(scene):
        other = scene.driver.create_stream()
        with scene.states.fork(stream=other) as fork:
            y = fork.run(scene.array, 1)
        return scene.read(y)

    assert len(distinct(over_seeds(scenario, control=True))) > 1


def test_g6_on_the_null_stream():
    def scenario(scene):
        with scene.driver.legacy_stream:
            x = scene.array(1)
            with scene.states.fork() as fork:
                y = fork.run(scene.plus, x, 1)
            return float(np.unique(np.array(y))[0])  # no wait: the null stream has run what it was given

    assert set(over_seeds(scenario)) == {2}


def test_g6_on_the_per_thread_default_stream():
    def scenario(scene):
        with scene.driver.per_thread_stream:
            x = scene.array(1)
            with scene.states.fork() as fork:
                y = fork.run(scene.plus, x, 1)
            return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g6_a_fork_on_the_second_device_orders_there():
    def scenario(scene):
        with scene.driver.device(1), scene.driver.create_stream():
            x = scene.array(1)
            with scene.states.fork() as fork:
                y = fork.run(scene.plus, x, 1)
            return scene.read(y), scene.driver.array_device(y)

    assert set(over_seeds(scenario)) == {(2, 1)}


def test_g6_a_body_that_makes_another_device_current_changes_nothing_for_its_branches():
    def scenario(scene):
        with scene.driver.legacy_stream:  # whose pointer means another stream on another device
            x = scene.array(1)
            with scene.states.fork() as fork, scene.driver.device(1):
                y = fork.run(scene.plus, x, 1)
                assert scene.driver.current_device() == 1
            return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g6_a_fork_that_is_left_on_another_device_joins_on_its_own():
    def scenario(scene):
        with scene.driver.legacy_stream:
            fork = scene.states.fork()
            fork.__enter__()
            y = fork.run(scene.array, 3)
            with scene.driver.device(1):
                fork.__exit__(None, None, None)
            return scene.read(y)

    assert set(over_seeds(scenario)) == {3}


# The join is made first, then the exception goes on


def raises(scene, error, where):
    x, outputs = scene.array(1), []

    def branch(value):
        outputs.append(scene.plus(x, value))
        if where == "branch" and value == 20:
            raise error("from a branch")

    with pytest.raises(error, match="from"), scene.states.fork() as fork:  # noqa: PT012
        fork.run(branch, 10)
        fork.run(branch, 20)
        raise error("from the body")
    return tuple(scene.read(output) for output in outputs)


@pytest.mark.parametrize("error", [BranchError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["branch", "body"])
def test_g6_the_join_is_made_before_an_exception_goes_on(where, error):
    assert set(over_seeds(lambda scene: raises(scene, error, where))) == {(11, 21)}


@pytest.mark.parametrize("where", ["branch", "body"])
def test_g6_control_an_exception_that_skips_the_join(where):
    assert len(distinct(over_seeds(lambda scene: raises(scene, BranchError, where), make=without_joins))) > 1


def test_g6_the_very_exception_of_a_branch_is_raised():
    error = BranchError()

    def branch():
        raise error

    with Scene() as scene, pytest.raises(BranchError) as raised, scene.states.fork() as fork:
        fork.run(branch)
    assert raised.value is error


def test_g6_a_branch_after_one_that_failed_runs():
    def branch():
        raise BranchError

    def scenario(scene):
        with scene.states.fork() as fork:
            with pytest.raises(BranchError):
                fork.run(branch)
            y = fork.run(scene.array, 4)
        return scene.read(y)

    assert set(over_seeds(scenario, seeds=range(20))) == {4}


def test_g6_an_iterable_that_raises_in_map_leaves_the_branches_before_it_joined():
    def scenario(scene):
        outputs = []

        def values():
            yield 1
            yield 2
            raise BranchError

        with pytest.raises(BranchError):
            scene.states.map(lambda value: outputs.append(scene.array(value)), values())
        return tuple(scene.read(output) for output in outputs)

    assert set(over_seeds(scenario)) == {(1, 2)}


def test_g6_when_a_join_fails_every_other_branch_is_joined():
    def scenario(scene):
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as fork:  # noqa: PT012
            outputs = [fork.run(scene.array, value) for value in range(3)]
            scene.driver.fail_at(1, "record_event")  # the first branch's end
        return tuple(scene.read(output) for output in outputs[1:])

    assert set(over_seeds(scenario)) == {(1, 2)}


def test_g6_after_a_join_that_failed_the_states_serve_the_next_fork():
    with Scene(count=32) as scene:
        with pytest.raises(RuntimeError, match="injected"), scene.states.fork() as fork:  # noqa: PT012
            fork.run(scene.array, 1)
            scene.driver.fail_at(1, "wait_event")
        streams = set(scene.states.map(lambda _: scene.driver.current_stream().ptr, range(32)))
        assert len(streams) == 32
