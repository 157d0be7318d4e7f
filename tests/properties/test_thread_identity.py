"""Threads are told apart by themselves: CPython gives the number of a thread that has ended to another thread.

Guarantees 1 and 17.
"""

import gc
import os
import threading
import weakref

import pytest
from harness.process import leave
from harness.scenes import Scene, Thread

from handlepool import OwnershipError, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.context import thread
from handlepool.pool.plan_cache import PlanCache


def numbered(function):
    """Return a function's value or error and the number of the thread that ran it."""
    found = []

    def run():
        found.append(threading.get_ident())
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    Thread(run).finish()
    return found


def with_the_number(number, function):
    """Call a function in a new thread that CPython gave a number of before."""
    for _ in range(2000):
        found = numbered(lambda: function() if threading.get_ident() == number else NotImplemented)
        if found[1] is not NotImplemented:
            return found[1]
    return pytest.skip("no thread was given the number again")


def test_a_number_is_given_again_control():
    """What the other tests rest on: two threads that are never there at once have one number."""
    number, token = numbered(lambda: thread.token)
    again = with_the_number(number, lambda: thread.token)
    assert again is not token
    assert token.over
    assert not thread.token.over


def test_a_token_keeps_nothing_of_its_thread():
    class Local:
        pass

    locals_ = threading.local()

    def run():
        locals_.value = Local()
        return thread.token, weakref.ref(locals_.value)

    token, kept = Thread(run).finish()
    gc.collect()
    assert kept() is None
    assert token.over
    assert repr(token) == "a thread that has ended"
    assert threading.current_thread().name in repr(thread.token)


def test_a_token_is_the_same_in_a_forked_child():
    token = thread.token
    child = os.fork()
    if not child:
        leave(0 if thread.token is token and not token.over else 1)
    assert os.waitpid(child, 0)[1] == 0


def turns(scene, states):
    with states.fork() as fork:
        for value in range(3):
            y = fork.run(scene.plus, scene.array(value), 1)
            yield scene.plus(fork.wait(y), 1)


def test_g17_a_fork_is_not_gone_on_with_by_a_thread_of_the_same_number():
    """As by a generator that a server drives turn by turn."""
    with Scene(HostDriver(check_order=True)) as scene:
        left = turns(scene, ParallelStates(2, pool=scene.pool))

        def turn():
            with scene.stream:
                return next(left)

        number, _ = numbered(turn)
        error = with_the_number(number, turn)
        assert isinstance(error, OwnershipError)
        assert "a thread that has ended" in str(error)
        left = error = None
        gc.collect()
        scene.pool.trim()
        assert scene.pool.stats()["handles_leased"] == 0


@pytest.mark.parametrize("use", ["run", "wait", "map", "exit"])
def test_every_use_of_a_fork_is_for_its_own_thread(scene, use):
    fork = scene.states.fork()
    number, _ = numbered(fork.__enter__)
    call = {
        "run": lambda: fork.run(int),
        "wait": lambda: fork.wait(1),
        "map": lambda: fork.map(int, [1, 2]),
        "exit": lambda: fork.__exit__(None, None, None),
    }[use]
    assert isinstance(with_the_number(number, call), OwnershipError)


def test_g1_a_checked_handle_is_refused_in_a_thread_of_the_same_number(make_pool):
    pool = make_pool(check=True)
    number, slot = numbered(lambda: pool.internals.slot())
    handle = slot.handle
    # Its thread has ended, and the pool does not know of that before the next miss.
    for use in (lambda: handle.backend_handle, lambda: slot.workspace(8), lambda: slot.reserve(8)):
        assert isinstance(with_the_number(number, use), OwnershipError)


def test_a_build_that_a_thread_left_behind_is_not_taken_for_ones_own():
    cache = PlanCache()
    number, build = numbered(lambda: _a_build(cache))

    def ask():
        return cache.get_or_build(0, "key", lambda: "built")

    assert build.thread.ident == number
    assert with_the_number(number, ask) == "built"


def _a_build(cache):
    """Leave a build behind, as an interrupt in the last steps of it does."""
    from handlepool.pool.plan_cache import _Build

    cache._builds[0, "key"] = build = _Build()
    return build
