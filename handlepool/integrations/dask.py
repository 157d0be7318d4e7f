"""Run handlepool on Dask.

A plugin keeps the pool of each worker, and `map_tiles` runs functions over arrays of overlapping tiles. A worker is a process
that uses one device: the first device that it sees, as with dask-cuda. The threads of a worker share the pool and the programs
of `map_tiles`. Each thread has its own stream, and therefore its own handle.
"""

import asyncio
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum
from functools import lru_cache, partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask import delayed
from dask.array import Array
from dask.array.overlap import coerce_boundary, coerce_depth, overlap, trim_internal
from dask.base import tokenize
from distributed import Worker, WorkerPlugin, get_worker

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    HandlePool,
    HandlePoolError,
    OwnershipError,
    PoisonedContextError,
    Program,
    RecordedFunction,
)

_BOUNDARIES = ("reflect", "periodic", "nearest", "none")
_MOST_LANES = 32
MOST_FUNCTIONS = 16
"""The maximum number of functions that a worker keeps.

If there are more, the worker drops the least recently used function.
"""
MOST_PROGRAMS = 16
"""The maximum number of programs of a function.

Each program serves one geometry of tiles. If there are more, the worker drops the least recently used program. The tiles in the
middle, at the edges and in the corners of an image have up to nine geometries.
"""
_MOST_TOLD = 64
"""The maximum number of entries of a tuple that `_telling` examines.

Two tuples of one length that differ only in later entries count as equal.
"""
_NO_VALUE = CellType()
"""An empty cell, as of a closure's variable without a value."""
_CLOSING = 30.0
"""The maximum time in seconds that a task waits for its worker.

A task that finds the context of its device lost closes its worker, and waits. After this time, the task reports its error.
"""
_STEP = 3.0
"""The maximum time of each step of a closing worker, in seconds.

The time is short, because a longer time would save nothing: other workers compute the closed worker's results again in any
case.
"""

logger = logging.getLogger("distributed.worker.handlepool")


class PoolPlugin(WorkerPlugin):  # type: ignore[misc]  # distributed is untyped
    """Make a worker's handles early, and replace a broken worker.

    The handles exist before the first task. A closing worker releases idle resources. Dask replaces a worker that lost its CUDA
    context. Register the plugin with ``client.register_plugin(PoolPlugin())``. Later workers get the plugin, too. A second
    registration replaces the first registration. The plugin uses the default pool of the worker's process.

    Parameters
    ----------
    driver : {"cuda", "host"}, optional
        Driver of the default pool. By default the environment of the worker decides, and without a setting the driver
        is ``cuda``.
    states : int
        Side slots to make, for forks and for programs with lanes.
    workspace : int
        Bytes of scratch for each handle.

    Raises
    ------
    DriverNotAvailableError
        If the driver cannot run, for example on a machine without a GPU. The worker raises the error, and ``register_plugin``
        raises it again.
    ArgumentError
        If the default pool of the worker's process has another driver, and for sizes that `prewarm` refuses. The worker raises
        this error, too.
    """

    name = "handlepool"

    def __init__(self, *, driver: str | None = None, states: int = 0, workspace: int = 0) -> None:
        self.driver, self.states, self.workspace = driver, states, workspace

    def setup(self, worker: Worker) -> None:
        """Make the pool, and handles for the worker's threads."""
        self._worker = worker
        if self.driver is not None:
            _choose(self.driver)
        driver = handlepool.default_pool().driver
        seen, first = driver.device_count(), worker.name in (0, "0")
        if driver.name == "cuda" and seen > 1 and not first and "CUDA_VISIBLE_DEVICES" not in os.environ:
            logger.warning(
                "worker %s computes on the first of %d GPUs, as all workers of this machine do: start the workers with "
                "dask-cuda, or give each worker another CUDA_VISIBLE_DEVICES",
                worker.name,
                seen,
            )
        count = worker.state.nthreads
        # All threads must hold their handles at the same time. If a thread ended early, the next thread would reuse its handle,
        # and fewer than ``count`` handles would be made.
        together = threading.Barrier(count)

        def make(states: int) -> None:
            try:
                handlepool.prewarm(states=states, workspace=self.workspace)
                together.wait()
            except BaseException:
                together.abort()
                raise

        # When these threads end, their handles become idle. Later the worker's own threads take these handles.
        with ThreadPoolExecutor(count) as threads:
            try:
                made = [threads.submit(make, 0 if thread else self.states) for thread in range(count)]
            # If a thread could not be started, the threads that already wait at the barrier must be released.
            except BaseException:
                together.abort()
                raise
        errors = [error for future in made if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])

    def teardown(self, worker: Worker) -> None:
        """Release all programs, and destroy idle resources."""
        _functions.clear()
        handlepool.close()

    def transition(self, key: object, start: str, finish: str, **kwargs: object) -> None:
        """Close the worker if a task failed because the context is lost.

        If the worker went on, every later task would fail in this worker.
        """
        if finish == "error" and _is_lost():
            _leave(self._worker)

    def __repr__(self) -> str:
        return f"PoolPlugin(driver={self.driver!r}, states={self.states}, workspace={self.workspace})"


