"""Measure how much of a model's work can run side by side."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from handlepool import ArgumentError
from handlepool.integrations.torch.door import RecordedModel, recorded
from handlepool.integrations.torch.ways import microseconds

LANES = 16
HOST = "the host driver"


@dataclass(frozen=True, slots=True)
class Width:
    """The times of a model's nodes, and the gain that lanes allow.

    ``str`` gives these figures as text.

    Attributes
    ----------
    nodes : int
        Number of the program's calls: kernels, copies and operations of torch.
    longest : int
        Number of calls on the longest path by data.
    total : float
        Microseconds of all nodes one after the other.
    critical : float
        Microseconds of the longest path through the nodes, by their data.
    replay : float
        Microseconds of a replay on the program's lanes.
    lanes : int
        Number of lanes of the program.
    device : str
        The name of the GPU that the times were measured on, or "the host driver".
    """

    nodes: int
    longest: int
    total: float
    critical: float
    replay: float
    lanes: int
    device: str

    @property
    def width(self) -> float:
        """``total`` divided by ``critical``: the maximum gain of any number of lanes."""
        return self.total / self.critical if self.critical else 1.0

    @property
    def gain(self) -> float:
        """``total`` divided by ``replay``: the gain of the program's lanes."""
        return self.total / self.replay if self.replay else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.nodes} nodes, {self.longest} of them on the longest path",
            f"{self.total:,.0f} µs one after the other, {self.critical:,.0f} µs on the longest path: the width is "
            f"{self.width:.2f} on {self.device}",
            f"A replay on {self.lanes} lanes takes {self.replay:,.0f} µs: a gain of {self.gain:.2f}",
        ]
        if self.device == HOST:
            lines.append(
                "These times are of NumPy on a CPU. A GPU gives other times and gains: call width on a machine with a GPU"
            )
        return "\n".join(lines)


def width(model: nn.Module | RecordedModel, *example: object, **named: object) -> Width:
    """Measure how much of a model's work can run side by side.

    The function records the model, times each node alone, and times the replay. The measurement takes the time of a
    first call and about twenty replays. A width near 1 means a chain of nodes: fewer launches make such a
    model quicker, and lanes do not.

    Parameters
    ----------
    model : Module or RecordedModel
        A model in eval mode, or the result of `recorded`, whose own program is then measured.
    *example, **named
        Arguments of the model.

    Returns
    -------
    Width

    Raises
    ------
    ArgumentError
        For an object that is no module.
    CaptureError
        If the model cannot be recorded, with the reason.
    """
    if not isinstance(model, (nn.Module, RecordedModel)):
        raise ArgumentError(f"width was given a {type(model).__name__}: pass a torch.nn.Module, or the result of recorded")
    ours = recorded(model, strict=True, lanes=LANES) if isinstance(model, nn.Module) else model
    with torch.no_grad():
        program = ours.program(*example, **named)
        found = program.explain(measure=True)
        if _on_gpu((example, named)):
            # A time stamp behind each node slows a replay down, so a plain replay is timed.
            device, stream = torch.cuda.get_device_name(), torch.cuda.current_stream()
            replay = microseconds(lambda: program.replay(stream), ())
        else:
            device, replay = HOST, max(found.ends, default=0.0)
    return Width(len(found.nodes), found.longest_by_data, found.total, found.critical, replay, found.got, device)


def _on_gpu(values: object) -> bool:
    return any(isinstance(each, Tensor) and each.is_cuda for each in torch.utils._pytree.tree_leaves(values))
