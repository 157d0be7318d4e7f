"""Run ``handlepool demo``.

The demo applies filters to a photograph on side streams. It also records a small network, then checks and draws the results.
"""

import os
from argparse import Namespace
from pathlib import Path

from handlepool import drivers
from handlepool.cli import info
from handlepool.cli.demo.filters import builtin_filters, load_filters
from handlepool.cli.terminal import Progress, complain, tell
from handlepool.errors import ArgumentError, DriverNotAvailableError, HandlePoolError

_MOST_STATES = 32


def main(options: Namespace) -> int:
    """Run the demo.

    Parameters
    ----------
    options : argparse.Namespace
        ``image``, ``filters`` (Path or None), ``out`` (Path), ``states``, ``size`` (int), ``driver`` (str or None).

    Returns
    -------
    int
        0 when all results are right; 1 when a result is further than 2e-3 from the reference; 2, with one line on stderr, when
        the demo could not run.
    """
    try:
        return _run(options)
    except MemoryError as error:
        complain("demo", f"{error}; pass a smaller --size, smaller filters or fewer --states")
    except HandlePoolError as error:
        complain("demo", error)
    except ImportError as error:
        complain("demo", f"{error}; install the extra: pip install 'handlepool[demo]'")
    return 2


def choose_driver(name: str | None) -> tuple[str, str]:
    """Return the driver for the demo, and the reason.

    If a driver was requested by argument or by ``HANDLEPOOL_DRIVER``, the demo uses this driver, or raises an error. If no
    driver was requested, the demo uses cuda if cuda is available, else host. The library itself never replaces a missing driver
    by another.
    """
    asked = name is not None or bool(os.environ.get("HANDLEPOOL_DRIVER"))
    chosen, reason = drivers.choose(name)
    missing = drivers.available(chosen)
    if missing is None:
        return chosen, reason
    if asked:
        raise DriverNotAvailableError(
            f"the {chosen} driver was asked for ({reason}), but {missing}; `--driver host` needs no GPU"
        )
    return "host", f"because {missing}"


def _check_out(out: Path, image: Path | None, filters: Path | None) -> None:
    """Raise if ``out`` cannot be written, before the demo does its work."""
    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else "lies in a folder that does not exist"
        raise ArgumentError(f"{str(out)!r} {what}; pass the path of the PNG to write as --out")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ArgumentError(f"{str(out)!r} may not be written by this user; pass another path as --out")
    # If a user swaps two paths, the demo would overwrite its own input.
    for what, given in (("photograph", image), ("file of filters", filters)):
        if given is not None and out.exists() and given.exists() and out.samefile(given):
            raise ArgumentError(f"--out {str(out)!r} is the {what} itself; pass another file")


def _run(options: Namespace) -> int:
    # These modules import matplotlib and Pillow, which an extra installs. If an import fails, `main` names the extra.
    from handlepool.cli.demo.figure import draw
    from handlepool.cli.demo.images import load_photograph, sample_photograph
    from handlepool.cli.demo.measure import measure, render
    from handlepool.pool.pool import HandlePool

    if not 1 <= options.states <= _MOST_STATES:
        raise ArgumentError(f"{options.states} states are out of range; pass 1 to {_MOST_STATES} as --states")
    _check_out(options.out, options.image, options.filters)
    filters = builtin_filters() if options.filters is None else load_filters(options.filters)
    path = sample_photograph() if options.image is None else options.image
    photograph = load_photograph(path, options.size)
    driver, reason = choose_driver(options.driver)
    height, width = photograph.shape[:2]
    device = info.device_name() if driver == "cuda" else "NumPy on the CPU"
    tell(f"driver   {driver} ({reason}), {device}")
    tell(f"picture  {path.name}, {width} x {height} pixels; {len(filters)} filters and a chain over {options.states} states")

    progress = Progress("handlepool demo")
    # The default pool may have another driver than the demo, so the demo makes a pool of its own.
    pool = HandlePool(driver=driver)
    try:
        report = measure(photograph, filters, states=options.states, pool=pool, progress=progress)
        progress("drawing")
        draw(report, photograph, f"{path.name} on the {driver} driver, {device}", options.out)
    finally:
        pool.close()
        progress.clear()
    tell()
    tell(render(report))
    tell(f"\nwrote {options.out}")
    if report.wrong:
        complain("demo", f"further than 2e-3 from the float64 reference: {', '.join(report.wrong)}")
    return 1 if report.wrong else 0
