"""Run items on several devices through a chain of convolutions, in one process and in a process for each, resident and host to
host.

`--way` selects from the ways to run items:

    eager                   one thread, the devices in turn; and a thread for each device
    recorded                one thread, a recorded program for each device, replayed in turn
    processes               a process for each device, which replays its program
    spread                  `handlepool.spread`, one thread
    dask                    `map_tiles` on a cluster with a worker for each device, if Dask is installed

*Resident*: items lie on a device, and results stay there. *Host to host*: items and results are NumPy's. Processes then run a
`spread` of one device each, and Dask has the arrays in the workers' memory. For comparison, one device runs alone, and the bus
runs the copies alone, between page-locked memory and all devices at once. An item of one convolution shows the host cost of
`spread`: the time that its thread computes.

All other times are wall times for an item over all devices. A way that keeps items in flight is warm when the clock starts, and
as full when the clock stops. Before a way is timed, its results are compared bit for bit with the result of one device: one
result of each device, or all results in flight. The results are written after each length of an item, with the least length
from which on `spread` over all devices is quicker than one device. Short lengths, as --items 0.05 0.1 0.2 2, show that point.

A device on which an item fails before a length is timed, for example without memory, is left out from there on. A later failure
ends that length. The results report both, and the exit status is 1.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from common import Ratios, no_collector, pool_on_a_stream, progress, publish, summary, write
from options import arguments, parse
from work import TINY, Shape

import handlepool

WAYS = ("eager", "recorded", "processes", "spread", "dask")
ONE, ONE_HOST = "one device, recorded", "one device, spread, host to host"
BUS = "the bus alone, host to host"
HOST = "spread, what its thread takes of the host"
IN_FLIGHT = 2
MOST_CALLS = 5000
TASKS = 200
"""For each of Dask's workers in a sample: few items would bear all that a job takes beside them."""
MOST_HOST_MICROSECONDS = 60.0
FROM_MILLISECONDS = {"spread": 2.0, "spread, host to host": 2.0, "dask, host to host": 20.0}
"""From which length of an item on there is a bound."""
SCALING = {"spread": 0.95, "spread, host to host": 0.9, "dask, host to host": 0.9}
"""At least so many times one device, for each device, where `AT_LEAST` has no number of devices."""
AT_LEAST = {"spread": {4: 3.7, 8: 7.2}, "spread, host to host": {4: 3.4, 8: 6.0}, "dask, host to host": {4: 3.4, 8: 6.0}}
"""At least so many times one device, by the number of devices."""
ALONE = "device {}, alone"
FAILURES = (handlepool.HandlePoolError, RuntimeError, MemoryError, OSError)
"""The errors of a device that is lost or full, and of a process that has ended."""


