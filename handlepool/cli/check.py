"""Run ``handlepool check``: a self-test on this machine's driver.

Each check compares numbers that this machine computed, and prints a line with its result. With ``--bundle``, a file keeps all
results for a report.
"""

import json
import os
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handlepool import __version__, drivers, ops
from handlepool.cli import info
from handlepool.cli.terminal import Progress, coloured, complain, tell
from handlepool.pool.default import substitute_default
from handlepool.pool.pool import HandlePool
from handlepool.recording.decorator import recorded
from handlepool.regions.states import ParallelStates

_TOLERANCE = 1e-4
_THREADS, _STREAMS, _SUCCESSORS, _STATES = 8, 2, 50, 8
_PATIENCE = 60.0
"""Seconds after which a thread counts as hung."""
_ENVIRONMENT = ("HANDLEPOOL_", "CUDA_", "NVIDIA_TF32", "CUDNN_", "CUPY_", "LD_LIBRARY_PATH", "LD_PRELOAD")

_Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold the result of a check.

    Attributes
    ----------
    name : str
        Name of the check.
    good : bool
        Whether the check passed.
    said : str
        The facts that the check found, or its problem if it failed.
    seconds : float
        Seconds that the check took.
    trace : str
        The traceback of a check that raised an error.
    """

    name: str
    good: bool
    said: str
    seconds: float
    trace: str = ""


class Mismatch(Exception):
    """A check found a result that differs from the expected result."""


def main(options: Namespace) -> int:
    """Run the checks.

    Parameters
    ----------
    options : argparse.Namespace
        ``driver`` (str or None), ``bundle`` (Path or None).

    Returns
    -------
    int
        0 when all checks passed; 1 when a check failed; 2 when the bundle could not be written.
    """
    bundle: Path | None = options.bundle
    if bundle is not None and (bundle.is_dir() or not bundle.parent.is_dir()):
        complain(
            "check", f"--bundle {str(bundle)!r} is a folder, or its parent folder does not exist; pass the path of a JSON file"
        )
        return 2
    findings, stats = _run(options.driver)
    good = all(finding.good for finding in findings)
    if bundle is not None:
        try:
            bundle.write_text(_report(findings, stats), encoding="utf-8")
        except OSError as error:
            complain("check", f"cannot write {str(bundle)!r}: {error.strerror or error}; pass another --bundle")
            return 2
        tell(f"wrote {bundle}: results, versions, paths and settings of this machine; read it before you attach it to a report")
    elif not good:
        tell("`handlepool check --bundle report.json` writes a file for a report of this problem")
    return 0 if good else 1


def _run(driver: str | None) -> tuple[list[Finding], dict[str, int]]:
    """Run all checks that are possible; print a line for each check."""
    progress = Progress("handlepool check")
    findings: list[Finding] = []

    def run(name: str, check: Callable[[], str]) -> None:
        progress(name)
        began = time.perf_counter()
        good, trace = True, ""
        try:
            said = check()
        # Any error is a finding, and must not keep the other checks from running.
        except Exception as error:
            good, said, trace = False, " ".join(str(error).split()) or type(error).__name__, traceback.format_exc()
        findings.append(Finding(name, good, said, time.perf_counter() - began, trace))
        progress.clear()
        verdict = coloured("ok    " if good else "FAILED", good=good)
        tell(f"{verdict}  {name:<8}  {said}  ({findings[-1].seconds:.1f} s)")

    pools: list[HandlePool] = []
    run("driver", partial(_driver, driver, pools))
    if not pools:
        return findings, {}
    with pools[0] as pool, substitute_default(pool):
        for name, check in _CHECKS.items():
            run(name, partial(check, pool))
        return findings, dict(pool.stats())


def _driver(name: str | None, pools: list[HandlePool]) -> str:
    """Make a pool, test the pool, and add the pool to ``pools``.

    The test computes one convolution. Return the driver, the reason for its choice, and the device, as text.
    """
    chosen, reason = drivers.choose(name)
    pool = HandlePool(driver=name)
    _convolution(pool, np.random.default_rng(0))()
    pools.append(pool)
    device = info.device_name(pool.driver.current_device()) if chosen == "cuda" else "NumPy on the CPU"
    return f"{chosen} ({reason}), {device}"


def _handles(pool: HandlePool) -> str:
    """Let threads compute at the same time, then one after another.

    The first threads must have different handles. The later threads must reuse idle handles.
    """
    # At the barrier, all threads hold their handles. So a handle that two threads hold would be shared, which guarantee 1
    # forbids.
    together = threading.Barrier(_THREADS, timeout=_PATIENCE)

    def hold(seed: int) -> list[Any]:
        held = []
        compute = _convolution(pool, np.random.default_rng(seed))
        streams: list[Any] = [pool.driver.create_stream() for _ in range(_STREAMS)]
        for stream in streams:
            with stream:
                handle = pool.get_handle()
                if pool.get_handle() is not handle:
                    raise Mismatch("a second get_handle on a stream gave another handle than the first")
                compute()
                held.append(handle)
        together.wait()
        return held

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            futures = [threads.submit(hold, seed) for seed in range(_THREADS)]
            done, waiting = wait(futures, timeout=_PATIENCE, return_when=FIRST_EXCEPTION)
            if error := next((error for future in done if (error := future.exception()) is not None), None):
                raise error
            if waiting:
                raise Mismatch(f"{len(waiting)} of {_THREADS} threads did not end within {_PATIENCE:g} seconds")
        finally:
            # After an error or Ctrl-C, threads may still wait at the barrier. `abort` wakes these threads, so that the executor
            # can end.
            together.abort()
    handles = [handle for future in futures for handle in future.result()]
    if len({id(handle) for handle in handles}) != len(handles):
        raise Mismatch(
            f"{len(handles)} streams in use at the same time had only {len({id(handle) for handle in handles})} handles"
        )
    before = pool.stats()
    for _ in range(_SUCCESSORS):
        thread = threading.Thread(target=pool.get_handle)
        thread.start()
        thread.join(_PATIENCE)
    made = (pool.stats() - before)["handles_created"]
    if made > 2:
        raise Mismatch(f"{_SUCCESSORS} threads, one after another, made {made} handles instead of reusing idle handles")
    return f"{len(handles)} different handles in {_THREADS} threads; {_SUCCESSORS} later threads made {made} more"


def _order(pool: HandlePool) -> str:
    """Run branches that read and overwrite each other's arrays."""
    random, driver = np.random.default_rng(1), pool.driver
    states, rounds = ParallelStates(_STATES, pool=pool), 20
    w, other = (_filters(random, 16, side) for side in (3, 1))
    on_device = [_placed(driver, each) for each in (w, other)]
    conv2d = partial(ops.conv2d, padding=1, allow_tf32=False, pool=pool)
    pointwise = partial(ops.conv2d, allow_tf32=False, pool=pool)
    for number in range(rounds):
        x = random.standard_normal((1, 16, 20, 20), dtype=np.float32)
        given = _placed(driver, x)
        with states.fork() as fork:
            a = fork.run(conv2d, given, on_device[0])
            b = fork.run(conv2d, a, on_device[0])
            c = fork.run(ops.add, a, b, pool=pool)
            # This branch overwrites an array that two earlier branches read, so it must wait for these branches.
            fork.run(pointwise, given, on_device[1], out=a)
            d = fork.run(conv2d, a, on_device[0])
        first = _reference(x, w)
        second = _reference(first, w)
        _compare(driver, f"round {number}", (b, second), (c, first + second), (d, _reference(_reference(x, other), w)))
    return f"{rounds} rounds of 5 dependent branches on {_STATES} states were right"


