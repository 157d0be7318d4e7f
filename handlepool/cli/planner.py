"""A driver that computes nothing, and has cuDNN plan each graph for a device that is elsewhere."""

from collections.abc import Sequence
from typing import Any

from handlepool.drivers.cuda.planning import DescribedDevice, DescribedExecutable
from handlepool.drivers.host.driver import HostDriver
from handlepool.drivers.host.executable import HostExecutable
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.protocol import Copy
from handlepool.errors import GraphNotSupportedError
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.layout import ArraySpec, Layout

REFUSED = "refused"


class Unlaunched(DescribedExecutable):
    """A plan of which each launch does nothing."""

    def launch(self, *_: Any) -> None:  # type: ignore[override]
        """Do nothing: the arrays stay what they are."""


class Planner(HostDriver):
    """Plans for a described device whatever is called on it; its pool's plan directory keeps the plans, for who has that device.

    Parameters
    ----------
    device : DeviceProperties

    Attributes
    ----------
    planned : dict
        For each graph that was met, by its function's name and its arrays, the engine or why there is none. An operation may go
        on with smaller graphs where one is refused.
    """

    def __init__(self, device: DeviceProperties) -> None:
        super().__init__()
        self._described = DescribedDevice(device)
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

    def made_for(self) -> str:
        """As `Driver.made_for`, where the device is."""
        return self._described.made_for()

    def compile(self, graph: Any, operands: Sequence[Any], *, copies: Sequence[Copy] = (), **settings: Any) -> Any:
        """As `Driver.compile`."""
        shapes = ", ".join("x".join(map(str, tensor.dim)) for tensor in operands)
        title = f"{settings['name']} over {shapes}"
        try:
            made = self._described.compile(graph, operands, copies=copies, **settings)
        except GraphNotSupportedError as error:
            self.planned[title] = f"{REFUSED}: {error}"
            raise
        self.planned[title] = made.engine
        return Unlaunched(made.planned, made.name, made.titles, "", made.untried)

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> HostExecutable:
        """As `Driver.kernel`, without what it computes."""
        executable = super().kernel(kernel, operands, name=name, titles=titles)
        executable.launch = lambda *_: None  # type: ignore[method-assign]
        return executable