def map_tiles(
    function: Callable[..., Any],
    x: Array,
    *,
    depth: object,
    shared: Sequence[Any] = (),
    boundary: object = "none",
    extents: Mapping[int, int] | None = None,
    dtype: Any = None,
    lanes: int | None = 8,
) -> Array:
    """Map a function over an array's chunks, extended by margins.

    Each chunk is extended by a margin of its neighbours, and each result is trimmed. The call is lazy. ``function(tile,
    *shared)`` is recorded once for each worker and geometry of a tile, and replayed for each further tile. If it cannot
    be recorded, it runs eagerly, and a ``RuntimeWarning`` gives the reason in the worker. Without a cluster everything
    runs in this process.

    Parameters
    ----------
    function : callable
        As for `spread`: takes an array of the driver and the values of ``shared``, and returns one array as large as the tile.
        Dask sends it to the workers: a function of a module by its name, any other function by its value.
    x : dask.array.Array
        An array whose chunks are NumPy arrays.
    depth, boundary
        As for `dask.array.map_overlap`: the reach of the function beyond its chunk, and the values beyond the array. By
        default there are no values beyond the array, and the function pads at the array's edges itself.
    shared : sequence
        Further arguments, such as weights: NumPy arrays with their present contents, numbers and strings. They are
        copied to each worker's device once, and keep their layout. The function must not write to them.
    extents : mapping, optional
        New extents, by axis, for axes whose extent the function changes, such as channels. Such an axis must have one chunk, and
        no depth.
    dtype : optional
        Type of the function's result; the type of ``x`` by default.
    lanes : int, optional
        As in `record`; None records the order of streams and forks.

    Returns
    -------
    dask.array.Array
        Its chunks are NumPy arrays. Every worker computes tiles of one geometry in the same way. With deterministic plans the
        bits are therefore the same as in one process.

    Raises
    ------
    ArgumentError
        For an object that is not a function or not a Dask array. For a program: pass the function that was recorded. For a
        ``depth`` or ``boundary`` that names axes outside ``x`` or leaves out axes. For ``extents`` of an axis with several
        chunks or a depth. For a result of another shape or type: the task raises this error, with the place of its tile.
    ArrayTypeError
        For other values in ``shared``. For a tile that is not a NumPy array: the task raises this error.

    Notes
    -----
    Workers treat a function as new if its code, its defaults or its closure changed. A number, a text or a function among the
    globals that the function names counts in the same way. The comparison also examines functions and operations that the
    function calls by these names, to a depth of four. The comparison ignores changes inside an object, a class or a container:
    pass such values in ``shared``.

    A task that finds the context of its device lost closes its worker. Other workers then compute the tiles of that worker, and
    again the tiles whose results it held.
    """
    name = _name(function)
    if isinstance(function, Program) or not callable(function):
        raise ArgumentError(
            f"map_tiles was given {function!r}: pass a function that takes a tile; each worker records this function itself"
        )
    if not isinstance(x, Array):
        raise ArgumentError(f"map_tiles({name}): x is of type {type(x).__name__}; pass a dask.array.Array")
    if not isinstance(shared, (list, tuple)):
        raise ArgumentError(
            f"map_tiles({name}): shared is of type {type(shared).__name__}; pass a tuple of arguments, for example (weights,)"
        )
    for value in shared:
        if not isinstance(value, (np.ndarray, np.generic, int, float, str)) or isinstance(value, np.ma.MaskedArray):
            raise ArrayTypeError(
                f"map_tiles({name}): shared holds a value of type {type(value).__name__}; pass NumPy arrays, real numbers "
                "or strings"
            )
    if lanes is not None and not (type(lanes) is int and 1 <= lanes <= _MOST_LANES):
        raise ArgumentError(f"map_tiles({name}, lanes={lanes!r}): lanes must be an integer from 1 to {_MOST_LANES}, or None")
    # The token below identifies the shared arrays by their present contents. So the arrays are copied now, before the caller
    # can write to them.
    shared = tuple([_packed(value) if isinstance(value, np.ndarray) else value for value in shared])
    depth, boundary = _margins(name, x.ndim, depth, boundary)
    # If no axis has a margin, `overlap` is not called, so that each tile stays a single task.
    alone = all(beyond in (0, (0, 0)) for beyond in depth.values())
    tiles = x if alone else overlap(x, depth=depth, boundary=boundary)
    if extents is not None and not isinstance(extents, Mapping):
        raise ArgumentError(
            f"map_tiles({name}): extents is of type {type(extents).__name__}; pass a dictionary, such as {{1: 8}}"
        )
    extents, chunks = dict(extents or {}), list(tiles.chunks)
    for axis, extent in extents.items():
        if not _counts(extent):
            raise ArgumentError(
                f"map_tiles({name}): extents has {extent!r} for axis {axis!r}; an extent must be an integer of 0 or more"
            )
        if axis not in range(x.ndim) or len(chunks[axis]) != 1 or depth[axis] not in (0, (0, 0)):
            raise ArgumentError(f"map_tiles({name}): extents has axis {axis!r}; name only axes of x with one chunk and no depth")
        chunks[axis] = (extent,)
    kind = np.dtype(x.dtype if dtype is None else dtype)
    token = tokenize(function, shared, lanes)
    made = tiles.map_blocks(
        partial(_made, function, token, lanes, extents, kind),
        # All tiles refer to the weights by one key of Dask's, so a worker fetches the weights once.
        weights=delayed(shared, name=f"shared-{token}"),
        chunks=tuple(chunks),
        dtype=kind,
        meta=np.empty((0,) * x.ndim, kind),
        name=f"{name}-{tokenize(tiles, token, extents, kind)}",
    )
    return made if alone else trim_internal(made, depth, boundary)


