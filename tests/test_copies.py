"""What owns handles, streams, threads or memory is neither copied nor pickled: two would give the same things back."""

import copy
import gc
import pickle

import numpy as np
import pytest

from handlepool import ParallelStateExecutor, ParallelStates, graph

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "of old": lambda value: pickle.dumps(value, 0)}


def refuse(way, value, *holders):
    for each in (value, *holders):
        with pytest.raises(TypeError, match="cannot be copied or pickled; "):
            way(each)
    gc.collect()  # what came of the attempt ends without a word


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_g1_a_fork_is_not_copied_and_no_two_forks_share_a_slot(scene, way):
    with scene.states.fork() as fork:
        fork.run(lambda: None)
        refuse(way, fork)
    with scene.states.fork() as one, scene.states.fork() as other:
        handles = [fork.run(scene.pool.get_handle) for fork in (one, other, one, other)]
    assert len(set(map(id, handles))) == 4
    refuse(way, one)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_plan_is_not_copied(pool, way):
    refuse(way, graph(lambda g, x: g.relu(x)).plan_for(pool.driver.asarray(np.ones((2, 3), np.float32))))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_pool_and_its_slots_are_not_copied(scene, way):
    handle = scene.pool.get_handle()
    refuse(way, scene.pool)
    refuse(way, scene.pool.internals.slot())
    assert scene.pool.get_handle() is handle
    assert scene.pool.stats()["handles_created"] == 1


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_states_are_not_copied_with_their_pool(scene, way):
    refuse(way, scene.states, [scene.states])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_executor_is_not_copied_and_works_on(scene, way):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        refuse(way, executor)
        assert executor.submit(lambda: 5).result() == 5
        refuse(way, executor)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_stream_of_the_host_driver_is_not_copied_and_works_on(scene, way):
    with scene.driver.create_stream() as stream:
        refuse(way, stream)
        assert scene.read(scene.plus(scene.array(1), 1)) == 2


def test_an_executor_that_was_never_made_ends_without_a_word():
    ParallelStateExecutor.__new__(ParallelStateExecutor)
    gc.collect()


def test_a_shallow_copy_of_states_leases_from_the_same_pool(scene):
    twin = copy.copy(scene.states)
    assert isinstance(twin, ParallelStates)
    assert twin.map(lambda value: value, [1, 2]) == scene.states.map(lambda value: value, [1, 2])
