"""Measure device memory over 10,000 short threads and 10,000 short streams, beside the frontend's default handle on the same
loop.

Each thread begins when the thread before has ended, and each stream when the stream before was destroyed. Each uses its handle
for a convolution. The pool hands a handle on, so its memory stays constant after the first. The frontend keeps a handle for
each thread until the process ends, so that loop is ended early. The measure is the device's free memory.
"""

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

from common import conditions, pool_on_a_stream, print_table, progress
from options import arguments, parse, positive

MOST_HANDLES = 2
HANDLES = 16
"""Handles at once, for the size of one: device memory is taken in large pieces."""
MIB = 1 << 20


def used(driver: Any) -> int:
    """Bytes of the device that are in use, by anybody."""
    with driver.relaxed():
        free, total = driver.memory_info()
    return int(total - free)


def in_thread(body: Callable[[], object]) -> None:
    """Run in a new thread, to its end."""
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def curve(driver: Any, turn: Callable[[], object], most: int) -> list[dict[str, int]]:
    """Bytes more than before the first turn, after 1, 10, 100 ... turns."""
    before = used(driver)
    points, next_point = [], 1
    for number in progress(range(1, most + 1)):
        turn()
        if number in (next_point, most):
            points.append({"turns": number, "bytes": used(driver) - before})
            next_point *= 10
    return points


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=positive, default=10_000, help="threads, and streams (default: %(default)s)")
    parser.add_argument("--default-turns", type=positive, default=500, help="of the frontend's loop (default: %(default)s)")
    options = parse(parser, turns=20, default_turns=5)
    with pool_on_a_stream(options.driver) as (pool, stream):
        import numpy as np

        import handlepool

        driver = pool.driver
        x = driver.asarray(np.ones((1, 16, 8, 8), np.float32))
        w = driver.asarray(np.ones((16, 16, 3, 3), np.float32))
        y = handlepool.conv2d(x, w, pool=pool)
        driver.synchronize_stream(stream.ptr)

        def convolve(stream: Any) -> None:
            with stream:
                pool.get_workspace(1 << 16)
                handlepool.conv2d(x, w, out=y, pool=pool)
            driver.synchronize_stream(stream.ptr)

        # The first thread loads libraries and kernels.
        in_thread(lambda: convolve(driver.wrap_stream(0, None)))
        pool.trim()
        curves = {}
        start = pool.stats()
        curves["pool, threads"] = curve(driver, lambda: in_thread(lambda: convolve(driver.create_stream())), options.turns)
        after_threads = pool.stats() - start
        pool.trim()
        start = pool.stats()
        curves["pool, streams"] = curve(driver, lambda: convolve(driver.create_stream()), options.turns)
        after_streams = pool.stats() - start
        skipped = ""
        if driver.name != "cuda":
            skipped = "the frontend's default handle: on a GPU alone"
        else:
            try:
                from cudnn.wrapper import get_default_handle

                curves["frontend's default handle, threads"] = curve(
                    driver, lambda: in_thread(get_default_handle), options.default_turns
                )
            except ImportError as error:
                skipped = f"the frontend's default handle: {error}"
        # This comes last, because the driver keeps memory of a destroyed handle, which would hide the growth of the loops.
        before, handles = used(driver), [driver.create_handle() for _ in range(HANDLES)]
        one_handle = (used(driver) - before) // HANDLES
        for handle in handles:
            driver.destroy_handle(handle)
        most = max(point["bytes"] for name, points in curves.items() if name.startswith("pool") for point in points)
        bound = f"over {options.turns:,} threads and as many streams, at most {MOST_HANDLES} handles more"
        kept = most <= MOST_HANDLES * one_handle if driver.name == "cuda" and not options.quick else None
        print_table(
            ("MiB of device memory", "turns", "more than before"),
            [(name, f"{p['turns']:,}", f"{p['bytes'] / MIB:,.1f}") for name, points in curves.items() for p in points],
        )
        verdict = {True: f"{bound}: kept", False: f"{bound}: NOT KEPT", None: "not judged"}[kept]
        print(f"one handle: {one_handle / MIB:.1f} MiB; most growth of the pool: {most / MIB:.1f} MiB; {verdict}")
        made = [stats["handles_created"] for stats in (after_threads, after_streams)]
        print(f"handles made: {made[0]} over the threads, {made[1]} over the streams")
        if skipped:
            print(f"not measured: {skipped}")
        if options.json is not None:
            results = {"benchmark": "lifetimes", "conditions": conditions(driver.name), "one_handle_bytes": one_handle}
            results |= {"bytes": curves, "most_growth_bytes": most, "bound": bound, "kept": kept}
            results |= {"stats": {"threads": after_threads, "streams": after_streams}, "not_measured": skipped}
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(kept is False)


if __name__ == "__main__":
    sys.exit(main())
