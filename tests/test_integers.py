"""Sizes, counts, indices, strides, pointers: NumPy's integers are integers; bools, fractions and texts are typed errors."""

import numpy as np
import pytest

import handlepool
from handlepool import (
    ArgumentError,
    ArraySpec,
    HandlePool,
    HandlePoolError,
    ParallelStateExecutor,
    ParallelStates,
    StateIndexError,
    StreamError,
    conv2d,
    conv2d_input_grad,
    conv2d_weight_grad,
)
from handlepool._util.arguments import as_integer, at_least
from handlepool.testing import reference

KINDS = [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.intp]
WRONG = [True, False, np.True_, 1.5, 2.0, np.float64(2), "2", b"2", [2], object]


@pytest.mark.parametrize("kind", KINDS)
def test_a_numpy_integer_becomes_an_integer(kind):
    assert type(as_integer(kind(3))) is int
    assert at_least(3, "it", kind(3)) == 3


@pytest.mark.parametrize("wrong", [*WRONG, None], ids=repr)
def test_what_is_no_integer_names_the_argument_and_what_it_may_be(wrong):
    with pytest.raises(TypeError):
        as_integer(wrong)
    with pytest.raises(ArgumentError, match=r"^the_size=.*; it must be an integer, 0 bytes or more$"):
        at_least(0, "the_size", wrong, " bytes")


CALLS = {
    "get_workspace": lambda scene, n: scene.pool.get_workspace(n),
    "state.workspace": lambda scene, n: scene.states.with_state(0, lambda state: state.workspace(n)),
    "prewarm states": lambda scene, n: scene.pool.prewarm(states=n),
    "prewarm workspace": lambda scene, n: scene.pool.prewarm(workspace=n),
    "scratch_limit": lambda scene, n: HandlePool(driver="host", scratch_limit=n),
    "idle_limit": lambda scene, n: HandlePool(driver="host", idle_limit=n),
    "plan_limit": lambda scene, n: HandlePool(driver="host", plan_limit=n),
    "ParallelStates": lambda scene, n: ParallelStates(n, pool=scene.pool),
    "ParallelStateExecutor": lambda scene, n: ParallelStateExecutor(n, pool=scene.pool),
    "spread lanes": lambda scene, n: handlepool.spread(abs, [], lanes=n),
    "spread in_flight": lambda scene, n: handlepool.spread(abs, [], in_flight=n),
    "with_state": lambda scene, n: scene.states.with_state(n, lambda state: None),
    "ArraySpec shape": lambda scene, n: ArraySpec((2, n), "float32"),
    "ArraySpec strides": lambda scene, n: ArraySpec((2,), "float32", [n]),
    "workspace_limit": lambda scene, n: handlepool.graph(int).options(workspace_limit=n),
}


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_integer_is_refused_and_nothing_is_made(scene, call, wrong):
    with pytest.raises(StateIndexError if call == "with_state" else ArgumentError) as raised:
        CALLS[call](scene, wrong)
    assert isinstance(raised.value, HandlePoolError)
    assert str(wrong) in str(raised.value)
    assert scene.pool.stats()["scratch_bytes"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_a_numpy_integer_is_taken(scene, call, kind):
    CALLS[call](scene, kind(3))


def test_states_that_were_numbered_by_numpy_are_the_same_states(scene):
    assert len(ParallelStates(np.int64(4), pool=scene.pool)) == 4
    scene.states.with_state(1, lambda state: None)
    scene.states.with_state(np.uint8(1), lambda state: None)
    assert len(scene.states._locks) == 1


def test_a_pointer_may_be_numpys_and_means_the_same_stream(scene):
    pool = scene.pool
    other = scene.driver.create_stream()
    assert pool.get_handle(np.uint64(other.ptr)) is pool.get_handle(other.ptr)
    with pytest.raises(StreamError, match=r"-1\)? is no cudaStream_t"):
        pool.get_handle(np.int64(-1))


def test_a_stream_of_anothers_may_give_its_pointer_as_numpys(scene):
    class Foreign:
        def __cuda_stream__(self):
            return 0, np.uint64(other.ptr)

    other = scene.driver.create_stream()
    assert scene.pool.get_handle(Foreign()) is scene.pool.get_handle(other.ptr)


# Geometry


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


GEOMETRY = {
    "stride": (2, np.int64(2), (np.int32(2), np.int64(2))),
    "padding": (1, np.uint8(1), (np.int8(1), 1)),
    "dilation": (2, np.int64(2), (2, np.int16(2))),
    "groups": (2, np.int64(2)),
}


@pytest.mark.parametrize(("name", "plain", "given"), [(n, plain, g) for n, (plain, *gs) in GEOMETRY.items() for g in gs])
def test_a_geometry_of_numpys_integers(scene, name, plain, given):
    x, w = numbers(2, 4, 9, 9), numbers(6, 2 if name == "groups" else 4, 3, 3)
    arrays = scene.driver.asarray(x), scene.driver.asarray(w)
    y = conv2d(*arrays, pool=scene.pool, **{name: given})
    assert reference.relative_error(scene.driver.asnumpy(y), reference.conv2d(x, w, **{name: plain})) < 1e-5
    assert reference.relative_error(scene.driver.asnumpy(y), reference.conv2d(x, w, **{name: given})) < 1e-5


@pytest.mark.parametrize("wrong", [(2, 4, 9, True), (2, 4, 9, 9.0), "2499", 9])
def test_the_shape_of_a_gradient(scene, wrong):
    dy, w, x = (scene.driver.asarray(numbers(*shape)) for shape in ((2, 6, 7, 7), (6, 4, 3, 3), (2, 4, 9, 9)))
    assert conv2d_input_grad(dy, w, np.array(x.shape), pool=scene.pool).shape == x.shape
    assert conv2d_weight_grad(x, dy, tuple(map(np.int16, w.shape)), pool=scene.pool).shape == w.shape
    for function, arrays in ((conv2d_input_grad, (dy, w)), (conv2d_weight_grad, (x, dy))):
        with pytest.raises(ArgumentError, match="shape="):
            function(*arrays, wrong, pool=scene.pool)


@pytest.mark.parametrize("wrong", [[True, 1], [np.True_, 1], [1.0, 1], "11"])
def test_the_parameters_of_a_node(scene, wrong):
    x, w = (scene.driver.asarray(numbers(*shape)) for shape in ((2, 4, 9, 9), (6, 4, 3, 3)))

    def convolve(stride):
        return handlepool.graph(lambda g, x, w: g.conv_fprop(x, w, padding=[0, 0], stride=stride, dilation=[1, 1]))

    with pytest.raises(ArgumentError, match=r"stride=.* is no list of integers"):
        convolve(wrong).plan_for(x, w)


def test_a_spec_of_numpys_integers_is_that_of_the_array(scene):
    x = scene.driver.asarray(numbers(2, 4, 9, 9))
    spec = ArraySpec(np.array(x.shape), "float32", np.array(x.strides))
    assert (spec.shape, spec.strides) == (x.shape, x.strides)
    assert {type(n) for n in spec.shape + spec.strides} == {int}


def test_a_uid_of_numpys_is_a_reference(scene):
    def build(g):
        x = g.tensor(name="x", dim=[2, 4], uid=7)
        return g.add(x, x)

    fn = handlepool.graph(build, inputs=[np.int64(7)])
    x = scene.driver.asarray(numbers(2, 4))
    assert np.array_equal(scene.driver.asnumpy(fn(x)), 2 * numbers(2, 4))
