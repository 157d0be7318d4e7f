"""The demo's findings as text."""

from collections.abc import Sequence

from handlepool.cli.demo.measure import TOLERANCE, Report


def render(report: Report) -> str:
    """Say it in lines: one a filter, then the times."""
    rows = [("filter", "size", "largest error", "relative", "", "workspace", "plan")]
    rows += [
        (
            result.name,
            f"{result.size} x {result.size}",
            f"{result.largest:.1e}",
            f"{result.relative:.1e}",
            "" if result.right else "WRONG",
            _bytes(result.workspace),
            result.engine,
        )
        for result in report.results
    ]
    times = report.times
    clock = [("", "ms", "")]
    for what, value in (
        (f"forked over {counted(report.states, 'state')}", times.forked),
        ("the same on one stream", times.single),
        (f"same-size filters as one convolution ({times.stacked_convolutions} in all)", times.stacked),
    ):
        clock.append((what, f"{value:.3f}", f"{times.single / value:.2f} x as fast as one stream"))
    clock[2] = (*clock[2][:2], "")
    samples = f"medians of {times.repeats} interleaved repeats after a warm-up" if times.repeats else "one run of each"
    lines = [
        *_columns(rows, right=(2, 3, 5)),
        f"errors are against SciPy in float64, pixels from 0 to 1; the relative one may be {TOLERANCE:g}",
        "",
        *_columns(clock, right=(1,)),
        f"{samples}, from events on the caller's stream; {report.overlap:.1f} branches at a time",
    ]
    if report.driver != "cuda":
        lines.append(f"these are times of the {report.driver} driver: they say nothing about a GPU")
    return "\n".join(lines)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Say "1 state", "2 states"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def milliseconds(value: float) -> str:
    """Three figures, and all of a number that has more before its point."""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.0f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"
