"""Graph functions and array specs go to other processes by name, as functions do."""

import copy
import os
import pickle
import subprocess
import sys

import pytest

import handlepool
from handlepool import ArgumentError, ArraySpec

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@handlepool.graph(allow_tf32=False)
def double(g, x):
    return g.add(x, x)


def plain(g, x):
    return g.relu(x)


@handlepool.graph
def rebound(g, x):
    return g.relu(x)


root = rebound
rebound = rebound.options(deterministic=True)
under_another_name = handlepool.graph(plain)


@handlepool.graph
def replaced(g, x):
    return g.relu(x)


first = replaced


@handlepool.graph
def replaced(g, x):
    return g.add(x, x)


class Network:
    @staticmethod
    @handlepool.graph
    def double(g, x):
        return g.add(x, x)


class Callable:
    def __call__(self, g, x):
        return g.relu(x)


def local():
    @handlepool.graph
    def double(g, x):
        return g.add(x, x)

    return double


FOUND = {
    "at module level": double,
    "in a class": Network.double,
    "a variant": double.options(deterministic=True),
    "a variant of a variant": double.options(deterministic=True).options(name="other", workspace_limit=0),
    "a variant with a default put back": double.options(allow_tf32=None),
    "a variant that took the name": rebound,
    "the function whose variant took the name": root,
    "a variant beside the one that took the name": root.options(io_dtype="bfloat16"),
}
LOST = {
    "local": local(),
    "a variant of a local one": local().options(deterministic=True),
    "lambda": handlepool.graph(lambda g, x: g.relu(x)),
    "under another name": under_another_name,
    "a callable object": handlepool.graph(Callable()),
    "a former one": first,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FOUND)
def test_a_graph_function_at_module_level_is_pickled_by_name(name, protocol):
    function = FOUND[name]
    data = pickle.dumps(function, protocol)
    assert pickle.loads(data) is function
    assert len(data) < 500


@pytest.mark.parametrize("name", LOST)
def test_what_its_name_does_not_lead_to_says_where_to_put_it(name):
    function = LOST[name]
    named = getattr(function, "__qualname__", "graph")
    with pytest.raises(
        ArgumentError, match=r"cannot be pickled: .* is not this function. Define the function at the top level of a module"
    ) as caught:
        pickle.dumps(function)
    assert f"looks it up by name, but {function.__module__}.{named} is not this function" in str(caught.value)


@pytest.mark.parametrize("name", [*FOUND, *LOST])
def test_a_copy_of_a_graph_function_is_the_function_itself(name):
    function = (FOUND | LOST)[name]
    assert copy.copy(function) is function
    assert copy.deepcopy([function])[0] is function


@pytest.mark.parametrize("spec", [ArraySpec((2, 3, 4, 5), "bfloat16", "NHWC"), ArraySpec((2, 3), "float16", (8, 2))])
def test_an_array_spec_can_be_pickled_and_copied(spec):
    for other in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
        assert type(other) is ArraySpec
        assert (other.shape, other.dtype, other.strides) == (spec.shape, spec.dtype, spec.strides)


LIBRARY = """
import handlepool

@handlepool.graph
def scale(g, x):
    return g.add(x, x)
"""
PROGRAM = """
import multiprocessing
import sys

import numpy as np

import handlepool
from library import scale


@handlepool.graph
def conv(g, x, w, *, padding):
    return g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1])


def work(functions, specs, x, w):
    mine, exact, theirs, get_handle, convolve = functions
    assert mine is conv and exact is conv.options(allow_tf32=False) and theirs is scale
    assert get_handle is handlepool.get_handle and convolve is handlepool.conv2d
    plan = exact.compile(*specs, padding=1)
    before = handlepool.stats()["plans_built"]
    y = exact(x, w, padding=1)
    assert handlepool.stats()["plans_built"] == before == 1
    return theirs(y), mine


if __name__ == "__main__":
    x, w = np.ones((1, 4, 6, 6), np.float32), np.ones((4, 4, 3, 3), np.float32)
    specs = [handlepool.ArraySpec(array.shape, array.dtype) for array in (x, w)]
    functions = [conv, conv.options(allow_tf32=False), scale, handlepool.get_handle, handlepool.conv2d]
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        y, mine = processes.apply(work, (functions, specs, x, w))
    assert mine is conv
    print(y[0, 0].tolist() == (2 * conv(x, w, padding=1))[0, 0].tolist(), y.max())
"""


def test_graph_functions_of_the_program_and_of_a_library_run_in_a_spawned_process(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"HANDLEPOOL_DRIVER": "host"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True 72.0\n", done.stderr
