"""Something happens at a line of the package, as the collector or an interrupt may make it happen at any."""

import itertools
import linecache
import os
import random
import sys

import handlepool

PACKAGE = os.path.dirname(handlepool.__file__) + os.sep
DRIVERS = os.path.join(PACKAGE, "drivers")


EVERY_LINE = bool(os.environ.get("HANDLEPOOL_EVERY_LINE"))


def some_lines(step):
    """The numbers of lines for `at_line`: each ``step``-th from one at random on, so that several runs meet them all.

    With ``HANDLEPOOL_EVERY_LINE`` one run does.
    """
    return itertools.count(1) if EVERY_LINE else itertools.count(random.randint(1, step), step)


def at_line(k, function, happens, modules=None):
    """Call a function, and another one at its k-th line inside the package or some modules; where that was, None beyond the last.

    A driver's own lines do not count, nor what they lead to: a real driver is not written in Python.
    """
    left, where = k, None

    def trace(frame, event, argument):
        nonlocal left, where
        if event == "call":
            caller = frame
            while caller is not None and not caller.f_code.co_filename.startswith(DRIVERS):
                caller = caller.f_back
            return trace if caller is None and frame.f_code.co_filename.startswith(PACKAGE) else None
        if event == "line" and (modules is None or os.path.basename(frame.f_code.co_filename) in modules):
            left -= 1
            if left == 0:
                where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                happens()  # untraced
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if where is not None and (error := sys.exception()) is not None:
            error.add_note(f"at {where}")
    return where


def interrupt():
    raise KeyboardInterrupt


def line_of(error):
    """The line of the package that `at_line` raised an error at."""
    name, number = error.__notes__[0].removeprefix("at ").split(":")
    return linecache.getline(os.path.join(PACKAGE, name), int(number)).strip()