def _recorded(pool: HandlePool) -> str:
    """Compare a recorded function with the function itself."""
    random, driver = np.random.default_rng(2), pool.driver
    wide, small = (_placed(driver, _filters(random, 16, side)) for side in (3, 1))

    # Pass the filters as arguments, because `recorded` does not look into the closures of this package's functions.
    def network(x: Any, wide: Any, small: Any) -> Any:
        left = ops.conv2d(x, wide, padding=1, activation="relu", allow_tf32=False)
        right = ops.conv2d(ops.add(x, x), small, allow_tf32=False)
        joined = ops.concat([left, right, ops.conv2d(right, wide, padding=1, allow_tf32=False)], 1)
        return ops.mean2d(joined), joined

    fast, calls = recorded(network, strict=True), 0
    try:
        for side in (16, 24):
            for _ in range(5):
                x = _placed(driver, random.standard_normal((2, 16, side, side), dtype=np.float32))
                pairs = zip(fast(x, wide, small), network(x, wide, small), strict=True)
                _compare(driver, f"call {calls}", *[(found, driver.asnumpy(right)) for found, right in pairs])
                calls += 1
    finally:
        fast.clear()
    return f"{calls} calls over 2 geometries gave the results of eager calls"


def _scratch(pool: HandlePool) -> str:
    """Let branches write their scratch at the same time.

    First the branches themselves fill their scratch. Then each branch runs a cuDNN plan, which uses the branch's scratch.
    """
    random, driver = np.random.default_rng(3), pool.driver
    states = ParallelStates(_STATES, pool=pool)

    def write(number: int) -> Any:
        scratch = pool.get_workspace(1 << 20)
        scratch.fill(number)
        return scratch.copy()

    # A GPU computes the larger size, for which cuDNN's plan needs scratch: 8 MiB on an H200. NumPy would take too long for this
    # size.
    shape, channels = ((64, 256, 14, 14), 256) if driver.name == "cuda" else ((2, 16, 14, 14), 16)
    w = _placed(driver, _filters(random, channels, 3))
    images = [_placed(driver, random.standard_normal(shape, dtype=np.float32)) for _ in range(_STATES)]
    conv2d = partial(ops.conv2d, padding=1, allow_tf32=False, pool=pool)
    expected = [driver.asnumpy(conv2d(x, w)) for x in images]
    rounds = 5
    for number in range(rounds):
        for value, written in enumerate(states.map(write, range(_STATES))):
            if (wrong := int((driver.asnumpy(written) != value).sum())) > 0:
                raise Mismatch(f"round {number}: {wrong} bytes of a branch's scratch were overwritten by another branch")
        outputs = states.map(lambda x: conv2d(x, w), images)
        _compare(driver, f"round {number}", *zip(outputs, expected, strict=True))
    nbytes = ops.conv2d_plan(images[0], w, padding=1, allow_tf32=False, pool=pool).workspace_size
    return f"{rounds} rounds of {_STATES} branches with 1 MiB of scratch, and {nbytes / 2**20:.1f} MiB for the plan, were right"


