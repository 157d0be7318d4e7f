"""Misuse that only a pool with ``check=True`` sees; without it nothing is checked, and nothing costs more."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from harness.hidden import hidden

import handlepool
from handlepool import (
    ArgumentError,
    CaptureError,
    ContractError,
    HandlePool,
    OwnershipError,
    ParallelStateExecutor,
    ParallelStates,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.graphs.launch import prepared
from handlepool.pool.checks import CheckedSlot
from handlepool.pool.slot import Slot
from handlepool.pool.thread_slots import MOST_FOREIGN_STREAMS

CHECKS = {True: pytest.raises, False: None}


@pytest.fixture
def pool(make_pool):
    """A pool with checks, over a driver whose own are off."""
    return make_pool(driver=HostDriver(checks=False), check=True)


def convolve(pool, x=None, out=None):
    x = np.ones((1, 8, 8, 8), np.float32) if x is None else x
    return handlepool.conv2d(x, np.ones((8, 8, 3, 3), np.float32), out=out, pool=pool)


def test_a_handle_of_another_thread_is_refused_with_both_sides_named(pool, in_thread):
    handle = pool.get_handle()
    with pytest.raises(OwnershipError, match=r"of thread 'MainThread' for stream 0x0 .* is used by thread 'Thread-"):
        in_thread(pool.driver.use_handle, handle, int)
    pool.driver.use_handle(handle, int)
    assert pool.get_handle() is handle


def test_a_handle_whose_thread_has_ended_is_refused(pool, in_thread):
    handle = in_thread(pool.get_handle)
    with pytest.raises(OwnershipError, match="whose thread, stream or fork has ended"):
        pool.driver.use_handle(handle, int)
    assert pool.get_handle() is handle  # reused, and mine now
    pool.driver.use_handle(handle, int)


def test_a_handle_of_a_pointer_that_was_not_used_for_long_is_refused(pool):
    first, *others = [pool.driver.create_stream() for _ in range(MOST_FOREIGN_STREAMS + 1)]
    handle = pool.get_handle(first.ptr)
    for stream in others:
        pool.get_handle(stream.ptr)
    with pytest.raises(OwnershipError, match="has ended"):
        pool.driver.use_handle(handle, int)
    assert pool.get_handle(first.ptr) is handle  # taken over, and bound anew
    pool.driver.use_handle(handle, int)


def test_a_handle_of_a_branch_is_refused_after_the_join(pool):
    with ParallelStates(2, pool=pool).fork() as fork:
        handle = fork.run(pool.get_handle)
        assert fork.run(lambda: pool.driver.use_handle(pool.get_handle(), int)) is None
    with pytest.raises(OwnershipError, match="has ended"):
        pool.driver.use_handle(handle, int)


def test_a_state_is_refused_outside_of_its_call(pool, in_thread):
    states = ParallelStates(2, pool=pool)
    kept = states.with_state(0, lambda state: pool.internals.slot())
    for use in (lambda: kept.workspace(10), lambda: kept.reserve(10), lambda: pool.driver.use_handle(kept.handle, int)):
        with pytest.raises(OwnershipError, match="has ended"):
            use()
    with pytest.raises(OwnershipError, match="is used by thread 'Thread-"):
        states.with_state(0, lambda state: in_thread(state.workspace, 10))


@pytest.mark.parametrize("check", [1, "off", [], np.ones(2)])
def test_a_check_that_is_neither_on_nor_off_is_refused(check):
    with pytest.raises(ArgumentError, match=r"^check=.*; it must be True or False"):
        HandlePool(driver="host", check=check)


def test_a_launch_with_a_slot_of_another_thread_is_refused(pool, in_thread):
    slot = pool.internals.slot()
    x, w, y = np.ones((1, 8, 8, 8), np.float32), np.ones((8, 8, 3, 3), np.float32), np.empty((1, 8, 6, 6), np.float32)
    call = prepared(handlepool.conv2d, pool.internals, (x, w), {"out": y})
    with pytest.raises(OwnershipError):
        in_thread(call.launch, slot)
    call.launch(slot)


def test_a_workspace_is_refused_on_another_stream(pool):
    driver = pool.driver
    nbytes = 4 * 8 * 8 * 8
    here, there = driver.create_stream(), driver.create_stream()
    x = pool.get_workspace(nbytes + 256, here)[256:].view(np.float32).reshape(1, 8, 8, 8)
    with here:
        convolve(pool, x)
    with (
        there,
        pytest.raises(
            ContractError, match=rf"conv2d: argument 0 \(x\) lies in the workspace of .*{here.ptr:#x}.*on stream {there.ptr:#x}"
        ),
    ):
        convolve(pool, x)
    with here, ParallelStates(1, pool=pool).fork() as fork, pytest.raises(ContractError, match="workspace"):
        fork.run(handlepool.conv2d, x, np.ones((8, 8, 3, 3), np.float32))


AGAIN = "a workspace is used after get_workspace was called for its stream again"
ENDED = "a workspace is used after the end of its thread, stream or fork"


@pytest.mark.parametrize("size", [0, 100, 5000], ids=["none", "less", "more"])
def test_a_workspace_that_is_held_over_the_next_is_refused(pool, size):
    with pool.driver.create_stream():
        held = pool.get_workspace(1024)
        view = held.view(np.float32)[8:]
        view[...] = 1
        total = view + 1  # is queued in time
        after = pool.get_workspace(size)
        uses = {
            "read": view.get,
            "add": lambda: view + 1,
            "write": lambda: view.fill(2),
            "launch": lambda: convolve(pool, held.view(np.float32).reshape(1, 8, 8, 4)),
        }
        for use in uses.values():
            with pytest.raises(ContractError, match=AGAIN):
                use()
        after[...] = 3
        assert (after.get() == 3).all()
        assert (total.get() == 2).all()


@pytest.mark.parametrize("over", ["fork", "map", "with_state", "submit", "inline", "thread"])
def test_a_workspace_that_outlives_its_branch_task_or_thread_is_refused(pool, in_thread, over):
    states = ParallelStates(2, pool=pool)

    def branch(*_):
        workspace = pool.get_workspace(64)
        workspace.fill(1)
        return workspace

    with pool.driver.create_stream():
        if over == "fork":
            with states.fork() as fork:
                kept = fork.run(branch)
        elif over == "inline":
            with ParallelStates(32, pool=pool).fork() as hoard:
                hoard.map(lambda _: None, range(32))
                with states.fork() as fork:
                    kept = fork.run(branch)
            branch()
        elif over == "submit":
            with ParallelStateExecutor(2, pool=pool) as executor:
                kept = executor.submit(branch).result()
        elif over == "thread":
            kept = in_thread(branch)
            gc.collect()
            pool.trim()
        else:
            kept = states.map(branch, [1])[0] if over == "map" else states.with_state(0, branch)
        with pytest.raises(ContractError, match=AGAIN if over == "inline" else ENDED):
            kept.get()


def test_workspaces_are_told_apart_by_stream_thread_and_capture(pool, in_thread):
    states = ParallelStates(2, pool=pool)
    here, there = pool.driver.create_stream(), pool.driver.create_stream()
    with here:
        kept = pool.get_workspace(64)
        pool.get_workspace(64, there)
        in_thread(pool.get_workspace, 64, here)
        states.map(lambda _: pool.get_workspace(64).fill(2), range(4))
        here.begin_capture()
        captured = pool.get_workspace(64)
        pool.get_workspace(64)
        captured.fill(3)
        graph = here.end_capture()
        graph.launch(here)
        kept.fill(1)
        assert (kept.get() == 1).all()
        assert (captured.get() == 3).all()


def test_everything_works_with_checks_on(make_pool, in_thread):
    pool = make_pool(check=True)
    states = ParallelStates(3, pool=pool)
    pool.prewarm(states=3, workspace=100)
    pool.prewarm(states=2, workspace=200)
    expected = convolve(pool)
    for _ in range(3):
        assert all((y == expected).all() for y in states.map(lambda _: convolve(pool), range(6)))
        assert (in_thread(convolve, pool) == expected).all()
        with pool.driver.create_stream() as stream:
            pool.driver.destroy_handle(pool.get_handle())
            pool.driver.use_handle(pool.get_handle(), int)
            pool.get_handle(stream.ptr)
        with ParallelStateExecutor(2, pool=pool) as executor:
            assert (executor.submit(convolve, pool).result() == expected).all()
            assert (executor.submit(states.map, lambda _: convolve(pool), range(2)).result()[1] == expected).all()
    assert "of thread 'MainThread'" in repr(pool.get_handle())
    pool.trim(captured=True)
    pool.close()
    stats = pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"]


class Sharing(HostDriver):
    """A driver whose arrays share something between streams, as CuPy's do."""

    report = None

    def watch_shared_state(self, report, *, check=True):
        self.report = report

        def end():
            self.report = None

        return end


