"""handlepool on Dask: a plugin that keeps each worker's pool, and functions over arrays of overlapping tiles.

A worker is a process with one device, the first that it sees, as dask-cuda has it. Its threads share the pool and the programs of
`map_tiles`, each with a stream of its own, and so with a handle of its own.
"""

import asyncio
import logging
import os
import threading
import warnings
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
    CaptureError,
    HandlePool,
    HandlePoolError,
    OwnershipError,
    PoisonedContextError,
    Program,
)

_BOUNDARIES = ("reflect", "periodic", "nearest", "none")
_MOST_LANES = 32
MOST_FUNCTIONS = 16
"""Of a worker: what `map_tiles` keeps of the one that was used least recently makes way."""
MOST_PROGRAMS = 16
"""Of a function, each for one geometry of a tile: the same. An image's middle, edges and corners are up to nine."""
_MOST_TOLD = 64
"""Entries of a tuple that tell a function from another one."""
_NO_VALUE = CellType()
"""A name of the enclosing function that has none yet."""
_CLOSING = 30.0
"""Seconds that a task waits at most for its worker to close, before it reports its error."""
_STEP = 3.0
"""Seconds that a worker which closes waits at most for each thing that it does: what it has is to be computed anew anyway."""

logger = logging.getLogger("distributed.worker.handlepool")


