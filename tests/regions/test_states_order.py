"""Guarantee 6: a fork orders. Each control leaves one wait out and must go wrong."""

import pytest
from harness.scenes import BranchError, CarelessDriver, Scene, over_seeds, without_joins, without_starts


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


def overwrites_after_the_fork(scene):
    x, y, sides = scene.array(1), scene.array(), []

    def branch():
        sides.append(scene.driver.current_stream())
        scene.put(y, lambda value: value + 1, x)

    with scene.states.fork() as fork:
        fork.run(branch)
    scene.put(x, lambda: 100)
    sides[0].synchronize()
    return scene.read(y)


def maps(scene):
    x, outputs = scene.array(5), [scene.array() for _ in range(6)]
    scene.states.map(lambda y, value: scene.put(y, lambda x: x + value, x), outputs, range(6))
    return tuple(scene.read(output) for output in outputs)


def with_a_state(scene):
    x, y = scene.array(5), scene.array()
    scene.states.with_state(2, lambda state: scene.put(y, lambda x: x + 1, x))
    return scene.read(y)


def a_fork_on(stream_of, device=0):
    def scenario(scene):
        with scene.driver.device(device), stream_of(scene.driver):
            x = scene.array(1)
            with scene.states.fork() as fork:
                y = fork.run(scene.plus, x, 1)
            return scene.read(y), scene.driver.array_device(y)

    return scenario


def a_stream_that_is_given(scene):
    other = scene.driver.create_stream()
    with other:
        x = scene.array(1)
    with scene.states.fork(stream=other) as fork:
        y = fork.run(scene.plus, x, 1)
    with other:
        return scene.read(y)


def a_body_on_another_device(scene):
    with scene.driver.legacy_stream:  # whose pointer means another stream on another device
        x = scene.array(1)
        with scene.states.fork() as fork, scene.driver.device(1):
            y = fork.run(scene.plus, x, 1)
            assert scene.driver.current_device() == 1
        return scene.read(y)


def left_on_another_device(scene):
    with scene.driver.legacy_stream:
        fork = scene.states.fork().__enter__()
        y = fork.run(scene.array, 3)
        with scene.driver.device(1):
            fork.__exit__(None, None, None)
        return scene.read(y)


ORDERED = {
    reads_the_caller: 12,
    reads_the_body: (11, 22),
    read_after_the_fork: (1, 2, 3, 4, 5, 6),
    overwrites_after_the_fork: 2,
    maps: (5, 6, 7, 8, 9, 10),
    with_a_state: 6,
    a_stream_that_is_given: 2,
    a_fork_on(lambda driver: driver.legacy_stream): (2, 0),
    a_fork_on(lambda driver: driver.per_thread_stream): (2, 0),
    a_fork_on(lambda driver: driver.create_stream(), device=1): (2, 1),
    a_body_on_another_device: 2,
    left_on_another_device: 3,
}
CONTROLS = [
    (reads_the_caller, without_starts),
    (read_after_the_fork, without_joins),
    (overwrites_after_the_fork, without_joins),
    *((scenario, make) for scenario in (maps, with_a_state) for make in (without_starts, without_joins)),
]


@pytest.mark.parametrize(("scenario", "expected"), ORDERED.items())
def test_g6_a_fork_orders(scenario, expected):
    assert set(over_seeds(scenario)) == {expected}


@pytest.mark.parametrize(("scenario", "make"), CONTROLS)
def test_g6_control_without_a_wait(scenario, make):
    assert len(distinct(over_seeds(scenario, make=make))) > 1


def test_g6_control_a_fork_of_another_stream_than_the_one_that_reads():
    def scenario(scene):
        other = scene.driver.create_stream()
        with scene.states.fork(stream=other) as fork:
            y = fork.run(scene.array, 1)
        return scene.read(y)

    assert len(distinct(over_seeds(scenario, control=True))) > 1


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
