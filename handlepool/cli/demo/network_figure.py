"""Draw the network's part of the demo's picture.

It shows the output, the duration of each way, and a time line of the calls.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from handlepool.cli.demo.network import FORKED, LANES, ONE_LANE, ONE_STREAM, RECORDED, NetworkReport
from handlepool.cli.demo.page import INK, MARGIN, PALE, PAPER, WIDTH, axes_at, bare, write

HEIGHT = 3.35
"""Give the height of the whole part, in inches."""
_BARS = {ONE_STREAM: "#aab3bb", FORKED: "#0b6bcb", ONE_LANE: "#7fbf9f", RECORDED: "#0a7d55"}
_CALLS = ("#0b6bcb", "#d1552b", "#a8610a", "#7a4fc0")
_PANEL, _TOP = 1.75, 0.75
_LETTER = 5.4
"""Give the width of a letter, in points."""


def claim(report: NetworkReport) -> str:
    """Return a sentence about the speed-up."""
    what, lanes = f"A network from plain code, recorded on {LANES} lanes", report.times[ONE_LANE] / report.times[RECORDED]
    if report.won < 1:
        return f"{what}, takes {1 / report.won:.2f} times as long as on one stream"
    return f"{what}: {report.won:.2f} times as fast as on one stream, {lanes:.2f} as recorded on one lane"


def draw_network(figure: Figure, report: NetworkReport, states: int, top: float) -> None:
    """Draw the network's part of the picture.

    ``top`` is the upper end of the part, in inches above the lower edge of the page.
    """
    height, width = report.size
    about = f"{len(report.calls)} calls in plain code, with no fork and no stream: modules of four branches, with made-up weights"
    size = f"{width} \N{MULTIPLICATION SIGN} {height}"
    write(figure, MARGIN, top - 0.2, f"a small network over the photograph, {size}; {about}", size=11.5)
    bottom = top - _TOP - _PANEL
    side = min(_PANEL * report.pixels.shape[1] / report.pixels.shape[0], 2.2)
    image = axes_at(figure, (MARGIN, bottom, side, _PANEL))
    low, high = np.percentile(report.pixels, (1, 99), axis=(0, 1))
    image.imshow(np.clip((report.pixels - low) / np.maximum(high - low, 1e-6), 0, 1), interpolation="antialiased")
    image.set_anchor("NW")
    image.set_axis_off()
    left = MARGIN + side + 1.75
    _bars(axes_at(figure, (left, bottom, 3.6, _PANEL)), report, states)
    left += 3.6 + 1.2
    _calls(axes_at(figure, (left, bottom, WIDTH - MARGIN - left, _PANEL)), report, (WIDTH - MARGIN - left) * 72)


def _bars(axes: Axes, report: NetworkReport, states: int) -> None:
    names = list(report.times)
    times = list(report.times.values())
    axes.barh(range(len(names)), times, height=0.66, color=[_BARS[name] for name in names])
    for place, taken in enumerate(times):
        axes.annotate(f"{taken:.3g} ms", (taken, place), (5, 0), textcoords="offset points", va="center", size=9.5, color=INK)
    labels = [f"forked, {states} states" if name == FORKED else name for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max(times) * 1.22)
    bare(axes)
    axes.set_title("all of it once, medians", loc="left", size=10.5, color=INK, pad=6)
    axes.set_xlabel("milliseconds, from stream events", size=9.5, color=PALE)


def _calls(axes: Axes, report: NetworkReport, points: float) -> None:
    end = max(call.end for call in report.calls)
    kinds = list(dict.fromkeys(call.name for call in report.calls))
    unit, scale = ("milliseconds", 1e3) if end >= 1e4 else ("microseconds", 1.0)
    for call in report.calls:
        colour = _CALLS[kinds.index(call.name) % len(_CALLS)]
        taken = call.end - call.start
        axes.barh(call.lane, taken / scale, left=call.start / scale, height=0.74, color=colour, edgecolor=PAPER, linewidth=0.7)
        if len(call.name) * _LETTER + 4 < taken / end * points:
            middle = (call.start + call.end) / 2 / scale
            axes.text(middle, call.lane, call.name, size=8, color="white", ha="center", va="center", parse_math=False)
    lanes = max(call.lane for call in report.calls) + 1
    axes.set_xlim(0, end / scale * 1.005)
    axes.set_ylim(max(lanes, LANES) - 0.5, -0.5)
    axes.set_yticks(range(lanes), [f"lane {lane}" for lane in range(lanes)])
    bare(axes)
    axes.set_title(f"a replay on {LANES} lanes, as it ran", loc="left", size=10.5, color=INK, pad=6)
    for place, kind in enumerate(kinds):
        axes.annotate(
            f"\N{BLACK SQUARE} {kind}",
            (1, 1),
            (-90 * (len(kinds) - place) + 4, 9),
            xycoords="axes fraction",
            textcoords="offset points",
            size=9,
            color=_CALLS[place % len(_CALLS)],
        )
    axes.set_xlabel(f"{unit} after the replay began", size=9.5, color=PALE)
