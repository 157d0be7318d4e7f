"""What CuPy shares between the streams of a thread or a device, and is therefore not for concurrent branches (guarantee 16).

A plan of ``cupy.fft`` is kept for a thread and has one work area; the generator behind ``cupy.random`` is kept for a device and
has one state. Their users pass through one function each, which is replaced while somebody watches.
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
"""What is reported, and the function that its users pass through: the module that looks it up, and its name there."""


class Watchers:
    """The pools that watch shared uses, and the functions of CuPy that are replaced while a pool watches.

    The lock guards both: the first watcher replaces the functions, and the last watcher puts them back. CuPy's modules are
    imported under the lock, where the collector may run a finaliser, so the same thread may take it again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._reports: dict[object, Callable[[str], None]] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def add(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Have a function called before each use; return a function that ends that."""
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
            # A CuPy that has the function under another name is not watched.
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
            for report in tuple(self._reports.values()):
                report(name)
            return function(*args, **kwargs)

        return reporting

    def after_fork(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self.lock = threading.RLock()


_watchers = Watchers()
os.register_at_fork(after_in_child=_watchers.after_fork)


def watch(report: Callable[[str], None]) -> Callable[[], None]:
    """Have ``report(name)`` called before each use, in the thread of the user; return a function that ends that."""
    return _watchers.add(report)
