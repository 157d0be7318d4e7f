"""Watch uses of CuPy state that streams share (guarantee 16).

All streams of a thread share the plans of ``cupy.fft``, and each plan has a single work area. All streams of a device share the
generator behind ``cupy.random``, which has a single state. So concurrent branches must use neither.

CuPy's code gets the plans by one function, and the generator by another. While a pool watches, `Watchers` replaces both
functions.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

_PASSED = (
    ("cupy.fft", "cupy.fft._fft", "get_plan_cache"),
    ("cupy.random", "cupy.random._generator", "get_random_state"),
)
"""The name of each shared state, and the function that returns it.

Each entry has the name of the state, the module in which CuPy looks the function up, and the function's name in that module.
"""


class Watchers:
    """Keep the watching pools, and the replaced functions of CuPy.

    The lock guards the pools and the functions. The first watcher replaces the functions, and the last watcher restores them.
    CuPy's modules are imported under the lock. An import may run the garbage collector, and so a finalizer that takes the lock in
    the same thread. The lock is therefore reentrant.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._reports: dict[object, Callable[[str], None]] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def add(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Call ``report`` before each use of shared state; return a remover."""
        with self.lock:
            if not self._reports:
                self._replace()
            key = object()
            self._reports[key] = report
        return partial(self._remove, key)

    def _replace(self) -> None:
        for name, module_name, attribute in _PASSED:
            module = import_module(module_name)
            function = getattr(module, attribute, None)
            # If this version of CuPy has the function under another name, the function's calls are not watched.
            if function is not None:
                self._replaced.append((module, attribute, function))
                setattr(module, attribute, self._reporting(name, function))

    def _remove(self, key: object) -> None:
        with self.lock:
            if self._reports.pop(key, None) is not None and not self._reports:
                while self._replaced:
                    setattr(*self._replaced.pop())

    def _reporting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(*args: object, **kwargs: object) -> Any:
            # The tuple is a copy, because another thread may add or remove a report meanwhile.
            for report in tuple(self._reports.values()):
                report(name)
            return function(*args, **kwargs)

        return reporting

    def after_fork(self) -> None:
        """Replace the lock in a forked child.

        Another thread of the parent may have held the lock at the fork, and that thread does not exist in the child.
        """
        self.lock = threading.RLock()


_watchers = Watchers()
os.register_at_fork(after_in_child=_watchers.after_fork)


def watch(report: Callable[[str], None]) -> Callable[[], None]:
    """Call ``report(name)`` before uses of shared state; return a remover.

    The thread that uses the state makes the call.
    """
    return _watchers.add(report)