_CHECKS: dict[str, Callable[[HandlePool], str]] = {
    "handles": _handles,
    "order": _order,
    "recorded": _recorded,
    "scratch": _scratch,
}


def _convolution(pool: HandlePool, random: np.random.Generator) -> Callable[[], None]:
    """Return a function that convolves, and compares the result with NumPy."""
    x, w = random.standard_normal((1, 16, 12, 12), dtype=np.float32), _filters(random, 16, 3)
    expected = _reference(x, w)

    def compute() -> None:
        # The copies run on the current stream, as the convolution does. So the convolution needs no wait for another stream.
        y = ops.conv2d(_placed(pool.driver, x), _placed(pool.driver, w), padding=1, allow_tf32=False, pool=pool)
        _compare(pool.driver, "a convolution", (y, expected))

    return compute


def _compare(driver: Any, where: str, *pairs: tuple[Any, NDArray[Any]]) -> None:
    for number, (found, expected) in enumerate(pairs):
        error = float(np.linalg.norm(driver.asnumpy(found) - expected) / np.linalg.norm(expected))
        # If the error is NaN, ``error <= _TOLERANCE`` is false, so the check fails.
        if not error <= _TOLERANCE:
            raise Mismatch(f"{where}: result {number} has a relative error of {error:.1e}; {_TOLERANCE:g} is allowed")


def _reference(x: NDArray[Any], w: _Array) -> NDArray[np.float64]:
    """Convolve in float64 by NumPy alone, and keep the input's size."""
    side = w.shape[2]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *[(side // 2, side // 2)] * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(2, 3))
    return np.tensordot(windows, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)


def _filters(random: np.random.Generator, channels: int, side: int) -> _Array:
    """Return random filters that keep the variance of an image."""
    return random.standard_normal((channels, channels, side, side), dtype=np.float32) / np.float32(side * channels**0.5)


def _placed(driver: Any, values: _Array) -> Any:
    """Copy ``values`` to the device, in channels-last layout.

    Every operation takes this layout.
    """
    return driver.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)


def _report(findings: Iterable[Finding], stats: dict[str, int]) -> str:
    """Return the results, versions and settings of this run as JSON text.

    In the text, ``~`` replaces the path of the user's home folder.
    """
    found = {
        "handlepool": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checks": [asdict(finding) for finding in findings],
        "info": info.collect(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
        "stats": stats,
    }
    text = json.dumps(found, indent=2)
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")
