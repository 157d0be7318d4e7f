"""Guarantee 8: memory outlives its readers. The host driver's arenas are as careless as CuPy's: a freed block is reused at once.

Each control takes one care away and must give wrong results.
"""

import functools

import pytest
from harness.scenes import Scene, Thread, over_seeds

from handlepool.pool import context
from handlepool.regions import memory


def keeps_nothing(scene):
    scene.driver.keeps = False


def has_no_edges(scene):
    scene.driver.edges = False


@pytest.fixture
def forget(monkeypatch):
    """Empties a region's list of what is kept when the control asks for it."""

    def forgetful(scene):
        monkeypatch.setattr(memory.Region, "keep_call", lambda *_: None)

    return forgetful


# What a branch reads


def an_argument_is_dropped(scene):
    """The body drops an argument and gives its block, from the caller's arena, to another array."""
    x, y = scene.array(1), scene.array()
    with scene.states.fork() as fork:
        fork.run(scene.put, y, lambda value: value + 1, x)
        del x
        scene.array(100)
    return scene.read(y)


def test_g8_arguments_are_kept_to_the_join():
    assert set(over_seeds(an_argument_is_dropped)) == {2}


def test_g8_control_an_argument_that_is_not_kept_is_overwritten(forget):
    assert 101 in over_seeds(an_argument_is_dropped, make=forget)


def test_g8_after_the_join_its_block_may_be_reused_on_the_callers_stream():
    def scenario(scene):
        x, y = scene.array(1), scene.array()
        address = scene.driver.array_pointer(x)
        with scene.states.fork() as fork:
            fork.run(scene.put, y, lambda value: value + 1, x)
        del x
        other = scene.array(100)
        assert scene.driver.array_pointer(other) == address
        return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def a_closure_is_rebound(scene):
    """A branch reads a variable of its closure, which the body rebinds, as a loop does."""
    x, y = scene.array(1), scene.array()

    def branch():
        scene.put(y, lambda value: value + 1, x)

    with scene.states.fork() as fork:
        fork.run(branch)
        x = None
        scene.array(100)
    return scene.read(y)


def test_g8_what_a_closure_held_when_the_branch_was_run_is_kept():
    assert set(over_seeds(a_closure_is_rebound)) == {2}


def test_g8_control_a_closure_that_is_not_kept(forget):
    assert 101 in over_seeds(a_closure_is_rebound, make=forget)


class Reader:
    def __init__(self, scene):
        self.scene, self.x = scene, scene.array(1)

    def __call__(self, y):
        self.scene.put(y, lambda value: value + 1, self.x)

    def method(self, y):
        self(y)


@pytest.mark.parametrize(
    "callable_of",
    [lambda x: x, lambda x: x.method, lambda x: functools.partial(x.method), lambda x: functools.partial(functools.partial(x))],
    ids=["callable", "method", "partial of a method", "partial of a partial"],
)
def test_g8_the_function_is_kept(callable_of):
    def scenario(scene):
        y, reader = scene.array(), Reader(scene)
        with scene.states.fork() as fork:
            fork.run(callable_of(reader), y)
            del reader
            scene.array(100)
        return scene.read(y)

    assert set(over_seeds(scenario)) == {2}


def test_g8_control_a_function_that_is_not_kept(forget):
    def scenario(scene):
        y, reader = scene.array(), Reader(scene)
        with scene.states.fork() as fork:
            fork.run(reader.method, y)
            del reader
            scene.array(100)
        return scene.read(y)

    assert 101 in over_seeds(scenario, make=forget)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "control"])
def test_g8_the_closure_below_partials_and_methods_is_kept(kept, forget):
    def scenario(scene):
        x, y = scene.array(1), scene.array()

        class Owner:
            def method(self):
                scene.put(y, lambda value: value + 1, x)

        with scene.states.fork() as fork:
            fork.run(functools.partial(Owner().method))
            x = None
            scene.array(100)
        return scene.read(y)

    results = set(over_seeds(scenario, make=None if kept else forget))
    assert results == {2} if kept else 101 in results


def test_g8_a_closure_cell_without_a_value_yet_is_no_error():
    with Scene() as scene, scene.states.fork() as fork:

        def branch():
            return later if scene is None else 1

        assert fork.run(branch) == 1
        later = None


