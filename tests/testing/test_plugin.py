"""The pytest plugin, as the tests of a library that uses handlepool see it: each run is a process of its own."""

import subprocess
import sys

import numpy as np
import pytest
from harness.insides import loaded_drivers

import handlepool
from handlepool import drivers
from handlepool.testing import pools
from handlepool.testing.leaks import leak_check

pytest_plugins = "pytester"

BEGIN = """
import numpy as np
import handlepool

KEPT = []

def arrays(pool, *shapes):
    return [pool.driver.asarray(np.ones(shape, np.float32)) for shape in shapes]

"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a file of tests with the plugin: ``run(source, *options)``."""
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "cuda")

    def run(source, *options):
        pytester.makepyfile(test_library=BEGIN + source)
        return pytester.runpytest_subprocess("-p", "pytest_handlepool", *options)

    return run


def test_the_plugin_imports_neither_the_package_nor_an_array_library():
    program = "import sys, pytest_handlepool; print([m for m in ('handlepool', 'numpy', 'cupy', 'cudnn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


TESTS = """
def test_module_functions_use_the_pool_of_the_test(handlepool_host_pool):
    x, w = arrays(handlepool_host_pool, (1, 4, 6, 6), (4, 4, 3, 3))
    ys = handlepool.ParallelStates(2).map(handlepool.conv2d, [x, x], [w, w])
    assert (ys[1].get() == 36).all()
    assert handlepool.get_handle() is handlepool_host_pool.get_handle()

def test_of_one_seed(handlepool_host_pool, handlepool_seed):
    assert handlepool_seed != 1

def test_race(handlepool_host_pool):
    x, = arrays(handlepool_host_pool, 64)
    with handlepool_host_pool.driver.create_stream():
        x + 1

def test_swallowed_race(handlepool_host_pool):
    x, = arrays(handlepool_host_pool, 64)
    with handlepool_host_pool.driver.create_stream():
        try:
            x + 1
        except Exception:
            pass

def test_what_cupy_refuses(handlepool_host_pool):
    x, = arrays(handlepool_host_pool, 64)
    np.asarray(x)

def test_on_a_gpu(handlepool_gpu_pool):
    assert handlepool_gpu_pool.driver.name == "cuda"
"""


@pytest.mark.slow
def test_each_test_runs_for_several_seeds_and_one_that_fails_prints_its_own(run):
    done = run(TESTS, "--handlepool-seeds=2")
    gpu = drivers.available("cuda") is None
    done.assert_outcomes(passed=5 + gpu, failed=5, errors=2, skipped=1 - gpu)
    done.stdout.fnmatch_lines(
        ["*The scheduler's seed was 1. This command repeats the test: pytest 'test_library.py::test_of_one_seed?seed1?' *=1"]
    )
    done.stdout.fnmatch_lines(["*ContractError: not ordered: 'add' on *test_library.py:*"])
    done.stdout.fnmatch_lines(
        ["*AssertionError: the code under test made accesses without order, and caught the errors (1 in all). The first error: *"]
    )
    done.stdout.fnmatch_lines(["*ArrayTypeError: *"])


SHORT = """
def library(x):
    return x + 1

def test_race(handlepool_host_pool):
    x, = arrays(handlepool_host_pool, 64)
    with handlepool_host_pool.driver.create_stream():
        library(x)

def test_leak(handlepool_host_pool, handlepool_leak_check):
    KEPT.append(handlepool_host_pool.driver.create_handle())
    KEPT.append(handlepool_host_pool.driver.create_handle())

def test_no_fixture():
    handlepool.get_handle()
"""


@pytest.mark.slow
def test_a_report_ends_at_the_tests_own_line(run):
    done = run(SHORT, "--handlepool-seeds=1", "-k", "not fixture")
    done.assert_outcomes(failed=1, passed=1, errors=1, deselected=1)
    done.stdout.no_fnmatch_line("*handlepool/*")
    done.stdout.no_fnmatch_line("*mixins.py*")
    done.stdout.fnmatch_lines(["AssertionError: this test leaks 2 handles that no slot has (*"])
    done.stdout.fnmatch_lines([">*return x + 1", "E*ContractError: not ordered*", "test_library.py:*: ContractError"])
    run(SHORT, "--handlepool-seeds=1", "-k", "race", "--full-trace").stdout.fnmatch_lines(["*race_checker.py:*: ContractError"])


@pytest.mark.parametrize("count", ["0", "-1", "few"])
def test_a_number_of_seeds_that_would_run_nothing_is_a_usage_error(run, count):
    done = run(SHORT, f"--handlepool-seeds={count}")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*--handlepool-seeds:*{count}*"])


@pytest.mark.slow
@pytest.mark.skipif(drivers.available("cuda") is None, reason="there is a GPU")
def test_a_test_without_a_fixture_is_told_of_one_where_there_is_no_gpu(run):
    done = run(SHORT, "-k", "no_fixture")
    done.stdout.fnmatch_lines(
        [
            "E*DriverNotAvailableError: *HANDLEPOOL_DRIVER=host*",
            "E*To run this test without a GPU, use the fixture handlepool_host_pool*",
        ]
    )


def test_a_seed_can_be_repeated(run):
    done = run(TESTS, "--handlepool-seed=1", "-k", "one_seed")
    done.assert_outcomes(failed=1, deselected=5)
    done.stdout.fnmatch_lines(["FAILED test_library.py::test_of_one_seed?seed1? *"])


