"""Draw the results of the benchmark scripts: ``python benchmarks/draw.py FOLDER`` makes NAME-light.png and NAME-dark.png.

Bars and points are medians, whiskers are quartiles. Each picture makes one claim in its title, computed from the figures.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from network_figures import EAGER, JAX, ONE_LANE, TUNED, Networks, gathered

DPI = 150


class Theme:
    """Colours of one form."""

    def __init__(self, paper: str, ink: str, pale: str, grid: str, ours: str, recorded: str, torch: str, graph: str, floor: str):
        self.paper, self.ink, self.pale, self.grid = paper, ink, pale, grid
        self.ours, self.recorded, self.torch, self.graph, self.floor = ours, recorded, torch, graph, floor


THEMES = {
    "light": Theme("#ffffff", "#1c2126", "#5d666e", "#dfe3e6", "#0b6bcb", "#0a7d55", "#d1552b", "#a8610a", "#8a949c"),
    "dark": Theme("#0f1419", "#e6e9ec", "#9aa5ae", "#2b333b", "#5aa9f5", "#43c59e", "#f0825c", "#e0b050", "#7d8890"),
}


def label(axes: Axes, theme: Theme, text: str, at: tuple[float, float]) -> None:
    """Write beside the end of a bar."""
    paper = {"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0}  # over the grid
    axes.annotate(text, at, (8, 0), textcoords="offset points", va="center", color=theme.ink, fontsize=10, bbox=paper)


def bars(axes: Axes, theme: Theme, times: dict[str, Any], unit: str, colour: Callable[[str], str]) -> None:
    """Horizontal bars, the first on top, each with its figure."""
    names = list(times)
    places = range(len(names))
    medians = [times[name]["median"] for name in names]
    spread = [[t["median"] - t["q1"] for t in times.values()], [t["q3"] - t["median"] for t in times.values()]]
    axes.barh(places, medians, color=[colour(name) for name in names], height=0.62)
    axes.errorbar(medians, places, xerr=spread, fmt="none", ecolor=theme.ink, elinewidth=1.2, capsize=3)
    for place, t in zip(places, times.values(), strict=True):
        value = f"{t['median']:,.2f}" if t["median"] < 10 else f"{t['median']:,.1f}"
        label(axes, theme, value, (t["q3"], place))
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.grid(axis="x")


def family(theme: Theme, name: str) -> str:
    """Return a colour for the library that does the work."""
    if name.startswith(("torch", "frontend", "pygraph")):
        return theme.torch if name.startswith("torch") else theme.graph
    if name.startswith(("raw", "floor", "bare", "part", "empty loop", "create")):
        return theme.floor
    return theme.ours


def launch(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Host time of a launch."""
    (times,) = results["times"].values()
    times = {name: t for name, t in times.items() if not name.startswith("part")}
    figure, axes = page(theme, 9, 0.42 * len(times) + 2.1)
    bars(axes, theme, times, "microseconds of host time a call", lambda name: family(theme, name))
    ratio = results["ratios"].get("graph function, out given / torch.nn.functional.conv2d")
    claim = "Launching a planned convolution"
    if ratio:
        claim = f"A planned convolution with out= is launched in {ratio['median']:.2f} of torch's time"
    return figure, claim, f"one convolution {shape_of(results['shape'])}; {results['calls']} calls a sample, queue not full"


