"""Find the frames outside of this package."""

import sys


def frames_inside() -> int:
    """Return how many frames of this package the caller is deep in, for a warning's ``stacklevel``: whoever called into it."""
    frame, depth = sys._getframe(1), 1  # noqa: SLF001 - public in all but its name
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "handlepool":
        frame, depth = frame.f_back, depth + 1
    return depth
