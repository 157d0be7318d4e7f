"""The host's time of a program's call and of a recorded function's, against torch's `copy_`, `replay` and `clone`.

Each call takes new inputs, launches the same few additions, and returns new outputs: with one input and output, and with ten.
Torch replays a CUDA graph of its own that was captured of as many additions. The arrays are small, so that the device waits for
the host. The cost of a guard comes from two functions that reach 10 and 110 arrays.
"""

import sys
from typing import Any

import numpy as np
from common import Case, Ratios, interleaved, pool_on_a_stream, publish, summary, synchronised
from options import arguments, parse, positive

import handlepool

FEW, MANY = 1, 10
MOST = {FEW: 1.2, MANY: 1.5}
MOST_OF_A_GUARD = 50.0
"""Nanoseconds."""
GUARDS, MORE = 10, 100
SHAPE = (1, 8, 8, 8)


def array(driver: Any, value: float) -> Any:
    """An array of one value, in float32."""
    return driver.asarray(np.full(SHAPE, value, np.float32))


def function(driver: Any, count: int, guards: int) -> Any:
    """A function of so many arrays that returns as many, and reaches so many arrays."""
    weights = [array(driver, number) for number in range(guards)]

    def network(*xs: Any) -> Any:
        ys = [handlepool.add(x, weights[number % guards]) for number, x in enumerate(xs)]
        return ys[0] if count == 1 else ys

    return network


def torch_case(torch: Any, count: int, calls: dict[str, Any]) -> str:
    """A graph of torch's of as many additions; the statement that calls it."""
    weight = torch.full(SHAPE, 1.0, device="cuda")
    inputs = [torch.zeros(SHAPE, device="cuda") for _ in range(count)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = [x + weight for x in inputs]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [x + weight for x in inputs]
    given = [torch.ones(SHAPE, device="cuda") for _ in range(count)]

    def call(*xs: Any) -> Any:
        for target, x in zip(inputs, xs, strict=True):
            target.copy_(x)
        graph.replay()
        return [y.clone() for y in outputs]

    one, output = inputs[0], outputs[0]

    def single(x: Any) -> Any:
        one.copy_(x)
        graph.replay()
        return output.clone()

    calls[f"torch_{count}"], calls[f"torch_xs_{count}"] = single if count == 1 else call, given
    return f"torch_{count}(*torch_xs_{count})"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=200, help="calls in one sample (default: %(default)s)")
    options = parse(parser, calls=3)
    skipped: list[str] = []
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        names: dict[str, Any] = {}
        statements: dict[str, str] = {}
        kept: list[Any] = []
        for count in (FEW, MANY):
            network = function(driver, count, GUARDS)
            names[f"xs_{count}"] = given = [array(driver, 2) for _ in range(count)]
            program = handlepool.record(network, *[array(driver, 1) for _ in range(count)], lanes=8)
            names[f"program_{count}"] = program
            names[f"recorded_{count}"] = handlepool.recorded(network)
            kept.append(program)
            for name in ("program", "recorded"):
                call = names[f"{name}_{count}"]
                for _ in range(3):
                    found = call(*given)
                for number, y in enumerate([found] if count == 1 else found):
                    assert np.all(driver.asnumpy(y) == 2 + number), f"{name} with {count} inputs is wrong"
                statements[f"{name}, {count} in and out"] = f"{name}_{count}(*xs_{count})"
        for guards in (GUARDS, GUARDS + MORE):
            names[f"guarded_{guards}"] = guarded = handlepool.recorded(function(driver, FEW, guards))
            for _ in range(3):
                guarded(*names[f"xs_{FEW}"])
            statements[f"recorded, {guards} guards"] = f"guarded_{guards}(*xs_{FEW})"
        if driver.name == "cuda":
            try:
                import torch
            except ImportError:
                skipped.append("torch: not installed")
            else:
                for count in (FEW, MANY):
                    statement = torch_case(torch, count, names)
                    statements[f"torch's copy_, replay and clone, {count} in and out"] = statement
        else:
            skipped.append("torch's graphs: on a GPU alone")
        around = synchronised(driver, stream)
        samples = interleaved({n: Case(s, names, options.calls, around) for n, s in statements.items()}, options.repeats)
        ratios = Ratios()
        bounded = driver.name == "cuda" and not options.quick
        for count in (FEW, MANY):
            theirs = f"torch's copy_, replay and clone, {count} in and out"
            for name in ("program", "recorded"):
                if theirs in samples:
                    ratios.compare(samples, f"{name}, {count} in and out", theirs, MOST[count] if bounded else None, ", host")
        pairs = zip(samples[f"recorded, {GUARDS + MORE} guards"], samples[f"recorded, {GUARDS} guards"], strict=True)
        each = [(many - few) / MORE for many, few in pairs]
        ratios.add("each further guard, nanoseconds", each, MOST_OF_A_GUARD if bounded else None)
        times = {"microseconds a call": {name: summary([each / 1e3 for each in values]) for name, values in samples.items()}}
        publish(options, "recorded_host", driver.name, times, ratios, skipped, calls=options.calls)
        for program in kept:
            program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
