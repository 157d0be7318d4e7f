"""Run ``handlepool``, or ``python -m handlepool``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from handlepool import __version__
from handlepool.cli.terminal import silence

_INTERRUPTED = 130
"""The exit status after Ctrl-C, by the convention of shells."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print ``message`` on one line and exit, without argparse's usage text."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments, and point to the help of this subcommand.

        If this parser returned the unknown arguments, the top-level parser would refuse them and point to its own help.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    top = _Parser(prog="handlepool", description="cuDNN handles per thread, device and stream; concurrent cuDNN calls.")
    top.add_argument("--version", action="version", version=f"handlepool {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="info | check | demo | plans")

    info = commands.add_parser("info", help="installed packages and devices, and the driver that would be chosen")
    form = info.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the output as JSON")
    form.add_argument(
        "--device-properties", nargs="?", type=int, const=0, metavar="ORDINAL", help="print a device's properties as JSON"
    )

    check = commands.add_parser("check", help="test handles, order, recording and scratch on this machine, within a minute")
    check.add_argument("--driver", choices=("cuda", "host"), help="default: the driver that `handlepool info` names")
    check.add_argument("--bundle", type=Path, metavar="FILE", help="write the results and `info` as JSON, to attach to a report")

    demo = commands.add_parser("demo", help="record a network, filter a photograph concurrently, check the results, draw them")
    demo.add_argument("image", nargs="?", type=Path, help="any file that Pillow reads (default: matplotlib's sample)")
    demo.add_argument("--out", type=Path, default=Path("handlepool-demo.png"), help="the PNG to write (%(default)s)")
    demo.add_argument("--states", type=int, default=4, help="side streams to run on, 1 to 32 (%(default)s)")
    demo.add_argument("--driver", choices=("cuda", "host"), help="default: cuda where there is a GPU, else host")
    demo.add_argument("--filters", type=Path, help='a JSON file, {"name": [[...], ...], ...}, of square kernels with odd sides')
    demo.add_argument("--size", type=int, default=1024, help="longest side in pixels (%(default)s)")

    plans = commands.add_parser("plans", help="list a plan directory, and build plans for a device elsewhere")
    actions = plans.add_subparsers(dest="action", required=True, metavar="list | verify | clear | build")
    told = {
        "list": "print each plan, most recently used first",
        "verify": "print the files that cannot be used",
        "clear": "remove every plan",
        "build": "plan the calls that a module lists, for a described device",
    }
    for name, text in told.items():
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "--directory", help="default: the environment variable HANDLEPOOL_PLAN_DIRECTORY, else ~/.cache/handlepool/plans"
        )
        if name == "build":
            action.add_argument("module", help="a module with a list PLANS of (function, specs) or (function, specs, options)")
            action.add_argument(
                "--device-properties", type=Path, required=True, help="a file that `info --device-properties` wrote"
            )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = parser().parse_args(arguments)
    if options.command == "info":
        # Each command imports its own modules. So `info` works even if the demo's packages are missing.
        from handlepool.cli import info

        if options.device_properties is not None:
            return info.describe(options.device_properties)
        return info.main(as_json=options.json)
    if options.command == "check":
        from handlepool.cli import check

        return check.main(options)
    if options.command == "plans":
        from handlepool.cli import plans

        return plans.main(options)
    from handlepool.cli import demo

    return demo.main(options)


def run() -> int:
    """Run the command of this process; return the exit status.

    After an `OSError` or Ctrl-C, the function prints one line on stderr. A reader that closes the pipe early, such as ``head``,
    causes no error.
    """
    try:
        status = main()
        # The parent process may have closed the stream.
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nhandlepool: interrupted" if sys.stderr.isatty() else "handlepool: interrupted", file=sys.stderr)
        silence()
        return _INTERRUPTED
    except OSError as error:
        enough = isinstance(error, BrokenPipeError)
        if not enough:
            print(f"handlepool: {error}", file=sys.stderr)
        silence()
        return 0 if enough else 2


if __name__ == "__main__":
    sys.exit(run())
