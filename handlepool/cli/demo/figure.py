"""Draw the demo's picture.

The picture shows the photograph, the result of each filter, and a time line of the recorded filters on their lanes.
"""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from handlepool.cli.demo import network_figure
from handlepool.cli.demo.measure import DRAWN, Report, Result, Span, counted, milliseconds
from handlepool.cli.demo.page import (
    INK,
    MARGIN,
    PALE,
    PAPER,
    SMALL,
    TEXT,
    TITLE,
    WIDTH,
    Box,
    axes_at,
    bare,
    fits,
    fitted,
    unit_of,
    write,
)
from handlepool.errors import ArgumentError

# Lengths are in inches, the resolution is in dots per inch.
_GAP, _CAPTION, _HEADER, _ROW, _DPI = 0.14, 0.46, 0.85, 0.4, 120
_LEAST_COLUMNS, _MOST_COLUMNS = 3, 12
_GREY = (0.42, 0.45, 0.49)

_Colour = tuple[float, float, float]


def draw(report: Report, photograph: NDArray[np.float32], title: str, path: Path) -> None:
    """Write the picture.

    Parameters
    ----------
    report : Report
        The measurements.
    photograph : ndarray of float32, shape (height, width, 3)
        The picture that the filters processed.
    title : str
        A line that names the picture, the driver and the device.
    path : Path
        Path of the PNG.

    Raises
    ------
    ArgumentError
        When the file cannot be written.
    """
    height, width = photograph.shape[:2]
    tiles = len(report.results) + 1
    aspect = min(max(height / width, 0.15), 2.5)
    columns = _columns(tiles, aspect)
    rows = math.ceil(tiles / columns)
    tile_width = (WIDTH - 2 * MARGIN - (columns - 1) * _GAP) / columns
    tile_height = tile_width * aspect
    lanes = max((span.lane for span in report.spans), default=-1) + 1
    line_height = _ROW * lanes
    over_tiles = _HEADER + network_figure.HEIGHT
    total = over_tiles + rows * (tile_height + _CAPTION + _GAP) + (line_height + 1.27 if lanes else 0.1)

    figure = Figure(figsize=(WIDTH, total), dpi=_DPI, facecolor=PAPER)
    # The canvas writes a PNG without a display. `pyplot` would choose a back end and keep the figure.
    FigureCanvasAgg(figure)
    timed = report.driver == "cuda"
    says_nothing = "" if timed else "; the host driver shows order and results, and its times say nothing about a GPU"
    write(figure, MARGIN, total - 0.3, network_figure.claim(report), size=TITLE, weight="bold")
    write(figure, MARGIN, total - 0.62, f"{title}{says_nothing}", color=PALE)
    network_figure.draw_network(figure, report.network, report.states, total - _HEADER, timed=timed)
    write(
        figure,
        MARGIN,
        total - over_tiles + 0.16,
        _subtitle(report) if timed else f"{len(report.results)} filters of the photograph",
    )

    colours = _colours(len(report.results))
    for index in range(tiles):
        row, column = divmod(index, columns)
        left = MARGIN + column * (tile_width + _GAP)
        top = total - over_tiles - row * (tile_height + _CAPTION + _GAP)
        box = (left, top - _CAPTION - tile_height, tile_width, tile_height)
        if index == 0:
            # A step of more than 1 drops pixels that the page could not show, and so saves memory.
            step = -(-max(height, width) // DRAWN)
            _tile(figure, box, photograph[::step, ::step], "the photograph", _by(width, height), _GREY)
        else:
            result = report.results[index - 1]
            shown, note = _displayable(result)
            note = ", ".join(_by(size, size) for size in dict.fromkeys(result.sizes)) + note
            _tile(figure, box, shown, f"{index}  {result.name}", note, colours[index - 1])
    if lanes:
        _time_line(axes_at(figure, (1.0, 0.62, WIDTH - 1.0 - MARGIN, line_height)), report, lanes, colours)
    with warnings.catch_warnings():
        # A filter's name may have letters that the font lacks. Matplotlib would warn of each such letter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        try:
            figure.savefig(path, format="png")
        except OSError as error:
            raise ArgumentError(f"cannot write {str(path)!r}: {error.strerror or error}; pass another --out") from error


def _columns(tiles: int, aspect: float) -> int:
    """Return the number of columns for the grid.

    The grid becomes about two and a half times as wide as high, and has few gaps.
    """

    def badness(columns: int) -> float:
        rows = math.ceil(tiles / columns)
        return abs(math.log(columns / (rows * aspect) / 2.5)) + (rows * columns - tiles) / tiles

    return min(range(_LEAST_COLUMNS, max(_LEAST_COLUMNS, min(tiles, _MOST_COLUMNS)) + 1), key=badness)


def _colours(count: int) -> list[_Colour]:
    """Return a colour for each filter; neighbours get very different colours."""
    hues = 0.9 * colormaps["turbo"](np.linspace(0.04, 0.96, count))[:, :3]
    stride = next((step for step in (5, 3, 7, 2, 1) if math.gcd(step, count) == 1), 1)
    return [(float(r), float(g), float(b)) for r, g, b in (hues[index * stride % count] for index in range(count))]


def _displayable(result: Result) -> tuple[NDArray[np.float32], str]:
    """Return a filter's pixels from 0 to 1, and a note.

    The note says how the range was changed. If the weights of a kernel sum to zero, its values lie around zero: grey stands for
    zero, and the shown range is symmetric. If the weights sum to one, the result is a picture in this range, and is not
    changed. The result of any other kernel is stretched, so that its darkest value is 0 and its brightest value is 1.
    """
    pixels, weight = result.pixels, result.weight
    if abs(weight) <= 1e-3 * result.absolute_weight:
        peak = float(np.percentile(np.abs(pixels), 98.0)) or 1.0
        return np.clip(0.5 + pixels / (2 * peak), 0, 1), f", grey 0, white {peak:.2g}"
    if abs(weight - 1.0) <= 1e-3:
        return np.clip(pixels, 0, 1), ""
    low, high = (float(value) for value in np.percentile(pixels, (0.5, 99.5)))
    return np.clip((pixels - low) / ((high - low) or 1.0), 0, 1), f", {low:.2g} to {high:.2g}"


def _tile(figure: Figure, box: Box, pixels: NDArray[np.float32], caption: str, note: str, colour: _Colour) -> None:
    left, bottom, width, height = box
    axes = axes_at(figure, box)
    axes.imshow(pixels, interpolation="antialiased")
    axes.set_anchor("N")
    axes.set_axis_off()
    # The strip above the image has the colour of the filter's bar on the time line.
    strip = axes_at(figure, (left, bottom + height + 0.03, width, 0.035))
    strip.set_axis_off()
    strip.add_patch(Rectangle((0, 0), 1, 1, color=colour, linewidth=0))
    write(figure, left, bottom + height + 0.34, fitted(caption, width * 72, TEXT))
    write(figure, left, bottom + height + 0.16, fitted(note, width * 72, SMALL), size=SMALL, color=PALE)


def _time_line(axes: Axes, report: Report, lanes: int, colours: Sequence[_Colour]) -> None:
    unit, factor = unit_of(max(span.end for span in report.spans))
    end = max(span.end for span in report.spans) * factor
    points = axes.get_position().width * WIDTH * 72
    for span in report.spans:
        start, taken, colour = span.start * factor, (span.end - span.start) * factor, colours[span.result]
        axes.barh(span.lane, taken, left=start, height=0.72, color=colour, edgecolor=PAPER, linewidth=0.8)
        label = _fitting_label(span, span.result + 1, taken / end * points)
        # The weights give the brightness of the colour: the eye sees green best and blue worst. The text is dark on a bright
        # colour, and white on a dark colour.
        ink = INK if sum(np.multiply(colour, (0.299, 0.587, 0.114))) > 0.55 else "white"
        text = axes.text(start + taken / 2, span.lane, label, size=SMALL, color=ink, ha="center", va="center")
        # A filter's name is literal text. Without this setting, a dollar sign in the name would start a formula.
        text.set(parse_math=False, clip_on=True)
    axes.set_xlim(0, end * 1.005)
    axes.set_ylim(lanes - 0.45, -0.55)
    axes.set_yticks(range(lanes), [f"lane {lane}" for lane in range(lanes)])
    axes.set_xlabel(f"{unit} after the replay began", size=SMALL, color=PALE)
    bare(axes)
    axes.set_title(
        f"the filters, recorded on {counted(report.states, 'lane')}, as they ran: {report.overlap:.1f} at a time; "
        f"{len(report.results)} is a chain, whose second filter waits for its first",
        loc="left",
        size=TEXT,
        color=INK,
        pad=8,
    )


def _fitting_label(span: Span, number: int, points: float) -> str:
    """Return the longest label that fits the bar.

    The choices are the number with the name, the number alone, and an empty text.
    """
    return next((text for text in (f"{number}  {span.name}", str(number)) if fits(text, points, SMALL)), "")


def _by(width: int, height: int) -> str:
    return f"{width} \N{MULTIPLICATION SIGN} {height}"


def _subtitle(report: Report) -> str:
    times = report.times
    parts = (
        f"{counted(len(report.spans), 'filter')} on one stream: {milliseconds(times.single)}",
        f"forked over {counted(report.states, 'state')}: {milliseconds(times.forked)}",
        f"same-size filters as one convolution: {milliseconds(times.stacked)}",
    )
    return "   \N{MIDDLE DOT}   ".join(parts)
