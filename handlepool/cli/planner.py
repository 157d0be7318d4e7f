"""A driver that computes nothing, and has cuDNN plan each graph for a device that is elsewhere."""

from collections.abc import Sequence
from typing import Any

from handlepool.drivers.cuda.planning import DescribedDevice, DescribedExecutable
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.executable import HostExecutable
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.protocol import Copy
from handlepool.errors import GraphNotSupportedError
from handlepool.graphs.plan_key import plan_key
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.layout import ArraySpec, Layout

REFUSED = "refused"
_LAUNCHED = "name", "titles"
"""Settings that say what a launch is called, and not what is planned."""


class Unlaunched(DescribedExecutable):
    """A plan of which each launch does nothing."""

    def launch(self, *_: Any) -> None:  # type: ignore[override]
        """Do nothing: the arrays stay what they are."""


class Planner(HostDriver):
    """Plans for a described device whatever is called on it, and keeps the plans in a plan directory.

    Parameters
    ----------
    device : DeviceProperties
    files : PlanDirectory

    Attributes
    ----------
    planned : dict
        For each graph that was met, by its function's name and its arrays, the engine or why there is none. An operation may go
        on with smaller graphs where one is refused.
    """

    def __init__(self, device: DeviceProperties, files: PlanDirectory) -> None:
        super().__init__()
        self._described = DescribedDevice(device)
        self._files = files
        self.planned: dict[str, str] = {}

    def arrays_of(self, value: Any) -> Any:
        """Return an array for each specification in lists, tuples and dictionaries; anything else as it is."""
        if isinstance(value, ArraySpec):
            return self.empty(value.shape, value.strides, value.dtype)
        if isinstance(value, dict):
            return {name: self.arrays_of(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.arrays_of, value))
        return value

    def new_graph(self, handle: Any, **settings: Any) -> Any:
        """As `Driver.new_graph`."""
        return self._described.new_graph(**settings)

    def compile(self, graph: Any, operands: Sequence[Any], *, copies: Sequence[Copy] = (), **settings: Any) -> Any:
        """As `Driver.compile`."""
        shapes = ", ".join("x".join(map(str, tensor.dim)) for tensor in operands)
        title = f"{settings['name']} over {shapes}"
        asked = {name: value for name, value in settings.items() if name not in _LAUNCHED}
        key = plan_key(graph, operands, asked, self._described.made_for())
        try:
            made = self._described.compile(graph, operands, copies=copies, **settings)
        except GraphNotSupportedError as error:
            self.planned[title] = f"{REFUSED}: {error}"
            raise
        if (saved := made.save()) is not None:
            self._files.save(key, saved)
        self.planned[title] = made.engine
        return Unlaunched(made.planned, made.name, made.titles, "", False)

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> HostExecutable:
        """As `Driver.kernel`, without what it computes."""
        executable = super().kernel(kernel, operands, name=name, titles=titles)
        executable.launch = lambda *_: None  # type: ignore[method-assign]
        return executable
