"""Write lines and progress to terminals, files and pipes."""

import os
import shutil
import sys
from typing import TextIO

_GREEN, _RED, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"


def tell(text: str = "") -> None:
    """Print ``text`` and flush stdout, for the reader of a pipe.

    A reader such as ``head`` may close the pipe early. The command then goes on without printing, and still writes its files.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence()


def complain(command: str, error: object) -> None:
    """Print an error as a single line on stderr."""
    print(f"handlepool {command}: {' '.join(str(error).split())}", file=sys.stderr)


def silence() -> None:
    """Discard everything that this process prints to stdout from now on.

    Otherwise the interpreter would report the closed pipe when it flushes stdout at its end.
    """
    # ``sys.stdout`` is None if the parent process has closed the stream.
    if sys.stdout is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def coloured(text: str, *, good: bool) -> str:
    """Return ``text`` in green if ``good`` is true, else in red.

    The text stays plain if stdout is no terminal, if the environment sets ``NO_COLOR`` (see https://no-color.org), or if ``TERM``
    is ``dumb``.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not _is_terminal(sys.stdout)
    return text if plain else f"{_GREEN if good else _RED}{text}{_PLAIN}"


class Progress:
    """Show the current step of a command on a terminal.

    The line goes to stderr. A command whose stderr is a pipe or a file shows nothing.

    Parameters
    ----------
    command : str
        The name of the command, with which the line begins.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._shown = _is_terminal(sys.stderr)

    def __call__(self, step: str) -> None:
        """Show ``step`` as the current step, in place of the last step."""
        self._write(f"{self._command}: {step} ...")

    def clear(self) -> None:
        """Remove the line, before other text is printed."""
        self._write("")

    def _write(self, text: str) -> None:
        if not self._shown:
            return
        # A text that fills the last column would begin a new line. The next step could then not overwrite this text.
        width = shutil.get_terminal_size().columns - 1
        # Overwrite the old text with blanks, because a dumb terminal would show an escape sequence as text.
        print(f"\r{text[:width]:<{width}}\r{text[:width]}", end="", file=sys.stderr, flush=True)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
