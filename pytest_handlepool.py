"""The pytest plugin: fixtures for the tests of libraries that use handlepool.

pytest imports this in every run of whoever has handlepool installed. So it stands outside of the package, whose every module
imports all of it, and imports that only when a fixture is asked for. What the fixtures do is in `handlepool.testing`.
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
    """Add the options for seeds."""
    group = parser.getgroup("handlepool")
    group.addoption("--handlepool-seed", type=int, metavar="SEED", help="the one seed for tests over handlepool_host_pool")
    group.addoption("--handlepool-seeds", type=_count, default=5, metavar="COUNT", help="how many seeds to run each over (5)")


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"with {text} seeds no test would run")
    return int(text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test over the host pool with several seeds."""
    if "handlepool_seed" in metafunc.fixturenames:
        seed = metafunc.config.getoption("handlepool_seed")
        seeds = range(metafunc.config.getoption("handlepool_seeds")) if seed is None else [seed]
        metafunc.parametrize("handlepool_seed", seeds, indirect=True, ids=lambda seed: f"seed{seed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what a test that fails needs: its seed, the fixture that it forgot, its own lines. Remember that it failed."""
    if call.excinfo is not None and "handlepool.errors" in sys.modules:
        _explain(item, call.excinfo)
    report = yield
    if report.failed:
        item.stash[_failed] = True
        seed = getattr(getattr(item, "callspec", None), "params", {}).get("handlepool_seed")
        if seed is not None:
            repeat = f"pytest '{item.nodeid}' --handlepool-seed={seed}"
            report.sections.append(("handlepool", f"The scheduler's seed was {seed}. This repeats it: {repeat}"))
    return report


def _explain(item: pytest.Item, info: pytest.ExceptionInfo[BaseException]) -> None:
    """Name the fixture that does without a GPU where there is none; end an error of the package's at the test's own line."""
    from handlepool.errors import DriverNotAvailableError, HandlePoolError

    fixtures = getattr(item, "fixturenames", ())
    if isinstance(info.value, DriverNotAvailableError) and "handlepool_host_pool" not in fixtures:
        info.value.add_note("A test that is to run without a GPU uses the fixture handlepool_host_pool.")
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
    """Give the seed of the host pool's scheduler."""
    return int(getattr(request, "param", request.config.getoption("handlepool_seed") or 0))


@pytest.fixture
def handlepool_host_pool(request: pytest.FixtureRequest, handlepool_seed: int) -> Iterator[Any]:
    """Give a pool that needs no GPU, for the test as the default one; each test runs once for each of several seeds.

    See `handlepool.testing.pools.host_pool`.
    """
    from handlepool.testing.pools import host_pool

    yield from _during(request, host_pool(seed=handlepool_seed))


@pytest.fixture
def handlepool_gpu_pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give a pool on the GPU, for the test as the default one; without a GPU the test is skipped, with the reason."""
    from handlepool import drivers
    from handlepool.testing.pools import gpu_pool

    if problem := drivers.available("cuda"):
        pytest.skip(f"needs an NVIDIA GPU: {problem}")
    yield from _during(request, gpu_pool())


@pytest.fixture
def handlepool_no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that touches CUDA."""
    from handlepool.testing.pools import no_gpu

    yield from _during(request, no_gpu())


@pytest.fixture
def handlepool_leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaks a slot, scratch memory, a program or a capture."""
    for name in ("handlepool_host_pool", "handlepool_gpu_pool"):
        if name in request.fixturenames:
            request.getfixturevalue(name)  # before this, so that it ends after this

    from handlepool import default_pool
    from handlepool.testing.leaks import leak_check

    yield from _during(request, leak_check(default_pool()))


def _during(request: pytest.FixtureRequest, context: AbstractContextManager[T]) -> Iterator[T]:
    """Give the test what a context gives. What the end complains of, a test that failed need not hear, too."""
    try:
        with context as value:
            yield value
    except Exception as error:
        if request.node.stash.get(_failed, False):
            return
        from handlepool.errors import HandlePoolError

        if isinstance(error, (AssertionError, HandlePoolError)):  # no line of the test's is to be seen there
            raise pytest.fail.Exception(f"{type(error).__name__}: {error}", pytrace=False) from None
        raise