def forks(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Host time of a fork."""
    times = {name: t for name, t in results["times"]["microseconds, host"].items() if "convolutions" not in name}
    figure, axes = page(theme, 9, 0.42 * len(times) + 2.1)
    bars(axes, theme, times, "microseconds of host time", lambda name: family(theme, name))
    ratio = next(iter(results["ratios"].values()))["median"]
    claim = f"An empty fork of {results['states']} states costs {ratio:.2f} times the events it consists of"
    return figure, claim, f"convolutions {shape_of(results['shape'])}; {results['calls']} forks a sample"


def overlap(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Device time by states, a panel for each shape."""
    shapes, states = results["shapes"], results["states"]
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    width = max(9.0, 4.3 * columns + 0.4)
    figure = Figure(figsize=(width, 3.5 * rows + 2.1), dpi=DPI, facecolor=theme.paper)
    lines = [
        ("torch, {} streams", "torch, streams by hand", theme.torch, "o-"),
        ("fork, {} states", "handlepool, fork", theme.ours, "o-"),
        ("recorded, {} states", "handlepool, recorded", theme.recorded, "s-"),
        ("torch graph, {} streams", "torch, CUDA graph", theme.graph, "--"),
    ]
    flat = [
        ("torch, one stream", "torch, one stream", theme.torch, ":"),
        ("grouped", "one grouped convolution", theme.pale, "-."),
    ]
    flat += [
        ("stacked", "one stacked convolution", theme.pale, (0, (4, 4))),
        ("batched", "one batched convolution", theme.pale, ":"),
    ]
    handles: dict[str, Any] = {}
    for place, shape in enumerate(shapes, 1):
        axes = figure.add_subplot(rows, columns, place)
        dress(axes, theme)
        times = results["times"][f"{results['count']} x {shape}, microseconds, device"]
        for form, label, colour, style in lines:
            known = [(count, times[form.format(count)]) for count in states if form.format(count) in times]
            if form.startswith("torch") and "torch graph, one stream" in times:
                single = "torch graph, one stream" if "graph" in form else "torch, one stream"
                known = [(1, times[single]), *known]
            if known:
                xs = [count for count, _ in known]
                ys = [t["median"] for _, t in known]
                spread = [[t["median"] - t["q1"] for _, t in known], [t["q3"] - t["median"] for _, t in known]]
                handles[label] = axes.errorbar(
                    xs, ys, yerr=spread, fmt=style, color=colour, markersize=4.5, linewidth=1.6, capsize=2
                )
        for name, label, colour, style in flat:
            if name in times:
                handles[label] = axes.axhline(times[name]["median"], color=colour, linestyle=style, linewidth=1.4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(states, list(map(str, states)))
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(shape_of(shape), fontsize=11, color=theme.ink)
        axes.grid(axis="y")
        if place > len(shapes) - columns:
            axes.set_xlabel("side streams")
        if place % columns == 1 or columns == 1:
            axes.set_ylabel(f"µs for {results['count']} convolutions")
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="lower center",
        bbox_to_anchor=(0.5, 0.48 / figure.get_figheight()),
        ncols=4 if width > 12 else 3,
        frameon=False,
        fontsize=10,
    )
    for text in legend.get_texts():
        text.set_color(theme.ink)
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.2 / width,
        top=1 - 0.95 / figure.get_figheight(),
        hspace=0.32,
        wspace=0.22,
        bottom=1.75 / figure.get_figheight(),
    )
    shares = []
    for shape in (shapes[0], shapes[-1]):
        times = results["times"][f"{results['count']} x {shape}, microseconds, device"]
        best = min(t["median"] for name, t in times.items() if name.startswith("recorded"))
        shares.append(best / times["one stream"]["median"])
    claim = f"Recorded over streams, the smallest take {shares[0]:.2f} of one eager stream's time, the largest {shares[1]:.2f}"
    return figure, claim, f"{results['count']} convolutions, fork to join, device time between events on the caller's stream"


