"""Draw a program: its graph by lanes, and its steps over time."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from operator import itemgetter
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from handlepool._util.names import shown
from handlepool.errors import ArgumentError, PackageMissingError
from handlepool.recording.explain import Explanation

# The picture's width, its margin and the height of a lane's row are in inches. The resolution is in dots per inch.
_WIDTH, _MARGIN, _ROW, _DPI = 16.0, 0.5, 0.3, 120
# The minimum height of a panel, in inches.
_LEAST_HEIGHT = 0.9
# If a graph has more edges than this number, its picture shows no edges.
_MOST_EDGES = 4000
_MANY = 300
"""The minimum number of steps for which boxes are drawn without gaps."""
_LETTER = 5.4
"""The width of a letter, in points."""
_NAMED = 8
"""The number of call names that have a colour of their own.

The names whose calls take longest get these colours. All other names share a colour.
"""


class Theme(NamedTuple):
    """The colours of a light or a dark picture."""

    paper: str
    ink: str
    pale: str
    grid: str
    serial: str
    other: str
    calls: tuple[str, ...]


LIGHT = Theme(
    "#ffffff",
    "#1c2126",
    "#5d666e",
    "#e3e7ea",
    "#f0f2f4",
    "#aab3bb",
    ("#0b6bcb", "#0a7d55", "#d1552b", "#a8610a", "#7a4fc0", "#b83280", "#157f8a", "#6d7a1c"),
)
DARK = Theme(
    "#0f1419",
    "#e6e9ec",
    "#9aa5ae",
    "#2b333b",
    "#1b2229",
    "#5b666f",
    ("#5aa9f5", "#43c59e", "#f0825c", "#e0b050", "#b497f0", "#f07fb4", "#4fc3d0", "#b7c455"),
)

VARIABLE = "HANDLEPOOL_DRAW"
"""The environment variable that names a folder for pictures.

If the variable is set, a picture of each recording with lanes is written to that folder.
"""

Spans = list[tuple[float, float]]
"""The begin and the end of each step, in microseconds."""


def check(name: str, file: str | PathLike[str]) -> None:
    """Raise if no picture can be written to ``file``.

    Callers check this before they record a function or measure a replay, because both take time.

    Raises
    ------
    PackageMissingError
        If matplotlib is not installed.
    ArgumentError
        If ``file`` is no file name, has an unknown ending, or is in a folder that does not exist.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise PackageMissingError(
            f"a picture of {name} needs matplotlib, which is not installed. Run pip install handlepool[demo], or give the text "
            f"of program.explain().to_dot() to Graphviz"
        ) from error
    try:
        path = Path(fspath(file))
    except TypeError:
        raise ArgumentError(f"{name}: draw({shown(file)}): the argument is not a file name; pass the name of a file") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ArgumentError(
            f"{name}: draw({str(fspath(file))!r}): the file name's ending selects the format; use one of "
            f".{', .'.join(sorted(kinds))}"
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"{name}: draw({str(path)!r}): the folder {str(path.parent)!r} does not exist; make it first")


# All calls share the default of ``numbers``, which counts the pictures of this process. So two recordings with the same name get
# two files.
def asked_for(name: str, numbers: Iterator[int] = count(1)) -> Path | None:  # noqa: B008
    """Return the file for a recording's picture, or None.

    Return None if the environment variable `VARIABLE` is not set, so that no picture is wanted.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    path = Path(folder) / f"{re.sub('[^A-Za-z0-9_.-]+', '-', name).strip('-.') or 'program'}-{next(numbers)}.png"
    check(f"{name} (drawn because {VARIABLE} is set)", path)
    return path


def draw(how: Explanation, file: str | PathLike[str], *, dark: bool) -> None:
    """Write the picture of a program to a file.

    If a replay was measured, a second panel shows when each step ran in that replay.

    Raises
    ------
    ArgumentError
        If the program has no steps, or if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not how.steps and how.limit is not None:
        raise ArgumentError(
            f"{how.name} has no calls to draw, because the function calls no graph function or operation; draw another program"
        )
    if not how.steps:
        raise ArgumentError(
            f"{how.name} was not recorded with lanes, so it has no calls to draw: record with lanes, as in "
            "record(function, ..., lanes=8)"
        )
    theme = DARK if dark else LIGHT
    colours = _colours(how, theme)
    panel = max(_ROW * how.got, _LEAST_HEIGHT)
    panels = 2 if how.ends else 1
    height = 1.2 + panels * (panel + 0.75)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor=theme.paper)
    # The canvas registers itself with the figure. The canvas is made here without pyplot, which would need a global state and
    # might need a display.
    FigureCanvasAgg(figure)
    figure.text(_MARGIN / _WIDTH, 1 - 0.35 / height, how.name, size=16, weight="bold", color=theme.ink, parse_math=False)
    figure.text(_MARGIN / _WIDTH, 1 - 0.65 / height, _subtitle(how), size=10.5, color=theme.pale, parse_math=False)
    _legend(figure, theme, colours, 1 - 0.95 / height)
    times = [*how.times] or [1.0] * len(how.steps)
    unit = "microseconds, planned from the time of each step alone" if how.times else "steps, as if all took equally long"
    for place in range(panels):
        top = height - 1.4 - place * (panel + 0.75)
        axes = figure.add_axes((0.75 / _WIDTH, (top - panel) / height, 1 - (0.75 + _MARGIN) / _WIDTH, panel / height))
        spans = _planned(how, times) if place == 0 else how.ran
        _panel(axes, how, spans, colours, theme, edges=place == 0)
        title = f"the graph by lanes; {unit}" if place == 0 else "the measured replay; microseconds from its beginning"
        axes.set_title(title, loc="left", size=10.5, color=theme.ink, pad=6)
    try:
        figure.savefig(fspath(file), facecolor=theme.paper)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"{how.name}: cannot write {fspath(file)!r}: {reason}; pass another file") from error


