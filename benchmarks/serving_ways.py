"""The ways of serving a model that `serving.py` compares. Each makes clients, whose threads make requests.

A request copies its image in, computes, copies the scores out and waits for them. Each client has a stream of its own. The models
of torch share the weights of ours.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
from compiled import module_of
from nets import NETWORKS, Parameters
from nets.parameters import channels_last
from peers import array_of, tensor

import handlepool

Request = Callable[[], Any]
Client = Callable[[], AbstractContextManager[Request]]
"""Enters a thread's stream, and gives the function that makes a request."""
BATCHES = (1, 2, 4, 8)
PATIENCE = 60
"""Seconds that a client of the batching queue waits for its scores."""


class Placed:
    """The weights of a network by name, on the device alone."""

    def __init__(self, p: Parameters) -> None:
        self.placed = dict(p.placed)

    def conv(self, name: str, *_: Any) -> tuple[Any, Any]:
        """Return filters and bias."""
        return self.placed[name]

    linear = conv

    def transposed(self, name: str, *_: Any) -> Any:
        """Return filters of a transposed convolution."""
        return self.placed[name][0]


class Model:
    """A network with its weights, an image, and the scores of a plain call.

    Attributes
    ----------
    name : str
    x : array
    right : array
    """

    def __init__(self, driver: Any, name: str, options: Any) -> None:
        network, _, side = name.partition("@")
        self.driver, self.name, self.run = driver, name, NETWORKS[network]
        self.p = Parameters(driver.asarray, options.dtype, options.thin)
        sides = int(side) if side else options.side
        images = np.random.default_rng(1).standard_normal((1, 3, sides, sides), np.float32).astype(options.dtype)
        self.x = driver.asarray(channels_last(images))
        self.run(self.p, self.x)
        self.placed = Placed(self.p)
        self.right = self.first(self.run(self.p, self.x))
        driver.synchronize_stream(driver.current_stream().ptr)
        self._torch: tuple[Any, Any, Any] | None = None

    def first(self, scores: Any) -> np.ndarray[Any, Any]:
        """Return the scores of the first head, on the host."""
        scores = scores[0] if isinstance(scores, (list, tuple)) else scores
        return self.driver.asnumpy(array_of(scores)).astype(np.float64)

    def wrong(self, scores: Any) -> float:
        """Return the relative error of a request's scores."""
        return float(np.linalg.norm(self.first(scores) - self.right) / np.linalg.norm(self.right))

    def in_torch(self, torch: Any) -> tuple[Any, Any]:
        """Return a module of torch's and the image, over the same memory."""
        if self._torch is None:
            p = self.p.elsewhere(lambda values: tensor(torch, self.driver.asarray(values)))
            self._torch = p, module_of(torch, self.run, p).eval(), tensor(torch, self.x)
        return self._torch[1], self._torch[2]


def awaited(call: Callable[[], Any], stream: Any) -> Request:
    """Return a request that makes a call, and waits for the call's stream."""

    def request() -> Any:
        y = call()
        stream.synchronize()
        return y

    return request


def served_by(model: Model, lanes: int, instances: int) -> Callable[[Any], Any]:
    """Return the recorded function of a model's image."""
    run, p = model.run, model.placed

    def network(x: Any) -> Any:
        return run(p, x)

    network.__qualname__ = model.name
    return handlepool.recorded(network, lanes=lanes, instances=instances, strict=True)


def plain(model: Model, options: Any) -> Client:
    """Our operations, eagerly."""

    @contextmanager
    def client() -> Iterator[Request]:
        with model.driver.create_stream() as stream:
            yield awaited(lambda: model.run(model.p, model.x), stream)

    return client


def recorded(lanes: int, instances: int) -> Callable[[Model, Any], Client]:
    """Return a way: one recorded function of all clients."""

    def way(model: Model, options: Any) -> Client:
        served = served_by(model, lanes, instances)

        @contextmanager
        def client() -> Iterator[Request]:
            # The copy has the layout of the image, channels-last.
            x = model.driver.empty(model.x.shape, model.x.strides, model.x.dtype)
            model.driver.copy(x, model.x)
            model.driver.synchronize_stream(model.driver.current_stream().ptr)
            with model.driver.create_stream() as stream:
                yield awaited(lambda: served(x), stream)

        return client

    return way


def submitted(lanes: int, instances: int) -> Callable[[Model, Any], Client]:
    """Return a way: requests by `submit`, which the clients' threads launch."""

    def way(model: Model, options: Any) -> Client:
        served = served_by(model, lanes, instances)

        @contextmanager
        def client() -> Iterator[Request]:
            with model.driver.create_stream():
                yield lambda: served.submit(model.x).synchronize()

        return client

    return way


