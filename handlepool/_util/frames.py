"""Find the user's line of code behind an error, warning or node.

This line belongs to the innermost frame whose code is neither this package's nor an array library's.
"""

import sys
from functools import cache

LIBRARIES = ("handlepool", "numpy", "cupy", "cupy_backends", "torch")
"""Packages whose frames do not count as the user's code."""


def place_of_call() -> str:
    """Return the file and line that called into this package.

    If an array library called this package, the line that called the array library is returned.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - public in all but its name
    # If even the outermost frame belongs to a library, the search ends there. Each recorded node needs a search, so for speed
    # this loop does not share code with `frames_inside`.
    while _is_library(frame.f_globals.get("__name__", "")) and (outer := frame.f_back) is not None:
        frame = outer
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_error(error: BaseException) -> str:
    """Return the user's file and line that led to an error.

    The line belongs to the innermost frame of the user's code. If the traceback has no such frame, its outermost frame counts.
    """
    place, trace = "", error.__traceback__
    while trace is not None:
        if not place or not _is_library(trace.tb_frame.f_globals.get("__name__", "")):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def frames_inside() -> int:
    """Return the ``stacklevel`` with which a warning names the user's line.

    The user's line is the line that called into this package.
    """
    frame, depth = sys._getframe(1), 1  # noqa: SLF001 - public in all but its name
    while frame.f_globals.get("__name__", "").partition(".")[0] == "handlepool" and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