def _subtitle(how: Explanation) -> str:
    text = f"{len(how.nodes):,} nodes on {how.got} lanes, recorded on {how.recorded}; {how.edges:,} edges"
    if how.serial:
        text += f"; {len(how.serial)} steps that run alone"
    if how.times:
        text += f"; {how.total:,.1f} µs one after the other, {how.critical:,.1f} on the longest path of waits by data"
    return text


def _colours(how: Explanation, theme: Theme) -> dict[str, str]:
    """Return the colour of each call name.

    Eight names get a colour each: the names whose calls take longest in all. All other names share one colour.
    """
    taken: Counter[str] = Counter()
    for number, step in enumerate(how.steps):
        if step.lane is not None:
            taken[step.name] += how.times[number] if how.times else 1  # type: ignore[assignment]
    named = [name for name, _ in taken.most_common(_NAMED)]
    return {name: theme.calls[named.index(name)] if name in named else theme.other for name in taken}


def _legend(figure: Any, theme: Theme, colours: dict[str, str], top: float) -> None:
    left = _MARGIN / _WIDTH
    shown_names = [(name, colour) for name, colour in colours.items() if colour != theme.other]
    if len(shown_names) < len(colours):
        shown_names.append((f"{len(colours) - len(shown_names)} others", theme.other))
    for name, colour in shown_names:
        short = name.rpartition(".")[2][:28]
        figure.text(left, top, f"■ {short}", size=9, color=colour, parse_math=False)
        left += (len(short) + 4) * _LETTER / 72 / _WIDTH


def _planned(how: Explanation, times: Sequence[float]) -> Spans:
    """Return the planned begin and end of each step.

    A step begins as soon as the steps that it waits for have ended, and takes its entry of ``times``.
    """
    spans: Spans = [(0.0, 0.0)] * len(how.steps)
    for number in how.order():
        begin = max([spans[before][1] for before in how.steps[number].after], default=0.0)
        spans[number] = begin, begin + times[number]
    return spans


def _panel(axes: Any, how: Explanation, spans: Spans, colours: dict[str, str], theme: Theme, *, edges: bool) -> None:
    last = max(end for _, end in spans) or 1.0
    points = axes.get_position().width * _WIDTH * 72
    axes.set_facecolor(theme.paper)
    # Neighbouring boxes of a lane are separated by a gap. If there are too many boxes for gaps, their shades alternate instead.
    gap = 0.3 if len(how.steps) < _MANY else 0.0
    middle = (how.got - 1) / 2
    shades = {lane: cycle((1.0, 1.0 if gap else 0.72)) for lane in range(how.got)}
    # The steps are drawn in order of their begin, so that the two shades alternate along the time axis.
    for step, (begin, end) in sorted(zip(how.steps, spans, strict=True), key=itemgetter(1)):
        width = end - begin
        if step.lane is None:
            axes.barh(middle, width, left=begin, height=how.got, color=theme.serial, edgecolor=theme.pale, linewidth=0.6)
        else:
            look = {"color": colours[step.name], "alpha": next(shades[step.lane])}
            axes.barh(step.lane, width, left=begin, height=0.78, edgecolor=theme.paper, linewidth=gap, **look)
        label = step.name.rpartition(".")[2]
        # The label is drawn only if it fits into the step's box.
        if len(label) * _LETTER + 4 < width / last * points:
            ink = theme.ink if step.lane is None else theme.paper
            row = middle if step.lane is None else step.lane
            axes.text((begin + end) / 2, row, label, size=8, color=ink, ha="center", va="center", parse_math=False, clip_on=True)
    if edges and how.edges <= _MOST_EDGES:
        _edges(axes, how, spans, theme)
    axes.set_xlim(0, last * 1.003)
    # The larger limit is given first, which reverses the axis. So lane 0 is at the top.
    axes.set_ylim(how.got - 0.45, -0.55)
    named = range(0, how.got, max(1, how.got // 8))
    axes.set_yticks(named, [f"lane {lane}" for lane in named])
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.tick_params(length=0, colors=theme.ink, labelsize=9)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _edges(axes: Any, how: Explanation, spans: Spans, theme: Theme) -> None:
    """Draw the edges that lead from one lane to another."""
    from matplotlib.collections import LineCollection

    lines = []
    for step, (begin, _) in zip(how.steps, spans, strict=True):
        for before in step.after:
            lane = how.steps[before].lane
            if lane is not None and step.lane is not None and lane != step.lane:
                lines.append([(spans[before][1], lane), (begin, step.lane)])
    faint = 0.55 if len(lines) < 200 else 0.25
    axes.add_collection(LineCollection(lines, colors=theme.ink, linewidths=0.6, alpha=faint))
