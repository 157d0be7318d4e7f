"""What a program's graph reads lives as long as the program, wherever the recorded function has it from."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from harness.graphs import plus
from harness.scenes import Scene

import handlepool


class Adding:
    """Has an array as an attribute."""

    def __init__(self, scene, y):
        self.scene, self.y = scene, y

    def add(self, x):
        return self.scene.put(self.scene.array(), np.add, x, self.y)


def closure(scene, y):
    return lambda x: scene.put(scene.array(), np.add, x, y)


def inner_closure(scene, y):
    add = closure(scene, y)
    return lambda x: add(x)


def default(scene, y):
    return lambda x, y=y: scene.put(scene.array(), np.add, x, y)


def keyword_default(scene, y):
    return lambda x, *, y=y: scene.put(scene.array(), np.add, x, y)


def of_a_partial(scene, y):
    return partial(lambda y, x: scene.put(scene.array(), np.add, x, y), y)


def of_a_method(scene, y):
    return Adding(scene, y).add


def in_containers(scene, y):
    held = {"y": [(y,)]}
    return lambda x: scene.put(scene.array(), np.add, x, held["y"][0][0])


READERS = [closure, inner_closure, default, keyword_default, of_a_partial, of_a_method, in_containers]


def itself(scene, add, x):
    return handlepool.record(lambda: [add(x)], pool=scene.pool)


def mapped(scene, add, x):
    return handlepool.record(scene.states.map, add, [x, x, x])


def partially_mapped(scene, add, x):
    return handlepool.record(partial(scene.states.map, add), [x, x], pool=scene.pool)


def in_a_fork(scene, add, x):
    def body(x):
        with scene.states.fork() as fork:
            return [fork.run(add, x) for _ in range(3)]

    return handlepool.record(body, x, pool=scene.pool)


def in_a_fork_in_a_branch(scene, add, x):
    def inner(x):
        with scene.states.fork() as fork:
            return fork.run(add, x)

    return handlepool.record(scene.states.map, inner, [x, x])


def on_a_state(scene, add, x):
    return handlepool.record(lambda: [scene.states.with_state(1, lambda state, x: add(x), x)], pool=scene.pool)


def where_no_state_is_free(scene, add, x):
    sides = scene.pool.internals.device(0).sides
    scene.pool.prewarm(states=32)
    leased = [sides.lease() for _ in range(31)]  # the one that is left is what is captured
    try:
        return mapped(scene, add, x)
    finally:
        for slot in leased:
            sides.release(slot, captured=False)


RECORDED = [itself, mapped, partially_mapped, in_a_fork, in_a_fork_in_a_branch, on_a_state, where_no_state_is_free]


def forgotten(scene, reader, record):
    """A program of ``x + 40``, where nobody else has the 40 any more, and what it gives after other work."""
    y = scene.array(40)
    alive = weakref.ref(y)
    program = record(scene, reader(scene, y), scene.array(1))
    del y
    gc.collect()
    others = [scene.array(9) for _ in range(8)]
    program.replay()
    results = [scene.read(out) for out in program.outputs]
    del others
    program.close()
    return results, alive


@pytest.mark.parametrize("record", RECORDED)
@pytest.mark.parametrize("reader", READERS)
def test_what_a_recorded_call_reads_is_kept_to_the_close(make_driver, reader, record):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        results, alive = forgotten(scene, reader, record)
        assert results
        assert set(results) == {41}
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("record", RECORDED)
def test_control_where_it_is_not_kept_replays_read_what_came_there(make_driver, without, record):
    without("kept values")
    with Scene(make_driver(scheduler="adversarial")) as scene:
        results, _ = forgotten(scene, closure, record)
        assert 41 not in results


@pytest.mark.parametrize("branch", ["python", "graph"])
def test_what_a_branch_was_given_is_kept_though_the_attribute_that_had_it_is_cleared(make_driver, branch):
    with Scene(make_driver(scheduler="adversarial")) as scene:
        holder = SimpleNamespace(y=scene.array(40))
        add = plus if branch == "graph" else lambda x, y: scene.put(scene.array(), np.add, x, y)

        def body(x):
            with scene.states.fork() as fork:
                return fork.run(add, x, holder.y)

        with handlepool.record(body, scene.array(1), pool=scene.pool) as program:
            holder.y = None
            others = [scene.array(9) for _ in range(8)]
            program.replay()
            assert scene.read(program.outputs) == 41
            del others


def test_temporaries_of_branches_are_not_kept_and_their_memory_serves_those_that_follow(make_driver):
    with Scene(make_driver(scheduler="adversarial")) as scene:

        def layers(count, x):
            for _ in range(count):
                x, _ = scene.states.map(lambda x: scene.plus(scene.plus(x, 1), 1), [x, x])
            return x

        sizes = []
        for count in (2, 20):
            with handlepool.record(layers, count, scene.array(1), pool=scene.pool) as program:
                program.replay()
                assert scene.read(program.outputs) == 1 + 2 * count
                sizes.append(program.nbytes)
        assert sizes[0] == sizes[1] > 0
