"""Pools that do the default pool's work while a test runs: without a GPU, with one, and none that touches one.

The pytest plugin makes fixtures of these; other test runners use the ``with`` statements.
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
    """Let a pool without a GPU be the default one, which refuses what CuPy refuses and finds every order that is missing.

    Work is queued as on a GPU, and runs in an order that the seed picks. Memory that nobody has written yet is NaN. A stream of
    its own is current in the calling thread.

    Parameters
    ----------
    seed : int
        Another one, another order.

    Yields
    ------
    HandlePool
        Closed at the end, when the stream has run what it was given. ``driver.order.found`` has the conflicts that were raised:
        a test that expects one clears it.

    Raises
    ------
    ContractError, AssertionError
        At the end, for what queued work failed with, and for conflicts that the code under test swallowed.
    """
    from handlepool.drivers.host.driver import HostDriver

    driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True, strict=True)
    with _as_default(driver) as pool:
        yield pool
    assert driver.order is not None
    if found := driver.order.found:
        raise AssertionError(f"the code under test swallowed errors of missing order, {len(found)} in all, the first: {found[0]}")


@contextmanager
def gpu_pool() -> Iterator[HandlePool]:
    """Let a pool on the GPU, with its checks, be the default one, with a stream of its own current in the calling thread.

    Raises
    ------
    DriverNotAvailableError
        Where there is no GPU.
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
            with driver.relaxed():  # also beside a capture that the test left open
                driver.synchronize_stream(stream.ptr)


@contextmanager
def no_gpu() -> Iterator[None]:
    """Let nobody touch CUDA.

    Whoever asks handlepool for a GPU is refused. What other libraries do is seen at the end, by the GPU's files that the process
    has opened; once something has opened them before, that shows nothing.

    Raises
    ------
    AssertionError
        At once, in the code that asks for a GPU; at the end, where that swallowed the error, or CUDA was touched otherwise.
    """
    opened = _opened()
    nobody = _Nobody()
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
        raise AssertionError(f"this test must not touch a GPU, and something has opened {', '.join(sorted(more))}")


REFUSAL = (
    "this test must not touch a GPU, and something asked handlepool for one: let the test use the fixture handlepool_host_pool, "
    "or pass pool=HandlePool(driver='host')"
)


class _Nobody:
    """Stands where the cuda driver would, and refuses."""

    name = "cuda"

    def __init__(self) -> None:
        self.asked = False

    def current_device(self) -> int:
        self._refuse()

    def context_lost(self, error: BaseException | None, ask: bool = True) -> None:
        """None: no context was ever there to lose."""

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self.asked = True
        raise AssertionError(REFUSAL)


def _opened() -> set[str]:
    """List the GPU's files that this process has open: CUDA opens them as it begins."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(os.readlink(entry.path))
        except OSError:  # it was closed meanwhile
            continue
    return {path for path in found if path.startswith("/dev/nvidia")}
