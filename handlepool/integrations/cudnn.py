"""Code that was written against nvidia-cudnn-frontend on the pool's handles, by one call.

Such code makes a handle, keeps it somewhere and binds it to a stream before it uses it. While `install` is in force,
`cudnn.create_handle` returns a `PooledHandle`: it stands, in whichever thread it is used, for the default pool's handle of that
thread, its current device and the stream that the thread has set. So wherever it is kept, two threads never use one cuDNN handle,
and nothing is left of a thread that has ended.

What that rests on:

- The frontend asks a handle for its ``backend_handle`` at each use and keeps none but the one that a graph is built with. Graphs
  are therefore built with a handle of their own for each device, which lives as long as the process. No two threads use it at
  once: the binding holds the GIL.
- The driver makes the pool's handles with the frontend's own function, which it finds as ``__wrapped__``.
- The methods of graphs stay as they are after `uninstall`, since graphs that were made meanwhile need them. On others they do
  nothing.
"""

import functools
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cudnn

import handlepool
from handlepool import DriverNotAvailableError, HandlePool, OwnershipError, StreamError
from handlepool.integrations.cudnn_assumptions import broken, called, missing

__all__ = ["KNOWN_VERSIONS", "PooledHandle", "install", "is_installed", "pooled_handles", "uninstall"]

KNOWN_VERSIONS = ("1.32",)
"""Of nvidia-cudnn-frontend, each with all that begins like it. Others have to pass a self-test, `judge`."""


class PooledHandle(getattr(cudnn, "Handle", object)):  # type: ignore[misc]
    """What `cudnn.create_handle` returns: in each thread the pool's handle for the current device and the thread's stream.

    The stream is what the thread itself has set with `cudnn.set_stream`. Where it has set none, it is the current one of torch or
    CuPy; where both are the default stream, what another thread has set last.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._last: int | None = None
        self._destroyed = False

    def actual(self) -> Any:
        """Return the pool's handle, which is the calling thread's until its stream or device changes.

        Raises
        ------
        OwnershipError
            When the handle was destroyed.
        DeviceMismatchError, StreamError
            When its stream is another device's, or torch and CuPy have different current streams and it was bound to none.
        """
        if self._destroyed:
            raise OwnershipError("this cudnn handle was given to cudnn.destroy_handle; make another one with cudnn.create_handle")
        stream = getattr(self._mine, "stream", None)
        return handlepool.get_handle(_current(self._last) if stream is None else _given(stream))

    def bind(self, stream: int | None) -> None:
        """Remember the calling thread's stream. Nothing is called: the pool has a handle that is bound to it, or makes one."""
        self._mine.stream = self._last = None if stream is None else operator.index(stream)

    def destroy(self) -> None:
        """End it for every thread. The pool's handles stay the pool's."""
        self._destroyed = True

    # Only functions of the frontend's that somebody has kept from before `install` set these two, after they bound or destroyed
    # the pool's handle itself. The pool mends a handle that says so.

    @property
    def backend_handle(self) -> int | None:
        """The ``cudnnHandle_t`` for the calling thread; None once the handle was destroyed."""
        return None if self._destroyed else self.actual().backend_handle

    @backend_handle.setter
    def backend_handle(self, value: None) -> None:
        handle = self.actual()
        handle.backend_handle, handle.stream = value, None
        self.destroy()

    @property
    def stream(self) -> int | None:
        """The ``cudaStream_t`` that the calling thread's work goes to; None once the handle was destroyed."""
        if self._destroyed:
            return None
        stream: int | None = getattr(self._mine, "stream", None)
        return self.actual().stream if stream is None else stream

    @stream.setter
    def stream(self, value: int | None) -> None:
        if not self._destroyed:
            self.actual().stream = None
            self.bind(value)

    @property
    def _ordinal(self) -> int:
        return handlepool.default_pool().driver.current_device()

    @_ordinal.setter
    def _ordinal(self, value: object) -> None:
        pass

    # What has a handle may be copied, as with the frontend's own: a copy is the same handle.

    def __copy__(self) -> "PooledHandle":
        return self

    def __deepcopy__(self, memo: object) -> "PooledHandle":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a cudnn handle is its process's and cannot be pickled; make one where it is used")

    def __repr__(self) -> str:
        return f"<PooledHandle{', destroyed' if self._destroyed else ''}>"


def _given(stream: int) -> int | None:
    """Return a stream as `handlepool.get_handle` takes it: None for CuPy's current one, whose own object has a slot already."""
    return None if handlepool.default_pool().driver.current_stream().ptr == stream else stream


