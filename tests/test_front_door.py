"""What a user sees of the package: names, completion, help; and the functions of a default pool that is not there yet."""

import inspect
import itertools
import json
import pickle
import pydoc
import rlcompleter
import subprocess
import sys

import pytest
from call_counts import BOUNDS, counted
from harness.lines import at_line

import handlepool
from handlepool import HandlePool
from handlepool.pool import default

OF_THE_POOL = ("get_handle", "get_workspace", "prewarm", "stats", "trim")
MODULES = {"drivers", "errors", "math", "ops", "testing"}


def test_dir_is_what_is_public_and_nothing_else():
    shown = dir(handlepool)
    assert {"close", "set_default_pool", *OF_THE_POOL} <= set(shown)
    assert set(shown) - MODULES == {*handlepool.__all__, "__version__"}
    assert set(shown) >= {"drivers", "errors", "ops"}
    assert all(hasattr(handlepool, name) for name in shown)


def test_completion_offers_what_dir_shows(unused):
    completer = rlcompleter.Completer({"handlepool": handlepool})
    texts = itertools.takewhile(bool, (completer.complete("handlepool.", n) for n in itertools.count()))
    offered = {text.removeprefix("handlepool.").rstrip("()") for text in texts}
    assert offered == {name for name in dir(handlepool) if not name.startswith("_")}
    assert offered >= {"close", *OF_THE_POOL}


@pytest.mark.parametrize("name", OF_THE_POOL)
def test_help_shows_the_pools_functions_as_they_are(unused, name):
    page = pydoc.plain(pydoc.render_doc(handlepool))
    function, method = getattr(handlepool, name), getattr(HandlePool, name)
    signature = inspect.signature(function)
    assert list(signature.parameters.values()) == list(inspect.signature(method).parameters.values())[1:]
    assert function.__doc__ == method.__doc__
    functions = page[page.index("\nFUNCTIONS\n") :]
    assert f"\n    {name}({str(signature)[1:].split(' ->')[0]}" in functions
    assert method.__doc__.splitlines()[0] in functions


def test_looking_makes_no_pool_and_loads_no_array_library():
    program = """
import json, pydoc, rlcompleter, sys
import handlepool
from handlepool import *
rlcompleter.Completer({"handlepool": handlepool}).complete("handlepool.", 0)
pydoc.render_doc(handlepool)
heavy = {"cupy", "torch", "cudnn", "cuda", "scipy"} & sys.modules.keys()
print(json.dumps([sorted(heavy), handlepool.pool.default._default is None]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout or "0") == [[], True], done.stderr


def test_a_function_that_was_imported_early_is_that_of_the_pool_set_later(unused, make_pool):
    mine = make_pool(devices=1)
    early, _ = default.lazy_get_handle(handlepool.default_pool)
    handlepool.set_default_pool(mine)
    assert early() is mine.get_handle()
    stream = mine.driver.create_stream()
    assert early(stream) is mine.get_handle(stream)
    assert handlepool.get_workspace(10).nbytes == 10


def test_g2_a_hit_of_a_function_that_was_imported_early_costs_what_the_pools_own_does(make_pool):
    mine = make_pool(devices=1)
    early, _ = default.lazy_get_handle(lambda: mine)
    for _ in range(3):
        early()
    assert counted(lambda: early()) == counted(lambda: mine.get_handle()) <= BOUNDS["hit of get_handle"]


def test_a_first_call_that_fails_or_is_interrupted_anywhere_leaves_the_next_one_right(make_pool):
    mine = make_pool()
    streams = [mine.driver.create_stream() for _ in range(2)]

    def interrupt():
        raise KeyboardInterrupt

    places = []
    for k in itertools.count(1):
        early, _ = default.lazy_get_handle(lambda: mine)
        try:
            where = at_line(k, early, interrupt, {"slot.py", "default.py"})
        except KeyboardInterrupt as error:
            where = error.__notes__[0]
        if where is None:
            break
        places.append(where)
        for _ in range(2):
            for stream in (None, *streams):
                assert early(stream) is mine.get_handle(stream)
        assert counted(lambda early=early: early()) == counted(lambda: mine.get_handle())
    assert len(places) > 10


def test_a_first_call_in_another_ones_middle_leaves_both_with_the_right_pools_handle(make_pool):
    """As from another thread: what began as nobody's function does not end as a hit of another pool."""
    first = make_pool()
    second = make_pool(driver=first.driver)
    first.get_handle()

    def twice_at(k):
        (early, _), handles = default.lazy_get_handle(lambda: second), []

        def call():
            handles.append(early())

        where = at_line(k, call, call, {"slot.py", "default.py"})
        assert set(handles) == {second.get_handle()}, where
        return where

    places = [*itertools.takewhile(bool, map(twice_at, itertools.count(1)))]
    assert len(places) > 10


@pytest.mark.parametrize("name", ["close", *OF_THE_POOL])
def test_the_pools_functions_can_be_pickled(name):
    function = getattr(handlepool, name)
    assert pickle.loads(pickle.dumps(function)) is function
