"""What is known of an array by its geometry."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from handlepool.tensors.layout import overlaps_itself

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@hypothesis.given(shape=shapes, data=st.data(), itemsize=st.sampled_from([1, 2, 4]))
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_an_array_that_does_not_overlap_itself_has_no_byte_twice(shape, data, itemsize):
    strides = [data.draw(st.integers(-40, 40)) for _ in shape]
    if overlaps_itself(shape, strides, itemsize):
        return
    begins = sum(np.indices(shape)[axis] * step for axis, step in enumerate(strides))
    bytes_of = (begins.reshape(-1, 1) + np.arange(itemsize)).ravel().tolist()
    assert len(set(bytes_of)) == len(bytes_of)


@hypothesis.given(shape=shapes, data=st.data(), itemsize=st.sampled_from([1, 2, 4]))
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_no_slice_of_an_array_overlaps_itself(shape, data, itemsize):
    whole = np.empty(shape, f"V{itemsize}").transpose(data.draw(st.permutations(range(len(shape)))))
    view = whole[tuple(slice(None, None, data.draw(st.integers(1, 4))) for _ in shape)]
    assert not overlaps_itself(view.shape, view.strides, itemsize)
