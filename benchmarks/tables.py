"""Write the figures of a folder of JSON into pages: ``python benchmarks/tables.py benchmarks/results/h200 docs/*.md``.

The text between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced; all other text stays. With ``--check`` nothing is
written. Pages that differ from the JSON are an error then, and so is missing JSON.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from network_figures import EAGER, JAX, ONE_LANE, TUNED, Networks, gathered

BLOCK = re.compile(r"(<!-- figures: ([a-z_-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = ("acquire", "launch", "forks", "order", "overlap", "record", "wrong", "memory")
NETWORKS = {"networks": "networks", "networks-short": "networks", "networks-jax": "networks_jax"}
"""Blocks of networks, and the script of each; of a script there may be several files."""
SEVERAL_GPUS = ("device_serving", "sizing")
"""Files that a folder has where several GPUs were used; ``devices*.json`` beside them."""
ONE_DEVICE = "one device, recorded"
SHORT = (ONE_LANE, TUNED, "torch graph", "Inductor", JAX)
SIDE_STREAMS = ("fork,", "map,", "map into outputs,")
"""How the cases begin that go over side streams eagerly."""
LEAST_GAIN = 1.05
"""The ratios that count as equal: smaller differences are within the spread of the times."""
Results = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def spread(entry: dict[str, float], digits: int) -> list[str]:
    """Median and quartiles."""
    return [f"{entry['median']:,.{digits}f}", f"{entry['q1']:,.{digits}f} to {entry['q3']:,.{digits}f}"]


def times(results: dict[str, Any]) -> str:
    """Every time of a script."""
    found = ""
    for heading, cases in results["times"].items():
        digits = 0 if "nano" in heading else 1
        found += table((heading, "median", "quartiles"), [(name, *spread(t, digits)) for name, t in cases.items()]) + "\n"
    return found + conditions(results)


def conditions(results: dict[str, Any]) -> str:
    """Name hardware and versions."""
    found = results["conditions"]
    packages = found["packages"] | ({"jax": results["jax"]} if "jax" in results else {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if not version.startswith("not "))
    gpu = found.get("gpu", "no GPU")
    return f"{gpu}, cuDNN {found.get('cudnn', 'none')}, Python {found['python']}, {versions}; {found['date']}.\n"


def bounds(every: Results) -> str:
    """Every ratio that has a bound."""
    rows = []
    for name in NAMES:
        for ratio, entry in every.get(name, {}).get("ratios", {}).items():
            if entry["bound"] is not None:
                verdict = {True: "kept", False: "**not kept**", None: "not judged"}[entry["kept"]]
                rows.append((f"{ratio} (`{name}.py`)", *spread(entry, 3), f"{entry['bound']:.3f}", verdict))
    return table(("ratio", "median", "quartiles", "at most", ""), rows)


def overlap(every: Results) -> str:
    """The best of each kind, for each shape, on the device's clock."""
    results = every["overlap"]
    states, count = results["states"], results["count"]
    kinds = {
        "one stream": ["one stream"],
        "side streams": [f"{how} {n} states" for how in SIDE_STREAMS for n in states],
        "recorded": [f"recorded, {n} states" for n in states],
        "torch, one stream": ["torch, one stream"],
        "torch, streams": [f"torch, {n} streams{how}" for n in states for how in ("", ", one context each")],
        "torch graph": ["torch graph, one stream", *(f"torch graph, {n} streams" for n in states)],
        "grouped": ["grouped", "torch, grouped"],
        "stacked": ["stacked", "torch, stacked"],
        "batched": ["batched", "torch, batched"],
    }
    rows = []
    for shape in results["shapes"]:
        found = results["times"][f"{count} x {shape}, microseconds, device"]
        row = [f"`{shape}`"]
        for names in kinds.values():
            known = {name: found[name]["median"] for name in names if name in found}
            best = min(known, key=lambda name: known[name], default=None)
            streams = re.search(r"(\d+) (?:states|streams)", best or "")
            at = f" ({streams[1]})" if streams else ""
            row.append("" if best is None else f"{known[best]:,.0f}{at}")
        rows.append(row)
    return table((f"{count} convolutions, µs", *kinds), rows) + "\n" + conditions(results)