def chain(calls: int) -> Callable[[Any, Any], Any]:
    """So many convolutions, one after the other."""

    def network(x: Any, w: Any) -> Any:
        import handlepool

        for _ in range(calls):
            x = handlepool.conv2d(x, w, padding=w.shape[-1] // 2, activation="tanh", deterministic=True)
        return x

    return network


class Work:
    """The items, the weights, and the right result, on the host."""

    def __init__(self, driver: Any, shape: Shape) -> None:
        rng = np.random.default_rng(0)
        self.shape = shape
        self.image, self.weights = (driver.asnumpy(make(driver, rng)) for make in (shape.image, shape.filter))
        if shape.layout == "NHWC":
            self.image, self.weights = map(_channels_last, (self.image, self.weights))

    def calls(self, driver: Any, milliseconds: float) -> int:
        """How many convolutions take so long."""
        some = 16
        with handlepool.record(chain(some), driver.asarray(self.image), driver.asarray(self.weights)) as program:
            taken = min(_until_done(driver, [driver.current_device()], program.replay) for _ in range(10))
        return max(1, min(MOST_CALLS, round(milliseconds / 1e3 / (taken / some))))


def _channels_last(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def _until_done(driver: Any, devices: Sequence[int], run: Callable[[], object], collects: bool = False) -> float:
    """Seconds until all is done on this thread's current streams of these devices."""
    with nullcontext() if collects else no_collector():
        start = perf_counter()
        run()
        for device in devices:
            with driver.device(device):
                driver.synchronize_stream(driver.current_stream().ptr)
        return perf_counter() - start


def fits(driver: Any, work: Work, devices: Sequence[int], left_out: dict[int, str]) -> list[int]:
    """Return the devices on which an item can be computed, and note why the others cannot."""
    found = []
    for device in devices:
        try:
            with closing(Resident(driver, work, 1, [device])) as resident:
                resident.results(partial(resident.recorded, [device]))
            found.append(device)
        except handlepool.PoisonedContextError:
            raise
        except FAILURES as error:
            left_out[device] = said(error)
            print(f"device {device} is left out: {left_out[device]}", flush=True)
    return found


def said(error: BaseException) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


class Resident:
    """Items that lie on each device, with a program for each."""

    def __init__(self, driver: Any, work: Work, calls: int, devices: Sequence[int]) -> None:
        self.driver, self.devices, self.network = driver, list(devices), chain(calls)
        self.operands, self.programs, self.last = {}, {}, {}
        for device in devices:
            with driver.device(device):
                self.operands[device] = driver.asarray(work.image), driver.asarray(work.weights)
                self.programs[device] = handlepool.record(self.network, *self.operands[device])

    def results(self, run: Callable[[int], object]) -> list[np.ndarray[Any, Any]]:
        """Of each device, after items were run, one on each."""
        self.last.clear()
        run(len(self.devices))
        found = []
        for device in self.devices:
            with self.driver.device(device):
                found.append(self.driver.asnumpy(self.last[device]))
        return found

    def eager(self, devices: Sequence[int], count: int) -> None:
        """Call the function for each item, on the devices in turn."""
        for device in islice(cycle(devices), count):
            with self.driver.device(device):
                self.last[device] = self.network(*self.operands[device])

    def threads(self, count: int) -> None:
        """The same from a thread for each device, which waits for its own stream."""
        each = -(-count // len(self.devices))

        def run(device: int) -> None:
            _until_done(self.driver, [device], partial(self.eager, [device], each), collects=True)

        with ThreadPoolExecutor(len(self.devices)) as threads:
            # The loop raises the error of a thread.
            for _ in threads.map(run, self.devices):
                pass

    def recorded(self, devices: Sequence[int], count: int) -> None:
        """Replay the program of each device in turn."""
        for device in islice(cycle(devices), count):
            with self.driver.device(device):
                self.programs[device].replay()
                self.last[device] = self.programs[device].outputs

    def timed(self, run: Callable[[int], object], devices: Sequence[int], count: int) -> float:
        """Seconds for so many items."""
        return _until_done(self.driver, devices, partial(run, count))

    def close(self) -> None:
        """Close the programs."""
        for program in self.programs.values():
            program.close()


class Spreading:
    """A spread that goes on, of which samples take results."""

    def __init__(self, work: Work, calls: int, devices: Sequence[int], items: Sequence[Any], to: str | None) -> None:
        self.full = 2 * IN_FLIGHT * len(devices) + 1  # results that may wait
        endless = cycle(items)
        options = {"devices": devices, "in_flight": IN_FLIGHT, "to": to, "lanes": None}
        self.results = handlepool.spread(chain(calls), endless, shared=(work.weights,), **options)

    def warm(self) -> list[Any]:
        """Take the waiting results."""
        return [next(self.results) for _ in range(self.full)]

    def timed(self, count: int, clock: Callable[[], float] = perf_counter) -> float:
        """Seconds for so many items, by a clock."""
        with no_collector():  # it collects first, and the devices would go on meanwhile
            self.warm()
            start = clock()
            for _ in range(count):
                next(self.results)
            return clock() - start

    def close(self) -> None:
        """End it."""
        self.results.close()


def visible(device: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process of one device."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[device].strip() if given else str(device)


def serve(pipe: Any, driver: str, shape: Shape, calls: int) -> None:
    """Run the requested work in a process of its own, on its first device."""
    with pool_on_a_stream(driver) as (pool, _), ExitStack() as stack:
        work = Work(pool.driver, shape)
        resident = stack.enter_context(closing(Resident(pool.driver, work, calls, [0])))
        host = stack.enter_context(closing(Spreading(work, calls, [0], [work.image] * 2, "host")))
        pipe.send((resident.results(partial(resident.recorded, [0])), host.warm()))
        while (asked := pipe.recv()) is not None:
            what, count = asked
            if what == "warm":
                host.warm()
            elif what == "host":
                for _ in range(count):
                    next(host.results)
            else:
                resident.timed(partial(resident.recorded, [0]), [0], count)
            pipe.send(None)


class Processes:
    """A process for each device."""

    def __init__(self, driver: str, shape: Shape, calls: int, devices: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        visibles = [visible(device) for device in devices]
        self.processes, self.pipes = [], []
        try:
            for each in visibles:
                os.environ["CUDA_VISIBLE_DEVICES"] = each
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(there, driver, shape, calls), daemon=True)
                process.start()
                there.close()  # so that the end of the process is the pipe's
                self.processes.append(process)
                self.pipes.append(here)
            self.devices = list(devices)
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.found = self._received()

    def timed(self, what: str, count: int) -> float:
        """Seconds for so many items over all."""
        if what == "host":
            self._ask("warm", 0)
        start = perf_counter()
        self._ask(what, -(-count // len(self.pipes)))
        return perf_counter() - start

    def _ask(self, what: str, count: int) -> None:
        for pipe in self.pipes:
            pipe.send((what, count))
        self._received()

    def _received(self) -> list[Any]:
        found = []
        for device, pipe in zip(self.devices, self.pipes, strict=True):
            try:
                found.append(pipe.recv())
            except EOFError:
                raise ChildProcessError(f"the process of device {device} has ended") from None
        return found

    def close(self) -> None:
        """Let them end."""
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:  # it is gone
                pass
        for process in self.processes:
            process.join(60)


class Cluster:
    """A worker of Dask's for each device, whose results stay in the workers' memory on the host."""

    def __init__(self, driver: str, devices: Sequence[int]) -> None:
        import distributed

        from handlepool.integrations.dask import PoolPlugin

        self.distributed = distributed
        options = {"nthreads": 2, "silence_logs": 50}
        nannies = [options | {"env": {"CUDA_VISIBLE_DEVICES": visible(device)}} for device in devices]
        workers = {name: {"cls": distributed.Nanny, "options": each} for name, each in enumerate(nannies)}
        scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": ":0"}}
        self.cluster = distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50)
        self.client = distributed.Client(self.cluster)
        self.client.register_plugin(PoolPlugin(driver=driver))
        self.samples = 0

    def timed(self, network: Any, work: Work, count: int, found: list[Any] | None = None) -> float:
        """Return the seconds for so many tiles; the tiles' results go into a list."""
        import dask
        import dask.array as da

        from handlepool.integrations.dask import map_tiles

        self.samples += 1
        order = sorted(range(4), key=lambda axis: -work.image.strides[axis])
        tile = np.ascontiguousarray(work.image.transpose(order))  # on its way Dask makes row-major arrays of all others
        extents, kind = tile.shape, tile.dtype
        empty = np.empty((0,) * 4, kind)
        zeros = da.zeros((extents[0] * count, *extents[1:]), chunks=extents, dtype=kind)
        image = dask.delayed(tile)
        x = zeros.map_blocks(_given, image=image, sample=self.samples, dtype=kind, meta=empty).persist()
        self.distributed.wait(x)
        y = map_tiles(_in_order(network, order), x, depth=0, shared=(work.weights,), lanes=None)
        start = perf_counter()
        y = y.persist()
        self.distributed.wait(y)
        taken = perf_counter() - start
        if found is not None:
            found += [tile.transpose(np.argsort(order)) for tile in np.split(y.compute(), count)]
        return taken

    def close(self) -> None:
        """End the workers."""
        self.client.close()
        self.cluster.close()


def _given(zeros: Any, image: Any, sample: int) -> Any:
    """An item in a worker's memory, of another name in each sample."""
    return image.copy()


def _in_order(network: Any, order: Sequence[int]) -> Any:
    """The same for arrays whose axes are in the order of the memory."""
    back = [order.index(axis) for axis in range(len(order))]

    def run(x: Any, w: Any) -> Any:
        return network(x.transpose(back), w).transpose(order)

    return run


def bus(driver: Any, work: Work, devices: Sequence[int]) -> Callable[[int], float]:
    """Seconds that the copies of so many items take, in both directions at once, on all devices at once."""
    image, places = work.image, []
    for device in devices:
        with driver.device(device):
            there = driver.asarray(image), driver.asarray(image)
            streams = [driver.create_stream() for _ in range(2)]
            if driver.name == "cuda":
                import cupy

                memory = [cupy.cuda.alloc_pinned_memory(image.nbytes) for _ in range(2)]
                runtime = cupy.cuda.runtime
                to, back = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
                args = [(there[0].data.ptr, memory[0].ptr, to), (memory[1].ptr, there[1].data.ptr, back)]
                calls = [
                    partial(runtime.memcpyAsync, *pair, image.nbytes, kind, stream.ptr)
                    for (*pair, kind), stream in zip(args, streams, strict=True)
                ]
                places.append((device, streams, calls, (there, memory)))
            else:
                places.append((device, streams, [partial(driver.asarray, image), partial(driver.asnumpy, there[1])], there))

    def timed(count: int) -> float:
        with no_collector():
            start = perf_counter()
            for _ in range(-(-count // len(places))):
                for device, _, calls, _ in places:
                    with driver.device(device):
                        for call in calls:
                            call()
            for device, streams, _, _ in places:
                with driver.device(device):
                    for stream in streams:
                        driver.synchronize_stream(stream.ptr)
            return perf_counter() - start

    return timed


def cases_of(
    stack: ExitStack, driver: Any, work: Work, calls: int, count: int, options: Any, skipped: list[str]
) -> dict[str, tuple[Callable[[int], float], int]]:
    """Return the functions to time, with the items of a sample, once their result was right."""
    devices, cases = options.devices, {}
    resident = stack.enter_context(closing(Resident(driver, work, calls, devices)))
    (right, *_) = resident.results(partial(resident.recorded, devices))

    def add(name: str, run: Callable[[int], float], results: Sequence[Any] = (), number: int = count) -> None:
        for result in results:
            if result.tobytes() != right.tobytes():
                raise SystemExit(f"{name}: another result than that of one device; its times would mean nothing")
        cases[name] = run, number

    def spreading(on: Sequence[int], items: Sequence[Any], to: str | None) -> tuple[Any, list[Any]]:
        made = stack.enter_context(closing(Spreading(work, calls, on, items, to)))
        values = made.warm()
        if to is None:
            for place, value in enumerate(values):
                with driver.device(driver.array_device(value)):
                    values[place] = driver.asnumpy(value)
        return made.timed, values

    first = devices[:1]
    one = max(2, count // len(devices))
    add(ONE, partial(resident.timed, partial(resident.recorded, first), first), number=one)
    for device in devices[1:] if "recorded" in options.way else ():
        alone = partial(resident.timed, partial(resident.recorded, [device]), [device])
        add(ALONE.format(device), alone, number=max(2, one // 4))
    if "eager" in options.way:
        eager = partial(resident.eager, devices)
        add("eager", partial(resident.timed, eager, devices), resident.results(eager))
        add("eager, a thread a device", partial(resident.timed, resident.threads, devices), resident.results(resident.threads))
    if "recorded" in options.way:
        recorded = partial(resident.recorded, devices)
        add("recorded", partial(resident.timed, recorded, devices), resident.results(recorded))
    add(BUS, bus(driver, work, devices))
    if "spread" in options.way:
        run, values = spreading(devices, [resident.operands[device][0] for device in devices], None)
        add("spread", run, values)
        if calls == 1:  # else it waits, which may count as computing
            add(HOST, partial(run, clock=thread_time))
        add(ONE_HOST, *spreading(first, [work.image] * 2, "host"), one)
        add("spread, host to host", *spreading(devices, [work.image] * 2, "host"))
    if "processes" in options.way:
        processes = stack.enter_context(closing(Processes(driver.name, work.shape, calls, devices)))
        add("processes", partial(processes.timed, "resident"), [each for found, _ in processes.found for each in found])
        add("processes, host to host", partial(processes.timed, "host"), [each for _, found in processes.found for each in found])
    if "dask" in options.way:
        try:
            cluster = stack.enter_context(closing(Cluster(driver.name, devices)))
        except ImportError as error:
            reason = f"dask, which needs handlepool[dask]: {error}"
            skipped += [] if reason in skipped else [reason]
        else:
            network, found = chain(calls), []
            cluster.timed(network, work, len(devices), found)
            add("dask, host to host", partial(cluster.timed, network, work), found, TASKS * len(devices))
    return cases


def sampled(cases: dict[str, tuple[Callable[[int], float], int]], repeats: int) -> dict[str, list[float]]:
    """Microseconds for an item, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in progress(range(repeats + 1)):
        for name, (run, count) in cases.items():
            taken = run(count) / count * 1e6
            if repeat:  # the first round warms up
                samples[name].append(taken)
    return samples


def compare(ratios: Ratios, samples: dict[str, list[float]], milliseconds: float, count: int) -> None:
    """Each way over one device, with a bound where there is one and the bus allows it."""
    one, copies = (statistics.median(samples[name]) for name in (ONE, BUS))
    for name in samples:
        bound = None
        if count > 1 and milliseconds >= FROM_MILLISECONDS.get(name, math.inf):
            bound = 1 / AT_LEAST[name].get(count, SCALING[name] * count)
            bound = None if "host" in name and copies > bound * one else bound
        if name not in (ONE, BUS, HOST) and not name.startswith("device "):
            ratios.compare(samples, name, ONE, bound, f", {milliseconds:g} ms, {count} devices")


def wins_from(wins: dict[float, bool]) -> float | None:
    """From which length of an item on `spread` over all devices is quicker than one device, of those that were measured."""
    found = None
    for milliseconds in sorted(wins, reverse=True):
        if not wins[milliseconds]:
            break
        found = milliseconds
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Dask's own warnings are of no matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--devices", type=int, nargs="+", help="ordinals (default: all)")
    parser.add_argument("--items", type=float, nargs="+", default=[0.2, 2, 20], metavar="MS", help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="that a sample lasts, about; Dask's longer (default: %(default)s)"
    )
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1, 256, 28, 256, 3, "float16", "NHWC"))
    options = parse(parser, small={"shape": TINY, "items": [0.2, 2]}, seconds=0.01, items=[0.2])
    times: dict[str, Any] = {}
    ratios, skipped, more = Ratios(), [], {}
    wins: dict[float, bool] = {}
    left_out: dict[int, str] = {}
    with pool_on_a_stream(options.driver) as (pool, _), quiet():
        driver = pool.driver
        seen = driver.device_count()
        options.devices = list(range(seen)) if options.devices is None else options.devices
        if len({*options.devices}) < len(options.devices) or not {*options.devices} <= {*range(seen)}:
            parser.error(f"--devices {options.devices}: name each once; there are 0 to {seen - 1}")
        work = Work(driver, options.shape)
        more = {"shape": str(options.shape), "item_bytes": work.image.nbytes, "calls": {}, "left_out": left_out}
        failed = False
        for milliseconds in (0.0, *options.items):  # 0: one convolution
            heading = f"items of {milliseconds:g} ms, microseconds an item"
            chosen = options
            if not milliseconds:
                heading = "items of one convolution, microseconds an item"
                chosen = argparse.Namespace(**{**vars(options), "way": [way for way in options.way if way == "spread"]})
            try:
                devices = fits(driver, work, options.devices, left_out)
                if not devices:
                    skipped.append(f"{heading}: no device is left")
                    break
                options.devices = chosen.devices = devices
                more["devices"] = len(devices)
                with driver.device(devices[0]):
                    calls = work.calls(driver, milliseconds)
                    # From host to host a convolution takes longer than it computes.
                    lasts = max(milliseconds / 1e3, 5e-5) if milliseconds else 2e-4
                    count = len(devices) * max(4, round(options.seconds / lasts))
                    with ExitStack() as stack:
                        samples = sampled(cases_of(stack, driver, work, calls, count, chosen, skipped), options.repeats)
            except FAILURES as error:
                failed = True
                skipped.append(f"{heading}: {said(error)}")
                print(f"not timed: {skipped[-1]}", flush=True)
                if isinstance(error, handlepool.PoisonedContextError):
                    break
                continue
            times[heading] = {name: summary(values) for name, values in samples.items()}
            more["calls"][heading] = calls
            if milliseconds:
                compare(ratios, samples, milliseconds, len(devices))
                if "spread" in samples:
                    wins[milliseconds] = statistics.median(samples["spread"]) < statistics.median(samples[ONE])
                    more["spread_wins_from_ms"] = wins_from(wins)
            elif HOST in samples:
                shares = [taken / MOST_HOST_MICROSECONDS for taken in samples[HOST]]
                ratios.add(f"an item of one convolution, {HOST} / {MOST_HOST_MICROSECONDS:g} microseconds", shares, 1.0)
            write(options, "devices", driver.name, times, ratios, skipped, **more)
        publish(options, "devices", driver.name, times, ratios, skipped, **more)
    return int(failed or bool(left_out) or not times)


if __name__ == "__main__":
    sys.exit(main())
