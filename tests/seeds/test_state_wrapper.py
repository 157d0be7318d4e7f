"""The state wrapper with four states: a handle, a stream and scratch each; a grouped convolution by hand, one group a state."""

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays

import handlepool
from handlepool import ParallelStates
from handlepool.testing.reference import conv2d as reference

STATES = 4
WIDTH, FILTERS = 8, 8  # channels and filters of one group


@pytest.fixture
def arrays(pool):
    return Arrays(pool, "float32")


@pytest.fixture
def states(pool):
    return ParallelStates(STATES, pool=pool)


@pytest.fixture
def groups(arrays):
    """For each group its images and its filters; and the grouped convolution of all."""
    images = [arrays.random(2, WIDTH, 10, 10) for _ in range(STATES)]
    filters = [arrays.random(FILTERS, WIDTH, 3, 3) for _ in range(STATES)]
    x = np.concatenate([arrays.take(part) for part in images], axis=1)
    w = np.concatenate([arrays.take(part) for part in filters], axis=0)
    return images, filters, reference(x, w, padding=1, groups=STATES)


def error(arrays, parts, expected):
    return arrays.error(parts[0], expected[:, :FILTERS]) + max(
        arrays.error(part, expected[:, i * FILTERS : (i + 1) * FILTERS]) for i, part in enumerate(parts)
    )


def test_a_group_a_state_makes_a_grouped_convolution(pool, arrays, states, groups):
    images, filters, expected = groups

    def convolve(state, x, w):
        assert pool.get_handle() is state.handle
        assert pool.driver.current_stream() is state.stream
        return handlepool.conv2d(x, w, padding=1)

    parts = [states.with_state(i, convolve, images[i], filters[i]) for i in range(STATES)]
    assert error(arrays, parts, expected) < 2 * TOLERANCE["float32"]


def test_the_same_in_a_fork_where_the_states_overlap(arrays, states, groups):
    images, filters, expected = groups
    with states.fork() as fork:
        parts = [fork.run(handlepool.conv2d, x, w, padding=1) for x, w in zip(images, filters, strict=True)]
    assert error(arrays, parts, expected) < 2 * TOLERANCE["float32"]


def test_states_that_are_held_at_a_time_share_nothing(pool, states):
    held = []

    def hold(state, index):
        scratch = state.workspace(4096)
        assert pool.driver.array_pointer(scratch) % 256 == 0
        held.append((id(state.handle), state.pointer, pool.driver.array_pointer(scratch)))
        if index + 1 < STATES:
            states.with_state(index + 1, hold, index + 1)

    states.with_state(0, hold, 0)
    for kind in zip(*held, strict=True):
        assert len(set(kind)) == STATES


def test_a_states_scratch_grows_and_keeps_what_was_asked_for(states):
    for nbytes in (0, 256, 100_000, 10):
        assert states.with_state(1, lambda state, nbytes: state.workspace(nbytes).nbytes, nbytes) == nbytes


def test_what_a_state_does_is_ordered_after_and_before_the_callers_stream(arrays, states):
    x, w = arrays.random(2, WIDTH, 10, 10), arrays.random(FILTERS, WIDTH, 3, 3)
    first = handlepool.conv2d(x, w, padding=1)
    second = states.with_state(2, lambda state: handlepool.conv2d(first, w, padding=1))
    third = handlepool.conv2d(second, w, padding=1)
    expected = arrays.take(x)
    for _ in range(3):
        expected = reference(expected, arrays.take(w), padding=1)
    assert arrays.error(third, expected) < 3 * TOLERANCE["float32"]
