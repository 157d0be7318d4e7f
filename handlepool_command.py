"""Start the command ``handlepool``.

The module stands outside of the package, because importing any module of the package imports all of it. That takes a third of a
second, in which Ctrl-C should end the command as it does later.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130
"""Give the exit status that shells use after Ctrl-C."""


def run() -> int:
    """Run the command of this process; return the exit status."""
    # A handler ends the process at once. An exception could be lost in a module that catches all errors of its imports.
    # A background job of a shell ignores Ctrl-C, and goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from handlepool.__main__ import run as run_command

    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_command()
    except KeyboardInterrupt:
        # Ctrl-C came between the two handlers: the command had not begun, or had ended.
        _end()


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Print one line and end the process, which has no work and no open files yet."""
    try:
        os.write(2, b"\nhandlepool: interrupted\n" if os.isatty(2) else b"handlepool: interrupted\n")
    finally:
        os._exit(_INTERRUPTED)
