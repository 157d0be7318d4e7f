"""Measure device memory against the number of keys (threads x streams): the pool, beside a kept handle for each key.

*At once*: all threads live at the same time, each with its streams, so the pool needs a handle for each key as well. *One after
another*: each thread ends before the next begins, as requests do. The pool reuses the handles of ended threads. A dictionary of
handles, or the frontend's own default handle, keeps a handle for each thread that ever lived.

The measure is the growth of the device's used memory, in a process for each way. The memory of a destroyed handle stays with its
process, so nothing is destroyed meanwhile.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Ratios, pool_on_a_stream, print_table, progress, publish
from options import arguments, parse, positive

AT_ONCE, ONE_AFTER_ANOTHER, KEPT = "pool, at once", "pool, one after another", "a handle for each key, kept"
DEFAULT_HANDLE = "the frontend's default handle, one after another"
WAYS = (AT_ONCE, ONE_AFTER_ANOTHER, KEPT, DEFAULT_HANDLE)
MOST_HANDLES = 2
PATIENCE = 60


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


def at_once(pool: Any, threads: int, streams: int) -> int:
    """Bytes in use with so many threads alive, each with a handle for each of its streams."""
    driver = pool.driver
    ready, done = threading.Barrier(threads + 1), threading.Event()

    def body() -> None:
        mine = [driver.create_stream() for _ in range(streams)]
        for stream in mine:
            pool.get_handle(stream)
        ready.wait(PATIENCE)
        done.wait(PATIENCE)

    running = [threading.Thread(target=body) for _ in range(threads)]
    for thread in running:
        thread.start()
    ready.wait(PATIENCE)
    found = used(driver)
    done.set()
    for thread in running:
        thread.join()
    return found


def one_after_another(pool: Any, threads: int) -> int:
    """Bytes in use after so many more threads came and went, with a stream each."""
    driver = pool.driver

    def body() -> None:
        stream = driver.create_stream()
        pool.get_handle(stream)

    for _ in range(threads):
        in_thread(body)
    return used(driver)


def kept(driver: Any, handles: list[Any], count: int) -> int:
    """Bytes in use with so many handles."""
    while len(handles) < count:
        with driver.relaxed():
            handles.append(driver.create_handle())
    return used(driver)


def measure(way: str, pool: Any, keys: list[tuple[int, int]], many: int) -> list[int]:
    """Bytes more for each number of keys, and for ``many`` threads where the way is one that is taken so often."""
    driver = pool.driver
    # The first handle of a process costs more than later handles.
    pool.get_handle()
    before = used(driver)
    found = []
    if way == AT_ONCE:
        found = [at_once(pool, *key) - before for key in progress(keys)]
    elif way == ONE_AFTER_ANOTHER:
        seen = 0
        for threads, streams in progress([*keys, (many, 1)]):
            found.append(one_after_another(pool, threads * streams - seen) - before)
            seen = threads * streams
    elif way == KEPT:
        handles: list[Any] = []
        found = [kept(driver, handles, threads * streams) - before for threads, streams in progress(keys)]
        with driver.relaxed():
            for handle in handles:
                driver.destroy_handle(handle)
    else:
        from cudnn.wrapper import get_default_handle

        seen = 0
        for threads, streams in progress(keys):
            for _ in range(threads * streams - seen):
                in_thread(get_default_handle)
            seen = threads * streams
            found.append(used(driver) - before)
    return found


def measured(way: str, keys: list[tuple[int, int]], options: Any) -> list[int]:
    """`measure`, in a process of its own; empty where that failed, which says why on its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--way", way, "--many", str(options.many)]
    command += ["--keys", *(f"{threads}x{streams}" for threads, streams in keys)]
    command += ["--driver", options.driver] if options.driver else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else []


def key(text: str) -> tuple[int, int]:
    """An option's value: threads x streams."""
    threads, _, streams = text.partition("x")
    return positive(threads), positive(streams or "1")


KEYS = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (16, 2), (16, 4)]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--keys", type=key, nargs="+", default=KEYS, help="threads x streams of each, such as 8x4")
    parser.add_argument("--many", type=positive, default=10_000, help="short threads, one after another (default: %(default)s)")
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process, and print bytes as JSON")
    options = parse(parser, keys=[(1, 1), (2, 2)], many=20)
    keys = sorted(options.keys, key=lambda key: key[0] * key[1])
    with pool_on_a_stream(options.driver) as (pool, _):
        if options.way is not None:
            print(json.dumps(measure(options.way, pool, keys, options.many)))
            return 0
        driver = pool.driver.name
    skipped = []
    grown = {way: measured(way, keys, options) for way in (WAYS if driver == "cuda" else WAYS[:3])}
    many = grown[ONE_AFTER_ANOTHER].pop() if grown[ONE_AFTER_ANOTHER] else 0
    for way in WAYS:
        if not grown.get(way):
            skipped.append(f"{way}: {'not measured' if driver == 'cuda' else 'on a GPU alone'}")
            grown.pop(way, None)
    each = grown.get(KEPT, [0])[-1] / (keys[-1][0] * keys[-1][1])
    columns = list(grown.values())
    print_table(
        ("MiB of device memory", *grown),
        [
            (f"{threads} threads x {streams} streams", *(f"{column[row] / 2**20:,.1f}" for column in columns))
            for row, (threads, streams) in enumerate(keys)
        ],
    )
    print(f"a handle: {each / 2**20:,.1f} MiB; {options.many:,} threads, one after another: {many / 2**20:,.1f} MiB")
    ratios = Ratios()
    if each > 0:
        ratios.add(f"growth over {options.many:,} threads / one handle", [many / each], MOST_HANDLES)
    sizes = {"keys": keys, "bytes": grown, "handle_bytes": each, "many_threads": options.many, "many_bytes": many}
    publish(options, "memory", driver, {}, ratios, skipped, memory=sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
