"""A custom op of a host framework: its stream is the framework's, its handle the pool's, its intermediate in device memory."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from harness.arrays import TOLERANCE, Arrays
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import ops
from handlepool.testing.reference import conv2d as reference


class FrameworkStream:
    """What the framework hands to its ops: nothing but the stream protocol."""

    def __init__(self, pool):
        self._stream = pool.driver.create_stream()

    def __cuda_stream__(self):
        return 0, self._stream.ptr


class OpContext:
    """The op's view of its framework: a device, a stream, and outputs that the framework allocates."""

    def __init__(self, pool, arrays):
        self.device = pool.driver.current_device()
        self.stream = FrameworkStream(pool)
        self._arrays = arrays

    @property
    def pointer(self):
        return self.stream.__cuda_stream__()[1]

    def allocate_output(self, shape):
        return self._arrays.poisoned(*shape)


@contextmanager
def on(pool, context):
    """The framework's stream is the current one."""
    with pool.driver.wrap_stream(context.pointer, context.stream):
        yield
    pool.driver.synchronize_stream(context.pointer)


def view(scratch, like, shape):
    """A contiguous array of a type in the first bytes of a workspace."""
    count = int(np.prod(shape))
    return scratch[: count * like.dtype.itemsize].view(like.dtype).reshape(shape)


class ConvolveThenActivate:
    """The op: two launches on the framework's stream, with the first one's result in scratch memory."""

    def __init__(self, pool):
        self.pool = pool
        self.handles = []

    def compute(self, context, x, w):
        pool = self.pool
        handle = pool.get_handle(context.stream)
        self.handles.append(handle)
        assert handle.stream == context.pointer
        shape = (x.shape[0], w.shape[0], *x.shape[2:])
        nbytes = int(np.prod(shape)) * x.dtype.itemsize
        intermediate = view(pool.get_workspace(nbytes, context.stream), x, shape)
        handlepool.conv2d(x, w, padding=1, out=intermediate)
        return ops.relu(intermediate, out=context.allocate_output(shape))


@pytest.fixture(params=["float16", "float32"])
def arrays(request, pool):
    return Arrays(pool, request.param)


def inputs(arrays):
    x, w = arrays.random(2, 16, 10, 10), arrays.random(8, 16, 3, 3)
    expected = reference(*map(arrays.take, (x, w)), padding=1, activation="relu")
    return x, w, expected


def test_the_op_runs_on_the_frameworks_stream_with_an_intermediate_in_device_memory(pool, arrays):
    op, context = ConvolveThenActivate(pool), OpContext(pool, arrays)
    with on(pool, context):
        for _ in range(3):
            x, w, expected = inputs(arrays)
            assert arrays.error(op.compute(context, x, w), expected) < TOLERANCE[arrays.dtype.name]
    assert len({id(handle) for handle in op.handles}) == 1


def test_a_call_costs_no_handle_and_no_memory_after_the_first(pool, arrays):
    op, context = ConvolveThenActivate(pool), OpContext(pool, arrays)
    with on(pool, context):
        x, w, _ = inputs(arrays)
        op.compute(context, x, w)
        before = pool.stats()
        for _ in range(5):
            op.compute(context, x, w)
        after = pool.stats() - before
    assert (after["handles_created"], after["scratch_bytes"], after["plans_built"]) == (0, 0, 0)


def test_each_thread_of_the_framework_has_a_handle_of_its_own(pool, arrays):
    op, meeting = ConvolveThenActivate(pool), threading.Barrier(4)

    def work():
        context = OpContext(pool, arrays)
        with on(pool, context):
            x, w, expected = inputs(arrays)
            meeting.wait(TIMEOUT)
            errors = [arrays.error(op.compute(context, x, w), expected) for _ in range(4)]
            meeting.wait(TIMEOUT)  # none ends, which would give its handle to another
            return max(errors)

    assert max([thread.finish() for thread in [Thread(work) for _ in range(4)]]) < TOLERANCE[arrays.dtype.name]
    assert len(op.handles) == 16
    assert len({id(handle) for handle in op.handles}) == 4


def test_two_streams_of_one_thread_have_two_handles_and_two_intermediates(pool, arrays):
    op, contexts = ConvolveThenActivate(pool), [OpContext(pool, arrays) for _ in range(2)]
    x, w, expected = inputs(arrays)
    pool.driver.synchronize_stream(pool.driver.current_stream().ptr)
    made = []
    for context in contexts:
        with on(pool, context):
            made.append(op.compute(context, x, w))
    first, second = (pool.get_workspace(16, context.stream) for context in contexts)
    assert pool.driver.array_pointer(first) != pool.driver.array_pointer(second)
    assert op.handles[0] is not op.handles[1]
    assert all(arrays.error(y, expected) < TOLERANCE[arrays.dtype.name] for y in made)
