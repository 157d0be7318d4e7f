"""A host driver that proposes several plans and whose clock is told how long each takes, alone and side by side."""

from dataclasses import dataclass, replace

from handlepool import GraphNotSupportedError
from handlepool.drivers.host.driver import HostDriver


@dataclass
class Fake:
    """A plan: microseconds a launch alone, microseconds for one launch of each state side by side, scratch, what is wrong."""

    alone: float = 10
    concurrent: float = 10
    scratch: int = 0
    refused: bool = False
    fails: bool = False


class TimedDriver(HostDriver):
    """Proposes ``plans``; what ran last between two events says what `elapsed` answers. Every fifth answer is far too much."""

    name = "timed"

    def __init__(self, plans, **options):
        super().__init__(**options)
        self.plans = list(plans)
        self.of_nodes = {}  # microseconds more of a plan by the number of its graph's nodes
        self.of_kernels = 1.0  # microseconds of a kernel of our own
        self.graphs = []  # (plan's index, launches by stream) of every graph that was captured
        self.eager = []  # (plan's index, stream) of every other launch
        self._last = 0.0
        self._asked = 0
        self._launches = None

    def compile(self, graph, operands, **settings):
        index = settings.pop("plan_index", 0)
        fake = self.plans[index]
        limit = settings.get("workspace_limit")
        if fake.refused or (limit is not None and fake.scratch > limit):
            raise GraphNotSupportedError("cuDNN answered: Deselecting execution plan")
        nodes = len(graph.nodes)

        def slower():
            more = self.of_nodes.get(nodes, 0)
            return replace(fake, alone=fake.alone + more, concurrent=fake.concurrent + more)

        made = super().compile(graph, operands, **settings)
        made.launch = self._timed(made.launch, index, slower)
        made.candidates, made.engine = len(self.plans), f"engine {index}"
        made.workspace_size = max(made.workspace_size, fake.scratch)
        return made

    def kernel(self, *args, **options):
        made = super().kernel(*args, **options)
        made.launch = self._timed(made.launch, "kernel", lambda: Fake(self.of_kernels, self.of_kernels))
        return made

    def _timed(self, launch, index, fake_of):
        def launched(handle, *args):
            fake = fake_of()
            if fake.fails:
                raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
            if self._launches is None:
                if index != "kernel":
                    self.eager.append((index, handle.stream))
                self._last = fake.alone
            else:
                self._launches.append((index, handle.stream, fake))
            launch(handle, *args)

        return launched

    def begin_capture(self, pointer):
        super().begin_capture(pointer)
        self._launches = []

    def end_capture(self, pointer):
        launches, self._launches = self._launches, None
        graph = super().end_capture(pointer)
        if len({index for index, *_ in launches}) != 1:  # nothing, or not one plan alone, as where plans are timed
            return graph
        (index, _, fake), streams = launches[0], tuple(stream for _, stream, _ in launches)
        self.graphs.append((index, streams, graph))
        launch = graph.launch
        each = streams.count(streams[0])

        def timed(pointer):
            launch(pointer)
            self._last = each * (fake.concurrent if len(set(streams)) > 1 else fake.alone)

        graph.launch = timed
        return graph

    def elapsed(self, start, end):
        assert super().elapsed(start, end) >= 0
        self._asked += 1
        return self._last / 1e3 * (50 if self._asked % 5 == 0 else 1)