def _current(handed: int | None = None) -> int | None:
    """Return this thread's current stream in that form; ``handed`` where it is the default stream of torch and CuPy both."""
    torch = sys.modules.get("torch")
    theirs = torch.cuda.current_stream().cuda_stream if torch is not None and torch.cuda.is_initialized() else 0
    ours = handlepool.default_pool().driver.current_stream().ptr
    if theirs and ours and theirs != ours:
        raise StreamError(
            f"a cudnn handle was bound to no stream by this thread, and the current streams of torch ({theirs:#x}) and CuPy "
            f"({ours:#x}) differ: say which is meant with cudnn.set_stream(handle, stream)"
        )
    if ours:
        return None
    return int(theirs) if theirs else handed


# What takes the place of the frontend's functions. Each is given the one that it replaces.


def _create_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_handle() -> PooledHandle:
        _ = handlepool.default_pool().driver  # raises where there is none, as the frontend does
        return PooledHandle()

    return create_handle


def _of_pooled(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function serve the pool's handles, and the one that it replaces all others."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(handle: object, *args: object, **options: object) -> Any:
            return (function if isinstance(handle, PooledHandle) else original)(handle, *args, **options)

        return made

    return make


def _get_default_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    handles = threading.local()  # a thread's end ends its own

    def get_default_handle(stream: Any = None) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return original(stream)  # which says so
        if stream is None:
            stream = torch.cuda.current_stream()
        theirs = isinstance(stream, torch.cuda.Stream)
        device = stream.device.index if theirs else torch.cuda.current_device()
        handle = vars(handles).get(device)
        if handle is None or handle.stream is None:
            handle = vars(handles)[device] = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=stream.cuda_stream if theirs else int(stream))
        return handle

    return get_default_handle


# And of the methods of its graphs.


