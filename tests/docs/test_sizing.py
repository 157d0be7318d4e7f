"""The page on sizing: its constants were measured, its example follows from its formulas, and these hold for a pool."""

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from harness.hidden import hidden

import handlepool

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "sizing.md", ROOT / "benchmarks" / "results" / "h200"
pytestmark = pytest.mark.skipif(not (PAGE.exists() and RESULTS.exists()), reason="docs/ and benchmarks/results/ are not here")
HANDLE, STREAM, MAKING = 8.75, 0.56, 1.2e-3
"""MiB, MiB and seconds."""


def median(script, heading, case):
    return json.loads((RESULTS / f"{script}.json").read_text())["times"][heading][case]["median"]


def row(start, *, whole=False):
    """The numbers in a row of a table, behind its first cell, or in that as well."""
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {start} |")]
    cells = line if whole else line[len(start) + 4 :].partition("`")[0]  # without the scripts' names
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", cells)]


def test_the_constants_are_those_that_were_measured():
    memory = json.loads((RESULTS / "memory.json").read_text())["memory"]
    assert memory["handle_bytes"] / 2**20 == row("a handle")[0] == HANDLE
    threads, streams = memory["keys"][-1]
    beside = memory["bytes"]["pool, at once"][-1] / (threads * streams) - memory["handle_bytes"]
    assert row("a stream with what the pool has beside the handle")[0] == STREAM == round(beside / 2**20, 2)
    making = median("acquire", "nanoseconds a call", "create, bind, destroy") / 1e6
    assert row("making a handle")[0] == MAKING * 1e3 == round(making, 1)
    launching = median("launch", "microseconds a call", "graph function, out given")
    assert row("launching a planned convolution, `out=` given")[0] == round(launching, 1)
    replays = [round(median("record", "microseconds, host", f"replay, {states} states"), 1) for states in (1, 8)]
    assert row("replaying a program of one lane, of 8") == replays
    recording = median("record", "microseconds in all, wall", "record, 8 states") / 1e3
    assert row("recording 16 convolutions over 8 states")[0] == round(recording, 1)


@pytest.mark.parametrize(
    ("start", "keys", "side", "devices"),
    [
        ("one process, every thread uses every GPU", 64 * 16, 0, 8),
        ("one process, 8 threads for each GPU", 8 * 16, 0, 8),
        ("a process for each GPU, 8 threads", 8 * 16, 0, 1),
        ("a process for each GPU, one thread, a fork over 16 states", 1, 16, 1),
    ],
)
def test_the_example_follows_from_the_formulas(start, keys, side, devices):
    handles = keys + side + 1
    memory = handles * HANDLE + (keys + side) * STREAM
    assert row(start) == [handles, round(memory), handles * devices, round(handles * devices * MAKING, 2)]


def chains(xs):
    """Independent of each other."""
    ys = []
    for x in xs:
        y = x
        for _ in range(6):
            y = handlepool.add(y, x)
        ys.append(y)
    return ys


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_recording_takes_slots_and_memory_for_the_lanes_that_it_is_recorded_on(make_pool, lanes):
    pool = make_pool(devices=1, check_order=False)
    xs = [pool.driver.asarray(np.ones((32, 32), np.float32)) for _ in range(16)]
    leased = hidden([])

    def watched(xs):
        ys = chains(xs)
        leased().append(pool.stats(0)["handles_leased"])
        return ys

    with handlepool.record(watched, xs, pool=pool, lanes=lanes) as program:
        how = program.explain()
        assert row(f"recorded with `lanes={lanes}`", whole=True) == [lanes, how.recorded, leased()[-1], program.nbytes]
        assert how.got == lanes
        assert leased()[-1] == 1 + how.recorded
    assert pool.stats(0)["handles_leased"] == 0


@pytest.mark.parametrize(("devices", "threads", "streams", "states"), [(1, 1, 1, 0), (2, 3, 4, 2), (3, 8, 2, 5)])
def test_a_pool_has_as_many_handles_as_the_formula_says(make_pool, devices, threads, streams, states):
    pool = make_pool(devices=devices, check_order=False)
    driver, together = pool.driver, threading.Barrier(threads + 1)

    def work():
        mine = []
        for device in range(devices):
            with driver.device(device):
                for _ in range(streams):
                    mine.append(driver.create_stream())
                    pool.get_handle(mine[-1])
        together.wait(60)
        together.wait(60)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    together.wait(60)
    for device in range(devices):
        with driver.device(device):
            if states:
                with handlepool.ParallelStates(states, pool=pool).fork() as fork:
                    for _ in range(2 * states):
                        fork.run(pool.get_handle)
        stats = pool.stats(device)
        found = [stats[f"handles_{kind}"] for kind in ("live", "idle", "leased")]
        assert sum(found) == threads * streams + states
    together.wait(60)
    for thread in running:
        thread.join()
