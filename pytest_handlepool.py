"""Provide pytest fixtures for the tests of libraries that use handlepool.

Where handlepool is installed, pytest imports this module in every run. An import of any module of the package imports the whole
package. So this module lies outside the package, and imports the package only when a test uses a fixture. The fixtures are
implemented in `handlepool.testing`.
"""

import argparse
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options for the seeds of the host pool."""
    group = parser.getgroup("handlepool")
    group.addoption("--handlepool-seed", type=int, metavar="SEED", help="the only seed for tests that use handlepool_host_pool")
    group.addoption(
        "--handlepool-seeds",
        type=_count,
        default=5,
        metavar="COUNT",
        help="number of seeds for each test that uses handlepool_host_pool (5)",
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} seeds would run no test; pass a number of 1 or more")
    return int(text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses the host pool once for each seed."""
    if "handlepool_seed" in metafunc.fixturenames:
        seed = metafunc.config.getoption("handlepool_seed")
        seeds = range(metafunc.config.getoption("handlepool_seeds")) if seed is None else [seed]
        metafunc.parametrize("handlepool_seed", seeds, indirect=True, ids=lambda seed: f"seed{seed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the scheduler's seed and an explanation to a failed test's report.

    The hook also notes on ``item`` that the test failed.
    """
    if call.excinfo is not None and "handlepool.errors" in sys.modules:
        _explain(item, call.excinfo)
    report = yield
    if report.failed:
        item.stash[_failed] = True
        seed = getattr(getattr(item, "callspec", None), "params", {}).get("handlepool_seed")
        if seed is not None:
            repeat = f"pytest '{item.nodeid}' --handlepool-seed={seed}"
            report.sections.append(("handlepool", f"The scheduler's seed was {seed}. This command repeats the test: {repeat}"))
    return report


def _explain(item: pytest.Item, info: pytest.ExceptionInfo[BaseException]) -> None:
    """Explain the error of a failed test.

    If the test found no GPU, a note names a fixture that needs no GPU. If the package raised the error, the traceback ends at the
    last line of the test's own code.
    """
    from handlepool.errors import DriverNotAvailableError, HandlePoolError

    fixtures = getattr(item, "fixturenames", ())
    if isinstance(info.value, DriverNotAvailableError) and "handlepool_host_pool" not in fixtures:
        info.value.add_note("To run this test without a GPU, use the fixture handlepool_host_pool.")
    ours = isinstance(info.value, HandlePoolError) and any(name.startswith("handlepool_") for name in fixtures)
    if ours and not item.config.getoption("fulltrace"):
        last = info.tb
        entry: TracebackType | None = last
        while entry is not None:
            if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] not in ("handlepool", "numpy"):
                last = entry
            entry = entry.tb_next
        last.tb_next = None


@pytest.fixture
def handlepool_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of the host pool's scheduler."""
    return int(getattr(request, "param", request.config.getoption("handlepool_seed") or 0))


@pytest.fixture
def handlepool_host_pool(request: pytest.FixtureRequest, handlepool_seed: int) -> Iterator[Any]:
    """Make a pool that needs no GPU the default pool of the test.

    Each test that uses this fixture runs once for each seed. See `handlepool.testing.pools.host_pool`.
    """
    from handlepool.testing.pools import host_pool

    yield from _during(request, host_pool(seed=handlepool_seed))


@pytest.fixture
def handlepool_gpu_pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make a pool on the GPU the default pool of the test.

    Without a GPU the test is skipped, with the reason.
    """
    from handlepool import drivers
    from handlepool.testing.pools import gpu_pool

    if problem := drivers.available("cuda"):
        pytest.skip(f"needs an NVIDIA GPU: {problem}")
    yield from _during(request, gpu_pool())


@pytest.fixture
def handlepool_no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if any code uses CUDA during the test."""
    from handlepool.testing.pools import no_gpu

    yield from _during(request, no_gpu())


@pytest.fixture
def handlepool_leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaks a slot, scratch, a program or a capture."""
    for name in ("handlepool_host_pool", "handlepool_gpu_pool"):
        if name in request.fixturenames:
            # The pool's fixture must be set up before this fixture, so that the pool ends after the check.
            request.getfixturevalue(name)

    from handlepool import default_pool
    from handlepool.testing.leaks import leak_check

    yield from _during(request, leak_check(default_pool()))


def _during(request: pytest.FixtureRequest, context: AbstractContextManager[T]) -> Iterator[T]:
    """Yield the value of ``context`` to a test, then end the context.

    If the test has failed already, an error from the end of the context is dropped.
    """
    try:
        with context as value:
            yield value
    except Exception as error:
        if request.node.stash.get(_failed, False):
            return
        from handlepool.errors import HandlePoolError

        # The traceback has no line of the test, so pytest shows only the message.
        if isinstance(error, (AssertionError, HandlePoolError)):
            raise pytest.fail.Exception(f"{type(error).__name__}: {error}", pytrace=False) from None
        raise
