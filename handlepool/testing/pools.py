"""Replace the default pool during a test.

There are three replacements: a pool without a GPU, a pool with a GPU and checks, and a refusal of any use of a GPU. The pytest
plugin offers these functions as fixtures. With other test runners, use them in ``with`` statements.
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

    The pool refuses the inputs that CuPy refuses. It detects each pair of accesses whose order is missing. Work is queued as on a
    GPU, and runs in an order that the seed selects. Unwritten memory holds NaN. In the calling thread, a new stream is current.

    Parameters
    ----------
    seed : int
        Selects the order in which queued work runs.

    Yields
    ------
    HandlePool
        The pool. At the end, the function waits for the stream and closes the pool. ``driver.order.found`` lists the conflicts
        that were raised. A test that expects a conflict has to clear this list.

    Raises
    ------
    ContractError, AssertionError
        At the end, for errors of queued work, and for conflicts whose errors the tested code caught.
    """
    from handlepool.drivers.host.driver import HostDriver

    driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True, strict=True)
    with _as_default(driver) as pool:
        yield pool
    assert driver.order is not None
    # The tested code may have caught the error of an access. The test must fail even then.
    if found := driver.order.found:
        raise AssertionError(
            f"the code under test made accesses without order, and caught the errors ({len(found)} in all). The "
            f"first error: {found[0]}"
        )


@contextmanager
def gpu_pool() -> Iterator[HandlePool]:
    """Use a new GPU pool with checks as the default pool.

    The pool is made with ``check=True``, and lasts to the end of the ``with`` statement. A separate stream is current in the
    calling thread.

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
            # The test may have left a capture of another stream open, which could refuse the wait. Under `relaxed` the wait
            # succeeds.
            with driver.relaxed():
                driver.synchronize_stream(stream.ptr)


@contextmanager
def no_gpu() -> Iterator[None]:
    """Forbid any use of CUDA.

    A pool that asks for a GPU is refused. When the block ends, the function detects whether another library started CUDA in the
    block, because CUDA then opens device files of the GPU. If these files were open before the block, it detects no such use.

    Raises
    ------
    AssertionError
        At once, in code that asks handlepool for a GPU. The function also raises at the end of the block, if that code caught the
        error, or if another library used CUDA.
    """
    opened = _opened()
    nobody = _Nobody()
    # A pool loads its driver by name at its first use. So replace the driver named "cuda" by an object that refuses any use.
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
        raise AssertionError(
            f"this test must not touch a GPU, and some code started CUDA, which opened {', '.join(sorted(more))}; keep "
            "that code out of the test"
        )


REFUSAL = (
    "this test must not touch a GPU, and some code asked handlepool for a GPU: let the test use the fixture "
    "handlepool_host_pool, or pass pool=HandlePool(driver='host')"
)


class _Nobody:
    """Replace the cuda driver, and refuse any use."""

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
        # The tested code may catch the error, so `no_gpu` reads this flag at the end.
        self.asked = True
        raise AssertionError(REFUSAL)


def _opened() -> set[str]:
    """Return the device files of the GPU that this process has open.

    CUDA opens such files when it starts.
    """
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(os.readlink(entry.path))
        # Another thread has closed the file meanwhile.
        except OSError:
            continue
    return {path for path in found if path.startswith("/dev/nvidia")}
