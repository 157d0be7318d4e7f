"""Run code for nvidia-cudnn-frontend on the pool's handles.

Code for the frontend makes a cuDNN handle, keeps the handle, and binds it to a stream before each use. While `install` is in
force, `cudnn.create_handle` returns a `PooledHandle`. In each thread, this object resolves to the default pool's handle for
that thread, its current device and the stream that the thread has set. So two threads never use the same cuDNN handle, even if
they share the object. When a thread ends, the pool takes back the thread's handles.

The integration rests on these assumptions:

- The frontend reads the attribute ``backend_handle`` of a handle at each use, and does not store the value. The exception is the
  handle that a graph is built with: the graph stores its value. The integration therefore builds graphs with a separate handle
  for each device, which lives as long as the process. No two threads use that handle at once, because the frontend's binding
  holds the GIL.
- The driver makes the pool's handles with the frontend's own `create_handle`, which it finds as the attribute ``__wrapped__`` of
  the replacement.
- The methods of graphs stay replaced after `uninstall`, because graphs that were made before `uninstall` need the replacements.
  For any other graph, a replacement only calls the method that it replaces.
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
"""The frontend versions that this integration was written against, as prefixes.

Any other version of nvidia-cudnn-frontend has to pass a self-test, see `judge`.
"""


class PooledHandle(getattr(cudnn, "Handle", object)):  # type: ignore[misc]
    """Resolve to the pool's handle for the calling thread.

    `cudnn.create_handle` returns such an object. The pool's handle belongs to the current device and to a stream. The stream is
    the stream that the calling thread has set with `cudnn.set_stream`. If the thread has set no stream, the current stream of
    torch or CuPy is used. If the current stream of both libraries is the default stream, the stream is used that any thread has
    set last for this object.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._last: int | None = None
        self._destroyed = False

    def actual(self) -> Any:
        """Return the pool's handle for the calling thread.

        Raises
        ------
        OwnershipError
            If this object was passed to `cudnn.destroy_handle`.
        DeviceMismatchError, StreamError
            When the stream belongs to another device. Also when this thread has set no stream, and the current streams of torch
            and CuPy differ.
        """
        if self._destroyed:
            raise OwnershipError("this cudnn handle was given to cudnn.destroy_handle; make another one with cudnn.create_handle")
        stream = getattr(self._mine, "stream", None)
        return handlepool.get_handle(_current(self._last) if stream is None else _given(stream))

    def bind(self, stream: int | None) -> None:
        """Remember ``stream`` as the calling thread's stream.

        The method calls neither cuDNN nor CUDA. The pool finds or makes a cuDNN handle for the stream at the next use of this
        object.
        """
        self._mine.stream = self._last = None if stream is None else operator.index(stream)

    def destroy(self) -> None:
        """Make this object unusable in every thread; the pool keeps cuDNN's handles."""
        self._destroyed = True

    # Only the frontend's own functions set the two properties below, and only a module that saved such a function before
    # `install` still calls it. The function has already bound or destroyed the pool's handle when it sets the property. The
    # pool repairs this handle at its next use.

    @property
    def backend_handle(self) -> int | None:
        """Return the calling thread's ``cudnnHandle_t``.

        The value is None once the handle was destroyed.
        """
        return None if self._destroyed else self.actual().backend_handle

    @backend_handle.setter
    def backend_handle(self, value: None) -> None:
        handle = self.actual()
        handle.backend_handle, handle.stream = value, None
        self.destroy()

    @property
    def stream(self) -> int | None:
        """Return the ``cudaStream_t`` of the calling thread's work.

        The value is None once the handle was destroyed.
        """
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

    # Copying returns the same object, as with the frontend's own handles.

    def __copy__(self) -> "PooledHandle":
        return self

    def __deepcopy__(self, memo: object) -> "PooledHandle":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a cudnn handle belongs to its process and cannot be pickled; make a handle in the process that uses it")

    def __repr__(self) -> str:
        return f"<PooledHandle{', destroyed' if self._destroyed else ''}>"


def _given(stream: int) -> int | None:
    """Return the argument of `handlepool.get_handle` for ``stream``.

    The result is None if ``stream`` is CuPy's current stream. For None, `get_handle` takes CuPy's stream object, and so finds a
    slot that was made for this object.
    """
    return None if handlepool.default_pool().driver.current_stream().ptr == stream else stream


def _current(handed: int | None = None) -> int | None:
    """Return the argument of `handlepool.get_handle` for the current stream.

    The result is None if CuPy's current stream is not the default stream, else torch's current stream. If the current stream of
    both libraries is the default stream, the result is ``handed``.
    """
    torch = sys.modules.get("torch")
    theirs = torch.cuda.current_stream().cuda_stream if torch is not None and torch.cuda.is_initialized() else 0
    ours = handlepool.default_pool().driver.current_stream().ptr
    if theirs and ours and theirs != ours:
        raise StreamError(
            f"this thread has set no stream for a cudnn handle, and the current streams of torch ({theirs:#x}) and CuPy "
            f"({ours:#x}) differ: choose a stream with cudnn.set_stream(handle, stream)"
        )
    if ours:
        return None
    return int(theirs) if theirs else handed