class PoolPlugin(WorkerPlugin):  # type: ignore[misc]  # of no type, installed or not
    """Make a worker's handles before its first task, give back what is idle when it closes, and replace it with a lost context.

    Register it with ``client.register_plugin(PoolPlugin())``; workers that come later have it, too. Registered once more it takes
    the place of what was registered before. The default pool of the worker's process is used.

    Parameters
    ----------
    driver : {"cuda", "host"}, optional
        Of the default pool. By default the environment of the worker says, and where it does not, ``cuda``.
    states : int
        Side slots to make, for forks and for programs with lanes.
    workspace : int
        Bytes of scratch for each handle.

    Raises
    ------
    DriverNotAvailableError
        In the worker, and so by ``register_plugin``: where the driver cannot run, on a machine without a GPU say.
    ArgumentError
        There, too: when the default pool of the process is of another driver; for sizes as in `prewarm`.
    """

    name = "handlepool"

    def __init__(self, *, driver: str | None = None, states: int = 0, workspace: int = 0) -> None:
        self.driver, self.states, self.workspace = driver, states, workspace

    def setup(self, worker: Worker) -> None:
        """Make the pool, and handles for as many threads as the worker has."""
        self._worker = worker
        if self.driver is not None:
            _choose(self.driver)
        driver = handlepool.default_pool().driver
        seen, first = driver.device_count(), worker.name in (0, "0")
        if driver.name == "cuda" and seen > 1 and not first and "CUDA_VISIBLE_DEVICES" not in os.environ:
            logger.warning(
                "worker %s computes on the first of %d GPUs, as all others of this machine do: start workers with dask-cuda, or "
                "with another CUDA_VISIBLE_DEVICES each",
                worker.name,
                seen,
            )
        count = worker.state.nthreads
        together = threading.Barrier(count)  # or one that ends early would leave its handle to the next

        def make(states: int) -> None:
            try:
                handlepool.prewarm(states=states, workspace=self.workspace)
                together.wait()
            except BaseException:
                together.abort()
                raise

        with ThreadPoolExecutor(count) as threads:  # the worker's own threads find the handles that these leave
            try:
                made = [threads.submit(make, 0 if thread else self.states) for thread in range(count)]
            except BaseException:  # a thread that cannot be started: the others wait for it
                together.abort()
                raise
        errors = [error for future in made if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])

    def teardown(self, worker: Worker) -> None:
        """Let go of all programs, and destroy what is idle."""
        _functions.clear()
        handlepool.close()

    def transition(self, key: object, start: str, finish: str, **kwargs: object) -> None:
        """Close the worker after a task that found its context lost: every later one would fail, too."""
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
    """Return what a function makes of each chunk of an array with a margin of its neighbours, trimmed; nothing runs yet.

    ``function(tile, *shared)`` is recorded once for each worker and geometry of a tile, and replayed for each further tile. Where
    it cannot be recorded it runs eagerly, and a ``RuntimeWarning`` says why in the worker. Without a cluster all runs in this
    process.

    Parameters
    ----------
    function : callable
        As for `spread`: of an array of the driver's and what is shared, it returns one array, as large as the tile. It goes to
        the workers as Dask's functions do: by name from a module, else by value.
    x : dask.array.Array
        Of NumPy's arrays.
    depth, boundary
        As for `dask.array.map_overlap`: how far beyond its chunk the function looks, and what is beyond the array. By default
        there is nothing, and the function pads at the array's edges, as it does with the array in one piece.
    shared : sequence
        Further arguments, weights say: arrays of NumPy's as they are now, numbers and strings. They are copied to each worker's
        device once, in the layout that they have. The function must not write to them.
    extents : mapping, optional
        For axes whose extent the function changes, channels say, how large they are then. They have one chunk, and no depth.
    dtype : optional
        Of what the function returns; that of ``x`` by default.
    lanes : int, optional
        As in `record`; None records the order of streams and forks.

    Returns
    -------
    dask.array.Array
        Of NumPy's arrays. Tiles of one geometry are computed alike wherever they run, so that with deterministic plans the bits
        are those of one process.

    Raises
    ------
    ArgumentError
        For what is no function or no Dask array, and for a program: pass the function that it was recorded from; for a ``depth``
        or ``boundary`` of axes that ``x`` has not, or not of all; for ``extents`` of an axis with several chunks or a depth. In a
        task, with the place of its tile: for a result of another shape or type.
    ArrayTypeError
        For ``shared`` that is none of these; in a task, for tiles that are none of NumPy's.

    Notes
    -----
    A function that was mapped before is another one where its code, its defaults or its closure changed, or a number, a text or a
    function among the globals that it names; so with the functions that it calls by these, four deep, and with operations. Not
    where an object, a class or a container did: give such a function what it reads in ``shared``.

    A task that finds the context of its device lost closes its worker, so that its tiles are computed by others, and those whose
    results it had.
    """
    name = _name(function)
    if isinstance(function, Program) or not callable(function):
        raise ArgumentError(f"map_tiles({function!r}): pass a function of a tile; each worker records it for itself")
    if not isinstance(x, Array):
        raise ArgumentError(f"map_tiles({name}): pass a dask.array.Array, and not what is of type {type(x).__name__}")
    if not isinstance(shared, (list, tuple)):
        raise ArgumentError(
            f"map_tiles({name}): shared is of type {type(shared).__name__}; pass a tuple of arguments, (weights,) for one"
        )
    for value in shared:
        if not isinstance(value, (np.ndarray, np.generic, int, float, str)) or isinstance(value, np.ma.MaskedArray):
            raise ArrayTypeError(
                f"map_tiles({name}): shared holds what is of type {type(value).__name__}; pass arrays of NumPy's, real numbers, "
                f"strings"
            )
    if lanes is not None and not (type(lanes) is int and 1 <= lanes <= _MOST_LANES):
        raise ArgumentError(f"map_tiles({name}, lanes={lanes!r}); it must be an integer from 1 to {_MOST_LANES}, or None")
    # As they are now: workers know them by what was in them.
    shared = tuple([_packed(value) if isinstance(value, np.ndarray) else value for value in shared])
    depth, boundary = _margins(name, x.ndim, depth, boundary)
    alone = all(beyond in (0, (0, 0)) for beyond in depth.values())  # then each tile is one task
    tiles = x if alone else overlap(x, depth=depth, boundary=boundary)
    if extents is not None and not isinstance(extents, Mapping):
        raise ArgumentError(f"map_tiles({name}): extents is of type {type(extents).__name__}; pass a dictionary, as in {{1: 8}}")
    extents, chunks = dict(extents or {}), list(tiles.chunks)
    for axis, extent in extents.items():
        if not _counts(extent):
            raise ArgumentError(
                f"map_tiles({name}): extents has {extent!r} for axis {axis!r}; it must be an integer of 0 or more"
            )
        if axis not in range(x.ndim) or len(chunks[axis]) != 1 or depth[axis] not in (0, (0, 0)):
            raise ArgumentError(f"map_tiles({name}): extents has axis {axis!r}; it must be one of x, with one chunk and no depth")
        chunks[axis] = (extent,)
    kind = np.dtype(x.dtype if dtype is None else dtype)
    token = tokenize(function, shared, lanes)
    made = tiles.map_blocks(
        partial(_made, function, token, lanes, extents, kind),
        weights=delayed(shared, name=f"shared-{token}"),  # one key, which a worker fetches once
        chunks=tuple(chunks),
        dtype=kind,
        meta=np.empty((0,) * x.ndim, kind),
        name=f"{name}-{tokenize(tiles, token, extents, kind)}",
    )
    return made if alone else trim_internal(made, depth, boundary)


