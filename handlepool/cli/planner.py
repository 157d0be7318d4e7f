"""Plan graphs for a device elsewhere, and compute nothing.

The driver in this module lets cuDNN plan each graph for a device that a file of device properties describes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from handlepool._util.names import shown
from handlepool.drivers.cuda.planning import DescribedDevice, DescribedExecutable
from handlepool.drivers.executable import OperandCopy, SavedPlan
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.executable import HostExecutable
from handlepool.drivers.kernel import Kernel
from handlepool.errors import GraphNotSupportedError
from handlepool.graphs.signature import COMPILE_SETTINGS
from handlepool.tensors import frontend
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.graph_types import FrontendGraph
from handlepool.tensors.layout import ArraySpec, Layout

_USUAL = {"allow_tf32": True, "deterministic": False}


@dataclass(slots=True)
class PlannedGraph:
    """Hold the outcome of planning one graph.

    Attributes
    ----------
    title : str
        The name of the graph's function, the graph's nodes with their parameters, and its arrays.
    said : str
        The engine of the plan, or the reason for a missing plan.
    refused : bool
        Whether the graph has no plan.
    kept : bool
        True if the plan directory can keep the plan, or if the plan needs no new file.
    """

    title: str
    said: str
    refused: bool = False
    kept: bool = False


class Unlaunched(DescribedExecutable):
    """Hold a plan whose launches do nothing."""

    def __init__(self, made: DescribedExecutable, met: PlannedGraph) -> None:
        super().__init__(made.planned, made.name, made.titles, "")
        # To write a plan file, a graph function calls `save` for the plan's bytes. If `save` returns None, the plan directory
        # cannot keep the plan, so `_saved` notes the result.
        self.save = self._saved
        self._met = met

    def _saved(self) -> SavedPlan | None:
        found = self.planned.save()
        self._met.kept = found is not None
        return found

    def launch(self, *_: object) -> None:  # type: ignore[override]
        """Do nothing, so that the arrays keep their values."""


class Planner(HostDriver):
    """Plan every called operation for a described device.

    The plan directory of the driver's pool keeps the plans, for use on a machine with that device.

    Parameters
    ----------
    device : DeviceProperties

    Attributes
    ----------
    met : list of PlannedGraph
        One entry for each graph. After a refused graph, the operation may go on with smaller graphs, which have entries as well.
    """

    def __init__(self, device: DeviceProperties) -> None:
        super().__init__()
        self._described = DescribedDevice(device)
        self.met: list[PlannedGraph] = []

    def arrays_of(self, value: object) -> Any:
        """Return ``value`` with an array in place of each `ArraySpec`.

        The specifications may stand in lists, tuples and dictionaries. All other values stay as they are.
        """
        if isinstance(value, ArraySpec):
            return self.empty(value.shape, value.strides, value.dtype)
        if isinstance(value, dict):
            return {name: self.arrays_of(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            arrays = map(self.arrays_of, value)
            # A namedtuple takes its fields as separate arguments.
            return type(value)(*arrays) if hasattr(value, "_fields") else type(value)(arrays)
        return value

    def new_graph(self, **settings: object) -> Any:
        """Delegate `Driver.new_graph` to the described device."""
        return self._described.new_graph(**settings)

    def plan_environment(self) -> str:
        """Return the plan environment of the described device."""
        return self._described.plan_environment()

    def compile(
        self, graph: Any, operands: Sequence[Any], *, handle: object = None, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Any:
        """Compile a graph as `Driver.compile` does, and note it in ``met``."""
        try:
            made = self._described.compile(graph, operands, copies=copies, **settings)
        except GraphNotSupportedError as error:
            self.met.append(PlannedGraph(_title(graph, operands, settings), f"refused: {error}", refused=True))
            raise
        # Two kinds of plans need no saving, and count as kept: a plan that was loaded from the directory, and a plan with an
        # index, which only serves a comparison.
        met = PlannedGraph(_title(graph, operands, settings), made.engine, kept=made.untried or "plan_index" in settings)
        self.met.append(met)
        return Unlaunched(made, met)

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> HostExecutable:
        """Make a kernel as `Driver.kernel` does, without its computation."""
        executable = super().kernel(kernel, operands, name=name, titles=titles)
        # Planning computes no values, so the launch does nothing. A kernel of this package needs no plan, so `met` has no entry
        # for it.
        executable.launch = lambda *_: None  # type: ignore[method-assign]
        return executable


def _title(graph: FrontendGraph, operands: Sequence[Any], settings: dict[str, Any]) -> str:
    """Describe a graph in one line of the command's output."""
    asked = {name: settings[name] for name in COMPILE_SETTINGS if settings.get(name, _USUAL.get(name)) != _USUAL.get(name)}
    nodes = " -> ".join(f"{node.node_type.name.lower()}{_told(node.params)}" for node in graph.nodes)
    arrays = ", ".join(f"{frontend.numpy_dtype(tensor.data_type)} {'x'.join(map(str, tensor.dim))}" for tensor in operands)
    return f"{settings['name']}{_told(asked)} over {arrays} by {nodes}"


def _told(values: dict[str, Any]) -> str:
    told = ", ".join(f"{name}={shown(value)}" for name, value in values.items() if value is not None)
    return f"({told})" if told else ""
