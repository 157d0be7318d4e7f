"""Choose and load one of the two drivers."""

import os
import threading
from importlib import import_module
from importlib.util import find_spec

from handlepool._util.names import shown
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, DriverNotAvailableError, ForkedProcessError

NAMES = ("cuda", "host")
VARIABLE = "HANDLEPOOL_DRIVER"


class LoadedDrivers:
    """The drivers of this process, each of which is made once.

    There is one object for each driver, because its events, streams and arenas belong together.

    The lock ensures that one thread makes a driver. The collector may run a finalizer while CuPy is imported, and that finalizer
    may ask for a driver. The same thread may therefore take the lock again. A fork waits for a driver that another thread loads.
    Otherwise Python would leave the child with half-imported modules, because the importing thread is missing there.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_name: dict[str, Driver] = {}
        # In a forked child, these are the parent's drivers. They are kept alive and never used (guarantee 13).
        self.inherited: dict[str, Driver] = {}
        self.forked = False

    def replace(self, name: str, driver: Driver | None) -> Driver | None:
        """Store a driver under a name, and return the former driver.

        The driver None removes the name.
        """
        with self.lock:
            before = self.by_name.pop(name, None)
            if driver is not None:
                self.by_name[name] = driver
            return before

    def after_fork(self) -> None:
        """Let a forked child make its own drivers.

        The host driver's threads are gone in the child.
        """
        self.inherited.update(self.by_name)
        self.forked = True
        self.by_name.clear()
        self.lock.release()


_loaded = LoadedDrivers()


def choose(name: str | None = None) -> tuple[str, str]:
    """Return the name of the driver to use, and the reason.

    Parameters
    ----------
    name : {"cuda", "host"}, optional
        An explicit choice, which wins over the environment.

    Returns
    -------
    name, reason : str
        If no name is given, the environment variable ``HANDLEPOOL_DRIVER`` decides. If it is not set, the driver is ``cuda``,
        because a library should never run on the CPU without a request.

    Raises
    ------
    ArgumentError
        For a name that is no driver's.
    """
    if name is not None:
        reason = "asked for by name"
    elif name := os.environ.get(VARIABLE):
        reason = f"set by {VARIABLE}"
    else:
        name, reason = "cuda", f"the default; {VARIABLE} is not set"
    if not isinstance(name, str) or name not in NAMES:
        raise ArgumentError(f"no driver is named {shown(name)} ({reason}); the drivers are {' and '.join(NAMES)}")
    return name, reason


def available(name: str) -> str | None:
    """Return the reason why a driver cannot run here, or None."""
    if name == "host":
        return None
    for module, package in (("cupy", "CuPy"), ("cudnn", "nvidia-cudnn-frontend"), ("cuda.bindings", "cuda-bindings")):
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            # The parent package of a dotted name is missing.
            found = False
        if not found:
            return f"{package} is not installed; install handlepool[cu12] or handlepool[cu13]"
    from handlepool.drivers.cuda import driver as cuda

    return cuda.unavailable()


def load(name: str | None = None, *, strict: bool = False) -> Driver:
    """Return the process's driver of a name, made on first use.

    Parameters
    ----------
    name : {"cuda", "host"}, optional
        As in `choose`.
    strict : bool
        Ask for a host driver whose arrays refuse the same operations as CuPy's arrays. The cuda driver ignores it.

    Raises
    ------
    DriverNotAvailableError
        If the driver cannot run. The message names the missing package and the extra that installs it.
    ForkedProcessError
        In a forked child, for the cuda driver of its parent: CUDA does not survive a fork.
    """
    name, reason = choose(name)
    strict = strict and name == "host"
    key = f"{name}, strict" if strict else name
    with _loaded.lock:
        driver = _loaded.by_name.get(key)
        if driver is None:
            # A forked child must not use the CUDA context that its parent has made.
            if name == "cuda" and name in _loaded.inherited:
                raise ForkedProcessError(
                    "the process that forked this one had used CUDA, which does not survive a fork: start the child with "
                    "multiprocessing.get_context('spawn'), or fork before CUDA is used"
                )
            if (problem := available(name)) and name == "cuda" and _loaded.forked:
                raise DriverNotAvailableError(
                    f"the cuda driver ({reason}) cannot run in this forked process: {problem}. Where any library of the parent "
                    f"has used CUDA, start the child with multiprocessing.get_context('spawn')"
                )
            if problem:
                raise DriverNotAvailableError(
                    f"the {name} driver ({reason}) cannot run here: {problem}. "
                    f"On a machine without a GPU, set {VARIABLE}=host or pass driver='host'"
                )
            module = import_module(f"handlepool.drivers.{name}.driver")
            made = module.CudaDriver() if name == "cuda" else module.HostDriver(strict=strict)
            driver = _loaded.by_name.setdefault(key, made)
    return driver


def replace(name: str, driver: Driver | None) -> Driver | None:
    """Register a driver under a name for tests; return the former driver.

    After None, the next load makes a new driver.
    """
    return _loaded.replace(name, driver)


os.register_at_fork(before=_loaded.lock.acquire, after_in_parent=_loaded.lock.release, after_in_child=_loaded.after_fork)