def _packed(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Return a contiguous copy of ``values``, and its axes' places.

    In the copy, the axes of ``values`` stand in the order in which they lie in memory. The second value is the place of each
    axis in the copy. Dask sends arrays in C order, so the worker uses the places to restore the layout of ``values``.
    """
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    return values.transpose(order).copy(), tuple(np.argsort(order).tolist())


def _margins(name: str, ndim: int, depth: object, boundary: object) -> tuple[dict[int, Any], dict[int, Any]]:
    """Check ``depth`` and ``boundary``; return the value of each for each axis.

    The function raises for entries that Dask would silently ignore.
    """
    for what, given in (("depth", depth), ("boundary", boundary)):
        if isinstance(given, (list, tuple)) and len(given) != ndim:
            raise ArgumentError(
                f"map_tiles({name}): {what} has {len(given)} entries and x has {ndim} axes; give one entry for each axis"
            )
        wrong = [axis for axis in given if axis not in range(ndim)] if isinstance(given, dict) else []
        if wrong:
            raise ArgumentError(f"map_tiles({name}): {what} has axis {wrong[0]!r}; x has the axes 0 to {ndim - 1}")
    depth, boundary = (tuple(given) if isinstance(given, list) else given for given in (depth, boundary))
    for each in [*depth.values()] if isinstance(depth, dict) else depth if isinstance(depth, tuple) else [depth]:
        if not all(map(_counts, each if isinstance(each, (list, tuple)) else [each])):
            raise ArgumentError(f"map_tiles({name}): depth has {each!r}; each depth must be an integer of 0 or more")
    for each in [*boundary.values()] if isinstance(boundary, dict) else boundary if isinstance(boundary, tuple) else [boundary]:
        if not (each is None or isinstance(each, (int, float, np.number)) or (isinstance(each, str) and each in _BOUNDARIES)):
            raise ArgumentError(
                f"map_tiles({name}): boundary has {each!r}; each boundary must be a number or one of {', '.join(_BOUNDARIES)}"
            )
    depths, boundaries = coerce_depth(ndim, depth), coerce_boundary(ndim, boundary)
    for axis, beyond in depths.items():
        if isinstance(beyond, tuple) and boundaries[axis] != "none":
            raise ArgumentError(
                f"map_tiles({name}): depth has {beyond} for axis {axis}; Dask takes two depths for an axis only with "
                "the boundary 'none', so pass this boundary or a single depth"
            )
    return depths, boundaries


def _counts(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _made(
    function: Callable[..., Any],
    token: str,
    lanes: int | None,
    extents: Mapping[int, int],
    kind: np.dtype[Any],
    tile: object,
    weights: tuple[Any, ...],
    block_id: tuple[int, ...] = (),
) -> np.ndarray[Any, Any]:
    """Return the function's result for a tile; runs in a worker."""
    try:
        if not isinstance(tile, np.ndarray) or isinstance(tile, np.ma.MaskedArray):
            raise ArrayTypeError(
                f"a tile is of type {type(tile).__name__}; pass a Dask array whose chunks are NumPy arrays to map_tiles"
            )
        # Tiles that come from other workers are contiguous. Making all tiles contiguous avoids a second program for the same
        # shape.
        tile = np.asarray(tile, order="C")
        recorded = _functions.latest(token, function, _Function(weights, lanes))
        value, ran = recorded(tile, function)
        # If the function itself ran, it may have changed state that is part of its key. So it is stored again, under its
        # present key.
        if ran:
            _functions.latest(token, function, recorded)
        shape = tuple([extents.get(axis, extent) for axis, extent in enumerate(tile.shape)])
        if (value.shape, value.dtype) != (shape, kind):
            raise ArgumentError(
                f"the function returned an array of shape {value.shape} and type {value.dtype} for a tile of shape {tile.shape}, "
                f"not of shape {shape} and type {kind}: return such an array, or pass extents= and dtype= to map_tiles"
            )
        return value
    except Exception as error:
        error.add_note(f"map_tiles({_name(function)}): at the tile {block_id}")
        if _is_lost():
            try:
                worker = get_worker()
            # Outside a worker's task there is no worker to close.
            except ValueError:
                raise error from None
            # A worker that closes reports no error of this task, so the scheduler gives the task to another worker. Dask limits
            # the number of such repetitions.
            wait([_leave(worker)], _CLOSING)
        raise


class KeptFunctions(OrderedDict[Hashable, "_Function"]):
    """Keep this worker's functions, the most recently used last.

    If two threads compute tiles at once, the lock makes both find the same function. A thread holds the lock while the
    dictionary changes, and never while a function runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def latest(self, token: str, function: Callable[..., Any], own: "_Function") -> "_Function":
        """Return the kept function of a token, or keep ``own``.

        The returned function becomes the most recently used. ``token`` was made when `map_tiles` was called. For a function of
        a module, the token contains only the name, not the state of the function. So the key also contains the present state,
        from `_telling`. If a function runs eagerly, its key contains no state, because an eager call reads the present state
        anyway.
        """
        key: Hashable = token, _telling(function)
        with self._lock:
            # ``own`` may still be stored under the key of its former state.
            if self.get(own.key) is own:
                del self[own.key]
            recorded = self.pop((token, None), None) or self.pop(key, own)
            recorded.key = (token, None) if recorded.eager else key
            self[recorded.key] = recorded
            while len(self) > MOST_FUNCTIONS:
                self.popitem(last=False)
        return recorded


_PLAIN = (str, bytes, int, bool, type(None))


def _telling(function: object, depth: int = 4) -> Hashable:
    """Return a key that changes if ``function`` or its values change.

    The key has the function's code, and values from its defaults, its closure and the globals that it names. Numbers, text and
    functions count by value, also in modules that the function names. Functions among these values are examined in the same
    way, to a depth of four. The contents of lists, dictionaries and objects do not count, because the function may keep its own
    results there. All other values, such as arrays, count by type.
    """
    told: list[Any] = []
    entered: set[int] = set()
    # Nearest values come first, so that each value is examined at its smallest depth.
    left = deque([(function, depth)])
    while left:
        value, depth = left.popleft()
        inside: Iterable[Any] = ()
        if type(value) in _PLAIN:
            told.append((type(value), value))
        elif isinstance(value, (float, complex, np.generic, Enum)):
            # The key has the text form of the value, because a NaN does not equal itself.
            told.append((type(value), repr(value)))
        elif isinstance(value, FunctionType):
            names = _names(value.__code__)
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _NO_VALUE]
            named = [value.__globals__.get(name) for name in names]
            modules: list[ModuleType] = []
            # The loop appends to the list over which it runs: for each module, the values of ``names`` in that module. So
            # modules inside modules are found as well.
            for each in named:
                if isinstance(each, ModuleType) and each not in modules:
                    modules.append(each)
                    named += [vars(each).get(name) for name in names]
            inside = (value.__defaults__, *(value.__kwdefaults__ or {}).values(), *cells, *named)
            told.append((value.__code__, len(cells)))
        elif isinstance(value, MethodType):
            inside = (value.__func__,)
        elif isinstance(value, partial):
            inside = (value.func, value.args, *value.keywords, *value.keywords.values())
        elif isinstance(value, tuple):
            inside = value[:_MOST_TOLD]
            told.append((tuple, len(value)))
        else:
            called = getattr_static(type(value), "__call__", None) if value is function else None
            # An operation or a cache keeps the user's function in the attribute ``__wrapped__``.
            wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
            inside = (each for each in (called, wrapped) if isinstance(each, (FunctionType, MethodType)))
            told.append(type(value))
        # Each object is entered only once.
        if depth and id(value) not in entered:
            entered.add(id(value))
            left += [(each, depth - 1) for each in inside]
    return tuple(told)


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code and its inner functions use.

    Comprehensions count as inner functions.
    """
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


class _Function:
    """Hold a recorded function and its copies of ``shared``.

    Any thread may call the object.
    """

    def __init__(self, shared: tuple[Any, ...], lanes: int | None) -> None:
        self._given, self._lanes = shared, lanes
        self._recorded: RecordedFunction[..., Any] | None = None
        # `KeptFunctions` stores this object under this key.
        self.key: Hashable = None
        # The first tile copies ``shared`` to the device for all threads. If two threads begin at once, the lock prevents a
        # second copy.
        self._lock = threading.Lock()

    @property
    def eager(self) -> bool:
        """Tell whether a tile was computed, and no program exists so far."""
        return self._recorded is not None and not self._recorded.stats().programs

    def __call__(self, tile: np.ndarray[Any, Any], function: Callable[..., Any]) -> tuple[np.ndarray[Any, Any], bool]:
        """Return the function's result for a tile.

        The second value tells whether the function itself ran, eagerly or to be recorded.
        """
        driver = handlepool.default_pool().driver
        if getattr(_threads, "driver", None) is not driver:
            _threads.driver, _threads.stream = driver, driver.create_stream()
        with _threads.stream:
            x = driver.asarray(tile)
            with self._lock:
                recorded = self._recorded = self._recorded or self._made(function)
            before = recorded.stats()
            y = recorded(x)
            if not isinstance(y, driver.array_types):
                raise ArgumentError(f"the function returned a value of type {type(y).__name__}; it must return one array")
            # A copy to pageable host memory would wait for the stream inside CUDA, and would block other threads meanwhile. So
            # this thread waits for its stream before the copy.
            driver.synchronize_stream(_threads.stream.ptr)
            now = recorded.stats()
            return driver.asnumpy(y), (now.recorded, now.eager) != (before.recorded, before.eager)

    def _made(self, function: Callable[..., Any]) -> RecordedFunction[..., Any]:
        driver = handlepool.default_pool().driver
        put = [driver.asarray(value[0].transpose(value[1])) if isinstance(value, tuple) else value for value in self._given]
        # Threads with other streams will read the shared arrays, so the copies must be complete.
        driver.synchronize_stream(driver.current_stream().ptr)

        def call(tile: object) -> Any:
            return function(tile, *put)

        call.__qualname__ = f"map_tiles({_name(function)})"
        # The guards of a recorded function do not look into functions of a library. They have to look into `call`, because
        # `call` refers to ``shared``. So `call` gets the name of the user's main module.
        call.__module__ = "__main__"
        return handlepool.recorded(call, lanes=self._lanes, programs=MOST_PROGRAMS)


_functions = KeptFunctions()
# Each thread's own stream, and the driver that made the stream.
_threads = threading.local()


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _choose(name: str) -> None:
    """Make the default pool use the driver ``name``, or raise."""
    pool = HandlePool(driver=name)
    try:
        handlepool.set_default_pool(pool)
    except OwnershipError:
        pool.close()
        found = handlepool.default_pool().driver.name
        if found != name:
            raise ArgumentError(
                f"PoolPlugin(driver={name!r}): the default pool of this worker's process has the {found} driver; register the "
                f"plugin before other code uses the pool, or pass driver={found!r}"
            ) from None


def _is_lost() -> bool:
    """Return whether the context of the device is lost.

    The plugin asks after each error of a task, because any code may have lost the context.
    """
    try:
        # `trim` asks CUDA for the state of the context before it destroys anything.
        handlepool.trim()
    except PoisonedContextError:
        return True
    except HandlePoolError:
        pass
    return False


def _leave(worker: Worker) -> Future[Any]:
    """Close ``worker``, so that its nanny starts a new worker."""
    logger.error("worker %s lost the context of its device, and closes", worker.name)
    closing = worker.close(_STEP, nanny=False, executor_wait=False, reason="the context of its device was lost")
    return asyncio.run_coroutine_threadsafe(closing, worker.loop.asyncio_loop)