# Each function below makes the replacement of a frontend's function. Its argument is the function to replace.


def _create_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_handle() -> PooledHandle:
        # If no driver can run here, this access raises an error. The frontend's own function raises as well where it cannot
        # make a handle.
        _ = handlepool.default_pool().driver
        return PooledHandle()

    return create_handle


def _of_pooled(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a replacement that calls ``function`` for a `PooledHandle`.

    For any other handle, the replacement calls the frontend's own function.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(handle: object, *args: object, **options: object) -> Any:
            return (function if isinstance(handle, PooledHandle) else original)(handle, *args, **options)

        return made

    return make


def _get_default_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    # Each thread has its own default handle for each device. Thread-local storage drops these handles when the thread ends.
    handles = threading.local()

    def get_default_handle(stream: Any = None) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            # Without torch, the frontend's own function raises the error that its callers expect.
            return original(stream)
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


# Each function below makes the replacement of a method of the frontend's graphs.


def _lowering(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_handle_for_lowering(graph: "cudnn.pygraph", settings: Any) -> Any:
        handle = graph._handle  # noqa: SLF001 - here and below, the attribute has no public name
        default = handle is None and settings.get("device_property") is None and is_installed()
        if not default and not isinstance(handle, PooledHandle):
            return original(graph, settings)
        graph._handlepool = True  # noqa: SLF001
        return _builders.current()

    return _backend_handle_for_lowering


class Builders:
    """The handles for building graphs, one for each device.

    The handles come from a pool other than the default pool. They live as long as the process, because a graph keeps the handle
    that it was built with, and may live as long. `current` needs no lock: if two threads call it at once, both get the handle
    that was stored first.
    """

    def __init__(self) -> None:
        self._pools: dict[int, HandlePool] = {}
        self._handles: dict[tuple[int, int], Any] = {}

    def current(self) -> int:
        """Return the handle for building graphs on the current device."""
        driver = handlepool.default_pool().driver
        device = driver.current_device()
        # The key contains the process id, so a forked child uses no handle of its parent. In the child, the pool's `get_handle`
        # raises.
        key = os.getpid(), device
        if key not in self._handles:
            pool = self._pools.setdefault(0, HandlePool(driver=driver.name, check=False))
            self._handles.setdefault(key, pool.get_handle(0))
        return int(self._handles[key].backend_handle)


_builders = Builders()


def _of_graph(graph: "cudnn.pygraph", handle: object) -> Any:
    """Return the handle for executing a graph.

    The result is ``handle`` if it is given, else the graph's own handle. If the graph has none, but was built with a handle of
    `Builders`, the result is the pool's handle for the current stream.
    """
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
"""Mark a `cudnn.Graph` without a workspace of its own.

Such a graph uses the pool's workspace for the stream on which it runs.
"""


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(graph: "cudnn.pygraph", *error: object) -> Any:
        if is_installed() and graph._Graph__workspace is None:  # noqa: SLF001
            graph._Graph__workspace = _ON_ITS_STREAM  # noqa: SLF001
        return original(graph, *error)

    return __exit__


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(wrapper: cudnn.Graph, *tensors: object, **options: object) -> Any:
        graph, own = wrapper._Graph__graph, wrapper._Graph__workspace  # noqa: SLF001
        # If the graph's workspace is False, the caller provides a workspace with each call.
        ready = graph is not None and own is not None and own is not False
        handle = options.get("handle", wrapper._Graph__handle)  # noqa: SLF001
        asks = handle is None and "handle" not in options
        if not ready or asks or "workspace" in options or not (own is _ON_ITS_STREAM or is_installed()):
            return original(wrapper, *tensors, **options)
        handle = _of_graph(graph, cudnn.wrapper.get_default_handle() if handle == "auto" else handle)
        if nbytes := graph.get_workspace_size():
            scratch = handlepool.get_workspace(nbytes, _given(0 if handle is None else handle.stream))
            # cuDNN's binding gets the address instead of the array. If the binding asked a CuPy array for its memory, CuPy would
            # make the default stream wait for the array's stream, which breaks a capture.
            nbytes = handlepool.default_pool().driver.array_pointer(scratch)
        return original(wrapper, *tensors, **{**options, "handle": handle, "workspace": nbytes or None})

    return __call__


class _ReplacedName(NamedTuple):
    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


class Verdict(NamedTuple):
    """Tell whether the installed frontend works with the pool's handles.

    Attributes
    ----------
    version : str
    known : bool
        Whether the integration was written against that version.
    broken : str or None
        The first assumption that the version breaks; None if it breaks no assumption.
    """

    version: str
    known: bool
    broken: str | None


def judge() -> Verdict:
    """Check whether the installed frontend works with the pool's handles.

    A known version works. An unknown version has to pass a self-test, which uses no GPU. The self-test imports `cudnn.wrapper`,
    which imports torch if torch is installed.
    """
    version = str(getattr(cudnn, "__version__", "of an unknown version"))
    known = version.startswith(tuple(f"{one}." for one in KNOWN_VERSIONS))
    if known:
        return Verdict(version, known, None)
    try:
        functions, methods = _places()
    except (AttributeError, ImportError) as error:
        return Verdict(version, known, f"the frontend has cudnn.pygraph and cudnn.wrapper.Graph ({error})")
    return Verdict(version, known, missing([place[:2] for place in functions + methods]) or broken())


def _places() -> tuple[list[_ReplacedName], list[_ReplacedName]]:
    """Return the names to replace: functions, then methods of graphs.

    `uninstall` restores the functions. The methods stay replaced.
    """
    # This import also imports torch if torch is installed.
    from cudnn import wrapper

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
    """Tell whether the frontend's functions are replaced now."""
    return bool(_installation.replaced)


def install() -> None:
    """Let code for nvidia-cudnn-frontend use the default pool's handles.

    The replacement lasts until `uninstall`. It covers `cudnn.create_handle`, ``set_stream``, ``get_stream``,
    ``destroy_handle``, the default handles and `cudnn.Graph`. Handles that were made before `install` go on to work as before.
    If `install` is already in force, a second call replaces only names that other code has restored. `install` uses no GPU, so
    it may be called during a capture.

    Raises
    ------
    DriverNotAvailableError
        For a frontend that lacks a replaced name, and for an unknown version that fails the self-test. The message
        names the broken assumption. `install` then changes nothing.

    Warns
    -----
    RuntimeWarning
        For an unknown version that passed the self-test. Also for each loaded module that has imported a function by name, as
        after ``from cudnn import create_handle``: the module keeps the frontend's function. Import such a module after
        `install`.
    """
    _installation.install()


def uninstall() -> None:
    """Restore the frontend's functions.

    Handles and graphs that were made since `install` go on to use the pool. If a context of `pooled_handles` is open, the
    functions are restored when this context ends. If `install` is not in force, `uninstall` does nothing.

    Raises
    ------
    OwnershipError
        If other code has replaced a name since `install`, with a function that is not the frontend's. `uninstall` then changes
        nothing.
    """
    _installation.uninstall()


@contextmanager
def pooled_handles() -> Iterator[None]:
    """Install the replacements until a ``with`` statement ends.

    The replacements hold in every thread. If several contexts are open, the context that ends last restores the functions.
    """
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
    """Track the replaced names, and the users of the replacement.

    The users are `install` and the contexts of `pooled_handles`. The lock guards all of this state. So each name is replaced
    once, and the user that ends last restores the name. A thread holds the lock while it changes names, and never while it
    makes a handle. The lock is reentrant, because a finalizer may end a context while its thread holds the lock.
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
        """Undo `install`."""
        with self._lock:
            self._restore(asked=False, contexts=self._contexts)
            self._asked = False

    def enter(self) -> None:
        """Replace the names until `leave`."""
        with self._lock:
            self._replace()
            self._contexts += 1

    def leave(self) -> None:
        """Undo `enter`."""
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
                f"nvidia-cudnn-frontend {verdict.version} cannot use the pool's handles, because it breaks an assumption of "
                f"handlepool: {wrong}. Install version {_KNOWN} of the frontend, or pass the result of handlepool.get_handle() "
                "as the handle"
            )
        if not verdict.known:
            warnings.warn(
                f"nvidia-cudnn-frontend {verdict.version} is not one of the versions that handlepool knows, {_KNOWN}; it passed "
                f"a self-test, so handlepool uses it",
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
                    f"other code has replaced {called(place.owner, place.name)} since handlepool.integrations.cudnn was "
                    "installed: let that code restore the function, then call uninstall again"
                )
        while self.replaced:
            _, (place, made) = self.replaced.popitem()
            if not _is_back(place, made):
                setattr(place.owner, place.name, vars(made)["__wrapped__"])


_installation = Installation()


def _is_back(place: _ReplacedName, made: Callable[..., Any]) -> bool:
    """Return whether other code has restored the name of ``place``.

    Code that patched the name before `install` restores the name when it ends its patch. The name then refers to the function
    that `install` replaced, or to the frontend's own function.
    """
    now = getattr(place.owner, place.name, None)
    return now is vars(made)["__wrapped__"] or getattr(now, "__globals__", None) is vars(place.owner)


def _warn_of_copies(originals: dict[int, _ReplacedName]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module is cudnn or module_name == "cudnn.wrapper":
            continue
        try:
            values = list(vars(module).values())
        # An entry of `sys.modules` need not be a module. It may lack attributes, or raise an error when code reads them.
        except Exception:
            continue
        kept = {originals[id(value)].name for value in values if id(value) in originals}
        if kept:
            warnings.warn(
                f"{module_name} keeps the frontend's own {', '.join(sorted(kept))}, imported before "
                f"handlepool.integrations.cudnn was installed, so its calls do not use the pool: import {module_name} after "
                "install(), or call these functions as attributes of cudnn",
                RuntimeWarning,
                stacklevel=5,
            )
