"""Enqueue calls of recorded functions as requests of clients.

A client's requests run on a stream of their own, or on the current stream for a call that has no program yet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from handlepool.drivers.protocol import Driver
from handlepool.pool.internals import PoolInternals
from handlepool.recording.hits import MISSED
from handlepool.recording.outputs import steps_without_gaps
from handlepool.recording.sharing import rebuilt
from handlepool.regions.future import StreamFuture, Task
from handlepool.regions.requests import Requests
from handlepool.tensors.layout import one_run

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_NUMBERS = "biufc"
"""The kinds (``dtype.kind``) of NumPy's types that a device array may have."""


class Served(Protocol):
    """A recorded function, as `request` uses it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""

    def _known(self, args: tuple[Any, ...], stream: Any, begin: Callable[[], None]) -> Any:
        """Enqueue a call; return `MISSED` if it has no program yet."""


def request(
    function: Served, pool: PoolInternals, requests: Requests, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StreamFuture[Any]:
    """Enqueue a request, and return its future.

    Arrays of NumPy are copied to the device through page-locked memory. If the call has no program yet, it runs on the current
    stream, and is recorded.

    Parameters
    ----------
    function : Served
    pool : PoolInternals
    requests : Requests
    task : Task
        The task of the request, made on the current stream.
    args, kwargs
        Values that `takes` accepts.
    """
    driver, events, caller = pool.driver, task.device.edges, task.stream
    stream = requests.stream(pool, task.device)
    bring: list[tuple[Any, Any]] = []
    kept: list[Any] = [args, kwargs]

    def on_device(value: Any) -> Any:
        if type(value) is not np.ndarray:
            return value
        with driver.relaxed():
            array = driver.empty(value.shape, steps_without_gaps(value), value.dtype)
        bring.append((array, value))
        return array

    def begin() -> None:
        # `restart` lets the request's stream wait for an event on the current stream. The event is recorded after the
        # allocations, because earlier work on the current stream may still use the allocated memory.
        task.restart(stream.ptr)
        with driver.relaxed():
            kept.extend([driver.copy_from_host(array, values, stream.ptr) for array, values in bring])

    future: StreamFuture[Any] = StreamFuture(task)
    try:
        staged = tuple([on_device(value) for value in args])
        named = {name: on_device(value) for name, value in kwargs.items()}
        kept += staged, named
        # From here on, the request's stream may have work. So the task is finished in any case, even if an error is raised.
        try:
            value = MISSED if named else function._known(staged, stream, begin)  # noqa: SLF001 - the protocol is for this
            if value is MISSED:
                # The call runs on the current stream, which first waits for the client's earlier requests.
                events.order(stream.ptr, caller.ptr)
                stream = caller
                begin()
                value = function(*staged, **named)
            kept.append(value)
            to_host = bool(bring) if requests.to is None else requests.to == "host"
            if to_host:
                value = rebuilt(value, partial(_to_host, driver, stream))
                kept.append(value)
        finally:
            task.region.keep(kept)
            task.finish(stream.ptr)
            requests.add(task)
    except Exception as error:
        pool.status.diagnose(error)
        task.withdraw()
        future.set_exception(error)
        return future
    except BaseException:
        task.withdraw()
        raise
    if to_host:
        return requests.future(task, lambda: rebuilt(value, _copied))
    future.set_result(value)
    return future


def takes(driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call can be a request.

    It can if each argument is an array of the driver, an array of NumPy, or a plain value.
    """
    native: Any = driver.array_types[0]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is not native and kind not in _PLAIN and not (kind is np.ndarray and value.dtype.kind in _NUMBERS):
            return False
    return True


def _to_host(driver: Driver, stream: Any, value: Any) -> Any:
    """Copy an array to the host on a stream.

    Other values are returned unchanged.
    """
    if not isinstance(value, driver.array_types):
        return value
    array: Any = value
    if one_run(array.shape, array.strides, array.strides, array.dtype.itemsize):
        with driver.relaxed():
            return driver.copy_to_host(array, stream.ptr)
    # The array has gaps: the function returned an argument or a weight. `asnumpy` copies it, and the host waits for the copy.
    before = driver.current_stream()
    driver.push_stream(stream)
    try:
        return driver.asnumpy(array)
    finally:
        driver.pop_stream(stream, before)


def _copied(value: object) -> Any:
    """Copy a host array out of page-locked memory.

    Later requests use the page-locked memory again.
    """
    return np.array(value, order="K") if isinstance(value, np.ndarray) else value
