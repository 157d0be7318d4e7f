"""Draw the network's part of the demo's picture.

This part shows the network's output, the duration of each way on a GPU, and a time line of the calls.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from handlepool.cli.demo.measure import Report, at_a_time
from handlepool.cli.demo.network import FORKED, LANES, ONE_LANE, ONE_STREAM, RECORDED, NetworkReport
from handlepool.cli.demo.page import INK, MARGIN, PALE, PAPER, SMALL, TEXT, WIDTH, axes_at, bare, fits, unit_of, write

HEIGHT = 3.35
"""The height of this part of the picture, in inches."""
_BARS = {ONE_STREAM: "#aab3bb", FORKED: "#0b6bcb", ONE_LANE: "#7fbf9f", RECORDED: "#0a7d55"}
_CALLS = ("#0b6bcb", "#d1552b", "#a8610a", "#7a4fc0")
_PANEL, _TOP = 1.75, 0.75


def claim(report: Report) -> str:
    """Return the demo's main result, as the sentence above the picture.

    On the host driver, the sentence is about results and overlap, because the host driver's times say nothing about a GPU.
    """
    found = report.network
    if report.driver != "cuda":
        busy = at_a_time([(call.start, call.end) for call in found.calls])
        right = "every result is right" if not report.wrong else f"{len(report.wrong)} results are wrong"
        return f"Plain code, recorded on {LANES} lanes: {busy:.1f} calls at a time, and {right}"
    best = min(found.times[ONE_STREAM], found.times[ONE_LANE]) / found.times[RECORDED]
    if best < 1:
        return f"Plain code, recorded on {LANES} lanes: {1 / best:.2f} times the best time of one stream"
    return f"Plain code, recorded on {LANES} lanes: {best:.2f} times as fast as the best on one stream"


def draw_network(figure: Figure, report: NetworkReport, states: int, top: float, *, timed: bool) -> None:
    """Draw the network's part of the picture.

    ``top`` is the upper end of the part, in inches above the lower edge of the page. Bars of times are drawn if ``timed``.
    """
    height, width = report.size
    about = f"{len(report.calls)} calls, with no fork and no stream: modules of four branches, with made-up weights"
    write(figure, MARGIN, top - 0.2, f"a small network over the photograph, {width} \N{MULTIPLICATION SIGN} {height}; {about}")
    bottom = top - _TOP - _PANEL
    side = min(_PANEL * report.pixels.shape[1] / report.pixels.shape[0], 2.2)
    image = axes_at(figure, (MARGIN, bottom, side, _PANEL))
    low, high = np.percentile(report.pixels, (1, 99), axis=(0, 1))
    image.imshow(np.clip((report.pixels - low) / np.maximum(high - low, 1e-6), 0, 1), interpolation="antialiased")
    image.set_anchor("NW")
    image.set_axis_off()
    left = MARGIN + side + 1.0
    # Both panels have one unit, so that their lengths can be compared.
    unit, factor = unit_of(max(report.times.values()))
    if timed:
        left += 0.75
        _bars(axes_at(figure, (left, bottom, 3.6, _PANEL)), report, states, unit, factor)
        left += 3.6 + 1.2
    points = (WIDTH - MARGIN - left) * 72
    _calls(axes_at(figure, (left, bottom, WIDTH - MARGIN - left, _PANEL)), report, points, unit, factor)


def _bars(axes: Axes, report: NetworkReport, states: int, unit: str, factor: float) -> None:
    names = list(report.times)
    times = [taken * factor for taken in report.times.values()]
    axes.barh(range(len(names)), times, height=0.66, color=[_BARS[name] for name in names])
    for place, taken in enumerate(times):
        axes.annotate(f"{taken:.0f}", (taken, place), (5, 0), textcoords="offset points", va="center", size=SMALL, color=INK)
    labels = [f"forked, {states} states" if name == FORKED else name for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max(times) * 1.22)
    bare(axes)
    axes.set_title("all of it once, medians", loc="left", size=TEXT, color=INK, pad=6)
    axes.set_xlabel(f"{unit}, from stream events", size=SMALL, color=PALE)


def _calls(axes: Axes, report: NetworkReport, points: float, unit: str, factor: float) -> None:
    # Calls are in microseconds, and the factor is for milliseconds.
    scale = factor / 1e3
    end = max(call.end for call in report.calls) * scale
    kinds = list(dict.fromkeys(call.name for call in report.calls))
    for call in report.calls:
        colour = _CALLS[kinds.index(call.name) % len(_CALLS)]
        start, taken = call.start * scale, (call.end - call.start) * scale
        axes.barh(call.lane, taken, left=start, height=0.74, color=colour, edgecolor=PAPER, linewidth=0.7)
        if fits(call.name, taken / end * points, SMALL):
            middle = start + taken / 2
            axes.text(middle, call.lane, call.name, size=SMALL, color="white", ha="center", va="center", parse_math=False)
    lanes = max(call.lane for call in report.calls) + 1
    axes.set_xlim(0, end * 1.005)
    axes.set_ylim(max(lanes, LANES) - 0.5, -0.5)
    axes.set_yticks(range(lanes), [f"lane {lane}" for lane in range(lanes)])
    bare(axes)
    axes.set_title(f"a replay on {LANES} lanes, as it ran", loc="left", size=TEXT, color=INK, pad=6)
    for place, kind in enumerate(kinds):
        axes.annotate(
            f"\N{BLACK SQUARE} {kind}",
            (1, 1),
            (-95 * (len(kinds) - place) + 4, 9),
            xycoords="axes fraction",
            textcoords="offset points",
            size=SMALL,
            color=_CALLS[place % len(_CALLS)],
        )
    axes.set_xlabel(f"{unit} after the replay began", size=SMALL, color=PALE)