# What a branch allocates


def temporaries(scene):
    """Each branch has a temporary that it drops while queued work reads it."""
    outputs = [scene.array() for _ in range(4)]

    def branch(y, value):
        temporary = scene.array(value)
        scene.put(y, lambda x: x + 1, temporary)

    scene.states.map(branch, outputs, range(4))
    return tuple(scene.read(y) for y in outputs)


def test_g8_what_a_branch_allocates_is_kept():
    assert set(over_seeds(temporaries)) == {(1, 2, 3, 4)}


def test_g8_control_a_temporary_that_is_not_kept_is_shared_by_branches():
    assert len(set(over_seeds(temporaries, make=keeps_nothing))) > 1


def test_g8_what_a_branch_allocates_comes_from_the_outermost_callers_arena():
    with Scene() as scene:

        def inner():
            return scene.driver.array_pointer(scene.array(size=100))

        def outer():
            return [scene.driver.array_pointer(scene.array(size=100)), *scene.states.map(lambda _: inner(), range(2))]

        with scene.states.fork() as fork:
            addresses = fork.run(outer)
        assert len(set(addresses)) == 3
        mine = [scene.array(size=100) for _ in range(3)]
        assert {scene.driver.array_pointer(array) for array in mine} == set(addresses)


def an_output_is_freed_after_the_join(scene):
    """An output goes back to the arena it came from, while the caller's stream still reads it; a next fork allocates."""
    with scene.states.fork() as fork:
        x = fork.run(scene.array, 1)
    y = scene.plus(x, 1)
    del x
    with scene.states.fork() as fork:
        z = fork.run(scene.array, 100)
    return scene.read(y), scene.read(z)


def test_g8_an_output_may_be_freed_after_the_join():
    assert set(over_seeds(an_output_is_freed_after_the_join)) == {(2, 100)}


def test_g8_control_an_output_of_the_side_streams_arena_is_overwritten():
    """As an allocator that leaves branches alone would do: what they make belongs to the side stream."""

    def make(scene):
        scene.driver.swap_allocator = lambda allocator: None

    def scenario(scene):
        with scene.states.fork() as fork:
            x = fork.run(scene.array, 1)
        y = scene.array()
        scene.put(y, lambda value: value + 1, x)
        del x
        with scene.states.fork(stream=scene.driver.create_stream()) as fork:
            fork.run(scene.array, 100)
        return scene.read(y)

    assert 101 in over_seeds(scenario, make=make)


def another_thread_frees_a_block(scene):
    """While a branch is under way, another thread gives the caller's stream work that reads a block, and frees the block."""
    y = scene.array()

    def other():
        with scene.stream:
            x = scene.array(1)
            scene.put(y, lambda value: value + 1, x)
            return scene.driver.array_pointer(x)

    def branch():
        freed = Thread(other).finish()
        z = scene.array(100)
        assert scene.driver.array_pointer(z) == freed
        return z

    with scene.states.fork() as fork:
        fork.run(branch)
    return scene.read(y)


def test_g8_an_allocation_in_a_branch_waits_for_what_the_callers_stream_was_given():
    assert set(over_seeds(another_thread_frees_a_block)) == {2}


def test_g8_control_without_the_edge_after_an_allocation():
    assert 101 in over_seeds(another_thread_frees_a_block, make=has_no_edges)


# To the join of the outermost fork


def an_inner_argument_is_dropped(scene, isolated=False):
    """A branch forks, and drops an inner branch's argument after the inner join, which the caller's stream has not waited for."""
    y, box = scene.array(), [scene.array(1)]

    def outer():
        region = context.thread.region
        if isolated:
            context.thread.region = None
        with scene.states.fork() as fork:
            fork.run(scene.put, y, lambda value: value + 1, box.pop())
        context.thread.region = region

    with scene.states.fork() as fork:
        fork.run(outer)
        scene.array(100)
    return scene.read(y)


def test_g8_what_an_inner_branch_reads_is_kept_to_the_join_of_the_outermost_fork():
    assert set(over_seeds(an_inner_argument_is_dropped)) == {2}


def test_g8_control_a_region_that_ends_with_the_inner_join():
    assert 101 in over_seeds(lambda scene: an_inner_argument_is_dropped(scene, isolated=True), control=True)
