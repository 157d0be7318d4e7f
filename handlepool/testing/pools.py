"""Replace the default pool during a test.

The replacement runs without a GPU, with a GPU and its checks, or refuses any use of a GPU. The pytest plugin makes fixtures
of these functions; other test runners use the ``with`` statements.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast

from handlepool import drivers
from handlepool.drivers.protocol import Driver
from handlepool.pool.default import default_pool, substitute_default
from handlepool.pool.pool import HandlePool


@contextmanager
def host_pool(*, seed: int = 0) -> Iterator[HandlePool]:
    """Make a pool without a GPU the default pool.

    The pool refuses the same input as CuPy, and detects every missing order. Work is queued as on a GPU, and runs in an
    order that the seed picks. Unwritten memory holds NaN. A separate stream is current in the calling thread.

    Parameters
    ----------
    seed : int
        Selects the order of the queued work.

    Yields
    ------
    HandlePool
        Closed at the end, when the stream has run its work. ``driver.order.found`` lists the conflicts that were
        raised. A test that expects a conflict clears the list.

    Raises
    ------
    ContractError, AssertionError
        At the end, for errors of queued work, and for conflicts that the code under test swallowed.
    """
    from handlepool.drivers.host.driver import HostDriver

    driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True, strict=True)
    with _as_default(driver) as pool:
        yield pool
    assert driver.order is not None
    # The code under test may catch the error at the access. The test must fail all the same.
    if found := driver.order.found:
        raise AssertionError(f"the code under test swallowed errors of missing order, {len(found)} in all, the first: {found[0]}")


@contextmanager
def gpu_pool() -> Iterator[HandlePool]:
    """Make a pool on the GPU, with its checks, the default pool.

    A separate stream is current in the calling thread.

    Raises
    ------
    DriverNotAvailableError
        If there is no GPU.
    """
    with _as_default(drivers.load("cuda")) as pool:
        yield pool


@contextmanager
def _as_default(driver: Driver) -> Iterator[HandlePool]:
    with HandlePool(driver=driver, check=True) as pool, substitute_default(pool):
        previous, stream = driver.current_stream(), driver.create_stream()
        driver.push_stream(stream)
        try:
            yield pool
        finally:
            driver.pop_stream(stream, previous)
        if not driver.is_capturing(stream.ptr):
            # `relaxed` lets the wait succeed beside a capture that the test left open.
            with driver.relaxed():
                driver.synchronize_stream(stream.ptr)


@contextmanager
def no_gpu() -> Iterator[None]:
    """Forbid any use of CUDA.

    A request to handlepool for a GPU is refused. At the end, the GPU files that the process has opened reveal any use by
    other libraries. If such files were already open before, this second check shows nothing.

    Raises
    ------
    AssertionError
        At once, in the code that asks for a GPU. At the end, if that code swallowed the error, or if another library
        touched CUDA.
    """
    opened = _opened()
    nobody = _Nobody()
    # A pool loads its driver by name at its first use. So the name itself has to lead to the refusal.
    former = drivers.replace("cuda", cast(Driver, nobody))
    try:
        with ExitStack() as stack:
            used = default_pool().internals.status.driver
            if used is not None and used.name == "cuda":
                pool = stack.enter_context(HandlePool(driver=cast(Driver, nobody)))
                stack.enter_context(substitute_default(pool))
            yield
    finally:
        drivers.replace("cuda", former)
    if nobody.asked:
        raise AssertionError(REFUSAL)
    if more := _opened() - opened:
        raise AssertionError(f"this test must not touch a GPU, and some code has opened {', '.join(sorted(more))}")


REFUSAL = (
    "this test must not touch a GPU, and something asked handlepool for one: let the test use the fixture handlepool_host_pool, "
    "or pass pool=HandlePool(driver='host')"
)


class _Nobody:
    """Take the place of the cuda driver, and refuse any use."""

    name = "cuda"

    def __init__(self) -> None:
        self.asked = False

    def current_device(self) -> int:
        self._refuse()

    def context_lost(self, error: BaseException | None, ask: bool = True) -> None:
        """Return None: there was never a context to lose."""

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        # The code under test may catch the error. The fixture looks at this flag afterwards.
        self.asked = True
        raise AssertionError(REFUSAL)


def _opened() -> set[str]:
    """Return the GPU files that this process has open.

    CUDA opens these files when it starts.
    """
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(os.readlink(entry.path))
        # Another thread closed the file meanwhile.
        except OSError:
            continue
    return {path for path in found if path.startswith("/dev/nvidia")}