def wrong(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Wrong results."""
    counts = results["wrong"]
    names = {}
    for shape, found in counts.items():
        for name, count in found.items():
            if name not in ("of", "workspace_bytes"):
                names[f"{name}, {shape_of(shape, short=True)}"] = count / found["of"] * 100
    figure, axes = page(theme, 9, 0.42 * len(names) + 2.2)
    places = range(len(names))
    axes.barh(
        places, list(names.values()), color=[theme.torch if n.startswith("one") else theme.ours for n in names], height=0.62
    )
    for place, share in zip(places, names.values(), strict=True):
        label(axes, theme, f"{share:.0f} %", (share, place))
    axes.set_yticks(list(places), list(names))
    axes.invert_yaxis()
    axes.set_xlim(0, 108)
    axes.set_xlabel("results that are wrong, per cent")
    axes.grid(axis="x")
    broken = sum(found["one workspace for all"] for found in counts.values())
    of = sum(found["of"] for found in counts.values())
    claim = f"Streams that share one workspace gave {broken} wrong results of {of}; handlepool's none"
    if any(found["handlepool's fork"] for found in counts.values()):
        claim = "Wrong results, also of handlepool's fork"
    return (
        figure,
        claim,
        f"{results['states']} streams with a handle each, float32 convolutions; wrong: further than 1e-2, relative norm",
    )


def memory(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Memory against keys."""
    figure, axes = page(theme, 9, 5.4)
    found = results["memory"]
    keys = [threads * streams for threads, streams in found["keys"]]
    styles = {
        "a handle for each key, kept": (theme.torch, "s-"),
        "the frontend's default handle, one after another": (theme.graph, "--"),
        "pool, at once": (theme.ours, "o-"),
        "pool, one after another": (theme.recorded, "o-"),
    }
    for name, (colour, style) in styles.items():
        if name in found["bytes"]:
            axes.plot(keys, [b / 2**20 for b in found["bytes"][name]], style, color=colour, label=name, linewidth=1.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("keys: threads x streams")
    axes.set_ylabel("MiB of device memory")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    legend = axes.legend(frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_color(theme.ink)
    many, mib = found["many_threads"], found["many_bytes"] / 2**20
    each = found["handle_bytes"] / 2**20
    claim = f"{many:,} threads, one after another, cost {mib:,.0f} MiB in all"
    if each:
        claim += f", not {each:,.1f} MiB each"
    about = "growth of the device's used memory; at once: all threads alive; one after another: each ends before the next"
    return figure, claim, about


def record(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Recording against eager, by number of replays."""
    figure, axes = page(theme, 9, 5.2)
    wall, whole = results["times"]["microseconds, wall"], results["times"]["microseconds in all, wall"]
    replays = results["replays"]
    states = 8 if 8 in results["states"] else results["states"][-1]
    at = f", {states} states"
    counts = list(range(replays + 1))
    eager = whole[f"{replays} eager maps{at}"]["median"] / replays
    axes.plot(counts, [eager * n / 1e3 for n in counts], color=theme.ours, label="eager maps", linewidth=1.8)
    first = whole[f"record{at}"]["median"]
    each = (whole[f"record and {replays} replays{at}"]["median"] - first) / replays
    axes.plot(
        counts, [(first + each * n) / 1e3 for n in counts], color=theme.recorded, label="record, then replay", linewidth=1.8
    )
    for name, colour in (
        (f"{replays} eager maps{at}", theme.ours),
        (f"record and {replays} replays{at}", theme.recorded),
    ):  # where it was timed
        spread = [whole[name][quartile] / 1e3 for quartile in ("q1", "median", "q3")]
        axes.errorbar(
            [replays],
            spread[1:2],
            yerr=[[spread[1] - spread[0]], [spread[2] - spread[1]]],
            color=colour,
            capsize=4,
            clip_on=False,
        )
    claim = f"A replay takes {wall[f'replay{at}']['median'] / wall[f'eager map{at}']['median']:.2f} of an eager map's time"
    if eager > each:
        earned = first / (eager - each)
        claim += f"; a recording is earned back after {ceil(earned):,} of them"
        axes.axvline(earned, color=theme.pale, linestyle=":", linewidth=1.2)
    axes.set_xlabel("times that the map is run")
    axes.set_ylabel("milliseconds in all, wall")
    axes.set_xlim(0, replays)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    legend = axes.legend(frameon=False, fontsize=10, loc="upper center")  # between the two vertical lines
    for text in legend.get_texts():
        text.set_color(theme.ink)
    return figure, claim, f"{results['count']} convolutions {shape_of(results['shape'])} over {states} states"


def acquire(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """A hit."""
    (times,) = results["times"].values()
    times = {name: t for name, t in times.items() if t["median"] < 10_000}
    figure, axes = page(theme, 9, 0.42 * len(times) + 2.1)
    bars(axes, theme, times, "nanoseconds of host time a call", lambda name: family(theme, name))
    ratio = results["ratios"]["hit / floor, own stream"]["median"]
    return figure, f"A hit of get_handle costs {ratio:.2f} times the two calls that no one can avoid", "one thread"


def devices(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Items a second, relative to one device, by length of an item."""
    figure, axes = page(theme, 9, 5.6)
    count = results["devices"]
    found = {float(heading.split()[2]): times for heading, times in results["times"].items() if " ms, " in heading}
    lengths = sorted(found)
    styles = {
        "spread": (theme.recorded, "o-"),
        "spread, host to host": (theme.recorded, "o--"),
        "recorded": (theme.ours, "s-"),
        "processes": (theme.graph, "^-"),
        "processes, host to host": (theme.graph, "^--"),
        "dask, host to host": (theme.torch, "D--"),
        "eager": (theme.pale, "v:"),
        "eager, a thread a device": (theme.pale, "x:"),
        "the bus alone, host to host": (theme.floor, "-"),
    }
    most = 1.0
    for name, (colour, style) in styles.items():
        known = [length for length in lengths if name in found[length]]
        ratios = [found[length]["one device, recorded"]["median"] / found[length][name]["median"] for length in known]
        if known:
            axes.plot(known, ratios, style, color=colour, label=name, linewidth=1.6, markersize=4.5)
            most = most if name.startswith("the bus") else max(most, *ratios)
    axes.axhline(count, color=theme.pale, linestyle=":", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, 1.6 * max(most, count))  # the bus may be far above, and the legend stands there
    axes.set_xlabel("milliseconds that an item takes on one device")
    axes.set_ylabel("items a second, relative to one device")
    axes.grid(axis="y")
    legend = axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    for text in legend.get_texts():
        text.set_color(theme.ink)
    claim = f"{count} devices against one"
    longest = found[lengths[-1]]
    if "spread" in longest:
        times = longest["one device, recorded"]["median"] / longest["spread"]["median"]
        claim = f"spread over {count} devices gives {times:.2f} times the items of one, where an item takes {lengths[-1]:g} ms"
    size = f"{results['item_bytes'] / 1e3:,.0f} kB each way"
    return figure, claim, f"an item is a chain of convolutions {shape_of(results['shape'])}; host to host: {size}"


def serving(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Requests a second, and the 99th percentile of latencies, by the number of clients."""
    models = results["models"]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for setting, ways in results["served"].items():
        name, threads, load = setting.split(", ")
        if name == models and load == "closed loop":
            for way, each in ways.items():
                found.setdefault(way, {})[int(threads.split()[0])] = each
    styles = {
        "recorded": (theme.recorded, "o-"),
        "recorded, one lane": (theme.recorded, "o--"),
        "submit": (theme.ours, "s-"),
        "one thread launches": (theme.ours, "s--"),
        "torch, a CUDA graph each": (theme.graph, "^-"),
        "torch, Inductor, a graph each": (theme.graph, "^--"),
        "torch, a batching queue": (theme.torch, "D-"),
        "torch, eager": (theme.torch, "D--"),
        "eager": (theme.pale, "v:"),
    }
    height = 5.2
    figure = Figure(figsize=(11, height), dpi=DPI, facecolor=theme.paper, layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.6 / height, 0.98, 1 - 1.15 / height))
    both = figure.subplots(1, 2)
    for axes, key, text in zip(both, ("rate", "p99"), ("requests a second", "99th percentile of latencies, ms"), strict=True):
        dress(axes, theme)
        for way, (colour, style) in styles.items():
            threads = sorted(found.get(way, {}))
            values = [
                found[way][at]["requests_a_second"]["median"] if key == "rate" else found[way][at]["p99"] / 1e3 for at in threads
            ]
            if threads:
                axes.plot(threads, values, style, color=colour, label=way, linewidth=1.6, markersize=4.5)
        known = sorted({threads for ways in found.values() for threads in ways})
        axes.set_xscale("log")
        axes.set_xticks(known, [str(each) for each in known])
        axes.minorticks_off()
        if key == "rate":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
        axes.set_xlabel("clients, each a thread")
        axes.set_ylabel(text)
        axes.grid(axis="y")
    legend = both[0].legend(frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_color(theme.ink)
    most = known[-1]
    ours = max(
        found[way][most]["requests_a_second"]["median"]
        for way in ("recorded", "recorded, one lane")
        if most in found.get(way, {})
    )
    claim = f"{ours:,.0f} requests a second from {most} threads"
    graphs = found.get("torch, a CUDA graph each", {}).get(most)
    if graphs is not None:
        claim += f", {ours / graphs['requests_a_second']['median']:.2f} times those of a CUDA graph of torch's each"
    about = "eight unlike models at once" if models == "eight" else f"{models}, one model for all clients"
    return figure, claim, f"{about}; closed loop, batch 1, each client waits for its scores"


PEERS = {
    "torch": "torch, eagerly",
    "torch graph": "torch, CUDA graph",
    "Inductor": "Inductor, CUDA graph",
    JAX: "JAX, own process",
}
PEERS |= {ONE_LANE: "recorded, one lane"}


def panel(axes: Axes, theme: Theme, here: Networks, name: str, shown: Sequence[str]) -> None:
    """Draw a network's times: the device's as a bar, and the clock's as a mark."""
    colours = {TUNED: theme.ours, ONE_LANE: theme.recorded, "Inductor": theme.graph, JAX: theme.graph}
    dress(axes, theme)
    taken = here.found[name]
    # Eager calls may exceed the axis.
    quick = [column for column in taken if column not in (EAGER, "torch")] or shown
    most = 1.05 * max(taken[column]["wall"]["median"] for column in quick if column in taken)
    least = min(taken[column]["device"]["median"] for column in taken if column != EAGER)
    for line, column in enumerate(shown):
        if column not in taken:
            continue
        device, wall = taken[column]["device"], taken[column]["wall"]
        beyond = device["median"] > most
        axes.barh(line, min(device["median"], most), color=colours.get(column, theme.torch), height=0.66)
        if not beyond:
            spread = [[device["median"] - device["q1"]], [device["q3"] - device["median"]]]
            axes.errorbar(device["median"], line, xerr=spread, fmt="none", ecolor=theme.ink, elinewidth=1.1, capsize=2)
            axes.plot(min(wall["median"], most), line, "|", color=theme.ink, markersize=11, markeredgewidth=1.6)
        at = most if beyond else max(device["q3"], wall["median"])
        text = f"{device['median']:,.0f} ({wall['median']:,.0f})" + (" \N{RIGHTWARDS ARROW}" if beyond else "")
        weight = "bold" if device["median"] == least else "normal"
        axes.annotate(
            text, (at, line), (6, 0), textcoords="offset points", va="center", color=theme.ink, fontsize=9.5, weight=weight
        )
    lanes = here.lanes.get(name)
    tuned = f"recorded, {lanes} lane{'s' if lanes > 1 else ''}" if lanes else "recorded, tuned"
    labels = [tuned if column == TUNED else PEERS.get(column, column) for column in shown]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.4)
    axes.set_title(name, fontsize=11, color=theme.ink, loc="left")
    axes.grid(axis="x")


def headline(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """The README's picture: a single network, with a single number in the title."""
    here: Networks = results[ALL]
    shown = here.columns((TUNED, ONE_LANE, JAX, "Inductor", "torch graph"))
    figure, axes = page(theme, 9.5, 3.1)
    panel(axes, theme, here, HEADLINE, shown)
    axes.set_title("", loc="left")
    axes.set_xlabel(f"µs, {HEADLINE}, batch {here.batch}, {here.dtype}")
    ratio = here.median(HEADLINE, "Inductor", "device") / here.median(HEADLINE, TUNED, "device")
    claim = f"{HEADLINE} from plain code: {ratio:.1f} times as fast as torch.compile's Inductor"
    return figure, claim, "bars and numbers: on the device; upright marks and parentheses: by the clock; bold: the least"


def networks(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Networks by peers: a panel each, the device's time as a bar and the clock's as a mark."""
    here: Networks = results[ALL]
    shown = here.columns((TUNED, ONE_LANE, "Inductor", JAX, "reduce-overhead", "torch graph", "torch"))
    names = list(here.found)
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    high = 0.3 * len(shown) + 0.75
    figure = Figure(figsize=(11.5 if columns > 1 else 8, high * rows + 1.75), dpi=DPI, facecolor=theme.paper)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place)
        panel(axes, theme, here, name, shown)
        if place > len(names) - columns:
            axes.set_xlabel(f"µs, batch {here.batch}, {here.dtype}")
    tall = figure.get_figheight()
    figure.subplots_adjust(
        left=1.75 / figure.get_figwidth(),
        right=1 - 0.25 / figure.get_figwidth(),
        top=1 - 0.95 / tall,
        bottom=1.0 / tall,
        hspace=0.62 / (high - 0.62) + 0.1,
        wspace=0.5,
    )
    peer = next((peer for peer in ("Inductor", "torch graph") if peer in shown), None)
    shares = [(here.median(name, TUNED, "device"), here.median(name, peer, "device")) for name in names] if peer else []
    ratios = sorted(ours / theirs for ours, theirs in shares if ours is not None and theirs is not None)
    claim = "Networks from plain code, recorded with lanes"
    if ratios:
        among = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else f"{ratios[0]:.2f}"
        claim += f": {among} of {PEERS[peer].partition(',')[0] if peer == 'Inductor' else 'a torch CUDA graph'}'s time"
    about = "bars and numbers: on the device; upright marks and parentheses: by the clock; bold: the least"
    return figure, claim, about


HEADLINE = "googlenet"
"""The network of `headline`."""
ALL = "all"
"""Where `networks` finds those of all files of one batch and type."""


def tiles(results: dict[str, Any], theme: Theme) -> tuple[Figure, str, str]:
    """Draw the actions of each thread of each worker over time."""
    colours = {"compute": theme.recorded, "transfer": theme.torch}
    rows = 1 + max(row for _, row, *_ in results["stream"])
    figure, axes = page(theme, 9, 0.34 * rows + 2.6)
    for action in sorted({action for _, _, action, *_ in results["stream"]}):
        steps = [(row, start, end) for _, row, each, start, end in results["stream"] if each == action]
        places, starts, lengths = [r for r, _, _ in steps], [s for _, s, _ in steps], [e - s for _, s, e in steps]
        colour = colours.get(action, theme.floor)
        axes.barh(places, lengths, left=starts, color=colour, edgecolor=theme.paper, linewidth=0.4, height=0.7, label=action)
    names = {row: f"worker {worker}" for worker, row, *_ in reversed(results["stream"])}
    axes.set_yticks(sorted(names), [names[row] for row in sorted(names)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    legend = axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    for text in legend.get_texts():
        text.set_color(theme.ink)
    ((_, ratio),) = results["ratios"].items()
    count = f"{results['workers']} workers of {results['devices']} device{'s' * (results['devices'] > 1)}"
    claim = f"{count} take {ratio['median']:.2f} of one process's time for an image, and give the same bits"
    about = (
        f"{results['side']:,}² pixels in {results['tiles']} tiles from Zarr to Zarr, blurred and through two more convolutions"
    )
    return figure, claim, about


PICTURES = {
    f.__name__: f for f in (acquire, launch, forks, overlap, wrong, memory, record, devices, serving, tiles, headline, networks)
}


def shape_of(text: str, *, short: bool = False) -> str:
    """A shape in words."""
    numbers, dtype, layout = text.split(":")
    batch, channels, side, filters, kernel = numbers.split("x")
    words = f"{batch} x {channels} x {side}²"
    return words if short else f"{words}, {filters} filters {kernel} x {kernel}, {dtype} {layout}"


def dress(axes: Axes, theme: Theme) -> None:
    """Put a theme's colours on axes."""
    axes.set_facecolor(theme.paper)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelsize=10)
    axes.grid(color=theme.grid)
    axes.grid(visible=False)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme.pale)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)


def page(theme: Theme, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one axes."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=theme.paper, layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.6 / height, 0.98, 1 - 1.15 / height))
    axes = figure.add_subplot()
    dress(axes, theme)
    return figure, axes


def conditions(results: dict[str, Any]) -> str:
    """Return hardware and versions for the caption."""
    found = results["conditions"]
    packages = found["packages"]
    words = [found.get("gpu", "host driver, no GPU: the times say nothing about one")]
    words += [f"cuDNN {found['cudnn']}"] if "cudnn" in found else []
    for name in ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-frontend", "torch"):
        if name in packages and "gpu" in found:
            words.append(f"{name.removesuffix('-cuda13x').removesuffix('-cuda12x').removeprefix('nvidia-')} {packages[name]}")
    if results["times"]:
        words.append(f"{results['repeats']} interleaved samples, median and quartiles")
    return ", ".join([*words, found["date"]])


def fit(canvas: FigureCanvasAgg, text: Text) -> None:
    """Make a line small enough for the figure's width."""
    while text.get_window_extent(canvas.get_renderer()).x1 > 0.985 * canvas.figure.bbox.width:
        text.set_fontsize(text.get_fontsize() - 0.25)


def draw(results: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Both forms of one picture."""
    written = []
    for form, theme in THEMES.items():
        figure, claim, about = PICTURES[results["benchmark"]](results, theme)
        height = figure.get_figheight()
        canvas = FigureCanvasAgg(figure)
        title = {"fontsize": 13, "weight": "bold", "color": theme.ink, "va": "center"}
        caption = {"fontsize": 9, "color": theme.pale, "va": "center"}
        fit(canvas, figure.text(0.015, 1 - 0.34 / height, claim, **title))
        fit(canvas, figure.text(0.015, 0.33 / height, about, **caption))
        fit(canvas, figure.text(0.015, 0.14 / height, conditions(results), **caption))
        written.append(folder / f"{name}-{form}.png")
        figure.savefig(written[-1], metadata={"Software": None})
    return written


def with_parts(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the results of `devices.py` with the ways of other files of the same run.

    Each file has timed one device beside its own ways, so its times are scaled by that.
    """
    one = "one device, recorded"
    for part in ("dask", "eager"):
        path = folder / f"devices-{part}.json"
        other = json.loads(path.read_text()) if path.exists() else {"devices": None, "times": {}}
        for heading, times in other["times"].items():
            found = results["times"].get(heading, {})
            if other["devices"] != results["devices"] or one not in found:
                continue
            scale = found[one]["median"] / times[one]["median"]
            new = {name: {key: value * scale for key, value in t.items()} for name, t in times.items() if name not in found}
            found |= new
    return results


def sources(folder: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the data of a script's pictures by picture name; networks have a picture for each batch and type."""
    path = folder / f"{name}.json"
    if name == "devices" and path.exists():
        return [(name, with_parts(json.loads(path.read_text()), folder))]
    if name == "serving" and path.exists():
        results = json.loads(path.read_text())
        models = dict.fromkeys(setting.split(", ")[0] for setting in results["served"])
        return [(name if not at else f"{name}-{each}", results | {"models": each}) for at, each in enumerate(models)]
    if name not in ("networks", "headline"):
        return [(name, json.loads(path.read_text()))] if path.exists() else []
    jax = gathered(folder, "networks_jax")
    found = [each.beside(jax, JAX) for each in gathered(folder)]
    if name == "headline":
        # The first file has the usual batch and type.
        return [(name, found[0].results | {ALL: found[0], "benchmark": name})] if found and HEADLINE in found[0].found else []
    stems = [name, *(f"{name}-{each.batch}-{each.dtype}" for each in found[1:])]
    return [(stem, each.results | {ALL: each}) for stem, each in zip(stems, found, strict=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the JSON is, and the pictures go")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), metavar="NAME", help="a selection of them")
    options = parser.parse_args(arguments)
    found = [source for name in options.only for source in sources(options.folder, name)]
    if not found:
        parser.error(f"{options.folder} has none of {', '.join(f'{name}.json' for name in options.only)}")
    for stem, results in found:
        print(*draw(results, options.folder, stem), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
