"""The key of a plan on disk: what is computed otherwise has another one."""

import cudnn
import ml_dtypes
import numpy as np
import pytest

from handlepool.graphs.plan_key import plan_key
from handlepool.tensors import frontend

SETTINGS = {"allow_tf32": True, "heuristics": ("A", "FALLBACK")}
MADE_FOR = '{"cudnn":91900}'
TENSOR_CORE = cudnn.numerical_note.TENSOR_CORE


def graph_of(build, **types):
    """Return a graph that a function built of two images and filters, and its operands; the function may name others."""
    graph = frontend.new_graph(**{"io_dtype": "float16", "intermediate_dtype": "float32", "compute_dtype": "float32"} | types)
    half = cudnn.data_type.HALF
    given = [graph.tensor(dim=[4, 8, 6, 6], stride=[288, 1, 48, 8], data_type=half, name=name) for name in ("x", "z")]
    given.append(graph.tensor(dim=[8, 8, 1, 1], stride=[8, 1, 8, 8], data_type=half, name="w"))
    made = build(graph, *given)
    return graph, made if isinstance(made, list) else [*given, made.set_output(True)]


def key(build, settings=SETTINGS, plan_environment=MADE_FOR, **types):
    return plan_key(*graph_of(build, **types), settings, plan_environment)


