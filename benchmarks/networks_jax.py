"""Time the networks of `networks.py` in JAX, in a process of its own, with ours beside them. Needs a GPU.

JAX runs with the flags that were found to be its best: XLA puts all possible work into a CUDA graph, and the graph overlaps
kernels. It compiles with weights in cuDNN's preferred layout, in the requested type.

*device* is taken in the same way for all cases, because JAX exposes no stream. A kernel that fills the GPU holds all work back
until the host has launched one call, or several. A call's time on the device is the additional time of several calls. *wall* is
the time of a call and of the wait for its end.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median
from time import perf_counter_ns
from typing import Any

import kernels
from common import Ratios, no_collector, pool_on_a_stream, progress, publish, regions, write
from nets.kinds import Jax
from networks import (
    ANY,
    ONE_LANE,
    PLANS,
    Network,
    Results,
    add_tuned,
    add_tuned_plans,
    best_of_ours,
    network_arguments,
    parse_network,
)

FLAGS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION,"
    "CONVOLUTION --xla_gpu_graph_min_graph_size=1 --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
)
JAX = "JAX"
MOST_OF_JAX = {"googlenet": (0.75, 1.05)}
"""The bounds of our time on the device relative to JAX: tuned, and on one lane. At batch 1 in float16."""
MORE = 8
"""Calls more than one, whose time on the device is divided by their number."""
SHORTEST_HOLD, LONGEST_HOLD = 1000.0, 200_000.0
"""Microseconds."""
HOLD = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(const long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


class Traced:
    """Parameters whose filters JAX has channels-last in memory, as `nets.Parameters` gives them."""

    def __init__(self, p: Any, jax: Any) -> None:
        self._p = p
        self._transpose = partial(jax.numpy.transpose, axes=(0, 3, 1, 2))

    def conv(self, *layer: Any) -> tuple[Any, Any]:
        """Filters by their usual axes, and their bias."""
        w, b = self._p.conv(*layer)
        return self._transpose(w), b

    def transposed(self, *layer: Any) -> Any:
        """Filters of a transposed convolution."""
        return self._transpose(self._p.conv(*layer)[0])

    def linear(self, *layer: Any) -> Any:
        """A matrix, and its bias."""
        return self._p.linear(*layer)


def last(values: Any) -> Any:
    """Images or filters with their channels in the last axis; anything else is as it was."""
    return values.transpose(0, 2, 3, 1) if values.ndim == 4 else values


def compiled(jax: Any, network: Network) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a function that calls a network compiled by JAX without a wait, and a function that returns its scores as host
    arrays.
    """
    place = partial(jax.device_put, device=jax.devices()[0])
    p = network.p.elsewhere(lambda values: place(last(values)))
    x = place(last(network.driver.asnumpy(network.x)))

    @jax.jit
    def run(x: Any) -> Any:
        return network.run(Traced(p, jax), x.transpose(0, 3, 1, 2), Jax(jax))

    case = partial(run, x)
    jax.block_until_ready(case())
    return case, lambda: jax.device_get(case())


