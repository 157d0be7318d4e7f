"""What CuPy shares between the streams of a thread or a device, and is therefore not for concurrent branches (guarantee 16).

A plan of ``cupy.fft`` is kept for a thread and has one work area; the generator behind ``cupy.random`` is kept for a device and
has one state. Their users pass through one function each, which is replaced while somebody watches.
"""

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

_PASSED = (
    ("cupy.fft", "cupy.fft._fft", "get_plan_cache"),
    ("cupy.random", "cupy.random._generator", "get_random_state"),
)
"""What is reported, and the function that its users pass through: the module that looks it up, and its name there."""

_reports: dict[object, Callable[[str], None]] = {}
_replaced: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()  # guards both; CuPy's modules are imported inside, where the collector may run a finaliser


def watch(report: Callable[[str], None]) -> Callable[[], None]:
    """Have ``report(name)`` called before each use, in the thread of the user; returns what ends it."""
    with _lock:
        if not _reports:
            for name, module_name, attribute in _PASSED:
                module = import_module(module_name)
                function = getattr(module, attribute, None)
                if function is not None:  # a CuPy that has it elsewhere is not watched
                    _replaced.append((module, attribute, function))
                    setattr(module, attribute, _reporting(name, function))
        key = object()
        _reports[key] = report

    def end() -> None:
        with _lock:
            if _reports.pop(key, None) is not None and not _reports:
                while _replaced:
                    setattr(*_replaced.pop())

    return end


def _reporting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        for report in tuple(_reports.values()):
            report(name)
        return function(*args, **kwargs)

    return reporting


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
