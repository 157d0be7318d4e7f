"""A command of the package on a terminal of its own, with Ctrl-C."""

import fcntl
import os
import pty
import signal
import struct
import sys
import termios


def run_on_terminal(*arguments, columns=80, interrupt_at=None, **environment):
    """Run ``python -m handlepool``; return its output and its exit status.

    ``interrupt_at`` is a text of the output. Ctrl-C is typed when it has appeared.
    """
    # A variable COLUMNS would win over the size of the terminal.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | environment
    process, terminal = pty.fork()
    if process == 0:
        # A background job of a shell ignores Ctrl-C, and so do its children. A job of a terminal does not.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, "-m", "handlepool", *map(str, arguments)], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    output = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        # The system says so when the command has closed the terminal.
        except OSError:
            data = b""
        if not data:
            break
        output += data
        if interrupt_at is not None and interrupt_at.encode() in output:
            os.write(terminal, b"\x03")
            interrupt_at = None
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    return output.decode(), os.waitstatus_to_exitcode(status)