class Held:
    """Take times on the device of calls that the host launches while the GPU is held.

    Parameters
    ----------
    cases : dict
        By name a function that launches a call, and a function that waits for all launched calls.
    """

    def __init__(self, cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], stream: Any) -> None:
        import cupy

        self._cases = cases
        self._stream = cupy.cuda.ExternalStream(stream.ptr)
        self._kernel = cupy.RawKernel(HOLD, "hold")
        # As many threads as the GPU can have at once: nothing else starts beside them.
        device = cupy.cuda.Device().attributes
        self._blocks = device["MultiProcessorCount"] * (device["MaxThreadsPerMultiProcessor"] // 1024)
        self._hold: dict[str, float] = {}

    def samples(self, repeats: int) -> dict[str, list[float]]:
        """Microseconds a call, ``repeats`` samples of each, in turns; nothing where the host does not get ahead of the GPU."""
        found: dict[str, list[float]] = {name: [] for name in self._cases}
        # Some threads of JAX's launch after the call has returned: a hold is so long that all calls could be done in it.
        self._hold = {name: max(SHORTEST_HOLD, 1.5 * (1 + MORE) * self._alone(name)) for name in self._cases}
        for repeat in progress(range(repeats + 1)):
            with no_collector():
                for name in list(found):
                    taken = self._sample(name)
                    if taken is None:
                        del found[name]
                    elif repeat:  # the first round warms up
                        found[name].append(taken)
        return found

    def _alone(self, name: str) -> float:
        """Microseconds of a call and the wait for it, with nothing held."""
        call, wait = self._cases[name]
        taken = []
        for _ in range(MORE):
            wait()
            before = perf_counter_ns()
            call()
            wait()
            taken.append((perf_counter_ns() - before) / 1e3)
        return median(taken)

    def _sample(self, name: str) -> float | None:
        while self._hold[name] <= LONGEST_HOLD:
            several, one = self._time(name, 1 + MORE), self._time(name, 1)
            if several is not None and one is not None:
                return (several - one) / MORE
            self._hold[name] *= 2
        return None

    def _time(self, name: str, count: int) -> float | None:
        """Microseconds from before the hold to the end of so many calls; None where the hold ended before they were launched."""
        call, wait = self._cases[name]
        wait()
        self._stream.synchronize()
        before = perf_counter_ns()
        with self._stream:
            self._kernel((self._blocks,), (1024,), (int(self._hold[name] * 1000),))
        kept = [call() for _ in range(count)]
        launched = perf_counter_ns()
        self._stream.synchronize()
        wait()
        ended = perf_counter_ns()
        del kept
        return (ended - before) / 1e3 if launched - before < 0.8 * self._hold[name] * 1e3 else None


def compare(ratios: Ratios, network: Network, samples: dict[str, dict[str, list[float]]], options: Any) -> None:
    """Ours over JAX's, and ours on one lane."""
    bounded = (options.batch, options.dtype, options.side, options.thin) == (1, "float16", 224, 1)
    ours = best_of_ours(samples["device"])
    one = ONE_LANE + PLANS if ours.endswith(PLANS) else ONE_LANE
    bounds = MOST_OF_JAX.get(network.name, (None, None)) if bounded else (None, None)
    for clock, (most, most_of_one) in (("device", bounds), ("wall", (None, None))):
        ratios.compare(samples[clock], ours, JAX, most, f", {network.name}, {clock}")
        ratios.compare(samples[clock], one, JAX, most_of_one, f", {network.name}, {clock}")


def waited(network: Network, waits: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], None]]:
    """Each case with the wait for its end."""

    def whole(call: Callable[[], Any], wait: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            wait()

        return run

    return {name: whole(call, waits[name]) for name, call in network.cases.items()}


def timed(network: Network, waits: dict[str, Callable[[], Any]], options: Any, driver: Any, stream: Any) -> dict[str, Any]:
    """Samples by clock and case."""
    walls = regions(waited(network, waits), options.repeats, options.calls, driver, stream)["wall"]
    held = Held({name: (call, waits[name]) for name, call in network.cases.items()}, stream)
    return {"device": held.samples(options.repeats), "wall": walls}


def main() -> int:
    parser = network_arguments(__doc__)
    parser.add_argument("--flags", default=FLAGS, help="XLA's (default: %(default)s)")
    options = parse_network(parser)
    options.way = ["plans"]
    os.environ["XLA_FLAGS"] = options.flags
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    results = Results()
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        if driver.name != "cuda":
            parser.error("JAX is compared on a GPU alone")
        try:
            import jax
        except ImportError as error:
            parser.error(f"JAX is not here: {error}")
        sizes = {key: getattr(options, key) for key in ("batch", "side", "thin", "dtype", "lanes", "goal", "flags")}
        sizes |= {"jax": jax.__version__}
        torch = import_module("torch") if options.profile else None  # of which the profiler alone is used
        if torch is not None:
            kernels.prepare(torch)
        for name in options.network:
            network = Network(driver, name, options)
            add_tuned(network, options)
            add_tuned_plans(network, None, options)
            ours = partial(driver.synchronize_stream, stream.ptr)
            waits: dict[str, Callable[[], Any]] = dict.fromkeys(network.cases, ours)
            latest: list[Any] = []

            def make(network: Network = network, latest: list[Any] = latest) -> Any:
                call, scores = compiled(jax, network)

                def launched() -> None:
                    latest[:] = [call()]

                return launched, scores

            network.add(JAX, make, ANY)
            if JAX in network.cases:
                waits[JAX] = partial(jax.block_until_ready, latest)
            samples = timed(network, waits, options, driver, stream)
            late = [case for case in network.cases if case not in samples["device"]]
            network.skipped += [f"{name}, {case}, on the device: the host does not get ahead of the GPU" for case in late]
            results.add(network, samples)
            if torch is not None:
                write(
                    options, "networks_jax", driver.name, results.times, results.ratios, results.skipped, **results.more, **sizes
                )
                results.profile(network, waited(network, waits), torch)
            compare(results.ratios, network, samples, options)
            write(options, "networks_jax", driver.name, results.times, results.ratios, results.skipped, **results.more, **sizes)
        publish(options, "networks_jax", driver.name, results.times, results.ratios, results.skipped, **results.more, **sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
