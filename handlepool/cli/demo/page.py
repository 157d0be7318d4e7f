"""Place the parts of the demo's picture on its page.

Places are in inches from the lower left corner.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, MARGIN = 16.0, 0.35
INK, PALE, PAPER, GRID = "#1c2126", "#6b747c", "#ffffff", "#e3e7ea"

Box = tuple[float, float, float, float]
"""Describe a box by left, bottom, width and height."""


def axes_at(figure: Figure, box: Box) -> Axes:
    """Add axes in a box."""
    total_width, total_height = figure.get_size_inches()
    left, bottom, width, height = box
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def write(
    figure: Figure, left: float, middle: float, text: str, *, size: float, color: str = INK, weight: str = "normal"
) -> None:
    """Write literal text at a place."""
    total_width, total_height = figure.get_size_inches()
    place = (left / total_width, middle / total_height)
    figure.text(*place, text, size=size, color=color, weight=weight, va="center", parse_math=False)


def bare(axes: Axes) -> None:
    """Reduce axes to labels, with grid lines behind the data."""
    axes.tick_params(length=0, colors=INK, labelsize=9.5)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
