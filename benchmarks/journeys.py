"""Trace how far a call travels through the package: modules, rooms, Python calls, and switches between them.

Each journey runs on the host driver, with everything warm. Each call of a Python function of the package counts, and so does each
further step of a generator. The driver's functions do not count, nor do the calls that they make: a real driver, and its arrays,
are not written in Python. Frames of comprehensions do not count either, since Python 3.12
no longer makes them. A switch is a change of module, or of room, from one of these calls to the next. `compare.py` has the times.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from common import no_collector

import handlepool

UNSEEN = {"<listcomp>", "<dictcomp>", "<setcomp>"}
UNCOUNTED = "handlepool.drivers"
"""The room whose calls do not count."""
WARM = 11
"""Untraced calls before the traced one. The tenth call of a function is the last that is measured. One more reads the answer."""


class Call(NamedTuple):
    """One call of a Python function."""

    module: str
    function: str

    @property
    def room(self) -> str:
        """The folder of the module, or the module itself where the package's own folder holds it."""
        return self.module.split(".")[1] if "." in self.module else self.module


class Journey(NamedTuple):
    """The calls that one call makes, in their order."""

    calls: list[Call]

    @property
    def modules(self) -> list[str]:
        """The modules, in the order of their first call."""
        return [*dict.fromkeys(call.module for call in self.calls)]

    @property
    def rooms(self) -> list[str]:
        """The rooms, in the order of their first call."""
        return [*dict.fromkeys(call.room for call in self.calls)]

    @property
    def switches(self) -> int:
        """How often the module changes from one call to the next."""
        return sum(one.module != other.module for one, other in zip(self.calls, self.calls[1:], strict=False))

    @property
    def room_switches(self) -> int:
        """How often the room changes from one call to the next."""
        return sum(one.room != other.room for one, other in zip(self.calls, self.calls[1:], strict=False))

    def figures(self) -> dict[str, int]:
        """Return the counts by name."""
        return {
            "modules": len(self.modules),
            "rooms": len(self.rooms),
            "calls": len(self.calls),
            "module switches": self.switches,
            "room switches": self.room_switches,
        }


def beneath_driver(frame: FrameType | None) -> bool:
    """Whether a function of the driver's led to a call."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(UNCOUNTED):
            return True
        frame = frame.f_back
    return False


def trace(function: Callable[[], object]) -> Journey:
    """Call a function, and follow its calls in this thread."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            ours = module.partition(".")[0] == "handlepool" and not module.startswith(UNCOUNTED)
            if ours and function not in UNSEEN and not beneath_driver(frame):
                calls.append(Call(module, function))

    with no_collector():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return Journey(calls)


def network(x: Any, *filters: Any) -> Any:
    """Compute a chain of convolutions."""
    for w in filters:
        x = handlepool.conv2d(x, w, padding=1)
    return x


def more(x: Any) -> Any:
    """Compute without a graph function."""
    return x + 1


def nothing() -> None:
    """Prepare nothing."""


def journeys(pool: Any) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return each journey, and a function that prepares it without being traced."""
    driver, rng = pool.driver, np.random.default_rng(0)

    def array(*shape: int) -> Any:
        values = rng.standard_normal(shape).astype(np.float32)
        return driver.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))

    x, other, filters = array(1, 8, 6, 6), array(1, 8, 6, 6), [array(8, 8, 3, 3) for _ in range(5)]
    states = handlepool.ParallelStates(4, pool=pool)
    streams: list[Any] = []
    programs: list[Any] = []

    def fork(function: Callable[..., Any], *args: Any) -> None:
        with states.fork() as region:
            region.run(function, *args)

    def get_handle_on_new_stream() -> None:
        with streams[-1]:
            pool.get_handle()

    def record(count: int) -> None:
        programs.append(handlepool.record(network, x, *filters[:count], lanes=8, pool=pool))

    def close() -> None:
        while programs:
            programs.pop().close()

    program = handlepool.record(lambda x: network(x, *filters), array(1, 8, 6, 6), lanes=8, pool=pool)
    return {
        "get_handle, hit": (pool.get_handle, nothing),
        "get_handle, miss": (get_handle_on_new_stream, lambda: streams.append(driver.create_stream())),
        "conv2d, second call": (lambda: handlepool.conv2d(x, filters[0], padding=1), nothing),
        "fork, run(conv2d), join": (lambda: fork(handlepool.conv2d, x, filters[0]), nothing),
        "fork, run(a function), join": (lambda: fork(more, x), nothing),
        "record of five calls, lanes=8": (lambda: record(5), close),
        "record of one call, lanes=8": (lambda: record(1), close),
        "program(x2)": (lambda: program(other), nothing),
        "program.replay()": (program.replay, nothing),
    }


def traced(*words: str) -> dict[str, Journey]:
    """Trace the journeys that have one of these words in their names, or all without words."""
    with handlepool.HandlePool(driver="host") as pool:
        stream = pool.driver.create_stream()
        with stream:
            found = {}
            for name, (call, prepare) in journeys(pool).items():
                if words and not any(word in name for word in words):
                    continue
                for _ in range(WARM):
                    prepare()
                    call()
                    pool.driver.synchronize_stream(stream.ptr)
                prepare()
                found[name] = trace(call)
            pool.driver.synchronize_stream(stream.ptr)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="trace the journeys with such a word in the name (default: all)")
    parser.add_argument("--modules", action="store_true", help="list the modules, with their calls")
    parser.add_argument("--calls", action="store_true", help="list the calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    options = parser.parse_args()
    os.environ.setdefault("HANDLEPOOL_DRIVER", "host")
    found = traced(*options.words)
    names = [*Journey([]).figures()]
    print(f"{'journey':<32}" + "".join(f"{name:>17}" for name in names))
    for name, journey in found.items():
        print(f"{name:<32}" + "".join(f"{figure:>17,}" for figure in journey.figures().values()))
        if options.modules:
            for module in journey.modules:
                print(f"{sum(call.module == module for call in journey.calls):>8}  {module}")
        if options.calls:
            for call in journey.calls:
                print(f"          {call.module}: {call.function}")
    if options.json is not None:
        counts = {name: journey.figures() for name, journey in found.items()}
        options.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