def _packed(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Return a copy whose axes are in the order of the memory, and where each axis is: Dask would lose a layout on the way."""
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    return values.transpose(order).copy(), tuple(np.argsort(order).tolist())


def _margins(name: str, ndim: int, depth: object, boundary: object) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return depth and boundary of each axis; raise for what Dask would leave out without a word."""
    for what, given in (("depth", depth), ("boundary", boundary)):
        if isinstance(given, (list, tuple)) and len(given) != ndim:
            raise ArgumentError(f"map_tiles({name}): {what} has {len(given)} entries, and x {ndim} axes")
        wrong = [axis for axis in given if axis not in range(ndim)] if isinstance(given, dict) else []
        if wrong:
            raise ArgumentError(f"map_tiles({name}): {what} has axis {wrong[0]!r}; x has the axes 0 to {ndim - 1}")
    depth, boundary = (tuple(given) if isinstance(given, list) else given for given in (depth, boundary))
    for each in [*depth.values()] if isinstance(depth, dict) else depth if isinstance(depth, tuple) else [depth]:
        if not all(map(_counts, each if isinstance(each, (list, tuple)) else [each])):
            raise ArgumentError(f"map_tiles({name}): depth has {each!r}; it must be integers of 0 or more")
    for each in [*boundary.values()] if isinstance(boundary, dict) else boundary if isinstance(boundary, tuple) else [boundary]:
        if not (each is None or isinstance(each, (int, float, np.number)) or (isinstance(each, str) and each in _BOUNDARIES)):
            raise ArgumentError(
                f"map_tiles({name}): boundary has {each!r}; it must be one of {', '.join(_BOUNDARIES)}, or a number"
            )
    depths, boundaries = coerce_depth(ndim, depth), coerce_boundary(ndim, boundary)
    for axis, beyond in depths.items():
        if isinstance(beyond, tuple) and boundaries[axis] != "none":
            raise ArgumentError(
                f"map_tiles({name}): depth has {beyond} for axis {axis}; Dask takes two with boundary 'none' alone"
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
    """Run in a worker: what the function makes of a tile."""
    try:
        if not isinstance(tile, np.ndarray) or isinstance(tile, np.ma.MaskedArray):
            raise ArrayTypeError(f"a tile is of type {type(tile).__name__}; map_tiles takes arrays of NumPy's")
        tile = np.asarray(tile, order="C")  # as those are that come from other workers, so that all of a geometry are alike
        recorded = _functions.latest(token, function, _Function(weights, lanes))
        value, ran = recorded(tile, function)
        if ran:  # it may have counted that in what tells it from others
            _functions.latest(token, function, recorded)
        shape = tuple([extents.get(axis, extent) for axis, extent in enumerate(tile.shape)])
        if (value.shape, value.dtype) != (shape, kind):
            raise ArgumentError(
                f"the function returned {value.shape} of {value.dtype} for a tile of {tile.shape}; it must be {shape} of {kind}, "
                f"or give map_tiles extents= and dtype="
            )
        return value
    except Exception as error:
        error.add_note(f"map_tiles({_name(function)}): at the tile {block_id}")
        if _is_lost():
            try:
                worker = get_worker()
            except ValueError:  # no worker's task
                raise error from None
            # While it closes nothing is reported, and the scheduler gives the task to another worker. Dask bounds how often.
            wait([_leave(worker)], _CLOSING)
        raise


class KeptFunctions(OrderedDict[Hashable, "_Function"]):
    """The functions that this worker keeps, the last one used last.

    The lock guards that two tiles find one function. It is held while the dictionary changes, and never while a function runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def latest(self, token: str, function: Callable[..., Any], own: "_Function") -> "_Function":
        """Return the kept function of a token, now the last one used; keep ``own`` where there is none.

        A token is a function's name alone where a module has the function, and was made when `map_tiles` was called. So the key
        also has the function's present state. A function that runs eagerly has its present state at each tile anyway.
        """
        key: Hashable = token, _telling(function)
        with self._lock:
            # Under the key of its former state.
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
    """Return what tells a function from others: its code, and what its defaults, its closure and the globals that it names are.

    Of these the numbers, text and functions, also in modules that it names, and so with these functions, four deep. Not what
    lists, dictionaries and objects hold, where it may keep what it did; of all else, as arrays, it is the type.
    """
    told: list[Any] = []
    entered: set[int] = set()
    left = deque([(function, depth)])  # the nearest first, so that each is looked into from as near as it is
    while left:
        value, depth = left.popleft()
        inside: Iterable[Any] = ()
        if type(value) in _PLAIN:
            told.append((type(value), value))
        elif isinstance(value, (float, complex, np.generic, Enum)):
            told.append((type(value), repr(value)))  # NaN, too
        elif isinstance(value, FunctionType):
            names = _names(value.__code__)
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _NO_VALUE]
            named = [value.__globals__.get(name) for name in names]
            modules: list[ModuleType] = []
            for each in named:  # it grows by what is named of modules, and of modules in these
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
            wrapped = getattr(value, "__wrapped__", None) if callable(value) else None  # an operation's, a cache's
            inside = (each for each in (called, wrapped) if isinstance(each, (FunctionType, MethodType)))
            told.append(type(value))
        if depth and id(value) not in entered:  # each once
            entered.add(id(value))
            left += [(each, depth - 1) for each in inside]
    return tuple(told)


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code asks for, its inner functions' and comprehensions', too."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


class _Function:
    """What a worker keeps of a function: its programs, and copies of what is shared. Any thread calls it."""

    def __init__(self, shared: tuple[Any, ...], lanes: int | None) -> None:
        self._given, self._lanes = shared, lanes
        self._shared: tuple[Any, ...] | None = None
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.eager = False
        self.key: Hashable = None  # what it is found by
        # A function is recorded by one thread for all. It is held while the function runs: a tile's function has no other to wait
        # for. A program that makes way is only dropped here, so that a thread which still has it may call it.
        self._lock = threading.Lock()

    def __call__(self, tile: np.ndarray[Any, Any], function: Callable[..., Any]) -> tuple[np.ndarray[Any, Any], bool]:
        """Return what the function makes of a tile, and whether it ran for that, itself or to be recorded."""
        driver = handlepool.default_pool().driver
        if getattr(_threads, "driver", None) is not driver:
            _threads.driver, _threads.stream = driver, driver.create_stream()
        with _threads.stream:
            x = driver.asarray(tile)
            with self._lock:
                ran = self.eager or (x.shape, x.strides, x.dtype) not in self._programs
                program = self._program(x, tile, function)
                shared = self._shared or ()
            y = function(x, *shared) if program is None else program(x)
            if not isinstance(y, driver.array_types):
                raise ArgumentError(f"the function returned what is of type {type(y).__name__}; it must be one array")
            # A copy to pageable memory waits within CUDA, where it keeps other threads from giving their items meanwhile.
            driver.synchronize_stream(_threads.stream.ptr)
            return driver.asnumpy(y), ran

    def _program(self, x: Any, tile: np.ndarray[Any, Any], function: Callable[..., Any]) -> Program | None:
        driver = handlepool.default_pool().driver
        if self._shared is None:
            put = [driver.asarray(value[0].transpose(value[1])) if isinstance(value, tuple) else value for value in self._given]
            driver.synchronize_stream(driver.current_stream().ptr)  # threads with other streams read them
            self._shared = tuple(put)
        if self.eager:
            return None
        key = x.shape, x.strides, x.dtype
        program = self._programs.pop(key, None)
        if program is None:
            shared = self._shared

            def call(own: object) -> Any:
                return function(own, *shared)

            call.__qualname__ = _name(function)
            try:
                program = handlepool.record(call, driver.asarray(tile), lanes=self._lanes)
            except CaptureError as error:
                self.eager = True
                text = f"map_tiles({_name(function)}): it cannot be recorded and runs eagerly, which is slower"
                warnings.warn(f"{text}: {error}", RuntimeWarning, stacklevel=2)
                return None
        self._programs[key] = program
        while len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        return program


_functions = KeptFunctions()
# Each thread's stream, and its driver.
_threads = threading.local()


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _choose(name: str) -> None:
    """Make the default pool one of a driver, or raise."""
    pool = HandlePool(driver=name)
    try:
        handlepool.set_default_pool(pool)
    except OwnershipError:
        pool.close()
        found = handlepool.default_pool().driver.name
        if found != name:
            raise ArgumentError(
                f"PoolPlugin(driver={name!r}): the default pool of this worker's process is of the {found} driver already"
            ) from None


def _is_lost() -> bool:
    """Whether the context of the device was lost, after an error that may be anybody's."""
    try:
        handlepool.trim()  # asks CUDA before it destroys anything
    except PoisonedContextError:
        return True
    except HandlePoolError:
        pass
    return False


def _leave(worker: Worker) -> Future[Any]:
    """Close a worker, which its nanny replaces by a new process."""
    logger.error("worker %s lost the context of its device, and closes", worker.name)
    closing = worker.close(_STEP, nanny=False, executor_wait=False, reason="the context of its device was lost")
    return asyncio.run_coroutine_threadsafe(closing, worker.loop.asyncio_loop)