def _lowering(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_handle_for_lowering(graph: "cudnn.pygraph", settings: Any) -> Any:
        handle = graph._handle  # noqa: SLF001 - here and below, what it has no public name for
        default = handle is None and settings.get("device_property") is None and is_installed()
        if not default and not isinstance(handle, PooledHandle):
            return original(graph, settings)
        graph._handlepool = True  # noqa: SLF001
        return _builders.current()

    return _backend_handle_for_lowering


class Builders:
    """The handles that graphs are built with, one for each device, of a pool that has no other user.

    They live as long as the process, as the graphs that keep them may. No lock: of two threads that come at once, both get the
    handle that was stored first.
    """

    def __init__(self) -> None:
        self._pools: dict[int, HandlePool] = {}
        self._handles: dict[tuple[int, int], Any] = {}

    def current(self) -> int:
        """Return the handle of the current device."""
        driver = handlepool.default_pool().driver
        device = driver.current_device()
        # In a forked child the pool raises, and no inherited handle is used.
        key = os.getpid(), device
        if key not in self._handles:
            pool = self._pools.setdefault(0, HandlePool(driver=driver.name, check=False))
            self._handles.setdefault(key, pool.get_handle(0))
        return int(self._handles[key].backend_handle)


_builders = Builders()


def _of_graph(graph: "cudnn.pygraph", handle: object) -> Any:
    """Return what a graph is executed with: the handle that is given, else the graph's own, else the current stream's."""
    handle = graph._handle if handle is None else handle  # noqa: SLF001
    if handle is None and getattr(graph, "_handlepool", False):
        return handlepool.get_handle(_current())
    return handle.actual() if isinstance(handle, PooledHandle) else handle


def _execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def _execute(
        graph: object, tensors: object, workspace: object = None, handle: object = None, *args: object, **options: object
    ) -> Any:
        return original(graph, tensors, workspace, _of_graph(graph, handle), *args, **options)

    return _execute


def _execute_at(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_plan_at_index(
        graph: object,
        tensors: object,
        workspace: object = None,
        index: int = 0,
        handle: object = None,
        *args: object,
        **options: object,
    ) -> Any:
        return original(graph, tensors, workspace, index, _of_graph(graph, handle), *args, **options)

    return execute_plan_at_index


_ON_ITS_STREAM = object()
"""Stands in a `cudnn.Graph` for its workspace: it has none, and takes that of the stream."""


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(graph: "cudnn.pygraph", *error: object) -> Any:
        if is_installed() and graph._Graph__workspace is None:  # noqa: SLF001
            graph._Graph__workspace = _ON_ITS_STREAM  # noqa: SLF001
        return original(graph, *error)

    return __exit__


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(wrapper: cudnn.Graph, *tensors: object, **options: object) -> Any:
        graph, own = wrapper._Graph__graph, wrapper._Graph__workspace  # noqa: SLF001
        ready = graph is not None and own is not None and own is not False  # False: the caller brings one
        handle = options.get("handle", wrapper._Graph__handle)  # noqa: SLF001
        asks = handle is None and "handle" not in options
        if not ready or asks or "workspace" in options or not (own is _ON_ITS_STREAM or is_installed()):
            return original(wrapper, *tensors, **options)
        handle = _of_graph(graph, cudnn.wrapper.get_default_handle() if handle == "auto" else handle)
        if nbytes := graph.get_workspace_size():
            scratch = handlepool.get_workspace(nbytes, _given(0 if handle is None else handle.stream))
            # An address: CuPy's arrays, asked for their memory, make the default stream wait, which ends a capture.
            nbytes = handlepool.default_pool().driver.array_pointer(scratch)
        return original(wrapper, *tensors, **{**options, "handle": handle, "workspace": nbytes or None})

    return __call__


class _ReplacedName(NamedTuple):
    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


class Verdict(NamedTuple):
    """Whether the frontend that is installed can have the pool's handles.

    Attributes
    ----------
    version : str
    known : bool
        Whether this was written against that version.
    broken : str or None
        The first assumption that does not hold of it.
    """

    version: str
    known: bool
    broken: str | None


def judge() -> Verdict:
    """Look at the frontend that is installed: for a version that is not known with a self-test, for which no GPU is asked.

    The self-test imports `cudnn.wrapper`, and with that torch, where that is installed.
    """
    version = str(getattr(cudnn, "__version__", "of an unknown version"))
    known = version.startswith(tuple(f"{one}." for one in KNOWN_VERSIONS))
    if known:
        return Verdict(version, known, None)
    try:
        functions, methods = _places()
    except (AttributeError, ImportError) as error:
        return Verdict(version, known, f"it has cudnn.pygraph and cudnn.wrapper.Graph ({error})")
    return Verdict(version, known, missing([place[:2] for place in functions + methods]) or broken())


def _places() -> tuple[list[_ReplacedName], list[_ReplacedName]]:
    """Return what is replaced: functions, which `uninstall` puts back, and methods, which stay."""
    from cudnn import wrapper  # imports torch, where that is installed

    functions = [
        _ReplacedName(cudnn, "create_handle", _create_handle),
        _ReplacedName(cudnn, "set_stream", _of_pooled(PooledHandle.bind)),
        _ReplacedName(cudnn, "get_stream", _of_pooled(operator.attrgetter("stream"))),
        _ReplacedName(cudnn, "destroy_handle", _of_pooled(PooledHandle.destroy)),
        _ReplacedName(wrapper, "get_default_handle", _get_default_handle),
    ]
    methods = [
        _ReplacedName(cudnn.pygraph, "_backend_handle_for_lowering", _lowering),
        _ReplacedName(cudnn.pygraph, "_execute", _execute),
        _ReplacedName(cudnn.pygraph, "execute_plan_at_index", _execute_at),
        _ReplacedName(wrapper.Graph, "__exit__", _exit),
        _ReplacedName(wrapper.Graph, "__call__", _call),
    ]
    return functions, methods


_KNOWN = " and ".join(f"{one}.*" for one in KNOWN_VERSIONS)


def is_installed() -> bool:
    """Whether the frontend's functions are the pool's now."""
    return bool(_installation.replaced)


def install() -> None:
    """Let code that was written against nvidia-cudnn-frontend have the default pool's handles, until `uninstall`.

    `cudnn.create_handle`, ``set_stream``, ``get_stream``, ``destroy_handle``, the default handles and `cudnn.Graph` are replaced.
    Handles that were made before go on to work as they did. Where it is in force already, only names that somebody has put back
    are replaced again. No GPU is asked, so it may be called during a capture.

    Raises
    ------
    DriverNotAvailableError
        For a frontend that lacks a name which is replaced, and for a version that is not known and does not pass a self-test. The
        message says which assumption does not hold. Nothing is changed then.

    Warns
    -----
    RuntimeWarning
        For a version that is not known and passed the self-test. And for each loaded module that has one of the functions as a
        name of its own, as after ``from cudnn import create_handle``: it keeps the frontend's. Import such modules afterwards.
    """
    _installation.install()


def uninstall() -> None:
    """Give the frontend's functions their names back; handles and graphs that were made meanwhile go on with the pool.

    Where a `pooled_handles` is in force, that happens at its end. Where nothing is installed, nothing happens.

    Raises
    ------
    OwnershipError
        When somebody else has replaced one of the names since, by what is not the frontend's own; nothing is changed then.
    """
    _installation.uninstall()


@contextmanager
def pooled_handles() -> Iterator[None]:
    """Do what `install` does to the end of a ``with`` statement, in every thread; of several, to the end of the last one."""
    _installation.enter()
    try:
        yield
    finally:
        _installation.leave()


def _put(place: _ReplacedName) -> Callable[..., Any]:
    original = getattr(place.owner, place.name)
    made = functools.wraps(original)(place.make(original))
    setattr(place.owner, place.name, made)
    return made


class Installation:
    """Which names of the frontend are replaced, and for whom: `install`, and the contexts of `pooled_handles`.

    The lock guards all of it, so that each name is replaced once and put back by the last user. It is held while names are
    changed, and never while a handle is made. A finaliser may end a context inside, so the same thread may take it again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.replaced: dict[str, tuple[_ReplacedName, Callable[..., Any]]] = {}
        self._methods_replaced = False
        self._asked = False
        self._contexts = 0

    def install(self) -> None:
        """Replace the names until `uninstall`."""
        with self._lock:
            self._replace()
            self._asked = True

    def uninstall(self) -> None:
        """End `install`."""
        with self._lock:
            self._restore(asked=False, contexts=self._contexts)
            self._asked = False

    def enter(self) -> None:
        """Replace the names until `leave`."""
        with self._lock:
            self._replace()
            self._contexts += 1

    def leave(self) -> None:
        """End `enter`."""
        with self._lock:
            self._contexts -= 1
            self._restore(asked=self._asked, contexts=self._contexts)

    def _replace(self) -> None:
        again = [name for name, (place, made) in self.replaced.items() if _is_back(place, made)]
        if self.replaced and not again:
            return
        verdict = judge()
        functions, methods = _places() if verdict.broken is None else ([], [])
        wrong = verdict.broken or missing([place[:2] for place in functions + methods])
        if wrong is not None:
            raise DriverNotAvailableError(
                f"nvidia-cudnn-frontend {verdict.version} cannot be given the pool's handles, since this does not hold of it: "
                f"{wrong}. Install {_KNOWN}, or call handlepool.get_handle where handles are needed"
            )
        if not verdict.known:
            warnings.warn(
                f"nvidia-cudnn-frontend {verdict.version} is not known to handlepool, which knows {_KNOWN}: it passed a "
                f"self-test, and is used",
                RuntimeWarning,
                stacklevel=4,
            )
        functions = [place for place in functions if not self.replaced or place.name in again]
        originals = [getattr(place.owner, place.name) for place in functions]
        _warn_of_copies(dict(zip(map(id, originals), functions, strict=True)))
        if not self._methods_replaced:
            for place in methods:
                _put(place)
            self._methods_replaced = True
        for place in functions:
            self.replaced[place.name] = place, _put(place)

    def _restore(self, *, asked: bool, contexts: int) -> None:
        if asked or contexts or not self.replaced:
            return
        for place, made in self.replaced.values():
            if getattr(place.owner, place.name, None) is not made and not _is_back(place, made):
                raise OwnershipError(
                    f"{called(place.owner, place.name)} was replaced by somebody else since handlepool.integrations.cudnn was "
                    f"installed: let them put back what was there, then call uninstall again"
                )
        while self.replaced:
            _, (place, made) = self.replaced.popitem()
            if not _is_back(place, made):
                setattr(place.owner, place.name, vars(made)["__wrapped__"])


_installation = Installation()


def _is_back(place: _ReplacedName, made: Callable[..., Any]) -> bool:
    """Whether somebody has put back what was there, or the frontend's own, as at the end of a patch that was there first."""
    now = getattr(place.owner, place.name, None)
    return now is vars(made)["__wrapped__"] or getattr(now, "__globals__", None) is vars(place.owner)


def _warn_of_copies(originals: dict[int, _ReplacedName]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module is cudnn or module_name == "cudnn.wrapper":
            continue
        try:
            values = list(vars(module).values())
        except Exception:  # what stands for a module may have no names, or raise at them
            continue
        kept = {originals[id(value)].name for value in values if id(value) in originals}
        if kept:
            warnings.warn(
                f"{module_name} keeps the frontend's own {', '.join(sorted(kept))}, imported before "
                f"handlepool.integrations.cudnn was installed: import it afterwards, or have it call them as attributes of cudnn",
                RuntimeWarning,
                stacklevel=5,
            )