def convolved(g, x, w, **how):
    return g.conv_fprop(x, w, **{"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]} | how)


def plain(g, x, z, w):
    return g.relu(g.add(convolved(g, x, w), z))


def between(change):
    def build(g, x, z, w):
        y = convolved(g, x, w)
        change(y)
        return g.relu(g.add(y, z))

    return build


def before(change):
    def build(g, x, z, w):
        change(g)
        return plain(g, x, z, w)

    return build


def on(change):
    def build(g, x, z, w):
        change(x)
        return plain(g, x, z, w)

    return build


def scaled(value, kind=None):
    if kind is None:
        return lambda g, x, z, w: g.relu(g.add(convolved(g, x, w), z), negative_slope=value)
    return lambda g, x, z, w: g.mul(g.add(convolved(g, x, w), z), g.tensor_scalar(value, kind))


def ragged(swapped):
    def build(g, x, z, w):
        kind = cudnn.data_type.INT32
        a, b = (g.tensor(dim=[5, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, name=name) for name in "ab")
        x.set_ragged_offset(b if swapped else a)
        z.set_ragged_offset(a if swapped else b)
        return [x, z, w, a, b, plain(g, x, z, w).set_output(True)]

    return build


def two(swapped):
    def build(g, x, z, w):
        made = [g.relu(x), g.exp(x)]
        operands = [x, *(reversed(made) if swapped else made)]
        for uid, tensor in enumerate(operands, 71):
            tensor.set_uid(uid)
        return [x, *(tensor.set_output(True).set_dim(x.dim).set_stride(x.stride) for tensor in operands[1:])]

    return build


GRAPHS = {
    "plain": plain,
    "without a sum": lambda g, x, z, w: g.relu(convolved(g, x, w)),
    "the other addend": lambda g, x, z, w: g.relu(g.add(convolved(g, x, w), x)),
    "the sum turned around": lambda g, x, z, w: g.relu(g.add(z, convolved(g, x, w))),
    "another image": lambda g, x, z, w: g.relu(g.add(convolved(g, z, w), x)),
    "another operation": lambda g, x, z, w: g.relu(g.sub(convolved(g, x, w), z)),
    "another order": lambda g, x, z, w: g.add(g.relu(convolved(g, x, w)), z),
    "other operands": lambda g, x, z, w: [z, x, w, plain(g, x, z, w).set_output(True)],
    "what is between is output": lambda g, x, z, w: [x, z, w, g.relu(g.add(convolved(g, x, w).set_output(True), z))],
    "a padding": lambda g, x, z, w: g.relu(g.add(convolved(g, x, w, padding=[1, 1]), z)),
    "turned filters": lambda g, x, z, w: g.relu(
        g.add(convolved(g, x, w, convolution_mode=frontend.convolution_mode("convolution")), z)
    ),
    "a node that computes otherwise": lambda g, x, z, w: g.relu(
        g.add(convolved(g, x, w), z), compute_data_type=cudnn.data_type.HALF
    ),
    "a type between": between(lambda y: y.set_data_type(cudnn.data_type.HALF)),
    "strides between": between(lambda y: y.set_dim([4, 8, 6, 6]).set_stride([288, 36, 6, 1])),
    "a shape": on(lambda x: x.set_dim([2, 8, 6, 6])),
    "strides": on(lambda x: x.set_stride([576, 1, 96, 16])),
    "a type": on(lambda x: x.set_data_type(cudnn.data_type.BFLOAT16)),
    "a uid": on(lambda x: x.set_uid(77)),
    "an order in memory": on(lambda x: x.set_reordering_type(cudnn.tensor_reordering.F8_128x4)),
    "a promise": on(lambda x: x.set_alignment_value(8)),
    "two outputs": two(False),
    "two outputs swapped": two(True),
    "offsets": ragged(False),
    "swapped offsets": ragged(True),
    **{
        f"a slope of {value!r}": scaled(value)
        for value in (0.1, 1, True, "0.1", np.float16(0.1), np.float32(0.1), ml_dtypes.bfloat16(0.1), float("nan"), float("inf"))
    },
    **{
        f"a parameter of {name}": scaled(value)
        for name, value in {
            "numbers": [1, 1],
            "an array": np.array([1, 1]),
            "another array": np.array([1, 2]),
            "an array of two axes": np.array([[1, 1]]),
            "an array of another type": np.array([1, 1], np.int32),
            "an array of another order of bytes": np.array([1, 1], ">i8"),
            "slices": [slice(0, 4), slice(1, None)],
            "other slices": [slice(0, 4), slice(2, None)],
            "slices with steps": [slice(0, 4, 1), slice(1, None)],
            "a slice of numbers of NumPy's": [slice(np.int64(0), 4), slice(1, None)],
        }.items()
    },
    "a constant": scaled(0.1, cudnn.scalar_type.COMPILE_TIME_CONST),
    "a parameter": scaled(0.1, cudnn.scalar_type.RUNTIME_PARAM),
    "an engine left out": before(lambda g: g.deselect_engines(["eng1"])),
    "another left out": before(lambda g: g.deselect_engines(["eng2"])),
    "scratch left out": before(lambda g: g.deselect_workspace_greater_than(0)),
    "a note left out": before(lambda g: g.deselect_numeric_notes([TENSOR_CORE])),
    "a note asked for": before(lambda g: g.select_numeric_notes([TENSOR_CORE])),
    "behaviour asked for": before(lambda g: g.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])),
}


def test_what_is_computed_otherwise_has_another_key():
    keys = {name: key(build) for name, build in GRAPHS.items()}
    keys |= {f"{name} of float16": key(plain, **{name: "float16"}) for name in ("intermediate_dtype", "compute_dtype")}
    keys["all of float32"] = key(plain, io_dtype="float32")
    keys["without TF32"] = key(plain, SETTINGS | {"allow_tf32": False})
    keys["other heuristics"] = key(plain, SETTINGS | {"heuristics": ("FALLBACK", "A")})
    keys["scratch"] = key(plain, SETTINGS | {"workspace_limit": 0})
    keys["another version"] = key(plain, plan_environment='{"cudnn":92800}')
    assert all(keys.values())
    by_key = {}
    for name, found in keys.items():
        by_key.setdefault(found, []).append(name)
    assert [names for names in by_key.values() if len(names) > 1] == []


def test_names_and_which_candidate_it_is_make_no_difference():
    def named(g, x, z, w):
        return g.relu(g.add(convolved(g, x.set_name("image"), w, name="first"), z, name="second"), name="third")

    assert key(named) == key(plain) == key(plain, SETTINGS | {"plan_index": 3})


@pytest.mark.parametrize(
    "value",
    [
        lambda g, x: x,
        object(),
        np.ones(2),
        np.ones(65, int),
        np.array([1, 1], object),
        np.ma.array([1, 1], mask=[0, 1]),
        slice(np.ones(2)),
        np.longdouble(1),
        {1j: 2},
        1 + 1j,
    ],
)
def test_what_text_does_not_tell_from_others_has_no_key(value):
    assert key(scaled(value)) == ""