@pytest.mark.parametrize("name", ["cupy.fft", "cupy.random"])
def test_g16_what_streams_share_is_refused_in_branches_beside_each_other(make_pool, name):
    pool = make_pool(driver=Sharing(), check=True)

    def use():
        return pool.driver.report(name)

    states = ParallelStates(2, pool=pool)
    use()
    with states.fork() as fork:
        fork.run(use)
        with pytest.raises(
            ContractError, match=rf"{name} is used by .* on stream .* by a branch of thread 'MainThread' on stream 0x"
        ):
            fork.run(use)
        with pytest.raises(ContractError, match="before the outermost join"):
            use()  # in the body
        fork.run(use)  # on the first one's stream again
    use()
    for _ in range(2):
        states.map(lambda _: use(), range(1))
        with states.fork() as fork:
            fork.run(states.with_state, 0, lambda state: use())
        states.with_state(1, lambda state: use())


@pytest.mark.parametrize("name", ["cupy.fft", "cupy.random"])
@pytest.mark.parametrize("where", ["branch", "task"])
def test_g16_two_streams_in_one_outermost_region_are_refused_also_where_forks_inside_order_them(make_pool, name, where):
    pool = make_pool(driver=Sharing(), check=True)
    states = ParallelStates(2, pool=pool)
    ran = []

    def use():
        pool.driver.report(name)

    def outer():
        use()
        with states.fork() as fork, pytest.raises(ContractError, match="before the outermost join"):
            fork.run(use)
        use()
        ran.append(where)

    with ParallelStateExecutor(1, pool=pool) as executor, states.fork() as fork:
        if where == "task":
            executor.submit(outer).result()
        else:
            fork.run(outer)
    use()
    assert ran == [where]