LEAKS = """
import threading
import pytest

pytestmark = pytest.mark.usefixtures("handlepool_leak_check")

def test_nothing(handlepool_host_pool):
    pool = handlepool_host_pool
    x, w = arrays(pool, (1, 4, 6, 6), (4, 4, 3, 3))
    states = handlepool.ParallelStates(2)
    states.map(handlepool.conv2d, [x, x], [w, w])
    with handlepool.record(handlepool.conv2d, x, w) as program:
        program.replay()
    handlepool.record(handlepool.conv2d, x, w)  # dropped
    KEPT.extend([states, handlepool.get_workspace(1 << 20)])
    thread = threading.Thread(target=handlepool.get_handle)
    thread.start()
    thread.join()
    with handlepool.ParallelStateExecutor(2) as executor:
        executor.submit(handlepool.get_handle).result()

def test_slot(handlepool_host_pool):
    fork = handlepool.ParallelStates(2).fork()
    fork.__enter__()
    fork.run(handlepool.get_handle)
    KEPT.append(fork)

def test_slot_of_a_thread(handlepool_host_pool):
    has, stop = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (handlepool.get_handle(), has.set(), stop.wait(60)), daemon=True).start()
    assert has.wait(60)

def test_scratch(handlepool_host_pool):
    KEPT.append(handlepool_host_pool.driver.allocate(4096))

def test_scratch_of_a_capture(handlepool_host_pool):
    stream = handlepool_host_pool.driver.current_stream()
    stream.begin_capture()
    handlepool.get_workspace(4096)
    KEPT.append(stream.end_capture())

def test_program(handlepool_host_pool):
    KEPT.append(handlepool.record(handlepool.conv2d, *arrays(handlepool_host_pool, (1, 4, 6, 6), (4, 4, 3, 3))))

def test_capture(handlepool_host_pool):
    stream = handlepool_host_pool.driver.create_stream()
    stream.begin_capture()
    KEPT.append(stream)

def test_that_failed_hears_of_no_leak_as_well(handlepool_host_pool):
    test_program(handlepool_host_pool)
    raise ZeroDivisionError
"""


@pytest.mark.slow
def test_a_leak_fails_the_test_that_leaks_and_no_other(run):
    done = run(LEAKS, "--handlepool-seeds=1")
    done.assert_outcomes(passed=7, errors=6, failed=1)
    for name, words in {
        "slot": "*AssertionError: this test leaks 1 side slot that is leased (leave each fork, *",
        "slot_of_a_thread": "*leaks 1 slot of another thread that lives on (join each thread)",
        "scratch": "*leaks 4,096 bytes of the driver's memory that no slot has (*",
        "scratch_of_a_capture": "*leaks 4,096 bytes of scratch that captured graphs hold (*",
        "program": "*leaks <Program conv2d of device 0: *> (close it)",
        "capture": "*leaks 1 capture that is not over (end each capture)",
    }.items():
        done.stdout.fnmatch_lines([f"*ERROR at teardown of test_{name}?seed0?*", words])


GUARDED = """
import pytest

pytestmark = pytest.mark.usefixtures("handlepool_no_gpu")

def test_no_gpu(handlepool_host_pool):
    handlepool.get_handle()

def test_gpu():
    handlepool.get_handle()

def test_gpu_swallowed():
    try:
        handlepool.HandlePool(driver="cuda").get_handle()
    except Exception:
        pass
"""


def test_a_test_that_asks_for_a_gpu_where_none_is_to_be_used_fails_in_plain_words(run):
    done = run(GUARDED, "--handlepool-seeds=1")
    done.assert_outcomes(passed=2, failed=1, errors=1)
    done.stdout.fnmatch_lines(
        ["E*AssertionError: this test must not touch a GPU, and some code asked handlepool for a GPU: let *"]
    )


def test_the_guard_sees_a_gpu_that_another_library_opened(monkeypatch):
    opened = iter([{"/dev/nvidia0"}, {"/dev/nvidia0", "/dev/nvidiactl"}])
    monkeypatch.setattr(pools, "_opened", lambda: next(opened))
    with (
        pytest.raises(
            AssertionError, match=r"must not touch a GPU, and some code started CUDA, which opened /dev/nvidiactl; keep"
        ),
        pools.no_gpu(),
    ):
        pass


def test_the_guard_gives_the_driver_back(monkeypatch):
    monkeypatch.setattr(loaded_drivers(), "by_name", {})
    with pytest.raises(AssertionError, match="some code asked"), pools.no_gpu():
        handlepool.HandlePool(driver="cuda").get_handle()
    assert loaded_drivers().by_name == {}


def test_a_pool_that_was_on_a_gpu_before_the_guard_is_guarded_as_well(unused, monkeypatch):
    handle = handlepool.get_handle()
    monkeypatch.setattr(handlepool.default_pool().driver, "name", "cuda")
    with pytest.raises(AssertionError, match="some code asked"), pools.no_gpu():
        handlepool.get_handle()
    assert handlepool.get_handle() is handle


def test_without_pytest_there_are_with_statements():
    with pools.host_pool(seed=3) as pool, leak_check(pool):
        x, w = (pool.driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3)))
        assert (handlepool.conv2d(x, w).get() == 36).all()
        assert handlepool.get_handle() is pool.get_handle()
    assert pool.closed
