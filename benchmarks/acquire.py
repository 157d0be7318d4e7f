"""Measure the cost of a handle: hits of the pool against the unavoidable calls, and against code without a pool.

The floor is the two calls that any key of (device, stream) needs: the current stream and the current device. The pool makes the
same two calls. Every case is one statement in the same kind of loop. Ratios are taken sample by sample. `less the loop`
subtracts the empty loop on both sides. Handles that code for the frontend keeps are timed in their use: bound and looked up, by
the frontend's own functions and by the functions of `handlepool.integrations.cudnn`.
"""

import sys
from typing import Any

import cudnn
from common import Case, Ratios, interleaved, paired, publish, summary
from options import arguments, parse, positive

from handlepool import HandlePool, set_default_pool
from handlepool.integrations import cudnn as integration

SLOW = 10_000  # a case that creates a handle runs so many times less often
MOST_OF_THE_FLOOR = 1.5
MOST_OF_THE_DEFAULT_HANDLE = 1 / 15
MOST_MICROSECONDS_OF_A_KEPT_HANDLE = 12.0
KEPT = {
    "kept handle": "bind(handle, pointer); handle.backend_handle",
    "kept handle, two streams in turn": "bind(handle, pointer); handle.backend_handle; bind(handle, 0); handle.backend_handle",
}


def cases(pool: HandlePool, calls: int) -> tuple[dict[str, Case], list[str]]:
    """Return the statements by name, and the statements that cannot be timed here."""
    driver = pool.driver
    own = driver.create_stream()
    null = driver.wrap_stream(0, None)
    names: dict[str, Any] = {
        "stream": driver.current_stream,
        "device": driver.current_device,
        "get_handle": pool.get_handle,
        "get_workspace": pool.get_workspace,
        "own": own,
        "pointer": own.ptr,
    }

    def create_and_destroy() -> None:
        with driver.relaxed():
            handle = driver.create_handle()
            driver.bind_handle(handle, own.ptr)
            driver.destroy_handle(handle)

    names["create_and_destroy"] = create_and_destroy
    found = {"empty loop": Case("pass", {}, calls)}
    for name, current in (("own stream", own), ("null stream", null)):

        def around(current: Any = current) -> Any:
            return current

        found[f"floor, {name}"] = Case("device(); stream()", names, calls, around)
        found[f"hit, {name}"] = Case("get_handle()", names, calls, around)
        found[f"workspace hit, {name}"] = Case("get_workspace(4096)", names, max(1, calls // 10), around)
    found["hit, stream given"] = Case("get_handle(own)", names, calls)
    found["hit, pointer given"] = Case("get_handle(pointer)", names, max(1, calls // 10))
    found["create, bind, destroy"] = Case("create_and_destroy()", names, max(1, calls // SLOW))
    for whose, kept in kept_handles(driver):
        for name, statement in KEPT.items():
            found[f"{name}, {whose}"] = Case(statement, kept | {"pointer": own.ptr}, max(1, calls // 10))
    skipped = []
    if pool.driver.name != "cuda":
        skipped.append("the frontend's own handles: they need a GPU")
        skipped.append("the frontend's default handle: needs a GPU and torch")
    else:
        try:
            import torch  # noqa: F401
            from cudnn import wrapper
            from cudnn.wrapper import get_default_handle
        except ImportError as error:
            skipped.append(f"the frontend's default handle: {error}")
        else:
            found["frontend's default handle"] = Case("default()", {"default": get_default_handle}, max(1, calls // 10))
            with integration.pooled_handles():
                default = {"default": wrapper.get_default_handle}
                wrapper.get_default_handle()
            found["default handle, the pool's"] = Case("default().backend_handle", default, max(1, calls // 10))
    return found, skipped


def kept_handles(driver: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a handle as code for the frontend has it, and the function that binds it."""
    with integration.pooled_handles():
        found = [("the pool's", {"bind": cudnn.set_stream, "handle": cudnn.create_handle()})]
    if driver.name == "cuda":
        found.append(("the frontend's", {"bind": cudnn.set_stream, "handle": cudnn.create_handle()}))
    return found


def ratios(samples: dict[str, list[float]]) -> Ratios:
    """Each pair's ratios, and the bound that the median must keep."""
    empty = samples["empty loop"]
    found = Ratios()
    for name in ("own stream", "null stream"):
        pair = samples[f"hit, {name}"], samples[f"floor, {name}"]
        found.add(f"hit / floor, {name}", paired(*pair), MOST_OF_THE_FLOOR)
        found.add(f"hit / floor, {name}, less the loop", paired(*pair, empty))
    default = "frontend's default handle"
    if default in samples:
        found.add(f"hit / {default}", paired(samples["hit, own stream"], samples[default]), MOST_OF_THE_DEFAULT_HANDLE)
    for name, lookups in (*((name, text.count("backend_handle")) for name, text in KEPT.items()), ("default handle", 1)):
        mine = samples.get(f"{name}, the pool's", [])
        if mine:
            found.add(f"a look-up of a {name}, µs", [v / lookups / 1e3 for v in mine], MOST_MICROSECONDS_OF_A_KEPT_HANDLE)
        found.compare(samples, f"{name}, the pool's", f"{name}, the frontend's")
    found.compare(samples, "default handle, the pool's", default)
    for name in ("workspace hit, own stream", "hit, stream given", "hit, pointer given", "create, bind, destroy"):
        found.add(f"{name} / hit", paired(samples[name], samples["hit, own stream"]))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=100_000, help="calls in one sample (default: %(default)s)")
    options = parse(parser, calls=20)
    with HandlePool(driver=options.driver) as pool:
        set_default_pool(pool)
        driver = pool.driver.name
        timed, skipped = cases(pool, options.calls)
        samples = interleaved(timed, options.repeats)
    times = {"nanoseconds a call": {name: summary(v) | {"calls": timed[name].calls} for name, v in samples.items()}}
    publish(options, "acquire", driver, times, ratios(samples), skipped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
