"""Draw the gain over Inductor against the width: ``python benchmarks/draw_widths.py workloads.json torch_networks.json``.

The files are those of `workloads.py` and `torch_networks.py`. A network is a point where it has a width, a time of Inductor's and
a time of ours. The pictures widths-light.png and widths-dark.png go to the folder of the first file.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draw import THEMES, Theme, fit, page
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from workloads import OURS

CHAIN = 1.25
"""The width from which a network counts as wide."""
Point = tuple[str, float, float]
"""A network's name, width, and gain over Inductor on the device."""


def points(files: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the networks that have all three figures, by width."""
    found = []
    for networks in files:
        for name, figures in networks.items():
            times, width = figures["device"], figures.get("width")
            ours = [times[way] for way in OURS if way in times]
            if width and ours and "inductor" in times:
                found.append((name.removesuffix(", batch 1"), width["width"], times["inductor"] / min(ours)))
    return sorted(found, key=lambda point: point[1:])


def claim(found: Sequence[Point]) -> str:
    """Return the title: the gain of wide networks and of chains."""
    kinds = {"wide networks run": [gain for _, width, gain in found if width >= CHAIN]}
    kinds["chains"] = [gain for _, width, gain in found if width < CHAIN]
    parts = [f"{name} {min(gains):.2f} to {max(gains):.2f} times" for name, gains in kinds.items() if gains]
    return f"Beside Inductor, {', '.join(parts)} as fast"


def drawn(found: Sequence[Point], theme: Theme) -> Figure:
    """Return the figure: a point for each network, with its name."""
    figure, axes = page(theme, 9, 6)
    chains = sorted([point for point in found if point[1] < CHAIN], key=lambda point: -point[2])
    for name, width, gain in found:
        axes.plot(width, gain, "o", color=theme.ours if width >= CHAIN else theme.floor, markersize=6)
        if width >= CHAIN:
            axes.annotate(name, (width, gain), (7, 3), textcoords="offset points", color=theme.ink, fontsize=9)
    # The chains lie too close for a name at each.
    listed = "\n".join(["chains", *(f"{gain:.2f}  {name}" for name, _, gain in chains)])
    if chains:
        axes.text(0.015, 0.97, listed, transform=axes.transAxes, va="top", color=theme.pale, fontsize=9)
    axes.axhline(1.0, color=theme.pale, linewidth=1.2)
    widest = max(width for _, width, _ in found)
    axes.plot([1, widest], [1, widest], "--", color=theme.pale, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    ticks = [
        tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6, 8, 10) if tick <= 1.3 * max(widest, *(gain for _, _, gain in found))
    ]
    axes.set_xticks([tick for tick in ticks if tick >= 1])
    axes.set_yticks(ticks)
    axes.set_xlim(0.95, 1.5 * widest)
    axes.set_xlabel("width: the sum of the nodes' times over the longest path")
    axes.set_ylabel("times quicker than Inductor on the device")
    axes.grid(visible=True)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.files if not path.exists()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}: run workloads.py and torch_networks.py on a GPU first")
    files = [json.loads(path.read_text()) for path in options.files]
    found = points(files)
    if not found:
        parser.error("no network has a width, a time of Inductor's and a time of ours: run the ways inductor, ours and replay")
    about = sorted({f"{figures['gpu']}, torch {figures['torch']}" for networks in files for figures in networks.values()})
    for form, theme in THEMES.items():
        figure = drawn(found, theme)
        height, canvas = figure.get_figheight(), FigureCanvasAgg(figure)
        caption = {"fontsize": 9, "color": theme.pale, "va": "center"}
        title = {"fontsize": 13, "weight": "bold", "color": theme.ink, "va": "center"}
        fit(canvas, figure.text(0.015, 1 - 0.34 / height, claim(found), **title))
        line = "dashed: a gain equal to the width; networks as their packages have them, batch 1"
        fit(canvas, figure.text(0.015, 0.33 / height, line, **caption))
        fit(canvas, figure.text(0.015, 0.14 / height, "; ".join(about), **caption))
        path = options.files[0].with_name(f"widths-{form}.png")
        figure.savefig(path, metadata={"Software": None})
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
