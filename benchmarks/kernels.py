"""Time the kernels of a call on the device as torch's profiler sees them: kernels of all libraries, also in CUDA graphs.

``python benchmarks/kernels.py FILE.json…`` prints the kernels in files that ``networks.py`` and ``networks_jax.py`` made with
``--profile``.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import print_table

CALLS = 5
MOST = 25
"""Kernels that are told apart; the others are one line."""
REST = "all others"
PRODUCT = re.compile(r"xmma|cutlass|cudnn|conv(?!ert)|gemm|nvjet|dot|fprop|dgrad|winograd", re.IGNORECASE)
"""Parts of names of kernels that convolve or multiply, or that a library's convolutions need around them."""
Kernel = tuple[str, float, float, int]
"""Its name, when it began and ended, in microseconds, and a stream or a branch of a graph."""
Profile = dict[str, Any]
"""``kernels``: by name the launches in a call, and the microseconds that all of them take; those that take longest first.
``launches``, ``microseconds``, ``products``: of all, and of those the microseconds that convolve or multiply.
``busy``: how long any of them ran. ``span``: from the first one's begin to the last one's end; None where calls differ.
``last``: the kernels of the last call in their order."""


def prepare(torch: Any) -> None:
    """Let the profiler be there before any CUDA graph is: of graphs that are older it may see nothing."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    _seen(torch, lambda: torch.zeros(8, device="cuda"))


def profiled(torch: Any, case: Callable[[], Any]) -> Profile:
    """Profile some calls, one after the other."""
    return told(_seen(torch, case))


def _seen(torch: Any, case: Callable[[], Any]) -> list[Kernel]:
    case()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            case()
            torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end, event.device_resource_id)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def told(seen: Sequence[Kernel]) -> Profile:
    """Return a summary of the kernels of `CALLS` calls."""
    ran = sorted(seen, key=lambda kernel: kernel[1:3])
    if not ran:
        raise RuntimeError("the profiler saw no kernel")
    sums: dict[str, tuple[int, float]] = {}
    for name, begin, end, _ in ran:
        count, us = sums.get(name, (0, 0.0))
        sums[name] = count + 1, us + end - begin
    size = len(ran) // CALLS
    parts = [ran[number * size : (number + 1) * size] for number in range(CALLS)] if size * CALLS == len(ran) else []
    spans = sorted(max(end for *_, end, _ in part) - part[0][1] for part in parts)
    last = parts[-1] if parts else []
    return {
        "kernels": summed([(name, count, us) for name, (count, us) in sums.items()]),
        "launches": len(ran) / CALLS,
        "microseconds": round(sum(us for _, us in sums.values()) / CALLS, 2),
        "products": round(sum(us for name, (_, us) in sums.items() if PRODUCT.search(name)) / CALLS, 2),
        "busy": round(busy(ran) / CALLS, 2),
        "span": round(spans[CALLS // 2], 2) if parts else None,
        "last": [[name[:200], round(begin - last[0][1], 2), round(end - begin, 2), lane] for name, begin, end, lane in last],
    }


def busy(ran: Sequence[Kernel]) -> float:
    """Microseconds in which any of the kernels ran, which are in the order of their beginnings."""
    total, until = 0.0, float("-inf")
    for _, begin, end, _ in ran:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def summed(events: list[tuple[str, int, float]]) -> dict[str, dict[str, float]]:
    """The kernels of one call, of names, counts and microseconds of all of them."""
    ran = sorted([event for event in events if event[2] > 0], key=lambda event: -event[2])
    found = {name: {"launches": count / CALLS, "microseconds": round(us / CALLS, 2)} for name, count, us in ran[:MOST]}
    if ran[MOST:]:
        count, us = (sum(column) / CALLS for column in list(zip(*ran[MOST:], strict=True))[1:])
        found[REST] = {"launches": count, "microseconds": round(us, 2)}
    return found


def show(network: str, profiles: dict[str, Profile]) -> None:
    """Print the profiles of a network: the sums side by side, and the kernels of each."""
    rows = []
    for name, each in profiles.items():
        values = [each[key] for key in ("launches", "microseconds", "products", "busy", "span")]
        rows.append((name, *("" if value is None else f"{value:,.1f}" for value in values)))
    print_table((f"{network}, microseconds of a call", "launches", "kernels", "convolutions", "busy", "span"), rows)
    for name, each in profiles.items():
        print_table(
            (f"{network}, {name}", "launches", "microseconds"),
            [(kernel[:90], f"{took['launches']:g}", f"{took['microseconds']:,.1f}") for kernel, took in each["kernels"].items()],
        )


def main() -> int:
    for path in sys.argv[1:]:
        for network, profiles in json.loads(Path(path).read_text()).get("kernels", {}).items():
            show(network, profiles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
