"""Share options among the benchmark scripts, and check the form of their values."""

import argparse
import os
from pathlib import Path
from typing import Any

DRIVER_HELP = "handlepool's driver (default: as handlepool chooses); on host, sizes are small where none are given"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=new_file, help="write the results there")
    parser.add_argument("--repeats", type=positive, default=15, help="samples of each case (default: %(default)s)")
    parser.add_argument("--driver", choices=("cuda", "host"), help=DRIVER_HELP)
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that the script runs, and nothing else")
    return parser


def parse(parser: argparse.ArgumentParser, small: dict[str, Any] | None = None, **quick: Any) -> argparse.Namespace:
    """The options, once the driver is loaded. Defaults are ``small`` on the host driver, and with ``quick`` under ``--quick``."""
    given = parser.parse_known_args()[0]
    driver = loaded(parser, given.driver)
    if given.quick:
        parser.set_defaults(repeats=2, **((small or {}) | quick))
    elif small and driver == "host":
        parser.set_defaults(**small)
        print("on the host driver, sizes are small where none are given")
    return parser.parse_args()


def loaded(parser: argparse.ArgumentParser, name: str | None) -> str:
    """The name of the driver that will be used; a line and the end where none can be."""
    from handlepool import ArgumentError, DriverNotAvailableError, drivers

    try:
        return drivers.load(name).name
    except (ArgumentError, DriverNotAvailableError) as error:
        parser.error(str(error))


def positive(text: str) -> int:
    """An option's value: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; it must be 1 or more")
    return value


def side_streams(text: str) -> int:
    """An option's value: as many states as there can be."""
    from handlepool.pool.side_streams import MOST_SIDE_SLOTS

    value = positive(text)
    if value > MOST_SIDE_SLOTS:
        raise argparse.ArgumentTypeError(f"{value}; it must be {MOST_SIDE_SLOTS} or less")
    return value


def new_file(text: str) -> Path:
    """An option's value: a file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path