def crossover(every: Results) -> str:
    """Gains over one eager stream against the time of one kernel, on the device's clock."""
    results = every["overlap"]
    count = results["count"]
    ways = (SIDE_STREAMS, ("recorded",), ("grouped",), ("stacked",), ("batched",))
    found = []
    for shape in results["shapes"]:
        times = {n: t["median"] for n, t in results["times"][f"{count} x {shape}, microseconds, device"].items()}
        eager = times["one stream"]

        def best(*starts: str, times: dict[str, float] = times) -> float:
            return min((t for name, t in times.items() if name.startswith(starts)), default=float("inf"))

        kernel = times["recorded, one stream"] / count
        gains = [eager / best(*starts) for starts in ways]
        found.append((kernel, shape, gains))
    found.sort()
    rows = [
        (f"`{shape}`", f"{kernel:,.1f}", *(f"{gain:.2f}" if gain else "" for gain in gains)) for kernel, shape, gains in found
    ]
    head = "times faster than one eager stream", "µs a kernel", "side streams", "recorded", "grouped", "stacked", "batched"
    text = table(head, rows)
    slower = [kernel for kernel, _, gains in found if gains[0] <= LEAST_GAIN]
    faster = [kernel for kernel, _, gains in found if gains[0] > LEAST_GAIN]
    if slower and faster and max(slower) < min(faster):
        text += f"\nEager side streams begin to gain more than {(LEAST_GAIN - 1) * 100:.0f} % between "
        text += f"{max(slower):,.1f} and {min(faster):,.1f} µs a kernel.\n"
    return text


def wrong(every: Results) -> str:
    """Counts of wrong results."""
    rows = []
    for shape, counts in every["wrong"]["wrong"].items():
        cases = {name: count for name, count in counts.items() if name not in ("of", "workspace_bytes")}
        rows += [(f"`{shape}`, {name}", f"{count} of {counts['of']}") for name, count in cases.items()]
    return table(("streams side by side", "wrong"), rows) + "\n" + conditions(every["wrong"])


def memory(every: Results) -> str:
    """Mebibytes by keys."""
    found = every["memory"]["memory"]
    rows = [
        (f"{threads} x {streams}", *(f"{column[row] / 2**20:,.0f}" for column in found["bytes"].values()))
        for row, (threads, streams) in enumerate(found["keys"])
    ]
    many = f"{found['many_threads']:,} threads, one after another, cost {found['many_bytes'] / 2**20:,.1f} MiB"
    text = f"{many}; a handle is {found['handle_bytes'] / 2**20:,.1f} MiB.\n\n"
    return table(("MiB, threads x streams", *found["bytes"]), rows) + "\n" + text + conditions(every["memory"])


def networks(every: list[Networks]) -> str:
    """Write networks by peers, a table for each type and batch, with the peers that are quicker than ours."""
    text = ""
    for each in every:
        columns = [column for column in each.columns() if column != EAGER]
        head = f"batch {each.batch}, {each.dtype}; µs on the device (by the clock)"
        text += f"{table((head, *columns), each.rows(columns))}\n{each.losses()}\n\n".replace("\n\n\n", "\n\n")
    return text + conditions(every[-1].results)


def networks_short(every: list[Networks], jax: list[Networks]) -> str:
    """The same of batch 1 in float16, with fewer columns, and with JAX's time, which is of another process."""
    first = next((each for each in every if (each.batch, each.dtype) == (1, "float16")), every[0]).beside(jax, JAX)
    columns = first.columns(SHORT)
    found = first.results["conditions"]
    where = f"{found.get('gpu', 'no GPU')}, cuDNN {found.get('cudnn', 'none')}, {found['date']}."
    return f"{table(('µs on the device (by the clock)', *columns), first.rows(columns))}\n{where}\n"


def devices(every: Results) -> str:
    """Return items a second, relative to one device, by way and length of an item, of all files of `devices.py`."""
    ones: dict[float, float] = {}
    rows: dict[str, dict[float, str]] = {}
    least: dict[str, float] = {}
    for results in every["devices"]:
        for heading, found in results["times"].items():
            if " ms, " not in heading:
                continue
            length, one = float(heading.split()[2]), found[ONE_DEVICE]["median"]
            ones.setdefault(length, one)
            for name, taken in found.items():
                if name not in (ONE_DEVICE, "one device, spread, host to host") and not name.startswith("device "):
                    rows.setdefault(name, {})[length] = f"{one / taken['median']:.2f}"
        for ratio, entry in results["ratios"].items():
            if entry["bound"] is not None and f" / {ONE_DEVICE}, " in ratio:
                least[ratio.partition(f" / {ONE_DEVICE}, ")[0]] = 1 / entry["bound"]
    lengths = sorted(ones)
    order = sorted(rows, key=lambda name: (name not in least, name.startswith("the bus"), name))
    body = [
        (name, *(rows[name].get(length, "") for length in lengths), f"{least[name]:.1f}" if name in least else "")
        for name in order
    ]
    last = every["devices"][-1]
    head = f"{last['devices']} devices, times the items of one"
    text = table((head, *(f"{length:g} ms ({ones[length] / 1e3:.2g})" for length in lengths), "at least"), body)
    return text + "\n" + conditions(last)


