"""Read the results of `networks.py` and `networks_jax.py`, by batch and type, for the tables and the picture."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EAGER, ONE_LANE, TUNED, JAX = "eager, one stream", "one lane", "tuned", "JAX"
COLUMNS: dict[str, tuple[str, ...]] = {
    EAGER: ("one stream",),
    ONE_LANE: ("recorded, 1 lane, tuned plans", "recorded, 1 lane", "recorded, 1 lanes"),
    TUNED: ("recorded, tuned, tuned plans", "recorded, tuned"),
    "torch": ("torch",),
    "torch graph": ("torch graph",),
    "reduce-overhead": ("reduce-overhead",),
    "Inductor": ("Inductor",),
    JAX: (JAX,),
}
"""The cases that stand for a library: the first that was timed counts."""
OURS = (EAGER, ONE_LANE, TUNED)
CLOCKS = {"device": "on the device", "wall": "by the clock"}


class Networks:
    """The networks of one batch and type, of one of the scripts, in one file or several.

    Attributes
    ----------
    batch, dtype
        Of the images.
    found : dict
        By network and column, the summaries by clock, as `COLUMNS` has it.
    lanes : dict
        By network, on how many lanes it runs tuned.
    results : dict
        The last file.
    """

    def __init__(self, batch: int, dtype: str) -> None:
        self.batch, self.dtype = batch, dtype
        self.found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
        self.lanes: dict[str, int] = {}
        self.results: dict[str, Any] = {}

    def add(self, results: dict[str, Any]) -> None:
        """Take the networks of a file, and replace earlier results of the same networks."""
        self.results = results
        times = results["times"]
        for heading in times:
            if not heading.endswith(", microseconds, wall"):
                continue
            name = heading.partition(",")[0]
            wall, device = times[heading], times[f"{name}, microseconds, device"]
            cases = {column: next((each for each in names if each in device), None) for column, names in COLUMNS.items()}
            many = [case for case in device if re.fullmatch(r"recorded, \d+ lanes", case)]
            if cases[TUNED] is None and many:  # the best of those that were recorded with a number
                cases[TUNED] = min(many, key=lambda case: device[case]["median"])
            self.found[name] = {
                column: {"device": device[case], "wall": wall[case]} for column, case in cases.items() if case is not None
            }
            lanes = results.get("lanes_chosen", {}).get(name, {}).get(cases[TUNED])
            number = re.search(r"(\d+) lanes", cases[TUNED] or "")
            self.lanes.pop(name, None)
            if lanes or number:
                self.lanes[name] = lanes or int(number[1])  # type: ignore[index]

    def beside(self, others: Iterable["Networks"], column: str) -> "Networks":
        """These, with a column of those among others that are of the same batch and type."""
        both = Networks(self.batch, self.dtype)
        both.results, both.lanes = self.results, self.lanes
        both.found = {network: dict(entry) for network, entry in self.found.items()}
        for other in others:
            for network in both.found if (other.batch, other.dtype) == (self.batch, self.dtype) else ():
                if column in other.found.get(network, {}):
                    both.found[network][column] = other.found[network][column]
        return both

    def columns(self, among: Iterable[str] = COLUMNS) -> list[str]:
        """Those that any network has, in their order."""
        return [column for column in among if any(column in each for each in self.found.values())]

    def median(self, network: str, column: str, clock: str) -> float | None:
        """Microseconds, or None where it was not timed."""
        entry = self.found[network].get(column)
        return None if entry is None else entry[clock]["median"]

    def rows(self, columns: Sequence[str]) -> list[list[str]]:
        """A line for each network: the device's time, and the clock's in parentheses; the quickest on the device in bold."""
        rows = []
        for network, entry in self.found.items():
            row = [network]
            known = {column: entry[column]["device"]["median"] for column in columns if column in entry}
            for column in columns:
                if column not in known:
                    row.append("")
                    continue
                text = f"{known[column]:,.0f} ({entry[column]['wall']['median']:,.0f})"
                text = f"**{text}**" if known[column] == min(known.values()) else text
                if column == TUNED and (lanes := self.lanes.get(network)):
                    text += f", {lanes} lane{'s' if lanes > 1 else ''}"
                row.append(text)
            rows.append(row)
        return rows

    def losses(self) -> str:
        """Name the peers that are quicker than the tuned program, in a sentence."""
        lost = []
        for clock, words in CLOCKS.items():
            for network in self.found:
                ours = self.median(network, TUNED, clock)
                for column in self.columns():
                    theirs = self.median(network, column, clock)
                    if column not in OURS and ours is not None and theirs is not None and theirs < ours:
                        lost.append(f"{column} on {network} {words} ({theirs / ours:.2f} of our time)")
        peers = [column for column in self.columns() if column not in OURS]
        if not peers:
            return ""
        return f"Quicker than ours: {', '.join(lost)}." if lost else f"None of these is quicker than ours: {', '.join(peers)}."


def gathered(folder: Path, script: str = "networks") -> list[Networks]:
    """Return the results in a folder's files of one script, by type and batch."""
    found: dict[tuple[str, int], Networks] = {}
    for path in [folder / f"{script}.json", *sorted(folder.glob(f"{script}-*.json"))]:
        if path.exists():
            results = json.loads(path.read_text())
            key = results["dtype"], results["batch"]
            found.setdefault(key, Networks(results["batch"], results["dtype"])).add(results)
    return [found[key] for key in sorted(found)]
