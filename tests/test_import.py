"""What importing handlepool does, and what it offers."""

import json
import os
import subprocess
import sys

import pytest

import handlepool
from handlepool import errors

HEAVY = ("cupy", "torch", "jax", "cudnn", "cuda", "scipy", "matplotlib")


def in_a_new_process(program, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_loads_no_array_library_no_binding_and_no_driver():
    program = "import json, sys, handlepool; print(json.dumps(sorted(sys.modules)))"
    modules = in_a_new_process(program)
    assert not {name for name in modules if name.split(".")[0] in HEAVY}
    assert "handlepool.drivers.cuda" not in modules
    assert not {name for name in modules if name.startswith("handlepool.drivers.host")}


def test_importing_makes_nothing():
    program = """
import gc, json, sys, threading
before = threading.active_count()
import handlepool
from handlepool.drivers import _loaded
pools = [repr(o) for o in gc.get_objects() if isinstance(o, (handlepool.HandlePool, handlepool.ParallelStates))]
print(json.dumps([pools, list(_loaded.by_name), threading.active_count() - before]))
"""
    assert in_a_new_process(program, HANDLEPOOL_DRIVER="host") == [[], [], 0]


def test_importing_with_an_unknown_driver_in_the_environment_works():
    assert in_a_new_process("import handlepool; print(1)", HANDLEPOOL_DRIVER="nonsense") == 1


def test_making_a_pool_loads_no_driver():
    program = """
import json, sys, handlepool
pool = handlepool.HandlePool()
states = handlepool.ParallelStates(4, pool=pool)
print(json.dumps([repr(pool), sorted(name for name in sys.modules if name.split(".")[0] in ("cupy", "cudnn", "cuda"))]))
"""
    assert in_a_new_process(program) == ["<HandlePool driver not loaded>", []]


def test_every_public_name_is_there_can_be_called_and_has_a_docstring_also_after_a_star_import():
    """No submodule hides a function of the same name."""
    program = """
from handlepool import *
import inspect, json, handlepool, handlepool.pool.pool, handlepool.regions.states, handlepool.graphs.function
names = {name: getattr(handlepool, name) for name in handlepool.__all__}
missing = [name for name, value in names.items() if not inspect.getdoc(value) or globals().get(name) is not value]
print(json.dumps([missing, [name for name, value in names.items() if not callable(value)], len(names)]))
"""
    missing, silent, count = in_a_new_process(program, HANDLEPOOL_DRIVER="host")
    assert missing == silent == []
    assert count > 20


def test_the_names_are_sorted_and_unique_and_the_version_is_the_distributions():
    from importlib.metadata import version

    assert handlepool.__all__ == sorted(set(handlepool.__all__))
    assert handlepool.__version__ == version("handlepool")
    with pytest.raises(AttributeError, match="module 'handlepool' has no attribute 'get_handel'"):
        handlepool.get_handel  # noqa: B018


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_the_root_and_a_builtin_that_a_person_would_catch(error):
    assert issubclass(error, errors.HandlePoolError)
    assert getattr(handlepool, error.__name__) is error
    if error is not errors.HandlePoolError:
        builtins = (RuntimeError, ValueError, TypeError, MemoryError, IndexError, ImportError)
        assert issubclass(error, builtins)
