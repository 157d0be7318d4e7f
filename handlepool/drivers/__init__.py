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
    """Hold the drivers of this process, and make each driver once.

    A driver's events, streams and arenas belong to its object. A second object for the same driver could not use them.

    The lock ensures that only one thread makes a driver. While CuPy is imported, the garbage collector may run a finalizer that
    asks for a driver in the same thread. So the lock is reentrant. `os.fork` also takes the lock, and so waits while another
    thread loads a driver. Without that wait, the child process could have half-imported modules, because it lacks the thread
    that imports them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_name: dict[str, Driver] = {}
        # In a forked child, the drivers that the parent had loaded. They are kept alive and never used (guarantee 13).
        self.inherited: dict[str, Driver] = {}
        self.forked = False

    def replace(self, name: str, driver: Driver | None) -> Driver | None:
        """Store a driver under a name, and return the former driver.

        If ``driver`` is None, no driver has the name afterwards.
        """
        with self.lock:
            before = self.by_name.pop(name, None)
            if driver is not None:
                self.by_name[name] = driver
            return before

    def after_fork(self) -> None:
        """Let a forked child make its own drivers.

        The child cannot use the parent's drivers, because CUDA does not survive a fork, and the child lacks the threads of the
        host driver.
        """
        self.inherited.update(self.by_name)
        self.forked = True
        self.by_name.clear()
        self.lock.release()


_loaded = LoadedDrivers()


def choose(name: str | None = None) -> tuple[str, str]:
    """Return the driver's name, and the reason for this choice.

    Parameters
    ----------
    name : {"cuda", "host"}, optional
        An explicit choice. It takes precedence over the environment variable.

    Returns
    -------
    name, reason : str
        If no name is given, the environment variable ``HANDLEPOOL_DRIVER`` decides. If the variable is not set, the driver is
        ``cuda``, because a library should never run on the CPU unless asked to.

    Raises
    ------
    ArgumentError
        If no driver has the name.
    """
    if name is not None:
        reason = "asked for by name"
    elif name := os.environ.get(VARIABLE):
        reason = f"set by {VARIABLE}"
    else:
        name, reason = "cuda", f"the default; {VARIABLE} is not set"
    if not isinstance(name, str) or name not in NAMES:
        raise ArgumentError(f"no driver is named {shown(name)} ({reason}); use one of the drivers {' and '.join(NAMES)}")
    return name, reason


def available(name: str) -> str | None:
    """Return the reason why a driver cannot run here, or None."""
    if name == "host":
        return None
    for module, package in (("cupy", "CuPy"), ("cudnn", "nvidia-cudnn-frontend"), ("cuda.bindings", "cuda-bindings")):
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            # `find_spec` raises this error if the parent package of a dotted name is missing.
            found = False
        if not found:
            return f"{package} is not installed; install handlepool[cu12] or handlepool[cu13]"
    from handlepool.drivers.cuda import driver as cuda

    return cuda.unavailable()


def load(name: str | None = None, *, strict: bool = False) -> Driver:
    """Return this process's driver ``name``; the first call makes it.

    Parameters
    ----------
    name : {"cuda", "host"}, optional
        As in `choose`.
    strict : bool
        Whether to return a host driver whose arrays refuse the same operations as CuPy's arrays. Without effect for ``cuda``.

    Raises
    ------
    DriverNotAvailableError
        If the driver cannot run. The message names the missing package and the extra that installs it.
    ForkedProcessError
        In a forked child whose parent had loaded the cuda driver. CUDA does not survive a fork.
    """
    name, reason = choose(name)
    strict = strict and name == "host"
    key = f"{name}, strict" if strict else name
    with _loaded.lock:
        driver = _loaded.by_name.get(key)
        if driver is None:
            # A forked child must not use the CUDA context of its parent.
            if name == "cuda" and name in _loaded.inherited:
                raise ForkedProcessError(
                    "the parent of this process had used CUDA, which does not survive a fork: start the child with "
                    "multiprocessing.get_context('spawn'), or fork before CUDA is used"
                )
            if (problem := available(name)) and name == "cuda" and _loaded.forked:
                raise DriverNotAvailableError(
                    f"the cuda driver ({reason}) cannot run in this forked process: {problem}. If any library of the parent "
                    f"process has used CUDA, start the child with multiprocessing.get_context('spawn')"
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

    If ``driver`` is None, the next `load` of the name makes a new driver.
    """
    return _loaded.replace(name, driver)


os.register_at_fork(before=_loaded.lock.acquire, after_in_parent=_loaded.lock.release, after_in_child=_loaded.after_fork)