def a_sibling_of_the_branch_that_asked(states, executor, use, _):
    with states.fork() as inner:
        inner.run(lambda: executor.submit(use).result())
        inner.run(use)


def the_body_of_the_fork_whose_branch_asked(states, executor, use, _):
    with states.fork() as inner:
        inner.run(lambda: executor.submit(use).result())
        use()


def a_branch_for_which_another_thread_asked(_, executor, use, in_thread):
    in_thread(executor.submit(use).result)
    use()


def a_branch_after_a_join_that_failed(states, _, use, __):
    def left_capturing():
        use()
        handlepool.pool.default.current_pool().driver.current_stream().begin_capture("relaxed")

    with pytest.raises(CaptureError, match="began to capture its stream"), states.fork() as inner:
        inner.run(left_capturing)
    use()


@pytest.mark.parametrize(
    "beside",
    [
        a_sibling_of_the_branch_that_asked,
        the_body_of_the_fork_whose_branch_asked,
        a_branch_for_which_another_thread_asked,
        a_branch_after_a_join_that_failed,
    ],
)
def test_g16_what_streams_share_is_refused_in_branches_where_nothing_waits_for_it(make_pool, in_thread, beside):
    pool = make_pool(driver=Sharing(), check=True)
    states = ParallelStates(2, pool=pool)

    def use():
        pool.driver.report("cupy.random")

    with (
        pool.driver.create_stream(),
        ParallelStateExecutor(1, pool=pool) as executor,
        states.fork() as fork,
        pytest.raises(ContractError, match="before the outermost join"),
    ):
        fork.run(beside, states, executor, use, in_thread)


