"""Find the first frame outside of this package: the line that an error, a warning or a node of a recording names."""

import sys
from functools import cache
from types import FrameType

LIBRARIES = ("handlepool", "numpy", "cupy", "cupy_backends", "torch")
"""Packages that call each other. A frame of them is not a caller's own code."""


def place_of_call() -> str:
    """Return the file and the line that called into this package, or into an array library that calls it."""
    frame = sys._getframe(1)  # noqa: SLF001 - public in all but its name
    # The outermost frame is taken even where it is a library's. Recording a node searches once, so the loop is written out.
    while _is_library(frame.f_globals.get("__name__", "")) and (outer := frame.f_back) is not None:
        frame = outer
    return _place(frame, frame.f_lineno)


def place_of_error(error: BaseException) -> str:
    """Return the file and the line of the caller's own code that an error came from, whichever library raised the error."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if not place or not _is_library(trace.tb_frame.f_globals.get("__name__", "")):
            place = _place(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return place


def frames_inside() -> int:
    """Return the ``stacklevel`` at which a warning names the line that called into this package."""
    frame, depth = sys._getframe(1), 1  # noqa: SLF001 - public in all but its name
    while frame.f_globals.get("__name__", "").partition(".")[0] == "handlepool" and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line}"
