"""What is known of an array by its geometry, beside what NumPy says of its bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from handlepool.tensors.layout import one_run, overlaps_itself


@st.composite
def laid(draw):
    """A shape, an item's size, and the strides of two arrays: often without gaps, in any order of axes, and often the same."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    size = draw(st.sampled_from((1, 2, 4)))

    def strides():
        order, found, step = draw(st.permutations(range(len(shape)))), [0] * len(shape), size
        for axis in order:
            odd = draw(st.sampled_from([None] * 12 + [0, -1, 2, 7]))
            found[axis] = step if odd is None else odd * step
            step *= shape[axis]
        return tuple(found)

    one = strides()
    return shape, one, one if draw(st.booleans()) else strides(), size


def places(shape, strides):
    """Where each element begins, from the first one, in row-major order of the indices."""
    indices = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), int)
    return (np.array(strides, int)[:, None] * indices).sum(0)


@settings(max_examples=1500)
@given(laid())
def test_one_run_is_what_a_copy_of_bytes_is_right_for(case):
    shape, one, other, size = case
    here, there = places(shape, one), places(shape, other)
    run = bool(here.size) and (here == there).all() and sorted(here) == [*range(0, here.size * size, size)]
    assert one_run(shape, one, other, size) == run


def test_channels_last_and_axes_of_one_are_runs_and_what_repeats_is_none():
    assert one_run((2, 3, 4, 5), (120, 2, 30, 6), (120, 2, 30, 6), 2)
    assert one_run((1, 3, 1), (7, 2, -5), (0, 2, 99), 2)
    assert one_run((), (), (), 2)
    assert not one_run((3, 3), (8, 0), (8, 0), 2)  # from the first to the last byte it is as long as nine elements
    assert not one_run((3,), (-2,), (-2,), 2)
    assert not one_run((3, 0), (2, 2), (2, 2), 2)


# Whether elements overlap

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shape=shapes, data=st.data(), itemsize=st.sampled_from([1, 2, 4]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_an_array_that_does_not_overlap_itself_has_no_byte_twice(shape, data, itemsize):
    strides = [data.draw(st.integers(-40, 40)) for _ in shape]
    if overlaps_itself(shape, strides, itemsize):
        return
    begins = sum(np.indices(shape)[axis] * step for axis, step in enumerate(strides))
    bytes_of = (begins.reshape(-1, 1) + np.arange(itemsize)).ravel().tolist()
    assert len(set(bytes_of)) == len(bytes_of)


@given(shape=shapes, data=st.data(), itemsize=st.sampled_from([1, 2, 4]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_slice_of_an_array_overlaps_itself(shape, data, itemsize):
    whole = np.empty(shape, f"V{itemsize}").transpose(data.draw(st.permutations(range(len(shape)))))
    view = whole[tuple(slice(None, None, data.draw(st.integers(1, 4))) for _ in shape)]
    assert not overlaps_itself(view.shape, view.strides, itemsize)