def device_serving(every: Results) -> str:
    """Return requests a second and latencies."""
    results = every["device_serving"]
    rows = [
        (name, *spread(each["requests_a_second"], 0), f"{each['p50']:,.0f}", f"{each['p99']:,.0f}")
        for name, each in results["served"].items()
    ]
    head = f"{results['network']}, {results['devices']} devices, {results['threads']} clients each"
    return table((head, "requests a second", "quartiles", "p50, µs", "p99, µs"), rows) + "\n" + conditions(results)


def serving(every: Results) -> str:
    """Return throughput and latencies of many clients of one process, by setting."""
    results = every["serving"]
    text = ""
    for setting, ways in results["served"].items():
        rows = []
        for name, each in ways.items():
            more = [f"{each['mib']:,.0f}", "" if each["gpu_percent"] is None else f"{each['gpu_percent']:.0f}"]
            rows.append((name, *spread(each["requests_a_second"], 0), f"{each['p50']:,.0f}", f"{each['p99']:,.0f}", *more))
        text += table((setting, "requests a second", "quartiles", "p50, µs", "p99, µs", "MiB", "GPU, %"), rows) + "\n"
    left = "".join(f"- {line}\n" for line in results["not_timed"])
    return f"{text}Not timed:\n\n{left}\n{conditions(results)}"


def sizing(every: Results) -> str:
    """Return handles and memory of each device beside the formulas."""
    results = every["sizing"]
    rows = []
    for name, found in results["sizes"].items():
        handles, by_formula = (", ".join(map(str, sorted({each[key] for each in found}))) for key in ("handles", "formula"))
        sizes = [each["bytes"] / 2**20 for each in found]
        seconds = max(each["seconds"] for each in found)
        expected = found[0]["expected_bytes"] / 2**20
        rows.append((name, handles, by_formula, f"{min(sizes):,.0f} to {max(sizes):,.0f}", f"{expected:,.0f}", f"{seconds:.2f}"))
    head = f"{results['devices']} devices, {results['threads']} threads, {results['streams']} streams"
    columns = head, "handles on a device", "by the formula", "MiB on a device", "by the formula", "seconds"
    return table(columns, rows) + "\n" + conditions(results)


WRITERS: dict[str, Callable[[Results], str]] = {
    "bounds": bounds,
    "overlap": overlap,
    "crossover": crossover,
    "wrong": wrong,
    "memory": memory,
    "devices": devices,
    "device_serving": device_serving,
    "serving": serving,
    "sizing": sizing,
    "networks": lambda every: networks(every["networks"]),
    "networks-jax": lambda every: networks(every["networks_jax"]),
    "networks-short": lambda every: networks_short(every["networks"], every.get("networks_jax", [])),
    **{name: lambda every, name=name: times(every[name]) for name in ("acquire", "launch", "forks", "record")},
}


def fill(page: str, every: Results) -> str:
    """The page with its figures; a block whose JSON is missing stays as it is."""

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        source = NETWORKS.get(name, "overlap" if name == "crossover" else name)
        known = every if name == "bounds" else source in every
        return f"{begin}\n{WRITERS[name](every)}\n{end}" if known else match[0]

    return BLOCK.sub(replace, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the JSON is")
    parser.add_argument("pages", type=Path, nargs="+", help="the pages to fill")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page would change")
    options = parser.parse_args()
    asked = {name for page in options.pages for _, name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    others = (*SEVERAL_GPUS, "devices", "serving")
    wanted = NAMES if asked - {*others} else ()
    paths = {name: options.folder / f"{name}.json" for name in (*wanted, *(name for name in others if name in asked))}
    every: Results = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    every |= {script: found for script in NETWORKS.values() if (found := gathered(options.folder, script))}
    if "devices" in every:
        # `all_devices.py` writes a file for each selection of ways; numbered files are of other runs.
        parts = [options.folder / f"devices-{part}.json" for part in ("dask", "eager")]
        every["devices"] = [json.loads(path.read_text()) for path in parts if path.exists()] + [every["devices"]]
    missing = [str(path) for path in paths.values() if not path.exists()]
    if missing and (options.check or not every):
        parser.error(f"there is no {', '.join(missing)}")
    changed = []
    for page in options.pages:
        before = page.read_text(encoding="utf-8")
        after = fill(before, every)
        if after != before:
            changed.append(str(page))
            if not options.check:
                page.write_text(after, encoding="utf-8")
    print(*changed, sep="\n")
    return int(bool(changed) and options.check)


if __name__ == "__main__":
    sys.exit(main())
