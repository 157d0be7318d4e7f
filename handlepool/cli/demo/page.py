"""Place the parts of the demo's picture on its page.

Places are in inches from the lower left corner.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, MARGIN = 16.0, 0.35
TITLE, TEXT, SMALL = 17.0, 11.0, 9.5
"""The three sizes of letters, in points."""
_LETTER = 0.49
"""The mean width of a letter, as a share of its size."""
INK, PALE, PAPER, GRID = "#1c2126", "#6b747c", "#ffffff", "#e3e7ea"

Box = tuple[float, float, float, float]
"""A box: left, bottom, width and height in inches."""


def axes_at(figure: Figure, box: Box) -> Axes:
    """Add axes in a box."""
    total_width, total_height = figure.get_size_inches()
    left, bottom, width, height = box
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def write(
    figure: Figure, left: float, middle: float, text: str, *, size: float = TEXT, color: str = INK, weight: str = "normal"
) -> None:
    """Write literal text at a place, which is given in inches."""
    total_width, total_height = figure.get_size_inches()
    place = (left / total_width, middle / total_height)
    figure.text(*place, text, size=size, color=color, weight=weight, va="center", parse_math=False)


def fitted(text: str, points: float, size: float) -> str:
    """Shorten a text to a width in points, with an ellipsis."""
    room = int(points / (_LETTER * size))
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}\N{HORIZONTAL ELLIPSIS}"


def fits(text: str, points: float, size: float) -> bool:
    """Tell whether a text fits a width in points."""
    return len(text) * _LETTER * size + 8 <= points


def unit_of(milliseconds: float) -> tuple[str, float]:
    """Return the unit and the factor of an axis with times.

    The longest time on the axis, ``milliseconds``, decides the unit.
    """
    return ("milliseconds", 1.0) if milliseconds >= 10 else ("microseconds", 1e3)


def bare(axes: Axes) -> None:
    """Reduce axes to labels, with grid lines behind the data."""
    axes.tick_params(length=0, colors=INK, labelsize=SMALL)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
