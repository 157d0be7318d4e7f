"""``python -m handlepool``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from handlepool import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line instead of the usage and a line."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    top = _Parser(prog="handlepool", description="cuDNN handles per thread, device and stream; concurrent cuDNN calls.")
    top.add_argument("--version", action="version", version=f"handlepool {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="info | demo")

    info = commands.add_parser("info", help="what is installed, and which driver would be chosen")
    info.add_argument("--json", action="store_true", help="print it as JSON")

    demo = commands.add_parser("demo", help="filter a photograph concurrently, check the results and draw them")
    demo.add_argument("image", nargs="?", type=Path, help="any file that Pillow reads (default: matplotlib's sample)")
    demo.add_argument("--out", type=Path, default=Path("handlepool-demo.png"), help="the PNG to write (%(default)s)")
    demo.add_argument("--states", type=int, default=4, help="side streams to run on, 1 to 32 (%(default)s)")
    demo.add_argument("--driver", choices=("cuda", "host"), help="default: cuda where there is a GPU, else host")
    demo.add_argument("--filters", type=Path, help='JSON: {"name": [[...], ...], ...}, odd square kernels')
    demo.add_argument("--size", type=int, default=1024, help="longest side in pixels (%(default)s)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.command == "info":
        from handlepool.cli import info

        return info.main(as_json=options.json)
    from handlepool.cli import demo

    return demo.main(options)


def _run() -> int:
    """Run the command of this process. A reader of standard output that has had enough, as ``head``, is no error."""
    try:
        status = main()
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it flushes at its end
        return 0


if __name__ == "__main__":
    sys.exit(_run())
