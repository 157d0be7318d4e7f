"""Handles and memory of each device beside the formulas of docs/sizing.md, in processes that use all devices at once.

The rows are those of the page's table: a process whose threads use every device, a process with threads of each device's own, a
process for each device, and one of these with one thread and a fork. A row runs in processes of its own.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from common import Ratios, pool_on_a_stream, print_table, progress, publish, summary
from devices import visible
from memory import used
from options import arguments, parse, positive, side_streams

HANDLE, STREAM = 8.75 * 2**20, 0.56 * 2**20
"""Bytes, as the page has them."""
MOST_DISTANCE = 0.1
ROWS = {
    "every": "one process, every thread uses every device",
    "own": "one process, threads for each device",
    "each": "a process for each device, threads",
    "fork": "a process for each device, one thread, a fork",
}
PATIENCE = 120


def keys(pool: Any, places: list[list[int]], streams: int, look: Callable[[], None]) -> None:
    """Give each thread a handle for each of its streams on each of its devices, and look while all have them."""
    driver, together = pool.driver, threading.Barrier(len(places) + 1)
    errors: list[Exception] = []

    def body(devices: list[int]) -> None:
        try:
            kept = []
            for device in devices:
                with driver.device(device):
                    kept += [driver.create_stream() for _ in range(streams)]
                    for stream in kept[-streams:]:
                        pool.get_handle(stream)
            together.wait(PATIENCE)
            together.wait(PATIENCE)
        except Exception as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=body, args=(devices,)) for devices in places]
    for thread in threads:
        thread.start()
    try:
        together.wait(PATIENCE)
        look()
        together.wait(PATIENCE)
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def made(pool: Any, device: int) -> int:
    """Return how many handles a pool has on a device, idle ones included."""
    stats = pool.stats(device)
    return int(stats["handles_created"] - stats["handles_destroyed"])


def measure(row: str, pool: Any, options: Any) -> list[dict[str, Any]]:
    """Handles, bytes and the formulas of each device of this process."""
    driver = pool.driver
    devices = [0] if row in ("each", "fork") else list(options.devices)
    before, first, found, at = {}, {}, [], perf_counter()
    for device in devices:
        with driver.device(device):
            pool.get_handle()  # the first handle of a process costs more than later ones
            before[device], first[device] = used(driver), made(pool, device)
    start = perf_counter()

    def look() -> None:
        nonlocal at
        at = perf_counter()
        for device in devices:
            with driver.device(device):
                grown, handles = used(driver) - before[device], made(pool, device) - first[device]
            found.append({"device": device, "handles": handles, "bytes": grown, "formula": expected, "seconds": at - start})

    per_device = max(1, options.threads // len(options.devices))
    if row == "fork":
        expected = options.states
        pool.prewarm(states=options.states)
        look()
        return found
    if row == "every":
        places = [devices] * options.threads
        expected = options.threads * options.streams
    else:
        places = [[device] for device in devices for _ in range(per_device)]
        expected = per_device * options.streams
    keys(pool, places, options.streams, look)
    return found


def measured(row: str, options: Any) -> list[dict[str, Any]]:
    """`measure` in processes of their own, one after which all have ended."""
    devices = options.devices
    command = [sys.executable, str(Path(__file__).resolve()), "--row", row, "--driver", options.driver]
    for name in ("threads", "streams", "states"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--devices", *map(str, devices)]
    alone = row in ("each", "fork")
    places = [visible(device) for device in devices] if alone else [None]
    running = []
    for place in places:
        environment = {**os.environ} if place is None else {**os.environ, "CUDA_VISIBLE_DEVICES": place}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    found = []
    for device, process in zip(devices, running, strict=False):
        text, _ = process.communicate()
        mine = json.loads(text.splitlines()[-1]) if process.returncode == 0 else []
        found += [{**each, "device": device} for each in mine] if alone else mine
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", help="ordinals (default: all)")
    parser.add_argument("--threads", type=positive, default=64, help="of all devices together (default: %(default)s)")
    parser.add_argument("--streams", type=positive, default=16, help="of each thread and device (default: %(default)s)")
    parser.add_argument("--states", type=side_streams, default=16, help="of the fork (default: %(default)s)")
    parser.add_argument("--row", choices=tuple(ROWS), help="measure a row in this process, and print JSON")
    options = parse(parser, small={"threads": 4, "streams": 2, "states": 3})
    with pool_on_a_stream(options.driver) as (pool, _):
        options.driver = driver = pool.driver.name
        options.devices = options.devices or list(range(pool.driver.device_count()))
        if options.row is not None:
            print(json.dumps(measure(options.row, pool, options)))
            return 0
    ratios, rows, skipped = Ratios(), {}, []
    for row, name in progress(list(ROWS.items())):
        found = measured(row, options)
        if len(found) < len(options.devices):
            skipped.append(f"{name}: its process ended with an error, which stands above")
        rows[name] = found
        for each in found:
            each["expected_bytes"] = each["formula"] * (HANDLE + STREAM)
            where = f"{name}, device {each['device']}"
            ratios.add(f"handles beside the formula, {where}", [abs(each["handles"] / each["formula"] - 1)], 0.0)
            ratios.add(f"bytes beside the formula, {where}", [abs(each["bytes"] / each["expected_bytes"] - 1)], MOST_DISTANCE)
    table = [
        (name, e["device"], e["handles"], e["formula"], *(f"{e[b] / 2**20:,.0f}" for b in ("bytes", "expected_bytes")))
        for name, found in rows.items()
        for e in found
    ]
    print_table(("", "device", "handles", "by the formula", "MiB", "by the formula"), table)
    seconds = {name: summary([each["seconds"] for each in found]) for name, found in rows.items() if found}
    times = {"seconds until all had their handles": seconds}
    more = {"devices": len(options.devices), "threads": options.threads, "streams": options.streams, "sizes": rows}
    publish(options, "sizing", driver, times, ratios, skipped, **more)
    return int(bool(skipped))


if __name__ == "__main__":
    sys.exit(main())