def test_g16_a_generator_is_shared_by_threads_and_plans_are_not(make_pool, in_thread):
    pool = make_pool(driver=Sharing(), check=True)
    with ParallelStates(1, pool=pool).fork() as fork:
        fork.run(lambda: (pool.driver.report("cupy.fft"), pool.driver.report("cupy.random")))
        in_thread(ParallelStates(1, pool=pool).map, pool.driver.report, ["cupy.fft"])
        with pytest.raises(ContractError, match=r"cupy\.random"):
            in_thread(ParallelStates(1, pool=pool).map, pool.driver.report, ["cupy.random"])


def test_g16_the_watch_ends_with_the_pool(make_pool):
    driver = Sharing()
    pool = make_pool(driver=driver, check=True)
    pool.get_handle()
    assert driver.report is not None
    pool.close()
    assert driver.report is None


@pytest.mark.parametrize("whose", ["a user's capture", "a program"])
def test_memory_that_a_workspace_of_a_capture_had_may_become_an_arrays(make_pool, whose):
    pool = make_pool(check=True)
    stream = pool.driver.create_stream()
    slots, given = hidden([]), hidden([])

    def work():
        slots().append(pool.internals.slot())
        workspace = pool.get_workspace(512)
        given().append(pool.driver.array_pointer(workspace))
        pool.driver.enqueue(pool.driver.current_stream().ptr, lambda given: given.fill(1), writes=[workspace], reads=[])
        return workspace

    with stream:
        pool.get_handle()
        if whose == "a program":
            program = handlepool.record(work, pool=pool)
        else:
            stream.begin_capture("thread_local")
            work()
            graph = stream.end_capture()
    assert slots()[-1].handed_out(given()[-1]) == (whose != "a program")  # recorded on a stream of its own, which is gone
    if whose == "a program":
        program.close()
    else:
        del graph
        pool.trim(captured=True)
    assert not slots()[-1].handed_out(given()[-1])


def test_without_checks_nothing_is_wrapped_or_watched(make_pool, in_thread):
    driver = Sharing(checks=False)
    pool = make_pool(driver=driver)
    handle = pool.get_handle()
    assert pool.driver is driver
    assert type(pool.internals.slot()) is Slot
    assert driver.report is None
    assert vars(type(handle)).get("backend_handle") is None
    in_thread(driver.use_handle, handle, int)


@pytest.mark.parametrize(
    ("value", "checked"), [*dict.fromkeys((None, "", "0", "off", "No", "FALSE"), False).items(), ("1", True), ("on", True)]
)
def test_the_environment_decides_where_nothing_is_said(monkeypatch, value, checked):
    monkeypatch.delenv("HANDLEPOOL_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("HANDLEPOOL_CHECK", value)
    assert HandlePool(driver="host").internals.checked == checked
    with HandlePool(driver="host", check=True) as pool:  # or the driver would go on to check what other tests do
        assert type(pool.internals.slot()) is CheckedSlot
    assert type(HandlePool(driver="host", check=False).internals.slot()) is Slot


@pytest.mark.cupy
def test_cupys_functions_are_replaced_while_a_pool_watches_alone():
    program = """
from cupy.fft import _fft
from cupy.random import _generator
from handlepool.drivers.cuda import shared

before = _fft.get_plan_cache, _generator.get_random_state
names = []
first, second = shared.watch(names.append), shared.watch(names.append)
assert _fft.get_plan_cache is not before[0]
for use in (_fft.get_plan_cache, _generator.get_random_state):
    try:
        use()
    except Exception:
        pass  # there may be no GPU
assert names == ["cupy.fft"] * 2 + ["cupy.random"] * 2, names
first()
first()
assert _fft.get_plan_cache is not before[0]
second()
assert (_fft.get_plan_cache, _generator.get_random_state) == before
"""
    pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