def launched(lanes: int, instances: int) -> Callable[[Model, Any], Client]:
    """Return a way: one thread launches all requests, on as many streams as instances."""

    def way(model: Model, options: Any) -> Client:
        driver, served = model.driver, served_by(model, lanes, instances)
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        streams = [driver.create_stream() for _ in range(instances)]

        def launch() -> None:
            for number in count():
                call, event = calls.get()
                if call is None:
                    return
                stream = streams[number % instances]
                try:
                    with stream:
                        y = served(model.x)
                    driver.record_event(event, stream.ptr)
                    call.set_result(y)
                except Exception as error:
                    call.set_exception(error)

        threading.Thread(target=launch, daemon=True).start()

        @contextmanager
        def client() -> Iterator[Request]:
            event = driver.create_event()

            def request() -> Any:
                call: Future[Any] = Future()
                calls.put((call, event))
                y = call.result(PATIENCE)
                driver.synchronize_event(event)
                return y

            yield request

        return client

    return way


@contextmanager
def on_a_stream(torch: Any) -> Iterator[Any]:
    """A stream of torch's that is current in this thread, in inference mode."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        yield stream


def graph_each(torch: Any, call: Callable[[Any], Any], x: Any, stream: Any) -> Callable[[Any], Any]:
    """Return a call of a CUDA graph of torch's, with an input and outputs of its own, captured on a stream."""
    inp = x.clone(memory_format=torch.preserve_format)
    for _ in range(2):
        call(inp)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = call(inp)
    torch.cuda.synchronize()

    def replay(x: Any) -> Any:
        inp.copy_(x)
        graph.replay()
        return [each.clone() for each in out] if isinstance(out, (list, tuple)) else out.clone()

    return replay


def torch_way(torch: Any, kind: str) -> Callable[[Model, Any], Client]:
    """Return a way of torch's: ``eager``, ``graph`` or ``inductor``, the last two with a graph for each client.

    One thread captures all graphs, because a compiled module may be compiled again in another thread.
    """

    def way(model: Model, options: Any) -> Client:
        module, image = model.in_torch(torch)
        call = module if kind != "inductor" else compiled_of(torch, module, image)
        made: list[tuple[Any, Any]] = []
        for _ in range(options.clients if kind != "eager" else 0):
            stream = torch.cuda.Stream()
            with torch.inference_mode(), torch.cuda.stream(stream):
                made.append((stream, graph_each(torch, call, image, stream)))

        @contextmanager
        def client() -> Iterator[Request]:
            stream, run = made.pop() if made else (torch.cuda.Stream(), call)
            with torch.inference_mode(), torch.cuda.stream(stream):
                x = image.clone(memory_format=torch.preserve_format)
                yield awaited(lambda: run(x), stream)

        return client

    return way


_compiled: dict[int, tuple[Any, Any]] = {}


def compiled_of(torch: Any, module: Any, image: Any) -> Any:
    """Return a module by Inductor with frozen weights, compiled once."""
    if id(module) not in _compiled:
        torch.backends.cudnn.benchmark = True
        call = torch.compile(module, dynamic=False, fullgraph=True)
        with import_module("torch._inductor.config").patch(freezing=True), torch.inference_mode():
            call(image)
        _compiled[id(module)] = module, call
    return _compiled[id(module)][1]


def batched(torch: Any) -> Callable[[Model, Any], Client]:
    """Return a way: a thread gathers up to 8 requests, and replays torch's CUDA graph of the next batch size."""

    def way(model: Model, options: Any) -> Client:
        module, image = model.in_torch(torch)
        waiting: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        ready = threading.Event()

        def serve() -> None:
            with on_a_stream(torch) as stream:
                graphs = {}
                for size in BATCHES:
                    inp = image.repeat(size, 1, 1, 1).contiguous(memory_format=torch.channels_last)
                    for _ in range(2):
                        module(inp)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        out = module(inp)
                    graphs[size] = inp, graph, out[0] if isinstance(out, (list, tuple)) else out
                ready.set()
                while True:
                    taken = [waiting.get()]
                    while len(taken) < BATCHES[-1]:
                        try:
                            taken.append(waiting.get_nowait())
                        except queue.Empty:
                            break
                    inp, graph, out = graphs[next(size for size in BATCHES if size >= len(taken))]
                    for place, (x, _) in enumerate(taken):
                        inp[place : place + 1].copy_(x)
                    graph.replay()
                    found = out.clone()
                    stream.synchronize()
                    for place, (_, future) in enumerate(taken):
                        future.set_result(found[place : place + 1])

        threading.Thread(target=serve, daemon=True).start()
        ready.wait(PATIENCE)

        @contextmanager
        def client() -> Iterator[Request]:
            with on_a_stream(torch):
                x = image.clone(memory_format=torch.preserve_format)

                def request() -> Any:
                    future: Future[Any] = Future()
                    waiting.put((x, future))
                    return future.result(PATIENCE)

                yield request

        return client

    return way


def aoti(torch: Any, runners: int) -> Callable[[Model, Any], Client]:
    """Return a way: AOTInductor with several runners."""

    def way(model: Model, options: Any) -> Client:
        module, image = model.in_torch(torch)
        inductor_of = import_module("torch._inductor")
        with torch.no_grad():
            program = torch.export.export(module, (image,))
            package = inductor_of.aoti_compile_and_package(program)
            loaded = inductor_of.aoti_load_package(package, num_runners=runners)

        @contextmanager
        def client() -> Iterator[Request]:
            with on_a_stream(torch) as stream:
                x = image.clone(memory_format=torch.preserve_format)
                yield awaited(lambda: loaded(x), stream)

        return client

    return way
