"""Requests to a network on every device: one process for all devices, and a process for each.

Each device has so many client threads. A client sends its next image when it has the scores of the last image. An array of
NumPy's goes to the device, the client's recorded program replays, and the scores come back. So the figures have the host's share
of a request, and the time that threads of one process take from each other.

The two ways take turns. Latencies are those of all requests of all samples. The scores of each client are compared with those of
the first client.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from time import perf_counter
from typing import Any

import numpy as np
from common import Ratios, pool_on_a_stream, print_table, progress, publish, summary
from devices import said, visible
from nets import NETWORKS, Parameters
from nets.parameters import channels_last
from options import arguments, parse, positive

import handlepool

ALL, EACH = "one process for all devices", "a process for each device"
MOST_ERROR = 1e-2
PATIENCE = 120
"""Seconds that clients wait for each other."""


class Client:
    """A program of a network on a device, with a stream of its own."""

    def __init__(self, driver: Any, device: int, run: Any, weights: Any, image: np.ndarray[Any, Any]) -> None:
        self.driver, self.device, self.image = driver, device, image
        with driver.device(device):
            self.stream = driver.create_stream()
            with self.stream:
                self.program = handlepool.record(lambda x: run(weights, x), driver.asarray(image), lanes=8)

    def request(self) -> np.ndarray[Any, Any]:
        """Return the scores of the image."""
        return self.driver.asnumpy(self.program(self.driver.asarray(self.image)))

    def serve(self, seconds: float, together: threading.Barrier, taken: list[float], errors: list[str]) -> None:
        """Send requests for so long, and note the seconds of each."""
        try:
            with self.driver.device(self.device), self.stream:
                self.request()
                together.wait(PATIENCE)
                now = perf_counter()
                end = now + seconds
                while now < end:
                    start = now
                    self.request()
                    now = perf_counter()
                    taken.append(now - start)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(f"a client of device {self.device} failed: {said(error)}")
            together.abort()


class Server:
    """The clients of some devices, in this process."""

    def __init__(self, driver: Any, devices: Sequence[int], options: Any) -> None:
        run = NETWORKS[options.network]
        shape = 1, 3, options.side, options.side
        image = channels_last(np.random.default_rng(1).standard_normal(shape, np.float32).astype(options.dtype))
        first = Parameters(driver.asarray, options.dtype, options.thin)
        self.clients: list[Client] = []
        with driver.device(devices[0]):
            run(first, driver.asarray(image))
        for device in devices:
            with driver.device(device):
                weights = first if device == devices[0] else first.elsewhere(driver.asarray)
                # The clients have streams of their own, which do not wait for the copies of the weights.
                driver.synchronize_stream(driver.current_stream().ptr)
                self.clients += [Client(driver, device, run, weights, image) for _ in range(options.threads)]
        self.scores = []
        for client in self.clients:
            with driver.device(client.device), client.stream:
                self.scores.append(client.request())

    def sample(self, seconds: float) -> list[float]:
        """Seconds of each request of all clients."""
        taken: list[list[float]] = [[] for _ in self.clients]
        errors: list[str] = []
        together = threading.Barrier(len(self.clients))
        threads = [
            threading.Thread(target=client.serve, args=(seconds, together, mine, errors))
            for client, mine in zip(self.clients, taken, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise SystemExit(errors[0])
        return [each for mine in taken for each in mine]

    def close(self) -> None:
        """Close the programs."""
        for client in self.clients:
            client.program.close()


def serve(pipe: Any, options: Any) -> None:
    """Serve on the first device of a process of its own."""
    with pool_on_a_stream(options.driver) as (pool, _), closing(Server(pool.driver, [0], options)) as server:
        pipe.send(server.scores)
        while (seconds := pipe.recv()) is not None:
            pipe.send(server.sample(seconds))


class Processes:
    """A server in a process for each device."""

    def __init__(self, devices: Sequence[int], options: Any) -> None:
        context, before = multiprocessing.get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices, self.pipes, self.processes = devices, [], []
        places = [visible(device) for device in devices]
        try:
            for place in places:
                os.environ["CUDA_VISIBLE_DEVICES"] = place
                here, there = context.Pipe()
                self.processes.append(context.Process(target=serve, args=(there, options), daemon=True))
                self.processes[-1].start()
                there.close()
                self.pipes.append(here)
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.scores = self._received()

    def sample(self, seconds: float) -> list[float]:
        """Seconds of each request of all clients."""
        for pipe in self.pipes:
            pipe.send(seconds)
        return self._received()

    def _received(self) -> list[Any]:
        found = []
        for device, pipe in zip(self.devices, self.pipes, strict=True):
            try:
                found += pipe.recv()
            except EOFError:
                raise SystemExit(f"the process of device {device} has ended") from None
        return found

    def close(self) -> None:
        """Let the processes end."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(60)


def check(name: str, scores: list[np.ndarray[Any, Any]], right: np.ndarray[Any, Any]) -> None:
    """Stop where a client has other scores than the first one."""
    for each in scores:
        wrong = np.linalg.norm(each.astype(float) - right) / np.linalg.norm(right)
        if not wrong < MOST_ERROR:
            raise SystemExit(f"{name}: relative error {wrong:.1e}; its times would mean nothing")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--network", choices=tuple(NETWORKS), default="googlenet", help="(default: %(default)s)")
    parser.add_argument("--devices", type=int, nargs="+", help="ordinals (default: all)")
    parser.add_argument("--threads", type=positive, default=2, help="clients of each device (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a sample lasts (default: %(default)s)")
    parser.add_argument("--side", type=positive, default=224, help="pixels of an image (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the channels, for trials (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    parser.set_defaults(repeats=7)
    options = parse(parser, small={"side": 33, "thin": 32, "dtype": "float32", "network": "ensemble", "seconds": 0.05})
    with pool_on_a_stream(options.driver) as (pool, _), ExitStack() as stack:
        driver = pool.driver
        options.driver = driver.name
        devices = list(range(driver.device_count())) if options.devices is None else options.devices
        ways: dict[str, Any] = {ALL: stack.enter_context(closing(Server(driver, devices, options)))}
        right = ways[ALL].scores[0].astype(float)
        ways[EACH] = stack.enter_context(closing(Processes(devices, options)))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        latencies: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in ways.items():
            check(name, way.scores, right)
        for repeat in progress(range(options.repeats + 1)):
            for name, way in ways.items():
                taken = way.sample(options.seconds)
                if repeat:  # the first round warms up
                    rates[name].append(len(taken) / options.seconds)
                    latencies[name] += [each * 1e6 for each in taken]
        ratios = Ratios()
        ratios.compare(rates, EACH, ALL, None, f", requests a second, {len(devices)} devices")
        times = {"microseconds of a request": {name: summary(values) for name, values in latencies.items()}}
        served = {
            name: {"requests_a_second": summary(rates[name]), "p50": found[0], "p99": found[1]}
            for name in ways
            for found in [[round(float(each), 1) for each in np.percentile(latencies[name], (50, 99))]]
        }
        rows = [(name, f"{v['requests_a_second']['median']:,.0f}", v["p50"], v["p99"]) for name, v in served.items()]
        print_table(("device_serving", "requests a second", "p50 µs", "p99 µs"), rows)
        more = {"devices": len(devices), "threads": options.threads, "network": options.network, "served": served}
        publish(options, "device_serving", driver.name, times, ratios, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
